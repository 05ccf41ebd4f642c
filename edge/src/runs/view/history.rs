//! Committed revisions of a run (D209, D210).

use iop_durable::record::{CheckpointRecord, Status};
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::words::RunStatus;
use super::{digest, shown, time};
use crate::agents::journal::step_name;

/// One revision.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct HistoryObject {
    /// A decimal number; the first is 1.
    pub(crate) revision: String,
    #[schema(value_type = RunStatus)]
    status: Status,
    /// The step after it; null at an end.
    cursor: Option<String>,
    /// Of the checkpoint: what inspection names.
    digest: String,
    created_at: String,
    /// Whether its state is not kept any more.
    pruned: bool,
}

impl HistoryObject {
    pub(crate) fn of(checkpoint: &CheckpointRecord) -> Self {
        Self {
            revision: checkpoint.revision.to_string(),
            status: checkpoint.status,
            cursor: checkpoint
                .cursor
                .as_ref()
                .map(|_| step_name(checkpoint.activation)),
            digest: digest(&checkpoint.digest),
            created_at: time(checkpoint.created_at),
            pruned: checkpoint.pruned,
        }
    }
}

/// One revision with its state.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct CheckpointObject {
    /// A decimal number.
    revision: String,
    #[schema(value_type = RunStatus)]
    status: Status,
    cursor: Option<String>,
    activation: u64,
    digest: String,
    state_digest: String,
    /// As it was committed. The transcript is in the turns, not here.
    #[schema(value_type = Value)]
    state: Box<RawValue>,
    created_at: String,
}

impl CheckpointObject {
    /// `None` when the state is not kept any more.
    pub(crate) fn of(checkpoint: &CheckpointRecord) -> Option<Self> {
        Some(Self {
            revision: checkpoint.revision.to_string(),
            status: checkpoint.status,
            cursor: checkpoint
                .cursor
                .as_ref()
                .map(|_| step_name(checkpoint.activation)),
            activation: checkpoint.activation,
            digest: digest(&checkpoint.digest),
            state_digest: digest(&checkpoint.state_digest),
            state: shown(checkpoint.state.as_ref()?.bytes()),
            created_at: time(checkpoint.created_at),
        })
    }
}
