//! Runs graphs: starts, resumes and claims them, one segment at a time, each under a lease.

mod accept;
mod bindings;
mod ctx;
mod draft;
mod drive;
mod ending;
mod error;
mod journal;
mod keeper;
mod ledger;
mod operate;
mod resume;
mod segment;
mod step;
mod stream;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::Instant;

pub use accept::{Accepted, Start};
pub use bindings::Bindings;
pub use ctx::{Activity, ActivityError, Answer, Busy, Call, CallError, Ctx, Gate, idempotency_key};
pub use error::RunError;
pub use ledger::BudgetRefused;
pub use operate::{Addressed, CancelOutcome, Cancelled, DeliverOutcome, Operator, Reconciled, Resolved};
pub use resume::{Evaluated, Resume, ResumeDecision, ResumePlan};
pub use stream::{RunStream, StreamEvent};

use crate::graph::Graph;
use crate::ids::{NodeName, Owner, RunId};
use crate::payload::Payload;
use crate::record::{Budget, Outcome, Reason, RunHead, Status, Waiting};
use crate::runner::keeper::{Held, Keeper};
use crate::runner::ledger::Entry;
use crate::runner::resume::{Intent, refusal};
use crate::runner::segment::Segment;
use crate::store::{Acquired, Store};
use crate::tasks;
use crate::token::ResumeToken;

/// Limits of one run (D262). Beyond them a call is refused before anything happens.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of encoded state.
    pub max_state: u64,
    /// Bytes of an activity's input or output, and of a delivery.
    pub max_payload: u64,
    /// Deliveries one wait answers.
    pub max_deliveries: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_state: 64 << 20,
            max_payload: 16 << 20,
            max_deliveries: 1000,
        }
    }
}

impl Limits {
    /// # Errors
    /// `payload_too_large`.
    pub(crate) fn check_payload(&self, what: &'static str, bytes: usize) -> Result<(), RunError> {
        within(what, bytes, self.max_payload)
    }

    /// # Errors
    /// `payload_too_large`.
    pub(crate) fn check_state(&self, state: &Payload) -> Result<(), RunError> {
        within("state", state.bytes().len(), self.max_state)
    }
}

fn within(what: &'static str, bytes: usize, limit: u64) -> Result<(), RunError> {
    let bytes = bytes as u64;
    if bytes > limit {
        Err(RunError::PayloadTooLarge { what, bytes, limit })
    } else {
        Ok(())
    }
}

/// The longest lease and grace: sums with the present moment stay in range.
const MAX_SPAN: Duration = Duration::from_hours(24 * 366);

/// How a runner works.
#[derive(Debug, Clone)]
pub struct Options {
    /// Who holds the leases: a label for people.
    pub owner: Owner,
    /// How long a lost worker keeps its runs from others. Renewed three times in that span.
    pub lease_ttl: Duration,
    pub limits: Limits,
    /// How long an unsafe call in flight may still answer after a cancellation.
    pub cancel_grace: Duration,
    /// How long a run that is deleted on success is still there: for those who follow it elsewhere. A process that ends within
    /// this time leaves it.
    pub linger: Duration,
    pub bindings: Bindings,
}

impl Options {
    /// Leases of 30 s, a grace of 10 s, no lingering, the default limits.
    pub fn new(owner: Owner) -> Self {
        Self {
            owner,
            lease_ttl: Duration::from_secs(30),
            limits: Limits::default(),
            cancel_grace: Duration::from_secs(10),
            linger: Duration::ZERO,
            bindings: Bindings::default(),
        }
    }
}

/// Runs the runs of one graph. Cheap to clone.
pub struct Runner<S, E = crate::graph::NoEffect> {
    pub(crate) inner: Arc<Inner<S, E>>,
}

impl<S, E> Clone for Runner<S, E> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
        }
    }
}

pub(crate) struct Inner<S, E> {
    pub(crate) graph: Arc<Graph<S, E>>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) limits: Limits,
    pub(crate) cancel_grace: Duration,
    pub(crate) linger: Duration,
    pub(crate) bindings: Arc<Bindings>,
}

