//! One run and everybody around it at once: workers that get lost or are cut off, people who resume with old and new tokens, events
//! that come twice, a cancellation, timers. A seed decides who does what when; time is tokio's and paused.

pub mod actors;
pub mod graph;
pub mod model;

use std::sync::Arc;
use std::time::Duration;

use iop_durable::graph::Graph;
use iop_durable::ids::{Owner, RunId, WaitId};
use iop_durable::machine::wait::Verdict;
use iop_durable::runner::{Bindings, CancelOutcome, Options, RunError, Runner};
use iop_durable::store::Store;
use iop_durable::store::memory::MemoryStore;
use iop_durable::testing::FaultStore;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::clock::PausedClock;
use super::graph::State;
use super::ledger::{Ledger, MemoryLedger};
use super::recorder::Recorder;
use super::seed::Random;
use super::world::World;

pub const TTL: Duration = Duration::from_secs(2);
/// How long the actors act.
pub const HORIZON: Duration = Duration::from_secs(12);

/// What one of those around the run was answered.
#[derive(Debug)]
pub enum Told {
    Cancel(Result<CancelOutcome, RunError>),
    Delivery {
        wait: WaitId,
        decision: String,
        answer: Result<(Verdict, bool), RunError>,
    },
    /// A resume with the token of this revision went through.
    Resumed {
        revision: u64,
    },
}

/// The run, its store and its world.
pub struct Scene {
    pub run: RunId,
    pub graph: Arc<Graph<State, String>>,
    /// The store itself.
    pub memory: Arc<dyn Store>,
    /// What the actors reach: it may fail.
    pub store: Arc<dyn Store>,
    pub faults: Arc<FaultStore>,
    pub ledger: Arc<dyn Ledger>,
    pub world: Arc<World>,
    pub told: Mutex<Vec<Told>>,
}

impl Scene {
    /// An empty store, a world whose services take up to 300 ms twice.
    pub fn new(random: &mut Random) -> Arc<Self> {
        let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::default());
        let memory: Arc<dyn Store> = Arc::new(MemoryStore::new(Arc::new(PausedClock::new())));
        let recorded: Arc<dyn Store> = Arc::new(Recorder::new(Arc::clone(&memory), Arc::clone(&ledger)));
        let faults = Arc::new(FaultStore::new(recorded));
        let paces = Mutex::new(random.fork());
        let world = World::new(Arc::clone(&ledger), Arc::clone(&memory)).with_pace(move || {
            let mut paces = paces.lock();
            let longest = if paces.chance(1, 2) { 20 } else { 300 };
            Duration::from_millis(paces.below(longest))
        });
        Arc::new(Self {
            run: RunId::new("run").unwrap(),
            graph: Arc::new(graph::race()),
            memory,
            store: faults.clone(),
            faults,
            ledger,
            world: Arc::new(world),
            told: Mutex::default(),
        })
    }

    /// One actor's way to the store: mostly quick, now and then cut for longer than a lease lasts.
    pub fn way(&self, random: &mut Random) -> Arc<dyn Store> {
        let state = Mutex::new((random.fork(), Instant::now()));
        Arc::new(Recorder::lagging(Arc::clone(&self.store), move || {
            let mut state = state.lock();
            let (random, cut_until) = &mut *state;
            let now = Instant::now();
            if random.chance(1, 120) {
                *cut_until = now + Duration::from_millis(random.below(3500));
            }
            let longest = if random.chance(1, 8) { 300 } else { 10 };
            cut_until.saturating_duration_since(now) + Duration::from_millis(random.below(longest))
        }))
    }

    /// A worker of its own process: nobody shares its leases.
    pub fn runner(&self, name: &str, store: &Arc<dyn Store>) -> Runner<State, String> {
        let mut options = Options::new(Owner::new(name).unwrap());
        options.lease_ttl = TTL;
        options.cancel_grace = Duration::from_millis(200);
        options.bindings = Bindings::default().with(Arc::clone(&self.world));
        Runner::new(Arc::clone(&self.graph), Arc::clone(store), options).unwrap()
    }

    pub fn tell(&self, told: Told) {
        self.told.lock().push(told);
    }
}
