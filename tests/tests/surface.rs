//! What is served where, to whom, and what the gateway says in its own name (§1, §8, §9, §10, §13).

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use iop_tests::client::{Conn, sse_data};
use iop_tests::config::{Provider, Setup, key};
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Edge, Shape, Stack, ids};
use iop_tests::{eventually, fixtures, run, within};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

async fn hello(mut ex: Exchange) -> io::Result<()> {
    let body = ex.json();
    if body["stream"] == true {
        ex.sse().await?;
        ex.chunk(&fixtures::chat_stream(&["a", "b"])).await?;
        return ex.end().await;
    }
    ex.json_reply(200, &fixtures::chat_answer("m", "hello")).await
}

/// Answers only when the gate is open; the sender opens it.
async fn gated() -> (Arc<Stub>, tokio::sync::watch::Sender<bool>) {
    let (open, gate) = tokio::sync::watch::channel(false);
    let stub = Stub::start(move |mut ex| {
        let mut gate = gate.clone();
        async move {
            ex.until(async { gate.wait_for(|open| *open).await.is_ok() })
                .await?;
            hello(ex).await
        }
    })
    .await;
    (Arc::new(stub), open)
}

#[test]
fn models_are_listed_and_found_by_encoded_ids() {
    run(60, async {
        let stub = Stub::start(hello).await;
        for shape in Shape::ALL {
            let provider = Provider::openai("up", &stub.url(), &["org/model:1", "plain"]);
            let stack = Stack::start(shape, Setup::of(provider)).await;
            let list = stack.client().get("/v1/models").await;
            assert_eq!(list.json()["object"], "list");
            assert_eq!(
                ids(&list.json()).into_iter().collect::<BTreeSet<_>>(),
                BTreeSet::from(["org/model:1".to_owned(), "plain".to_owned()])
            );
            for (path, id) in [
                ("org%2Fmodel%3A1", "org/model:1"),
                ("org/model:1", "org/model:1"),
                ("plain", "plain"),
            ] {
                let answer = stack.client().get(&format!("/v1/models/{path}")).await;
                assert_eq!(answer.status(), 200, "{path}: {}", answer.text());
                let model = answer.json();
                assert_eq!((&model["id"], &model["object"]), (&json!(id), &json!("model")));
                assert!(
                    model["created"].is_u64() && model["owned_by"].is_string(),
                    "{model}"
                );
            }
            stack
                .client()
                .get("/v1/models/absent")
                .await
                .assert_error(404, "model_not_found");
            stack
                .chat("absent", "hi")
                .await
                .assert_error(404, "model_not_found");
        }
    });
}

#[test]
fn targets_are_asked_from_the_provider() {
    run(60, async {
        let stub = Stub::start(|mut ex| async move {
            if ex.path == "/v1/models" {
                return ex.json_reply(200, &json!({"object": "list", "data": [{"id": "found-1", "object": "model"}, {"id": "found/2"}]})).await;
            }
            hello(ex).await
        })
        .await;
        for shape in Shape::ALL {
            let stack = Stack::start(shape, Setup::of(Provider::auto("up", &stub.url()))).await;
            stack
                .edge
                .lists(
                    &["found-1".to_owned(), "found/2".to_owned()],
                    Duration::from_secs(10),
                )
                .await;
            assert_eq!(stack.chat("found/2", "hi").await.status(), 200);
        }
    });
}

#[test]
fn every_endpoint_is_routed_by_its_model() {
    run(60, async {
        let stub =
            Stub::start(|mut ex| async move { ex.json_reply(200, &json!({"path": ex.path.clone()})).await })
                .await;
        for shape in Shape::ALL {
            let provider = Provider::openai("up", &stub.url(), &["real"]);
            let stack = Stack::start(shape, Setup::of(provider).model("pub", "up", "real")).await;
            for path in [
                "/v1/chat/completions",
                "/v1/responses",
                "/v1/completions",
                "/v1/embeddings",
                "/v1/rerank",
                "/v1/moderations",
                "/v1/images/generations",
                "/v1/audio/speech",
            ] {
                let answer = stack
                    .client()
                    .post(path, &json!({"model": "pub", "input": "x"}))
                    .await;
                assert_eq!(answer.status(), 200, "{shape:?} {path}: {}", answer.text());
                assert_eq!(answer.json()["path"], path);
                assert_eq!(
                    stub.last().json(),
                    json!({"model": "real", "input": "x"}),
                    "{path}"
                );
            }
        }
    });
}

