//! Edges of recovery: who is asked third, what a wait may cost, what a cut answer, a refused run and an error after
//! content are worth, and what a trial and a cool-down leave to other requests (G16, G35, G36, G53, G55, G56, G58, §13).

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use iop_tests::client::{Answer, sse_data};
use iop_tests::config::{Provider, Setup};
use iop_tests::faults::{
    Act, Api, Bench, Faulty, Reply, Route, Script, Then, WORDS, assert_bytes, assert_own_answer, failures,
};
use iop_tests::liveness::{ELIGIBILITY, RESULTS, Rows, STALLS, edge_rows, node_rows, provider, rows};
use iop_tests::metrics::Page;
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{eventually, fixtures, run};
use serde_json::{Value, json};
use tokio::sync::watch;

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const EMBEDDINGS: &str = "/v1/embeddings";
const COMMENT: &str = ": keep-alive\n\n";
const NODE_METRICS: &str = "metrics_listen = \"127.0.0.1:0\"";
/// What two busy cores may add to a wait.
const SLACK: Duration = Duration::from_secs(3);
/// An answer that waited for nothing.
const AT_ONCE: Duration = Duration::from_millis(1_800);

/// Chat and Responses, whole and as a stream.
const WAYS: [(Api, bool); 4] = [
    (Api::Chat, false),
    (Api::Chat, true),
    (Api::Responses, false),
    (Api::Responses, true),
];

fn status(status: u16) -> Act {
    Act::Status(Reply::error(status, "no"))
}

fn limited(headers: &[(&str, &str)]) -> Act {
    let reply = Reply::error(429, "rate_limit_exceeded");
    Act::Status(
        headers
            .iter()
            .fold(reply, |r, (name, value)| r.header(name, value)),
    )
}

fn attempts_of(answer: &Answer) -> &str {
    answer.header("x-iop-attempts").unwrap_or_default()
}

/// Providers of one model per way, asked in order, all on one node.
struct Row {
    stack: Stack,
    providers: Vec<Faulty>,
}

impl Row {
    /// `line` stands in the table of each provider.
    async fn start(shape: Shape, scripts: &[Script], line: &str, gate: &str) -> Self {
        const NAMES: [&str; 3] = ["red", "green", "blue"];
        let mut providers = Vec::new();
        let mut setup = Setup::default()
            .nodes(&["n1"])
            .node("node", NODE_METRICS)
            .edge("gate", gate);
        let models: Vec<String> = WAYS.into_iter().map(Self::model).collect();
        let targets: Vec<&str> = models.iter().map(String::as_str).collect();
        for (name, script) in NAMES.into_iter().zip(scripts) {
            let faulty = Faulty::start(name).await;
            for target in &targets {
                faulty.script(target, script.clone());
            }
            setup = setup.provider(Provider::openai(name, &faulty.stub.url(), &targets).line(line));
            providers.push(faulty);
        }
        for model in &models {
            let candidates: Vec<(&str, &str)> = providers
                .iter()
                .map(|p| (p.name.as_str(), model.as_str()))
                .collect();
            setup = setup.ranked(model, &candidates);
        }
        let stack = Stack::start(shape, setup).await;
        Self { stack, providers }
    }

    fn model((api, stream): (Api, bool)) -> String {
        format!("{}.{}", api.name(), if stream { "stream" } else { "whole" })
    }

    async fn ask(&self, way: (Api, bool)) -> Answer {
        let (api, stream) = way;
        let body = api.request(&Self::model(way), stream);
        self.stack.client().post(api.path(), &body).await
    }

    fn attempts(&self, way: (Api, bool)) -> Vec<usize> {
        let target = Self::model(way);
        self.providers.iter().map(|p| p.attempts(&target)).collect()
    }

    /// Checks that an answer is the good one of this provider.
    fn assert_of(&self, n: usize, way: (Api, bool), answer: &Answer) {
        let (api, stream) = way;
        let answers = self.providers[n].answers(api, &Self::model(way));
        let expected = if stream {
            answers.stream(WORDS).all().concat()
        } else {
            answers.whole()
        };
        assert_eq!((answer.status(), answer.complete), (200, true), "{way:?}");
        assert_bytes(&Self::model(way), &answer.body, &expected);
    }
}

