//! How a run ended (D28): encoded once, the same bytes in the head, in the terminal event and wherever the host shows it.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::failure::Failure;
use crate::record::{Status, words};

words! {
    /// Why a run ended (durable-api §8).
    pub enum Reason {
        Completed => "completed",
        Error => "error",
        Deadline => "deadline",
        Cancelled => "cancelled",
        WaitCancelled => "wait_cancelled",
        Budget => "budget",
        Denied => "denied",
    }
}

/// The code of a failure that is a person's denial: the run's reason is `denied` (D81).
pub const DENIED: &str = "approval_denied";

/// Which limit ran out (D17).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exhausted {
    /// `retry:<step>`, `steps`, `recovery_attempts` or a budget's name.
    pub budget: String,
    pub used: u64,
    pub limit: u64,
}

/// The end of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    pub status: Status,
    pub reason: Reason,
    pub output: Option<Box<RawValue>>,
    pub error: Option<OutcomeError>,
    pub exhausted: Option<Exhausted>,
    pub cancel: Option<OutcomeCancel>,
    pub effects: Vec<Box<RawValue>>,
    pub evidence: Vec<Box<RawValue>>,
    pub usage: Option<Box<RawValue>>,
}

/// A failure and where it happened (D14).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeError {
    #[serde(flatten)]
    pub failure: Failure,
    pub step: Option<String>,
    pub attempt: u32,
}

/// Who cancelled, and why (D15).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeCancel {
    pub by: Option<String>,
    pub reason: String,
}

impl Outcome {
    pub fn new(status: Status, reason: Reason) -> Self {
        Self {
            status,
            reason,
            output: None,
            error: None,
            exhausted: None,
            cancel: None,
            effects: Vec::new(),
            evidence: Vec::new(),
            usage: None,
        }
    }

    /// Whether a resume may open the next life (D22).
    pub fn resumable(&self) -> bool {
        self.status == Status::Failed && self.error.as_ref().is_some_and(|e| e.failure.kind.resumable())
    }

    /// # Errors
    /// When the output or an effect is no JSON.
    pub fn encode(&self) -> Result<Bytes, serde_json::Error> {
        serde_json::to_vec(self).map(Bytes::from)
    }

    /// # Errors
    /// When the bytes are no encoded outcome.
    pub fn decode(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}
