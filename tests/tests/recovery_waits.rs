//! What a request waits for, and what its wait leaves to others: the place of a large refusal, the pause that a provider
//! asks for, the line behind another candidate, a trial that hangs; and what is told while a body or an event is not
//! whole (G21, G34, G36, G53, G55, G59, §13).

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use iop_tests::client::{Answer, Conn, sse_data};
use iop_tests::config::{Provider, Setup};
use iop_tests::fake_node::{FakeNode, advertisement, provider as advertised};
use iop_tests::faults::{
    Act, Answers, Api, Bench, Cell, Faulty, Reply, Route, Script, WORDS, assert_bytes, assert_gapless,
    assert_own_answer, failures,
};
use iop_tests::liveness::{ELIGIBILITY, RESULTS, edge_rows, provider, rows};
use iop_tests::metrics::Page;
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{eventually, fixtures, run, within};
use serde_json::{Value, json};
use tokio::sync::watch;

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const COMMENT: &str = ": keep-alive\n\n";
const NODE_METRICS: &str = "metrics_listen = \"127.0.0.1:0\"";
const JSON: (&str, &str) = ("content-type", "application/json");
/// What two busy cores may add to a wait.
const SLACK: Duration = Duration::from_millis(2_500);
const SOON: Duration = Duration::from_secs(5);

/// Chat and Responses, whole and as a stream.
const WAYS: [(Api, bool); 4] = [
    (Api::Chat, false),
    (Api::Chat, true),
    (Api::Responses, false),
    (Api::Responses, true),
];

async fn both<F: Future<Output = ()>>(check: impl Fn(Shape) -> F) {
    tokio::join!(check(Shape::Embedded), check(Shape::Linked));
}

fn limited(seconds: &str) -> Reply {
    Reply::error(429, "rate_limit_exceeded").header("retry-after", seconds)
}

/// An error object of at least `bytes` bytes.
fn wordy(bytes: usize) -> String {
    let error = json!({"message": "x".repeat(bytes), "type": "t", "param": null, "code": "own_code"});
    json!({ "error": error }).to_string()
}

fn attempts_of(answer: &Answer) -> &str {
    answer.header("x-iop-attempts").unwrap_or_default()
}

fn attempts(page: &Page, result: &str) -> f64 {
    page.sum("iop_edge_attempts_total", &[("result", result)])
}

/// The targets of the attempts that a stub has seen, in order.
fn asked(stub: &Stub) -> Vec<String> {
    let received = stub.received();
    let posts = received.iter().filter(|r| r.method == "POST");
    posts
        .map(|r| r.json()["model"].as_str().unwrap_or_default().to_owned())
        .collect()
}

fn count(all: &[String], target: &str) -> usize {
    all.iter().filter(|t| *t == target).count()
}

/// Waits until it holds, then goes on.
async fn opened(gate: &mut watch::Receiver<bool>) {
    let _ = gate.wait_for(|open| *open).await;
}

/// A refusal that is larger than what is held, from the only provider, which has one place.
async fn large_refusal_alone(shape: Shape) {
    let pause = Duration::from_secs(2);
    let refusal = limited("2").body(&wordy(3 << 10));
    let route = Route::once("large", Act::Status(refusal))
        .alone()
        .line("capacity = 1");
    let bench = Bench::start(shape, vec![route], |s| s.edge("gate", "hold_bytes = \"1KiB\"")).await;
    failures(bench.cells(), |cell| {
        let bench = Arc::clone(&bench);
        async move {
            let seen = bench.ask(cell).await;
            seen.assert_clean(cell, &bench.of_primary(cell), 2);
            bench.assert_counts(cell, 2, 0);
            let what = format!("{}: {:?}", cell.model(), seen.elapsed);
            assert!(seen.elapsed >= pause && seen.elapsed < pause + SLACK, "{what}");
        }
    })
    .await;
    bench.done().await;
}

#[test]
fn a_large_refusal_does_not_keep_the_place_that_its_own_replay_needs() {
    run(60, both(large_refusal_alone));
}

