//! How a run ended, as the OpenAPI document describes it. The outcome itself is told byte for byte as it was stored (D28).

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::words::{ErrorKind, OutcomeReason, RunStatus};

/// How a run ended: the same in the run, in its last event and in its result.
#[derive(Serialize, ToSchema)]
pub(crate) struct OutcomeObject {
    /// One of the last five.
    #[schema(value_type = RunStatus)]
    status: String,
    #[schema(value_type = OutcomeReason)]
    reason: String,
    /// Of an agent: the text of its last answer.
    output: Option<Value>,
    /// What failed last. Where a limit ran out and nothing failed its code is `budget_exhausted`.
    error: Option<OutcomeErrorObject>,
    /// The limit that ran out.
    exhausted: Option<ExhaustedObject>,
    cancel: Option<CancelObject>,
    effects: Vec<Value>,
    evidence: Vec<Value>,
    /// Tokens in all.
    #[schema(value_type = Option<Object>)]
    usage: Option<Value>,
}

/// A failure, and where it happened.
#[derive(Serialize, ToSchema)]
pub(crate) struct OutcomeErrorObject {
    #[schema(value_type = ErrorKind)]
    kind: String,
    code: String,
    message: String,
    retryable: bool,
    step: Option<String>,
    /// Of the call that failed; else of the step.
    attempt: u32,
}

/// A limit that ran out.
#[derive(Serialize, ToSchema)]
pub(crate) struct ExhaustedObject {
    /// `retry:STEP`, `retry:TOOL`, or the name of a budget.
    budget: String,
    used: f64,
    limit: f64,
}

/// Who ended a run, or the time by which it should have ended.
#[derive(Serialize, ToSchema)]
pub(crate) struct CancelObject {
    by: Option<String>,
    reason: String,
    deadline: Option<String>,
}
