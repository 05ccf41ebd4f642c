//! What a store can say no with. Whether something was written is part of the type.

use crate::ids::Revision;

/// What a guard found instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conflict {
    /// The head has moved on (D106).
    Revision(Revision),
    /// The inbox has changed.
    Signal(u64),
}

/// A store's refusal or failure.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    #[error("the run is at another point by now: {0:?}")]
    Conflict(Conflict),
    #[error("the lease is lost")]
    LeaseLost,
    #[error("somebody holds the run")]
    Busy,
    #[error("there is no such run")]
    NotFound,
    #[error("the run was deleted")]
    Deleted,
    #[error("the run is not over")]
    NotIdle,
    /// The id of a decision is taken, or the life already has its terminal event.
    #[error("this was decided before")]
    Duplicate,
    /// What is stored is not what was written: a seal that does not hold, a row of another run, a column that does not match.
    #[error("the stored run is corrupt: {what}")]
    Corrupt { what: String },
    /// Written by another schema than this program knows.
    #[error("the stored run has schema {found}, this program reads up to {known}")]
    SchemaUnsupported { found: u32, known: u32 },
    #[error("this checkpoint is not kept any more")]
    CheckpointUnavailable,
    #[error("the last revision is used up")]
    RevisionsExhausted,
    #[error("{what} is {bytes} bytes, at most {limit} are allowed")]
    TooLarge {
        what: &'static str,
        bytes: u64,
        limit: u64,
    },
    /// Nothing was written.
    #[error("the store is not available: {source}")]
    Unavailable { source: Cause },
    /// It may have been written: only a fresh look tells (D146).
    #[error("the store did not confirm: {source}")]
    Unconfirmed { source: Cause },
    /// The database cannot be opened as it is; the text says what to do.
    #[error("{0}")]
    Open(String),
}

/// The driver's error, shared.
pub type Cause = std::sync::Arc<dyn std::error::Error + Send + Sync>;

impl StoreError {
    pub fn unavailable(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Unavailable {
            source: Cause::from(source.into()),
        }
    }

    pub fn unconfirmed(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Unconfirmed {
            source: Cause::from(source.into()),
        }
    }

    pub fn corrupt(what: impl Into<String>) -> Self {
        Self::Corrupt { what: what.into() }
    }

    /// A word for metrics and tests.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Conflict(_) => "conflict",
            Self::LeaseLost => "lease_lost",
            Self::Busy => "busy",
            Self::NotFound => "not_found",
            Self::Deleted => "deleted",
            Self::NotIdle => "not_idle",
            Self::Duplicate => "duplicate",
            Self::Corrupt { .. } => "corrupt",
            Self::SchemaUnsupported { .. } => "schema_unsupported",
            Self::CheckpointUnavailable => "checkpoint_unavailable",
            Self::RevisionsExhausted => "revisions_exhausted",
            Self::TooLarge { .. } => "too_large",
            Self::Unavailable { .. } => "unavailable",
            Self::Unconfirmed { .. } => "unconfirmed",
            Self::Open(_) => "open",
        }
    }
}
