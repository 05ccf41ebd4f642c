//! From what went wrong in an attempt to what may follow, what is counted and what the client sees if nothing follows
//! (gateway.md §7, §8, §13). Pure.

use std::time::{Duration, SystemTime};

use http::header::{self, HeaderMap};
use http::{HeaderName, StatusCode};
use iop_shared::execution::{AttemptResult, FailureCode};
use iop_shared::openai::event::InBandError;
use iop_shared::wire::terminal::{NodeError, StallFailure};

use super::attempt::SeenStall;
use super::exchange::Answer;
use super::recovery::Cause;
use super::relay::Refusal;
use crate::error::{ApiError, ErrorKind};

pub(super) const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// An attempt that gave the client nothing.
pub(crate) struct Failure {
    pub(crate) cause: Cause,
    /// How the attempt is counted.
    pub(crate) result: AttemptResult,
    /// When the provider wants to be asked again.
    pub(crate) retry_after: Option<Duration>,
    /// What the terminal of a stall carried.
    pub(crate) evidence: Option<Box<StallFailure>>,
    /// The same, received and validated.
    pub(crate) stall: Option<SeenStall>,
    /// The status of an answer that could not be used.
    pub(crate) answered: Option<StatusCode>,
    /// What the client gets if nothing else is tried.
    pub(crate) last: Box<Answer>,
}

/// Why an attempt is over without an answer.
pub(crate) enum Failed {
    /// The node had no room or takes no new work: no attempt at all, the request is queued again (G32).
    Refused,
    By(Failure),
}

impl From<Failure> for Failed {
    fn from(failure: Failure) -> Self {
        Failed::By(failure)
    }
}

impl Failure {
    /// With the edge's own error. Retrying at the client would only multiply attempts.
    fn own(cause: Cause, error: ErrorKind, message: &'static str, result: AttemptResult) -> Self {
        Self {
            cause,
            result,
            retry_after: None,
            evidence: None,
            stall: None,
            answered: None,
            last: Box::new(Answer::Own(
                ApiError::new(error, message).with_should_retry(false),
            )),
        }
    }

    pub(crate) fn of_node(error: NodeError) -> Self {
        let (cause, result, kind, message) = ending(error.code);
        Self {
            evidence: error.failure,
            ..Self::own(cause, kind, message, result)
        }
    }

    pub(crate) fn node_lost() -> Self {
        Self::own(
            Cause::NodeLost,
            ErrorKind::NodeLost,
            LOST,
            AttemptResult::NodeLost,
        )
    }

    pub(crate) fn first_content() -> Self {
        Self::own(
            Cause::FirstContent,
            ErrorKind::FirstContentTimeout,
            "The provider gave no content within the first content timeout.",
            AttemptResult::FirstContentTimeout,
        )
    }

    /// A request that this provider's path cannot carry.
    pub(crate) fn refused_by_edge(error: ApiError) -> Self {
        Self {
            cause: Cause::Final,
            result: AttemptResult::Http4xx,
            retry_after: None,
            evidence: None,
            stall: None,
            answered: None,
            last: Box::new(Answer::Own(error)),
        }
    }

    /// An answer that is none: wrong type, redirect, refused credential, nothing at all. Another provider may do better,
    /// except where the status is the provider's judgement of the request (G59).
    pub(crate) fn unusable(message: &'static str, status: StatusCode) -> Self {
        let cause = if status.is_client_error() && !is_retryable(status) {
            Cause::Final
        } else {
            Cause::Broken
        };
        Self {
            answered: Some(status),
            ..Self::own(
                cause,
                ErrorKind::ProviderError,
                message,
                result_of_unusable(status),
            )
        }
    }

    /// An answer that broke off.
    pub(crate) fn cut(message: &'static str) -> Self {
        Self::own(
            Cause::Cut,
            ErrorKind::ProviderDisconnected,
            message,
            AttemptResult::Cut,
        )
    }

    pub(crate) fn of_refusal(refusal: Refusal) -> Self {
        let broken = |message| {
            Self::own(
                Cause::Broken,
                ErrorKind::ProviderError,
                message,
                AttemptResult::Cut,
            )
        };
        match refusal {
            Refusal::InBand(error) => Self::in_band(error),
            Refusal::Malformed => broken("The provider's stream is malformed."),
            Refusal::Empty => broken("The provider ended its stream without an answer."),
        }
    }

    /// The provider's own error object, found inside a 200 (G58). A refused credential is the gateway's own affair, and
    /// the provider's text may show a part of it (G11).
    pub(crate) fn in_band(error: InBandError) -> Self {
        if error.status == Some(StatusCode::UNAUTHORIZED.as_u16()) {
            return Self::unusable(CREDENTIAL, StatusCode::UNAUTHORIZED);
        }
        let status = in_band_status(&error);
        let object = error.raw;
        Self::answered(status, None, Answer::InBand { status, object })
    }

    /// Nothing else is tried.
    pub(crate) fn final_word(self) -> Self {
        Self {
            cause: Cause::Final,
            ..self
        }
    }

    /// The provider answered with a failure of its own.
    pub(crate) fn answered(status: StatusCode, retry_after: Option<Duration>, answer: Answer) -> Self {
        let cause = if is_retryable(status) {
            Cause::Answered
        } else {
            Cause::Final
        };
        Self {
            cause,
            result: result_of_status(status),
            retry_after,
            evidence: None,
            stall: None,
            answered: None,
            last: Box::new(answer),
        }
    }
}

