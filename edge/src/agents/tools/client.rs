//! The HTTP clients of tools: no redirects, no proxy of the environment, no cookies, no decoding, nothing sent twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use reqwest::{Client, ClientBuilder};
use rustls::crypto::ring;
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt;
use tower::util::MapResponseLayer;

/// How long a connection is kept that nobody uses.
const IDLE: Duration = Duration::from_secs(15);

/// Makes clients. All share one TLS configuration.
pub(crate) struct Clients {
    tls: ClientConfig,
    pooled: Client,
}

/// A client for one call on a connection of its own.
pub(crate) struct Fresh {
    pub(crate) client: Client,
    connected: Arc<AtomicBool>,
}

impl Fresh {
    /// Whether the connection stood: before it, nothing of the request can have left.
    pub(crate) fn connected(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }
}

impl Clients {
    /// # Errors
    /// When TLS cannot be set up at all. A machine without root certificates only speaks no `https://`.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let tls = tls()?;
        let pooled = builder(&tls).pool_idle_timeout(IDLE).build()?;
        Ok(Self { tls, pooled })
    }

    /// A builder with the rules of this house, for clients of other protocols.
    pub(crate) fn builder(&self) -> ClientBuilder {
        builder(&self.tls)
    }

    /// For calls that may be repeated. A pooled connection may be closed by its other end in the very moment of the request.
    pub(crate) fn pooled(&self) -> &Client {
        &self.pooled
    }

    /// For calls that must not be repeated: whether they may have been sent is always known.
    ///
    /// # Errors
    /// When the client cannot be built.
    pub(crate) fn fresh(&self) -> reqwest::Result<Fresh> {
        let connected = Arc::new(AtomicBool::new(false));
        let note = Arc::clone(&connected);
        let layer = MapResponseLayer::new(move |connection| {
            note.store(true, Ordering::Release);
            connection
        });
        let client = builder(&self.tls)
            .pool_max_idle_per_host(0)
            .connector_layer(layer)
            .build()?;
        Ok(Fresh { client, connected })
    }
}

fn builder(tls: &ClientConfig) -> ClientBuilder {
    Client::builder()
        .tls_backend_preconfigured(tls.clone())
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .referer(false)
        .no_proxy()
}

fn tls() -> anyhow::Result<ClientConfig> {
    let versions = || {
        ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .context("TLS of the tools")
    };
    let verified = versions()?.with_platform_verifier();
    let config = match verified {
        Ok(config) => config,
        Err(error) => {
            tracing::warn!(%error, "no root certificates on this machine: https:// tools cannot be verified");
            versions()?.with_root_certificates(RootCertStore::empty())
        }
    };
    let mut config = config.with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}
