//! The few members of an event that matter, borrowed as they are; the rest is skipped.

use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;
use serde_json::value::RawValue;

use super::{CommittedFacts, Dialect, EventKind, InBandError, TerminalKind, may_hold_error};
use crate::openai::members::{elements, quoted, read};
use crate::openai::usage::Usage;

/// A chat or completions chunk.
pub(super) struct ChatChunk<'a> {
    error: Option<&'a RawValue>,
    choices: Vec<Choice<'a>>,
    usage: Option<&'a RawValue>,
    object: Option<&'a RawValue>,
}

struct Choice<'a> {
    /// A member of `delta`, or completions' `text`, that is something to show.
    content: bool,
    finish_reason: Option<&'a RawValue>,
}

impl<'a> Choice<'a> {
    fn parse(raw: &'a RawValue) -> Option<Self> {
        let [delta, text, finish_reason] = read(raw.get().as_bytes(), ["delta", "text", "finish_reason"])?;
        let delta = delta.and_then(|d| read(d.get().as_bytes(), CONTENT));
        let content = holds(text) || delta.is_some_and(|d| d.into_iter().any(holds));
        Some(Self {
            content,
            finish_reason,
        })
    }
}

/// What of a `delta` is content; its `role` is not.
const CONTENT: [&str; 8] = [
    "content",
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "refusal",
    "tool_calls",
    "function_call",
    "audio",
];

/// Neither absent nor `null`, `""`, `[]`, `{}`.
fn holds(raw: Option<&RawValue>) -> bool {
    let Some(raw) = raw.map(RawValue::get) else {
        return false;
    };
    match raw.as_bytes() {
        b"null" | b"\"\"" => false,
        [b'[' | b'{', inner @ .., _] => !inner.trim_ascii().is_empty(),
        _ => true,
    }
}

/// JavaScript's truth, as the SDKs judge an `error` member.
fn truthy(raw: Option<&RawValue>) -> bool {
    raw.is_some_and(|r| !matches!(r.get(), "null" | "false" | "0" | "\"\""))
}

impl<'a> ChatChunk<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Option<Self> {
        let [error, choices, usage, object] = read(data, ["error", "choices", "usage", "object"])?;
        let choices = elements(choices).into_iter().filter_map(Choice::parse).collect();
        Some(Self {
            error,
            choices,
            usage,
            object,
        })
    }

    fn is_flat_error(&self) -> bool {
        quoted(self.object) == Some("error")
    }

    fn has_content(&self) -> bool {
        self.choices.iter().any(|c| c.content)
    }

    /// Some providers write `""` in every chunk but the last.
    fn finishes(&self) -> u32 {
        let finished = self.choices.iter().filter(|c| holds(c.finish_reason)).count();
        u32::try_from(finished).unwrap_or(u32::MAX)
    }

    fn usage(&self) -> Option<Usage> {
        Usage::from_json(self.usage?.get().as_bytes())
    }

    fn is_usage_only(&self) -> bool {
        self.choices.is_empty() && self.usage.is_some_and(|u| u.get().starts_with('{'))
    }

    pub(super) fn kind(&self, data: &[u8]) -> EventKind {
        if truthy(self.error) {
            return EventKind::Error(in_band(self.error, data));
        }
        if self.is_flat_error() {
            return EventKind::Error(in_band(None, data));
        }
        if self.has_content() {
            EventKind::Content
        } else if self.finishes() > 0 {
            EventKind::Finish
        } else if self.is_usage_only() {
            EventKind::UsageOnly
        } else {
            EventKind::Preamble
        }
    }

    pub(super) fn committed(&self) -> CommittedFacts {
        CommittedFacts {
            terminal: None,
            finishes: self.finishes(),
            usage: self.usage(),
            usage_only: self.is_usage_only(),
            error: truthy(self.error) || self.is_flat_error(),
        }
    }
}

/// A Responses event.
pub(super) struct ResponsesEvent<'a> {
    kind: Option<&'a str>,
    delta: Option<&'a RawValue>,
    error: Option<&'a RawValue>,
    response: Option<&'a RawValue>,
}