/// Refuses in words that are larger than what is held: for a while, or without saying for how long.
async fn refuses(mut ex: Exchange) -> io::Result<()> {
    let page = wordy(400 << 10);
    if ex.json()["model"] == "cools" {
        let headers = [JSON, ("retry-after", "30")];
        return ex.reply(429, &headers, page.as_bytes()).await;
    }
    ex.reply(503, &[JSON], page.as_bytes()).await
}

/// While the replays of large refusals still run, the first provider has its places back and has been heard.
async fn large_refusal_heard(shape: Shape) {
    let refusing = Stub::start(refuses).await;
    let go = watch::channel(false).0;
    let slow = Stub::start({
        let go = go.clone();
        move |mut ex| {
            let mut go = go.subscribe();
            async move {
                ex.until(opened(&mut go)).await?;
                ex.json_reply(200, &fixtures::chat_answer("t", "well")).await
            }
        }
    })
    .await;
    let setup = Setup::of(Provider::openai("ejects", &refusing.url(), &["ejects"]))
        .provider(Provider::openai("cools", &refusing.url(), &["cools"]))
        .provider(Provider::openai("slow", &slow.url(), &["t"]))
        .ranked("ejects", &[("ejects", "ejects"), ("slow", "t")])
        .ranked("cools", &[("cools", "cools"), ("slow", "t")])
        .edge("ejection", "base = \"20s\"");
    let stack = Stack::start(shape, setup).await;
    let mut waiting: Vec<(&str, Conn)> = Vec::new();
    for (model, refused) in [("ejects", 5), ("cools", 1)] {
        // The last one is not sent there at all.
        for n in 0..=refused {
            let expected = if n < refused { "2" } else { "1" };
            let conn = stack
                .client()
                .open(CHAT, &fixtures::chat(model, "hi", false))
                .await;
            waiting.push((expected, conn));
            slow.arrived(waiting.len()).await;
            let seen = provider(&stack, model).await;
            let what = format!("{shape:?} {model}, request {n}: {seen}");
            assert_eq!(seen["in_flight"], 0, "{what}");
            assert_eq!(count(&asked(&refusing), model), (n + 1).min(refused), "{what}");
            let ejected = model == "ejects" && n + 1 >= refused;
            assert_eq!(seen["ejected_until"].is_string(), ejected, "{what}");
        }
    }
    go.send_replace(true);
    for (expected, conn) in &mut waiting {
        let answer = conn.answer().await.unwrap();
        assert_eq!(
            (answer.status(), answer.complete),
            (200, true),
            "{}",
            answer.text()
        );
        assert_eq!(attempts_of(&answer), *expected);
    }
    stack.settled(SOON).await;
    let page = stack.edge.scrape().await;
    let counts = ["http_5xx", "rate_limited", "success"].map(|r| attempts(&page, r));
    assert_eq!(counts, [5.0, 1.0, 8.0], "{shape:?}");
}

#[test]
fn a_large_refusal_is_heard_and_frees_its_place_before_its_replay_is_answered() {
    run(60, both(large_refusal_heard));
}

/// Clients that come one after the other, whether the earlier ones have an answer or not.
async fn one_by_one(n: u32, gap: Duration, ask: impl AsyncFn(u32)) {
    let ask = &ask;
    join_all((0..n).map(|i| async move {
        // How often clients come is what these tests are about.
        tokio::time::sleep(gap * i).await;
        ask(i).await;
    }))
    .await;
}

fn in_turn(cells: &[Cell], n: u32) -> Cell {
    cells[n as usize % cells.len()]
}

/// The only provider asks each of many clients for two seconds, for ever.
async fn limited_for_ever(shape: Shape) {
    const CLIENTS: u32 = 24;
    let route = Route::new("ever", Act::Status(limited("2"))).alone().one_model();
    let bench = Bench::start(shape, vec![route], |s| s).await;
    let cells = bench.cells();
    one_by_one(CLIENTS, Duration::from_millis(250), async |n| {
        let cell = in_turn(&cells, n);
        let seen = bench.ask(cell).await;
        let what = format!("{shape:?} client {n} {:?}: {:?}", cell.api, seen.elapsed);
        let body = limited("2").body_of("primary");
        assert_own_answer(&what, &seen.answer, 429, &body);
        assert_eq!(seen.answer.header("retry-after"), Some("2"), "{what}");
        assert_eq!(seen.attempts(), 3, "{what}");
        let pauses = Duration::from_secs(4);
        assert!(seen.elapsed >= pauses && seen.elapsed < pauses + SLACK, "{what}");
    })
    .await;
    bench.assert_counts(cells[0], 3 * CLIENTS as usize, 0);
    bench.done().await;
}

