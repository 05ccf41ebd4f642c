//! Keep-alive comments: only between complete events, never before the response is opened, and what happens to
//! a request that was opened by one (G21, G53, §13).

use std::sync::Arc;
use std::time::Duration;

use iop_tests::client::sse_data;
use iop_tests::config::{Provider, Setup};
use iop_tests::provider::Stub;
use iop_tests::stack::{Shape, Stack};
use iop_tests::{fixtures, run};
use serde_json::{Value, json};
use tokio::sync::watch;

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const COMMENT: &str = ": keep-alive\n\n";

/// A provider that moves on by one step each time the test says so.
async fn stepped() -> (Arc<Stub>, watch::Sender<u32>) {
    let (step, steps) = watch::channel(0);
    let stub = Stub::start(move |mut ex| {
        let mut steps = steps.clone();
        async move {
            let body = ex.json();
            let text = body["input"].as_str().or(body["messages"][0]["content"].as_str()).unwrap_or_default().to_owned();
            if text != "good" {
                ex.until(async { steps.wait_for(|n| *n >= 1).await.is_ok() }).await?;
                let error = json!({"error": {"message": "own words", "type": "t", "param": null, "code": "own_code"}});
                return match text.as_str() {
                    "401" => ex.json_reply(401, &error).await,
                    "cut" => {
                        ex.cut(false);
                        Ok(())
                    }
                    _ => ex.json_reply(400, &error).await,
                };
            }
            ex.sse().await?;
            ex.data(&fixtures::text_chunk("begun")).await?;
            ex.until(async { steps.wait_for(|n| *n >= 1).await.is_ok() }).await?;
            let event = format!("data: {}\r\n\r\n", fixtures::text_chunk("in halves"));
            let (first, second) = event.as_bytes().split_at(event.len() - 3);
            ex.chunk(first).await?;
            ex.until(async { steps.wait_for(|n| *n >= 2).await.is_ok() }).await?;
            ex.chunk(second).await?;
            ex.data(&fixtures::stop_chunk()).await?;
            ex.data("[DONE]").await?;
            ex.end().await
        }
    })
    .await;
    (Arc::new(stub), step)
}

fn setup(stub: &Stub, open_after: &str) -> Setup {
    Setup::of(Provider::openai("up", &stub.url(), &["m"]))
        .edge("gate", "keepalive_interval = \"100ms\"")
        .edge("gate", &format!("keepalive_open_after = {open_after:?}"))
}

#[test]
fn comments_go_out_between_complete_events_only() {
    run(60, async {
        for shape in Shape::ALL {
            let (stub, step) = stepped().await;
            let stack = Stack::start(shape, setup(&stub, "0s")).await;
            let mut conn = stack
                .client()
                .open(CHAT, &fixtures::chat("m", "good", true))
                .await;
            assert_eq!(conn.head().await.unwrap().status, 200);
            let mut text = conn.until(COMMENT).await;
            text.push_str(&conn.until(COMMENT).await);
            step.send_replace(1);
            // Half an event is on its way; whatever of it was sent, no comment may stand in it.
            let silence = Duration::from_millis(500);
            while let Ok(piece) = tokio::time::timeout(silence, conn.piece()).await {
                text.push_str(&String::from_utf8_lossy(&piece.unwrap().unwrap()));
                if text.matches(COMMENT).count() > 12 {
                    break;
                }
            }
            step.send_replace(2);
            text.push_str(&String::from_utf8_lossy(&conn.body().await.unwrap()));
            assert!(conn.complete());
            let expected = format!(
                "data: {}\n\ndata: {}\r\n\r\ndata: {}\n\ndata: [DONE]\n\n",
                fixtures::text_chunk("begun"),
                fixtures::text_chunk("in halves"),
                fixtures::stop_chunk()
            );
            assert_eq!(text.replace(COMMENT, ""), expected, "{shape:?}: {text}");
            assert!(text.starts_with("data:"), "a comment is no commit: {text}");
        }
    });
}

#[test]
fn nothing_is_sent_before_the_first_content() {
    run(60, async {
        let (stub, step) = stepped().await;
        let stack = Stack::start(Shape::Embedded, setup(&stub, "0s")).await;
        let mut conn = stack.client().open(CHAT, &fixtures::chat("m", "bad", true)).await;
        stub.arrived(1).await;
        let early = tokio::time::timeout(Duration::from_millis(600), conn.head()).await;
        assert!(
            early.is_err(),
            "opened although keep-alive never opens: {early:?}"
        );
        step.send_replace(1);
        let answer = conn.answer().await.unwrap();
        assert_eq!(
            (answer.status(), &answer.json()["error"]["code"]),
            (400, &json!("own_code"))
        );
    });
}

#[test]
fn a_failure_after_a_keep_alive_opening_is_in_band() {
    run(60, async {
        for shape in Shape::ALL {
            for (text, code, words) in [
                ("bad", "own_code", true),
                ("401", "provider_error", false),
                ("cut", "provider_disconnected", false),
            ] {
                let (stub, step) = stepped().await;
                let stack = Stack::start(shape, setup(&stub, "200ms")).await;
                let mut chat = stack.client().open(CHAT, &fixtures::chat("m", text, true)).await;
                let mut responses = stack
                    .client()
                    .open(RESPONSES, &fixtures::responses("m", text, true))
                    .await;
                for conn in [&mut chat, &mut responses] {
                    let head = conn.head().await.unwrap();
                    assert_eq!(head.status, 200);
                    assert!(
                        head.header("content-type")
                            .is_some_and(|t| t.starts_with("text/event-stream"))
                    );
                    assert_eq!(head.header("x-iop-attempts"), Some("1"));
                    assert!(head.header("x-request-id").is_some());
                    conn.until(COMMENT).await;
                }
                step.send_replace(1);
                let rest = String::from_utf8_lossy(&chat.body().await.unwrap()).into_owned();
                assert!(chat.complete() && !rest.contains("[DONE]"), "{rest}");
                let events = sse_data(&rest);
                assert_eq!(events.len(), 1, "{rest}");
                let error: Value = serde_json::from_str(&events[0]).unwrap();
                assert_eq!(error["error"]["code"], code, "{shape:?} {text}");
                assert_eq!(rest.contains("own words"), words, "{rest}");

                let rest = String::from_utf8_lossy(&responses.body().await.unwrap()).into_owned();
                assert!(responses.complete(), "{rest}");
                let events: Vec<Value> = sse_data(&rest)
                    .iter()
                    .map(|e| serde_json::from_str(e).unwrap())
                    .collect();
                assert_eq!(events.len(), 2, "{rest}");
                assert_eq!(
                    (&events[0]["type"], &events[0]["sequence_number"]),
                    (&json!("response.created"), &json!(0))
                );
                assert_eq!(
                    (&events[1]["type"], &events[1]["sequence_number"]),
                    (&json!("response.failed"), &json!(1))
                );
                assert_eq!(events[0]["response"]["id"], events[1]["response"]["id"]);
                assert_eq!(events[1]["response"]["error"]["code"], code, "{shape:?} {text}");
                stack.settled(Duration::from_secs(2)).await;
            }
        }
    });
}
