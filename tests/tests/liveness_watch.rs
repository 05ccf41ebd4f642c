//! What the watchdog sees and what it does not: progress, back-pressure, the end of an answer; and stalls in the places
//! where an answer has begun in some other way than by its first content (004; gateway.md G22, G50, G52, G53; docs/link.md).

use std::io;
use std::time::Duration;

use futures_util::future::join_all;
use iop_tests::client::{Conn, sse_data};
use iop_tests::config::{Provider, Setup};
use iop_tests::liveness::{
    ELIGIBILITY, EVIDENCE, RESULTS, Rows, STALLS, assert_clean, assert_lowered, edge_rows, node_rows,
    provider, rows,
};
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{fixtures, run};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";
const STALL: Duration = Duration::from_secs(1);
/// Shorter than `STALL`; the pace of a provider that is alive.
const BEAT: Duration = Duration::from_millis(600);
const BEATS: usize = 5;

/// A provider that does what the prompt says.
async fn engine(mut ex: Exchange) -> io::Result<()> {
    if ex.method == "GET" {
        let list = json!({"object": "list", "data": [{"id": "t"}]});
        return ex.json_reply(200, &list).await;
    }
    let body = ex.json();
    let prompt = body["messages"][0]["content"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    // The pauses are what a slow provider is.
    let beat = || tokio::time::sleep(BEAT);
    match prompt.as_str() {
        "comments" => {
            ex.sse().await?;
            for _ in 0..BEATS {
                beat().await;
                ex.chunk(b": working\n\n").await?;
            }
            beat().await;
            ex.chunk(&fixtures::chat_stream(&["well"])).await?;
            ex.end().await
        }
        "bytes" => {
            // One event, a few bytes at a time.
            ex.sse().await?;
            let all = fixtures::chat_stream(&["well"]);
            let (slow, rest) = all.split_at(BEATS);
            for byte in slow {
                beat().await;
                ex.chunk(&[*byte]).await?;
            }
            beat().await;
            ex.chunk(rest).await?;
            ex.end().await
        }
        "whole, slowly" => {
            let answer = fixtures::chat_answer("t", "well").to_string();
            let (slow, rest) = answer.as_bytes().split_at(BEATS);
            beat().await;
            ex.head(200, &[("content-type", "application/json")]).await?;
            for byte in slow {
                beat().await;
                ex.chunk(&[*byte]).await?;
            }
            beat().await;
            ex.chunk(rest).await?;
            ex.end().await
        }
        "done and stay" => {
            ex.sse().await?;
            ex.chunk(&fixtures::chat_stream(&["well"])).await?;
            ex.gone().await;
            Ok(())
        }
        "flood" => {
            ex.sse().await?;
            let batch = format!("data: {}\n\n", fixtures::text_chunk(&"x".repeat(200))).repeat(16);
            loop {
                ex.chunk(batch.as_bytes()).await?;
            }
        }
        "large" => {
            ex.head(200, &[("content-type", "application/json")]).await?;
            ex.chunk(&vec![b' '; 64 * 1024]).await?;
            ex.gone().await;
            Ok(())
        }
        _ => {
            ex.gone().await;
            Ok(())
        }
    }
}

fn setup(stub: &Stub) -> Setup {
    let provider = Provider::openai("up", &stub.url(), &["t"]).line("response_stall_timeout = \"1s\"");
    Setup::of(provider).node("node", "metrics_listen = \"127.0.0.1:0\"")
}

async fn no_cycle(stack: &Stack) {
    node_rows(stack, STALLS, &Rows::new()).await;
    edge_rows(stack, ELIGIBILITY, &Rows::new()).await;
    edge_rows(stack, RESULTS, &Rows::new()).await;
    edge_rows(stack, EVIDENCE, &Rows::new()).await;
}

#[test]
fn whatever_moves_is_no_stall() {
    run(60, async {
        for shape in Shape::ALL {
            let stub = Stub::start(engine).await;
            let stack = Stack::start(shape, setup(&stub)).await;
            let cases = [
                ("comments", true),
                ("bytes", true),
                ("whole, slowly", false),
                ("done and stay", true),
            ];
            join_all(cases.iter().map(|(prompt, stream)| {
                let client = stack.client();
                async move {
                    let answer = client.post(CHAT, &fixtures::chat("t", prompt, *stream)).await;
                    assert_eq!(
                        (answer.status(), answer.complete),
                        (200, true),
                        "{prompt}: {}",
                        answer.text()
                    );
                    assert!(answer.text().contains("well"), "{prompt}: {}", answer.text());
                    assert_eq!(answer.header("x-iop-attempts"), Some("1"), "{prompt}");
                }
            }))
            .await;
            no_cycle(&stack).await;
            stack.settled(Duration::from_secs(2)).await;
        }
    });
}

/// A client whose kernel takes little and that never reads.
async fn unread(addr: &str) -> Conn {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(8 * 1024).unwrap();
    let mut conn = Conn::over(socket.connect(addr.parse().unwrap()).await.unwrap());
    let body = fixtures::chat("t", "flood", true).to_string();
    let headers = [("content-type", "application/json")];
    conn.request("POST", CHAT, &headers, body.as_bytes())
        .await
        .unwrap();
    conn
}

#[test]
fn a_client_that_takes_nothing_for_longer_than_the_limit_is_no_stall_of_its_provider() {
    run(60, async {
        for shape in Shape::ALL {
            let stub = Stub::start(engine).await;
            let stack = Stack::start(shape, setup(&stub)).await;
            let mut slow = Vec::new();
            for _ in 0..4 {
                slow.push(unread(&stack.edge.http).await);
            }
            stub.arrived(4).await;
            for n in 0..4 {
                stub.hung_up(n, STALL * 6).await;
            }
            stack.settled(Duration::from_secs(2)).await;
            no_cycle(&stack).await;
            let page = stack.edge.scrape().await;
            assert_eq!(
                page.sum("iop_edge_requests_total", &[("outcome", "response_stalled")]),
                0.0
            );
            drop(slow);
        }
    });
}

#[test]
fn a_stall_behind_a_large_answer_is_past_commit_and_breaks_its_message() {
    run(60, async {
        for shape in Shape::ALL {
            let stub = Stub::start(engine).await;
            let setup = setup(&stub).edge("gate", "hold_bytes = \"4KiB\"");
            let stack = Stack::start(shape, setup).await;
            let answer = stack.chat("t", "large").await;
            assert_eq!(
                (answer.status(), answer.complete),
                (200, false),
                "never a complete message"
            );
            let row = "provider_tunnel/available";
            node_rows(
                &stack,
                STALLS,
                &rows(&[(&format!("{row}/request_stalled/confirmed"), 1)]),
            )
            .await;
            edge_rows(
                &stack,
                ELIGIBILITY,
                &rows(&[(&format!("{row}/stream_open/post_commit"), 1)]),
            )
            .await;
            edge_rows(&stack, RESULTS, &Rows::new()).await;
            stack.settled(Duration::from_secs(2)).await;
        }
    });
}

#[test]
fn a_stream_that_a_comment_opened_is_not_committed() {
    run(60, async {
        for shape in Shape::ALL {
            let stub = Stub::start(engine).await;
            let well = "{ \"t-well\" = { reply = \"well again\" } }";
            let setup = setup(&stub)
                .provider(Provider::scripted("well", &["t-well"], well))
                .ranked("m", &[("up", "t"), ("well", "t-well")])
                .edge("gate", "keepalive_open_after = \"300ms\"");
            let stack = Stack::start(shape, setup).await;
            let row = "provider_tunnel/available/transport_uncommitted";
            let client = stack.client();

            let answer = client.post(CHAT, &fixtures::chat("m", "silence", true)).await;
            let text = answer.text();
            assert_eq!((answer.status(), answer.complete), (200, true), "{text}");
            assert_eq!(answer.header("x-iop-attempts"), Some("1"), "its value at opening");
            assert!(
                text.starts_with(':') && text.ends_with("data: [DONE]\n\n"),
                "{text}"
            );
            assert!(!text.contains("\"error\""), "{text}");
            edge_rows(&stack, ELIGIBILITY, &rows(&[(&format!("{row}/eligible"), 1)])).await;

            let mut hosted = fixtures::chat("m", "silence", true);
            hosted["web_search_options"] = json!({});
            let answer = client.post(CHAT, &hosted).await;
            let text = answer.text();
            assert_eq!((answer.status(), answer.complete), (200, true), "{text}");
            let events = sse_data(&text);
            assert_eq!(events.len(), 1, "{text}");
            assert!(events[0].contains("\"response_stalled\""), "{text}");
            let expected = rows(&[
                (&format!("{row}/eligible"), 1),
                (&format!("{row}/tool_side_effect"), 1),
            ]);
            edge_rows(&stack, ELIGIBILITY, &expected).await;
            edge_rows(
                &stack,
                RESULTS,
                &rows(&[("provider_tunnel/available/redispatched", 1)]),
            )
            .await;
            stack.settled(Duration::from_secs(2)).await;
        }
    });
}

#[test]
fn a_node_that_lowers_its_provider_says_nothing_of_its_namesake_elsewhere() {
    run(60, async {
        let script = "{ \"t\" = { stall = \"before_headers\", fail_first = 1, probe = \"missing\" } }";
        let setup =
            Setup::of(Provider::scripted("up", &["t"], script).line("response_stall_timeout = \"1s\""))
                .nodes(&["n1", "n2"])
                .model("m", "up", "t");
        let stack = Stack::start(Shape::Linked, setup).await;
        // Each node's first attempt stalls: one request needs both, and neither is left.
        let answer = stack.chat("m", "hello").await;
        answer.assert_error(504, "response_stalled");
        assert_eq!(answer.header("x-iop-attempts"), Some("2"));
        for id in ["n1/up", "n2/up"] {
            assert_lowered(&provider(&stack, id).await, Some(1));
        }
        edge_rows(&stack, EVIDENCE, &rows(&[("stall/unavailable/applied", 2)])).await;
        let row = "provider_tunnel/unavailable/transport_uncommitted";
        let expected = rows(&[
            (&format!("{row}/eligible"), 1),
            (&format!("{row}/no_candidate"), 1),
        ]);
        edge_rows(&stack, ELIGIBILITY, &expected).await;
    });
}

#[test]
fn one_of_two_namesakes_is_lowered_and_the_other_serves() {
    run(60, async {
        // Only n1 ever gets the request that stalls: its target has another name there.
        let script =
            "{ \"ill\" = { stall = \"before_headers\", probe = \"missing\" }, \"t\" = { reply = \"well\" } }";
        let setup = Setup::of(
            Provider::scripted("up", &["ill", "t"], script).line("response_stall_timeout = \"1s\""),
        )
        .nodes(&["n1", "n2"])
        .model("m", "up", "t")
        .edge("queue", "max_wait = \"1s\"");
        let stack = Stack::start(Shape::Linked, setup.edge("gate", "max_attempts = 1")).await;
        stack
            .chat("ill", "hello")
            .await
            .assert_error(504, "response_stalled");
        let all = stack.edge.admin("providers").await;
        let (low, high): (Vec<_>, Vec<_>) = all.iter().partition(|p| p["status"] == "unavailable");
        assert_eq!((low.len(), high.len()), (1, 1), "{all:?}");
        assert_lowered(low[0], Some(1));
        assert_clean(high[0]);
        for _ in 0..10 {
            let answer = stack.chat("m", "hello").await;
            assert_eq!(
                (answer.status(), answer.header("x-iop-attempts")),
                (200, Some("1")),
                "{}",
                answer.text()
            );
        }
    });
}
