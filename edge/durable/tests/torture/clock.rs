//! The store's clock in tests with paused time: tokio's time, so that leases, timers and workers agree, plus what a test lets
//! pass for the store alone.

use std::time::Duration;

use iop_durable::time::{Clock, Timestamp};
use parking_lot::Mutex;
use tokio::time::Instant;

/// Wall and monotonic time of a store, from tokio's clock.
#[derive(Debug)]
pub struct PausedClock {
    start: Instant,
    ahead: Mutex<Duration>,
}

impl PausedClock {
    /// 2024-01-01T00:00:00Z at this moment of tokio's clock.
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
            ahead: Mutex::new(Duration::ZERO),
        }
    }

    /// Time passes for the store and for nobody else: leases run out under workers that believe in them.
    pub fn jump(&self, span: Duration) {
        *self.ahead.lock() += span;
    }

    fn elapsed(&self) -> Duration {
        self.start.elapsed() + *self.ahead.lock()
    }
}

impl Clock for PausedClock {
    fn wall(&self) -> Timestamp {
        Timestamp::from_millis(1_704_067_200_000)
            .unwrap()
            .plus(self.elapsed())
    }

    fn monotonic(&self) -> Duration {
        self.elapsed()
    }
}
