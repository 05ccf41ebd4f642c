//! An answer written as OpenAI's API writes it, event by event or whole, for who has the answer in another form. Pure.
//!
//! Writes one choice or one kind of output, in the order in which it is called: begin, pieces, end; a response that is
//! kept may have several items. What is said, and when, is the caller's business.

mod chat;
mod kept;
mod responses;

use bytes::Bytes;
use serde::Serialize;

pub use chat::ChatAnswer;
pub use kept::{Approval, Close, Item, Kept};
pub use responses::ResponsesAnswer;
pub(super) use responses::{Status, response};

use crate::label_enum;

/// Who an answer is by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Author {
    /// Every id of the answer is made of it.
    pub id: uuid::Uuid,
    pub model: String,
    /// Seconds since 1970.
    pub created: i64,
}

/// A tool call of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call<'a> {
    pub name: &'a str,
    /// JSON text.
    pub arguments: &'a str,
}

/// What a whole answer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said<'a> {
    Text(&'a str),
    Calls(&'a [Call<'a>]),
}

label_enum! {
    /// Chat's `finish_reason`.
    pub enum Finish {
        Stop => "stop",
        ToolCalls => "tool_calls",
    }
}

impl Said<'_> {
    const fn finish(&self) -> Finish {
        match self {
            Said::Text(_) => Finish::Stop,
            Said::Calls(_) => Finish::ToolCalls,
        }
    }
}

/// JSON of what always serializes: texts, numbers, lists and objects of them.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// Several events as one piece.
fn joined(events: &[String]) -> Bytes {
    Bytes::from(events.concat())
}

#[cfg(test)]
mod tests;
