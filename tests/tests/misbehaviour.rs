//! Whatever a provider does wrong ends in the right status or in one typed error: never a hang, never a fake
//! success (G22, G56, G58, G59).

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_tests::client::{Answer, sse_data};
use iop_tests::config::{Provider, Setup};
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{eventually, fixtures, run, within};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
/// No case may take longer; none has a reason to wait at all.
const AT_ONCE: Duration = Duration::from_secs(3);
const HTML: &str = "<html><body>Internal Server Error: worker 7</body></html>";
const SECRET: &str = "the provider's own words about key sk-abcdef";

async fn misbehave(mut ex: Exchange) -> io::Result<()> {
    let body = ex.json();
    let case = body["input"]
        .as_str()
        .or(body["messages"][0]["content"].as_str())
        .unwrap_or_default()
        .to_owned();
    let role = fixtures::chat_chunk(&json!({"role": "assistant", "content": ""}), None).to_string();
    match case.as_str() {
        "html 500" => {
            ex.reply(500, &[("content-type", "text/html")], HTML.as_bytes())
                .await
        }
        "html 200" => {
            ex.reply(200, &[("content-type", "text/html")], HTML.as_bytes())
                .await
        }
        "401" => {
            ex.json_reply(
                401,
                &json!({"error": {"message": SECRET, "code": "invalid_api_key"}}),
            )
            .await
        }
        "302" => ex.reply(302, &[("location", "/v1/elsewhere")], b"").await,
        "hang up" => {
            ex.cut(false);
            Ok(())
        }
        "reset" => {
            ex.cut(true);
            Ok(())
        }
        "no http" => {
            ex.raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n").await?;
            ex.cut(false);
            Ok(())
        }
        "too short" => {
            ex.raw(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{\"cut\":",
            )
            .await?;
            ex.cut(false);
            Ok(())
        }
        "too long" => {
            ex.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n{\"whole\": 1}HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsmugly").await?;
            ex.gone().await;
            Ok(())
        }
        "bad chunk" => {
            ex.head(200, &[("content-type", "application/json")]).await?;
            ex.chunk(b"{\"cut\":").await?;
            ex.raw(b"zz\r\n").await?;
            ex.cut(false);
            Ok(())
        }
        "large then cut" => {
            ex.head(200, &[("content-type", "application/json")]).await?;
            for _ in 0..16 {
                ex.chunk(&[b' '; 64 * 1024]).await?;
            }
            ex.cut(false);
            Ok(())
        }
        "close after" => {
            ex.json_reply(200, &fixtures::chat_answer("m", "ok")).await?;
            ex.cut(false);
            Ok(())
        }
        // Streams from here on.
        "error first" => {
            ex.sse().await?;
            ex.data(
                &json!({"error": {"object": "error", "message": "in band", "type": "BadRequestError",
                                      "param": null, "code": 400}})
                .to_string(),
            )
            .await?;
            ex.data("[DONE]").await?;
            ex.end().await
        }
        "error first, no number" => {
            ex.sse().await?;
            ex.data(&json!({"error": {"message": "in band", "type": "server_error"}}).to_string())
                .await?;
            ex.end().await
        }
        "empty" => {
            ex.sse().await?;
            ex.end().await
        }
        "only done" => {
            ex.sse().await?;
            ex.data("[DONE]").await?;
            ex.end().await
        }
        "role then end" => {
            ex.sse().await?;
            ex.data(&role).await?;
            ex.end().await
        }
        "role then cut" => {
            ex.sse().await?;
            ex.data(&role).await?;
            ex.cut(false);
            Ok(())
        }
        "content then end" => {
            ex.sse().await?;
            ex.data(&fixtures::text_chunk("begun")).await?;
            ex.end().await
        }
        "content then cut" => {
            ex.sse().await?;
            ex.data(&fixtures::text_chunk("begun")).await?;
            ex.cut(false);
            Ok(())
        }
        "cut inside an event" => {
            ex.sse().await?;
            ex.data(&fixtures::text_chunk("begun")).await?;
            ex.chunk(b"data: {\"choices\":[{\"delta\":{\"content\":\"half")
                .await?;
            ex.cut(false);
            Ok(())
        }
        "finish without done" => {
            ex.sse().await?;
            ex.data(&fixtures::text_chunk("begun")).await?;
            ex.data(&fixtures::stop_chunk()).await?;
            ex.end().await
        }
        "malformed first" => {
            ex.sse().await?;
            ex.data("{this is no json").await?;
            ex.end().await
        }
        "malformed later" => {
            ex.sse().await?;
            ex.data(&fixtures::text_chunk("begun")).await?;
            ex.data("{this is no json").await?;
            ex.data(&fixtures::stop_chunk()).await?;
            ex.data("[DONE]").await?;
            ex.end().await
        }
        "error later" => {
            ex.sse().await?;
            ex.data(&fixtures::text_chunk("begun")).await?;
            ex.data(&json!({"error": {"message": "in band", "type": "server_error"}}).to_string())
                .await?;
            ex.end().await
        }
        "done and stay" => {
            ex.sse().await?;
            ex.chunk(&fixtures::chat_stream(&["begun"])).await?;
            ex.gone().await;
            Ok(())
        }
        // Responses streams.
        "created then cut" | "created then end" | "delta then cut" | "delta then end"
        | "completed and stay" => {
            ex.sse().await?;
            let count = match case.split(' ').next() {
                Some("created") => 2,
                Some("delta") => 5,
                _ => usize::MAX,
            };
            for event in fixtures::response_events("resp_1", "m", &["begun"])
                .iter()
                .take(count)
            {
                ex.chunk(&fixtures::named_event(event)).await?;
            }
            match case.rsplit(' ').next() {
                Some("cut") => ex.cut(false),
                Some("end") => return ex.end().await,
                _ => ex.gone().await,
            }
            Ok(())
        }
        _ => ex.json_reply(200, &fixtures::chat_answer("m", "ok")).await,
    }
}

struct Bench {
    stack: Stack,
    stub: Arc<Stub>,
}

impl Bench {
    async fn start(shape: Shape) -> Self {
        let stub = Arc::new(Stub::start(misbehave).await);
        // Nobody is ejected: the one candidate of a model never is.
        let stack = Stack::start(shape, Setup::of(Provider::openai("up", &stub.url(), &["m"]))).await;
        Self { stack, stub }
    }

    async fn ask(&self, path: &str, case: &str, stream: bool) -> Answer {
        let body = if path == CHAT {
            fixtures::chat("m", case, stream)
        } else {
            fixtures::responses("m", case, stream)
        };
        let attempts = self.stub.received().len();
        let client = self.stack.client();
        let answer = within(case, AT_ONCE, client.post(path, &body)).await;
        assert_eq!(self.stub.received().len(), attempts + 1, "{case}: one attempt");
        assert_eq!(answer.header("x-iop-attempts"), Some("1"), "{case}");
        answer
    }
}

async fn before_commit(shape: Shape) {
    let bench = Bench::start(shape).await;
    for stream in [false, true] {
        for path in [CHAT, RESPONSES] {
            let answer = bench.ask(path, "html 500", stream).await;
            assert_eq!(
                (answer.status(), answer.text().as_str()),
                (500, HTML),
                "{path} stream={stream}"
            );
            assert_eq!(answer.header("content-type"), Some("text/html"));
            assert_eq!(answer.header("x-should-retry"), Some("false"));
            for (case, code) in [
                ("html 200", "provider_error"),
                ("401", "provider_error"),
                ("302", "provider_error"),
                ("hang up", "provider_disconnected"),
                ("reset", "provider_disconnected"),
                ("no http", "provider_disconnected"),
            ] {
                let answer = bench.ask(path, case, stream).await;
                answer.assert_error(502, code);
                assert_eq!(answer.header("x-should-retry"), Some("false"), "{case}");
                assert_eq!(answer.header("location"), None);
                assert!(!answer.text().contains("sk-abcdef"), "{}", answer.text());
            }
        }
    }
    assert!(
        bench.stub.received().iter().all(|r| r.path != "/v1/elsewhere"),
        "a redirect was followed"
    );
    for case in ["too short", "bad chunk"] {
        bench
            .ask(CHAT, case, false)
            .await
            .assert_error(502, "provider_disconnected");
        bench
            .ask(RESPONSES, case, false)
            .await
            .assert_error(502, "provider_disconnected");
    }
    let answer = bench.ask(CHAT, "too long", false).await;
    assert_eq!((answer.status(), answer.text().as_str()), (200, "{\"whole\": 1}"));
    let answer = bench.ask(CHAT, "after it", false).await;
    assert!(
        answer.text().contains("chatcmpl-1"),
        "another request got the rest: {}",
        answer.text()
    );

    let answer = bench.ask(CHAT, "error first", true).await;
    assert_eq!(answer.status(), 400, "{}", answer.text());
    assert_eq!(answer.json()["error"]["message"], "in band");
    let answer = bench.ask(CHAT, "error first, no number", true).await;
    assert!(answer.status() >= 500, "{}", answer.text());
    assert_eq!(answer.json()["error"]["message"], "in band");
    for (path, case) in [
        (CHAT, "empty"),
        (CHAT, "only done"),
        (CHAT, "role then end"),
        (CHAT, "role then cut"),
        (CHAT, "malformed first"),
        (RESPONSES, "empty"),
        (RESPONSES, "created then cut"),
        (RESPONSES, "created then end"),
        (RESPONSES, "malformed first"),
    ] {
        let answer = bench.ask(path, case, true).await;
        assert_eq!(answer.status(), 502, "{path} {case}: {}", answer.text());
        let code = answer.error_code();
        assert!(
            code == "provider_error" || code == "provider_disconnected",
            "{path} {case}: {code}"
        );
    }
    bench.stack.settled(Duration::from_secs(2)).await;
    assert_eq!(bench.stack.chat("m", "still well").await.status(), 200);
}

#[test]
fn embedded_misbehaviour_before_commit_is_one_status() {
    run(90, before_commit(Shape::Embedded));
}

#[test]
fn linked_misbehaviour_before_commit_is_one_status() {
    run(90, before_commit(Shape::Linked));
}

/// The error object of the one error event that ends a Chat stream.
fn chat_error(answer: &Answer) -> Value {
    assert_eq!(
        (answer.status(), answer.complete),
        (200, true),
        "{}",
        answer.text()
    );
    let events = sse_data(&answer.text());
    assert!(events[0].contains("begun"), "{events:?}");
    assert!(!answer.text().contains("[DONE]"), "{events:?}");
    let errors: Vec<Value> = events
        .iter()
        .filter_map(|e| serde_json::from_str::<Value>(e).ok())
        .filter(|e| e.get("error").is_some())
        .collect();
    assert_eq!(errors.len(), 1, "{events:?}");
    assert!(events.last().unwrap().contains("\"error\""), "{events:?}");
    errors[0]["error"].clone()
}

async fn after_commit(shape: Shape) {
    let bench = Bench::start(shape).await;
    for case in ["content then end", "content then cut"] {
        let error = chat_error(&bench.ask(CHAT, case, true).await);
        assert_eq!(error["code"], "provider_disconnected", "{case}");
        for key in ["message", "type", "param", "code"] {
            assert!(error.get(key).is_some(), "{case}: {error}");
        }
    }
    let answer = bench.ask(CHAT, "error later", true).await;
    assert_eq!(
        chat_error(&answer)["message"],
        "in band",
        "the provider's own error, once"
    );
    let answer = bench.ask(CHAT, "cut inside an event", true).await;
    assert!(!answer.text().contains("[DONE]"));
    if answer.complete {
        assert!(
            !answer.text().contains("half"),
            "half an event was closed: {}",
            answer.text()
        );
        chat_error(&answer);
    }
    let answer = bench.ask(CHAT, "finish without done", true).await;
    assert!(answer.complete && answer.status() == 200);
    let text = answer.text();
    assert!(text.ends_with("\n\ndata: [DONE]\n\n"), "{text:?}");
    assert_eq!(text.matches("[DONE]").count(), 1);
    assert!(!text.contains("\"error\""), "{text}");
    let answer = bench.ask(CHAT, "malformed later", true).await;
    assert!(
        answer.text().contains("data: {this is no json\n\n"),
        "passed through unchanged: {}",
        answer.text()
    );
    assert!(answer.text().ends_with("data: [DONE]\n\n") && answer.complete);

    for case in ["delta then cut", "delta then end"] {
        let answer = bench.ask(RESPONSES, case, true).await;
        assert_eq!((answer.status(), answer.complete), (200, true), "{case}");
        let events: Vec<Value> = sse_data(&answer.text())
            .iter()
            .map(|e| serde_json::from_str(e).unwrap())
            .collect();
        let numbers: Vec<u64> = events
            .iter()
            .filter_map(|e| e["sequence_number"].as_u64())
            .collect();
        assert_eq!(
            numbers,
            (0..events.len() as u64).collect::<Vec<_>>(),
            "{case}: dense numbers"
        );
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.failed", "{case}");
        assert_eq!(last["response"]["id"], "resp_1");
        assert_eq!(last["response"]["status"], "failed");
        assert_eq!(last["response"]["error"]["code"], "provider_disconnected");
        assert!(last["response"]["error"]["message"].is_string());
        assert!(
            answer.text().contains("event: response.failed\n"),
            "{}",
            answer.text()
        );
        assert!(!answer.text().contains("response.completed"));
    }
    bench.stack.settled(Duration::from_secs(2)).await;
    // Never a fake success in the figures either: two of these streams were good.
    let page = bench.stack.edge.scrape().await;
    let count = |endpoint, outcome| {
        page.sum(
            "iop_edge_requests_total",
            &[("endpoint", endpoint), ("outcome", outcome)],
        )
    };
    assert_eq!(
        (count("chat", "success"), count("responses", "success")),
        (2.0, 0.0)
    );
    assert_eq!(
        page.sum("iop_edge_requests_total", &[("outcome", "client_cancelled")]),
        0.0
    );
}

#[test]
fn embedded_misbehaviour_after_commit_is_one_typed_error() {
    run(60, after_commit(Shape::Embedded));
}

#[test]
fn linked_misbehaviour_after_commit_is_one_typed_error() {
    run(60, after_commit(Shape::Linked));
}

async fn terminal_ends_it(shape: Shape) {
    let bench = Bench::start(shape).await;
    let client = bench.stack.client();
    for (path, case, last) in [
        (CHAT, "done and stay", "data: [DONE]\n\n"),
        (RESPONSES, "completed and stay", "response.completed"),
    ] {
        let body = if path == CHAT {
            fixtures::chat("m", case, true)
        } else {
            fixtures::responses("m", case, true)
        };
        let mut conn = client.open(path, &body).await;
        assert_eq!(conn.head().await.unwrap().status, 200);
        conn.until(last).await;
        let seen = Instant::now();
        within("the end of the message", Duration::from_millis(500), conn.body())
            .await
            .unwrap();
        assert!(conn.complete(), "{case}");
        let index = bench.stub.received().len() - 1;
        bench.stub.hung_up(index, Duration::from_secs(1)).await;
        assert!(seen.elapsed() <= Duration::from_secs(1), "{case}");
    }
    bench.stack.settled(Duration::from_secs(1)).await;
}

#[test]
fn the_terminal_event_ends_the_stream_though_the_provider_stays() {
    run(60, async {
        terminal_ends_it(Shape::Embedded).await;
        terminal_ends_it(Shape::Linked).await;
    });
}

#[test]
fn a_client_that_leaves_at_response_completed_is_a_success() {
    run(60, async {
        for shape in Shape::ALL {
            let bench = Bench::start(shape).await;
            let turns = 20;
            for _ in 0..turns {
                let body = fixtures::responses("m", "completed and stay", true);
                let mut conn = bench.stack.client().open(RESPONSES, &body).await;
                conn.head().await.unwrap();
                conn.until("event: response.completed").await;
                drop(conn);
            }
            bench.stack.settled(Duration::from_secs(2)).await;
            let page = bench.stack.edge.scrape().await;
            let count = |outcome| {
                page.sum(
                    "iop_edge_requests_total",
                    &[("endpoint", "responses"), ("outcome", outcome)],
                )
            };
            assert_eq!(
                (count("success"), count("client_cancelled")),
                (f64::from(turns), 0.0),
                "{shape:?}"
            );
            assert_eq!(page.sum("iop_edge_client_cancelled_total", &[]), 0.0);
            // Its usage is kept: 9 in and 3 out per turn.
            assert_eq!(
                page.sum("iop_edge_tokens_total", &[("type", "input")]),
                f64::from(9 * turns),
                "{shape:?}"
            );
            assert_eq!(
                page.sum("iop_edge_tokens_total", &[("type", "output")]),
                f64::from(3 * turns),
                "{shape:?}"
            );
        }
    });
}

#[test]
fn a_provider_that_refuses_connections_is_502_at_once_and_back_when_it_is_back() {
    run(60, async {
        for shape in Shape::ALL {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let addr = listener.local_addr().unwrap();
            drop(listener);
            let provider = Provider::openai("up", &format!("http://{addr}/v1"), &["m"]);
            let stack = Stack::start(shape, Setup::of(provider)).await;
            for path in [CHAT, RESPONSES] {
                for stream in [false, true] {
                    let body = if path == CHAT {
                        fixtures::chat("m", "x", stream)
                    } else {
                        fixtures::responses("m", "x", stream)
                    };
                    let answer =
                        within("502", AT_ONCE, async { stack.client().post(path, &body).await }).await;
                    answer.assert_error(502, "provider_unreachable");
                    assert_eq!(answer.header("x-should-retry"), Some("false"));
                    assert_eq!(answer.header("x-iop-attempts"), Some("1"));
                }
            }
            let listener = tokio::net::TcpListener::bind(addr).await.unwrap();
            let served = tokio::spawn(async move {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut seen = Vec::new();
                while iop_tests::client::find(&seen, b"\"x\"").is_none() {
                    let mut buf = [0; 4096];
                    let n = tokio::io::AsyncReadExt::read(&mut socket, &mut buf)
                        .await
                        .unwrap();
                    seen.extend_from_slice(&buf[..n]);
                }
                let reply =
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
                tokio::io::AsyncWriteExt::write_all(&mut socket, reply)
                    .await
                    .unwrap();
                socket
            });
            eventually("the provider is back", Duration::from_secs(5), || async {
                let answer = stack.chat("m", "x").await;
                if answer.status() == 200 {
                    Ok(())
                } else {
                    Err(answer.text())
                }
            })
            .await;
            drop(served.await.unwrap());
            stack.settled(Duration::from_secs(2)).await;
        }
    });
}

#[test]
fn a_large_answer_cut_after_commit_is_never_a_complete_message() {
    run(60, async {
        for shape in Shape::ALL {
            let bench = Bench::start(shape).await;
            for _ in 0..5 {
                let answer = bench.ask(CHAT, "large then cut", false).await;
                assert!(
                    !answer.complete,
                    "{shape:?}: {} bytes as a complete message",
                    answer.body.len()
                );
            }
            bench.stack.settled(Duration::from_secs(2)).await;
        }
    });
}

#[test]
fn a_provider_that_closes_after_each_answer_costs_no_request() {
    run(60, async {
        for shape in Shape::ALL {
            let bench = Bench::start(shape).await;
            for _ in 0..50 {
                let answer = bench.ask(CHAT, "close after", false).await;
                assert_eq!(answer.status(), 200, "{shape:?}: {}", answer.text());
            }
        }
    });
}
