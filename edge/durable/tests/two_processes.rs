//! Two worker processes, one PostgreSQL database, 500 runs. Workers are killed, and stopped and woken past their leases, at
//! random; what was cut and may not be repeated is resolved from what the services saw. Nothing is lost, nothing is done twice,
//! and nobody writes after somebody else has taken over.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::large_futures,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod torture;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use iop_durable::ids::RunId;
use iop_durable::record::{AttemptClass, Effect, Status};
use iop_durable::runner::Start;
use iop_durable::store::{Listed, RunFilter, Store};
use iop_tests::postgres::Postgres;
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;

use torture::child::Database;
use torture::fleet::{self, Fleet, Post};
use torture::graph::State;
use torture::invariants::{Found, Met, check_run};
use torture::ledger::{FileLedger, Ledger};
use torture::seed::{Random, start as seed};
use torture::world::{World, answers};

const RUNS: usize = 500;
const WORKERS: usize = 2;
/// Rounds of torment; between them every worker is dead and what is ambiguous is resolved.
const ROUNDS: u32 = 3;

struct Test {
    runtime: Runtime,
    store: Arc<dyn Store>,
    ledger: Arc<dyn Ledger>,
    world: Arc<World>,
}

impl Test {
    /// How many runs stand at each of these.
    fn count(&self, statuses: &[Status]) -> usize {
        statuses.iter().map(|status| self.list(*status).len()).sum()
    }

    fn list(&self, status: Status) -> Vec<RunId> {
        let filter = RunFilter {
            status: Some(status),
            limit: 1000,
            ..RunFilter::default()
        };
        let listed = self.runtime.block_on(self.store.list(filter)).unwrap();
        listed
            .into_iter()
            .map(|listed| match listed {
                Listed::Run { head, .. } => head.id,
                Listed::Corrupt { run, why, .. } => panic!("{run}: {why}"),
            })
            .collect()
    }

    /// Every run is over or waits for a person.
    fn settled(&self) -> bool {
        self.count(&[Status::Succeeded, Status::Ambiguous]) == RUNS
    }

    /// Resolves everything that is ambiguous; no worker is alive.
    fn resolve(&self) {
        self.runtime
            .block_on(fleet::resolve_all(&self.store, &self.world));
    }

    fn check(&self, run: &RunId) -> Found {
        let what = run.as_str();
        let found = self
            .runtime
            .block_on(check_run(what, &*self.store, &*self.ledger, run));
        let head = &found.loaded.head;
        assert_eq!(head.status, Status::Succeeded, "{what}");
        let state: State = serde_json::from_slice(found.loaded.state.bytes()).unwrap();
        assert_eq!(state.trail, fleet::TRAIL, "{what}");
        for (name, answer) in &state.answers {
            let key = |suffix: &str| format!("{run}/{name}/{}/{name}{suffix}", position(name));
            let mut applied = answers(&found.lines, &key(""));
            applied.extend((1..20).flat_map(|n| answers(&found.lines, &key(&format!(".{n}")))));
            assert_eq!(applied, [answer.as_str()], "{what}: {name}");
        }
        // A person was asked where an unsafe call was cut, and nowhere else.
        let cut = found.activities.iter().any(|a| {
            let last = a.attempts.last().map(|attempt| attempt.class);
            a.effect == Effect::Unsafe && last == Some(AttemptClass::Abandoned)
        });
        assert_eq!(
            Met::of(&found).ambiguous > 0,
            cut,
            "{what}: {:?}",
            found.activities
        );
        found
    }
}

/// The activation of a node.
fn position(node: &str) -> usize {
    fleet::TRAIL.iter().position(|name| *name == node).unwrap() + 1
}

fn workers_are_killed_and_stopped() {
    let seed = seed();
    let mut random = Random::new(seed);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let server = runtime.block_on(Postgres::start());
    let dir = tempfile::tempdir().unwrap();
    let database = Database::Postgres(server.url());
    let store = runtime.block_on(database.open());
    let ledger: Arc<dyn Ledger> = Arc::new(FileLedger::new(dir.path()));
    let test = Test {
        world: Arc::new(World::new(Arc::clone(&ledger), Arc::clone(&store))),
        runtime,
        store,
        ledger,
    };
    let runs: Vec<RunId> = (0..RUNS)
        .map(|n| RunId::new(&format!("run-{n}")).unwrap())
        .collect();
    let front = fleet::runner(&test.store, &test.world, "front");
    for run in &runs {
        let start = Start::new(State::default()).run(run.clone());
        test.runtime.block_on(front.accept(start)).unwrap();
    }

    let post = Post {
        database,
        ledger: dir.path().to_owned(),
        workers: 10,
        pace_ms: 160,
    };
    let mut all = Vec::new();
    for _ in 0..ROUNDS {
        let mut fleet = Fleet::start(&post, WORKERS);
        all.push(fleet.torment(&mut random, Duration::from_secs(9), || test.settled()));
        fleet.end();
        test.resolve();
    }
    // In peace: what is left goes through, and a person looks after what the rounds left cut.
    for _ in 0..3 {
        if test.count(&[Status::Succeeded]) == RUNS {
            break;
        }
        let mut fleet = Fleet::start(&post, WORKERS);
        fleet.settle(Duration::from_secs(60), || test.settled());
        fleet.end();
        test.resolve();
    }
    assert_eq!(test.count(&[Status::Succeeded]), RUNS);
    let mut met = Met::default();
    let mut taken_over = 0;
    for run in &runs {
        let found = test.check(run);
        met += Met::of(&found);
        taken_over += usize::from(found.loaded.head.recoveries > 0 || Met::of(&found).abandoned > 0);
    }
    eprintln!("{all:?} {met:?}, {taken_over} taken over");
    let (killed, slept) = all
        .iter()
        .fold((0, 0), |sum, chaos| (sum.0 + chaos.killed, sum.1 + chaos.slept));
    assert!(killed > 3 && slept > 3, "{all:?}");
    assert!(
        met.abandoned > 10 && met.ambiguous > 3 && taken_over > 10,
        "{met:?}"
    );
}

/// A worker whose clock is an hour off changes nothing, because nobody asks it for the time: what runs on PostgreSQL reads the
/// database's clock and measures spans with a clock that has no date.
fn no_worker_reads_the_wall_clock() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = vec![sources.join("host.rs"), sources.join("tasks.rs")];
    for folder in ["runner", "machine", "graph", "store/postgres"] {
        add_files(&sources.join(folder), &mut files);
    }
    assert!(files.len() > 30, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for clock in ["SystemTime", "HostClock", "UNIX_EPOCH", ".wall()"] {
            assert!(!text.contains(clock), "{} reads {clock}", file.display());
        }
    }
}

fn add_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_files(&path, files);
        } else {
            files.push(path);
        }
    }
}

fn trial(name: &str, test: fn()) -> Trial {
    Trial::test(name, move || {
        test();
        Ok::<(), Failed>(())
    })
}

fn main() {
    if fleet::is_worker() {
        return;
    }
    let trials = vec![
        trial(
            "workers_are_killed_and_stopped_at_random",
            workers_are_killed_and_stopped,
        ),
        trial("no_worker_reads_the_wall_clock", no_worker_reads_the_wall_clock),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
