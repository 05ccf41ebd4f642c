//! Steps: each activation of a run's nodes, finished or present (D38, D61).

use iop_durable::patterns::REASON;
use iop_durable::record::{ActivityRecord, RunHead, Status, StepRecord, StepStatus, most_attempts};
use iop_shared::label_enum;
use serde::Serialize;
use utoipa::ToSchema;

use super::words::RunStepStatus;
use super::{FailureObject, time};
use crate::agents::journal::step_name;
use crate::schema::words_schema;

label_enum! {
    /// What a step of an agent does.
    pub enum StepKind {
        ModelTurn => "model_turn",
        ToolCall => "tool_call",
    }
}
words_schema!(StepKind);

impl StepKind {
    pub(super) const fn of(reasons: bool) -> Self {
        if reasons { Self::ModelTurn } else { Self::ToolCall }
    }
}

/// A step.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub(crate) struct StepObject {
    /// `turn-n`: a model turn and its tool calls are two steps of one name.
    pub(crate) name: String,
    pub(crate) kind: StepKind,
    /// From 1 within the run.
    pub(crate) activation: u64,
    #[schema(value_type = RunStepStatus)]
    status: StepStatus,
    /// What its model turn took, or the call of it that took most.
    attempts: u32,
    /// A short text.
    result: Option<String>,
    error: Option<FailureObject>,
    /// The run that a tool call of this step started, when it was one; all of them are the run's children.
    pub(crate) child_run_id: Option<String>,
    verification: Option<String>,
    started_at: Option<String>,
    ended_at: Option<String>,
}

impl StepObject {
    pub(crate) fn of(step: &StepRecord) -> Self {
        Self {
            name: step_name(step.activation),
            kind: StepKind::of(step.node.as_str() == REASON),
            activation: step.activation,
            status: step.status,
            attempts: step.attempts,
            result: step.result.clone(),
            error: step.error.as_ref().map(FailureObject::from),
            child_run_id: None,
            verification: None,
            started_at: Some(time(step.started_at)),
            ended_at: Some(time(step.ended_at)),
        }
    }
}

/// The step that a run is at, with the calls of it; `None` when it is over.
pub(crate) fn current_step(head: &RunHead, calls: &[ActivityRecord]) -> Option<StepObject> {
    let status = match head.status {
        Status::Queued => StepStatus::Pending,
        Status::Running => StepStatus::InProgress,
        Status::Waiting => StepStatus::Waiting,
        Status::Ambiguous => StepStatus::Unknown,
        Status::Succeeded | Status::Failed | Status::Cancelled | Status::Exhausted | Status::Transferred => {
            return None;
        }
    };
    let node = head.cursor.as_ref()?;
    Some(StepObject {
        name: step_name(head.activation),
        kind: StepKind::of(node.as_str() == REASON),
        activation: head.activation,
        status,
        attempts: head.attempt.max(most_attempts(calls)),
        result: None,
        error: None,
        child_run_id: None,
        verification: None,
        started_at: None,
        ended_at: None,
    })
}
