//! Events that the gateway itself adds to a stream (G56), in the form that real clients show.

use bytes::Bytes;
use serde_json::json;

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
    event(
        "response.failed",
        sequence_number,
        &response(
            id,
            model,
            created_at,
            "failed",
            &json!({ "code": code, "message": message }),
        ),
    )
}

/// Responses: the beginning of a stream that the provider never began.
pub fn responses_created_event(id: &str, model: &str, created_at: i64, sequence_number: u64) -> Bytes {
    event(
        "response.created",
        sequence_number,
        &response(id, model, created_at, "in_progress", &json!(null)),
    )
}

fn response(
    id: &str,
    model: &str,
    created_at: i64,
    status: &str,
    error: &serde_json::Value,
) -> serde_json::Value {
    json!({
        "id": id, "object": "response", "created_at": created_at, "status": status, "error": error,
        "incomplete_details": null, "instructions": null, "metadata": {}, "model": model, "output": [],
        "parallel_tool_calls": true, "temperature": null, "tool_choice": "auto", "tools": [], "top_p": null,
        "usage": null,
    })
}

fn event(kind: &str, sequence_number: u64, response: &serde_json::Value) -> Bytes {
    let data = json!({ "type": kind, "sequence_number": sequence_number, "response": response });
    Bytes::from(format!("event: {kind}\ndata: {data}\n\n"))
}