#[test]
fn clients_that_a_provider_puts_off_for_ever_get_its_answer_after_their_own_pauses() {
    run(60, both(limited_for_ever));
}

/// The only provider puts off each of many clients once, for four seconds.
async fn limited_once_each(shape: Shape) {
    const CLIENTS: u32 = 12;
    let refusals = vec![Act::Status(limited("4")); CLIENTS as usize];
    let route = Route::scripted("once", Script::series(refusals, Act::Good))
        .alone()
        .one_model();
    let bench = Bench::start(shape, vec![route], |s| s).await;
    let cells = bench.cells();
    // All have come before the first one's pause is over, and none of them makes it longer.
    one_by_one(CLIENTS, Duration::from_millis(250), async |n| {
        let cell = in_turn(&cells, n);
        let seen = bench.ask(cell).await;
        seen.assert_clean(cell, &bench.of_primary(cell), 2);
        let (pause, what) = (
            Duration::from_secs(4),
            format!("{shape:?} client {n}: {:?}", seen.elapsed),
        );
        assert!(seen.elapsed >= pause && seen.elapsed < pause + SLACK, "{what}");
    })
    .await;
    bench.assert_counts(cells[0], 2 * CLIENTS as usize, 0);
    bench.done().await;
}

#[test]
fn a_pause_is_not_made_longer_by_what_the_provider_tells_others() {
    run(60, both(limited_once_each));
}

/// One that stalled and is proven available, and another that is full when it goes away with its node.
async fn proven_fallback(signal: &str) {
    let (red, green) = (Faulty::start("red").await, Faulty::start("green").await);
    let model = |(api, stream): (Api, bool)| format!("{}.{stream}", api.name());
    let models = WAYS.map(model);
    let mut targets: Vec<&str> = models.iter().map(String::as_str).collect();
    for target in &targets {
        red.script(target, Script::once(Act::Silence));
        green.script(target, Script::good());
    }
    let stalls = Provider::openai("red", &red.stub.url(), &targets).line("response_stall_timeout = \"1s\"");
    green.script("held", Script::always(Act::Silence));
    targets.push("held");
    let full = Provider::openai("green", &green.stub.url(), &targets).capacity(1);
    let mut setup = Setup::of(stalls)
        .provider(full)
        .nodes(&["n1", "n2"])
        .node("node", NODE_METRICS)
        .ranked("held", &[("n2/green", "held")]);
    for model in &models {
        setup = setup.ranked(model, &[("n1/red", model), ("n2/green", model)]);
    }
    let stack = Stack::start(Shape::Linked, setup).await;
    let held = stack
        .client()
        .open(CHAT, &fixtures::chat("held", "hi", false))
        .await;
    green.stub.arrived(1).await;

    let asking = WAYS.map(|way| {
        let (client, body) = (stack.client(), way.0.request(&model(way), way.1));
        async move { client.post(way.0.path(), &body).await }
    });
    let leaving = async {
        eventually(
            "the replays wait for a place",
            Duration::from_secs(15),
            async || {
                let depth = stack.edge.scrape().await.sum("iop_edge_queue_depth", &[]);
                if depth == WAYS.len() as f64 {
                    Ok(())
                } else {
                    Err(depth.to_string())
                }
            },
        )
        .await;
        stack.nodes[1].process.signal(signal);
    };
    let (answers, ()) = tokio::join!(join_all(asking), leaving);
    for (way, answer) in WAYS.into_iter().zip(&answers) {
        let (model, what) = (model(way), format!("{signal} {way:?}: {}", answer.text()));
        assert_eq!((answer.status(), answer.complete), (200, true), "{what}");
        assert_eq!(attempts_of(answer), "2", "{what}");
        assert_eq!((red.attempts(&model), green.attempts(&model)), (2, 0), "{what}");
        let good = red.answers(way.0, &model);
        let expected = if way.1 {
            good.stream(WORDS).all().concat()
        } else {
            good.whole()
        };
        assert_bytes(&what, &answer.body, &expected);
    }
    let ways = WAYS.len() as u64;
    let eligible = rows(&[("provider_tunnel/available/transport_uncommitted/eligible", ways)]);
    edge_rows(&stack, ELIGIBILITY, &eligible).await;
    let redispatched = rows(&[("provider_tunnel/available/redispatched", ways)]);
    edge_rows(&stack, RESULTS, &redispatched).await;
    drop(held);
    eventually("nothing is in flight", SOON, async || {
        let busy = stack.edge.scrape().await.busy();
        if busy.is_empty() {
            Ok(())
        } else {
            Err(format!("{busy:?}"))
        }
    })
    .await;
}

