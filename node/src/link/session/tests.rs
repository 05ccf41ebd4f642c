//! A link over an in-memory socket: hyper's HTTP/2 client on the other side is the edge.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use iop_shared::wire::{h2, headers};
use tokio::io::DuplexStream;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::super::activity::Watched;
use super::*;
use crate::tasks::{self, Kind};
use crate::testing::{Stub, node, openai, request, tunnel, whole};

type Edge = SendRequest<Full<Bytes>>;

/// A link between a node and an edge; its end arrives in `ended`.
struct Link {
    edge: Edge,
    close: watch::Sender<bool>,
    ended: tokio::sync::oneshot::Receiver<Ended>,
    /// Aborted, both sides see their sockets close.
    path: JoinHandle<()>,
    /// Turned true, the path swallows everything and closes nothing.
    freeze: watch::Sender<bool>,
}

fn serve_on(node: &Node, io: DuplexStream) -> (watch::Sender<bool>, tokio::sync::oneshot::Receiver<Ended>) {
    let (close, asked) = watch::channel(false);
    let (tx, ended) = tokio::sync::oneshot::channel();
    let node = node.clone();
    tasks::spawn(Kind::Session, "link", async move {
        let activity = Activity::new();
        let io = TokioIo::new(Watched::new(io, activity.clone()));
        let _ = tx.send(serve(&node, io, &activity, asked).await);
    });
    (close, ended)
}

async fn link(node: &Node) -> Link {
    let (near, mut middle) = tokio::io::duplex(64 << 10);
    let (mut other_middle, far) = tokio::io::duplex(64 << 10);
    let (freeze, mut frozen) = watch::channel(false);
    let path = tasks::spawn(Kind::Session, "path", async move {
        let stopped = tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut middle, &mut other_middle) => false,
            stopped = async { frozen.wait_for(|f| *f).await.is_ok() } => stopped,
        };
        if stopped {
            std::future::pending::<()>().await;
        }
    });
    let (close, ended) = serve_on(node, near);
    let (edge, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(h2::EDGE_STREAM_WINDOW)
        .initial_connection_window_size(h2::EDGE_CONNECTION_WINDOW)
        .max_concurrent_reset_streams(h2::EDGE_CONCURRENT_RESET_STREAMS)
        .max_local_error_reset_streams(None)
        .initial_max_send_streams(None)
        .max_header_list_size(h2::MAX_HEADER_LIST)
        .keep_alive_interval(h2::PING_INTERVAL)
        .keep_alive_timeout(h2::PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(far))
        .await
        .unwrap();
    tasks::spawn(Kind::Session, "edge", async move {
        let _ = connection.await;
    });
    Link {
        edge,
        close,
        ended,
        path,
        freeze,
    }
}

#[tokio::test]
async fn two_tunnels_of_two_providers_share_a_link() {
    let stub = Stub::start().await;
    let node = node(&format!(
        "{}{}",
        openai("a", &stub.url, ""),
        openai("b", &stub.url, "")
    ));
    let mut link = link(&node).await;
    let (mut e1, mut e2) = (link.edge.clone(), link.edge.clone());
    let (a, b) = tokio::join!(
        async { whole(e1.send_request(tunnel("a", "stream", "{}")).await.unwrap()).await },
        async { whole(e2.send_request(tunnel("b", "", "{}")).await.unwrap()).await },
    );
    assert_eq!(
        (a.code(), &a.data[..]),
        ("complete", &b"data: a\n\ndata: b\n\n"[..])
    );
    assert_eq!((b.code(), &b.data[..]), ("complete", &b"{\"ok\":true}"[..]));
    assert_eq!(b.headers[headers::CONTENT_LENGTH], "11");
    assert!(!b.headers.contains_key("content-length") && !b.headers.contains_key("date"));
    // A failure of the node's own: a head, no data, the trailers.
    let refused = whole(link.edge.send_request(tunnel("nobody", "", "{}")).await.unwrap()).await;
    assert_eq!((refused.status, refused.code()), (200, "provider_missing"));
    let cut = whole(
        link.edge
            .send_request(tunnel("a", "cut-stream", "{}"))
            .await
            .unwrap(),
    )
    .await;
    assert_eq!(
        (cut.code(), &cut.data[..]),
        ("provider_cut", &b"data: begun\n\n"[..])
    );
    let lie = whole(link.edge.send_request(tunnel("a", "short", "{}")).await.unwrap()).await;
    assert_eq!((lie.code(), &lie.data[..]), ("provider_cut", &b"half"[..]));
}

