//! An MCP server under the test's control, over streamable HTTP: JSON-RPC by hand, sessions that can be forgotten, calls and what
//! they changed counted apart.
//!
//! It speaks the sessions of 2025-06-18, or, when `modern` was asked for, the sessionless 2026-07-28.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::barrier::Barrier;
use crate::provider::{Exchange, Stub};

/// One `tools/call`.
#[derive(Debug, Clone)]
pub struct ToolCall {
    pub tool: String,
    pub arguments: Value,
    /// `_meta["iop/idempotency-key"]`.
    pub key: Option<String>,
    /// `_meta.traceparent`.
    pub trace: Option<String>,
    /// `inputResponses` of a call that goes on after `input_required`.
    pub answers: Value,
    /// `requestState` of the same.
    pub state: Value,
    pub headers: Vec<(String, String)>,
    pub session: Option<String>,
    pub applied: bool,
}

/// What a call is answered.
#[derive(Debug, Clone)]
pub enum Reply {
    /// The `result` of the call.
    Result(Value),
    /// The same as an event stream.
    Streamed(Value),
    /// A JSON-RPC error.
    Error(i64, String),
    /// An HTTP status without a body; the call changes nothing.
    Status(u16, Vec<(String, String)>),
    /// 404 after the call was applied, as a server answers that forgot the session meanwhile.
    Expired,
    /// The head of an event stream, and the connection is cut.
    Cut,
    /// Silence.
    Stall,
}

impl Reply {
    pub fn text(text: &str) -> Self {
        Self::Result(json!({"content": [{"type": "text", "text": text}]}))
    }

    /// A result that says that the tool failed.
    pub fn failed(text: &str) -> Self {
        Self::Result(json!({"content": [{"type": "text", "text": text}], "isError": true}))
    }

    /// A question to a person; `state` comes back with the answer.
    pub fn asks(name: &str, message: &str, schema: &Value, state: &str) -> Self {
        let request = json!({"method": "elicitation/create",
                             "params": {"mode": "form", "message": message, "requestedSchema": schema}});
        Self::Result(
            json!({"resultType": "input_required", "inputRequests": {name: request},
                            "requestState": state}),
        )
    }
}

#[derive(Default)]
struct State {
    modern: bool,
    sessions: BTreeSet<String>,
    made: usize,
    calls: Vec<ToolCall>,
    scripts: BTreeMap<String, VecDeque<Reply>>,
    received: BTreeMap<String, Barrier>,
    applied: BTreeMap<String, Barrier>,
    methods: Vec<String>,
}

/// A running server.
pub struct McpStub {
    stub: Stub,
    state: Arc<Mutex<State>>,
}

impl McpStub {
    pub async fn start() -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let stub = {
            let state = Arc::clone(&state);
            Stub::start(move |exchange| serve(exchange, Arc::clone(&state))).await
        };
        Self { stub, state }
    }

    pub fn url(&self) -> String {
        format!("http://{}/mcp", self.stub.addr)
    }

    /// Speaks 2026-07-28, without sessions.
    pub fn modern(&self) {
        self.state.lock().modern = true;
    }

    /// What the next calls of a tool are answered; `{"ok": true}` as text when nothing is left.
    pub fn script(&self, tool: &str, replies: Vec<Reply>) {
        self.state
            .lock()
            .scripts
            .entry(tool.to_owned())
            .or_default()
            .extend(replies);
    }

    /// Before a call changes anything.
    pub fn received(&self, tool: &str) -> Barrier {
        self.state
            .lock()
            .received
            .entry(tool.to_owned())
            .or_default()
            .clone()
    }

    /// After it did, before the answer.
    pub fn applied(&self, tool: &str) -> Barrier {
        self.state
            .lock()
            .applied
            .entry(tool.to_owned())
            .or_default()
            .clone()
    }

    /// Every session is unknown from here on.
    pub fn forget_sessions(&self) {
        self.state.lock().sessions.clear();
    }

    /// How many sessions were ever made.
    pub fn sessions(&self) -> usize {
        self.state.lock().made
    }

    /// The JSON-RPC methods asked for, in order.
    pub fn methods(&self) -> Vec<String> {
        self.state.lock().methods.clone()
    }

    /// Calls of one tool, in order.
    pub fn calls(&self, tool: &str) -> Vec<ToolCall> {
        let state = self.state.lock();
        state.calls.iter().filter(|c| c.tool == tool).cloned().collect()
    }

    /// How often a tool changed something.
    pub fn effects(&self, tool: &str) -> usize {
        self.calls(tool).iter().filter(|c| c.applied).count()
    }
}

