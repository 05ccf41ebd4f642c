//! A model's answer put together from its pieces (D33, S16). Pure: texts of events in, pieces to show out.
//!
//! Reads chat completion chunks and whole chat completions. Knows no socket and no end of a connection: whether what was
//! put together is the whole answer is for `stream` to say.

use std::collections::BTreeMap;

use iop_shared::openai::event::{Dialect, EventKind, InBandError, classify, error_in_body};
use iop_shared::openai::usage::Usage;
use memchr::memmem;
use serde::{Deserialize, Serialize};

use super::wire::{Choice, Chunk, Message, Piece, content, said, text, written};
use crate::agents::state::tokens;

/// Longest id of a tool call, in bytes: its ordinal and the rest of its activity's key need room beside it.
const ID_MAX: usize = 240;
/// What a tool call weighs besides its texts, in bytes.
const CALL_WEIGHT: usize = 64;

/// What a model said in one turn.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TurnAnswer {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) refusal: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning: Option<String>,
    /// In the order of their indexes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) finish_reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none", with = "tokens")]
    pub(crate) usage: Option<Usage>,
    /// What the provider calls the model that answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) model: Option<String>,
    /// Dispatches to providers that the gate made for it.
    #[serde(default)]
    pub(crate) attempts: u32,
}

/// A tool call as the model wrote it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ToolCall {
    /// From 1 to 240 bytes, without U+0000.
    pub(crate) id: String,
    pub(crate) name: String,
    /// JSON text, not checked.
    pub(crate) arguments: String,
}

/// A piece of an answer under way, for who watches. Nothing of it counts before the whole answer is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Delta {
    Text(String),
    Refusal(String),
    Reasoning(String),
    Call {
        /// Which call of the turn.
        index: u32,
        /// With the piece that first says it.
        id: Option<String>,
        name: Option<String>,
        arguments: String,
    },
}

/// Why pieces are no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Broken {
    /// The provider or the gate says why, in the stream.
    Said(InBandError),
    /// Not what a chat completion looks like.
    Malformed,
    /// It went on past the limit, in bytes.
    TooLarge(usize),
    /// It ended before it was complete.
    Cut,
    /// The id of a tool call cannot be part of a key.
    BadId,
}

/// What an event was to the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Took {
    More,
    /// `[DONE]`.
    Done,
}

/// An answer in the making.
pub(super) struct Assembly {
    /// Bytes of all texts together.
    max: usize,
    held: usize,
    content: String,
    refusal: String,
    reasoning: String,
    calls: BTreeMap<u32, Building>,
    /// Indexes that a provider uses for several calls, and the last of them.
    moved: BTreeMap<u32, u32>,
    finish_reason: Option<String>,
    usage: Option<Usage>,
    model: Option<String>,
}

#[derive(Default)]
struct Building {
    id: Option<String>,
    name: String,
    arguments: String,
}

