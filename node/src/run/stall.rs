//! What follows a claimed stall: the fence and the probe side by side, joined once into the one terminal (004, G51).
//!
//! Runs in a task of its own, so that a client that leaves meanwhile stops neither what is counted nor what is logged.
//! It retries nothing, changes no provider and says nothing about recovery.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use iop_shared::execution::{AttemptFence, FailureCode, LivenessClassification, ProbeOutcome};
use iop_shared::wire::terminal::{NodeError, StallFailure};
use tokio::sync::oneshot;

use super::task::Attempt;
use super::watchdog::StallClaim;
use crate::metrics::{NodeMetrics, StallRow};
use crate::probe;
use crate::providers::hold::Hold;
use crate::providers::registry::Slot;
use crate::tasks::{self, Kind};

/// 004's close grace: how long the end of the node's hold on the provider is waited for.
const CLOSE_GRACE: Duration = Duration::from_secs(2);

/// An attempt whose call or body was dropped already.
pub(crate) struct Stalled {
    pub(crate) claim: StallClaim,
    pub(crate) hold: Hold,
    pub(crate) attempt: Attempt,
    pub(crate) slot: Arc<Slot>,
    pub(crate) metrics: Arc<NodeMetrics>,
}

/// The terminal of a stalled attempt in the making. Dropping it stops nothing.
pub(crate) struct Joining(oneshot::Receiver<NodeError>);

impl Joining {
    pub(crate) fn start(stalled: Stalled) -> Self {
        let (sender, receiver) = oneshot::channel();
        tasks::spawn(Kind::Session, "stall", async move {
            // Nobody may be there any more to take it.
            let _ = sender.send(join(stalled).await);
        });
        Self(receiver)
    }
}

impl Future for Joining {
    type Output = NodeError;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<NodeError> {
        // Without a sender the runtime is ending: a terminal may lack its evidence, it may not be missing.
        Pin::new(&mut self.0).poll(cx).map(|joined| {
            joined.unwrap_or_else(|_| NodeError::new(FailureCode::ResponseStalled, "the provider stalled"))
        })
    }
}

async fn join(stalled: Stalled) -> NodeError {
    let Stalled {
        claim,
        hold,
        attempt,
        slot,
        metrics,
    } = stalled;
    // A defect of a probe is no answer of the provider.
    let probe = AssertUnwindSafe(probe::health(&slot, &attempt.target)).catch_unwind();
    let (fence, probed) = futures_util::future::join(fence(hold), probe).await;
    let classification = probed.unwrap_or(ProbeOutcome::Error).classification();
    // Numbered when final, so that the order of numbers is the order of knowledge.
    let sequence = attempt.scope.next_observation();
    let error = terminal(
        claim,
        &attempt,
        slot.adapter.as_str(),
        classification,
        fence,
        sequence,
    );
    let row = StallRow {
        path: attempt.path,
        classification,
        fence,
    };
    observe(|| report(&metrics, row, claim.idle));
    error
}

/// Whether the hold was seen to end within the grace.
async fn fence(hold: Hold) -> AttemptFence {
    match tokio::time::timeout(CLOSE_GRACE, hold.end()).await {
        Ok(()) => AttemptFence::Confirmed,
        Err(_) => AttemptFence::Unconfirmed,
    }
}

fn idle_ms(claim: StallClaim) -> u64 {
    u64::try_from(claim.idle.as_millis()).unwrap_or(u64::MAX)
}

/// 004's allow-listed keys and nothing else. Pure.
fn terminal(
    claim: StallClaim,
    attempt: &Attempt,
    adapter: &str,
    classification: LivenessClassification,
    attempt_fence: AttemptFence,
    sequence: u64,
) -> NodeError {
    let idle_duration_ms = idle_ms(claim);
    NodeError {
        code: FailureCode::ResponseStalled,
        message: format!("the provider made no progress for {idle_duration_ms} ms"),
        failure: Some(Box::new(StallFailure {
            failure_code: FailureCode::ResponseStalled,
            provider_health: classification.health(),
            liveness_classification: classification,
            idle_duration_ms,
            run_id: attempt.run_id.to_string(),
            attempt_id: attempt.attempt_id.to_string(),
            attempt_fence,
            adapter: adapter.to_owned(),
            target: attempt.target.clone(),
            health_observation_seq: Some(sequence),
        })),
    }
}

/// 004: an observer that fails never suppresses the terminal. The panic itself was told by the panic hook; what just
/// broke is not asked to log it.
fn observe(observer: impl FnOnce()) {
    drop(catch_unwind(AssertUnwindSafe(observer)));
}

fn report(metrics: &NodeMetrics, row: StallRow, idle: Duration) {
    metrics.stalled(row, idle);
    tracing::info!(
        execution_path = row.path.as_str(),
        provider_health = row.classification.health().as_str(),
        liveness_classification = row.classification.as_str(),
        attempt_fence = row.fence.as_str(),
        idle_duration_ms = idle_ms(StallClaim { idle }),
        "node_response_stall_observation"
    );
}

#[cfg(test)]
mod tests;
