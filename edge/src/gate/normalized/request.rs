//! A client's request as a run: its conversation as text, or a clear refusal. Pure.
//!
//! Settings of the model, such as `temperature` or `max_tokens`, are wishes and do not travel; what would change the
//! form of the answer, or what the model is given to read, is refused where it cannot be carried.

use std::borrow::Cow;
use std::collections::BTreeMap;

use iop_shared::execution::Endpoint;
use iop_shared::ids::{AttemptId, ProviderId, RunId};
use iop_shared::wire::event::{Message, RunRequest};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::ApiError;

/// Members that ask for what a run cannot give, unless they are empty.
const CHAT_REFUSED: &[&str] = &["tools", "functions", "audio", "logprobs"];
const RESPONSES_REFUSED: &[&str] = &[
    "tools",
    "previous_response_id",
    "conversation",
    "prompt",
    "background",
];

/// The run that this request asks for.
///
/// # Errors
/// 400, naming the field that a run cannot carry or that is malformed.
pub(crate) fn run_request(
    endpoint: Endpoint,
    body: &[u8],
    run_id: RunId,
    attempt_id: AttemptId,
    provider: &ProviderId,
    target: &str,
    response_stall_timeout_ms: i64,
) -> Result<RunRequest, ApiError> {
    let messages = match endpoint {
        Endpoint::Chat => chat(&Members::read("messages", body)?)?,
        Endpoint::Responses => responses(&Members::read("input", body)?)?,
        Endpoint::Completions
        | Endpoint::Embeddings
        | Endpoint::Rerank
        | Endpoint::Moderations
        | Endpoint::Images
        | Endpoint::Audio => {
            return Err(ApiError::invalid(
                "model",
                "This model does not serve this endpoint.",
            ));
        }
    };
    Ok(RunRequest {
        endpoint,
        run_id,
        attempt_id,
        provider: provider.clone(),
        target: target.to_owned(),
        response_stall_timeout_ms,
        session_id: None,
        messages,
    })
}

/// The top level of a body; of duplicates the last one counts.
struct Members<'a>(BTreeMap<Cow<'a, str>, &'a RawValue>);

impl<'a> Members<'a> {
    fn read(param: &'static str, body: &'a [u8]) -> Result<Self, ApiError> {
        let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
        serde_json::from_slice(body)
            .map(Self)
            .map_err(|_| ApiError::invalid(param, "The request body cannot be read as text."))
    }

    /// A member that is there and not `null`.
    fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.0.get(name).copied().filter(|raw| raw.get() != "null")
    }

    fn refuse(&self, names: &[&'static str]) -> Result<(), ApiError> {
        match names
            .iter()
            .find(|name| self.get(name).is_some_and(|raw| !is_empty(raw)))
        {
            None => Ok(()),
            Some(name) => Err(not_carried(*name)),
        }
    }
}

/// Says nothing: `false`, `""`, `[]`, `{}`.
fn is_empty(raw: &RawValue) -> bool {
    match raw.get().as_bytes() {
        b"false" | b"\"\"" => true,
        [b'[' | b'{', inner @ .., _] => inner.trim_ascii().is_empty(),
        _ => false,
    }
}

fn not_carried(param: impl Into<Cow<'static, str>>) -> ApiError {
    let param = param.into();
    let message = format!("This model takes text only: `{param}` is not supported.");
    ApiError::invalid(param, message)
}

fn malformed(param: impl Into<Cow<'static, str>>, what: &str) -> ApiError {
    let param = param.into();
    let message = format!("`{param}` must be {what}.");
    ApiError::invalid(param, message)
}

