//! What the outside world says to a run: deliveries to its waits, events that find theirs, and waits that nobody will answer
//! (D161 to D177, D269). Approvals are no part of it: they are decided by people, under their own rules.

#[cfg(test)]
mod tests;

use bytes::Bytes;
use iop_durable::ids::{CorrelationId, DecisionId, RunId, WaitId};
use iop_durable::record::{WaitRecord, WaitingKind};
use iop_durable::runner::{Addressed, Operator, Resolved, RunError};
use iop_durable::store::Loaded;
use iop_durable::time::Timestamp;
use iop_durable::token::ResumeToken;
use serde_json::json;
use serde_json::value::RawValue;

use super::gates::{self, NotTold, Standing, Told, Word};
use super::people::list::part;
use super::people::{decider, fits};
use super::problem::{Code, Problem};
use super::{Engine, Runs, Seen};
use crate::config::Role;
use crate::http::auth::Caller;

/// How many armed waits of one correlation id are looked at; more are ambiguous all the same.
const NAMED: u32 = 100;
/// How often an operation that names no revision is tried against a run that moves.
const TRIES: u32 = 20;

/// A delivery as it comes over the API.
#[derive(Debug, Clone)]
pub(crate) struct Deliver {
    pub(crate) id: DecisionId,
    pub(crate) correlation: CorrelationId,
    /// JSON, as its sender wrote it.
    pub(crate) payload: Box<RawValue>,
}

impl Deliver {
    /// # Errors
    /// `invalid_encoding` that names its field.
    pub(crate) fn new(id: &str, correlation: &str, payload: Box<RawValue>) -> Result<Self, Problem> {
        Ok(Self {
            id: gates::decision_id("delivery_id", id)?,
            correlation: CorrelationId::new(correlation).map_err(RunError::from)?,
            payload,
        })
    }
}

/// An operator's word that a wait will not be answered.
#[derive(Debug, Clone)]
pub(crate) struct GiveUp {
    pub(crate) id: DecisionId,
    pub(crate) reason: String,
    pub(crate) evidence: String,
}

impl GiveUp {
    /// # Errors
    /// `invalid_encoding`, `invalid_request`; both name their field.
    pub(crate) fn new(id: &str, reason: String, evidence: String) -> Result<Self, Problem> {
        gates::text("reason", &reason, true)?;
        gates::text("evidence", &evidence, true)?;
        Ok(Self {
            id: gates::decision_id("cancel_id", id)?,
            reason,
            evidence,
        })
    }
}

/// Whether a wait is one of the outside world. What only passes time has no place in a list either, but it is shown: somebody who
/// asks what a run waits for wants to know.
pub(crate) fn is_outside(wait: &WaitRecord) -> bool {
    wait.kind != WaitingKind::Approval
}

/// Whether an event may be for this wait: answers to people's prompts are an operator's.
fn takes_events(wait: &WaitRecord, is_operator: bool) -> bool {
    match wait.kind {
        WaitingKind::Event => true,
        WaitingKind::Input => is_operator,
        WaitingKind::Approval
        | WaitingKind::Timer
        | WaitingKind::Retry
        | WaitingKind::Children
        | WaitingKind::Reconciliation
        | WaitingKind::Resume
        | WaitingKind::Handoff => false,
    }
}

/// What the engine's answer to a delivery means: a verdict is an answer, whichever it is (durable-api §8 "Waits").
fn delivered(told: Result<Told, NotTold>) -> Result<Told, Problem> {
    told.map_err(|not| match not {
        NotTold::OtherContent => gates::other_content("delivery_id"),
        NotTold::Expired => Problem::new(Code::DeliveryConflict, "The time of this wait is over."),
        NotTold::Problem(problem) => *problem,
    })
}

/// The one wait that an event is for.
///
/// # Errors
/// `wait_not_armed`; `ambiguous_correlation`, naming the waits.
fn the_one<T>(mut armed: Vec<(T, WaitRecord)>) -> Result<(T, WaitRecord), Problem> {
    if armed.len() > 1 {
        let waits: Vec<_> = armed
            .iter()
            .map(|(_, wait)| json!({ "run_id": wait.run.as_str(), "wait_id": wait.id.as_str() }))
            .collect();
        let why = "Several waits are armed for this correlation_id; deliver to one of them.";
        return Err(Problem::new(Code::AmbiguousCorrelation, why)
            .at("correlation_id")
            .with("waits", json!(waits)));
    }
    armed.pop().ok_or_else(|| {
        let why = "No wait is armed for this correlation_id; deliver again later.";
        Problem::new(Code::WaitNotArmed, why).at("correlation_id")
    })
}

/// Repeats an operation under the current token as long as the run moves on meanwhile; once, under the caller's, when there is one.
///
/// # Errors
/// The operation's.
pub(crate) async fn with_token<T, F, Fut>(
    operator: &Operator,
    run: &RunId,
    given: Option<ResumeToken>,
    operate: F,
) -> Result<T, Problem>
where
    F: Fn(ResumeToken) -> Fut,
    Fut: Future<Output = Result<T, RunError>>,
{
    let of = |problem: Problem| problem.of(run.as_str());
    let mut left = if given.is_some() { 1 } else { TRIES };
    loop {
        left -= 1;
        let token = match &given {
            Some(token) => token.clone(),
            None => {
                let loaded = operator.store().load(run).await.map_err(|e| of(e.into()))?;
                loaded.head.token()
            }
        };
        match operate(token).await {
            Err(RunError::StaleToken { .. }) if left > 0 => {}
            done => return done.map_err(|e| of(e.into())),
        }
    }
}

