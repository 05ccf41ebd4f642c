//! Effects that nobody knows of: settled by an operator's word or by the callee's.

use std::future::Future;

use bytes::Bytes;
use serde::Serialize;

use super::{HostEvent, Operator, fresh, replayed};
use crate::ids::{ActivityId, RunId, digest_of, hex};
use crate::machine::activity::{self, Action, Resolution};
use crate::payload::{Digest, Payload};
use crate::record::{ActivityRecord, ActivityState, DecisionRecord, Scope, Status, WaitingKind, WaitingOn};
use crate::runner::RunError;
use crate::runner::draft::Draft;
use crate::runner::ending::{cut_short, park};
use crate::runner::keeper::Held;
use crate::runner::ledger::{Holding, Ledger};
use crate::store::{Acquired, Loaded};
use crate::token::ResumeToken;

/// The answer to a resolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    pub replayed: bool,
    /// Where the run stands after it.
    pub status: Status,
    pub token: ResumeToken,
}

/// What a reconciliation found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reconciled {
    /// The effect is proved; the run goes on.
    Found(ResumeToken),
    /// No evidence: the run stays ambiguous (D152).
    Absent,
}

/// What a run does once an unknown effect is settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// It waits for its resume.
    Rest,
    GoOn,
    /// It waits for the prepared attempt.
    Retry,
}

/// What settles an effect, and what follows.
struct Settled {
    decisions: Vec<DecisionRecord>,
    told: Option<HostEvent>,
    then: Then,
}

#[derive(Serialize)]
struct OperatorDecision<'a> {
    action: &'static str,
    activity_id: &'a str,
    attempt: u32,
    reason: &'a str,
    evidence: &'a str,
    by: Option<&'a str>,
    revision: String,
    incarnation: u64,
    implementation: &'a str,
    input_digest: String,
}
impl Operator {
    /// Records an operator's decision about an unknown effect (D153). Attempts are never reset; a retry is committed with its
    /// time, not dispatched. The run then waits for a resume unless `resume` says to go on (D159).
    ///
    /// # Errors
    /// `stale_token`; `activity_not_found`; `activity_conflict` for every rule that does not hold and for a decision id used
    /// with other content; `run_not_found`, `run_busy`; the store's.
    pub async fn resolve(
        &self,
        token: &ResumeToken,
        resolution: &Resolution,
        by: Option<&str>,
        resume: bool,
    ) -> Result<Resolved, RunError> {
        if let Action::Complete { output } = &resolution.action {
            self.limits.check_payload("output", output.bytes().len())?;
        }
        let content = resolution_content(resolution);
        let replay = |earlier: &DecisionRecord, loaded: &Loaded| {
            if earlier.content != content {
                return Err(RunError::ActivityConflict(
                    "decision_id: used with other content".to_owned(),
                ));
            }
            Ok(replayed(loaded))
        };
        let loaded = self.store.load(&token.run).await?;
        if let Some(earlier) = self
            .store
            .decision(&token.run, &Scope::Operator, &resolution.decision)
            .await?
        {
            return replay(&earlier, &loaded);
        }
        fresh(token, &loaded)?;
        let (acquired, held) = self.acquire(&token.run).await?;
        let done = self
            .resolve_held(token, resolution, by, resume, content, &acquired, &held)
            .await;
        if done.is_err() {
            self.keeper.release(&held).await;
            // A twin may have been first.
            if let Some(earlier) = self
                .store
                .decision(&token.run, &Scope::Operator, &resolution.decision)
                .await?
            {
                return replay(&earlier, &self.store.load(&token.run).await?);
            }
        }
        done
    }

    #[expect(clippy::too_many_arguments, reason = "one decision with its authority")]
    async fn resolve_held(
        &self,
        token: &ResumeToken,
        resolution: &Resolution,
        by: Option<&str>,
        resume: bool,
        content: Digest,
        acquired: &Acquired,
        held: &Held,
    ) -> Result<Resolved, RunError> {
        let loaded = &acquired.loaded;
        fresh(token, loaded)?;
        let ledger = self.ledger(acquired).await?;
        let now = loaded.now;
        let told = match ledger.amend(&resolution.id, |record| {
            activity::resolve(record, resolution, now, fastrand::f64()).map(|()| self.told(record))
        }) {
            None => return Err(RunError::ActivityNotFound),
            Some(Err(refused)) => return Err(RunError::ActivityConflict(refused.to_string())),
            Some(Ok(told)) => told,
        };
        let action = action_name(&resolution.action);
        let body = OperatorDecision {
            action,
            activity_id: resolution.id.as_str(),
            attempt: resolution.attempt,
            reason: &resolution.reason,
            evidence: &resolution.evidence,
            by,
            revision: loaded.head.revision.to_string(),
            incarnation: acquired.lease.incarnation,
            implementation: &resolution.implementation,
            input_digest: hex(&resolution.input_digest),
        };
        let decision = DecisionRecord {
            run: token.run.clone(),
            scope: Scope::Operator,
            id: resolution.decision.clone(),
            content,
            body: serde_json::to_vec(&body)
                .map(Bytes::from)
                .map_err(|e| RunError::ActivityConflict(e.to_string()))?,
            created_at: now,
        };
        let then = match resolution.action {
            Action::Retry => Then::Retry,
            Action::Complete { .. } | Action::Fail { .. } if resume => Then::GoOn,
            Action::Complete { .. } | Action::Fail { .. } => Then::Rest,
        };
        let settled = Settled {
            decisions: vec![decision],
            told,
            then,
        };
        self.settled(loaded, &ledger, held, settled).await
    }

