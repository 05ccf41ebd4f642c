//! The exact-target probe beside a stall: what each of its answers is worth, that it asks and never generates, and how
//! a provider that it lowered comes back (004 "Health probe contract"; gateway.md G35, G51).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use iop_tests::config::{Provider, Setup};
use iop_tests::liveness::{
    EVIDENCE, HEALTH_LINE, Rows, STALL_DURATION, STALL_LINE, STALLS, TRANSITIONS, assert_clean,
    assert_lowered, assert_raised, edge_rows, lines, node_page, node_process, node_rows, provider, rows,
    until_status,
};
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{eventually, fixtures, run, within};
use serde_json::json;
use tokio::sync::watch;

const CHAT: &str = "/v1/chat/completions";
const STALL: Duration = Duration::from_secs(1);
/// 004: the bound of a probe.
const PROBE: Duration = Duration::from_secs(5);
/// The first CAPABILITIES for a lowered provider is asked after 5 s.
const FIRST_ASK: Duration = Duration::from_secs(6);
const KEY: &str = "sk-provider-of-the-probe-tests";

/// How an engine answers `GET /v1/models`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Models {
    Listed,
    /// Other names, among them ones that begin or end like the target.
    Others,
    Empty,
    /// A list object without its list.
    NoData,
    NoJson,
    Status(u16),
    Cut,
    /// The head of a good answer, and no body.
    HalfAnswer,
    Hang,
}

/// An engine that serves target `t`: a POST stalls while `stalls`, and is answered otherwise.
struct Engine {
    stub: Stub,
    stalls: watch::Sender<bool>,
    models: watch::Sender<Models>,
}

impl Engine {
    async fn start(models: Models) -> Self {
        let (stalls, stalling) = watch::channel(true);
        let (models, listing) = watch::channel(models);
        let stub = Stub::start(move |ex| {
            let (stalls, models) = (*stalling.borrow(), *listing.borrow());
            async move {
                if ex.method == "GET" {
                    list(ex, models).await
                } else {
                    generate(ex, stalls).await
                }
            }
        })
        .await;
        Self { stub, stalls, models }
    }

    fn provider(&self, id: &str) -> Provider {
        Provider::openai(id, &self.stub.url(), &["t"])
            .line("response_stall_timeout = \"1s\"")
            .line("api_key = { env = \"IOP_PROBE_KEY\" }")
    }

    /// Requests by method.
    fn asked(&self, method: &str) -> usize {
        self.stub.received().iter().filter(|r| r.method == method).count()
    }

    /// Whatever is no request of a client is a question: a GET of the list, with the provider's key and no body.
    fn assert_questions(&self) {
        for r in self.stub.received().iter().filter(|r| r.method != "POST") {
            assert_eq!((r.method.as_str(), r.path.as_str()), ("GET", "/v1/models"));
            assert!(r.body.is_empty(), "{r:?}");
            assert_eq!(r.header("authorization"), Some(format!("Bearer {KEY}").as_str()));
        }
    }
}

async fn generate(mut ex: Exchange, stalls: bool) -> std::io::Result<()> {
    if stalls {
        ex.gone().await;
        return Ok(());
    }
    ex.json_reply(200, &fixtures::chat_answer("t", "well")).await
}

async fn list(mut ex: Exchange, models: Models) -> std::io::Result<()> {
    let of = |ids: &[&str]| {
        let data: Vec<_> = ids
            .iter()
            .map(|id| json!({"id": id, "object": "model"}))
            .collect();
        json!({"object": "list", "data": data})
    };
    match models {
        Models::Listed => ex.json_reply(200, &of(&["other", "t"])).await,
        Models::Others => {
            ex.json_reply(200, &of(&["other", "T", "t2", "org/t", "t "]))
                .await
        }
        Models::Empty => ex.json_reply(200, &of(&[])).await,
        Models::NoData => ex.json_reply(200, &json!({"object": "list"})).await,
        Models::NoJson => {
            ex.reply(200, &[("content-type", "application/json")], b"<html>t</html>")
                .await
        }
        Models::Status(status) => ex.json_reply(status, &of(&["t"])).await,
        Models::Cut => {
            ex.cut(true);
            Ok(())
        }
        Models::HalfAnswer => {
            ex.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 4096\r\n\r\n{\"data\":[")
                .await?;
            ex.gone().await;
            Ok(())
        }
        Models::Hang => {
            ex.gone().await;
            Ok(())
        }
    }
}

