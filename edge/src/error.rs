//! What a client sees when the edge itself says no (gateway.md §8): one kind, one status, one type, one code.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use iop_shared::execution::Outcome;
use iop_shared::label_enum;
use iop_shared::openai::errors::ErrorObject;

/// Tells SDKs whether to retry, above their own rules.
pub const X_SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// The field's status for a client that left before its answer.
const CLIENT_CLOSED_REQUEST: StatusCode = match StatusCode::from_u16(499) {
    Ok(status) => status,
    Err(_) => StatusCode::BAD_REQUEST,
};

label_enum! {
    /// The closed list of the edge's own errors; the word is the `code`.
    pub enum ErrorKind {
        InvalidApiKey => "invalid_api_key",
        PermissionDenied => "permission_denied",
        ModelNotFound => "model_not_found",
        NotFound => "not_found",
        MethodNotAllowed => "method_not_allowed",
        UpgradeRequired => "upgrade_required",
        InvalidRequest => "invalid_request_error",
        RequestTooLarge => "request_too_large",
        RateLimitExceeded => "rate_limit_exceeded",
        CapacityExhausted => "capacity_exhausted",
        NoProviderAvailable => "no_provider_available",
        Draining => "draining",
        ProviderUnreachable => "provider_unreachable",
        ProviderDisconnected => "provider_disconnected",
        ProviderError => "provider_error",
        NodeLost => "node_lost",
        ResponseStalled => "response_stalled",
        FirstContentTimeout => "first_content_timeout",
        InternalError => "internal_error",
        /// Never seen by a client: it left while its body was due. Counted, and 499 in logs (G60).
        ClientClosedRequest => "client_closed_request",
    }
}

impl ErrorKind {
    pub const fn status(self) -> StatusCode {
        match self {
            ErrorKind::InvalidApiKey => StatusCode::UNAUTHORIZED,
            ErrorKind::PermissionDenied => StatusCode::FORBIDDEN,
            ErrorKind::ModelNotFound | ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            ErrorKind::UpgradeRequired => StatusCode::UPGRADE_REQUIRED,
            ErrorKind::InvalidRequest => StatusCode::BAD_REQUEST,
            ErrorKind::RequestTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            ErrorKind::RateLimitExceeded => StatusCode::TOO_MANY_REQUESTS,
            ErrorKind::CapacityExhausted | ErrorKind::NoProviderAvailable | ErrorKind::Draining => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            ErrorKind::ProviderUnreachable
            | ErrorKind::ProviderDisconnected
            | ErrorKind::ProviderError
            | ErrorKind::NodeLost => StatusCode::BAD_GATEWAY,
            ErrorKind::ResponseStalled | ErrorKind::FirstContentTimeout => StatusCode::GATEWAY_TIMEOUT,
            ErrorKind::InternalError => StatusCode::INTERNAL_SERVER_ERROR,
            ErrorKind::ClientClosedRequest => CLIENT_CLOSED_REQUEST,
        }
    }

