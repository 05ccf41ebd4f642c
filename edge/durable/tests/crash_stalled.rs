//! A worker that stands still at its k-th storage operation, for every k, until its lease is over and another one has brought
//! the run further or to its end. When it wakes up it writes nothing, calls nobody and spoils nothing.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::large_futures,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod torture;

use std::sync::Arc;
use std::time::Duration;

use iop_durable::ids::RunId;
use iop_durable::store::Store;
use iop_durable::store::memory::MemoryStore;

use torture::clock::PausedClock;
use torture::driver::{Driver, Mode, Progress, is_passing};
use torture::graph::everything;
use torture::invariants::{Met, check_everything, check_run};
use torture::ledger::{Ledger, MemoryLedger};
use torture::recorder::{Recorder, When};
use torture::world::World;

const TTL: Duration = Duration::from_secs(10);

/// How far the others bring the run while one stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Others {
    /// One look and what follows from it, once the lease is over.
    OneMove,
    ToTheEnd,
}

/// Whether the worker came to its k-th operation, and what the run met.
async fn stalled_at(k: u64, when: When, others: Others, mode: Mode) -> (bool, Met) {
    let what = format!("{mode:?} stalled {when:?} operation {k}, others {others:?}");
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::default());
    let memory: Arc<dyn Store> = Arc::new(MemoryStore::new(Arc::new(PausedClock::new())));
    let world = Arc::new(World::new(Arc::clone(&ledger), Arc::clone(&memory)));
    let graph = Arc::new(everything("everything"));
    let run = RunId::new("run").unwrap();

    let recorded: Arc<dyn Store> = Arc::new(Recorder::new(Arc::clone(&memory), Arc::clone(&ledger)));
    let other = Driver::new(&graph, &recorded, &world, &run, mode, TTL);
    let meanwhile = async move {
        // Everybody's time passes, the sleeper's too.
        tokio::time::sleep(TTL + Duration::from_secs(1)).await;
        match others {
            Others::ToTheEnd => other.drive().await.unwrap(),
            Others::OneMove => {
                while let Progress::Wait(span) = other.step().await.unwrap() {
                    tokio::time::sleep(span).await;
                }
            }
        }
    };
    let sleepy = Recorder::new(Arc::clone(&memory), Arc::clone(&ledger));
    let sleepy = Arc::new(sleepy.stalling(k, when, Box::pin(meanwhile)));
    let store: Arc<dyn Store> = sleepy.clone();
    for worker in 0.. {
        assert!(worker < 20, "{what}: the run does not end");
        let driver = Driver::new(&graph, &store, &world, &run, mode, TTL);
        match sleepy.freezing(driver.drive()).await {
            Ok(()) => break,
            Err(error) => assert!(is_passing(&error), "{what}: {error:?}"),
        }
    }
    let found = check_run(&what, &*memory, &*ledger, &run).await;
    check_everything(&what, &found);
    (sleepy.has_stalled(), Met::of(&found))
}

async fn every_k(others: Others) {
    let mut met = Met::default();
    for mode in [Mode::Claims, Mode::Resumes] {
        for when in [When::Before, When::After] {
            let mut k = 1;
            loop {
                let (stalled, here) = stalled_at(k, when, others, mode).await;
                met += here;
                if !stalled {
                    break;
                }
                k += 1;
            }
            assert!(k > 50, "only {k} operations");
        }
    }
    assert!(
        met.abandoned > 10 && met.completed_by_hand > 0 && met.failed_by_hand > 0,
        "{met:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_wakes_up_after_the_end_changes_nothing() {
    every_k(Others::ToTheEnd).await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_wakes_up_in_the_middle_leaves_the_run_to_its_successor() {
    every_k(Others::OneMove).await;
}
