//! From what went wrong in an attempt to what the client sees and what is counted (gateway.md §7, §8, §13). Pure.

use http::StatusCode;
use iop_shared::execution::{AttemptResult, FailureCode};
use iop_shared::openai::event::InBandError;
use iop_shared::wire::terminal::NodeError;

use super::relay::Refusal;
use crate::error::{ApiError, ErrorKind};

/// An attempt that gave the client nothing.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The node had no room or takes no new work: no attempt at all, the request is queued again (G32).
    Refused(FailureCode),
    /// The edge answers with its own error.
    Own {
        error: ErrorKind,
        message: &'static str,
        result: AttemptResult,
    },
    /// The provider's own error object, found inside a 200 (G58).
    InBand(InBandError),
}

impl Failure {
    pub(crate) fn of_node(error: &NodeError) -> Self {
        let own = |error, message, result| Failure::Own {
            error,
            message,
            result,
        };
        match error.code {
            FailureCode::Capacity | FailureCode::Draining => Failure::Refused(error.code),
            FailureCode::ConnectFailed => own(
                ErrorKind::ProviderUnreachable,
                "The provider could not be reached.",
                AttemptResult::ConnectError,
            ),
            FailureCode::ProviderCut => own(
                ErrorKind::ProviderDisconnected,
                "The provider ended the connection before its answer was complete.",
                AttemptResult::Cut,
            ),
            FailureCode::ResponseStalled => own(
                ErrorKind::ResponseStalled,
                "The provider made no progress within the response stall timeout.",
                AttemptResult::ResponseStalled,
            ),
            FailureCode::ProviderMissing | FailureCode::ProviderUnavailable | FailureCode::TargetMissing => {
                own(
                    ErrorKind::ProviderError,
                    "The provider does not serve this model or endpoint.",
                    AttemptResult::ConnectError,
                )
            }
            FailureCode::InvalidRequest | FailureCode::Internal => own(
                ErrorKind::ProviderError,
                "The node could not pass the request on.",
                AttemptResult::ConnectError,
            ),
        }
    }

    pub(crate) fn node_lost() -> Self {
        Failure::Own {
            error: ErrorKind::NodeLost,
            message: "The connection to the provider's node was lost.",
            result: AttemptResult::NodeLost,
        }
    }

    /// An answer that is none: wrong type, redirect, refused credential, nothing at all.
    pub(crate) fn unusable(message: &'static str, status: StatusCode) -> Self {
        Failure::Own {
            error: ErrorKind::ProviderError,
            message,
            result: result_of_status(status),
        }
    }

    pub(crate) fn of_refusal(refusal: Refusal) -> Self {
        let own = |message| Failure::Own {
            error: ErrorKind::ProviderError,
            message,
            result: AttemptResult::Cut,
        };
        match refusal {
            Refusal::InBand(error) => Failure::InBand(error),
            Refusal::Malformed => own("The provider's stream is malformed."),
            Refusal::Empty => own("The provider ended its stream without an answer."),
        }
    }

    /// How the attempt is counted.
    pub(crate) fn result(&self) -> AttemptResult {
        match self {
            Failure::Refused(_) => AttemptResult::Capacity,
            Failure::Own { result, .. } => *result,
            Failure::InBand(e) => result_of_status(in_band_status(e)),
        }
    }

    /// The edge's own answer when nothing else will be tried. Retrying at the client would only multiply attempts.
    pub(crate) fn into_error(self) -> ApiError {
        match self {
            Failure::Refused(_) => ApiError::new(
                ErrorKind::CapacityExhausted,
                "Every provider of this model is busy.",
            ),
            Failure::Own { error, message, .. } => ApiError::new(error, message).with_should_retry(false),
            Failure::InBand(_) => ApiError::new(ErrorKind::ProviderError, "The provider reported an error.")
                .with_should_retry(false),
        }
    }
}

/// The status that an error found inside a 200 stands for: its own where it has one; a refused credential is ours (G11).
pub(crate) fn in_band_status(error: &InBandError) -> StatusCode {
    error
        .status
        .and_then(|s| StatusCode::from_u16(s).ok())
        .filter(|s| (s.is_client_error() || s.is_server_error()) && *s != StatusCode::UNAUTHORIZED)
        .unwrap_or(StatusCode::BAD_GATEWAY)
}

/// How a provider's status is counted.
pub(crate) fn result_of_status(status: StatusCode) -> AttemptResult {
    if status == StatusCode::TOO_MANY_REQUESTS {
        AttemptResult::RateLimited
    } else if status.is_client_error() {
        AttemptResult::Http4xx
    } else if status.is_server_error() {
        AttemptResult::Http5xx
    } else if status.is_success() {
        AttemptResult::Success
    } else {
        AttemptResult::Http5xx
    }
}

/// Statuses that SDKs retry by themselves and that the gate may replay (G59).
pub(crate) fn is_retryable(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 409 | 425 | 429) || status.is_server_error()
}
