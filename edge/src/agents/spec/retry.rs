//! `retry` as it is written: `"inherit"`, `"none"` or a table (D48).

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize as _, Deserializer, Error, MapAccess, Unexpected, Visitor};
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Schema, Type};
use utoipa::openapi::{Ref, RefOr};
use utoipa::{PartialSchema, ToSchema};

use super::{BackoffSpec, RetrySpec};

const INHERIT: &str = "inherit";
const NONE: &str = "none";

/// `inherit` says what leaving it out says; `none` is one attempt.
pub(super) fn retry<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<RetrySpec>, D::Error> {
    struct Written;
    impl<'de> Visitor<'de> for Written {
        type Value = Option<RetrySpec>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("\"inherit\", \"none\" or { max_attempts = … }")
        }

        fn visit_str<E: Error>(self, it: &str) -> Result<Self::Value, E> {
            match it {
                INHERIT => Ok(None),
                NONE => Ok(Some(RetrySpec {
                    max_attempts: 1,
                    backoff: BackoffSpec::default(),
                    initial: None,
                    max: None,
                    jitter: 0.0,
                })),
                other => Err(E::invalid_value(Unexpected::Str(other), &self)),
            }
        }

        fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
            RetrySpec::deserialize(MapAccessDeserializer::new(map)).map(Some)
        }
    }
    deserializer.deserialize_any(Written)
}

/// For the OpenAPI document.
pub(super) struct Retry;

impl PartialSchema for Retry {
    fn schema() -> RefOr<Schema> {
        let words = ObjectBuilder::new()
            .schema_type(Type::String)
            .enum_values(Some([INHERIT, NONE]));
        OneOfBuilder::new()
            .item(words)
            .item(Ref::from_schema_name(RetrySpec::name()))
            .into()
    }
}

impl ToSchema for Retry {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((RetrySpec::name().into_owned(), RetrySpec::schema()));
        RetrySpec::schemas(schemas);
    }
}

#[cfg(test)]
mod tests {
    use crate::agents::spec::AgentSpec;
    use crate::agents::spec::check::canonical;

    fn toml(retry: &str) -> Result<AgentSpec, String> {
        let text = format!(
            "model = \"m\"\nmodel_retry = {retry}\n[[tools]]\nname = \"a\"\nhttp = {{ url = \"http://a\" }}\nretry = {retry}"
        );
        toml::from_str(&text).map_err(|e| e.to_string())
    }

    fn json(retry: &str) -> Result<AgentSpec, String> {
        let text = format!(
            r#"{{"model":"m","model_retry":{retry},"tools":[{{"name":"a","http":{{"url":"http://a"}},"retry":{retry}}}]}}"#
        );
        serde_json::from_str(&text).map_err(|e| e.to_string())
    }

    #[test]
    fn the_words_say_what_a_table_says() {
        let (inherit, none) = (toml("\"inherit\"").unwrap(), toml("\"none\"").unwrap());
        assert_eq!((&inherit.model_retry, &inherit.tools[0].retry), (&None, &None));
        assert_eq!(none.model_retry.as_ref().unwrap().max_attempts, 1);
        let one = toml("{ max_attempts = 1 }").unwrap();
        assert_eq!(canonical(&none), canonical(&one));
        assert_eq!(canonical(&none), canonical(&json("\"none\"").unwrap()));
        for other in ["\"inherit\"", "null"] {
            assert_eq!(canonical(&inherit), canonical(&json(other).unwrap()));
        }
    }

    #[test]
    fn what_is_neither_is_refused() {
        for (text, why) in [
            ("\"never\"", "inherit"),
            ("3", "inherit"),
            ("{}", "max_attempts"),
            ("{\"max_attempts\":2,\"often\":1}", "often"),
        ] {
            let error = json(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
