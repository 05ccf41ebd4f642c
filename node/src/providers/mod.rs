//! Providers of this node: who they are, who has room, and how each adapter is called.
//!
//! An adapter turns an `Ask` into a provider's head and body. It decides no retry, no capacity and no terminal: what
//! it yields goes through `run`.

pub(crate) mod client;
pub(crate) mod hold;
pub(crate) mod models;
pub(crate) mod openai;
pub(crate) mod registry;
pub(crate) mod scripted;

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response};
use iop_shared::config::{ConfigError, ProviderConfig, SecretString, Source};
use iop_shared::execution::event::classify_tunnel_frame;
use iop_shared::execution::{Disposition, Endpoint, FailureCode, TunnelFrameKind};
use iop_shared::wire::event::{Message, RunEvent};
use iop_shared::wire::terminal::NodeError;

use crate::config::Resolver;
use crate::probe::{ProbeError, ProbeReport, ProviderProber};
use crate::run::source::HttpSource;
use hold::Hold;

/// A provider's configuration with its secret.
#[derive(Debug, Clone)]
pub struct ProviderSettings {
    pub config: ProviderConfig,
    /// Sent as `Authorization: Bearer`; never leaves the node.
    pub api_key: Option<Arc<SecretString>>,
}

impl ProviderSettings {
    /// Validates every `[[providers]]` of a file and reads their secrets.
    ///
    /// # Errors
    /// The first rule broken or secret missing, at its key; an id named twice.
    pub fn resolve_all(
        configs: Vec<ProviderConfig>,
        source: &Source,
        resolver: &impl Resolver,
    ) -> Result<Vec<Self>, ConfigError> {
        let mut all: Vec<Self> = Vec::with_capacity(configs.len());
        for (i, config) in configs.into_iter().enumerate() {
            let key = format!("providers[{i}]");
            config.validate(source, &key)?;
            if all.iter().any(|other| other.config.id == config.id) {
                return Err(source.error(
                    &format!("{key}.id"),
                    format!("provider {:?} is named twice", config.id),
                ));
            }
            let api_key = match &config.api_key {
                None => None,
                Some(reference) => {
                    let at = format!("{key}.api_key");
                    let secret = reference
                        .resolve(|n| resolver.env(n), |p| resolver.file(p))
                        .map_err(|m| source.error(&at, m))?;
                    if openai::bearer(&secret).is_none() {
                        return Err(source.error(&at, "holds a byte that no header may carry"));
                    }
                    Some(Arc::new(secret))
                }
            };
            all.push(Self { config, api_key });
        }
        Ok(all)
    }
}

/// What a provider is asked.
pub(crate) enum Ask {
    Tunnel(TunnelAsk),
    Run(RunAsk),
}

/// One request to a provider: the client's own, already without what may not travel.
pub(crate) struct TunnelAsk {
    pub(crate) endpoint: Endpoint,
    pub(crate) method: Method,
    /// Path and query below `/v1/`; `None`: the endpoint's own.
    pub(crate) path: Option<String>,
    pub(crate) headers: HeaderMap,
    /// The client's `Accept-Encoding`.
    pub(crate) accept_encoding: Option<HeaderValue>,
    pub(crate) body: client::SendBody,
}

/// One normalized run (004 `RunRequest`).
pub(crate) struct RunAsk {
    pub(crate) messages: Vec<Message>,
}

/// How a provider is reached.
pub(crate) enum Backend {
    Http(Box<openai::HttpProvider>),
    Scripted(scripted::Scripted),
}

impl Backend {
    /// Calls the provider for a target; resolves at its head, or when its run started.
    /// `hold` tells what the call has of the provider; it is true at any time, also when the future is dropped.
    pub(crate) async fn call(
        &self,
        target: &str,
        ask: Ask,
        hold: &mut Hold,
    ) -> Result<Response<ProviderBody>, NodeError> {
        match (self, ask) {
            (Backend::Http(p), Ask::Tunnel(ask)) => p.call(ask, hold).await,
            (Backend::Scripted(s), Ask::Tunnel(ask)) => s.call(target, ask, hold).await,
            (Backend::Scripted(s), Ask::Run(ask)) => s.run(target, &ask, hold).await,
            (Backend::Http(_), Ask::Run(_)) => Err(NodeError::new(
                FailureCode::TargetMissing,
                "the provider speaks for itself and takes no runs",
            )),
        }
    }
}

impl ProviderProber for Backend {
    async fn probe(&self, target: &str) -> Result<ProbeReport, ProbeError> {
        match self {
            Backend::Http(p) => p.probe(target).await,
            Backend::Scripted(s) => s.probe(target).await,
        }
    }
}

/// Bytes on their way to the edge, and what they say about the provider's liveness (004).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) bytes: Bytes,
    pub(crate) disposition: Disposition,
}

impl Piece {
    /// A body frame of the tunnel path.
    pub(crate) fn tunnel(bytes: Bytes) -> Self {
        let disposition = classify_tunnel_frame(TunnelFrameKind::Body, bytes.len());
        Self { bytes, disposition }
    }

    /// A line of the normalized path.
    pub(crate) fn event(event: &RunEvent) -> Self {
        Self {
            disposition: event.disposition(),
            bytes: Bytes::from(event.to_line()),
        }
    }
}

/// What a provider says after its head.
pub(crate) enum ProviderBody {
    Http(HttpSource),
    Scripted(scripted::ScriptBody),
    #[cfg(test)]
    Fed(crate::testing::Fed),
}

impl ProviderBody {
    /// The next piece; `None` is the provider's own proper end.
    pub(crate) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, NodeError>>> {
        match self {
            ProviderBody::Http(b) => b
                .poll_data(cx)
                .map(|next| next.map(|result| result.map(Piece::tunnel))),
            ProviderBody::Scripted(b) => b.poll_data(cx),
            #[cfg(test)]
            ProviderBody::Fed(b) => b.poll_data(cx),
        }
    }

    /// Has output in hand and will give it soon: a poll that had nothing was no wait for the provider.
    pub(crate) fn has_some(&self) -> bool {
        match self {
            ProviderBody::Http(b) => b.has_some(),
            ProviderBody::Scripted(_) => false,
            #[cfg(test)]
            ProviderBody::Fed(_) => false,
        }
    }
}
