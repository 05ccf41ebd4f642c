//! From what the gate or a provider says of a turn without an answer to what a run stores of it (durable-api §8, D14). Pure.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::runner::CallError;
use iop_shared::execution::AttemptFence;
use iop_shared::openai::event::{Dialect, InBandError, error_in_body};

use super::answer::Broken;
use super::wire::words;
use crate::error::{ApiError, ErrorKind};
use crate::gate::{Verdict, in_band_status};

/// Longest message that is kept, in bytes.
const MESSAGE_MAX: usize = 1024;

/// The edge refused the turn before anybody was asked.
pub(super) fn refused(error: &ApiError) -> CallError {
    let failure = own(error.kind, &error.message);
    CallError::Failed {
        failure,
        retry_after: error.retry_after,
    }
}

/// An answer that is none. `verdict`: when the gate made it.
pub(super) fn unanswered(
    status: StatusCode,
    verdict: Option<Verdict>,
    body: &Bytes,
    retry_after: Option<Duration>,
) -> CallError {
    let said = error_in_body(Dialect::Chat, body).and_then(|error| words(&error.raw).0);
    let failure = match verdict {
        Some(verdict) => by_gate(verdict, &said.unwrap_or_default()),
        None => by_provider(status, said.as_deref()),
    };
    CallError::Failed { failure, retry_after }
}

/// A stream that ended without an answer.
pub(super) fn broken(broken: Broken) -> CallError {
    let failure = match broken {
        Broken::Said(error) => in_band(&error),
        Broken::Malformed => own(ErrorKind::ProviderError, "The provider's answer is malformed."),
        Broken::Cut => own(
            ErrorKind::ProviderDisconnected,
            "The provider ended the connection before its answer was complete.",
        ),
        Broken::TooLarge(max) => Failure::new(
            FailureKind::InvalidInput,
            format!("The model's answer is larger than {max} bytes."),
        )
        .code("payload_too_large"),
        Broken::BadId => Failure::new(
            FailureKind::InvalidInput,
            "The model's answer has a tool call whose id is longer than 240 bytes or has U+0000 in it.",
        )
        .code("invalid_encoding"),
    };
    failure.into()
}

/// With the gate's own word; the message is its own too.
fn own(kind: ErrorKind, message: &str) -> Failure {
    let failure = match kind {
        ErrorKind::InvalidApiKey | ErrorKind::PermissionDenied => FailureKind::Auth,
        ErrorKind::ModelNotFound
        | ErrorKind::NotFound
        | ErrorKind::MethodNotAllowed
        | ErrorKind::UpgradeRequired => FailureKind::Configuration,
        ErrorKind::InvalidRequest | ErrorKind::RequestTooLarge => FailureKind::InvalidInput,
        ErrorKind::RateLimitExceeded => FailureKind::RateLimited,
        ErrorKind::CapacityExhausted
        | ErrorKind::NoProviderAvailable
        | ErrorKind::Draining
        | ErrorKind::ProviderUnreachable
        | ErrorKind::ProviderDisconnected
        | ErrorKind::NodeLost => FailureKind::Unavailable,
        ErrorKind::ProviderError => FailureKind::ProviderError,
        ErrorKind::ResponseStalled | ErrorKind::FirstContentTimeout => FailureKind::Timeout,
        ErrorKind::InternalError | ErrorKind::ClientClosedRequest => FailureKind::Internal,
    };
    Failure::new(failure, cut(message)).code(kind.as_str())
}

fn by_gate(verdict: Verdict, message: &str) -> Failure {
    match (verdict.kind, verdict.answered) {
        // What the provider answered could not be passed on; its status says what kind of no it is.
        (ErrorKind::ProviderError, Some(status)) if status.is_client_error() => {
            of_status(status, message).code(verdict.kind.as_str())
        }
        // A provider that may still be at work is not asked again without anybody wanting it (S107, D244).
        (ErrorKind::ResponseStalled, _) => {
            own(verdict.kind, message).retryable(verdict.fence == AttemptFence::Confirmed)
        }
        (kind, _) => own(kind, message),
    }
}

/// The provider's own no.
fn by_provider(status: StatusCode, said: Option<&str>) -> Failure {
    let code = format!("http_{}", status.as_u16());
    match said {
        Some(message) => of_status(status, message),
        None => of_status(
            status,
            &format!("The provider answered with status {}.", status.as_u16()),
        ),
    }
    .code(code)
}

fn of_status(status: StatusCode, message: &str) -> Failure {
    let kind = match status.as_u16() {
        401 | 403 => FailureKind::Auth,
        408 | 504 => FailureKind::Timeout,
        429 => FailureKind::RateLimited,
        425 | 503 => FailureKind::Unavailable,
        400 | 413 | 422 => FailureKind::InvalidInput,
        402 | 404..=407 | 410 | 415 => FailureKind::Configuration,
        _ if status.is_client_error() => FailureKind::InvalidInput,
        _ => FailureKind::ProviderError,
    };
    let retryable = matches!(status.as_u16(), 408 | 425 | 429 | 500 | 502 | 503 | 504);
    Failure::new(kind, cut(message)).retryable(retryable)
}

/// An error object inside a stream that had begun: the provider's own, or the gate's, whose words for an end are five.
fn in_band(error: &InBandError) -> Failure {
    let (message, code) = words(&error.raw);
    let text = message.as_deref().unwrap_or_default();
    match code.as_deref().and_then(ErrorKind::parse) {
        // Something of the answer was shown already (S107).
        Some(ErrorKind::ResponseStalled) => own(ErrorKind::ResponseStalled, text).retryable(false),
        Some(
            kind @ (ErrorKind::ProviderUnreachable
            | ErrorKind::ProviderDisconnected
            | ErrorKind::ProviderError
            | ErrorKind::NodeLost),
        ) => own(kind, text),
        Some(_) | None => by_provider(in_band_status(error), message.as_deref()),
    }
}

/// A message in its length, cut between characters.
fn cut(message: &str) -> String {
    let mut end = message.len().min(MESSAGE_MAX);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    message[..end].to_owned()
}

#[cfg(test)]
mod tests;
