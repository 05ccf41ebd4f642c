//! The fault matrix before content: whatever a first provider does, the client sees one clean answer of the second
//! one; what is the request's own fault is passed on after one attempt; when everybody fails, the last answer counts
//! (G52, G55, G58, G59).

use std::sync::Arc;
use std::time::Duration;

use iop_tests::faults::{Act, Api, Bench, Cell, Reply, Route, Then, assert_own_answer, failures};
use iop_tests::run;
use iop_tests::stack::Shape;

/// No cell without a silence has a reason to wait.
const AT_ONCE: Duration = Duration::from_secs(3);
const STALL: Duration = Duration::from_secs(1);
/// Fence, probe and replay after a stall (004: bounded, in parallel, joined once).
const GRACE: Duration = Duration::from_secs(7);

fn status(status: u16, code: &str) -> Act {
    Act::Status(Reply::error(status, code))
}

fn before_content() -> Vec<Route> {
    let limited = Reply::error(429, "rate_limit_exceeded");
    vec![
        Route::once(
            "429-once",
            Act::Status(limited.clone().header("retry-after", "2")),
        ),
        Route::new("429-ever", Act::Status(limited)),
        Route::once("500-once", status(500, "internal")),
        Route::new("503-ever", status(503, "overloaded")),
        Route::once("502-html", Act::Status(Reply::html(502))),
        Route::new(
            "500-large",
            Act::Status(Reply::error(500, "").body(&"{} ".repeat(200_000))),
        ),
        Route::new("500-cut", Act::StatusThen(500, Then::Cut)),
        Route::new("500-hang", Act::StatusThen(500, Then::Silence)).stalls(),
        Route::once(
            "302-once",
            Act::Status(Reply::error(302, "").header("location", "/v1/elsewhere")),
        ),
        Route::once("200-html", Act::Status(Reply::html(200))),
        Route::once("408-once", status(408, "timeout")),
        Route::once("409-once", status(409, "conflict")),
        Route::once("425-once", status(425, "too_early")),
        Route::refused("refused"),
        Route::new("reset", Act::Reset),
        Route::new("hang-up", Act::HangUp),
        Route::new("silence", Act::Silence).stalls(),
        Route::new("head-silence", Act::Head(Then::Silence)).stalls(),
        Route::new("head-cut", Act::Head(Then::Cut)),
        Route::new("head-end", Act::Head(Then::End)),
        Route::new("preamble-silence", Act::Preamble(Then::Silence)).stalls(),
        Route::new("preamble-cut", Act::Preamble(Then::Cut)),
        Route::new("preamble-end", Act::Preamble(Then::End)),
        Route::new("preamble-error", Act::Preamble(Then::Error)),
        Route::new("preamble-failed", Act::Preamble(Then::Failed))
            .only(|api, stream| stream && api == Api::Responses),
        Route::new("malformed-first", Act::Malformed(0)).streams(),
    ]
}

/// Where the first provider is silent, and the answer has to wait for its stall.
fn is_silent(cell: Cell) -> bool {
    cell.route.ends_with("silence")
}

async fn one_clean_answer(shape: Shape) {
    let bench = Bench::start(shape, before_content(), |s| s).await;
    let cells = bench.cells();
    failures(cells.clone(), |cell| check_clean(Arc::clone(&bench), cell)).await;
    bench.done().await;
    let page = bench.stack.edge.scrape().await;
    let count = |result| page.sum("iop_edge_attempts_total", &[("result", result)]);
    let all = page.sum("iop_edge_attempts_total", &[]) - count("capacity");
    assert_eq!(all, 2.0 * cells.len() as f64, "two attempts for each request");
    let silent = cells.iter().filter(|c| is_silent(**c)).count() as f64;
    assert_eq!(
        (count("success"), count("rate_limited"), count("connect_error")),
        (cells.len() as f64, 8.0, 4.0)
    );
    let stalled = count("response_stalled");
    assert!(
        stalled == silent || stalled == silent + 4.0,
        "{stalled}: 500-hang may be one"
    );
    let good = |endpoint| {
        let labels = [("endpoint", endpoint), ("outcome", "success")];
        page.sum("iop_edge_requests_total", &labels)
    };
    let success = good("chat") + good("responses");
    assert_eq!(success, cells.len() as f64, "each a success to its client");
}

async fn check_clean(bench: Arc<Bench>, cell: Cell) {
    let seen = bench.ask(cell).await;
    seen.assert_clean(cell, &bench.of_second(cell), 2);
    bench.assert_counts(cell, usize::from(cell.route != "refused"), 1);
    if is_silent(cell) {
        assert!(
            seen.elapsed >= STALL,
            "{}: replayed after {:?}",
            cell.model(),
            seen.elapsed
        );
        assert!(
            seen.elapsed <= STALL + GRACE,
            "{}: {:?}",
            cell.model(),
            seen.elapsed
        );
    } else {
        // An error whose body never ends may be told by its head, or by the stall.
        let most = if cell.route == "500-hang" {
            STALL + GRACE
        } else {
            AT_ONCE
        };
        assert!(seen.elapsed <= most, "{}: {:?}", cell.model(), seen.elapsed);
    }
}

