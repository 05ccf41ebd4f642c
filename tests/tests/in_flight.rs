//! After a thousand requests that ended in every way there is, nothing is counted as going on (G37).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use iop_tests::client::Client;
use iop_tests::config::{Provider, Setup};
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{fixtures, run};
use parking_lot::Mutex;
use tokio::sync::oneshot;

const REQUESTS: usize = 1_000;
const CAPACITY: usize = 8;

/// Who waits for a request to arrive at the provider, by the request's text.
type Arrivals = Arc<Mutex<HashMap<String, oneshot::Sender<()>>>>;

async fn answer(mut ex: Exchange, arrivals: Arrivals) -> std::io::Result<()> {
    let body = ex.json();
    let text = body["messages"][0]["content"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    if let Some(waiting) = arrivals.lock().remove(&text) {
        let _ = waiting.send(());
    }
    let stream = body["stream"] == true;
    match text.split(':').next().unwrap_or_default() {
        "ok" if stream => {
            ex.sse().await?;
            ex.chunk(&fixtures::chat_stream(&["a", "b", "c"])).await?;
            ex.end().await
        }
        "cut" if stream => {
            ex.sse().await?;
            ex.data(&fixtures::text_chunk("begun")).await?;
            ex.cut(true);
            Ok(())
        }
        "cut" => {
            ex.cut(false);
            Ok(())
        }
        "error" => {
            ex.json_reply(500, &serde_json::json!({"error": {"message": "no"}}))
                .await
        }
        "hold" | "fill" => {
            ex.gone().await;
            Ok(())
        }
        "mid" => {
            ex.sse().await?;
            ex.data(&fixtures::text_chunk("begun")).await?;
            ex.gone().await;
            Ok(())
        }
        _ => ex.json_reply(200, &fixtures::chat_answer("m", "ok")).await,
    }
}

/// Runs one request of kind `n` to the end that its kind has; the value says what the client saw.
async fn one(client: Client, arrivals: Arrivals, n: usize) -> &'static str {
    let path = "/v1/chat/completions";
    let send = async |kind: &str, stream: bool| {
        client
            .open(path, &fixtures::chat("m", &format!("{kind}:{n}"), stream))
            .await
    };
    match n % 8 {
        0 | 1 => {
            let answer = send("ok", n % 8 == 1).await.answer().await.unwrap();
            assert_eq!(
                (answer.status(), answer.complete),
                (200, true),
                "{}",
                answer.text()
            );
            "ok"
        }
        2 | 3 => {
            let answer = send("cut", n % 8 == 3).await.answer().await.unwrap();
            assert!(
                answer.status() == 502 || answer.text().contains("provider_disconnected"),
                "{}",
                answer.text()
            );
            "cut"
        }
        4 => {
            assert_eq!(
                send("error", n % 16 == 4).await.answer().await.unwrap().status(),
                500
            );
            "error"
        }
        5 => {
            let (waiting, arrived) = oneshot::channel();
            arrivals.lock().insert(format!("hold:{n}"), waiting);
            let conn = send("hold", n % 16 == 5).await;
            arrived.await.unwrap();
            drop(conn);
            "left in prefill"
        }
        6 => {
            let mut conn = send("mid", true).await;
            assert_eq!(conn.head().await.unwrap().status, 200);
            conn.until("begun").await;
            "left mid-stream"
        }
        _ => {
            // Most of these are still in the queue when their client leaves.
            drop(send("ok", n % 16 == 7).await);
            "left at once"
        }
    }
}

async fn thousand(shape: Shape) {
    let arrivals = Arrivals::default();
    let stub = Stub::start({
        let arrivals = Arc::clone(&arrivals);
        move |ex| answer(ex, Arc::clone(&arrivals))
    })
    .await;
    let provider = Provider::openai("up", &stub.url(), &["m"]).capacity(CAPACITY);
    let setup = Setup::of(provider).node("node", "metrics_listen = \"127.0.0.1:0\"");
    let stack = Stack::start(shape, setup).await;
    let client = stack.client();
    let ends: Vec<&str> = futures_util::stream::iter(0..REQUESTS)
        .map(|n| one(client.clone(), Arc::clone(&arrivals), n))
        .buffer_unordered(48)
        .collect()
        .await;
    assert_eq!(ends.len(), REQUESTS);
    stack.settled(Duration::from_secs(5)).await;
    stub.idle(Duration::from_secs(2)).await;
    let page = stack.edge.scrape().await;
    let all = page.sum("iop_edge_requests_total", &[("endpoint", "chat")]);
    // A client that leaves at once may be gone before its request was read: those alone may be missing.
    let left_at_once = ends.iter().filter(|e| **e == "left at once").count();
    assert!(
        all <= REQUESTS as f64 && all >= (REQUESTS - left_at_once) as f64,
        "{all} requests counted once each"
    );

    // Capacity is whole: exactly that many fit at once.
    let before = stub.received().len();
    let mut fill = Vec::new();
    for _ in 0..=CAPACITY {
        fill.push(
            client
                .open("/v1/chat/completions", &fixtures::chat("m", "fill", false))
                .await,
        );
    }
    stub.arrived(before + CAPACITY).await;
    iop_tests::eventually("the last one queues", Duration::from_secs(5), || async {
        let depth = stack.edge.scrape().await.sum("iop_edge_queue_depth", &[]);
        if depth == 1.0 {
            Ok(())
        } else {
            Err(format!("{depth}"))
        }
    })
    .await;
    assert_eq!(stub.received().len(), before + CAPACITY);
    drop(fill);
    stack.settled(Duration::from_secs(2)).await;
}

#[test]
fn embedded_nothing_is_in_flight_after_1000_mixed_requests() {
    run(120, thousand(Shape::Embedded));
}

#[test]
fn linked_nothing_is_in_flight_after_1000_mixed_requests() {
    run(120, thousand(Shape::Linked));
}
