//! Errors of runs in the form of `/v1`.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::ids::RunId;
use iop_durable::record::{Outcome as RunOutcome, OutcomeError, SPENT, Status};
use iop_shared::execution::Outcome;
use iop_shared::openai::errors::ErrorObject;

use crate::error::{ApiError, ErrorKind, X_SHOULD_RETRY};
use crate::gate::{GateBody, RequestGuard};
use crate::runs::problem::{Code, Problem};

pub(super) const X_IOP_RUN_ID: HeaderName = HeaderName::from_static("x-iop-run-id");

/// One error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) status: StatusCode,
    /// OpenAI's `type`.
    pub(super) kind: &'static str,
    pub(super) code: Cow<'static, str>,
    pub(super) message: Cow<'static, str>,
    pub(super) param: Option<Cow<'static, str>>,
    retry_after: Option<Duration>,
    /// False: SDKs do not send the request again by themselves, as that would start a second run.
    again: bool,
    run: Option<RunId>,
}

impl Fault {
    pub(super) fn invalid(
        param: impl Into<Cow<'static, str>>,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        ApiError::invalid(param, message).into()
    }

    /// A run that is in no state for what is asked.
    pub(super) fn conflict(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Problem::new(code, message).into()
    }

    /// There is no such response.
    pub(super) fn no_response(param: &'static str) -> Self {
        ApiError::new(ErrorKind::NotFound, "There is no response of this id.")
            .with_param(param)
            .into()
    }

    /// The process ends; the run goes on without it.
    pub(super) fn draining(run: &RunId) -> Self {
        let why =
            format!("This gateway is shutting down; the run {run} goes on. Follow it at /api/v1/runs/{run}.");
        Self::from(ApiError::new(ErrorKind::Draining, why)).of(run)
    }

    /// A run that cannot be read by this caller is a response that is not there.
    pub(super) fn unseen(problem: Problem, param: &'static str) -> Self {
        if matches!(problem.code, Code::RunNotFound | Code::RunDeleted) {
            Self::no_response(param)
        } else {
            problem.into()
        }
    }

    /// A run that ended otherwise than well; `None`: it succeeded.
    pub(super) fn of_outcome(run: &RunId, outcome: &RunOutcome) -> Option<Self> {
        let (status, code, message) = match outcome.status {
            Status::Succeeded => return None,
            Status::Cancelled => {
                let why = outcome
                    .cancel
                    .as_ref()
                    .map_or("", |cancel| cancel.reason.as_str());
                let why = format!("The run {run} was cancelled. {why}");
                (
                    StatusCode::CONFLICT,
                    "run_cancelled".to_owned(),
                    why.trim_end().to_owned(),
                )
            }
            Status::Exhausted => {
                let over = match &outcome.exhausted {
                    Some(over) => format!("The run {run} used up a budget: {over} are used."),
                    None => format!("The run {run} used up a budget."),
                };
                let why = match outcome.error.as_ref().and_then(cause) {
                    Some(cause) => format!("{over} {cause}"),
                    None => over,
                };
                (StatusCode::TOO_MANY_REQUESTS, "run_exhausted".to_owned(), why)
            }
            Status::Queued
            | Status::Running
            | Status::Waiting
            | Status::Ambiguous
            | Status::Failed
            | Status::Transferred => match &outcome.error {
                Some(error) => (
                    status_of(error.failure.kind),
                    error.failure.code.clone(),
                    format!("The run {run} failed: {}", error.failure.message),
                ),
                None => (
                    StatusCode::BAD_GATEWAY,
                    format!("run_{}", outcome.status),
                    format!("The run {run} ended without an answer."),
                ),
            },
        };
        Some(Self {
            status,
            kind: kind_of(status),
            code: code.into(),
            message: message.into(),
            param: None,
            retry_after: None,
            again: false,
            run: Some(run.clone()),
        })
    }

    /// About a run that is there.
    #[must_use]
    pub(super) fn of(mut self, run: &RunId) -> Self {
        self.run = Some(run.clone());
        self.again = false;
        self
    }

