//! An operator's word about an effect that nobody knows of (D153), as it comes over the API.

#[cfg(test)]
mod tests;

use iop_durable::failure::{Failure, FailureKind};
use iop_durable::machine::activity::{Action, Resolution};
use iop_durable::payload::{Digest, Payload};
use iop_durable::record::ActivityRecord;
use iop_shared::label_enum;
use serde_json::value::RawValue;

use crate::runs::gates;
use crate::runs::problem::Problem;
use crate::schema::words_schema;

label_enum! {
    /// What is to become of an unknown effect.
    pub enum ResolveAction {
        /// It happened, with this output.
        Complete => "complete",
        /// It did not, and is not tried again.
        Fail => "fail",
        /// It is tried again, under the tool's own policy and within its limit.
        Retry => "retry",
    }
}
words_schema!(ResolveAction);

/// The code of a call that an operator said has failed.
pub(crate) const FAILED: &str = "resolved_as_failed";

/// The body of a resolution.
#[derive(Debug, Clone)]
pub(crate) struct Resolve {
    pub(crate) action: ResolveAction,
    pub(crate) decision_id: String,
    /// `sha256:` and 64 hex digits.
    pub(crate) input_digest: String,
    /// The number of the last attempt.
    pub(crate) attempt: u32,
    pub(crate) reason: String,
    pub(crate) evidence: String,
    /// Of `complete`.
    pub(crate) output: Option<Box<RawValue>>,
    /// Whether the run goes on at once (D159).
    pub(crate) resume: bool,
}

impl Resolve {
    /// The decision about this activity.
    ///
    /// # Errors
    /// `invalid_request`, `invalid_encoding`; both name their field.
    pub(crate) fn of(&self, record: &ActivityRecord) -> Result<Resolution, Problem> {
        let decision = gates::decision_id("decision_id", &self.decision_id)?;
        gates::text("reason", &self.reason, true)?;
        gates::text("evidence", &self.evidence, true)?;
        let action = match (self.action, &self.output) {
            (ResolveAction::Complete, Some(output)) => Action::Complete {
                output: told(output)?,
            },
            (ResolveAction::Complete, None) => {
                return Err(Problem::invalid(
                    "output",
                    "The action \"complete\" needs the call's output.",
                ));
            }
            (ResolveAction::Fail | ResolveAction::Retry, Some(_)) => {
                return Err(Problem::invalid(
                    "output",
                    "Only the action \"complete\" takes an output.",
                ));
            }
            (ResolveAction::Fail, None) => Action::Fail {
                error: Failure::new(FailureKind::ToolError, self.reason.clone())
                    .code(FAILED)
                    .retryable(false),
            },
            (ResolveAction::Retry, None) => Action::Retry,
        };
        Ok(Resolution {
            id: record.id.clone(),
            action,
            decision,
            input_digest: digest(&self.input_digest)?,
            implementation: record.implementation.clone(),
            attempt: self.attempt,
            reason: self.reason.clone(),
            evidence: self.evidence.clone(),
        })
    }
}

/// An output as the model is told it: a text is its content, everything else is JSON as it was sent.
fn told(output: &RawValue) -> Result<Payload, Problem> {
    let text = output.get();
    if text.starts_with('"') {
        let content: String =
            serde_json::from_str(text).map_err(|_| Problem::invalid("output", "output is not a text."))?;
        return Ok(Payload::new(content));
    }
    Ok(Payload::new(text.to_owned()))
}

/// # Errors
/// `invalid_request`.
fn digest(text: &str) -> Result<Digest, Problem> {
    let invalid = || {
        Problem::invalid(
            "input_digest",
            "input_digest must be \"sha256:\" and 64 hex digits.",
        )
    };
    let hex = text.strip_prefix("sha256:").ok_or_else(invalid)?;
    crate::config::from_hex(hex).ok_or_else(invalid)
}