/// Where a run stands after a segment, or as it is stored.
#[derive(Debug, Clone)]
pub struct RunResult<S, E> {
    pub run: RunId,
    pub status: Status,
    pub life: u32,
    /// The node that runs or would run next; of a run that failed, the one it failed in. `None` when it is over otherwise.
    pub cursor: Option<NodeName>,
    /// The last committed state.
    pub state: S,
    /// For the next resume: only this one is valid (D91).
    pub token: ResumeToken,
    /// Of a run that is over.
    pub outcome: Option<Outcome>,
    /// The typed effects of a run that is over, in order (D105).
    pub effects: Vec<E>,
    /// Of a run that is parked.
    pub waiting: Option<Waiting>,
    pub budgets: BTreeMap<String, Budget>,
}

impl<S, E> RunResult<S, E> {
    /// Of a run that is over.
    pub fn reason(&self) -> Option<Reason> {
        self.outcome.as_ref().map(|outcome| outcome.reason)
    }
}

impl<S, E> Inner<S, E> {
    pub(crate) fn entry(&self, head: &RunHead, incarnation: u64) -> Entry {
        let node = head.cursor.clone().unwrap_or_else(|| self.graph.entry.clone());
        Entry {
            recovery_limit: self.graph.recovery_attempts,
            max_payload: self.limits.max_payload,
            ..Entry::of(head, node, incarnation)
        }
    }

    pub(crate) fn operator(&self) -> Operator {
        Operator::of(Arc::clone(&self.store), Arc::clone(&self.keeper), self.limits)
    }

    /// The typed state of stored bytes. Their seal holds: a codec that cannot read them is of another definition (D116).
    pub(crate) fn decode(&self, state: &Payload) -> Result<S, RunError>
    where
        S: 'static,
    {
        let undecodable = |why| RunError::DefinitionChanged(format!("the state cannot be decoded: {why}"));
        self.graph.decode(state).map_err(undecodable)
    }

    /// A run is of exactly one definition; another version, label or digest is never guessed to fit (D58, D116). Why this one
    /// is another.
    pub(crate) fn mismatch(&self, head: &RunHead) -> Option<String> {
        let (mine, its) = (&self.graph.definition, &head.definition);
        (mine != its).then(|| {
            format!(
                "it is of {} {} version {} ({}), this is {} {} version {} ({})",
                its.kind, its.name, its.version, its.digest, mine.kind, mine.name, mine.version, mine.digest
            )
        })
    }

    pub(crate) fn check_definition(&self, head: &RunHead) -> Result<(), RunError> {
        self.mismatch(head)
            .map_or(Ok(()), |why| Err(RunError::DefinitionChanged(why)))
    }
}

