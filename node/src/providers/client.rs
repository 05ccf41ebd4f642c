//! The HTTP client towards one provider: a thin door, so that the library behind it can be another.
//!
//! Decides what an error means (no connection, or a connection that broke); follows no redirect, asks no proxy,
//! decodes nothing, retries nothing but what was never sent on a pooled connection (gateway.md §11).

use std::error::Error as StdError;
use std::fmt;
use std::pin::Pin;
use std::sync::Once;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Response};
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;

use crate::service::BoxError;

/// uvicorn closes after 5 s; a pool must be quicker than the server (link.md, Stale connections).
const POOL_IDLE: Duration = Duration::from_secs(4);

/// What a provider answers with.
pub(crate) type ClientBody = reqwest::Body;

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
    fn new(error: &reqwest::Error) -> Self {
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
        // The outermost error names the URL, the innermost one the cause.
        let text = if root.is::<reqwest::Error>() {
            String::from("request failed")
        } else {
            root.to_string()
        };
        Self { kind, text }
    }
}

/// An address of a provider, parsed once.
#[derive(Debug, Clone)]
pub(crate) struct Target(reqwest::Url);

impl Target {
    pub(crate) fn parse(url: &str) -> Option<Self> {
        let url = reqwest::Url::parse(url).ok()?;
        (matches!(url.scheme(), "http" | "https") && url.has_host()).then_some(Self(url))
    }

    /// `base` and a path below it, taken literally: a URL parser would resolve `%2e%2e` and leave `base`.
    pub(crate) fn parse_exactly(base: &str, path: &str) -> Option<Self> {
        let target = Self::parse(&format!("{base}/{path}"))?;
        target
            .0
            .as_str()
            .strip_suffix(path)?
            .ends_with('/')
            .then_some(target)
    }
}

/// The client of one provider, with its own pool.
#[derive(Debug, Clone)]
pub(crate) struct Client(reqwest::Client);

impl Client {
    /// # Errors
    /// When TLS cannot be set up, such as without any root certificate.
    pub(crate) fn new(connect_timeout: Duration) -> Result<Self, BoxError> {
        install_crypto();
        let client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .referer(false)
            .no_proxy()
            .tcp_nodelay(true)
            .connect_timeout(connect_timeout)
            .pool_idle_timeout(POOL_IDLE)
            .build()?;
        Ok(Self(client))
    }

    /// Sends one request and resolves at the response's head. Dropping the future or the body closes the connection.
    pub(crate) async fn send(
        &self,
        method: Method,
        to: Target,
        headers: HeaderMap,
        body: SendBody,
    ) -> Result<Response<ClientBody>, ClientError> {
        let mut request = reqwest::Request::new(method, to.0);
        *request.headers_mut() = headers;
        if !body.is_end_stream() {
            *request.body_mut() = Some(reqwest::Body::wrap(body));
        }
        match self.0.execute(request).await {
            Ok(response) => Ok(response.into()),
            Err(e) => Err(ClientError::new(&e)),
        }
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

/// A request body of any kind. The mutex is never contended: it makes the body `Sync`, which the client asks for.
pub(crate) struct SendBody(Option<Mutex<AnyBody>>);

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
            Self(Some(Mutex::new(Box::pin(Boxed(body)))))
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
            Some(body) => body.get_mut().as_mut().poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(|b| b.lock().is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.0
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), |b| b.lock().size_hint())
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
