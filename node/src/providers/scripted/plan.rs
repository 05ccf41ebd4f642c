//! What a scripted target does, step by step: an answer in its API's form, with the script's faults in it. Pure.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use iop_shared::config::{Script, StallPoint, ToolCallScript};
use iop_shared::execution::{Disposition, Endpoint, FailureCode};
use iop_shared::openai::answer::{Author, Call};
use iop_shared::openai::errors::ErrorObject;
use iop_shared::openai::usage::Usage;
use iop_shared::wire::event::Message;
use iop_shared::wire::headers;
use iop_shared::wire::terminal::NodeError;
use serde::Deserialize;

use super::prompt::PromptBytes;
use super::{chat, events, responses};
use crate::providers::Piece;

/// One thing after the other.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    Wait(Duration),
    Head(Head),
    Data(Piece),
    /// Silence for ever.
    Stall,
    Fail(NodeError),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Head {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
}

/// The APIs that a scripted target speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    Chat,
    Responses,
}

pub(super) fn api(endpoint: Endpoint) -> Option<Api> {
    match endpoint {
        Endpoint::Chat => Some(Api::Chat),
        Endpoint::Responses => Some(Api::Responses),
        Endpoint::Completions
        | Endpoint::Embeddings
        | Endpoint::Rerank
        | Endpoint::Moderations
        | Endpoint::Images
        | Endpoint::Audio => None,
    }
}

/// What only the shell knows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts<'a> {
    pub(super) target: &'a str,
    pub(super) id: uuid::Uuid,
    /// Seconds since 1970.
    pub(super) created: u64,
    /// Requests to this target before this one.
    pub(super) attempt: u32,
}

/// What of a request decides the form of its answer.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Asked {
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    messages: Option<Vec<Turn>>,
    input: Option<Input>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// A chat message or an input item.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Turn {
    role: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    content: Option<Content>,
    output: Option<Content>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Other(serde::de::IgnoredAny),
}

impl Turn {
    /// What a tool said, when this is a tool's result.
    fn tool_result(&self) -> Option<&str> {
        let said = if self.role.as_deref() == Some("tool") {
            &self.content
        } else if self.kind.as_deref()?.ends_with("_call_output") {
            &self.output
        } else {
            return None;
        };
        Some(match said {
            Some(Content::Text(text)) => text,
            Some(Content::Other(_)) | None => "",
        })
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Input {
    Items(Vec<Turn>),
    Text(serde::de::IgnoredAny),
}

impl Asked {
    /// The last thing said, when it is a tool's result: then the model speaks instead of calling again.
    fn tool_result(&self) -> Option<&str> {
        let last_message = self.messages.as_ref().and_then(|m| m.last());
        let last_item = match &self.input {
            Some(Input::Items(items)) => items.last(),
            Some(Input::Text(_)) | None => None,
        };
        let mut last = [last_message, last_item].into_iter().flatten();
        last.find_map(Turn::tool_result)
    }
}

/// The model's turn, before it has a form.
#[derive(Debug)]
pub(super) struct Turned<'a> {
    pub(super) facts: Facts<'a>,
    pub(super) says: Says<'a>,
    /// Estimates, as a tokenizer would count roughly.
    pub(super) usage: Usage,
    pub(super) include_usage: bool,
}

impl<'a> Turned<'a> {
    fn new(facts: &Facts<'a>, says: Says<'a>, prompt_bytes: usize, include_usage: bool) -> Self {
        let output = match &says {
            Says::Text(pieces) => pieces.len(),
            Says::Calls(calls) => calls.iter().map(|c| c.arguments.len().div_ceil(4)).sum(),
        };
        Self {
            facts: *facts,
            says,
            usage: Usage {
                input: prompt_bytes.div_ceil(4) as u64,
                output: output as u64,
                ..Usage::default()
            },
            include_usage,
        }
    }

