//! HTTP/2 clients that do not read: their streams end by policy, as broken ones, and before the provider could seem to
//! have stalled; whoever reads gets a complete answer with a clean end (link.md rule 1, G22, G23, G56).

use std::io;
use std::time::{Duration, Instant};

use iop_tests::client::find;
use iop_tests::config::{Provider, Setup};
use iop_tests::http2::{End, Http2, Unread};
use iop_tests::liveness::{ELIGIBILITY, Rows, STALLS, node_page};
use iop_tests::metrics::Page;
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{fixtures, run};
use serde_json::Value;
use tokio::sync::watch;

const CHAT: &str = "/v1/chat/completions";
const COMMENT: &str = ": keep-alive\n\n";
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// What two busy cores may add.
const SLACK: Duration = Duration::from_secs(3);
/// `content-length` of an answer that nobody reads to its end.
const ANNOUNCED: usize = 256 * 1024 * 1024;
/// Above `gate.hold_bytes`: passed on as it comes.
const LARGE: usize = 700_000;

/// How a provider answers; the request's text says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Stream,
    /// A stream whose first byte comes after the keep-alive opening.
    Opened,
    /// JSON without `content-length`.
    Whole,
    /// JSON with it.
    Sized,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Stream, Kind::Opened, Kind::Whole, Kind::Sized];

    fn is_stream(self) -> bool {
        matches!(self, Kind::Stream | Kind::Opened)
    }

    /// A request for an answer that has an end, or for one that has none.
    fn ask(self, endless: bool) -> Value {
        let text = format!("{self:?} {endless}");
        fixtures::chat("m", &text, self.is_stream())
    }
}

/// A whole answer, parted inside its text.
fn whole() -> (String, String) {
    let text = fixtures::chat_answer("m", "CUT").to_string();
    let (before, after) = text.split_once("CUT").unwrap();
    (before.to_owned(), after.to_owned())
}

/// A whole answer of more than `LARGE` bytes.
fn large() -> String {
    let (before, after) = whole();
    format!("{before}{}{after}", "y".repeat(LARGE))
}

async fn sized(ex: &mut Exchange, length: usize) -> io::Result<()> {
    let head =
        format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n");
    ex.raw(head.as_bytes()).await
}