#[tokio::test]
async fn a_cancel_reaches_the_provider_before_and_after_its_head() {
    let stub = Stub::start().await;
    let node = node(&openai("p", &stub.url, ""));
    let mut link = link(&node).await;
    let answer = link
        .edge
        .send_request(tunnel("p", "endless", "{}"))
        .await
        .unwrap();
    let mut body = answer.into_body();
    assert_eq!(
        body.frame().await.unwrap().unwrap().into_data().unwrap(),
        "data: begun\n\n"
    );
    drop(body);
    stub.hung_up(1, Duration::from_secs(1)).await;
    {
        let mut prefill = Box::pin(link.edge.send_request(tunnel("p", "hang", "{}")));
        tokio::select! {
            _ = &mut prefill => panic!("answered"),
            () = stub.arrived(2) => {}
        }
    }
    stub.hung_up(2, Duration::from_secs(1)).await;
    node.drained().await;
}

#[tokio::test]
async fn a_lost_link_ends_what_it_carried() {
    let stub = Stub::start().await;
    let node = node(&openai("p", &stub.url, ""));
    let mut link = link(&node).await;
    let streaming = link
        .edge
        .send_request(tunnel("p", "endless", "{}"))
        .await
        .unwrap();
    link.path.abort();
    assert_eq!(link.ended.await.unwrap(), Ended::Lost);
    stub.hung_up(1, Duration::from_secs(1)).await;
    node.drained().await;
    drop(streaming);
}

#[tokio::test]
async fn five_thousand_cancels_at_once_leave_the_link_whole() {
    let node = node(
        "[[providers]]\nid = \"s\"\nadapter = \"scripted\"\ncapacity = 6000\n\
         script = { m = { stall = \"after_headers\" }, ok = {} }\n",
    );
    let mut link = link(&node).await;
    let all = (0..5000).map(|_| {
        let mut edge = link.edge.clone();
        async move {
            edge.send_request(tunnel("s", "", "{\"stream\":true}"))
                .await
                .unwrap()
        }
    });
    let held = futures_util::future::join_all(all).await;
    assert_eq!(node.in_flight(), 5000);
    drop(held);
    tokio::time::timeout(Duration::from_secs(5), node.drained())
        .await
        .unwrap();
    let ask = crate::testing::tunnel_with("s", "", "{}", |h| h.target = "ok".into());
    assert_eq!(
        whole(link.edge.send_request(ask).await.unwrap()).await.code(),
        "complete"
    );
}

