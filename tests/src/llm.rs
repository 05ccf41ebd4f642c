//! A model under the test's control, as OpenAI's chat API streams one.
//!
//! A conversation is known by its first user message. `plays` gives it one answer per turn; which turn is asked for is read from the
//! request (how many assistant messages it holds), so that a turn that is asked twice is answered alike. `next` answers the
//! next request, whatever it is, before any of that: for failures.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::barrier::Barrier;
use crate::provider::{Exchange, Stub};
use crate::{eventually, fixtures};

/// The model that this server has.
pub const MODEL: &str = "gpt-test";

/// One answer.
#[derive(Debug, Clone)]
pub enum Say {
    /// Text, one chunk a word.
    Text(String),
    /// Tool calls as (id, name, arguments), the arguments in pieces.
    Calls(Vec<(String, String, String)>),
    /// An error, with further headers.
    Status(u16, Vec<(String, String)>),
    /// A head and silence.
    Stall,
    /// The first `n` chunks of a text, then the connection is cut.
    Cut(usize, String),
}

impl Say {
    pub fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    /// One call; `arguments` is the text that the model writes.
    pub fn call(id: &str, name: &str, arguments: &str) -> Self {
        Self::calls(&[(id, name, arguments)])
    }

    pub fn calls(calls: &[(&str, &str, &str)]) -> Self {
        let owned = |(id, name, arguments): &(&str, &str, &str)| {
            ((*id).to_owned(), (*name).to_owned(), (*arguments).to_owned())
        };
        Self::Calls(calls.iter().map(owned).collect())
    }

    pub fn status(status: u16) -> Self {
        Self::Status(status, Vec::new())
    }
}

#[derive(Default)]
struct State {
    scripts: BTreeMap<String, Vec<Say>>,
    next: VecDeque<Say>,
    bodies: Vec<Value>,
}

/// A running model.
pub struct Llm {
    stub: Stub,
    state: Arc<Mutex<State>>,
    /// Holds requests after they were recorded, before anything is answered.
    pub asked: Barrier,
    /// Holds answers after their first half.
    pub halfway: Barrier,
}

impl Llm {
    pub async fn start() -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let (asked, halfway) = (Barrier::default(), Barrier::default());
        let stub = {
            let (state, asked, halfway) = (Arc::clone(&state), asked.clone(), halfway.clone());
            Stub::start(move |exchange| serve(exchange, Arc::clone(&state), asked.clone(), halfway.clone()))
                .await
        };
        Self {
            stub,
            state,
            asked,
            halfway,
        }
    }

    /// The base URL for a provider's configuration.
    pub fn url(&self) -> String {
        self.stub.url()
    }

    /// What the conversation that begins with `input` is answered, turn by turn. After its last, and for unknown ones: `done`.
    pub fn plays(&self, input: &str, turns: Vec<Say>) {
        self.state.lock().scripts.insert(input.to_owned(), turns);
    }

    /// What the next requests are answered, one each.
    pub fn next(&self, answers: Vec<Say>) {
        self.state.lock().next.extend(answers);
    }

    /// Bodies of every request so far.
    pub fn requests(&self) -> Vec<Value> {
        self.state.lock().bodies.clone()
    }

    /// Bodies of one conversation.
    pub fn requests_of(&self, input: &str) -> Vec<Value> {
        let mut bodies = self.requests();
        bodies.retain(|b| opening(b) == input);
        bodies
    }

    /// Waits until `n` requests have arrived.
    ///
    /// # Panics
    /// When they have not within half a minute.
    pub async fn asked(&self, n: usize) {
        eventually(
            &format!("{n} model requests"),
            Duration::from_secs(30),
            || async {
                let asked = self.requests().len();
                if asked >= n {
                    Ok(())
                } else {
                    Err(format!("{asked}"))
                }
            },
        )
        .await;
    }
}

/// The contents of the tool messages of a request, by call id.
pub fn told(body: &Value) -> BTreeMap<String, String> {
    let messages = body["messages"].as_array().into_iter().flatten();
    messages
        .filter(|m| m["role"] == "tool")
        .map(|m| (text(&m["tool_call_id"]), text(&m["content"])))
        .collect()
}

