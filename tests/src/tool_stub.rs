//! The services that agents' tools call: every call is recorded, and what it *changed* is counted apart from it.
//!
//! A path is a service. `script` says what it answers, `honour_keys` makes it apply a key once and repeat its answer,
//! barriers hold a call after it was received or after it was applied: the moment to kill an edge.
//! `GET /found/NAME?key=KEY` says whether `/NAME` applied a key: `{"id": "effect-…"}`, or `{"id": null}`.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::barrier::Barrier;
use crate::eventually;
use crate::provider::{Exchange, Stub};

/// One call as it arrived.
#[derive(Debug, Clone)]
pub struct Call {
    pub method: String,
    /// Without the query.
    pub path: String,
    pub query: BTreeMap<String, String>,
    pub headers: Vec<(String, String)>,
    /// `Idempotency-Key`.
    pub key: Option<String>,
    pub body: Bytes,
    /// Whether this call changed something.
    pub applied: bool,
}

impl Call {
    /// The body as JSON; `null` when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// The first value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(k, _)| k.eq_ignore_ascii_case(name));
        found.map(|(_, v)| v.as_str())
    }
}

/// What a service answers to one call.
#[derive(Debug, Clone)]
pub struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    applies: bool,
    cut: bool,
}

impl Answer {
    /// 200 with JSON; the call changes something.
    pub fn ok(body: &Value) -> Self {
        Self::bytes(200, body.to_string().as_bytes()).header("content-type", "application/json")
    }

    /// An error; the call changes nothing.
    pub fn status(status: u16) -> Self {
        let body = json!({"message": format!("scripted {status}")}).to_string();
        let mut answer = Self::bytes(status, body.as_bytes());
        answer.applies = false;
        answer.header("content-type", "application/json")
    }

    /// Any bytes; the call changes something.
    pub fn bytes(status: u16, body: &[u8]) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.to_vec(),
            applies: true,
            cut: false,
        }
    }

    /// The connection is cut after the call was applied, before any answer.
    pub fn cut() -> Self {
        let mut answer = Self::bytes(200, b"");
        answer.cut = true;
        answer
    }

    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// With `Retry-After`, in seconds.
    #[must_use]
    pub fn retry_after(self, seconds: u32) -> Self {
        self.header("retry-after", &seconds.to_string())
    }
}

#[derive(Default)]
struct Service {
    honours_keys: bool,
    /// Answers to come; the one that is always given when there are none.
    script: VecDeque<Answer>,
    always: Option<Answer>,
    received: Barrier,
    applied: Barrier,
    /// What was applied, by key; calls without a key count under "".
    effects: BTreeMap<String, usize>,
    answered: BTreeMap<String, Answer>,
}

#[derive(Default)]
struct State {
    services: BTreeMap<String, Service>,
    calls: Vec<Call>,
}

/// Running services.
pub struct ToolStub {
    stub: Stub,
    state: Arc<Mutex<State>>,
}

