//! The few members of an event that matter, as serde structs that borrow and skip the rest.

use std::borrow::Cow;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{CommittedFacts, Dialect, EventKind, InBandError, TerminalKind, may_hold_error};
use crate::openai::usage::Usage;

/// Reads a JSON object; serde would read a struct from an array as well.
fn object<'a, T: Deserialize<'a>>(data: &'a [u8]) -> Option<T> {
    data.trim_ascii_start()
        .starts_with(b"{")
        .then(|| serde_json::from_slice(data).ok())
        .flatten()
}

/// A chat or completions chunk.
#[derive(Deserialize)]
pub(super) struct ChatChunk<'a> {
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    object: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    /// Completions.
    #[serde(borrow, default)]
    text: Option<&'a RawValue>,
    #[serde(borrow, default)]
    finish_reason: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow, default)]
    refusal: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow, default)]
    function_call: Option<&'a RawValue>,
    #[serde(borrow, default)]
    audio: Option<&'a RawValue>,
}

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
        object(data)
    }

    fn is_flat_error(&self) -> bool {
        self.object.is_some_and(|o| o.get() == "\"error\"")
    }

    fn has_content(&self) -> bool {
        self.choices.iter().flatten().any(|c| {
            holds(c.text)
                || c.delta.as_ref().is_some_and(|d| {
                    [
                        d.content,
                        d.reasoning_content,
                        d.reasoning,
                        d.refusal,
                        d.tool_calls,
                        d.function_call,
                        d.audio,
                    ]
                    .into_iter()
                    .any(holds)
                })
        })
    }

    fn has_finish(&self) -> bool {
        self.choices
            .iter()
            .flatten()
            .any(|c| c.finish_reason.is_some_and(|r| r.get() != "null"))
    }

    fn usage(&self) -> Option<Usage> {
        Usage::from_json(self.usage?.get().as_bytes())
    }

    fn is_usage_only(&self) -> bool {
        self.choices.as_ref().is_some_and(Vec::is_empty) && self.usage.is_some_and(|u| u.get() != "null")
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
        } else if self.has_finish() {
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
            finish: self.has_finish(),
            usage: self.usage(),
            usage_only: self.is_usage_only(),
            error: truthy(self.error) || self.is_flat_error(),
        }
    }
}

/// A Responses event.
#[derive(Deserialize)]
pub(super) struct ResponsesEvent<'a> {
    #[serde(borrow, default, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    delta: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    response: Option<&'a RawValue>,
}

impl<'a> ResponsesEvent<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Option<Self> {
        object(data)
    }

    /// Readers dispatch on `type`; the event's name stands in where it is absent.
    fn type_or<'n>(&'n self, name: Option<&'n [u8]>) -> &'n str {
        match &self.kind {
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
        #[derive(Deserialize)]
        struct Response<'a> {
            #[serde(borrow, default)]
            usage: Option<&'a RawValue>,
        }
        let terminal = self.terminal(name);
        let usage = terminal
            .and(self.response)
            .and_then(|r| serde_json::from_str::<Response<'_>>(r.get()).ok())
            .and_then(|r| Usage::from_json(r.usage?.get().as_bytes()));
        CommittedFacts {
            terminal,
            finish: false,
            usage,
            usage_only: false,
            error: self.is_error(name),
        }
    }
}

/// The error object: the member where it is an object, else one made of what there is.
fn in_band(member: Option<&RawValue>, data: &[u8]) -> InBandError {
    #[derive(Deserialize, Default)]
    struct Object<'a> {
        #[serde(borrow, default)]
        code: Option<&'a RawValue>,
        #[serde(borrow, default)]
        status: Option<&'a RawValue>,
        #[serde(borrow, default, rename = "type")]
        kind: Option<&'a RawValue>,
        #[serde(borrow, default)]
        message: Option<&'a RawValue>,
    }
    let raw: Bytes = match member.map(RawValue::get) {
        Some(object) if object.starts_with('{') => Bytes::copy_from_slice(object.as_bytes()),
        Some(text) if text.starts_with('"') => Bytes::from(format!(
            r#"{{"message":{text},"type":"server_error","param":null,"code":null}}"#
        )),
        Some(_) | None => Bytes::copy_from_slice(data),
    };
    let object: Object<'_> = serde_json::from_slice(&raw).unwrap_or_default();
    let number = |raw: Option<&RawValue>| raw.and_then(|r| r.get().trim_matches('"').parse::<u16>().ok());
    let made = member.is_some_and(|m| !m.get().starts_with('{'));
    let status = number(object.status)
        .or_else(|| number(object.code))
        .filter(|s| (400..600).contains(s))
        .or_else(|| {
            let words = [object.code, object.kind].map(|r| r.map_or("", |r| r.get().trim_matches('"')));
            words.into_iter().find_map(status_of_word).filter(|_| !made)
        });
    // An `event: error` of Responses carries code and message at the top, beside its own `type`.
    let flat = member.is_none() && object.kind.is_some_and(|k| k.get() == "\"error\"");
    let raw = if flat {
        fn text(raw: Option<&RawValue>) -> &str {
            raw.map_or("null", RawValue::get)
        }
        Bytes::from(format!(
            r#"{{"message":{},"type":"server_error","param":null,"code":{}}}"#,
            text(object.message),
            text(object.code)
        ))
    } else {
        raw
    };
    InBandError { status, raw }
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
    #[derive(Deserialize)]
    struct Body<'a> {
        #[serde(borrow, default)]
        error: Option<&'a RawValue>,
        #[serde(borrow, default)]
        object: Option<&'a RawValue>,
        #[serde(borrow, default)]
        choices: Option<&'a RawValue>,
        #[serde(borrow, default)]
        data: Option<&'a RawValue>,
    }
    let parsed: Body<'_> = object(body)?;
    let object = parsed.object.map(RawValue::get);
    if object == Some("\"error\"") {
        return Some(in_band(parsed.error.filter(|e| e.get().starts_with('{')), body));
    }
    if dialect == Dialect::Responses && object == Some("\"response\"") {
        return None;
    }
    let answers = parsed.choices.is_some() || parsed.data.is_some();
    (truthy(parsed.error) && !answers).then(|| in_band(parsed.error, body))
}

/// Which response an event or a whole Responses body belongs to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    pub id: Option<String>,
    pub model: Option<String>,
}

/// Id and model of the `response` inside an event, else of the object itself.
pub fn response_id(data: &[u8]) -> Identity {
    #[derive(Deserialize)]
    struct Object<'a> {
        #[serde(borrow, default)]
        id: Option<Cow<'a, str>>,
        #[serde(borrow, default)]
        model: Option<Cow<'a, str>>,
    }
    #[derive(Deserialize)]
    struct Outer<'a> {
        #[serde(borrow, default)]
        response: Option<Object<'a>>,
        #[serde(borrow, default)]
        id: Option<Cow<'a, str>>,
        #[serde(borrow, default)]
        model: Option<Cow<'a, str>>,
    }
    let Ok(outer) = serde_json::from_slice::<Outer<'_>>(data) else {
        return Identity::default();
    };
    let (id, model) = match outer.response {
        Some(inner) => (inner.id, inner.model),
        None => (outer.id, outer.model),
    };
    Identity {
        id: id.map(Cow::into_owned),
        model: model.map(Cow::into_owned),
    }
}

/// The `sequence_number` of a Responses event.
pub fn sequence_number(data: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Numbered {
        sequence_number: Option<u64>,
    }
    object::<Numbered>(data)?.sequence_number
}
