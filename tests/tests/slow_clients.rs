//! Clients that do not read cost a fixed amount of memory and slow nobody else down (G23, G43).

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use iop_tests::client::{Client, Conn};
use iop_tests::config::{Provider, Setup};
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{fixtures, run};

const SLOW: usize = 64;
const OTHERS: usize = 200;
const CHUNKS: usize = 50;
/// What 64 unread streams may cost a process: 256 KiB held each, their windows, and room for the allocator.
const GROWTH_BYTES: u64 = 96 * 1024 * 1024;

async fn answer(mut ex: Exchange) -> std::io::Result<()> {
    let body = ex.json();
    if body["stream"] != true {
        return ex.json_reply(200, &fixtures::chat_answer("m", "ok")).await;
    }
    ex.sse().await?;
    if body["messages"][0]["content"] == "flood" {
        let piece = format!("data: {}\n\n", fixtures::text_chunk(&"x".repeat(200)));
        let batch = piece.repeat(16);
        loop {
            let Err(e) = ex.chunk(batch.as_bytes()).await else {
                continue;
            };
            return Err(e);
        }
    }
    for n in 0..CHUNKS {
        ex.data(&fixtures::text_chunk(&format!("word {n} "))).await?;
    }
    ex.data(&fixtures::stop_chunk()).await?;
    ex.data("[DONE]").await?;
    ex.end().await
}

/// A client whose kernel takes little and that never reads.
async fn flooded(client: &Client) -> Conn {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(8 * 1024).unwrap();
    let stream = socket.connect(client.addr.parse().unwrap()).await.unwrap();
    let mut conn = Conn::over(stream);
    let body = fixtures::chat("m", "flood", true).to_string();
    let headers = [("content-type", "application/json")];
    conn.request("POST", "/v1/chat/completions", &headers, body.as_bytes())
        .await
        .unwrap();
    conn
}

async fn others(client: &Client) -> Duration {
    let started = Instant::now();
    let body = fixtures::chat("m", "quick", true);
    futures_util::stream::iter(0..OTHERS)
        .map(|_| async {
            let answer = client.post("/v1/chat/completions", &body).await;
            assert_eq!((answer.status(), answer.complete), (200, true));
            let text = answer.text();
            assert_eq!(text.matches("word ").count(), CHUNKS);
            assert!(text.ends_with("data: [DONE]\n\n"));
        })
        .buffer_unordered(32)
        .collect::<Vec<()>>()
        .await;
    started.elapsed()
}

async fn unread(shape: Shape) {
    let stub = Stub::start(answer).await;
    let provider = Provider::openai("up", &stub.url(), &["m"]).capacity(256);
    // The slow ones must stay for the whole test.
    let stack = Stack::start(
        shape,
        Setup::of(provider).edge("gate", "client_write_timeout = \"120s\""),
    )
    .await;
    let client = stack.client();
    others(&client).await;
    let alone = others(&client).await;
    let before: Vec<u64> = rss(&stack);
    let mut slow = Vec::new();
    for _ in 0..SLOW {
        slow.push(flooded(&client).await);
    }
    stub.arrived(2 * OTHERS + SLOW).await;
    let beside = others(&client).await;
    let again = others(&client).await;
    // At full rate: a stalled link would take until a timeout, not a factor of a busy machine's noise.
    let best = beside.min(again);
    assert!(
        best <= alone * 3 + Duration::from_secs(1),
        "alone {alone:?}, beside 64 unread streams {best:?}"
    );
    for (after, before) in rss(&stack).into_iter().zip(before) {
        let growth = after.saturating_sub(before);
        assert!(growth <= GROWTH_BYTES, "{growth} bytes more than before");
    }
    let still = stub.received().iter().filter(|r| !r.done).count();
    assert_eq!(
        still, SLOW,
        "every unread stream is still there, held up by its client"
    );
    drop(slow);
    stack.settled(Duration::from_secs(5)).await;
    stub.idle(Duration::from_secs(2)).await;
}

fn rss(stack: &Stack) -> Vec<u64> {
    let nodes = stack.nodes.iter().map(|n| n.process.rss_bytes());
    std::iter::once(stack.edge.process.rss_bytes())
        .chain(nodes)
        .collect()
}

#[test]
fn embedded_64_unread_streams_slow_nobody_down() {
    run(120, unread(Shape::Embedded));
}

#[test]
fn linked_64_unread_streams_slow_nobody_down() {
    run(120, unread(Shape::Linked));
}

