//! A clock that moves when a test says so.

use std::time::Duration;

use parking_lot::Mutex;

use crate::time::{Clock, Timestamp};

/// Both clocks of a host, by hand. They stand still between two calls.
#[derive(Debug)]
pub struct ManualClock {
    now: Mutex<(Timestamp, Duration)>,
}

impl ManualClock {
    /// Wall time 2024-01-01T00:00:00Z, monotonic time one hour.
    pub fn new() -> Self {
        let wall = Timestamp::from_millis(1_704_067_200_000).unwrap_or(Timestamp::MIN);
        Self {
            now: Mutex::new((wall, Duration::from_hours(1))),
        }
    }

    /// Time passes: both clocks move on.
    pub fn advance(&self, span: Duration) {
        let mut now = self.now.lock();
        now.0 = now.0.plus(span);
        now.1 += span;
    }

    /// The wall clock alone steps by this many milliseconds, back when negative. It stops at the ends of what can be stored.
    pub fn step_wall(&self, ms: i64) {
        let mut now = self.now.lock();
        let ms = now.0.as_millis().saturating_add(ms);
        now.0 = Timestamp::from_millis(ms).unwrap_or(if ms < 0 { Timestamp::MIN } else { Timestamp::MAX });
    }

    /// The monotonic clock alone moves on.
    pub fn advance_monotonic(&self, span: Duration) {
        self.now.lock().1 += span;
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for ManualClock {
    fn wall(&self) -> Timestamp {
        self.now.lock().0
    }

    fn monotonic(&self) -> Duration {
        self.now.lock().1
    }
}
