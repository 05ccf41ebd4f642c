//! The port: refusals with words, TLS, slow peers, the embedded node beside it.

use std::net::SocketAddr;

use http_body_util::Empty;
use iop_shared::config::SecretString;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use super::super::accept::{self, Port};
use super::*;
use crate::config::settings_of;
use crate::http::tls::{Alpn, server_config};

const GOOD: &str = "GET /link HTTP/1.1\r\nhost: e\r\nconnection: upgrade\r\nupgrade: iop-link/1\r\nauthorization: Bearer secret\r\n";

struct Site {
    addr: SocketAddr,
    registry: Arc<Registry>,
    drain: Drain,
}

async fn site(tls: Option<Arc<rustls::ServerConfig>>) -> Site {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (registry, drain) = (registry(), Drain::default());
    let settings = LinkSettings {
        listen: addr,
        tokens: vec!["old".into(), "secret".into()],
        tls,
    };
    Links(Arc::clone(&registry)).listen(listener, settings, drain.clone());
    Site {
        addr,
        registry,
        drain,
    }
}

impl Site {
    /// Everything the port says to a request.
    async fn says(&self, request: &str) -> String {
        let mut socket = TcpStream::connect(self.addr).await.unwrap();
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        tokio::time::timeout(PATIENCE, socket.read_to_string(&mut text))
            .await
            .unwrap()
            .unwrap();
        text
    }

    async fn dial(&self, id: &str, instance: &str) -> (Fake, u64) {
        let socket = TcpStream::connect(self.addr).await.unwrap();
        upgraded(socket, id, instance).await
    }
}

/// Shakes hands as a node does, then serves.
async fn upgraded(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    id: &str,
    instance: &str,
) -> (Fake, u64) {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(io))
        .await
        .unwrap();
    let request = Request::get("/link")
        .header("host", "e")
        .header("connection", "upgrade")
        .header("upgrade", "iop-link/1")
        .header("authorization", "Bearer secret")
        .header("iop-node-id", id)
        .header("iop-node-instance", instance)
        .body(Empty::<Bytes>::new())
        .unwrap();
    let (response, _) = tokio::join!(sender.send_request(request), connection.with_upgrades());
    let response = response.unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(response.headers()["upgrade"], "iop-link/1");
    let generation = response.headers()["iop-connection-generation"]
        .to_str()
        .unwrap()
        .parse()
        .unwrap();
    let io = hyper::upgrade::on(response).await.unwrap();
    (Fake::start(TokioIo::new(io)), generation)
}

#[test]
fn each_refusal_has_its_status_and_words() {
    threaded(async {
        let site = site(None).await;
        let (fake, _) = site.dial("n1", "a").await;
        fake.says(line("n1"));
        drop(lease(&site.registry).await);
        let id = "iop-node-id: x\r\n\r\n";
        let good = |rest: &str| format!("{GOOD}{rest}");
        for (request, status, code, words) in [
            (
                "GET /v1/models HTTP/1.1\r\nhost: e\r\n\r\n".to_owned(),
                "404",
                "not_found",
                "/link",
            ),
            (
                good(id).replacen("GET", "POST", 1),
                "405",
                "method_not_allowed",
                "GET",
            ),
            (
                good(id).replace("secret", "secre"),
                "401",
                "invalid_link_token",
                "token",
            ),
            (
                good(id).replace("authorization", "x"),
                "401",
                "invalid_link_token",
                "token",
            ),
            (
                good(id).replace("upgrade: iop-link/1", "x: y"),
                "426",
                "upgrade_required",
                "iop-link/1",
            ),
            (
                good(id).replace("connection: upgrade", "x: y"),
                "426",
                "upgrade_required",
                "iop-link/1",
            ),
            (
                good(id).replace("link/1", "link/99"),
                "426",
                "link_version",
                "iop-link/1",
            ),
            (good("\r\n"), "400", "invalid_node_id", "iop-node-id"),
            (
                good("iop-node-id: bad id!\r\n\r\n"),
                "400",
                "invalid_node_id",
                "iop-node-id",
            ),
            (
                good("iop-node-id: embedded\r\n\r\n"),
                "400",
                "reserved_node_id",
                "reserved",
            ),
            (
                good("iop-node-id: n1\r\niop-node-instance: b\r\n\r\n"),
                "409",
                "duplicate_node",
                "\\\"n1\\\"",
            ),
        ] {
            let said = site.says(&request).await;
            assert!(said.starts_with(&format!("HTTP/1.1 {status} ")), "{said}");
            assert_eq!(
                said.contains("iop-link-versions: 1\r\n"),
                status == "426",
                "{said}"
            );
            let body = said.split_once("\r\n\r\n").unwrap().1;
            let v: serde_json::Value = serde_json::from_str(body).unwrap();
            assert_eq!(v["error"].as_object().unwrap().len(), 4);
            assert_eq!(v["error"]["code"], code);
            assert!(body.contains(words), "{body}");
        }
        assert!(
            site.says("\x16\x03\x01 what\r\n\r\n")
                .await
                .starts_with("HTTP/1.1 400 ")
        );
        // None of that touched the node that is there, nor its generation.
        assert_eq!(live(&site.registry), [("n1".into(), 1)]);
        site.drain.start();
        let said = site.says(&good(id)).await;
        assert!(
            said.starts_with("HTTP/1.1 503 ") && said.contains("\"draining\""),
            "{said}"
        );
    });
}

