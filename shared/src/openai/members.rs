//! A few members of a JSON object, by name, as the bytes they are.
//!
//! The whole text is checked to be JSON and nothing of it is built. Of duplicates the last one counts, as it does for
//! the readers in Python and JavaScript; a value of the wrong type is the reader's business, not an error.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Reads the members called `names`; `None`: the text is no JSON object.
pub(super) fn read<'a, const N: usize>(
    json: &'a [u8],
    names: [&str; N],
) -> Option<[Option<&'a RawValue>; N]> {
    let mut reader = serde_json::Deserializer::from_slice(json);
    let members = reader.deserialize_map(Members { names }).ok()?;
    reader.end().ok()?;
    Some(members)
}

/// The elements of an array; none where it is no array.
pub(super) fn elements(array: Option<&RawValue>) -> Vec<&RawValue> {
    array
        .and_then(|raw| serde_json::from_str(raw.get()).ok())
        .unwrap_or_default()
}

/// The text between the quotes of a string, escapes and all.
pub(super) fn quoted(raw: Option<&RawValue>) -> Option<&str> {
    raw?.get().strip_prefix('"')?.strip_suffix('"')
}

struct Members<'n, const N: usize> {
    names: [&'n str; N],
}

impl<'de, const N: usize> Visitor<'de> for Members<'_, N> {
    type Value = [Option<&'de RawValue>; N];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = [None; N];
        while let Some(index) = map.next_key_seed(Name { names: &self.names })? {
            match index.and_then(|i| found.get_mut(i)) {
                Some(slot) => *slot = Some(map.next_value()?),
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(found)
    }
}

/// Which of the names a key is. Keys are read as bytes: one with a lone surrogate is no text, and none of ours.
struct Name<'n> {
    names: &'n [&'n str],
}

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_bytes(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_bytes<E>(self, key: &[u8]) -> Result<Self::Value, E> {
        Ok(self.names.iter().position(|name| name.as_bytes() == key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts<const N: usize>(json: &str, names: [&str; N]) -> Option<[Option<String>; N]> {
        read(json.as_bytes(), names).map(|found| found.map(|raw| raw.map(|raw| raw.get().to_owned())))
    }

    #[test]
    fn members_are_found_among_odd_neighbours() {
        let json = r#" { "\ud83e":1, "a" : [1, {"a":2}], "x":1e400, "b":"\ud83e", "a":null } "#;
        let text = |s: &str| Some(s.to_owned());
        assert_eq!(
            texts(json, ["a", "b", "c"]),
            Some([text("null"), text(r#""\ud83e""#), None])
        );
        assert_eq!(texts("{}", ["a"]), Some([None]));
    }

    #[test]
    fn what_is_no_object_has_no_members() {
        for json in [
            "",
            "[1]",
            "1",
            "\"a\"",
            "{",
            r#"{"a":1"#,
            r#"{"a":1}}"#,
            r#"{"a":tru}"#,
            r#"{a:1}"#,
            "null",
        ] {
            assert_eq!(texts(json, ["a"]), None, "{json}");
        }
    }
}
