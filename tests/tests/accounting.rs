//! What is counted is what happened, and nothing that failed looks like a success: answers longer than the hold,
//! answers that end too early, refusals in disguise, uploads that never end (G11, G33, G56, G58, G60, G83).

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_tests::client::{Answer, Client, Conn, request_head, sse_data};
use iop_tests::config::{Provider, Setup};
use iop_tests::metrics::Page;
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Edge, Node, Shape, Stack};
use iop_tests::{eventually, fixtures, run, within};
use serde_json::{Value, json};
use tokio::sync::watch;

const CHAT: &str = "/v1/chat/completions";
const EMBEDDINGS: &str = "/v1/embeddings";
const SECRET: &str = "sk-PROVIDERKEY";
const COMMENT: &str = ": keep-alive\n\n";

async fn up(shape: Shape, stub: &Stub) -> Stack {
    Stack::start(shape, Setup::of(Provider::openai("up", &stub.url(), &["m"]))).await
}

fn requests(page: &Page, endpoint: &str, outcome: &str) -> f64 {
    page.sum(
        "iop_edge_requests_total",
        &[("endpoint", endpoint), ("outcome", outcome)],
    )
}

fn attempts(page: &Page, result: &str) -> f64 {
    page.sum("iop_edge_attempts_total", &[("result", result)])
}

fn tokens(page: &Page) -> f64 {
    page.sum("iop_edge_tokens_total", &[("type", "input")])
}

/// 600 KB of an embeddings answer, its usage last.
fn vectors() -> String {
    let vector = format!("[{}0.5]", "0.125,".repeat(100_000));
    format!(
        r#"{{"object":"list","data":[{{"object":"embedding","index":0,"embedding":{vector}}}],"model":"m","usage":{{"prompt_tokens":7,"total_tokens":7}}}}"#
    )
}

async fn embed(mut ex: Exchange) -> io::Result<()> {
    let body = vectors();
    if ex.json()["input"] != "cut" {
        let headers = [("content-type", "application/json")];
        return ex.reply(200, &headers, body.as_bytes()).await;
    }
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    ex.raw(head.as_bytes()).await?;
    ex.raw(&body.as_bytes()[..body.len() / 2]).await?;
    ex.cut(false);
    Ok(())
}

async fn embeddings(client: &Client, input: &str) -> Answer {
    client
        .post(EMBEDDINGS, &json!({"model": "m", "input": input}))
        .await
}

#[test]
fn a_long_answer_is_a_success_with_its_tokens_and_leaves_its_connection_behind() {
    run(60, async {
        for shape in Shape::ALL {
            let stub = Stub::start(embed).await;
            let stack = up(shape, &stub).await;
            for n in 1..=3_u8 {
                let answer = embeddings(&stack.client(), "all of it").await;
                assert_eq!((answer.status(), answer.complete), (200, true), "{shape:?}");
                assert_eq!(answer.body, vectors(), "{shape:?}");
                stack.settled(Duration::from_secs(2)).await;
                let page = stack.edge.scrape().await;
                let n = f64::from(n);
                assert_eq!(requests(&page, "embeddings", "success"), n, "{shape:?}");
                assert_eq!(
                    page.sum("iop_edge_requests_total", &[("endpoint", "embeddings")]),
                    n
                );
                assert_eq!(attempts(&page, "success"), n, "{shape:?}");
                assert_eq!(page.sum("iop_edge_attempts_total", &[]), n, "{shape:?}");
                assert_eq!(tokens(&page), 7.0 * n, "{shape:?}");
            }
            assert_eq!(stub.sockets(), 1, "{shape:?}: one connection for three answers");
        }
    });
}

#[test]
fn a_long_answer_cut_midway_is_incomplete_and_its_attempt_cut() {
    run(60, async {
        for shape in Shape::ALL {
            let stub = Stub::start(embed).await;
            let stack = up(shape, &stub).await;
            let answer = embeddings(&stack.client(), "cut").await;
            assert_eq!((answer.status(), answer.complete), (200, false), "{shape:?}");
            stack.settled(Duration::from_secs(2)).await;
            let page = stack.edge.scrape().await;
            assert_eq!(requests(&page, "embeddings", "incomplete"), 1.0, "{shape:?}");
            assert_eq!(
                page.sum("iop_edge_requests_total", &[("endpoint", "embeddings")]),
                1.0
            );
            assert_eq!(attempts(&page, "cut"), 1.0, "{shape:?}");
            assert_eq!(page.sum("iop_edge_attempts_total", &[]), 1.0, "{shape:?}");
            assert_eq!(tokens(&page), 0.0, "{shape:?}");
        }
    });
}