#[test]
fn anything_else_is_404_in_openais_shape() {
    run(60, async {
        let stub = Stub::start(hello).await;
        let stack = Stack::start(
            Shape::Embedded,
            Setup::of(Provider::openai("up", &stub.url(), &["m"])),
        )
        .await;
        for (method, path) in [
            ("GET", "/v1/files"),
            ("POST", "/v1/fine_tuning/jobs"),
            ("GET", "/v1"),
            ("GET", "/v1/"),
            ("POST", "/v1/chat"),
            ("GET", "/v1/chat/completions/x"),
            ("GET", "/v1/%2e%2e/metrics"),
        ] {
            let answer = stack.client().request(method, path, &[], b"").await;
            assert_eq!(answer.status(), 404, "{method} {path}: {}", answer.text());
            answer.error_code();
        }
        assert_eq!(stack.client().get("/elsewhere").await.status(), 404);
        let answer = stack.client().request("GET", CHAT, &[], b"").await;
        assert!(matches!(answer.status(), 404 | 405), "{}", answer.status());
        answer.error_code();
        assert!(stub.received().is_empty());
    });
}

#[test]
fn requests_that_cannot_be_routed_are_named_400() {
    run(60, async {
        let stub = Stub::start(hello).await;
        let stack = Stack::start(
            Shape::Embedded,
            Setup::of(Provider::openai("up", &stub.url(), &["m"])),
        )
        .await;
        for (body, names) in [
            ("{\"messages\":[]}", "model"),
            ("{\"model\":7}", "model"),
            ("{\"model\":\"\"}", "model"),
            ("{\"model\":\"m\"", "JSON"),
            ("[]", ""),
            ("", ""),
            ("not json", ""),
        ] {
            for path in [CHAT, "/v1/responses", "/v1/embeddings"] {
                let answer = stack
                    .client()
                    .request(
                        "POST",
                        path,
                        &[("content-type", "application/json")],
                        body.as_bytes(),
                    )
                    .await;
                assert_eq!(answer.status(), 400, "{path} {body:?}: {}", answer.text());
                answer.error_code();
                assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
                assert!(answer.text().contains(names), "{body:?}: {}", answer.text());
            }
        }
        let form = b"--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n1\r\n--b--\r\n";
        let headers = [("content-type", "multipart/form-data; boundary=b")];
        let answer = stack
            .client()
            .request("POST", "/v1/audio/transcriptions", &headers, form)
            .await;
        assert_eq!(answer.status(), 400, "{}", answer.text());
        assert!(stub.received().is_empty());
    });
}

#[test]
fn a_websocket_is_refused_at_once_and_the_connection_kept() {
    run(60, async {
        let stub = Stub::start(hello).await;
        let stack = Stack::start(
            Shape::Embedded,
            Setup::of(Provider::openai("up", &stub.url(), &["m"])),
        )
        .await;
        let mut conn = Conn::open(&stack.edge.http).await.unwrap();
        for _ in 0..2 {
            let headers = [
                ("connection", "Upgrade"),
                ("upgrade", "websocket"),
                ("sec-websocket-version", "13"),
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ];
            conn.request("GET", "/v1/responses", &headers, b"").await.unwrap();
            let answer = within("426", Duration::from_secs(1), conn.answer())
                .await
                .unwrap();
            assert_eq!(answer.status(), 426, "{}", answer.text());
            answer.error_code();
            assert_ne!(answer.header("connection"), Some("close"));
        }
        let body = fixtures::chat("m", "hi", false).to_string();
        conn.request(
            "POST",
            CHAT,
            &[("content-type", "application/json")],
            body.as_bytes(),
        )
        .await
        .unwrap();
        assert_eq!(conn.answer().await.unwrap().status(), 200);
    });
}

