//! Worker processes on one PostgreSQL database: each has a host that claims and runs whatever is due, until it is killed. The
//! test stops them, wakes them and kills them.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_durable::graph::{Directive, Graph, GraphBuilder};
use iop_durable::host::{Host, HostOptions, Registry};
use iop_durable::ids::{ActivityId, Owner};
use iop_durable::record::{Effect, Status};
use iop_durable::runner::{Bindings, Ctx, Options, Runner, idempotency_key};
use iop_durable::store::{Listed, RunFilter, Store};
use serde::{Deserialize, Serialize};

use super::child::{Database, Running};
use super::driver;
use super::graph::{State, call, call_once};
use super::ledger::{FileLedger, Ledger};
use super::recorder::Recorder;
use super::seed::Random;
use super::world::World;

/// A lease of a lost worker lasts this long.
pub const TTL: Duration = Duration::from_secs(1);

/// A call that may be repeated, one that may not, and another that may.
pub const TRAIL: [&str; 3] = ["put", "send", "note"];

fn graph() -> Graph<State, String> {
    let node = |name: &'static str| {
        move |ctx: Ctx, mut state: State| async move {
            let answer = match name {
                "send" => call_once(&ctx, name, "in").await?,
                _ => call(&ctx, name, Effect::Idempotent, "in").await?,
            };
            state.trail.push(name.to_owned());
            let answer = String::from_utf8_lossy(&answer).into_owned();
            state.answers.insert(name.to_owned(), answer);
            Ok((state, Directive::completed()))
        }
    };
    GraphBuilder::<State, String>::new("fleet", 1)
        .node("put", node("put"))
        .node("send", node("send"))
        .node("note", node("note"))
        .edge("put", "send")
        .edge("send", "note")
        .terminal("note")
        .recovery_attempts(1000)
        .compile()
        .unwrap()
}

/// A runner of the fleet's graph on this store.
pub fn runner(store: &Arc<dyn Store>, world: &Arc<World>, owner: &str) -> Runner<State, String> {
    let mut options = Options::new(Owner::new(owner).unwrap());
    options.lease_ttl = TTL;
    options.bindings = Bindings::default().with(Arc::clone(world));
    Runner::new(Arc::new(graph()), Arc::clone(store), options).unwrap()
}

/// A host that works on the runs of this store, from this process.
pub fn host(store: &Arc<dyn Store>, world: &Arc<World>, workers: u32) -> Host {
    let registry = Registry::default();
    registry.add(runner(store, world, "worker"));
    let mut options = HostOptions::new(Owner::new("worker").unwrap());
    options.workers = workers;
    options.poll_interval = Duration::from_millis(200);
    Host::start(Arc::clone(store), registry, options)
}

/// Resolves every run that is ambiguous and that no service still works for, from the ledger.
pub async fn resolve_all(store: &Arc<dyn Store>, world: &Arc<World>) {
    let operator = runner(store, world, "operator").operator();
    let filter = RunFilter {
        status: Some(Status::Ambiguous),
        limit: 1000,
        ..RunFilter::default()
    };
    for listed in store.list(filter).await.unwrap() {
        let Listed::Run { head, .. } = listed else {
            panic!("{listed:?}");
        };
        let loaded = store.load(&head.id).await.unwrap();
        let on = &loaded.head.waiting.as_ref().unwrap().on[0];
        let id = ActivityId::new(&on.id).unwrap();
        let record = store.activity(&head.id, &id).await.unwrap().unwrap();
        let key = idempotency_key(&record.run, record.node.as_str(), record.activation, &record.key);
        if world.is_busy(&key) {
            continue;
        }
        let resolution = driver::resolution(world, &record);
        let token = driver::token(&loaded);
        let resolved = operator
            .resolve(&token, &resolution, Some("operator"), true)
            .await
            .unwrap();
        assert_eq!(resolved.status, Status::Queued);
    }
}

/// What a worker process is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Post {
    pub database: Database,
    pub ledger: PathBuf,
    /// Runs at the same time.
    pub workers: u32,
    /// The longest a service works before its effect, and again after it.
    pub pace_ms: u64,
}

const POST: &str = "IOP_TORTURE_POST";

/// Works until it is killed, when this process was started for that; false when it was not.
pub fn is_worker() -> bool {
    let Ok(text) = std::env::var(POST) else {
        return false;
    };
    let post: Post = serde_json::from_str(&text).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(work(post));
    true
}