fn setup(providers: Vec<Provider>) -> Setup {
    let mut providers = providers.into_iter();
    let mut setup = Setup::of(providers.next().unwrap())
        .node("node", "metrics_listen = \"127.0.0.1:0\"")
        .env("IOP_PROBE_KEY", KEY);
    for provider in providers {
        setup = setup.provider(provider);
    }
    setup
}

fn pair(health: &str) -> String {
    format!("{health}/{}", iop_tests::fake_node::classification(health))
}

/// Duration rows: count and label values; sums are within what a stall of `STALL` can be idle for.
async fn assert_durations(stack: &Stack, expected: &Rows) {
    let page = node_page(stack).await;
    let mut counts = STALLS.read(&page, &format!("{STALL_DURATION}_count"), &[]);
    counts.retain(|_, n| *n > 0);
    assert_eq!(&counts, expected);
    let stalls: u64 = expected.values().sum();
    let idle = page.sum(&format!("{STALL_DURATION}_sum"), &[]);
    let (least, most) = (STALL.as_secs_f64(), STALL.as_secs_f64() + 1.0);
    let each = idle / stalls as f64;
    assert!((least..most).contains(&each), "idle for {each} s");
    // Its buckets have these labels and `le`, and the last one holds everything.
    let buckets = STALLS.read(&page, &format!("{STALL_DURATION}_bucket"), &["le"]);
    for (row, n) in expected {
        assert_eq!(buckets.get(&format!("{row}/+Inf")), Some(n), "{row}");
    }
}

/// One line per stall, with exactly 004's fields.
async fn assert_stall_lines(stack: &Stack, expected: &Rows) {
    let fields = &STALL_LINE.fields[..4];
    lines(node_process(stack), STALL_LINE, fields, expected).await;
    for line in STALL_LINE.of(node_process(stack)) {
        let idle = line["idle_duration_ms"].as_u64().unwrap();
        assert!((1_000..2_000).contains(&idle), "{line}");
    }
}

