//! What a resume would meet: its token, what can be asked of an agent's run, and the decision that all ways of resuming share
//! (D91 to D97).

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use http::HeaderValue;
use iop_durable::ids::{Revision, RunId};
use iop_durable::record::{Outcome, RunHead, Status, Waiting};
use iop_durable::runner::ResumeDecision;
use iop_durable::token::ResumeToken;
use iop_shared::label_enum;
use serde_json::Value;

use crate::runs::problem::{Code, Problem};
use crate::schema::words_schema;

label_enum! {
    /// What a resume would meet (D93).
    pub enum Meets {
        Ready => "ready",
        Stale => "stale",
        Waiting => "waiting",
        Ambiguous => "ambiguous",
        Busy => "busy",
        Terminal => "terminal",
        DefinitionChanged => "definition_changed",
        DefinitionMissing => "definition_missing",
    }
}
words_schema!(Meets);

/// The same, with what a caller needs beside the word.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Decision {
    Ready,
    Stale,
    Waiting(Box<Waiting>),
    Ambiguous(Box<Waiting>),
    Busy,
    Terminal(Status),
    DefinitionChanged(String),
    DefinitionMissing,
}

impl Decision {
    pub(crate) const fn word(&self) -> Meets {
        match self {
            Self::Ready => Meets::Ready,
            Self::Stale => Meets::Stale,
            Self::Waiting(_) => Meets::Waiting,
            Self::Ambiguous(_) => Meets::Ambiguous,
            Self::Busy => Meets::Busy,
            Self::Terminal(_) => Meets::Terminal,
            Self::DefinitionChanged(_) => Meets::DefinitionChanged,
            Self::DefinitionMissing => Meets::DefinitionMissing,
        }
    }
}

impl From<ResumeDecision> for Decision {
    fn from(decision: ResumeDecision) -> Self {
        match decision {
            ResumeDecision::Ready => Self::Ready,
            ResumeDecision::Stale => Self::Stale,
            ResumeDecision::Waiting(on) => Self::Waiting(on),
            ResumeDecision::Ambiguous(on) => Self::Ambiguous(on),
            ResumeDecision::Busy => Self::Busy,
            ResumeDecision::Terminal(status) => Self::Terminal(status),
            ResumeDecision::DefinitionChanged(why) => Self::DefinitionChanged(why),
        }
    }
}

/// What a caller asks a resume for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ask {
    pub(crate) resume_token: Option<String>,
    /// The header.
    pub(crate) if_match: Option<HeaderValue>,
    pub(crate) state_overlay: Option<Value>,
    pub(crate) resume_target: Option<Value>,
    pub(crate) metadata: BTreeMap<String, String>,
}

impl Ask {
    /// What an agent's run can be asked for, and by which token.
    ///
    /// # Errors
    /// `invalid_request`, `invalid_resume_target`; they name their field.
    pub(crate) fn check(&self, run: &RunId) -> Result<ResumeToken, Problem> {
        if self.state_overlay.is_some() {
            return Err(Problem::invalid(
                "state_overlay",
                "The state of an agent's run cannot be overlaid.",
            ));
        }
        if let Some(target) = &self.resume_target
            && !is_current(target)
        {
            return Err(Problem::new(
                Code::InvalidResumeTarget,
                "An agent's run goes on where it is: resume_target can only be {\"current\":true}.",
            )
            .at("resume_target"));
        }
        token(run, self.resume_token.as_deref(), self.if_match.as_ref())?.ok_or_else(|| {
            Problem::invalid(
                "resume_token",
                "Send the resume_token of the run's last answer, or its ETag as If-Match.",
            )
        })
    }
}

fn is_current(target: &Value) -> bool {
    let members = target.as_object();
    members.is_some_and(|members| members.len() == 1 && members.get("current") == Some(&Value::Bool(true)))
}