async fn answer(mut ex: Exchange, mut opened: watch::Receiver<bool>) -> io::Result<()> {
    let body = ex.json();
    let asked = body["messages"][0]["content"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let endless = asked.ends_with("true");
    let more = "y".repeat(4_000);
    let word = format!("data: {}\n\n", fixtures::text_chunk(&"x".repeat(200)));
    match asked.split(' ').next().unwrap_or_default() {
        kind @ ("Stream" | "Opened") => {
            if kind == "Opened" {
                ex.until(async { opened.wait_for(|o| *o).await.is_ok() }).await?;
            }
            ex.sse().await?;
            if endless {
                loop {
                    ex.chunk(word.repeat(16).as_bytes()).await?;
                }
            }
            ex.chunk(&fixtures::chat_stream(&["all ", "of ", "it"])).await?;
            ex.end().await
        }
        "Whole" => {
            ex.head(200, &[("content-type", "application/json")]).await?;
            ex.chunk(whole().0.as_bytes()).await?;
            if endless {
                loop {
                    ex.chunk(more.as_bytes()).await?;
                }
            }
            ex.chunk("y".repeat(LARGE).as_bytes()).await?;
            ex.chunk(whole().1.as_bytes()).await?;
            ex.end().await
        }
        _ => {
            if !endless {
                let headers = [("content-type", "application/json")];
                return ex.reply(200, &headers, large().as_bytes()).await;
            }
            sized(&mut ex, ANNOUNCED).await?;
            ex.raw(whole().0.as_bytes()).await?;
            loop {
                ex.raw(more.as_bytes()).await?;
            }
        }
    }
}

/// A provider, a stack before it, and what lets the `Opened` answers begin.
struct Site {
    stack: Stack,
    stub: Stub,
    opened: watch::Sender<bool>,
}

impl Site {
    async fn start(shape: Shape, provider_line: &str, gate_line: &str) -> Self {
        let opened = watch::channel(false).0;
        let stub = Stub::start({
            let opened = opened.clone();
            move |ex| answer(ex, opened.subscribe())
        })
        .await;
        let provider = Provider::openai("up", &stub.url(), &["m"])
            .capacity(8)
            .line(provider_line);
        let setup = Setup::of(provider)
            .edge("gate", "keepalive_open_after = \"300ms\"")
            .edge("gate", gate_line)
            .node("node", "metrics_listen = \"127.0.0.1:0\"");
        let stack = Stack::start(shape, setup).await;
        Self { stack, stub, opened }
    }

    /// Asks and waits for the head; what comes after it is not read.
    async fn ask(&self, client: &mut Http2, kind: Kind, endless: bool) -> Unread {
        self.opened.send_replace(false);
        let unread = client.post(CHAT, &kind.ask(endless)).await;
        assert_eq!(unread.status, 200, "{kind:?}");
        // The head of such an answer is the opening itself.
        self.opened.send_replace(true);
        unread
    }

    /// Nothing of it is left, and nobody says that the provider stalled.
    async fn assert_no_stall(&self) {
        self.stack.settled(Duration::from_secs(2)).await;
        let page = self.stack.edge.scrape().await;
        assert_eq!(STALLS.rows(&node_page(&self.stack).await), Rows::new());
        assert_eq!(ELIGIBILITY.rows(&page), Rows::new());
        assert_eq!(
            page.sum("iop_edge_attempts_total", &[("result", "response_stalled")]),
            0.0
        );
        for outcome in ["response_stalled", "provider_error", "incomplete"] {
            assert_eq!(requests(&page, outcome), 0.0, "{outcome}");
        }
    }
}

fn requests(page: &Page, outcome: &str) -> f64 {
    let labels = [("endpoint", "chat"), ("outcome", outcome)];
    page.sum("iop_edge_requests_total", &labels)
}

/// Checks that a complete answer came, with a clean end.
async fn assert_complete(kind: Kind, unread: Unread) {
    let (body, end) = unread.rest().await;
    assert_eq!(end, End::Clean, "{kind:?}");
    if kind.is_stream() {
        let text = String::from_utf8_lossy(&body).replace(COMMENT, "");
        let expected = fixtures::chat_stream(&["all ", "of ", "it"]);
        assert_eq!(text.as_bytes(), expected, "{kind:?}");
    } else {
        assert!(body == large(), "{kind:?}: {} bytes", body.len());
    }
}

async fn cut(shape: Shape) {
    let line = format!("client_write_timeout = \"{}s\"", WRITE_TIMEOUT.as_secs());
    let site = Site::start(shape, "", &line).await;
    for kind in Kind::ALL {
        let mut client = Http2::open(&site.stack.edge.http).await;
        let request = site.stub.received().len();
        let asked = Instant::now();
        let unread = site.ask(&mut client, kind, true).await;
        site.stub.hung_up(request, WRITE_TIMEOUT + SLACK).await;
        assert!(
            asked.elapsed() >= WRITE_TIMEOUT,
            "{kind:?}: after {:?}",
            asked.elapsed()
        );

        // The client reads on: it has to learn that this is not all.
        let (body, end) = unread.rest().await;
        assert_eq!(end, End::Reset, "{shape:?} {kind:?}, after {} bytes", body.len());
        assert!(!body.is_empty(), "{shape:?} {kind:?}");
        if kind.is_stream() {
            assert_eq!(find(&body, b"[DONE]"), None, "{shape:?} {kind:?}");
        } else {
            let read: Result<Value, _> = serde_json::from_slice(&body);
            assert!(read.is_err(), "{shape:?} {kind:?}: a whole document");
        }
        // The stream alone was cut.
        let unread = site.ask(&mut client, kind, false).await;
        assert_complete(kind, unread).await;
    }
    site.assert_no_stall().await;
    let page = site.stack.edge.scrape().await;
    let each = Kind::ALL.len() as f64;
    assert_eq!(
        (requests(&page, "success"), requests(&page, "client_cancelled")),
        (each, each)
    );
}

#[test]
fn embedded_an_answer_cut_for_a_client_that_does_not_read_ends_by_a_reset() {
    run(60, cut(Shape::Embedded));
}

#[test]
fn linked_an_answer_cut_for_a_client_that_does_not_read_ends_by_a_reset() {
    run(60, cut(Shape::Linked));
}

const STALL: Duration = Duration::from_secs(3);

async fn before_a_stall(shape: Shape) {
    let line = format!("response_stall_timeout = \"{}s\"", STALL.as_secs());
    // `client_write_timeout` is the default, ten times as long.
    let site = Site::start(shape, &line, "").await;
    for kind in Kind::ALL {
        let mut client = Http2::open(&site.stack.edge.http).await;
        let request = site.stub.received().len();
        let asked = Instant::now();
        let unread = site.ask(&mut client, kind, true).await;
        site.stub
            .hung_up(request, STALL / 2 + Duration::from_millis(2_500))
            .await;
        assert!(
            asked.elapsed() >= STALL / 2,
            "{kind:?}: after {:?}",
            asked.elapsed()
        );
        site.stack.edge.quiet(Duration::from_secs(1)).await;
        drop(unread);
    }
    site.assert_no_stall().await;
    let page = site.stack.edge.scrape().await;
    assert_eq!(requests(&page, "client_cancelled"), Kind::ALL.len() as f64);
}

#[test]
fn embedded_a_client_that_does_not_read_is_cut_at_half_the_stall_timeout() {
    run(60, before_a_stall(Shape::Embedded));
}

#[test]
fn linked_a_client_that_does_not_read_is_cut_at_half_the_stall_timeout() {
    run(60, before_a_stall(Shape::Linked));
}

/// Many at once on one connection, so that answers meet full windows and wait for each other.
async fn complete(shape: Shape) {
    let site = Site::start(shape, "", "client_write_timeout = \"20s\"").await;
    let mut client = Http2::open(&site.stack.edge.http).await;
    for kind in Kind::ALL {
        let unread = site.ask(&mut client, kind, false).await;
        assert_complete(kind, unread).await;
    }
    let mut waiting = Vec::new();
    for kind in [Kind::Whole, Kind::Sized, Kind::Stream] {
        waiting.push((kind, site.ask(&mut client, kind, false).await));
    }
    futures_util::future::join_all(waiting.into_iter().map(|(k, u)| assert_complete(k, u))).await;
    site.assert_no_stall().await;
    let page = site.stack.edge.scrape().await;
    let success = requests(&page, "success");
    assert_eq!(success, 7.0);
    let all = page.sum("iop_edge_requests_total", &[("endpoint", "chat")]);
    assert_eq!(all, success, "and nothing else");
}

#[test]
fn embedded_complete_answers_over_http2_end_cleanly() {
    run(60, complete(Shape::Embedded));
}

#[test]
fn linked_complete_answers_over_http2_end_cleanly() {
    run(60, complete(Shape::Linked));
}
