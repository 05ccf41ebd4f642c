//! One stretch of a run under one lease: from a start, a claim or a resume to the next park or end. The order of things in it
//! is the resume pipeline of seed 003.

use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::envelope;
use crate::failure::{Failure, FailureKind};
use crate::graph::{Base, Directive, NodeEntry, NodeError};
use crate::ids::NodeName;
use crate::machine::activity;
use crate::machine::retry::{self, Next};
use crate::machine::wait;
use crate::payload::Payload;
use crate::record::{
    CancelRequest, Continuation, EventName, Exhausted, Outcome, OutcomeCancel, OutcomeError, Reason, RunHead,
    Status, StepRecord, StepStatus, WaitStatus, Waiting, WaitingKind, WaitingOn,
};
use crate::runner::draft::{Draft, Halt, persist};
use crate::runner::drive::{Ending, Why};
use crate::runner::keeper::Held;
use crate::runner::ledger::{Holding, Ledger};
use crate::runner::{Inner, RunError};
use crate::store::{Acquired, Authority, Store, StoreError};
use crate::time::Timestamp;

pub(crate) struct Segment<S, E> {
    pub(crate) inner: Arc<Inner<S, E>>,
    pub(crate) held: Arc<Held>,
    pub(crate) head: RunHead,
    pub(crate) state: Payload,
    pub(crate) ledger: Arc<Ledger>,
    /// The inbox as last read.
    pub(crate) signal: u64,
    pub(crate) cancel: Option<CancelRequest>,
    /// Activations of this segment.
    steps: u64,
    entered_at: Timestamp,
    pub(crate) published: Option<tokio::sync::watch::Sender<u64>>,
    pub(crate) stop: tokio::sync::watch::Receiver<bool>,
}

/// What a step leads to.
enum Turn {
    /// The next node, or the same one again.
    On,
    /// Parked or over: committed, lease released.
    Done,
}

#[derive(Serialize)]
struct WaitingEvent<'a> {
    reason: &'a str,
    waiting_on: &'a [WaitingOn],
}