/// Two that stall and are proven available, and perhaps one that was not asked yet.
async fn third_attempt(shape: Shape) {
    let silent = || Script::always(Act::Silence);
    let recovers = || Script::once(Act::Silence);
    let good = Script::good;
    // What each provider does, how often it is asked, and whose answer it is.
    let cases: [(Vec<Script>, [usize; 3], Option<usize>); 5] = [
        (vec![silent(), silent(), good()], [1, 1, 1], Some(2)),
        (vec![recovers(), recovers(), good()], [1, 1, 1], Some(2)),
        (vec![recovers(), silent()], [2, 1, 0], Some(0)),
        (vec![recovers(), recovers()], [2, 1, 0], Some(0)),
        (vec![silent(), silent()], [2, 1, 0], None),
    ];
    let checks = cases.into_iter().map(|(scripts, attempts, whose)| async move {
        let row = Row::start(shape, &scripts, "response_stall_timeout = \"1s\"", "").await;
        let asking = WAYS.map(|way| {
            let row = &row;
            async move {
                let answer = row.ask(way).await;
                let what = format!("{shape:?} {way:?} of {attempts:?}: {}", answer.text());
                assert_eq!(row.attempts(way), attempts[..row.providers.len()], "{what}");
                assert_eq!(attempts_of(&answer), "3", "{what}");
                match whose {
                    Some(n) => row.assert_of(n, way, &answer),
                    None => answer.assert_error(504, "response_stalled"),
                }
            }
        });
        join_all(asking).await;
        let of_stalls = "provider_tunnel/available/transport_uncommitted";
        let ways = WAYS.len() as u64;
        let mut eligibility = rows(&[(&format!("{of_stalls}/eligible"), 2 * ways)]);
        if whose.is_none() {
            eligibility.insert(format!("{of_stalls}/budget_exhausted"), ways);
        }
        edge_rows(&row.stack, ELIGIBILITY, &eligibility).await;
        let replayed = rows(&[("provider_tunnel/available/redispatched", 2 * ways)]);
        edge_rows(&row.stack, RESULTS, &replayed).await;
        row.stack.settled(Duration::from_secs(5)).await;
    });
    join_all(checks).await;
}

#[test]
fn embedded_who_was_not_asked_comes_before_those_that_stalled() {
    run(60, third_attempt(Shape::Embedded));
}

#[test]
fn linked_who_was_not_asked_comes_before_those_that_stalled() {
    run(60, third_attempt(Shape::Linked));
}

/// When the provider of `left_early` gives its second sign of life.
const SIGN: Duration = Duration::from_millis(1_500);

/// Says nothing, or a head at once and a part of its answer later; never content, and never an end.
async fn hesitant(mut ex: Exchange) -> io::Result<()> {
    let body = ex.json();
    if !body.to_string().contains("signs") {
        ex.gone().await;
        return Ok(());
    }
    let stream = body["stream"] == true;
    let (media, part) = match Api::of_path(&ex.path) {
        _ if !stream => ("application/json", b"{\"id\":\"x\",".to_vec()),
        Some(Api::Responses) => (
            "text/event-stream",
            fixtures::named_event(&fixtures::response_events("resp_1", "m", &[])[0]),
        ),
        _ => {
            let role = fixtures::chat_chunk(&json!({"role": "assistant", "content": ""}), None);
            ("text/event-stream", format!("data: {role}\n\n").into_bytes())
        }
    };
    ex.head(200, &[("content-type", media)]).await?;
    ex.until(tokio::time::sleep(SIGN)).await?;
    ex.chunk(&part).await?;
    ex.gone().await;
    Ok(())
}

/// A client that leaves before a stall could be claimed: nothing stalled, so there is no cycle to tell of.
async fn left_early(shape: Shape) {
    let stub = Stub::start(hesitant).await;
    let limited = Provider::openai("up", &stub.url(), &["m"])
        .capacity(16)
        .line("response_stall_timeout = \"2s\"");
    let stack = Stack::start(shape, Setup::of(limited).node("node", NODE_METRICS)).await;
    let leaving = WAYS.into_iter().flat_map(|(api, stream)| {
        // Past the limit since its request, the second one is well within it since the last sign of the provider.
        [("silent", 1_400), ("signs", 2_800)].map(|(text, stays_ms)| {
            let body = match api {
                Api::Chat => fixtures::chat("m", text, stream),
                Api::Responses => fixtures::responses("m", text, stream),
            };
            let client = stack.client();
            async move {
                let conn = client.open(api.path(), &body).await;
                // How long a client stays is what this test is about.
                tokio::time::sleep(Duration::from_millis(stays_ms)).await;
                drop(conn);
            }
        })
    });
    join_all(leaving).await;
    stack.settled(Duration::from_secs(2)).await;
    stub.idle(Duration::from_secs(2)).await;
    let asked = stub.received().iter().filter(|r| r.method == "POST").count();
    assert_eq!(asked, 2 * WAYS.len());
    edge_rows(&stack, ELIGIBILITY, &Rows::new()).await;
    node_rows(&stack, STALLS, &Rows::new()).await;
    let page = stack.edge.scrape().await;
    let left = page.sum("iop_edge_requests_total", &[("outcome", "client_cancelled")]);
    assert_eq!(left, asked as f64, "{shape:?}");
}

