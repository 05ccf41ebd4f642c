//! The HTTP client towards one provider: a thin door, so that the library behind it can be another.
//!
//! Decides what an error means (no connection, or a connection that broke); follows no redirect, asks no proxy,
//! decodes nothing, retries nothing but what was never sent on a pooled connection (gateway.md §11). Its connections are
//! its own: an attempt holds one from before its head to the end of its body, and whoever lets go early closes it.

use std::error::Error as StdError;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Once};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HOST, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, Request, Response, Uri};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use self::connection::{Connection, Dialer};
use self::pool::Pool;
use super::hold::Hold;
use crate::service::BoxError;

mod connection;
mod pool;

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
    /// The innermost error names the cause.
    fn new(kind: ClientErrorKind, error: &(dyn StdError + 'static)) -> Self {
        let mut root = error;
        while let Some(next) = root.source() {
            root = next;
        }
        Self {
            kind,
            text: root.to_string(),
        }
    }

    /// Of a request that was given to a connection.
    fn sent(error: &hyper::Error) -> Self {
        let mut next: Option<&dyn StdError> = Some(error);
        while let Some(error) = next {
            if error.is::<UploadFailed>() {
                return Self::new(ClientErrorKind::Upload, error);
            }
            next = error.source();
        }
        Self::new(ClientErrorKind::Cut, error)
    }
}

/// An address of a provider, parsed once. A path is taken literally: nothing in it is resolved.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    /// Scheme and authority: whom to connect to.
    origin: Arc<Uri>,
    /// What the request line says: path and query.
    path: Uri,
    /// Name, and port where it is not the scheme's own; no user and no password.
    host: HeaderValue,
}

impl Target {
    pub(crate) fn parse(url: &str) -> Option<Self> {
        let url = Uri::try_from(url).ok()?;
        let name = url.host().filter(|h| !h.is_empty())?;
        let own_port = match url.scheme_str() {
            Some("http") => 80,
            Some("https") => 443,
            Some(_) | None => return None,
        };
        let host = match url.port_u16().filter(|port| *port != own_port) {
            Some(port) => HeaderValue::try_from(format!("{name}:{port}")),
            None => HeaderValue::from_str(name),
        };
        let host = host.ok()?;
        let mut parts = url.into_parts();
        let path = parts.path_and_query.replace(PathAndQuery::from_static("/"))?;
        Some(Self {
            origin: Arc::new(Uri::from_parts(parts).ok()?),
            // Without a path it is the root's; `PathAndQuery` alone would keep it empty.
            path: if path == "/" {
                Uri::default()
            } else {
                Uri::from(path)
            },
            host,
        })
    }
}

/// The client of one provider, with its own pool.
pub(crate) struct Client {
    dialer: Dialer,
    pool: Arc<Pool<Connection>>,
}

impl Client {
    /// `connect_timeout` covers name, TCP and TLS together.
    pub(crate) fn new(connect_timeout: Duration) -> Self {
        install_crypto();
        Self {
            dialer: Dialer::new(connect_timeout),
            pool: Arc::default(),
        }
    }

    /// Sends one request and resolves at the response's head. Dropping the future or the body closes the connection.
    pub(crate) async fn send(
        &self,
        method: Method,
        to: Target,
        headers: HeaderMap,
        body: SendBody,
    ) -> Result<Response<ClientBody>, ClientError> {
        let mut hold = Hold::default();
        let answer = self.send_held(method, to, headers, body, &mut hold).await;
        hold.waits(false);
        answer
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
        let Target { origin, path, host } = to;
        let mut request = Request::new(body);
        *request.method_mut() = method;
        *request.uri_mut() = path;
        *request.headers_mut() = headers;
        request.headers_mut().entry(HOST).or_insert(host);
        loop {
            let idle = self.pool.take(|connection| connection.fitness(&origin));
            let reused = idle.is_some();
            let mut connection = match idle {
                Some(connection) => connection,
                None => self
                    .dialer
                    .connect(&origin)
                    .await
                    .map_err(|e| ClientError::new(ClientErrorKind::Connect, &*e))?,
            };
            hold.take(connection.held());
            let mut failed = match connection.send(request).await {
                Ok(answer) => {
                    return Ok(answer.map(|body| ClientBody::new(body, connection, Arc::clone(&self.pool))));
                }
                Err(failed) => failed,
            };
            match failed.take_message() {
                // The pooled connection was closed before any of the request was written to it.
                Some(unsent) if reused => request = unsent,
                Some(_) | None => return Err(ClientError::sent(failed.error())),
            }
            *hold = Hold::default();
        }
    }
}

/// What a provider answers with. It holds its connection, and gives it back at its end; dropped before, it closes it.
pub(crate) struct ClientBody {
    body: Incoming,
    of: Option<(Connection, Arc<Pool<Connection>>)>,
}

impl ClientBody {
    fn new(body: Incoming, connection: Connection, pool: Arc<Pool<Connection>>) -> Self {
        let mut this = Self {
            body,
            of: Some((connection, pool)),
        };
        if this.body.is_end_stream() {
            this.give_back();
        }
        this
    }

    fn give_back(&mut self) {
        if let Some((connection, pool)) = self.of.take()
            && !connection.is_closed()
        {
            pool.put(connection);
        }
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = ready!(Pin::new(&mut self.body).poll_frame(cx));
        match &polled {
            Some(Ok(frame)) if !frame.is_trailers() && !self.body.is_end_stream() => {}
            Some(Ok(_)) | None => self.give_back(),
            Some(Err(_)) => self.of = None,
        }
        Poll::Ready(polled)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
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

#[cfg(test)]
mod tests;