impl<S, E> Runner<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// # Errors
    /// `invalid_request` when the lease time is below a millisecond, a span is above a year or a limit is zero.
    pub fn new(graph: Arc<Graph<S, E>>, store: Arc<dyn Store>, options: Options) -> Result<Self, RunError> {
        if options.lease_ttl < Duration::from_millis(1) {
            return Err(RunError::InvalidRequest {
                field: "lease_ttl",
                why: "must be at least 1ms".to_owned(),
            });
        }
        for (field, span) in [
            ("lease_ttl", options.lease_ttl),
            ("cancel_grace", options.cancel_grace),
            ("linger", options.linger),
        ] {
            if span > MAX_SPAN {
                return Err(RunError::InvalidRequest {
                    field,
                    why: "must be at most a year".to_owned(),
                });
            }
        }
        if options.limits.max_state == 0
            || options.limits.max_payload == 0
            || options.limits.max_deliveries == 0
        {
            return Err(RunError::InvalidRequest {
                field: "limits",
                why: "must not be zero".to_owned(),
            });
        }
        let keeper = Keeper::new(Arc::clone(&store), options.owner, options.lease_ttl);
        Ok(Self {
            inner: Arc::new(Inner {
                graph,
                store,
                keeper,
                limits: options.limits,
                cancel_grace: options.cancel_grace,
                linger: options.linger,
                bindings: Arc::new(options.bindings),
            }),
        })
    }

    pub fn graph(&self) -> &Graph<S, E> {
        &self.inner.graph
    }

    pub fn store(&self) -> &Arc<dyn Store> {
        &self.inner.store
    }

    /// Everything that needs no graph: cancelling, resolving, reading.
    pub fn operator(&self) -> Operator {
        self.inner.operator()
    }

    /// Accepts a run and runs it here, to its first park or end. A run that exists with this id, definition and first state is
    /// not started again: the answer is where it stands.
    ///
    /// # Errors
    /// As `accept`, and what keeps the segment from being recorded. A run that fails is a result, not an error.
    pub async fn start(&self, start: Start<S>) -> Result<RunResult<S, E>, RunError> {
        let (_keep, stop) = watch::channel(false);
        self.start_with(start, None, stop).await
    }

    async fn start_with(
        &self,
        start: Start<S>,
        published: Option<watch::Sender<u64>>,
        stop: watch::Receiver<bool>,
    ) -> Result<RunResult<S, E>, RunError> {
        let now = self.inner.store.now().await?;
        let create = self.creation(start, now, Some(self.inner.keeper.request()))?;
        let asked = Instant::now();
        match self.create(create).await? {
            (_, Some(acquired)) => {
                let held = journal::take(&self.inner.keeper, &acquired, asked).await?;
                Box::pin(self.segment(acquired, held, Intent::Fresh, published, stop)).await
            }
            (accepted, None) => self.result(&accepted.run).await,
        }
    }

    /// Resumes a run with the token of its last result, to its next park or end. A run that has succeeded answers its stored
    /// result and runs nothing (D64).
    ///
    /// # Errors
    /// The refusals of `evaluate_resume`, typed; `invalid_resume_target`, `budget_invalid`, `payload_too_large`; what keeps the
    /// segment from being recorded.
    pub async fn resume(&self, token: &ResumeToken, resume: Resume<S>) -> Result<RunResult<S, E>, RunError> {
        let (_keep, stop) = watch::channel(false);
        self.resume_with(token, Intent::Resume(resume), None, stop).await
    }

    /// Resumes a run as `resume` does, and leaves it to the workers of a host: it is queued when this returns.
    ///
    /// # Errors
    /// As `resume`.
    pub async fn enqueue(&self, token: &ResumeToken, resume: Resume<S>) -> Result<RunResult<S, E>, RunError> {
        let (_keep, stop) = watch::channel(false);
        self.resume_with(token, Intent::Enqueue(resume), None, stop).await
    }

    async fn resume_with(
        &self,
        token: &ResumeToken,
        intent: Intent<S>,
        published: Option<watch::Sender<u64>>,
        stop: watch::Receiver<bool>,
    ) -> Result<RunResult<S, E>, RunError> {
        let loaded = self.inner.store.load(&token.run).await?;
        let moves = intent.moves();
        if let Some(refused) = refusal(self.decide(token, &loaded), &loaded, moves) {
            return Err(refused);
        }
        if loaded.head.status == Status::Succeeded {
            return self.shown(loaded.head, &loaded.state);
        }
        let asked = Instant::now();
        let acquired = self
            .inner
            .store
            .acquire(&token.run, self.inner.keeper.request())
            .await?;
        let held = journal::take(&self.inner.keeper, &acquired, asked).await?;
        if acquired.loaded.head.revision != token.revision {
            let current = acquired.loaded.head.token();
            self.inner.keeper.release(&held).await;
            return Err(RunError::StaleToken { current });
        }
        Box::pin(self.segment(acquired, held, intent, published, stop)).await
    }

    /// Runs a run that was claimed, to its next park or end. `asked` is when the claim was sent.
    ///
    /// # Errors
    /// What keeps the segment from being recorded.
    pub async fn run_claimed(
        &self,
        acquired: Acquired,
        asked: Instant,
        stop: watch::Receiver<bool>,
    ) -> Result<RunResult<S, E>, RunError> {
        let held = journal::take(&self.inner.keeper, &acquired, asked).await?;
        Box::pin(self.segment(acquired, held, Intent::Claimed, None, stop)).await
    }

    async fn segment(
        &self,
        acquired: Acquired,
        held: Held,
        intent: Intent<S>,
        published: Option<watch::Sender<u64>>,
        stop: watch::Receiver<bool>,
    ) -> Result<RunResult<S, E>, RunError> {
        let mut segment = Segment::open(Arc::clone(&self.inner), acquired, held, published, stop).await?;
        let ran = match segment.admit(intent).await {
            Ok(true) => segment.run().await,
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = ran {
            let head = &segment.head;
            let error = journal::doubted(&self.inner.store, &head.id, head.revision, error).await;
            // Whatever could not be written, the next holder reads what was.
            if segment.held.is_live() {
                self.inner.keeper.release(&segment.held).await;
            }
            return Err(error);
        }
        let (head, state) = (segment.head, segment.state);
        self.clean_up(&head).await;
        self.shown(head, &state)
    }

    /// Retention, after the lease is released; its failure changes no result (D226).
    async fn clean_up(&self, head: &RunHead) {
        let (store, graph) = (&self.inner.store, &self.inner.graph);
        // A run that another one started is there until that one has read its result.
        if head.status == Status::Succeeded && graph.delete_on_success && head.lineage.parent.is_none() {
            let (store, run, linger) = (Arc::clone(store), head.id.clone(), self.inner.linger);
            let delete = async move {
                if let Err(error) = store.delete_if_idle(&run).await {
                    tracing::warn!(%error, "a finished run was not deleted");
                }
            };
            if linger.is_zero() {
                delete.await;
            } else {
                tasks::spawn("delete on success", async move {
                    tokio::time::sleep(linger).await;
                    delete.await;
                });
            }
            return;
        }
        if let Some(keep) = graph.keep_checkpoints
            && head.revision.get() > u64::from(keep)
            && let Err(error) = store.prune(&head.id, keep).await
        {
            tracing::warn!(%error, "checkpoints were not pruned");
        }
    }

    /// The stored result of a run.
    ///
    /// # Errors
    /// `run_not_found`, `run_deleted`, `run_corrupt`, `definition_changed`; the store's.
    pub async fn result(&self, run: &RunId) -> Result<RunResult<S, E>, RunError> {
        let loaded = self.inner.store.load(run).await?;
        self.inner.check_definition(&loaded.head)?;
        self.shown(loaded.head, &loaded.state)
    }

    fn shown(&self, head: RunHead, state: &Payload) -> Result<RunResult<S, E>, RunError> {
        let outcome = head
            .outcome
            .as_deref()
            .map(Outcome::decode)
            .transpose()
            .map_err(|e| RunError::Corrupt(format!("the outcome cannot be read: {e}")))?;
        let effects = outcome
            .iter()
            .flat_map(|outcome| &outcome.effects)
            .map(|text| serde_json::from_str(text.get()))
            .collect::<Result<Vec<E>, _>>()
            .map_err(|e| RunError::Corrupt(format!("an effect cannot be read: {e}")))?;
        Ok(RunResult {
            token: head.token(),
            run: head.id,
            status: head.status,
            life: head.life,
            cursor: head.cursor,
            state: self.inner.decode(state)?,
            outcome,
            effects,
            waiting: head.waiting,
            budgets: head.budgets,
        })
    }
}

