//! What a run waits for at the end of an answer: for the client, in items or in words.

use std::sync::Arc;

use iop_durable::ids::{RunId, WaitId};
use iop_durable::record::{WaitRecord, WaitingKind};
use iop_durable::store::Store;

use super::telling::On;
use crate::agents::journal::{ApprovalSubject, InputSubject, approval_id};
use crate::runs::problem::Problem;
use crate::runs::view::url_of;

/// One thing that a run waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Pending {
    Approval {
        id: String,
        wait: WaitId,
        tool: String,
        /// As the model wrote them.
        arguments: String,
    },
    Input {
        wait: WaitId,
        prompt: String,
    },
    /// Somebody who knows whether a call had its effect.
    Effect {
        activity: String,
    },
    /// A resume, or another system.
    Word,
}

impl Pending {
    fn of(wait: &WaitRecord) -> Self {
        let subject = wait.subject.bytes();
        if wait.kind == WaitingKind::Input {
            let asked: Option<InputSubject> = serde_json::from_slice(subject).ok();
            return Self::Input {
                wait: wait.id.clone(),
                prompt: asked.map(|asked| asked.prompt).unwrap_or_default(),
            };
        }
        let call: Option<ApprovalSubject> = serde_json::from_slice(subject).ok();
        let (tool, arguments) = call.map_or_else(Default::default, |call| (call.tool, call.arguments));
        Self::Approval {
            id: approval_id(&wait.id),
            wait: wait.id.clone(),
            tool,
            arguments,
        }
    }

    /// In words, with where it is answered.
    pub(super) fn words(&self, run: &RunId) -> String {
        let at = url_of(run);
        match self {
            Self::Approval { id, tool, .. } => {
                format!(
                    "The run {run} waits for the approval {id} of a call of {tool}: POST {at}/approvals/{id}"
                )
            }
            Self::Input { wait, prompt } => {
                format!("{prompt}\n\nThe run {run} waits for the answer {wait}: POST {at}/inputs/{wait}")
            }
            Self::Effect { activity } => format!(
                "The run {run} waits for somebody who knows whether the call {activity} had its effect: \
                 POST {at}/activities/{activity}/resolve"
            ),
            Self::Word => format!("The run {run} waits to be resumed: POST {at}/resume"),
        }
    }
}

/// What a pause waits for, with what the waits hold.
///
/// # Errors
/// The store's.
pub(super) async fn pending(store: &Arc<dyn Store>, run: &RunId, on: &[On]) -> Result<Vec<Pending>, Problem> {
    let mut pending = Vec::with_capacity(on.len());
    for on in on {
        pending.push(match on.kind {
            WaitingKind::Approval | WaitingKind::Input => {
                let Ok(id) = WaitId::new(&on.id) else { continue };
                match store.wait(run, &id).await? {
                    Some(wait) => Pending::of(&wait),
                    None => continue,
                }
            }
            WaitingKind::Reconciliation => Pending::Effect {
                activity: on.id.clone(),
            },
            WaitingKind::Resume
            | WaitingKind::Handoff
            | WaitingKind::Event
            | WaitingKind::Timer
            | WaitingKind::Retry
            | WaitingKind::Children => Pending::Word,
        });
    }
    Ok(pending)
}
