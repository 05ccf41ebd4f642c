//! The port that nodes dial: TCP, perhaps TLS, one HTTP/1.1 request that is upgraded or refused with words.
//!
//! A connection that has not been upgraded after `HANDSHAKE_WITHIN` is closed, whatever it was doing.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use iop_shared::config::SecretString;
use iop_shared::ids::{ConnectionGeneration, NodeId};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::carrier;
use super::handshake::{self, Hello, Refusal};
use super::registry::Registry;
use crate::config::LinkSettings;
use crate::drain::Drain;
use crate::tasks::{self, Kind};

/// TLS, request and answer together.
pub(super) const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
/// For a last word to a peer that may not be listening.
const LAST_WORD: Duration = Duration::from_secs(1);
/// A handshake's head needs no more, in bytes.
const HEAD_MAX: usize = 16 << 10;
/// After an accept that failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// The same refusal is worth a warning once in this time.
const QUIET: Duration = Duration::from_secs(60);

/// What every connection of the port needs.
pub(super) struct Port {
    tokens: Vec<SecretString>,
    registry: Arc<Registry>,
    drain: Drain,
    /// When each refusal was last warned of.
    told: Mutex<[Option<Instant>; Refusal::ALL.len()]>,
}

/// A connection that became a link.
pub(super) struct Accepted {
    pub(super) io: Upgraded,
    pub(super) hello: Hello,
    pub(super) generation: ConnectionGeneration,
}

/// Accepts nodes for as long as the process runs; while it drains they are refused.
pub(super) async fn serve(
    listener: TcpListener,
    settings: LinkSettings,
    registry: Arc<Registry>,
    drain: Drain,
) {
    let tls = settings.tls.map(TlsAcceptor::from);
    let port = Arc::new(Port::new(settings.tokens, registry, drain));
    loop {
        match listener.accept().await {
            Ok((socket, peer)) => {
                let (port, tls) = (Arc::clone(&port), tls.clone());
                tasks::spawn(
                    Kind::Session,
                    "link_connection",
                    connection(port, tls, socket, peer),
                );
            }
            Err(error) if of_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "the link port cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The peer left before it was accepted.
fn of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    let kind = error.kind();
    kind == ConnectionAborted || kind == ConnectionRefused || kind == ConnectionReset
}

async fn connection(port: Arc<Port>, tls: Option<TlsAcceptor>, socket: TcpStream, peer: SocketAddr) {
    // Best effort: a link works without it, later.
    let _ = socket.set_nodelay(true);
    let since = tokio::time::Instant::now();
    let accepted = match tls {
        None => port.greet(socket, peer, HANDSHAKE_WITHIN).await,
        Some(tls) => match tokio::time::timeout(HANDSHAKE_WITHIN, tls.accept(socket)).await {
            Ok(Ok(io)) => {
                port.greet(io, peer, HANDSHAKE_WITHIN.saturating_sub(since.elapsed()))
                    .await
            }
            Ok(Err(error)) => return tracing::info!(%peer, %error, "TLS with a node failed"),
            Err(_) => return tracing::info!(%peer, "TLS with a node took too long"),
        },
    };
    if let Some(Accepted {
        io,
        hello,
        generation,
    }) = accepted
    {
        let link = carrier::serve(io, hello, generation, &port.registry);
        port.registry.connections().track_future(link).await;
    }
}

impl Port {
    pub(super) fn new(tokens: Vec<SecretString>, registry: Arc<Registry>, drain: Drain) -> Self {
        Self {
            tokens,
            registry,
            drain,
            told: Mutex::new([None; Refusal::ALL.len()]),
        }
    }

    /// Answers the one request of a connection; `None` when it was refused or left.
    pub(super) async fn greet<I>(&self, io: I, peer: SocketAddr, within: Duration) -> Option<Accepted>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let accepted = Mutex::new(None);
        let answered = AtomicBool::new(false);
        let service = service_fn(|request| {
            let judged = self.judge(request, peer);
            let (accepted, answered) = (&accepted, &answered);
            async move {
                let response = match judged.await {
                    Ok((hello, generation, upgrade)) => {
                        *accepted.lock() = Some((hello, generation, upgrade));
                        handshake::accepted(generation)
                    }
                    Err(refusal) => refusal,
                };
                answered.store(true, Ordering::Relaxed);
                Ok::<_, Infallible>(response)
            }
        });
        let mut connection = http1::Builder::new()
            .keep_alive(false)
            .max_buf_size(HEAD_MAX)
            .header_read_timeout(None)
            .serve_connection(TokioIo::new(io), service)
            .with_upgrades();
        match tokio::time::timeout(within, &mut connection).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%peer, %error, "a connection to the link port failed"),
            Err(_) => {
                let parts = connection
                    .into_parts()
                    .filter(|_| !answered.load(Ordering::Relaxed));
                self.tell(Refusal::TooSlow, peer, None);
                if let Some(parts) = parts {
                    last_word(parts.io.into_inner()).await;
                }
                return None;
            }
        }
        let accepted = accepted.lock().take();
        let (hello, generation, upgrade) = accepted?;
        match upgrade.await {
            Ok(io) => Some(Accepted {
                io,
                hello,
                generation,
            }),
            Err(error) => {
                tracing::info!(%peer, node = %hello.node_id, %error, "a node left during its handshake");
                None
            }
        }
    }

    fn judge(
        &self,
        mut request: Request<Incoming>,
        peer: SocketAddr,
    ) -> impl Future<Output = Result<(Hello, ConnectionGeneration, OnUpgrade), Response<Full<Bytes>>>> {
        let upgrade = hyper::upgrade::on(&mut request);
        async move {
            let (asked, _) = request.into_parts();
            let refused = |refusal: Refusal, node_id: Option<&NodeId>| {
                self.tell(refusal, peer, node_id);
                refusal.response(node_id)
            };
            let hello = handshake::read(&asked, &self.tokens, self.drain.is_draining())
                .map_err(|r| refused(r, None))?;
            match self.registry.admit(&hello).await {
                Ok(generation) => Ok((hello, generation, upgrade)),
                Err(refusal) => Err(refused(refusal, Some(&hello.node_id))),
            }
        }
    }

    fn tell(&self, refusal: Refusal, peer: SocketAddr, node_id: Option<&NodeId>) {
        let (now, reason, words) = (Instant::now(), refusal.as_str(), refusal.message(node_id));
        let news = match self.told.lock().get_mut(refusal as usize) {
            Some(last) if last.is_none_or(|at| now.saturating_duration_since(at) >= QUIET) => {
                *last = Some(now);
                true
            }
            Some(_) | None => false,
        };
        if news {
            tracing::warn!(%peer, reason, "a link was refused: {words}");
        } else {
            tracing::debug!(%peer, reason, "a link was refused: {words}");
        }
    }
}

/// Says why to a peer whose request never became whole.
async fn last_word<I: AsyncWrite + Unpin>(mut io: I) {
    let (head, body) = Refusal::TooSlow.response(None).into_parts();
    // A body in memory is there at once.
    let Ok(body) = body.collect().await.map(|b| b.to_bytes());
    let mut text = format!(
        "HTTP/1.1 {}\r\nconnection: close\r\ncontent-length: {}\r\n",
        head.status,
        body.len()
    );
    for (name, value) in &head.headers {
        if let Ok(value) = value.to_str() {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
    }
    text.push_str("\r\n");
    let said = async {
        io.write_all(text.as_bytes()).await?;
        io.write_all(&body).await?;
        io.shutdown().await
    };
    // It was the last word; nobody is waiting for its fate.
    let _ = tokio::time::timeout(LAST_WORD, said).await;
}
