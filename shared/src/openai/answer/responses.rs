//! The Responses API: numbered events, and the whole response.

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::{Author, Call, Kept, Said, joined};
use crate::label_enum;
use crate::openai::usage::Usage;

label_enum! {
    /// `status` of a response and of its items.
    pub(in crate::openai) enum Status {
        InProgress => "in_progress",
        Completed => "completed",
        Incomplete => "incomplete",
        Failed => "failed",
        Cancelled => "cancelled",
    }
}

/// Writes one response. Events are numbered from 0 without a gap as they are written (G16).
#[derive(Debug, Clone)]
pub struct ResponsesAnswer {
    pub(super) author: Author,
    pub(super) id: String,
    /// What ids of items are made of.
    pub(super) stem: String,
    pub(super) kept: Option<Kept>,
    pub(super) sequence: u64,
}

#[derive(Serialize)]
struct Event<'a, F> {
    #[serde(rename = "type")]
    kind: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    fields: F,
}

/// A piece of text at the one content part of a message.
#[derive(Serialize)]
struct TextDelta<'a> {
    item_id: &'a str,
    output_index: usize,
    content_index: u32,
    delta: &'a str,
    logprobs: [(); 0],
}

impl ResponsesAnswer {
    pub fn new(author: Author) -> Self {
        let stem = author.id.simple().to_string();
        Self {
            id: format!("resp_{stem}"),
            stem,
            author,
            kept: None,
            sequence: 0,
        }
    }

    /// `response.created` and `response.in_progress`.
    pub fn begins(&mut self) -> Bytes {
        let fields = json!({"response": self.response(Status::InProgress, json!([]), None)});
        let created = self.event("response.created", &fields);
        joined(&[created, self.event("response.in_progress", &fields)])
    }

    /// The message and its one part.
    pub fn text_begins(&mut self) -> Bytes {
        self.message_begins(0)
    }

    pub fn text(&mut self, piece: &str) -> Bytes {
        self.message_goes_on(0, piece)
    }

    /// `text`: all pieces together.
    pub fn text_ends(&mut self, text: &str) -> Bytes {
        self.message_ends(0, text, true)
    }

    /// A message and its one part. `index`: of the message in the output.
    pub fn message_begins(&mut self, index: usize) -> Bytes {
        let item = self.message(index, Status::InProgress, &[]);
        let added = self.event(
            "response.output_item.added",
            json!({"output_index": index, "item": item}),
        );
        let begun = self.at_part(index, "part", part(""));
        joined(&[added, self.event("response.content_part.added", begun)])
    }

    pub fn message_goes_on(&mut self, index: usize, piece: &str) -> Bytes {
        let item_id = self.message_id(index);
        Bytes::from(self.event(
            "response.output_text.delta",
            TextDelta {
                item_id: &item_id,
                output_index: index,
                content_index: 0,
                delta: piece,
                logprobs: [],
            },
        ))
    }

    /// `text`: all pieces together; `whole`: it did not break off.
    pub fn message_ends(&mut self, index: usize, text: &str, whole: bool) -> Bytes {
        let mut fields = self.at_part(index, "text", json!(text));
        fields["logprobs"] = json!([]);
        let text_done = self.event("response.output_text.done", fields);
        let all = self.at_part(index, "part", part(text));
        let part_done = self.event("response.content_part.done", all);
        let item = self.message_of(index, text, whole);
        let item_done = self.event(
            "response.output_item.done",
            json!({"output_index": index, "item": item}),
        );
        joined(&[text_done, part_done, item_done])
    }

    /// `index`: of the call in the output.
    pub fn call_begins(&mut self, index: usize, name: &str) -> Bytes {
        let begun = Call { name, arguments: "" };
        let item = self.call(index, Status::InProgress, begun);
        Bytes::from(self.event(
            "response.output_item.added",
            json!({"output_index": index, "item": item}),
        ))
    }

    pub fn arguments(&mut self, index: usize, piece: &str) -> Bytes {
        let fields = json!({"item_id": self.call_item_id(index), "output_index": index, "delta": piece});
        Bytes::from(self.event("response.function_call_arguments.delta", fields))
    }

