//! Activities: the calls of a run to the world outside (D137 to D160).

use bytes::Bytes;
use iop_durable::record::{
    ActivityRecord, ActivityState, AttemptClass, DecisionRecord, Effect, Origin, Scope,
};
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::words::{RunActivityState, RunAttemptClass, RunEffect, RunOrigin};
use super::{FailureObject, shown, time};
use crate::agents::journal::{MCP, REFUSAL, call_of, effect_key, started_call, step_name};
use crate::agents::tools::mcp::told;

/// The call of a turn that an activity is of: all of its rounds are that one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Called {
    /// The model's id.
    pub(crate) id: String,
    pub(crate) tool: String,
    /// Its place in the turn, from 0.
    pub(crate) ordinal: usize,
}

/// One dispatch.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct AttemptObject {
    n: u32,
    started_at: String,
    ended_at: Option<String>,
    #[schema(value_type = RunAttemptClass)]
    class: AttemptClass,
    /// Whether it repeats one whose worker was lost.
    recovery: bool,
    error: Option<FailureObject>,
}

/// A call, and what is known of it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct ActivityObject {
    id: String,
    run_id: String,
    step: String,
    /// The model's id of the call.
    call_id: Option<String>,
    tool: Option<String>,
    /// What carries it out: `http`, `mcp`, `agent`, or `chat` for a model turn.
    implementation: String,
    #[schema(value_type = RunEffect)]
    effect: Effect,
    #[schema(value_type = RunActivityState)]
    state: ActivityState,
    #[schema(value_type = Option<RunOrigin>)]
    origin: Option<Origin>,
    /// The number of the last one; 0 before the first.
    attempt: u32,
    attempts: Vec<AttemptObject>,
    /// The same for every attempt.
    idempotency_key: String,
    #[schema(value_type = Value)]
    input: Box<RawValue>,
    input_digest: String,
    /// Null while there is none.
    #[schema(value_type = Option<Value>)]
    output: Option<Box<RawValue>>,
    error: Option<FailureObject>,
    next_attempt_at: Option<String>,
    /// What operators said of it.
    #[schema(value_type = Vec<Object>)]
    decisions: Vec<Value>,
}

/// Whether an activity is a call to the world outside: not what a call was refused with, and not the run's own book-keeping.
pub(crate) fn is_shown(record: &ActivityRecord) -> bool {
    record.implementation != REFUSAL
        && started_call(record).is_none()
        && call_of(record.key.as_str()).is_some()
}

impl ActivityObject {
    /// `decisions`: of the run's operators, in order; those about other activities are passed over.
    pub(crate) fn of(record: &ActivityRecord, called: Option<Called>, decisions: &[DecisionRecord]) -> Self {
        let (call_id, tool) = called.map_or((None, None), |called| (Some(called.id), Some(called.tool)));
        let of_this = |decision: &DecisionRecord| decision_of(decision, record.id.as_str());
        Self {
            id: record.id.as_str().to_owned(),
            run_id: record.run.as_str().to_owned(),
            step: step_name(record.activation),
            call_id: call_id.or_else(|| call_of(record.key.as_str()).map(|(id, _)| id.to_owned())),
            tool,
            implementation: record.implementation.clone(),
            effect: record.effect,
            state: record.state,
            origin: record.origin,
            attempt: record.attempts.last().map_or(0, |attempt| attempt.n),
            attempts: record
                .attempts
                .iter()
                .map(|attempt| AttemptObject {
                    n: attempt.n,
                    started_at: time(attempt.started_at),
                    ended_at: attempt.ended_at.map(time),
                    class: attempt.class,
                    recovery: attempt.recovery,
                    error: attempt.error.as_ref().map(FailureObject::from),
                })
                .collect(),
            idempotency_key: effect_key(&record.run, record.activation, &record.key),
            input: payload(record, record.input.bytes()),
            input_digest: record.input.digest_text(),
            output: record
                .output
                .as_ref()
                .map(|output| payload(record, output.bytes())),
            error: record.error.as_ref().map(FailureObject::from),
            next_attempt_at: record.not_before.as_ref().map(|next| time(next.at)),
            decisions: decisions.iter().filter_map(of_this).collect(),
        }
    }
}

/// What a call was sent or answered. A round of a call over MCP is kept in a form of its own.
fn payload(record: &ActivityRecord, bytes: &Bytes) -> Box<RawValue> {
    let round = if record.implementation == MCP {
        told(bytes)
    } else {
        None
    };
    shown(round.as_ref().unwrap_or(bytes))
}

/// An operator's decision about this activity: its id and time, and what was said.
fn decision_of(decision: &DecisionRecord, activity: &str) -> Option<Value> {
    if decision.scope != Scope::Operator {
        return None;
    }
    let said: Map<String, Value> = serde_json::from_slice(&decision.body).ok()?;
    if said.get("activity_id").and_then(Value::as_str) != Some(activity) {
        return None;
    }
    let mut told = Map::new();
    told.insert("decision_id".to_owned(), decision.id.as_str().into());
    told.insert("created_at".to_owned(), time(decision.created_at).into());
    let said = said
        .into_iter()
        .filter(|(name, _)| name != "activity_id")
        .map(|(name, value)| match (name.as_str(), value.as_str()) {
            // It is kept as a text, whatever it was.
            ("evidence", Some(text)) if text.starts_with(['{', '[']) => {
                let value = serde_json::from_str(text).unwrap_or(value);
                (name, value)
            }
            ("input_digest", Some(hex)) => {
                let digest = format!("sha256:{hex}");
                (name, digest.into())
            }
            _ => (name, value),
        });
    told.extend(said);
    Some(Value::Object(told))
}
