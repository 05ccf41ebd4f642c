//! A scripted turn as Chat Completions writes it. Pure.

use bytes::Bytes;
use serde_json::{Value, json};

use super::plan::{Says, Stream, Turned, pieces};

/// Pieces in which a call's arguments are streamed.
const ARGUMENT_PIECES: u32 = 3;

fn id(turned: &Turned<'_>) -> String {
    format!("chatcmpl-{}", turned.facts.id.simple())
}

fn call_id(turned: &Turned<'_>, n: usize) -> String {
    format!("call_{}{n}", turned.facts.id.simple())
}

fn usage(turned: &Turned<'_>) -> Value {
    json!({
        "prompt_tokens": turned.input_tokens,
        "completion_tokens": turned.output_tokens,
        "total_tokens": turned.input_tokens + turned.output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    })
}

fn finish(says: &Says<'_>) -> &'static str {
    match says {
        Says::Text(_) => "stop",
        Says::Calls(_) => "tool_calls",
    }
}

/// The answer without `stream`.
pub(super) fn whole(turned: &Turned<'_>) -> Bytes {
    let message = match &turned.says {
        Says::Text(pieces) => json!({"role": "assistant", "content": pieces.concat(), "refusal": null}),
        Says::Calls(calls) => {
            let calls: Vec<Value> = calls
                .iter()
                .enumerate()
                .map(|(n, c)| {
                    json!({"id": call_id(turned, n), "type": "function",
                           "function": {"name": c.name, "arguments": c.arguments}})
                })
                .collect();
            json!({"role": "assistant", "content": null, "refusal": null, "tool_calls": calls})
        }
    };
    let answer = json!({
        "id": id(turned),
        "object": "chat.completion",
        "created": turned.facts.created,
        "model": turned.facts.target,
        "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": finish(&turned.says)}],
        "usage": usage(turned),
    });
    Bytes::from(answer.to_string())
}

/// The answer with `stream`.
pub(super) fn stream(turned: &Turned<'_>) -> Stream {
    let mut content = Vec::new();
    let role = match &turned.says {
        Says::Text(pieces) => {
            content.extend(pieces.iter().map(|p| delta(turned, &json!({"content": p}))));
            json!({"role": "assistant", "content": "", "refusal": null})
        }
        Says::Calls(calls) => {
            for (n, call) in calls.iter().enumerate() {
                let begin = json!({"index": n, "id": call_id(turned, n), "type": "function",
                                   "function": {"name": call.name, "arguments": ""}});
                content.push(delta(turned, &json!({"tool_calls": [begin]})));
                for piece in pieces(&call.arguments, ARGUMENT_PIECES) {
                    let more = json!({"index": n, "function": {"arguments": piece}});
                    content.push(delta(turned, &json!({"tool_calls": [more]})));
                }
            }
            json!({"role": "assistant", "content": null})
        }
    };
    let done = json!([{"index": 0, "delta": {}, "logprobs": null, "finish_reason": finish(&turned.says)}]);
    let mut closing = vec![event(turned, &done, Value::Null)];
    if turned.include_usage {
        closing.push(event(turned, &json!([]), usage(turned)));
    }
    closing.push(Bytes::from_static(b"data: [DONE]\n\n"));
    Stream {
        preamble: vec![delta(turned, &role)],
        content,
        closing,
    }
}

fn delta(turned: &Turned<'_>, delta: &Value) -> Bytes {
    event(
        turned,
        &json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": null}]),
        Value::Null,
    )
}

fn event(turned: &Turned<'_>, choices: &Value, usage: Value) -> Bytes {
    let mut chunk = json!({
        "id": id(turned),
        "object": "chat.completion.chunk",
        "created": turned.facts.created,
        "model": turned.facts.target,
        "choices": choices,
    });
    if turned.include_usage {
        chunk["usage"] = usage;
    }
    Bytes::from(format!("data: {chunk}\n\n"))
}

#[cfg(test)]
mod tests {
    use iop_shared::config::ToolCallScript;

    use super::super::plan::Facts;
    use super::*;

    fn turned(says: Says<'_>, include_usage: bool) -> Turned<'_> {
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
            include_usage,
        }
    }

    fn values(events: &[Bytes]) -> Vec<Value> {
        events
            .iter()
            .filter_map(|e| {
                std::str::from_utf8(e)
                    .unwrap()
                    .strip_prefix("data: ")
                    .unwrap()
                    .trim_end()
                    .parse()
                    .ok()
            })
            .collect()
    }

    #[test]
    fn a_stream_says_what_the_whole_answer_says() {
        let t = turned(Says::Text(vec!["he", "llo"]), true);
        let s = stream(&t);
        let said: String = values(&s.content)
            .iter()
            .map(|v| v["choices"][0]["delta"]["content"].as_str().unwrap())
            .collect();
        let whole: Value = serde_json::from_slice(&whole(&t)).unwrap();
        assert_eq!(whole["choices"][0]["message"]["content"], said);
        let closing = values(&s.closing);
        assert_eq!(closing[0]["choices"][0]["finish_reason"], "stop");
        assert_eq!(closing[1]["usage"], whole["usage"]);
        assert_eq!(closing[1]["choices"], json!([]));
        assert_eq!(s.closing[2], "data: [DONE]\n\n");
    }

    #[test]
    fn usage_is_in_the_stream_only_when_asked_for() {
        let t = turned(Says::Text(vec!["x"]), false);
        let s = stream(&t);
        assert!(values(&s.closing).iter().all(|v| v.get("usage").is_none()));
        assert_eq!(s.closing.len(), 2);
    }

    #[test]
    fn calls_have_dense_indexes_and_whole_arguments() {
        let calls = [
            ToolCallScript {
                name: "f".into(),
                arguments: "{\"city\":\"Paris\"}".into(),
            },
            ToolCallScript {
                name: "g".into(),
                arguments: "{}".into(),
            },
        ];
        let t = turned(Says::Calls(&calls), false);
        let mut arguments = vec![String::new(); 2];
        for v in values(&stream(&t).content) {
            let call = &v["choices"][0]["delta"]["tool_calls"][0];
            arguments[call["index"].as_u64().unwrap() as usize] +=
                call["function"]["arguments"].as_str().unwrap();
        }
        assert_eq!(arguments, ["{\"city\":\"Paris\"}", "{}"]);
        let whole: Value = serde_json::from_slice(&whole(&t)).unwrap();
        assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
        assert_eq!(
            whole["choices"][0]["message"]["tool_calls"][1]["function"]["name"],
            "g"
        );
    }
}