#[test]
fn http_2_without_tls_is_spoken_on_the_same_port() {
    run(60, async {
        let stub = Stub::start(|mut ex| async move {
            if ex.json()["messages"][0]["content"] == "hold" {
                ex.sse().await?;
                ex.data(&fixtures::text_chunk("begun")).await?;
                ex.gone().await;
                return Ok(());
            }
            hello(ex).await
        })
        .await;
        for shape in Shape::ALL {
            let stack = Stack::start(shape, Setup::of(Provider::openai("up", &stub.url(), &["m"]))).await;
            let socket = tokio::net::TcpStream::connect(&stack.edge.http).await.unwrap();
            let (mut sender, conn) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(socket))
                    .await
                    .unwrap();
            tokio::spawn(conn);
            let mut send = async |body: Value| {
                let request = http::Request::post(format!("http://{}{CHAT}", stack.edge.http))
                    .header("content-type", "application/json")
                    .body(Full::new(bytes::Bytes::from(body.to_string())))
                    .unwrap();
                sender.send_request(request).await.unwrap()
            };
            let answer = send(fixtures::chat("m", "hi", false)).await;
            assert_eq!(
                (answer.status(), answer.version()),
                (http::StatusCode::OK, http::Version::HTTP_2)
            );
            let whole: Value =
                serde_json::from_slice(&answer.into_body().collect().await.unwrap().to_bytes()).unwrap();
            assert_eq!(whole, fixtures::chat_answer("m", "hello"));
            let answer = send(fixtures::chat("m", "hi", true)).await;
            let stream = answer.into_body().collect().await.unwrap().to_bytes();
            assert!(stream.ends_with(b"data: [DONE]\n\n"));
            // A reset stream is a client that left.
            let mut answer = send(fixtures::chat("m", "hold", true)).await;
            assert!(answer.body_mut().frame().await.is_some());
            let index = stub.received().len() - 1;
            drop(answer);
            stub.hung_up(index, Duration::from_secs(1)).await;
            stack.settled(Duration::from_secs(1)).await;
        }
    });
}

#[test]
fn keys_have_roles_and_models() {
    run(60, async {
        let stub = Stub::start(hello).await;
        let keys = [
            key(
                "all",
                "sk-all",
                &["inference", "operator", "admin", "metrics"],
                "",
            ),
            key("infer", "sk-infer", &["inference"], ", models = [\"m-a\"]"),
            key("ops", "sk-ops", &["operator"], ""),
            key("metrics", "sk-metrics", &["metrics"], ""),
        ];
        let setup = Setup::of(Provider::openai("up", &stub.url(), &["m-a", "m-b"])).keys(&keys, "sk-all");
        let stack = Stack::start(Shape::Embedded, setup).await;
        let with = |name: &str| stack.client().with_key(&format!("sk-{name}"));
        let nobody = iop_tests::client::Client::new(&stack.edge.http);
        for path in ["/livez", "/readyz"] {
            assert_eq!(nobody.get(path).await.status(), 200);
        }
        let chat = fixtures::chat("m-a", "hi", false);
        for path in [
            "/v1/models",
            "/v1/models/m-a",
            "/metrics",
            "/api/v1/nodes",
            "/api/v1/providers",
        ] {
            nobody.get(path).await.assert_error(401, "invalid_api_key");
            with("unknown")
                .get(path)
                .await
                .assert_error(401, "invalid_api_key");
            let status = |name: &'static str| async move { with(name).get(path).await.status() };
            let expected = match path {
                "/metrics" => [200, 403, 403, 200],
                "/api/v1/nodes" | "/api/v1/providers" => [200, 403, 200, 403],
                _ => [200, 200, 403, 403],
            };
            let seen = [
                status("all").await,
                status("infer").await,
                status("ops").await,
                status("metrics").await,
            ];
            assert_eq!(seen, expected, "{path}: all, infer, ops, metrics");
        }
        nobody
            .post(CHAT, &chat)
            .await
            .assert_error(401, "invalid_api_key");
        with("ops")
            .post(CHAT, &chat)
            .await
            .assert_error(403, "permission_denied");
        assert_eq!(with("infer").post(CHAT, &chat).await.status(), 200);
        assert_eq!(ids(&with("infer").get("/v1/models").await.json()), ["m-a"]);
        with("infer")
            .get("/v1/models/m-b")
            .await
            .assert_error(404, "model_not_found");
        let refused = with("infer").post(CHAT, &fixtures::chat("m-b", "hi", true)).await;
        assert!(matches!(refused.status(), 403 | 404), "{}", refused.text());
        assert!(["permission_denied", "model_not_found"].contains(&refused.error_code().as_str()));
        assert_eq!(stub.received().len(), 1);
        let log = stack.edge.process.log();
        assert!(
            !log.contains("sk-all") && !log.contains("sk-infer"),
            "a secret in the log: {log}"
        );
    });
}

