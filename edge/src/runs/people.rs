//! What people say to a run: decisions on approvals (D76 to D89) and answers to inputs (D74). A decision is stored before
//! anything else happens; the worker of the run, wherever it is, finds it there.

pub(crate) mod inputs;
pub(crate) mod list;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use iop_durable::ids::{DecisionId, RunId, WaitId};
use iop_durable::machine::wait::Verdict;
use iop_durable::record::{WaitRecord, WaitingKind};
use iop_durable::runner::{Addressed, Operator};
use iop_durable::store::Loaded;
use serde_json::value::RawValue;

pub(crate) use inputs::{fits, input};

use super::gates::{self, NotTold, Standing, Told, Word};
use super::problem::{Code, Problem};
use super::view::ApprovalObject;
use super::{Runs, Seen};
use crate::agents::journal::{ApprovalAnswer, ApprovalDecision, ApprovalSubject, wait_of_approval};
use crate::config::Role;
use crate::http::auth::Caller;
use crate::runs::catalog::Version;

/// Whose decisions are recorded where no keys are configured.
pub(crate) const ANYBODY: &str = "local";

/// A decision on an approval, checked by itself.
#[derive(Debug, Clone)]
pub(crate) struct Decide {
    pub(crate) id: DecisionId,
    pub(crate) answer: ApprovalAnswer,
}

impl Decide {
    /// `edited` is what the body has as `edited_arguments`: an object, or the text of one.
    ///
    /// # Errors
    /// `invalid_encoding`, `invalid_request`; both name their field.
    pub(crate) fn new(
        id: &str,
        decision: ApprovalDecision,
        arguments_digest: String,
        reason: Option<String>,
        edited: Option<&RawValue>,
    ) -> Result<Self, Problem> {
        let id = gates::decision_id("decision_id", id)?;
        if let Some(reason) = &reason {
            gates::text("reason", reason, false)?;
        }
        let edited_arguments = match (decision, edited) {
            (ApprovalDecision::Edit, Some(edited)) => Some(arguments_of(edited)?),
            (ApprovalDecision::Edit, None) => {
                return Err(Problem::invalid(
                    "edited_arguments",
                    "The decision \"edit\" needs edited_arguments.",
                ));
            }
            (ApprovalDecision::Approve | ApprovalDecision::Deny, Some(_)) => {
                return Err(Problem::invalid(
                    "edited_arguments",
                    "Only the decision \"edit\" takes edited_arguments.",
                ));
            }
            (ApprovalDecision::Approve | ApprovalDecision::Deny, None) => None,
        };
        Ok(Self {
            id,
            answer: ApprovalAnswer {
                decision,
                arguments_digest,
                reason,
                edited_arguments,
            },
        })
    }
}

/// The text of edited arguments: of an object as it was sent, of a string its content.
fn arguments_of(edited: &RawValue) -> Result<String, Problem> {
    let text = edited.get();
    match text.as_bytes().first() {
        Some(b'{') => Ok(text.to_owned()),
        Some(b'"') => serde_json::from_str(text)
            .map_err(|_| Problem::invalid("edited_arguments", "edited_arguments is not a text.")),
        Some(_) | None => Err(Problem::invalid(
            "edited_arguments",
            "edited_arguments must be an object or the text of one.",
        )),
    }
}

/// What holds for an approval at the moment of its decision.
pub(crate) struct Terms<'a> {
    /// Names of the keys that may decide, of the version the run is pinned to; empty: every operator.
    pub(crate) deciders: &'a [String],
    /// Whether the newest version of the agent has the tool.
    pub(crate) available: bool,
    /// Checks arguments against the pinned tool's schema; says path and rule.
    pub(crate) check: &'a (dyn Fn(&str) -> Result<(), String> + Sync),
}

