//! What belongs to one session with an edge: the health sequence, its own share of the load, and its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::watch;

use crate::providers::registry::Busy;

/// One session: a link, or the edge in the same process.
pub(crate) struct Scope {
    /// 004 `health_observation_seq`: connection-scoped, the first observation is 1.
    observations: AtomicU64,
    pub(crate) busy: Arc<Busy>,
    edge_draining: watch::Sender<bool>,
    closing: watch::Sender<bool>,
}

impl Scope {
    pub(crate) fn new() -> Self {
        Self {
            observations: AtomicU64::new(0),
            busy: Arc::new(Busy::default()),
            edge_draining: watch::Sender::new(false),
            closing: watch::Sender::new(false),
        }
    }

    /// The number of the observation that is now final; unique and increasing.
    pub(crate) fn next_observation(&self) -> u64 {
        self.observations.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The edge sends nothing new.
    pub(crate) fn edge_drains(&self) {
        self.edge_draining.send_replace(true);
    }

    /// Resolves when the edge drains and none of its requests is under way any more.
    pub(crate) async fn edge_is_done(&self) {
        let mut draining = self.edge_draining.subscribe();
        if draining.wait_for(|d| *d).await.is_ok() {
            self.busy.idle().await;
        }
    }

    /// Ends the session stream, so that the link can end too.
    pub(crate) fn close(&self) {
        self.closing.send_replace(true);
    }

    pub(crate) fn closing(&self) -> watch::Receiver<bool> {
        self.closing.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn observations_are_unique_increasing_and_begin_at_one() {
        let scope = Scope::new();
        let mut all: Vec<u64> = std::thread::scope(|s| {
            let each: Vec<_> = (0..4)
                .map(|_| s.spawn(|| (0..250).map(|_| scope.next_observation()).collect::<Vec<_>>()))
                .collect();
            each.into_iter().flat_map(|t| t.join().unwrap()).collect()
        });
        all.sort_unstable();
        assert_eq!(all, (1..=1000).collect::<Vec<_>>());
    }
}
