//! A run with everything in it whose process ends, before or after its k-th storage operation, for every k, on both durable
//! stores; and at random moments. New processes go on until the run is over; then the invariants hold.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::large_futures,
    clippy::wildcard_enum_match_arm,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod torture;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use iop_durable::ids::RunId;
use iop_durable::store::Store;
use iop_durable::testing::Fault;
use iop_tests::postgres::Postgres;
use libtest_mimic::{Arguments, Failed, Trial};
use parking_lot::Mutex;

use torture::child::{Counted, Database, Ended, Running, Task, is_child, run_child};
use torture::invariants::{Met, check_everything, check_run};
use torture::ledger::FileLedger;
use torture::seed::{Random, start as seed};

/// Children at the same time: more than the cores, because each waits for leases and disks.
const ABREAST: usize = 3;
/// Sweeps over all operations until one has met an unsafe call in flight; about one in twenty meets none.
const SWEEPS: usize = 6;

/// Where the runs of one trial are.
struct Place {
    dir: tempfile::TempDir,
    server: Option<Postgres>,
}

impl Place {
    fn sqlite() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            server: None,
        }
    }

    fn postgres() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            server: Some(runtime().block_on(Postgres::start())),
        }
    }

    /// The database of one line of children: SQLite takes one process at a time.
    fn database(&self, line: usize) -> Database {
        match &self.server {
            Some(server) => Database::Postgres(server.url()),
            None => Database::Sqlite(self.dir.path().join(format!("{line}.db"))),
        }
    }

    fn ledger(&self) -> PathBuf {
        let path = self.dir.path().join("ledger");
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    fn task(&self, line: usize, run: String) -> Task {
        Task {
            database: self.database(line),
            run,
            ledger: self.ledger(),
            resumes: false,
            ttl_ms: 300,
            pace_ms: 0,
            counted: Counted::Steady,
            fault: None,
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// Restarts children until the run is over.
fn finish(task: &Task) {
    let task = Task {
        fault: None,
        ..task.clone()
    };
    let over = (0..10).any(|_| run_child(&task) == Ended::Over);
    assert!(over, "{task:?}: the run does not end");
}

/// Every run of a database, verified by a process that ran none of them.
fn check(database: &Database, ledger: &Path, runs: &[String]) -> Met {
    runtime().block_on(async {
        let store: Arc<dyn Store> = database.open().await;
        let mut met = Met::default();
        for run in runs {
            let ledger = FileLedger::new(ledger);
            let found = check_run(run, &*store, &ledger, &RunId::new(run).unwrap()).await;
            check_everything(run, &found);
            met += Met::of(&found);
        }
        met
    })
}

/// So many lines of children beside each other; each gives the runs it made. What they met, all checked.
fn lines(place: &Place, line: impl Fn(usize) -> Vec<String> + Sync) -> Met {
    let met = Mutex::new(Met::default());
    std::thread::scope(|scope| {
        for n in 0..ABREAST {
            let (line, met) = (&line, &met);
            scope.spawn(move || {
                let runs = line(n);
                *met.lock() += check(&place.database(n), &place.ledger(), &runs);
            });
        }
    });
    met.into_inner()
}

/// The process ends at the k-th operation, for every k that a run reaches. How many there are, and what the runs met.
/// `name` is of this sweep alone.
fn every_k(place: &Place, name: &str, fault: Fault, counted: Counted) -> (u64, Met) {
    let next = AtomicU64::new(1);
    let end = AtomicU64::new(u64::MAX);
    let met = lines(place, |line| {
        let mut runs = Vec::new();
        loop {
            let k = next.fetch_add(1, Ordering::SeqCst);
            if k >= end.load(Ordering::SeqCst) {
                return runs;
            }
            let mut task = place.task(line, format!("{name}-{k}"));
            task.resumes = k.is_multiple_of(2);
            task.counted = counted;
            task.fault = Some((k, fault.as_str().to_owned()));
            if counted == Counted::Renewals {
                // Long enough for the clock to come to the first of them.
                task.pace_ms = 80;
            }
            match run_child(&task) {
                Ended::Over => drop(end.fetch_min(k, Ordering::SeqCst)),
                Ended::Aborted => finish(&task),
            }
            runs.push(task.run);
        }
    });
    (end.load(Ordering::SeqCst) - 1, met)
}

/// Processes are killed again and again wherever they are.
fn killed_at_random(place: &Place) {
    let seed = seed();
    let killed = AtomicU64::new(0);
    // A database server keeps the leases of the dead until they run out; a file does not.
    let longest_ms = if place.server.is_some() { 700 } else { 250 };
    let met = lines(place, |line| {
        let mut random = Random::new(seed.wrapping_add(line as u64));
        let mut runs = Vec::new();
        for n in 0..6 {
            let mut task = place.task(line, format!("killed-{line}-{n}"));
            task.resumes = random.chance(1, 2);
            task.pace_ms = 60;
            for _ in 0..8 {
                let child = Running::child(&task);
                std::thread::sleep(Duration::from_millis(random.below(longest_ms)));
                killed.fetch_add(u64::from(child.kill()), Ordering::SeqCst);
            }
            finish(&task);
            runs.push(task.run);
        }
        runs
    });
    let killed = killed.into_inner();
    assert!(killed > 40, "only {killed} processes were killed at work");
    assert!(met.abandoned > 0, "{met:?}");
    eprintln!("{killed} killed: {met:?}");
}

/// Processes are killed while they create an empty database: the next one finds it empty or whole.
fn killed_at_creation(place: &Place) {
    let mut random = Random::new(seed());
    for n in 0..15 {
        let mut task = place.task(n, format!("created-{n}"));
        if let Some(server) = &place.server {
            server.sql(&format!("CREATE DATABASE d{n}")).unwrap();
            task.database = Database::Postgres(server.url_of(&format!("d{n}")));
        }
        let child = Running::child(&task);
        std::thread::sleep(Duration::from_millis(random.below(60)));
        child.kill();
        finish(&task);
        check(&task.database, &task.ledger, &[task.run]);
    }
}

fn trial(
    name: &str,
    place: impl FnOnce() -> Place + Send + 'static,
    test: impl FnOnce(&Place) + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        test(&place());
        Ok::<(), Failed>(())
    })
}

fn main() {
    if is_child() {
        return;
    }
    let mut trials = Vec::new();
    for name in ["sqlite", "postgres"] {
        let place = move || match name {
            "sqlite" => Place::sqlite(),
            _ => Place::postgres(),
        };
        for (when, fault) in [("before", Fault::AbortBefore), ("after", Fault::AbortAfter)] {
            let what = format!("{name}_process_ends_{when}_every_operation");
            trials.push(trial(&what, place, move |place| {
                // Calls at once have no order, so a sweep may pass over the moment of an unsafe one.
                let by_hand = (1..=SWEEPS).find(|sweep| {
                    let (reached, met) = every_k(place, &format!("sweep-{sweep}"), fault, Counted::Steady);
                    assert!(reached > 50, "only {reached} operations");
                    assert!(met.runs as u64 > reached && met.abandoned > 3, "{met:?}");
                    // Before an outcome is stored its effect is there; after an intent is stored nothing is.
                    let by_hand = match fault {
                        Fault::AbortBefore => met.completed_by_hand,
                        _ => met.failed_by_hand,
                    };
                    by_hand > 0
                });
                assert!(by_hand.is_some(), "no unsafe call was met in {SWEEPS} sweeps");
            }));
            let what = format!("{name}_process_ends_{when}_a_renewal");
            trials.push(trial(&what, place, move |place| {
                let (reached, met) = every_k(place, "renewal", fault, Counted::Renewals);
                assert!(reached > 2, "only {reached} renewals: {met:?}");
            }));
        }
        let what = format!("{name}_process_is_killed_at_random");
        trials.push(trial(&what, place, killed_at_random));
        let what = format!("{name}_process_is_killed_while_it_creates_the_database");
        trials.push(trial(&what, place, killed_at_creation));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
