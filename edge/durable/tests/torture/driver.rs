//! Plays everybody around a run: the worker that claims or resumes it, the person who approves, the service that sends the
//! event, the operator who looks into the ledger and resolves what is not known. It remembers nothing: after any failure a new
//! one, in this process or another, goes on from what is stored.

use std::sync::Arc;
use std::time::Duration;

use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::Graph;
use iop_durable::ids::{ActivityId, DecisionId, Owner, RunId, WaitId};
use iop_durable::machine::activity::{Action, Resolution};
use iop_durable::machine::wait::{Delivery, Verdict};
use iop_durable::payload::Payload;
use iop_durable::record::{ActivityRecord, Effect, Outcome, Status, WaitStatus, Waiting, WaitingKind};
use iop_durable::runner::{
    Bindings, CancelOutcome, Options, Resume, RunError, Runner, Start, idempotency_key,
};
use iop_durable::store::{Claim, IdempotencyKey, LeaseRequest, Loaded, Store, StoreError};
use iop_durable::token::ResumeToken;
use tokio::sync::watch;
use tokio::time::Instant;

use super::graph::{GO, NOT_APPLIED, State};
use super::world::World;

/// How a run is begun, worked on and resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Accepted, then claimed; a resolution sends it on.
    Claims,
    /// Started here, resumed by token; a resolution leaves it to a resume.
    Resumes,
}

/// What a look at the run led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    Moved,
    /// Nothing to do before this time has passed.
    Wait(Duration),
    Over,
}

/// When somebody asks for the end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelAt {
    /// Instead of answering.
    Approval,
    /// Before a retry is due.
    Retry,
    /// Before it is resolved.
    Ambiguous,
}

/// One run and those around it.
pub struct Driver {
    runner: Runner<State, String>,
    store: Arc<dyn Store>,
    world: Arc<World>,
    run: RunId,
    mode: Mode,
    cancel_at: Option<CancelAt>,
    lease: LeaseRequest,
}

impl Driver {
    /// Everything goes through `store`, which may fail; the world has its own way to it.
    pub fn new(
        graph: &Arc<Graph<State, String>>,
        store: &Arc<dyn Store>,
        world: &Arc<World>,
        run: &RunId,
        mode: Mode,
        ttl: Duration,
    ) -> Self {
        let owner = Owner::new("worker").unwrap();
        let mut options = Options::new(owner.clone());
        options.lease_ttl = ttl;
        options.bindings = Bindings::default().with(Arc::clone(world));
        Self {
            runner: Runner::new(Arc::clone(graph), Arc::clone(store), options).unwrap(),
            store: Arc::clone(store),
            world: Arc::clone(world),
            run: run.clone(),
            mode,
            cancel_at: None,
            lease: LeaseRequest { owner, ttl },
        }
    }

    /// The run is to be cancelled once it stands like this.
    pub fn cancelling(mut self, at: Option<CancelAt>) -> Self {
        self.cancel_at = at;
        self
    }

    pub fn runner(&self) -> &Runner<State, String> {
        &self.runner
    }

    /// One look and what follows from it.
    pub async fn step(&self) -> Result<Progress, RunError> {
        let loaded = match self.store.load(&self.run).await {
            Err(StoreError::NotFound) => return self.begin().await,
            loaded => loaded?,
        };
        if loaded.head.status.is_terminal() {
            let outcome =
                Outcome::decode(&loaded.head.outcome.clone().expect("it is over")).expect("it is JSON");
            if !outcome.resumable() {
                return Ok(Progress::Over);
            }
        }
        if let Some(lease) = &loaded.lease {
            let left = lease.expires_at.since(loaded.now);
            return Ok(Progress::Wait(left + Duration::from_millis(1)));
        }
        if self.is_to_be_cancelled(&loaded) {
            return self.cancel(&loaded).await;
        }
        match loaded.head.status {
            Status::Queued | Status::Running if self.mode == Mode::Claims => self.claim().await,
            Status::Queued | Status::Running | Status::Failed => self.resume(&loaded).await,
            Status::Ambiguous => self.resolve(&loaded).await,
            Status::Waiting => self.answer(&loaded).await,
            Status::Succeeded | Status::Cancelled | Status::Exhausted | Status::Transferred => {
                unreachable!("it is not over")
            }
        }
    }

