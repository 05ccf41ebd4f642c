//! A live session with a node, embedded or linked: the one way to send it a request.
//!
//! Decides nothing about which node gets a request. Node id and generation are facts of the session object; nothing a
//! node writes can change them (link.md, Reception is a fact).

use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::uri::{Authority, Scheme};
use http::{HeaderMap, Method, Request, Response, Uri};
use hyper::client::conn::http2::SendRequest;
use iop_shared::ids::{ConnectionGeneration, NodeId};
use iop_shared::openai::request::SplicedBody;
use iop_shared::wire::RUNS_PATH;
use iop_shared::wire::event::RunRequest;
use iop_shared::wire::tunnel::TunnelHead;
use tokio_util::sync::CancellationToken;

use super::body::NodeBody;
use crate::http::request_id::X_REQUEST_ID;

/// A path that no node serves: its 404 is an answer, and costs the node nothing.
const PING_PATH: &str = "/link/v1/ping";

/// HTTP/2 wants an authority; the socket itself says who is asked.
static AUTHORITY: LazyLock<Authority> = LazyLock::new(|| Authority::from_static("node"));

/// Why a request got no answer, or a body no end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The connection or the stream ended; what the node did of it is unknown.
    #[error("the link to the node was lost")]
    Lost,
}

/// A session, for as long as anybody holds it: a link closes once its last holder is gone.
pub struct Session {
    pub node_id: NodeId,
    pub generation: ConnectionGeneration,
    pub connected_at: jiff::Timestamp,
    pub embedded: bool,
    way: Way,
    /// Set when the session takes no new requests: it ended, or a newer connection took over.
    over: CancellationToken,
}

enum Way {
    Embedded(iop_node::Node),
    Link(SendRequest<SplicedBody>),
}

impl Session {
    pub(super) fn embedded(node: iop_node::Node, generation: ConnectionGeneration) -> Self {
        Self::new(node.id().clone(), generation, true, Way::Embedded(node))
    }

    pub(super) fn linked(
        node_id: NodeId,
        generation: ConnectionGeneration,
        sender: SendRequest<SplicedBody>,
    ) -> Self {
        Self::new(node_id, generation, false, Way::Link(sender))
    }

    fn new(node_id: NodeId, generation: ConnectionGeneration, embedded: bool, way: Way) -> Self {
        let (connected_at, over) = (jiff::Timestamp::now(), CancellationToken::new());
        Self {
            node_id,
            generation,
            connected_at,
            embedded,
            way,
            over,
        }
    }

    /// Sends one request of `docs/link.md`. Dropping the future, or later the body, cancels it at the node.
    ///
    /// # Errors
    /// `Lost` when no answer can come any more.
    pub async fn call(&self, request: Request<SplicedBody>) -> Result<Response<NodeBody>, LinkError> {
        match &self.way {
            Way::Embedded(node) => Ok(node.handle(request).await.map(NodeBody::from)),
            Way::Link(sender) => match sender.clone().send_request(absolute(request)).await {
                Ok(response) => Ok(response.map(NodeBody::from)),
                Err(error) => {
                    tracing::debug!(node = %self.node_id, connection_generation = self.generation.0, %error, "no answer");
                    Err(LinkError::Lost)
                }
            },
        }
    }

    /// Sends one attempt. Dropping the future, or later the body, cancels it at the node.
    ///
    /// # Errors
    /// `Lost` when no answer can come any more.
    pub async fn tunnel(
        &self,
        head: TunnelHead,
        headers: HeaderMap,
        body: SplicedBody,
    ) -> Result<Response<NodeBody>, LinkError> {
        match &self.way {
            Way::Embedded(node) => Ok(node.tunnel(head, headers, body).await.map(NodeBody::from)),
            Way::Link(_) => {
                let mut request = Request::new(body);
                *request.method_mut() = Method::POST;
                *request.uri_mut() = TunnelHead::uri(head.endpoint);
                *request.headers_mut() = headers;
                if let Some(id) = request.headers_mut().get_mut(X_REQUEST_ID) {
                    id.set_sensitive(true);
                }
                head.write(request.headers_mut());
                self.call(request).await
            }
        }
    }

    /// Sends one run. Dropping the future, or later the body, cancels it at the node.
    ///
    /// # Errors
    /// `Lost` when no answer can come any more.
    pub async fn run(&self, request: &RunRequest) -> Result<Response<NodeBody>, LinkError> {
        match &self.way {
            Way::Embedded(node) => Ok(node.run(request.clone()).await.map(NodeBody::from)),
            Way::Link(_) => {
                let mut post = Request::new(SplicedBody::whole(Bytes::from(request.to_json())));
                *post.method_mut() = Method::POST;
                *post.uri_mut() = Uri::from_static(RUNS_PATH);
                post.headers_mut()
                    .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
                self.call(post).await
            }
        }
    }

    /// Whether a request could be sent now.
    pub fn is_live(&self) -> bool {
        let open = match &self.way {
            Way::Embedded(_) => true,
            Way::Link(sender) => !sender.is_closed(),
        };
        open && !self.over.is_cancelled()
    }

    /// Whether the node answers anything at all within `bound`.
    pub(super) async fn answers_within(&self, bound: Duration) -> bool {
        let mut ping = Request::new(SplicedBody::default());
        *ping.uri_mut() = Uri::from_static(PING_PATH);
        matches!(tokio::time::timeout(bound, self.call(ping)).await, Ok(Ok(_)))
    }

    /// No new requests from now on; running streams finish.
    pub(super) fn end(&self) {
        self.over.cancel();
    }

    /// Resolves after `end`.
    pub(super) async fn ended(&self) {
        self.over.cancelled().await;
    }
}

/// The gate names paths only.
fn absolute(mut request: Request<SplicedBody>) -> Request<SplicedBody> {
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    parts.scheme = Some(Scheme::HTTP);
    parts.authority = Some(AUTHORITY.clone());
    // A path with scheme and authority always is a URI.
    *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
    request
}