#[test]
fn a_node_dials_serves_and_is_replaced_by_its_own_next_connection() {
    threaded(async {
        let site = site(None).await;
        let (old, generation) = site.dial("n1", "a").await;
        assert_eq!(generation, 1);
        old.says(line("n1"));
        let first = lease(&site.registry).await;
        let response = first.session().call(tunnel("short")).await.unwrap();
        assert_eq!(read(response).await.unwrap().0, 25_000);
        let (new, generation) = site.dial("n1", "a").await;
        assert_eq!(generation, 2);
        new.says(line("n1"));
        eventually("the newer generation is live", || {
            live(&site.registry) == [("n1".into(), 2)]
        })
        .await;
        drop(first);
        tokio::time::timeout(PATIENCE, old.served).await.unwrap().unwrap();
        assert_eq!(live(&site.registry), [("n1".into(), 2)]);
        // A restarted process finds its dead predecessor's place free.
        new.served.abort();
        drop(new.session);
        eventually("the old process is gone", || live(&site.registry).is_empty()).await;
        let (restarted, generation) = site.dial("n1", "b").await;
        restarted.says(line("n1"));
        assert_eq!(lease(&site.registry).await.generation().0, generation);
    });
}

#[test]
fn a_link_in_tls_is_a_link() {
    threaded(async {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let cert = made.cert.pem();
        let config = server_config(&cert, &made.signing_key.serialize_pem(), None, Alpn::Upgrade).unwrap();
        let site = site(Some(config)).await;
        let mut roots = rustls::RootCertStore::empty();
        roots.add(made.cert.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let socket = TcpStream::connect(site.addr).await.unwrap();
        let name = rustls::pki_types::ServerName::try_from("localhost").unwrap();
        let io = tokio_rustls::TlsConnector::from(Arc::new(client))
            .connect(name, socket)
            .await
            .unwrap();
        let (fake, _) = upgraded(io, "n1", "a").await;
        fake.says(line("n1"));
        let lease = lease(&site.registry).await;
        let response = lease.session().call(tunnel("short")).await.unwrap();
        assert_eq!(read(response).await.unwrap().0, 25_000);
    });
}

#[tokio::test(start_paused = true)]
async fn a_handshake_that_never_ends_is_closed_after_5_seconds_with_words() {
    let peer = SocketAddr::from(([127, 0, 0, 1], 9));
    for begun in ["", "GET /li", GOOD] {
        let port = Port::new(vec![SecretString::from("secret")], registry(), Drain::default());
        let (mut node, io) = tokio::io::duplex(1 << 16);
        let start = Instant::now();
        let greeting = tasks::spawn(Kind::Session, "test_greeting", async move {
            assert!(port.greet(io, peer, accept::HANDSHAKE_WITHIN).await.is_none());
        });
        node.write_all(begun.as_bytes()).await.unwrap();
        let mut said = String::new();
        node.read_to_string(&mut said).await.unwrap();
        assert_eq!(start.elapsed().as_secs(), 5);
        assert!(
            said.starts_with("HTTP/1.1 408 ") && said.contains("handshake_timeout"),
            "{said}"
        );
        greeting.await.unwrap();
    }
}

#[tokio::test]
async fn the_embedded_node_is_a_session_like_any_other() {
    let toml = "[[providers]]\nid = \"p\"\nadapter = \"scripted\"\ncapacity = 2\n[providers.script.t]\nreply = \"hi\"\n";
    let settings = settings_of(toml);
    let metrics = Arc::new(Metrics::new().unwrap());
    let pool = Pool::new(
        settings.models,
        settings.queue,
        settings.ejection,
        Arc::clone(&metrics),
    );
    let node = iop_node::Node::new(NodeId::embedded(), &settings.providers, metrics.registry()).unwrap();
    let links = Links::new(Arc::clone(&pool));
    links.embed(node.clone());
    let nodes = pool.nodes();
    assert_eq!(
        (nodes.len(), nodes[0].id.as_str(), nodes[0].embedded),
        (1, "embedded", true)
    );
    assert_eq!(nodes[0].connection_generation, ConnectionGeneration(1));
    let model = pool.resolve("t").unwrap();
    let who = Who::nobody();
    let ask = Ask::first(&model, Endpoint::Chat, &who);
    let lease = pool.acquire(ask).await.unwrap();
    assert!(lease.session().is_live() && lease.session().embedded);
    let mut status = Request::new(SplicedBody::whole(Bytes::from_static(b"{\"provider\":\"p\"}")));
    *status.method_mut() = http::Method::POST;
    *status.uri_mut() = http::Uri::from_static("/link/v1/commands/transport_status");
    let response = lease.session().call(status).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert!(body.starts_with(b"{\"adapter_key\":\"p\""), "{body:?}");
    // What it advertises later is followed; a drain of the links leaves it alone.
    node.set_draining(true);
    let draining = || pool.nodes()[0].state == crate::metrics::SessionState::Draining;
    eventually("the embedded node is shown as draining", draining).await;
    links.drain().await;
    assert_eq!(pool.nodes().len(), 1);
}
