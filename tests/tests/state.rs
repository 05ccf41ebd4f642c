//! Responses that a provider stores: they lead to their provider, never to a model that the key may not use, and
//! asking for one again costs nothing (G2, G70, §13).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use iop_tests::client::{Answer, Client};
use iop_tests::config::{Provider, Setup, key};
use iop_tests::provider::Stub;
use iop_tests::stack::{Shape, Stack};
use iop_tests::{fixtures, run};
use serde_json::{Value, json};

const RESPONSES: &str = "/v1/responses";

/// Makes responses whose ids name the provider, and says who it is when asked for one.
async fn maker(name: &'static str) -> Stub {
    let next = Arc::new(AtomicUsize::new(0));
    Stub::start(move |mut ex| {
        let next = Arc::clone(&next);
        async move {
            if ex.method != "POST" {
                return ex
                    .json_reply(200, &json!({"by": name, "object": "response"}))
                    .await;
            }
            let id = format!("resp_{name}_{}", next.fetch_add(1, Ordering::SeqCst));
            let output = json!([fixtures::message_item("x", "completed")]);
            ex.json_reply(200, &fixtures::response_object(&id, "m", "completed", &output))
                .await
        }
    })
    .await
}

/// `mb` lives at provider `home` alone, `mc` at `other` alone; `ma` at both, under a name of its own at each.
struct Bench {
    _stack: Stack,
    home: Stub,
    other: Stub,
    all: Client,
    only_ma: Client,
}

impl Bench {
    /// `ma` is the candidates of that model.
    async fn start(shape: Shape, ma: &[(&str, &str)]) -> Self {
        let (home, other) = (maker("home").await, maker("other").await);
        let keys = [
            key("all", "sk-all", &["inference", "operator", "metrics"], ""),
            key("ma", "sk-ma", &["inference"], ", models = [\"ma\"]"),
        ];
        let setup = Setup::of(Provider::openai("home", &home.url(), &["ta-home", "tb"]))
            .provider(Provider::openai("other", &other.url(), &["ta-other", "tc"]))
            .candidates("ma", ma)
            .candidates("mb", &[("home", "tb")])
            .candidates("mc", &[("other", "tc")])
            .keys(&keys, "sk-all");
        let stack = Stack::start(shape, setup).await;
        let (all, only_ma) = (stack.client(), stack.client().with_key("sk-ma"));
        Self {
            _stack: stack,
            home,
            other,
            all,
            only_ma,
        }
    }

    /// A response made under `mb`, by a key that may use it.
    async fn made_under_mb(&self) -> String {
        let answer = self
            .all
            .post(RESPONSES, &fixtures::responses("mb", "hi", false))
            .await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        assert_eq!(self.home.last().json()["model"], "tb");
        answer.json()["id"].as_str().unwrap().to_owned()
    }
}

async fn go_on(client: &Client, model: &str, id: &str) -> Answer {
    let mut body = fixtures::responses(model, "go on", false);
    body["previous_response_id"] = json!(id);
    client.post(RESPONSES, &body).await
}

#[test]
fn previous_response_id_leads_to_no_model_that_the_key_may_not_use() {
    run(60, async {
        for shape in Shape::ALL {
            let bench = Bench::start(shape, &[("home", "ta-home")]).await;
            let id = bench.made_under_mb().await;
            let seen = bench.home.received().len();
            let answer = go_on(&bench.only_ma, "ma", &id).await;
            assert_eq!(answer.status(), 200, "{shape:?}: {}", answer.text());
            let sent = bench.home.received();
            assert_eq!(sent.len(), seen + 1, "{shape:?}");
            let sent = sent.last().unwrap().json();
            assert_eq!(
                (&sent["model"], &sent["previous_response_id"]),
                (&json!("ta-home"), &json!(id)),
                "{shape:?}"
            );
            let refused = go_on(&bench.only_ma, "mb", &id).await;
            assert!(
                matches!(refused.status(), 403 | 404),
                "{shape:?}: {}",
                refused.text()
            );
            refused.error_code();
            assert_eq!(bench.home.received().len(), seen + 1, "{shape:?}");
        }
    });
}

