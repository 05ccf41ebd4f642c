//! A tool that is another agent: the call is a run of it, with a derived id, made before anything is waited for (D7, D73).

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Deadline, NodeError};
use iop_durable::ids::RunId;
use iop_durable::record::{Effect, Lineage, Outcome, Status, WaitingKind};
use iop_durable::runner::{ActivityError, CallError, Ctx};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::journal::{CHILD, start_key};
use super::program::{Program, Room};
use super::reason::{ASK_AGAIN, patiently};
use crate::config::hex;
use crate::runs::Child as NewChild;

/// How long a parent sleeps when nobody tells it that its child is over: at first, and at most. A child may wait for a person for
/// days, and each look is a pause in the run's records.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
const LOOK_AGAIN_MAX: Duration = Duration::from_secs(600);

/// The pause before look `n`, from 0.
pub(super) fn look_again(n: u64) -> Duration {
    let doubled = 1_u32.checked_shl(u32::try_from(n).unwrap_or(u32::MAX));
    LOOK_AGAIN
        .saturating_mul(doubled.unwrap_or(u32::MAX))
        .min(LOOK_AGAIN_MAX)
}

/// A call that is a run of another agent.
pub(super) struct Child<'a> {
    pub(super) program: &'a Program,
    pub(super) ctx: &'a Ctx,
    /// Of the call.
    pub(super) key: &'a str,
    pub(super) agent: &'a str,
    /// The child's input.
    pub(super) arguments: &'a str,
}

impl Child<'_> {
    /// Starts the run, waits for its end, records its output as the call's. `Err` in the inner result: the child did not succeed.
    pub(super) async fn run(
        &self,
        started: impl FnOnce(u32) -> (Cow<'static, str>, Bytes) + Send + 'static,
        completed: impl Fn(&Result<Bytes, CallError>, u32) + Send + Sync,
    ) -> Result<Result<(), ActivityError>, NodeError> {
        let child = self.id()?;
        let made = self
            .ctx
            .activity(&start_key(self.key))
            .implementation(CHILD)
            .effect(Effect::Idempotent)
            .announce(started)
            .run(self.arguments.to_owned(), |call| {
                let child = child.clone();
                async move {
                    let app = self.program.room.app()?;
                    let runs = app.runs().ok_or_else(Room::ending)?;
                    let lineage = Lineage {
                        parent: Some(call.run.clone()),
                        root: self.ctx.root().clone(),
                        origin: Some(super::journal::step_name(call.activation)),
                    };
                    let new = NewChild {
                        run: child.clone(),
                        agent: self.agent.to_owned(),
                        input: call.input.clone(),
                        lineage,
                        owner: self.ctx.owner().map(|owner| owner.to_string()),
                        durable: self.program.room.durable,
                    };
                    // A store that is away for a moment is not the call's fault: it is asked again while the lease lives.
                    while let Err(problem) = runs.start_child(&new).await {
                        if !problem.retryable {
                            let failure = Failure::new(FailureKind::Configuration, problem.message);
                            return Err(failure.code(problem.code.as_str()).into());
                        }
                        tokio::time::sleep(ASK_AGAIN).await;
                    }
                    Ok(Bytes::copy_from_slice(child.as_str().as_bytes()))
                }
            })
            .await;
        if let Err(error) = made {
            return Ok(Err(error));
        }
        let outcome = self.outcome(&child).await?;
        let ended = self
            .ctx
            .activity(self.key)
            .implementation(CHILD)
            .effect(Effect::ReadOnly)
            .run(child.as_str().to_owned(), |call| {
                let result = told(&outcome);
                completed(&result, call.attempt);
                std::future::ready(result)
            })
            .await;
        Ok(ended.map(|_| ()))
    }

    /// The same for every dispatch of this call.
    fn id(&self) -> Result<RunId, Failure> {
        let mut hash = Sha256::new();
        for part in [
            self.ctx.run().as_str(),
            &self.ctx.activation().to_string(),
            self.key,
        ] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part.as_bytes());
        }
        let digest = hex(&hash.finalize().into());
        RunId::new(&format!("run_{}", &digest[..32]))
            .map_err(|e| Failure::new(FailureKind::Internal, e.to_string()))
    }

    /// Waits until the child is over, without a worker.
    async fn outcome(&self, child: &RunId) -> Result<Outcome, NodeError> {
        for n in 0_u64.. {
            let busy = self.ctx.busy();
            let loaded = patiently(|| self.program.room.store.load(child)).await?;
            drop(busy);
            if let Some(outcome) = &loaded.head.outcome
                && loaded.head.status.is_terminal()
            {
                return Outcome::decode(outcome).map_err(|e| {
                    NodeError::Failed(Failure::new(
                        FailureKind::Internal,
                        format!("the child's outcome: {e}"),
                    ))
                });
            }
            let subject = json!({ "child_run_id": child.as_str() }).to_string();
            self.ctx
                .gate(&format!("child/{n}/{}", self.key))
                .kind(WaitingKind::Children)
                .correlation(&ended(child))
                .subject(subject)
                .deadline(Deadline::In(look_again(n)))
                .wait()
                .await?;
        }
        Err(Failure::new(FailureKind::Internal, "a child was looked for too often").into())
    }
}

/// What a parent waits for.
pub(crate) fn ended(child: &RunId) -> String {
    format!("run_ended/{child}")
}

/// What the model is told of a child's end: its output, or why there is none.
fn told(outcome: &Outcome) -> Result<Bytes, CallError> {
    if outcome.status == Status::Succeeded {
        let output = outcome.output.as_ref().map_or("null", |output| output.get());
        // A text is told as it is, not as JSON.
        let text = serde_json::from_str::<String>(output).unwrap_or_else(|_| output.to_owned());
        return Ok(Bytes::from(text));
    }
    let why = match &outcome.error {
        Some(error) => format!(
            "the agent's run ended {}: {}",
            outcome.status, error.failure.message
        ),
        None => format!("the agent's run ended {}", outcome.status),
    };
    Err(Failure::new(FailureKind::ToolError, why)
        .code(format!("run_{}", outcome.status))
        .retryable(false)
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_looks_less_and_less_often() {
        let seconds: Vec<u64> = (0..6).map(|n| look_again(n).as_secs()).collect();
        assert_eq!(seconds, [60, 120, 240, 480, 600, 600]);
        assert_eq!(look_again(u64::MAX), LOOK_AGAIN_MAX);
    }
}
