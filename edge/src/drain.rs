//! Whether the process is leaving: set once, seen by every room (G45).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::CancellationToken;

/// A cheap handle.
#[derive(Debug, Clone, Default)]
pub struct Drain {
    /// Asked by every request; the token's own answer takes a lock.
    begun: Arc<AtomicBool>,
    token: CancellationToken,
}

impl Drain {
    /// New work is refused from now on.
    pub fn start(&self) {
        self.begun.store(true, Ordering::Release);
        self.token.cancel();
    }

    pub fn is_draining(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    /// Resolves once the drain has started.
    pub async fn started(&self) {
        self.token.cancelled().await;
    }
}