    pub(super) fn author(&self) -> Author {
        Author {
            id: self.facts.id,
            model: self.facts.target.to_owned(),
            created: i64::try_from(self.facts.created).unwrap_or(i64::MAX),
        }
    }
}

#[derive(Debug)]
pub(super) enum Says<'a> {
    /// The reply in pieces, at least one.
    Text(Vec<&'a str>),
    Calls(Vec<Call<'a>>),
}

/// A stream in three parts, so that faults can be placed between them.
#[derive(Debug, Default)]
pub(super) struct Stream {
    pub(super) preamble: Vec<Piece>,
    pub(super) content: Vec<Piece>,
    pub(super) closing: Vec<Piece>,
}

/// What stands in a reply for the result of the tool.
const TOOL_RESULT: &str = "{tool_result}";

/// The plan for one tunnel request.
pub(super) fn tunnel(api: Api, script: &Script, body: &[u8], facts: &Facts<'_>) -> VecDeque<Step> {
    let Ok(asked) = serde_json::from_slice::<Asked>(body) else {
        return answer(
            StatusCode::BAD_REQUEST,
            error("the request's body is no JSON object", "invalid_request_error"),
        );
    };
    let faults = Faults::of(script, facts);
    if let Some(status) = faults.status {
        return refusal(script, status);
    }
    let result = asked.tool_result();
    let reply = match result {
        Some(result) => Cow::Owned(script.reply.replace(TOOL_RESULT, result)),
        None => Cow::Borrowed(&*script.reply),
    };
    let says = if script.tool_calls.is_empty() || result.is_some() {
        Says::Text(pieces(&reply, script.chunks))
    } else {
        Says::Calls(calls(&script.tool_calls))
    };
    let include_usage = asked.stream_options.as_ref().and_then(|o| o.include_usage) == Some(true);
    // A text that cannot be read has a length all the same.
    let prompt_bytes = serde_json::from_slice(body).map_or(body.len(), |PromptBytes(n)| n);
    let turned = Turned::new(facts, says, prompt_bytes, include_usage);
    if asked.stream == Some(true) {
        let stream = match api {
            Api::Chat => chat::stream(&turned),
            Api::Responses => responses::stream(&turned),
        };
        streamed(script, &faults, SSE, stream)
    } else {
        let whole = match api {
            Api::Chat => chat::whole(&turned),
            Api::Responses => responses::whole(&turned),
        };
        at_once(script, &faults, whole)
    }
}

/// The plan for one normalized run. It has no status to refuse with, so that it fails before its head.
pub(super) fn run(script: &Script, messages: &[Message], facts: &Facts<'_>) -> VecDeque<Step> {
    let faults = Faults::of(script, facts);
    if let Some(status) = faults.status {
        return refusal(script, status);
    }
    let says = Says::Text(pieces(&script.reply, script.chunks));
    let prompt_bytes = messages.iter().map(|m| m.content.len()).sum();
    let turned = Turned::new(facts, says, prompt_bytes, true);
    streamed(script, &faults, JSON_LINES, events::stream(&turned))
}

fn calls(script: &[ToolCallScript]) -> Vec<Call<'_>> {
    script
        .iter()
        .map(|ToolCallScript { name, arguments }| Call { name, arguments })
        .collect()
}

/// What an endpoint without a script says.
pub(super) fn not_served() -> VecDeque<Step> {
    answer(
        StatusCode::NOT_FOUND,
        error(
            "a scripted provider answers chat and responses only",
            "invalid_request_error",
        ),
    )
}

#[derive(Debug, Default, Clone, Copy)]
struct Faults {
    status: Option<StatusCode>,
    stall: Option<StallPoint>,
    cut_after: Option<u32>,
}

impl Faults {
    /// None once the attempts that misbehave are over.
    fn of(script: &Script, facts: &Facts<'_>) -> Self {
        if script.fail_first.is_some_and(|n| facts.attempt >= n) {
            return Self::default();
        }
        Self {
            status: script.status.and_then(|s| StatusCode::from_u16(s).ok()),
            stall: script.stall,
            cut_after: script.cut.map(|c| c.after_chunks),
        }
    }