    /// To the end, or to the first error.
    pub async fn drive(&self) -> Result<(), RunError> {
        for _ in 0..200 {
            match self.step().await? {
                Progress::Moved => {}
                Progress::Wait(span) => tokio::time::sleep(span).await,
                Progress::Over => return Ok(()),
            }
        }
        panic!("the run does not end: {:?}", self.store.load(&self.run).await);
    }

    async fn begin(&self) -> Result<Progress, RunError> {
        let mut start = Start::new(State::default()).run(self.run.clone());
        start.idempotency = Some(IdempotencyKey {
            scope: "torture".to_owned(),
            key: self.run.as_str().to_owned(),
            request: [1; 32],
        });
        match self.mode {
            Mode::Claims => self.runner.accept(start).await.map(|_| ())?,
            Mode::Resumes => self.runner.start(start).await.map(|_| ())?,
        }
        Ok(Progress::Moved)
    }

    async fn claim(&self) -> Result<Progress, RunError> {
        let definition = self.runner.graph().definition();
        let asked = Instant::now();
        let claimed = self
            .store
            .claim(Claim {
                lease: self.lease.clone(),
                definitions: vec![(definition.kind.clone(), definition.name.clone())],
                except: Vec::new(),
                limit: 1,
            })
            .await?;
        assert_eq!(claimed.quarantined, [], "nothing is corrupt");
        let Some(acquired) = claimed.runs.into_iter().next() else {
            return Ok(Progress::Wait(Duration::from_millis(5)));
        };
        assert_eq!(acquired.lease.run, self.run, "one definition, one run");
        let (_keep, stop) = watch::channel(false);
        let result = self.runner.run_claimed(acquired, asked, stop).await?;
        assert_ne!(result.status, Status::Running);
        Ok(Progress::Moved)
    }

    fn is_to_be_cancelled(&self, loaded: &Loaded) -> bool {
        let kind = loaded.head.waiting.as_ref().and_then(Waiting::kind);
        match self.cancel_at {
            None => false,
            Some(CancelAt::Approval) => kind == Some(WaitingKind::Approval),
            Some(CancelAt::Retry) => kind == Some(WaitingKind::Retry),
            Some(CancelAt::Ambiguous) => loaded.head.status == Status::Ambiguous,
        }
    }

    /// Asks for the end; what the request leaves to others is done by them.
    async fn cancel(&self, loaded: &Loaded) -> Result<Progress, RunError> {
        let id = DecisionId::new("cancel-1").unwrap();
        let operator = self.runner.operator();
        let cancelled = operator
            .cancel(&self.run, &id, "enough", Some("somebody"))
            .await?;
        match (cancelled.outcome, loaded.head.status) {
            (CancelOutcome::Done(Status::Cancelled), _) => Ok(Progress::Moved),
            (_, Status::Ambiguous) => self.resolve(loaded).await,
            (_, _) => self.claim().await,
        }
    }

    async fn resume(&self, loaded: &Loaded) -> Result<Progress, RunError> {
        self.runner.resume(&token(loaded), Resume::new()).await?;
        Ok(Progress::Moved)
    }

    async fn answer(&self, loaded: &Loaded) -> Result<Progress, RunError> {
        let waiting = loaded.head.waiting.as_ref().expect("it waits for something");
        let id = || WaitId::new(&waiting.on[0].id).unwrap();
        match waiting.kind() {
            Some(WaitingKind::Resume) => self.resume(loaded).await,
            Some(WaitingKind::Retry) => match waiting.due_at {
                Some(at) if at > loaded.now => Ok(Progress::Wait(at.since(loaded.now))),
                Some(_) | None => self.claim().await,
            },
            Some(WaitingKind::Approval) => {
                if !self.deliver(&id(), "approve-1", "yes").await? {
                    return self.claim().await;
                }
                Ok(Progress::Moved)
            }
            Some(WaitingKind::Event) => {
                if self.deliver(&id(), "event-1", "not yet").await? {
                    self.deliver(&id(), "event-2", GO).await?;
                }
                Ok(Progress::Moved)
            }
            other => panic!("the run waits for {other:?}: {waiting:?}"),
        }
    }

