//! What happens to a live database while runs are under way on it: rows that rot, answers that get lost, a store that is away.
//! The same on every durable store; the test files give the store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use iop_durable::graph::Graph;
use iop_durable::ids::{ActivityId, Owner, Revision, RunId, WaitId};
use iop_durable::record::{Status, WaitingKind};
use iop_durable::runner::RunError;
use iop_durable::store::{Claim, LeaseRequest, Listed, Loaded, RunFilter, Store, StoreError};
use iop_durable::testing::fault::Op;
use iop_durable::testing::{Fault, FaultStore, Fixture, Tamper};
use tokio::sync::watch;

use super::driver::{Driver, Mode, Progress, is_passing};
use super::graph::{State, everything};
use super::invariants::{check_everything, check_run};
use super::ledger::{Ledger, MemoryLedger};
use super::recorder::Recorder;
use super::world::World;

pub const TTL: Duration = Duration::from_secs(1);
const WITHIN: Duration = Duration::from_secs(60);
/// Runs under way at the same time.
const LINES: usize = 6;

/// How often runs were told that their store is away.
#[derive(Clone, Default)]
pub struct Away(Arc<watch::Sender<usize>>);

impl Away {
    fn told(&self, error: &RunError) {
        if is_away(error) {
            self.0.send_modify(|n| *n += 1);
        }
    }

    pub fn count(&self) -> usize {
        *self.0.borrow()
    }

    /// Until they were told so many times more.
    pub async fn grows_by(&self, more: usize) {
        let mut heard = self.0.subscribe();
        let enough = self.count() + more;
        let told = heard.wait_for(|n| *n >= enough);
        iop_tests::within("runs are refused", WITHIN, told).await.unwrap();
    }
}

/// Whether the store could not be reached, or could not write.
pub fn is_away(error: &RunError) -> bool {
    matches!(
        error,
        RunError::StoreUnavailable(_) | RunError::JournalUnavailable(_)
    )
}

/// One run of a definition of its own, and those around it.
pub struct Case {
    pub run: RunId,
    graph: Arc<Graph<State, String>>,
    /// The store itself.
    pub bare: Arc<dyn Store>,
    store: Arc<dyn Store>,
    pub world: Arc<World>,
    ledger: Arc<dyn Ledger>,
    mode: Mode,
    away: Away,
}

impl Case {
    pub fn new(name: &str, store: &Arc<dyn Store>) -> Self {
        let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::default());
        let recorded: Arc<dyn Store> = Arc::new(Recorder::new(Arc::clone(store), Arc::clone(&ledger)));
        Self {
            run: RunId::new(name).unwrap(),
            graph: Arc::new(everything(name)),
            bare: Arc::clone(store),
            store: recorded,
            world: Arc::new(World::new(Arc::clone(&ledger), Arc::clone(store))),
            ledger,
            mode: Mode::Claims,
            away: Away::default(),
        }
    }

    pub fn driver(&self) -> Driver {
        Driver::new(&self.graph, &self.store, &self.world, &self.run, self.mode, TTL)
    }

    /// Until it stands like this.
    pub async fn until(&self, like: impl Fn(&Loaded) -> bool) -> Loaded {
        let driver = self.driver();
        for _ in 0..100 {
            match self.bare.load(&self.run).await {
                Ok(loaded) if loaded.lease.is_none() && like(&loaded) => return loaded,
                Ok(_) | Err(StoreError::NotFound) => {}
                Err(error) => panic!("{}: {error:?}", self.run),
            }
            if let Progress::Wait(span) = driver.step().await.unwrap() {
                tokio::time::sleep(span).await;
            }
        }
        panic!("{} never stands like this", self.run);
    }

    /// To the end, through whatever passes; the refusals on the way.
    pub async fn finish(&self) -> Vec<RunError> {
        let mut met = Vec::new();
        while let Err(error) = self.driver().drive().await {
            assert!(is_passing(&error), "{}: {error:?} after {met:?}", self.run);
            self.away.told(&error);
            met.push(error);
            assert!(met.len() < 1000, "{}: the run does not end: {met:?}", self.run);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        met
    }

    pub async fn check(&self) {
        let found = check_run(self.run.as_str(), &*self.bare, &*self.ledger, &self.run).await;
        check_everything(self.run.as_str(), &found);
    }

    pub async fn finish_and_check(&self) -> Vec<RunError> {
        let met = self.finish().await;
        self.check().await;
        met
    }

    /// Whoever may run it finds that it is corrupt and sets it aside; then nobody finds it.
    async fn is_set_aside(&self) {
        let claim = Claim {
            lease: LeaseRequest {
                owner: Owner::new("worker").unwrap(),
                ttl: TTL,
            },
            definitions: vec![("graph".to_owned(), self.run.as_str().to_owned())],
            except: Vec::new(),
            limit: 5,
        };
        let claimed = self.bare.claim(claim.clone()).await.unwrap();
        assert_eq!(claimed.runs, [], "{}", self.run);
        assert_eq!(claimed.quarantined.len(), 1, "{}", self.run);
        assert_eq!(claimed.quarantined[0].0, self.run);
        let again = self.bare.claim(claim).await.unwrap();
        assert_eq!(
            (again.runs, again.quarantined),
            (Vec::new(), Vec::new()),
            "{}",
            self.run
        );
    }

    /// Every way to it says that it is corrupt; none that it is not there.
    async fn is_corrupt(&self) {
        let result = self.driver().runner().result(&self.run).await;
        assert_eq!(code(result), "run_corrupt", "{}", self.run);
        assert_eq!(code(self.driver().step().await), "run_corrupt", "{}", self.run);
    }

    /// A list names it and shows the others.
    async fn is_listed_as_corrupt(&self) {
        let filter = RunFilter {
            limit: 1000,
            ..RunFilter::default()
        };
        let listed = self.bare.list(filter).await.unwrap();
        let named = |listed: &&Listed| matches!(listed, Listed::Corrupt { run, .. } if *run == self.run);
        assert_eq!(listed.iter().filter(named).count(), 1, "{}: {listed:?}", self.run);
        assert!(listed.iter().any(|listed| matches!(listed, Listed::Run { .. })));
    }

    async fn heal(&self) {
        let rebuilt = self.bare.rebuild_index().await.unwrap();
        assert!(rebuilt.repaired > 0, "{}: {rebuilt:?}", self.run);
    }
}

