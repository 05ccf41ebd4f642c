//! Steering runs: on from a pause or a failure, to an end, out of the store, past an effect that nobody knows of.

pub(crate) mod effects;
pub(crate) mod resume;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use iop_durable::ids::{DecisionId, RunId};
use iop_durable::record::{ActivityRecord, Origin, Status};
use iop_durable::runner::{CancelOutcome, Cancelled, Resolved, Resume, RunError};
use iop_durable::store::StoreError;
use iop_durable::token::ResumeToken;

use self::effects::Resolve;
use self::resume::{Ask, Decision, refusal, without_definition};
use super::calls::{Tools, call, ended as ended_call};
use super::catalog::Compiled;
use super::live::Update;
use super::outside::with_token;
use super::people::decider;
use super::problem::{Code, Problem};
use super::{Engine, Runs, Seen, gates};
use crate::agents::journal::effect_key;
use crate::config::Role;
use crate::http::auth::Caller;

/// How long a cancellation waits for the end that it asked for.
const SOON: Duration = Duration::from_millis(500);

/// A run that somebody wants to go on with, and what that would meet.
pub(crate) struct Preflight<'a> {
    pub(crate) seen: Seen<'a>,
    pub(crate) token: ResumeToken,
    pub(crate) decision: Decision,
    /// The one to use.
    pub(crate) current: ResumeToken,
    /// Of a run that may go on.
    compiled: Option<Arc<Compiled>>,
}

impl Preflight<'_> {
    /// Why the run would not go on; `None` when it would, or has succeeded.
    pub(crate) fn refusal(&self) -> Option<Problem> {
        refusal(&self.decision, &self.seen.loaded.head, &self.current)
    }
}

/// A request to cancel, checked by itself.
#[derive(Debug, Clone)]
pub(crate) struct Cancel {
    pub(crate) id: DecisionId,
    pub(crate) reason: String,
}

impl Cancel {
    /// # Errors
    /// `invalid_encoding`, `invalid_request`; both name their field.
    pub(crate) fn new(id: &str, reason: String) -> Result<Self, Problem> {
        gates::text("reason", &reason, false)?;
        Ok(Self {
            id: gates::decision_id("cancel_id", id)?,
            reason,
        })
    }
}

/// Whether the answer to a cancellation is about a run that is over, or one that was given before: then it is 200, else 202.
pub(crate) fn is_settled(cancelled: Cancelled) -> bool {
    match cancelled.outcome {
        CancelOutcome::Over(_) => true,
        CancelOutcome::Done(status) => cancelled.replayed || status.is_terminal(),
        CancelOutcome::Requested => cancelled.replayed,
    }
}

/// Steering is for who makes runs and for operators; whose runs is another question.
fn may_steer(caller: &Caller) -> Result<(), Problem> {
    Ok(caller.require_any(&[Role::Operator, Role::Inference])?)
}

