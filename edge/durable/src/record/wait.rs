//! Durable waits (D161 to D178): armed together with the state they follow, settled once, every loser recorded.

use serde::{Deserialize, Serialize};

use crate::ids::{CorrelationId, DecisionId, Key, NodeName, RunId, WaitId};
use crate::payload::Payload;
use crate::record::{WaitingKind, words};
use crate::time::Timestamp;

words! {
    /// Where a wait stands.
    pub enum WaitStatus {
        Armed => "armed",
        Delivered => "delivered",
        TimedOut => "timed_out",
        Cancelled => "cancelled",
    }
}

words! {
    /// What the deadline means (D176).
    pub enum DeadlinePolicy {
        /// It lets the timer in; an event that commits first still wins.
        FirstCommitted => "first_committed",
        /// An event after it is refused even when the timer has not committed yet.
        Hard => "hard",
    }
}

/// Where a run goes when its wait is settled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Continuation {
    /// A wait of the graph: its node is over, the state is transformed and the run goes on here.
    Nodes {
        on_event: NodeName,
        on_timeout: NodeName,
    },
    /// A wait inside a node (an approval, an input): the same activation is entered again and finds the answer.
    Gate,
}

/// Labels compared before any callback of the host is called (D164, D166).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitLabels {
    pub matcher: String,
    pub payload: String,
    pub continuation: String,
}

/// What settled a wait. `payload` is the delivery's; none for a timer or a cancellation.
#[derive(Debug, Clone, PartialEq)]
pub struct Settled {
    pub by: Option<DecisionId>,
    pub payload: Option<Payload>,
    pub at: Timestamp,
}

/// One wait.
#[derive(Debug, Clone, PartialEq)]
pub struct WaitRecord {
    pub run: RunId,
    pub id: WaitId,
    pub node: NodeName,
    pub activation: u64,
    pub key: Key,
    pub correlation: CorrelationId,
    /// From 1 within its address.
    pub generation: u32,
    pub kind: WaitingKind,
    pub status: WaitStatus,
    pub continuation: Continuation,
    pub labels: WaitLabels,
    /// What people or callers are shown: a prompt, the exact call to approve. Opaque.
    pub subject: Payload,
    pub deadline: Option<Timestamp>,
    pub deadline_policy: DeadlinePolicy,
    pub armed_at: Timestamp,
    /// Deliveries of any outcome so far; bounded by the runner (D177).
    pub deliveries: u32,
    pub settled: Option<Settled>,
}
