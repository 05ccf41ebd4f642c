//! Whole stalls: the node asked as an edge asks it, scripted providers in paused time and real sockets in real time.

use std::sync::Arc;
use std::time::Duration;

use iop_shared::execution::liveness::MAX_SAFE_STALL_TIMEOUT_MS;
use iop_shared::execution::{
    AttemptFence, AttemptResult, Endpoint, ExecutionPath, FailureCode, LivenessClassification,
};
use iop_shared::wire::headers;
use iop_shared::wire::terminal::{StallFailure, Terminal};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::Node;
use crate::metrics::StallRow;
use crate::testing::{Stub, Whole, node, openai, request, tunnel, tunnel_with, whole};

fn scripted(script: &str) -> Node {
    node(&format!(
        "[[providers]]\nid = \"s\"\nadapter = \"scripted\"\ncapacity = 1\nscript = {{ m = {{ {script} }} }}\n"
    ))
}

/// A streamed request that stalls after that many milliseconds.
fn ask(
    provider: &str,
    what: &'static str,
    stall_ms: i64,
) -> http::Request<http_body_util::Full<bytes::Bytes>> {
    tunnel_with(provider, what, "{\"stream\":true}", |h| {
        h.response_stall_timeout_ms = stall_ms;
    })
}

fn failure(answer: &Whole) -> StallFailure {
    let Some(Terminal::Error(e)) = &answer.terminal else {
        panic!("{:?}", answer.terminal)
    };
    assert_eq!(e.code, FailureCode::ResponseStalled, "{}", e.message);
    StallFailure::clone(e.failure.as_ref().unwrap())
}

fn counted(node: &Node, classification: LivenessClassification, fence: AttemptFence) -> (u64, u64, u64) {
    let path = ExecutionPath::ProviderTunnel;
    let row = StallRow {
        path,
        classification,
        fence,
    };
    let metrics = node.metrics();
    let text = String::from_utf8(metrics.encode().unwrap()).unwrap();
    let all = text
        .lines()
        .filter(|l| l.starts_with("iop_node_response_stalls_total{"))
        .filter_map(|l| l.rsplit_once(' '))
        .map(|(_, n)| n.parse::<u64>().unwrap())
        .sum();
    let labels = (path, classification.health(), classification, fence);
    (
        metrics.stalls.at(labels).get(),
        metrics.stall_duration.at(row).get_sample_count(),
        all,
    )
}

