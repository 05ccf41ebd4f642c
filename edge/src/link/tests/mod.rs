//! The link against nodes written by hand: an HTTP/2 server that does what a test wants.

mod port;
mod runs;
mod sessions;
mod streams;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use iop_shared::execution::Endpoint;
use iop_shared::ids::{ConnectionGeneration, NodeId, ProviderId, ProviderKey};
use iop_shared::openai::request::SplicedBody;
use iop_shared::wire::session::{Advertisement, ProviderAdvertisement, SessionLine};
use iop_shared::wire::{DRAIN_PATH, SESSION_PATH, h2};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::carrier::{self, Ended};
use super::handshake::Hello;
use super::registry::Registry;
use super::session::Session;
use super::*;
use crate::config::{EjectionSettings, QueueSettings};
use crate::metrics::Metrics;
use crate::pool::{Affinity, Ask, Candidate, Lease, Liveness, Model, Who};

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

const PATIENCE: Duration = Duration::from_secs(20);

/// A registry whose pool knows one model, `m`, at `n1/p`.
fn registry() -> Arc<Registry> {
    let candidate = Candidate {
        provider: ProviderKey::parse("n1/p").unwrap(),
        target: Arc::from("t"),
        priority: 0,
        weight: 1,
    };
    let model = Model {
        name: Arc::from("m"),
        candidates: vec![candidate],
        advertised: false,
        liveness: Liveness::default(),
        affinity: Affinity::None,
    };
    let queue = QueueSettings {
        max_depth: 10_000,
        max_wait: PATIENCE,
    };
    let ejection = EjectionSettings {
        consecutive: 5,
        base: Duration::from_secs(2),
        max: Duration::from_secs(20),
    };
    let metrics = Arc::new(Metrics::new().unwrap());
    Registry::new(Pool::new(vec![model], queue, ejection, metrics))
}

/// Waits until the node is live, as a request does.
async fn lease(registry: &Registry) -> Lease {
    let model = registry.pool().resolve("m").unwrap();
    let who = Who::nobody();
    let ask = Ask::first(&model, Endpoint::Chat, &who);
    registry.pool().acquire(ask).await.unwrap()
}

/// Ids and generations of the live nodes.
fn live(registry: &Registry) -> Vec<(String, u64)> {
    let nodes = registry.pool().nodes();
    nodes
        .iter()
        .map(|n| (n.id.to_string(), n.connection_generation.0))
        .collect()
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let poll = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, poll).await.is_ok(), "{what}");
}

fn advertisement(node: &str, draining: bool) -> Advertisement {
    Advertisement {
        node_id: NodeId::new(node).unwrap(),
        version: "9.9.9".into(),
        providers: vec![ProviderAdvertisement {
            id: ProviderId::new("p").unwrap(),
            adapter: "openai".into(),
            targets: vec!["t".into()],
            endpoints: vec![Endpoint::Chat],
            normalized_targets: vec![],
            capacity: 10_000,
            response_stall_timeout_ms: 0,
            first_content_timeout_ms: None,
            replay: true,
        }],
        draining,
    }
}

fn hello(node: &str, instance: &str) -> Hello {
    Hello {
        node_id: NodeId::new(node).unwrap(),
        instance: Some(instance.into()),
    }
}

fn line(node: &str) -> Bytes {
    SessionLine::Advertisement(advertisement(node, false))
        .to_line()
        .into()
}

/// What a fake node does besides its session.
struct Script {
    /// Never answers `/link/v1/ping`.
    deaf: bool,
    session_status: StatusCode,
    seen: Arc<Seen>,
}

/// What a fake node has seen.
#[derive(Default)]
struct Seen {
    drains: AtomicUsize,
    begun: AtomicUsize,
    cancelled: AtomicUsize,
    uris: parking_lot::Mutex<Vec<String>>,
}

