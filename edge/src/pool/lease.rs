//! A place at a provider: immutable, released exactly once, by dropping it (G31).

use std::sync::Arc;
use std::time::Duration;

use iop_shared::ids::{ConnectionGeneration, ProviderId, ProviderKey};
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
}

impl Lease {
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
