//! A client that leaves takes its request with it: the provider's socket is closed within a second, wherever the
//! request was, and nothing stays counted (G60).

use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_tests::client::Conn;
use iop_tests::config::{Provider, Setup};
use iop_tests::provider::Stub;
use iop_tests::stack::{Shape, Stack};
use iop_tests::{eventually, fixtures, run};
use serde_json::{Value, json};

/// The promise.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

const PATHS: [&str; 2] = ["/v1/chat/completions", "/v1/responses"];

fn request(path: &str, text: &str, stream: bool) -> Value {
    if path == PATHS[0] {
        fixtures::chat("m", text, stream)
    } else {
        fixtures::responses("m", text, stream)
    }
}

/// Prefill: no byte of an answer. Mid: content has begun, then silence.
async fn provider() -> Stub {
    Stub::start(|mut ex| async move {
        let body = ex.json();
        let text = body["input"]
            .as_str()
            .or(body["messages"][0]["content"].as_str())
            .unwrap_or_default();
        match (text, body["stream"] == true, ex.path.as_str()) {
            ("prefill", ..) => {}
            ("head", ..) => ex.sse().await?,
            ("mid", true, "/v1/responses") => {
                ex.sse().await?;
                for event in &fixtures::response_events("resp_1", "m", &["begun"])[..5] {
                    ex.chunk(&fixtures::named_event(event)).await?;
                }
            }
            ("mid", true, _) => {
                ex.sse().await?;
                ex.data(&fixtures::text_chunk("begun")).await?;
            }
            ("mid", false, _) => {
                ex.head(200, &[("content-type", "application/json")]).await?;
                ex.chunk(b"{\"begun\": [").await?;
            }
            _ => return ex.json_reply(200, &fixtures::chat_answer("m", "ok")).await,
        }
        ex.gone().await;
        Ok(())
    })
    .await
}

async fn everywhere(shape: Shape) {
    let stub = provider().await;
    let stack = Stack::start(
        shape,
        Setup::of(Provider::openai("up", &stub.url(), &["m"]).capacity(2)),
    )
    .await;
    let mut sent = 0;
    for path in PATHS {
        for (text, stream) in [
            ("prefill", true),
            ("prefill", false),
            ("head", true),
            ("mid", true),
            ("mid", false),
        ] {
            for half in [false, true] {
                let mut conn = stack.client().open(path, &request(path, text, stream)).await;
                sent += 1;
                stub.arrived(sent).await;
                if text == "mid" && stream {
                    assert_eq!(conn.head().await.unwrap().status, 200);
                    conn.until("begun").await;
                }
                let left = Instant::now();
                if half {
                    conn.half_close().await.unwrap();
                    stub.hung_up(sent - 1, CLOSED_WITHIN).await;
                }
                drop(conn);
                stub.hung_up(sent - 1, CLOSED_WITHIN).await;
                assert!(
                    left.elapsed() <= CLOSED_WITHIN,
                    "{path} {text} stream={stream} {:?}",
                    left.elapsed()
                );
            }
        }
    }
    stack.settled(CLOSED_WITHIN).await;
    let page = stack.edge.scrape().await;
    assert_eq!(
        page.sum("iop_edge_requests_total", &[("outcome", "client_cancelled")]),
        sent as f64
    );
    assert_eq!(
        page.sum("iop_edge_requests_total", &[("outcome", "provider_error")]),
        0.0
    );
    assert_eq!(stack.chat("m", "ok").await.status(), 200);
}

#[test]
fn embedded_client_gone_closes_the_providers_socket_within_1_s() {
    run(90, everywhere(Shape::Embedded));
}

#[test]
fn linked_client_gone_closes_the_providers_socket_within_1_s() {
    run(90, everywhere(Shape::Linked));
}

async fn queued(shape: Shape) {
    let stub = Arc::new(provider().await);
    let stack = Stack::start(
        shape,
        Setup::of(Provider::openai("up", &stub.url(), &["m"]).capacity(1)),
    )
    .await;
    for path in PATHS {
        for stream in [true, false] {
            let arrived = stub.received().len() + 1;
            let first = stack.client().open(path, &request(path, "prefill", stream)).await;
            stub.arrived(arrived).await;
            let second = stack.client().open(path, &request(path, "prefill", stream)).await;
            depth(&stack, 1, Duration::from_secs(5)).await;
            drop(second);
            depth(&stack, 0, CLOSED_WITHIN).await;
            drop(first);
            stub.hung_up(arrived - 1, CLOSED_WITHIN).await;
            stack.settled(CLOSED_WITHIN).await;
            assert_eq!(
                stub.received().len(),
                arrived,
                "the one that left in the queue never reached the provider"
            );
        }
    }
    assert_eq!(
        stack.chat("m", "ok").await.status(),
        200,
        "the slot is free again"
    );
}

async fn depth(stack: &Stack, n: u64, bound: Duration) {
    eventually(&format!("{n} in the queue"), bound, || async {
        let depth = stack.edge.scrape().await.sum("iop_edge_queue_depth", &[]);
        if depth == n as f64 {
            Ok(())
        } else {
            Err(format!("{depth}"))
        }
    })
    .await;
}

#[test]
fn embedded_client_gone_leaves_the_queue_within_1_s() {
    run(60, queued(Shape::Embedded));
}

#[test]
fn linked_client_gone_leaves_the_queue_within_1_s() {
    run(60, queued(Shape::Linked));
}

#[test]
fn a_request_whose_upload_never_ends_is_forgotten_with_its_client() {
    run(60, async {
        let stub = provider().await;
        let stack = Stack::start(
            Shape::Embedded,
            Setup::of(Provider::openai("up", &stub.url(), &["m"])),
        )
        .await;
        let mut conn = Conn::open(&stack.edge.http).await.unwrap();
        let head = iop_tests::client::request_head(
            "POST",
            "/v1/chat/completions",
            &[("content-type", "application/json")],
            Some(1000),
        );
        conn.send(&head).await.unwrap();
        conn.send(json!({"model": "m"}).to_string().as_bytes())
            .await
            .unwrap();
        eventually("the request is seen", Duration::from_secs(5), || async {
            let n = stack.edge.scrape().await.sum("iop_edge_in_flight_requests", &[]);
            if n > 0.0 { Ok(()) } else { Err(format!("{n}")) }
        })
        .await;
        drop(conn);
        stack.settled(CLOSED_WITHIN).await;
        assert!(stub.received().is_empty());
    });
}
