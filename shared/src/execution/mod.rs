//! Seed 004's execution vocabulary: events, frames, dispositions, failures, outcomes, health.

pub mod endpoint;
pub mod event;
pub mod failure;
pub mod health;
pub mod liveness;
pub mod outcome;
pub mod recovery;

pub use endpoint::Endpoint;
pub use event::{Disposition, RuntimeEventKind, TunnelFrameKind};
pub use failure::FailureCode;
pub use health::{AttemptFence, ExecutionPath, LivenessClassification, ProbeOutcome, ProviderHealth};
pub use outcome::{AttemptResult, Outcome};
pub use recovery::{
    CommitState, Eligibility, EvidenceDecision, EvidenceSource, RecoveryPhase, RecoveryResult,
};
