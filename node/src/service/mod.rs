//! The node itself: one service for the edge in the same process and for every link.
//!
//! Routes what `docs/link.md` names and refuses the rest. Holds providers, places and the advertisement; knows no
//! socket towards an edge.

pub(crate) mod body;
mod command;
mod runs;
pub(crate) mod scope;
mod session;
#[cfg(test)]
mod tests;
mod tunnel;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::Body;
use iop_shared::ids::{NodeId, ProviderId};
use iop_shared::wire::event::RunRequest;
use iop_shared::wire::session::{Advertisement, ProviderLoad};
use iop_shared::wire::tunnel::TunnelHead;
use iop_shared::wire::{COMMAND_PREFIX, DRAIN_PATH, RUNS_PATH, SESSION_PATH, TUNNEL_PREFIX};
use tokio::sync::watch;

use crate::metrics::NodeMetrics;
use crate::providers::registry::{Busy, Registry, Slot};
use crate::providers::scripted::Scripted;
use crate::providers::{Backend, ProviderSettings, models, openai};
use body::ResponseBody;
use iop_shared::config::Adapter;
use scope::Scope;

/// An error of any body.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a node could not be built from a valid configuration.
#[derive(Debug, thiserror::Error)]
pub enum NodeBuildError {
    #[error("provider {provider}: {reason}")]
    Provider { provider: ProviderId, reason: String },
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// A node; clones are handles of the same one.
#[derive(Clone)]
pub struct Node {
    inner: Arc<Inner>,
    /// Of the caller in the same process; every link has its own.
    scope: Arc<Scope>,
}

pub(crate) struct Inner {
    id: NodeId,
    registry: Registry,
    metrics: Arc<NodeMetrics>,
    advertisement: watch::Sender<Arc<Advertisement>>,
    draining: AtomicBool,
    started: AtomicBool,
    busy: Arc<Busy>,
}

impl Node {
    /// Builds a node; its series are made in `registry`.
    ///
    /// # Errors
    /// When a provider's client cannot be set up, or the registry has a node's series already.
    pub fn new(
        id: NodeId,
        providers: &[ProviderSettings],
        registry: &prometheus::Registry,
    ) -> Result<Self, NodeBuildError> {
        let slots = providers.iter().map(slot).collect::<Result<Vec<_>, _>>()?;
        let metrics = Arc::new(NodeMetrics::register(registry)?);
        let registry = Registry::new(slots);
        metrics.capacity.set(i64::from(registry.capacity()));
        let first = Advertisement {
            node_id: id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            providers: registry.advertisements(),
            draining: false,
        };
        let inner = Inner {
            id,
            registry,
            metrics,
            advertisement: watch::Sender::new(Arc::new(first)),
            draining: AtomicBool::new(false),
            started: AtomicBool::new(false),
            busy: Arc::new(Busy::default()),
        };
        Ok(Self {
            inner: Arc::new(inner),
            scope: Arc::new(Scope::new()),
        })
    }

    /// Starts what runs beside requests: asking `auto` providers what they serve. Needs a runtime; once is enough.
    /// It ends when the last handle of the node is gone.
    pub fn start(&self) {
        if !self.inner.started.swap(true, Ordering::SeqCst) {
            models::start(&self.inner);
        }
    }

    pub fn id(&self) -> &NodeId {
        &self.inner.id
    }

    /// What an edge may know now.
    pub fn advertisement(&self) -> Arc<Advertisement> {
        Arc::clone(&self.inner.advertisement.borrow())
    }

    /// The advertisement, now and whenever it changes.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Advertisement>> {
        self.inner.advertisement.subscribe()
    }

    /// Requests under way, by provider.
    pub fn loads(&self) -> Vec<ProviderLoad> {
        self.inner.registry.loads()
    }

    /// Places of all providers together.
    pub fn capacity(&self) -> u32 {
        self.inner.registry.capacity()
    }

