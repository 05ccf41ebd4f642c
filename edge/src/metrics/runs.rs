//! The label words of the run series, and which stored fact each stands for.

use iop_durable::record::Status;
use iop_durable::store::StoreError;
use iop_shared::label_enum;

label_enum! {
    /// `status` of `iop_edge_runs`.
    pub enum LiveStatus {
        Queued => "queued",
        Running => "running",
        Waiting => "waiting",
        Ambiguous => "ambiguous",
    }
}

label_enum! {
    /// `status` of `iop_edge_runs_ended_total` and `iop_edge_run_duration_seconds`.
    pub enum EndStatus {
        Succeeded => "succeeded",
        Failed => "failed",
        Cancelled => "cancelled",
        Exhausted => "exhausted",
        Transferred => "transferred",
    }
}

impl LiveStatus {
    /// Of a run that is not over.
    pub const fn of(status: Status) -> Option<Self> {
        match status {
            Status::Queued => Some(Self::Queued),
            Status::Running => Some(Self::Running),
            Status::Waiting => Some(Self::Waiting),
            Status::Ambiguous => Some(Self::Ambiguous),
            Status::Succeeded
            | Status::Failed
            | Status::Cancelled
            | Status::Exhausted
            | Status::Transferred => None,
        }
    }
}

impl EndStatus {
    /// Of a run that is over.
    pub const fn of(status: Status) -> Option<Self> {
        match status {
            Status::Queued | Status::Running | Status::Waiting | Status::Ambiguous => None,
            Status::Succeeded => Some(Self::Succeeded),
            Status::Failed => Some(Self::Failed),
            Status::Cancelled => Some(Self::Cancelled),
            Status::Exhausted => Some(Self::Exhausted),
            Status::Transferred => Some(Self::Transferred),
        }
    }
}

label_enum! {
    /// `kind` of `iop_edge_run_step_duration_seconds`.
    pub enum StepKind {
        ModelTurn => "model_turn",
        ToolCall => "tool_call",
    }
}

label_enum! {
    /// `decision` of `iop_edge_approval_latency_seconds`.
    pub enum DecisionLabel {
        Approved => "approved",
        Denied => "denied",
        Edited => "edited",
        Expired => "expired",
    }
}

label_enum! {
    /// `error` of `iop_edge_checkpoint_errors_total`.
    pub enum CommitError {
        Conflict => "conflict",
        LeaseLost => "lease_lost",
        Unavailable => "unavailable",
        /// Whether it was written is not known.
        Unconfirmed => "unconfirmed",
        Other => "other",
    }
}

impl CommitError {
    pub const fn of(error: &StoreError) -> Self {
        match error {
            StoreError::Conflict(_) => Self::Conflict,
            StoreError::LeaseLost => Self::LeaseLost,
            StoreError::Unavailable { .. } => Self::Unavailable,
            StoreError::Unconfirmed { .. } => Self::Unconfirmed,
            StoreError::Busy
            | StoreError::NotFound
            | StoreError::Deleted
            | StoreError::NotIdle
            | StoreError::Duplicate
            | StoreError::Corrupt { .. }
            | StoreError::SchemaUnsupported { .. }
            | StoreError::CheckpointUnavailable
            | StoreError::RevisionsExhausted
            | StoreError::TooLarge { .. }
            | StoreError::Open(_) => Self::Other,
        }
    }
}

label_enum! {
    /// `tool_kind` of `iop_edge_tool_calls_total`.
    pub enum ToolKind {
        Http => "http",
        Mcp => "mcp",
        Agent => "agent",
        /// `request_input`: a person answers.
        Input => "input",
    }
}

label_enum! {
    /// `result` of `iop_edge_tool_calls_total`.
    pub enum ToolResult {
        Ok => "ok",
        Error => "error",
        /// Answered without a dispatch: denied, expired, invalid.
        Refused => "refused",
        /// Whether it was carried out is not known.
        Unknown => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_is_live_or_an_end_and_keeps_its_word() {
        for status in Status::ALL {
            let (live, end) = (LiveStatus::of(*status), EndStatus::of(*status));
            assert_eq!(live.is_none(), status.is_terminal());
            assert_eq!(end.is_some(), status.is_terminal());
            let word = live.map(LiveStatus::as_str).or(end.map(EndStatus::as_str));
            assert_eq!(word, Some(status.as_str()));
        }
    }

    #[test]
    fn a_commit_error_keeps_the_stores_word_or_is_other() {
        for error in [
            StoreError::LeaseLost,
            StoreError::unavailable("gone"),
            StoreError::unconfirmed("cut"),
        ] {
            assert_eq!(CommitError::of(&error).as_str(), error.kind());
        }
        assert_eq!(CommitError::of(&StoreError::Busy), CommitError::Other);
    }
}