/// A fake node's end of one connection.
struct Fake {
    /// The session stream; closed when dropped.
    session: mpsc::UnboundedSender<Bytes>,
    seen: Arc<Seen>,
    /// Resolves with the connection.
    served: JoinHandle<()>,
}

impl Fake {
    /// A node that has said nothing yet.
    fn start(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        Self::scripted(io, false, StatusCode::OK)
    }

    fn scripted(
        io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        deaf: bool,
        session_status: StatusCode,
    ) -> Self {
        let (session, lines) = mpsc::unbounded_channel();
        let seen = Arc::new(Seen::default());
        let script = Arc::new(Script {
            deaf,
            session_status,
            seen: Arc::clone(&seen),
        });
        let lines = parking_lot::Mutex::new(Some(lines));
        let service = service_fn(move |request| {
            let lines = (request_path(&request) == SESSION_PATH)
                .then(|| lines.lock().take())
                .flatten();
            answer(Arc::clone(&script), request, lines)
        });
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(h2::NODE_STREAM_WINDOW)
            .initial_connection_window_size(h2::NODE_CONNECTION_WINDOW)
            .max_concurrent_streams(h2::node_max_concurrent_streams(10_000))
            .max_pending_accept_reset_streams(h2::NODE_PENDING_ACCEPT_RESET_STREAMS)
            .max_local_error_reset_streams(None)
            .max_header_list_size(h2::MAX_HEADER_LIST)
            .serve_connection(TokioIo::new(io), service);
        let served = tasks::spawn(Kind::Session, "fake_node", async move {
            // How it ends is the other side's business.
            let _ = connection.await;
        });
        Self {
            session,
            seen,
            served,
        }
    }

    fn says(&self, line: impl Into<Bytes>) {
        self.session.send(line.into()).unwrap();
    }
}

fn request_path(request: &Request<Incoming>) -> &str {
    request.uri().path()
}

async fn answer(
    script: Arc<Script>,
    request: Request<Incoming>,
    lines: Option<mpsc::UnboundedReceiver<Bytes>>,
) -> Result<Answer, Infallible> {
    script.seen.uris.lock().push(request.uri().to_string());
    let status = |status| {
        let mut response = Response::new(http_body_util::Empty::new().boxed_unsync());
        *response.status_mut() = status;
        response
    };
    let word = request
        .headers()
        .get("iop-target")
        .map_or("", |v| v.to_str().unwrap())
        .to_owned();
    Ok(match request.uri().path() {
        SESSION_PATH => match lines {
            Some(lines) => {
                let mut response = Response::new(Told(lines).boxed_unsync());
                *response.status_mut() = script.session_status;
                response
            }
            None => status(StatusCode::CONFLICT),
        },
        DRAIN_PATH => {
            script.seen.drains.fetch_add(1, Ordering::SeqCst);
            status(StatusCode::OK)
        }
        "/link/v1/ping" if script.deaf => std::future::pending().await,
        "/link/v1/tunnels/chat" => {
            // The whole upload first, as providers do.
            let Ok(sent) = request.into_body().collect().await else {
                return Ok(status(StatusCode::BAD_REQUEST));
            };
            let run = Run::of(&word, sent.to_bytes(), Arc::clone(&script.seen));
            if word == "mute" {
                // The run exists, its head never comes.
                script.seen.begun.fetch_add(1, Ordering::SeqCst);
                std::future::pending::<()>().await;
            }
            Response::new(run.boxed_unsync())
        }
        _ => status(StatusCode::NOT_FOUND),
    })
}

/// The lines of a session, as the test says them.
struct Told(mpsc::UnboundedReceiver<Bytes>);

impl Body for Told {
    type Data = Bytes;
    type Error = Infallible;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|line| line.map(|l| Ok(Frame::data(l))))
    }
}

/// A provider's answer: `left` small frames, then trailers if any.
struct Run {
    left: usize,
    trailers: Option<HeaderMap>,
    payload: Bytes,
    seen: Arc<Seen>,
}

