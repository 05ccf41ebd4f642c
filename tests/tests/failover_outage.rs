//! A provider that is away for a while: clients notice nothing, it is asked a few times only, and it has its work back
//! soon after its return (G36).

use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_tests::faults::{Act, Bench, Reply, Route, Script};
use iop_tests::run;
use iop_tests::stack::Shape;

/// What a phase of steady load saw.
#[derive(Default)]
struct Phase {
    requests: usize,
    /// Answers of the first provider.
    primary: usize,
    /// Attempts beyond the first of each request: those that failed at the first provider.
    failed: usize,
}

/// Sends a request each `pace` until `end`; each has to be one clean answer.
async fn load(bench: &Bench, pace: Duration, mut end: impl FnMut(&Phase) -> bool) -> Phase {
    let mut phase = Phase::default();
    let cells = bench.cells();
    let mut ticks = tokio::time::interval(pace);
    while !end(&phase) {
        ticks.tick().await;
        let cell = cells[phase.requests % cells.len()];
        let seen = bench.ask(cell).await;
        let attempts = seen.attempts();
        let by_primary = seen.answer.header("x-provider") == Some("primary");
        let answers = if by_primary {
            bench.of_primary(cell)
        } else {
            bench.of_second(cell)
        };
        // The first provider is asked first, so what it answers is a first attempt.
        assert!(
            attempts == 1 || (attempts == 2 && !by_primary),
            "{attempts} attempts, {by_primary}"
        );
        seen.assert_clean(cell, &answers, attempts);
        phase.requests += 1;
        phase.primary += usize::from(by_primary);
        phase.failed += attempts - 1;
    }
    phase
}

fn for_a_while(duration: Duration) -> impl FnMut(&Phase) -> bool {
    let end = Instant::now() + duration;
    move |_| Instant::now() >= end
}

struct Outage {
    ejection: &'static [&'static str],
    pace: Duration,
    down: Duration,
    /// Attempts on the provider while it is away.
    attempts: usize,
    /// From its return to its first answer.
    back: Duration,
}

async fn outage(shape: Shape, case: &Outage) {
    let routes = vec![Route::refused("out").one_model()];
    let lines = case.ejection;
    let bench = Bench::start(shape, routes, |s| {
        lines.iter().fold(s, |s, line| s.edge("ejection", line))
    })
    .await;
    bench.front.up().await;
    let before = load(&bench, case.pace, for_a_while(case.pace * 10)).await;
    assert_eq!(
        (before.primary, before.failed),
        (before.requests, 0),
        "all on the first provider"
    );

    bench.front.down().await;
    let away = load(&bench, case.pace, for_a_while(case.down)).await;
    assert_eq!(away.primary, 0, "the first provider is away");
    assert!(
        away.requests > 60,
        "{} requests are no steady load",
        away.requests
    );
    assert!(away.failed >= 1, "nobody noticed");
    assert!(
        away.failed <= case.attempts,
        "{shape:?}: {} attempts on a provider that is away",
        away.failed
    );

    bench.front.up().await;
    let returned = Instant::now();
    let back = load(&bench, case.pace, |phase| {
        assert!(
            returned.elapsed() <= case.back,
            "{shape:?}: not back after {:?}",
            returned.elapsed()
        );
        phase.primary > 0
    })
    .await;
    assert_eq!(back.failed, 0, "it was there");
    let after = load(&bench, case.pace, for_a_while(case.pace * 10)).await;
    assert_eq!(
        (after.primary, after.failed),
        (after.requests, 0),
        "all back on the first provider"
    );
    bench.done().await;
}

async fn both_shapes(case: Outage) {
    tokio::join!(outage(Shape::Embedded, &case), outage(Shape::Linked, &case));
}

/// Five refusals, then one trial after 2 s, 4 s and 8 s each: in 12 s that makes seven, and at most 8 s and a fifth
/// are left to wait when it is back.
#[test]
fn failover_during_an_outage_asks_seldom_and_comes_back_with_the_defaults() {
    run(
        90,
        both_shapes(Outage {
            ejection: &[],
            pace: Duration::from_millis(100),
            down: Duration::from_secs(12),
            attempts: 8,
            back: Duration::from_secs(10),
        }),
    );
}

/// A minute's outage at a tenth of its length: the ladder is 0.2, 0.4, 0.8, 1.6, 2, 2 … s.
#[test]
fn failover_during_a_long_outage_climbs_to_the_longest_ejection_and_no_further() {
    run(
        60,
        both_shapes(Outage {
            ejection: &["base = \"200ms\"", "max = \"2s\""],
            pace: Duration::from_millis(40),
            down: Duration::from_secs(6),
            attempts: 11,
            back: Duration::from_millis(3_000),
        }),
    );
}