pub(super) const CREDENTIAL: &str = "The provider refused the gateway's credential.";
pub(super) const CUT: &str = "The provider ended the connection before its answer was complete.";
pub(super) const LOST: &str = "The connection to the provider's node was lost.";

/// What a node's error code means to the gate: the cause, the count, and the edge's own error.
pub(super) fn ending(code: FailureCode) -> (Cause, AttemptResult, ErrorKind, &'static str) {
    match code {
        FailureCode::ConnectFailed => (
            Cause::Connect,
            AttemptResult::ConnectError,
            ErrorKind::ProviderUnreachable,
            "The provider could not be reached.",
        ),
        FailureCode::ProviderCut => (
            Cause::Cut,
            AttemptResult::Cut,
            ErrorKind::ProviderDisconnected,
            CUT,
        ),
        FailureCode::ResponseStalled => (
            Cause::Stall,
            AttemptResult::ResponseStalled,
            ErrorKind::ResponseStalled,
            "The provider made no progress within the response stall timeout.",
        ),
        FailureCode::ProviderMissing | FailureCode::ProviderUnavailable | FailureCode::TargetMissing => (
            Cause::Connect,
            AttemptResult::ConnectError,
            ErrorKind::ProviderError,
            "The provider does not serve this model or endpoint.",
        ),
        FailureCode::InvalidRequest => (
            Cause::Final,
            AttemptResult::ConnectError,
            ErrorKind::ProviderError,
            "The node could not pass the request on.",
        ),
        // A refusal for want of room after the run began is a defect of the node, as the last one is.
        FailureCode::Capacity | FailureCode::Draining | FailureCode::Internal => (
            Cause::Cut,
            AttemptResult::Cut,
            ErrorKind::ProviderError,
            "The node failed.",
        ),
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
    } else if status.is_success() {
        AttemptResult::Success
    } else {
        AttemptResult::Http5xx
    }
}

/// A 200 that is no answer is no success.
fn result_of_unusable(status: StatusCode) -> AttemptResult {
    if status.is_success() {
        AttemptResult::Cut
    } else {
        result_of_status(status)
    }
}

/// Statuses that SDKs retry by themselves and that the gate may replay (G59).
pub(crate) fn is_retryable(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 409 | 425 | 429) || status.is_server_error()
}

/// How long a provider wants to be left alone: `retry-after-ms`, else `retry-after` in seconds or as an HTTP date (G36).
pub(crate) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = |name: &HeaderName| headers.get(name)?.to_str().ok().map(str::trim);
    let number = |text: &str| text.parse::<f64>().ok();
    let ms = text(&RETRY_AFTER_MS).and_then(number);
    if let Some(after) = ms.and_then(|ms| Duration::try_from_secs_f64(ms / 1000.0).ok()) {
        return Some(after);
    }
    let value = text(&header::RETRY_AFTER)?;
    match number(value) {
        Some(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        None => {
            let at = httpdate::parse_http_date(value).ok()?;
            Some(at.duration_since(now).unwrap_or_default())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn retry_after_is_read_in_its_three_forms_and_nonsense_is_none() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        for (name, value, want) in [
            ("retry-after", "2", Some(2000)),
            ("retry-after", "1.5", Some(1500)),
            ("retry-after", "Sun, 06 Nov 1994 08:49:47 GMT", Some(10_000)),
            ("retry-after", "Sun, 06 Nov 1994 08:49:30 GMT", Some(0)),
            ("retry-after-ms", "150", Some(150)),
            ("retry-after", "soon", None),
            ("retry-after", "-1", None),
            ("retry-after", "NaN", None),
            ("retry-after", "1e300", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            let got = retry_after(&headers, now).map(|d| d.as_millis());
            assert_eq!(got, want, "{name}: {value}");
        }
        let mut both = HeaderMap::new();
        both.insert("retry-after", HeaderValue::from_static("9"));
        both.insert("retry-after-ms", HeaderValue::from_static("5"));
        assert_eq!(retry_after(&both, now), Some(Duration::from_millis(5)));
        both.insert("retry-after-ms", HeaderValue::from_static("-1"));
        assert_eq!(retry_after(&both, now), Some(Duration::from_secs(9)));
    }

    #[test]
    fn statuses_that_may_pass_are_replayed_and_judgements_are_not() {
        for code in 400..600 {
            let status = StatusCode::from_u16(code).unwrap();
            let answer = Answer::Own(ApiError::new(ErrorKind::ProviderError, ""));
            let replayed = Failure::answered(status, None, answer).cause == Cause::Answered;
            assert_eq!(replayed, matches!(code, 408 | 409 | 425 | 429 | 500..), "{code}");
        }
        assert_eq!(
            Failure::unusable("", StatusCode::UNAUTHORIZED).cause,
            Cause::Final
        );
        assert_eq!(Failure::unusable("", StatusCode::FOUND).cause, Cause::Broken);
        assert_eq!(Failure::unusable("", StatusCode::OK).result, AttemptResult::Cut);
    }

    #[test]
    fn only_what_never_reached_a_provider_counts_as_unsent() {
        for code in FailureCode::ALL {
            let unsent = matches!(
                code,
                FailureCode::ConnectFailed
                    | FailureCode::ProviderMissing
                    | FailureCode::ProviderUnavailable
                    | FailureCode::TargetMissing
            );
            assert_eq!(ending(*code).0 == Cause::Connect, unsent, "{code}");
        }
    }
}