#[tokio::test(start_paused = true)]
async fn a_scripted_stall_anywhere_ends_with_the_same_terminal() {
    for (stall, origin, begins) in [
        ("\"before_headers\"", "node", ""),
        ("\"after_headers\"", "provider", ""),
        ("\"after_preamble\"", "provider", "data: "),
        ("{ after_chunks = 3 }", "provider", "data: "),
    ] {
        let node = scripted(&format!("stall = {stall}"));
        let begun = Instant::now();
        let answer = whole(node.handle(ask("s", "", 45_000)).await).await;
        assert_eq!(begun.elapsed().as_secs(), 45, "{stall}");
        assert_eq!(
            (answer.status, &answer.headers[headers::ORIGIN]),
            (200, &origin.parse().unwrap())
        );
        assert!(answer.data.starts_with(begins.as_bytes()), "{stall}");
        assert_eq!(answer.data.is_empty(), begins.is_empty(), "{stall}");
        let stalled = failure(&answer);
        assert_eq!(
            (
                stalled.attempt_fence,
                stalled.liveness_classification,
                stalled.health_observation_seq
            ),
            (
                AttemptFence::Confirmed,
                LivenessClassification::RequestStalled,
                Some(1)
            )
        );
        assert_eq!(
            counted(
                &node,
                LivenessClassification::RequestStalled,
                AttemptFence::Confirmed
            ),
            (1, 1, 1)
        );
        assert_eq!((node.in_flight(), node.metrics().in_flight.get()), (0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_ignores_its_caller_is_not_fenced_but_its_place_on_the_node_is_free() {
    let node = scripted("stall = \"before_headers\", ignores_cancel = true, probe = \"missing\"");
    let begun = Instant::now();
    let answer = whole(node.handle(ask("s", "", 1000)).await).await;
    // The grace is waited for, and no longer.
    assert_eq!(begun.elapsed().as_secs(), 3);
    let stalled = failure(&answer);
    assert_eq!(
        (stalled.attempt_fence, stalled.provider_health.as_str()),
        (AttemptFence::Unconfirmed, "unavailable")
    );
    assert_eq!(node.in_flight(), 0);
    // The next one waits for the engine without holding anything: silence again, and nothing to fence.
    let stalled = failure(&whole(node.handle(ask("s", "", 1000)).await).await);
    assert_eq!(
        (stalled.attempt_fence, stalled.health_observation_seq),
        (AttemptFence::Confirmed, Some(2))
    );
}

#[tokio::test(start_paused = true)]
async fn zero_is_the_default_timeout_and_a_lively_answer_outlives_it() {
    let node = scripted("stall = \"before_headers\"");
    let begun = Instant::now();
    failure(&whole(node.handle(ask("s", "", 0)).await).await);
    assert_eq!(begun.elapsed().as_secs(), 300);

    let node = scripted("reply = \"abcdefghij\", chunks = 10, chunk_delay = \"40s\", first_delay = \"44s\"");
    for stall_ms in [45_000, MAX_SAFE_STALL_TIMEOUT_MS] {
        let begun = Instant::now();
        let answer = whole(node.handle(ask("s", "", stall_ms)).await).await;
        assert_eq!((answer.code(), begun.elapsed().as_secs()), ("complete", 404));
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_before_the_head_is_a_stall_only_if_it_was_claimed() {
    let node = scripted("stall = \"before_headers\", probe = \"hang\"");
    for (leaves_s, stalls) in [(9, 0), (12, 1)] {
        let handle = node.handle(ask("s", "", 10_000));
        let left = tokio::time::timeout(Duration::from_secs(leaves_s), handle).await;
        assert!(left.is_err());
        assert_eq!((node.in_flight(), node.metrics().in_flight.get()), (0, 0));
        tokio::time::sleep(Duration::from_secs(10)).await;
        let (_, _, all) = counted(
            &node,
            LivenessClassification::HealthUnknown,
            AttemptFence::Confirmed,
        );
        assert_eq!(all, stalls);
    }
    let attempts = |result| node.metrics().attempts.at((Endpoint::Chat, result)).get();
    assert_eq!(
        (
            attempts(AttemptResult::Cancelled),
            attempts(AttemptResult::ResponseStalled)
        ),
        (1, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn stalls_and_capabilities_share_one_sequence_per_session() {
    let node = node(
        "[[providers]]\nid = \"s\"\nadapter = \"scripted\"\nscript = { m = { stall = \"after_headers\" } }\n",
    );
    let capabilities = async {
        let command = request(
            "POST",
            "/link/v1/commands/capabilities",
            "{\"provider\":\"s\",\"target\":\"m\"}",
        );
        let answer = whole(node.handle(command).await).await;
        let json: serde_json::Value = serde_json::from_slice(&answer.data).unwrap();
        json["health_observation_seq"].as_u64().unwrap()
    };
    let stall = async || {
        let answer = whole(node.handle(ask("s", "", 1000)).await).await;
        failure(&answer).health_observation_seq.unwrap()
    };
    let (first, a, b, c) = tokio::join!(capabilities, stall(), stall(), stall());
    let mut others = [a, b, c];
    others.sort_unstable();
    assert_eq!((first, others), (1, [2, 3, 4]));
}

/// One provider over loopback; its stall timeout is real time.
const STALL_MS: i64 = 200;

#[tokio::test]
async fn a_silent_socket_is_closed_within_the_grace_and_the_fence_is_seen() {
    let stub = Stub::start().await;
    let node = node(&openai("p", &stub.url, ""));
    for (n, what, origin) in [(1, "hang", "node"), (2, "endless", "provider")] {
        let answer = whole(node.handle(ask("p", what, STALL_MS)).await).await;
        stub.hung_up(n, Duration::from_secs(2)).await;
        let stalled = failure(&answer);
        assert_eq!(
            (
                stalled.attempt_fence,
                stalled.liveness_classification,
                answer.headers[headers::ORIGIN].to_str().unwrap()
            ),
            (
                AttemptFence::Confirmed,
                LivenessClassification::RequestStalled,
                origin
            ),
            "{what}"
        );
        assert_eq!(
            (stalled.adapter.as_str(), stalled.target.as_str()),
            ("openai", "m")
        );
        assert_eq!(answer.data, if origin == "node" { "" } else { "data: begun\n\n" });
    }
    assert_eq!(
        counted(
            &node,
            LivenessClassification::RequestStalled,
            AttemptFence::Confirmed
        ),
        (2, 2, 2)
    );
    assert_eq!(node.in_flight(), 0);
}

#[tokio::test]
async fn a_stall_on_a_connection_used_before_is_fenced_too() {
    let stub = Stub::start().await;
    let node = node(&openai("p", &stub.url, ""));
    for _ in 0..3 {
        assert_eq!(
            whole(node.handle(tunnel("p", "", "{}")).await).await.code(),
            "complete"
        );
    }
    let answer = whole(node.handle(ask("p", "hang", STALL_MS)).await).await;
    assert_eq!(failure(&answer).attempt_fence, AttemptFence::Confirmed);
    stub.hung_up(1, Duration::from_secs(2)).await;
}

#[tokio::test]
async fn a_provider_that_never_reads_its_request_is_fenced_too() {
    let stub = Stub::start().await;
    let node = node(&openai("p", &stub.url, ""));
    let big = tunnel_with("p", "never-read", vec![b'x'; 32 << 20], |h| {
        h.response_stall_timeout_ms = STALL_MS;
    });
    let answer = whole(node.handle(big).await).await;
    assert_eq!(failure(&answer).attempt_fence, AttemptFence::Confirmed);
}

#[tokio::test]
async fn the_probe_tells_a_missing_target_from_a_refusal_and_a_busy_engine_from_a_dead_one() {
    let stub = Stub::start().await;
    let toml = openai("p", &stub.url, "").replace("[\"m\"]", "[\"m\", \"z\"]");
    for (target, lists, health, least) in [
        ("m", "", "available", Duration::ZERO),
        ("z", "", "unavailable", Duration::ZERO),
        ("m", "fails", "unknown", Duration::ZERO),
        ("m", "cut-before-head", "unknown", Duration::ZERO),
        // A single-slot engine that is busy with the stalled request answers nobody.
        ("m", "hang", "unknown", Duration::from_secs(5)),
    ] {
        stub.lists(lists);
        let node = node(&toml);
        let begun = std::time::Instant::now();
        let stalling = tunnel_with("p", "endless", "{}", |h| {
            h.response_stall_timeout_ms = STALL_MS;
            h.target = target.into();
        });
        let stalled = failure(&whole(node.handle(stalling).await).await);
        assert_eq!(
            (stalled.provider_health.as_str(), stalled.attempt_fence),
            (health, AttemptFence::Confirmed),
            "{target} {lists}"
        );
        assert!(begun.elapsed() >= least, "{lists} {:?}", begun.elapsed());
    }
}

/// Everything that is logged while it is set.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_stall_is_one_log_line_of_exactly_these_fields() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_current_span(false)
        .with_span_list(false)
        .with_writer(move || writer.clone())
        .finish();
    let node = scripted("stall = \"before_headers\", probe = \"hang\", ignores_cancel = true");
    {
        let _set = tracing::subscriber::set_default(subscriber);
        failure(&whole(node.handle(ask("s", "", 1500)).await).await);
    }
    let text = String::from_utf8(log.0.lock().clone()).unwrap();
    let lines: Vec<serde_json::Map<String, serde_json::Value>> = text
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .filter(|l: &serde_json::Map<_, _>| l["message"] == "node_response_stall_observation")
        .collect();
    assert_eq!(lines.len(), 1, "{text}");
    let mut line = lines[0].clone();
    for own in ["timestamp", "level", "target", "message"] {
        assert!(line.remove(own).is_some(), "{own}");
    }
    assert!(line["idle_duration_ms"].as_u64().unwrap().abs_diff(1500) <= 2);
    line.remove("idle_duration_ms");
    assert_eq!(
        serde_json::Value::Object(line),
        serde_json::json!({
            "execution_path": "provider_tunnel",
            "provider_health": "unknown",
            "liveness_classification": "health_unknown",
            "attempt_fence": "unconfirmed",
        })
    );
}

/// An observer that breaks at every event.
struct Panics;

impl tracing::Subscriber for Panics {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        assert!(
            !event.metadata().target().starts_with("iop_node"),
            "an observer that fails"
        );
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[tokio::test(start_paused = true)]
async fn an_observer_that_panics_takes_nothing_from_the_terminal() {
    let node = scripted("stall = \"after_headers\"");
    let _set = tracing::subscriber::set_default(Panics);
    let stalled = failure(&whole(node.handle(ask("s", "", 1000)).await).await);
    assert_eq!(
        (
            stalled.attempt_fence,
            stalled.provider_health.as_str(),
            stalled.health_observation_seq
        ),
        (AttemptFence::Confirmed, "available", Some(1))
    );
    assert_eq!(node.in_flight(), 0);
}