/// Runs claimed runs of one graph, whatever its types: what a host keeps per definition.
pub trait Drive: Send + Sync + 'static {
    /// `(kind, name)`.
    fn definition(&self) -> (String, String);
    /// How long its leases last.
    fn lease_ttl(&self) -> Duration;
    /// Whether it is of exactly this version.
    fn fits(&self, head: &RunHead) -> bool;
    /// To the next park or end; where it stands then.
    fn drive(
        &self,
        acquired: Acquired,
        asked: Instant,
        stop: watch::Receiver<bool>,
    ) -> BoxFuture<'_, Result<Status, RunError>>;
}

impl<S, E> Drive for Runner<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    fn definition(&self) -> (String, String) {
        let definition = &self.inner.graph.definition;
        (definition.kind.clone(), definition.name.clone())
    }

    fn lease_ttl(&self) -> Duration {
        self.inner.keeper.ttl()
    }

    fn fits(&self, head: &RunHead) -> bool {
        head.definition == self.inner.graph.definition
    }

    fn drive(
        &self,
        acquired: Acquired,
        asked: Instant,
        stop: watch::Receiver<bool>,
    ) -> BoxFuture<'_, Result<Status, RunError>> {
        Box::pin(async move { Ok(self.run_claimed(acquired, asked, stop).await?.status) })
    }
}
