//! What was said in a run so far, rebuilt from its journal, and the request that goes on from it. Pure: the same records make the
//! same bytes, so that a turn that is asked again is asked the same.

use std::collections::HashMap;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::record::{ActivityRecord, ActivityState};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use super::journal::{INPUT, MCP, MODEL, call_key, round_key, started_call, turn_of};
use super::tools::mcp::Answered;
use super::tools::told;
use super::turn::{ToolCall, TurnAnswer};

/// A run's input and its turns.
#[derive(Debug)]
pub(crate) struct Transcript {
    input: Box<RawValue>,
    turns: Vec<Turn>,
}

#[derive(Debug)]
struct Turn {
    answer: TurnAnswer,
    /// By the place of the call; absent for a call that never came to a result.
    results: Vec<Option<Bytes>>,
}

/// What a call without a result is answered with: the run was moved away from it.
const NOT_CARRIED_OUT: &[u8] =
    br#"{"error":{"status":null,"code":"not_carried_out","body":"The call was not carried out."}}"#;

impl Transcript {
    /// Of a run that has not had a turn.
    pub(crate) fn begin(input: Box<RawValue>) -> Self {
        Self {
            input,
            turns: Vec::new(),
        }
    }

    /// Of the records of a run's journal before `activation`, in any order.
    ///
    /// # Errors
    /// `internal` when the journal is not an agent's.
    pub(crate) fn of(records: &[ActivityRecord], activation: u64) -> Result<Self, Failure> {
        let mut input = None;
        let mut answers: Vec<(u64, TurnAnswer)> = Vec::new();
        // Absent for a round in which a server asked for more.
        let mut results: HashMap<(u64, String), Option<Bytes>> = HashMap::new();
        for record in records.iter().filter(|record| record.activation < activation) {
            let output = record.output.as_ref().map(|output| output.bytes().clone());
            if let Some(call) = started_call(record) {
                // A child that could not be started is its call's result; one that was started is not.
                if record.state == ActivityState::Failed
                    && let Some(failure) = &record.error
                {
                    results.insert((turn_of(record.activation), call.to_owned()), Some(told(failure)));
                }
                continue;
            }
            match (record.key.as_str(), output) {
                (INPUT, Some(output)) if record.activation == 1 => {
                    input = Some(serde_json::from_slice(&output).map_err(|e| broken(&e))?);
                }
                (MODEL, Some(output)) if record.activation % 2 == 1 => {
                    let answer = serde_json::from_slice(&output).map_err(|e| broken(&e))?;
                    answers.push((turn_of(record.activation), answer));
                }
                (key, Some(output)) => {
                    // What another tool answers is its result, whatever it looks like.
                    let result = match Answered::of_output(&output) {
                        Answered::InputRequired(_) if record.implementation == MCP => None,
                        Answered::InputRequired(_) | Answered::Result(_) => Some(output),
                    };
                    results.insert((turn_of(record.activation), key.to_owned()), result);
                }
                (key, None) if record.state == ActivityState::Failed => {
                    if let Some(failure) = &record.error {
                        results.insert((turn_of(record.activation), key.to_owned()), Some(told(failure)));
                    }
                }
                (_, None) => {}
            }
        }
        answers.sort_by_key(|(turn, _)| *turn);
        let turns = answers
            .into_iter()
            .map(|(turn, answer)| {
                let result = |(ordinal, call): (usize, &ToolCall)| {
                    let key = call_key(&call.id, ordinal);
                    let rounds = (0..).map_while(|round| results.remove(&(turn, round_key(&key, round))));
                    rounds.last()?
                };
                Turn {
                    results: answer.tool_calls.iter().enumerate().map(result).collect(),
                    answer,
                }
            })
            .collect();
        Ok(Self {
            input: input.ok_or_else(|| broken(&"the input is missing"))?,
            turns,
        })
    }

    /// How often a tool was called with these arguments in the turns so far.
    pub(crate) fn count(&self, call: &ToolCall) -> u64 {
        let calls = self.turns.iter().flat_map(|turn| &turn.answer.tool_calls);
        calls
            .filter(|other| other.name == call.name && other.arguments == call.arguments)
            .count() as u64
    }

    /// The messages of the next request.
    ///
    /// # Errors
    /// `invalid_input` when the input is no conversation.
    fn messages(&self, instructions: Option<&str>) -> Result<Vec<Box<RawValue>>, Failure> {
        let mut messages = Vec::new();
        if let Some(instructions) = instructions {
            messages.push(raw(&Plain {
                role: "system",
                content: instructions,
            })?);
        }
        messages
            .extend(conversation(&self.input).map_err(|why| Failure::new(FailureKind::InvalidInput, why))?);
        for turn in &self.turns {
            messages.push(raw(&Assistant::of(&turn.answer))?);
            for (call, result) in turn.answer.tool_calls.iter().zip(&turn.results) {
                let result = result.as_deref().unwrap_or(NOT_CARRIED_OUT);
                messages.push(raw(&ToolResult {
                    role: "tool",
                    tool_call_id: &call.id,
                    // Results are stored as text; see `tools`.
                    content: &String::from_utf8_lossy(result),
                })?);
            }
        }
        Ok(messages)
    }
}

