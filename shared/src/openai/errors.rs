//! OpenAI's error shape: `{"error":{"message","type","param","code"}}`, all four keys always present (gateway.md §8).

use serde::Serialize;

/// The object inside `error`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorObject<'a> {
    pub message: &'a str,
    #[serde(rename = "type")]
    pub kind: &'a str,
    pub param: Option<&'a str>,
    pub code: Option<&'a str>,
}

impl ErrorObject<'_> {
    /// The whole body, as JSON.
    pub fn body(&self) -> String {
        #[derive(Serialize)]
        struct Envelope<'e, 'a> {
            error: &'e ErrorObject<'a>,
        }
        // Strings and options always serialize; the fallback keeps the shape if that ever changed.
        serde_json::to_string(&Envelope { error: self }).unwrap_or_else(|_| {
            String::from(r#"{"error":{"message":"","type":"","param":null,"code":null}}"#)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_four_keys_are_there() {
        let body = ErrorObject {
            message: "a \"b\"",
            kind: "invalid_request_error",
            param: None,
            code: None,
        }
        .body();
        assert_eq!(
            body,
            r#"{"error":{"message":"a \"b\"","type":"invalid_request_error","param":null,"code":null}}"#
        );
    }
}
