//! The HTTP client towards one provider: a thin door, so that the library behind it can be another.
//!
//! Decides what an error means (no connection, or a connection that broke); follows no redirect, asks no proxy,
//! decodes nothing, retries nothing but what was never sent on a pooled connection (gateway.md §11).

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Once;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, Uri};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector, capture_connection};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tower::Service;

use super::hold::{Hold, Holding};
use crate::service::BoxError;

/// uvicorn closes after 5 s; a pool must be quicker than the server (link.md, Stale connections).
const POOL_IDLE: Duration = Duration::from_secs(4);

/// What a provider answers with.
pub(crate) type ClientBody = Incoming;

/// Why a call has no head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClientErrorKind {
    /// Refused, unreachable, unresolved, TLS, connect timeout: nothing was sent.
    Connect,
    /// The connection broke, or what came over it was no HTTP.
    Cut,
    /// The request's own body failed: its sender is gone.
    Upload,
}

/// A failed call; the text holds no URL and no credential.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct ClientError {
    pub(crate) kind: ClientErrorKind,
    text: String,
}

impl ClientError {
    fn new(error: &legacy::Error) -> Self {
        let mut root: &dyn StdError = error;
        let mut upload = false;
        while let Some(next) = root.source() {
            upload |= next.is::<UploadFailed>();
            root = next;
        }
        let kind = if error.is_connect() {
            ClientErrorKind::Connect
        } else if upload {
            ClientErrorKind::Upload
        } else {
            ClientErrorKind::Cut
        };
        // The innermost error names the cause.
        Self {
            kind,
            text: root.to_string(),
        }
    }
}

/// An address of a provider, parsed once. A path is taken literally: nothing in it is resolved.
#[derive(Debug, Clone)]
pub(crate) struct Target(Uri);

impl Target {
    pub(crate) fn parse(url: &str) -> Option<Self> {
        let url = Uri::try_from(url).ok()?;
        let fits =
            matches!(url.scheme_str(), Some("http" | "https")) && url.host().is_some_and(|h| !h.is_empty());
        fits.then_some(Self(url))
    }
}

type Connector = Bounded<HttpsConnector<HttpConnector>>;

/// The client of one provider, with its own pool.
#[derive(Debug, Clone)]
pub(crate) struct Client(legacy::Client<Connector, SendBody>);

impl Client {
    /// `connect_timeout` covers name, TCP and TLS together.
    pub(crate) fn new(connect_timeout: Duration) -> Self {
        install_crypto();
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
        let connector = Bounded {
            inner: tls.https_or_http().enable_http1().wrap_connector(tcp),
            bound: connect_timeout,
        };
        let client = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE)
            .build(connector);
        Self(client)
    }

    /// Sends one request and resolves at the response's head. Dropping the future or the body closes the connection.
    pub(crate) async fn send(
        &self,
        method: Method,
        to: Target,
        headers: HeaderMap,
        body: SendBody,
    ) -> Result<Response<ClientBody>, ClientError> {
        self.request(request(method, to, headers, body)).await
    }

    /// The same, and tells at any time which connection it holds.
    pub(crate) async fn send_held(
        &self,
        method: Method,
        to: Target,
        headers: HeaderMap,
        body: SendBody,
        hold: &mut Hold,
    ) -> Result<Response<ClientBody>, ClientError> {
        let mut request = request(method, to, headers, body);
        hold.ask(capture_connection(&mut request));
        let mut answer = self.request(request).await?;
        if let Some(held) = answer.extensions_mut().remove() {
            hold.take(held);
        }
        Ok(answer)
    }

    async fn request(&self, request: Request<SendBody>) -> Result<Response<ClientBody>, ClientError> {
        self.0.request(request).await.map_err(|e| ClientError::new(&e))
    }
}

fn request(method: Method, to: Target, headers: HeaderMap, body: SendBody) -> Request<SendBody> {
    let mut request = Request::new(body);
    *request.method_mut() = method;
    *request.uri_mut() = to.0;
    *request.headers_mut() = headers;
    request
}

/// A connector that takes no longer than its bound, handshakes included.
#[derive(Debug, Clone)]
struct Bounded<C> {
    inner: C,
    bound: Duration,
}

impl<C> Service<Uri> for Bounded<C>
where
    C: Service<Uri>,
    C::Future: Send + 'static,
    C::Response: 'static,
    C::Error: Into<BoxError>,
{
    type Response = Watched<C::Response>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let (connecting, bound) = (self.inner.call(to), self.bound);
        Box::pin(async move {
            match tokio::time::timeout(bound, connecting).await {
                Ok(connected) => connected.map(Watched::new).map_err(Into::into),
                Err(_) => Err("no connection within connect_timeout".into()),
            }
        })
    }
}

/// A connection whose end can be seen, and brought about, by whoever holds it.
struct Watched<C> {
    /// Closed first, told next: fields are dropped in this order.
    io: C,
    holding: Holding,
}

impl<C> Watched<C> {
    fn new(io: C) -> Self {
        Self {
            io,
            holding: Holding::new(),
        }
    }
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

impl<C> Connection for Watched<C> {
    fn connected(&self) -> Connected {
        Connected::new().extra(self.holding.held())
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

/// rustls takes its cryptography from one process-wide provider; whoever is first installs it.
pub(crate) fn install_crypto() {
    static ONCE: Once = Once::new();
    // Another part of the process may have installed one already, which serves as well.
    ONCE.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
}

/// A request body that cannot be sent to its end because its own source failed.
#[derive(Debug)]
struct UploadFailed;

impl fmt::Display for UploadFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request's body ended early")
    }
}

impl StdError for UploadFailed {}

type AnyBody = Pin<Box<dyn Body<Data = Bytes, Error = BoxError> + Send>>;

/// A request body of any kind.
pub(crate) struct SendBody(Option<AnyBody>);

impl SendBody {
    pub(crate) fn empty() -> Self {
        Self(None)
    }

    pub(crate) fn new<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<BoxError>,
    {
        if body.is_end_stream() {
            Self::empty()
        } else {
            Self(Some(Box::pin(Boxed(body))))
        }
    }
}

impl Body for SendBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.0 {
            Some(body) => body.as_mut().poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(|b| b.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.0
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), |b| b.size_hint())
    }
}

/// Gives every error one type, so that an upload that failed is told from a provider that did.
struct Boxed<B>(B);

impl<B> Body for Boxed<B>
where
    B: Body<Data = Bytes> + Unpin,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.0)
            .poll_frame(cx)
            .map_err(|_| UploadFailed.into())
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}