fn code<T>(answer: Result<T, RunError>) -> &'static str {
    match answer {
        Ok(_) => "done",
        Err(error) => error.code(),
    }
}

fn waits_for(kind: WaitingKind) -> impl Fn(&Loaded) -> bool {
    move |loaded| loaded.head.waiting.as_ref().and_then(|w| w.kind()) == Some(kind)
}

/// Rows rot while other runs go on. What is rotten is named and set aside, nothing is written over it, and what is mended goes
/// on as if nothing had been.
pub async fn rows_rot(fixture: &dyn Fixture) {
    let store = fixture.store();
    let healthy: Vec<Case> = (0..4)
        .map(|n| Case::new(&format!("healthy-{n}"), &store))
        .collect();
    // Somebody is there to be listed, however slowly the others begin.
    healthy[0].until(|_| true).await;
    let others = async {
        // One after the other, so that some are under way all the time.
        for case in &healthy {
            assert_eq!(case.finish_and_check().await.len(), 0);
        }
    };
    let rot = async {
        heads(fixture).await;
        lost_heads(fixture).await;
        newer_schema(fixture).await;
        checkpoints(fixture).await;
        journal(fixture).await;
    };
    tokio::join!(others, rot);
    // What was set aside did not come back by itself, and hides nobody.
    for case in &healthy {
        case.check().await;
    }
}

fn queued(loaded: &Loaded) -> bool {
    loaded.head.status == Status::Queued
}

/// A flipped bit, flipped back later.
async fn heads(fixture: &dyn Fixture) {
    for (name, tamper) in [("head-state", Tamper::HeadState), ("head-body", Tamper::HeadBody)] {
        let case = Case::new(name, &fixture.store());
        case.until(queued).await;
        fixture.tamper(&case.run, tamper.clone()).await;
        case.is_corrupt().await;
        case.is_set_aside().await;
        case.is_corrupt().await;
        case.is_listed_as_corrupt().await;
        fixture.tamper(&case.run, tamper).await;
        case.heal().await;
        assert_eq!(case.finish_and_check().await.len(), 0, "{name}");
    }
}

