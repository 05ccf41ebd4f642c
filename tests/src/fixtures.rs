//! Answers as OpenAI-compatible servers give them, and requests as clients send them.

use serde_json::{Value, json};

/// A Chat request.
pub fn chat(model: &str, text: &str, stream: bool) -> Value {
    let mut body = json!({"model": model, "messages": [{"role": "user", "content": text}]});
    if stream {
        body["stream"] = json!(true);
    }
    body
}

/// A Responses request.
pub fn responses(model: &str, text: &str, stream: bool) -> Value {
    let mut body = json!({"model": model, "input": text});
    if stream {
        body["stream"] = json!(true);
    }
    body
}

/// A whole Chat answer.
pub fn chat_answer(model: &str, text: &str) -> Value {
    json!({
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1_700_000_000, "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop",
                     "logprobs": null}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    })
}

/// One Chat chunk; `delta` is the delta object.
pub fn chat_chunk(delta: &Value, finish: Option<&str>) -> Value {
    json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]
    })
}

/// A chunk with text.
pub fn text_chunk(text: &str) -> String {
    chat_chunk(&json!({"content": text}), None).to_string()
}

/// The chunk that ends the choice.
pub fn stop_chunk() -> String {
    chat_chunk(&json!({}), Some("stop")).to_string()
}

/// The usage chunk of `include_usage`.
pub fn usage_chunk() -> String {
    json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "m", "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    })
    .to_string()
}

/// A whole good Chat stream as bytes.
pub fn chat_stream(words: &[&str]) -> Vec<u8> {
    let mut out = String::new();
    out.push_str(&format!(
        "data: {}\n\n",
        chat_chunk(&json!({"role": "assistant", "content": ""}), None)
    ));
    for word in words {
        out.push_str(&format!("data: {}\n\n", text_chunk(word)));
    }
    out.push_str(&format!("data: {}\n\ndata: [DONE]\n\n", stop_chunk()));
    out.into_bytes()
}

/// The response object of the Responses API.
pub fn response_object(id: &str, model: &str, status: &str, output: &Value) -> Value {
    let done = status == "completed";
    json!({
        "id": id, "object": "response", "created_at": 1_700_000_000, "status": status, "model": model,
        "error": null, "incomplete_details": null, "instructions": null, "metadata": {}, "output": output,
        "parallel_tool_calls": true, "temperature": 1.0, "tool_choice": "auto", "tools": [], "top_p": 1.0,
        "previous_response_id": null, "store": true, "background": false, "max_output_tokens": null,
        "text": {"format": {"type": "text"}}, "truncation": "disabled",
        "usage": if done {
            json!({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 3,
                   "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 12})
        } else { Value::Null }
    })
}

/// A message item with one text part.
pub fn message_item(text: &str, status: &str) -> Value {
    json!({"id": "msg_1", "type": "message", "role": "assistant", "status": status,
           "content": [{"type": "output_text", "text": text, "annotations": []}]})
}

/// The events of a Responses stream that says `words`, numbered from 0, `response.completed` last.
pub fn response_events(id: &str, model: &str, words: &[&str]) -> Vec<Value> {
    let text: String = words.concat();
    let started = json!({"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []});
    let part = |text: &str| json!({"type": "output_text", "text": text, "annotations": []});
    let place = json!({"item_id": "msg_1", "output_index": 0, "content_index": 0});
    let mut events = vec![
        json!({"type": "response.created", "response": response_object(id, model, "in_progress", &json!([]))}),
        json!({"type": "response.in_progress", "response": response_object(id, model, "in_progress", &json!([]))}),
        json!({"type": "response.output_item.added", "output_index": 0, "item": started}),
        merge(
            &place,
            json!({"type": "response.content_part.added", "part": part("")}),
        ),
    ];
    for word in words {
        events.push(merge(
            &place,
            json!({"type": "response.output_text.delta", "delta": word, "logprobs": []}),
        ));
    }
    events.push(merge(
        &place,
        json!({"type": "response.output_text.done", "text": text, "logprobs": []}),
    ));
    events.push(merge(
        &place,
        json!({"type": "response.content_part.done", "part": part(&text)}),
    ));
    let item = message_item(&text, "completed");
    events.push(json!({"type": "response.output_item.done", "output_index": 0, "item": item}));
    events.push(json!({"type": "response.completed",
                       "response": response_object(id, model, "completed", &json!([item]))}));
    number(events)
}

/// Writes `sequence_number` 0, 1, 2 … into events.
pub fn number(mut events: Vec<Value>) -> Vec<Value> {
    for (n, event) in events.iter_mut().enumerate() {
        event["sequence_number"] = json!(n);
    }
    events
}

/// One named event as bytes.
pub fn named_event(event: &Value) -> Vec<u8> {
    format!(
        "event: {}\ndata: {event}\n\n",
        event["type"].as_str().unwrap_or_default()
    )
    .into_bytes()
}

/// A whole Responses stream as bytes.
pub fn response_stream(id: &str, words: &[&str]) -> Vec<u8> {
    response_events(id, "m", words)
        .iter()
        .flat_map(named_event)
        .collect()
}

fn merge(place: &Value, mut event: Value) -> Value {
    for (k, v) in place.as_object().into_iter().flatten() {
        event[k] = v.clone();
    }
    event
}
