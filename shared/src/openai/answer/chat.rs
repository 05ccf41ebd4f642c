//! Chat Completions: chunks, and the whole completion.

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::{Author, Finish, Said, joined};
use crate::openai::usage::Usage;

const DONE: &str = "data: [DONE]\n\n";

/// Writes one chat completion of one choice.
#[derive(Debug, Clone)]
pub struct ChatAnswer {
    author: Author,
    id: String,
    /// The stream tells usage: `null` in every chunk, and a last chunk with it.
    include_usage: bool,
}

#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: i64,
    model: &'a str,
    choices: C,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
}

#[derive(Serialize)]
struct Choice<D> {
    index: u32,
    delta: D,
    logprobs: (),
    finish_reason: Option<Finish>,
}

#[derive(Serialize)]
struct Content<'a> {
    content: &'a str,
}

impl ChatAnswer {
    pub fn new(author: Author, include_usage: bool) -> Self {
        Self {
            id: format!("chatcmpl-{}", author.id.simple()),
            author,
            include_usage,
        }
    }

    /// The first chunk of an answer that is text.
    pub fn text_begins(&self) -> Bytes {
        self.delta(json!({"role": "assistant", "content": "", "refusal": null}))
    }

    pub fn text(&self, piece: &str) -> Bytes {
        self.delta(Content { content: piece })
    }

    /// The first chunk of an answer that is calls.
    pub fn calls_begin(&self) -> Bytes {
        self.delta(json!({"role": "assistant", "content": null}))
    }

    /// `index`: of the call in the answer, from 0 without a gap (G15).
    pub fn call_begins(&self, index: usize, name: &str) -> Bytes {
        let function = json!({"name": name, "arguments": ""});
        self.delta(json!({"tool_calls": [
            {"index": index, "id": self.call_id(index), "type": "function", "function": function},
        ]}))
    }

    pub fn arguments(&self, index: usize, piece: &str) -> Bytes {
        self.delta(json!({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
    }

    /// The reason for the end, the usage where the stream tells it and it is known, and `[DONE]`.
    pub fn ends(&self, said: &Said<'_>, usage: Option<Usage>) -> Bytes {
        let finish = self.choice(json!({}), Some(said.finish()));
        let usage = match usage {
            Some(counted) if self.include_usage => self.chunk::<[(); 0]>([], Some(usage_object(counted))),
            Some(_) | None => String::new(),
        };
        joined(&[finish, usage, DONE.to_owned()])
    }

    /// The answer without `stream`.
    pub fn whole(&self, said: &Said<'_>, usage: Option<Usage>) -> Bytes {
        let message = match said {
            Said::Text(text) => json!({"role": "assistant", "content": text, "refusal": null}),
            Said::Calls(calls) => {
                let calls = calls.iter().enumerate().map(|(index, call)| {
                    json!({"id": self.call_id(index), "type": "function",
                           "function": {"name": call.name, "arguments": call.arguments}})
                });
                let calls: Vec<Value> = calls.collect();
                json!({"role": "assistant", "content": null, "refusal": null, "tool_calls": calls})
            }
        };
        Bytes::from(super::json(&Chunk {
            id: &self.id,
            object: "chat.completion",
            created: self.author.created,
            model: &self.author.model,
            choices: [
                json!({"index": 0, "message": message, "logprobs": null, "finish_reason": said.finish()}),
            ],
            usage: Some(usage.map_or(Value::Null, usage_object)),
        }))
    }

    fn call_id(&self, index: usize) -> String {
        format!("call_{}{index}", self.author.id.simple())
    }

    fn delta(&self, delta: impl Serialize) -> Bytes {
        Bytes::from(self.choice(delta, None))
    }

    fn choice(&self, delta: impl Serialize, finish_reason: Option<Finish>) -> String {
        let choice = Choice {
            index: 0,
            delta,
            logprobs: (),
            finish_reason,
        };
        self.chunk([choice], Some(Value::Null))
    }

    fn chunk<C: Serialize>(&self, choices: C, usage: Option<Value>) -> String {
        let chunk = super::json(&Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.author.created,
            model: &self.author.model,
            choices,
            usage: usage.filter(|_| self.include_usage),
        });
        format!("data: {chunk}\n\n")
    }
}

fn usage_object(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.input.saturating_add(usage.output),
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    })
}
