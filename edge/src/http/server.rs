//! Listeners and the accept loop. Decides how sockets are set up and when a connection ends on behalf of the process;
//! knows no routes.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;

use super::connection;
use super::write_deadline::{ConnState, WriteDeadline};
use crate::drain::Drain;
use crate::gate::GateBody;
use crate::tasks;

/// Connections that wait to be accepted; a burst of clients after a restart must not be refused.
const BACKLOG: u32 = 4096;
/// Unsent bytes above which the kernel takes no more for one socket. Without it a write to a slow reader would block
/// for as long as megabytes take to drain, and a client that does read would look like one that does not.
#[cfg(target_os = "linux")]
const NOT_SENT_LOW_WATER: u32 = 32 << 10;
const TLS_HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// After an accept that failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// A request's way to its own connection.
#[derive(Debug, Clone)]
pub struct ConnHandle(Arc<ConnState>);

impl ConnHandle {
    pub(super) fn new(state: &Arc<ConnState>) -> Self {
        Self(Arc::clone(state))
    }

    /// For the rest of this request the client may block writes no longer than this. Only shortens the configured
    /// limit; on HTTP/2 the shortest of all requests holds for the connection.
    pub fn limit_write_stall(&self, longest: Duration) {
        self.0.limit_write_stall(longest);
    }
}

/// A listening socket.
///
/// # Errors
/// As the system says; the address is not in the error.
pub fn bind(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(BACKLOG)
}

/// How connections of one listener are treated.
pub struct Options {
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// How long a client may take nothing (`gate.client_write_timeout`).
    pub write_timeout: Duration,
}

/// A started listener.
pub struct Running {
    connections: TaskTracker,
}

impl Running {
    /// Resolves when the drain has begun and every connection that was open then has ended.
    pub async fn drained(&self) {
        self.connections.wait().await;
    }
}

/// Accepts connections for as long as the process runs; `handler` answers their requests.
///
/// When `drain` starts, idle connections are closed and busy ones after their response; the listener stays open so that
/// `/readyz` can be read.
pub fn start<H, Fut>(listener: TcpListener, options: Options, drain: Drain, handler: H) -> Running
where
    H: Fn(ConnHandle, Request<Incoming>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Response<GateBody>> + Send + 'static,
{
    let connections = TaskTracker::new();
    let tracker = connections.clone();
    let server = Arc::new(Server {
        handler,
        builder: connection::builder(),
        tls: options.tls.map(TlsAcceptor::from),
        write_timeout: options.write_timeout,
        closing: AtomicBool::new(false),
        closed: Notify::new(),
    });
    tasks::spawn(tasks::Kind::Service, "http_accept", async move {
        let mut draining = std::pin::pin!(drain.started());
        loop {
            tokio::select! {
                biased;
                () = &mut draining, if !server.is_closing() => {
                    // In this order: a connection that registers between the two sees the flag.
                    server.closing.store(true, Ordering::SeqCst);
                    server.closed.notify_waiters();
                    tracker.close();
                }
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        // Who comes to look at a draining process must not keep it from leaving.
                        let held = (!server.is_closing()).then(|| tracker.token());
                        let server = Arc::clone(&server);
                        tasks::spawn(tasks::Kind::Session, "http_connection", async move {
                            server.serve(stream).await;
                            drop(held);
                        });
                    }
                    Err(error) if is_about_one_connection(&error) => {}
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        }
    });
    Running { connections }
}

fn is_about_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

struct Server<H> {
    handler: H,
    builder: hyper_util::server::conn::auto::Builder<connection::Tasks>,
    tls: Option<TlsAcceptor>,
    write_timeout: Duration,
    closing: AtomicBool,
    closed: Notify,
}

impl<H, Fut> Server<H>
where
    H: Fn(ConnHandle, Request<Incoming>) -> Fut,
    Fut: Future<Output = Response<GateBody>> + Send + 'static,
{
    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    async fn serve(&self, stream: TcpStream) {
        // Neither option is worth a connection.
        let _ = stream.set_nodelay(true);
        set_low_water(&stream);
        let state = ConnState::new(self.write_timeout);
        let io = WriteDeadline::new(stream, Arc::clone(&state));
        // A connection that was accepted while the process drains is served: each answer closes it.
        let late = self.is_closing();
        let mut closed = std::pin::pin!(self.closed.notified());
        closed.as_mut().enable();
        let is_closing = || !late && self.is_closing();
        match &self.tls {
            None => connection::serve(io, state, &self.builder, &self.handler, closed, is_closing).await,
            Some(tls) => {
                let Ok(Ok(io)) = tokio::time::timeout(TLS_HANDSHAKE_WITHIN, tls.accept(io)).await else { return };
                connection::serve(io, state, &self.builder, &self.handler, closed, is_closing).await;
            }
        }
    }
}

fn set_low_water(stream: &TcpStream) {
    #[cfg(target_os = "linux")]
    {
        // Without it slow readers are judged more harshly; nothing else changes.
        let _ = socket2::SockRef::from(stream).set_tcp_notsent_lowat(NOT_SENT_LOW_WATER);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = stream;
}