impl Runs {
    /// What every resume begins with: plain, as a stream, and when it is only asked what it would meet (D94).
    ///
    /// # Errors
    /// `permission_denied`, `run_not_found`, `run_deleted`, `run_not_durable`, those of `Ask::check`; the store's.
    pub(crate) async fn preflight(
        &self,
        caller: &Caller,
        run: &str,
        ask: &Ask,
    ) -> Result<Preflight<'_>, Problem> {
        may_steer(caller)?;
        let seen = self.see(caller, run).await?;
        let head = &seen.loaded.head;
        let of = |problem: Problem| problem.of(head.id.as_str());
        if !seen.engine.durable {
            let why = "The run is not durable: it ends with its process and cannot be resumed.";
            return Err(of(Problem::new(Code::RunNotDurable, why)));
        }
        let token = ask.check(&head.id).map_err(of)?;
        let mut current = head.token();
        let mut compiled = None;
        let decision = match without_definition(head, &token) {
            Some(decision) => decision,
            None => match seen.engine.pinned(&head.definition).await {
                Ok(found) => {
                    let evaluated = found
                        .runner
                        .evaluate_resume(&token)
                        .await
                        .map_err(|e| of(e.into()))?;
                    compiled = Some(found);
                    current = evaluated.current;
                    Decision::from(evaluated.decision)
                }
                Err(problem) if problem.code == Code::DefinitionMissing => Decision::DefinitionMissing,
                Err(problem) if problem.code == Code::DefinitionChanged => {
                    Decision::DefinitionChanged(problem.message.into_owned())
                }
                Err(problem) => return Err(of(problem)),
            },
        };
        Ok(Preflight {
            seen,
            token,
            decision,
            current,
            compiled,
        })
    }

    /// Lets a run go on: queued when this returns. True: it has succeeded and its stored outcome is the answer (D64).
    ///
    /// # Errors
    /// The refusal that the decision is; the store's.
    pub(crate) async fn resume(
        &self,
        preflight: &Preflight<'_>,
        metadata: &BTreeMap<String, String>,
    ) -> Result<bool, Problem> {
        let head = &preflight.seen.loaded.head;
        if let Some(problem) = preflight.refusal() {
            return Err(problem);
        }
        let Some(compiled) = &preflight.compiled else {
            return Ok(true);
        };
        let resume = metadata
            .iter()
            .fold(Resume::new(), |resume, (key, value)| resume.metadata(key, value));
        let result = compiled.runner.enqueue(&preflight.token, resume).await;
        let result = result.map_err(|e| Problem::from(e).of(head.id.as_str()))?;
        Ok(result.status == Status::Succeeded)
    }

    /// Asks for the end of a run. Stored when this returns; a worker that ends it soon is waited for.
    ///
    /// # Errors
    /// `permission_denied`, `run_not_found`, `run_deleted`, `delivery_conflict`; the store's.
    pub(crate) async fn cancel(
        &self,
        caller: &Caller,
        run: &str,
        cancel: &Cancel,
    ) -> Result<Cancelled, Problem> {
        may_steer(caller)?;
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let run = &loaded.head.id;
        let by = decider(caller);
        let cancelled = engine
            .operator
            .cancel(run, &cancel.id, &cancel.reason, Some(&by))
            .await;
        let cancelled = cancelled.map_err(|error| {
            let problem = if matches!(error, RunError::DeliveryConflict(_)) {
                gates::other_content("cancel_id")
            } else {
                error.into()
            };
            problem.of(run.as_str())
        })?;
        if cancelled.outcome == CancelOutcome::Requested {
            // Its worker is told at once and is mostly done at once.
            let ended = ended(engine, run, loaded.head.event_seq);
            let _ = tokio::time::timeout(SOON, ended).await;
        }
        Ok(cancelled)
    }

    /// Removes a run that is over and that nobody holds. Its id stays taken (D134, D228).
    ///
    /// # Errors
    /// `permission_denied`, `run_not_found`, `run_deleted`, `run_busy`; the store's.
    pub(crate) async fn delete(&self, caller: &Caller, run: &str) -> Result<(), Problem> {
        caller.require(Role::Admin)?;
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let run = &loaded.head.id;
        engine.store.delete_if_idle(run).await.map_err(|error| {
            let problem = if matches!(error, StoreError::NotIdle) {
                let why = "The run is not over; cancel it, or wait for its end, and delete it then.";
                Problem::new(Code::RunBusy, why)
            } else {
                error.into()
            };
            problem.of(run.as_str())
        })
    }

    /// Records what an operator says of an effect that nobody knows of (D153).
    ///
    /// # Errors
    /// `permission_denied`, `run_not_found`, `run_deleted`, `activity_not_found`, `activity_conflict`, `stale_token`, `run_terminal`,
    /// `run_busy`, `payload_too_large`, those of `Resolve::of`; the store's.
    pub(crate) async fn resolve(
        &self,
        caller: &Caller,
        run: &str,
        activity: &str,
        resolve: &Resolve,
        token: impl FnOnce(&RunId) -> Result<Option<ResumeToken>, Problem>,
    ) -> Result<Resolved, Problem> {
        caller.require(Role::Operator)?;
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let run = &loaded.head.id;
        let record = call(&engine.store, run, activity).await?;
        let called = Tools::new(&engine.store).of(&record).await?;
        let operator = &engine.operator.telling(ended_call(called));
        let resolution = resolve.of(&record).map_err(|problem| problem.of(run.as_str()))?;
        let (by, resolution) = (decider(caller), &resolution);
        let by = by.as_str();
        with_token(operator, run, token(run)?, |token| async move {
            operator
                .resolve(&token, resolution, Some(by), resolve.resume)
                .await
        })
        .await
    }

    /// Asks the callee whether an unknown effect happened (D152). Evidence lets the run go on; without any it stays as it is. True:
    /// the evidence was there before.
    ///
    /// # Errors
    /// `permission_denied`, `run_not_found`, `run_deleted`, `activity_not_found`, `activity_conflict`, `definition_missing`,
    /// `definition_changed`, `tool_unavailable`, `run_busy`; the store's.
    pub(crate) async fn reconcile(
        &self,
        caller: &Caller,
        run: &str,
        activity: &str,
    ) -> Result<bool, Problem> {
        caller.require(Role::Operator)?;
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let run = &loaded.head.id;
        let record = call(&engine.store, run, activity).await?;
        if record.origin == Some(Origin::Reconciled) {
            return Ok(true);
        }
        let of = |problem: Problem| problem.of(run.as_str());
        let compiled = engine.pinned(&loaded.head.definition).await.map_err(of)?;
        let newest = self.newest_of(&compiled.version.name).await.map_err(of)?;
        let called = Tools::new(&engine.store).of(&record).await?;
        let tool = called
            .as_ref()
            .and_then(|called| compiled.program.tool(&called.tool));
        let Some(tool) = tool.filter(|tool| tool.reconcile.is_some()) else {
            let why = "The tool of this call declares no reconcile; resolve the call by hand.";
            return Err(of(Problem::new(Code::ActivityConflict, why)));
        };
        if !newest.spec.tools.iter().any(|other| other.name == tool.name) {
            let why = "The agent does not have this tool any more.";
            return Err(of(Problem::new(Code::ToolUnavailable, why)));
        }
        let key = effect_key(run, record.activation, &record.key);
        let probe = |record: ActivityRecord| async move {
            self.toolbox()
                .found(&newest.spec, tool, record.input.bytes(), &key)
                .await
        };
        engine
            .operator
            .telling(ended_call(called.clone()))
            .reconcile(run, &record.id, probe)
            .await
            .map_err(|e| of(e.into()))?;
        Ok(false)
    }
}

/// Until a life of the run is over, behind this event. A run that cannot be followed is not waited for.
async fn ended(engine: &Engine, run: &RunId, after: u64) {
    let mut follow = engine.follow(run, after);
    while let Ok(update) = follow.next().await {
        if matches!(update, Update::Event(event) if event.terminal) {
            return;
        }
    }
}
