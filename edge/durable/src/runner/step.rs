//! What a node's answer makes of its run: the next node, another attempt, a pause or an end. One commit each, with everything
//! the step left behind (D110).

use serde::Serialize;
use serde::de::DeserializeOwned;

use std::sync::Arc;

use crate::failure::{Failure, FailureKind};
use crate::graph::{Await, Base, Deadline, Directive, NodeEntry, NodeError, caught};
use crate::ids::NodeName;
use crate::machine::retry::{self, Next};
use crate::machine::wait;
use crate::payload::Payload;
use crate::record::{
    Continuation, DENIED, Exhausted, Outcome, OutcomeError, Reason, RunHead, SPENT, Status, StepRecord,
    StepStatus, WaitRecord, WaitingKind, WaitingOn,
};
use crate::runner::ctx::within_limit;
use crate::runner::draft::{Draft, Halt};
use crate::runner::ledger::Holding;
use crate::runner::segment::{Segment, Turn};
use crate::time::Timestamp;

/// What follows a step that is over.
enum After {
    Arm(Box<WaitRecord>),
    /// Parked; it goes on there.
    Suspend(NodeName, String),
    Fail(Failure, Option<Exhausted>),
    Enter(NodeName),
    End,
}

impl<S, E> Segment<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// A step that is over, with the draft it belongs to.
    fn step(&self, status: StepStatus, error: Option<Failure>) -> Option<StepRecord> {
        Some(StepRecord {
            activation: self.head.activation,
            node: self.head.cursor.clone()?,
            status,
            attempts: self.head.attempt.max(self.ledger.most_attempts()),
            result: None,
            error,
            effects: Vec::new(),
            started_at: self.entered_at,
            ended_at: self.held.now(),
        })
    }

    pub(crate) async fn node_done(
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
        let after = match base {
            Base::Completed => match calm(|| inner.graph.route(entry, &typed)) {
                Ok(Some(next)) => After::Enter(next),
                Ok(None) => After::End,
                Err(error) => return self.node_failed(name, entry, error).await,
            },
            Base::Wait(wait) => match self.arm(name, entry, wait, now) {
                Ok(record) => After::Arm(Box::new(record)),
                Err(failure) => return self.fail(failure, None).await,
            },
            Base::Suspend { reason, resume_at } => {
                let target = resume_at.as_deref().unwrap_or(name.as_str());
                let Some(node) = inner.graph.nodes.keys().find(|node| node.as_str() == target) else {
                    let failure =
                        Failure::new(FailureKind::Configuration, format!("{target:?} is not a node"));
                    return self.fail(failure.code("invalid_resume_target"), None).await;
                };
                After::Suspend(node.clone(), reason)
            }
            Base::Fail(failure) => After::Fail(failure, None),
            Base::Exhaust(exhausted) => After::Fail(spent(&exhausted), Some(exhausted)),
            Base::End | Base::Retry { .. } => After::End,
        };
        let output = match (&after, &inner.graph.output) {
            (After::End, Some(output)) => {
                match calm(|| Ok(output(&typed))).unwrap_or_else(|e| Err(e.to_string())) {
                    Ok(text) => Some(text),
                    Err(why) => {
                        let failure = Failure::new(
                            FailureKind::Internal,
                            format!("the output cannot be shown: {why}"),
                        );
                        return self.fail(failure, None).await;
                    }
                }
            }
            (_, _) => None,
        };

        let mut draft = self.draft();
        draft.state = state;
        draft.head.state_digest = *draft.state.digest();
        draft.head.budgets = self.ledger.budgets();
        draft.take(self.ledger.take_dirty(), self.ledger.open());
        let (status, failure) = match &after {
            After::Fail(failure, None) => (StepStatus::Failed, Some(failure.clone())),
            After::Fail(failure, Some(_)) => (StepStatus::Exhausted, Some(failure.clone())),
            After::Arm(_) | After::Suspend(..) | After::Enter(_) | After::End => (StepStatus::Done, None),
        };
        if let Some(mut step) = self.step(status, failure.clone()) {
            step.result = result;
            draft.head.effects += texts.len() as u64;
            step.effects = texts;
            draft.step_completed(step);
        }

        match after {
            After::Arm(record) => {
                let on = WaitingOn {
                    kind: record.kind,
                    id: record.id.as_str().to_owned(),
                    node: name.clone(),
                    key: record.key.as_str().to_owned(),
                };
                let holding = Holding {
                    on: vec![on],
                    due_at: record.deadline,
                    ..Holding::default()
                };
                draft.head.armed_waits += 1;
                draft.waits.push(*record);
                self.park(draft, holding, None).await
            }
            After::Suspend(node, reason) => {
                let on = WaitingOn {
                    kind: WaitingKind::Resume,
                    id: String::new(),
                    node: node.clone(),
                    key: String::new(),
                };
                let holding = Holding {
                    on: vec![on],
                    ..Holding::default()
                };
                enter(&mut draft.head, node);
                self.park(draft, holding, Some(reason)).await
            }
            After::Fail(failure, exhausted) => self.finish_failed(draft, failure, exhausted).await,
            After::Enter(node) => {
                enter(&mut draft.head, node.clone());
                draft.step_started(&node);
                self.write(draft).await?;
                self.reenter();
                Ok(Turn::On)
            }
            After::End => {
                let mut outcome = Outcome::new(Status::Succeeded, Reason::Completed);
                outcome.output = output;
                self.end(draft, outcome).await
            }
        }
    }

    /// The record of a wait of the graph, or why it cannot be armed.
    fn arm(
        &self,
        name: &NodeName,
        entry: &NodeEntry<S, E>,
        wait: Await,
        now: Timestamp,
    ) -> Result<WaitRecord, Failure> {
        let invalid = |why: String| Failure::new(FailureKind::Configuration, why);
        let Some(route) = &entry.wait else {
            let why = format!("node {name} waits without a wait route");
            return Err(invalid(why).code("wait_route_missing"));
        };
        let bytes = wait.subject.bytes().len();
        within_limit("the subject", bytes, self.inner.limits.max_payload)?;
        let spec = wait::WaitSpec {
            key: wait.key,
            correlation: wait.correlation,
            kind: wait.kind,
            continuation: Continuation::Nodes {
                on_event: route.on_event.clone(),
                on_timeout: route.on_timeout.clone(),
            },
            labels: route.labels.clone(),
            subject: wait.subject,
            deadline: wait.deadline.map(|deadline| match deadline {
                Deadline::At(at) => at,
                Deadline::In(span) => now.plus(span),
            }),
            deadline_policy: wait.deadline_policy,
        };
        wait::check(&spec).map_err(|e| invalid(e.to_string()))?;
        let address = wait::Address {
            run: self.head.id.clone(),
            node: name.clone(),
            activation: self.head.activation,
        };
        Ok(wait::arm(&address, &spec, 1, now))
    }

    /// The state after a node: reduced, checked, encoded.
    fn reduce(&self, update: S) -> Result<(Payload, S), NodeError> {
        calm(|| self.try_reduce(update))
    }

    fn try_reduce(&self, update: S) -> Result<(Payload, S), NodeError> {
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
        within_limit("the state", state.bytes().len(), self.inner.limits.max_state)?;
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
            draft.step_started(name);
            self.write(draft).await?;
            self.reenter();
            return Ok(Turn::On);
        }
        let exhausted = Exhausted {
            budget: format!("retry:{name}"),
            used: self.head.attempt.into(),
            limit: max.into(),
            decimals: 0,
        };
        let Some(route) = &entry.retry_route else {
            if max > 1 {
                return self.exhaust(exhausted, None).await;
            }
            // One attempt is no limit that runs out (durable-api §8).
            let failure = Failure::new(FailureKind::Refused, "the one attempt of this step is used");
            return self.fail(failure.code("retry_refused"), None).await;
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
            draft.head.budgets = self.ledger.budgets();
        }
        draft.take(self.ledger.take_dirty(), self.ledger.open());
        if let Some(step) = self.step(StepStatus::Exhausted, error) {
            draft.step_completed(step);
        }
        enter(&mut draft.head, to.clone());
        draft.step_started(&to);
        self.write(draft).await?;
        self.reenter();
        Ok(Turn::On)
    }

    /// A node that returned an error or panicked.
    pub(crate) async fn node_failed(
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
                ..Holding::default()
            },
            None,
        )
        .await
    }

    pub(crate) async fn fail(
        &mut self,
        failure: Failure,
        exhausted: Option<Exhausted>,
    ) -> Result<Turn, Halt> {
        self.ledger.close(&failure, self.held.now());
        if !self.ledger.holding().on.is_empty() {
            return self.hold().await;
        }
        let mut draft = self.draft();
        draft.take(self.ledger.take_dirty(), self.ledger.open());
        // The budget that ran out is shown as its end says; what else the step drew is not committed.
        if let Some(exhausted) = &exhausted
            && let Some(budget) = draft.head.budgets.get_mut(&exhausted.budget)
        {
            budget.used = budget.used.max(exhausted.used);
        }
        let status = if exhausted.is_some() {
            StepStatus::Exhausted
        } else {
            StepStatus::Failed
        };
        if let Some(step) = self.step(status, Some(failure.clone())) {
            draft.step_completed(step);
        }
        self.finish_failed(draft, failure, exhausted).await
    }

    pub(crate) async fn exhaust(
        &mut self,
        exhausted: Exhausted,
        failure: Option<Failure>,
    ) -> Result<Turn, Halt> {
        let failure = failure.unwrap_or_else(|| spent(&exhausted));
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
            None if failure.code == DENIED => (Status::Failed, Reason::Denied),
            None => (Status::Failed, Reason::Error),
        };
        let mut outcome = Outcome::new(status, reason);
        // Of the call that failed; else of the step.
        let attempt = self.ledger.attempt_of(&failure).unwrap_or(self.head.attempt);
        outcome.error = Some(OutcomeError {
            failure,
            step: self
                .head
                .cursor
                .as_ref()
                .map(|node| match self.inner.graph.step_name {
                    Some(name) => name(node, self.head.activation),
                    None => node.as_str().to_owned(),
                }),
            attempt,
        });
        outcome.exhausted = exhausted;
        self.end(draft, outcome).await
    }
}

/// The failure of a limit that ran out without another one.
fn spent(exhausted: &Exhausted) -> Failure {
    Failure::new(FailureKind::Refused, format!("{exhausted} are used")).code(SPENT)
}

/// Calls pure code of the host; its panic is a failure of the step (D257).
fn calm<T>(call: impl FnOnce() -> Result<T, NodeError>) -> Result<T, NodeError> {
    caught(call).unwrap_or_else(|| {
        let failure = Failure::new(FailureKind::Internal, "code of the graph panicked").code("panic");
        Err(NodeError::Failed(failure))
    })
}

/// The next activation.
pub(crate) fn enter(head: &mut RunHead, node: NodeName) {
    head.cursor = Some(node);
    head.activation += 1;
    head.attempt = 1;
    head.recoveries = 0;
}
