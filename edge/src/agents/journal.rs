//! What an agent keeps where in the journal of its run: keys, labels, and the JSON of pauses. The one place that names them.

use iop_durable::ids::{Key, RunId, WaitId};
use iop_durable::record::{ActivityRecord, Effect, Origin};
use iop_durable::runner::idempotency_key;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::config::hex;
use crate::metrics::ToolResult;

/// The run's input: an activity of the first turn.
pub(crate) const INPUT: &str = "input";
/// A turn's answer: an activity of its `reason` step.
pub(crate) const MODEL: &str = "model";
/// The built-in tool that asks a person (D74).
pub(crate) const REQUEST_INPUT: &str = "request_input";
/// The implementation label of a call that was answered without a dispatch.
pub(crate) const REFUSAL: &str = "refusal";

/// The implementation label of a call that is a run of another agent.
pub(crate) const CHILD: &str = "agent";

/// The implementation label of a call over MCP, which may come to its result in several rounds.
pub(crate) const MCP: &str = "mcp";

/// Events of an agent's own (durable-api §3).
pub(crate) const TURN_COMPLETED: &str = "run.turn.completed";
pub(crate) const TOOL_STARTED: &str = "run.tool.started";
pub(crate) const TOOL_COMPLETED: &str = "run.tool.completed";
/// All of them.
pub(crate) const AGENT_EVENTS: [&str; 3] = [TURN_COMPLETED, TOOL_STARTED, TOOL_COMPLETED];

/// The data of the events that tell of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CallEvent {
    pub(crate) turn: u64,
    pub(crate) tool: String,
    /// The model's id.
    pub(crate) call_id: String,
    /// Its place in the turn, from 0.
    pub(crate) ordinal: usize,
}

impl CallEvent {
    fn data(&self) -> Value {
        json!({ "turn": self.turn, "tool": self.tool, "call_id": self.call_id, "ordinal": self.ordinal })
    }

    /// Of `run.tool.started`.
    pub(crate) fn started(&self, attempt: u32) -> Value {
        let mut data = self.data();
        data["attempt"] = json!(attempt);
        data
    }

    /// Of `run.tool.completed`: how the call ended and who says so (D144). One that was not dispatched has no attempt.
    pub(crate) fn ended(&self, attempt: Option<u32>, result: ToolResult, origin: Origin) -> Value {
        let mut data = self.data();
        if let Some(attempt) = attempt {
            data["attempt"] = json!(attempt);
        }
        data["result"] = json!(result.as_str());
        data["origin"] = json!(origin.as_str());
        data
    }
}

/// The journal's key of a tool call: the model's call id and its place in the turn (durable-api §5). Two calls with one id are
/// two calls.
pub(crate) fn call_key(call_id: &str, ordinal: usize) -> String {
    format!("{call_id}.{ordinal}")
}

/// The journal's key of a later round of a call whose tool asked a person first (S106); the first one's is the call's. The place in
/// the turn is still at its end, so that it is no other call's key.
pub(crate) fn round_key(call_key: &str, round: u32) -> String {
    match round {
        0 => call_key.to_owned(),
        round => format!("{round}/{call_key}"),
    }
}

/// The model's call id and the place in the turn of a key.
pub(crate) fn call_of(key: &str) -> Option<(&str, usize)> {
    let (id, ordinal) = key.rsplit_once('.')?;
    Some((id, ordinal.parse().ok()?))
}

/// The journal's key of the start of a child, which its call is.
pub(crate) fn start_key(call_key: &str) -> String {
    format!("start/{call_key}")
}

/// The call's key of a record that is the start of a child; `None` for any other. A call's own record has the same label and
/// is a read, whatever its id looks like.
pub(crate) fn started_call(record: &ActivityRecord) -> Option<&str> {
    let starts = record.implementation == CHILD && record.effect == Effect::Idempotent;
    record.key.as_str().strip_prefix("start/").filter(|_| starts)
}

