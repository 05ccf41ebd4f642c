//! A place at a provider: immutable, released exactly once, by dropping it (G31).

use std::sync::Arc;
use std::time::Duration;

use iop_shared::execution::{
    AttemptFence, AttemptResult, Endpoint, EvidenceSource, ExecutionPath, ProviderHealth,
};
use iop_shared::ids::{AttemptId, ConnectionGeneration, ProviderId, ProviderKey, RunId};
use iop_shared::wire::terminal::StallFailure;
use prometheus::IntGauge;
use tokio::time::Instant;

use super::ejection::{Pass, Told};
use super::grant::Place;
use super::overlay::Reading;
use super::route::Model;
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
    place: Place,
    model: Arc<Model>,
    endpoint: Endpoint,
    stall_timeout: Duration,
    first_content_timeout: Option<Duration>,
    end: End,
}

/// With which words the place is given back.
enum End {
    Released(Option<Told>),
    /// The node had no room, or is gone.
    Refused,
}

impl Lease {
    pub(super) fn new(
        pool: Arc<Pool>,
        home: Arc<Home>,
        place: Place,
        model: &Arc<Model>,
        endpoint: Endpoint,
    ) -> Self {
        let (stall_timeout, first_content_timeout) = model
            .liveness
            .effective(home.stall_timeout_ms, home.first_content_timeout_ms);
        home.gauge.inc();
        Self {
            pool,
            home,
            place,
            model: model.clone(),
            endpoint,
            stall_timeout,
            first_content_timeout,
            end: End::Released(None),
        }
    }

    pub fn session(&self) -> &Arc<Session> {
        &self.home.session
    }

    pub fn generation(&self) -> ConnectionGeneration {
        self.place.generation
    }

    pub fn provider(&self) -> &ProviderKey {
        &self.place.provider
    }

    pub fn provider_id(&self) -> &ProviderId {
        &self.home.provider_id
    }

    pub fn adapter(&self) -> &Arc<str> {
        &self.home.adapter
    }

    /// The name the provider knows.
    pub fn target(&self) -> &Arc<str> {
        &self.place.target
    }

    /// The public name that was asked for.
    pub fn model(&self) -> &Arc<str> {
        &self.model.name
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
        if self.home.normalized.contains(&self.place.target) {
            ExecutionPath::Normalized
        } else {
            ExecutionPath::ProviderTunnel
        }
    }
}

/// What of a stall's terminal was proven (004). Where the handoff is not confirmed, nothing was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StallObservation {
    /// 004 `recovery_handoff=confirmed`: the terminal is this lease's own.
    pub handoff: bool,
    pub fence: AttemptFence,
    pub health: ProviderHealth,
}

impl Lease {
    /// How the attempt ended, and how long its provider wants to be left alone; the first word counts, and the pool hears
    /// of it at release (G36). A cut after content is not told, for it says nothing that an ejection would help.
    pub fn tell(&mut self, result: AttemptResult, retry_after: Option<Duration>) {
        if result == AttemptResult::NodeLost {
            // Whatever the pool still knows of its session, nobody is sent there before there is news.
            self.end = End::Refused;
        }
        if let End::Released(told) = &mut self.end {
            told.get_or_insert_with(|| Told::of(result, retry_after, || Instant::now().into_std()));
        }
    }

    /// The answer has begun: a half-open trial is decided by that, not by how long the answer takes (G36).
    pub fn proven(&self) {
        if matches!(self.place.pass, Pass::Trial(..)) {
            self.pool.prove(&self.place);
        }
    }

    /// Takes a stall's terminal: validates it against this lease and gives it to the overlay (G35), which counts it once.
    /// The place is released with the lease, whatever came of it.
    pub fn observe_stall(
        &self,
        run_id: RunId,
        attempt_id: AttemptId,
        failure: Option<&StallFailure>,
    ) -> StallObservation {
        let bound = failure.is_none_or(|f| {
            RunId::parse(&f.run_id) == Some(run_id)
                && AttemptId::parse(&f.attempt_id) == Some(attempt_id)
                && *f.adapter == *self.home.adapter
                && *f.target == *self.place.target
        });
        let reading = failure.and_then(Reading::of_stall);
        let Place {
            generation,
            provider,
            target,
            ..
        } = &self.place;
        self.pool.observe(
            *generation,
            provider,
            (EvidenceSource::Stall, target),
            bound,
            reading,
        );
        // 004: an execution path without a number is bound to no session.
        match reading.filter(|r| bound && r.sequence.is_some()) {
            Some(proven) => StallObservation {
                handoff: true,
                fence: proven.fence,
                health: proven.health,
            },
            None => StallObservation {
                handoff: false,
                fence: AttemptFence::Unknown,
                health: ProviderHealth::Unknown,
            },
        }
    }

    /// The node refused for want of room: the place is given back, and nobody is sent there for a moment.
    pub fn refused(mut self) {
        self.end = End::Refused;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.home.gauge.dec();
        match self.end {
            End::Refused => self.pool.refused(&self.place, self.endpoint),
            End::Released(told) => {
                let told = told.unwrap_or_default();
                self.pool.release(&self.place, told, self.endpoint, &self.model);
            }
        }
    }
}
