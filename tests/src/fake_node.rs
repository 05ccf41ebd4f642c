//! A node under the test's control: it dials the link as `docs/link.md` says, and every answer of it is the test's.
//!
//! Nothing of the product is linked: names and lines are written out here as the protocol has them.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use crate::client::{Head, parse_head, request_head};
use crate::stack::LINK_TOKEN;
use crate::within;

/// Nothing that the edge owes the node takes longer.
const SOON: Duration = Duration::from_secs(10);
const TUNNELS: &str = "/link/v1/tunnels/";
const RUNS: &str = "/link/v1/runs";
const COMMANDS: &str = "/link/v1/commands/";

type Body = UnsyncBoxBody<Bytes, Infallible>;
type Frames = mpsc::UnboundedSender<Frame<Bytes>>;
/// What a session stream says, and who waits for it to be opened.
type Unopened = (mpsc::UnboundedReceiver<Frame<Bytes>>, oneshot::Sender<()>);

/// One link of the node. Dropping it breaks the connection.
pub struct FakeNode {
    /// The generation that the edge gave this connection.
    pub generation: u64,
    /// Attempts in the order they came.
    pub tunnels: mpsc::UnboundedReceiver<Tunnel>,
    /// Commands in the order they came.
    pub commands: mpsc::UnboundedReceiver<Command>,
    session: Frames,
    connection: tokio::task::JoinHandle<()>,
}

/// What the node says of one provider. Its adapter has the name of the provider: 004 calls one of them `adapter_key`
/// and the other `adapter`, and no answer of this node is wrong for want of telling them apart.
pub fn provider(id: &str, targets: &[&str], capacity: u32) -> Value {
    json!({"id": id, "adapter": id, "targets": targets, "endpoints": ["chat", "responses"],
           "capacity": capacity, "response_stall_timeout_ms": 300_000, "replay": true})
}

/// The first line of a session.
pub fn advertisement(node: &str, providers: &[Value]) -> Value {
    json!({"node_id": node, "version": "0.0.0", "providers": providers, "draining": false})
}

impl FakeNode {
    /// Dials the link port at `addr` and serves it; `instance` stands for one start of the node's process.
    ///
    /// # Panics
    /// When the edge refuses, or asks for no session.
    pub async fn dial(addr: &str, instance: &str, advertisement: &Value) -> Self {
        let node = advertisement["node_id"].as_str().unwrap().to_owned();
        let mut stream = TcpStream::connect(addr).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let bearer = format!("Bearer {LINK_TOKEN}");
        let headers = [
            ("host", addr),
            ("connection", "upgrade"),
            ("upgrade", "iop-link/1"),
            ("authorization", bearer.as_str()),
            ("iop-node-id", &node),
            ("iop-node-instance", instance),
        ];
        let request = request_head("GET", "/link", &headers, None);
        stream.write_all(&request).await.unwrap();
        let head = within("an answer to the handshake", SOON, answer_head(&mut stream)).await;
        assert_eq!(head.status, 101, "{head:?}");
        let generation = head.header("iop-connection-generation").unwrap();
        let generation = generation.parse().unwrap();

        let (session, lines) = mpsc::unbounded_channel();
        let (to_tunnels, tunnels) = mpsc::unbounded_channel();
        let (to_commands, commands) = mpsc::unbounded_channel();
        let (opened, open) = oneshot::channel();
        let node = Arc::new(Served {
            session: Mutex::new(Some((lines, opened))),
            tunnels: to_tunnels,
            commands: to_commands,
        });
        let service = service_fn(move |request| {
            let node = Arc::clone(&node);
            async move { Ok::<_, Infallible>(node.answer(request).await) }
        });
        let connection = tokio::spawn(async move {
            let served = http2::Builder::new(TokioExecutor::new())
                .max_concurrent_streams(1_000)
                .serve_connection(TokioIo::new(stream), service);
            // However the link ends, the test sees it from the edge's side.
            let _ = served.await;
        });
        let node = Self {
            generation,
            tunnels,
            commands,
            session,
            connection,
        };
        node.say(advertisement);
        within("the session is asked for", SOON, open).await.unwrap();
        node
    }

    /// One more line of the session.
    pub fn say(&self, line: &Value) {
        let line = Bytes::from(format!("{line}\n"));
        assert!(
            self.session.send(Frame::data(line)).is_ok(),
            "the session is over"
        );
    }

