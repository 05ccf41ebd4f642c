//! Bytes in, the same bytes out: what clients and providers say to each other is not the gateway's to change.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_compression::tokio::write::{BrotliEncoder, GzipEncoder, ZlibEncoder};
use bytes::Bytes;
use iop_tests::client::{Conn, request_head};
use iop_tests::config::{Provider, Setup};
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{fixtures, run, within};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;

const CHAT: &str = "/v1/chat/completions";
const TARGET: &str = "real/target:1-b";

/// What the stub answers next: an async function of the exchange, set by the test.
type Next = Arc<Mutex<Reply>>;

#[derive(Clone, Default)]
struct Reply {
    status: u16,
    headers: Vec<(&'static str, String)>,
    /// Written one by one, each in its own chunk.
    pieces: Vec<Bytes>,
    chunked: bool,
}

impl Reply {
    fn whole(status: u16, content_type: &str, body: impl Into<Bytes>) -> Self {
        Self {
            status,
            headers: vec![("content-type", content_type.to_owned())],
            pieces: vec![body.into()],
            chunked: false,
        }
    }

    fn stream(pieces: Vec<Bytes>) -> Self {
        Self {
            status: 200,
            headers: vec![("content-type", "text/event-stream".to_owned())],
            pieces,
            chunked: true,
        }
    }

    fn header(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.to_owned()));
        self
    }
}

async fn answer(mut ex: Exchange, next: Next) -> io::Result<()> {
    let reply = next.lock().clone();
    let headers: Vec<(&str, &str)> = reply.headers.iter().map(|(k, v)| (*k, v.as_str())).collect();
    if !reply.chunked {
        return ex.reply(reply.status, &headers, &reply.pieces.concat()).await;
    }
    ex.head(reply.status, &headers).await?;
    for piece in &reply.pieces {
        ex.chunk(piece).await?;
    }
    ex.end().await
}

/// A stack whose one public model `pub` has another name at the provider, and the provider's next answer.
async fn start(shape: Shape, next: Reply) -> (Stack, Stub, Next) {
    let next = Arc::new(Mutex::new(next));
    let stub = Stub::start({
        let next = Arc::clone(&next);
        move |ex| answer(ex, Arc::clone(&next))
    })
    .await;
    let provider = Provider::openai("up", &stub.url(), &[TARGET])
        .line("api_key = { env = \"PROVIDER_KEY\" }")
        .endpoints(&["chat", "responses", "images", "embeddings"]);
    let setup = Setup::of(provider)
        .model("pub", "up", TARGET)
        .env("PROVIDER_KEY", "sk-of-the-provider");
    (Stack::start(shape, setup).await, stub, next)
}

fn ok_answer() -> Reply {
    Reply::whole(
        200,
        "application/json",
        fixtures::chat_answer("m", "ok").to_string(),
    )
}

/// Odd but valid request bodies; `MODEL` stands where the model's name goes.
const REQUESTS: [&str; 14] = [
    r#"{"model":"MODEL","messages":[{"role":"user","content":"hi"}]}"#,
    r#"{"messages":[],"big":9007199254740993,"bigger":123456789012345678901234567890,"model":"MODEL"}"#,
    "  {\n\t\"model\" :\r\n \"MODEL\" , \"messages\" : [ ] }\n\n",
    r#"{"model":"MODEL","messages":[],"f":1.0,"e":1E+2,"tiny":1e-400,"huge":1e400,"neg":-0.0,"long":0.10000000000000000555}"#,
    r#"{"model":"MODEL","messages":[{"role":"user","content":"\ud83e"}],"lone":"\udc00 tail"}"#,
    r#"{"model":"MODEL","messages":[],"metadata":{"model":"not this","stream":true,"nested":{"model":"nor this"}}}"#,
    r#"{"messages":[{"role":"user","content":"\"model\":\"trap\""}],"model":"MODEL"}"#,
    r#"{"model":"MODEL","messages":[],"x":null,"y":[],"z":{},"w":"","t":true,"f":false}"#,
    r#"{"model":"MODEL","messages":[],"escapes":"\u0041\/\b\f\n\r\t\\ é ü 漢字 🦀","\u006bey":1}"#,
    r#"{"model":"MODEL","messages":[],"dup":1,"dup":2,"dup":3}"#,
    r#"{"model":"MODEL","messages":[],"tools":[{"type":"namespace","name":"n","tools":[{"type":"custom","format":{"type":"grammar","syntax":"lark"}}]}]}"#,
    r##"{"model":"MODEL","messages":[],"guided_json":{"a":{"$ref":"#/x"}},"top_k":-1,"chat_template_kwargs":{"thinking":false},"min_p":0.05,"repetition_penalty":1.10,"logit_bias":{"50256":-100},"stop":["\u0000"],"user":"u","seed":-9223372036854775808}"##,
    r#"{"model":"MODEL","messages":[],"stream":false,"stream_options":{"include_usage":false}}"#,
    r#"{"":1,"model":"MODEL","messages":[]," model":"x","Model":"y"}"#,
];