impl ToolStub {
    pub async fn start() -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let stub = {
            let state = Arc::clone(&state);
            Stub::start(move |exchange| serve(exchange, Arc::clone(&state))).await
        };
        Self { stub, state }
    }

    /// `http://ADDR` + path.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.stub.addr)
    }

    fn service<T>(&self, path: &str, f: impl FnOnce(&mut Service) -> T) -> T {
        f(self.state.lock().services.entry(path.to_owned()).or_default())
    }

    /// A key is applied once; a call that repeats it gets the same answer again.
    pub fn honour_keys(&self, path: &str) {
        self.service(path, |s| s.honours_keys = true);
    }

    /// What the next calls are answered, one each.
    pub fn script(&self, path: &str, answers: Vec<Answer>) {
        self.service(path, |s| s.script.extend(answers));
    }

    /// What calls are answered for which nothing is scripted; `{"ok": true}` when not said.
    pub fn always(&self, path: &str, answer: Answer) {
        self.service(path, |s| s.always = Some(answer));
    }

    /// Before anything is changed. A caller that hangs up here leaves nothing changed.
    pub fn received(&self, path: &str) -> Barrier {
        self.service(path, |s| s.received.clone())
    }

    /// After the change, before the answer.
    pub fn applied(&self, path: &str) -> Barrier {
        self.service(path, |s| s.applied.clone())
    }

    /// Calls of one path, in order.
    pub fn calls(&self, path: &str) -> Vec<Call> {
        let state = self.state.lock();
        state.calls.iter().filter(|c| c.path == path).cloned().collect()
    }

    /// How often one path changed something.
    pub fn effects(&self, path: &str) -> usize {
        self.service(path, |s| s.effects.values().sum())
    }

    /// The same by key, for every path that honours keys.
    pub fn honoured(&self) -> Vec<(String, String, usize)> {
        let state = self.state.lock();
        let honouring = state.services.iter().filter(|(_, s)| s.honours_keys);
        honouring
            .flat_map(|(path, s)| s.effects.iter().map(|(k, n)| (path.clone(), k.clone(), *n)))
            .collect()
    }

    /// Waits until the caller of the `n`th call of all, from 0, has hung up before it was answered.
    pub async fn hung_up(&self, n: usize) {
        self.stub.hung_up(n, Duration::from_secs(30)).await;
    }

    /// Waits until a path was called `n` times.
    ///
    /// # Panics
    /// When it was not within half a minute.
    pub async fn called(&self, path: &str, n: usize) {
        eventually(
            &format!("{n} calls of {path}"),
            Duration::from_secs(30),
            || async {
                let calls = self.calls(path).len();
                if calls >= n {
                    Ok(())
                } else {
                    Err(format!("{calls}"))
                }
            },
        )
        .await;
    }
}

async fn serve(mut ex: Exchange, state: Arc<Mutex<State>>) -> io::Result<()> {
    let (path, query) = split(&ex.path);
    if let Some(service) = path.strip_prefix("/found") {
        let key = query.get("key").cloned().unwrap_or_default();
        let applied = {
            let state = state.lock();
            let effects = state.services.get(service).map(|s| &s.effects);
            effects.and_then(|e| e.get(&key)).is_some_and(|n| *n > 0)
        };
        let id = if applied {
            json!(format!("effect-{key}"))
        } else {
            Value::Null
        };
        return ex.json_reply(200, &json!({"id": id})).await;
    }
    let key = ex.header("idempotency-key").map(str::to_owned);
    let (index, received, applied) = {
        let mut state = state.lock();
        state.calls.push(Call {
            method: ex.method.clone(),
            path: path.clone(),
            query,
            headers: ex.headers.clone(),
            key: key.clone(),
            body: ex.body.clone(),
            applied: false,
        });
        let index = state.calls.len() - 1;
        let service = state.services.entry(path.clone()).or_default();
        (index, service.received.clone(), service.applied.clone())
    };
    received.hold(&mut ex).await?;
    let answer = {
        let mut state = state.lock();
        let service = state.services.entry(path).or_default();
        let known = if service.honours_keys { key.as_ref() } else { None };
        match known.and_then(|k| service.answered.get(k)).cloned() {
            Some(answer) => answer,
            None => {
                let scripted = service.script.pop_front().or_else(|| service.always.clone());
                let answer = scripted.unwrap_or_else(|| Answer::ok(&json!({"ok": true})));
                if answer.applies {
                    *service
                        .effects
                        .entry(key.clone().unwrap_or_default())
                        .or_default() += 1;
                    if let Some(key) = known {
                        // A repeated key is answered, whatever became of the first answer.
                        let mut again = answer.clone();
                        again.cut = false;
                        service.answered.insert(key.clone(), again);
                    }
                }
                state.calls[index].applied = answer.applies;
                answer
            }
        }
    };
    applied.hold(&mut ex).await?;
    if answer.cut {
        ex.cut(true);
        return Ok(());
    }
    let headers: Vec<(&str, &str)> = answer
        .headers
        .iter()
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .collect();
    ex.reply(answer.status, &headers, &answer.body).await
}

/// Path and decoded query.
fn split(target: &str) -> (String, BTreeMap<String, String>) {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let pairs = query.split('&').filter(|p| !p.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(name), decode(value))
    });
    (path.to_owned(), pairs.collect())
}

/// Percent-decoding, with `+` as a space.
fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let code = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        match code.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(if bytes[at] == b'+' { b' ' } else { bytes[at] });
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}
