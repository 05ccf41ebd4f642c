//! SIGTERM: what runs is finished, what is new is refused, then the process goes (G45).

use std::sync::Arc;
use std::time::Duration;

use iop_tests::client::{Client, Conn};
use iop_tests::config::{Provider, Setup};
use iop_tests::provider::Stub;
use iop_tests::stack::{Shape, Stack};
use iop_tests::{eventually, fixtures, run, within};
use tokio::sync::watch;

const CHAT: &str = "/v1/chat/completions";
const SOON: Duration = Duration::from_secs(5);

/// Streams begin at once and end when the gate opens.
async fn gated() -> (Arc<Stub>, watch::Sender<bool>) {
    let (open, gate) = watch::channel(false);
    let stub = Stub::start(move |mut ex| {
        let mut gate = gate.clone();
        async move {
            ex.sse().await?;
            ex.data(&fixtures::text_chunk("begun")).await?;
            ex.until(async { gate.wait_for(|open| *open).await.is_ok() })
                .await?;
            ex.data(&fixtures::text_chunk("finished")).await?;
            ex.data(&fixtures::stop_chunk()).await?;
            ex.data("[DONE]").await?;
            ex.end().await
        }
    })
    .await;
    (Arc::new(stub), open)
}

fn setup(stub: &Stub) -> Setup {
    Setup::of(Provider::openai("up", &stub.url(), &["m"])).edge("queue", "max_wait = \"1s\"")
}

async fn begin(stack: &Stack) -> Conn {
    let mut conn = stack.client().open(CHAT, &fixtures::chat("m", "hi", true)).await;
    assert_eq!(conn.head().await.unwrap().status, 200);
    conn.until("begun").await;
    conn
}

async fn finish(mut conn: Conn) {
    let rest = String::from_utf8_lossy(&conn.body().await.unwrap()).into_owned();
    assert!(conn.complete());
    assert!(
        rest.contains("finished") && rest.ends_with("data: [DONE]\n\n"),
        "{rest}"
    );
}

async fn readyz(client: &Client, status: u16) {
    eventually(&format!("/readyz {status}"), SOON, || async {
        match client.try_request("GET", "/readyz", &[], b"").await {
            Ok(answer) if answer.status() == status => Ok(()),
            Ok(answer) => Err(format!("{}", answer.status())),
            Err(e) => Err(e.to_string()),
        }
    })
    .await;
}

async fn edge_drains(shape: Shape) {
    let (stub, open) = gated().await;
    let mut stack = Stack::start(shape, setup(&stub)).await;
    let client = stack.client();
    readyz(&client, 200).await;
    let stream = begin(&stack).await;
    // An idle keep-alive connection must not hold the process.
    let mut idle = Conn::open(&client.addr).await.unwrap();
    idle.request("GET", "/livez", &[], b"").await.unwrap();
    assert_eq!(idle.answer().await.unwrap().status(), 200);

    stack.edge.process.signal("TERM");
    readyz(&client, 503).await;
    assert_eq!(
        client.get("/livez").await.status(),
        200,
        "it is alive, only not ready"
    );
    for streaming in [false, true] {
        let refused = client.post(CHAT, &fixtures::chat("m", "hi", streaming)).await;
        assert_eq!(refused.status(), 503, "{}", refused.text());
        assert!(!refused.error_code().is_empty());
    }
    assert_eq!(stub.received().len(), 1, "nothing new reached the provider");
    assert!(stack.edge.process.running());
    open.send_replace(true);
    finish(stream).await;
    let status = stack.edge.process.exit(SOON).await;
    assert_eq!(status.code(), Some(0), "{}", stack.edge.process.log());
}

#[test]
fn embedded_edge_finishes_its_streams_and_refuses_new_ones() {
    run(60, edge_drains(Shape::Embedded));
}

#[test]
fn linked_edge_finishes_its_streams_and_refuses_new_ones() {
    run(60, edge_drains(Shape::Linked));
}

#[test]
fn node_finishes_its_streams_and_takes_no_new_ones() {
    run(60, async {
        let (stub, open) = gated().await;
        let mut stack = Stack::start(Shape::Linked, setup(&stub)).await;
        let stream = begin(&stack).await;
        stack.nodes[0].process.signal("TERM");
        eventually("the node is seen draining", SOON, || async {
            let nodes = stack.edge.admin("nodes").await;
            let node = nodes
                .iter()
                .find(|n| n["id"] == "n1")
                .cloned()
                .unwrap_or_default();
            if node["state"] == "draining" {
                Ok(())
            } else {
                Err(node.to_string())
            }
        })
        .await;
        let refused = within("a refusal", SOON, stack.chat("m", "hi")).await;
        assert_eq!(refused.status(), 503, "{}", refused.text());
        assert!(refused.header("retry-after").is_some());
        assert_eq!(stub.received().len(), 1);
        open.send_replace(true);
        finish(stream).await;
        let status = stack.nodes[0].process.exit(SOON).await;
        assert_eq!(status.code(), Some(0), "{}", stack.nodes[0].process.log());
        eventually("the node is gone", SOON, || async {
            let nodes = stack.edge.admin("nodes").await;
            if nodes.iter().all(|n| n["embedded"] == true) {
                Ok(())
            } else {
                Err(format!("{nodes:?}"))
            }
        })
        .await;
        assert_eq!(stack.edge.models().await, Vec::<String>::new());
        readyz(&stack.client(), 200).await;
    });
}