    #[must_use]
    pub(super) fn at(mut self, param: impl Into<Cow<'static, str>>) -> Self {
        self.param = Some(param.into());
        self
    }

    fn outcome(&self) -> Outcome {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Outcome::Rejected,
            StatusCode::INTERNAL_SERVER_ERROR => Outcome::InternalError,
            StatusCode::NOT_IMPLEMENTED => Outcome::ClientError,
            status if status.is_server_error() => Outcome::ProviderError,
            _ => Outcome::ClientError,
        }
    }

    pub(super) fn into_answer(self, guard: RequestGuard) -> Response<GateBody> {
        let body = ErrorObject {
            message: &self.message,
            kind: self.kind,
            param: self.param.as_deref(),
            code: Some(&self.code),
        }
        .body();
        let outcome = self.outcome();
        let mut response = Response::new(GateBody::full(Bytes::from(body), guard, outcome));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(after) = self.retry_after {
            let secs = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(secs));
        }
        if !self.again {
            headers.insert(X_SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if let Some(run) = self.run.and_then(|run| HeaderValue::from_str(run.as_str()).ok()) {
            headers.insert(X_IOP_RUN_ID, run);
        }
        response
    }
}

/// What the last of the attempts that ran out failed with; `None` when nothing failed and the limit itself is why.
fn cause(error: &OutcomeError) -> Option<String> {
    let Failure {
        kind, code, message, ..
    } = &error.failure;
    let kind = kind.as_str();
    (code != SPENT).then(|| format!("The last error was {code} ({kind}): {message}"))
}

/// The status that stands for why a run failed.
const fn status_of(kind: FailureKind) -> StatusCode {
    match kind {
        FailureKind::Timeout => StatusCode::GATEWAY_TIMEOUT,
        FailureKind::RateLimited => StatusCode::TOO_MANY_REQUESTS,
        FailureKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        FailureKind::ProviderError | FailureKind::ToolError | FailureKind::Verification => {
            StatusCode::BAD_GATEWAY
        }
        FailureKind::InvalidInput => StatusCode::BAD_REQUEST,
        FailureKind::Refused => StatusCode::FORBIDDEN,
        FailureKind::Auth | FailureKind::Configuration | FailureKind::Internal => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}

/// OpenAI's `type` of a status.
fn kind_of(status: StatusCode) -> &'static str {
    match status {
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_server_error() => "server_error",
        _ => "invalid_request_error",
    }
}

/// The word that `/v1` has for a code; `None`: the same.
fn own_word(code: Code) -> Option<ErrorKind> {
    if matches!(code, Code::AgentNotFound) {
        Some(ErrorKind::ModelNotFound)
    } else if matches!(code, Code::InvalidRequest | Code::InvalidEncoding) {
        Some(ErrorKind::InvalidRequest)
    } else if code == Code::PayloadTooLarge {
        Some(ErrorKind::RequestTooLarge)
    } else if matches!(code, Code::PermissionDenied | Code::DeciderNotAllowed) {
        Some(ErrorKind::PermissionDenied)
    } else {
        None
    }
}

impl From<ApiError> for Fault {
    fn from(error: ApiError) -> Self {
        Self {
            status: error.kind.status(),
            kind: error.kind.openai_type(),
            code: error.kind.as_str().into(),
            message: error.message,
            param: error.param,
            retry_after: error.retry_after,
            again: error.should_retry.unwrap_or(true),
            run: None,
        }
    }
}

impl From<Problem> for Fault {
    fn from(problem: Problem) -> Self {
        let kind = own_word(problem.code);
        let status = problem.code.status();
        Self {
            status: kind.map_or(status, ErrorKind::status),
            kind: kind.map_or_else(|| problem.code.kind(), ErrorKind::openai_type),
            code: kind
                .map_or_else(|| problem.code.as_str(), ErrorKind::as_str)
                .into(),
            message: problem.message,
            param: problem.param,
            retry_after: problem.retry_after,
            // The state of a run does not change by asking; a commit that is not confirmed may have been made.
            again: status != StatusCode::CONFLICT && problem.code != Code::JournalUnavailable,
            run: problem.run_id.and_then(|run| RunId::new(&run).ok()),
        }
    }
}