#[test]
fn a_stream_of_two_choices_is_not_done_when_one_is() {
    run(60, async {
        let chunk = |index: u8, delta: Value, finish: Option<&str>| {
            let mut chunk = fixtures::chat_chunk(&delta, finish);
            chunk["choices"][0]["index"] = json!(index);
            chunk.to_string()
        };
        let first_done = [
            chunk(0, json!({"content": "begun"}), None),
            chunk(1, json!({"content": "too"}), None),
            chunk(0, json!({}), Some("stop")),
        ];
        let second_done = chunk(1, json!({}), Some("length"));
        let stub = Stub::start(move |mut ex| {
            let (first_done, second_done) = (first_done.clone(), second_done.clone());
            async move {
                ex.sse().await?;
                for data in &first_done {
                    ex.data(data).await?;
                }
                match ex.json()["messages"][0]["content"].as_str() {
                    Some("cut") => {
                        ex.cut(false);
                        return Ok(());
                    }
                    Some("both") => ex.data(&second_done).await?,
                    _ => {}
                }
                ex.end().await
            }
        })
        .await;
        for shape in Shape::ALL {
            let stack = up(shape, &stub).await;
            let ask = async |case: &str| {
                let mut body = fixtures::chat("m", case, true);
                body["n"] = json!(2);
                let answer = stack.client().post(CHAT, &body).await;
                assert_eq!((answer.status(), answer.complete), (200, true), "{case}");
                answer.text()
            };
            for case in ["cut", "end"] {
                let text = ask(case).await;
                assert!(!text.contains("[DONE]"), "{shape:?} {case}: {text}");
                let last: Value = serde_json::from_str(sse_data(&text).last().unwrap()).unwrap();
                assert_eq!(last["error"]["code"], "provider_disconnected", "{shape:?} {case}");
            }
            let text = ask("both").await;
            assert!(text.ends_with("data: [DONE]\n\n"), "{shape:?}: {text}");
            assert!(!text.contains("\"error\""), "{shape:?}: {text}");
            stack.settled(Duration::from_secs(2)).await;
            let page = stack.edge.scrape().await;
            assert_eq!(requests(&page, "chat", "success"), 1.0, "{shape:?}");
            assert_eq!(attempts(&page, "cut"), 2.0, "{shape:?}");
        }
    });
}

#[test]
fn json_without_a_length_that_ends_in_the_middle_is_a_disconnected_provider() {
    run(60, async {
        let stub = Stub::start(|mut ex| async move {
            let whole = fixtures::chat_answer("m", "hello").to_string();
            let half = ex.json()["messages"][0]["content"] == "half";
            let part = if half { whole.len() / 2 } else { whole.len() };
            ex.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n")
                .await?;
            ex.raw(&whole.as_bytes()[..part]).await?;
            ex.cut(false);
            Ok(())
        })
        .await;
        for shape in Shape::ALL {
            let stack = up(shape, &stub).await;
            let answer = stack.chat("m", "half").await;
            answer.assert_error(502, "provider_disconnected");
            let answer = stack.chat("m", "whole").await;
            assert_eq!(
                (answer.status(), answer.json()),
                (200, fixtures::chat_answer("m", "hello")),
                "{shape:?}"
            );
            stack.settled(Duration::from_secs(2)).await;
            let page = stack.edge.scrape().await;
            assert_eq!(
                (attempts(&page, "cut"), attempts(&page, "success")),
                (1.0, 1.0),
                "{shape:?}"
            );
        }
    });
}

/// Refuses the gateway's credential inside a 200, once the gate is open.
async fn refusing(open: bool) -> (Stub, watch::Sender<bool>) {
    let (sender, gate) = watch::channel(open);
    let stub = Stub::start(move |mut ex| {
        let mut gate = gate.clone();
        async move {
            ex.until(async { gate.wait_for(|open| *open).await.is_ok() })
                .await?;
            let error = json!({"error": {"message": format!("Incorrect API key provided: {SECRET}"), "param": null,
                                         "type": "invalid_request_error", "code": 401}});
            if ex.json()["stream"] == true {
                ex.sse().await?;
                ex.data(&error.to_string()).await?;
                return ex.end().await;
            }
            ex.json_reply(200, &error).await
        }
    })
    .await;
    (stub, sender)
}