impl Assembly {
    /// `max`: bytes of all texts together.
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            held: 0,
            content: String::new(),
            refusal: String::new(),
            reasoning: String::new(),
            calls: BTreeMap::new(),
            moved: BTreeMap::new(),
            finish_reason: None,
            usage: None,
            model: None,
        }
    }

    /// The model has said why it stopped.
    pub(super) fn is_finished(&self) -> bool {
        self.finish_reason.is_some()
    }

    /// Takes the data of one event.
    pub(super) fn event(&mut self, data: &str, tell: &dyn Fn(Delta)) -> Result<Took, Broken> {
        let data = data.trim();
        if data.is_empty() {
            // A heartbeat (G20).
            return Ok(Took::More);
        }
        if data == "[DONE]" {
            return Ok(Took::Done);
        }
        if memmem::find(data.as_bytes(), b"\"error\"").is_some()
            && let EventKind::Error(error) = classify(Dialect::Chat, None, data.as_bytes())
        {
            return Err(Broken::Said(error));
        }
        let chunk = Chunk::read(data.as_bytes())?;
        self.facts(&chunk);
        for choice in chunk.choices.into_iter().flatten().filter(Choice::is_first) {
            self.choice(choice, false, tell)?;
        }
        Ok(Took::More)
    }

    /// Takes a whole chat completion.
    pub(super) fn whole(&mut self, body: &[u8], tell: &dyn Fn(Delta)) -> Result<(), Broken> {
        if let Some(error) = error_in_body(Dialect::Chat, body) {
            return Err(Broken::Said(error));
        }
        let chunk = Chunk::read(body)?;
        self.facts(&chunk);
        let choices = chunk.choices.unwrap_or_default();
        let first = choices.into_iter().find(|c| c.is_first() && c.message.is_some());
        self.choice(first.ok_or(Broken::Malformed)?, true, tell)
    }

    /// The answer, of which nothing more comes.
    pub(super) fn finish(self, attempts: u32) -> Result<TurnAnswer, Broken> {
        let some = |text: String| (!text.is_empty()).then_some(text);
        let mut tool_calls = Vec::with_capacity(self.calls.len());
        for (index, call) in self.calls {
            // Some providers write an empty one, and some none.
            let id = call.id.filter(|id| !id.is_empty());
            let id = id.unwrap_or_else(|| format!("call_{index}"));
            if id.len() > ID_MAX || id.contains('\0') {
                return Err(Broken::BadId);
            }
            tool_calls.push(ToolCall {
                id,
                name: call.name,
                arguments: call.arguments,
            });
        }
        Ok(TurnAnswer {
            content: some(self.content),
            refusal: some(self.refusal),
            reasoning: some(self.reasoning),
            tool_calls,
            finish_reason: self.finish_reason,
            usage: self.usage,
            model: self.model,
            attempts,
        })
    }

    /// Usage counts from the start of the answer: the last word is the sum.
    fn facts(&mut self, chunk: &Chunk<'_>) {
        if let Some(usage) = chunk.usage.and_then(|u| Usage::from_json(u.get().as_bytes())) {
            self.usage = Some(usage);
        }
        if self.model.is_none() {
            self.model = chunk
                .model
                .and_then(|m| text(m).ok().flatten())
                .filter(|m| !m.is_empty());
        }
    }

    fn choice(&mut self, choice: Choice<'_>, whole: bool, tell: &dyn Fn(Delta)) -> Result<(), Broken> {
        if let Some(message) = if whole { choice.message } else { choice.delta } {
            self.message(message, whole, tell)?;
        }
        // Some providers write `""` in every chunk but the last.
        if let Some(reason) = said(choice.finish_reason)? {
            self.grow(reason.len())?;
            self.finish_reason = Some(reason);
        }
        Ok(())
    }

    fn message(&mut self, message: Message<'_>, whole: bool, tell: &dyn Fn(Delta)) -> Result<(), Broken> {
        // Some providers say the same under both names.
        let reasoning = said(message.reasoning_content)?.or(said(message.reasoning)?);
        if let Some(text) = reasoning {
            self.grow(text.len())?;
            self.reasoning.push_str(&text);
            tell(Delta::Reasoning(text));
        }
        if let Some(text) = content(message.content)? {
            self.grow(text.len())?;
            self.content.push_str(&text);
            tell(Delta::Text(text));
        }
        if let Some(text) = said(message.refusal)? {
            self.grow(text.len())?;
            self.refusal.push_str(&text);
            tell(Delta::Refusal(text));
        }
        for (place, piece) in message.tool_calls.into_iter().flatten().enumerate() {
            // A whole answer lists its calls; only pieces say which call they belong to.
            let place = if whole { u32::try_from(place).ok() } else { None };
            self.call(piece, place, tell)?;
        }
        Ok(())
    }

    fn call(&mut self, piece: Piece<'_>, place: Option<u32>, tell: &dyn Fn(Delta)) -> Result<(), Broken> {
        let id = piece.id.map(text).transpose()?.flatten();
        let (mut name, mut arguments) = (None, None);
        if let Some(function) = piece.function {
            name = said(function.name)?;
            arguments = written(function.arguments)?;
        }
        let index = self.index_of(place.or(piece.index), id.as_deref(), name.as_deref())?;
        let bytes = id.as_ref().map_or(0, String::len)
            + name.as_ref().map_or(0, String::len)
            + arguments.as_ref().map_or(0, String::len);
        let weight = if self.calls.contains_key(&index) {
            0
        } else {
            CALL_WEIGHT
        };
        self.grow(bytes + weight)?;
        let call = self.calls.entry(index).or_default();
        // Id and name are said once, and by some providers with every piece.
        let id = id.filter(|_| call.id.as_ref().is_none_or(String::is_empty));
        if id.is_some() {
            call.id.clone_from(&id);
        }
        let name = name.filter(|_| call.name.is_empty());
        if let Some(name) = &name {
            call.name.clone_from(name);
        }
        let arguments = arguments.unwrap_or_default();
        call.arguments.push_str(&arguments);
        let id = id.filter(|id| !id.is_empty());
        if id.is_some() || name.is_some() || !arguments.is_empty() {
            tell(Delta::Call {
                index,
                id,
                name,
                arguments,
            });
        }
        Ok(())
    }

    /// Which call a piece belongs to: that of its index. Providers that give every call the same index, or none, begin a new
    /// one with a new id; without ids, with a new name.
    fn index_of(&mut self, said: Option<u32>, id: Option<&str>, name: Option<&str>) -> Result<u32, Broken> {
        let id = id.filter(|id| !id.is_empty());
        let Some((&last, newest)) = self.calls.last_key_value() else {
            return Ok(said.unwrap_or(0));
        };
        let other = |known: &Building| {
            let known = known.id.as_deref().filter(|id| !id.is_empty());
            id.is_some() && known.is_some() && known != id
        };
        let at = said.map(|index| self.moved.get(&index).copied().unwrap_or(index));
        let begins = match at {
            Some(at) => self.calls.get(&at).is_some_and(other),
            None if id.is_some() => newest.id.as_deref() != id,
            None => name.is_some() && !newest.name.is_empty(),
        };
        if !begins {
            return Ok(at.unwrap_or(last));
        }
        let next = last.checked_add(1).ok_or(Broken::Malformed)?;
        if let Some(index) = said {
            self.moved.insert(index, next);
        }
        Ok(next)
    }

    fn grow(&mut self, bytes: usize) -> Result<(), Broken> {
        self.held = self.held.saturating_add(bytes);
        if self.held > self.max {
            return Err(Broken::TooLarge(self.max));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