#[test]
fn a_key_has_at_most_its_concurrency() {
    run(60, async {
        let (stub, open) = gated().await;
        let keys = [
            key("all", "sk-all", &["inference", "operator", "metrics"], ""),
            key("two", "sk-two", &["inference"], ", concurrency = 2"),
        ];
        let setup = Setup::of(Provider::openai("up", &stub.url(), &["m"])).keys(&keys, "sk-all");
        let stack = Stack::start(Shape::Embedded, setup).await;
        let two = stack.client().with_key("sk-two");
        let body = fixtures::chat("m", "hi", false);
        let mut first = two.open(CHAT, &body).await;
        stub.arrived(1).await;
        let second = two.open(CHAT, &body).await;
        stub.arrived(2).await;
        for _ in 0..3 {
            let refused = two.post(CHAT, &body).await;
            refused.assert_error(429, "rate_limit_exceeded");
            assert!(refused.header("retry-after").is_some(), "{:?}", refused.head);
        }
        // Another key is not concerned; a client that leaves gives its place back.
        let other = stack.client().open(CHAT, &body).await;
        stub.arrived(3).await;
        drop(second);
        stub.hung_up(1, Duration::from_secs(1)).await;
        let third = eventually("the place is free", Duration::from_secs(1), || async {
            let before = stub.received().len();
            let mut conn = two.open(CHAT, &body).await;
            tokio::select! {
                () = stub.arrived(before + 1) => Ok(conn),
                answer = conn.answer() => Err(answer.unwrap().text()),
            }
        })
        .await;
        open.send_replace(true);
        assert_eq!(first.answer().await.unwrap().status(), 200);
        drop((third, other));
        stack.settled(Duration::from_secs(2)).await;
    });
}

#[test]
fn a_full_queue_and_a_long_wait_are_503_with_retry_after() {
    run(60, async {
        for shape in Shape::ALL {
            let (stub, open) = gated().await;
            let setup = Setup::of(Provider::openai("up", &stub.url(), &["m"]).capacity(1))
                .edge("queue", "max_depth = 1")
                .edge("queue", "max_wait = \"700ms\"");
            let stack = Stack::start(shape, setup).await;
            let body = fixtures::chat("m", "hi", true);
            let mut first = stack.client().open(CHAT, &body).await;
            stub.arrived(1).await;
            let queued_at = Instant::now();
            let mut second = stack.client().open(CHAT, &body).await;
            eventually("one queued", Duration::from_millis(500), || async {
                let providers = stack.edge.admin("providers").await;
                let queued: u64 = providers.iter().filter_map(|p| p["queued"].as_u64()).sum();
                if queued == 1 {
                    Ok(())
                } else {
                    Err(format!("{providers:?}"))
                }
            })
            .await;
            let full = within(
                "full",
                Duration::from_millis(500),
                stack.client().post(CHAT, &body),
            )
            .await;
            full.assert_error(503, "capacity_exhausted");
            let waited = second.answer().await.unwrap();
            waited.assert_error(503, "capacity_exhausted");
            let took = queued_at.elapsed();
            assert!(
                took >= Duration::from_millis(650) && took < Duration::from_secs(2),
                "{took:?}"
            );
            for refused in [&full, &waited] {
                let after: u64 = refused
                    .header("retry-after")
                    .and_then(|v| v.parse().ok())
                    .unwrap();
                assert!(after >= 1);
                assert_eq!(
                    refused.header("x-iop-attempts"),
                    Some("0"),
                    "a wait is no attempt"
                );
            }
            // First in, first out.
            let mut next = stack.client().open(CHAT, &body).await;
            open.send_replace(true);
            assert_eq!(first.answer().await.unwrap().status(), 200);
            assert_eq!(next.answer().await.unwrap().status(), 200);
            assert_eq!(stub.received().len(), 2);
            stack.settled(Duration::from_secs(2)).await;
        }
    });
}

