//! The surface as a client meets it, over loopback, with no provider behind it.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use iop_shared::execution::Outcome;
use serde_json::Value;
use tokio::net::TcpStream;

use super::auth::Keys;
use super::{router, server};
use crate::app::App;
use crate::config::settings_of;
use crate::drain::Drain;
use crate::error::ErrorKind;
use crate::metrics::{EndpointLabel, Metrics};
use crate::pool::Pool;
use crate::tasks;

pub(super) const KEYS: &str = r#"
[auth]
keys = [
  { name = "a", secret = { env = "A" }, roles = ["inference"] },
  { name = "b", secret = { env = "B" }, roles = ["operator", "metrics"] },
]
"#;

pub(super) fn app(toml: &str) -> Arc<App> {
    let mut settings = settings_of(toml);
    let metrics = Arc::new(Metrics::new().unwrap());
    let pool = Pool::new(
        std::mem::take(&mut settings.models),
        settings.queue,
        settings.ejection,
        Arc::clone(&metrics),
    );
    let keys = Keys::new(std::mem::take(&mut settings.keys));
    App::new(settings, metrics, pool, keys, Drain::default())
}

fn listen(app: &Arc<App>) -> SocketAddr {
    let listener = server::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let addr = listener.local_addr().unwrap();
    let options = server::Options {
        tls: None,
        write_timeout: app.settings.gate.client_write_timeout,
    };
    let app = Arc::clone(app);
    let drain = app.drain.clone();
    server::start(listener, options, drain, move |conn, request| {
        router::serve(Arc::clone(&app), conn, request)
    });
    addr
}

struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|v| v.to_str().unwrap())
    }
}

struct Client(hyper::client::conn::http1::SendRequest<Full<Bytes>>);

impl Client {
    async fn connect(addr: SocketAddr) -> Self {
        let io = TokioIo::new(TcpStream::connect(addr).await.unwrap());
        let (sender, conn) = hyper::client::conn::http1::handshake(io).await.unwrap();
        tasks::spawn(tasks::Kind::Session, "client", async move {
            let _ = conn.await;
        });
        Self(sender)
    }

    async fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.0.ready().await.unwrap();
        let mut request = Request::builder().method(method).uri(path).header("host", "edge");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self
            .0
            .send_request(request.body(Full::default()).unwrap())
            .await
            .unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body,
        }
    }
}

async fn ask(addr: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    Client::connect(addr).await.send(method, path, headers).await
}

#[tokio::test]
async fn every_answer_carries_the_requests_id() {
    let addr = listen(&app(""));
    for (method, path) in [
        ("GET", "/livez"),
        ("GET", "/v1/models"),
        ("GET", "/v1/files"),
        ("POST", "/v1/chat/completions"),
        ("PUT", "/v1/models"),
        ("GET", "/api/v1/nodes"),
        ("GET", "/nowhere"),
    ] {
        let answer = ask(addr, method, path, &[("x-request-id", "mine-1")]).await;
        let ids = (answer.header("x-request-id"), answer.header("x-iop-request-id"));
        assert_eq!(ids, (Some("mine-1"), Some("mine-1")), "{method} {path}");
        let answer = ask(addr, method, path, &[("x-request-id", "not well formed")]).await;
        let id = answer.header("x-iop-request-id").unwrap();
        assert!(
            id != "not well formed" && answer.header("x-request-id") == Some(id),
            "{method} {path}"
        );
    }
}

#[tokio::test]
async fn a_panic_is_a_500_of_that_request_alone() {
    let app = app("");
    let asked = router::Asked::of(&app, &Request::new(()));
    let response = asked.guarded(async { panic!("a defect") }).await;
    assert_eq!(response.status(), 500);
    assert!(response.headers().contains_key("x-iop-request-id"));
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body["error"]["code"], "internal_error");
    assert!(!body.to_string().contains("a defect"), "{body}");
    assert_eq!(app.metrics.panics.get(), 1);
    assert_eq!(ask(listen(&app), "GET", "/livez", &[]).await.status, 200);
}

