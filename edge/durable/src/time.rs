//! Time as the store tells it. Deadlines are absolute; the store's clock decides about leases and due work (D129), and a
//! worker derives its own view from the store's last answer and its own monotonic clock, so a skewed host changes nothing.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Milliseconds since 1970-01-01 UTC. Never 0 or negative, never after the year 9999 (D261).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub struct Timestamp(i64);

/// Not an instant that can be stored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a time is in milliseconds after 1970-01-01 and before 10000-01-01 UTC")]
pub struct InvalidTime;

impl Timestamp {
    /// 9999-12-31T23:59:59.999Z.
    pub const MAX: Self = Self(253_402_300_799_999);
    /// The first one: before every other.
    pub const MIN: Self = Self(1);

    /// # Errors
    /// `InvalidTime` outside the years 1970 to 9999.
    pub fn from_millis(ms: i64) -> Result<Self, InvalidTime> {
        if (Self::MIN.0..=Self::MAX.0).contains(&ms) {
            Ok(Self(ms))
        } else {
            Err(InvalidTime)
        }
    }

    pub fn as_millis(self) -> i64 {
        self.0
    }

    /// Rounded up to a whole millisecond; stops at `MAX`.
    #[must_use]
    pub fn plus(self, span: Duration) -> Self {
        let ms = i64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(ms).min(Self::MAX.0))
    }

    /// Time from `earlier` to here; zero when it is not earlier.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0 - earlier.0).unwrap_or(0))
    }
}

/// RFC 3339, UTC, to the millisecond.
impl std::fmt::Display for Timestamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Every timestamp is within the years that jiff knows.
        let at = jiff::Timestamp::from_millisecond(self.as_millis()).unwrap_or_default();
        write!(f, "{at:.3}")
    }
}

impl TryFrom<i64> for Timestamp {
    type Error = InvalidTime;
    fn try_from(ms: i64) -> Result<Self, InvalidTime> {
        Self::from_millis(ms)
    }
}

impl From<Timestamp> for i64 {
    fn from(time: Timestamp) -> i64 {
        time.0
    }
}

/// The host's clocks, for the stores that have none of their own (memory, SQLite). Tests bring their own.
pub trait Clock: Send + Sync + 'static {
    /// Wall time: due work and deadlines.
    fn wall(&self) -> Timestamp;
    /// Time since some fixed point that never steps: leases.
    fn monotonic(&self) -> Duration;
}

/// The operating system's clocks.
#[derive(Debug)]
pub struct HostClock {
    start: std::time::Instant,
}

impl HostClock {
    pub fn new() -> Self {
        Self {
            start: std::time::Instant::now(),
        }
    }
}

impl Default for HostClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for HostClock {
    fn wall(&self) -> Timestamp {
        let ms = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX));
        Timestamp(ms.clamp(Timestamp::MIN.0, Timestamp::MAX.0))
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_round_up_and_stop_at_the_last_year() {
        let t = Timestamp::from_millis(1_000).unwrap();
        assert_eq!(t.plus(Duration::from_nanos(1)).as_millis(), 1_001);
        assert_eq!(t.plus(Duration::MAX), Timestamp::MAX);
        assert_eq!(t.since(t.plus(Duration::from_secs(1))), Duration::ZERO);
        assert!(Timestamp::from_millis(0).is_err());
        assert!(Timestamp::from_millis(Timestamp::MAX.as_millis() + 1).is_err());
    }
}