#[test]
fn a_client_that_leaves_before_the_stall_limit_leaves_no_row() {
    run(60, async {
        tokio::join!(left_early(Shape::Embedded), left_early(Shape::Linked));
    });
}

/// Bodies that arrive in full by their `content-length` and are no JSON document.
const BROKEN: [&str; 5] = [
    r#"{"id": BAD"#,
    r#"{"a":1} trailing"#,
    r#"{"id":"x","choices":["#,
    r#"{"object":"list","data":[{"emb"#,
    r#"{"id":"x"},"#,
];

/// What a good provider answers, with the white space that some put around it.
fn good_answer(path: &str) -> String {
    let answer = match path {
        CHAT => fixtures::chat_answer("t", "well"),
        RESPONSES => {
            let output = json!([fixtures::message_item("well", "completed")]);
            fixtures::response_object("resp_1", "t", "completed", &output)
        }
        _ => json!({"object": "list", "model": "t",
                    "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}],
                    "usage": {"prompt_tokens": 2, "total_tokens": 2}}),
    };
    format!("\n {answer}\r\n")
}

async fn json_answer(mut ex: Exchange) -> io::Result<()> {
    let target = ex.json()["model"].as_str().unwrap_or_default().to_owned();
    let broken = target
        .strip_prefix("broken-")
        .and_then(|n| n.parse::<usize>().ok());
    let body = match broken {
        Some(n) => BROKEN[n].to_owned(),
        None => good_answer(&ex.path),
    };
    let headers = [("content-type", "application/json")];
    ex.reply(200, &headers, body.as_bytes()).await
}

async fn broken_json(shape: Shape) {
    let stub = Stub::start(json_answer).await;
    let targets: Vec<String> = (0..BROKEN.len()).map(|n| format!("broken-{n}")).collect();
    let targets: Vec<&str> = targets.iter().map(String::as_str).collect();
    let mut setup = Setup::of(Provider::openai("bad", &stub.url(), &targets))
        .provider(Provider::openai("good", &stub.url(), &["good"]))
        .ranked("well", &[("good", "good")]);
    for target in &targets {
        setup = setup
            .ranked(&format!("alone-{target}"), &[("bad", target)])
            .ranked(&format!("pair-{target}"), &[("bad", target), ("good", "good")]);
    }
    let stack = Stack::start(shape, setup).await;
    let client = stack.client();
    for path in [CHAT, RESPONSES, EMBEDDINGS] {
        let ask = async |model: &str| {
            let body = match path {
                CHAT => fixtures::chat(model, "hi", false),
                _ => json!({"model": model, "input": "hi"}),
            };
            client.post(path, &body).await
        };
        let good = |answer: &Answer, attempts: &str| {
            let what = format!("{shape:?} {path}: {}", answer.text());
            assert_eq!((answer.status(), answer.complete), (200, true), "{what}");
            assert_eq!(attempts_of(answer), attempts, "{what}");
            assert_bytes(&what, &answer.body, good_answer(path).as_bytes());
        };
        good(&ask("well").await, "1");
        for target in &targets {
            let answer = ask(&format!("alone-{target}")).await;
            answer.assert_error(502, "provider_error");
            assert_eq!(answer.header("x-should-retry"), Some("false"));
            assert_eq!(attempts_of(&answer), "1");
            good(&ask(&format!("pair-{target}")).await, "2");
        }
    }
    stack.settled(Duration::from_secs(2)).await;
    let page = stack.edge.scrape().await;
    let refused = 3 * 2 * BROKEN.len();
    assert_eq!(attempts(&page, "cut"), refused as f64, "{shape:?}");
    assert_eq!(attempts(&page, "success"), (3 + refused / 2) as f64, "{shape:?}");
}

