//! The head of a run and the rows beside it.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::failure::Failure;
use crate::ids::{DecisionId, NodeName, Revision, RunId, WaitId};
use crate::payload::{Digest, Payload};
use crate::record::words;
use crate::time::Timestamp;
use crate::token::ResumeToken;

words! {
    /// Where a run stands. The last five are ends (D13 to D18).
    pub enum Status {
        Queued => "queued",
        Running => "running",
        Waiting => "waiting",
        Ambiguous => "ambiguous",
        Succeeded => "succeeded",
        Failed => "failed",
        Cancelled => "cancelled",
        Exhausted => "exhausted",
        Transferred => "transferred",
    }
}

impl Status {
    pub const fn is_terminal(self) -> bool {
        match self {
            Self::Queued | Self::Running | Self::Waiting | Self::Ambiguous => false,
            Self::Succeeded | Self::Failed | Self::Cancelled | Self::Exhausted | Self::Transferred => true,
        }
    }
}

words! {
    /// What a waiting or ambiguous run waits for.
    pub enum WaitingKind {
        Approval => "approval",
        Input => "input",
        Event => "event",
        Timer => "timer",
        Retry => "retry",
        Children => "children",
        Reconciliation => "reconciliation",
        Resume => "resume",
        Handoff => "handoff",
    }
}

/// One thing a run waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingOn {
    pub kind: WaitingKind,
    /// The wait, the activity, or empty for `resume`.
    pub id: String,
    pub node: NodeName,
    /// The logical key within the node.
    pub key: String,
}

/// Why a run is parked, and when it may go on by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// The host's word for it: the reason of a suspension, or the kind.
    pub reason: String,
    /// When a timer or a retry makes the run claimable; `None`: only a delivery, a decision or a resume does.
    pub due_at: Option<Timestamp>,
    /// Never empty; the first names the kind that lists are filtered by.
    pub on: Vec<WaitingOn>,
}

impl Waiting {
    pub fn kind(&self) -> Option<WaitingKind> {
        self.on.first().map(|on| on.kind)
    }
}

/// A definition as a run is pinned to it (D116). Labels are compared, never guessed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefinitionRef {
    /// The front-end: `graph`, `agent`, `flow`.
    pub kind: String,
    pub name: String,
    pub version: u64,
    /// Of the compiled graph and its labels, `sha256:…`.
    pub digest: String,
}

/// Where a run comes from (D11).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lineage {
    pub parent: Option<RunId>,
    pub root: RunId,
    /// The step of the parent that started it.
    pub origin: Option<String>,
}

/// A named budget (D251).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    pub used: u64,
    pub limit: u64,
}

/// The head of a run, without its state: what a list shows and what the seal covers, together with the state's digest.
#[derive(Debug, Clone, PartialEq)]
pub struct RunHead {
    pub id: RunId,
    /// Of the commit that wrote this head. In a `Commit` it is what the store found; the store assigns the next.
    pub revision: Revision,
    pub definition: DefinitionRef,
    pub lineage: Lineage,
    /// From 1; a resume after a failure opens the next.
    pub life: u32,
    pub status: Status,
    /// The node that runs or would run next; `None` when the run is over.
    pub cursor: Option<NodeName>,
    /// Counts the nodes entered, from 1. A retry keeps it, the next node or the next turn of a loop has another (D138).
    pub activation: u64,
    /// Attempts of this activation that its retry policy paid for, from 1.
    pub attempt: u32,
    /// How often this activation was entered again after its worker was lost.
    pub recoveries: u32,
    pub state_digest: Digest,
    pub budgets: BTreeMap<String, Budget>,
    pub metadata: BTreeMap<String, String>,
    /// Who made the run; never changes. Lists are filtered by it.
    pub owner: Option<String>,
    pub waiting: Option<Waiting>,
    /// The encoded `Outcome` of a terminal run: these bytes everywhere (D28, D233).
    pub outcome: Option<Bytes>,
    pub deadline: Option<Timestamp>,
    /// The last event's number.
    pub event_seq: u64,
    /// Activities that are prepared, running or unknown (D143): no step commits over them.
    pub open_activities: u32,
    pub armed_waits: u32,
    /// Typed effects emitted so far (D105).
    pub effects: u64,
    /// W3C trace context (D242).
    pub traceparent: Option<String>,
    /// Of the last lease that a commit was written under (D124); 0 before the first.
    pub incarnation: u64,
    /// Made anew for each commit: how a worker recognises its own after a lost answer.
    pub commit_id: Uuid,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

impl RunHead {
    /// What a resume of the run as it is needs.
    pub fn token(&self) -> ResumeToken {
        ResumeToken {
            run: self.id.clone(),
            revision: self.revision,
        }
    }
}

/// A request to cancel, kept beside the head until the holder of the run acts on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CancelRequest {
    pub id: DecisionId,
    pub reason: String,
    pub by: Option<String>,
    pub requested_at: Timestamp,
}

