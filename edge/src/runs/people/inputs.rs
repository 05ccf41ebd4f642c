//! Answers to what a run asks a person (D74).

use bytes::Bytes;
use iop_durable::ids::{DecisionId, WaitId};
use iop_durable::machine::wait::Verdict;
use iop_durable::record::{WaitRecord, WaitingKind};
use iop_durable::runner::{Addressed, Operator};
use iop_durable::store::Loaded;
use serde_json::Value;
use serde_json::value::RawValue;

use super::{decider, gate};
use crate::agents::journal::InputSubject;
use crate::agents::tools::schema::Arguments;
use crate::config::Role;
use crate::http::auth::Caller;
use crate::runs::gates::{self, NotTold, Standing, Told, Word};
use crate::runs::problem::{Code, Problem};
use crate::runs::{Runs, Seen};

/// The gate of an input's id and what it asks.
///
/// # Errors
/// `input_not_found`, also for a gate of another kind or another run; the store's.
pub(crate) async fn input(operator: &Operator, loaded: &Loaded, id: &str) -> Result<WaitRecord, Problem> {
    let run = loaded.head.id.as_str();
    let not_found = || Problem::new(Code::InputNotFound, "This run has no such input.").of(run);
    let wait = WaitId::new(id).map_err(|_| not_found())?;
    let wait = gate(operator, loaded, &wait, WaitingKind::Input).await?;
    wait.ok_or_else(not_found)
}

/// Holds an answer to the schema that its prompt came with.
///
/// # Errors
/// `schema_violation` at `field`.
pub(crate) fn fits(wait: &WaitRecord, field: &'static str, value: &RawValue) -> Result<(), Problem> {
    let subject = serde_json::from_slice(wait.subject.bytes());
    // A schema that no answer could be held to is none.
    let schema = subject
        .ok()
        .and_then(|subject: InputSubject| subject.schema)
        .and_then(|schema| Arguments::compile_foreign(&schema).ok());
    let Some(schema) = schema else {
        return Ok(());
    };
    let value: Value = serde_json::from_str(value.get())
        .map_err(|_| Problem::invalid(field, format!("{field} is not JSON that can be checked.")))?;
    schema.check_answer(&value).map_err(|why| {
        Problem::new(
            Code::SchemaViolation,
            format!("The answer violates the schema of its prompt: {why}."),
        )
        .at(field)
    })
}

/// What the engine's answer to an input means.
///
/// # Errors
/// `run_not_waiting` when it was answered before or its time is over, `run_terminal`, `delivery_conflict`.
pub(crate) fn answered(told: Result<Told, NotTold>) -> Result<Told, Problem> {
    match told {
        Ok(told) => match told.verdict {
            Verdict::Accepted => Ok(told),
            Verdict::Superseded if told.standing == Standing::Expired => Err(too_late()),
            Verdict::Superseded | Verdict::Unmatched => Err(Problem::new(
                Code::RunNotWaiting,
                "This input was answered before.",
            )),
            Verdict::Canceled => Err(gates::withdrawn("input", told.status)),
        },
        Err(NotTold::OtherContent) => Err(gates::other_content("decision_id")),
        Err(NotTold::Expired) => Err(too_late()),
        Err(NotTold::Problem(problem)) => Err(*problem),
    }
}

fn too_late() -> Problem {
    Problem::new(Code::RunNotWaiting, "The time for this input is over.")
}

/// Sends the answer to an input to the engine, as its sender wrote it.
pub(crate) async fn answer(
    operator: &Operator,
    addressed: Addressed,
    id: DecisionId,
    value: &RawValue,
    by: &str,
) -> Result<Told, Problem> {
    let run = addressed.loaded.head.id.clone();
    let word = Word {
        id,
        correlation: None,
        payload: Bytes::copy_from_slice(value.get().as_bytes()),
    };
    answered(gates::tell(operator, addressed, word, by).await).map_err(|problem| problem.of(run.as_str()))
}

impl Runs {
    /// Answers an input.
    ///
    /// # Errors
    /// `permission_denied`, `run_not_found`, `run_deleted`, `input_not_found`, `definition_missing`, `definition_changed`,
    /// `schema_violation`, those of `answered`; the store's.
    pub(crate) async fn answer(
        &self,
        caller: &Caller,
        run: &str,
        input: &str,
        decision_id: &str,
        value: &RawValue,
    ) -> Result<Told, Problem> {
        caller.require(Role::Operator)?;
        let id = gates::decision_id("decision_id", decision_id)?;
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let operator = &engine.operator;
        let wait = self::input(operator, &loaded, input).await?;
        let by = decider(caller);
        let earlier = gates::earlier(operator, &wait, &id).await?;
        if !gates::said_by(earlier.as_ref(), &by) {
            let of = |problem: Problem| problem.of(loaded.head.id.as_str());
            engine.pinned(&loaded.head.definition).await.map_err(of)?;
            if Standing::of(&wait, loaded.now) == Standing::Open {
                fits(&wait, "value", value).map_err(of)?;
            }
        }
        let addressed = Addressed {
            loaded,
            wait,
            earlier,
        };
        self::answer(operator, addressed, id, value, &by).await
    }
}