#[test]
fn a_whole_answer_that_is_no_whole_json_fails_over_or_is_a_502() {
    run(60, async {
        tokio::join!(broken_json(Shape::Embedded), broken_json(Shape::Linked));
    });
}

/// A provider that asks for two seconds each time, within a budget of time.
async fn waits_within(shape: Shape, max_elapsed: &str, attempts: usize) {
    let always = Script::always(limited(&[("retry-after", "2")]));
    let row = Row::start(shape, &[always], "", &format!("max_elapsed = {max_elapsed:?}")).await;
    let asking = WAYS.map(|way| {
        let row = &row;
        async move {
            let started = Instant::now();
            let answer = row.ask(way).await;
            let (elapsed, what) = (started.elapsed(), format!("{shape:?} {max_elapsed} {way:?}"));
            let body = Reply::error(429, "rate_limit_exceeded").body_of("red");
            assert_own_answer(&what, &answer, 429, &body);
            assert_eq!(answer.header("retry-after"), Some("2"), "{what}");
            assert_eq!(answer.header("x-should-retry"), None, "{what}");
            assert_eq!(attempts_of(&answer), attempts.to_string(), "{what}");
            assert_eq!(row.attempts(way), [attempts], "{what}");
            let waits = Duration::from_secs(2) * u32::try_from(attempts - 1).unwrap();
            assert!(elapsed >= waits, "{what}: {elapsed:?}");
            assert!(elapsed < waits + AT_ONCE, "{what}: {elapsed:?}");
        }
    });
    join_all(asking).await;
    row.stack.settled(Duration::from_secs(2)).await;
}

#[test]
fn waiting_for_a_retry_after_is_part_of_max_elapsed() {
    run(60, async {
        // Three seconds leave room for one wait, of which the second would be the end.
        let cases = [("1s", 1), ("3s", 2), ("10s", 3)];
        let all = Shape::ALL
            .into_iter()
            .flat_map(|shape| cases.map(|(max, attempts)| waits_within(shape, max, attempts)));
        join_all(all).await;
    });
}

/// Runs that a scripted provider refuses: (model, script, status, `error.type`).
const REFUSALS: [(&str, &str, u16, &str); 3] = [
    ("r503", "status = 503", 503, "server_error"),
    (
        "r429",
        "status = 429, retry_after = \"30s\"",
        429,
        "rate_limit_error",
    ),
    ("r400", "status = 400", 400, "invalid_request_error"),
];
const WELL: &str = "the-second-one-is-well";

async fn refused_runs(shape: Shape) {
    let scripts: Vec<String> = REFUSALS
        .iter()
        .map(|(name, script, ..)| format!("{name:?} = {{ {script}, normalized = true }}"))
        .collect();
    let refusing = format!("{{ {} }}", scripts.join(", "));
    let well = format!("{{ \"w\" = {{ reply = {WELL:?}, chunks = 1, normalized = true }} }}");
    let targets: Vec<&str> = REFUSALS.iter().map(|r| r.0).collect();
    let mut setup = Setup::of(Provider::scripted("refusing", &targets, &refusing))
        .provider(Provider::scripted("well", &["w"], &well));
    for target in &targets {
        setup = setup
            .ranked(&format!("{target}-alone"), &[("refusing", target)])
            .ranked(&format!("{target}-pair"), &[("refusing", target), ("well", "w")]);
    }
    // Eight refusals of each target must not become an ejection.
    let stack = Stack::start(shape, setup.edge("ejection", "consecutive = 100")).await;
    for (api, stream) in WAYS {
        let ask = async |model: &str| {
            let body = api.request(model, stream);
            stack.client().post(api.path(), &body).await
        };
        for (name, _, status, kind) in REFUSALS {
            let own = |answer: &Answer| {
                let what = format!("{shape:?} {api:?} stream={stream} {name}: {}", answer.text());
                assert_eq!((answer.status(), answer.complete), (status, true), "{what}");
                let error =
                    json!({"message": "this answer is scripted", "type": kind, "param": null, "code": null});
                assert_eq!(answer.json(), json!({ "error": error }), "{what}");
                assert_eq!(answer.header("content-type"), Some("application/json"), "{what}");
                let after = (status == 429).then_some("30");
                assert_eq!(answer.header("retry-after"), after, "{what}");
                assert_eq!(attempts_of(answer), "1", "{what}");
            };
            // Asked again while it cools, nobody else being there, it says the same again.
            own(&ask(&format!("{name}-alone")).await);
            let answer = ask(&format!("{name}-pair")).await;
            if status == 400 {
                own(&answer);
                continue;
            }
            let what = format!("{shape:?} {api:?} stream={stream} {name}: {}", answer.text());
            assert_eq!((answer.status(), answer.complete), (200, true), "{what}");
            assert!(answer.text().contains(WELL), "{what}");
            // Who cools is not asked where another will do.
            let expected = if status == 429 { "1" } else { "2" };
            assert_eq!(attempts_of(&answer), expected, "{what}");
        }
    }
    stack.settled(Duration::from_secs(2)).await;
    let page = stack.edge.scrape().await;
    let counts = ["http_5xx", "rate_limited", "http_4xx", "success"].map(|r| attempts(&page, r));
    assert_eq!(counts, [8.0, 4.0, 8.0, 8.0], "{shape:?}");
    assert_eq!(page.sum("iop_edge_attempts_total", &[]), 28.0, "{shape:?}");
}