    pub fn arguments_end(&mut self, index: usize, call: Call<'_>) -> Bytes {
        let fields = json!({"item_id": self.call_item_id(index), "output_index": index,
                            "arguments": call.arguments, "name": call.name});
        Bytes::from(self.event("response.function_call_arguments.done", fields))
    }

    pub fn call_ends(&mut self, index: usize, call: Call<'_>) -> Bytes {
        let item = self.call(index, Status::Completed, call);
        Bytes::from(self.event(
            "response.output_item.done",
            json!({"output_index": index, "item": item}),
        ))
    }

    /// `response.completed`.
    pub fn ends(&mut self, said: &Said<'_>, usage: Option<Usage>) -> Bytes {
        let response = self.completed(said, usage);
        Bytes::from(self.event("response.completed", json!({"response": response})))
    }

    /// The answer without `stream`.
    pub fn whole(&self, said: &Said<'_>, usage: Option<Usage>) -> Bytes {
        Bytes::from(super::json(&self.completed(said, usage)))
    }

    fn completed(&self, said: &Said<'_>, usage: Option<Usage>) -> Value {
        let output: Vec<Value> = match said {
            Said::Text(text) => vec![self.message_of(0, text, true)],
            Said::Calls(calls) => calls
                .iter()
                .enumerate()
                .map(|(index, call)| self.call(index, Status::Completed, *call))
                .collect(),
        };
        self.response(Status::Completed, json!(output), usage)
    }

    pub(super) fn response(&self, status: Status, output: Value, usage: Option<Usage>) -> Value {
        let mut response = response(&self.id, &self.author.model, self.author.created, status);
        response["output"] = output;
        if let Some(kept) = &self.kept {
            kept.mark(&mut response);
        }
        if let Some(usage) = usage {
            response["usage"] = json!({
                "input_tokens": usage.input,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.output,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.input.saturating_add(usage.output),
            });
        }
        response
    }

    fn message_id(&self, index: usize) -> String {
        match index {
            0 => format!("msg_{}", self.stem),
            index => format!("msg_{}_{index}", self.stem),
        }
    }

    pub(super) fn message_of(&self, index: usize, text: &str, whole: bool) -> Value {
        let status = if whole {
            Status::Completed
        } else {
            Status::Incomplete
        };
        self.message(index, status, &[part(text)])
    }

    fn message(&self, index: usize, status: Status, content: &[Value]) -> Value {
        json!({"id": self.message_id(index), "type": "message", "status": status, "role": "assistant",
               "content": content})
    }

    fn at_part(&self, index: usize, key: &str, value: Value) -> Value {
        let mut fields =
            json!({"item_id": self.message_id(index), "output_index": index, "content_index": 0});
        fields[key] = value;
        fields
    }

    fn call_item_id(&self, index: usize) -> String {
        format!("fc_{}{index}", self.stem)
    }

    fn call(&self, index: usize, status: Status, call: Call<'_>) -> Value {
        json!({"id": self.call_item_id(index), "type": "function_call",
               "call_id": format!("call_{}{index}", self.stem),
               "name": call.name, "arguments": call.arguments, "status": status})
    }

    pub(super) fn event(&mut self, kind: &str, fields: impl Serialize) -> String {
        let data = super::json(&Event {
            kind,
            sequence_number: self.sequence,
            fields,
        });
        self.sequence += 1;
        format!("event: {kind}\ndata: {data}\n\n")
    }
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

/// A response of which nothing is known but who it is by and how far it is.
pub(in crate::openai) fn response(id: &str, model: &str, created_at: i64, status: Status) -> Value {
    json!({
        "id": id,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": null,
        "max_output_tokens": null,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": true,
        "previous_response_id": null,
        "reasoning": {"effort": null, "summary": null},
        // Nothing is kept: a later request for this id would find nothing.
        "store": false,
        "temperature": null,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": null,
        "truncation": "disabled",
        "usage": null,
        "user": null,
    })
}