#[test]
fn a_refused_credential_inside_a_200_is_a_502_without_the_providers_text() {
    run(60, async {
        for shape in Shape::ALL {
            let (stub, _open) = refusing(true).await;
            let stack = up(shape, &stub).await;
            for stream in [false, true] {
                for (path, body) in [
                    (CHAT, fixtures::chat("m", "hi", stream)),
                    ("/v1/responses", fixtures::responses("m", "hi", stream)),
                ] {
                    let answer = stack.client().post(path, &body).await;
                    answer.assert_error(502, "provider_error");
                    assert!(
                        !answer.text().contains(SECRET),
                        "{shape:?} {path} stream={stream}: {}",
                        answer.text()
                    );
                }
            }
        }
    });
}

#[test]
fn a_refused_credential_after_a_keep_alive_opening_keeps_the_providers_text_back() {
    run(60, async {
        for shape in Shape::ALL {
            let (stub, open) = refusing(false).await;
            let setup = Setup::of(Provider::openai("up", &stub.url(), &["m"]))
                .edge("gate", "keepalive_open_after = \"1s\"")
                .edge("gate", "keepalive_interval = \"100ms\"");
            let stack = Stack::start(shape, setup).await;
            let client = stack.client();
            let mut chat = client.open(CHAT, &fixtures::chat("m", "hi", true)).await;
            let mut responses = client
                .open("/v1/responses", &fixtures::responses("m", "hi", true))
                .await;
            for conn in [&mut chat, &mut responses] {
                assert_eq!(conn.head().await.unwrap().status, 200);
                conn.until(COMMENT).await;
            }
            open.send_replace(true);
            for (conn, error_of) in [
                (&mut chat, "/error/code"),
                (&mut responses, "/response/error/code"),
            ] {
                let rest = String::from_utf8_lossy(&conn.body().await.unwrap()).into_owned();
                assert!(conn.complete() && !rest.contains("[DONE]"), "{shape:?}: {rest}");
                assert!(!rest.contains(SECRET), "{shape:?}: {rest}");
                let last: Value = serde_json::from_str(sse_data(&rest).last().unwrap()).unwrap();
                assert_eq!(
                    last.pointer(error_of),
                    Some(&json!("provider_error")),
                    "{shape:?}: {rest}"
                );
            }
        }
    });
}

#[test]
fn speech_that_is_streamed_passes_as_it_is() {
    run(60, async {
        let sound: Vec<u8> = (0..=255_u8).cycle().take(40_000).collect();
        let stub = Stub::start({
            let sound = sound.clone();
            move |mut ex| {
                let sound = sound.clone();
                async move {
                    ex.head(200, &[("content-type", "audio/mpeg")]).await?;
                    for piece in sound.chunks(4_000) {
                        ex.chunk(piece).await?;
                    }
                    ex.end().await
                }
            }
        })
        .await;
        for shape in Shape::ALL {
            let stack = up(shape, &stub).await;
            let body = json!({"model": "m", "input": "say it", "voice": "alloy", "stream": true});
            let answer = stack.client().post("/v1/audio/speech", &body).await;
            assert_eq!(
                (answer.status(), answer.complete),
                (200, true),
                "{shape:?}: {}",
                answer.text()
            );
            assert_eq!(answer.header("content-type"), Some("audio/mpeg"), "{shape:?}");
            assert!(answer.body == sound, "{shape:?}: {} bytes", answer.body.len());
            stack.settled(Duration::from_secs(2)).await;
            let page = stack.edge.scrape().await;
            assert_eq!(requests(&page, "audio", "success"), 1.0, "{shape:?}");
        }
    });
}

/// The head of an upload of which nothing, or only a part, will follow.
async fn announce(stack: &Stack, length: usize) -> Conn {
    let mut conn = Conn::open(&stack.edge.http).await.unwrap();
    let headers = [("content-type", "application/json")];
    conn.send(&request_head("POST", CHAT, &headers, Some(length)))
        .await
        .unwrap();
    conn
}

async fn body_memory(stack: &Stack, what: &str, fact: impl Fn(f64) -> bool) {
    eventually(what, Duration::from_secs(2), || async {
        let held = stack.edge.scrape().await.sum("iop_edge_body_memory_bytes", &[]);
        if fact(held) {
            Ok(())
        } else {
            Err(format!("{held} bytes"))
        }
    })
    .await;
}

async fn never_asked(mut ex: Exchange) -> io::Result<()> {
    ex.json_reply(200, &fixtures::chat_answer("m", "hello")).await
}

