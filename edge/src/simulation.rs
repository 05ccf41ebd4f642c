//! The whole edge with real nodes in one process under paused time: thousands of seeded schedules of stalls, cuts,
//! refusals, link losses, reconnects and clients that leave, each ended by the promises that must hold whatever
//! happened.
//!
//! A schedule is its seed: `IOP_SIMULATION_SEED=n` runs that one alone.

mod judge;
mod plan;
mod presets;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full};
use iop_node::Node;
use iop_shared::execution::{AttemptResult, Endpoint, Outcome};
use iop_shared::ids::NodeId;
use tokio::task::JoinHandle;

use crate::agents::turn::{TurnRequest, turn};
use crate::app::App;
use crate::config::settings_of;
use crate::drain::Drain;
use crate::http::auth::Keys;
use crate::http::openai;
use crate::http::request_id::RequestId;
use crate::link::Links;
use crate::metrics::{EndpointLabel, Metrics};
use crate::pool::Pool;
use crate::tasks::{self, Kind};
use judge::{judge_answer, judge_turn};
use plan::{Asking, Loss, Plan};

/// Schedules of one run of the tests, in shares that run side by side.
const SCHEDULES: u64 = 500;
const MAX_ATTEMPTS: u32 = 3;
/// Longer than anything in a schedule may take, the queue and three stalls with their evidence included.
const PATIENCE: Duration = Duration::from_secs(600);

#[test]
fn no_schedule_breaks_a_promise_first_share() {
    share(0);
}

#[test]
fn no_schedule_breaks_a_promise_second_share() {
    share(1);
}

#[test]
fn no_schedule_breaks_a_promise_third_share() {
    share(2);
}

#[test]
fn no_schedule_breaks_a_promise_fourth_share() {
    share(3);
}

fn share(n: u64) {
    if let Some(seed) = std::env::var("IOP_SIMULATION_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
    {
        if n == 0 {
            schedule(seed);
        }
        return;
    }
    let mut reached: BTreeMap<String, u64> = BTreeMap::new();
    for seed in n * SCHEDULES..(n + 1) * SCHEDULES {
        match std::panic::catch_unwind(|| schedule(seed)) {
            Ok(counts) => {
                for (series, n) in counts {
                    *reached.entry(series).or_default() += n;
                }
            }
            Err(_) => panic!("the schedule of seed {seed} broke a promise: IOP_SIMULATION_SEED={seed}"),
        }
    }
    // A promise is judged only where something could have broken it.
    for word in REACHED {
        let n: u64 = reached
            .iter()
            .filter(|(series, _)| series.contains(word))
            .map(|(_, n)| n)
            .sum();
        assert!(n > 0, "no schedule came to {word}: {reached:#?}");
    }
}

/// What every share has to come to.
const REACHED: &[&str] = &[
    "attempts_total{result=\"success\"}",
    "attempts_total{result=\"http_4xx\"}",
    "attempts_total{result=\"http_5xx\"}",
    "attempts_total{result=\"rate_limited\"}",
    "attempts_total{result=\"cut\"}",
    "attempts_total{result=\"response_stalled\"}",
    "attempts_total{result=\"first_content_timeout\"}",
    "attempts_total{result=\"node_lost\"}",
    "attempts_total{result=\"cancelled\"}",
    "eligibility=\"eligible\"",
    "eligibility=\"post_commit\"",
    "eligibility=\"unconfirmed_fence\"",
    "eligibility=\"caller_cancelled\"",
    "eligibility=\"tool_side_effect\"",
    "eligibility=\"no_candidate\"",
    "eligibility=\"same_provider_forbidden\"",
    "execution_path=\"normalized\"",
    "recovery_result=\"redispatched\"",
    "recovery_result=\"not_selected\"",
    "decision=\"applied\"",
    "decision=\"inconclusive\"",
    "decision=\"rejected_ambiguous\"",
    "from_health=\"available\",to_health=\"unavailable\"",
    "outcome=\"client_cancelled\"",
    "outcome=\"rejected\"",
    "outcome=\"incomplete\"",
];

fn schedule(seed: u64) -> BTreeMap<String, u64> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut rng = Rng::with_seed(seed);
        let plan = Plan::draw(&mut rng);
        let sim = Simulation::start(&plan);
        sim.run(&plan).await;
        sim.judge(&plan).await;
        counts(&sim.app.metrics)
    })
}

/// Every counter that is not zero.
fn counts(metrics: &Metrics) -> BTreeMap<String, u64> {
    let text = String::from_utf8(metrics.encode().unwrap()).unwrap();
    text.lines()
        .filter_map(|l| l.rsplit_once(' '))
        .filter(|(series, _)| series.contains("_total{"))
        .filter_map(|(series, n)| Some((series.to_owned(), n.parse().ok().filter(|n| *n > 0)?)))
        .collect()
}

fn node(id: NodeId, toml: &str) -> Node {
    let node = Node::new(id, &settings_of(toml).providers, &prometheus::Registry::new()).unwrap();
    node.start();
    node
}

