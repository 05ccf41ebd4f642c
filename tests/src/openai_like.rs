//! A provider that behaves like OpenAI's own server, for the official SDKs: the last user text says what happens.
//!
//! `hello`, `weather` (a tool call), `json` (structured output), `endless:TAG`, `stall:TAG`, `429`, `500`,
//! `context`. `GET /v1/control/closed/TAG` answers when the exchange of that tag lost its peer, or after 1 s.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::fixtures;
use crate::provider::{Exchange, Stub};

/// The key that this provider takes.
pub const KEY: &str = "sk-provider-and-client";
/// Bodies over this are refused with 413.
pub const BODY_LIMIT: usize = 1024 * 1024;

struct Tags {
    closed: Mutex<HashSet<String>>,
    changed: watch::Sender<u64>,
}

/// Starts the server.
pub async fn start() -> Stub {
    let tags = Arc::new(Tags {
        closed: Mutex::default(),
        changed: watch::channel(0).0,
    });
    Stub::start(move |exchange| serve(exchange, Arc::clone(&tags))).await
}

async fn serve(mut ex: Exchange, tags: Arc<Tags>) -> io::Result<()> {
    if let Some(tag) = ex.path.strip_prefix("/v1/control/closed/").map(str::to_owned) {
        let closed = wait_closed(&tags, &tag).await;
        return ex.json_reply(200, &json!({"closed": closed})).await;
    }
    if ex.header("authorization") != Some(&format!("Bearer {KEY}")) {
        return error(
            &mut ex,
            401,
            "invalid_request_error",
            "invalid_api_key",
            "Incorrect API key provided.",
        )
        .await;
    }
    if ex.body.len() > BODY_LIMIT {
        return error(
            &mut ex,
            413,
            "invalid_request_error",
            "request_too_large",
            "Too large.",
        )
        .await;
    }
    let path = ex.path.clone();
    let body = ex.json();
    if ex.method == "POST" && body["model"] != "gpt-test" {
        let message = "The model does not exist.";
        return error(&mut ex, 404, "invalid_request_error", "model_not_found", message).await;
    }
    match path.as_str() {
        "/v1/chat/completions" => chat(&mut ex, &body, &tags).await,
        "/v1/responses" => responses(&mut ex, &body, &tags).await,
        "/v1/embeddings" => {
            let answer = json!({"object": "list", "model": "gpt-test",
                "data": [{"object": "embedding", "index": 0, "embedding": "AACAPwAAAEAAAEBA"}],
                "usage": {"prompt_tokens": 2, "total_tokens": 2}});
            ex.json_reply(200, &answer).await
        }
        _ => {
            error(
                &mut ex,
                404,
                "invalid_request_error",
                "not_found",
                "Unknown path.",
            )
            .await
        }
    }
}