/// What cannot be mended stays as it is, history included.
async fn lost_heads(fixture: &dyn Fixture) {
    let store = fixture.store();
    let source = Case::new("copied-from", &store);
    source.until(queued).await;
    for (name, tamper) in [
        ("no-seal", Tamper::DropHeadSeal),
        ("copied-row", Tamper::CopyHeadFrom(source.run.clone())),
    ] {
        let case = Case::new(name, &store);
        let loaded = case.until(waits_for(WaitingKind::Approval)).await;
        let wait = WaitId::new(&loaded.head.waiting.as_ref().unwrap().on[0].id).unwrap();
        let before = store.history(&case.run, None, 1000).await.unwrap();
        fixture.tamper(&case.run, tamper).await;
        case.is_corrupt().await;
        let gate = store.wait(&case.run, &wait).await;
        assert!(
            gate.is_ok_and(|gate| gate.is_some()),
            "{name}: its rows are there"
        );
        let acquired = store.acquire(
            &case.run,
            LeaseRequest {
                owner: Owner::new("worker").unwrap(),
                ttl: TTL,
            },
        );
        assert_eq!(acquired.await.unwrap_err().kind(), "corrupt", "{name}");
        assert_eq!(
            store.history(&case.run, None, 1000).await.unwrap(),
            before,
            "{name}"
        );
        for listed in before {
            let opened = store.checkpoint(&case.run, listed.revision).await.unwrap();
            assert_eq!(opened.digest, listed.digest, "{name}");
        }
        case.is_corrupt().await;
        case.is_listed_as_corrupt().await;
    }
    assert_eq!(source.finish_and_check().await.len(), 0);
}

/// A newer program's run is left to it: refused, not corrupt, untouched.
async fn newer_schema(fixture: &dyn Fixture) {
    let store = fixture.store();
    let case = Case::new("newer-schema", &store);
    let known = i64::from(iop_durable::envelope::SCHEMA_VERSION);
    case.until(queued).await;
    fixture.tamper(&case.run, Tamper::SchemaVersion(known + 1)).await;
    let error = store.load(&case.run).await.unwrap_err();
    assert_eq!(error.kind(), "schema_unsupported", "{error}");
    assert!(matches!(
        case.driver().step().await,
        Err(RunError::SchemaUnsupported(_))
    ));
    fixture.tamper(&case.run, Tamper::SchemaVersion(known)).await;
    assert_eq!(case.finish_and_check().await.len(), 0);
}

/// Old revisions rot; the run goes on, and says which of them is gone.
async fn checkpoints(fixture: &dyn Fixture) {
    let store = fixture.store();
    let case = Case::new("checkpoint", &store);
    case.until(waits_for(WaitingKind::Event)).await;
    let revision = |n| Revision::new(n).unwrap();
    fixture
        .tamper(&case.run, Tamper::CheckpointState(revision(2)))
        .await;
    let kind = |opened: Result<_, StoreError>| opened.map(|_| ()).map_err(|e| e.kind());
    assert_eq!(
        kind(store.checkpoint(&case.run, revision(2)).await),
        Err("corrupt")
    );
    assert_eq!(kind(store.checkpoint(&case.run, revision(3)).await), Ok(()));
    assert_eq!(case.finish().await.len(), 0);
    assert_eq!(
        kind(store.checkpoint(&case.run, revision(2)).await),
        Err("corrupt")
    );
    fixture
        .tamper(&case.run, Tamper::CheckpointState(revision(2)))
        .await;
    case.check().await;
    fixture
        .tamper(&case.run, Tamper::DropCheckpointSeal(revision(1)))
        .await;
    assert_eq!(
        kind(store.checkpoint(&case.run, revision(1)).await),
        Err("corrupt")
    );
    assert_eq!(kind(store.checkpoint(&case.run, revision(2)).await), Ok(()));
}