/// Whether a decision may go to the engine. One on a gate that is settled goes there too: it is recorded as the loser.
///
/// # Errors
/// `decider_not_allowed`, `approval_mismatch`, `approval_expired`, `tool_unavailable`, `schema_violation`.
pub(crate) fn admit(
    subject: &ApprovalSubject,
    answer: &ApprovalAnswer,
    standing: Standing,
    by: &str,
    terms: &Terms<'_>,
) -> Result<(), Problem> {
    if !terms.deciders.is_empty() && !terms.deciders.iter().any(|name| name == by) {
        return Err(Problem::new(
            Code::DeciderNotAllowed,
            "approvals.deciders of the agent does not name this API key.",
        ));
    }
    if answer.arguments_digest != subject.arguments_digest {
        return Err(Problem::new(
            Code::ApprovalMismatch,
            "arguments_digest is not that of the call to be approved.",
        )
        .at("arguments_digest"));
    }
    match standing {
        Standing::Expired => Err(expired()),
        // The engine says who was first.
        Standing::Decided | Standing::Withdrawn => Ok(()),
        Standing::Open => {
            let (field, arguments) = match answer.decision {
                ApprovalDecision::Deny => return Ok(()),
                ApprovalDecision::Approve => ("decision", Some(&subject.arguments)),
                ApprovalDecision::Edit => ("edited_arguments", answer.edited_arguments.as_ref()),
            };
            if !terms.available {
                return Err(Problem::new(
                    Code::ToolUnavailable,
                    "The agent does not have this tool any more; the run keeps waiting.",
                ));
            }
            let arguments = arguments.map_or("", String::as_str);
            (terms.check)(arguments).map_err(|why| {
                let advice = match answer.decision {
                    ApprovalDecision::Approve => " Edit or deny the call.",
                    ApprovalDecision::Edit | ApprovalDecision::Deny => "",
                };
                Problem::new(
                    Code::SchemaViolation,
                    format!("The arguments violate the tool's schema: {why}.{advice}"),
                )
                .at(field)
            })
        }
    }
}

fn expired() -> Problem {
    Problem::new(Code::ApprovalExpired, "The time for this decision is over.")
}

fn already_decided() -> Problem {
    Problem::new(Code::ApprovalAlreadyDecided, "This approval was decided before.")
}

/// What the engine's answer to a decision means. A decision that lost is never a success (D80, D89).
///
/// # Errors
/// `approval_already_decided`, `approval_expired`, `run_terminal`, `run_not_waiting`.
pub(crate) fn decided(told: Result<Told, NotTold>) -> Result<Told, Problem> {
    match told {
        Ok(told) => match told.verdict {
            Verdict::Accepted => Ok(told),
            Verdict::Superseded if told.standing == Standing::Expired => Err(expired()),
            // A gate matches everything.
            Verdict::Superseded | Verdict::Unmatched => Err(already_decided()),
            Verdict::Canceled => Err(gates::withdrawn("approval", told.status)),
        },
        Err(NotTold::OtherContent) => Err(already_decided().at("decision_id")),
        Err(NotTold::Expired) => Err(expired()),
        Err(NotTold::Problem(problem)) => Err(*problem),
    }
}

/// The gate of an approval's id and the call it holds.
///
/// # Errors
/// `approval_not_found`, also for a gate of another kind or another run; `run_corrupt`; the store's.
pub(crate) async fn approval(
    operator: &Operator,
    loaded: &Loaded,
    id: &str,
) -> Result<(WaitRecord, ApprovalSubject), Problem> {
    let run = &loaded.head.id;
    let not_found =
        || Problem::new(Code::ApprovalNotFound, "This run has no such approval.").of(run.as_str());
    let wait = wait_of_approval(id).ok_or_else(not_found)?;
    let wait = gate(operator, loaded, &wait, WaitingKind::Approval).await?;
    let wait = wait.ok_or_else(not_found)?;
    let subject = serde_json::from_slice(wait.subject.bytes()).map_err(|_| unreadable(run))?;
    Ok((wait, subject))
}

