//! The HTTP clients of tools: no redirects, no proxy of the environment, no cookies, no decoding, nothing sent twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use reqwest::{Client, ClientBuilder};
use rustls::crypto::ring;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};
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
        Ok(Self::with(tls()?)?)
    }

    fn with(mut tls: ClientConfig) -> reqwest::Result<Self> {
        tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
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
    let verified = protocols()?.with_platform_verifier();
    let config = match verified {
        Ok(config) => config,
        Err(error) => {
            tracing::warn!(%error, "no root certificates on this machine: https:// tools cannot be verified");
            protocols()?.with_root_certificates(RootCertStore::empty())
        }
    };
    Ok(config.with_no_client_auth())
}

fn protocols() -> anyhow::Result<ConfigBuilder<ClientConfig, WantsVerifier>> {
    ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .context("TLS of the tools")
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::Full;
    use hyper::body::Incoming;
    use hyper::service::service_fn;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use hyper_util::server::conn::auto;
    use rustls::ServerConfig;
    use rustls::pki_types::PrivateKeyDer;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::tasks::{Kind, spawn};

    /// A service that says which version it was asked in; its URL, and a client that trusts it.
    async fn service(alpn: &[&str]) -> (String, Clients) {
        let made = rcgen::generate_simple_self_signed(vec![String::from("localhost")]).unwrap();
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let ring = || Arc::new(ring::default_provider());
        let mut server = ServerConfig::builder_with_provider(ring())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        server.alpn_protocols = alpn.iter().map(|p| p.as_bytes().to_vec()).collect();
        let acceptor = TlsAcceptor::from(Arc::new(server));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        spawn(Kind::Session, "test_service", async move {
            while let Ok((socket, _)) = listener.accept().await {
                let Ok(stream) = acceptor.accept(socket).await else {
                    continue;
                };
                spawn(Kind::Session, "test_connection", async move {
                    let answer = service_fn(|request: http::Request<Incoming>| async move {
                        let version = format!("{:?}", request.version());
                        Ok::<_, Infallible>(http::Response::new(Full::<bytes::Bytes>::from(version)))
                    });
                    let server = auto::Builder::new(TokioExecutor::new());
                    let _ = server.serve_connection(TokioIo::new(stream), answer).await;
                });
            }
        });
        let mut roots = RootCertStore::empty();
        roots.add(made.cert.der().clone()).unwrap();
        let client = protocols().unwrap().with_root_certificates(roots);
        let clients = Clients::with(client.with_no_client_auth()).unwrap();
        (format!("https://localhost:{port}/"), clients)
    }

    #[tokio::test]
    async fn a_service_is_spoken_to_in_the_version_that_it_offers() {
        for (alpn, version) in [
            (&["h2", "http/1.1"][..], "HTTP/2.0"),
            (&["http/1.1"], "HTTP/1.1"),
            (&[], "HTTP/1.1"),
        ] {
            let (url, clients) = service(alpn).await;
            let fresh = clients.fresh().unwrap();
            assert!(!fresh.connected());
            for client in [clients.pooled(), &fresh.client] {
                let answer = client.get(&url).send().await.unwrap();
                assert_eq!(answer.text().await.unwrap(), version);
            }
            assert!(fresh.connected());
        }
    }

    #[tokio::test]
    async fn a_service_that_nobody_vouches_for_is_sent_nothing() {
        let (url, _) = service(&["h2"]).await;
        let clients = Clients::new().unwrap();
        let fresh = clients.fresh().unwrap();
        for client in [clients.pooled(), &fresh.client] {
            let error = client.get(&url).send().await.unwrap_err();
            assert!(error.is_connect(), "{error:?}");
        }
        assert!(!fresh.connected());
    }
}