async fn scripted(shape: Shape, normalized: bool) {
    let path = if normalized {
        "normalized"
    } else {
        "provider_tunnel"
    };
    let probes = [
        ("available", "available"),
        ("missing", "unavailable"),
        ("refuse", "unknown"),
        ("hang", "unknown"),
    ];
    let providers = probes.iter().map(|(probe, _)| {
        let script = format!(
            "{{ \"t-{probe}\" = {{ stall = \"before_headers\", fail_first = 1, probe = {probe:?}, normalized = {normalized} }} }}"
        );
        Provider::scripted(probe, &[&format!("t-{probe}")], &script).line("response_stall_timeout = \"1s\"")
    });
    let stack = Stack::start(shape, setup(providers.collect())).await;
    let started = Instant::now();
    let asked = probes.iter().map(|(probe, _)| {
        let stack = &stack;
        async move {
            let answer = stack.chat(&format!("t-{probe}"), "hello").await;
            // Only what was proven available is asked again.
            if *probe == "available" {
                assert_eq!(answer.status(), 200, "{}", answer.text());
                assert_eq!(answer.header("x-iop-attempts"), Some("2"));
            } else {
                answer.assert_error(504, "response_stalled");
            }
            let bound = if *probe == "hang" { STALL + PROBE } else { STALL };
            let took = started.elapsed();
            assert!(
                took >= bound && took < bound + Duration::from_secs(2),
                "{probe}: {took:?}"
            );
        }
    });
    join_all(asked).await;

    let expected = rows(&[
        (&format!("{path}/{}/confirmed", pair("available")), 1),
        (&format!("{path}/{}/confirmed", pair("unavailable")), 1),
        (&format!("{path}/{}/confirmed", pair("unknown")), 2),
    ]);
    node_rows(&stack, STALLS, &expected).await;
    assert_durations(&stack, &expected).await;
    assert_stall_lines(&stack, &expected).await;
    let evidence = rows(&[
        ("stall/available/applied", 1),
        ("stall/unavailable/applied", 1),
        ("stall/unknown/inconclusive", 2),
    ]);
    let observed = || async {
        let mut seen = EVIDENCE.rows(&stack.edge.scrape().await);
        // The lowered provider has been asked again by the time that the hanging probe is over.
        seen.retain(|row, _| row.starts_with("stall/"));
        if seen == evidence {
            Ok(())
        } else {
            Err(format!("{seen:?}"))
        }
    };
    eventually("evidence", Duration::from_secs(5), observed).await;
    edge_rows(&stack, TRANSITIONS, &rows(&[("available/unavailable", 1)])).await;
    let mut told = HEALTH_LINE.rows(
        &stack.edge.process,
        &["source", "from_health", "to_health", "state_changed"],
    );
    told.retain(|row, _| row.starts_with("stall/"));
    let expected = rows(&[
        ("stall/available/available/false", 3),
        ("stall/available/unavailable/true", 1),
    ]);
    assert_eq!(told, expected);
    for (probe, health) in probes {
        let provider = provider(&stack, probe).await;
        match health {
            "unavailable" => assert_lowered(&provider, None),
            _ => {
                assert_eq!(provider["status"], "available", "{provider}");
                assert_eq!(provider["effective_capacity"], provider["capacity"], "{provider}");
            }
        }
    }
    for id in ["refuse", "hang"] {
        assert_clean(&provider(&stack, id).await);
    }
}

#[test]
fn embedded_tunnel_stalls_are_paired_with_what_their_probe_found() {
    run(60, scripted(Shape::Embedded, false));
}

#[test]
fn linked_tunnel_stalls_are_paired_with_what_their_probe_found() {
    run(60, scripted(Shape::Linked, false));
}

#[test]
fn embedded_run_stalls_are_paired_with_what_their_probe_found() {
    run(60, scripted(Shape::Embedded, true));
}

#[test]
fn linked_run_stalls_are_paired_with_what_their_probe_found() {
    run(60, scripted(Shape::Linked, true));
}

async fn engines(shape: Shape) {
    let cases = [
        ("listed", Models::Listed, "available"),
        ("others", Models::Others, "unavailable"),
        ("empty", Models::Empty, "unavailable"),
        ("no-data", Models::NoData, "unknown"),
        ("no-json", Models::NoJson, "unknown"),
        ("e401", Models::Status(401), "unknown"),
        ("e404", Models::Status(404), "unknown"),
        ("e302", Models::Status(302), "unknown"),
        ("e500", Models::Status(500), "unknown"),
        ("cut", Models::Cut, "unknown"),
        ("half", Models::HalfAnswer, "unknown"),
        ("hang", Models::Hang, "unknown"),
    ];
    let mut all = Vec::new();
    for (id, models, health) in cases {
        all.push((id, health, Engine::start(models).await));
    }
    let mut setup = setup(all.iter().map(|(id, _, engine)| engine.provider(id)).collect());
    for (id, _, _) in &all {
        setup = setup.model(&format!("m-{id}"), id, "t");
    }
    // The gate's other chance is not looked at here.
    let stack = Stack::start(shape, setup.edge("gate", "max_attempts = 1")).await;
    join_all(all.iter().map(|(id, _, _)| {
        let stack = &stack;
        async move {
            let answer = stack.chat(&format!("m-{id}"), "hello").await;
            assert_eq!((*id, answer.status()), (*id, 504), "{}", answer.text());
        }
    }))
    .await;
    let mut expected = Rows::new();
    for (id, health, engine) in &all {
        *expected
            .entry(format!("provider_tunnel/{}/confirmed", pair(health)))
            .or_default() += 1;
        assert_eq!(engine.asked("POST"), 1, "{id}");
        assert!(engine.asked("GET") >= 1, "{id} was probed");
        engine.assert_questions();
        // The fence is what it says: the attempt's connection is closed.
        engine.stub.hung_up(0, Duration::from_secs(1)).await;
        let provider = provider(&stack, id).await;
        match *health {
            "unavailable" => assert_lowered(&provider, None),
            "unknown" => assert_clean(&provider),
            _ => assert_eq!(provider["status"], "available", "{provider}"),
        }
    }
    node_rows(&stack, STALLS, &expected).await;
    assert_stall_lines(&stack, &expected).await;
    edge_rows(&stack, TRANSITIONS, &rows(&[("available/unavailable", 2)])).await;
}

