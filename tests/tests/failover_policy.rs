//! What forbids a replay, and what `Retry-After` does: a wait where nobody else is there, a cool-down where somebody
//! is (G36, G55, §13).

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::StreamExt;
use iop_tests::faults::{
    Act, Api, Bench, Cell, Reply, Route, Script, Then, ask, assert_own_answer, failures,
};
use iop_tests::stack::Shape;
use iop_tests::{eventually, run};
use serde_json::{Value, json};

const STALL: Duration = Duration::from_secs(1);
const GRACE: Duration = Duration::from_secs(7);
/// What two busy cores may add to a wait.
const SLACK: Duration = Duration::from_secs(3);

fn status(status: u16, code: &str) -> Act {
    Act::Status(Reply::error(status, code))
}

fn limited(header: &str, value: &str) -> Act {
    Act::Status(Reply::error(429, "rate_limit_exceeded").header(header, value))
}

/// Failures that would be replayed if nothing forbade it.
fn replayable() -> Vec<Route> {
    vec![
        Route::new("500", status(500, "internal")),
        Route::new("429", status(429, "rate_limit_exceeded")),
        Route::new("reset", Act::Reset),
        Route::new("cut", Act::Preamble(Then::Cut)),
        Route::new("silence", Act::Silence).stalls(),
    ]
}

/// The one attempt's own failure, and nobody else was asked.
async fn no_replay(bench: Arc<Bench>, cell: Cell) {
    let seen = bench.ask(cell).await;
    let (what, answer) = (cell.model(), &seen.answer);
    assert_eq!(seen.attempts(), 1, "{what}: {}", answer.text());
    bench.assert_counts(cell, usize::from(cell.route != "refused"), 0);
    match cell.route {
        "500" => assert_own_answer(
            &what,
            answer,
            500,
            &Reply::error(500, "internal").body_of("primary"),
        ),
        "429" => {
            let body = Reply::error(429, "rate_limit_exceeded").body_of("primary");
            assert_own_answer(&what, answer, 429, &body);
        }
        "reset" | "cut" => answer.assert_error(502, "provider_disconnected"),
        "silence" => answer.assert_error(504, "response_stalled"),
        "refused" => answer.assert_error(502, "provider_unreachable"),
        other => panic!("no expectation for {other}"),
    }
    assert_eq!(answer.header("x-should-retry"), Some("false"), "{what}");
    assert!(seen.elapsed <= STALL + GRACE, "{what}: {:?}", seen.elapsed);
}

async fn one_attempt_allowed(shape: Shape) {
    let mut routes = replayable();
    routes.push(Route::refused("refused"));
    let bench = Bench::start(shape, routes, |s| s.edge("gate", "max_attempts = 1")).await;
    failures(bench.cells(), |cell| no_replay(Arc::clone(&bench), cell)).await;
    bench.done().await;
}

#[test]
fn no_failover_when_one_attempt_is_all_there_is() {
    run(60, async {
        tokio::join!(
            one_attempt_allowed(Shape::Embedded),
            one_attempt_allowed(Shape::Linked)
        );
    });
}

async fn replay_turned_off(shape: Shape) {
    let mut routes: Vec<Route> = replayable()
        .into_iter()
        .map(|r| r.line("replay = false"))
        .collect();
    routes.push(Route::new("into", status(500, "internal")).second_line("replay = false"));
    let bench = Bench::start(shape, routes, |s| s).await;
    failures(bench.cells(), |cell| {
        let bench = Arc::clone(&bench);
        async move {
            if cell.route != "into" {
                return no_replay(bench, cell).await;
            }
            // It may still be where a replay goes to.
            bench
                .ask(cell)
                .await
                .assert_clean(cell, &bench.of_second(cell), 2);
            bench.assert_counts(cell, 1, 1);
        }
    })
    .await;
    bench.done().await;
}

#[test]
fn no_failover_away_from_a_provider_with_replay_turned_off() {
    run(60, async {
        tokio::join!(
            replay_turned_off(Shape::Embedded),
            replay_turned_off(Shape::Linked)
        );
    });
}

/// A request whose tool runs at the provider, or at the client.
fn with_tool(cell: Cell, hosted: bool) -> Value {
    let mut body = cell.api.request(&cell.model(), cell.stream);
    match (cell.api, hosted) {
        (Api::Chat, true) => body["web_search_options"] = json!({}),
        (Api::Chat, false) => body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]),
        (Api::Responses, true) => body["tools"] = json!([{"type": "web_search"}]),
        (Api::Responses, false) => {
            let function = json!({"type": "function", "name": "f", "parameters": {}});
            body["tools"] = json!([function, {"type": "local_shell"}, {"type": "custom", "name": "c"},
                                   {"type": "namespace", "name": "n", "tools": [function]}]);
        }
    }
    body
}

