//! One body under the test's control: what is fed, how fast the fence falls, what the probe says, who leaves when.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use iop_shared::config::ProviderConfig;
use iop_shared::execution::{
    AttemptFence, AttemptResult, Disposition, Endpoint, ExecutionPath, FailureCode, LivenessClassification,
    ProviderHealth,
};
use iop_shared::ids::{AttemptId, RunId};
use iop_shared::wire::terminal::{StallFailure, Terminal};
use prometheus::Registry;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, sleep, timeout};

use super::{Attempt, RunBody, RunGuard};
use crate::metrics::{NodeMetrics, StallRow};
use crate::providers::hold::{Hold, Holding};
use crate::providers::registry::{Busy, Permit, Slot};
use crate::providers::scripted::Scripted;
use crate::providers::{Backend, Piece, ProviderSettings};
use crate::run::watch::Watch;
use crate::service::scope::Scope;
use crate::testing::Fed;

/// One provider with room for eight, and everything that an attempt needs.
struct Rig {
    slot: Arc<Slot>,
    metrics: Arc<NodeMetrics>,
    busy: Arc<Busy>,
    scope: Arc<Scope>,
}

impl Rig {
    /// `probe` is what the script says to a probe.
    fn new(probe: &str) -> Self {
        let toml = format!(
            "id = \"s\"\nadapter = \"scripted\"\ncapacity = 8\nscript = {{ m = {{ probe = {probe:?} }} }}\n"
        );
        let config: ProviderConfig = toml::from_str(&toml).unwrap();
        let backend = Backend::Scripted(Scripted::new(&config));
        let settings = ProviderSettings {
            config,
            api_key: None,
        };
        Self {
            slot: Arc::new(Slot::new(&settings, backend)),
            metrics: Arc::new(NodeMetrics::register(&Registry::new()).unwrap()),
            busy: Arc::new(Busy::default()),
            scope: Arc::new(Scope::new()),
        }
    }

    /// A body that stalls after ten seconds, and who feeds it.
    fn body(&self, path: ExecutionPath, hold: Hold) -> (UnboundedSender<Piece>, RunBody) {
        let permit = Permit::take(&self.slot, &self.busy, &self.scope.busy, &self.metrics.in_flight)
            .unwrap_or_else(|e| panic!("{}", e.message));
        let attempt = Attempt {
            path,
            endpoint: Endpoint::Chat,
            run_id: RunId(uuid::Uuid::from_u128(1)),
            attempt_id: AttemptId(uuid::Uuid::from_u128(2)),
            target: "m".into(),
            stall_timeout: TIMEOUT,
            scope: Arc::clone(&self.scope),
        };
        let watch = Watch::new(attempt.stall_timeout);
        let guard = RunGuard::new(permit, Arc::clone(&self.metrics), attempt);
        let (feed, source) = Fed::channel();
        let body = RunBody::Streaming {
            source,
            hold,
            watch,
            guard,
        };
        (feed, body)
    }

    fn tunnel(&self) -> (UnboundedSender<Piece>, RunBody) {
        self.body(ExecutionPath::ProviderTunnel, Hold::default())
    }

    fn claims(&self) -> u64 {
        let mut all = 0;
        for path in ExecutionPath::ALL {
            for health in ProviderHealth::ALL {
                for class in LivenessClassification::ALL {
                    for fence in AttemptFence::ALL {
                        all += self.metrics.stalls.at((*path, *health, *class, *fence)).get();
                    }
                }
            }
        }
        all
    }

    fn attempts(&self, result: AttemptResult) -> u64 {
        self.metrics.attempts.at((Endpoint::Chat, result)).get()
    }

    fn at_rest(&self) -> bool {
        self.slot.in_flight() == 0 && self.busy.count() == 0 && self.metrics.in_flight.get() == 0
    }
}

const TIMEOUT: Duration = Duration::from_secs(10);

fn secs(s: u64) -> Duration {
    Duration::from_secs(s)
}

async fn next(body: &mut RunBody) -> Option<Frame<Bytes>> {
    poll_fn(|cx| body.poll_frame(cx)).await
}

async fn data(body: &mut RunBody) -> Bytes {
    next(body).await.unwrap().into_data().unwrap()
}

/// Reads to the end; one terminal, nothing after it.
async fn terminal(body: &mut RunBody) -> Terminal {
    let trailers = next(body).await.unwrap().into_trailers().unwrap();
    let terminal = Terminal::from_trailers(&trailers).unwrap();
    assert_eq!(body.terminal(), Some(&terminal));
    assert!(next(body).await.is_none());
    terminal
}

