use std::time::Duration;

use http::Request;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use iop_shared::execution::{
    AttemptFence, AttemptResult, Endpoint, LivenessClassification, ProviderHealth, RuntimeEventKind,
};
use iop_shared::ids::{AttemptId, ProviderId, RunId};
use iop_shared::openai::usage::Usage;
use iop_shared::wire::RUNS_PATH;
use iop_shared::wire::event::{Message, RunEvent};
use iop_shared::wire::terminal::Terminal;

use super::*;
use crate::Node;
use crate::testing::{Whole, node, request, tunnel_with, whole};

/// A scripted provider `s` whose target `m` does as the script says by the normalized path; `t` takes tunnels.
fn scripted(script: &str) -> Node {
    scripted_with("", script)
}

fn scripted_with(more: &str, script: &str) -> Node {
    let comma = if script.is_empty() { "" } else { ", " };
    node(&format!(
        "[[providers]]\nid = \"s\"\nadapter = \"scripted\"\n{more}\n\
         script = {{ m = {{ normalized = true{comma}{script} }}, t = {{ {script} }} }}\n"
    ))
}

fn run_of(change: impl FnOnce(&mut RunRequest)) -> RunRequest {
    let mut run = RunRequest {
        endpoint: Endpoint::Responses,
        run_id: RunId(uuid::Uuid::from_u128(1)),
        attempt_id: AttemptId(uuid::Uuid::from_u128(2)),
        provider: ProviderId::new("s").unwrap(),
        target: "m".into(),
        response_stall_timeout_ms: 0,
        session_id: None,
        messages: vec![Message {
            role: "user".into(),
            content: "hello".into(),
        }],
    };
    change(&mut run);
    run
}

/// As an edge at a link asks.
async fn post(node: &Node, body: impl Into<Bytes>) -> Whole {
    let ask = request("POST", RUNS_PATH, body);
    whole(node.handle(ask).await).await
}

async fn run(node: &Node, change: impl FnOnce(&mut RunRequest)) -> Whole {
    post(node, run_of(change).to_json()).await
}

fn events(answer: &Whole) -> Vec<RunEvent> {
    assert!(answer.data.is_empty() || answer.data.ends_with(b"\n"));
    let lines = answer.data.split(|b| *b == b'\n').filter(|l| !l.is_empty());
    lines.map(|l| RunEvent::parse(l).unwrap()).collect()
}

fn kinds(answer: &Whole) -> Vec<&'static str> {
    events(answer).iter().map(|e| e.kind.as_str()).collect()
}

fn attempts(node: &Node, result: AttemptResult) -> u64 {
    node.metrics().attempts.at((Endpoint::Responses, result)).get()
}

#[tokio::test]
async fn a_run_is_its_events_then_one_terminal_twice_said() {
    let node = scripted("reply = \"abc\", chunks = 3");
    let linked = run(&node, |_| {}).await;
    let embedded = whole(node.run(run_of(|_| {})).await).await;
    for answer in [&linked, &embedded] {
        assert_eq!((answer.status, answer.code()), (200, "complete"));
        assert_eq!(answer.headers[headers::ORIGIN], "provider");
        assert_eq!(answer.headers[http::header::CONTENT_TYPE], "application/jsonl");
        let mut want = vec![RunEvent::new(RuntimeEventKind::Start)];
        want.extend(["a", "b", "c"].map(RunEvent::delta));
        want.push(RunEvent::usage(Usage {
            input: 2,
            output: 3,
            ..Usage::default()
        }));
        want.push(RunEvent::new(RuntimeEventKind::Complete));
        assert_eq!(events(answer), want);
    }
    assert_eq!(linked.data, embedded.data);
    assert_eq!(
        (node.in_flight(), attempts(&node, AttemptResult::Success)),
        (0, 2)
    );
    assert_eq!(node.advertisement().providers[0].normalized_targets, ["m"]);
}