async fn work(post: Post) {
    let ledger: Arc<dyn Ledger> = Arc::new(FileLedger::new(&post.ledger));
    let database = post.database.open().await;
    let store: Arc<dyn Store> = Arc::new(Recorder::new(Arc::clone(&database), Arc::clone(&ledger)));
    let world =
        World::new(ledger, database).with_pace(move || Duration::from_millis(fastrand::u64(..=post.pace_ms)));
    let _host = host(&store, &Arc::new(world), post.workers);
    std::future::pending::<()>().await;
}

/// What was done to the workers.
#[derive(Debug, Default, Clone, Copy)]
pub struct Chaos {
    pub killed: u32,
    /// Stopped for less, and for longer than a lease.
    pub dozed: u32,
    pub slept: u32,
}

/// The workers of one test.
pub struct Fleet {
    post: Post,
    workers: Vec<Worker>,
    started: u32,
}

struct Worker {
    process: Running,
    /// When it is to be woken, if it is stopped.
    wake: Option<Instant>,
}

impl Fleet {
    pub fn start(post: &Post, size: usize) -> Self {
        let mut fleet = Self {
            post: post.clone(),
            workers: Vec::new(),
            started: 0,
        };
        for _ in 0..size {
            let worker = fleet.worker();
            fleet.workers.push(worker);
        }
        fleet
    }

    fn worker(&mut self) -> Worker {
        self.started += 1;
        let log = self.post.ledger.join(format!("worker-{}.log", self.started));
        let post = serde_json::to_string(&self.post).unwrap();
        Worker {
            process: Running::start((POST, &post), &log),
            wake: None,
        }
    }

    /// Kills, stops and wakes workers at random until `enough` says so or the time is over. No worker is stopped afterwards.
    pub fn torment(
        &mut self,
        random: &mut Random,
        longest: Duration,
        mut enough: impl FnMut() -> bool,
    ) -> Chaos {
        let began = Instant::now();
        let mut chaos = Chaos::default();
        let mut next = Instant::now();
        let mut turn = 0;
        while began.elapsed() < longest && !enough() {
            std::thread::sleep(Duration::from_millis(20));
            self.wake(Instant::now());
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + Duration::from_millis(100 + random.below(900));
            let n = random.below(self.workers.len() as u64) as usize;
            if self.workers[n].wake.is_some() {
                continue;
            }
            // In turn, so that each comes often enough; when, to whom and for how long is chance.
            turn = (turn + 1) % 3;
            if turn == 0 {
                let fresh = self.worker();
                let old = std::mem::replace(&mut self.workers[n], fresh);
                let said = old.process.said();
                assert!(old.process.kill(), "a worker ended by itself: {said}");
                chaos.killed += 1;
                continue;
            }
            let (shortest, counted) = match turn {
                1 => (TTL + Duration::from_millis(200), &mut chaos.slept),
                _ => (Duration::ZERO, &mut chaos.dozed),
            };
            let span = shortest + Duration::from_millis(random.below(900));
            signal(self.workers[n].process.pid(), "STOP");
            self.workers[n].wake = Some(Instant::now() + span);
            *counted += 1;
        }
        let last = self.workers.iter().filter_map(|worker| worker.wake).max();
        self.wake(last.unwrap_or_else(Instant::now));
        chaos
    }

    fn wake(&mut self, now: Instant) {
        for worker in &mut self.workers {
            if worker.wake.is_some_and(|at| at <= now) {
                signal(worker.process.pid(), "CONT");
                worker.wake = None;
            }
        }
    }

    /// Leaves the workers in peace until `enough` says so.
    pub fn settle(&mut self, longest: Duration, mut enough: impl FnMut() -> bool) {
        let began = Instant::now();
        while !enough() {
            assert!(began.elapsed() < longest, "not settled within {longest:?}");
            for worker in &mut self.workers {
                let ended = worker.process.ended();
                assert_eq!(ended, None, "{}", worker.process.said());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Kills all of them: no effect is under way any more.
    pub fn end(self) {
        for worker in self.workers {
            let said = worker.process.said();
            assert!(worker.process.kill(), "a worker ended by itself: {said}");
        }
    }
}

fn signal(pid: u32, signal: &str) {
    let status = Command::new("kill")
        .arg(format!("-{signal}"))
        .arg(pid.to_string())
        .status()
        .unwrap();
    assert!(status.success(), "{signal} {pid}");
}
