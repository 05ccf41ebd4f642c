//! Turns at providers that speak HTTP and answer what no script does, over loopback.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::tasks;

/// A provider that gives every request the same bytes and closes.
struct Stub {
    url: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Stub {
    async fn start(answer: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        tasks::spawn(tasks::Kind::Session, "stub", async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                if let Some(request) = request(&mut socket).await {
                    seen.lock().unwrap().push(request);
                }
                let _ = socket.write_all(answer.as_bytes()).await;
                let _ = socket.shutdown().await;
            }
        });
        Self { url, requests }
    }

    /// An address at which nobody listens.
    async fn absent() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        format!("http://{}/v1", listener.local_addr().unwrap())
    }

    fn asked(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

/// One whole request; `None` when the connection was opened for nothing.
async fn request(socket: &mut TcpStream) -> Option<String> {
    let mut read = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&read).to_ascii_lowercase();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|l| l.strip_prefix("content-length: ")?.parse().ok());
            let chunked = head.contains("transfer-encoding: chunked");
            if body.len() >= length.unwrap_or(0) && (!chunked || body.ends_with("0\r\n\r\n")) {
                return Some(String::from_utf8(read).unwrap());
            }
        }
        let mut piece = [0; 4096];
        match socket.read(&mut piece).await {
            Ok(n) if n > 0 => read.extend_from_slice(&piece[..n]),
            Ok(_) | Err(_) => return None,
        }
    }
}

fn answer(content_type: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
}

fn at(url: &str) -> String {
    format!("adapter = \"openai\"\nbase_url = {url:?}\ntargets = [\"t\"]")
}

fn scripted() -> String {
    "adapter = \"scripted\"\nscript = { t = { reply = \"from b\" } }".to_owned()
}

const WHOLE: &str = r#"{"object":"chat.completion","model":"t","choices":[{"index":0,"finish_reason":"stop",
    "message":{"role":"assistant","content":"whole"}}],"usage":{"prompt_tokens":3,"completion_tokens":2}}"#;
const SAYS: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"some\"}}]}\n\n";

#[tokio::test]
async fn a_provider_that_ignores_stream_has_answered_all_the_same() {
    let stub = Stub::start(answer("application/json", WHOLE)).await;
    let edge = edge_with("", &[("a", at(&stub.url)), ("b", scripted())]);
    let seen = edge.turn().await;
    assert_eq!(seen.answer().content.as_deref(), Some("whole"));
    assert_eq!(seen.deltas, [Delta::Text("whole".to_owned())]);
    assert_eq!((seen.answer().attempts, stub.asked()), (1, 1));
    assert_eq!(seen.answer().usage.unwrap().input, 3);
    edge.assert_idle();
    // A client that asked for a stream gets one, from somebody else.
    assert_eq!(edge.client().await, (200, 2));
}

#[tokio::test]
async fn what_is_no_answer_was_said_by_a_provider_and_goes_back_to_the_run() {
    let in_band = "data: {\"error\":{\"message\":\"not so fast\",\"code\":\"rate_limit_exceeded\"}}\n\n";
    let late =
        format!("{SAYS}data: {{\"error\":{{\"message\":\"it broke\",\"type\":\"server_error\"}}}}\n\n");
    let done = "data: [DONE]\n\n";
    for (content_type, body, want) in [
        (
            "text/event-stream",
            in_band,
            (FailureKind::RateLimited, "http_429", true),
        ),
        (
            "text/event-stream",
            late.as_str(),
            (FailureKind::ProviderError, "http_500", true),
        ),
        (
            "text/event-stream",
            "data: nonsense\n\n",
            (FailureKind::ProviderError, "provider_error", true),
        ),
        (
            "text/event-stream",
            done,
            (FailureKind::ProviderError, "provider_error", true),
        ),
        (
            "text/html",
            "<html></html>",
            (FailureKind::ProviderError, "provider_error", true),
        ),
        (
            "application/json",
            "{\"choices\":[]}",
            (FailureKind::ProviderError, "provider_error", true),
        ),
    ] {
        let stub = Stub::start(answer(content_type, body)).await;
        let edge = edge_with("", &[("a", at(&stub.url)), ("b", scripted())]);
        let seen = edge.turn().await;
        assert_eq!(seen.said(), want, "{body}");
        assert_eq!(
            (stub.asked(), edge.attempts(AttemptResult::Cancelled)),
            (1, 0),
            "{body}"
        );
        edge.assert_idle();
    }
}

#[tokio::test]
async fn a_provider_that_is_not_there_or_hangs_up_is_replaced() {
    let hangs_up = Stub::start(String::new()).await;
    let half_a_head = Stub::start("HTTP/1.1 200 OK\r\ncontent-ty".to_owned()).await;
    let absent = Stub::absent().await;
    for url in [&absent, &hangs_up.url, &half_a_head.url] {
        let both = edge_with("", &[("a", at(url)), ("b", scripted())]);
        let seen = both.turn().await;
        assert_eq!(seen.answer().content.as_deref(), Some("from b"), "{url}");
        assert_eq!(seen.answer().attempts, 2, "{url}");
        let alone = edge_with("", &[("a", at(url))]);
        let seen = alone.turn().await;
        let (failure, _) = seen.failure();
        assert_eq!(
            (failure.kind, failure.retryable),
            (FailureKind::Unavailable, true),
            "{failure}"
        );
    }
}

#[tokio::test]
async fn a_provider_is_sent_what_a_client_would_send() {
    let body = format!(
        "{SAYS}data: {{\"choices\":[{{\"index\":0,\"delta\":{{}},\"finish_reason\":\"stop\"}}]}}\n\ndata: [DONE]\n\n"
    );
    let stub = Stub::start(answer("text/event-stream", &body)).await;
    let edge = edge_with("", &[("a", at(&stub.url))]);
    assert_eq!(edge.turn().await.answer().content.as_deref(), Some("some"));
    let requests = stub.requests.lock().unwrap();
    let (head, body) = requests[0].split_once("\r\n\r\n").unwrap();
    let head = head.to_ascii_lowercase();
    assert!(
        head.starts_with("post /v1/chat/completions http/1.1\r\n"),
        "{head}"
    );
    for header in [
        "content-type: application/json",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-id: ",
    ] {
        assert!(head.contains(&format!("\r\n{header}")), "{header}: {head}");
    }
    assert!(
        body.contains(r#""model":"t""#) && body.contains(r#""include_usage":true"#),
        "{body}"
    );
}
