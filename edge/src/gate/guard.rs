//! What must happen on every exit, armed before the first await: exactly one outcome per request, one result per attempt.

use std::sync::Arc;
use std::time::Duration;

use iop_shared::execution::{
    AttemptFence, AttemptResult, CommitState, ExecutionPath, Outcome, ProviderHealth,
};
use iop_shared::openai::usage::Usage;
use tokio::time::Instant;

use super::asked::Origin;
use super::cycle::{Stalled, observe};
use super::recovery::{Cause, Facts, decide};
use crate::pool::Prospects;

use crate::http::request_id::RequestId;
use crate::metrics::{EndpointLabel, Metrics, UsageCompleteness};

/// By so long after its limit a node has claimed the stall: its clock runs beside the provider, ours behind the link.
const CLAIMED: Duration = Duration::from_millis(100);

/// Counts one request. Dropped without `settle`, its client left (G60).
pub(crate) struct RequestGuard {
    metrics: Arc<Metrics>,
    endpoint: EndpointLabel,
    request_id: RequestId,
    started: Instant,
    /// Whether it is one of the requests that a gateway is there for.
    counts: bool,
    outcome: Option<Outcome>,
    /// What is given back when the request ends.
    held: Option<Box<dyn std::any::Any + Send + Sync>>,
}

impl RequestGuard {
    pub(crate) fn new(
        metrics: Arc<Metrics>,
        endpoint: EndpointLabel,
        request_id: RequestId,
        now: Instant,
    ) -> Self {
        metrics.in_flight.at((endpoint,)).inc();
        Self {
            metrics,
            endpoint,
            request_id,
            started: now,
            counts: true,
            outcome: None,
            held: None,
        }
    }

    /// Of a request to `/api/v1`: in flight like any other, and in no count of the traffic that clients and providers make.
    pub(crate) fn beside(metrics: Arc<Metrics>, request_id: RequestId, now: Instant) -> Self {
        let mut guard = Self::new(metrics, EndpointLabel::Other, request_id, now);
        guard.counts = false;
        guard
    }

    /// Says how the request ended; the first word counts.
    pub(crate) fn settle(&mut self, outcome: Outcome) {
        self.outcome.get_or_insert(outcome);
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Keeps something until the request has ended.
    pub(crate) fn hold(&mut self, what: impl Send + Sync + 'static) {
        self.held = Some(Box::new(what));
    }

    pub(crate) fn first_token(&self, now: Instant) {
        self.metrics
            .time_to_first_token
            .at((self.endpoint,))
            .observe((now - self.started).as_secs_f64());
    }

    pub(crate) fn token_gap(&self, last: Instant, now: Instant) {
        self.metrics
            .inter_token_latency
            .at((self.endpoint,))
            .observe((now - last).as_secs_f64());
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        let labels = (self.endpoint,);
        self.metrics.in_flight.at(labels).dec();
        let outcome = self.outcome.unwrap_or_else(|| {
            // A panic unwinds through here as well; only a client that left is a cancellation.
            if std::thread::panicking() {
                Outcome::InternalError
            } else {
                Outcome::ClientCancelled
            }
        });
        if self.counts {
            self.metrics
                .request_duration
                .at(labels)
                .observe(self.started.elapsed().as_secs_f64());
            if outcome == Outcome::ClientCancelled {
                self.metrics.client_cancelled.at(labels).inc();
            }
            self.metrics.requests.at((self.endpoint, outcome)).inc();
        }
        // 499 is the field's status for a client that left.
        let status = (outcome == Outcome::ClientCancelled).then_some(499);
        tracing::debug!(
            request_id = %self.request_id,
            endpoint = self.endpoint.as_str(),
            outcome = outcome.as_str(),
            status,
            duration_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            "request_ended"
        );
    }
}

/// Counts one dispatch. Dropped without `settle`, it was cancelled.
pub(crate) struct AttemptGuard {
    metrics: Arc<Metrics>,
    result: Option<AttemptResult>,
    /// A stored answer that is asked for again was counted when it was made.
    counts_usage: bool,
    usage: Option<(Option<Usage>, UsageCompleteness)>,
    path: ExecutionPath,
    /// The node's stall limit; `None` once something has been committed.
    stall_limit: Option<Duration>,
    progressed: Instant,
}

impl AttemptGuard {
    pub(crate) fn new(
        metrics: Arc<Metrics>,
        counts_usage: bool,
        path: ExecutionPath,
        stall_limit: Duration,
        now: Instant,
    ) -> Self {
        Self {
            metrics,
            result: None,
            counts_usage,
            usage: None,
            path,
            stall_limit: Some(stall_limit),
            progressed: now,
        }
    }

    /// Something came from the node.
    pub(crate) fn progress(&mut self, now: Instant) {
        self.progressed = now;
    }

    /// Something leaves for the client.
    pub(crate) fn committed(&mut self) {
        self.stall_limit = None;
    }

    /// Says how the attempt ended; the first word counts.
    pub(crate) fn settle(&mut self, result: AttemptResult) {
        self.result.get_or_insert(result);
    }

    /// The tokens known so far; counted once, when the attempt ends.
    pub(crate) fn usage(&mut self, usage: Option<Usage>, completeness: UsageCompleteness) {
        self.usage = self.counts_usage.then_some((usage, completeness));
    }

    /// The client left while the node was establishing a stall: the limit had passed, and its terminal was due.
    fn left_in_a_stall(&self) -> bool {
        self.result.is_none()
            && self
                .stall_limit
                .is_some_and(|limit| self.progressed.elapsed() >= limit + CLAIMED)
            && !std::thread::panicking()
    }
}

/// The decision on a stall whose caller has gone.
fn abandoned() -> Facts {
    Facts {
        origin: Origin::Client,
        cause: Cause::Stall,
        handoff: true,
        fence: AttemptFence::Confirmed,
        health: ProviderHealth::Unknown,
        commit: CommitState::TransportUncommitted,
        cancelled: true,
        replay_safe: true,
        budget: true,
        snapshot: true,
        allowed: true,
        comes_back: false,
        prospects: Prospects {
            other: false,
            same: false,
        },
    }
}

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        if self.left_in_a_stall() {
            let facts = abandoned();
            let stalled = Stalled {
                path: self.path,
                health: facts.health,
                commit: facts.commit,
            };
            observe(&self.metrics, stalled, decide(&facts).eligibility);
        }
        self.metrics
            .attempts
            .at((self.result.unwrap_or(AttemptResult::Cancelled),))
            .inc();
        if let Some((usage, completeness)) = self.usage {
            self.metrics.count_usage(usage, completeness);
        }
    }
}

#[cfg(test)]
mod tests;
