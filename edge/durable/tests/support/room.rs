//! One store with its clock, and what tests ask of it.

use std::sync::Arc;

use iop_durable::graph::Graph;
use iop_durable::ids::{Owner, RunId};
use iop_durable::record::{
    ActivityRecord, DecisionRecord, EventRecord, Inbox, Outcome, Scope, Status, StepRecord, WaitRecord,
};
use iop_durable::runner::{Limits, Operator, Options, RunError, RunResult, Runner};
use iop_durable::store::memory::MemoryStore;
use iop_durable::store::{LeaseRequest, Loaded, Store};
use iop_durable::testing::ManualClock;
use iop_durable::token::ResumeToken;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Door, Running, Spy, TTL, Trail, running};

/// One store with its clock.
pub(crate) struct Room {
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) memory: Arc<MemoryStore>,
    pub(crate) spy: Arc<Spy>,
}

impl Room {
    pub(crate) fn new() -> Self {
        let clock = Arc::new(ManualClock::new());
        let memory = Arc::new(MemoryStore::new(clock.clone()));
        let spy = Arc::new(Spy::new(memory.clone()));
        Self { clock, memory, spy }
    }

    pub(crate) fn options() -> Options {
        let mut options = Options::new(Owner::new("worker").unwrap());
        options.lease_ttl = TTL;
        options
    }