fn failure(terminal: Terminal) -> StallFailure {
    let Terminal::Error(e) = terminal else {
        panic!("{terminal:?}")
    };
    assert_eq!(e.code, FailureCode::ResponseStalled);
    *e.failure.unwrap()
}

/// What is held, let go after that long.
fn held_for(time: Duration) -> Hold {
    let holding = Holding::new();
    let mut hold = Hold::default();
    hold.take(holding.held());
    crate::tasks::spawn(crate::tasks::Kind::Session, "holder", async move {
        sleep(time).await;
        drop(holding);
    });
    hold
}

#[tokio::test(start_paused = true)]
async fn a_stall_is_joined_once_with_the_longer_of_fence_and_probe_into_one_terminal() {
    use AttemptFence::{Confirmed, Unconfirmed};
    use LivenessClassification as L;
    for (probe, released_s, path, class, fence, joined_s) in [
        (
            "available",
            0,
            ExecutionPath::ProviderTunnel,
            L::RequestStalled,
            Confirmed,
            0,
        ),
        (
            "available",
            11,
            ExecutionPath::Normalized,
            L::RequestStalled,
            Confirmed,
            1,
        ),
        (
            "missing",
            0,
            ExecutionPath::Normalized,
            L::ProviderUnhealthy,
            Confirmed,
            0,
        ),
        (
            "missing",
            99,
            ExecutionPath::ProviderTunnel,
            L::ProviderUnhealthy,
            Unconfirmed,
            2,
        ),
        (
            "refuse",
            99,
            ExecutionPath::ProviderTunnel,
            L::HealthUnknown,
            Unconfirmed,
            2,
        ),
        (
            "hang",
            99,
            ExecutionPath::ProviderTunnel,
            L::HealthUnknown,
            Unconfirmed,
            5,
        ),
        (
            "hang",
            11,
            ExecutionPath::ProviderTunnel,
            L::HealthUnknown,
            Confirmed,
            5,
        ),
    ] {
        let rig = Rig::new(probe);
        let begun = Instant::now();
        let (feed, mut body) = rig.body(path, held_for(secs(released_s)));
        let stalled = failure(terminal(&mut body).await);
        assert_eq!(begun.elapsed().as_secs(), 10 + joined_s, "{probe} {released_s}");
        assert!(stalled.idle_duration_ms.abs_diff(10_000) <= 2, "{stalled:?}");
        assert_eq!(
            stalled,
            StallFailure {
                failure_code: FailureCode::ResponseStalled,
                provider_health: class.health(),
                liveness_classification: class,
                idle_duration_ms: stalled.idle_duration_ms,
                run_id: RunId(uuid::Uuid::from_u128(1)).to_string(),
                attempt_id: AttemptId(uuid::Uuid::from_u128(2)).to_string(),
                attempt_fence: fence,
                adapter: "scripted".into(),
                target: "m".into(),
                health_observation_seq: Some(1),
            }
        );
        assert!(feed.is_closed() && rig.at_rest());
        assert_eq!(
            (rig.claims(), rig.attempts(AttemptResult::ResponseStalled)),
            (1, 1)
        );
        let row = StallRow {
            path,
            classification: class,
            fence,
        };
        assert_eq!(rig.metrics.stall_duration.at(row).get_sample_count(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn late_output_is_fenced_from_the_claim_on_and_the_place_is_taken_until_the_terminal() {
    let rig = Rig::new("hang");
    let (feed, mut body) = rig.tunnel();
    assert!(timeout(secs(11), next(&mut body)).await.is_err());
    // Claimed, its terminal in the making: the provider's body is gone, nobody can be heard any more.
    assert!(feed.is_closed());
    assert!(feed.send(Piece::tunnel(Bytes::from_static(b"late"))).is_err());
    assert!(body.terminal().is_none() && !rig.at_rest());
    assert_eq!(
        failure(terminal(&mut body).await).attempt_fence,
        AttemptFence::Confirmed
    );
    assert!(rig.at_rest());
}

#[tokio::test(start_paused = true)]
async fn comments_are_progress_and_empty_frames_are_not() {
    let rig = Rig::new("available");
    let (feed, mut body) = rig.tunnel();
    for _ in 0..20 {
        assert!(timeout(secs(9), next(&mut body)).await.is_err());
        let comment = Bytes::from_static(b": ping\n\n");
        feed.send(Piece::tunnel(comment.clone())).unwrap();
        assert_eq!(data(&mut body).await, comment);
    }
    let begun = Instant::now();
    for _ in 0..3 {
        assert!(timeout(secs(3), next(&mut body)).await.is_err());
        feed.send(Piece::tunnel(Bytes::new())).unwrap();
        assert!(data(&mut body).await.is_empty());
    }
    failure(terminal(&mut body).await);
    assert_eq!(begun.elapsed().as_secs(), 10);
    assert_eq!(rig.claims(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_nobody_polls_is_no_stall() {
    let rig = Rig::new("available");
    let (feed, mut body) = rig.tunnel();
    let piece = |text: &'static str| Piece::tunnel(Bytes::from_static(text.as_bytes()));
    // Output was taken; then the edge takes nothing for ten times the timeout.
    feed.send(piece("a")).unwrap();
    assert_eq!(data(&mut body).await, "a");
    sleep(10 * TIMEOUT).await;
    // The wait begins when the edge asks again.
    assert!(timeout(secs(9), next(&mut body)).await.is_err());
    feed.send(piece("b")).unwrap();
    assert_eq!(data(&mut body).await, "b");
    // A wait that nobody looked after: what came meanwhile is there, or the wait begins anew.
    assert!(timeout(secs(5), next(&mut body)).await.is_err());
    feed.send(piece("c")).unwrap();
    sleep(10 * TIMEOUT).await;
    assert_eq!(data(&mut body).await, "c");
    assert!(timeout(secs(5), next(&mut body)).await.is_err());
    sleep(10 * TIMEOUT).await;
    assert!(timeout(secs(9), next(&mut body)).await.is_err());
    assert_eq!(rig.claims(), 0);
    drop(feed);
    assert_eq!(terminal(&mut body).await, Terminal::Complete { usage: None });
    assert_eq!((rig.claims(), rig.attempts(AttemptResult::Success)), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_pause_keeps_what_was_waited_before() {
    let rig = Rig::new("available");
    let (feed, mut body) = rig.tunnel();
    assert!(timeout(secs(6), next(&mut body)).await.is_err());
    feed.send(Piece::tunnel(Bytes::new())).unwrap();
    assert!(data(&mut body).await.is_empty());
    sleep(10 * TIMEOUT).await;
    let begun = Instant::now();
    let stalled = failure(terminal(&mut body).await);
    assert_eq!(begun.elapsed().as_secs(), 4);
    assert!(stalled.idle_duration_ms.abs_diff(10_000) <= 4, "{stalled:?}");
}

#[tokio::test(start_paused = true)]
async fn a_terminal_of_the_provider_ends_the_watch() {
    let rig = Rig::new("available");
    for disposition in [Disposition::Terminal, Disposition::Start, Disposition::None] {
        let (feed, mut body) = rig.body(ExecutionPath::Normalized, Hold::default());
        feed.send(Piece {
            bytes: Bytes::from_static(b"{}\n"),
            disposition,
        })
        .unwrap();
        assert_eq!(data(&mut body).await, "{}\n");
        let silent = timeout(secs(1000), next(&mut body)).await.is_err();
        assert_eq!(silent, disposition == Disposition::Terminal, "{disposition}");
    }
    assert_eq!(rig.claims(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_during_the_join_is_still_one_stall() {
    let rig = Rig::new("hang");
    let (_feed, mut body) = rig.tunnel();
    assert!(timeout(secs(12), next(&mut body)).await.is_err());
    assert!(!rig.at_rest());
    drop(body);
    assert!(rig.at_rest());
    assert_eq!(
        (
            rig.attempts(AttemptResult::ResponseStalled),
            rig.attempts(AttemptResult::Cancelled),
            rig.claims()
        ),
        (1, 0, 0)
    );
    sleep(secs(4)).await;
    assert_eq!((rig.claims(), rig.scope.next_observation()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_before_the_timeout_is_none() {
    let rig = Rig::new("available");
    let (_feed, mut body) = rig.tunnel();
    assert!(timeout(secs(9), next(&mut body)).await.is_err());
    drop(body);
    sleep(secs(100)).await;
    assert_eq!((rig.claims(), rig.attempts(AttemptResult::Cancelled)), (0, 1));
    assert!(rig.at_rest());
}

#[tokio::test(start_paused = true)]
async fn observations_of_one_session_are_numbered_without_a_gap() {
    let rig = Rig::new("available");
    let bodies = (0..8).map(|i| {
        let path = if i % 2 == 0 {
            ExecutionPath::ProviderTunnel
        } else {
            ExecutionPath::Normalized
        };
        rig.body(path, held_for(secs(10 + i % 3)))
    });
    let stalls = bodies.map(|(feed, mut body)| async move {
        let stalled = failure(terminal(&mut body).await);
        drop(feed);
        stalled.health_observation_seq.unwrap()
    });
    let mut all = futures_util::future::join_all(stalls).await;
    all.sort_unstable();
    assert_eq!(all, (1..=8).collect::<Vec<_>>());
    assert_eq!(rig.claims(), 8);
    assert!(rig.at_rest());
}
