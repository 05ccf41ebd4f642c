//! Errors of `/api/v1` (durable-api §1, §4): one code, one status, and what the caller needs to go on.

use std::borrow::Cow;
use std::time::Duration;

use http::StatusCode;
use iop_durable::runner::RunError;
use iop_durable::store::StoreError;
use iop_shared::label_enum;
use serde_json::Value;

use crate::error::{ApiError, ErrorKind};
use crate::schema::words_schema;

label_enum! {
    /// The closed list of codes of `/api/v1`.
    pub enum Code {
        InvalidEncoding => "invalid_encoding",
        InvalidRequest => "invalid_request",
        InvalidApiKey => "invalid_api_key",
        PermissionDenied => "permission_denied",
        DeciderNotAllowed => "decider_not_allowed",
        NotFound => "not_found",
        MethodNotAllowed => "method_not_allowed",
        RunNotFound => "run_not_found",
        ApprovalNotFound => "approval_not_found",
        InputNotFound => "input_not_found",
        WaitNotFound => "wait_not_found",
        ActivityNotFound => "activity_not_found",
        AgentNotFound => "agent_not_found",
        FlowNotFound => "flow_not_found",
        StaleToken => "stale_token",
        DefinitionMissing => "definition_missing",
        AmbiguousCorrelation => "ambiguous_correlation",
        RunBusy => "run_busy",
        RunWaiting => "run_waiting",
        RunNotWaiting => "run_not_waiting",
        RunTerminal => "run_terminal",
        RunNotDurable => "run_not_durable",
        EffectAmbiguous => "effect_ambiguous",
        IdempotencyConflict => "idempotency_conflict",
        ApprovalAlreadyDecided => "approval_already_decided",
        ApprovalMismatch => "approval_mismatch",
        WaitNotArmed => "wait_not_armed",
        DeliveryConflict => "delivery_conflict",
        DefinitionChanged => "definition_changed",
        ToolUnavailable => "tool_unavailable",
        ActivityConflict => "activity_conflict",
        DigestMismatch => "digest_mismatch",
        ApprovalExpired => "approval_expired",
        CheckpointUnavailable => "checkpoint_unavailable",
        RunDeleted => "run_deleted",
        PayloadTooLarge => "payload_too_large",
        InvalidDefinition => "invalid_definition",
        InvalidResumeTarget => "invalid_resume_target",
        BudgetInvalid => "budget_invalid",
        SchemaViolation => "schema_violation",
        TooManyDeliveries => "too_many_deliveries",
        TooManyRuns => "too_many_runs",
        RunCorrupt => "run_corrupt",
        InternalError => "internal_error",
        UnsupportedGuarantee => "unsupported_guarantee",
        StoreUnavailable => "store_unavailable",
        JournalUnavailable => "journal_unavailable",
        LeaseLost => "lease_lost",
        Draining => "draining",
    }
}
words_schema!(Code);

