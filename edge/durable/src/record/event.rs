//! The event log of a run: numbered from 1 without gaps, one terminal event per life (D243).

use std::borrow::Cow;

use bytes::Bytes;

use crate::record::{Status, words};
use crate::time::Timestamp;

words! {
    /// Events the engine itself writes; a host adds its own names with `Ctx::emit`.
    pub enum EventName {
        Created => "run.created",
        Started => "run.started",
        StepStarted => "run.step.started",
        StepCompleted => "run.step.completed",
        Waiting => "run.waiting",
        Resumed => "run.resumed",
        Ambiguous => "run.ambiguous",
        Succeeded => "run.succeeded",
        Failed => "run.failed",
        Cancelled => "run.cancelled",
        Exhausted => "run.exhausted",
        Transferred => "run.transferred",
    }
}

impl EventName {
    /// The terminal event of a terminal status.
    pub const fn terminal(status: Status) -> Option<Self> {
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

/// One stored event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventRecord {
    pub seq: u64,
    pub life: u32,
    pub name: Cow<'static, str>,
    pub terminal: bool,
    pub time: Timestamp,
    /// JSON.
    pub data: Bytes,
}