    /// The fault that comes first among content chunks, and after how many.
    fn in_content(self) -> Option<(usize, Step)> {
        let stall = match self.stall {
            Some(StallPoint::AfterChunks(n)) => Some((n as usize, Step::Stall)),
            Some(StallPoint::BeforeHeaders | StallPoint::AfterHeaders | StallPoint::AfterPreamble) | None => {
                None
            }
        };
        let cut = self.cut_after.map(|n| {
            let text = "the provider hung up before its answer ended";
            (
                n as usize,
                Step::Fail(NodeError::new(FailureCode::ProviderCut, text)),
            )
        });
        match (stall, cut) {
            (Some(s), Some(c)) => Some(if c.0 < s.0 { c } else { s }),
            (s, c) => s.or(c),
        }
    }
}

/// Steps in the making.
struct Steps(VecDeque<Step>);

impl Steps {
    fn wait(&mut self, d: Duration) {
        if !d.is_zero() {
            self.0.push_back(Step::Wait(d));
        }
    }

    /// Chunks between which nothing happens leave as one.
    fn data(&mut self, piece: Piece) {
        if let Some(Step::Data(last)) = self.0.back_mut()
            && last.bytes.len() < 32 << 10
        {
            let mut both = Vec::with_capacity(last.bytes.len() + piece.bytes.len());
            both.extend_from_slice(&last.bytes);
            both.extend_from_slice(&piece.bytes);
            last.bytes = both.into();
            last.disposition = stronger(last.disposition, piece.disposition);
        } else {
            self.0.push_back(Step::Data(piece));
        }
    }