impl Code {
    pub const fn status(self) -> StatusCode {
        match self {
            Self::InvalidEncoding | Self::InvalidRequest => StatusCode::BAD_REQUEST,
            Self::InvalidApiKey => StatusCode::UNAUTHORIZED,
            Self::PermissionDenied | Self::DeciderNotAllowed => StatusCode::FORBIDDEN,
            Self::NotFound
            | Self::RunNotFound
            | Self::ApprovalNotFound
            | Self::InputNotFound
            | Self::WaitNotFound
            | Self::ActivityNotFound
            | Self::AgentNotFound
            | Self::FlowNotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::StaleToken
            | Self::DefinitionMissing
            | Self::AmbiguousCorrelation
            | Self::RunBusy
            | Self::RunWaiting
            | Self::RunNotWaiting
            | Self::RunTerminal
            | Self::RunNotDurable
            | Self::EffectAmbiguous
            | Self::IdempotencyConflict
            | Self::ApprovalAlreadyDecided
            | Self::ApprovalMismatch
            | Self::WaitNotArmed
            | Self::DeliveryConflict
            | Self::DefinitionChanged
            | Self::ToolUnavailable
            | Self::ActivityConflict
            | Self::DigestMismatch => StatusCode::CONFLICT,
            Self::ApprovalExpired | Self::CheckpointUnavailable | Self::RunDeleted => StatusCode::GONE,
            Self::PayloadTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::InvalidDefinition
            | Self::InvalidResumeTarget
            | Self::BudgetInvalid
            | Self::SchemaViolation => StatusCode::UNPROCESSABLE_ENTITY,
            Self::TooManyDeliveries | Self::TooManyRuns => StatusCode::TOO_MANY_REQUESTS,
            Self::RunCorrupt | Self::InternalError => StatusCode::INTERNAL_SERVER_ERROR,
            Self::UnsupportedGuarantee => StatusCode::NOT_IMPLEMENTED,
            Self::StoreUnavailable | Self::JournalUnavailable | Self::LeaseLost | Self::Draining => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }

    /// OpenAI's `type`.
    pub fn kind(self) -> &'static str {
        match self.status() {
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }
}

/// One error of `/api/v1`, ready to be answered.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Problem {
    pub code: Code,
    /// For the caller; never a payload or a secret.
    pub message: Cow<'static, str>,
    /// The field at fault.
    pub param: Option<Cow<'static, str>>,
    pub run_id: Option<String>,
    /// Whether the same request may succeed later without anybody changing anything.
    pub retryable: bool,
    pub current_resume_token: Option<String>,
    /// A word: what a resume would meet (D93).
    pub decision: Option<&'static str>,
    /// Members that only some codes have, such as `waiting_on`.
    pub more: Vec<(&'static str, Value)>,
    pub retry_after: Option<Duration>,
}

impl Problem {
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        let unavailable = code.status() == StatusCode::SERVICE_UNAVAILABLE;
        Self {
            code,
            message: message.into(),
            param: None,
            run_id: None,
            retryable: unavailable || matches!(code, Code::RunBusy | Code::WaitNotArmed | Code::TooManyRuns),
            current_resume_token: None,
            decision: None,
            more: Vec::new(),
            retry_after: (unavailable || code == Code::WaitNotArmed || code == Code::TooManyRuns)
                .then_some(Duration::from_secs(1)),
        }
    }

    /// `invalid_request` at a field.
    pub fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::InvalidRequest, message).at(param)
    }

    #[must_use]
    pub fn at(mut self, param: impl Into<Cow<'static, str>>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// At this field, when something was too large and nothing says what.
    #[must_use]
    pub(crate) fn too_large_at(self, param: &'static str) -> Self {
        if self.code == Code::PayloadTooLarge && self.param.is_none() {
            self.at(param)
        } else {
            self
        }
    }

    /// About this run.
    #[must_use]
    pub fn of(mut self, run: &str) -> Self {
        self.run_id = Some(run.to_owned());
        self
    }

    #[must_use]
    pub fn with(mut self, member: &'static str, value: Value) -> Self {
        self.more.push((member, value));
        self
    }
}

impl From<RunError> for Problem {
    fn from(error: RunError) -> Self {
        let code = Code::parse(error.code()).unwrap_or(Code::InternalError);
        // The texts of a store's errors may name the database.
        let message = if matches!(error, RunError::JournalUnavailable(_)) {
            Cow::Borrowed("The journal did not confirm; ask again.")
        } else if matches!(error, RunError::StoreUnavailable(_)) {
            Cow::Borrowed("The store is not available; try again.")
        } else if matches!(error, RunError::InvalidToken(_)) {
            Cow::Borrowed("resume_token is not a resume token.")
        } else {
            Cow::Owned(error.to_string())
        };
        let mut problem = Self::new(code, message);
        if let RunError::InvalidToken(_) = error {
            problem.param = Some("resume_token".into());
        } else if let RunError::InvalidRequest { field, .. } = error {
            problem.param = Some(field.into());
        } else if let RunError::StaleToken { current } = error {
            problem.current_resume_token = Some(current.to_string());
            problem.decision = Some("stale");
        } else if let RunError::InvalidId(id) = error {
            let field = id.to_string();
            problem.param = field.split_once(':').map(|(field, _)| field.to_owned().into());
        }
        problem
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        if matches!(error, StoreError::CheckpointUnavailable) {
            return Self::new(
                Code::CheckpointUnavailable,
                "This checkpoint is not there any more.",
            );
        }
        RunError::from(error).into()
    }
}

impl From<ApiError> for Problem {
    fn from(error: ApiError) -> Self {
        let code = if error.kind == ErrorKind::InvalidRequest {
            Code::InvalidRequest
        } else if error.kind == ErrorKind::RequestTooLarge {
            Code::PayloadTooLarge
        } else if error.kind == ErrorKind::CapacityExhausted {
            Code::TooManyRuns
        } else {
            Code::parse(error.kind.as_str()).unwrap_or(Code::InternalError)
        };
        let mut problem = Self::new(code, error.message);
        problem.param = error.param;
        problem.retry_after = error.retry_after.or(problem.retry_after);
        problem
    }
}

#[cfg(test)]
mod tests;
