//! What one SSE event of an OpenAI stream means to the gate: content, terminal, error, usage.
//!
//! Two readers. `classify` is exact and structured, for the few events before commit. `scan_committed` is for every
//! event after it: a few byte searches rule out that the event matters, and only a hit is parsed. Neither builds a
//! tree, and text that merely contains `"usage"` or `[DONE]` fools neither: inside a JSON string quotes are escaped.

mod make;
mod parse;

use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::{self, Finder};

pub use make::{chat_error_event, responses_created_event, responses_failed_event};
pub use parse::{
    Identity, error_in_body, error_of_failed, leading_response_id, response_id, sequence_number,
};

use super::usage::Usage;
use parse::{ChatChunk, ResponsesEvent, other_committed};

/// Which API's events a stream carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    Chat,
    Completions,
    Responses,
    /// Images and audio: every data event is content.
    Other,
}

/// What an event is before commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventKind {
    /// Role chunks, `response.created`: held, no commit (G52).
    Preamble,
    /// Text, reasoning, refusal, tool call, audio.
    Content,
    /// `finish_reason` without content.
    Finish,
    /// A chat chunk with usage and no choice.
    UsageOnly,
    Terminal(TerminalKind),
    /// The provider's failure inside a 200 (G58).
    Error(InBandError),
    /// No event of this API.
    Malformed,
    /// Valid, and says nothing that matters here.
    Ignored,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TerminalKind {
    /// `[DONE]`.
    Done,
    /// `response.completed`.
    Completed,
    /// `response.failed`.
    Failed,
    /// `response.incomplete`.
    Incomplete,
}

/// A provider's error object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InBandError {
    /// The HTTP status it stands for, where it says so or its words do.
    pub status: Option<u16>,
    /// The object as the provider wrote it.
    pub raw: Bytes,
}

/// What of an event matters after commit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CommittedFacts {
    pub terminal: Option<TerminalKind>,
    /// Choices that were given their `finish_reason`.
    pub finishes: u32,
    pub usage: Option<Usage>,
    /// A chat chunk with usage and no choice.
    pub usage_only: bool,
    /// The provider's failure.
    pub error: bool,
}

/// Reads one event exactly.
pub fn classify(dialect: Dialect, name: Option<&[u8]>, data: &[u8]) -> EventKind {
    if is_done(data) {
        return EventKind::Terminal(TerminalKind::Done);
    }
    // An empty `data:` is a heartbeat (G20).
    if data.trim_ascii().is_empty() {
        return EventKind::Ignored;
    }
    match dialect {
        Dialect::Chat | Dialect::Completions => match ChatChunk::parse(data) {
            Some(chunk) => chunk.kind(data),
            None => EventKind::Malformed,
        },
        Dialect::Responses => match ResponsesEvent::parse(data) {
            Some(event) => event.kind(name, data),
            None => EventKind::Malformed,
        },
        Dialect::Other => match error_in_body(Dialect::Other, data) {
            Some(error) => EventKind::Error(error),
            None => EventKind::Content,
        },
    }
}

static FINISH_REASON: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"finish_reason\""));
static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"error\""));
static RESPONSE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"response."));

/// Reads one event for what matters after commit.
pub fn scan_committed(dialect: Dialect, name: Option<&[u8]>, data: &[u8]) -> CommittedFacts {
    if is_done(data) {
        return CommittedFacts {
            terminal: Some(TerminalKind::Done),
            ..CommittedFacts::default()
        };
    }
    match dialect {
        Dialect::Chat | Dialect::Completions => {
            if member_set(&FINISH_REASON, data) || member_set(&USAGE, data) || mentions_error(data) {
                ChatChunk::parse(data).map(|c| c.committed()).unwrap_or_default()
            } else {
                CommittedFacts::default()
            }
        }
        Dialect::Responses => {
            if name.is_some_and(names_an_end) || may_end(data) || mentions_error(data) {
                ResponsesEvent::parse(data)
                    .map(|e| e.committed(name))
                    .unwrap_or_default()
            } else {
                CommittedFacts::default()
            }
        }
        Dialect::Other => {
            if member_set(&USAGE, data) || mentions_error(data) {
                other_committed(data)
            } else {
                CommittedFacts::default()
            }
        }
    }
}

fn is_done(data: &[u8]) -> bool {
    data.first() == Some(&b'[') && data.trim_ascii_end() == b"[DONE]"
}

/// Whether a member of that name may be there, at any depth, with a value other than `null` or `""`.
///
/// Where such a name is text, its quotes are escaped; only a text that ends in it gives a false alarm.
fn member_set(finder: &Finder<'_>, data: &[u8]) -> bool {
    any_after(finder, data, |rest| {
        let value = rest.strip_prefix(b":").map(<[u8]>::trim_ascii_start);
        value.is_some_and(|v| !v.starts_with(b"null") && !v.starts_with(b"\"\""))
    })
}

/// Whether there may be an `error` member that says something, or an `error` as `type` or `object`.
fn mentions_error(data: &[u8]) -> bool {
    any_after(&ERROR, data, |rest| match rest.strip_prefix(b":") {
        Some(value) => !value.trim_ascii_start().starts_with(b"null"),
        None => true,
    })
}

/// Whether what follows some occurrence of the finder's text is as wanted.
#[inline]
fn any_after(finder: &Finder<'_>, data: &[u8], wanted: impl Fn(&[u8]) -> bool) -> bool {
    let mut rest = data;
    while let Some(i) = finder.find(rest) {
        rest = &rest[i + finder.needle().len()..];
        if wanted(rest.trim_ascii_start()) {
            return true;
        }
    }
    false
}

/// Whether an event of this name ends a Responses stream, should its data have no `type`.
fn names_an_end(name: &[u8]) -> bool {
    matches!(
        name,
        b"error" | b"response.completed" | b"response.failed" | b"response.incomplete"
    )
}

/// Whether the type of a terminal Responses event is written anywhere in it.
fn may_end(data: &[u8]) -> bool {
    any_after(&RESPONSE, data, |rest| {
        rest.starts_with(b"completed\"") || rest.starts_with(b"failed\"") || rest.starts_with(b"incomplete\"")
    })
}

/// Whether a body could hold an `error` member at all.
fn may_hold_error(body: &[u8]) -> bool {
    memmem::find(body, b"\"error\"").is_some()
}

#[cfg(test)]
mod tests;