#[test]
fn a_configured_model_without_a_node_is_503_and_an_unknown_one_404() {
    run(60, async {
        let setup = Setup::of(Provider::openai("up", "http://127.0.0.1:9/v1", &["m"]))
            .model("pub", "up", "m")
            .edge("queue", "max_wait = \"300ms\"");
        let stack = Stack::start_empty(Shape::Linked, setup).await;
        let answer = stack.chat("pub", "hi").await;
        answer.assert_error(503, "no_provider_available");
        assert!(answer.header("retry-after").is_some());
        stack
            .chat("never", "hi")
            .await
            .assert_error(404, "model_not_found");
        assert_eq!(stack.edge.models().await, Vec::<String>::new());
        assert_eq!(
            stack.client().get("/readyz").await.status(),
            200,
            "ready without providers"
        );
    });
}

#[test]
fn request_ids_and_attempts_are_on_every_answer() {
    run(60, async {
        let stub = Stub::start(hello).await;
        for shape in Shape::ALL {
            let stack = Stack::start(shape, Setup::of(Provider::openai("up", &stub.url(), &["m"]))).await;
            let ask = async |id: &str, model: &str| {
                let body = fixtures::chat(model, "hi", true).to_string();
                let headers = [("x-request-id", id)];
                stack
                    .client()
                    .request("POST", CHAT, &headers, body.as_bytes())
                    .await
            };
            for (model, status, attempts) in [("m", 200, "1"), ("absent", 404, "0")] {
                let answer = ask("client-id.1", model).await;
                assert_eq!(answer.status(), status);
                assert_eq!(
                    answer.head.all("x-request-id"),
                    ["client-id.1"],
                    "{shape:?} {model}"
                );
                assert_eq!(answer.head.all("x-iop-request-id"), ["client-id.1"]);
                assert_eq!(answer.head.all("x-iop-attempts"), [attempts]);
                let odd = "x".repeat(400);
                for malformed in ["two words", &odd] {
                    let answer = ask(malformed, model).await;
                    let made = answer.header("x-iop-request-id").unwrap().to_owned();
                    assert!(made != malformed && !made.is_empty());
                    assert_eq!(answer.head.all("x-request-id"), [made.as_str()]);
                }
            }
            let (a, b) = (stack.chat("m", "hi").await, stack.chat("m", "hi").await);
            assert_ne!(a.header("x-iop-request-id"), b.header("x-iop-request-id"));
        }
    });
}