    /// What the host tells of an effect that has its outcome.
    fn told(&self, record: &ActivityRecord) -> Option<HostEvent> {
        self.tell.as_ref().and_then(|tell| tell(record))
    }

    /// After an unknown effect is settled: on to the end of a cancelled run, to the next unknown effect, to a queue or to a
    /// resume.
    async fn settled(
        &self,
        loaded: &Loaded,
        ledger: &Ledger,
        held: &Held,
        settled: Settled,
    ) -> Result<Resolved, RunError> {
        let now = loaded.now;
        let Settled {
            decisions,
            told,
            then,
        } = settled;
        let mut draft = Draft::new(&loaded.head, &loaded.state, now);
        draft.decisions = decisions;
        if let Some((name, data)) = told {
            draft.event(name, data);
        }
        let holding = ledger.holding();
        if let (Some(cancel), false) = (&loaded.inbox.cancel, holding.unknown) {
            self.cancel_children(&loaded.head.id, cancel.by.as_deref())
                .await?;
            if let Some(outcome) = cut_short(&mut draft, ledger, Some(cancel), now, now) {
                self.end(held, &mut draft, outcome).await?;
            }
        } else {
            draft.take(ledger.take_dirty(), ledger.open());
            match then {
                _ if holding.unknown => park(&mut draft, holding, None),
                Then::Retry => park(&mut draft, holding, None),
                // Whatever else it waits for, the node has an answer to work on.
                Then::GoOn => {
                    draft.head.status = Status::Queued;
                    draft.head.waiting = None;
                }
                Then::Rest => {
                    let mut on = vec![WaitingOn {
                        kind: WaitingKind::Resume,
                        id: String::new(),
                        node: ledger.entry.node.clone(),
                        key: String::new(),
                    }];
                    on.extend(holding.on);
                    let holding = Holding {
                        on,
                        stands: holding.stands,
                        ..Holding::default()
                    };
                    park(&mut draft, holding, None);
                }
            }
        }
        self.write(draft, held, loaded.inbox.signal).await
    }

    /// Asks the callee about an unknown effect, with the host's own read-only probe (D152). Found: the outcome is recorded as
    /// reconciled and the run goes on. The run is held only while the answer is written.
    ///
    /// # Errors
    /// `activity_not_found`, `activity_conflict` when the activity is not unknown; `run_busy`; the store's.
    pub async fn reconcile<F, Fut>(
        &self,
        run: &RunId,
        id: &ActivityId,
        probe: F,
    ) -> Result<Reconciled, RunError>
    where
        F: FnOnce(ActivityRecord) -> Fut,
        Fut: Future<Output = Option<Bytes>>,
    {
        let Some(record) = self.store.activity(run, id).await? else {
            // Missing run or missing activity.
            self.store.load(run).await?;
            return Err(RunError::ActivityNotFound);
        };
        if record.state != ActivityState::Unknown {
            return Err(RunError::ActivityConflict(format!(
                "the activity is {}",
                record.state
            )));
        }
        let attempt = record.attempts.len();
        let Some(found) = probe(record).await else {
            return Ok(Reconciled::Absent);
        };
        self.limits.check_payload("output", found.len())?;
        let (acquired, held) = self.acquire(run).await?;
        let done = async {
            let loaded = &acquired.loaded;
            let ledger = self.ledger(&acquired).await?;
            let changed = ledger.amend(id, |record| {
                let settles = record.attempts.len() == attempt
                    && activity::reconcile(record, Some(Payload::new(found)), loaded.now);
                settles.then(|| self.told(record))
            });
            let Some(Some(told)) = changed else {
                return Err(RunError::ActivityConflict(
                    "the activity changed meanwhile".to_owned(),
                ));
            };
            let settled = Settled {
                decisions: Vec::new(),
                told,
                then: Then::GoOn,
            };
            self.settled(loaded, &ledger, &held, settled).await
        };
        match done.await {
            Ok(resolved) => Ok(Reconciled::Found(resolved.token)),
            Err(error) => {
                self.keeper.release(&held).await;
                Err(error)
            }
        }
    }
}

fn action_name(action: &Action) -> &'static str {
    match action {
        Action::Complete { .. } => "complete",
        Action::Fail { .. } => "fail",
        Action::Retry => "retry",
    }
}

fn resolution_content(resolution: &Resolution) -> Digest {
    let outcome: Vec<u8> = match &resolution.action {
        Action::Complete { output } => output.digest().to_vec(),
        Action::Fail { error } => serde_json::to_vec(error).unwrap_or_default(),
        Action::Retry => Vec::new(),
    };
    digest_of(&[
        b"resolve",
        resolution.id.as_str().as_bytes(),
        action_name(&resolution.action).as_bytes(),
        &outcome,
        &resolution.input_digest,
        resolution.implementation.as_bytes(),
        &resolution.attempt.to_be_bytes(),
        resolution.reason.as_bytes(),
        resolution.evidence.as_bytes(),
    ])
}