#[test]
fn a_run_that_is_refused_keeps_the_providers_status_and_words() {
    run(60, async {
        tokio::join!(refused_runs(Shape::Embedded), refused_runs(Shape::Linked));
    });
}

fn attempts(page: &Page, result: &str) -> f64 {
    page.sum("iop_edge_attempts_total", &[("result", result)])
}

fn usage_reports(page: &Page, completeness: &str) -> f64 {
    page.sum("iop_edge_usage_reports_total", &[("completeness", completeness)])
}

/// A stream that its provider ends with an error of its own after content: no success of anybody.
async fn error_after_content(shape: Shape) {
    let script = |then| {
        let fails = || status(500);
        let first = vec![fails(), fails(), fails(), fails(), Act::Content(3, then), fails()];
        Script::series(first, Act::Good)
    };
    let routes = vec![
        Route::scripted("chat", script(Then::Error))
            .only(|api, stream| api == Api::Chat && stream)
            .one_model(),
        Route::scripted("responses", script(Then::Failed))
            .only(|api, stream| api == Api::Responses && stream)
            .one_model(),
    ];
    let bench = Bench::start(shape, routes, |s| s.edge("ejection", "consecutive = 5")).await;
    for (route, incomplete) in [("chat", 1.0), ("responses", 0.0)] {
        let cell = bench.cells_of(route)[0];
        let replayed = async || {
            let seen = bench.ask(cell).await;
            seen.assert_clean(cell, &bench.of_second(cell), 2);
        };
        for _ in 0..4 {
            replayed().await;
        }
        bench.stack.edge.quiet(Duration::from_secs(2)).await;
        let before = bench.stack.edge.scrape().await;

        let seen = bench.ask(cell).await;
        let text = seen.answer.text();
        assert_eq!(
            (seen.answer.status(), seen.answer.complete),
            (200, true),
            "{route}"
        );
        assert!(text.contains("in band of primary"), "{route}: {text}");
        assert!(
            !text.contains("[DONE]") && !text.contains("response.completed"),
            "{text}"
        );
        bench.stack.edge.quiet(Duration::from_secs(2)).await;
        let after = bench.stack.edge.scrape().await;
        let counted = |of: &dyn Fn(&Page) -> f64| of(&after) - of(&before);
        let what = format!("{shape:?} {route}");
        assert_eq!(counted(&|p| attempts(p, "http_5xx")), 1.0, "{what}");
        assert_eq!(counted(&|p| p.sum("iop_edge_attempts_total", &[])), 1.0, "{what}");
        let requests = |p: &Page| {
            let labels = [("endpoint", route), ("outcome", "provider_error")];
            p.sum("iop_edge_requests_total", &labels)
        };
        assert_eq!(counted(&requests), 1.0, "{what}");
        assert_eq!(counted(&|p| p.sum("iop_edge_requests_total", &[])), 1.0, "{what}");
        assert_eq!(counted(&|p| usage_reports(p, "incomplete")), incomplete, "{what}");
        assert_eq!(
            counted(&|p| usage_reports(p, "complete")),
            1.0 - incomplete,
            "{what}"
        );

        // The row of failures goes on: one more is the fifth.
        let id = format!("a-{route}");
        assert_eq!(
            provider(&bench.stack, &id).await["ejected_until"],
            Value::Null,
            "{what}"
        );
        replayed().await;
        let seen = provider(&bench.stack, &id).await;
        assert!(seen["ejected_until"].is_string(), "{what}: {seen}");
        let seen = bench.ask(cell).await;
        seen.assert_clean(cell, &bench.of_second(cell), 1);
        bench.assert_counts(cell, 6, 6);
    }
    bench.done().await;
}