#[test]
fn embedded_only_an_exact_answer_of_an_engine_says_anything() {
    run(60, engines(Shape::Embedded));
}

#[test]
fn linked_only_an_exact_answer_of_an_engine_says_anything() {
    run(60, engines(Shape::Linked));
}

async fn lowered_and_back(shape: Shape) {
    let (bad, well) = (
        Engine::start(Models::Others).await,
        Engine::start(Models::Listed).await,
    );
    well.stalls.send_replace(false);
    let setup = setup(vec![bad.provider("bad"), well.provider("well")])
        .ranked("m", &[("bad", "t"), ("well", "t")])
        .model("alone", "bad", "t");
    let stack = Stack::start(shape, setup).await;
    let answer = stack.chat("m", "hello").await;
    assert_eq!(
        (answer.status(), answer.header("x-iop-attempts")),
        (200, Some("2")),
        "{}",
        answer.text()
    );
    let lowered = Instant::now();
    // The first observation of a connection has the number 1.
    assert_lowered(&provider(&stack, "bad").await, Some(1));
    bad.stalls.send_replace(false);
    for _ in 0..20 {
        let answer = stack.chat("m", "hello").await;
        assert_eq!(
            (answer.status(), answer.header("x-iop-attempts")),
            (200, Some("1")),
            "{}",
            answer.text()
        );
    }
    assert_eq!(
        (bad.asked("POST"), well.asked("POST")),
        (1, 21),
        "a lowered provider gets nothing"
    );
    // Who can go nowhere else waits for its return.
    let mut waiting = stack
        .client()
        .open(CHAT, &fixtures::chat("alone", "hello", false))
        .await;
    eventually("the request waits", Duration::from_secs(3), || async {
        let provider = provider(&stack, "bad").await;
        if provider["queued"] == 1 {
            Ok(())
        } else {
            Err(provider.to_string())
        }
    })
    .await;
    assert_eq!(bad.asked("POST"), 1);

    bad.models.send_replace(Models::Listed);
    until_status(
        &stack,
        "bad",
        "available",
        FIRST_ASK.saturating_sub(lowered.elapsed()),
    )
    .await;
    let answer = within(
        "the waiting request is served",
        Duration::from_secs(2),
        waiting.answer(),
    )
    .await;
    assert_eq!(answer.unwrap().status(), 200);
    assert_raised(&provider(&stack, "bad").await, Some(2));
    let answer = stack.chat("m", "hello").await;
    assert_eq!(
        (answer.status(), bad.asked("POST")),
        (200, 3),
        "the first of its model again"
    );
    let evidence = rows(&[("stall/unavailable/applied", 1), ("probe/available/applied", 1)]);
    edge_rows(&stack, EVIDENCE, &evidence).await;
    let transitions = rows(&[("available/unavailable", 1), ("unavailable/available", 1)]);
    edge_rows(&stack, TRANSITIONS, &transitions).await;
    let told = rows(&[
        ("stall/unavailable/applied/available/unavailable/true", 1),
        ("probe/available/applied/unavailable/available/true", 1),
    ]);
    lines(&stack.edge.process, HEALTH_LINE, HEALTH_LINE.fields, &told).await;
    stack.settled(Duration::from_secs(2)).await;
    // One question at the stall, one for its return, and none of a provider that is well. That none follows is shown
    // beside the code, over minutes of paused time.
    assert_eq!((bad.asked("GET"), well.asked("GET")), (2, 0));
    bad.assert_questions();
}