async fn hosted_tools(shape: Shape) {
    let routes = vec![
        Route::new("500", status(500, "internal")),
        Route::new("client-tool", status(500, "internal")),
        Route::refused("refused"),
    ];
    let bench = Bench::start(shape, routes, |s| s).await;
    failures(bench.cells(), |cell| {
        let bench = Arc::clone(&bench);
        async move {
            let body = with_tool(cell, cell.route != "client-tool");
            let answer = bench.stack.client().post(cell.api.path(), &body).await;
            let attempts = answer.header("x-iop-attempts");
            if cell.route == "500" {
                assert_eq!((answer.status(), attempts), (500, Some("1")), "{}", answer.text());
                bench.assert_counts(cell, 1, 0);
            } else {
                assert_eq!((answer.status(), attempts), (200, Some("2")), "{}", answer.text());
                bench.assert_counts(cell, usize::from(cell.route != "refused"), 1);
            }
        }
    })
    .await;
    bench.done().await;
}

#[test]
fn no_failover_with_a_hosted_tool_unless_nothing_was_sent() {
    run(60, async {
        tokio::join!(hosted_tools(Shape::Embedded), hosted_tools(Shape::Linked));
    });
}

fn http_date(ahead: Duration) -> String {
    httpdate::fmt_http_date(SystemTime::now() + ahead)
}

/// (route, at least, attempts); the provider is alone.
fn waits() -> Vec<(Route, Duration, usize)> {
    let ms = Duration::from_millis;
    let once = |name, header: &str, value: &str| Route::once(name, limited(header, value)).alone();
    vec![
        (once("429-2s", "retry-after", "2"), ms(2_000), 2),
        (once("429-700ms", "retry-after-ms", "700"), ms(700), 2),
        // The date is written when the request goes out: four whole seconds ahead are at least three.
        (
            once("429-date", "retry-after", &http_date(ms(4_000))),
            ms(2_900),
            2,
        ),
        (
            Route::once(
                "503-1s",
                Act::Status(Reply::error(503, "busy").header("retry-after", "1")),
            )
            .alone(),
            ms(1_000),
            2,
        ),
        (
            Route::new("429-ever", limited("retry-after-ms", "600")).alone(),
            ms(1_200),
            3,
        ),
        // Everybody was asked; the one that said when is asked again.
        (
            Route::new("500-429", status(500, "internal"))
                .then_script(Script::once(limited("retry-after-ms", "700"))),
            ms(700),
            3,
        ),
        (
            Route::new("429-30s", limited("retry-after", "30")).alone(),
            ms(0),
            1,
        ),
        (
            Route::new("429-6s", limited("retry-after-ms", "6000")).alone(),
            ms(0),
            1,
        ),
    ]
}

async fn waits_and_asks_again(shape: Shape) {
    let table = waits();
    let routes = table.iter().map(|(route, ..)| route.clone()).collect();
    let bench = Bench::start(shape, routes, |s| s).await;
    let table: Arc<Vec<_>> = Arc::new(table.iter().map(|(r, least, n)| (r.name, *least, *n)).collect());
    failures(bench.cells(), |cell| {
        let (bench, table) = (Arc::clone(&bench), Arc::clone(&table));
        async move {
            if cell.route == "429-date" {
                let date = http_date(Duration::from_secs(4));
                bench
                    .primary
                    .script(&cell.target(), Script::once(limited("retry-after", &date)));
            }
            let seen = bench.ask(cell).await;
            let (_, least, attempts) = *table.iter().find(|(name, ..)| *name == cell.route).unwrap();
            let (what, answer) = (cell.model(), &seen.answer);
            if matches!(cell.route, "429-ever" | "429-30s" | "429-6s") {
                let body = Reply::error(429, "rate_limit_exceeded").body_of("primary");
                assert_own_answer(&what, answer, 429, &body);
                let said = [answer.header("retry-after"), answer.header("retry-after-ms")];
                let expected = match cell.route {
                    "429-ever" => [None, Some("600")],
                    "429-30s" => [Some("30"), None],
                    _ => [None, Some("6000")],
                };
                assert_eq!(said, expected, "{what}");
                assert_eq!(answer.header("x-should-retry"), None, "{what}");
                assert_eq!(seen.attempts(), attempts, "{what}");
            } else if cell.route == "500-429" {
                seen.assert_clean(cell, &bench.of_second(cell), attempts);
                bench.assert_counts(cell, 1, 2);
            } else {
                seen.assert_clean(cell, &bench.of_primary(cell), attempts);
            }
            if cell.route != "500-429" {
                bench.assert_counts(cell, attempts, 0);
            }
            assert!(
                seen.elapsed >= least,
                "{what}: asked again after {:?}",
                seen.elapsed
            );
            let most = if cell.route == "429-date" {
                Duration::from_secs(4)
            } else {
                least
            };
            assert!(seen.elapsed <= most + SLACK, "{what}: {:?}", seen.elapsed);
        }
    })
    .await;
    bench.done().await;
}