/// The revision that a caller means, as a token; `None` when it names none (durable-api §1).
///
/// # Errors
/// `invalid_request` for a token of another run, for what is no token or no ETag, and when the two differ.
pub(crate) fn token(
    run: &RunId,
    resume_token: Option<&str>,
    if_match: Option<&HeaderValue>,
) -> Result<Option<ResumeToken>, Problem> {
    let by_body = resume_token
        .map(ResumeToken::parse)
        .transpose()
        .map_err(|_| Problem::invalid("resume_token", "resume_token is not a resume token."))?;
    if by_body.as_ref().is_some_and(|token| token.run != *run) {
        return Err(Problem::invalid(
            "resume_token",
            "resume_token is of another run.",
        ));
    }
    let by_header = if_match.map(revision).transpose()?.map(|revision| ResumeToken {
        run: run.clone(),
        revision,
    });
    match (by_body, by_header) {
        (Some(body), Some(header)) if body != header => Err(Problem::invalid(
            "If-Match",
            "resume_token and If-Match name different revisions.",
        )),
        (Some(token), _) | (None, Some(token)) => Ok(Some(token)),
        (None, None) => Ok(None),
    }
}

/// The revision in an ETag of ours: `"42"`.
fn revision(value: &HeaderValue) -> Result<Revision, Problem> {
    let invalid = || {
        Problem::invalid(
            "If-Match",
            "If-Match must be one ETag of the run, such as \"42\".",
        )
    };
    let text = value.to_str().map_err(|_| invalid())?.trim();
    let text = text.strip_prefix("W/").unwrap_or(text);
    let digits = text
        .strip_prefix('"')
        .and_then(|text| text.strip_suffix('"'))
        .filter(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()));
    let number = digits
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(invalid)?;
    Revision::new(number).map_err(|_| invalid())
}

/// What can be said of a resume by the stored run alone, without its definition: `None` when the definition is needed.
pub(crate) fn without_definition(head: &RunHead, token: &ResumeToken) -> Option<Decision> {
    if token.revision != head.revision {
        return Some(Decision::Stale);
    }
    let over = match head.status {
        Status::Queued | Status::Running | Status::Waiting | Status::Ambiguous => false,
        Status::Failed => {
            let outcome = head.outcome.as_deref().map(Outcome::decode);
            !matches!(outcome, Some(Ok(outcome)) if outcome.resumable())
        }
        Status::Succeeded | Status::Cancelled | Status::Exhausted | Status::Transferred => true,
    };
    over.then_some(Decision::Terminal(head.status))
}

/// The refusal that a decision is; `None` when the run may go on, or has succeeded: then its stored outcome is the answer
/// (D64).
pub(crate) fn refusal(decision: &Decision, head: &RunHead, current: &ResumeToken) -> Option<Problem> {
    let problem = match decision {
        Decision::Ready | Decision::Terminal(Status::Succeeded) => return None,
        Decision::Stale => Problem::new(
            Code::StaleToken,
            "The run has moved on; resume with the current token.",
        ),
        Decision::Waiting(_) => Problem::new(
            Code::RunWaiting,
            "The run waits; a decision, an answer or its time moves it.",
        ),
        Decision::Ambiguous(_) => Problem::new(
            Code::EffectAmbiguous,
            "An effect may or may not have happened; reconcile or resolve it first.",
        ),
        Decision::Busy => Problem::new(Code::RunBusy, "Somebody is working on the run."),
        Decision::Terminal(status) => Problem::new(
            Code::RunTerminal,
            format!("The run is over ({status}) and cannot be resumed."),
        ),
        Decision::DefinitionChanged(why) => Problem::new(
            Code::DefinitionChanged,
            format!("The run belongs to another definition: {why}."),
        ),
        Decision::DefinitionMissing => Problem::new(
            Code::DefinitionMissing,
            "The agent of this run is not declared any more; declare it again to free its runs.",
        ),
    };
    let mut problem = problem.of(head.id.as_str());
    problem.decision = Some(decision.word().as_str());
    problem.current_resume_token = Some(current.to_string());
    Some(problem)
}