/// The turn that an activation belongs to: `reason` and `action` alternate, from `reason` at 1.
pub(crate) const fn turn_of(activation: u64) -> u64 {
    activation.div_ceil(2)
}

/// The step of an activation as people see it.
pub(crate) fn step_name(activation: u64) -> String {
    format!("turn-{}", turn_of(activation))
}

/// The idempotency key of a call, the same for each attempt: `<run>/<step>/<activation>/<call>` with the step as people see it
/// (durable-api §5).
pub(crate) fn effect_key(run: &RunId, activation: u64, key: &Key) -> String {
    idempotency_key(run, &step_name(activation), activation, key)
}

/// What the decider of an approval is shown: the exact call (D78).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ApprovalSubject {
    pub(crate) tool: String,
    pub(crate) call_id: String,
    pub(crate) ordinal: usize,
    /// As the model wrote them.
    pub(crate) arguments: String,
    pub(crate) arguments_digest: String,
    /// `rule` or `invalid_arguments`.
    pub(crate) why: String,
}

/// A decision, as it settles the gate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ApprovalAnswer {
    pub(crate) decision: ApprovalDecision,
    pub(crate) arguments_digest: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// Of an edit: the text that is dispatched instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) edited_arguments: Option<String>,
}

iop_shared::label_enum! {
    /// What a person may say to an approval.
    pub enum ApprovalDecision {
        Approve => "approve",
        Deny => "deny",
        Edit => "edit",
    }
}
crate::schema::words_schema!(ApprovalDecision);

/// What a person is asked by `request_input`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct InputSubject {
    pub(crate) prompt: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) schema: Option<Value>,
    pub(crate) call_id: String,
}

/// `sha256:…` of a call's arguments as the model wrote them.
pub(crate) fn arguments_digest(arguments: &str) -> String {
    format!("sha256:{}", hex(&Sha256::digest(arguments.as_bytes()).into()))
}

/// The approval's id of a wait; the same digest under another prefix.
pub(crate) fn approval_id(wait: &WaitId) -> String {
    let digest = wait.as_str().strip_prefix("wait_").unwrap_or(wait.as_str());
    format!("apr_{digest}")
}

/// The wait of an approval's id; `None` for a text that is none.
pub(crate) fn wait_of_approval(id: &str) -> Option<WaitId> {
    let digest = id.strip_prefix("apr_")?;
    WaitId::new(&format!("wait_{digest}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_lead_back_to_their_calls() {
        for (id, ordinal) in [("call_7", 0), ("a.b", 12), ("", 3), (".", 1)] {
            assert_eq!(call_of(&call_key(id, ordinal)), Some((id, ordinal)));
        }
        assert_eq!(call_of(MODEL), None);
        assert_eq!(call_of("a.x"), None);
    }

    #[test]
    fn steps_alternate_within_a_turn() {
        let turns: Vec<u64> = (1..=6).map(turn_of).collect();
        assert_eq!(turns, [1, 1, 2, 2, 3, 3]);
        assert_eq!(step_name(4), "turn-2");
    }

    #[test]
    fn a_calls_key_names_the_step_that_people_see() {
        let (run, key) = (RunId::new("r/1").unwrap(), Key::new("call_7.0").unwrap());
        assert_eq!(effect_key(&run, 4, &key), "r%2F1/turn-2/4/call_7.0");
    }

    #[test]
    fn approvals_are_waits_under_another_name() {
        let wait = WaitId::new("wait_0011").unwrap();
        assert_eq!(approval_id(&wait), "apr_0011");
        assert_eq!(wait_of_approval("apr_0011"), Some(wait));
        assert_eq!(wait_of_approval("wait_0011"), None);
    }

    #[test]
    fn the_digest_is_of_the_exact_text() {
        assert_ne!(arguments_digest("{}"), arguments_digest("{ }"));
        assert!(arguments_digest("").starts_with("sha256:e3b0c442"));
    }
}
