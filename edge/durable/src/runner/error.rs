//! What the engine says no with: the codes of durable-api §4.

use bytes::Bytes;

use crate::ids::InvalidId;
use crate::record::{Status, Waiting};
use crate::store::StoreError;
use crate::token::{InvalidToken, ResumeToken};

/// A refusal or failure of an operation on a run. A run that fails is no error: it has an outcome.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RunError {
    #[error("{0}")]
    InvalidToken(#[from] InvalidToken),
    #[error("{0}")]
    InvalidId(#[from] InvalidId),
    #[error("{field}: {why}")]
    InvalidRequest { field: &'static str, why: String },
    #[error("there is no such run")]
    NotFound,
    #[error("the run was deleted")]
    Deleted,
    /// The run has moved on; `current` is the token to use.
    #[error("the token is of an earlier revision; the current one is {current}")]
    StaleToken { current: ResumeToken },
    #[error("somebody is working on the run")]
    Busy,
    #[error("the run waits for {}", .0.kind().map_or("nothing", crate::record::WaitingKind::as_str))]
    Waiting(Box<Waiting>),
    /// The stored outcome, as it was committed (D236).
    #[error("the run is over: {status}")]
    Terminal { status: Status, outcome: Bytes },
    #[error("an effect may or may not have happened; resolve it first")]
    Ambiguous(Box<Waiting>),
    #[error("the run belongs to another definition: {0}")]
    DefinitionChanged(String),
    #[error("{0}")]
    InvalidResumeTarget(String),
    #[error("{0}")]
    InvalidBudget(String),
    #[error("this id or key was used for another run")]
    Conflict,
    #[error("there is no such wait")]
    WaitNotFound,
    #[error("the wait is not armed")]
    WaitNotArmed,
    #[error("{0}")]
    DeliveryConflict(String),
    #[error("the wait took {limit} deliveries already")]
    TooManyDeliveries { limit: u32 },
    #[error("there is no such activity")]
    ActivityNotFound,
    #[error("{0}")]
    ActivityConflict(String),
    #[error("{what} is {bytes} bytes, at most {limit} are allowed")]
    PayloadTooLarge {
        what: &'static str,
        bytes: u64,
        limit: u64,
    },
    #[error("the stored run is corrupt: {0}")]
    Corrupt(String),
    #[error("{0}")]
    SchemaUnsupported(String),
    /// The worker's right to the run ended before it was done; whoever has it now goes on from the last commit.
    #[error("the lease was lost")]
    LeaseLost,
    /// A transition of the journal is not confirmed; it may have been stored (D146).
    #[error("the journal did not confirm: {0}")]
    JournalUnavailable(StoreError),
    #[error("{0}")]
    StoreUnavailable(StoreError),
    /// The execution was stopped by its own host and goes on from the last commit when somebody resumes it.
    #[error("the execution was stopped")]
    Stopped,
}

impl RunError {
    /// The code of durable-api §4.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::InvalidToken(_) | Self::InvalidRequest { .. } => "invalid_request",
            Self::InvalidId(_) => "invalid_encoding",
            Self::NotFound => "run_not_found",
            Self::Deleted => "run_deleted",
            Self::StaleToken { .. } => "stale_token",
            Self::Busy | Self::Stopped => "run_busy",
            Self::Waiting(_) => "run_waiting",
            Self::Terminal { .. } => "run_terminal",
            Self::Ambiguous(_) => "effect_ambiguous",
            Self::DefinitionChanged(_) | Self::SchemaUnsupported(_) => "definition_changed",
            Self::InvalidResumeTarget(_) => "invalid_resume_target",
            Self::InvalidBudget(_) => "budget_invalid",
            Self::Conflict => "idempotency_conflict",
            Self::WaitNotFound => "wait_not_found",
            Self::WaitNotArmed => "wait_not_armed",
            Self::DeliveryConflict(_) => "delivery_conflict",
            Self::TooManyDeliveries { .. } => "too_many_deliveries",
            Self::ActivityNotFound => "activity_not_found",
            Self::ActivityConflict(_) => "activity_conflict",
            Self::PayloadTooLarge { .. } => "payload_too_large",
            Self::Corrupt(_) => "run_corrupt",
            Self::LeaseLost => "lease_lost",
            Self::JournalUnavailable(_) => "journal_unavailable",
            Self::StoreUnavailable(_) => "store_unavailable",
        }
    }

    /// Whether the same call may succeed later without anybody changing anything.
    pub const fn retryable(&self) -> bool {
        match self {
            Self::Busy
            | Self::Stopped
            | Self::LeaseLost
            | Self::JournalUnavailable(_)
            | Self::StoreUnavailable(_)
            | Self::WaitNotArmed => true,
            Self::InvalidToken(_)
            | Self::InvalidId(_)
            | Self::InvalidRequest { .. }
            | Self::NotFound
            | Self::Deleted
            | Self::StaleToken { .. }
            | Self::Waiting(_)
            | Self::Terminal { .. }
            | Self::Ambiguous(_)
            | Self::DefinitionChanged(_)
            | Self::InvalidResumeTarget(_)
            | Self::InvalidBudget(_)
            | Self::Conflict
            | Self::WaitNotFound
            | Self::DeliveryConflict(_)
            | Self::TooManyDeliveries { .. }
            | Self::ActivityNotFound
            | Self::ActivityConflict(_)
            | Self::PayloadTooLarge { .. }
            | Self::Corrupt(_)
            | Self::SchemaUnsupported(_) => false,
        }
    }
}

impl From<StoreError> for RunError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound => Self::NotFound,
            StoreError::Deleted => Self::Deleted,
            StoreError::Busy | StoreError::Conflict(_) | StoreError::NotIdle => Self::Busy,
            StoreError::LeaseLost => Self::LeaseLost,
            StoreError::Corrupt { what } => Self::Corrupt(what),
            StoreError::SchemaUnsupported { .. } => Self::SchemaUnsupported(error.to_string()),
            StoreError::TooLarge { what, bytes, limit } => Self::PayloadTooLarge { what, bytes, limit },
            StoreError::Unconfirmed { .. } => Self::JournalUnavailable(error),
            StoreError::Duplicate
            | StoreError::CheckpointUnavailable
            | StoreError::RevisionsExhausted
            | StoreError::Unavailable { .. }
            | StoreError::Open(_) => Self::StoreUnavailable(error),
        }
    }
}