/// What reaches a run from outside while somebody else may hold its lease. `signal` grows by one with every change, and a
/// commit that depends on it says which it saw: no wake-up is lost.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inbox {
    pub signal: u64,
    pub cancel: Option<CancelRequest>,
    /// Why the run is set aside as corrupt; it is never claimed while this stands.
    pub quarantine: Option<String>,
}

/// One committed revision (D209, D210).
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointRecord {
    pub run: RunId,
    pub revision: Revision,
    pub status: Status,
    pub cursor: Option<NodeName>,
    pub activation: u64,
    /// `None` in listings and when pruned.
    pub state: Option<Payload>,
    pub state_digest: Digest,
    /// The seal of this checkpoint: the digest that inspection and forks name.
    pub digest: Digest,
    pub pruned: bool,
    pub created_at: Timestamp,
}

words! {
    /// Where a step stands (D6). `in_progress` and `waiting` are read off the head; the others are stored.
    pub enum StepStatus {
        Pending => "pending",
        InProgress => "in_progress",
        Waiting => "waiting",
        Done => "done",
        Failed => "failed",
        Cancelled => "cancelled",
        Exhausted => "exhausted",
        Unknown => "unknown",
    }
}

/// One activation of a node that is over (D38).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepRecord {
    pub activation: u64,
    pub node: NodeName,
    pub status: StepStatus,
    /// Its own, or those of the call of it that took more.
    pub attempts: u32,
    /// A short text of the host's.
    pub result: Option<String>,
    pub error: Option<Failure>,
    /// Typed effects of this activation, in order; exported once each (D105, D256).
    pub effects: Vec<Box<RawValue>>,
    pub started_at: Timestamp,
    pub ended_at: Timestamp,
}

/// Which ledger a decision belongs to. The same id in two scopes is two decisions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Resolutions of activities.
    Operator,
    /// Requests to cancel the run.
    Cancel,
    /// Deliveries to one wait, and its cancellation.
    Wait(WaitId),
}

impl Scope {
    /// `operator`, `cancel` or `wait:<id>`, as in the table.
    pub fn to_text(&self) -> String {
        match self {
            Self::Operator => "operator".to_owned(),
            Self::Cancel => "cancel".to_owned(),
            Self::Wait(id) => format!("wait:{id}"),
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "operator" => Some(Self::Operator),
            "cancel" => Some(Self::Cancel),
            _ => WaitId::new(text.strip_prefix("wait:")?).ok().map(Self::Wait),
        }
    }
}

/// A decision with its answer; kept while the run exists (D157, D167, D177).
#[derive(Debug, Clone, PartialEq)]
pub struct DecisionRecord {
    pub run: RunId,
    pub scope: Scope,
    pub id: DecisionId,
    /// Of everything the decider said: the same id with other content is a conflict.
    pub content: Digest,
    /// JSON: what was decided, by whom, why, on which evidence, at which revision, incarnation and attempt (D90), and the answer.
    pub body: Bytes,
    pub created_at: Timestamp,
}
