//! What the API answers, as far as the command line reads it. Members that are not there are not shown; a call's arguments
//! stay the bytes that the edge sent.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Number;
use serde_json::value::RawValue;

/// RFC 3339.
#[derive(Debug, Clone, Copy)]
pub(super) struct Time(pub(super) Timestamp);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        text.parse().map(Self).map_err(D::Error::custom)
    }
}

/// A run object (durable-api §3).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Run {
    pub(super) id: String,
    pub(super) agent: Option<String>,
    pub(super) definition: Option<Definition>,
    pub(super) status: String,
    pub(super) blocked: Option<String>,
    pub(super) step: Option<String>,
    pub(super) life: Option<Number>,
    pub(super) parent_run_id: Option<String>,
    pub(super) resume_token: Option<String>,
    pub(super) resumable: bool,
    pub(super) waiting_on: Vec<WaitingOn>,
    pub(super) budgets: BTreeMap<String, Budget>,
    pub(super) outcome: Option<Outcome>,
    pub(super) created_at: Option<Time>,
    pub(super) updated_at: Option<Time>,
    pub(super) deadline: Option<Time>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Definition {
    pub(super) version: Option<Number>,
    pub(super) digest: String,
}

/// One thing a run waits for. Which members are there depends on the kind.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WaitingOn {
    pub(super) kind: String,
    pub(super) id: Option<String>,
    pub(super) tool: Option<String>,
    pub(super) arguments: Option<Box<RawValue>>,
    pub(super) arguments_digest: Option<String>,
    pub(super) expires_at: Option<Time>,
    pub(super) prompt: Option<String>,
    /// Of the answer.
    pub(super) schema: Option<Box<RawValue>>,
    pub(super) url: Option<String>,
    pub(super) activity_id: Option<String>,
    pub(super) child_run_id: Option<String>,
    /// Of an event.
    pub(super) key: Option<String>,
    pub(super) attempt: Option<Number>,
    pub(super) next_attempt_at: Option<Time>,
    /// Of a timer.
    pub(super) due_at: Option<Time>,
    pub(super) deadline: Option<Time>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Budget {
    pub(super) used: Option<Box<RawValue>>,
    pub(super) limit: Option<Box<RawValue>>,
}

/// How a run ended.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Outcome {
    pub(super) status: String,
    pub(super) reason: Option<String>,
    pub(super) output: Option<Box<RawValue>>,
    pub(super) error: Option<RunError>,
    pub(super) exhausted: Option<Exhausted>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RunError {
    pub(super) kind: Option<String>,
    pub(super) code: Option<String>,
    pub(super) message: Option<String>,
    pub(super) step: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Exhausted {
    pub(super) budget: String,
    pub(super) used: Option<Number>,
    pub(super) limit: Option<Number>,
}

/// An approval object (durable-api §8 "Objects").
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Approval {
    pub(super) id: String,
    pub(super) run_id: String,
    pub(super) agent: Option<String>,
    pub(super) tool: String,
    pub(super) arguments: Option<Box<RawValue>>,
    pub(super) arguments_digest: String,
    pub(super) status: String,
    pub(super) decision_id: Option<String>,
    /// The name of the key that decided.
    pub(super) decided_by: Option<String>,
    pub(super) reason: Option<String>,
    pub(super) edited_arguments: Option<Box<RawValue>>,
    pub(super) created_at: Option<Time>,
    pub(super) decided_at: Option<Time>,
    pub(super) expires_at: Option<Time>,
}

impl Approval {
    pub(super) fn is_pending(&self) -> bool {
        self.status == "pending"
    }
}

/// An activity object: a call to the world outside.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Activity {
    pub(super) id: String,
    pub(super) run_id: String,
    pub(super) step: Option<String>,
    pub(super) tool: Option<String>,
    pub(super) state: String,
    pub(super) origin: Option<String>,
    /// The number of the last one.
    pub(super) attempt: u64,
    pub(super) attempts: Vec<Attempt>,
    pub(super) idempotency_key: String,
    pub(super) input: Option<Box<RawValue>>,
    pub(super) input_digest: String,
    pub(super) error: Option<RunError>,
    /// What operators said of it.
    pub(super) decisions: Vec<Resolved>,
}

impl Activity {
    pub(super) fn is_unknown(&self) -> bool {
        self.state == "unknown"
    }

    /// The decision with this id.
    pub(super) fn decision(&self, id: Option<&str>) -> Option<&Resolved> {
        self.decisions
            .iter()
            .find(|decision| id == Some(&decision.decision_id))
    }

    /// The attempt that a decision is about: its own when it was made before, else the last.
    pub(super) fn attempt_of(&self, decision_id: Option<&str>) -> u64 {
        let made = self.decision(decision_id).and_then(|decision| decision.attempt);
        made.unwrap_or(self.attempt)
    }
}

/// One dispatch of a call.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Attempt {
    pub(super) n: u64,
    pub(super) started_at: Option<Time>,
    pub(super) ended_at: Option<Time>,
    pub(super) class: String,
}

/// An operator's decision about a call of unknown effect.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Resolved {
    pub(super) decision_id: String,
    pub(super) created_at: Option<Time>,
    pub(super) action: String,
    pub(super) attempt: Option<u64>,
    pub(super) by: Option<String>,
    pub(super) reason: Option<String>,
    pub(super) evidence: Option<Box<RawValue>>,
}

/// A step object.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Step {
    pub(super) name: String,
    pub(super) kind: Option<String>,
    pub(super) status: String,
    pub(super) attempts: Option<Number>,
    pub(super) error: Option<RunError>,
}

/// A turn object.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Turn {
    pub(super) n: u64,
    pub(super) response: Option<Response>,
    pub(super) usage: Option<Usage>,
    pub(super) attempts: Option<Number>,
}

/// What the model answered.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Response {
    pub(super) content: Option<String>,
    pub(super) refusal: Option<String>,
    pub(super) tool_calls: Vec<ToolCall>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ToolCall {
    pub(super) name: String,
    /// Exactly as the model wrote them.
    pub(super) arguments: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Usage {
    pub(super) input_tokens: Option<u64>,
    pub(super) output_tokens: Option<u64>,
}

/// A page of a list.
#[derive(Debug, Deserialize)]
pub(super) struct Page {
    pub(super) data: Vec<Box<RawValue>>,
    #[serde(default)]
    pub(super) has_more: bool,
    #[serde(default)]
    pub(super) next_after: Option<String>,
}

impl Page {
    /// Nothing, and nothing behind it.
    pub(super) fn empty() -> Self {
        Self {
            data: Vec::new(),
            has_more: false,
            next_after: None,
        }
    }
}

/// The body of every error of the API.
#[derive(Debug, Deserialize)]
pub(super) struct ErrorBody {
    pub(super) error: ErrorMembers,
}

#[derive(Debug, Deserialize)]
pub(super) struct ErrorMembers {
    pub(super) code: String,
    #[serde(default)]
    pub(super) message: String,
}