struct Simulation {
    app: Arc<App>,
    links: Arc<Links>,
    embedded: Option<Node>,
    /// Series at the start: none may be added.
    series: BTreeSet<String>,
}

/// What a client saw.
struct Saw {
    left: bool,
    attempts: u32,
    status: u16,
    body: Vec<u8>,
    broke_off: bool,
}

impl Simulation {
    fn start(plan: &Plan) -> Self {
        let mut settings = settings_of(&plan.edge_toml);
        let metrics = Arc::new(Metrics::new().unwrap());
        let pool = Pool::new(
            std::mem::take(&mut settings.models),
            settings.queue,
            settings.ejection,
            Arc::clone(&metrics),
        );
        let links = Arc::new(Links::new(Arc::clone(&pool)));
        let providers = std::mem::take(&mut settings.providers);
        let embedded = (!providers.is_empty()).then(|| {
            let node = Node::new(NodeId::embedded(), &providers, metrics.registry()).unwrap();
            node.start();
            links.embed(node.clone());
            node
        });
        let keys = Keys::new(std::mem::take(&mut settings.keys));
        let app = App::new(settings, metrics, pool, keys, Drain::default());
        let series = series(&app.metrics);
        Self {
            app,
            links,
            embedded,
            series,
        }
    }

    async fn run(&self, plan: &Plan) {
        let mut links = Vec::new();
        for (n, toml) in plan.nodes.iter().enumerate() {
            let id = NodeId::new(&format!("n{n}")).unwrap();
            let losses: Vec<&Loss> = plan.losses.iter().filter(|l| l.node == n).collect();
            links.push(self.keep_linked(id, toml, &losses));
        }
        let clients: Vec<_> = plan.requests.iter().map(|asking| self.client(asking)).collect();
        let turns: Vec<_> = plan.turns.iter().map(|asking| self.turn(asking)).collect();
        let all = async {
            for turn in turns {
                turn.await.unwrap();
            }
            for (asking, client) in plan.requests.iter().zip(clients) {
                let saw = client.await.unwrap();
                judge_answer(asking, &saw);
            }
        };
        tokio::time::timeout(PATIENCE, all).await.expect("a request hung");
        for link in links {
            link.abort();
        }
    }

    /// A node that dials, is lost and comes back as planned.
    fn keep_linked(&self, id: NodeId, toml: &str, losses: &[&Loss]) -> JoinHandle<()> {
        let (links, toml) = (Arc::clone(&self.links), toml.to_owned());
        let mut losses: Vec<(Duration, Duration, bool)> =
            losses.iter().map(|l| (l.at, l.back_after, l.restarted)).collect();
        losses.sort();
        tasks::spawn(Kind::Session, "simulated_node", async move {
            let begun = tokio::time::Instant::now();
            let mut process = node(id.clone(), &toml);
            for (at, back_after, restarted) in losses {
                let (ours, theirs) = tokio::io::duplex(64 << 10);
                let serving = serve(process.clone(), theirs);
                let until = begun + at;
                tokio::select! {
                    () = links.carry(ours, id.clone()) => {}
                    () = tokio::time::sleep_until(until) => {}
                }
                serving.abort();
                tokio::time::sleep(back_after).await;
                if restarted {
                    process = node(id.clone(), &toml);
                }
            }
            let (ours, theirs) = tokio::io::duplex(64 << 10);
            let serving = serve(process, theirs);
            links.carry(ours, id).await;
            serving.abort();
        })
    }

    /// A turn of a run, which its host may end early.
    fn turn(&self, asking: &Asking) -> JoinHandle<()> {
        let app = Arc::clone(&self.app);
        let (at, leaves_after, body) = (asking.at, asking.leaves_after, asking.body());
        spawn(async move {
            tokio::time::sleep(at).await;
            let request = TurnRequest {
                run: "run_1",
                model: "m",
                body: Bytes::from(body),
                owner: None,
                traceparent: None,
            };
            let whole = turn(&app, request, &|_| {});
            match leaves_after {
                None => judge_turn(&whole.await),
                Some(leaves) => {
                    if let Ok(turn) = tokio::time::timeout(leaves, whole).await {
                        judge_turn(&turn);
                    }
                }
            }
        })
    }