fn chat(body: &Members<'_>) -> Result<Vec<Message>, ApiError> {
    body.refuse(CHAT_REFUSED)?;
    // An empty object asks for a search with everything at its default.
    if body.get("web_search_options").is_some() {
        return Err(not_carried("web_search_options"));
    }
    if let Some(n) = body.get("n")
        && n.get() != "1"
    {
        return Err(not_carried("n"));
    }
    if let Some(raw) = body.get("modalities")
        && read::<Vec<String>>(raw).is_none_or(|all| all.iter().any(|m| m != "text"))
    {
        return Err(not_carried("modalities"));
    }
    text_form(body.get("response_format"), "response_format")?;
    let turns = body
        .get("messages")
        .and_then(read::<Vec<Turn<'_>>>)
        .filter(|turns| !turns.is_empty())
        .ok_or_else(|| malformed("messages", "a list of messages"))?;
    let message = |(i, turn): (usize, &Turn<'_>)| {
        for (name, raw) in [
            ("tool_calls", turn.tool_calls),
            ("function_call", turn.function_call),
            ("audio", turn.audio),
        ] {
            if raw.is_some_and(|raw| !is_empty(raw)) {
                return Err(not_carried(format!("messages[{i}].{name}")));
            }
        }
        turn.message(&format!("messages[{i}]"))
    };
    turns.iter().enumerate().map(message).collect()
}

fn responses(body: &Members<'_>) -> Result<Vec<Message>, ApiError> {
    body.refuse(RESPONSES_REFUSED)?;
    if let Some(text) = body.get("text") {
        let options = read::<TextOptions<'_>>(text).ok_or_else(|| malformed("text", "an object"))?;
        text_form(options.format, "text.format")?;
    }
    let mut messages = Vec::new();
    if let Some(raw) = body.get("instructions") {
        let content = read(raw).ok_or_else(|| malformed("instructions", "text"))?;
        messages.push(Message {
            role: "system".to_owned(),
            content,
        });
    }
    let input = body
        .get("input")
        .ok_or_else(|| malformed("input", "text or a list of items"))?;
    if let Some(content) = read::<String>(input) {
        messages.push(Message {
            role: "user".to_owned(),
            content,
        });
        return Ok(messages);
    }
    let items = read::<Vec<Turn<'_>>>(input)
        .filter(|items| !items.is_empty())
        .ok_or_else(|| malformed("input", "text or a list of items"))?;
    for (i, item) in items.iter().enumerate() {
        if item.kind.as_deref().is_some_and(|kind| kind != "message") {
            return Err(not_carried(format!("input[{i}].type")));
        }
        messages.push(item.message(&format!("input[{i}]"))?);
    }
    Ok(messages)
}

/// A chat message or an input item.
#[derive(Deserialize)]
struct Turn<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow)]
    function_call: Option<&'a RawValue>,
    #[serde(borrow)]
    audio: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct TextOptions<'a> {
    #[serde(borrow)]
    format: Option<&'a RawValue>,
}

/// A content part, or the wanted form of an answer.
#[derive(Deserialize)]
struct Typed {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

impl Turn<'_> {
    fn message(&self, at: &str) -> Result<Message, ApiError> {
        let role = match self.role.as_deref() {
            Some(role @ ("system" | "developer" | "user" | "assistant")) => role.to_owned(),
            Some(_) => return Err(not_carried(format!("{at}.role"))),
            None => return Err(malformed(format!("{at}.role"), "there")),
        };
        let at = format!("{at}.content");
        let Some(content) = self.content else {
            return if role == "assistant" {
                Ok(Message {
                    role,
                    content: String::new(),
                })
            } else {
                Err(malformed(at, "text"))
            };
        };
        let content = match read::<String>(content) {
            Some(text) => text,
            None => parts(content, &at)?,
        };
        Ok(Message { role, content })
    }
}

fn parts(content: &RawValue, at: &str) -> Result<String, ApiError> {
    let parts: Vec<&RawValue> = serde_json::from_str(content.get())
        .map_err(|_| malformed(at.to_owned(), "text or a list of parts"))?;
    let mut all = String::new();
    for (i, raw) in parts.into_iter().enumerate() {
        let at = format!("{at}[{i}]");
        let part = read::<Typed>(raw).ok_or_else(|| malformed(at.clone(), "a part of text"))?;
        match (part.kind.as_str(), part.text) {
            ("text" | "input_text" | "output_text", Some(text)) => all.push_str(&text),
            ("text" | "input_text" | "output_text", None) => {
                return Err(malformed(format!("{at}.text"), "text"));
            }
            _ => return Err(not_carried(format!("{at}.type"))),
        }
    }
    Ok(all)
}

/// Refuses every wanted form but plain text.
fn text_form(raw: Option<&RawValue>, param: &'static str) -> Result<(), ApiError> {
    let plain = |raw| read::<Typed>(raw).is_some_and(|form| form.kind == "text");
    match raw {
        Some(raw) if !plain(raw) => Err(not_carried(param)),
        Some(_) | None => Ok(()),
    }
}

/// A value of that shape; `None`: it has another, or holds text that is none (a lone surrogate).
fn read<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> Option<T> {
    serde_json::from_str(raw.get()).ok()
}

#[cfg(test)]
mod tests;
