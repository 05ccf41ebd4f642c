//! Seeded schedules of everybody around a run at once, against a naive model of how it may end. A failing schedule tells its
//! seed; `IOP_DURABLE_SEED` runs that one alone.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::large_futures,
    clippy::wildcard_enum_match_arm,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod torture;

use std::sync::Arc;

use futures_util::future::{BoxFuture, join_all};
use iop_durable::record::Status;
use iop_durable::testing::Fault;

use torture::driver::{Driver, Mode, is_passing};
use torture::invariants::check_run;
use torture::race::{Scene, TTL, actors, model};
use torture::seed::{Random, SEED};

/// Told when a schedule fails.
struct Told(u64);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to see it again: {SEED}={}", self.0);
        }
    }
}

/// What a schedule came to, for the sum over all.
struct Came {
    status: Status,
    abandoned: bool,
    ambiguous: bool,
    timed_out: bool,
}

async fn schedule(seed: u64) -> Came {
    let mut random = Random::new(seed);
    let scene = Scene::new(&mut random);
    if random.chance(1, 4) {
        let all = [Fault::Refused, Fault::DoneUnconfirmed, Fault::LostUnconfirmed];
        for _ in 0..random.below(12) {
            scene
                .faults
                .fail(random.below(250) + 1, all[random.below(3) as usize]);
        }
    }
    actors::accept(&scene, &mut random).await;
    let mut acting: Vec<BoxFuture<'static, ()>> = vec![
        Box::pin(actors::resumer(Arc::clone(&scene), random.fork())),
        Box::pin(actors::resumer(Arc::clone(&scene), random.fork())),
        Box::pin(actors::sender(Arc::clone(&scene), random.fork())),
        Box::pin(actors::sender(Arc::clone(&scene), random.fork())),
        Box::pin(actors::eager(Arc::clone(&scene), random.fork())),
        Box::pin(actors::canceller(Arc::clone(&scene), random.fork())),
        Box::pin(actors::operator(Arc::clone(&scene), random.fork())),
    ];
    for n in 0..3 {
        acting.push(Box::pin(actors::worker(
            Arc::clone(&scene),
            random.fork(),
            format!("worker {n}"),
        )));
    }
    join_all(acting).await;

    // Then one worker and no trouble but the faults that are left.
    for last in 0.. {
        assert!(last < 30, "the run does not end");
        let driver = Driver::new(
            &scene.graph,
            &scene.store,
            &scene.world,
            &scene.run,
            Mode::Claims,
            TTL,
        );
        match driver.drive().await {
            Ok(()) => break,
            Err(error) => assert!(is_passing(&error), "{error:?}"),
        }
    }
    let what = format!("seed {seed}");
    let found = check_run(&what, &*scene.memory, &*scene.ledger, &scene.run).await;
    let told = std::mem::take(&mut *scene.told.lock());
    model::check(&*scene.memory, &found, &told).await;
    let named = |name: &str| found.events.iter().any(|e| e.name == name);
    Came {
        status: found.loaded.head.status,
        abandoned: found
            .activities
            .iter()
            .flat_map(|a| &a.attempts)
            .any(|a| a.class == iop_durable::record::AttemptClass::Abandoned),
        ambiguous: named("run.ambiguous"),
        timed_out: found.loaded.state.bytes().windows(6).any(|w| w == b"missed"),
    }
}

fn run(seed: u64) -> Came {
    let _told = Told(seed);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(schedule(seed))
}

#[test]
fn whatever_happens_around_a_run_ends_as_the_model_allows() {
    if let Ok(seed) = std::env::var(SEED) {
        run(seed.parse().unwrap());
        return;
    }
    let base = fastrand::u64(..);
    let all: Vec<Came> = (0..500).map(|n| run(base.wrapping_add(n))).collect();
    // The schedules reach what they are for.
    let count = |which: fn(&Came) -> bool| all.iter().filter(|came| which(came)).count();
    let seen = [
        count(|came| came.status == Status::Succeeded),
        count(|came| came.status == Status::Cancelled),
        count(|came| came.abandoned),
        count(|came| came.ambiguous),
        count(|came| came.timed_out),
    ];
    assert!(seen.iter().all(|n| *n >= 8), "{seen:?}");
    eprintln!("succeeded, cancelled, abandoned, ambiguous, timed out: {seen:?}");
}