#[test]
fn with_another_node_a_draining_one_is_not_noticed() {
    run(60, async {
        let (stub, open) = gated().await;
        open.send_replace(true);
        let setup = setup(&stub).nodes(&["n1", "n2"]).model("pub", "up", "m");
        let mut stack = Stack::start(Shape::Linked, setup).await;
        stack.nodes[0].process.signal("TERM");
        let client = stack.client();
        let body = fixtures::chat("pub", "hi", true);
        let status = {
            let exit = stack.nodes[0].process.exit(SOON);
            tokio::pin!(exit);
            loop {
                tokio::select! {
                    biased;
                    status = &mut exit => break status,
                    answer = client.post(CHAT, &body) => {
                        assert_eq!((answer.status(), answer.complete), (200, true), "{}", answer.text());
                    }
                }
            }
        };
        assert_eq!(status.code(), Some(0));
        let answer = client.post(CHAT, &fixtures::chat("pub", "hi", true)).await;
        assert!(answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
    });
}

#[test]
fn a_second_signal_ends_a_drain_at_once() {
    run(60, async {
        let (stub, _open) = gated().await;
        let mut stack = Stack::start(Shape::Linked, setup(&stub)).await;
        let _stream = begin(&stack).await;
        stack.edge.process.signal("TERM");
        readyz(&stack.client(), 503).await;
        assert!(stack.edge.process.running());
        stack.edge.process.signal("TERM");
        stack.edge.process.exit(Duration::from_secs(2)).await;
        stack.nodes[0].process.signal("TERM");
        stack.nodes[0].process.signal("TERM");
        stack.nodes[0].process.exit(SOON).await;
    });
}

#[test]
fn a_drain_has_a_deadline() {
    run(60, async {
        let (stub, _open) = gated().await;
        let setup = setup(&stub)
            .edge("server", "drain_timeout = \"1s\"")
            .node("node", "drain_timeout = \"1s\"");
        let mut stack = Stack::start(Shape::Linked, setup).await;
        let mut stream = begin(&stack).await;
        stack.nodes[0].process.signal("TERM");
        stack.nodes[0].process.exit(SOON).await;
        let rest = String::from_utf8_lossy(&stream.body().await.unwrap()).into_owned();
        assert!(rest.contains("\"error\"") && !rest.contains("[DONE]"), "{rest}");
        stub.hung_up(0, Duration::from_secs(1)).await;

        let mut stack = Stack::start(Shape::Embedded, stack.setup.clone()).await;
        let mut stream = begin(&stack).await;
        stack.edge.process.signal("TERM");
        stack.edge.process.exit(SOON).await;
        let rest = String::from_utf8_lossy(&stream.body().await.unwrap()).into_owned();
        assert!(!rest.contains("[DONE]"), "{rest}");
        stub.hung_up(1, Duration::from_secs(1)).await;
    });
}

#[test]
fn idle_processes_go_at_once() {
    run(60, async {
        let (stub, _open) = gated().await;
        let mut stack = Stack::start(Shape::Linked, setup(&stub)).await;
        stack.edge.process.signal("TERM");
        assert_eq!(
            stack.edge.process.exit(Duration::from_secs(3)).await.code(),
            Some(0)
        );
        // The node, now redialing, goes as well.
        stack.nodes[0].process.signal("TERM");
        assert_eq!(
            stack.nodes[0].process.exit(Duration::from_secs(3)).await.code(),
            Some(0)
        );
    });
}

#[test]
fn a_30_s_stream_outlives_both_signals() {
    run(90, async {
        let reply = vec!["tick"; 120].join(" ");
        let script =
            format!(r#"{{ "long" = {{ reply = "{reply}", chunks = 120, chunk_delay = "250ms" }} }}"#);
        let setup =
            Setup::of(Provider::scripted("up", &["long"], &script)).edge("queue", "max_wait = \"1s\"");
        let mut stack = Stack::start(Shape::Linked, setup).await;
        let mut stream = stack
            .client()
            .open(CHAT, &fixtures::chat("long", "hi", true))
            .await;
        assert_eq!(stream.head().await.unwrap().status, 200);
        let started = std::time::Instant::now();
        assert!(stream.piece().await.unwrap().is_some());
        stack.nodes[0].process.signal("TERM");
        stack.edge.process.signal("TERM");
        readyz(&stack.client(), 503).await;
        let refused = stack.chat("long", "hi").await;
        assert_eq!(refused.status(), 503, "{}", refused.text());
        let rest = String::from_utf8_lossy(&stream.body().await.unwrap()).into_owned();
        assert!(stream.complete() && rest.ends_with("data: [DONE]\n\n"), "{rest}");
        assert!(
            started.elapsed() >= Duration::from_secs(25),
            "the stream was long: {:?}",
            started.elapsed()
        );
        assert_eq!(stack.edge.process.exit(SOON).await.code(), Some(0));
        assert_eq!(stack.nodes[0].process.exit(SOON).await.code(), Some(0));
    });
}
