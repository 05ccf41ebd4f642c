//! Whether the process is leaving: set once, seen by every room (G45).

use tokio_util::sync::CancellationToken;

/// A cheap handle.
#[derive(Debug, Clone, Default)]
pub struct Drain(CancellationToken);

impl Drain {
    /// New work is refused from now on.
    pub fn start(&self) {
        self.0.cancel();
    }

    pub fn is_draining(&self) -> bool {
        self.0.is_cancelled()
    }

    /// Resolves once the drain has started.
    pub async fn started(&self) {
        self.0.cancelled().await;
    }
}