#[test]
fn embedded_an_error_after_content_is_no_success_and_ends_no_row_of_failures() {
    run(60, error_after_content(Shape::Embedded));
}

#[test]
fn linked_an_error_after_content_is_no_success_and_ends_no_row_of_failures() {
    run(60, error_after_content(Shape::Linked));
}

/// The data of a Responses stream's beginning; `number` numbers an event by its place.
fn beginning(number: impl Fn(usize) -> Option<u64>) -> Vec<Value> {
    let events = fixtures::response_events("resp_7", "t", &["some ", "words "]);
    let mut events: Vec<Value> = events.into_iter().take(6).collect();
    for (n, event) in events.iter_mut().enumerate() {
        match number(n) {
            Some(number) => event["sequence_number"] = json!(number),
            None => drop(event.as_object_mut().unwrap().remove("sequence_number")),
        }
    }
    events
}

/// Ways to number a stream that is cut: (model, events, the number that follows).
fn numberings() -> Vec<(&'static str, Vec<Value>, u64)> {
    let dense = || beginning(|n| Some(n as u64));
    let ping = |kind: &str| json!({ "type": kind });
    let mut pings = dense();
    pings.insert(1, ping("keepalive"));
    pings.insert(5, ping("ping"));
    pings.push(ping("keepalive"));
    let mut gaps_and_pings = beginning(|n| Some(n as u64 * 3));
    gaps_and_pings.insert(3, ping("ping"));
    vec![
        ("dense", dense(), 6),
        ("pings", pings, 6),
        ("gaps", beginning(|n| Some(n as u64 * 2)), 11),
        ("gaps-and-pings", gaps_and_pings, 16),
        ("from-one", beginning(|n| Some(n as u64 + 1)), 7),
        ("first-alone", beginning(|n| (n == 0).then_some(0)), 1),
        ("none", beginning(|_| None), 6),
    ]
}

async fn last_number(shape: Shape) {
    let stub = Stub::start(|mut ex| async move {
        let target = ex.json()["model"].as_str().unwrap_or_default().to_owned();
        let all = numberings();
        let (_, events, _) = all.iter().find(|(name, ..)| *name == target).unwrap();
        ex.sse().await?;
        for event in events {
            ex.chunk(&fixtures::named_event(event)).await?;
        }
        ex.cut(false);
        Ok(())
    })
    .await;
    let all = numberings();
    let targets: Vec<&str> = all.iter().map(|(name, ..)| *name).collect();
    let stack = Stack::start(shape, Setup::of(Provider::openai("up", &stub.url(), &targets))).await;
    for (name, events, next) in &all {
        let body = fixtures::responses(name, "hi", true);
        let answer = stack.client().post(RESPONSES, &body).await;
        let what = format!("{shape:?} {name}: {}", answer.text());
        assert_eq!((answer.status(), answer.complete), (200, true), "{what}");
        let mut seen: Vec<Value> = sse_data(&answer.text())
            .iter()
            .map(|data| serde_json::from_str(data).unwrap())
            .collect();
        let failed = seen.pop().unwrap();
        assert_eq!(seen, *events, "{what}");
        assert_eq!(failed["type"], "response.failed", "{what}");
        assert_eq!(failed["sequence_number"], *next, "{what}");
        assert_eq!(failed["response"]["id"], "resp_7", "{what}");
        assert_eq!(
            failed["response"]["error"]["code"], "provider_disconnected",
            "{what}"
        );
    }
    stack.settled(Duration::from_secs(2)).await;
}

#[test]
fn a_failure_that_the_gateway_tells_carries_the_number_after_the_providers_last() {
    run(60, async {
        tokio::join!(last_number(Shape::Embedded), last_number(Shape::Linked));
    });
}