impl<'a> ResponsesEvent<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Option<Self> {
        let [kind, delta, error, response] = read(data, ["type", "delta", "error", "response"])?;
        Some(Self {
            kind: quoted(kind),
            delta,
            error,
            response,
        })
    }

    /// Readers dispatch on `type`; the event's name stands in where it is absent.
    fn type_or<'n>(&'n self, name: Option<&'n [u8]>) -> &'n str {
        match self.kind {
            Some(kind) => kind,
            None => name.and_then(|n| std::str::from_utf8(n).ok()).unwrap_or_default(),
        }
    }

    fn terminal(&self, name: Option<&[u8]>) -> Option<TerminalKind> {
        match self.type_or(name) {
            "response.completed" => Some(TerminalKind::Completed),
            "response.failed" => Some(TerminalKind::Failed),
            "response.incomplete" => Some(TerminalKind::Incomplete),
            _ => None,
        }
    }

    fn is_error(&self, name: Option<&[u8]>) -> bool {
        let kind = self.type_or(name);
        kind == "error" || (truthy(self.error) && !kind.starts_with("response."))
    }

    pub(super) fn kind(&self, name: Option<&[u8]>, data: &[u8]) -> EventKind {
        if self.is_error(name) {
            return EventKind::Error(in_band(self.error, data));
        }
        if let Some(terminal) = self.terminal(name) {
            return EventKind::Terminal(terminal);
        }
        let kind = self.type_or(name);
        if kind.ends_with(".delta") {
            return if holds(self.delta) {
                EventKind::Content
            } else {
                EventKind::Preamble
            };
        }
        if kind.ends_with(".done") {
            return EventKind::Content;
        }
        match kind {
            "response.created" | "response.in_progress" | "response.queued" => EventKind::Preamble,
            _ if kind.ends_with(".added") => EventKind::Preamble,
            _ => EventKind::Ignored,
        }
    }

    pub(super) fn committed(&self, name: Option<&[u8]>) -> CommittedFacts {
        let terminal = self.terminal(name);
        let usage = terminal
            .and(self.response)
            .and_then(|r| read(r.get().as_bytes(), ["usage"])?[0])
            .and_then(|u| Usage::from_json(u.get().as_bytes()));
        CommittedFacts {
            terminal,
            finishes: 0,
            usage,
            usage_only: false,
            error: self.is_error(name),
        }
    }
}

/// What matters of an image or audio event after commit.
pub(super) fn other_committed(data: &[u8]) -> CommittedFacts {
    let [usage, error] = read(data, ["usage", "error"]).unwrap_or_default();
    CommittedFacts {
        usage: usage.and_then(|u| Usage::from_json(u.get().as_bytes())),
        error: truthy(error),
        ..CommittedFacts::default()
    }
}

/// The error object: the member where it is an object, else one made of what there is.
fn in_band(member: Option<&RawValue>, data: &[u8]) -> InBandError {
    let object = match member.map(RawValue::get) {
        Some(object) if object.starts_with('{') => Some(object),
        Some(text) if text.starts_with('"') => {
            return InBandError {
                status: None,
                raw: made(text, "null"),
            };
        }
        Some(_) | None => None,
    };
    let raw = object.map_or(data, str::as_bytes);
    let [status, code, kind, message] = read(raw, ["status", "code", "type", "message"]).unwrap_or_default();
    let number = |raw: Option<&RawValue>| {
        let status = raw?.get().trim_matches('"').parse().ok()?;
        (400..600).contains(&status).then_some(status)
    };
    let word = |raw: Option<&RawValue>| quoted(raw).and_then(status_of_word);
    let status = number(status)
        .or_else(|| number(code))
        .or_else(|| word(code))
        .or_else(|| word(kind));
    // An `event: error` of Responses carries code and message at the top, beside its own `type`.
    let raw = if object.is_none() && quoted(kind) == Some("error") {
        let text = |raw: Option<&RawValue>| raw.map_or("null", RawValue::get).to_owned();
        made(&text(message), &text(code))
    } else {
        Bytes::copy_from_slice(raw)
    };
    InBandError { status, raw }
}

/// An error object of these JSON values.
fn made(message: &str, code: &str) -> Bytes {
    Bytes::from(format!(
        r#"{{"message":{message},"type":"server_error","param":null,"code":{code}}}"#
    ))
}

