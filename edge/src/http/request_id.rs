//! A request's id: the client's where it is well formed, else a fresh one (G13).
//!
//! It is echoed, logged and sent on, so what a client may choose is kept plain and short.

use std::fmt;

use http::header::{HeaderMap, HeaderName, HeaderValue};

/// The provider's id when it sent one, else the gateway's.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Always the gateway's.
pub const X_IOP_REQUEST_ID: HeaderName = HeaderName::from_static("x-iop-request-id");

const LONGEST: usize = 128;

/// The gateway's id of one request.
#[derive(Clone, PartialEq, Eq)]
pub struct RequestId(HeaderValue);

impl RequestId {
    /// The client's id, or a new one.
    pub fn of(headers: &HeaderMap) -> Self {
        headers
            .get(X_REQUEST_ID)
            .filter(|v| is_well_formed(v.as_bytes()))
            .map_or_else(Self::generate, |v| Self(v.clone()))
    }

    /// A new one.
    pub(crate) fn generate() -> Self {
        let mut text = uuid::Uuid::encode_buffer();
        let text = uuid::Uuid::now_v7().simple().encode_lower(&mut text);
        // Hexadecimal digits are always a header value.
        Self(HeaderValue::from_str(text).unwrap_or_else(|_| HeaderValue::from_static("-")))
    }

    pub fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }

    pub fn header(&self) -> HeaderValue {
        self.0.clone()
    }

    /// Puts the two id headers on a response; an id that the handler took from the provider stays.
    pub fn stamp(&self, headers: &mut HeaderMap) {
        if !headers.contains_key(X_REQUEST_ID) {
            headers.insert(X_REQUEST_ID, self.0.clone());
        }
        headers.insert(X_IOP_REQUEST_ID, self.0.clone());
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

fn is_well_formed(id: &[u8]) -> bool {
    !id.is_empty()
        && id.len() <= LONGEST
        && id
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(id: &str) -> RequestId {
        let mut headers = HeaderMap::new();
        headers.insert(X_REQUEST_ID, HeaderValue::from_str(id).unwrap());
        RequestId::of(&headers)
    }

    #[test]
    fn a_plain_id_is_kept_and_anything_else_replaced() {
        for kept in ["a", "req_1:2.3-4", &"x".repeat(128)] {
            assert_eq!(of(kept).as_str(), kept);
        }
        for replaced in ["", "a b", "a,b", "<script>", "é", &"x".repeat(129)] {
            let id = of(replaced);
            assert_ne!(id.as_str(), replaced);
            assert!(
                uuid::Uuid::try_parse(id.as_str()).is_ok_and(|u| u.get_version_num() == 7),
                "{id}"
            );
        }
        assert_ne!(RequestId::of(&HeaderMap::new()), RequestId::of(&HeaderMap::new()));
    }

    #[test]
    fn a_providers_id_stays_on_the_response() {
        let mut headers = HeaderMap::new();
        of("mine").stamp(&mut headers);
        assert_eq!(
            (&headers[X_REQUEST_ID], &headers[X_IOP_REQUEST_ID]),
            (&of("mine").0, &of("mine").0)
        );
        headers.insert(X_REQUEST_ID, HeaderValue::from_static("theirs"));
        of("mine").stamp(&mut headers);
        assert_eq!(
            (&headers[X_REQUEST_ID], &headers[X_IOP_REQUEST_ID]),
            (&of("theirs").0, &of("mine").0)
        );
    }
}
