//! The store's two clocks.

use std::sync::Arc;
use std::time::Duration;

use crate::time::{Clock, Timestamp};

/// Wall time for due work; for leases the wall time at opening plus the monotonic time since: it never steps, so a host clock
/// that does neither ends a lease nor makes one longer.
#[derive(Clone)]
pub(super) struct Clocks {
    clock: Arc<dyn Clock>,
    anchor: Timestamp,
    opened: Duration,
}

impl Clocks {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            anchor: clock.wall(),
            opened: clock.monotonic(),
            clock,
        }
    }

    pub(super) fn wall(&self) -> Timestamp {
        self.clock.wall()
    }

    /// What `run_leases.expires_at` is compared with: a lease is live before it.
    pub(super) fn lease(&self) -> Timestamp {
        self.anchor
            .plus(self.clock.monotonic().saturating_sub(self.opened))
    }

    /// When a lease given out at this moment ends: whole milliseconds, at least one.
    pub(super) fn expiry(&self, ttl: Duration) -> Timestamp {
        self.lease().plus(ttl.max(Duration::from_millis(1)))
    }
}

impl std::fmt::Debug for Clocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Clocks").finish_non_exhaustive()
    }
}