#[test]
fn another_model_goes_on_at_the_home_provider_under_its_own_target() {
    run(60, async {
        for shape in Shape::ALL {
            let bench = Bench::start(shape, &[("other", "ta-other"), ("home", "ta-home")]).await;
            let id = bench.made_under_mb().await;
            for _ in 0..4 {
                let answer = go_on(&bench.all, "ma", &id).await;
                assert_eq!(answer.status(), 200, "{shape:?}: {}", answer.text());
                assert_eq!(bench.home.last().json()["model"], "ta-home", "{shape:?}");
            }
            assert_eq!(go_on(&bench.all, "mb", &id).await.status(), 200);
            assert_eq!(bench.home.last().json()["model"], "tb", "{shape:?}");
            assert!(bench.other.received().is_empty(), "{shape:?}");
        }
    });
}

#[test]
fn a_model_that_the_home_provider_does_not_serve_is_a_400_that_names_the_field() {
    run(60, async {
        for shape in Shape::ALL {
            let bench = Bench::start(shape, &[("home", "ta-home")]).await;
            let id = bench.made_under_mb().await;
            let seen = bench.home.received().len();
            let answer = go_on(&bench.all, "mc", &id).await;
            assert_eq!(answer.status(), 400, "{shape:?}: {}", answer.text());
            answer.error_code();
            let error = &answer.json()["error"];
            assert_eq!(
                (&error["param"], &error["type"]),
                (&json!("model"), &json!("invalid_request_error")),
                "{shape:?}"
            );
            assert_eq!(bench.home.received().len(), seen, "{shape:?}");
            assert!(bench.other.received().is_empty(), "{shape:?}");
        }
    });
}

#[test]
fn a_stored_response_of_a_forbidden_model_is_as_good_as_unknown() {
    run(60, async {
        for shape in Shape::ALL {
            let bench = Bench::start(shape, &[("other", "ta-other")]).await;
            let id = bench.made_under_mb().await;
            let seen = bench.home.received().len();
            for (n, (method, path)) in [
                ("GET", format!("{RESPONSES}/{id}")),
                ("GET", format!("{RESPONSES}/{id}/input_items")),
                ("DELETE", format!("{RESPONSES}/{id}")),
            ]
            .into_iter()
            .enumerate()
            {
                let answer = bench.only_ma.request(method, &path, &[], b"").await;
                assert_eq!(
                    answer.status(),
                    200,
                    "{shape:?} {method} {path}: {}",
                    answer.text()
                );
                assert_eq!(answer.json()["by"], "other", "{shape:?} {method} {path}");
                assert_eq!(bench.other.received().len(), n + 1, "{shape:?}");
            }
            assert_eq!(bench.home.received().len(), seen, "{shape:?}: reached its home");
            // The key that may use its model still finds it there.
            let answer = bench.all.get(&format!("{RESPONSES}/{id}")).await;
            assert_eq!(answer.json()["by"], "home", "{shape:?}: {}", answer.text());
        }
    });
}

/// A provider that stores one response, as long as `padding` makes it.
async fn storing(padding: usize) -> Stub {
    Stub::start(move |mut ex| async move {
        if ex.method == "DELETE" {
            ex.raw(b"HTTP/1.1 204 No Content\r\ncontent-type: application/json\r\n\r\n")
                .await?;
            return Ok(());
        }
        if ex.method == "GET" && ex.path.contains("stream=true") {
            ex.sse().await?;
            ex.chunk(&fixtures::response_stream("resp_1", &["x", "y"]))
                .await?;
            return ex.end().await;
        }
        let text = if ex.method == "GET" {
            "x".repeat(padding)
        } else {
            "x".to_owned()
        };
        let output = json!([fixtures::message_item(&text, "completed")]);
        ex.json_reply(
            200,
            &fixtures::response_object("resp_1", "m", "completed", &output),
        )
        .await
    })
    .await
}