#[tokio::test]
async fn providers_that_never_read_do_not_stop_the_others() {
    let stub = Stub::start().await;
    let node = node(&openai("p", &stub.url, "capacity = 64"));
    let link = link(&node).await;
    let large = Bytes::from(vec![b'x'; 40 << 20]);
    let stuck: Vec<_> = (0..8)
        .map(|_| {
            let (mut edge, body) = (link.edge.clone(), large.clone());
            tasks::AbortOnDrop(tasks::spawn(Kind::Session, "stuck", async move {
                let _ = edge.send_request(tunnel("p", "never-read", body)).await;
            }))
        })
        .collect();
    stub.arrived(8).await;
    for batch in 0..10 {
        let all = (0..20).map(|_| {
            let mut edge = link.edge.clone();
            async move {
                whole(
                    edge.send_request(tunnel("p", "", vec![b'y'; 8 << 10]))
                        .await
                        .unwrap(),
                )
                .await
            }
        });
        let all = tokio::time::timeout(Duration::from_secs(5), futures_util::future::join_all(all)).await;
        let all = all.unwrap_or_else(|_| panic!("batch {batch} hangs"));
        assert!(all.iter().all(|a| a.code() == "complete"));
    }
    assert_eq!(node.in_flight(), 8);
    drop(stuck);
    tokio::time::timeout(Duration::from_secs(5), node.drained())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_large_upload_arrives_whole() {
    let stub = Stub::start().await;
    let node = node(&openai("p", &stub.url, ""));
    let mut link = link(&node).await;
    let body: Vec<u8> = (0..40u32 << 20).map(|i| (i % 251) as u8).collect();
    let answer = whole(
        link.edge
            .send_request(tunnel("p", "", body.clone()))
            .await
            .unwrap(),
    )
    .await;
    assert_eq!(answer.code(), "complete");
    let (head, got) = stub.last();
    assert!(
        head.to_ascii_lowercase().contains("content-length: 41943040\r\n"),
        "{head}"
    );
    assert!(got == body);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_leaves_finishes_its_streams_first() {
    let node = node(
        "[[providers]]\nid = \"s\"\nadapter = \"scripted\"\nscript = { m = { reply = \"abc\", chunks = 3, chunk_delay = \"10s\" } }\n",
    );
    let mut link = link(&node).await;
    let mut session = link
        .edge
        .send_request(request("GET", "/link/v1/session", ""))
        .await
        .unwrap()
        .into_body();
    session.frame().await.unwrap().unwrap();
    let streaming = link
        .edge
        .send_request(tunnel("s", "", "{\"stream\":true}"))
        .await
        .unwrap();
    let begun = Instant::now();
    link.close.send_replace(true);
    let answer = whole(streaming).await;
    assert_eq!((answer.code(), begun.elapsed().as_secs()), ("complete", 20));
    assert_eq!(link.ended.await.unwrap(), Ended::Closed);
    // The session stream ended with its link, properly.
    while let Some(frame) = session.frame().await {
        frame.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_draining_edge_gets_its_streams_and_then_the_end() {
    let node = node(
        "[[providers]]\nid = \"s\"\nadapter = \"scripted\"\nscript = { m = { reply = \"abc\", chunks = 3, chunk_delay = \"10s\" } }\n",
    );
    let (mut draining, mut other) = (link(&node).await, link(&node).await);
    let session = draining
        .edge
        .send_request(request("GET", "/link/v1/session", ""))
        .await
        .unwrap();
    let streaming = draining
        .edge
        .send_request(tunnel("s", "", "{\"stream\":true}"))
        .await
        .unwrap();
    let told = draining
        .edge
        .send_request(request("POST", "/link/v1/drain", ""))
        .await
        .unwrap();
    assert_eq!(told.status(), 200);
    assert!(draining.ended.try_recv().is_err());
    assert_eq!(whole(streaming).await.code(), "complete");
    assert_eq!(draining.ended.await.unwrap(), Ended::Closed);
    drop(session);
    // Another edge's link is not touched.
    assert_eq!(
        whole(other.edge.send_request(tunnel("s", "", "{}")).await.unwrap())
            .await
            .code(),
        "complete"
    );
    assert!(other.ended.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_silent_edge_is_dead_within_15_s_whether_idle_or_blocked() {
    for busy in [false, true] {
        let node = node(
            "[[providers]]\nid = \"s\"\nadapter = \"scripted\"\nscript = { m = { stall = \"after_headers\" } }\n",
        );
        let mut link = link(&node).await;
        let session = link
            .edge
            .send_request(request("GET", "/link/v1/session", ""))
            .await
            .unwrap();
        let held = if busy {
            Some(
                link.edge
                    .send_request(tunnel("s", "", "{\"stream\":true}"))
                    .await
                    .unwrap(),
            )
        } else {
            None
        };
        // A living link is kept: half a minute of pings first.
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert!(link.ended.try_recv().is_err());
        let begun = Instant::now();
        link.freeze.send_replace(true);
        let ended = link.ended.await.unwrap();
        assert!(
            begun.elapsed() <= Duration::from_secs(15),
            "{:?}",
            begun.elapsed()
        );
        assert_ne!(ended, Ended::Closed, "busy: {busy}");
        node.drained().await;
        drop((session, held));
    }
}