#[test]
fn a_client_that_breaks_off_its_upload_has_cancelled() {
    run(60, async {
        let stub = Stub::start(never_asked).await;
        let stack = up(Shape::Embedded, &stub).await;
        let mut conn = announce(&stack, 100_000).await;
        conn.send(br#"{"model": "m", "#).await.unwrap();
        body_memory(&stack, "the upload is held", |b| b >= 100_000.0).await;
        drop(conn);
        stack.settled(Duration::from_secs(1)).await;
        body_memory(&stack, "the upload is forgotten", |b| b == 0.0).await;
        let page = stack.edge.scrape().await;
        assert_eq!(requests(&page, "chat", "client_cancelled"), 1.0);
        assert_eq!(page.sum("iop_edge_requests_total", &[("endpoint", "chat")]), 1.0);
        assert_eq!(page.sum("iop_edge_client_cancelled_total", &[]), 1.0);
        assert!(stub.received().is_empty());
    });
}

#[test]
fn a_client_that_announces_a_body_and_sends_nothing_is_refused_and_holds_no_memory() {
    run(60, async {
        let stub = Stub::start(never_asked).await;
        let setup = Setup::of(Provider::openai("up", &stub.url(), &["m"]))
            .edge("gate", "client_write_timeout = \"1s\"");
        let stack = Stack::start(Shape::Embedded, setup).await;
        let mut conn = announce(&stack, 8 << 20).await;
        let announced = Instant::now();
        body_memory(&stack, "the announced body is held", |b| b >= f64::from(8 << 20)).await;
        let head = within("a refusal", Duration::from_secs(3), conn.head())
            .await
            .unwrap();
        assert!(
            announced.elapsed() >= Duration::from_millis(900),
            "{:?}",
            announced.elapsed()
        );
        assert_eq!(head.status, 400);
        body_memory(&stack, "no body is held", |b| b == 0.0).await;
        stack.settled(Duration::from_secs(1)).await;
        assert!(stub.received().is_empty());
    });
}

/// Two edges, one node with one place; the second edge waits at most 2 s.
async fn second_edge(stack: &mut Stack, dir: &std::path::Path) -> Edge {
    let toml = stack.setup.edge_toml(true) + "[queue]\nmax_wait = \"2s\"\n";
    let edge = Edge::start(dir, &toml, &stack.setup.env, stack.setup.key.clone()).await;
    let config = format!(
        "{}\n[[edges]]\nurl = {:?}\ntoken = {{ env = \"IOP_LINK_TOKEN\" }}\n",
        stack.setup.node_toml("n1", &stack.edge.link_url()),
        edge.link_url()
    );
    let node = Node::start(stack.dir.path(), "n1", &config, &stack.setup.env).await;
    stack.nodes.push(node);
    for edge in [&stack.edge, &edge] {
        edge.lists(&["m".to_owned()], Duration::from_secs(10)).await;
    }
    edge
}

#[test]
fn a_wait_is_bounded_although_the_node_keeps_refusing() {
    run(60, async {
        let stub = Arc::new(
            Stub::start(|mut ex| async move {
                if ex.json()["messages"][0]["content"] == "hold" {
                    ex.gone().await;
                    return Ok(());
                }
                ex.json_reply(200, &fixtures::chat_answer("m", "hello")).await
            })
            .await,
        );
        let setup = Setup::of(Provider::openai("up", &stub.url(), &["m"]).capacity(1));
        let mut stack = Stack::start_empty(Shape::Linked, setup).await;
        let dir = tempfile::tempdir().unwrap();
        let second = second_edge(&mut stack, dir.path()).await;
        let held = stack
            .client()
            .open(CHAT, &fixtures::chat("m", "hold", false))
            .await;
        stub.arrived(1).await;
        let asked = Instant::now();
        let answer = within(
            "an answer of the second edge",
            Duration::from_secs(4),
            second.client().post(CHAT, &fixtures::chat("m", "hi", false)),
        )
        .await;
        answer.assert_error(503, "capacity_exhausted");
        assert!(answer.header("retry-after").is_some());
        assert!(
            asked.elapsed() >= Duration::from_millis(1_900),
            "it waited {:?} only",
            asked.elapsed()
        );
        assert_eq!(stub.received().len(), 1, "the place was taken all the time");
        drop(held);
        stub.idle(Duration::from_secs(2)).await;
        let answer = second
            .client()
            .post(CHAT, &fixtures::chat("m", "hi", false))
            .await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
    });
}