    /// Delivers to a wait that is armed. False when it is settled.
    async fn deliver(&self, id: &WaitId, decision: &str, payload: &str) -> Result<bool, RunError> {
        let record = self.store.wait(&self.run, id).await?.expect("the wait is stored");
        if record.status != WaitStatus::Armed {
            return Ok(false);
        }
        let delivery = Delivery {
            id: DecisionId::new(decision).unwrap(),
            correlation: record.correlation,
            generation: None,
            labels: None,
            payload: Payload::new(payload.to_owned()),
            by: Some("somebody".to_owned()),
            revision: iop_durable::ids::Revision::FIRST,
        };
        let delivered = if record.kind == WaitingKind::Approval {
            let operator = self.runner.operator();
            operator.deliver_to_gate(&self.run, id, &delivery).await?
        } else {
            self.runner.deliver(&self.run, id, &delivery).await?
        };
        let expected = if payload == "not yet" {
            Verdict::Unmatched
        } else {
            Verdict::Accepted
        };
        assert_eq!(delivered.verdict, expected, "{decision}");
        Ok(true)
    }

    /// Looks into the ledger for every effect that is not known: complete what was applied, fail what was not.
    pub async fn resolve(&self, loaded: &Loaded) -> Result<Progress, RunError> {
        let waiting = loaded.head.waiting.as_ref().expect("it waits for something");
        let on = &waiting.on[0];
        assert_eq!(on.kind, WaitingKind::Reconciliation, "{waiting:?}");
        let id = ActivityId::new(&on.id).unwrap();
        let record = self.store.activity(&self.run, &id).await?.expect("it is stored");
        let key = idempotency_key(&self.run, record.node.as_str(), record.activation, &record.key);
        if self.world.is_busy(&key) {
            return Ok(Progress::Wait(Duration::from_millis(10)));
        }
        let resolution = resolution(&self.world, &record);
        let go_on = self.mode == Mode::Claims;
        self.runner
            .operator()
            .resolve(&token(loaded), &resolution, Some("operator"), go_on)
            .await?;
        Ok(Progress::Moved)
    }
}

/// What an operator says of an unknown effect once nobody works on it any more: complete when the ledger has it, else fail.
pub fn resolution(world: &World, record: &ActivityRecord) -> Resolution {
    assert_eq!(
        record.effect,
        Effect::Unsafe,
        "only an unsafe effect is left to people"
    );
    let key = idempotency_key(&record.run, record.node.as_str(), record.activation, &record.key);
    let action = match world.answers(&record.run, &key).pop() {
        Some(answer) => Action::Complete {
            output: Payload::new(answer),
        },
        None => Action::Fail {
            error: Failure::new(FailureKind::ToolError, "it was never carried out").code(NOT_APPLIED),
        },
    };
    let attempt = record.attempts.last().expect("it was tried").n;
    Resolution {
        decision: DecisionId::new(&format!("resolve-{}-{attempt}", record.id)).unwrap(),
        id: record.id.clone(),
        action,
        input_digest: *record.input.digest(),
        implementation: record.implementation.clone(),
        attempt,
        reason: "looked it up".to_owned(),
        evidence: "the ledger".to_owned(),
    }
}

pub fn token(loaded: &Loaded) -> ResumeToken {
    ResumeToken {
        run: loaded.head.id.clone(),
        revision: loaded.head.revision,
    }
}

/// Whether an error is one that somebody around a run meets when a store fails, and that tells him to look again.
pub fn is_passing(error: &RunError) -> bool {
    error.retryable()
        || matches!(
            error,
            RunError::StaleToken { .. } | RunError::Waiting(_) | RunError::Ambiguous(_)
        )
}
