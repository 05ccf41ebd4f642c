//! What is found over all runs for people: gates of a kind, and how much there is of everything that is not over.

use std::collections::BTreeMap;

use crate::ids::{RunId, WaitId};
use crate::record::{Status, WaitingKind};
use crate::time::Timestamp;

/// Filters of a list of gates and waits; all given ones must match. Order is `(armed_at, run, id)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GateFilter {
    pub kind: WaitingKind,
    /// Only what is armed; else whatever became of it.
    pub armed: bool,
    /// `(kind, name)` of the run's.
    pub definition: Option<(String, String)>,
    /// Of the run, exactly.
    pub owner: Option<String>,
    pub after: Option<(Timestamp, RunId, WaitId)>,
    /// From 1.
    pub limit: u32,
}

/// How much there is, for metrics. What has none is not in the maps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Runs that are not over, by status. What is set aside is not counted.
    pub runs: BTreeMap<Status, u64>,
    /// Armed waits by kind.
    pub armed: BTreeMap<WaitingKind, u64>,
    /// When the one of a kind that is armed for longest was armed.
    pub oldest_armed: BTreeMap<WaitingKind, Timestamp>,
}