    fn head(
        &mut self,
        status: StatusCode,
        kind: &'static str,
        length: Option<usize>,
        mut headers: HeaderMap,
    ) {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        if let Some(length) = length {
            headers.insert(headers::CONTENT_LENGTH, HeaderValue::from(length));
        }
        self.0.push_back(Step::Head(Head { status, headers }));
    }
}

/// What pieces that leave as one say together. No piece is a terminal: that is the end of the body.
fn stronger(a: Disposition, b: Disposition) -> Disposition {
    match (a, b) {
        (Disposition::Progress, _) | (_, Disposition::Progress) => Disposition::Progress,
        (Disposition::None, other) => other,
        (Disposition::Start | Disposition::Terminal, _) => a,
    }
}

const JSON: &str = "application/json";
const JSON_LINES: &str = "application/jsonl";
const SSE: &str = "text/event-stream; charset=utf-8";

fn answer(status: StatusCode, body: Bytes) -> VecDeque<Step> {
    let mut steps = Steps(VecDeque::new());
    steps.head(status, JSON, Some(body.len()), HeaderMap::new());
    steps.data(Piece::tunnel(body));
    steps.0
}

fn refusal(script: &Script, status: StatusCode) -> VecDeque<Step> {
    let mut steps = Steps(VecDeque::new());
    steps.wait(script.first_delay.0);
    let kind = match status.as_u16() {
        429 => "rate_limit_error",
        400..=499 => "invalid_request_error",
        _ => "server_error",
    };
    let body = error("this answer is scripted", kind);
    let mut map = HeaderMap::new();
    if let Some(after) = script.retry_after {
        map.insert(
            RETRY_AFTER,
            HeaderValue::from(after.0.as_secs() + u64::from(after.0.subsec_nanos() > 0)),
        );
        if after.0.subsec_nanos() > 0
            && let Ok(ms) = u64::try_from(after.0.as_millis())
        {
            map.insert(
                http::HeaderName::from_static("retry-after-ms"),
                HeaderValue::from(ms),
            );
        }
    }
    steps.head(status, JSON, Some(body.len()), map);
    steps.data(Piece::tunnel(body));
    steps.0
}

fn streamed(script: &Script, faults: &Faults, kind: &'static str, stream: Stream) -> VecDeque<Step> {
    let mut steps = Steps(VecDeque::new());
    if faults.stall == Some(StallPoint::BeforeHeaders) {
        steps.0.push_back(Step::Stall);
        return steps.0;
    }
    steps.wait(script.first_delay.0);
    steps.head(StatusCode::OK, kind, None, HeaderMap::new());
    if faults.stall == Some(StallPoint::AfterHeaders) {
        steps.0.push_back(Step::Stall);
        return steps.0;
    }
    for event in stream.preamble {
        steps.data(event);
    }
    if faults.stall == Some(StallPoint::AfterPreamble) {
        steps.0.push_back(Step::Stall);
        return steps.0;
    }
    let chunks = stream.content.len();
    let fault = faults.in_content();
    for (i, event) in stream.content.into_iter().enumerate() {
        if let Some((after, fault)) = &fault
            && *after == i
        {
            steps.0.push_back(fault.clone());
            return steps.0;
        }
        if i > 0 {
            steps.wait(script.chunk_delay.0);
        }
        steps.data(event);
    }
    // A reply shorter than its fault still meets it: after its last chunk.
    if let Some((after, fault)) = fault
        && after >= chunks
    {
        steps.0.push_back(fault);
        return steps.0;
    }
    for event in stream.closing {
        steps.data(event);
    }
    steps.0
}

fn at_once(script: &Script, faults: &Faults, body: Bytes) -> VecDeque<Step> {
    let mut steps = Steps(VecDeque::new());
    if faults.stall == Some(StallPoint::BeforeHeaders) {
        steps.0.push_back(Step::Stall);
        return steps.0;
    }
    // The engine works as long as it would for a stream.
    let work = script
        .chunk_delay
        .0
        .saturating_mul(script.chunks.saturating_sub(1));
    steps.wait(script.first_delay.0.saturating_add(work));
    steps.head(StatusCode::OK, JSON, Some(body.len()), HeaderMap::new());
    if matches!(
        faults.stall,
        Some(StallPoint::AfterHeaders | StallPoint::AfterPreamble)
    ) {
        steps.0.push_back(Step::Stall);
        return steps.0;
    }
    match faults.in_content() {
        Some((after, fault)) => {
            // The same share of the body as of the stream's chunks, never all of it.
            let share = after.min(script.chunks as usize);
            let part = body.len() * share / (script.chunks as usize + 1);
            if part > 0 {
                steps.data(Piece::tunnel(body.slice(..part)));
            }
            steps.0.push_back(fault);
        }
        None => steps.data(Piece::tunnel(body)),
    }
    steps.0
}

/// Cuts a reply into about that many pieces of equal length, never inside a character; at least one piece.
pub(super) fn pieces(reply: &str, chunks: u32) -> Vec<&str> {
    let chars = reply.chars().count();
    let count = (chunks.max(1) as usize).min(chars.max(1));
    let mut bounds: Vec<usize> = reply.char_indices().map(|(i, _)| i).collect();
    bounds.push(reply.len());
    (0..count)
        .map(|i| &reply[bounds[chars * i / count]..bounds[chars * (i + 1) / count]])
        .collect()
}

fn error(message: &str, kind: &str) -> Bytes {
    Bytes::from(
        ErrorObject {
            message,
            kind,
            param: None,
            code: None,
        }
        .body(),
    )
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    pub(in super::super) fn facts(attempt: u32) -> Facts<'static> {
        Facts {
            target: "t",
            id: uuid::Uuid::from_u128(7),
            created: 1,
            attempt,
        }
    }

    pub(in super::super) fn turned(says: Says<'_>, include_usage: bool) -> Turned<'_> {
        Turned::new(&facts(0), says, 12, include_usage)
    }
}

#[cfg(test)]
mod tests;