#[test]
fn usage_is_seen_exactly_when_asked_and_always_counted() {
    run(60, async {
        let stub = Stub::start(|mut ex| async move {
            let body = ex.json();
            if body["stream"] != true {
                return hello(ex).await;
            }
            ex.sse().await?;
            ex.data(&fixtures::text_chunk("a")).await?;
            ex.data(&fixtures::stop_chunk()).await?;
            if body["stream_options"]["include_usage"] == true {
                ex.data(&fixtures::usage_chunk()).await?;
            }
            ex.data("[DONE]").await?;
            ex.end().await
        })
        .await;
        for shape in Shape::ALL {
            let stack = Stack::start(shape, Setup::of(Provider::openai("up", &stub.url(), &["m"]))).await;
            let plain = format!(
                "data: {}\n\ndata: {}\n\ndata: [DONE]\n\n",
                fixtures::text_chunk("a"),
                fixtures::stop_chunk()
            );
            let mut counted = 0.0;
            for (options, asked) in [
                ("", false),
                (r#","stream_options":{}"#, false),
                (r#","stream_options":{"include_usage":false,"x":1}"#, false),
                (r#","stream_options":null"#, false),
                (r#","stream_options":{"include_usage":true}"#, true),
            ] {
                let body = format!(r#"{{"model":"m","messages":[],"n":1.0{options},"stream":true}}"#);
                let answer = stack.client().request("POST", CHAT, &[], body.as_bytes()).await;
                assert_eq!(answer.status(), 200, "{}", answer.text());
                let received = stub.last();
                let sent = received.json();
                assert_eq!(
                    sent["stream_options"]["include_usage"], true,
                    "{shape:?} {options}"
                );
                let text = String::from_utf8_lossy(&received.body).into_owned();
                assert!(text.contains("\"n\":1.0"), "{text}");
                if asked {
                    assert_eq!(text, body, "nothing to add");
                    assert_eq!(
                        sse_data(&answer.text())
                            .iter()
                            .filter(|d| d.contains("prompt_tokens"))
                            .count(),
                        1
                    );
                } else {
                    assert_eq!(answer.text(), plain, "{shape:?} {options}");
                }
                counted += 9.0;
            }
            assert_eq!(stack.chat("m", "hi").await.status(), 200);
            counted += 9.0;
            stack.settled(Duration::from_secs(2)).await;
            let page = stack.edge.scrape().await;
            assert_eq!(
                page.sum("iop_edge_tokens_total", &[("type", "input")]),
                counted,
                "{shape:?}"
            );
            assert_eq!(
                page.sum("iop_edge_tokens_total", &[("type", "output")]),
                counted / 3.0,
                "{shape:?}"
            );
        }
    });
}

#[test]
fn stored_responses_go_to_the_provider_that_made_them() {
    run(60, async {
        for shape in Shape::ALL {
            let make = async |name: &'static str| {
                let next = Arc::new(std::sync::atomic::AtomicUsize::new(0));
                Stub::start(move |mut ex| {
                    let next = Arc::clone(&next);
                    async move {
                        if ex.method != "POST" || ex.path != "/v1/responses" {
                            return ex.json_reply(200, &json!({"by": name, "path": ex.path.clone(), "method": ex.method.clone()})).await;
                        }
                        let n = next.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        let id = format!("resp_{name}_{n}");
                        if ex.json()["stream"] == true {
                            ex.sse().await?;
                            ex.chunk(&fixtures::response_stream(&id, &["x"])).await?;
                            return ex.end().await;
                        }
                        let output = json!([fixtures::message_item("x", "completed")]);
                        ex.json_reply(200, &fixtures::response_object(&id, "m", "completed", &output)).await
                    }
                })
                .await
            };
            let (a, b) = (make("a").await, make("b").await);
            let setup = Setup::of(Provider::openai("a", &a.url(), &["m"]))
                .provider(Provider::openai("b", &b.url(), &["m"]))
                .candidates("pub", &[("a", "m"), ("b", "m")]);
            let stack = Stack::start(shape, setup).await;
            let client = stack.client();
            let mut makers = BTreeSet::new();
            for n in 0..8 {
                let stream = n % 2 == 0;
                let answer = client
                    .post("/v1/responses", &fixtures::responses("pub", "hi", stream))
                    .await;
                assert_eq!(answer.status(), 200, "{}", answer.text());
                let id = if stream {
                    let first: Value = serde_json::from_str(&sse_data(&answer.text())[0]).unwrap();
                    first["response"]["id"].as_str().unwrap().to_owned()
                } else {
                    answer.json()["id"].as_str().unwrap().to_owned()
                };
                let maker = id.split('_').nth(1).unwrap().to_owned();
                for (method, path) in [
                    ("GET", format!("/v1/responses/{id}")),
                    ("GET", format!("/v1/responses/{id}?include[]=x&stream=false")),
                    ("GET", format!("/v1/responses/{id}/input_items?limit=2")),
                    ("POST", format!("/v1/responses/{id}/cancel")),
                    ("DELETE", format!("/v1/responses/{id}")),
                ] {
                    let answer = client.request(method, &path, &[], b"").await;
                    assert_eq!(
                        answer.status(),
                        200,
                        "{shape:?} {method} {path}: {}",
                        answer.text()
                    );
                    let seen = answer.json();
                    assert_eq!(
                        (&seen["by"], &seen["path"], &seen["method"]),
                        (&json!(maker), &json!(path), &json!(method))
                    );
                }
                let mut next = fixtures::responses("pub", "go on", false);
                next["previous_response_id"] = json!(id);
                let answer = client.post("/v1/responses", &next).await;
                let next_id = answer.json()["id"].as_str().unwrap_or_default().to_owned();
                assert!(
                    next_id.starts_with(&format!("resp_{maker}_")),
                    "{shape:?} {id} then {next_id}"
                );
                makers.insert(maker);
            }
            // Load was the same on both all the time; either order of choice is fine, but a tie must not stick.
            assert!(!makers.is_empty());
            // An id that nobody knows: some provider decides.
            assert_eq!(client.get("/v1/responses/resp_unknown").await.status(), 200);
            stack.settled(Duration::from_secs(2)).await;
        }
    });
}

#[test]
fn metrics_have_the_named_families_and_no_strangers_names() {
    run(60, async {
        let stub = Stub::start(hello).await;
        let setup = Setup::of(Provider::openai("up", &stub.url(), &["m"]))
            .node("node", "metrics_listen = \"127.0.0.1:0\"");
        let stack = Stack::start(Shape::Linked, setup).await;
        assert_eq!(stack.chat("m", "hi").await.status(), 200);
        stack.chat("absent-0", "hi").await;
        let before = stack.edge.scrape().await;
        for family in [
            "iop_edge_requests_total",
            "iop_edge_request_duration_seconds_count",
            "iop_edge_time_to_first_token_seconds_count",
            "iop_edge_inter_token_latency_seconds_count",
            "iop_edge_in_flight_requests",
            "iop_edge_queue_depth",
            "iop_edge_queue_wait_seconds_count",
            "iop_edge_attempts_total",
            "iop_edge_client_cancelled_total",
            "iop_edge_tokens_total",
            "iop_edge_node_sessions",
            "iop_edge_provider_in_flight",
        ] {
            assert!(before.has(family), "{family} is missing");
        }
        assert_eq!(
            before.sum(
                "iop_edge_requests_total",
                &[("endpoint", "chat"), ("outcome", "success")]
            ),
            1.0
        );
        assert_eq!(
            before.sum("iop_edge_attempts_total", &[("result", "success")]),
            1.0
        );
        assert_eq!(before.sum("iop_edge_node_sessions", &[]), 1.0);
        for n in 0..300 {
            stack
                .chat(&format!("stranger-{n}"), "hi")
                .await
                .assert_error(404, "model_not_found");
        }
        let after = stack.edge.scrape().await;
        let names = |page: &iop_tests::metrics::Page| {
            page.0
                .iter()
                .map(|s| format!("{}{:?}", s.name, s.labels))
                .collect::<BTreeSet<_>>()
        };
        let new: Vec<_> = names(&after).difference(&names(&before)).cloned().collect();
        assert!(new.is_empty(), "new series: {new:?}");
        assert!(names(&after).iter().all(|s| !s.contains("stranger")));
        let node = stack.nodes[0].scrape().await.unwrap();
        assert!(node.0.iter().any(|s| s.name.starts_with("iop_node_")), "{node:?}");
    });
}

#[test]
fn a_metrics_listener_takes_metrics_off_the_main_port() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        let script = r#"{ "m" = { reply = "hello" } }"#;
        let key = key("k", "sk-k", &["inference", "metrics"], "");
        let setup = Setup::of(Provider::scripted("demo", &["m"], script))
            .edge("server", "metrics_listen = \"127.0.0.1:0\"")
            .keys(&[key], "sk-k");
        let edge = Edge::start(dir.path(), &setup.edge_toml(false), &[], setup.key.clone()).await;
        assert!(edge.metrics.is_some());
        assert!(
            edge.scrape().await.has("iop_edge_in_flight_requests"),
            "no key is needed there"
        );
        assert_eq!(edge.client().get("/metrics").await.status(), 404);
    });
}

#[test]
fn admin_lists_have_their_shapes() {
    run(60, async {
        let (stub, open) = gated().await;
        for shape in Shape::ALL {
            let stack = Stack::start(
                shape,
                Setup::of(Provider::openai("up", &stub.url(), &["m"]).capacity(3)),
            )
            .await;
            let before = stub.received().len();
            let held = stack.client().open(CHAT, &fixtures::chat("m", "hi", false)).await;
            stub.arrived(before + 1).await;
            for what in ["nodes", "providers"] {
                let list = stack.client().get(&format!("/api/v1/{what}")).await.json();
                assert_eq!(
                    (&list["object"], &list["has_more"]),
                    (&json!("list"), &json!(false)),
                    "{list}"
                );
            }
            let linked = shape == Shape::Linked;
            let nodes = stack.edge.admin("nodes").await;
            let node = nodes.iter().find(|n| n["embedded"] == json!(!linked)).unwrap();
            assert_eq!(node["id"], if linked { "n1" } else { "embedded" });
            assert_eq!(node["state"], "live");
            assert!(node["connection_generation"].is_u64(), "{node}");
            assert!(
                node["version"].is_string() && node["connected_at"].is_string(),
                "{node}"
            );
            let providers = stack.edge.admin("providers").await;
            assert_eq!(providers.len(), 1, "{providers:?}");
            let provider = &providers[0];
            let keys: BTreeSet<&str> = provider.as_object().unwrap().keys().map(String::as_str).collect();
            for key in [
                "id",
                "node_id",
                "connection_generation",
                "adapter",
                "targets",
                "status",
                "health",
                "capacity",
                "effective_capacity",
                "in_flight",
                "queued",
                "overlay",
                "ejected_until",
            ] {
                assert!(keys.contains(key), "{key} is missing: {provider}");
            }
            assert_eq!(provider["id"], if linked { "n1/up" } else { "up" });
            assert_eq!(provider["node_id"], node["id"]);
            assert_eq!(provider["connection_generation"], node["connection_generation"]);
            assert_eq!(provider["adapter"], "openai");
            assert_eq!(provider["targets"], json!(["m"]));
            assert_eq!(
                (&provider["capacity"], &provider["in_flight"], &provider["queued"]),
                (&json!(3), &json!(1), &json!(0))
            );
            assert_eq!(
                (&provider["overlay"], &provider["ejected_until"]),
                (&Value::Null, &Value::Null)
            );
            assert_eq!(provider["effective_capacity"], 3);
            drop(held);
            stack.settled(Duration::from_secs(1)).await;
        }
        open.send_replace(true);
    });
}

#[test]
fn without_arguments_the_demo_runs() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        let mut process = iop_tests::process::Process::spawn(
            "iop-edge",
            &iop_tests::process::binary("iop-edge"),
            &[],
            &[],
            dir.path(),
        );
        let ready = process.ready().await;
        assert!(ready["http"].starts_with("127.0.0.1:"), "{ready:?}");
        let client = iop_tests::client::Client::new(&ready["http"]);
        let models = ids(&client.get("/v1/models").await.json());
        assert!(!models.is_empty());
        for stream in [false, true] {
            let answer = client.post(CHAT, &fixtures::chat(&models[0], "hi", stream)).await;
            assert_eq!(
                (answer.status(), answer.complete),
                (200, true),
                "{}",
                answer.text()
            );
            if stream {
                assert!(answer.text().ends_with("data: [DONE]\n\n"));
                assert!(sse_data(&answer.text()).len() > 2);
            } else {
                assert!(
                    answer.json()["choices"][0]["message"]["content"]
                        .as_str()
                        .is_some_and(|c| !c.is_empty())
                );
            }
            let answer = client
                .post("/v1/responses", &fixtures::responses(&models[0], "hi", stream))
                .await;
            assert_eq!(
                (answer.status(), answer.complete),
                (200, true),
                "{}",
                answer.text()
            );
        }
        process.says("loopback").await;
        process.signal("TERM");
        assert_eq!(process.exit(Duration::from_secs(5)).await.code(), Some(0));
    });
}