async fn ejected(shape: Shape) {
    let failing = |status| Act::Status(Reply::error(status, "no"));
    let routes = vec![
        Route::new("429", failing(429)).one_model(),
        Route::new("503", failing(503)).one_model(),
        Route::new("reset", Act::Reset).one_model(),
        Route::refused("refused").one_model(),
    ];
    let bench = Bench::start(shape, routes, |s| s.edge("ejection", "base = \"20s\"")).await;
    let asking = bench.routes.iter().map(|route| {
        let (bench, cells) = (Arc::clone(&bench), bench.cells_of(route.name));
        async move {
            let mut failed = 0;
            for n in 0..30 {
                let cell = cells[n % cells.len()];
                let seen = bench.ask(cell).await;
                let asked = if n < 5 || route.name == "reset" { 2 } else { 1 };
                seen.assert_clean(cell, &bench.of_second(cell), asked);
                failed += seen.attempts() - 1;
            }
            // A connection that was made and broke is no connect error: it is replayed and ejects nobody (G36).
            let ejected_after = if route.name == "reset" { 30 } else { 5 };
            assert_eq!(failed, ejected_after, "{}", route.name);
            let seen = if route.name == "refused" { 0 } else { ejected_after };
            bench.assert_counts(cells[0], seen, 30);
        }
    });
    futures_util::future::join_all(asking).await;
    let providers = bench.stack.edge.admin("providers").await;
    let out: Vec<&str> = providers
        .iter()
        .filter(|p| p["ejected_until"].is_string())
        .filter_map(|p| p["id"].as_str())
        .map(|id| id.rsplit('/').next().unwrap_or(id))
        .collect();
    let mut expected = vec!["a-429", "a-503", "a-refused"];
    expected.sort_unstable();
    let mut out = out;
    out.sort_unstable();
    assert_eq!(out, expected, "ejected");
    bench.done().await;
}

#[test]
fn failover_for_ever_ejects_after_five_failures_in_a_row() {
    run(60, async {
        tokio::join!(ejected(Shape::Embedded), ejected(Shape::Linked));
    });
}

/// One good answer in between, and the count begins anew; a client's own errors neither count nor clear.
#[test]
fn failover_after_scattered_failures_ejects_nobody() {
    run(60, async {
        let fail = || Act::Status(Reply::error(503, "no"));
        let mut acts = Vec::new();
        for _ in 0..4 {
            acts.extend([fail(), fail(), fail(), fail(), Act::Good]);
        }
        let script = Script::series(acts, Act::Good);
        let routes = vec![Route::scripted("scattered", script).one_model()];
        let bench = Bench::start(Shape::Embedded, routes, |s| s).await;
        let cells = bench.cells();
        for n in 0..20 {
            let cell = cells[n % cells.len()];
            let seen = bench.ask(cell).await;
            if n % 5 == 4 {
                seen.assert_clean(cell, &bench.of_primary(cell), 1);
            } else {
                seen.assert_clean(cell, &bench.of_second(cell), 2);
            }
        }
        bench.assert_counts(cells[0], 20, 16);
        bench.done().await;
    });
}

/// When an ejection is over, one request tries the provider; the others that come meanwhile do not wait for it.
async fn one_trial(shape: Shape) {
    let fail = || Act::Status(Reply::error(503, "no"));
    let slow = Act::After(Duration::from_millis(800), Box::new(fail()));
    let script = Script::series(vec![fail(), fail(), fail(), fail(), fail(), slow], Act::Good);
    let routes = vec![Route::scripted("trial", script).one_model()];
    let bench = Bench::start(shape, routes, |s| s.edge("ejection", "base = \"500ms\"")).await;
    let cell = bench.cells()[0];
    for _ in 0..5 {
        bench
            .ask(cell)
            .await
            .assert_clean(cell, &bench.of_second(cell), 2);
    }
    iop_tests::eventually("the ejection is over", Duration::from_secs(5), || async {
        let ejected = bench.stack.edge.admin("providers").await;
        let until = ejected.iter().filter(|p| p["ejected_until"].is_string()).count();
        if until == 0 {
            Ok(())
        } else {
            Err(format!("{ejected:?}"))
        }
    })
    .await;
    let asking = (0..20).map(|_| bench.ask(cell));
    let mut attempts = 0;
    for seen in futures_util::future::join_all(asking).await {
        seen.assert_clean(cell, &bench.of_second(cell), seen.attempts());
        attempts += seen.attempts();
    }
    assert_eq!(attempts, 21, "one trial among twenty requests");
    bench.assert_counts(cell, 6, 25);
    bench.done().await;
}

#[test]
fn failover_leaves_one_trial_when_an_ejection_is_over() {
    run(60, async {
        tokio::join!(one_trial(Shape::Embedded), one_trial(Shape::Linked));
    });
}