/// A wait of the outside world.
///
/// # Errors
/// `wait_not_found`; the store's.
async fn wait_of(engine: &Engine, loaded: &Loaded, id: &str) -> Result<WaitRecord, Problem> {
    let run = &loaded.head.id;
    let not_found = || Problem::new(Code::WaitNotFound, "This run has no such wait.").of(run.as_str());
    let id = WaitId::new(id).map_err(|_| not_found())?;
    let wait = engine.store.wait(run, &id).await?;
    wait.filter(is_outside).ok_or_else(not_found)
}

impl Runs {
    /// The waits of a run behind a place, in order of their arming: at most `limit`, and where the next page begins when there are
    /// more. Needs no definition (D269).
    ///
    /// # Errors
    /// `run_not_found`, `run_deleted`; the store's.
    pub(crate) async fn waits(
        &self,
        caller: &Caller,
        run: &str,
        after: Option<&(Timestamp, WaitId)>,
        limit: u32,
    ) -> Result<(Vec<WaitRecord>, Option<(Timestamp, WaitId)>), Problem> {
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let waits = engine.store.waits(&loaded.head.id).await?;
        Ok(part(waits, is_outside, after, limit))
    }

    /// Delivers to one wait.
    ///
    /// # Errors
    /// `permission_denied`, `run_not_found`, `run_deleted`, `wait_not_found`, `wait_not_armed`, `delivery_conflict`,
    /// `too_many_deliveries`, `payload_too_large`; for a prompt's answer `definition_missing`, `schema_violation`; the store's.
    pub(crate) async fn deliver(
        &self,
        caller: &Caller,
        run: &str,
        wait: &str,
        deliver: &Deliver,
    ) -> Result<Told, Problem> {
        caller.require(Role::Operator)?;
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let wait = wait_of(engine, &loaded, wait).await?;
        deliver_to(engine, loaded, wait, deliver, &decider(caller)).await
    }

    /// Delivers an event to the one wait that is armed for it.
    ///
    /// # Errors
    /// `permission_denied`, `wait_not_armed`, `ambiguous_correlation`; those of `deliver`.
    pub(crate) async fn event(&self, caller: &Caller, deliver: &Deliver) -> Result<Told, Problem> {
        let is_operator = caller.has(Role::Operator);
        if !is_operator {
            caller.require(Role::Inference)?;
        }
        let fits = |wait: &WaitRecord| takes_events(wait, is_operator);
        let mut told = Vec::new();
        let mut armed = Vec::new();
        for engine in self.engines() {
            let store = &engine.store;
            let found = store.addressed(&deliver.correlation, &deliver.id, NAMED).await?;
            told.extend(found.into_iter().filter(fits).map(|wait| (engine, wait)));
            let found = store.armed(&deliver.correlation, NAMED).await?;
            armed.extend(found.into_iter().filter(fits).map(|wait| (engine, wait)));
        }
        // One that is sent once more is for the wait that has it, whatever waits by now.
        let (engine, wait) = match told.into_iter().next() {
            Some(told) => told,
            None => the_one(armed)?,
        };
        let loaded = engine.store.load(&wait.run).await?;
        deliver_to(engine, loaded, wait, deliver, &decider(caller)).await
    }

    /// Cancels a wait and with it its run (D173).
    ///
    /// # Errors
    /// `permission_denied`, `run_not_found`, `run_deleted`, `wait_not_found`, `stale_token`, `run_terminal`, `delivery_conflict`,
    /// `effect_ambiguous`, `run_busy`; the store's.
    pub(crate) async fn cancel_wait(
        &self,
        caller: &Caller,
        run: &str,
        wait: &str,
        give_up: &GiveUp,
        token: impl FnOnce(&RunId) -> Result<Option<ResumeToken>, Problem>,
    ) -> Result<Resolved, Problem> {
        caller.require(Role::Operator)?;
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let run = &loaded.head.id;
        let wait = wait_of(engine, &loaded, wait).await?;
        let by = decider(caller);
        let (operator, wait, by) = (&engine.operator, &wait.id, by.as_str());
        with_token(operator, run, token(run)?, |token| async move {
            operator
                .cancel_wait(
                    &token,
                    wait,
                    &give_up.id,
                    &give_up.reason,
                    &give_up.evidence,
                    Some(by),
                )
                .await
        })
        .await
    }
}

async fn deliver_to(
    engine: &Engine,
    loaded: Loaded,
    wait: WaitRecord,
    deliver: &Deliver,
    by: &str,
) -> Result<Told, Problem> {
    let operator = &engine.operator;
    let run = loaded.head.id.clone();
    let of = |problem: Problem| problem.of(run.as_str());
    let earlier = gates::earlier(operator, &wait, &deliver.id).await?;
    if wait.kind == WaitingKind::Input && !gates::said_by(earlier.as_ref(), by) {
        engine.pinned(&loaded.head.definition).await.map_err(of)?;
        if Standing::of(&wait, loaded.now) == Standing::Open {
            fits(&wait, "payload", &deliver.payload).map_err(of)?;
        }
    }
    let word = Word {
        id: deliver.id.clone(),
        correlation: Some(deliver.correlation.clone()),
        payload: Bytes::copy_from_slice(deliver.payload.get().as_bytes()),
    };
    let addressed = Addressed {
        loaded,
        wait,
        earlier,
    };
    delivered(gates::tell(operator, addressed, word, by).await).map_err(of)
}