async fn serve(mut ex: Exchange, state: Arc<Mutex<State>>) -> io::Result<()> {
    let session = ex.header("mcp-session-id").map(str::to_owned);
    if ex.method == "DELETE" {
        state.lock().sessions.remove(&session.unwrap_or_default());
        return ex.reply(204, &[], b"").await;
    }
    if ex.method != "POST" {
        return ex.reply(405, &[], b"").await;
    }
    let message = ex.json();
    let method = message["method"].as_str().unwrap_or_default().to_owned();
    let (modern, known) = {
        let mut state = state.lock();
        state.methods.push(method.clone());
        let known = session.as_ref().is_some_and(|s| state.sessions.contains(s));
        (state.modern, known)
    };
    match method.as_str() {
        "server/discover" if modern => {
            let result = json!({"resultType": "complete", "supportedVersions": ["2026-07-28"],
                "capabilities": {"tools": {}}, "ttlMs": 0, "cacheScope": "private",
                "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "stub", "version": "1"}}});
            result_of(&mut ex, &message, &result, &[]).await
        }
        "initialize" if !modern => {
            let id = {
                let mut state = state.lock();
                state.made += 1;
                let id = format!("session-{}", state.made);
                state.sessions.insert(id.clone());
                id
            };
            let result = json!({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                                "serverInfo": {"name": "stub", "version": "1"}});
            result_of(&mut ex, &message, &result, &[("mcp-session-id", &id)]).await
        }
        "initialize" | "server/discover" => {
            error_of(&mut ex, 400, &message, -32601, "Method not found.").await
        }
        _ if !modern && session.is_none() => {
            error_of(&mut ex, 400, &message, -32600, "A session is needed.").await
        }
        _ if !modern && !known => error_of(&mut ex, 404, &message, -32001, "Session not found.").await,
        "ping" => result_of(&mut ex, &message, &json!({}), &[]).await,
        "tools/call" => call(&mut ex, &message, session, &state).await,
        _ => ex.reply(202, &[], b"").await,
    }
}

async fn call(
    ex: &mut Exchange,
    message: &Value,
    session: Option<String>,
    state: &Mutex<State>,
) -> io::Result<()> {
    let params = &message["params"];
    let tool = params["name"].as_str().unwrap_or_default().to_owned();
    let (index, received, applied) = {
        let mut state = state.lock();
        state.calls.push(ToolCall {
            tool: tool.clone(),
            arguments: params["arguments"].clone(),
            key: params["_meta"]["iop/idempotency-key"].as_str().map(str::to_owned),
            trace: params["_meta"]["traceparent"].as_str().map(str::to_owned),
            answers: params["inputResponses"].clone(),
            state: params["requestState"].clone(),
            headers: ex.headers.clone(),
            session,
            applied: false,
        });
        let index = state.calls.len() - 1;
        let received = state.received.entry(tool.clone()).or_default().clone();
        let applied = state.applied.entry(tool.clone()).or_default().clone();
        (index, received, applied)
    };
    received.hold(ex).await?;
    let reply = {
        let mut state = state.lock();
        let scripted = state.scripts.get_mut(&tool).and_then(VecDeque::pop_front);
        let reply = scripted.unwrap_or_else(|| Reply::text("{\"ok\": true}"));
        let asks = matches!(&reply, Reply::Result(r) if r["resultType"] == "input_required");
        let applies = !asks && !matches!(reply, Reply::Error(..) | Reply::Status(..) | Reply::Stall);
        state.calls[index].applied = applies;
        reply
    };
    applied.hold(ex).await?;
    match reply {
        Reply::Result(result) => result_of(ex, message, &result, &[]).await,
        Reply::Streamed(result) => {
            ex.sse().await?;
            ex.data(&json!({"jsonrpc": "2.0", "id": message["id"], "result": result}).to_string())
                .await?;
            ex.end().await
        }
        Reply::Error(code, text) => error_of(ex, 200, message, code, &text).await,
        Reply::Status(status, headers) => {
            let headers: Vec<(&str, &str)> = headers.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            ex.reply(status, &headers, b"").await
        }
        Reply::Expired => error_of(ex, 404, message, -32001, "Session not found.").await,
        Reply::Cut => {
            ex.sse().await?;
            ex.cut(true);
            Ok(())
        }
        Reply::Stall => {
            ex.gone().await;
            Ok(())
        }
    }
}

async fn result_of(
    ex: &mut Exchange,
    message: &Value,
    result: &Value,
    headers: &[(&str, &str)],
) -> io::Result<()> {
    let body = json!({"jsonrpc": "2.0", "id": message["id"], "result": result}).to_string();
    let mut all = vec![("content-type", "application/json")];
    all.extend_from_slice(headers);
    ex.reply(200, &all, body.as_bytes()).await
}

async fn error_of(ex: &mut Exchange, status: u16, message: &Value, code: i64, text: &str) -> io::Result<()> {
    let body = json!({"jsonrpc": "2.0", "id": message["id"], "error": {"code": code, "message": text}});
    ex.json_reply(status, &body).await
}
