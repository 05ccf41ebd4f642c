//! One liveness cycle of a request, from a stall to what came of it (004, "Edge OpenAI recovery observations").
//!
//! Request-local; the counters are the process's. At most one eligibility row and one result row per cycle.

use std::sync::Arc;

use iop_shared::execution::{
    CommitState, Eligibility, ExecutionPath, ProviderHealth, RecoveryPhase, RecoveryResult,
};

use crate::metrics::Metrics;

/// A stall as the rows name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stalled {
    pub(super) path: ExecutionPath,
    pub(super) health: ProviderHealth,
    pub(super) commit: CommitState,
}

/// The request's cycle; a pending one that is dropped ended with its request.
pub(super) struct Cycle {
    metrics: Arc<Metrics>,
    pending: Option<Stalled>,
}

impl Cycle {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            pending: None,
        }
    }

    /// The decision on a stall.
    pub(super) fn decided(&mut self, stalled: Stalled, eligibility: Eligibility) {
        let eligible = eligibility == Eligibility::Eligible;
        observe(&self.metrics, stalled, eligibility);
        self.pending = eligible.then_some(stalled);
    }

    /// What came of an eligible stall; nothing where none is pending.
    pub(super) fn resolved(&mut self, result: RecoveryResult) {
        let Some(stalled) = self.pending.take() else {
            return;
        };
        self.metrics
            .recovery_results
            .at((stalled.path, stalled.health, result))
            .inc();
        log(RecoveryPhase::Idle, stalled, "", result.as_str());
    }
}

impl Drop for Cycle {
    fn drop(&mut self) {
        self.resolved(RecoveryResult::Terminal);
    }
}

/// One eligibility row.
pub(super) fn observe(metrics: &Metrics, stalled: Stalled, eligibility: Eligibility) {
    metrics
        .recovery_eligibility
        .at((stalled.path, stalled.health, stalled.commit, eligibility))
        .inc();
    let phase = if eligibility == Eligibility::Eligible {
        RecoveryPhase::EligiblePending
    } else {
        RecoveryPhase::Idle
    };
    log(phase, stalled, eligibility.as_str(), "");
}

fn log(phase: RecoveryPhase, stalled: Stalled, eligibility: &'static str, recovery_result: &'static str) {
    tracing::info!(
        phase = phase.as_str(),
        execution_path = stalled.path.as_str(),
        provider_health = stalled.health.as_str(),
        commit_state = stalled.commit.as_str(),
        eligibility,
        recovery_result,
        "edge_liveness_recovery_observation"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALLED: Stalled = Stalled {
        path: ExecutionPath::ProviderTunnel,
        health: ProviderHealth::Unknown,
        commit: CommitState::TransportUncommitted,
    };

    fn rows(metrics: &Metrics) -> Vec<(&'static str, u64)> {
        let results = RecoveryResult::ALL.iter().map(|r| {
            let n = metrics
                .recovery_results
                .at((STALLED.path, STALLED.health, *r))
                .get();
            (r.as_str(), n)
        });
        results.filter(|(_, n)| *n > 0).collect()
    }

    #[test]
    fn a_cycle_has_one_result_and_only_if_it_was_eligible() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let mut cycle = Cycle::new(metrics.clone());
        cycle.decided(STALLED, Eligibility::NoCandidate);
        cycle.resolved(RecoveryResult::Redispatched);
        assert_eq!(rows(&metrics), []);
        cycle.decided(STALLED, Eligibility::Eligible);
        cycle.resolved(RecoveryResult::Redispatched);
        cycle.resolved(RecoveryResult::NotSelected);
        assert_eq!(rows(&metrics), [("redispatched", 1)]);
        cycle.decided(STALLED, Eligibility::Eligible);
        drop(cycle);
        assert_eq!(rows(&metrics), [("redispatched", 1), ("terminal", 1)]);
    }
}