#[test]
fn embedded_a_lowered_provider_gets_nothing_until_it_is_exactly_available_again() {
    run(60, lowered_and_back(Shape::Embedded));
}

#[test]
fn linked_a_lowered_provider_gets_nothing_until_it_is_exactly_available_again() {
    run(60, lowered_and_back(Shape::Linked));
}

#[test]
fn a_provider_that_stays_lowered_is_asked_less_and_less_often() {
    run(90, async {
        for shape in Shape::ALL {
            let engine = Engine::start(Models::Others).await;
            let stack = Stack::start(shape, setup(vec![engine.provider("up")])).await;
            stack
                .chat("t", "hello")
                .await
                .assert_error(504, "response_stalled");
            let lowered = Instant::now();
            let mut asked = Vec::new();
            for n in 2..=3 {
                let what = format!("question {n}");
                eventually(&what, Duration::from_secs(25), || async {
                    if engine.asked("GET") >= n {
                        Ok(())
                    } else {
                        Err(String::new())
                    }
                })
                .await;
                asked.push(lowered.elapsed());
            }
            let (first, second) = (asked[0], asked[1] - asked[0]);
            let s = Duration::from_secs;
            assert!(first > s(4) && first < FIRST_ASK, "{asked:?}");
            assert!(second > s(5) && second < s(20), "{asked:?}");
            engine.assert_questions();
            assert_eq!(engine.asked("POST"), 1);
            assert_lowered(&provider(&stack, "up").await, None);
            edge_rows(&stack, TRANSITIONS, &rows(&[("available/unavailable", 1)])).await;
        }
    });
}

#[test]
fn a_restarted_node_starts_clean() {
    run(60, async {
        let engine = Engine::start(Models::Others).await;
        let mut stack = Stack::start(Shape::Linked, setup(vec![engine.provider("up")])).await;
        stack
            .chat("t", "hello")
            .await
            .assert_error(504, "response_stalled");
        let before = provider(&stack, "up").await;
        assert_lowered(&before, Some(1));
        let mut node = stack.nodes.remove(0);
        node.process.kill().await;
        drop(node);
        let node = stack.start_node("n1", &stack.edge.link_url()).await;
        stack.nodes.push(node);
        let generation = before["connection_generation"].as_u64();
        eventually("the restarted node is there", Duration::from_secs(5), || async {
            let all = stack.edge.admin("providers").await;
            if all
                .iter()
                .any(|p| p["connection_generation"].as_u64() > generation)
            {
                Ok(())
            } else {
                Err(format!("{all:?}"))
            }
        })
        .await;
        assert_clean(&provider(&stack, "up").await);
        engine.stalls.send_replace(false);
        assert_eq!(stack.chat("t", "hello").await.status(), 200);
        // Its numbers begin anew, and count.
        engine.stalls.send_replace(true);
        stack
            .chat("t", "hello")
            .await
            .assert_error(504, "response_stalled");
        assert_lowered(&provider(&stack, "up").await, Some(1));
    });
}

