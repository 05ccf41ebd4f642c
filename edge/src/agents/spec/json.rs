//! JSON inside a declaration, read the same from TOML and from JSON: what only one of the two can say is refused.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// How the TOML reader hands a date on.
const TOML_DATE: &str = "$__toml_private_datetime";

/// A value; null is none.
pub(super) fn value<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Value>, D::Error> {
    Json.deserialize(d)
        .map(|value| (!value.is_null()).then_some(value))
}

/// An object.
pub(super) fn object<'de, D: Deserializer<'de>>(d: D) -> Result<Map<String, Value>, D::Error> {
    match Json.deserialize(d)? {
        Value::Object(map) => Ok(map),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            Err(D::Error::custom("expected an object"))
        }
    }
}

struct Json;

impl<'de> DeserializeSeed<'de> for Json {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Json {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, d: D) -> Result<Value, D::Error> {
        self.deserialize(d)
    }

    fn visit_bool<E: Error>(self, it: bool) -> Result<Value, E> {
        Ok(Value::Bool(it))
    }

    fn visit_i64<E: Error>(self, it: i64) -> Result<Value, E> {
        Ok(it.into())
    }

    fn visit_u64<E: Error>(self, it: u64) -> Result<Value, E> {
        Ok(it.into())
    }

    fn visit_f64<E: Error>(self, it: f64) -> Result<Value, E> {
        Number::from_f64(it)
            .map(Value::Number)
            .ok_or_else(|| E::custom("JSON has no infinite numbers"))
    }

    fn visit_str<E: Error>(self, it: &str) -> Result<Value, E> {
        Ok(it.into())
    }

    fn visit_string<E: Error>(self, it: String) -> Result<Value, E> {
        Ok(it.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(Json)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut members = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == TOML_DATE {
                return Err(A::Error::custom("JSON has no dates; write a text"));
            }
            let value = map.next_value_seed(Json)?;
            if members.insert(key.clone(), value).is_some() {
                return Err(A::Error::custom(format!("{key:?} is given twice")));
            }
        }
        Ok(Value::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Held {
        #[serde(deserialize_with = "object")]
        it: Map<String, Value>,
    }

    #[test]
    fn both_languages_say_the_same() {
        let toml: Held = toml::from_str("it = { a = 1, b = [1.0, \"x\", true], c = { d = -5 } }").unwrap();
        let json: Held = serde_json::from_str(r#"{"it":{"c":{"d":-5},"b":[1.0,"x",true],"a":1}}"#).unwrap();
        assert_eq!(toml.it, json.it);
        assert_eq!(
            Value::Object(toml.it),
            json!({"a": 1, "b": [1.0, "x", true], "c": {"d": -5}})
        );
    }

    #[test]
    fn what_json_cannot_say_is_refused() {
        for (toml, why) in [
            ("it = { a = inf }", "infinite"),
            ("it = { a = [nan] }", "infinite"),
            ("it = { a = 2026-01-01 }", "dates"),
            ("it = 5", "object"),
        ] {
            let error = toml::from_str::<Held>(toml).unwrap_err().to_string();
            assert!(error.contains(why), "{toml}: {error}");
        }
        let error = serde_json::from_str::<Held>(r#"{"it":{"a":1,"a":2}}"#).unwrap_err();
        assert!(error.to_string().contains("twice"), "{error}");
    }
}
