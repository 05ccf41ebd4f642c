//! OpenAPI schemas of closed word lists.

/// A text that is one of these words.
pub(crate) fn one_of(
    words: impl IntoIterator<Item = &'static str>,
) -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
    utoipa::openapi::ObjectBuilder::new()
        .schema_type(utoipa::openapi::schema::Type::String)
        .enum_values(Some(words))
        .into()
}

/// Gives closed word lists their OpenAPI schema: a string with these values.
macro_rules! words_schema {
    ($($name:ty),+ $(,)?) => {$(
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                crate::schema::one_of(<$name>::ALL.iter().map(|word| word.as_str()))
            }
        }
        impl utoipa::ToSchema for $name {}
    )+};
}
pub(crate) use words_schema;

/// Gives word lists of another crate their OpenAPI schema, each under a name that stands for it in `value_type`.
macro_rules! words_named {
    ($($name:ident => $words:ty),+ $(,)?) => {$(
        pub(crate) enum $name {}

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                crate::schema::one_of(<$words>::ALL.iter().map(|word| word.as_str()))
            }
        }
        impl utoipa::ToSchema for $name {}
    )+};
}
pub(crate) use words_named;