#[test]
fn who_is_proven_available_is_asked_again_when_the_other_candidates_node_is_killed() {
    run(60, proven_fallback("KILL"));
}

#[test]
fn who_is_proven_available_is_asked_again_when_the_other_candidates_node_drains() {
    run(60, proven_fallback("TERM"));
}

/// One place, in which another request runs between the first stall and the replay.
async fn line_for_the_same(shape: Shape) {
    let between = Duration::from_millis(4_500);
    let up = Faulty::start("up").await;
    up.script("m", Script::series(vec![Act::Silence, Act::Silence], Act::Good));
    up.script("other", Script::always(Act::After(between, Box::new(Act::Good))));
    let setup = Setup::of(Provider::openai("up", &up.stub.url(), &["m", "other"]).capacity(1))
        .node("node", NODE_METRICS)
        .edge("gate", "max_elapsed = \"5s\"")
        .model("other", "up", "other")
        .model("m", "up", "m")
        .model_line("response_stall_timeout = \"1s\"");
    let stack = Stack::start(shape, setup).await;
    let started = Instant::now();
    let mut conn = stack.client().open(CHAT, &Api::Chat.request("m", true)).await;
    up.stub.arrived(1).await;
    let mut other = stack
        .client()
        .open(CHAT, &Api::Chat.request("other", false))
        .await;

    // Stall, line and stall are longer than the budget; both stalls alone are not.
    let answer = conn.answer().await.unwrap();
    let what = format!("{shape:?} after {:?}: {}", started.elapsed(), answer.text());
    assert_eq!((answer.status(), answer.complete), (200, true), "{what}");
    assert_eq!(attempts_of(&answer), "3", "{what}");
    assert!(started.elapsed() >= between + Duration::from_secs(2), "{what}");
    assert_bytes(
        &what,
        &answer.body,
        &up.answers(Api::Chat, "m").stream(WORDS).all().concat(),
    );
    assert_eq!(other.answer().await.unwrap().status(), 200);
    assert_eq!(asked(&up.stub), ["m", "other", "m", "m"], "{what}");
    stack.settled(SOON).await;
}

#[test]
fn the_line_for_the_provider_that_stalled_costs_no_max_elapsed() {
    run(60, both(line_for_the_same));
}

/// How long a trial counts that says nothing.
const TRIAL: Duration = Duration::from_secs(10);