async fn requests_unchanged(shape: Shape) {
    let (stack, stub, _) = start(shape, ok_answer()).await;
    for path in [CHAT, "/v1/responses"] {
        for template in REQUESTS {
            let body = template.replace("MODEL", "pub");
            let answer = stack.client().request("POST", path, &[], body.as_bytes()).await;
            assert_eq!(answer.status(), 200, "{body}: {}", answer.text());
            let received = String::from_utf8_lossy(&stub.last().body).into_owned();
            assert_eq!(received, template.replace("MODEL", TARGET));
            assert_eq!(stub.last().path, path);
        }
    }
    // The model's name may be spelled with escapes, too.
    let body = r#"{"model":"p\u0075b","messages":[]}"#;
    assert_eq!(
        stack
            .client()
            .request("POST", CHAT, &[], body.as_bytes())
            .await
            .status(),
        200
    );
    assert_eq!(
        stub.last().body,
        format!(r#"{{"model":"{TARGET}","messages":[]}}"#)
    );
    // Chunked, in pieces that cut everything.
    let body = REQUESTS[8].replace("MODEL", "pub");
    let mut conn = Conn::open(&stack.edge.http).await.unwrap();
    let headers = [
        ("content-type", "application/json"),
        ("transfer-encoding", "chunked"),
    ];
    conn.send(&request_head("POST", CHAT, &headers, None))
        .await
        .unwrap();
    for byte in body.as_bytes() {
        conn.send(&[b"1\r\n", &[*byte][..], b"\r\n"].concat())
            .await
            .unwrap();
    }
    conn.send(b"0\r\n\r\n").await.unwrap();
    assert_eq!(conn.answer().await.unwrap().status(), 200);
    assert_eq!(stub.last().body, REQUESTS[8].replace("MODEL", TARGET));
}

#[test]
fn embedded_odd_requests_arrive_unchanged() {
    run(60, requests_unchanged(Shape::Embedded));
}

#[test]
fn linked_odd_requests_arrive_unchanged() {
    run(60, requests_unchanged(Shape::Linked));
}

#[test]
fn headers_pass_except_those_that_must_not() {
    run(60, async {
        for shape in Shape::ALL {
            let reply = ok_answer()
                .header("x-multi", "one")
                .header("x-multi", "two")
                .header("retry-after-ms", "15")
                .header("x-should-retry", "false")
                .header("x-ratelimit-remaining-tokens", "7")
                .header("openai-organization", "org")
                .header("openai-processing-ms", "3")
                .header("x-request-id", "req-of-the-provider")
                .header("x-custom", "kept")
                .header("set-cookie", "secret=1")
                .header("iop-terminal", "complete")
                .header("iop-origin", "node")
                .header("iop-usage", "1")
                .header("keep-alive", "timeout=9");
            let (stack, stub, _) = start(shape, reply).await;
            let sent = [
                ("authorization", "Bearer sk-of-the-client"),
                ("x-api-key", "sk-of-the-client"),
                ("cookie", "session=1"),
                ("iop-provider", "other"),
                ("iop-run-id", "forged"),
                ("x-stainless-retry-count", "0"),
                ("x-stainless-read-timeout", "600"),
                ("x-codex-turn-metadata", "{\"a\":1}"),
                ("x-two", "one"),
                ("x-two", "two"),
                (
                    "traceparent",
                    "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                ),
                ("user-agent", "test/1"),
                ("accept-encoding", "gzip, br, zstd"),
                ("x-request-id", "id-of-the-client"),
                ("te", "trailers"),
                ("proxy-authorization", "Basic x"),
            ];
            let body = fixtures::chat("pub", "hi", false).to_string();
            let answer = stack.client().request("POST", CHAT, &sent, body.as_bytes()).await;
            assert_eq!(answer.status(), 200, "{}", answer.text());
            let received = stub.last();
            assert_eq!(
                received.header("authorization"),
                Some("Bearer sk-of-the-provider"),
                "{shape:?}"
            );
            for gone in ["x-api-key", "cookie", "proxy-authorization", "te"] {
                assert_eq!(received.header(gone), None, "{shape:?} {gone}");
            }
            assert!(
                received.headers.iter().all(|(k, _)| !k.starts_with("iop-")),
                "{:?}",
                received.headers
            );
            let dump = format!("{:?}", received.headers);
            assert!(
                !dump.contains("sk-of-the-client") && !dump.contains("forged"),
                "{dump}"
            );
            assert_eq!(received.header("x-stainless-retry-count"), Some("0"));
            assert_eq!(received.header("x-stainless-read-timeout"), Some("600"));
            assert_eq!(received.header("x-codex-turn-metadata"), Some("{\"a\":1}"));
            assert_eq!(received.header("user-agent"), Some("test/1"));
            assert_eq!(received.header("x-request-id"), Some("id-of-the-client"));
            assert!(
                received
                    .header("traceparent")
                    .is_some_and(|t| t.contains("4bf92f3577b34da6a3ce929d0e0e4736"))
            );
            assert_eq!(received.headers.iter().filter(|(k, _)| k == "x-two").count(), 2);
            assert!(
                received.header("accept-encoding").is_none_or(|v| v == "identity"),
                "{dump}"
            );
            assert_eq!(received.header("host"), Some(stub.addr.as_str()));

            assert_eq!(answer.head.all("x-multi"), ["one", "two"]);
            for (kept, value) in [
                ("retry-after-ms", "15"),
                ("x-should-retry", "false"),
                ("x-ratelimit-remaining-tokens", "7"),
                ("openai-organization", "org"),
                ("openai-processing-ms", "3"),
                ("x-custom", "kept"),
                ("x-request-id", "req-of-the-provider"),
                ("x-iop-attempts", "1"),
            ] {
                assert_eq!(answer.head.all(kept), [value], "{shape:?} {kept}");
            }
            assert!(answer.header("x-iop-request-id").is_some());
            for gone in [
                "set-cookie",
                "iop-terminal",
                "iop-origin",
                "iop-usage",
                "keep-alive",
                "iop-content-length",
            ] {
                assert_eq!(answer.header(gone), None, "{shape:?} {gone}");
            }
        }
    });
}

#[test]
fn odd_answers_come_back_unchanged() {
    run(60, async {
        let odd = r#" {"id":"x","big":9007199254740993,"e":1E400,"lone":"\ud83e","dup":1,"dup":2,
            "choices":[{"message":{"reasoning_content":"r","content":"c","x":{}}}],"prompt_filter_results":[],"provider":{"cost":0.10000000000000000555}}
"#;
        for shape in Shape::ALL {
            let (stack, _stub, next) = start(shape, ok_answer()).await;
            for status in [200, 201, 400, 403, 404, 413, 422, 429, 500, 503] {
                for content_type in [
                    "application/json",
                    "application/json; charset=UTF-8",
                    "application/problem+json",
                ] {
                    *next.lock() = Reply::whole(status, content_type, odd);
                    for stream in [false, true] {
                        if stream && status < 300 {
                            continue;
                        }
                        let answer = stack
                            .client()
                            .post(CHAT, &fixtures::chat("pub", "hi", stream))
                            .await;
                        assert_eq!(answer.status(), status, "{shape:?} stream={stream}");
                        assert_eq!(answer.text(), odd, "{shape:?} {status} stream={stream}");
                        assert_eq!(answer.head.all("content-type"), [content_type]);
                        assert_eq!(answer.head.all("content-length"), [odd.len().to_string()]);
                    }
                }
            }
        }
    });
}

/// Streams in every framing that there is; each ends in a terminal event.
fn framings() -> Vec<(&'static str, Vec<u8>)> {
    let chunk = |text: &str| fixtures::text_chunk(text);
    let stop = fixtures::stop_chunk();
    let multi = chunk("multi").replacen(",\"", ",\ndata: \"", 1);
    let big = chunk(&"\u{1f980}x".repeat(1024 * 1024 / 5));
    let lines = |eol: &str| {
        format!(
            "data: {}\n\n: a comment\n\nevent: message\nid: 7\nretry: 10\ndata: {}\n\ndata:{}\n\ndata: {stop}\n\ndata: [DONE]\n\n",
            chunk("a é 漢 🦀"),
            chunk("b"),
            chunk("no space"),
        )
        .replace('\n', eol)
        .into_bytes()
    };
    vec![
        ("LF", lines("\n")),
        ("CRLF", lines("\r\n")),
        ("CR", lines("\r")),
        ("BOM", [b"\xef\xbb\xbf".to_vec(), lines("\n")].concat()),
        (
            "multi-line data",
            format!("data: {multi}\n\ndata: {stop}\n\ndata: [DONE]\n\n").into_bytes(),
        ),
        (
            "empty data",
            format!(
                "data:\n\ndata: {}\n\ndata\n\ndata: {stop}\n\ndata: [DONE]\n\n",
                chunk("x")
            )
            .into_bytes(),
        ),
        (
            "1 MB event",
            format!("data: {big}\n\ndata: {stop}\n\ndata: [DONE]\n\n").into_bytes(),
        ),
        (
            "unknown fields",
            format!(
                "foo: bar\ndata: {}\nbaz\n\ndata: {stop}\n\ndata: [DONE]\n\n",
                chunk("x")
            )
            .into_bytes(),
        ),
        (
            "mixed",
            format!("data: {}\r\n\r\ndata: {stop}\r\rdata: [DONE]\n\n", chunk("x")).into_bytes(),
        ),
    ]
}

/// Ways to cut a stream into writes.
fn cuts(bytes: &[u8]) -> Vec<(&'static str, Vec<Bytes>)> {
    let by = |n: usize| bytes.chunks(n).map(Bytes::copy_from_slice).collect::<Vec<_>>();
    let mut ways = vec![
        ("whole", by(bytes.len())),
        ("by 7", by(7)),
        ("by 16 KiB", by(16 * 1024)),
    ];
    if bytes.len() < 4096 {
        ways.push(("by 1", by(1)));
    } else {
        ways.remove(1);
    }
    ways
}

async fn streams_unchanged(shape: Shape) {
    let (stack, _stub, next) = start(shape, ok_answer()).await;
    let mut ask = fixtures::chat("pub", "hi", true);
    // Usage is asked for, so nothing is added to the request and nothing taken out of the answer.
    ask["stream_options"] = serde_json::json!({"include_usage": true});
    for (name, bytes) in framings() {
        for (way, pieces) in cuts(&bytes) {
            *next.lock() = Reply::stream(pieces);
            let started = Instant::now();
            let answer = stack.client().post(CHAT, &ask).await;
            assert_eq!(
                (answer.status(), answer.complete),
                (200, true),
                "{shape:?} {name} {way}"
            );
            // The terminal event is complete at its CR, and the message ends there if the LF is a write behind.
            let without_last_lf = bytes.strip_suffix(b"\n").filter(|b| b.ends_with(b"\r"));
            assert!(
                answer.body == bytes || without_last_lf.is_some_and(|b| answer.body == b),
                "{shape:?} {name} {way}: {} bytes instead of {}: {:?}",
                answer.body.len(),
                bytes.len(),
                String::from_utf8_lossy(&answer.body[..answer.body.len().min(400)])
            );
            assert!(
                started.elapsed() < Duration::from_secs(5),
                "{name} {way} took {:?}",
                started.elapsed()
            );
            assert_eq!(answer.header("content-type"), Some("text/event-stream"));
        }
    }
    let bytes = fixtures::response_stream("resp_1", &["a", "é漢🦀", "c"]);
    for (way, pieces) in cuts(&bytes) {
        *next.lock() = Reply::stream(pieces);
        let answer = stack
            .client()
            .post("/v1/responses", &fixtures::responses("pub", "hi", true))
            .await;
        assert!(
            answer.body == bytes && answer.complete,
            "{shape:?} responses {way}: {}",
            answer.text()
        );
    }
}

#[test]
fn embedded_streams_are_byte_identical() {
    run(90, streams_unchanged(Shape::Embedded));
}

#[test]
fn linked_streams_are_byte_identical() {
    run(90, streams_unchanged(Shape::Linked));
}

async fn encode(coding: &str, bytes: &[u8]) -> Bytes {
    macro_rules! through {
        ($encoder:ident) => {{
            let mut encoder = $encoder::new(Vec::new());
            encoder.write_all(bytes).await.unwrap();
            encoder.shutdown().await.unwrap();
            encoder.into_inner()
        }};
    }
    let encoded = match coding {
        "gzip" => through!(GzipEncoder),
        "br" => through!(BrotliEncoder),
        "deflate" => through!(ZlibEncoder),
        _ => bytes.to_vec(),
    };
    encoded.into()
}

#[test]
fn encoded_answers_stay_consistent() {
    run(90, async {
        let plain = fixtures::chat_answer("m", &"hello ".repeat(200)).to_string();
        let stream = fixtures::chat_stream(&["a", "é", "c"]);
        let mut ask = fixtures::chat("pub", "hi", true);
        ask["stream_options"] = serde_json::json!({"include_usage": true});
        for shape in Shape::ALL {
            let (stack, _stub, next) = start(shape, ok_answer()).await;
            for coding in ["gzip", "br", "deflate"] {
                let encoded = encode(coding, plain.as_bytes()).await;
                for status in [200, 400, 500] {
                    *next.lock() = Reply::whole(status, "application/json", encoded.clone())
                        .header("content-encoding", coding);
                    let body = fixtures::chat("pub", "hi", false).to_string();
                    for accepts in [Some(coding), Some("identity"), None] {
                        let headers: Vec<_> = accepts.map(|a| ("accept-encoding", a)).into_iter().collect();
                        let answer = stack
                            .client()
                            .request("POST", CHAT, &headers, body.as_bytes())
                            .await;
                        assert_eq!(
                            (answer.status(), answer.complete),
                            (status, true),
                            "{shape:?} {coding} {accepts:?}"
                        );
                        match answer.header("content-encoding") {
                            None | Some("identity") => {
                                assert_eq!(answer.text(), plain, "{shape:?} {coding} {status} {accepts:?}")
                            }
                            Some(said) => {
                                assert_eq!((said, accepts), (coding, Some(coding)), "{shape:?} {status}");
                                assert_eq!(answer.body, encoded);
                            }
                        }
                    }
                }
                let encoded = encode(coding, &stream).await;
                for size in [1, encoded.len()] {
                    let pieces = encoded.chunks(size).map(Bytes::copy_from_slice).collect();
                    *next.lock() = Reply::stream(pieces).header("content-encoding", coding);
                    let headers = [("accept-encoding", coding)];
                    let answer = stack
                        .client()
                        .request("POST", CHAT, &headers, ask.to_string().as_bytes())
                        .await;
                    assert_eq!(answer.status(), 200, "{shape:?} {coding}: {}", answer.text());
                    assert_eq!(answer.header("content-encoding"), None);
                    assert_eq!(
                        answer.text(),
                        String::from_utf8_lossy(&stream),
                        "{shape:?} {coding}"
                    );
                }
            }
            *next.lock() = Reply::whole(200, "application/json", plain.clone())
                .header("content-encoding", "x-unheard-of");
            let answer = stack
                .client()
                .post(CHAT, &fixtures::chat("pub", "hi", false))
                .await;
            answer.assert_error(502, "provider_error");
        }
    });
}

async fn large_bodies(shape: Shape) {
    let (stack, stub, _) = start(shape, ok_answer()).await;
    // A 40 MB image.
    let image = "A".repeat(40 * 1024 * 1024);
    let template = format!(r#"{{"model":"MODEL","image":"data:image/png;base64,{image}","prompt":"p"}}"#);
    let body = template.replacen("MODEL", "pub", 1);
    let answer = stack
        .client()
        .request("POST", "/v1/images/generations", &[], body.as_bytes())
        .await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    assert!(
        stub.last().body == template.replacen("MODEL", TARGET, 1),
        "the image arrived changed"
    );
    assert_eq!(stub.last().path, "/v1/images/generations");
    // Exactly the limit, its model at the very end.
    let limit = 64 * 1024 * 1024;
    let head = r#"{"messages":[{"role":"user","content":""#;
    let tail = r#""}],"model":"pub"}"#;
    let body = [head, &"y".repeat(limit - head.len() - tail.len()), tail].concat();
    assert_eq!(body.len(), limit);
    let answer = stack.client().request("POST", CHAT, &[], body.as_bytes()).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    assert_eq!(stub.last().body.len(), limit - 3 + TARGET.len());
    stack.settled(Duration::from_secs(2)).await;
}

#[test]
fn embedded_large_bodies_arrive_whole() {
    run(90, large_bodies(Shape::Embedded));
}

#[test]
fn linked_large_bodies_arrive_whole() {
    run(90, large_bodies(Shape::Linked));
}

#[test]
fn bodies_over_the_limit_are_refused_at_once() {
    run(60, async {
        let (stack, stub, _) = start(Shape::Embedded, ok_answer()).await;
        let over = 64 * 1024 * 1024 + 1;
        // By Content-Length alone: not a byte of the body is sent.
        let mut conn = Conn::open(&stack.edge.http).await.unwrap();
        conn.send(&request_head(
            "POST",
            CHAT,
            &[("content-type", "application/json")],
            Some(over),
        ))
        .await
        .unwrap();
        let answer = within("413", Duration::from_secs(1), conn.answer())
            .await
            .unwrap();
        answer.assert_error(413, "request_too_large");
        // The same when the client asks first.
        let mut conn = Conn::open(&stack.edge.http).await.unwrap();
        let expect = [("content-type", "application/json"), ("expect", "100-continue")];
        conn.send(&request_head("POST", CHAT, &expect, Some(over)))
            .await
            .unwrap();
        assert_eq!(
            within("413", Duration::from_secs(1), conn.any_head())
                .await
                .unwrap()
                .status,
            413
        );
        // Without a length it is refused as soon as it is too much.
        let mut conn = Conn::open(&stack.edge.http).await.unwrap();
        let chunked = [
            ("content-type", "application/json"),
            ("transfer-encoding", "chunked"),
        ];
        conn.send(&request_head("POST", CHAT, &chunked, None))
            .await
            .unwrap();
        let piece = [b"100000\r\n".to_vec(), vec![b'{'; 0x10_0000], b"\r\n".to_vec()].concat();
        for _ in 0..65 {
            if conn.send(&piece).await.is_err() {
                break;
            }
        }
        let answer = within("413", Duration::from_secs(5), conn.answer())
            .await
            .unwrap();
        answer.assert_error(413, "request_too_large");
        assert!(stub.received().is_empty());
        stack.settled(Duration::from_secs(2)).await;
    });
}

#[test]
fn expect_100_continue_is_answered() {
    run(60, async {
        for shape in Shape::ALL {
            let (stack, stub, _) = start(shape, ok_answer()).await;
            let body = fixtures::chat("pub", "hi", false).to_string();
            let mut conn = Conn::open(&stack.edge.http).await.unwrap();
            let headers = [("content-type", "application/json"), ("expect", "100-continue")];
            conn.send(&request_head("POST", CHAT, &headers, Some(body.len())))
                .await
                .unwrap();
            assert_eq!(
                within("100", Duration::from_secs(2), conn.any_head())
                    .await
                    .unwrap()
                    .status,
                100
            );
            conn.send(body.as_bytes()).await.unwrap();
            assert_eq!(conn.answer().await.unwrap().status(), 200);
            assert_eq!(stub.last().body, body.replace("\"pub\"", &format!("{TARGET:?}")));
            assert_eq!(stub.last().header("expect"), None);
        }
    });
}

#[test]
fn multipart_forms_pass_with_only_the_model_part_changed() {
    run(60, async {
        for shape in Shape::ALL {
            let stub = Stub::start(|mut ex| async move {
                ex.json_reply(200, &serde_json::json!({"text": "spoken"})).await
            })
            .await;
            let provider = Provider::openai("up", &stub.url(), &[TARGET]).endpoints(&["audio", "images"]);
            let stack = Stack::start(shape, Setup::of(provider).model("pub", "up", TARGET)).await;
            let audio: Vec<u8> = (0..=255).cycle().take(300_000).collect();
            let form = |model: &str| {
                let mut body = Vec::new();
                body.extend_from_slice(b"--b0und\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n");
                body.extend_from_slice(&audio);
                body.extend_from_slice(format!("\r\n--b0und\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n--b0und\r\nContent-Disposition: form-data; name=\"odd\"\r\n\r\nname=\"model\"\r\n--b0und--\r\n").as_bytes());
                body
            };
            for path in ["/v1/audio/transcriptions", "/v1/images/edits"] {
                let headers = [("content-type", "multipart/form-data; boundary=b0und")];
                let answer = stack.client().request("POST", path, &headers, &form("pub")).await;
                assert_eq!(answer.status(), 200, "{shape:?} {path}: {}", answer.text());
                let received = stub.last();
                assert!(received.body == form(TARGET), "{shape:?} {path}");
                assert_eq!(
                    received.header("content-type"),
                    Some("multipart/form-data; boundary=b0und")
                );
                assert_eq!(received.path, path);
            }
        }
    });
}

#[test]
fn bodies_beyond_the_memory_for_all_of_them_are_refused_before_they_are_read() {
    run(60, async {
        let stub = Stub::start(|mut ex| async move {
            ex.gone().await;
            Ok(())
        })
        .await;
        let setup = Setup::of(Provider::openai("up", &stub.url(), &["m"]))
            .edge("server", "body_limit = \"1MiB\"")
            .edge("server", "body_memory = \"2MiB\"");
        let stack = Stack::start(Shape::Embedded, setup).await;
        let mut body = fixtures::chat("m", "hi", false);
        body["padding"] = "x".repeat(900 * 1024).into();
        let body = body.to_string();
        let first = stack
            .client()
            .start("POST", CHAT, &[], body.as_bytes())
            .await
            .unwrap();
        let second = stack
            .client()
            .start("POST", CHAT, &[], body.as_bytes())
            .await
            .unwrap();
        stub.arrived(2).await;
        let mut third = Conn::open(&stack.edge.http).await.unwrap();
        let head = request_head(
            "POST",
            CHAT,
            &[("content-type", "application/json")],
            Some(body.len()),
        );
        third.send(&head).await.unwrap();
        let answer = within("503", Duration::from_secs(2), third.answer())
            .await
            .unwrap();
        answer.assert_error(503, "capacity_exhausted");
        assert!(answer.header("retry-after").is_some());
        drop((first, second));
        stack.settled(Duration::from_secs(2)).await;
        // The memory is given back.
        let again = stack
            .client()
            .start("POST", CHAT, &[], body.as_bytes())
            .await
            .unwrap();
        stub.arrived(3).await;
        drop(again);
    });
}

#[test]
fn a_client_that_is_still_uploading_gets_to_read_its_refusal() {
    run(60, async {
        let stub =
            Stub::start(|mut ex| async move { ex.json_reply(200, &serde_json::json!({})).await }).await;
        let setup =
            Setup::of(Provider::openai("up", &stub.url(), &["m"])).edge("server", "body_limit = \"1MiB\"");
        let stack = Stack::start(Shape::Embedded, setup).await;
        let body = vec![b' '; 8 * 1024 * 1024];
        let (mut unsent, mut unread) = (0, 0);
        for _ in 0..40 {
            let mut conn = Conn::open(&stack.edge.http).await.unwrap();
            // Real clients give up at a failed write or a reset, whatever else has arrived.
            unsent += usize::from(
                conn.request("POST", CHAT, &[("content-type", "application/json")], &body)
                    .await
                    .is_err(),
            );
            match conn.answer().await {
                Ok(answer) => answer.assert_error(413, "request_too_large"),
                Err(_) => unread += 1,
            }
        }
        assert_eq!(
            (unsent, unread),
            (0, 0),
            "of 40: uploads reset, refusals never read"
        );
    });
}
