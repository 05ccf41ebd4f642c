//! For tests beside the code: a provider over loopback that does as the request says, and an edge at a link.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use iop_shared::execution::Endpoint;
use iop_shared::ids::{AttemptId, NodeId, ProviderId, RunId};
use iop_shared::wire::terminal::{NodeError, Terminal};
use iop_shared::wire::tunnel::TunnelHead;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

use crate::config::{ProcessResolver, Resolver};
use crate::providers::{Piece, ProviderBody};
use crate::tasks::{self, AbortOnDrop, Kind};
use crate::{Node, ProviderSettings};

/// The request header that tells a stub what to do.
pub(crate) const DO: HeaderName = HeaderName::from_static("x-do");

/// A provider whose behaviour the request names.
pub(crate) struct Stub {
    pub(crate) url: String,
    shared: Arc<Shared>,
    _accept: AbortOnDrop,
}

struct Shared {
    arrived: watch::Sender<usize>,
    gone: watch::Sender<usize>,
    last: Mutex<(String, Vec<u8>)>,
    lists: Mutex<&'static str>,
}

impl Stub {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            arrived: watch::Sender::new(0),
            gone: watch::Sender::new(0),
            last: Mutex::default(),
            lists: Mutex::default(),
        });
        let s = Arc::clone(&shared);
        let accept = tasks::spawn(Kind::Session, "stub", async move {
            while let Ok((socket, _)) = listener.accept().await {
                let s = Arc::clone(&s);
                tasks::spawn(Kind::Session, "stub connection", async move {
                    // An error is a peer that hung up.
                    let _ = connection(socket, &s).await;
                });
            }
        });
        Self {
            url,
            shared,
            _accept: AbortOnDrop(accept),
        }
    }

    /// Does that when asked for its models.
    pub(crate) fn lists(&self, what: &'static str) {
        *self.shared.lists.lock() = what;
    }

    /// Resolves when that many requests have come.
    pub(crate) async fn arrived(&self, n: usize) {
        self.shared
            .arrived
            .subscribe()
            .wait_for(|a| *a >= n)
            .await
            .unwrap();
    }

    /// Resolves when that many peers have hung up on an unfinished answer; panics when that takes longer than `bound`.
    pub(crate) async fn hung_up(&self, n: usize, bound: Duration) {
        let mut gone = self.shared.gone.subscribe();
        let seen = tokio::time::timeout(bound, gone.wait_for(|g| *g >= n))
            .await
            .map(drop);
        assert!(
            seen.is_ok(),
            "{} of {n} hung up within {bound:?}",
            *self.shared.gone.borrow()
        );
    }

    /// Head and body of the last request.
    pub(crate) fn last(&self) -> (String, Vec<u8>) {
        self.shared.last.lock().clone()
    }
}

async fn connection(mut socket: TcpStream, shared: &Shared) -> std::io::Result<()> {
    let mut buf = Vec::new();
    loop {
        let end = loop {
            if let Some(end) = buf.windows(4).position(|w| w == b"\r\n\r\n") {
                break end + 4;
            }
            if socket.read_buf(&mut buf).await? == 0 {
                return Ok(());
            }
        };
        let head = String::from_utf8_lossy(&buf[..end]).into_owned();
        buf.drain(..end);
        let field = |name: &str| {
            head.lines()
                .filter_map(|l| l.split_once(": "))
                .find(|(k, _)| k.eq_ignore_ascii_case(name))
                .map(|(_, v)| v.to_owned())
        };
        let what = if head.starts_with("GET /v1/models ") {
            (*shared.lists.lock()).to_owned()
        } else {
            field("x-do").unwrap_or_default()
        };
        if what == "never-read" {
            shared.arrived.send_modify(|n| *n += 1);
            std::future::pending::<()>().await;
        }
        let length: usize = field("content-length").and_then(|l| l.parse().ok()).unwrap_or(0);
        while buf.len() < length {
            if socket.read_buf(&mut buf).await? == 0 {
                return Ok(());
            }
        }
        *shared.last.lock() = (head.clone(), buf.drain(..length).collect());
        shared.arrived.send_modify(|n| *n += 1);
        if act(&mut socket, &what, &head, shared).await? {
            return Ok(());
        }
    }
}