#[test]
fn embedded_failover_before_content_is_one_clean_answer() {
    run(90, one_clean_answer(Shape::Embedded));
}

#[test]
fn linked_failover_before_content_is_one_clean_answer() {
    run(90, one_clean_answer(Shape::Linked));
}

/// Spaces, escapes and numbers that any re-serialization would change.
const CONTEXT: &str = "{ \"error\" : {\"message\":\"too long by 1.0e2 for \\u004eAME\", \"code\":\
                       \"context_length_exceeded\",\"n\":9007199254740993 , \"type\":\"invalid_request_error\"}}\n";
const POLICY: &str =
    "{\"error\":{\"code\":\"content_policy_violation\",\"message\":\"no\\u0021\",\"inner\":[1,2 ,3]}}";

fn the_request_is_at_fault() -> Vec<(Route, u16, String)> {
    let own = |status, body: &str| Act::Status(Reply::error(status, "").body(body));
    let other = |status| {
        let reply = Reply::error(status, "own_code");
        (reply.clone(), reply.body_of("primary"))
    };
    let mut all = vec![
        (
            Route::new("400-context", own(400, CONTEXT)),
            400,
            CONTEXT.to_owned(),
        ),
        (Route::new("400-policy", own(400, POLICY)), 400, POLICY.to_owned()),
    ];
    for (name, status) in [("403", 403), ("404", 404), ("413", 413), ("422", 422)] {
        let (reply, body) = other(status);
        all.push((Route::new(name, Act::Status(reply)), status, body));
    }
    all
}

async fn passed_on(shape: Shape) {
    let table = the_request_is_at_fault();
    let mut routes: Vec<Route> = table.iter().map(|(route, ..)| route.clone()).collect();
    // A provider's own 401 is the gateway's affair: no other attempt, and none of its words.
    routes.push(Route::new("401", status(401, "invalid_api_key")));
    let bench = Bench::start(shape, routes, |s| s).await;
    let table: Arc<Vec<_>> = Arc::new(table.into_iter().map(|(r, s, b)| (r.name, s, b)).collect());
    failures(bench.cells(), |cell| {
        let (bench, table) = (Arc::clone(&bench), Arc::clone(&table));
        async move {
            let seen = bench.ask(cell).await;
            assert_eq!(seen.attempts(), 1, "{}", cell.model());
            bench.assert_counts(cell, 1, 0);
            match table.iter().find(|(name, ..)| *name == cell.route) {
                Some((_, status, body)) => {
                    assert_own_answer(&cell.model(), &seen.answer, *status, body);
                    assert_eq!(seen.answer.header("content-type"), Some("application/json"));
                    assert_eq!(seen.answer.header("x-request-id"), Some("req-primary"));
                }
                None => {
                    seen.answer.assert_error(502, "provider_error");
                    assert!(!seen.answer.text().contains("primary"), "{}", seen.answer.text());
                }
            }
        }
    })
    .await;
    bench.done().await;
}

#[test]
fn embedded_no_failover_where_the_request_is_at_fault() {
    run(60, passed_on(Shape::Embedded));
}

#[test]
fn linked_no_failover_where_the_request_is_at_fault() {
    run(60, passed_on(Shape::Linked));
}

