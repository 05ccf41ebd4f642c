//! Dialing an edge over loopback: the upgrade, the roles turned, refusals, TLS.

use std::time::Duration;

use http_body_util::Full;
use hyper::client::conn::http2;
use hyper_util::rt::TokioExecutor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::config::{ProcessResolver, Settings};
use crate::link::{Links, prepare};
use crate::testing::{request, whole};

/// Answers one handshake; gives the request's head and the socket.
async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(mut socket: S, answer: &str) -> (String, S) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await.unwrap());
    }
    socket.write_all(answer.as_bytes()).await.unwrap();
    (String::from_utf8(head).unwrap(), socket)
}

const ACCEPTED: &str = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: iop-link/1\r\n\
                        iop-connection-generation: 7\r\n\r\n";

fn settings(url: &str, tls: &str, dir: &std::path::Path) -> Settings {
    let token = dir.join("token");
    std::fs::write(&token, "t0ken\n").unwrap();
    let text = format!(
        "[node]\nid = \"n1\"\n[[edges]]\nurl = {url:?}\ntoken = {{ file = {token:?} }}\n{tls}\n\
         [[providers]]\nid = \"s\"\nadapter = \"scripted\"\nscript = {{ m = {{}} }}\n"
    );
    Settings::parse("node.toml", &text, &ProcessResolver).unwrap()
}

fn dial(settings: Settings) -> (Node, Links) {
    let node = Node::new(settings.id, &settings.providers, &prometheus::Registry::new()).unwrap();
    let links = Links::start(&node, prepare(settings.edges).unwrap());
    (node, links)
}

async fn session_over<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(socket: S) -> String {
    let (mut edge, connection) =
        http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), TokioIo::new(socket))
            .await
            .unwrap();
    let task = crate::tasks::spawn(crate::tasks::Kind::Session, "edge", async move {
        let _ = connection.await;
    });
    let mut lines = edge
        .send_request(request("GET", "/link/v1/session", ""))
        .await
        .unwrap()
        .into_body();
    let line = lines.frame().await.unwrap().unwrap().into_data().unwrap();
    let known = whole(
        edge.send_request(request("POST", "/link/v1/commands/x", ""))
            .await
            .unwrap(),
    )
    .await;
    assert_eq!(known.status, 404);
    task.abort();
    String::from_utf8(line.to_vec()).unwrap()
}

#[tokio::test]
async fn a_node_offers_itself_serves_and_comes_back_when_the_link_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = listener.local_addr().unwrap().to_string();
    let (node, links) = dial(settings(&format!("http://{authority}"), "", dir.path()));
    let mut instances = Vec::new();
    for _ in 0..2 {
        let (socket, _) = tokio::time::timeout(Duration::from_secs(5), listener.accept())
            .await
            .unwrap()
            .unwrap();
        let (head, socket) = handshake(socket, ACCEPTED).await;
        assert!(head.starts_with("GET /link HTTP/1.1\r\n"), "{head}");
        for line in [
            "upgrade: iop-link/1",
            "authorization: Bearer t0ken",
            "iop-node-id: n1",
            &format!("host: {authority}"),
        ] {
            assert!(head.lines().any(|l| l == line), "{line} in {head}");
        }
        instances.push(
            head.lines()
                .find(|l| l.starts_with("iop-node-instance: "))
                .unwrap()
                .to_owned(),
        );
        assert!(session_over(socket).await.starts_with("{\"node_id\":\"n1\","));
    }
    // The same process is the same instance.
    assert_eq!(instances[0], instances[1]);
    assert!(node.metrics().dials.at((DialResult::Accepted,)).get() >= 2);
    links.close(Duration::from_secs(5)).await;
    assert_eq!(node.metrics().links.at((LinkState::Up,)).get(), 0);
    assert_eq!(node.metrics().links.at((LinkState::Down,)).get(), 1);
}

#[tokio::test]
async fn a_refused_node_dials_again_and_counts_why() {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (node, links) = dial(settings(
        &format!("http://{}", listener.local_addr().unwrap()),
        "",
        dir.path(),
    ));
    for (status, result) in [
        ("401 Unauthorized", DialResult::Unauthorized),
        ("426 Upgrade Required", DialResult::VersionRefused),
        ("409 Conflict", DialResult::Duplicate),
        ("500 Internal Server Error", DialResult::Refused),
        // A 101 that names no generation is no link.
        (
            "101 Switching Protocols\r\nupgrade: iop-link/1\r\nconnection: upgrade",
            DialResult::Refused,
        ),
    ] {
        let before = node.metrics().dials.at((result,)).get();
        let (socket, _) = tokio::time::timeout(Duration::from_secs(5), listener.accept())
            .await
            .unwrap()
            .unwrap();
        let length = if status.starts_with("101") {
            ""
        } else {
            "content-length: 0\r\n"
        };
        let (_, socket) = handshake(socket, &format!("HTTP/1.1 {status}\r\n{length}\r\n")).await;
        // Hung up by the node, once it has read the answer.
        let mut socket = socket;
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(Duration::from_secs(5), socket.read_to_end(&mut rest))
            .await
            .unwrap();
        drop(socket);
        let counted = async {
            while node.metrics().dials.at((result,)).get() == before {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), counted)
            .await
            .unwrap();
    }
    links.close(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn tls_with_an_authority_and_a_certificate_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let authority = {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        rcgen::CertifiedIssuer::self_signed(params, key).unwrap()
    };
    let issue = |name: &str| {
        let key = rcgen::KeyPair::generate().unwrap();
        let cert = rcgen::CertificateParams::new(vec![name.to_owned()])
            .unwrap()
            .signed_by(&key, &authority)
            .unwrap();
        (cert, key)
    };
    let (server, server_key) = issue("127.0.0.1");
    let (client, client_key) = issue("node");
    crate::providers::client::install_crypto();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority.der().clone()).unwrap();
    let verifier = rustls::server::WebPkiClientVerifier::builder(std::sync::Arc::new(roots))
        .build()
        .unwrap();
    let config = rustls::ServerConfig::builder()
        .with_client_cert_verifier(verifier)
        .with_single_cert(
            vec![server.der().clone()],
            server_key.serialize_der().try_into().unwrap(),
        )
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let tls = format!(
        "tls = {{ ca = {:?}, cert = {:?}, key = {:?} }}",
        file("ca.pem", &authority.pem()),
        file("node.pem", &client.pem()),
        file("node.key", &client_key.serialize_pem()),
    );
    let (_node, links) = dial(settings(
        &format!("https://{}", listener.local_addr().unwrap()),
        &tls,
        dir.path(),
    ));
    let (socket, _) = tokio::time::timeout(Duration::from_secs(5), listener.accept())
        .await
        .unwrap()
        .unwrap();
    let socket = acceptor.accept(socket).await.unwrap();
    let (_, socket) = handshake(socket, ACCEPTED).await;
    assert!(session_over(socket).await.contains("\"n1\""));
    links.close(Duration::from_secs(5)).await;

    // Files that do not fit are named before anything starts.
    let bad = format!("tls = {{ ca = {:?} }}", file("bad.pem", "nothing"));
    let refused = prepare(settings("https://127.0.0.1:1", &bad, dir.path()).edges)
        .err()
        .unwrap();
    assert!(
        refused.starts_with("edges[0].tls: ") && refused.contains("bad.pem"),
        "{refused}"
    );
}
