//! A run with everything in it, on a store that fails at the k-th operation, for every k and every way to fail: refused, done
//! without an answer, lost without an answer. New workers go on from what is stored.

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
use std::time::Duration;

use iop_durable::ids::RunId;
use iop_durable::store::Store;
use iop_durable::store::memory::MemoryStore;
use iop_durable::testing::{Fault, FaultStore};

use torture::clock::PausedClock;
use torture::driver::{CancelAt, Driver, Mode, is_passing};
use torture::graph::{TRAIL, everything};
use torture::invariants::{Met, check_cancelled, check_everything, check_run};
use torture::ledger::{Ledger, MemoryLedger};
use torture::recorder::Recorder;
use torture::world::World;

const TTL: Duration = Duration::from_secs(10);

/// How a run goes, faults aside.
#[derive(Debug, Clone, Copy)]
struct Way {
    mode: Mode,
    cancel_at: Option<CancelAt>,
}

const WAYS: [Way; 2] = [
    Way {
        mode: Mode::Claims,
        cancel_at: None,
    },
    Way {
        mode: Mode::Resumes,
        cancel_at: None,
    },
];

/// Runs to the end with these faults. How many were met, and what else.
async fn run_with(faults: &[(u64, Fault)], way: Way) -> (usize, Met) {
    let what = format!("{way:?} {faults:?}");
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::default());
    let memory: Arc<dyn Store> = Arc::new(MemoryStore::new(Arc::new(PausedClock::new())));
    let recorded: Arc<dyn Store> = Arc::new(Recorder::new(Arc::clone(&memory), Arc::clone(&ledger)));
    let faulty = Arc::new(FaultStore::new(recorded));
    for (k, fault) in faults {
        faulty.fail(*k, *fault);
    }
    let store: Arc<dyn Store> = faulty.clone();
    let world = Arc::new(World::new(Arc::clone(&ledger), Arc::clone(&memory)));
    if way.cancel_at == Some(CancelAt::Ambiguous) {
        world.cut("charge.1");
    }
    let graph = Arc::new(everything("everything"));
    let run = RunId::new("run").unwrap();
    for worker in 0.. {
        assert!(worker < 60, "{what}: the run does not end");
        let driver = Driver::new(&graph, &store, &world, &run, way.mode, TTL).cancelling(way.cancel_at);
        match driver.drive().await {
            Ok(()) => break,
            Err(error) => assert!(is_passing(&error), "{what}: {error:?} after {:?}", faulty.hits()),
        }
    }
    let found = check_run(&what, &*memory, &*ledger, &run).await;
    match way.cancel_at {
        None => check_everything(&what, &found),
        Some(CancelAt::Approval) => check_cancelled(&what, &found, &TRAIL[..2]),
        Some(CancelAt::Retry) => check_cancelled(&what, &found, &TRAIL[..5]),
        Some(CancelAt::Ambiguous) => check_cancelled(&what, &found, &TRAIL[..1]),
    }
    (faulty.hits().len(), Met::of(&found))
}

const ALL: [Fault; 3] = [Fault::Refused, Fault::DoneUnconfirmed, Fault::LostUnconfirmed];

/// These faults in a row from every k on, until a run needs fewer operations.
async fn every_k(row: &[Fault], way: Way) -> (usize, Met) {
    let (mut hits, mut all) = (0, Met::default());
    for k in 1.. {
        let faults: Vec<(u64, Fault)> = (k..).zip(row.iter().copied()).collect();
        let (hit, met) = run_with(&faults, way).await;
        hits += hit;
        all += met;
        if hit == 0 {
            break;
        }
    }
    (hits, all)
}

#[tokio::test(start_paused = true)]
async fn a_run_without_faults_ends_as_it_should() {
    for way in WAYS {
        let calm = Met {
            runs: 1,
            ..Met::default()
        };
        assert_eq!(run_with(&[], way).await, (0, calm));
    }
}

#[tokio::test(start_paused = true)]
async fn a_claimed_run_survives_a_fault_at_every_operation() {
    a_fault_at_every_operation(WAYS[0]).await;
}

#[tokio::test(start_paused = true)]
async fn a_resumed_run_survives_a_fault_at_every_operation() {
    a_fault_at_every_operation(WAYS[1]).await;
}

async fn a_fault_at_every_operation(way: Way) {
    for fault in ALL {
        let (hits, met) = every_k(&[fault], way).await;
        assert!(hits > 50 && met.runs == hits + 1, "{fault}: {hits}, {met:?}");
        // What a call returned is not given up for one refusal.
        assert!(fault != Fault::Refused || met.abandoned == 0, "{met:?}");
    }
}

/// Cancelled while it waits for a person, for a retry, for an operator.
#[tokio::test(start_paused = true)]
async fn a_cancelled_run_survives_a_fault_at_every_operation() {
    for cancel_at in [CancelAt::Approval, CancelAt::Retry, CancelAt::Ambiguous] {
        let way = Way {
            cancel_at: Some(cancel_at),
            ..WAYS[0]
        };
        for fault in ALL {
            let (hits, _) = every_k(&[fault], way).await;
            assert!(hits > 20, "{cancel_at:?} {fault}: {hits}");
        }
    }
}

/// The second fault hits the look that a lost answer leads to, so that nobody knows what is stored.
#[tokio::test(start_paused = true)]
async fn a_run_survives_a_lost_answer_and_a_failed_look_at_every_operation() {
    let mut all = Met::default();
    for way in WAYS {
        for fault in [Fault::DoneUnconfirmed, Fault::LostUnconfirmed] {
            all += every_k(&[fault, Fault::Refused], way).await.1;
        }
    }
    assert!(all.ambiguous > 0 && all.failed_by_hand > 0, "{all:?}");
}

/// The store is away for longer than a lease: what a call returned is lost with its worker.
#[tokio::test(start_paused = true)]
async fn a_run_survives_an_outage_from_every_operation_on() {
    let mut all = Met::default();
    for way in WAYS {
        all += every_k(&[Fault::Refused; 45], way).await.1;
    }
    assert!(all.completed_by_hand > 0 && all.abandoned > 10, "{all:?}");
}

/// Faults meet each other's recoveries.
#[tokio::test(start_paused = true)]
async fn a_run_survives_faults_at_random_operations() {
    let seed = torture::seed::start();
    let mut all = 0;
    for n in 0..150 {
        let mut random = torture::seed::Random::new(seed.wrapping_add(n));
        let faults: Vec<(u64, Fault)> = (0..8)
            .map(|_| (random.below(110) + 1, ALL[random.below(3) as usize]))
            .collect();
        let way = WAYS[random.below(2) as usize];
        all += run_with(&faults, way).await.0;
    }
    assert!(all > 500, "only {all} faults were met");
}