#[test]
fn a_short_retry_after_is_waited_for_where_failover_has_nowhere_to_go() {
    run(60, async {
        tokio::join!(
            waits_and_asks_again(Shape::Embedded),
            waits_and_asks_again(Shape::Linked)
        );
    });
}

/// How long the short cool-down is.
const COOL: Duration = Duration::from_millis(2_500);

async fn cool_down(shape: Shape) {
    let date = http_date(Duration::from_secs(30));
    let busy = Reply::error(503, "busy").header("retry-after", "30");
    let routes = vec![
        Route::once("seconds", limited("retry-after", "30")),
        Route::once("ms", limited("retry-after-ms", "30000")),
        Route::once("date", limited("retry-after", &date)),
        Route::once("503", Act::Status(busy)),
        Route::once("short", limited("retry-after-ms", "2500")),
    ];
    let bench = Bench::start(shape, routes, |s| s).await;
    failures(bench.cells(), |cell| {
        let bench = Arc::clone(&bench);
        async move {
            let second = bench.of_second(cell);
            let started = Instant::now();
            bench.ask(cell).await.assert_clean(cell, &second, 2);
            for _ in 0..3 {
                let seen = bench.ask(cell).await;
                if cell.route == "short" && started.elapsed() >= COOL {
                    break;
                }
                seen.assert_clean(cell, &second, 1);
                assert_eq!(
                    bench.primary.attempts(&cell.target()),
                    1,
                    "{}: asked while it cools",
                    cell.model()
                );
            }
            if cell.route != "short" {
                return;
            }
            let back = eventually("the first provider is asked again", COOL + SLACK, async || {
                let seen = bench.ask(cell).await;
                match seen.answer.header("x-provider") {
                    Some("primary") => Ok(seen),
                    other => Err(format!("{other:?}")),
                }
            })
            .await;
            back.assert_clean(cell, &bench.of_primary(cell), 1);
            assert!(
                started.elapsed() >= COOL,
                "{}: back after {:?}",
                cell.model(),
                started.elapsed()
            );
        }
    })
    .await;
    bench.done().await;
}

#[test]
fn retry_after_is_a_cool_down_in_all_its_spellings_where_failover_has_a_place() {
    run(60, async {
        tokio::join!(cool_down(Shape::Embedded), cool_down(Shape::Linked));
    });
}

const CLIENT_ERRORS: usize = 1_000;

async fn client_errors(shape: Shape) {
    let routes = vec![Route::new("400", status(400, "invalid_request_error")).one_model()];
    let bench = Bench::start(shape, routes, |s| s).await;
    let (client, cells) = (bench.stack.client(), bench.cells());
    let seen: Vec<(u16, usize)> = futures_util::stream::iter(0..CLIENT_ERRORS)
        .map(|n| {
            let (client, cell) = (client.clone(), cells[n % cells.len()]);
            async move {
                let seen = ask(&client, cell).await;
                (seen.answer.status(), seen.attempts())
            }
        })
        .buffer_unordered(24)
        .collect()
        .await;
    assert_eq!(seen.len(), CLIENT_ERRORS);
    assert!(
        seen.iter().all(|s| *s == (400, 1)),
        "{shape:?}: something else than one 400"
    );
    bench.assert_counts(cells[0], CLIENT_ERRORS, 0);
    for provider in bench.stack.edge.admin("providers").await {
        assert_eq!(provider["ejected_until"], Value::Null, "{provider}");
        assert_eq!(provider["overlay"], Value::Null, "{provider}");
        assert_eq!(provider["effective_capacity"], provider["capacity"], "{provider}");
    }
    bench.primary.script(&cells[0].target(), Script::good());
    for cell in cells {
        bench
            .ask(cell)
            .await
            .assert_clean(cell, &bench.of_primary(cell), 1);
    }
    bench.done().await;
}

#[test]
fn a_thousand_client_errors_cause_no_failover_and_no_ejection() {
    run(120, async {
        client_errors(Shape::Embedded).await;
        client_errors(Shape::Linked).await;
    });
}
