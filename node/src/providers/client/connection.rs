//! One connection to a provider: how it is made, what of it can be seen, and what ends it.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use tower::ServiceExt;

use super::SendBody;
use super::pool::Fitness;
use crate::providers::hold::{Held, Holding};
use crate::service::BoxError;
use crate::tasks::{self, Kind};

/// Makes connections.
pub(super) struct Dialer {
    connector: HttpsConnector<HttpConnector>,
    /// For name, TCP and TLS together.
    bound: Duration,
}

impl Dialer {
    pub(super) fn new(bound: Duration) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        let tls = match HttpsConnectorBuilder::new().with_native_roots() {
            Ok(tls) => tls,
            Err(error) => {
                // Plain HTTP needs none; an https:// provider will say so itself.
                tracing::warn!(%error, "no root certificates on this machine: https:// providers cannot be verified");
                let none =
                    rustls::ClientConfig::builder().with_root_certificates(rustls::RootCertStore::empty());
                HttpsConnectorBuilder::new().with_tls_config(none.with_no_client_auth())
            }
        };
        Self {
            connector: tls.https_or_http().enable_http1().wrap_connector(tcp),
            bound,
        }
    }

    /// `origin` is scheme and authority. Dropping the future drops what was made so far.
    pub(super) async fn connect(&self, origin: &Arc<Uri>) -> Result<Connection, BoxError> {
        let connecting = self.connector.clone().oneshot(Uri::clone(origin));
        let io = tokio::time::timeout(self.bound, connecting)
            .await
            .map_err(|_| "no connection within connect_timeout")??;
        let holding = Holding::new();
        let held = holding.held();
        let (sender, driver) = http1::handshake(Watched { io, holding }).await?;
        tasks::spawn(Kind::Session, "provider_connection", async move {
            // Whoever has a request on it is told what broke; an idle one may end as it likes.
            let _ = driver.await;
        });
        Ok(Connection {
            sender,
            held,
            origin: Arc::clone(origin),
        })
    }
}

/// The right to use a connection. Dropped, the connection closes: at once if its answer was dropped as well.
pub(super) struct Connection {
    sender: SendRequest<SendBody>,
    held: Held,
    origin: Arc<Uri>,
}

impl Connection {
    pub(super) fn held(&self) -> Held {
        self.held.clone()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Whether a request to that origin may be sent now.
    pub(super) fn fitness(&self, origin: &Uri) -> Fitness {
        if self.sender.is_closed() {
            Fitness::Closed
        } else if self.sender.is_ready() && *self.origin == *origin {
            Fitness::Ready
        } else {
            Fitness::Skip
        }
    }

    /// The error holds the request if none of it was sent.
    pub(super) fn send(
        &mut self,
        request: Request<SendBody>,
    ) -> impl Future<Output = Result<Response<Incoming>, TrySendError<Request<SendBody>>>> + use<> {
        self.sender.try_send_request(request)
    }
}

/// A connection whose end can be seen, and brought about, by whoever holds it.
struct Watched<C> {
    /// Closed first, told next: fields are dropped in this order.
    io: C,
    holding: Holding,
}

impl<C> Watched<C> {
    /// A peer that takes nothing is waited for only while somebody wants the connection.
    fn sent<T>(&self, cx: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.holding.flows();
            return polled;
        }
        self.holding
            .poll_blocked(cx)
            .map(|()| Err(io::ErrorKind::ConnectionAborted.into()))
    }
}

impl<C: Read + Unpin> Read for Watched<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<C: Write + Unpin> Write for Watched<C> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write(cx, buf);
        self.sent(cx, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_flush(cx);
        self.sent(cx, polled)
    }

    /// A goodbye that does not fit into the socket (TLS) is not waited for: a peer that reads nothing would hold the
    /// connection for ever.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.io).poll_shutdown(cx) {
            Poll::Ready(done) => Poll::Ready(done),
            Poll::Pending => Poll::Ready(Ok(())),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.sent(cx, polled)
    }
}