async fn stored(shape: Shape, padding: usize) -> (Stack, Stub) {
    let stub = storing(padding).await;
    let stack = Stack::start(shape, Setup::of(Provider::openai("up", &stub.url(), &["m"]))).await;
    let answer = stack
        .client()
        .post(RESPONSES, &fixtures::responses("m", "hi", false))
        .await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    (stack, stub)
}

#[test]
fn a_delete_without_content_passes_and_is_a_success() {
    run(60, async {
        for shape in Shape::ALL {
            let (stack, _stub) = stored(shape, 0).await;
            let answer = stack
                .client()
                .request("DELETE", "/v1/responses/resp_1", &[], b"")
                .await;
            assert_eq!(
                (answer.status(), answer.body.len(), answer.complete),
                (204, 0, true),
                "{shape:?}: {}",
                answer.text()
            );
            stack.settled(Duration::from_secs(2)).await;
            let page = stack.edge.scrape().await;
            assert_eq!(
                page.sum(
                    "iop_edge_requests_total",
                    &[("endpoint", "responses"), ("outcome", "success")]
                ),
                2.0,
                "{shape:?}"
            );
            assert_eq!(
                page.sum("iop_edge_requests_total", &[("endpoint", "responses")]),
                2.0,
                "{shape:?}: nothing else"
            );
        }
    });
}

#[test]
fn a_stored_response_that_is_streamed_again_passes_as_it_is() {
    run(60, async {
        for shape in Shape::ALL {
            let (stack, stub) = stored(shape, 0).await;
            let path = "/v1/responses/resp_1?stream=true";
            let answer = stack.client().get(path).await;
            assert_eq!(
                (answer.status(), answer.complete),
                (200, true),
                "{shape:?}: {}",
                answer.text()
            );
            assert_eq!(answer.header("content-type"), Some("text/event-stream"));
            assert_eq!(
                answer.body,
                fixtures::response_stream("resp_1", &["x", "y"]),
                "{shape:?}"
            );
            assert_eq!(stub.last().path, path);
        }
    });
}

async fn asked_again(shape: Shape, padding: usize, path: &str) {
    let (stack, _stub) = stored(shape, padding).await;
    let tokens = async || {
        stack.settled(Duration::from_secs(2)).await;
        let page = stack.edge.scrape().await;
        ["input", "output", "cached", "reasoning"].map(|t| page.sum("iop_edge_tokens_total", &[("type", t)]))
    };
    let once = tokens().await;
    assert_eq!(once, [9.0, 3.0, 2.0, 1.0], "{shape:?}");
    for _ in 0..3 {
        let answer = stack.client().get(path).await;
        assert_eq!(
            (answer.status(), answer.complete),
            (200, true),
            "{}",
            answer.text()
        );
        if !path.contains("stream") {
            assert_eq!(answer.json()["usage"]["total_tokens"], Value::from(12));
        }
    }
    assert_eq!(tokens().await, once, "{shape:?} {path} of {padding} bytes");
}

#[test]
fn asking_for_a_response_again_adds_no_tokens() {
    run(60, async {
        for shape in Shape::ALL {
            asked_again(shape, 0, "/v1/responses/resp_1").await;
        }
    });
}
#[test]
fn streaming_a_response_again_adds_no_tokens() {
    run(60, async {
        for shape in Shape::ALL {
            asked_again(shape, 0, "/v1/responses/resp_1?stream=true").await;
        }
    });
}

#[test]
fn asking_for_a_long_response_again_adds_no_tokens() {
    run(60, async {
        for shape in Shape::ALL {
            asked_again(shape, 600 * 1024, "/v1/responses/resp_1").await;
        }
    });
}
