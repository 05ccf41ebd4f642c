//! What every request sees of the process.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use iop_shared::ids::ProviderKey;

use crate::config::Settings;
use crate::drain::Drain;
use crate::http::auth::Keys;
use crate::http::payload::BodyMemory;
use crate::metrics::Metrics;
use crate::pool::{Lease, Pool};
use crate::runs::Runs;

/// Response ids remembered (gateway.md §13, Provider-side response state).
const RESPONSES_KEPT: u64 = 100_000;
const RESPONSES_TTL: Duration = Duration::from_secs(24 * 3600);

/// One edge process.
pub struct App {
    pub settings: Settings,
    pub metrics: Arc<Metrics>,
    pub pool: Arc<Pool>,
    pub keys: Keys,
    pub drain: Drain,
    pub body_memory: BodyMemory,
    /// Response id → where its state lives, until the edge stores responses itself.
    responses: moka::sync::Cache<Box<str>, ResponseHome>,
    runs: OnceLock<Arc<Runs>>,
}

/// Where a response's state lives, and the public model it was made under.
#[derive(Clone)]
pub(crate) struct ResponseHome {
    pub(crate) provider: ProviderKey,
    pub(crate) target: Arc<str>,
    pub(crate) model: Arc<str>,
}

impl App {
    pub fn new(
        settings: Settings,
        metrics: Arc<Metrics>,
        pool: Arc<Pool>,
        keys: Keys,
        drain: Drain,
    ) -> Arc<Self> {
        let body_memory = BodyMemory::new(settings.server.body_memory, metrics.body_memory_bytes.clone());
        let responses = moka::sync::Cache::builder()
            .max_capacity(RESPONSES_KEPT)
            .time_to_live(RESPONSES_TTL)
            .build();
        Arc::new(Self {
            settings,
            metrics,
            pool,
            keys,
            drain,
            body_memory,
            responses,
            runs: OnceLock::new(),
        })
    }

    /// Gives the process its runs. Once; later ones are dropped.
    pub fn host(&self, runs: Arc<Runs>) {
        let _ = self.runs.set(runs);
    }

    /// `None`: this edge was not given a store for runs.
    pub(crate) fn runs(&self) -> Option<&Arc<Runs>> {
        self.runs.get()
    }

    pub(crate) fn remember_response(&self, id: &str, lease: &Lease) {
        let home = ResponseHome {
            provider: lease.provider().clone(),
            target: lease.target().clone(),
            model: lease.model().clone(),
        };
        self.responses.insert(id.into(), home);
    }

    /// `None`: made elsewhere, or too long ago.
    pub(crate) fn response_home(&self, id: &str) -> Option<ResponseHome> {
        self.responses.get(id)
    }
}