    /// The next attempt.
    ///
    /// # Panics
    /// When none comes.
    pub async fn tunnel(&mut self) -> Tunnel {
        within("a tunnel", SOON, self.tunnels.recv()).await.unwrap()
    }

    /// The next command.
    ///
    /// # Panics
    /// When none comes within `bound`.
    pub async fn command(&mut self, bound: Duration) -> Command {
        within("a command", bound, self.commands.recv()).await.unwrap()
    }
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// What the requests of the edge are answered with.
struct Served {
    session: Mutex<Option<Unopened>>,
    tunnels: mpsc::UnboundedSender<Tunnel>,
    commands: mpsc::UnboundedSender<Command>,
}

impl Served {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        if path == "/link/v1/session" {
            let Some((lines, opened)) = self.session.lock().take() else {
                return plain(StatusCode::CONFLICT, Bytes::new());
            };
            let _ = opened.send(());
            return Response::new(frames(lines));
        }
        let Ok(body) = body.collect().await.map(|b| b.to_bytes()) else {
            return plain(StatusCode::BAD_REQUEST, Bytes::new());
        };
        let (answer, answered) = oneshot::channel();
        let taken = if path.starts_with(TUNNELS) || path == RUNS {
            let tunnel = Tunnel {
                path,
                headers: parts.headers,
                body,
                answer: Some(answer),
                frames: None,
            };
            self.tunnels.send(tunnel).is_ok()
        } else if let Some(name) = path.strip_prefix(COMMANDS) {
            let body = serde_json::from_slice(&body).unwrap_or_default();
            let command = Command {
                name: name.to_owned(),
                body,
                answer,
            };
            self.commands.send(command).is_ok()
        } else {
            // A ping, or a drain that this node has nothing to say to.
            return plain(StatusCode::NOT_FOUND, Bytes::new());
        };
        match answered.await {
            Ok(response) if taken => response,
            // The test is not interested any more.
            _ => std::future::pending().await,
        }
    }
}

/// One attempt of the edge, and the means to answer it.
pub struct Tunnel {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
    answer: Option<oneshot::Sender<Response<Body>>>,
    frames: Option<Frames>,
}

impl Tunnel {
    /// A field of the attempt: a header of a tunnel, a member of a run.
    ///
    /// # Panics
    /// When it is not there.
    pub fn field(&self, name: &str) -> String {
        if self.path == RUNS {
            let run: Value = serde_json::from_slice(&self.body).unwrap();
            return run[name.replace('-', "_")].as_str().unwrap().to_owned();
        }
        let value = &self.headers[format!("iop-{name}").as_str()];
        value.to_str().unwrap().to_owned()
    }

    /// The client's body as JSON.
    ///
    /// # Panics
    /// When it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The provider's head.
    ///
    /// # Panics
    /// When the edge has given the attempt up.
    pub fn head(&mut self, status: u16, headers: &[(&str, &str)]) {
        let mut all = vec![("iop-origin", "provider")];
        all.extend_from_slice(headers);
        self.respond(status, &all);
    }

    /// Bytes of the provider.
    ///
    /// # Panics
    /// When there is no head yet, or the edge has given the attempt up.
    pub fn data(&self, bytes: impl Into<Bytes>) {
        let frames = self.frames.as_ref().expect("a head comes first");
        assert!(
            frames.send(Frame::data(bytes.into())).is_ok(),
            "the edge has left"
        );
    }

    /// The one terminal; without a head before it, as the node's own answer.
    ///
    /// # Panics
    /// When the edge has given the attempt up.
    pub fn terminal(mut self, trailers: &[(&str, &str)]) {
        if self.frames.is_none() {
            self.respond(200, &[("iop-origin", "node")]);
        }
        let frames = self.frames.take().unwrap();
        let trailers = Frame::trailers(header_map(trailers));
        assert!(frames.send(trailers).is_ok(), "the edge has left");
    }

    /// A whole Chat answer that ends well.
    pub fn complete(mut self, body: &Value) {
        self.head(200, &[("content-type", "application/json")]);
        self.data(body.to_string());
        self.terminal(&[("iop-terminal", "complete")]);
    }

