//! A JSON request body, read without a tree and changed without a re-serialization (G10).
//!
//! One pass over the top level finds what routes the request; nested values are skipped by their brackets and
//! strings. What is not understood is the provider's business and travels as it came: number spelling, key order,
//! lone surrogates, unknown members.

mod splice;

use std::borrow::Cow;
use std::ops::Range;

use memchr::memchr2;

pub use splice::{SplicedBody, splice};

/// Nested brackets deeper than this are refused.
const MAX_DEPTH: usize = 512;

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
    tools: Option<Range<usize>>,
    web_search_options: bool,
    prompt_cache_key: Option<String>,
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

    /// The span of the `tools` value.
    pub fn tools(&self) -> Option<&Range<usize>> {
        self.tools.as_ref()
    }

    pub fn has_web_search_options(&self) -> bool {
        self.web_search_options
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
    let mut r = Reader { body, at: 0 };
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
        tools: None,
        web_search_options: false,
        prompt_cache_key: None,
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
            "background" => self.background = raw == b"true",
            "n" => {
                self.choices = std::str::from_utf8(raw)
                    .ok()
                    .and_then(|n| n.parse().ok())
                    .unwrap_or(1)
                    .max(1)
            }
            "tools" if !is_null => self.tools = Some(value),
            "web_search_options" => self.web_search_options = !is_null,
            "prompt_cache_key" => self.prompt_cache_key = text(raw),
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
        let mut r = Reader { body: raw, at: 1 };
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
    let mut r = Reader { body: raw, at: 1 };
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

/// Walks one level of JSON; skips values without looking into them.
pub(super) struct Reader<'a> {
    body: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// At a byte of a text.
    pub(super) fn at(body: &'a [u8], at: usize) -> Self {
        Self { body, at }
    }

    /// The members of the object that starts here, each key's text with its value's bytes; `None`: it is no object.
    pub(super) fn object(mut self, mut visit: impl FnMut(&str, &'a [u8])) -> Option<()> {
        self.blanks();
        if self.peek() != Some(b'{') {
            return None;
        }
        self.at += 1;
        self.members(|key, span, body| {
            visit(key, &body[span]);
            Ok(())
        })
        .ok()
    }

    /// Behind a member's key: the value's bytes, if what follows them are only further members of an object that ends
    /// with the text. So the member is one of the outermost object.
    pub(super) fn last_level_value(mut self) -> Option<&'a [u8]> {
        self.blanks();
        if self.peek() != Some(b':') {
            return None;
        }
        self.at += 1;
        self.blanks();
        let start = self.at;
        self.skip().ok()?;
        let value = &self.body[start..self.at];
        self.blanks();
        match self.peek()? {
            b',' => {
                self.at += 1;
                self.blanks();
                // An empty rest is no JSON: a comma wants a member.
                if self.peek() == Some(b'}') {
                    return None;
                }
                self.members(|_, _, _| Ok(())).ok()?;
            }
            b'}' => self.at += 1,
            _ => return None,
        }
        self.blanks();
        (self.at == self.body.len()).then_some(value)
    }

    fn peek(&self) -> Option<u8> {
        self.body.get(self.at).copied()
    }

    fn blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn broken(&self) -> RequestError {
        RequestError::body(if self.at >= self.body.len() {
            "The request body is not valid JSON: it ends too early.".to_owned()
        } else {
            format!("The request body is not valid JSON (at byte {}).", self.at)
        })
    }

    /// From behind `{` to behind its `}`; the visitor gets each key's text and its value's span.
    fn members(
        &mut self,
        mut visit: impl FnMut(&str, Range<usize>, &'a [u8]) -> Result<(), RequestError>,
    ) -> Result<(), RequestError> {
        self.blanks();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.blanks();
            let key = self.key()?;
            self.blanks();
            if self.peek() != Some(b':') {
                return Err(self.broken());
            }
            self.at += 1;
            self.blanks();
            let start = self.at;
            self.skip()?;
            visit(&key, start..self.at, self.body)?;
            self.blanks();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err(self.broken()),
            }
        }
    }

    fn key(&mut self) -> Result<Cow<'a, str>, RequestError> {
        if self.peek() != Some(b'"') {
            return Err(self.broken());
        }
        let start = self.at;
        self.string()?;
        let raw = &self.body[start..self.at];
        let inner = &raw[1..raw.len() - 1];
        if !inner.contains(&b'\\') {
            return std::str::from_utf8(inner)
                .map(Cow::Borrowed)
                .map_err(|_| self.broken());
        }
        // A key that is no text (a lone surrogate) is none of ours.
        Ok(Cow::Owned(text(raw).unwrap_or_default()))
    }

    /// From a quote to behind the closing one.
    fn string(&mut self) -> Result<(), RequestError> {
        self.at += 1;
        loop {
            let Some(i) = memchr2(b'"', b'\\', &self.body[self.at..]) else {
                self.at = self.body.len();
                return Err(self.broken());
            };
            self.at += i;
            if self.body[self.at] == b'"' {
                self.at += 1;
                return Ok(());
            }
            self.at = (self.at + 2).min(self.body.len());
        }
    }

    /// Over one value. Nested values must balance; what stands between brackets is not judged.
    fn skip(&mut self) -> Result<(), RequestError> {
        match self.peek() {
            Some(b'"') => self.string(),
            Some(b'{' | b'[') => self.nested(),
            Some(b'-' | b'0'..=b'9' | b't' | b'f' | b'n') => self.scalar(),
            _ => Err(self.broken()),
        }
    }

    fn scalar(&mut self) -> Result<(), RequestError> {
        let start = self.at;
        while matches!(
            self.peek(),
            Some(b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'+' | b'-' | b'.')
        ) {
            self.at += 1;
        }
        let raw = &self.body[start..self.at];
        let number = |raw: &[u8]| serde_json::from_slice::<&serde_json::value::RawValue>(raw).is_ok();
        if matches!(raw, b"true" | b"false" | b"null") || number(raw) {
            Ok(())
        } else {
            self.at = start;
            Err(self.broken())
        }
    }

    fn nested(&mut self) -> Result<(), RequestError> {
        let mut open: Vec<u8> = Vec::new();
        loop {
            match self.peek() {
                None => return Err(self.broken()),
                Some(b'"') => {
                    self.string()?;
                    continue;
                }
                Some(b @ (b'{' | b'[')) => {
                    if open.len() == MAX_DEPTH {
                        return Err(RequestError::body(format!(
                            "The request body is nested deeper than {MAX_DEPTH} levels."
                        )));
                    }
                    open.push(b);
                }
                Some(b @ (b'}' | b']')) => {
                    let fits = open.pop() == Some(if b == b'}' { b'{' } else { b'[' });
                    if !fits {
                        return Err(self.broken());
                    }
                    if open.is_empty() {
                        self.at += 1;
                        return Ok(());
                    }
                }
                Some(_) => {}
            }
            self.at += 1;
        }
    }
}

#[cfg(test)]
mod tests;
