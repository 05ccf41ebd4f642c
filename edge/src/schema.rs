//! OpenAPI schemas of closed word lists.

/// Gives closed word lists their OpenAPI schema: a string with these values.
macro_rules! words_schema {
    ($($name:ty),+ $(,)?) => {$(
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                utoipa::openapi::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::schema::Type::String)
                    .enum_values(Some(<$name>::ALL.iter().map(|word| word.as_str())))
                    .into()
            }
        }
        impl utoipa::ToSchema for $name {}
    )+};
}
pub(crate) use words_schema;