/// A message's content as text, whether written as text or as parts.
fn text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|p| p["text"].as_str()).collect(),
        _ => String::new(),
    }
}

fn opening(body: &Value) -> String {
    let messages = body["messages"].as_array().into_iter().flatten();
    let first = messages
        .filter(|m| m["role"] == "user")
        .map(|m| text(&m["content"]));
    first.take(1).collect()
}

async fn serve(
    mut ex: Exchange,
    state: Arc<Mutex<State>>,
    asked: Barrier,
    halfway: Barrier,
) -> io::Result<()> {
    if ex.method == "GET" {
        let models = json!({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "test"}]});
        return ex.json_reply(200, &models).await;
    }
    let body = ex.json();
    let say = {
        let mut state = state.lock();
        state.bodies.push(body.clone());
        let messages = body["messages"].as_array().into_iter().flatten();
        let turn = messages.filter(|m| m["role"] == "assistant").count();
        let script = state.scripts.get(&opening(&body));
        let scripted = script.and_then(|s| s.get(turn)).cloned();
        state
            .next
            .pop_front()
            .or(scripted)
            .unwrap_or_else(|| Say::text("done"))
    };
    asked.hold(&mut ex).await?;
    answer(&mut ex, say, &body, &halfway).await
}

async fn answer(ex: &mut Exchange, say: Say, body: &Value, halfway: &Barrier) -> io::Result<()> {
    let mut chunks = Vec::new();
    let mut finish = "stop";
    let mut cut = None;
    match say {
        Say::Status(status, headers) => {
            let error = json!({"error": {"message": format!("scripted {status}"), "type": "server_error",
                                         "param": null, "code": null}});
            let mut all: Vec<(&str, &str)> = vec![("content-type", "application/json")];
            all.extend(headers.iter().map(|(k, v)| (k.as_str(), v.as_str())));
            return ex.reply(status, &all, error.to_string().as_bytes()).await;
        }
        Say::Stall => {
            ex.sse().await?;
            ex.gone().await;
            return Ok(());
        }
        Say::Text(text) => chunks.extend(words(&text)),
        Say::Cut(n, text) => {
            chunks.extend(words(&text));
            cut = Some(n);
        }
        Say::Calls(calls) => {
            finish = "tool_calls";
            for (index, (id, name, arguments)) in calls.iter().enumerate() {
                chunks.push(calls_delta(&json!({"index": index, "id": id, "type": "function",
                                              "function": {"name": name, "arguments": ""}})));
                for piece in pieces(arguments) {
                    let delta = json!({"index": index, "function": {"arguments": piece}});
                    chunks.push(calls_delta(&delta));
                }
            }
        }
    }
    ex.sse().await?;
    let role = fixtures::chat_chunk(&json!({"role": "assistant", "content": null}), None);
    ex.data(&role.to_string()).await?;
    let half = chunks.len() / 2;
    for (n, chunk) in chunks.iter().enumerate() {
        if cut == Some(n) {
            ex.cut(true);
            return Ok(());
        }
        if n == half {
            halfway.hold(ex).await?;
        }
        ex.data(chunk).await?;
    }
    ex.data(&fixtures::chat_chunk(&json!({}), Some(finish)).to_string())
        .await?;
    if body["stream_options"]["include_usage"] == true {
        ex.data(&fixtures::usage_chunk()).await?;
    }
    ex.data("[DONE]").await?;
    ex.end().await
}

fn words(text: &str) -> Vec<String> {
    text.split_inclusive(' ').map(fixtures::text_chunk).collect()
}

fn calls_delta(delta: &Value) -> String {
    fixtures::chat_chunk(&json!({"tool_calls": [delta]}), None).to_string()
}

/// At most four pieces, cut between characters.
fn pieces(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let size = chars.len().div_ceil(4).max(1);
    chars.chunks(size).map(|piece| piece.iter().collect()).collect()
}