async fn hanging_trial(shape: Shape) {
    let mut first = vec![Act::Status(Reply::error(503, "busy")); 5];
    first.push(Act::Silence);
    let route = Route::scripted("hangs", Script::series(first, Act::Good))
        .only(|api, stream| api == Api::Chat && !stream);
    let bench = Bench::start(shape, vec![route], |s| s.edge("ejection", "base = \"500ms\"")).await;
    let cell = bench.cells()[0];
    let second = bench.of_second(cell);
    for _ in 0..5 {
        bench.ask(cell).await.assert_clean(cell, &second, 2);
    }
    eventually("the ejection is over", SOON, async || {
        match provider(&bench.stack, "a-hangs").await {
            ejected if ejected["ejected_until"].is_string() => Err(ejected.to_string()),
            _ => Ok(()),
        }
    })
    .await;
    let begun = Instant::now();
    let body = cell.api.request(&cell.model(), cell.stream);
    let trial = bench.stack.client().open(cell.api.path(), &body).await;
    bench.primary.stub.arrived(6).await;
    let asked_again = eventually("another trial", TRIAL + SLACK, async || {
        let seen = bench.ask(cell).await;
        match seen.answer.header("x-provider") {
            Some("primary") => Ok(seen),
            other => {
                seen.assert_clean(cell, &second, 1);
                Err(format!("{other:?}"))
            }
        }
    });
    asked_again.await.assert_clean(cell, &bench.of_primary(cell), 1);
    assert!(begun.elapsed() >= TRIAL, "{shape:?}: after {:?}", begun.elapsed());
    // It was the trial, and the provider is back.
    bench
        .ask(cell)
        .await
        .assert_clean(cell, &bench.of_primary(cell), 1);
    drop(trial);
    bench.done().await;
}

#[test]
fn a_trial_that_hangs_is_followed_by_another_before_it_stalls() {
    run(60, both(hanging_trial));
}

/// A stream that says one word, then something of which nothing leaves yet, until the test has seen enough.
async fn trickles(mut ex: Exchange, enough: watch::Receiver<bool>) -> io::Result<()> {
    let api = Api::of_path(&ex.path).unwrap_or(Api::Chat);
    let target = ex.json()["model"].as_str().unwrap_or_default().to_owned();
    let answers = answers_of(api, &target);
    let second = answers.stream(3).preamble.len() + 1;
    let events = answers.stream(3).all();
    let mut pace = tokio::time::interval(Duration::from_millis(50));
    ex.sse().await?;
    ex.chunk(&events[..second].concat()).await?;
    let slow = &events[second];
    let mut sent = 0;
    while !*enough.borrow() {
        ex.until(pace.tick()).await?;
        if target == "usage" {
            ex.data(&fixtures::usage_chunk()).await?;
        } else if sent + 3 < slow.len() {
            ex.chunk(&slow[sent..=sent]).await?;
            sent += 1;
        }
    }
    ex.chunk(&slow[sent..]).await?;
    ex.chunk(&events[second + 1..].concat()).await?;
    ex.end().await
}

fn answers_of(api: Api, target: &str) -> Answers {
    Answers {
        api,
        provider: "up".to_owned(),
        target: target.to_owned(),
    }
}

async fn trickling(shape: Shape) {
    let enough = watch::channel(false).0;
    let stub = Stub::start({
        let enough = enough.clone();
        move |ex| trickles(ex, enough.subscribe())
    })
    .await;
    let setup = Setup::of(Provider::openai("up", &stub.url(), &["event", "usage"]))
        .edge("gate", "keepalive_interval = \"300ms\"");
    let stack = Stack::start(shape, setup).await;
    for (api, target) in [
        (Api::Chat, "event"),
        (Api::Responses, "event"),
        (Api::Chat, "usage"),
    ] {
        let what = format!("{shape:?} {api:?} {target}");
        enough.send_replace(false);
        let mut conn = stack.client().open(api.path(), &api.request(target, true)).await;
        assert_eq!(conn.head().await.unwrap().status, 200, "{what}");
        let mut text = String::new();
        for n in 1..=3 {
            let comment = format!("{what}: comment {n} while nothing leaves");
            text.push_str(&within(&comment, SOON, conn.until(COMMENT)).await);
        }
        enough.send_replace(true);
        text.push_str(&String::from_utf8_lossy(&conn.body().await.unwrap()));
        assert!(conn.complete(), "{what}: {text}");
        // Without its comments it is what the provider said, so none of them stands in an event.
        let expected = answers_of(api, target).stream(3).all().concat();
        assert_bytes(&what, text.replace(COMMENT, "").as_bytes(), &expected);
        for event in text.split_inclusive("\n\n") {
            let comment = event.contains(": keep-alive");
            assert!(!comment || event == COMMENT, "{what}: {event:?}");
        }
    }
    stack.settled(SOON).await;
}

#[test]
fn comments_go_out_while_what_the_provider_sends_does_not_leave() {
    run(60, both(trickling));
}