/// An engine with one slot whose list waits for that slot, as some do: it is busy, not dead.
async fn busy_single_slot(shape: Shape, leaves_with_its_caller: bool) {
    let (busy, slot) = watch::channel(false);
    let (release, released) = watch::channel(false);
    let busy = Arc::new(busy);
    let stub = Stub::start(move |mut ex| {
        let (busy, mut slot, mut released) = (Arc::clone(&busy), slot.clone(), released.clone());
        async move {
            if ex.method == "GET" {
                ex.until(async { slot.wait_for(|busy| !*busy).await.map(|_| ()) })
                    .await?
                    .ok();
                return list(ex, Models::Listed).await;
            }
            if *released.borrow() {
                return generate(ex, false).await;
            }
            busy.send_replace(true);
            ex.gone().await;
            if !leaves_with_its_caller {
                // It goes on computing for nobody.
                released.wait_for(|over| *over).await.ok();
            }
            busy.send_replace(false);
            Ok(())
        }
    })
    .await;
    let provider_of = Provider::openai("up", &stub.url(), &["t"])
        .capacity(1)
        .line("response_stall_timeout = \"1s\"");
    let setup = setup(vec![provider_of]).edge("gate", "max_attempts = 1");
    let stack = Stack::start(shape, setup).await;
    stack
        .chat("t", "hello")
        .await
        .assert_error(504, "response_stalled");
    let health = if leaves_with_its_caller {
        "available"
    } else {
        "unknown"
    };
    let expected = rows(&[(&format!("provider_tunnel/{}/confirmed", pair(health)), 1)]);
    node_rows(&stack, STALLS, &expected).await;
    let up = provider(&stack, "up").await;
    assert_eq!(
        (&up["status"], &up["health"]),
        (&json!("available"), &json!("available")),
        "{up}"
    );
    assert_eq!(up["effective_capacity"], 1, "{up}");
    edge_rows(&stack, TRANSITIONS, &Rows::new()).await;
    release.send_replace(true);
    let answer = stack.chat("t", "hello").await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let posts = stub.received().iter().filter(|r| r.method == "POST").count();
    assert_eq!(posts, 2, "a probe generates nothing");
}

#[test]
fn a_busy_single_slot_engine_is_never_called_dead() {
    run(60, async {
        for shape in Shape::ALL {
            for leaves_with_its_caller in [true, false] {
                busy_single_slot(shape, leaves_with_its_caller).await;
            }
        }
    });
}

/// Both paths of one connection draw from one source of numbers.
#[test]
fn observations_of_one_connection_are_numbered_once_each_from_one() {
    run(60, async {
        for shape in Shape::ALL {
            let ids: Vec<String> = (0..8).map(|n| format!("p{n}")).collect();
            let providers = ids.iter().enumerate().map(|(n, id)| {
                let normalized = n % 2 == 0;
                let script = format!(
                    "{{ \"t-{id}\" = {{ stall = \"before_headers\", probe = \"missing\", normalized = {normalized} }} }}"
                );
                Provider::scripted(id, &[&format!("t-{id}")], &script).line("response_stall_timeout = \"1s\"")
            });
            let stack = Stack::start(shape, setup(providers.collect())).await;
            join_all(ids.iter().map(|id| {
                let stack = &stack;
                async move {
                    let answer = stack.chat(&format!("t-{id}"), "hello").await;
                    answer.assert_error(504, "response_stalled");
                }
            }))
            .await;
            let all = stack.edge.admin("providers").await;
            let sequences: BTreeSet<u64> = all
                .iter()
                .filter_map(|p| p["overlay"]["sequence"].as_u64())
                .collect();
            assert_eq!(sequences, (1..=8).collect(), "{all:?}");
            let expected = rows(&[
                (&format!("normalized/{}/confirmed", pair("unavailable")), 4),
                (&format!("provider_tunnel/{}/confirmed", pair("unavailable")), 4),
            ]);
            node_rows(&stack, STALLS, &expected).await;
            assert_durations(&stack, &expected).await;
        }
    });
}