impl<S, E> Segment<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// Opens a run somebody holds: everything stored is verified again before any code of the host sees it (D114, D145).
    pub(crate) async fn open(
        inner: Arc<Inner<S, E>>,
        acquired: Acquired,
        held: Held,
        published: Option<tokio::sync::watch::Sender<u64>>,
        stop: tokio::sync::watch::Receiver<bool>,
    ) -> Result<Self, RunError> {
        let held = Arc::new(held);
        let Acquired { lease, loaded } = acquired;
        let opened = async {
            let corrupt = |what: String| RunError::Corrupt(what);
            if loaded.head.id != lease.run || loaded.head.state_digest != *loaded.state.digest() {
                return Err(corrupt("the store answered with another run".to_owned()));
            }
            if envelope::seal_of(&loaded.head, &loaded.state)? != loaded.seal {
                return Err(corrupt("the seal does not hold".to_owned()));
            }
            inner.check_definition(&loaded.head)?;
            let journal = inner.store.journal(&lease.run, loaded.head.activation).await?;
            let (run, activation) = (&lease.run, loaded.head.activation);
            activity::validate(&journal.activities, run, activation, loaded.head.open_activities)
                .map_err(corrupt)?;
            // Gates may have been settled by deliveries since the head was written; none can have been armed.
            let armed = journal
                .waits
                .iter()
                .filter(|w| w.status == WaitStatus::Armed)
                .count();
            let armed = u32::try_from(armed).unwrap_or(u32::MAX);
            if armed > loaded.head.armed_waits {
                return Err(corrupt("more waits are armed than the head says".to_owned()));
            }
            wait::validate(&journal.waits, run, activation, armed).map_err(corrupt)?;
            Ok(journal)
        };
        let journal = match opened.await {
            Ok(journal) => journal,
            Err(error) => {
                if let RunError::Corrupt(why) = &error {
                    let _ = inner.store.quarantine(&lease.run, why).await;
                }
                inner.release(&held).await;
                return Err(error);
            }
        };
        let now = held.now();
        let mut activities = journal.activities;
        let mut recovered = false;
        for record in &mut activities {
            recovered |= activity::recover(record, lease.incarnation, now);
        }
        let entry = inner.entry(&loaded.head, lease.incarnation);
        let ledger = Ledger::new(entry, activities, journal.waits, loaded.head.budgets.clone());
        if recovered {
            ledger.touch_recovered();
        }
        Ok(Self {
            inner,
            held,
            head: loaded.head,
            state: loaded.state,
            ledger: Arc::new(ledger),
            signal: loaded.inbox.signal,
            cancel: loaded.inbox.cancel,
            steps: 0,
            entered_at: now,
            published,
            stop,
        })
    }

    pub(crate) fn draft(&self) -> Draft {
        Draft::new(&self.head, &self.state, self.held.now())
    }

    /// Writes a draft and takes it over. After `Halt::Signal` nothing has changed but `signal`.
    pub(crate) async fn write(&mut self, draft: Draft) -> Result<(), Halt> {
        let outcome = draft.outcome;
        let signal = draft.watch_inbox.then_some(self.signal);
        let commit = draft.commit(Authority::Lease(self.held.lease().clone()), signal);
        let committed = persist(&self.inner.store, &self.held, &commit, outcome).await?;
        self.landed(commit, committed.revision);
        Ok(())
    }

    /// A commit is in the store.
    pub(crate) fn landed(&mut self, commit: crate::store::Commit, revision: crate::ids::Revision) {
        self.ledger.mark_stored(&commit.activities);
        self.head = commit.head;
        self.head.revision = revision;
        self.state = commit.state;
        self.state.mark_stored();
        if let Some(published) = &self.published {
            published.send_replace(self.head.event_seq);
        }
    }

    /// Reads what others put into the inbox.
    pub(crate) async fn read_inbox(&mut self) -> Result<(), Halt> {
        let loaded = self.inner.store.load(&self.head.id).await.map_err(Halt::Store)?;
        if loaded.head.revision != self.head.revision {
            self.held.lose();
            return Err(Halt::LeaseLost);
        }
        self.signal = loaded.inbox.signal;
        self.cancel = loaded.inbox.cancel;
        if self.head.armed_waits > 0 {
            let journal = self
                .inner
                .store
                .journal(&self.head.id, self.head.activation)
                .await
                .map_err(Halt::Store)?;
            self.ledger.refresh_waits(journal.waits);
        }
        Ok(())
    }

    /// A fresh ledger for another entry into the same activation, or for the next one.
    fn reenter(&mut self) {
        let entry = self.inner.entry(&self.head, self.held.lease().incarnation);
        let same = entry.activation == self.ledger.entry.activation;
        let (activities, waits) = if same {
            self.ledger.records()
        } else {
            (Vec::new(), Vec::new())
        };
        self.ledger = Arc::new(Ledger::new(entry, activities, waits, self.head.budgets.clone()));
        self.entered_at = self.held.now();
    }

    /// Runs to the next park or end. Everything before has been committed by `admit`.
    pub(crate) async fn run(&mut self) -> Result<(), RunError> {
        loop {
            match self.turn().await {
                Ok(Turn::On) => {}
                Ok(Turn::Done) => return Ok(()),
                Err(Halt::Signal) => match self.read_inbox().await {
                    Ok(()) => self.reenter(),
                    Err(halt) => return Err(self.halted(halt)),
                },
                Err(halt) => return Err(self.halted(halt)),
            }
        }
    }

    /// The entry is committed: the first turn works on what it left.
    pub(crate) fn restart(&mut self) {
        self.reenter();
    }

    /// A lost worker too many.
    pub(crate) async fn give_up(&mut self, exhausted: Exhausted) -> Result<bool, RunError> {
        let failure = Failure::new(
            FailureKind::Unavailable,
            "the workers of this step were lost too often",
        );
        match self.exhaust(exhausted, Some(failure)).await {
            Ok(_) => Ok(false),
            Err(halt) => Err(self.halted(halt)),
        }
    }

    fn halted(&self, halt: Halt) -> RunError {
        match halt {
            Halt::LeaseLost => RunError::LeaseLost,
            Halt::Signal => RunError::Busy,
            Halt::Store(error @ StoreError::Unavailable { .. }) if self.head.open_activities > 0 => {
                RunError::JournalUnavailable(error)
            }
            Halt::Store(error) => RunError::from(error),
        }
    }

    async fn turn(&mut self) -> Result<Turn, Halt> {
        if self.cancel.is_some() {
            return self.interrupt(Why::Cancel).await;
        }
        if self
            .head
            .deadline
            .is_some_and(|deadline| deadline <= self.held.now())
        {
            return self.interrupt(Why::Deadline).await;
        }
        if *self.stop.borrow() {
            return self.interrupt(Why::Stop).await;
        }
        let inner = Arc::clone(&self.inner);
        let Some((name, entry)) = self
            .head
            .cursor
            .clone()
            .and_then(|name| Some((name.clone(), inner.graph.nodes.get(&name)?)))
        else {
            return self
                .fail(
                    Failure::new(FailureKind::Internal, "the run points at no node"),
                    None,
                )
                .await;
        };
        if self.steps >= inner.graph.max_steps {
            let exhausted = Exhausted {
                budget: "steps".to_owned(),
                used: self.steps,
                limit: inner.graph.max_steps,
            };
            return self.exhaust(exhausted, None).await;
        }
        let typed = match inner.graph.decode(&self.state) {
            Ok(typed) => typed,
            Err(why) => {
                return Err(Halt::Store(StoreError::corrupt(format!(
                    "the state cannot be decoded: {why}"
                ))));
            }
        };
        match self.drive(entry, typed).await? {
            Ending::Parked => self.hold().await,
            Ending::Interrupted(why) => self.interrupt(why).await,
            Ending::Panicked => {
                let failure = Failure::new(FailureKind::Internal, "the node panicked").code("panic");
                self.node_failed(&name, entry, NodeError::Failed(failure)).await
            }
            Ending::Returned(Err(error)) => self.node_failed(&name, entry, error).await,
            Ending::Returned(Ok((update, directive))) => {
                self.node_done(&name, entry, update, directive).await
            }
        }
    }

    /// What holds the step back parks the run, or brings it back to the node when nothing outside is needed.
    async fn hold(&mut self) -> Result<Turn, Halt> {
        let now = self.held.now();
        self.ledger.abandon_in_flight(now);
        let timed_out = self.ledger.time_out_gates(now);
        let holding = self.ledger.holding();
        if timed_out
            || (!holding.unknown && holding.due_at.is_some_and(|at| at <= now))
            || holding.on.is_empty()
        {
            let mut draft = self.draft();
            draft.watch_inbox = timed_out;
            draft.take(self.ledger.take_dirty(), self.ledger.open());
            self.write(draft).await?;
            self.reenter();
            return Ok(Turn::On);
        }
        let mut draft = self.draft();
        draft.take(self.ledger.take_dirty(), self.ledger.open());
        self.park(draft, holding, None).await
    }

    async fn park(
        &mut self,
        mut draft: Draft,
        holding: Holding,
        reason: Option<String>,
    ) -> Result<Turn, Halt> {
        park(&mut draft, holding, reason);
        draft.release = true;
        self.write(draft).await?;
        Ok(Turn::Done)
    }

    /// A step that is over, with the draft it belongs to.
    fn step(&self, status: StepStatus, error: Option<Failure>) -> Option<StepRecord> {
        Some(StepRecord {
            activation: self.head.activation,
            node: self.head.cursor.clone()?,
            status,
            attempts: self.head.attempt,
            result: None,
            error,
            effects: Vec::new(),
            started_at: self.entered_at,
            ended_at: self.held.now(),
        })
    }

    async fn node_done(
        &mut self,
        name: &NodeName,
        entry: &NodeEntry<S, E>,
        update: S,
        directive: Directive<E>,
    ) -> Result<Turn, Halt> {
        let now = self.held.now();
        self.ledger.abandon_in_flight(now);
        if !self.ledger.holding().on.is_empty() {
            return self.hold().await;
        }
        let Directive {
            base,
            effects,
            result,
        } = directive;
        if let Base::Retry { max_attempts } = base {
            return self.retry(name, entry, update, max_attempts).await;
        }
        let inner = Arc::clone(&self.inner);
        let (state, typed) = match self.reduce(update) {
            Ok(reduced) => reduced,
            Err(error) => return self.node_failed(name, entry, error).await,
        };
        let mut texts = Vec::with_capacity(effects.len());
        for effect in &effects {
            match serde_json::value::to_raw_value(effect) {
                Ok(text) => texts.push(text),
                Err(e) => {
                    let failure =
                        Failure::new(FailureKind::Internal, format!("an effect cannot be encoded: {e}"));
                    return self.fail(failure, None).await;
                }
            }
        }
        let next = match base {
            Base::Completed => match inner.graph.route(entry, &typed) {
                Ok(next) => next,
                Err(error) => return self.node_failed(name, entry, error).await,
            },
            Base::Wait(_) if entry.wait.is_none() => {
                let failure = Failure::new(
                    FailureKind::Configuration,
                    format!("node {name} waits without a wait route"),
                );
                return self.fail(failure.code("wait_route_missing"), None).await;
            }
            Base::Suspend {
                resume_at: Some(ref target),
                ..
            } => match inner.graph.nodes.keys().find(|node| node.as_str() == target) {
                Some(node) => Some(node.clone()),
                None => {
                    let failure =
                        Failure::new(FailureKind::Configuration, format!("{target:?} is not a node"));
                    return self.fail(failure.code("invalid_resume_target"), None).await;
                }
            },
            Base::Suspend { resume_at: None, .. } => Some(name.clone()),
            Base::End | Base::Fail(_) | Base::Retry { .. } | Base::Wait(_) => None,
        };

        let mut draft = self.draft();
        draft.state = state;
        draft.head.state_digest = *draft.state.digest();
        draft.head.budgets = self.ledger.budgets();
        draft.take(self.ledger.take_dirty(), self.ledger.open());
        let failure = if let Base::Fail(failure) = &base {
            Some(failure.clone())
        } else {
            None
        };
        let status = if failure.is_some() {
            StepStatus::Failed
        } else {
            StepStatus::Done
        };
        if let Some(mut step) = self.step(status, failure.clone()) {
            step.result = result;
            draft.head.effects += texts.len() as u64;
            step.effects = texts;
            draft.step_event(EventName::StepCompleted, &step.node, Some(status.as_str()));
            draft.steps.push(step);
        }
        self.steps += 1;

        match (base, next) {
            (Base::Wait(spec), _) => {
                let Some(route) = &entry.wait else {
                    return self.hold().await;
                };
                let spec = wait::WaitSpec {
                    key: spec.key,
                    correlation: spec.correlation,
                    kind: spec.kind,
                    continuation: Continuation::Nodes {
                        on_event: route.on_event.clone(),
                        on_timeout: route.on_timeout.clone(),
                    },
                    labels: route.labels.clone(),
                    subject: spec.subject,
                    deadline: spec.deadline.map(|deadline| match deadline {
                        crate::graph::Deadline::At(at) => at,
                        crate::graph::Deadline::In(span) => now.plus(span),
                    }),
                    deadline_policy: spec.deadline_policy,
                };
                if let Err(e) = wait::check(&spec) {
                    return self
                        .fail(Failure::new(FailureKind::Configuration, e.to_string()), None)
                        .await;
                }
                let address = wait::Address {
                    run: self.head.id.clone(),
                    node: name.clone(),
                    activation: self.head.activation,
                };
                let record = wait::arm(&address, &spec, 1, now);
                let holding = Holding {
                    on: vec![WaitingOn {
                        kind: record.kind,
                        id: record.id.as_str().to_owned(),
                        node: name.clone(),
                        key: record.key.as_str().to_owned(),
                    }],
                    due_at: record.deadline,
                    unknown: false,
                };
                draft.head.armed_waits += 1;
                draft.waits.push(record);
                self.park(draft, holding, None).await
            }
            (Base::Suspend { reason, .. }, Some(node)) => {
                let on = WaitingOn {
                    kind: WaitingKind::Resume,
                    id: String::new(),
                    node: node.clone(),
                    key: String::new(),
                };
                enter(&mut draft.head, node);
                self.park(
                    draft,
                    Holding {
                        on: vec![on],
                        due_at: None,
                        unknown: false,
                    },
                    Some(reason),
                )
                .await
            }
            (Base::Fail(failure), _) => self.finish_failed(draft, failure, None).await,
            (Base::Completed, Some(node)) => {
                enter(&mut draft.head, node.clone());
                draft.step_event(EventName::StepStarted, &node, None);
                self.write(draft).await?;
                self.reenter();
                Ok(Turn::On)
            }
            (Base::Completed | Base::End | Base::Retry { .. } | Base::Suspend { .. }, _) => {
                let output = match &inner.graph.output {
                    None => None,
                    Some(output) => match output(&typed) {
                        Ok(text) => Some(text),
                        Err(why) => {
                            let failure = Failure::new(
                                FailureKind::Internal,
                                format!("the output cannot be shown: {why}"),
                            );
                            return self.fail(failure, None).await;
                        }
                    },
                };
                let mut outcome = Outcome::new(Status::Succeeded, Reason::Completed);
                outcome.output = output;
                self.end(draft, outcome).await
            }
        }
    }

    /// The state after a node: reduced, checked, encoded.
    fn reduce(&self, update: S) -> Result<(Payload, S), NodeError> {
        let graph = &self.inner.graph;
        let internal = |why: String| NodeError::Failed(Failure::new(FailureKind::Internal, why));
        let typed = match &graph.reducer {
            None => update,
            Some(reducer) => {
                let base = graph.decode(&self.state).map_err(internal)?;
                reducer(&base, update)
            }
        };
        if let Some(invariant) = &graph.invariant {
            invariant(&typed).map_err(|why| {
                NodeError::Failed(Failure::new(FailureKind::Verification, why).code("invariant_violated"))
            })?;
        }
        let state = graph.encode(&typed).map_err(internal)?;
        let bytes = state.bytes().len() as u64;
        if bytes > self.inner.limits.max_state {
            let failure = Failure::new(
                FailureKind::InvalidInput,
                format!(
                    "the state is {bytes} bytes, at most {} are allowed",
                    self.inner.limits.max_state
                ),
            );
            return Err(NodeError::Failed(failure.code("payload_too_large")));
        }
        // An unchanged state need not travel again.
        let state = if state == self.state {
            self.state.clone()
        } else {
            state
        };
        Ok((state, typed))
    }

    /// `Directive::retry`: the same entry once more, its attempt counted before it begins (D67).
    async fn retry(
        &mut self,
        name: &NodeName,
        entry: &NodeEntry<S, E>,
        update: S,
        max: u32,
    ) -> Result<Turn, Halt> {
        if self.head.attempt < max {
            let mut draft = self.draft();
            draft.take(self.ledger.take_dirty(), self.ledger.open());
            draft.head.attempt += 1;
            draft.step_event(EventName::StepStarted, name, None);
            self.write(draft).await?;
            self.reenter();
            return Ok(Turn::On);
        }
        let exhausted = Exhausted {
            budget: format!("retry:{name}"),
            used: self.head.attempt.into(),
            limit: max.into(),
        };
        let Some(route) = &entry.retry_route else {
            return self.exhaust(exhausted, None).await;
        };
        let state = match self.reduce(update) {
            Ok((state, _)) => state,
            Err(error) => return self.node_failed(name, entry, error).await,
        };
        self.reroute(route.clone(), Some(state), None).await
    }

    /// The retry route: this step is over as exhausted, the run goes on there (D250).
    async fn reroute(
        &mut self,
        to: NodeName,
        state: Option<Payload>,
        error: Option<Failure>,
    ) -> Result<Turn, Halt> {
        let mut draft = self.draft();
        if let Some(state) = state {
            draft.head.state_digest = *state.digest();
            draft.state = state;
        }
        draft.take(self.ledger.take_dirty(), self.ledger.open());
        if let Some(step) = self.step(StepStatus::Exhausted, error) {
            draft.step_event(EventName::StepCompleted, &step.node, Some(step.status.as_str()));
            draft.steps.push(step);
        }
        self.steps += 1;
        enter(&mut draft.head, to.clone());
        draft.step_event(EventName::StepStarted, &to, None);
        self.write(draft).await?;
        self.reenter();
        Ok(Turn::On)
    }

    /// A node that returned an error or panicked.
    async fn node_failed(
        &mut self,
        name: &NodeName,
        entry: &NodeEntry<S, E>,
        error: NodeError,
    ) -> Result<Turn, Halt> {
        let now = self.held.now();
        self.ledger.abandon_in_flight(now);
        if self.ledger.holding().unknown {
            return self.hold().await;
        }
        let (failure, exhausted) = match error {
            NodeError::Exhausted { exhausted, failure } => return self.exhaust(exhausted, failure).await,
            NodeError::Failed(failure) => {
                let policy = entry.retry.as_ref();
                match retry::after_failure(
                    policy,
                    name,
                    self.head.attempt,
                    &failure,
                    None,
                    now,
                    fastrand::f64(),
                ) {
                    Next::Again(not_before) => return self.retry_later(name, not_before.at).await,
                    Next::Final { exhausted } => (failure, exhausted),
                }
            }
        };
        match (exhausted, &entry.retry_route) {
            (Some(_), Some(route)) if self.ledger.holding().on.is_empty() => {
                self.reroute(route.clone(), None, Some(failure)).await
            }
            (Some(exhausted), _) => self.exhaust(exhausted, Some(failure)).await,
            (None, _) => self.fail(failure, None).await,
        }
    }

    /// A step retry: the attempt is counted and the run parked until it is due (D148).
    async fn retry_later(&mut self, name: &NodeName, at: Timestamp) -> Result<Turn, Halt> {
        let mut draft = self.draft();
        draft.take(self.ledger.take_dirty(), self.ledger.open());
        draft.head.attempt += 1;
        let on = WaitingOn {
            kind: WaitingKind::Retry,
            id: String::new(),
            node: name.clone(),
            key: String::new(),
        };
        self.park(
            draft,
            Holding {
                on: vec![on],
                due_at: Some(at),
                unknown: false,
            },
            None,
        )
        .await
    }

    async fn fail(&mut self, failure: Failure, exhausted: Option<Exhausted>) -> Result<Turn, Halt> {
        self.ledger.close(&failure, self.held.now());
        if !self.ledger.holding().on.is_empty() {
            return self.hold().await;
        }
        let mut draft = self.draft();
        draft.take(self.ledger.take_dirty(), self.ledger.open());
        let status = if exhausted.is_some() {
            StepStatus::Exhausted
        } else {
            StepStatus::Failed
        };
        if let Some(step) = self.step(status, Some(failure.clone())) {
            draft.step_event(EventName::StepCompleted, &step.node, Some(status.as_str()));
            draft.steps.push(step);
        }
        self.finish_failed(draft, failure, exhausted).await
    }

    async fn exhaust(&mut self, exhausted: Exhausted, failure: Option<Failure>) -> Result<Turn, Halt> {
        let failure = failure.unwrap_or_else(|| {
            Failure::new(
                FailureKind::Refused,
                format!(
                    "{} of {} {} are used",
                    exhausted.used, exhausted.limit, exhausted.budget
                ),
            )
            .code("budget_exhausted")
        });
        self.fail(failure, Some(exhausted)).await
    }

    async fn finish_failed(
        &mut self,
        draft: Draft,
        failure: Failure,
        exhausted: Option<Exhausted>,
    ) -> Result<Turn, Halt> {
        let (status, reason) = match &exhausted {
            Some(_) => (Status::Exhausted, Reason::Budget),
            None => (Status::Failed, Reason::Error),
        };
        let mut outcome = Outcome::new(status, reason);
        outcome.error = Some(OutcomeError {
            failure,
            step: self.head.cursor.as_ref().map(|c| c.as_str().to_owned()),
            attempt: self.head.attempt,
        });
        outcome.exhausted = exhausted;
        self.end(draft, outcome).await
    }

    /// The terminal commit (D235). A request to cancel that was accepted before it wins over success.
    async fn end(&mut self, mut draft: Draft, outcome: Outcome) -> Result<Turn, Halt> {
        draft.watch_inbox = outcome.status == Status::Succeeded;
        draft.release = true;
        end(&self.inner.store, &mut draft, outcome).await?;
        self.write(draft).await?;
        Ok(Turn::Done)
    }

    /// Cancel, deadline or stop, at the last committed point: what the node had not committed is discarded (D103).
    async fn interrupt(&mut self, why: Why) -> Result<Turn, Halt> {
        let now = self.held.now();
        self.ledger.abandon_in_flight(now);
        if why == Why::Stop {
            if self.ledger.holding().unknown {
                return self.hold().await;
            }
            let mut draft = self.draft();
            draft.take(self.ledger.take_dirty(), self.ledger.open());
            draft.head.status = Status::Queued;
            draft.head.waiting = None;
            draft.release = true;
            self.write(draft).await?;
            return Ok(Turn::Done);
        }
        let mut draft = self.draft();
        match cut_short(
            &mut draft,
            &self.ledger,
            self.cancel.as_ref(),
            self.entered_at,
            now,
        ) {
            Some(outcome) => self.end(draft, outcome).await,
            None => {
                draft.release = true;
                self.write(draft).await?;
                Ok(Turn::Done)
            }
        }
    }
}