#[tokio::test]
async fn every_check_has_its_code_and_comes_in_a_tunnels_order() {
    let node = scripted_with("endpoints = [\"responses\"]", "");
    for (name, body) in [
        ("empty", String::new()),
        ("no json", "{".into()),
        (
            "foreign member",
            run_of(|_| {}).to_json().replacen('{', "{\"x\":1,", 1),
        ),
        ("negative", run_of(|r| r.response_stall_timeout_ms = -1).to_json()),
        (
            "overflow",
            run_of(|r| r.response_stall_timeout_ms = i64::MAX).to_json(),
        ),
        (
            "before the provider",
            run_of(|r| {
                r.response_stall_timeout_ms = -1;
                r.provider = ProviderId::new("x").unwrap();
            })
            .to_json(),
        ),
    ] {
        let answer = post(&node, body).await;
        assert_eq!((answer.status, answer.code()), (200, "invalid_request"), "{name}");
        assert_eq!(answer.headers[headers::ORIGIN], "node", "{name}");
        assert!(answer.data.is_empty(), "{name}");
    }
    type Change = fn(&mut RunRequest);
    let changes: [(&str, Change); 4] = [
        ("provider_missing", |r| {
            r.provider = ProviderId::new("x").unwrap();
            r.target = "z".into();
        }),
        ("provider_unavailable", |r| r.endpoint = Endpoint::Chat),
        ("target_missing", |r| r.target = "z".into()),
        ("target_missing", |r| r.target = "t".into()),
    ];
    for (want, change) in changes {
        assert_eq!(run(&node, change).await.code(), want);
    }
    let by_tunnel = tunnel_with("s", "", "{}", |h| h.endpoint = Endpoint::Responses);
    assert_eq!(whole(node.handle(by_tunnel).await).await.code(), "target_missing");
    assert_eq!(
        node.metrics().refusals.at((FailureCode::InvalidRequest,)).get(),
        6
    );
    assert_eq!(node.metrics().refusals.at((FailureCode::TargetMissing,)).get(), 3);
    assert_eq!(node.in_flight(), 0);
    for method in ["GET", "DELETE"] {
        assert_eq!(
            whole(node.handle(request(method, RUNS_PATH, "")).await)
                .await
                .status,
            404
        );
    }
}

#[tokio::test]
async fn an_http_provider_takes_no_runs() {
    let node = node(&crate::testing::openai("s", "http://127.0.0.1:1/v1", ""));
    assert_eq!(run(&node, |_| {}).await.code(), "target_missing");
}

#[tokio::test]
async fn places_are_shared_with_tunnels_and_given_back_by_a_dropped_body_or_future() {
    let node = scripted_with("capacity = 2", "stall = \"after_headers\"");
    let streaming = node.run(run_of(|_| {})).await;
    let by_tunnel = tunnel_with("s", "", "{\"stream\":true}", |h| h.target = "t".into());
    let tunnelled = node.handle(by_tunnel).await;
    assert_eq!(run(&node, |_| {}).await.code(), "capacity");
    drop(streaming);
    drop(tunnelled);
    node.drained().await;
    assert_eq!(attempts(&node, AttemptResult::Cancelled), 1);
    {
        let silent = scripted("stall = \"before_headers\"");
        let mut waiting = Box::pin(silent.run(run_of(|_| {})));
        assert!(futures_util::poll!(&mut waiting).is_pending());
        assert_eq!(silent.in_flight(), 1);
        drop(waiting);
        assert_eq!(
            (silent.in_flight(), attempts(&silent, AttemptResult::Cancelled)),
            (0, 1)
        );
    }
}

#[tokio::test]
async fn a_drain_refuses_new_runs_and_waits_for_the_others() {
    let node = scripted("stall = \"after_headers\"");
    let running = node.run(run_of(|_| {})).await;
    node.set_draining(true);
    assert_eq!(run(&node, |_| {}).await.code(), "draining");
    let mut drained = Box::pin(node.drained());
    assert!(futures_util::poll!(&mut drained).is_pending());
    drop(running);
    drained.await;
}