fn unreadable(run: &RunId) -> Problem {
    Problem::new(Code::RunCorrupt, "The approval cannot be read.").of(run.as_str())
}

/// A gate of a run, when it is of this kind.
async fn gate(
    operator: &Operator,
    loaded: &Loaded,
    id: &WaitId,
    kind: WaitingKind,
) -> Result<Option<WaitRecord>, Problem> {
    let wait = operator.store().wait(&loaded.head.id, id).await?;
    Ok(wait.filter(|wait| wait.kind == kind))
}

/// Sends a decision to the engine. `admit` comes first.
pub(crate) async fn decide(
    operator: &Operator,
    addressed: Addressed,
    decide: &Decide,
    by: &str,
) -> Result<Told, Problem> {
    let payload = serde_json::to_vec(&decide.answer)
        .map_err(|_| Problem::new(Code::InternalError, "The decision could not be written."))?;
    let word = Word {
        id: decide.id.clone(),
        correlation: None,
        payload: payload.into(),
    };
    let run = addressed.loaded.head.id.clone();
    decided(gates::tell(operator, addressed, word, by).await).map_err(|problem| problem.of(run.as_str()))
}

/// Whose name a decision is recorded under: never something that the request says (D85).
pub(crate) fn decider(caller: &Caller) -> String {
    caller
        .name()
        .map_or_else(|| ANYBODY.to_owned(), |name| name.to_string())
}

impl Runs {
    /// Decides an approval.
    ///
    /// # Errors
    /// `permission_denied`, `run_not_found`, `run_deleted`, `approval_not_found`, `definition_missing`, `definition_changed`, those
    /// of `admit` and `decided`; the store's.
    pub(crate) async fn decide(
        &self,
        caller: &Caller,
        run: &str,
        approval: &str,
        decide: &Decide,
    ) -> Result<(ApprovalObject, Told), Problem> {
        caller.require(Role::Operator)?;
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let operator = &engine.operator;
        let (wait, subject) = self::approval(operator, &loaded, approval).await?;
        let by = decider(caller);
        let earlier = gates::earlier(operator, &wait, &decide.id).await?;
        if !gates::said_by(earlier.as_ref(), &by) {
            let of = |problem: Problem| problem.of(loaded.head.id.as_str());
            let compiled = engine.pinned(&loaded.head.definition).await.map_err(of)?;
            let newest = self.newest_of(&compiled.version.name).await.map_err(of)?;
            let terms = Terms {
                deciders: &compiled.version.spec.approvals.deciders,
                available: newest.spec.tools.iter().any(|tool| tool.name == subject.tool),
                check: &|arguments| compiled.program.check_arguments(&subject.tool, arguments),
            };
            let standing = Standing::of(&wait, loaded.now);
            admit(&subject, &decide.answer, standing, &by, &terms).map_err(of)?;
        }
        let agent = loaded.head.definition.name.clone();
        let addressed = Addressed {
            loaded,
            wait,
            earlier,
        };
        let told = self::decide(operator, addressed, decide, &by).await?;
        let object = if told.replayed {
            self.shown_approval(engine, &told.wait, &agent).await?
        } else {
            ApprovalObject::of(&told.wait, &agent, Some(by), told.now)
        };
        let object = object.ok_or_else(|| unreadable(&told.wait.run))?;
        Ok((object, told))
    }

    /// The newest version of a run's agent.
    ///
    /// # Errors
    /// `definition_missing`; the store's.
    pub(crate) async fn newest_of(&self, agent: &str) -> Result<Arc<Version>, Problem> {
        let newest = self.catalog().newest(agent).await;
        newest.map_err(|problem| {
            if problem.code != Code::AgentNotFound {
                return problem;
            }
            let why = "The agent of this run is not declared any more.";
            Problem::new(Code::DefinitionMissing, why)
        })
    }
}