/// What the last provider says, and what of it the client sees.
enum Last {
    /// Its own status and body; `retry-after`, `retry-after-ms` and `x-should-retry` as given.
    Own(Reply, [Option<&'static str>; 3]),
    /// The gateway's own error.
    Gateway(u16, &'static str),
}

fn everybody_fails() -> Vec<(Route, Last)> {
    let failing = |name| Route::new(name, status(500, "first"));
    let no = Some("false");
    let own =
        |route: Route, reply: Reply, retry| (route.then(Act::Status(reply.clone())), Last::Own(reply, retry));
    vec![
        own(failing("500-503"), Reply::error(503, "last"), [None, None, no]),
        own(
            Route::new("503-500", status(503, "first")),
            Reply::error(500, "last"),
            [None, None, no],
        ),
        own(
            failing("500-429"),
            Reply::error(429, "last").header("retry-after", "30"),
            [Some("30"), None, None],
        ),
        own(
            failing("500-429ms"),
            Reply::error(429, "last").header("retry-after-ms", "20000"),
            [None, Some("20000"), None],
        ),
        own(
            failing("500-yes"),
            Reply::error(500, "last").header("x-should-retry", "true"),
            [None, None, Some("true")],
        ),
        // What the first one said about retries is not what the last one says.
        own(
            Route::new(
                "429-500",
                Act::Status(Reply::error(429, "first").header("retry-after", "20")),
            ),
            Reply::error(500, "last"),
            [None, None, no],
        ),
        own(failing("500-400"), Reply::error(400, "last"), [None, None, None]),
        own(failing("500-html"), Reply::html(502), [None, None, no]),
        own(
            Route::refused("refused-503"),
            Reply::error(503, "last"),
            [None, None, no],
        ),
        (
            failing("500-refused").then_refused(),
            Last::Gateway(502, "provider_unreachable"),
        ),
        (
            Route::new("reset-reset", Act::Reset).then(Act::Reset),
            Last::Gateway(502, "provider_disconnected"),
        ),
        (
            failing("500-401").then(status(401, "invalid_api_key")),
            Last::Gateway(502, "provider_error"),
        ),
        (
            Route::new("cut-end", Act::Preamble(Then::Cut)).then(Act::Preamble(Then::Cut)),
            Last::Gateway(502, "provider_disconnected"),
        ),
    ]
}

async fn all_spent(shape: Shape) {
    let (routes, lasts): (Vec<Route>, Vec<_>) = everybody_fails()
        .into_iter()
        .map(|(route, last)| (route.clone(), (route.name, last)))
        .unzip();
    let lasts = Arc::new(lasts);
    let bench = Bench::start(shape, routes, |s| s).await;
    failures(bench.cells(), |cell| {
        let (bench, lasts) = (Arc::clone(&bench), Arc::clone(&lasts));
        async move {
            let seen = bench.ask(cell).await;
            let (what, answer) = (cell.model(), &seen.answer);
            assert_eq!(seen.attempts(), 2, "{what}: {}", answer.text());
            let (primary, second) = (cell.route.starts_with("refused"), cell.route.ends_with("refused"));
            bench.assert_counts(cell, usize::from(!primary), usize::from(!second));
            let retry = ["retry-after", "retry-after-ms", "x-should-retry"].map(|name| answer.header(name));
            match lasts
                .iter()
                .find(|(name, _)| *name == cell.route)
                .map(|(_, last)| last)
            {
                Some(Last::Own(reply, expected)) => {
                    assert_own_answer(&what, answer, reply.status, &reply.body_of("second"));
                    assert_eq!(retry, *expected, "{what}");
                    assert_eq!(answer.header("x-provider"), Some("second"), "{what}");
                }
                Some(Last::Gateway(status, code)) => {
                    answer.assert_error(*status, code);
                    assert_eq!(retry, [None, None, Some("false")], "{what}");
                    assert_eq!(answer.header("x-provider"), None, "{what}");
                    assert!(!answer.text().contains("second"), "{what}: {}", answer.text());
                }
                None => panic!("no expectation for {what}"),
            }
            assert!(!answer.text().contains("primary"), "{what}: {}", answer.text());
            assert!(seen.elapsed <= AT_ONCE, "{what}: {:?}", seen.elapsed);
        }
    })
    .await;
    bench.done().await;
}

#[test]
fn embedded_failover_that_is_exhausted_shows_the_last_answer() {
    run(60, all_spent(Shape::Embedded));
}

#[test]
fn linked_failover_that_is_exhausted_shows_the_last_answer() {
    run(60, all_spent(Shape::Linked));
}

/// Both are silent, and both are alive: the budget ends it, not a ring of replays.
async fn both_stall(shape: Shape, max_elapsed: &str, most: usize) {
    let route = Route::new("both", Act::Preamble(Then::Silence))
        .stalls()
        .then(Act::Silence)
        .second_line("response_stall_timeout = \"1s\"");
    let line = format!("max_elapsed = {max_elapsed:?}");
    let bench = Bench::start(shape, vec![route], |s| s.edge("gate", &line)).await;
    failures(bench.cells(), |cell| {
        let bench = Arc::clone(&bench);
        async move {
            let seen = bench.ask(cell).await;
            seen.answer.assert_error(504, "response_stalled");
            assert_eq!(seen.answer.header("x-should-retry"), Some("false"));
            let target = cell.target();
            let (a, b) = (bench.primary.attempts(&target), bench.second.attempts(&target));
            assert_eq!(seen.attempts(), a + b, "{}", cell.model());
            assert!(a >= 1 && b >= 1 && a + b <= most, "{}: {a} and {b}", cell.model());
            assert!(seen.elapsed <= (STALL + GRACE) * 3, "{:?}", seen.elapsed);
        }
    })
    .await;
    bench.done().await;
}

#[test]
fn failover_between_two_that_stall_ends_within_the_budget() {
    run(90, async {
        tokio::join!(
            both_stall(Shape::Embedded, "600s", 3),
            both_stall(Shape::Linked, "600s", 3),
            // After two stalls two seconds are gone: no third attempt is begun.
            both_stall(Shape::Embedded, "1500ms", 2),
            both_stall(Shape::Linked, "1500ms", 2),
        );
    });
}