/// A `retry-after-ms` that says nothing leaves the word to `retry-after`.
async fn nonsense_beside(shape: Shape) {
    let beside = |ms: &str| limited(&[("retry-after-ms", ms), ("retry-after", "3")]);
    let routes = vec![
        Route::once("negative", beside("-1")),
        Route::once("word", beside("soon")),
    ];
    let bench = Bench::start(shape, routes, |s| s).await;
    failures(bench.cells(), |cell| {
        let bench = Arc::clone(&bench);
        async move {
            let cool = Duration::from_secs(3);
            let started = Instant::now();
            let second = bench.of_second(cell);
            bench.ask(cell).await.assert_clean(cell, &second, 2);
            bench.ask(cell).await.assert_clean(cell, &second, 1);
            bench.assert_counts(cell, 1, 2);
            let back = eventually("the first provider is asked again", cool + SLACK, async || {
                let seen = bench.ask(cell).await;
                match seen.answer.header("x-provider") {
                    Some("primary") => Ok(seen),
                    other => Err(format!("{other:?}")),
                }
            });
            back.await.assert_clean(cell, &bench.of_primary(cell), 1);
            let elapsed = started.elapsed();
            assert!(elapsed >= cool, "{}: back after {elapsed:?}", cell.model());
        }
    })
    .await;
    bench.done().await;
}

#[test]
fn a_retry_after_ms_that_is_no_time_does_not_hide_the_retry_after() {
    run(60, async {
        tokio::join!(nonsense_beside(Shape::Embedded), nonsense_beside(Shape::Linked));
    });
}

/// How a stream that keep-alive opened fails: the target says it.
const LATE: [&str; 4] = ["own-400", "page-500", "in-band", "cut"];

async fn late_failure(mut ex: Exchange, mut opened: watch::Receiver<bool>) -> io::Result<()> {
    ex.until(async { opened.wait_for(|o| *o).await.is_ok() }).await?;
    let target = ex.json()["model"].as_str().unwrap_or_default().to_owned();
    let error = json!({"error": {"message": "own words", "type": "t", "param": null, "code": "own_code"}});
    match target.as_str() {
        "own-400" => ex.json_reply(400, &error).await,
        "page-500" => {
            let headers = [("content-type", "text/html")];
            ex.reply(500, &headers, b"<html>no</html>").await
        }
        "in-band" => {
            ex.sse().await?;
            ex.data(&error.to_string()).await?;
            ex.end().await
        }
        _ => {
            ex.cut(false);
            Ok(())
        }
    }
}

async fn named_as_asked(shape: Shape) {
    let opened = watch::channel(false).0;
    let stub = Stub::start({
        let opened = opened.clone();
        move |ex| late_failure(ex, opened.subscribe())
    })
    .await;
    let mut setup = Setup::of(Provider::openai("up", &stub.url(), &LATE))
        .edge("gate", "keepalive_open_after = \"200ms\"")
        .edge("gate", "keepalive_interval = \"100ms\"");
    for target in LATE {
        setup = setup.model(&format!("public-{target}"), "up", target);
    }
    let stack = Stack::start(shape, setup).await;
    for target in LATE {
        opened.send_replace(false);
        let model = format!("public-{target}");
        let body = fixtures::responses(&model, "hi", true);
        let mut conn = stack.client().open(RESPONSES, &body).await;
        assert_eq!(conn.head().await.unwrap().status, 200, "{target}");
        conn.until(COMMENT).await;
        opened.send_replace(true);
        let rest = String::from_utf8_lossy(&conn.body().await.unwrap()).into_owned();
        let what = format!("{shape:?} {target}: {rest}");
        assert!(conn.complete(), "{what}");
        let events: Vec<Value> = sse_data(&rest)
            .iter()
            .map(|data| serde_json::from_str(data).unwrap())
            .collect();
        let told: Vec<(&Value, &Value)> = events
            .iter()
            .map(|e| (&e["type"], &e["response"]["model"]))
            .collect();
        let model = json!(model);
        let expected = [json!("response.created"), json!("response.failed")];
        assert_eq!(told, [(&expected[0], &model), (&expected[1], &model)], "{what}");
    }
    stack.settled(Duration::from_secs(2)).await;
}

#[test]
fn a_response_that_fails_after_a_keep_alive_opening_names_the_model_as_it_was_asked_for() {
    run(60, async {
        tokio::join!(named_as_asked(Shape::Embedded), named_as_asked(Shape::Linked));
    });
}