/// Rows beside the head rot: whoever needs them is told, nobody acts on them, and the answer waits until they are mended.
async fn journal(fixture: &dyn Fixture) {
    let store = fixture.store();
    let case = Case::new("wait-body", &store);
    let loaded = case.until(waits_for(WaitingKind::Approval)).await;
    let wait = WaitId::new(&loaded.head.waiting.as_ref().unwrap().on[0].id).unwrap();
    fixture.tamper(&case.run, Tamper::WaitBody(wait.clone())).await;
    assert_eq!(store.wait(&case.run, &wait).await.unwrap_err().kind(), "corrupt");
    assert_eq!(code(case.driver().step().await), "run_corrupt");
    let stands = store.load(&case.run).await.unwrap();
    assert_eq!(
        (stands.head, stands.inbox),
        (loaded.head, loaded.inbox),
        "nothing was written"
    );
    fixture.tamper(&case.run, Tamper::WaitBody(wait)).await;
    assert_eq!(case.finish_and_check().await.len(), 0);

    let case = Case::new("activity-output", &store);
    case.world.cut("charge.1");
    let loaded = case.until(|loaded| loaded.head.status == Status::Ambiguous).await;
    let activities = store.activities(&case.run, None, 100).await.unwrap();
    let reserve = activities.iter().find(|a| a.key.as_str() == "reserve").unwrap();
    let id: ActivityId = reserve.id.clone();
    fixture
        .tamper(&case.run, Tamper::ActivityOutput(id.clone()))
        .await;
    assert_eq!(code(case.driver().resolve(&loaded).await), "run_corrupt");
    let stands = store.load(&case.run).await.unwrap();
    assert_eq!(
        (stands.head.revision, stands.head.status),
        (loaded.head.revision, Status::Ambiguous)
    );
    fixture.tamper(&case.run, Tamper::ActivityOutput(id)).await;
    store.rebuild_index().await.unwrap();
    case.finish_and_check().await;
}

/// Every acceptance, transition and decision of a run loses its answer, done or not done.
pub async fn answers_get_lost(store: Arc<dyn Store>) {
    for fault in [Fault::DoneUnconfirmed, Fault::LostUnconfirmed] {
        for mode in [Mode::Claims, Mode::Resumes] {
            let mut k = 1;
            let mut reached = true;
            while reached {
                let some = (k..k + 8).map(|k| lost_at(&store, k, fault, mode));
                let hit: Vec<bool> = join_all(some).await;
                reached = hit.iter().all(|hit| *hit);
                k += 8;
            }
            assert!(k > 15, "only {k} writes");
        }
    }
}

/// The k-th write of a run loses its answer. Whether there is one.
async fn lost_at(store: &Arc<dyn Store>, k: u64, fault: Fault, mode: Mode) -> bool {
    let writes: fn(Op) -> bool = |op| matches!(op, Op::Create | Op::Commit | Op::Post);
    let mut case = Case::new(&format!("{mode:?}-{fault}-{k}"), store);
    let faulty = Arc::new(FaultStore::counting(Arc::clone(&case.store), writes));
    faulty.fail(k, fault);
    case.store = faulty.clone();
    case.mode = mode;
    case.finish_and_check().await;
    !faulty.hits().is_empty()
}

/// Runs are under way, one after the other on each of some lines, while `trouble` happens to their store; all of them end
/// well. The refusals they met.
pub async fn trouble<Fut>(
    store: &Arc<dyn Store>,
    name: &str,
    trouble: impl FnOnce(Away) -> Fut,
) -> Vec<RunError>
where
    Fut: Future<Output = ()>,
{
    let away = Away::default();
    let trouble = trouble(away.clone());
    let over = AtomicBool::new(false);
    let lines = join_all((0..LINES).map(|line| {
        let (over, away) = (&over, &away);
        async move {
            let (mut cases, mut met) = (Vec::new(), Vec::new());
            while !over.load(Ordering::SeqCst) {
                let mut case = Case::new(&format!("{name}-{line}-{}", cases.len()), store);
                case.mode = [Mode::Claims, Mode::Resumes][line % 2];
                case.away = away.clone();
                met.extend(case.finish().await);
                cases.push(case);
            }
            (cases, met)
        }
    }));
    let trouble = async {
        trouble.await;
        over.store(true, Ordering::SeqCst);
    };
    let (lines, ()) = tokio::join!(lines, trouble);
    let mut all = Vec::new();
    for (cases, met) in lines {
        for case in cases {
            case.check().await;
        }
        all.extend(met);
    }
    all
}

fn over() -> RunFilter {
    RunFilter {
        status: Some(Status::Succeeded),
        limit: 10_000,
        ..RunFilter::default()
    }
}

/// Until one more run of this store has ended.
pub async fn one_more_ended(store: &dyn Store) {
    let so_far = store.list(over()).await.unwrap().len();
    ended(store, so_far + 1).await;
}

/// Until so many runs of this store have ended.
pub async fn ended(store: &dyn Store, runs: usize) {
    iop_tests::eventually("runs end", WITHIN, || async {
        match store.list(over()).await {
            Ok(ended) if ended.len() >= runs => Ok(()),
            Ok(ended) => Err(format!("{} of {runs}", ended.len())),
            Err(error) => Err(error.to_string()),
        }
    })
    .await;
}