const SSE: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// Answers; `true`: the connection is over.
async fn act(socket: &mut TcpStream, what: &str, head: &str, shared: &Shared) -> std::io::Result<bool> {
    match what {
        "hang" => {
            gone(socket, shared).await;
            return Ok(true);
        }
        "cut-before-head" => return Ok(true),
        "reset-before-head" => {
            socket.set_zero_linger()?;
            return Ok(true);
        }
        "no-http" => {
            socket.write_all(b"what?\r\n\r\n").await?;
            return Ok(true);
        }
        "endless" => {
            socket.write_all(SSE.as_bytes()).await?;
            socket.write_all(b"d\r\ndata: begun\n\n\r\n").await?;
            gone(socket, shared).await;
            return Ok(true);
        }
        "cut-stream" => {
            socket.write_all(SSE.as_bytes()).await?;
            socket.write_all(b"d\r\ndata: begun\n\n\r\n").await?;
            return Ok(true);
        }
        "short" => {
            socket
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
                .await?;
            return Ok(true);
        }
        "stream" => {
            socket.write_all(SSE.as_bytes()).await?;
            socket
                .write_all(b"9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n")
                .await?;
        }
        "fails" => {
            socket
                .write_all(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n")
                .await?;
        }
        "redirect" => {
            socket
                .write_all(
                    b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
                )
                .await?;
        }
        "big-head" => {
            let head = format!(
                "HTTP/1.1 200 OK\r\nx-big: {}\r\ncontent-length: 0\r\n\r\n",
                "a".repeat(140 << 10)
            );
            socket.write_all(head.as_bytes()).await?;
        }
        "snappy" => {
            socket
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-encoding: snappy\r\ncontent-length: 1\r\n\r\nx")
                .await?;
        }
        _ if head.starts_with("GET /v1/models ") => {
            let body = r#"{"object":"list","data":[{"id":"m"},{"id":"n"}]}"#;
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            socket.write_all(answer.as_bytes()).await?;
        }
        _ => {
            socket
                .write_all(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-multi: 1\r\nx-multi: 2\r\n\
                      set-cookie: a=b\r\nconnection: keep-alive\r\ncontent-length: 11\r\n\r\n{\"ok\":true}",
                )
                .await?;
        }
    }
    Ok(false)
}

async fn gone(socket: &mut TcpStream, shared: &Shared) {
    let mut buf = [0; 64];
    // Nothing more is asked on this connection: anything read is its end.
    while matches!(socket.read(&mut buf).await, Ok(n) if n > 0) {}
    shared.gone.send_modify(|n| *n += 1);
}

/// A provider's body as the test feeds it.
pub(crate) struct Fed(mpsc::UnboundedReceiver<Piece>);

impl Fed {
    /// The end of the sender is the body's end; a sender is closed when the body was dropped.
    pub(crate) fn channel() -> (mpsc::UnboundedSender<Piece>, ProviderBody) {
        let (feed, fed) = mpsc::unbounded_channel();
        (feed, ProviderBody::Fed(Self(fed)))
    }

    pub(crate) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, NodeError>>> {
        self.0.poll_recv(cx).map(|piece| piece.map(Ok))
    }
}

/// A node from `[[providers]]` tables.
pub(crate) fn node(providers: &str) -> Node {
    node_with(providers, &ProcessResolver)
}

pub(crate) fn node_with(providers: &str, resolver: &impl Resolver) -> Node {
    #[derive(serde::Deserialize)]
    struct File {
        providers: Vec<iop_shared::config::ProviderConfig>,
    }
    let (file, source) = iop_shared::config::Source::parse::<File>("test.toml", providers).unwrap();
    let all = ProviderSettings::resolve_all(file.providers, &source, resolver).unwrap();
    Node::new(NodeId::new("n1").unwrap(), &all, &prometheus::Registry::new()).unwrap()
}

/// A `[[providers]]` table for a stub.
pub(crate) fn openai(id: &str, url: &str, more: &str) -> String {
    format!(
        "[[providers]]\nid = {id:?}\nadapter = \"openai\"\nbase_url = {url:?}\ntargets = [\"m\"]\n{more}\n"
    )
}

/// A tunnel request for target `m`.
pub(crate) fn tunnel(provider: &str, what: &'static str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    tunnel_with(provider, what, body, |_| {})
}

pub(crate) fn tunnel_with(
    provider: &str,
    what: &'static str,
    body: impl Into<Bytes>,
    change: impl FnOnce(&mut TunnelHead),
) -> Request<Full<Bytes>> {
    let mut head = TunnelHead {
        endpoint: Endpoint::Chat,
        run_id: RunId(uuid::Uuid::from_u128(1)),
        attempt_id: AttemptId(uuid::Uuid::from_u128(2)),
        provider: ProviderId::new(provider).unwrap(),
        target: "m".into(),
        response_stall_timeout_ms: 0,
        method: http::Method::POST,
        path: None,
        accept_encoding: None,
    };
    change(&mut head);
    let mut map = HeaderMap::new();
    head.write(&mut map);
    map.insert(DO, HeaderValue::from_static(what));
    let mut request = Request::new(Full::new(body.into()));
    *request.method_mut() = http::Method::POST;
    let path = TunnelHead::uri(head.endpoint);
    *request.uri_mut() = format!("http://node{path}").parse().unwrap();
    *request.headers_mut() = map;
    request
}

/// Any other request of an edge.
pub(crate) fn request(method: &str, path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    let uri = format!("http://node{path}");
    Request::builder()
        .method(method)
        .uri(uri)
        .body(Full::new(body.into()))
        .unwrap()
}

/// A whole answer: head, bytes, terminal.
pub(crate) struct Whole {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) data: Bytes,
    pub(crate) terminal: Option<Terminal>,
}

impl Whole {
    pub(crate) fn code(&self) -> &'static str {
        match &self.terminal {
            Some(Terminal::Error(e)) => e.code.as_str(),
            Some(Terminal::Complete { .. }) => "complete",
            Some(Terminal::Cancelled) => "cancelled",
            None => "none",
        }
    }
}

/// Reads an answer to its end.
pub(crate) async fn whole<B>(response: Response<B>) -> Whole
where
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap();
    let terminal = body.trailers().and_then(Terminal::from_trailers);
    Whole {
        status: parts.status.as_u16(),
        headers: parts.headers,
        data: body.to_bytes(),
        terminal,
    }
}