#[tokio::test]
async fn what_is_not_served_is_refused_in_openais_form() {
    let app = app("");
    let addr = listen(&app);
    for (method, path, status, code) in [
        ("GET", "/v1/files", 404, "not_found"),
        ("POST", "/v1/fine_tuning/jobs", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("GET", "/v1/models/absent", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/livez", 405, "method_not_allowed"),
    ] {
        let answer = ask(addr, method, path, &[]).await;
        let error = &answer.json()["error"];
        assert_eq!(
            (answer.status, error["code"].as_str()),
            (status, Some(code)),
            "{method} {path}"
        );
        assert_eq!(error.as_object().unwrap().len(), 4, "{error}");
        assert_eq!(answer.header("allow").is_some(), status == 405, "{method} {path}");
        if code == "not_found" {
            assert!(error["message"].as_str().unwrap().contains(path), "{error}");
        }
    }
    assert_eq!(
        app.metrics
            .requests
            .at((EndpointLabel::Other, Outcome::ClientError))
            .get(),
        2
    );
    assert_eq!(
        app.metrics
            .requests
            .at((EndpointLabel::Models, Outcome::ClientError))
            .get(),
        1
    );
    assert_eq!(
        app.metrics
            .requests
            .at((EndpointLabel::Chat, Outcome::ClientError))
            .get(),
        1
    );
}

#[tokio::test]
async fn a_websocket_is_refused_at_once_and_the_connection_kept() {
    let mut client = Client::connect(listen(&app(""))).await;
    let upgrade = [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
    ];
    let refused = client.send("GET", "/v1/responses", &upgrade).await;
    assert_eq!((refused.status, refused.header("connection")), (426, None));
    assert_eq!(
        refused.json()["error"]["code"],
        ErrorKind::UpgradeRequired.as_str()
    );
    assert_eq!(client.send("GET", "/livez", &[]).await.status, 200);
}

#[tokio::test]
async fn head_is_get_without_its_body() {
    let mut client = Client::connect(listen(&app(""))).await;
    for path in ["/livez", "/readyz", "/metrics", "/v1/models"] {
        let head = client.send("HEAD", path, &[]).await;
        assert_eq!((head.status, head.body.len()), (200, 0), "{path}");
        assert_ne!(head.header("content-length"), Some("0"), "{path}");
        let options = client.send("OPTIONS", path, &[]).await;
        assert_eq!(
            (options.status, options.header("allow")),
            (204, Some("GET, HEAD, OPTIONS")),
            "{path}"
        );
    }
}

#[tokio::test]
async fn roles_open_what_they_name() {
    let addr = listen(&app(KEYS));
    for (path, a, b, nobody) in [
        ("/livez", 200, 200, 200),
        ("/readyz", 200, 200, 200),
        ("/metrics", 403, 200, 401),
        ("/v1/models", 200, 403, 401),
        ("/v1/models/x", 404, 403, 401),
        ("/api/v1/nodes", 403, 200, 401),
        ("/api/v1/providers", 403, 200, 401),
    ] {
        for (secret, status) in [("A", a), ("B", b), ("C", nobody)] {
            let headers = [("authorization", format!("Bearer {secret}"))];
            let headers = headers.each_ref().map(|(k, v)| (*k, v.as_str()));
            let answer = ask(addr, "GET", path, &headers).await;
            assert_eq!(answer.status, status, "{path} {secret}");
        }
        assert_eq!(ask(addr, "GET", path, &[]).await.status, nobody, "{path}");
    }
}

#[tokio::test]
async fn admin_lists_have_their_envelope_and_errors_their_own_form() {
    let addr = listen(&app(""));
    for list in ["nodes", "providers"] {
        let answer = ask(addr, "GET", &format!("/api/v1/{list}"), &[]).await;
        let empty =
            serde_json::json!({ "object": "list", "data": [], "has_more": false, "next_after": null });
        assert_eq!(answer.json(), empty);
        let refused = ask(addr, "GET", &format!("/api/v1/{list}?limit=x"), &[]).await;
        let error = &refused.json()["error"];
        assert_eq!(
            (refused.status, error["code"].as_str()),
            (400, Some("invalid_request"))
        );
        assert_eq!(
            (error["param"].as_str(), error["retryable"].as_bool()),
            (Some("limit"), Some(false))
        );
    }
    assert_eq!(ask(addr, "GET", "/api/v1/flows", &[]).await.status, 404);
    assert_eq!(
        ask(addr, "POST", "/api/v1/nodes", &[]).await.header("allow"),
        Some("GET, HEAD, OPTIONS")
    );
}

#[tokio::test]
async fn metrics_move_to_their_own_listener() {
    let main = app("");
    assert!(
        ask(listen(&main), "GET", "/metrics", &[])
            .await
            .body
            .starts_with(b"# HELP")
    );

    let moved = app(&format!("[server]\nmetrics_listen = \"127.0.0.1:0\"\n{KEYS}"));
    assert_eq!(
        ask(listen(&moved), "GET", "/metrics", &[("x-api-key", "B")])
            .await
            .status,
        404
    );
    let listener = server::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let addr = listener.local_addr().unwrap();
    let options = server::Options {
        tls: None,
        write_timeout: moved.settings.gate.client_write_timeout,
    };
    let shared = Arc::clone(&moved);
    server::start(listener, options, moved.drain.clone(), move |_, request| {
        router::serve_metrics(Arc::clone(&shared), request)
    });
    for (path, status) in [
        ("/metrics", 200),
        ("/livez", 200),
        ("/readyz", 200),
        ("/v1/models", 404),
    ] {
        assert_eq!(ask(addr, "GET", path, &[]).await.status, status, "{path}");
    }
}

#[tokio::test]
async fn a_draining_edge_says_so_and_takes_nothing_new() {
    let app = app("");
    let addr = listen(&app);
    assert_eq!(ask(addr, "GET", "/readyz", &[]).await.status, 200);
    app.drain.start();
    for (method, path, status) in [
        ("GET", "/readyz", 503),
        ("GET", "/livez", 200),
        ("GET", "/metrics", 200),
        ("POST", "/v1/chat/completions", 503),
        ("POST", "/v1/responses", 503),
    ] {
        let answer = ask(addr, method, path, &[]).await;
        assert_eq!(
            (answer.status, answer.header("connection")),
            (status, Some("close")),
            "{path}"
        );
        if path.starts_with("/v1/") {
            assert_eq!(answer.json()["error"]["code"], ErrorKind::Draining.as_str());
            assert!(answer.header("retry-after").is_some());
        }
    }
}