async fn blocked_too_long(shape: Shape) {
    let stub = Stub::start(answer).await;
    let provider = Provider::openai("up", &stub.url(), &["m"]).capacity(8);
    let setup = Setup::of(provider)
        .edge("gate", "client_write_timeout = \"2s\"")
        .node("node", "metrics_listen = \"127.0.0.1:0\"");
    let stack = Stack::start(shape, setup).await;
    let mut slow = Vec::new();
    for _ in 0..4 {
        slow.push(flooded(&stack.client()).await);
    }
    stub.arrived(4).await;
    for n in 0..4 {
        stub.hung_up(n, Duration::from_secs(8)).await;
    }
    stack.settled(Duration::from_secs(2)).await;
    // Ended by policy, and the provider is not to blame.
    let mut pages = vec![stack.edge.scrape().await];
    for node in &stack.nodes {
        pages.extend(node.scrape().await);
    }
    for page in pages {
        assert_eq!(page.sum("iop_node_response_stalls_total", &[]), 0.0);
        assert_eq!(
            page.sum("iop_edge_requests_total", &[("outcome", "response_stalled")]),
            0.0
        );
        assert_eq!(
            page.sum("iop_edge_requests_total", &[("outcome", "provider_error")]),
            0.0
        );
    }
    assert_eq!(stack.chat("m", "ok").await.status(), 200);
    drop(slow);
}

#[test]
fn embedded_a_client_blocked_too_long_is_ended_and_it_is_no_stall() {
    run(60, blocked_too_long(Shape::Embedded));
}

#[test]
fn linked_a_client_blocked_too_long_is_ended_and_it_is_no_stall() {
    run(60, blocked_too_long(Shape::Linked));
}

#[test]
fn linked_providers_that_never_read_a_large_body_block_nobody() {
    run(120, async {
        let stub = Stub::start_unread(|mut ex| async move {
            let length: usize = ex
                .header("content-length")
                .and_then(|l| l.parse().ok())
                .unwrap_or(0);
            if length > 1024 * 1024 {
                // Takes the connection and never the body.
                return std::future::pending().await;
            }
            ex.read_body().await?;
            answer(ex).await
        })
        .await;
        let provider = Provider::openai("up", &stub.url(), &["m"]).capacity(256);
        let stack = Stack::start(Shape::Linked, Setup::of(provider)).await;
        let client = stack.client();
        let mut body = fixtures::chat("m", "large", false);
        body["padding"] = "x".repeat(40 * 1024 * 1024).into();
        let body = body.to_string();
        let mut uploads = Vec::new();
        for _ in 0..8 {
            uploads.push(
                client
                    .start("POST", "/v1/chat/completions", &[], body.as_bytes())
                    .await
                    .unwrap(),
            );
        }
        stub.arrived(8).await;
        others(&client).await;
        drop(uploads);
        stack.settled(Duration::from_secs(5)).await;
    });
}

/// Over HTTP/2 the socket is never blocked by one stream that nobody reads: the stream itself has to be seen.
async fn blocked_on_http2(shape: Shape) {
    let stub = Stub::start(answer).await;
    let provider = Provider::openai("up", &stub.url(), &["m"]).capacity(8);
    let setup = Setup::of(provider).edge("gate", "client_write_timeout = \"1s\"");
    let stack = Stack::start(shape, setup).await;
    let socket = tokio::net::TcpStream::connect(&stack.edge.http).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(socket))
            .await
            .unwrap();
    tokio::spawn(connection);
    let mut ask = async |what: &str| {
        let body = serde_json::json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": what}]});
        let request = http::Request::post(format!("http://{}/v1/chat/completions", stack.edge.http))
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .unwrap();
        sender.send_request(request).await.unwrap()
    };
    let unread = ask("flood").await;
    assert_eq!(unread.status(), 200);
    stub.arrived(1).await;
    let read = ask("words").await.into_body().collect().await.unwrap().to_bytes();
    assert!(
        read.ends_with(b"data: [DONE]\n\n"),
        "another stream of the connection goes on"
    );
    stub.hung_up(0, Duration::from_secs(5)).await;
    stack.settled(Duration::from_secs(2)).await;
    drop(unread);
}

#[test]
fn embedded_an_http2_stream_that_nobody_reads_is_ended() {
    run(30, blocked_on_http2(Shape::Embedded));
}

#[test]
fn linked_an_http2_stream_that_nobody_reads_is_ended() {
    run(30, blocked_on_http2(Shape::Linked));
}
