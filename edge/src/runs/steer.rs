//! Steering runs: on from a pause or a failure, to an end, out of the store, past an effect that nobody knows of.

pub(crate) mod effects;
pub(crate) mod resume;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use iop_durable::ids::{ActivityId, DecisionId, Key, NodeName, RunId};
use iop_durable::patterns::REASON;
use iop_durable::record::{ActivityRecord, Origin, Status};
use iop_durable::runner::{CancelOutcome, Cancelled, Operator, Resolved, Resume, RunError, idempotency_key};
use iop_durable::store::{Loaded, StoreError};
use iop_durable::token::ResumeToken;

use self::effects::Resolve;
use self::resume::{Ask, Decision, refusal, without_definition};
use super::catalog::Compiled;
use super::outside::with_token;
use super::people::decider;
use super::problem::{Code, Problem};
use super::{Runs, Seen, gates};
use crate::agents::journal::{MODEL, call_of};
use crate::agents::turn::TurnAnswer;
use crate::config::Role;
use crate::http::auth::Caller;

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
    if caller.has(Role::Operator) {
        return Ok(());
    }
    Ok(caller.require(Role::Inference)?)
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
        if let Some(problem) = refusal(&preflight.decision, head, &preflight.current) {
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

    /// Asks for the end of a run. Stored when this returns.
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
        cancelled.map_err(|error| {
            let problem = match error {
                RunError::DeliveryConflict(_) => gates::other_content("cancel_id"),
                error => error.into(),
            };
            problem.of(run.as_str())
        })
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
            let problem = match error {
                StoreError::NotIdle => Problem::new(
                    Code::RunBusy,
                    "The run is not over; cancel it, or wait for its end, and delete it then.",
                ),
                error => error.into(),
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
        let operator = &engine.operator;
        let record = activity_of(operator, &loaded, activity).await?;
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

    /// Asks the callee whether an unknown effect happened (D152). Evidence lets the run go on; without any it stays as it is. The
    /// activity after it, and whether it had its evidence before.
    ///
    /// # Errors
    /// `permission_denied`, `run_not_found`, `run_deleted`, `activity_not_found`, `activity_conflict`, `definition_missing`,
    /// `definition_changed`, `tool_unavailable`, `run_busy`; the store's.
    pub(crate) async fn reconcile(
        &self,
        caller: &Caller,
        run: &str,
        activity: &str,
    ) -> Result<(ActivityRecord, bool), Problem> {
        caller.require(Role::Operator)?;
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let run = &loaded.head.id;
        let operator = &engine.operator;
        let record = activity_of(operator, &loaded, activity).await?;
        if record.origin == Some(Origin::Reconciled) {
            return Ok((record, true));
        }
        let of = |problem: Problem| problem.of(run.as_str());
        let compiled = engine.pinned(&loaded.head.definition).await.map_err(of)?;
        let newest = self.newest_of(&compiled.version.name).await.map_err(of)?;
        let name = tool_of(operator, &record).await?;
        let tool = name.as_deref().and_then(|name| compiled.program.tool(name));
        let Some(tool) = tool.filter(|tool| tool.reconcile.is_some()) else {
            let why = "The tool of this call declares no reconcile; resolve the call by hand.";
            return Err(of(Problem::new(Code::ActivityConflict, why)));
        };
        if !newest.spec.tools.iter().any(|other| other.name == tool.name) {
            let why = "The agent does not have this tool any more.";
            return Err(of(Problem::new(Code::ToolUnavailable, why)));
        }
        let key = idempotency_key(run, &record.node, record.activation, &record.key);
        let probe = |record: ActivityRecord| async move {
            self.toolbox()
                .found(&newest.spec, tool, record.input.bytes(), &key)
                .await
        };
        operator
            .reconcile(run, &record.id, probe)
            .await
            .map_err(|e| of(e.into()))?;
        let record = activity_of(operator, &loaded, activity).await?;
        Ok((record, false))
    }
}

/// An activity of a run.
///
/// # Errors
/// `activity_not_found`; the store's.
pub(crate) async fn activity_of(
    operator: &Operator,
    loaded: &Loaded,
    id: &str,
) -> Result<ActivityRecord, Problem> {
    let run = &loaded.head.id;
    let not_found =
        || Problem::new(Code::ActivityNotFound, "This run has no such activity.").of(run.as_str());
    let id = ActivityId::new(id).map_err(|_| not_found())?;
    let record = operator.store().activity(run, &id).await?;
    record.ok_or_else(not_found)
}

/// The name of the tool that an activity calls: the turn before it says so.
///
/// # Errors
/// The store's.
async fn tool_of(operator: &Operator, record: &ActivityRecord) -> Result<Option<String>, Problem> {
    let Some((_, ordinal)) = call_of(record.key.as_str()) else {
        return Ok(None);
    };
    let (Ok(node), Ok(key)) = (NodeName::new(REASON), Key::new(MODEL)) else {
        return Ok(None);
    };
    let turn = ActivityId::derive(&record.run, &node, record.activation.saturating_sub(1), &key);
    let turn = operator.store().activity(&record.run, &turn).await?;
    let output = turn.and_then(|turn| turn.output);
    let answer = output.and_then(|output| serde_json::from_slice::<TurnAnswer>(output.bytes()).ok());
    Ok(answer
        .and_then(|answer| answer.tool_calls.into_iter().nth(ordinal))
        .map(|call| call.name))
}
