//! The last words of a stream that has no natural end: one typed error event in the endpoint's own form (G56).

use bytes::{BufMut, Bytes, BytesMut};
use http::StatusCode;
use iop_shared::openai::event::{
    Dialect, chat_error_event, error_in_body, responses_created_event, responses_failed_event,
};

use super::relay::Relay;
use crate::error::ErrorKind;

/// After commit: the same response id, the next sequence number.
pub(super) fn error_event(dialect: Dialect, relay: &Relay, kind: ErrorKind, message: &str) -> Bytes {
    // A provider that said why it failed is quoted: Codex reads `response.failed` and ignores `event: error`.
    let said = relay.error().map(Said::of);
    let (code, message) = match &said {
        Some(said) => (said.code(), said.message.as_str()),
        None => (kind.as_str(), message),
    };
    match dialect {
        Dialect::Responses => responses_failed_event(
            relay.response_id().unwrap_or_default(),
            relay.model().unwrap_or_default(),
            created_at(),
            relay.next_sequence(),
            code,
            message,
        ),
        Dialect::Chat | Dialect::Completions | Dialect::Other => {
            chat_error_event(code, message, kind.openai_type())
        }
    }
}

/// What of a provider's error object a `response.failed` repeats.
#[derive(serde::Deserialize, Default)]
struct Said {
    code: Option<serde_json::Value>,
    #[serde(default)]
    message: String,
}

impl Said {
    /// Reads an error object, or an event that carries its members at the top.
    fn of(object: &[u8]) -> Self {
        serde_json::from_slice(object).unwrap_or_default()
    }

    fn code(&self) -> &str {
        match &self.code {
            Some(serde_json::Value::String(code)) => code,
            Some(_) | None => ErrorKind::ProviderError.as_str(),
        }
    }
}

/// After a keep-alive opening: nothing of the provider has been sent. `model` is the public name.
pub(super) fn late_error(dialect: Dialect, model: &str, kind: ErrorKind, message: &str) -> Bytes {
    match dialect {
        Dialect::Responses => created_and_failed(model, kind.as_str(), message),
        Dialect::Chat | Dialect::Completions | Dialect::Other => {
            chat_error_event(kind.as_str(), message, kind.openai_type())
        }
    }
}

/// After a keep-alive opening: the provider answered with a status; its own error object travels in-band.
pub(super) fn late_answer(dialect: Dialect, model: &str, status: StatusCode, body: &Bytes) -> Bytes {
    match error_in_body(Dialect::Chat, body) {
        Some(error) => late_object(dialect, model, &error.raw),
        None => late_error(
            dialect,
            model,
            ErrorKind::ProviderError,
            &format!("The provider answered with status {}.", status.as_u16()),
        ),
    }
}

/// After a keep-alive opening: a provider's error object.
pub(super) fn late_object(dialect: Dialect, model: &str, object: &Bytes) -> Bytes {
    match dialect {
        Dialect::Responses => {
            let said = Said::of(object);
            created_and_failed(model, said.code(), &said.message)
        }
        Dialect::Chat | Dialect::Completions | Dialect::Other => {
            let mut out = BytesMut::with_capacity(object.len() + 32);
            out.put_slice(b"data: {\"error\":");
            // A line feed inside the object is white space to JSON and a new data line to SSE.
            for (i, line) in object.split(|b| matches!(b, b'\n' | b'\r')).enumerate() {
                if i > 0 {
                    out.put_slice(b"\ndata: ");
                }
                out.put_slice(line);
            }
            out.put_slice(b"}\n\n");
            out.freeze()
        }
    }
}

fn created_and_failed(model: &str, code: &str, message: &str) -> Bytes {
    let id = format!("resp_{}", uuid::Uuid::now_v7().simple());
    let created_at = created_at();
    let mut out = BytesMut::new();
    out.put(responses_created_event(&id, model, created_at, 0));
    out.put(responses_failed_event(&id, model, created_at, 1, code, message));
    out.freeze()
}

/// Unix seconds.
fn created_at() -> i64 {
    jiff::Timestamp::now().as_second()
}
