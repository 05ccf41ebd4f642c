//! What a scripted target does, step by step: an answer in its API's form, with the script's faults in it. Pure.

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
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Input {
    Items(Vec<Turn>),
    Text(serde::de::IgnoredAny),
}

impl Asked {
    /// A tool's result is there, so the model speaks instead of calling again.
    fn has_tool_result(&self) -> bool {
        let last_message = self.messages.as_ref().and_then(|m| m.last());
        let last_item = match &self.input {
            Some(Input::Items(items)) => items.last(),
            Some(Input::Text(_)) | None => None,
        };
        last_message.is_some_and(|m| m.role.as_deref() == Some("tool"))
            || last_item.is_some_and(|i| i.kind.as_deref().is_some_and(|k| k.ends_with("_call_output")))
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
    let says = if script.tool_calls.is_empty() || asked.has_tool_result() {
        Says::Text(pieces(&script.reply, script.chunks))
    } else {
        Says::Calls(calls(&script.tool_calls))
    };
    let include_usage = asked.stream_options.and_then(|o| o.include_usage) == Some(true);
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
    if faults.status.is_some() {
        let mut steps = Steps(VecDeque::new());
        steps.wait(script.first_delay.0);
        let error = NodeError::new(FailureCode::ProviderUnavailable, "this failure is scripted");
        steps.0.push_back(Step::Fail(error));
        return steps.0;
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
mod tests {
    use iop_shared::config::Period;
    use iop_shared::execution::RuntimeEventKind;
    use iop_shared::wire::event::RunEvent;

    use super::testing::facts;
    use super::*;

    fn script(toml: &str) -> Script {
        toml::from_str(toml).unwrap()
    }

    fn plan(script: &Script, body: &str) -> Vec<Step> {
        tunnel(Api::Chat, script, body.as_bytes(), &facts(0)).into()
    }

    fn normalized(script: &Script, attempt: u32) -> Vec<Step> {
        let messages = [Message {
            role: "user".into(),
            content: "hello".into(),
        }];
        run(script, &messages, &facts(attempt)).into()
    }

    fn text(steps: &[Step]) -> String {
        let mut all = Vec::new();
        for step in steps {
            if let Step::Data(data) = step {
                all.extend_from_slice(&data.bytes);
            }
        }
        String::from_utf8(all).unwrap()
    }

    const STREAM: &str = r#"{"stream":true}"#;

    #[test]
    fn a_reply_is_cut_at_characters_into_equal_pieces() {
        assert_eq!(pieces("abcdef", 4), ["a", "bc", "d", "ef"]);
        assert_eq!(pieces("añ🌍", 3), ["a", "ñ", "🌍"]);
        assert_eq!(pieces("ab", 20), ["a", "b"]);
        assert_eq!(pieces("", 20), [""]);
        assert_eq!(pieces("abc", 0), ["abc"]);
    }

    #[test]
    fn stalls_and_cuts_stand_where_the_script_says() {
        let kinds = |steps: &[Step]| {
            let kind = |s: &Step| match s {
                Step::Wait(_) => 'w',
                Step::Head(_) => 'h',
                Step::Data(_) => 'd',
                Step::Stall => 's',
                Step::Fail(_) => 'c',
            };
            steps.iter().map(kind).collect::<String>()
        };
        for (toml, streamed, whole) in [
            ("", "hd", "hd"),
            ("first_delay = \"1s\"", "whd", "whd"),
            ("stall = \"before_headers\"", "s", "s"),
            ("stall = \"after_headers\"", "hs", "hs"),
            ("stall = \"after_preamble\"", "hds", "hs"),
            ("stall = { after_chunks = 3 }", "hds", "hds"),
            ("cut = { after_chunks = 0 }", "hdc", "hc"),
            ("cut = { after_chunks = 99 }", "hdc", "hdc"),
            (
                "cut = { after_chunks = 2 }\nstall = { after_chunks = 1 }",
                "hds",
                "hds",
            ),
            (
                "reply = \"abc\"\nchunks = 3\nchunk_delay = \"1s\"",
                "hdwdwd",
                "whd",
            ),
        ] {
            assert_eq!(kinds(&plan(&script(toml), STREAM)), streamed, "{toml}");
            assert_eq!(kinds(&plan(&script(toml), "{}")), whole, "{toml}");
            assert_eq!(kinds(&normalized(&script(toml), 0)), streamed, "{toml}");
        }
    }

    #[test]
    fn exactly_the_chunks_before_a_fault_are_sent() {
        let s = script("reply = \"abcdef\"\nchunks = 6\ncut = { after_chunks = 3 }");
        let said = text(&plan(&s, STREAM));
        assert_eq!(said.matches("\"content\":\"a\"").count(), 1);
        assert!(
            said.contains("\"content\":\"c\"") && !said.contains("\"content\":\"d\""),
            "{said}"
        );
        assert!(!said.contains("[DONE]"));
    }

    #[test]
    fn the_first_attempts_fail_and_the_next_do_not() {
        let s = script("status = 503\nretry_after = \"1500ms\"\nfail_first = 1");
        let Step::Head(head) = &tunnel(Api::Chat, &s, b"{}", &facts(0))[0] else {
            panic!("no head")
        };
        assert_eq!(
            (head.status.as_u16(), &head.headers["retry-after"]),
            (503, &HeaderValue::from(2))
        );
        assert_eq!(head.headers["retry-after-ms"], "1500");
        let Step::Head(head) = &tunnel(Api::Chat, &s, b"{}", &facts(1))[0] else {
            panic!("no head")
        };
        assert_eq!(head.status, 200);
    }

    #[test]
    fn the_length_told_is_the_length_sent() {
        for body in ["{}", "no json"] {
            let steps = plan(&Script::default(), body);
            let Step::Head(head) = &steps[0] else {
                panic!("no head")
            };
            assert_eq!(
                head.headers[headers::CONTENT_LENGTH],
                text(&steps).len().to_string()
            );
        }
    }

    #[test]
    fn a_tool_result_ends_the_calls() {
        let s = Script {
            tool_calls: vec![toml::from_str("name = \"f\"").unwrap()],
            chunk_delay: Period::secs(0),
            ..Script::default()
        };
        assert!(text(&plan(&s, r#"{"messages":[{"role":"user"}]}"#)).contains("\"tool_calls\""));
        assert!(
            !text(&plan(&s, r#"{"messages":[{"role":"user"},{"role":"tool"}]}"#)).contains("\"tool_calls\"")
        );
        let items = br#"{"input":[{"type":"function_call_output","output":"1"}]}"#;
        let steps: Vec<_> = tunnel(Api::Responses, &s, items, &facts(0)).into();
        assert!(!text(&steps).contains("function_call"));
        let steps: Vec<_> = tunnel(Api::Responses, &s, br#"{"input":"hi"}"#, &facts(0)).into();
        assert!(text(&steps).contains("function_call"));
    }

    #[test]
    fn a_run_tells_its_text_and_usage_line_by_line_and_no_terminal() {
        let steps = normalized(&script("reply = \"abc\"\nchunks = 3"), 0);
        let Step::Head(head) = &steps[0] else {
            panic!("no head")
        };
        assert_eq!(
            (head.status.as_u16(), &head.headers[CONTENT_TYPE]),
            (200, &HeaderValue::from_static("application/jsonl"))
        );
        assert!(!head.headers.contains_key(headers::CONTENT_LENGTH));
        let events: Vec<RunEvent> = text(&steps)
            .lines()
            .map(|l| RunEvent::parse(l.as_bytes()).unwrap())
            .collect();
        let mut want = vec![RunEvent::new(RuntimeEventKind::Start)];
        want.extend(["a", "b", "c"].map(RunEvent::delta));
        want.push(RunEvent::usage(Usage {
            input: 2,
            output: 3,
            ..Usage::default()
        }));
        assert_eq!(events, want);
    }

    #[test]
    fn what_leaves_together_says_what_its_strongest_part_says() {
        let dispositions = |toml: &str| -> Vec<Disposition> {
            let pieces = normalized(&script(toml), 0);
            let pieces = pieces.iter().filter_map(|s| match s {
                Step::Data(piece) => Some(piece.disposition),
                Step::Wait(_) | Step::Head(_) | Step::Stall | Step::Fail(_) => None,
            });
            pieces.collect()
        };
        assert_eq!(dispositions("stall = \"after_preamble\""), [Disposition::Start]);
        assert_eq!(
            dispositions("stall = { after_chunks = 1 }"),
            [Disposition::Progress]
        );
        // An empty delta is no progress; the usage behind it is.
        assert_eq!(
            dispositions("reply = \"\"\nstall = { after_chunks = 1 }"),
            [Disposition::Start]
        );
        assert_eq!(dispositions("reply = \"\""), [Disposition::Progress]);
        assert_eq!(
            dispositions("reply = \"ab\"\nchunks = 2\nchunk_delay = \"1s\""),
            [Disposition::Progress; 2]
        );
    }

    #[test]
    fn a_run_that_is_refused_fails_before_its_head_on_its_first_attempts() {
        let s = script("status = 503\nfirst_delay = \"1s\"\nfail_first = 1");
        let steps = normalized(&s, 0);
        let [Step::Wait(_), Step::Fail(error)] = &steps[..] else {
            panic!("{steps:?}")
        };
        assert_eq!(error.code, FailureCode::ProviderUnavailable);
        assert!(normalized(&s, 1).iter().any(|s| matches!(s, Step::Head(_))));
    }

    #[test]
    fn a_conversation_costs_the_same_tokens_whichever_way_it_takes() {
        let s = script("reply = \"abc\"\nchunks = 3");
        let told: Vec<RunEvent> = text(&normalized(&s, 0))
            .lines()
            .map(|l| RunEvent::parse(l.as_bytes()).unwrap())
            .collect();
        let usage = told.iter().find_map(|e| e.usage);
        for (api, body) in [
            (Api::Chat, r#"{"messages":[{"role":"user","content":"hello"}]}"#),
            (Api::Responses, r#"{"input":"hello"}"#),
        ] {
            let steps: Vec<_> = tunnel(api, &s, body.as_bytes(), &facts(0)).into();
            let whole = text(&steps);
            assert_eq!(
                iop_shared::openai::usage::usage_from_body(whole.as_bytes()),
                usage
            );
        }
    }
}
