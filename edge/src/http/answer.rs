//! Small whole answers of the edge's own surface.

use std::borrow::Cow;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Response, StatusCode};
use serde::Serialize;

use crate::error::{ApiError, ErrorKind};
use crate::gate::GateBody;

/// What every handler of this surface gives.
pub(super) type Answer = Response<GateBody>;

pub(super) fn whole(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(GateBody::from(body.into()));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

pub(super) fn json<T: Serialize>(value: &T) -> Answer {
    match serde_json::to_vec(value) {
        Ok(body) => whole(StatusCode::OK, "application/json", body),
        Err(_) => ApiError::new(ErrorKind::InternalError, "The answer could not be written.").into_response(),
    }
}

pub(super) fn not_found(path: &str) -> ApiError {
    ApiError::new(
        ErrorKind::NotFound,
        format!("There is nothing at {}.", shortened(path)),
    )
}

pub(super) fn method_not_allowed(path: &str) -> ApiError {
    ApiError::new(
        ErrorKind::MethodNotAllowed,
        format!("This method is not allowed on {}.", shortened(path)),
    )
}

/// Says which methods would do.
pub(super) fn with_allow(mut answer: Answer, allow: &'static str) -> Answer {
    answer
        .headers_mut()
        .insert(header::ALLOW, HeaderValue::from_static(allow));
    answer
}

/// `OPTIONS`: the methods, and nothing else.
pub(super) fn options(allow: &'static str) -> Answer {
    let mut response = Response::new(GateBody::from(Bytes::new()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    with_allow(response, allow)
}

/// An echoed path is kept short.
fn shortened(path: &str) -> Cow<'_, str> {
    const LONGEST: usize = 200;
    match path.char_indices().nth(LONGEST) {
        None => Cow::Borrowed(path),
        Some((at, _)) => Cow::Owned(format!("{}…", &path[..at])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_echoed_path_is_short_and_whole_characters() {
        assert_eq!(shortened("/v1/x"), "/v1/x");
        assert_eq!(shortened(&"é".repeat(300)), format!("{}…", "é".repeat(200)));
        assert!(not_found("/v1/files").message.contains("/v1/files"));
    }
}
