//! A scripted turn as the Responses API writes it: sequence numbers from 0 without a gap, one id throughout. Pure.

use bytes::Bytes;
use serde_json::{Value, json};

use super::plan::{Says, Stream, Turned, pieces};

/// Pieces in which a call's arguments are streamed.
const ARGUMENT_PIECES: u32 = 3;

fn response(turned: &Turned<'_>, status: &str, output: &Value) -> Value {
    let usage = (status == "completed").then(|| {
        json!({
            "input_tokens": turned.input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": turned.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turned.input_tokens + turned.output_tokens,
        })
    });
    json!({
        "id": format!("resp_{}", turned.facts.id.simple()),
        "object": "response",
        "created_at": turned.facts.created,
        "status": status,
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": null,
        "max_output_tokens": null,
        "metadata": {},
        "model": turned.facts.target,
        "output": output,
        "parallel_tool_calls": true,
        "previous_response_id": null,
        "reasoning": {"effort": null, "summary": null},
        // Nothing is kept: a later request for this id would find nothing.
        "store": false,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": usage,
        "user": null,
    })
}

fn message_id(turned: &Turned<'_>) -> String {
    format!("msg_{}", turned.facts.id.simple())
}

fn message(turned: &Turned<'_>, status: &str, content: &[Value]) -> Value {
    json!({"id": message_id(turned), "type": "message", "status": status, "role": "assistant", "content": content})
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn call(turned: &Turned<'_>, n: usize, status: &str, name: &str, arguments: &str) -> Value {
    let id = turned.facts.id.simple();
    json!({"id": format!("fc_{id}{n}"), "type": "function_call", "call_id": format!("call_{id}{n}"),
           "name": name, "arguments": arguments, "status": status})
}

fn output(turned: &Turned<'_>) -> Vec<Value> {
    match &turned.says {
        Says::Text(pieces) => vec![message(turned, "completed", &[part(&pieces.concat())])],
        Says::Calls(calls) => calls
            .iter()
            .enumerate()
            .map(|(n, c)| call(turned, n, "completed", &c.name, &c.arguments))
            .collect(),
    }
}

/// The answer without `stream`.
pub(super) fn whole(turned: &Turned<'_>) -> Bytes {
    Bytes::from(response(turned, "completed", &json!(output(turned))).to_string())
}

/// Numbers events as they are written.
struct Numbered(u64);

impl Numbered {
    fn event(&mut self, kind: &str, mut fields: Value) -> Bytes {
        fields["type"] = json!(kind);
        fields["sequence_number"] = json!(self.0);
        self.0 += 1;
        Bytes::from(format!("event: {kind}\ndata: {fields}\n\n"))
    }
}

/// The answer with `stream`.
pub(super) fn stream(turned: &Turned<'_>) -> Stream {
    let mut n = Numbered(0);
    let mut s = Stream::default();
    for kind in ["response.created", "response.in_progress"] {
        s.preamble.push(n.event(
            kind,
            json!({"response": response(turned, "in_progress", &json!([]))}),
        ));
    }
    match &turned.says {
        Says::Text(pieces) => text(turned, pieces, &mut n, &mut s),
        Says::Calls(calls) => {
            for (index, c) in calls.iter().enumerate() {
                let begun = call(turned, index, "in_progress", &c.name, "");
                let whole = call(turned, index, "completed", &c.name, &c.arguments);
                let place = |more: &[(&str, Value)]| {
                    let mut v = json!({"item_id": whole["id"], "output_index": index});
                    for (key, value) in more {
                        v[key] = value.clone();
                    }
                    v
                };
                s.content.push(n.event(
                    "response.output_item.added",
                    json!({"output_index": index, "item": begun}),
                ));
                for piece in pieces(&c.arguments, ARGUMENT_PIECES) {
                    let fields = place(&[("delta", json!(piece))]);
                    s.content
                        .push(n.event("response.function_call_arguments.delta", fields));
                }
                let fields = place(&[("arguments", json!(c.arguments)), ("name", json!(c.name))]);
                s.content
                    .push(n.event("response.function_call_arguments.done", fields));
                s.content.push(n.event(
                    "response.output_item.done",
                    json!({"output_index": index, "item": whole}),
                ));
            }
        }
    }
    let done = response(turned, "completed", &json!(output(turned)));
    s.closing
        .push(n.event("response.completed", json!({"response": done})));
    s
}

fn text(turned: &Turned<'_>, said: &[&str], n: &mut Numbered, s: &mut Stream) {
    let place = |key: &str, value: Value| {
        let mut v = json!({"item_id": message_id(turned), "output_index": 0, "content_index": 0});
        v[key] = value;
        v
    };
    let begun = message(turned, "in_progress", &[]);
    s.preamble.push(n.event(
        "response.output_item.added",
        json!({"output_index": 0, "item": begun}),
    ));
    s.preamble
        .push(n.event("response.content_part.added", place("part", part(""))));
    for piece in said {
        let mut fields = place("delta", json!(piece));
        fields["logprobs"] = json!([]);
        s.content.push(n.event("response.output_text.delta", fields));
    }
    let whole = said.concat();
    let mut fields = place("text", json!(whole));
    fields["logprobs"] = json!([]);
    s.closing.push(n.event("response.output_text.done", fields));
    s.closing
        .push(n.event("response.content_part.done", place("part", part(&whole))));
    let item = message(turned, "completed", &[part(&whole)]);
    s.closing.push(n.event(
        "response.output_item.done",
        json!({"output_index": 0, "item": item}),
    ));
}

#[cfg(test)]
mod tests {
    use iop_shared::config::ToolCallScript;

    use super::super::plan::Facts;
    use super::*;

    fn turned(says: Says<'_>) -> Turned<'_> {
        let facts = Facts {
            target: "t",
            id: uuid::Uuid::from_u128(7),
            created: 1,
            attempt: 0,
        };
        Turned {
            facts,
            says,
            input_tokens: 3,
            output_tokens: 2,
            include_usage: false,
        }
    }

    fn events(s: &Stream) -> Vec<Value> {
        let all = s.preamble.iter().chain(&s.content).chain(&s.closing);
        all.map(|e| {
            let text = std::str::from_utf8(e).unwrap();
            let (name, data) = text
                .strip_prefix("event: ")
                .unwrap()
                .split_once("\ndata: ")
                .unwrap();
            let v: Value = data.trim_end().parse().unwrap();
            assert_eq!(v["type"], name);
            v
        })
        .collect()
    }

    #[test]
    fn numbers_have_no_gap_and_the_identity_never_changes() {
        let calls = [ToolCallScript {
            name: "f".into(),
            arguments: "{\"a\":1}".into(),
        }];
        for t in [turned(Says::Text(vec!["he", "llo"])), turned(Says::Calls(&calls))] {
            let all = events(&stream(&t));
            for (n, e) in all.iter().enumerate() {
                assert_eq!(e["sequence_number"], n as u64);
                if let Some(id) = e["response"].get("id") {
                    assert_eq!(*id, all[0]["response"]["id"]);
                }
            }
            let whole: Value = serde_json::from_slice(&whole(&t)).unwrap();
            assert_eq!(all[all.len() - 1]["response"], whole);
            assert_eq!(all[all.len() - 1]["type"], "response.completed");
        }
    }

    #[test]
    fn deltas_add_up_to_the_text_that_is_done() {
        let all = events(&stream(&turned(Says::Text(vec!["he", "llo"]))));
        let said: String = all.iter().filter_map(|e| e["delta"].as_str()).collect();
        let done = all
            .iter()
            .find(|e| e["type"] == "response.output_text.done")
            .unwrap();
        assert_eq!((said.as_str(), &done["text"]), ("hello", &json!("hello")));
    }
}