async fn wait_closed(tags: &Tags, tag: &str) -> bool {
    let mut changed = tags.changed.subscribe();
    let wait = async {
        while !tags.closed.lock().contains(tag) {
            if changed.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(1), wait).await.is_ok()
}

fn note_closed(tags: &Tags, tag: &str) {
    tags.closed.lock().insert(tag.to_owned());
    tags.changed.send_modify(|n| *n += 1);
}

async fn error(ex: &mut Exchange, status: u16, kind: &str, code: &str, message: &str) -> io::Result<()> {
    let body = json!({"error": {"message": message, "type": kind, "param": null, "code": code}});
    let mut headers = vec![
        ("content-type", "application/json"),
        ("x-request-id", "req_provider_1"),
    ];
    if status == 429 {
        headers.push(("retry-after", "7"));
    }
    ex.reply(status, &headers, body.to_string().as_bytes()).await
}

const HEADERS: [(&str, &str); 4] = [
    ("content-type", "application/json"),
    ("x-request-id", "req_provider_1"),
    ("openai-processing-ms", "12"),
    ("x-ratelimit-remaining-requests", "99"),
];

async fn json_answer(ex: &mut Exchange, body: &Value) -> io::Result<()> {
    ex.reply(200, &HEADERS, body.to_string().as_bytes()).await
}

async fn sse_head(ex: &mut Exchange) -> io::Result<()> {
    let mut headers = HEADERS;
    headers[0].1 = "text/event-stream; charset=utf-8";
    ex.head(200, &headers).await
}

/// Answers the directives that are the same for both APIs; `true`: answered.
async fn common(ex: &mut Exchange, text: &str, tags: &Tags) -> io::Result<bool> {
    if let Some(tag) = text.strip_prefix("stall:") {
        ex.gone().await;
        note_closed(tags, tag);
        return Ok(true);
    }
    let (status, kind, code, message) = match text {
        "429" => (429, "requests", "rate_limit_exceeded", "Slow down, please."),
        "500" => (500, "server_error", "internal", "The server had an error."),
        "context" => (
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "Too many tokens.",
        ),
        _ => return Ok(false),
    };
    error(ex, status, kind, code, message).await?;
    Ok(true)
}

/// Keeps sending until the peer is gone.
async fn endless(ex: &mut Exchange, piece: Vec<u8>, tag: &str, tags: &Tags) -> io::Result<()> {
    let mut pace = tokio::time::interval(Duration::from_millis(5));
    loop {
        let sent = match ex.until(pace.tick()).await {
            Ok(_) => ex.chunk(&piece).await,
            Err(e) => Err(e),
        };
        if sent.is_err() {
            note_closed(tags, tag);
            return sent;
        }
    }
}

async fn chat(ex: &mut Exchange, body: &Value, tags: &Tags) -> io::Result<()> {
    let last = body["messages"]
        .as_array()
        .and_then(|m| m.last())
        .cloned()
        .unwrap_or_default();
    let text = if last["role"] == "tool" {
        "after-tool"
    } else {
        last["content"].as_str().unwrap_or_default()
    };
    if common(ex, text, tags).await? {
        return Ok(());
    }
    let stream = body["stream"] == true;
    if let Some(tag) = text.strip_prefix("endless:") {
        if !stream {
            ex.gone().await;
            note_closed(tags, tag);
            return Ok(());
        }
        sse_head(ex).await?;
        let piece = format!("data: {}\n\n", fixtures::text_chunk("and on "));
        return endless(ex, piece.into_bytes(), tag, tags).await;
    }
    let tool = json!({"index": 0, "id": "call_1", "type": "function",
                      "function": {"name": "get_weather", "arguments": "{\"city\":\"Paris\"}"}});
    let (say, calls): (&[&str], bool) = match text {
        "weather" => (&[], true),
        "json" => (&["{\"name\":", "\"Ada\",", "\"age\":36}"], false),
        "after-tool" => (&["It is ", "sunny."], false),
        _ => (&["Hel", "lo ", "w\u{f6}rld \u{1f30d}"], false),
    };
    if !stream {
        let mut answer = fixtures::chat_answer("gpt-test", &say.concat());
        answer["system_fingerprint"] = json!("fp_1");
        answer["provider_cost"] = json!({"usd": 0.000_012});
        if calls {
            answer["choices"][0]["message"]["content"] = Value::Null;
            answer["choices"][0]["message"]["tool_calls"] = json!([tool]);
            answer["choices"][0]["finish_reason"] = json!("tool_calls");
        }
        return json_answer(ex, &answer).await;
    }
    sse_head(ex).await?;
    ex.data(
        &fixtures::chat_chunk(
            &json!({"role": "assistant", "content": if calls { None } else { Some("") }}),
            None,
        )
        .to_string(),
    )
    .await?;
    for word in say {
        ex.data(&fixtures::text_chunk(word)).await?;
    }
    if calls {
        for (n, piece) in ["", "{\"city\":", "\"Paris\"}"].iter().enumerate() {
            let mut delta = json!({"index": 0, "function": {"arguments": piece}});
            if n == 0 {
                delta = json!({"index": 0, "id": "call_1", "type": "function",
                               "function": {"name": "get_weather", "arguments": ""}});
            }
            ex.data(&fixtures::chat_chunk(&json!({"tool_calls": [delta]}), None).to_string())
                .await?;
        }
    }
    let finish = if calls { "tool_calls" } else { "stop" };
    ex.data(&fixtures::chat_chunk(&json!({}), Some(finish)).to_string())
        .await?;
    if body["stream_options"]["include_usage"] == true {
        ex.data(&fixtures::usage_chunk()).await?;
    }
    ex.data("[DONE]").await?;
    ex.end().await
}

async fn responses(ex: &mut Exchange, body: &Value, tags: &Tags) -> io::Result<()> {
    let text = match &body["input"] {
        Value::String(s) => s.clone(),
        Value::Array(items) => {
            let last = items.last().cloned().unwrap_or_default();
            if last["type"] == "function_call_output" {
                "after-tool".to_owned()
            } else {
                last["content"].as_str().map(str::to_owned).unwrap_or_default()
            }
        }
        _ => String::new(),
    };
    if common(ex, &text, tags).await? {
        return Ok(());
    }
    let stream = body["stream"] == true;
    let words: &[&str] = match text.as_str() {
        "json" => &["{\"name\":", "\"Ada\",", "\"age\":36}"],
        "after-tool" => &["It is ", "sunny."],
        _ => &["Hel", "lo ", "w\u{f6}rld \u{1f30d}"],
    };
    if let Some(tag) = text.strip_prefix("endless:") {
        if !stream {
            ex.gone().await;
            note_closed(tags, tag);
            return Ok(());
        }
        sse_head(ex).await?;
        for event in &fixtures::response_events("resp_1", "gpt-test", &["a"])[..5] {
            ex.chunk(&fixtures::named_event(event)).await?;
        }
        let piece = fixtures::named_event(&json!({"type": "response.output_text.delta", "delta": "and on ",
            "item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": [], "sequence_number": 5}));
        return endless(ex, piece, tag, tags).await;
    }
    let call = json!({"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": "get_weather",
                      "arguments": "{\"city\":\"Paris\"}", "status": "completed"});
    if text == "weather" {
        if !stream {
            return json_answer(
                ex,
                &fixtures::response_object("resp_1", "gpt-test", "completed", &json!([call])),
            )
            .await;
        }
        sse_head(ex).await?;
        for event in tool_events(&call) {
            ex.chunk(&fixtures::named_event(&event)).await?;
        }
        return ex.end().await;
    }
    if !stream {
        let output = json!([fixtures::message_item(&words.concat(), "completed")]);
        let mut answer = fixtures::response_object("resp_1", "gpt-test", "completed", &output);
        answer["provider_cost"] = json!({"usd": 0.000_012});
        return json_answer(ex, &answer).await;
    }
    sse_head(ex).await?;
    for event in fixtures::response_events("resp_1", "gpt-test", words) {
        ex.chunk(&fixtures::named_event(&event)).await?;
    }
    ex.end().await
}

fn tool_events(call: &Value) -> Vec<Value> {
    let mut started = call.clone();
    started["status"] = json!("in_progress");
    started["arguments"] = json!("");
    let created = fixtures::response_object("resp_1", "gpt-test", "in_progress", &json!([]));
    let done = fixtures::response_object("resp_1", "gpt-test", "completed", &json!([call]));
    fixtures::number(vec![
        json!({"type": "response.created", "response": created}),
        json!({"type": "response.output_item.added", "output_index": 0, "item": started}),
        json!({"type": "response.function_call_arguments.delta", "item_id": "fc_1", "output_index": 0,
               "delta": "{\"city\":"}),
        json!({"type": "response.function_call_arguments.delta", "item_id": "fc_1", "output_index": 0,
               "delta": "\"Paris\"}"}),
        json!({"type": "response.function_call_arguments.done", "item_id": "fc_1", "output_index": 0,
               "name": "get_weather", "arguments": "{\"city\":\"Paris\"}"}),
        json!({"type": "response.output_item.done", "output_index": 0, "item": call}),
        json!({"type": "response.completed", "response": done}),
    ])
}