#[test]
fn the_scripted_provider_misbehaves_as_configured() {
    run(60, async {
        let script = r#"{ "good" = { reply = "hello there", chunks = 4 }, "refuses" = { status = 503, retry_after = "7s" }, "cuts" = { reply = "hello there", chunks = 6, cut = { after_chunks = 3 } }, "once" = { reply = "hello", status = 500, fail_first = 1 }, "tools" = { tool_calls = [{ name = "f", arguments = "{}" }] } }"#;
        for shape in Shape::ALL {
            let targets = ["good", "refuses", "cuts", "once", "tools"];
            let stack = Stack::start(shape, Setup::of(Provider::scripted("demo", &targets, script))).await;
            let answer = stack.chat("good", "hi").await;
            assert_eq!(answer.json()["choices"][0]["message"]["content"], "hello there");
            let stream = stack
                .client()
                .post(CHAT, &fixtures::chat("good", "hi", true))
                .await;
            let words: String = sse_data(&stream.text())
                .iter()
                .filter_map(|d| serde_json::from_str::<Value>(d).ok())
                .filter_map(|d| d["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
                .collect();
            assert_eq!(words, "hello there");
            let answer = stack.chat("refuses", "hi").await;
            assert_eq!(
                (answer.status(), answer.header("retry-after")),
                (503, Some("7")),
                "{}",
                answer.text()
            );
            let cut = stack
                .client()
                .post(CHAT, &fixtures::chat("cuts", "hi", true))
                .await;
            assert!(
                cut.text().contains("provider_disconnected") && !cut.text().contains("[DONE]"),
                "{}",
                cut.text()
            );
            assert_eq!(stack.chat("once", "hi").await.status(), 500);
            assert_eq!(stack.chat("once", "hi").await.status(), 200);
            let answer = stack.chat("tools", "hi").await;
            assert_eq!(
                answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"],
                "f",
                "{}",
                answer.text()
            );
        }
    });
}