#[cfg(test)]
mod tests {
    use iop_durable::record::{Exhausted, Reason};

    use super::*;

    fn run() -> RunId {
        RunId::new("run_1").unwrap()
    }

    #[test]
    fn every_end_but_a_good_one_is_an_error_that_is_not_sent_again() {
        let good = RunOutcome::new(Status::Succeeded, Reason::Completed);
        assert_eq!(Fault::of_outcome(&run(), &good), None);
        for kind in FailureKind::ALL {
            let mut outcome = RunOutcome::new(Status::Failed, Reason::Error);
            outcome.error = Some(OutcomeError {
                failure: Failure::new(kind, "it broke").code("x"),
                step: None,
                attempt: 1,
            });
            let fault = Fault::of_outcome(&run(), &outcome).unwrap();
            assert!(fault.status.as_u16() >= 400, "{kind:?}");
            assert!(!fault.again && fault.message.contains("it broke") && fault.code == "x");
        }
        let mut outcome = RunOutcome::new(Status::Exhausted, Reason::Budget);
        outcome.exhausted = Some(Exhausted {
            budget: "turns".to_owned(),
            used: 3,
            limit: 3,
            decimals: 0,
        });
        let fault = Fault::of_outcome(&run(), &outcome).unwrap();
        assert_eq!(
            (fault.status.as_u16(), fault.code.as_ref()),
            (429, "run_exhausted")
        );
        assert!(fault.message.contains("3 of 3 turns"));
        outcome.error = Some(OutcomeError {
            failure: Failure::new(FailureKind::Refused, "3 of 3 turns are used").code(SPENT),
            step: None,
            attempt: 1,
        });
        assert_eq!(Fault::of_outcome(&run(), &outcome).unwrap(), fault);
        let cancelled = RunOutcome::new(Status::Cancelled, Reason::Cancelled);
        assert_eq!(
            Fault::of_outcome(&run(), &cancelled).unwrap().code,
            "run_cancelled"
        );
    }

    #[test]
    fn a_run_whose_attempts_ran_out_says_which_and_why_the_last_one_failed() {
        let mut outcome = RunOutcome::new(Status::Exhausted, Reason::Budget);
        outcome.exhausted = Some(Exhausted {
            budget: "retry:turn-2".to_owned(),
            used: 3,
            limit: 3,
            decimals: 0,
        });
        let why = "No provider could be reached.";
        outcome.error = Some(OutcomeError {
            failure: Failure::new(FailureKind::Unavailable, why).code("provider_unreachable"),
            step: Some("turn-2".to_owned()),
            attempt: 3,
        });
        let fault = Fault::of_outcome(&run(), &outcome).unwrap();
        assert_eq!(
            (fault.status.as_u16(), fault.code.as_ref()),
            (429, "run_exhausted")
        );
        assert_eq!(
            fault.message,
            "The run run_1 used up a budget: 3 of 3 retry:turn-2 are used. \
             The last error was provider_unreachable (unavailable): No provider could be reached."
        );
    }

    #[test]
    fn problems_keep_their_codes_where_the_gateway_has_no_word_of_its_own() {
        for (code, status, word) in [
            (Code::AgentNotFound, 404, "model_not_found"),
            (Code::DeciderNotAllowed, 403, "permission_denied"),
            (Code::PayloadTooLarge, 413, "request_too_large"),
            (Code::InvalidRequest, 400, "invalid_request_error"),
            (Code::ApprovalAlreadyDecided, 409, "approval_already_decided"),
            (Code::ApprovalExpired, 410, "approval_expired"),
            (Code::StoreUnavailable, 503, "store_unavailable"),
        ] {
            let fault = Fault::from(Problem::new(code, "why"));
            assert_eq!((fault.status.as_u16(), fault.code.as_ref()), (status, word));
        }
        assert!(!Fault::from(Problem::new(Code::JournalUnavailable, "")).again);
        assert!(Fault::from(Problem::new(Code::StoreUnavailable, "")).again);
    }
}
