//! A JSON request body, read without a tree and changed without a re-serialization (G10).
//!
//! One pass over the top level finds what routes the request; nested values are skipped by their brackets and
//! strings. What is not understood is the provider's business and travels as it came: number spelling, key order,
//! lone surrogates, unknown members.

mod affinity;
mod reader;
mod splice;
mod tools;

use std::ops::Range;

pub use affinity::affinity_key;
pub(super) use reader::Reader;
pub use splice::{SplicedBody, splice};
pub use tools::replay_safe;

/// Why a body was refused; `param` names the member at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    pub param: Option<&'static str>,
    pub message: String,
}

impl RequestError {
    pub(super) fn at(param: &'static str, message: impl Into<String>) -> Self {
        Self {
            param: Some(param),
            message: message.into(),
        }
    }

    pub(super) fn body(message: impl Into<String>) -> Self {
        Self {
            param: None,
            message: message.into(),
        }
    }
}

/// What of a body routes it. Spans are byte ranges of the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestFacts {
    /// Just behind the top level's `{`.
    open: usize,
    model: String,
    /// Every `model` value, quotes included: duplicates too, since readers differ on which one counts.
    model_spans: Vec<Range<usize>>,
    stream: bool,
    options: StreamOptions,
    state_id: Option<String>,
    background: bool,
    choices: u32,
    prompt_cache_key: Option<String>,
    messages: Option<Range<usize>>,
    instructions: Option<Range<usize>>,
    input: Option<Range<usize>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum StreamOptions {
    Absent,
    /// The value is `null`.
    Null(Range<usize>),
    /// Behind the object's `{`, whether it has members, and its `include_usage` value.
    Object {
        open: usize,
        empty: bool,
        include_usage: Option<(bool, Range<usize>)>,
    },
    /// Something else, which the provider will refuse.
    Foreign,
}

impl RequestFacts {
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The body asked for a stream.
    pub fn stream(&self) -> bool {
        self.stream
    }

    /// The client asked for the usage chunk.
    pub fn include_usage(&self) -> bool {
        matches!(
            self.options,
            StreamOptions::Object {
                include_usage: Some((true, _)),
                ..
            }
        )
    }

    /// `previous_response_id`, else the id of `conversation`: state that one provider holds.
    pub fn state_id(&self) -> Option<&str> {
        self.state_id.as_deref()
    }

    /// Choices asked for (`n`), at least 1; odd values are the provider's business.
    pub fn choices(&self) -> u32 {
        self.choices
    }

    pub fn background(&self) -> bool {
        self.background
    }

    pub fn prompt_cache_key(&self) -> Option<&str> {
        self.prompt_cache_key.as_deref()
    }
}

/// Reads the top level of a JSON object.
///
/// # Errors
/// No JSON object, or a routing member that is missing or of the wrong type.
pub fn inspect(body: &[u8]) -> Result<RequestFacts, RequestError> {
    let mut r = Reader::at(body, 0);
    if body.starts_with(b"\xef\xbb\xbf") {
        r.at = 3;
    }
    r.blanks();
    if r.peek() != Some(b'{') {
        return Err(RequestError::body(match r.peek() {
            None => "The request body is empty; a JSON object is expected.".to_owned(),
            Some(_) => format!("The request body is not a JSON object (at byte {}).", r.at),
        }));
    }
    r.at += 1;
    let mut facts = RequestFacts {
        open: r.at,
        model: String::new(),
        model_spans: Vec::new(),
        stream: false,
        options: StreamOptions::Absent,
        state_id: None,
        background: false,
        choices: 1,
        prompt_cache_key: None,
        messages: None,
        instructions: None,
        input: None,
    };
    r.members(|key, value, body| facts.take(key, value, body))?;
    r.blanks();
    if r.at != body.len() {
        return Err(r.broken());
    }
    if facts.model_spans.is_empty() {
        return Err(RequestError::at("model", "The member `model` is missing."));
    }
    if facts.model.is_empty() {
        return Err(RequestError::at("model", "`model` must not be empty."));
    }
    Ok(facts)
}

impl RequestFacts {
    fn take(&mut self, key: &str, value: Range<usize>, body: &[u8]) -> Result<(), RequestError> {
        let raw = &body[value.clone()];
        let is_null = raw == b"null";
        match key {
            "model" => {
                self.model =
                    text(raw).ok_or_else(|| RequestError::at("model", "`model` must be a string."))?;
                self.model_spans.push(value);
            }
            "stream" => {
                self.stream = match raw {
                    b"true" => true,
                    b"false" | b"null" => false,
                    _ => return Err(RequestError::at("stream", "`stream` must be true or false.")),
                }
            }
            "stream_options" => self.options = stream_options(raw, value.start)?,
            "previous_response_id" if !is_null => {
                let id = text(raw).ok_or_else(|| {
                    RequestError::at("previous_response_id", "`previous_response_id` must be a string.")
                })?;
                self.state_id = Some(id);
            }
            "conversation" if !is_null && self.state_id.is_none() => self.state_id = conversation_id(raw)?,
            "background" => self.background |= raw == b"true",
            "n" => {
                self.choices = std::str::from_utf8(raw)
                    .ok()
                    .and_then(|n| n.parse().ok())
                    .unwrap_or(1)
                    .max(1)
            }
            "prompt_cache_key" => self.prompt_cache_key = text(raw),
            "messages" => self.messages = Some(value),
            "instructions" => self.instructions = Some(value),
            "input" => self.input = Some(value),
            _ => {}
        }
        Ok(())
    }
}

/// A JSON string's text; `None`: no string, or one that is no text (a lone surrogate).
fn text(raw: &[u8]) -> Option<String> {
    serde_json::from_slice(raw).ok()
}

fn conversation_id(raw: &[u8]) -> Result<Option<String>, RequestError> {
    if let Some(id) = text(raw) {
        return Ok(Some(id));
    }
    let mut id = None;
    if raw.first() == Some(&b'{') {
        let mut r = Reader::at(raw, 1);
        r.members(|key, value, raw| {
            if key == "id" {
                id = text(&raw[value]);
            }
            Ok(())
        })?;
    }
    Ok(id)
}

fn stream_options(raw: &[u8], offset: usize) -> Result<StreamOptions, RequestError> {
    if raw == b"null" {
        return Ok(StreamOptions::Null(offset..offset + raw.len()));
    }
    if raw.first() != Some(&b'{') {
        return Ok(StreamOptions::Foreign);
    }
    let (mut include_usage, mut empty) = (None, true);
    let mut r = Reader::at(raw, 1);
    r.members(|key, value, raw| {
        empty = false;
        if key == "include_usage" {
            include_usage = Some((
                &raw[value.clone()] == b"true",
                offset + value.start..offset + value.end,
            ));
        }
        Ok(())
    })?;
    Ok(StreamOptions::Object {
        open: offset + 1,
        empty,
        include_usage,
    })
}

#[cfg(test)]
mod tests;