    /// OpenAI's `type`.
    pub const fn openai_type(self) -> &'static str {
        match self {
            ErrorKind::InvalidApiKey
            | ErrorKind::ModelNotFound
            | ErrorKind::NotFound
            | ErrorKind::MethodNotAllowed
            | ErrorKind::UpgradeRequired
            | ErrorKind::InvalidRequest
            | ErrorKind::RequestTooLarge
            | ErrorKind::ClientClosedRequest => "invalid_request_error",
            ErrorKind::PermissionDenied => "permission_error",
            ErrorKind::RateLimitExceeded => "rate_limit_error",
            ErrorKind::CapacityExhausted
            | ErrorKind::NoProviderAvailable
            | ErrorKind::Draining
            | ErrorKind::ProviderUnreachable
            | ErrorKind::ProviderDisconnected
            | ErrorKind::ProviderError
            | ErrorKind::NodeLost
            | ErrorKind::ResponseStalled
            | ErrorKind::FirstContentTimeout
            | ErrorKind::InternalError => "server_error",
        }
    }

    /// How a request that ends with this error is counted.
    pub const fn outcome(self) -> Outcome {
        match self {
            ErrorKind::InvalidApiKey
            | ErrorKind::PermissionDenied
            | ErrorKind::ModelNotFound
            | ErrorKind::NotFound
            | ErrorKind::MethodNotAllowed
            | ErrorKind::UpgradeRequired
            | ErrorKind::InvalidRequest
            | ErrorKind::RequestTooLarge => Outcome::ClientError,
            ErrorKind::RateLimitExceeded
            | ErrorKind::CapacityExhausted
            | ErrorKind::NoProviderAvailable
            | ErrorKind::Draining => Outcome::Rejected,
            ErrorKind::ProviderUnreachable
            | ErrorKind::ProviderDisconnected
            | ErrorKind::ProviderError
            | ErrorKind::NodeLost
            | ErrorKind::FirstContentTimeout => Outcome::ProviderError,
            ErrorKind::ResponseStalled => Outcome::ResponseStalled,
            ErrorKind::InternalError => Outcome::InternalError,
            ErrorKind::ClientClosedRequest => Outcome::ClientCancelled,
        }
    }
}

/// One error of the edge, ready to be answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: {message}")]
pub struct ApiError {
    pub kind: ErrorKind,
    /// For the client; never a payload, a credential or a provider's text.
    pub message: Cow<'static, str>,
    /// The field at fault.
    pub param: Option<Cow<'static, str>>,
    pub retry_after: Option<Duration>,
    /// `x-should-retry`, where the SDK's own rule would multiply attempts.
    pub should_retry: Option<bool>,
}

impl ApiError {
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            message: message.into(),
            param: None,
            retry_after: None,
            should_retry: None,
        }
    }

    pub fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::new(ErrorKind::InvalidRequest, message)
        }
    }

    #[must_use]
    pub fn with_param(mut self, param: impl Into<Cow<'static, str>>) -> Self {
        self.param = Some(param.into());
        self
    }

    #[must_use]
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    #[must_use]
    pub fn with_should_retry(mut self, retry: bool) -> Self {
        self.should_retry = Some(retry);
        self
    }

    /// The JSON body.
    pub fn body(&self) -> Bytes {
        let object = ErrorObject {
            message: &self.message,
            kind: self.kind.openai_type(),
            param: self.param.as_deref(),
            code: Some(self.kind.as_str()),
        };
        Bytes::from(object.body())
    }

    /// The whole answer.
    pub fn into_response<B: From<Bytes>>(self) -> Response<B> {
        let mut response = Response::new(B::from(self.body()));
        *response.status_mut() = self.kind.status();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(after) = self.retry_after {
            // Whole seconds, rounded up, so that a client never comes too early.
            let secs = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(secs));
        }
        if let Some(retry) = self.should_retry {
            headers.insert(
                X_SHOULD_RETRY,
                HeaderValue::from_static(if retry { "true" } else { "false" }),
            );
        }
        response
    }
}

impl axum::response::IntoResponse for ApiError {
    fn into_response(self) -> axum::response::Response {
        ApiError::into_response::<axum::body::Body>(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_that_end_a_codex_turn_are_never_made() {
        for k in ErrorKind::ALL {
            assert!(!matches!(k.as_str(), "server_is_overloaded" | "slow_down"));
        }
    }

    #[test]
    fn an_answer_has_the_four_keys_and_rounds_retry_after_up() {
        let e =
            ApiError::new(ErrorKind::CapacityExhausted, "busy").with_retry_after(Duration::from_millis(1500));
        let r: Response<axum::body::Body> = e.clone().into_response();
        assert_eq!(r.status(), 503);
        assert_eq!(r.headers()["retry-after"], "2");
        let v: serde_json::Value = serde_json::from_slice(&e.body()).unwrap();
        assert_eq!(v["error"].as_object().unwrap().len(), 4);
        assert_eq!(v["error"]["code"], "capacity_exhausted");
        assert!(v["error"]["param"].is_null());
    }
}