/// Parks: `ambiguous` when an effect is unknown, else `waiting`. An unknown effect is not ended by a deadline: it stays until
/// it is resolved.
pub(crate) fn park(draft: &mut Draft, holding: Holding, reason: Option<String>) {
    let (status, name) = if holding.unknown {
        (Status::Ambiguous, EventName::Ambiguous)
    } else {
        (Status::Waiting, EventName::Waiting)
    };
    let kind = holding.on.first().map_or("resume", |on| on.kind.as_str());
    let reason = reason.unwrap_or_else(|| kind.to_owned());
    draft.due_at = if holding.unknown {
        None
    } else {
        [holding.due_at, draft.head.deadline].into_iter().flatten().min()
    };
    draft.engine_event(
        name,
        &WaitingEvent {
            reason: &reason,
            waiting_on: &holding.on,
        },
    );
    draft.head.status = status;
    draft.head.waiting = Some(Waiting {
        reason,
        due_at: holding.due_at,
        on: holding.on,
    });
    draft.watch_inbox = true;
}

/// Ends: the outcome with every typed effect of the run, in order (D105), encoded once.
pub(crate) async fn end(store: &Arc<dyn Store>, draft: &mut Draft, mut outcome: Outcome) -> Result<(), Halt> {
    if draft.head.effects > 0 {
        let mut after = 0;
        loop {
            let page = store
                .steps(&draft.head.id, after, 500)
                .await
                .map_err(Halt::Store)?;
            let Some(last) = page.last() else { break };
            after = last.activation;
            outcome
                .effects
                .extend(page.into_iter().flat_map(|step| step.effects));
        }
        outcome
            .effects
            .extend(draft.steps.iter().flat_map(|step| step.effects.clone()));
    }
    let encoded = outcome
        .encode()
        .map_err(|e| Halt::Store(StoreError::corrupt(format!("the outcome cannot be encoded: {e}"))))?;
    if outcome.status != Status::Failed {
        draft.head.cursor = None;
    }
    draft.end(outcome.status, encoded);
    Ok(())
}