/// Judgements of a request whose words do not come whole: `STATUS-HOW`.
const JUDGED: [&str; 4] = ["400", "403", "404", "422"];
const HOWS: [&str; 3] = ["short", "cut", "hangs"];

async fn judges(mut ex: Exchange) -> io::Result<()> {
    if ex.method == "GET" {
        let all = JUDGED
            .iter()
            .flat_map(|s| HOWS.map(|h| json!({"id": format!("{s}-{h}"), "object": "model"})));
        let list = json!({"object": "list", "data": all.collect::<Vec<_>>()});
        return ex.json_reply(200, &list).await;
    }
    let target = ex.json()["model"].as_str().unwrap_or_default().to_owned();
    let (status, how) = target.split_once('-').unwrap_or_default();
    let status: u16 = status.parse().unwrap_or_default();
    let words = b"{\"error\":{\"message\":";
    if how == "short" {
        let head =
            format!("HTTP/1.1 {status} No\r\ncontent-type: application/json\r\ncontent-length: 200\r\n\r\n");
        ex.raw(head.as_bytes()).await?;
        ex.raw(words).await?;
        ex.cut(false);
        return Ok(());
    }
    ex.head(status, &[JSON]).await?;
    ex.chunk(words).await?;
    if how == "hangs" {
        ex.gone().await;
    }
    ex.cut(false);
    Ok(())
}

async fn half_a_judgement(shape: Shape) {
    let (judge, other) = (Stub::start(judges).await, Stub::start(judges).await);
    let targets: Vec<String> = JUDGED
        .iter()
        .flat_map(|status| HOWS.map(|how| format!("{status}-{how}")))
        .collect();
    let targets: Vec<&str> = targets.iter().map(String::as_str).collect();
    let stalls = "response_stall_timeout = \"1s\"";
    let mut setup = Setup::of(
        Provider::openai("judge", &judge.url(), &targets)
            .capacity(100)
            .line(stalls),
    )
    .provider(Provider::openai("other", &other.url(), &targets).line(stalls))
    .node("node", NODE_METRICS);
    for target in &targets {
        setup = setup.ranked(target, &[("judge", target), ("other", target)]);
    }
    let stack = Stack::start(shape, setup).await;
    let asking = targets.iter().flat_map(|target| WAYS.map(|way| (*target, way)));
    join_all(asking.map(|(target, (api, stream))| {
        let client = stack.client();
        async move {
            let answer = client.post(api.path(), &api.request(target, stream)).await;
            let what = format!("{shape:?} {target} {api:?} {stream}: {}", answer.text());
            assert_eq!(attempts_of(&answer), "1", "{what}");
            if target.ends_with("hangs") {
                answer.assert_error(504, "response_stalled");
            } else {
                answer.assert_error(502, "provider_disconnected");
            }
            assert_eq!(answer.header("x-should-retry"), Some("false"), "{what}");
        }
    }))
    .await;
    let seen = asked(&judge);
    for target in &targets {
        assert_eq!(count(&seen, target), WAYS.len(), "{shape:?} {target}");
    }
    assert_eq!(asked(&other).len(), 0, "{shape:?}");
    stack.settled(SOON).await;
    let page = stack.edge.scrape().await;
    let stalled = (JUDGED.len() * WAYS.len()) as f64;
    let counts = ["cut", "response_stalled"].map(|r| attempts(&page, r));
    assert_eq!(counts, [2.0 * stalled, stalled], "{shape:?}");
    // A stall is weighed all the same, once each.
    let cycles = rows(&[("provider_tunnel/available/transport_uncommitted/other", 16)]);
    edge_rows(&stack, ELIGIBILITY, &cycles).await;
}

#[test]
fn a_judgement_of_the_request_is_final_whatever_becomes_of_its_words() {
    run(60, both(half_a_judgement));
}

/// Answers as its target says when the test has seen that the stream is open.
async fn late(mut ex: Exchange, mut open: watch::Receiver<bool>) -> io::Result<()> {
    ex.until(opened(&mut open)).await?;
    let target = ex.json()["model"].as_str().unwrap_or_default().to_owned();
    let status = target.parse().unwrap_or_default();
    // More than a node reads at a time, so that the end of it is not there yet.
    ex.reply(status, &[JSON], wordy(1 << 20).as_bytes()).await
}

