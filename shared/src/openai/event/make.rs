//! Events that the gateway itself adds to a stream (G56), in the form that real clients show.

use bytes::Bytes;
use serde_json::json;

use crate::openai::answer::{Status, response};
use crate::openai::errors::ErrorObject;

/// Chat and completions: an unnamed data event with a truthy `error`, which SDKs raise.
pub fn chat_error_event(code: &str, message: &str, kind: &str) -> Bytes {
    let body = ErrorObject {
        message,
        kind,
        param: None,
        code: Some(code),
    }
    .body();
    Bytes::from(format!("data: {body}\n\n"))
}

/// Responses: `response.failed`, since Codex ignores `event: error`.
pub fn responses_failed_event(
    id: &str,
    model: &str,
    created_at: i64,
    sequence_number: u64,
    code: &str,
    message: &str,
) -> Bytes {
    let mut failed = response(id, model, created_at, Status::Failed);
    failed["error"] = json!({ "code": code, "message": message });
    event("response.failed", sequence_number, &failed)
}

/// Responses: the beginning of a stream that the provider never began.
pub fn responses_created_event(id: &str, model: &str, created_at: i64, sequence_number: u64) -> Bytes {
    let created = response(id, model, created_at, Status::InProgress);
    event("response.created", sequence_number, &created)
}

fn event(kind: &str, sequence_number: u64, response: &serde_json::Value) -> Bytes {
    let data = json!({ "type": kind, "sequence_number": sequence_number, "response": response });
    Bytes::from(format!("event: {kind}\ndata: {data}\n\n"))
}
