//! Turns: what the model was asked and what it answered.

use iop_durable::record::ActivityRecord;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{FailureObject, time, written};
use crate::agents::journal::turn_of;

/// A model turn.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct TurnObject {
    /// From 1.
    pub(crate) n: u64,
    /// SHA-256 of the request, which is the transcript up to here.
    request_digest: Option<String>,
    /// Null while there is none.
    #[schema(value_type = Option<Object>)]
    response: Option<Box<RawValue>>,
    /// Tokens, as the provider counted them.
    #[schema(value_type = Option<Object>)]
    usage: Option<Box<RawValue>>,
    attempts: usize,
    /// Why the last attempt failed.
    error: Option<FailureObject>,
    started_at: Option<String>,
    ended_at: Option<String>,
}

#[derive(Deserialize)]
struct Asked {
    request_digest: String,
}

#[derive(Deserialize)]
struct Answered {
    #[serde(default)]
    usage: Option<Box<RawValue>>,
}

impl TurnObject {
    /// Of the activity that is its model call.
    pub(crate) fn of(record: &ActivityRecord) -> Self {
        let asked: Option<Asked> = serde_json::from_slice(record.input.bytes()).ok();
        let output = record.output.as_ref().map(|output| output.bytes());
        let answered: Option<Answered> = output.and_then(|output| serde_json::from_slice(output).ok());
        let last = record.attempts.last();
        Self {
            n: turn_of(record.activation),
            request_digest: asked.map(|asked| asked.request_digest),
            response: output.map(|output| written(output)),
            usage: answered.and_then(|answered| answered.usage),
            attempts: record.attempts.len(),
            error: record.error.as_ref().map(FailureObject::from),
            started_at: record.attempts.first().map(|attempt| time(attempt.started_at)),
            ended_at: last.and_then(|attempt| attempt.ended_at).map(time),
        }
    }
}