async fn large_and_late(shape: Shape) {
    let open = watch::channel(false).0;
    let stub = Stub::start({
        let open = open.clone();
        move |ex| late(ex, open.subscribe())
    })
    .await;
    // How it is counted: (target, attempt, outcome).
    let cases = [
        ("400", "http_4xx", "client_error"),
        ("422", "http_4xx", "client_error"),
        ("500", "http_5xx", "provider_error"),
    ];
    let targets = cases.map(|c| c.0);
    let setup = Setup::of(Provider::openai("up", &stub.url(), &targets))
        .node("node", NODE_METRICS)
        .edge("gate", "keepalive_open_after = \"200ms\"");
    let stack = Stack::start(shape, setup).await;
    for (target, result, outcome) in cases {
        for (api, path) in [(Api::Chat, CHAT), (Api::Responses, RESPONSES)] {
            let before = stack.edge.scrape().await;
            open.send_replace(false);
            let mut conn = stack.client().open(path, &api.request(target, true)).await;
            let head = conn.head().await.unwrap();
            assert_eq!((head.status, head.header("x-iop-attempts")), (200, Some("1")));
            conn.until(COMMENT).await;
            open.send_replace(true);
            let rest = String::from_utf8_lossy(&conn.body().await.unwrap()).into_owned();
            let what = format!("{shape:?} {target} {api:?}: {rest}");
            assert!(conn.complete(), "{what}");
            assert!(
                !rest.contains("[DONE]") && !rest.contains("response.completed"),
                "{what}"
            );
            let events: Vec<Value> = sse_data(&rest)
                .iter()
                .map(|data| serde_json::from_str(data).unwrap())
                .collect();
            let error = match api {
                Api::Chat => {
                    assert_eq!(events.len(), 1, "{what}");
                    &events[0]["error"]
                }
                Api::Responses => {
                    assert_gapless(&rest);
                    let kinds: Vec<&Value> = events.iter().map(|e| &e["type"]).collect();
                    assert_eq!(kinds, ["response.created", "response.failed"], "{what}");
                    &events[1]["response"]["error"]
                }
            };
            assert_eq!(error["code"], "provider_error", "{what}");
            assert!(
                error["message"].as_str().is_some_and(|m| m.contains(target)),
                "{what}"
            );

            stack.settled(SOON).await;
            let after = stack.edge.scrape().await;
            let counted =
                |name: &str, labels: &[(&str, &str)]| after.sum(name, labels) - before.sum(name, labels);
            assert_eq!(
                counted("iop_edge_attempts_total", &[("result", result)]),
                1.0,
                "{what}"
            );
            assert_eq!(counted("iop_edge_attempts_total", &[]), 1.0, "{what}");
            assert_eq!(
                counted("iop_edge_requests_total", &[("outcome", outcome)]),
                1.0,
                "{what}"
            );
            assert_eq!(counted("iop_edge_requests_total", &[]), 1.0, "{what}");
        }
    }
}

#[test]
fn a_large_error_after_a_keep_alive_opening_is_counted_as_what_it_is() {
    run(60, both(large_and_late));
}