#[tokio::test]
async fn an_upload_that_breaks_off_or_never_ends_is_an_invalid_request() {
    let node = scripted("");
    let upload = async |pieces: Vec<Result<Bytes, std::io::Error>>| {
        let frames = pieces.into_iter().map(|p| p.map(Frame::data));
        let body = StreamBody::new(futures_util::stream::iter(frames));
        let ask = Request::post(RUNS_PATH).body(body).unwrap();
        whole(node.handle(ask).await).await.code()
    };
    let text = Bytes::from(run_of(|_| {}).to_json());
    let reset = || Err(std::io::ErrorKind::ConnectionReset.into());
    assert_eq!(
        upload(vec![Ok(text.slice(..20)), Ok(text.slice(20..))]).await,
        "complete"
    );
    assert_eq!(
        upload(vec![Ok(text.slice(..20)), reset()]).await,
        "invalid_request"
    );
    let blanks = Bytes::from(vec![b' '; 1 << 20]);
    let mut pieces: Vec<_> = (0..=MAX_BODY >> 20).map(|_| Ok(blanks.clone())).collect();
    pieces.push(Ok(text));
    assert_eq!(upload(pieces).await, "invalid_request");
    assert_eq!(attempts(&node, AttemptResult::Success), 1);
}

#[tokio::test(start_paused = true)]
async fn a_stall_is_claimed_wherever_it_stands_and_said_by_line_and_trailers() {
    for (script, code, origin, said) in [
        ("stall = \"before_headers\"", "response_stalled", "node", ""),
        (
            "stall = \"after_headers\"",
            "response_stalled",
            "provider",
            "error",
        ),
        (
            "stall = \"after_preamble\"",
            "response_stalled",
            "provider",
            "start error",
        ),
        (
            "stall = { after_chunks = 2 }",
            "response_stalled",
            "provider",
            "start delta delta error",
        ),
    ] {
        let node = scripted(script);
        let begun = tokio::time::Instant::now();
        let answer = run(&node, |r| r.response_stall_timeout_ms = 20_000).await;
        assert_eq!(begun.elapsed().as_secs(), 20, "{script}");
        assert_eq!(
            (answer.code(), &answer.headers[headers::ORIGIN]),
            (code, &origin.parse().unwrap()),
            "{script}"
        );
        assert_eq!(kinds(&answer).join(" "), said, "{script}");
        let Some(terminal @ Terminal::Error(error)) = &answer.terminal else {
            panic!("{script}")
        };
        let failure = error.failure.as_ref().unwrap();
        assert_eq!(
            (
                failure.attempt_fence,
                failure.provider_health,
                failure.target.as_str()
            ),
            (AttemptFence::Confirmed, ProviderHealth::Available, "m"),
            "{script}"
        );
        assert_eq!(failure.health_observation_seq, Some(1));
        if let Some(last) = events(&answer).last() {
            assert_eq!(last, &RunEvent::terminal(terminal));
        }
        let row = (
            ExecutionPath::Normalized,
            ProviderHealth::Available,
            LivenessClassification::RequestStalled,
            AttemptFence::Confirmed,
        );
        assert_eq!(node.metrics().stalls.at(row).get(), 1, "{script}");
        assert_eq!(
            (node.in_flight(), attempts(&node, AttemptResult::ResponseStalled)),
            (0, 1),
            "{script}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn tunnels_and_runs_of_a_session_number_their_observations_together() {
    let node = scripted("stall = \"after_headers\"");
    let mut seen = Vec::new();
    for by_run in [true, false, true] {
        let answer = if by_run {
            run(&node, |r| r.response_stall_timeout_ms = 1000).await
        } else {
            let ask = tunnel_with("s", "", "{\"stream\":true}", |h| {
                h.target = "t".into();
                h.response_stall_timeout_ms = 1000;
            });
            whole(node.handle(ask).await).await
        };
        let Some(Terminal::Error(error)) = answer.terminal else {
            panic!("no stall")
        };
        seen.push(error.failure.unwrap().health_observation_seq);
    }
    assert_eq!(seen, [Some(1), Some(2), Some(3)]);
}

#[tokio::test(start_paused = true)]
async fn deltas_are_progress_and_a_start_is_none() {
    // Ten seconds of silence never come: a delta each six.
    let lively = scripted("reply = \"abcd\", chunks = 4, chunk_delay = \"6s\"");
    let answer = run(&lively, |r| r.response_stall_timeout_ms = 10_000).await;
    assert_eq!(answer.code(), "complete");
    // The head came after six seconds and says nothing about liveness: the stall is ten after admission.
    let late = scripted("first_delay = \"6s\", stall = \"after_preamble\"");
    let begun = tokio::time::Instant::now();
    let answer = run(&late, |r| r.response_stall_timeout_ms = 10_000).await;
    assert_eq!(
        (answer.code(), begun.elapsed().as_secs()),
        ("response_stalled", 10)
    );
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_ignores_its_end_leaves_the_fence_unconfirmed() {
    let node = scripted("stall = { after_chunks = 1 }, ignores_cancel = true");
    let answer = run(&node, |r| r.response_stall_timeout_ms = 1000).await;
    let Some(Terminal::Error(error)) = answer.terminal else {
        panic!("no stall")
    };
    assert_eq!(error.failure.unwrap().attempt_fence, AttemptFence::Unconfirmed);
}

#[tokio::test]
async fn cuts_and_refusals_are_typed_and_end_with_the_first_attempts() {
    let node = scripted("cut = { after_chunks = 2 }, fail_first = 1");
    let answer = run(&node, |_| {}).await;
    assert_eq!(answer.code(), "provider_cut");
    assert_eq!(kinds(&answer), ["start", "delta", "delta", "error"]);
    assert!(!events(&answer)[3].error.is_empty());
    assert_eq!(run(&node, |_| {}).await.code(), "complete");

    let node = scripted("status = 503, retry_after = \"2s\", fail_first = 1");
    let answer = run(&node, |_| {}).await;
    assert_eq!((answer.status, answer.code()), (503, "complete"));
    assert_eq!(answer.headers[headers::ORIGIN], "provider");
    assert_eq!(answer.headers["retry-after"], "2");
    assert!(answer.data.starts_with(b"{\"error\":"));
    assert_eq!(run(&node, |_| {}).await.code(), "complete");
    assert_eq!(node.in_flight(), 0);
}

#[tokio::test]
async fn a_body_is_over_when_its_trailers_are_out_and_not_before() {
    let node = scripted("reply = \"a\"");
    let mut body = node.run(run_of(|_| {})).await.into_body();
    let mut trailers = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.unwrap();
        if frame.is_trailers() {
            trailers += 1;
            assert!(body.is_end_stream());
        } else {
            assert!(!body.is_end_stream() && body.terminal().is_none());
        }
    }
    assert_eq!((trailers, body.terminal().is_some()), (1, true));
}

#[tokio::test(start_paused = true)]
async fn each_delta_leaves_when_it_was_said() {
    let node = scripted("reply = \"abc\", chunks = 3, chunk_delay = \"5s\"");
    let mut body = node.run(run_of(|_| {})).await.into_body();
    let begun = tokio::time::Instant::now();
    let mut seen = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        if let Ok(data) = frame.into_data() {
            let said = data.windows(9).filter(|w| w == b"\"delta\":\"").count();
            seen.push((begun.elapsed(), said));
        }
    }
    seen.retain(|(_, said)| *said > 0);
    assert_eq!(seen, [0, 5, 10].map(|s| (Duration::from_secs(s), 1)));
}
