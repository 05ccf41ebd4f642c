//! Listeners and the accept loop. Decides how sockets are set up and when a connection ends on behalf of the process;
//! knows no routes.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;

use super::connection::{self, BoxError};
use super::write_deadline::{ConnState, WriteDeadline};
use crate::drain::Drain;
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
    let socket = if addr.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
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
pub fn start<H, Fut, B>(listener: TcpListener, options: Options, drain: Drain, handler: H) -> Running
where
    H: Fn(ConnHandle, Request<Incoming>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
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

impl<H> Server<H> {
    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    async fn serve<Fut, B>(&self, stream: TcpStream)
    where
        H: Fn(ConnHandle, Request<Incoming>) -> Fut,
        Fut: Future<Output = Response<B>> + Send + 'static,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
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
                let Ok(Ok(io)) = tokio::time::timeout(TLS_HANDSHAKE_WITHIN, tls.accept(io)).await else {
                    return;
                };
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

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::{BodyExt, Empty, Full};
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use std::sync::atomic::AtomicUsize;
    use tokio::sync::Semaphore;

    struct Site {
        addr: SocketAddr,
        /// Answers to `/wait` need a permit.
        gate: Arc<Semaphore>,
        arrivals: Arc<AtomicUsize>,
        running: Running,
    }

    fn server(drain: &Drain, tls: Option<Arc<rustls::ServerConfig>>) -> Site {
        let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let addr = listener.local_addr().unwrap();
        let gate = Arc::new(Semaphore::new(0));
        let arrivals = Arc::new(AtomicUsize::new(0));
        let shared = (Arc::clone(&gate), Arc::clone(&arrivals));
        let options = Options {
            tls,
            write_timeout: Duration::from_secs(30),
        };
        let running = start(listener, options, drain.clone(), move |_, request| {
            shared.1.fetch_add(1, Ordering::SeqCst);
            let gate = Arc::clone(&shared.0);
            async move {
                if request.uri().path() == "/wait" {
                    gate.acquire().await.unwrap().forget();
                }
                Response::new(Full::new(Bytes::from(format!("{:?}", request.version()))))
            }
        });
        Site {
            addr,
            gate,
            arrivals,
            running,
        }
    }

    type Sender1 = hyper::client::conn::http1::SendRequest<Empty<Bytes>>;

    async fn http1(addr: SocketAddr) -> (Sender1, tokio::task::JoinHandle<()>) {
        let io = TokioIo::new(TcpStream::connect(addr).await.unwrap());
        let (sender, conn) = hyper::client::conn::http1::handshake(io).await.unwrap();
        let ended = tasks::spawn(tasks::Kind::Session, "client", async move {
            let _ = conn.await;
        });
        (sender, ended)
    }

    fn get(path: &str) -> Request<Empty<Bytes>> {
        Request::get(format!("http://h{path}"))
            .header("host", "h")
            .body(Empty::new())
            .unwrap()
    }

    async fn text(response: Response<Incoming>) -> String {
        String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn both_versions_are_spoken_on_one_port() {
        let Site { addr, .. } = server(&Drain::default(), None);
        let (mut one, _) = http1(addr).await;
        assert_eq!(text(one.send_request(get("/")).await.unwrap()).await, "HTTP/1.1");
        let io = TokioIo::new(TcpStream::connect(addr).await.unwrap());
        let (mut two, conn) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io)
            .await
            .unwrap();
        tasks::spawn(tasks::Kind::Session, "client", async move {
            let _ = conn.await;
        });
        assert_eq!(text(two.send_request(get("/")).await.unwrap()).await, "HTTP/2.0");
    }

    #[tokio::test]
    async fn a_drain_waits_for_what_runs_and_still_answers_newcomers() {
        let drain = Drain::default();
        let Site {
            addr,
            gate,
            arrivals,
            running,
        } = server(&drain, None);
        let (mut idle, idle_ended) = http1(addr).await;
        text(idle.send_request(get("/")).await.unwrap()).await;
        let (mut busy, busy_ended) = http1(addr).await;
        let mut waiting = std::pin::pin!(busy.send_request(get("/wait")));
        let arrived = async {
            while arrivals.load(Ordering::SeqCst) < 2 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            _ = &mut waiting => panic!("answered without a permit"),
            () = arrived => {}
        }

        drain.start();
        idle_ended.await.unwrap();
        let (mut late, _late_ended) = http1(addr).await;
        assert_eq!(text(late.send_request(get("/")).await.unwrap()).await, "HTTP/1.1");
        let mut drained = std::pin::pin!(running.drained());
        assert!(
            futures_util::poll!(drained.as_mut()).is_pending(),
            "a request is still running"
        );
        gate.add_permits(1);
        assert_eq!(text(waiting.await.unwrap()).await, "HTTP/1.1");
        busy_ended.await.unwrap();
        // The late connection is open and does not count.
        drained.await;
    }

    #[tokio::test]
    async fn tls_negotiates_http2() {
        let made = rcgen::generate_simple_self_signed(vec![String::from("localhost")]).unwrap();
        let tls = super::super::tls::server_config(
            &made.cert.pem(),
            &made.signing_key.serialize_pem(),
            None,
            super::super::tls::Alpn::Http,
        )
        .unwrap();
        let Site { addr, .. } = server(&Drain::default(), Some(tls));
        let mut roots = rustls::RootCertStore::empty();
        roots.add(made.cert.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let name = rustls::pki_types::ServerName::try_from("localhost").unwrap();
        let tcp = TcpStream::connect(addr).await.unwrap();
        let io = tokio_rustls::TlsConnector::from(Arc::new(config))
            .connect(name, tcp)
            .await
            .unwrap();
        let (mut sender, conn) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(io))
                .await
                .unwrap();
        tasks::spawn(tasks::Kind::Session, "client", async move {
            let _ = conn.await;
        });
        assert_eq!(
            text(sender.send_request(get("/")).await.unwrap()).await,
            "HTTP/2.0"
        );
    }
}