/// A Responses stream that says nothing but that the request is too long, and what that cost.
fn too_long() -> Vec<u8> {
    let mut events = fixtures::response_events("resp_9", "m", &[]);
    events.truncate(1);
    let mut response = fixtures::response_object("resp_9", "m", "failed", &json!([]));
    response["error"] = json!({"code": "context_length_exceeded", "message": "too long"});
    response["usage"] = json!({"input_tokens": 7, "input_tokens_details": {"cached_tokens": 3}, "output_tokens": 2,
                               "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 9});
    events.push(json!({"type": "response.failed", "response": response}));
    fixtures::number(events)
        .iter()
        .flat_map(fixtures::named_event)
        .collect()
}

async fn failed_at_once(shape: Shape) {
    let open = watch::channel(false).0;
    let stub = Stub::start({
        let open = open.clone();
        move |mut ex| {
            let mut open = open.subscribe();
            async move {
                if ex.json()["model"] == "late" {
                    ex.until(opened(&mut open)).await?;
                }
                ex.sse().await?;
                ex.chunk(&too_long()).await?;
                ex.end().await
            }
        }
    })
    .await;
    let second = Faulty::start("second").await;
    let mut setup = Setup::of(Provider::openai("up", &stub.url(), &["early", "late"]))
        .provider(Provider::openai("second", &second.stub.url(), &["t"]))
        .node("node", NODE_METRICS)
        .edge("gate", "keepalive_open_after = \"1s\"");
    for model in ["early", "late"] {
        setup = setup.ranked(model, &[("up", model), ("second", "t")]);
    }
    let stack = Stack::start(shape, setup).await;
    for model in ["early", "late"] {
        let before = stack.edge.scrape().await;
        let mut conn = stack
            .client()
            .open(RESPONSES, &fixtures::responses(model, "hi", true))
            .await;
        let head = conn.head().await.unwrap();
        assert_eq!(
            (head.status, head.header("x-iop-attempts")),
            (200, Some("1")),
            "{model}"
        );
        if model == "late" {
            conn.until(COMMENT).await;
            open.send_replace(true);
        }
        let body = conn.body().await.unwrap();
        let text = String::from_utf8_lossy(&body).replace(COMMENT, "");
        let what = format!("{shape:?} {model}");
        assert!(conn.complete(), "{what}");
        assert_bytes(&what, text.as_bytes(), &too_long());
        stack.settled(SOON).await;
        let after = stack.edge.scrape().await;
        let counted =
            |name: &str, labels: &[(&str, &str)]| after.sum(name, labels) - before.sum(name, labels);
        let outcome = [("endpoint", "responses"), ("outcome", "client_error")];
        assert_eq!(counted("iop_edge_requests_total", &outcome), 1.0, "{what}");
        assert_eq!(counted("iop_edge_requests_total", &[]), 1.0, "{what}");
        assert_eq!(
            counted("iop_edge_attempts_total", &[("result", "http_4xx")]),
            1.0,
            "{what}"
        );
        assert_eq!(counted("iop_edge_attempts_total", &[]), 1.0, "{what}");
        for (kind, tokens) in [
            ("input", 7.0),
            ("output", 2.0),
            ("cached", 3.0),
            ("reasoning", 1.0),
        ] {
            assert_eq!(
                counted("iop_edge_tokens_total", &[("type", kind)]),
                tokens,
                "{what} {kind}"
            );
        }
        let reports = |kind| counted("iop_edge_usage_reports_total", &[("completeness", kind)]);
        assert_eq!((reports("complete"), reports("incomplete")), (1.0, 0.0), "{what}");
    }
    assert_eq!(second.all_attempts(), 0);
}

#[test]
fn a_response_that_fails_for_the_requests_sake_is_the_clients_error_and_its_usage_counts() {
    run(60, both(failed_at_once));
}

/// A node that advertises a limit of no time at all.
#[test]
fn a_first_content_limit_of_zero_is_none() {
    run(30, async {
        let stack = Stack::start_empty(Shape::Linked, Setup::default()).await;
        let mut with_zero = advertised("p", &["m"], 1);
        with_zero["first_content_timeout_ms"] = json!(0);
        let link = stack.edge.link.clone().unwrap();
        let mut node = FakeNode::dial(&link, "one", &advertisement("n1", &[with_zero])).await;
        stack.edge.lists(&["m".to_owned()], SOON).await;
        let mut conn = stack.client().open(CHAT, &fixtures::chat("m", "hi", false)).await;
        let tunnel = node.tunnel().await;
        // A moment in which a limit of nothing would be over.
        let early = tokio::time::timeout(Duration::from_millis(300), conn.head()).await;
        assert!(early.is_err(), "answered before the provider: {early:?}");
        let body = fixtures::chat_answer("m", "well");
        tunnel.complete(&body);
        let answer = conn.answer().await.unwrap();
        assert_eq!((answer.status(), answer.json()), (200, body));
    });
}
