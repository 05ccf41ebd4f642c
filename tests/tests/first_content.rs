//! Who says nothing is told from who thinks: `first_content_timeout`, lively providers, long silences, and streams that a
//! keep-alive comment opened before anybody had content (G52, G53, G54).

use std::sync::Arc;
use std::time::Duration;

use iop_tests::client::sse_data;
use iop_tests::faults::{
    Act, Api, Bench, Cell, PRIMARY, Reply, Route, Then, WORDS, assert_bytes, assert_gapless, failures,
    typed_error,
};
use iop_tests::run;
use iop_tests::stack::Shape;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(1);
const SLACK: Duration = Duration::from_secs(3);
const FIRST_CONTENT: &str = "first_content_timeout = \"1s\"";

fn comments() -> Act {
    Act::Comments(Duration::from_millis(200))
}

fn without_content() -> Vec<Route> {
    let limited = |route: Route| route.line(FIRST_CONTENT);
    vec![
        limited(Route::new("comments", comments())).streams(),
        limited(Route::new("preamble", Act::Preamble(Then::Silence))).streams(),
        limited(Route::new("head", Act::Head(Then::Silence))),
        limited(Route::new("silence", Act::Silence)),
        // The model's value wins over the provider's.
        Route::new("by-model", comments())
            .streams()
            .line("first_content_timeout = \"30s\"")
            .model_line(FIRST_CONTENT),
    ]
}

async fn no_content(shape: Shape) {
    let mut routes = without_content();
    routes.push(
        Route::new("alone", comments())
            .streams()
            .line(FIRST_CONTENT)
            .alone(),
    );
    routes.push(
        Route::new("alone-silent", Act::Silence)
            .line(FIRST_CONTENT)
            .alone(),
    );
    let bench = Bench::start(shape, routes, |s| s).await;
    failures(bench.cells(), |cell| {
        let bench = Arc::clone(&bench);
        async move {
            let (seen, what) = (bench.ask(cell).await, cell.model());
            if cell.route.starts_with("alone") {
                seen.answer.assert_error(504, "first_content_timeout");
                assert_eq!(seen.answer.header("x-should-retry"), Some("false"), "{what}");
                assert_eq!(seen.attempts(), 1, "{what}");
                bench.assert_counts(cell, 1, 0);
            } else {
                seen.assert_clean(cell, &bench.of_second(cell), 2);
                bench.assert_counts(cell, 1, 1);
            }
            assert!(seen.elapsed >= LIMIT, "{what}: {:?}", seen.elapsed);
            assert!(seen.elapsed <= LIMIT + SLACK, "{what}: {:?}", seen.elapsed);
        }
    })
    .await;
    bench.done().await;
    let page = bench.stack.edge.scrape().await;
    let count = |result| page.sum("iop_edge_attempts_total", &[("result", result)]);
    let cells = bench.cells().len() as f64;
    assert_eq!(
        (count("first_content_timeout"), count("response_stalled")),
        (cells, 0.0)
    );
    // It is no liveness cycle (§13).
    assert_eq!(page.sum("iop_edge_liveness_recovery_eligibility_total", &[]), 0.0);
}

#[test]
fn embedded_failover_when_no_content_comes_in_time() {
    run(60, no_content(Shape::Embedded));
}

#[test]
fn linked_failover_when_no_content_comes_in_time() {
    run(60, no_content(Shape::Linked));
}

/// Words of the lively stream, one each two seconds.
const LIVELY: usize = 10;
const STEP: Duration = Duration::from_secs(2);
const SILENCE: Duration = Duration::from_secs(6);

async fn nobody_is_cut_off(shape: Shape) {
    let lively = Act::Paced {
        words: LIVELY,
        first: Duration::ZERO,
        gap: STEP,
    };
    let thinking = Act::Paced {
        words: WORDS,
        first: SILENCE,
        gap: Duration::ZERO,
    };
    let routes = vec![
        Route::new("lively", lively)
            .streams()
            .line("response_stall_timeout = \"5s\"")
            .line("first_content_timeout = \"5s\""),
        Route::new("thinking", thinking.clone()),
        Route::new("preset", thinking).model_line("liveness = \"default\""),
    ];
    let bench = Bench::start(shape, routes, |s| s).await;
    failures(bench.cells(), |cell| {
        let bench = Arc::clone(&bench);
        async move {
            let seen = bench.ask(cell).await;
            let (words, least) = match cell.route {
                "lively" => (LIVELY, STEP * 10),
                _ => (WORDS, SILENCE),
            };
            seen.assert_clean_words(cell, &bench.of_primary(cell), 1, words);
            bench.assert_counts(cell, 1, 0);
            assert!(seen.elapsed >= least, "{}: {:?}", cell.model(), seen.elapsed);
        }
    })
    .await;
    bench.done().await;
}

