//! Runs of the normalized path: the same answer from the node in the process and from a node at a link.

use iop_shared::execution::FailureCode;
use iop_shared::ids::{AttemptId, RunId};
use iop_shared::wire::event::{Message, RunEvent, RunRequest};
use iop_shared::wire::terminal::Terminal;

use super::*;

fn node() -> iop_node::Node {
    #[derive(serde::Deserialize)]
    struct File {
        providers: Vec<iop_shared::config::ProviderConfig>,
    }
    let toml = "[[providers]]\nid = \"p\"\nadapter = \"scripted\"\n\
                script = { t = { normalized = true, cut = { after_chunks = 4 }, fail_first = 2, chunks = 9 } }\n";
    let (file, source) = iop_shared::config::Source::parse::<File>("t.toml", toml).unwrap();
    let none = iop_node::config::ProcessResolver;
    let all = iop_node::ProviderSettings::resolve_all(file.providers, &source, &none).unwrap();
    iop_node::Node::new(NodeId::new("n1").unwrap(), &all, &prometheus::Registry::new()).unwrap()
}

/// Serves a node at the far end of a connection.
fn serve(node: iop_node::Node, io: DuplexStream) {
    let service = service_fn(move |request: Request<Incoming>| {
        let node = node.clone();
        async move { Ok::<_, Infallible>(node.handle(request).await) }
    });
    tasks::spawn(Kind::Session, "test_node", async move {
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .serve_connection(TokioIo::new(io), service);
        // How it ends is the other side's business.
        let _ = connection.await;
    });
}

fn request(messages: usize) -> RunRequest {
    let message = Message {
        role: "user".into(),
        content: "hello ".repeat(100),
    };
    RunRequest {
        endpoint: Endpoint::Chat,
        run_id: RunId(uuid::Uuid::from_u128(1)),
        attempt_id: AttemptId(uuid::Uuid::from_u128(2)),
        provider: ProviderId::new("p").unwrap(),
        target: "t".into(),
        response_stall_timeout_ms: 0,
        session_id: None,
        messages: vec![message; messages],
    }
}

/// Head, events and terminal of a run.
async fn run(session: &Session, messages: usize) -> (String, HeaderMap, Vec<RunEvent>, Option<Terminal>) {
    let response = session.run(&request(messages)).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap();
    let terminal = body.trailers().and_then(Terminal::from_trailers);
    let data = body.to_bytes();
    let lines = data.split(|b| *b == b'\n').filter(|l| !l.is_empty());
    let events = lines.map(|l| RunEvent::parse(l).unwrap()).collect();
    (parts.status.to_string(), parts.headers, events, terminal)
}

#[tokio::test]
async fn a_run_is_the_same_in_process_and_at_a_link() {
    let registry = registry();
    let linked_node = node();
    let (near, far) = tokio::io::duplex(1 << 16);
    serve(linked_node.clone(), far);
    let generation = registry.next_generation();
    let serving = Arc::clone(&registry);
    tasks::spawn(Kind::Session, "test_link", async move {
        carrier::serve(TokioIo::new(near), hello("n1", "a"), generation, &serving).await;
    });
    let lease = lease(&registry).await;
    assert_eq!(
        lease.execution_path(),
        iop_shared::execution::ExecutionPath::Normalized
    );
    let linked = lease.session();
    let embedded = Session::embedded(node(), registry.next_generation());
    // The first two attempts are cut, the third is whole; 100 KB go up each time.
    for attempt in 0..3 {
        let mut here = run(&embedded, 170).await;
        let mut there = run(linked, 170).await;
        for answer in [&mut here, &mut there] {
            // hyper's own, at a link.
            answer.1.remove("date");
        }
        assert_eq!(here, there);
        let (_, _, events, terminal) = here;
        assert_eq!(events.last(), terminal.as_ref().map(RunEvent::terminal).as_ref());
        match terminal.unwrap() {
            Terminal::Error(e) => assert!(attempt < 2 && e.code == FailureCode::ProviderCut),
            Terminal::Complete { .. } => assert_eq!(attempt, 2),
            Terminal::Cancelled => panic!("cancelled"),
        }
    }
    // A body that is dropped ends the run at the node.
    drop(linked.run(&request(1)).await.unwrap());
    tokio::time::timeout(PATIENCE, linked_node.drained())
        .await
        .unwrap();
}
