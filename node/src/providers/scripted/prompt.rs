//! How much prompt a request holds, for an estimate of its tokens. Pure.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Bytes of all text that a Chat or Responses request gives the model to read: the same for the same conversation,
/// whatever form it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PromptBytes(pub(super) usize);

/// Members that hold text, at any depth below each other.
const HOLD_TEXT: [&str; 5] = ["messages", "instructions", "input", "content", "text"];

impl<'de> Deserialize<'de> for PromptBytes {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(Walk)
    }
}

struct Walk;

impl<'de> Visitor<'de> for Walk {
    type Value = PromptBytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<PromptBytes, E> {
        Ok(PromptBytes(text.len()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptBytes, A::Error> {
        let mut sum = 0;
        while let Some(PromptBytes(n)) = seq.next_element()? {
            sum += n;
        }
        Ok(PromptBytes(sum))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PromptBytes, A::Error> {
        let mut sum = 0;
        while let Some(key) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            if HOLD_TEXT.contains(&key.as_ref()) {
                sum += map.next_value::<PromptBytes>()?.0;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(PromptBytes(sum))
    }

    fn visit_bool<E>(self, _: bool) -> Result<PromptBytes, E> {
        Ok(PromptBytes(0))
    }

    fn visit_i64<E>(self, _: i64) -> Result<PromptBytes, E> {
        Ok(PromptBytes(0))
    }

    fn visit_u64<E>(self, _: u64) -> Result<PromptBytes, E> {
        Ok(PromptBytes(0))
    }

    fn visit_f64<E>(self, _: f64) -> Result<PromptBytes, E> {
        Ok(PromptBytes(0))
    }

    fn visit_unit<E>(self) -> Result<PromptBytes, E> {
        Ok(PromptBytes(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_a_conversation_counts_the_same() {
        for body in [
            r#"{"model":"m","messages":[{"role":"user","content":"hello"}],"temperature":0.5,"n":-1,"user":null}"#,
            r#"{"messages":[{"role":"user","content":[{"type":"text","text":"hel"},{"type":"text","text":"lo"}]}]}"#,
            r#"{"input":"hello","text":{"format":{"type":"text"}},"stream":true}"#,
            r#"{"instructions":"he","input":[{"role":"user","content":[{"type":"input_text","text":"llo"}]}]}"#,
            r#"{"messages":[{"content":"hello"}],"messages":[]}"#,
        ] {
            let PromptBytes(n) = serde_json::from_str(body).unwrap();
            assert_eq!(n, 5, "{body}");
        }
        assert!(serde_json::from_str::<PromptBytes>(r#"{"input":"\ud83e"}"#).is_err());
    }
}