/// The status that OpenAI sends with this code or type.
fn status_of_word(word: &str) -> Option<u16> {
    Some(match word {
        "rate_limit_exceeded" | "rate_limit_error" | "insufficient_quota" | "tokens" | "requests" => 429,
        "invalid_request_error"
        | "context_length_exceeded"
        | "content_policy_violation"
        | "invalid_prompt"
        | "BadRequestError" => 400,
        "authentication_error" | "invalid_api_key" => 401,
        "permission_error" | "permission_denied" => 403,
        "not_found_error" | "model_not_found" | "NotFoundError" => 404,
        "server_error" | "internal_error" | "internal_server_error" | "api_error" | "InternalServerError" => {
            500
        }
        "overloaded_error" | "server_is_overloaded" | "service_unavailable" | "slow_down" => 503,
        _ => return None,
    })
}

/// A whole body that is an error in spite of its status: a truthy top-level `error` and no answer beside it (G58).
///
/// A Responses object carries `error: null`, or a real one with `status: failed`, which is an answer.
pub fn error_in_body(dialect: Dialect, body: &[u8]) -> Option<InBandError> {
    if !may_hold_error(body) {
        return None;
    }
    let [error, object, choices, data] = read(body, ["error", "object", "choices", "data"])?;
    if quoted(object) == Some("error") {
        return Some(in_band(error.filter(|e| e.get().starts_with('{')), body));
    }
    if dialect == Dialect::Responses && quoted(object) == Some("response") {
        return None;
    }
    let answers = choices.is_some() || data.is_some();
    (truthy(error) && !answers).then(|| in_band(error, body))
}

/// The error that a `response.failed` carries inside its response.
pub fn error_of_failed(data: &[u8]) -> InBandError {
    let response = read(data, ["response"]).and_then(|[response]| response);
    let error = response
        .and_then(|r| read(r.get().as_bytes(), ["error"]))
        .and_then(|[error]| error);
    in_band(error, b"{}")
}

/// Which response an event or a whole Responses body belongs to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    pub id: Option<String>,
    pub model: Option<String>,
    /// The id of its `conversation`.
    pub conversation: Option<String>,
}

/// Id and model of the `response` inside an event, else of the object itself.
pub fn response_id(data: &[u8]) -> Identity {
    let [response, mut id, mut model, mut conversation] =
        read(data, ["response", "id", "model", "conversation"]).unwrap_or_default();
    if let Some(inner) = response.and_then(|r| read(r.get().as_bytes(), ["id", "model", "conversation"])) {
        [id, model, conversation] = inner;
    }
    let text = |raw: Option<&RawValue>| serde_json::from_str(raw?.get()).ok();
    let inside = conversation
        .and_then(|c| read(c.get().as_bytes(), ["id"]))
        .and_then(|[id]| id);
    Identity {
        id: text(id),
        model: text(model),
        conversation: text(inside),
    }
}

/// The id of a Responses object of which only the beginning is here: its first `"id"` with a `resp_` value.
pub fn leading_response_id(beginning: &[u8]) -> Option<String> {
    let at = memchr::memmem::find(beginning, b"\"id\"")?;
    let rest = beginning[at + 4..]
        .trim_ascii_start()
        .strip_prefix(b":")?
        .trim_ascii_start();
    let value = rest.strip_prefix(b"\"")?;
    let end = memchr::memchr(b'"', value)?;
    let id = std::str::from_utf8(&value[..end]).ok()?;
    (id.starts_with("resp_") && !id.contains('\\')).then(|| id.to_owned())
}

/// The `sequence_number` of a Responses event, found without reading the rest: inside a string its quotes are escaped.
pub fn sequence_number(data: &[u8]) -> Option<u64> {
    static KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"sequence_number\""));
    // A text that is this name has no colon after it.
    KEY.find_iter(data).find_map(|at| {
        let value = data[at + KEY.needle().len()..]
            .trim_ascii_start()
            .strip_prefix(b":")?
            .trim_ascii_start();
        let digits = value.iter().take_while(|b| b.is_ascii_digit()).count();
        std::str::from_utf8(&value[..digits]).ok()?.parse().ok()
    })
}