    /// A stall: the error terminal, with `failure` as its evidence where there is one.
    pub fn stalled(self, failure: Option<&str>) {
        let evidence = failure.map(encode);
        let mut trailers = vec![
            ("iop-terminal", "error"),
            ("iop-error-code", "response_stalled"),
            ("iop-error", "no%20progress%20at%20the%20provider"),
        ];
        trailers.extend(evidence.as_deref().map(|e| ("iop-failure", e)));
        self.terminal(&trailers);
    }

    /// Good evidence of a stall of this attempt, numbered `sequence`: a confirmed fence, and the pair of `health`.
    ///
    /// # Panics
    /// When `health` is no health.
    pub fn evidence(&self, health: &str, sequence: u64) -> Value {
        json!({"failure_code": "response_stalled", "provider_health": health,
               "liveness_classification": classification(health), "idle_duration_ms": 1_000,
               "run_id": self.field("run-id"), "attempt_id": self.field("attempt-id"),
               "attempt_fence": "confirmed", "adapter": self.field("provider"), "target": self.field("target"),
               "health_observation_seq": sequence})
    }

    /// Waits until the edge gives the attempt up.
    ///
    /// # Panics
    /// When it does not.
    pub async fn given_up(&mut self) {
        let what = "the edge gives the attempt up";
        match (&mut self.answer, &self.frames) {
            (Some(answer), _) => within(what, SOON, answer.closed()).await,
            (None, Some(frames)) => within(what, SOON, frames.closed()).await,
            (None, None) => {}
        }
    }

    fn respond(&mut self, status: u16, headers: &[(&str, &str)]) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut response = Response::new(frames(receiver));
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        *response.headers_mut() = header_map(headers);
        self.frames = Some(sender);
        let answer = self.answer.take().expect("one head each");
        assert!(answer.send(response).is_ok(), "the edge has left");
    }
}

/// One command of the edge, and the means to answer it.
pub struct Command {
    pub name: String,
    pub body: Value,
    answer: oneshot::Sender<Response<Body>>,
}

impl Command {
    /// Answers; an edge that asks no more does not hear it.
    ///
    /// # Panics
    /// When `status` is none.
    pub fn answer(self, status: u16, body: impl Into<Bytes>) {
        let status = StatusCode::from_u16(status).unwrap();
        let _ = self.answer.send(plain(status, body.into()));
    }

    /// A good answer to `capabilities` about what was asked.
    pub fn capabilities(&self, health: &str, sequence: u64) -> Value {
        json!({"adapter_key": self.body["provider"], "target": self.body["target"],
               "provider_status": health, "health_observation_seq": sequence})
    }
}

/// The classification that 004 pairs with a health.
///
/// # Panics
/// When it is no health.
pub fn classification(health: &str) -> &'static str {
    let pairs = BTreeMap::from([
        ("available", "request_stalled"),
        ("unavailable", "provider_unhealthy"),
        ("unknown", "health_unknown"),
    ]);
    pairs[health]
}

/// Reads the head of the handshake's answer and nothing of what follows it.
async fn answer_head(stream: &mut TcpStream) -> Head {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    parse_head(&head).unwrap()
}

fn frames(receiver: mpsc::UnboundedReceiver<Frame<Bytes>>) -> Body {
    let frames = stream::unfold(receiver, |mut receiver| async {
        let frame = receiver.recv().await?;
        Some((Ok(frame), receiver))
    });
    StreamBody::new(frames).boxed_unsync()
}

fn plain(status: StatusCode, body: Bytes) -> Response<Body> {
    let mut response = Response::new(Full::new(body).boxed_unsync());
    *response.status_mut() = status;
    response
}

fn header_map(headers: &[(&str, &str)]) -> HeaderMap {
    let pair = |(name, value): &(&str, &str)| {
        (
            HeaderName::try_from(*name).unwrap(),
            HeaderValue::try_from(*value).unwrap(),
        )
    };
    headers.iter().map(pair).collect()
}

/// A value of an `iop-*` header: percent-encoded outside visible ASCII.
pub fn encode(text: &str) -> String {
    text.bytes()
        .map(|b| match b {
            b'%' => "%25".to_owned(),
            0x21..=0x7e => char::from(b).to_string(),
            _ => format!("%{b:02X}"),
        })
        .collect()
}
