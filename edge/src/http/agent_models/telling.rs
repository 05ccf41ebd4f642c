//! What of a run's events and pieces is an answer. Pure: records in, parts of an answer out.
//!
//! Pieces of a turn are shown as they come, and none of them counts before the turn is stored: what was shown of an attempt that
//! was given up, or with a gap, is broken off, and the stored text is told whole.

use iop_durable::record::{EventName, EventRecord, Outcome, WaitingKind};
use iop_shared::openai::usage::Usage;
use serde::Deserialize;

use crate::agents::journal::TURN_COMPLETED;
use crate::agents::state::tokens;
use crate::agents::turn::TurnAnswer;

/// A part of an answer. Messages follow each other: one begins when the one before has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    Begins,
    Says(String),
    /// What the message has said so far, all of which counts for nothing.
    Broken(String),
    /// All that the message has said.
    Ends(String),
}

/// What an event is to an answer.
#[derive(Debug, Clone)]
pub(super) enum Heard {
    Nothing,
    /// A turn is stored; its text comes from the journal.
    Turn(u64),
    /// Nothing happens until somebody says something.
    Pause(Vec<On>),
    Over(Box<Outcome>),
}

/// One thing that a run waits for.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct On {
    pub(super) kind: WaitingKind,
    /// A wait, an activity, or empty.
    pub(super) id: String,
}

#[derive(Deserialize)]
struct Waiting {
    waiting_on: Vec<On>,
}

#[derive(Deserialize)]
struct Terminal {
    outcome: Outcome,
}

#[derive(Deserialize)]
struct Completed {
    turn: u64,
    #[serde(default, with = "tokens")]
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Piece {
    turn: u64,
    #[serde(default)]
    text: Option<String>,
    /// Bytes of the turn's text before this piece.
    #[serde(default)]
    offset: usize,
}

/// A message under way.
#[derive(Debug)]
struct Open {
    turn: u64,
    text: String,
    /// A piece was missed: the rest waits for the stored text.
    torn: bool,
}

/// One answer in the making.
#[derive(Debug, Default)]
pub(super) struct Telling {
    open: Option<Open>,
    /// The last turn that is stored.
    stored: u64,
    /// Its text was not there.
    gone: bool,
    usage: Option<Usage>,
}

/// Whether a run that waits for these rests until somebody says something.
fn rests(on: &[On]) -> bool {
    !on.is_empty()
        && on.iter().all(|on| match on.kind {
            WaitingKind::Approval
            | WaitingKind::Input
            | WaitingKind::Reconciliation
            | WaitingKind::Resume
            | WaitingKind::Handoff => true,
            WaitingKind::Event | WaitingKind::Timer | WaitingKind::Retry | WaitingKind::Children => false,
        })
}

/// What a pause waits for, when this event is one that an answer ends with.
pub(super) fn pause(event: &EventRecord) -> Option<Vec<On>> {
    match EventName::parse(&event.name) {
        Some(EventName::Waiting | EventName::Ambiguous) => {
            let waiting: Waiting = serde_json::from_slice(&event.data).ok()?;
            Some(waiting.waiting_on).filter(|on| rests(on))
        }
        Some(_) | None => None,
    }
}

impl Telling {
    /// Tokens of the turns so far.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Takes the data of `run.turn.delta`.
    pub(super) fn piece(&mut self, data: &[u8]) -> Vec<Part> {
        let Ok(Piece {
            turn,
            text: Some(text),
            offset,
        }) = serde_json::from_slice(data)
        else {
            return Vec::new();
        };
        if turn <= self.stored || text.is_empty() {
            return Vec::new();
        }
        let mut parts = Vec::new();
        if offset == 0 {
            // The first piece of an attempt; what an earlier one said counts for nothing.
            if let Some(open) = self.open.take() {
                parts.push(Part::Broken(open.text));
            }
            parts.extend([Part::Begins, Part::Says(text.clone())]);
            self.open = Some(Open {
                turn,
                text,
                torn: false,
            });
            return parts;
        }
        if let Some(open) = self.open.as_mut().filter(|open| open.turn == turn && !open.torn) {
            if open.text.len() == offset {
                open.text.push_str(&text);
                parts.push(Part::Says(text));
            } else {
                open.torn = true;
            }
        }
        parts
    }

    pub(super) fn event(&mut self, event: &EventRecord) -> Heard {
        if event.terminal {
            return match serde_json::from_slice(&event.data) {
                Ok(Terminal { outcome }) => Heard::Over(Box::new(outcome)),
                Err(_) => Heard::Nothing,
            };
        }
        if event.name == TURN_COMPLETED {
            let Ok(completed) = serde_json::from_slice::<Completed>(&event.data) else {
                return Heard::Nothing;
            };
            if let Some(usage) = completed.usage {
                let sum = self.usage.get_or_insert_default();
                sum.input += usage.input;
                sum.output += usage.output;
                sum.cached += usage.cached;
                sum.reasoning += usage.reasoning;
            }
            return Heard::Turn(completed.turn);
        }
        pause(event).map_or(Heard::Nothing, Heard::Pause)
    }

    /// Takes a stored turn.
    pub(super) fn turn(&mut self, turn: u64, answer: TurnAnswer) -> Vec<Part> {
        self.stored = turn;
        self.gone = false;
        let text = answer.content.or(answer.refusal).unwrap_or_default();
        let mut parts = Vec::new();
        if let Some(open) = self.open.take() {
            if let Some(rest) = text.strip_prefix(open.text.as_str())
                && open.turn == turn
            {
                if !rest.is_empty() {
                    parts.push(Part::Says(rest.to_owned()));
                }
                parts.push(Part::Ends(text));
                return parts;
            }
            parts.push(Part::Broken(open.text));
        }
        if !text.is_empty() {
            parts.extend([Part::Begins, Part::Says(text.clone()), Part::Ends(text)]);
        }
        parts
    }

    /// A stored turn that is not there any more.
    pub(super) fn gone(&mut self, turn: u64) {
        self.stored = turn;
        self.gone = true;
    }

    /// The answer ends; a message that is not stored by then never is. The text of a turn that is gone is the run's output.
    pub(super) fn ends(&mut self, outcome: Option<&Outcome>) -> Vec<Part> {
        let output = outcome
            .filter(|_| self.gone)
            .and_then(|outcome| outcome.output.as_ref());
        if let Some(text) = output.and_then(|output| serde_json::from_str(output.get()).ok()) {
            let answer = TurnAnswer {
                content: Some(text),
                ..TurnAnswer::default()
            };
            return self.turn(self.stored, answer);
        }
        self.open
            .take()
            .map(|open| Part::Broken(open.text))
            .into_iter()
            .collect()
    }
}

#[cfg(test)]
mod tests;
