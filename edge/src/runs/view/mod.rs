//! Runs as people and clients see them (durable-api §3, §8 "Objects"): stored records in, JSON objects out. Pure; nothing here reads
//! a store or a clock.

mod activity;
mod approval;
mod event;
mod history;
mod outcome;
mod run;
mod step;
mod turn;
mod wait;
mod waiting;
mod words;

use bytes::Bytes;
use iop_durable::failure::Failure;
use iop_durable::ids::RunId;
use iop_durable::time::Timestamp;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use utoipa::ToSchema;

pub(crate) use activity::{ActivityObject, Called, is_shown};
pub(crate) use approval::{ApprovalObject, ApprovalStatus};
pub(crate) use event::{EventObject, Mentioned, Transient, TransientWord, mentioned};
pub(crate) use history::{CheckpointObject, HistoryObject};
pub(crate) use outcome::OutcomeObject;
pub(crate) use run::{Blocked, ChildObject, CorruptRun, Guarantee, RunObject};
pub(crate) use step::{StepKind, StepObject, current_step};
pub(crate) use turn::TurnObject;
pub(crate) use wait::WaitObject;
pub(crate) use waiting::{Open, WaitingOnObject, waiting_on};
pub(crate) use words::{DeliveryDecision, RunStatus, RunWaitingKind};

/// RFC 3339 in UTC with milliseconds.
pub(crate) fn time(at: Timestamp) -> String {
    at.to_string()
}

/// `sha256:…`.
pub(crate) fn digest(digest: &[u8; 32]) -> String {
    format!("sha256:{}", crate::config::hex(digest))
}

/// What a payload is shown as: JSON other than a text as it is, other UTF-8 as a text, other bytes as
/// `{"encoding":"base64","data":…}`.
pub(crate) fn shown(bytes: &Bytes) -> Box<RawValue> {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return raw(&Encoded {
            encoding: "base64",
            data: base64(bytes),
        });
    };
    match json(text) {
        Some(value) if !value.get().starts_with('"') => value.to_owned(),
        Some(_) | None => raw(&text),
    }
}

/// Levels of JSON from elsewhere that are shown as JSON. Readers give up at 128 and more, and what they give up is the whole answer
/// that it stands in.
const LEVELS: usize = 100;

/// A text that a reader of any answer can read as JSON.
fn json(text: &str) -> Option<&RawValue> {
    let value: &RawValue = serde_json::from_str(text).ok()?;
    let (mut levels, mut quoted, mut escaped) = (0_usize, false, false);
    for byte in value.get().bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'[' | b'{' if !quoted => {
                levels += 1;
                if levels > LEVELS {
                    return None;
                }
            }
            b']' | b'}' if !quoted => levels = levels.saturating_sub(1),
            _ => {}
        }
    }
    Some(value)
}

/// JSON that this program wrote, as it is; `null` when it is none.
pub(crate) fn written(bytes: &[u8]) -> Box<RawValue> {
    serde_json::from_slice(bytes).unwrap_or_else(|_| raw(&()))
}

fn raw<T: Serialize>(value: &T) -> Box<RawValue> {
    // Values of our own: without maps that have other keys than texts.
    to_raw_value(value).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

#[derive(Serialize)]
struct Encoded {
    encoding: &'static str,
    data: String,
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group =
            chunk.iter().fold(0_u32, |group, b| group << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
        for n in 0..4 {
            let letter = LETTERS.get((group >> (18 - 6 * n)) as usize & 63);
            out.push(
                letter
                    .filter(|_| n <= chunk.len())
                    .map_or('=', |b| char::from(*b)),
            );
        }
    }
    out
}

/// What a path segment may hold as it is.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// The path of a run.
pub(crate) fn url_of(run: &RunId) -> String {
    format!("/api/v1/runs/{}", utf8_percent_encode(run.as_str(), SEGMENT))
}

/// Why a step or a call failed.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub(crate) struct FailureObject {
    #[schema(value_type = words::ErrorKind)]
    kind: &'static str,
    code: String,
    message: String,
    retryable: bool,
}

impl From<&Failure> for FailureObject {
    fn from(failure: &Failure) -> Self {
        Self {
            kind: failure.kind.as_str(),
            code: failure.code.clone(),
            message: failure.message.clone(),
            retryable: failure.retryable,
        }
    }
}

#[cfg(test)]
mod tests;