/// A cool-down is a preference: it holds where another will do, and the only one is asked although it cools.
async fn cooling(shape: Shape) {
    let once = |name, after: &str| Route::once(name, limited(&[("retry-after", after)]));
    let ever = |name, after: &str| Route::new(name, limited(&[("retry-after", after)]));
    let routes = vec![
        once("alone-short", "3").alone(),
        once("alone-long", "30").alone(),
        ever("alone-ever", "30").alone(),
        once("pair-short", "3"),
        once("pair-long", "30"),
    ];
    // One attempt each: what a request gets is what the provider of its choice says.
    let bench = Bench::start(shape, routes, |s| s.edge("gate", "max_attempts = 1")).await;
    failures(bench.cells(), |cell| {
        let bench = Arc::clone(&bench);
        async move {
            let what = cell.model();
            let own = async |seconds: &str| {
                let seen = bench.ask(cell).await;
                let body = Reply::error(429, "rate_limit_exceeded").body_of("primary");
                assert_own_answer(&what, &seen.answer, 429, &body);
                assert_eq!(seen.answer.header("retry-after"), Some(seconds), "{what}");
                assert_eq!(seen.attempts(), 1, "{what}");
                assert!(seen.elapsed < AT_ONCE, "{what}: {:?}", seen.elapsed);
            };
            let seconds = if cell.route.ends_with("short") { "3" } else { "30" };
            own(seconds).await;
            if cell.route == "alone-ever" {
                own(seconds).await;
                own(seconds).await;
                bench.assert_counts(cell, 3, 0);
                return;
            }
            let alone = cell.route.starts_with("alone");
            let seen = bench.ask(cell).await;
            let answers = if alone {
                bench.of_primary(cell)
            } else {
                bench.of_second(cell)
            };
            seen.assert_clean(cell, &answers, 1);
            assert!(seen.elapsed < AT_ONCE, "{what}: {:?}", seen.elapsed);
            bench.assert_counts(cell, 1 + usize::from(alone), usize::from(!alone));
        }
    })
    .await;
    bench.done().await;
}

#[test]
fn who_cools_is_asked_at_once_where_nobody_else_is() {
    run(60, async {
        tokio::join!(cooling(Shape::Embedded), cooling(Shape::Linked));
    });
}

/// The trial after an ejection is decided when its answer begins, not when it ends.
async fn long_trial(shape: Shape) {
    let trial = |name, act| {
        let mut first = vec![status(503), status(503), status(503), status(503), status(503)];
        first.push(act);
        Route::scripted(name, Script::series(first, Act::Good)).one_model()
    };
    let routes = vec![
        trial("stream", Act::Content(1, Then::Silence)).streams(),
        // Too large to be held: it leaves as it comes.
        trial("large", Act::Large(Then::Silence)).only(|_, stream| !stream),
    ];
    let bench = Bench::start(shape, routes, |s| s.edge("ejection", "base = \"500ms\"")).await;
    let cells = bench.cells();
    failures(
        ["stream", "large"].map(|route| bench.cells_of(route)[0]).to_vec(),
        |cell| {
            let (bench, cells) = (Arc::clone(&bench), cells.clone());
            async move {
                let second = bench.of_second(cell);
                for _ in 0..5 {
                    bench.ask(cell).await.assert_clean(cell, &second, 2);
                }
                let id = format!("a-{}", cell.route);
                eventually(
                    "the ejection is over",
                    Duration::from_secs(5),
                    async || match provider(&bench.stack, &id).await {
                        ejected if ejected["ejected_until"].is_string() => Err(ejected.to_string()),
                        _ => Ok(()),
                    },
                )
                .await;

                let body = cell.api.request(&cell.model(), cell.stream);
                let mut trial = bench.stack.client().open(cell.api.path(), &body).await;
                let head = trial.head().await.unwrap();
                assert_eq!((head.status, head.header("x-provider")), (200, Some("primary")));
                trial.piece().await.unwrap().unwrap();

                // The trial still runs, and nobody has to go elsewhere because of it.
                for cell in cells.iter().filter(|c| c.route == cell.route) {
                    let seen: [_; 3] = std::array::from_fn(|_| bench.ask(*cell));
                    for seen in join_all(seen).await {
                        seen.assert_clean(*cell, &bench.of_primary(*cell), 1);
                    }
                }
                let more = async { while trial.piece().await.unwrap().is_some() {} };
                let over = tokio::time::timeout(Duration::from_millis(200), more).await;
                assert!(over.is_err(), "{}: the trial has ended", cell.model());
                assert!(!trial.complete());
            }
        },
    )
    .await;
    bench.done().await;
}

#[test]
fn a_trial_with_a_long_answer_is_over_when_its_answer_begins() {
    run(60, async {
        tokio::join!(long_trial(Shape::Embedded), long_trial(Shape::Linked));
    });
}