fn broken(why: &dyn std::fmt::Display) -> Failure {
    Failure::new(
        FailureKind::Internal,
        format!("the journal cannot be read: {why}"),
    )
    .code("journal_invalid")
}

fn raw<T: Serialize>(value: &T) -> Result<Box<RawValue>, Failure> {
    to_raw_value(value).map_err(|e| Failure::new(FailureKind::Internal, e.to_string()))
}

#[derive(Serialize)]
struct Plain<'a> {
    role: &'static str,
    content: &'a str,
}

#[derive(Serialize)]
struct Assistant<'a> {
    role: &'static str,
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallOf<'a>>,
}

#[derive(Serialize)]
struct CallOf<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    function: FunctionOf<'a>,
}

#[derive(Serialize)]
struct FunctionOf<'a> {
    name: &'a str,
    arguments: &'a str,
}

#[derive(Serialize)]
struct ToolResult<'a> {
    role: &'static str,
    tool_call_id: &'a str,
    content: &'a str,
}

impl<'a> Assistant<'a> {
    fn of(answer: &'a TurnAnswer) -> Self {
        Self {
            role: "assistant",
            content: answer.content.as_deref(),
            refusal: answer.refusal.as_deref(),
            tool_calls: answer
                .tool_calls
                .iter()
                .map(|call| CallOf {
                    id: &call.id,
                    kind: "function",
                    function: FunctionOf {
                        name: &call.name,
                        arguments: &call.arguments,
                    },
                })
                .collect(),
        }
    }
}

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Role {
    #[serde(rename = "role")]
    _role: String,
}

/// The messages of a run's input (durable-api §8): a string is the user's message, an object with `messages` is the conversation,
/// other JSON is sent as text.
///
/// # Errors
/// A sentence about `messages`.
pub(crate) fn conversation(input: &RawValue) -> Result<Vec<Box<RawValue>>, String> {
    let user = |content: &str| {
        to_raw_value(&Plain {
            role: "user",
            content,
        })
        .map_err(|e| e.to_string())
    };
    let text = input.get().trim_start();
    if text.starts_with('"') {
        let text: String = serde_json::from_str(text).map_err(|e| format!("the text cannot be read: {e}"))?;
        return Ok(vec![user(&text)?]);
    }
    let has_messages = text.starts_with('{')
        && serde_json::from_str::<HashMap<String, &RawValue>>(text)
            .is_ok_and(|members| members.contains_key("messages"));
    if !has_messages {
        return Ok(vec![user(input.get())?]);
    }
    let Conversation { messages } =
        serde_json::from_str(text).map_err(|e| format!("messages must be a list of messages: {e}"))?;
    if messages.is_empty() {
        return Err("messages must not be empty".to_owned());
    }
    for (n, message) in messages.iter().enumerate() {
        serde_json::from_str::<Role>(message.get())
            .map_err(|e| format!("messages[{n}] is no message: {e}"))?;
    }
    Ok(messages)
}

/// What of a declaration goes into each request.
pub(crate) struct Frame<'a> {
    pub(crate) model: &'a str,
    pub(crate) instructions: Option<&'a str>,
    /// A list of tools; absent when there are none.
    pub(crate) tools: Option<&'a RawValue>,
    pub(crate) parameters: &'a serde_json::Map<String, serde_json::Value>,
}

#[derive(Serialize)]
struct Request<'a> {
    model: &'a str,
    messages: Vec<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'a RawValue>,
    stream: bool,
    stream_options: StreamOptions,
    #[serde(flatten)]
    parameters: &'a serde_json::Map<String, serde_json::Value>,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

/// The chat completion request of the next turn.
///
/// # Errors
/// `invalid_input` when the input is no conversation.
pub(crate) fn request(transcript: &Transcript, frame: &Frame<'_>) -> Result<Bytes, Failure> {
    let request = Request {
        model: frame.model,
        messages: transcript.messages(frame.instructions)?,
        tools: frame.tools,
        stream: true,
        stream_options: StreamOptions { include_usage: true },
        parameters: frame.parameters,
    };
    serde_json::to_vec(&request)
        .map(Bytes::from)
        .map_err(|e| Failure::new(FailureKind::Internal, e.to_string()))
}

#[cfg(test)]
mod tests;