    fn client(&self, asking: &Asking) -> JoinHandle<Saw> {
        let app = Arc::clone(&self.app);
        let (at, endpoint) = (asking.at, asking.endpoint);
        let (leaves_after, reads_every) = (asking.leaves_after, asking.reads_every);
        let body = asking.body();
        let path = format!("/v1/{}", endpoint.path());
        spawn(async move {
            tokio::time::sleep(at).await;
            let request = Request::builder()
                .method(Method::POST)
                .uri(path)
                .header("content-type", "application/json")
                .body(Full::new(Bytes::from(body)))
                .unwrap();
            let ask = async {
                let id = RequestId::of(&HeaderMap::new());
                let response = openai::handle(app, endpoint, id, request).await;
                let (head, mut body) = response.into_parts();
                let mut saw = Saw {
                    left: false,
                    attempts: head.headers["x-iop-attempts"].to_str().unwrap().parse().unwrap(),
                    status: head.status.as_u16(),
                    body: Vec::new(),
                    broke_off: false,
                };
                while let Some(frame) = body.frame().await {
                    match frame {
                        Ok(frame) => saw.body.extend_from_slice(&frame.into_data().unwrap_or_default()),
                        Err(_) => saw.broke_off = true,
                    }
                    if !reads_every.is_zero() {
                        tokio::time::sleep(reads_every).await;
                    }
                }
                saw
            };
            match leaves_after {
                None => ask.await,
                Some(leaves) => tokio::time::timeout(leaves, ask).await.unwrap_or(Saw {
                    left: true,
                    attempts: 0,
                    status: 0,
                    body: Vec::new(),
                    broke_off: false,
                }),
            }
        })
    }

    /// The promises that hold after any schedule.
    async fn judge(&self, plan: &Plan) {
        // Fences, probes and the last words of links: all bounded.
        tokio::time::sleep(Duration::from_secs(60)).await;
        let metrics = &self.app.metrics;
        for e in EndpointLabel::ALL {
            assert_eq!(metrics.in_flight.at((*e,)).get(), 0, "in flight at {e}");
        }
        assert_eq!(metrics.queue_depth.get(), 0, "somebody waits for nothing");
        for provider in self.app.pool.providers() {
            assert_eq!(provider.in_flight, 0, "a lease of {} is out", provider.id);
            assert_eq!(provider.queued, 0);
        }
        if let Some(node) = &self.embedded {
            assert_eq!(node.in_flight(), 0, "a place of the embedded node is taken");
        }
        let outcomes = sum(metrics, "iop_edge_requests_total", "");
        let asked = plan.requests.len() + plan.turns.len();
        assert_eq!(outcomes, asked as u64, "one outcome each");
        for e in EndpointLabel::ALL {
            assert_eq!(metrics.requests.at((*e, Outcome::InternalError)).get(), 0);
        }
        let refused = metrics.attempts.at((AttemptResult::Capacity,)).get();
        let attempts = sum(metrics, "iop_edge_attempts_total", "") - refused;
        assert!(
            attempts <= outcomes * u64::from(MAX_ATTEMPTS),
            "{attempts} attempts of {outcomes} requests"
        );
        let eligible = sum(
            metrics,
            "iop_edge_liveness_recovery_eligibility_total",
            "eligibility=\"eligible\"",
        );
        let results = sum(metrics, "iop_edge_liveness_recovery_results_total", "");
        assert_eq!(
            eligible, results,
            "every eligible cycle has one result, no other has any"
        );
        assert_eq!(series(metrics), self.series, "no series was added");
    }
}

impl Asking {
    fn body(&self) -> String {
        let stream = self.stream;
        let tools = if self.hosted_tool {
            r#","tools":[{"type":"web_search"}]"#
        } else {
            ""
        };
        let content = if self.endpoint == Endpoint::Responses {
            r#""input":"hello""#
        } else {
            r#""messages":[{"role":"user","content":"hello"}]"#
        };
        format!(r#"{{"model":"m","stream":{stream},{content}{tools}}}"#)
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "its value and its panic are the test's own"
)]
fn spawn<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(future)
}

/// The node's side of a link.
fn serve(node: Node, io: tokio::io::DuplexStream) -> JoinHandle<()> {
    tasks::spawn(Kind::Session, "simulated_link", async move {
        let service = hyper::service::service_fn(move |request| {
            let node = node.clone();
            async move { Ok::<_, std::convert::Infallible>(node.handle(request).await) }
        });
        // How it ends is what is simulated.
        let _ = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new())
            .timer(hyper_util::rt::TokioTimer::new())
            .max_local_error_reset_streams(None)
            .serve_connection(hyper_util::rt::TokioIo::new(io), service)
            .await;
    })
}

/// The sum of a counter's series whose labels contain this text.
fn sum(metrics: &Metrics, name: &str, labels: &str) -> u64 {
    let text = String::from_utf8(metrics.encode().unwrap()).unwrap();
    text.lines()
        .filter(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')) && l.contains(labels))
        .filter_map(|l| l.rsplit_once(' '))
        .map(|(_, value)| value.parse::<u64>().unwrap())
        .sum()
}

/// Names and labels of every series, but for those of providers, which live as long as they do.
fn series(metrics: &Metrics) -> BTreeSet<String> {
    let text = String::from_utf8(metrics.encode().unwrap()).unwrap();
    text.lines()
        .filter(|l| !l.starts_with('#') && !l.contains("provider=\""))
        .filter_map(|l| l.rsplit_once(' '))
        .map(|(name, _)| name.to_owned())
        .collect()
}
