//! The arguments of a call as a model wrote them: one JSON object whose members are kept as text, so that no number is
//! rounded and nothing is reordered.

use std::collections::BTreeSet;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Number, Value};

/// The members of the object, in their order.
#[derive(Debug, Default)]
pub(crate) struct Members(Vec<(String, Box<RawValue>)>);

impl Members {
    /// # Errors
    /// When the text is no JSON object, or has a member twice: two readers could take it for two different calls.
    pub(crate) fn parse(arguments: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(arguments).map_err(|e| format!("the arguments are {}", unreadable(&e)))
    }

    /// A member's text for a URL: a string's content, a number or a boolean as written, anything else as compact JSON.
    /// `None` when it is absent or null.
    pub(crate) fn get(&self, name: &str) -> Option<Text> {
        let (_, raw) = self.0.iter().find(|(n, _)| n == name)?;
        text(raw)
    }

    /// The members that are not null, in their order, but for those in `used`.
    pub(crate) fn others<'a>(&'a self, used: &'a BTreeSet<&str>) -> impl Iterator<Item = (&'a str, String)> {
        self.0
            .iter()
            .filter(|(name, _)| !used.contains(name.as_str()))
            .filter_map(|(name, raw)| Some((name.as_str(), text(raw)?.into_inner())))
    }
}

/// A member as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Text {
    Scalar(String),
    /// An object or an array, as compact JSON.
    Compound(String),
}

impl Text {
    fn into_inner(self) -> String {
        match self {
            Self::Scalar(text) | Self::Compound(text) => text,
        }
    }
}

fn text(raw: &RawValue) -> Option<Text> {
    let raw = raw.get();
    match raw.as_bytes().first()? {
        b'"' => serde_json::from_str(raw).ok().map(Text::Scalar),
        b'n' => None,
        b'{' | b'[' => Some(Text::Compound(compact(raw))),
        _ => Some(Text::Scalar(raw.to_owned())),
    }
}

/// Valid JSON without the white space between its tokens.
fn compact(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let (mut quoted, mut escaped) = (false, false);
    for c in json.chars() {
        if quoted {
            (quoted, escaped) = (escaped || c != '"', !escaped && c == '\\');
        } else if c.is_ascii_whitespace() {
            continue;
        } else {
            quoted = c == '"';
        }
        out.push(c);
    }
    out
}

/// Why a text is no arguments: what rule and where, nothing of the text.
fn unreadable(error: &serde_json::Error) -> String {
    match error.classify() {
        serde_json::error::Category::Data => {
            String::from("no JSON object whose members have different names")
        }
        serde_json::error::Category::Syntax
        | serde_json::error::Category::Eof
        | serde_json::error::Category::Io => {
            format!("no JSON: line {}, column {}", error.line(), error.column())
        }
    }
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Members;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut names = BTreeSet::new();
                let mut members = Vec::new();
                while let Some((name, raw)) = map.next_entry::<String, Box<RawValue>>()? {
                    // A string that is no text, such as one half of a surrogate pair, is found here.
                    if raw.get().starts_with('"') && serde_json::from_str::<String>(raw.get()).is_err() {
                        return Err(de::Error::custom("no text"));
                    }
                    if !names.insert(name.clone()) {
                        return Err(de::Error::custom("a member twice"));
                    }
                    members.push((name, raw));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// The value of an object in which no object has a member twice.
///
/// # Errors
/// As [`Members::parse`], at any depth; also when it is nested too deeply to be read.
pub(crate) fn value(arguments: &str) -> Result<Value, String> {
    match serde_json::from_str::<Unique>(arguments) {
        Ok(Unique(value @ Value::Object(_))) => Ok(value),
        Ok(_) => Err(String::from("the arguments are no JSON object")),
        Err(error) => Err(format!("the arguments are {}", unreadable(&error))),
    }
}

/// A value without double members.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
                Ok(Value::Bool(v))
            }

            fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
                Ok(Value::from(v))
            }

            fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
                Ok(Value::from(v))
            }

            fn visit_f64<E: de::Error>(self, v: f64) -> Result<Value, E> {
                Number::from_f64(v)
                    .map(Value::Number)
                    .ok_or_else(|| de::Error::custom("a number out of range"))
            }

            fn visit_str<E>(self, v: &str) -> Result<Value, E> {
                Ok(Value::String(v.to_owned()))
            }

            fn visit_string<E>(self, v: String) -> Result<Value, E> {
                Ok(Value::String(v))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut items = Vec::new();
                while let Some(Unique(item)) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Value::Array(items))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut members = Map::new();
                while let Some((name, Unique(member))) = map.next_entry::<String, Unique>()? {
                    if members.insert(name, member).is_some() {
                        return Err(de::Error::custom("a member twice"));
                    }
                }
                Ok(Value::Object(members))
            }
        }
        deserializer.deserialize_any(Any).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn members_are_read_as_they_were_written() {
        let text = r#"{"s":"a\u0041\"b","n":12345678901234567890123,"f":1.50,"e":1e400,"t":true,"z":null,"o":{ "b" : [1, "x y\\" ] , "a":0}}"#;
        let members = Members::parse(text.as_bytes()).unwrap();
        let scalar = |name| match members.get(name) {
            Some(Text::Scalar(text)) => text,
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(scalar("s"), "aA\"b");
        assert_eq!(scalar("n"), "12345678901234567890123");
        assert_eq!(scalar("f"), "1.50");
        assert_eq!(scalar("e"), "1e400");
        assert_eq!(scalar("t"), "true");
        assert_eq!(members.get("z"), None);
        assert_eq!(members.get("absent"), None);
        let compound = r#"{"b":[1,"x y\\"],"a":0}"#;
        assert_eq!(members.get("o"), Some(Text::Compound(compound.to_owned())));
        let names: Vec<_> = members
            .others(&BTreeSet::from(["s", "f"]))
            .map(|(name, _)| name.to_owned())
            .collect();
        assert_eq!(names, ["n", "e", "t", "o"]);
    }

    #[test]
    fn what_is_no_plain_object_is_refused_without_being_repeated() {
        for text in [
            "",
            " ",
            "null",
            "[1]",
            "\"secret\"",
            "{\"secret\":1",
            "{\"a\":1}{",
            "{'secret':1}",
            "{\"secret\":1,\"secret\":2}",
            r#"{"secret":"\ud800"}"#,
        ] {
            let error = Members::parse(text.as_bytes()).map(|_| ()).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
            let error = value(text).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
        assert!(Members::parse(b"{\"a\":\"\xff\"}").is_err());
        assert!(value(r#"{"a":[{"b":1,"b":2}]}"#).is_err());
        assert!(value(&format!("{{\"a\":{}1{}}}", "[".repeat(400), "]".repeat(400))).is_err());
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            ".*".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
                prop::collection::btree_map(".*", inner, 0..4)
                    .prop_map(|m| Value::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn compacting_changes_no_value(v in any_json()) {
            let pretty = serde_json::to_string_pretty(&v).unwrap();
            prop_assert_eq!(compact(&pretty), serde_json::to_string(&v).unwrap());
        }

        #[test]
        fn objects_are_read_like_by_the_library(v in prop::collection::btree_map(".*", any_json(), 0..4)) {
            let v = json!(v);
            prop_assert!(Members::parse(v.to_string().as_bytes()).is_ok());
            prop_assert_eq!(value(&v.to_string()), Ok(v));
        }
    }
}