    /// A runner of its own, with its own keeper: another process, as far as the store can tell.
    pub(crate) fn runner<S, E>(&self, graph: &Arc<Graph<S, E>>) -> Runner<S, E>
    where
        S: Send + Sync + 'static,
        E: Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        self.runner_with(graph, Self::options())
    }

    pub(crate) fn runner_with<S, E>(&self, graph: &Arc<Graph<S, E>>, options: Options) -> Runner<S, E>
    where
        S: Send + Sync + 'static,
        E: Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        let store: Arc<dyn Store> = self.spy.clone();
        Runner::new(Arc::clone(graph), store, options).unwrap()
    }

    /// Operators on the store itself, for use inside a trap of the spy.
    pub(crate) fn aside(&self) -> Operator {
        let store: Arc<dyn Store> = self.memory.clone();
        Operator::new(store, Owner::new("aside").unwrap(), TTL, Limits::default())
    }

    pub(crate) async fn load(&self, run: &RunId) -> Loaded {
        self.memory.load(run).await.unwrap()
    }

    pub(crate) async fn status(&self, run: &RunId) -> Status {
        self.load(run).await.head.status
    }

    pub(crate) async fn token(&self, run: &RunId) -> ResumeToken {
        ResumeToken {
            run: run.clone(),
            revision: self.load(run).await.head.revision,
        }
    }

    pub(crate) async fn inbox(&self, run: &RunId) -> Inbox {
        self.load(run).await.inbox
    }

    pub(crate) async fn activities(&self, run: &RunId) -> Vec<ActivityRecord> {
        self.memory.activities(run, None, 1000).await.unwrap()
    }

    /// The one activity with this key, whatever its activation.
    pub(crate) async fn activity(&self, run: &RunId, key: &str) -> ActivityRecord {
        let mut all = self.activities(run).await;
        all.retain(|a| a.key.as_str() == key);
        assert_eq!(all.len(), 1, "activities with key {key}");
        all.remove(0)
    }

    pub(crate) async fn wait(&self, run: &RunId, key: &str) -> WaitRecord {
        let mut all = self.memory.waits(run).await.unwrap();
        all.retain(|w| w.key.as_str() == key);
        assert_eq!(all.len(), 1, "waits with key {key}");
        all.remove(0)
    }

    pub(crate) async fn decisions(&self, run: &RunId, scope: &Scope) -> Vec<DecisionRecord> {
        self.memory.decisions(run, scope).await.unwrap()
    }

    pub(crate) async fn steps(&self, run: &RunId) -> Vec<StepRecord> {
        self.memory.steps(run, 0, 1000).await.unwrap()
    }

    pub(crate) async fn events(&self, run: &RunId) -> Vec<EventRecord> {
        self.memory.events(run, 0, 100_000).await.unwrap()
    }

    pub(crate) async fn names(&self, run: &RunId) -> Vec<String> {
        self.events(run)
            .await
            .iter()
            .map(|e| e.name.to_string())
            .collect()
    }

    /// Checks what holds for every run at every time: events and revisions without gaps, one terminal event per ended life,
    /// terminal events equal to the outcome, no open work in a run that is over.
    pub(crate) async fn sound(&self, run: &RunId) {
        let loaded = self.load(run).await;
        let head = &loaded.head;
        let events = self.events(run).await;
        let seqs: Vec<u64> = events.iter().map(|e| e.seq).collect();
        assert_eq!(seqs, (1..=head.event_seq).collect::<Vec<_>>(), "event numbers");
        let mut revisions: Vec<u64> = self
            .memory
            .history(run, None, 100_000)
            .await
            .unwrap()
            .iter()
            .map(|c| c.revision.get())
            .collect();
        revisions.reverse();
        assert_eq!(
            revisions,
            (1..=head.revision.get()).collect::<Vec<_>>(),
            "revisions"
        );
        for life in 1..=head.life {
            let ends: Vec<&EventRecord> = events.iter().filter(|e| e.terminal && e.life == life).collect();
            let over = life < head.life || head.status.is_terminal();
            assert_eq!(ends.len(), usize::from(over), "terminal events of life {life}");
        }
        let mut lives: Vec<u32> = events.iter().map(|e| e.life).collect();
        assert!(lives.is_sorted(), "lives follow each other");
        lives.dedup();
        let starts = events.iter().filter(|e| e.name == "run.started").count();
        assert!(starts <= 1, "a run is started once");
        let activities = self.activities(run).await;
        let open = activities.iter().filter(|a| a.state.is_open()).count();
        assert_eq!(open as u64, u64::from(head.open_activities), "open activities");
        if head.status.is_terminal() {
            let last = events.last().unwrap();
            let outcome = head.outcome.as_ref().unwrap();
            assert!(last.terminal, "the last event is the end");
            assert_eq!(last.name, format!("run.{}", head.status));
            assert_eq!(
                last.data,
                [&b"{\"outcome\":"[..], outcome, b"}"].concat(),
                "the terminal event shows the outcome's bytes"
            );
            assert_eq!(Outcome::decode(outcome).unwrap().status, head.status);
            assert_eq!(open, 0, "a run that is over has nothing open");
            let armed = self.memory.waits(run).await.unwrap();
            assert!(armed.iter().all(|w| w.settled.is_some()), "no wait is left armed");
            assert_eq!(loaded.lease, None, "nobody holds a run that is over");
        }
        if head.status == Status::Waiting || head.status == Status::Ambiguous {
            assert!(!head.waiting.as_ref().unwrap().on.is_empty());
            assert_eq!(loaded.lease, None, "a parked run holds no lease");
        } else {
            assert_eq!(head.waiting, None);
        }
    }

    /// One claim, and what became of the run; `None` when nothing was due.
    pub(crate) async fn work<S, E>(
        &self,
        runner: &Runner<S, E>,
    ) -> Option<std::result::Result<RunResult<S, E>, RunError>>
    where
        S: Send + Sync + 'static,
        E: Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        let definition = runner.graph().definition();
        let asked = Instant::now();
        let mut claim = iop_durable::testing::build::claim("host", 1);
        claim.lease.ttl = TTL;
        claim.definitions = vec![(definition.kind.clone(), definition.name.clone())];
        let mut claimed = self.spy.claim(claim).await.unwrap();
        let acquired = claimed.runs.pop()?;
        let (_keep, stop) = watch::channel(false);
        Some(runner.run_claimed(acquired, asked, stop).await)
    }

    /// Claims until nothing is due. The last result.
    pub(crate) async fn drain<S, E>(&self, runner: &Runner<S, E>) -> Option<RunResult<S, E>>
    where
        S: Send + Sync + 'static,
        E: Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        let mut last = None;
        for _ in 0..1000 {
            match self.work(runner).await {
                Some(done) => last = Some(done.unwrap()),
                None => return last,
            }
        }
        panic!("claimed a thousand times without coming to rest");
    }

    /// A worker takes the run and is never heard of again: its lease expires.
    pub(crate) async fn lose_worker(&self, run: &RunId) {
        let request = LeaseRequest {
            owner: Owner::new("lost").unwrap(),
            ttl: TTL,
        };
        self.memory.acquire(run, request).await.unwrap();
        self.clock.advance(TTL);
    }

    /// The worker of a run in the background is never heard of again: its lease expires.
    pub(crate) fn lose(&self, worker: Running) {
        drop(worker);
        self.clock.advance(TTL);
    }

    /// Starts the run `r` and loses its worker while it stands before the door.
    pub(crate) async fn lose_at(&self, door: &Door, graph: &Arc<Graph<Trail>>) {
        let worker = running(&self.runner(graph));
        door.reached(1).await;
        self.lose(worker);
    }
}