#[test]
fn no_failover_from_the_slow_but_lively_and_from_those_who_think() {
    run(90, async {
        tokio::join!(
            nobody_is_cut_off(Shape::Embedded),
            nobody_is_cut_off(Shape::Linked)
        );
    });
}

const COMMENT: &str = ": keep-alive\n\n";

/// After the opening.
fn late(act: Act) -> Act {
    Act::After(Duration::from_millis(700), Box::new(act))
}

fn opened_early() -> Vec<Route> {
    let busy = || Act::Status(Reply::error(503, "own_code"));
    let routes = [
        Route::new("silence", Act::Silence).stalls(),
        Route::new("preamble", Act::Preamble(Then::Silence)).stalls(),
        Route::new("comments", comments()).line(FIRST_CONTENT),
        Route::new("then-503", Act::Preamble(Then::Silence))
            .stalls()
            .then(busy()),
        Route::new("then-400", Act::Silence)
            .stalls()
            .then(Act::Status(Reply::error(400, "own_code"))),
        Route::new("then-refused", Act::Silence).stalls().then_refused(),
        Route::new("late-500", late(Act::Status(Reply::error(500, "first")))),
        Route::new("late-cut", late(Act::HangUp)),
        // Its own `Retry-After` is waited for, with the client's stream open.
        Route::once(
            "waits",
            Act::Status(Reply::error(429, "busy").header("retry-after", "1")),
        )
        .alone(),
        Route::new("then-cut", Act::Silence)
            .stalls()
            .then(Act::Preamble(Then::Cut)),
    ];
    routes.into_iter().map(Route::streams).collect()
}

async fn check_opened(bench: Arc<Bench>, cell: Cell) {
    let (seen, what) = (bench.ask(cell).await, cell.model());
    let (answer, text) = (&seen.answer, seen.answer.text());
    assert_eq!((answer.status(), answer.complete), (200, true), "{what}: {text}");
    // Its value at opening: the first attempt was under way.
    assert_eq!(seen.attempts(), 1, "{what}");
    let media = answer.header("content-type").unwrap_or_default();
    assert!(media.starts_with("text/event-stream"), "{what}: {media}");
    assert_eq!(answer.header("x-provider"), None, "{what}: a provider's header");
    assert!(answer.header("x-iop-request-id").is_some(), "{what}");
    assert!(text.starts_with(COMMENT), "{what}: {text}");
    assert!(text.matches(COMMENT).count() >= 2, "{what}: {text}");
    let events = text.replace(COMMENT, "");
    if cell.route == "waits" {
        let expected = bench.of_primary(cell).stream(WORDS).all().concat();
        assert_bytes(&what, events.as_bytes(), &expected);
        bench.assert_counts(cell, 2, 0);
        return;
    }
    assert!(
        !text.contains(PRIMARY),
        "{what}: a trace of the first attempt: {text}"
    );
    let code = match cell.route {
        "then-503" | "then-400" => "own_code",
        "then-refused" => "provider_unreachable",
        "then-cut" => "provider_disconnected",
        _ => {
            let expected = bench.of_second(cell).stream(WORDS).all().concat();
            assert_bytes(&what, events.as_bytes(), &expected);
            bench.assert_counts(cell, 1, 1);
            return;
        }
    };
    bench.assert_counts(cell, 1, usize::from(cell.route != "then-refused"));
    assert!(
        !text.contains("[DONE]") && !text.contains("response.completed"),
        "{what}: {text}"
    );
    if cell.api == Api::Chat {
        let error = typed_error(cell.api, &bench.of_second(cell), 0, &events);
        assert_eq!(error["code"], code, "{what}: {text}");
        return;
    }
    let all: Vec<Value> = sse_data(&events)
        .iter()
        .map(|d| serde_json::from_str(d).unwrap())
        .collect();
    assert_gapless(&events);
    let types: Vec<&str> = all.iter().filter_map(|e| e["type"].as_str()).collect();
    assert_eq!(types, ["response.created", "response.failed"], "{what}: {text}");
    assert_eq!(all[1]["response"]["error"]["code"], code, "{what}: {text}");
    assert_eq!(all[1]["response"]["status"], "failed", "{what}: {text}");
}

async fn keepalive_opening(shape: Shape) {
    let bench = Bench::start(shape, opened_early(), |s| {
        s.edge("gate", "keepalive_open_after = \"300ms\"")
            .edge("gate", "keepalive_interval = \"100ms\"")
    })
    .await;
    failures(bench.cells(), |cell| check_opened(Arc::clone(&bench), cell)).await;
    bench.done().await;
}

#[test]
fn failover_is_still_possible_after_a_keep_alive_opening() {
    run(60, async {
        tokio::join!(
            keepalive_opening(Shape::Embedded),
            keepalive_opening(Shape::Linked)
        );
    });
}