    /// Takes no new tunnels, or takes them again.
    pub fn set_draining(&self, draining: bool) {
        self.inner.draining.store(draining, Ordering::SeqCst);
        self.inner.metrics.draining.set(i64::from(draining));
        self.inner.publish();
    }

    pub fn is_draining(&self) -> bool {
        self.inner.is_draining()
    }

    /// Requests under way.
    pub fn in_flight(&self) -> u32 {
        self.inner.busy.count()
    }

    /// Resolves when nothing is under way, at once if so now.
    pub async fn drained(&self) {
        self.inner.busy.idle().await;
    }

    pub fn metrics(&self) -> &Arc<NodeMetrics> {
        &self.inner.metrics
    }

    /// Answers one request of the edge in the same process. Dropping the future, or later the body, cancels all of it.
    pub async fn handle<B>(&self, request: Request<B>) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<BoxError>,
    {
        self.handle_in(&self.scope, request).await
    }

    /// One attempt for the edge in the same process, its head and headers as values; the headers have gone through
    /// `client_to_provider`. Dropping the future, or later the body, cancels all of it.
    pub async fn tunnel<B>(&self, head: TunnelHead, headers: HeaderMap, body: B) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<BoxError>,
    {
        tunnel::run(&self.inner, &self.scope, head, headers, body).await
    }

    /// One attempt by the normalized path for the edge in the same process. Dropping the future, or later the body,
    /// cancels all of it.
    pub async fn run(&self, request: RunRequest) -> Response<ResponseBody> {
        runs::run(&self.inner, &self.scope, request).await
    }

    /// The same for one link.
    pub(crate) async fn handle_in<B>(&self, scope: &Arc<Scope>, request: Request<B>) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<BoxError>,
    {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        if path.starts_with(TUNNEL_PREFIX) && parts.method == Method::POST {
            tunnel::handle(&self.inner, scope, parts, body).await
        } else if path == RUNS_PATH && parts.method == Method::POST {
            Box::pin(runs::handle(&self.inner, scope, body)).await
        } else if path.starts_with(COMMAND_PREFIX) && parts.method == Method::POST {
            Box::pin(command::handle(&self.inner, scope, path, body)).await
        } else if path == SESSION_PATH && parts.method == Method::GET {
            session::open(self, scope)
        } else if path == DRAIN_PATH && parts.method == Method::POST {
            scope.edge_drains();
            body::json(StatusCode::OK, Bytes::from_static(b"{\"draining\":true}"))
        } else {
            body::json_error(StatusCode::NOT_FOUND, "not_found", "the link has no such request")
        }
    }
}

impl Inner {
    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Tells subscribers when anything that edges may know has changed.
    pub(crate) fn publish(&self) {
        self.advertisement.send_if_modified(|current| {
            let next = Advertisement {
                node_id: self.id.clone(),
                version: current.version.clone(),
                providers: self.registry.advertisements(),
                draining: self.is_draining(),
            };
            let news = **current != next;
            if news {
                *current = Arc::new(next);
            }
            news
        });
    }
}

fn slot(settings: &ProviderSettings) -> Result<Arc<Slot>, NodeBuildError> {
    let config = &settings.config;
    let backend = match config.adapter {
        Adapter::Openai | Adapter::Ollama => openai::HttpProvider::new(settings)
            .map(|p| Backend::Http(Box::new(p)))
            .map_err(|reason| NodeBuildError::Provider {
                provider: config.id.clone(),
                reason,
            })?,
        Adapter::Scripted => Backend::Scripted(Scripted::new(config)),
    };
    Ok(Arc::new(Slot::new(settings, backend)))
}

impl<B> tower::Service<Request<B>> for Node
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Capacity is a typed refusal, not back-pressure: the edge must be able to go elsewhere.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let node = self.clone();
        Box::pin(async move { Ok(node.handle(request).await) })
    }
}