impl Run {
    fn of(word: &str, payload: Bytes, seen: Arc<Seen>) -> Self {
        let mut trailers = HeaderMap::new();
        trailers.insert("iop-terminal", "complete".parse().unwrap());
        let (left, trailers) = match word {
            "endless" | "mute" => (usize::MAX, None),
            "unfinished" => (3, None),
            _ => (100, Some(trailers)),
        };
        Self {
            left,
            trailers,
            payload,
            seen,
        }
    }
}

impl Body for Run {
    type Data = Bytes;
    type Error = Infallible;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left > 0 {
            self.left -= 1;
            return Poll::Ready(Some(Ok(Frame::data(self.payload.clone()))));
        }
        Poll::Ready(self.trailers.take().map(|t| Ok(Frame::trailers(t))))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.left > 0 {
            self.seen.cancelled.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// A run whose frames have the size of a token's event: 250 bytes, as link.md measured.
fn tunnel(word: &'static str) -> Request<SplicedBody> {
    tunnel_of(word, 250)
}

fn tunnel_of(word: &'static str, frame_bytes: usize) -> Request<SplicedBody> {
    Request::post("/link/v1/tunnels/chat")
        .header("iop-target", word)
        .body(SplicedBody::whole(Bytes::from(vec![b'x'; frame_bytes])))
        .unwrap()
}

/// Reads an answer to its end.
async fn read(response: Response<NodeBody>) -> Result<(usize, Option<HeaderMap>), LinkError> {
    let mut body = response.into_body();
    let (mut bytes, mut trailers) = (0, None);
    while let Some(frame) = body.frame().await {
        match frame?.into_data() {
            Ok(data) => bytes += data.len(),
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    Ok((bytes, trailers))
}

/// A connection between a carrier and a fake node in memory; time may be paused.
struct Pair {
    fake: Fake,
    ended: JoinHandle<()>,
    reason: watch::Receiver<Option<Ended>>,
    generation: ConnectionGeneration,
}

impl Pair {
    fn start(registry: &Arc<Registry>, hello: Hello) -> Self {
        Self::scripted(registry, hello, false, StatusCode::OK)
    }

    fn scripted(registry: &Arc<Registry>, hello: Hello, deaf: bool, session_status: StatusCode) -> Self {
        let (near, far) = tokio::io::duplex(1 << 20);
        Self::over(registry, hello, near, Fake::scripted(far, deaf, session_status))
    }

    fn over(
        registry: &Arc<Registry>,
        hello: Hello,
        near: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        fake: Fake,
    ) -> Self {
        let generation = registry.next_generation();
        let (tell, reason) = watch::channel(None);
        let registry = Arc::clone(registry);
        let ended = tasks::spawn(Kind::Session, "test_link", async move {
            let link = carrier::serve(TokioIo::new(near), hello, generation, &registry);
            let ended = registry.connections().track_future(link).await;
            tell.send_replace(Some(ended));
        });
        Self {
            fake,
            ended,
            reason,
            generation,
        }
    }

    async fn ended(self) -> (Ended, Fake) {
        self.ended.await.unwrap();
        let ended = self.reason.borrow().unwrap();
        (ended, self.fake)
    }
}

/// A path between two ends that swallows everything once told to, with both sockets open.
fn holed_path() -> (DuplexStream, DuplexStream, watch::Sender<bool>) {
    let (near, mut near_end) = tokio::io::duplex(1 << 16);
    let (mut far_end, far) = tokio::io::duplex(1 << 16);
    let (hole, mut is_hole) = watch::channel(false);
    tasks::spawn(Kind::Session, "test_path", async move {
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut near_end, &mut far_end) => {}
            _ = is_hole.changed() => std::future::pending::<()>().await,
        }
    });
    (near, far, hole)
}

/// Runs on several threads, as the process does.
fn threaded<F: Future<Output = ()>>(test: F) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), test).await.unwrap() });
}