/// A run cut short by a cancellation or its deadline: everything that can be closed is closed. The outcome, or `None` when an
/// unknown effect keeps the run `ambiguous` (durable-api §8, "Cancel").
pub(crate) fn cut_short(
    draft: &mut Draft,
    ledger: &Ledger,
    cancel: Option<&CancelRequest>,
    entered_at: Timestamp,
    now: Timestamp,
) -> Option<Outcome> {
    let completed = ledger.completed();
    let recorded = ledger.step_is_recorded();
    let failure = Failure::new(FailureKind::Refused, "the run was cancelled").code("cancelled");
    ledger.close(&failure, now);
    let holding = ledger.holding();
    draft.take(ledger.take_dirty(), ledger.open());
    if holding.unknown {
        park(draft, holding, None);
        return None;
    }
    if let (false, Some(node)) = (recorded, draft.head.cursor.clone()) {
        let step = StepRecord {
            activation: draft.head.activation,
            node,
            status: StepStatus::Cancelled,
            attempts: draft.head.attempt,
            result: None,
            error: None,
            effects: Vec::new(),
            started_at: entered_at,
            ended_at: now,
        };
        draft.step_event(EventName::StepCompleted, &step.node, Some(step.status.as_str()));
        draft.steps.push(step);
    }
    let reason = if cancel.is_some() {
        Reason::Cancelled
    } else {
        Reason::Deadline
    };
    let mut outcome = Outcome::new(Status::Cancelled, reason);
    outcome.cancel = Some(match cancel {
        Some(cancel) => OutcomeCancel {
            by: cancel.by.clone(),
            reason: cancel.reason.clone(),
        },
        None => OutcomeCancel {
            by: None,
            reason: "deadline".to_owned(),
        },
    });
    outcome.evidence = completed
        .iter()
        .filter_map(|(id, key)| {
            let text = serde_json::json!({ "activity_id": id.as_str(), "key": key.as_str() });
            serde_json::value::to_raw_value(&text).ok()
        })
        .collect();
    Some(outcome)
}

/// The next activation.
pub(crate) fn enter(head: &mut RunHead, node: NodeName) {
    head.cursor = Some(node);
    head.activation += 1;
    head.attempt = 1;
    head.recoveries = 0;
}

/// Bytes of an outcome, for errors that carry it.
pub(crate) fn outcome_of(head: &RunHead) -> Bytes {
    head.outcome.clone().unwrap_or_default()
}
