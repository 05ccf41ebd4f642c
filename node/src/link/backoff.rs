//! How soon an edge is dialed again, and how often its refusal is logged.
//!
//! G42: back within 5 s once the path is. The longest wait (1.5 s with jitter) and one attempt that began before the
//! path was back (3 s) stay below that together.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

use crate::metrics::DialResult;

/// One attempt: resolve, connect, TLS, upgrade. An edge may take 2 s of it to ping an older session (link.md).
pub(crate) const ATTEMPT: Duration = Duration::from_secs(3);

const FIRST: Duration = Duration::from_millis(100);
/// Jitter may double it.
const LONGEST: Duration = Duration::from_millis(750);
/// A link that lived this long was a good one: the next dial begins anew.
const GOOD: Duration = Duration::from_secs(2);
/// The same refusal is logged once in this time.
const QUIET: Duration = Duration::from_secs(60);

fn delays() -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(FIRST)
        .with_max_delay(LONGEST)
        .with_factor(2.0)
        .with_jitter()
        .without_max_times()
        .build()
}

/// The waits between dials of one edge.
#[derive(Debug)]
pub(crate) struct Redial {
    delays: ExponentialBackoff,
}

impl Redial {
    pub(crate) fn new() -> Self {
        Self { delays: delays() }
    }

    pub(crate) fn lived(&mut self, time: Duration) {
        if time >= GOOD {
            self.delays = delays();
        }
    }

    pub(crate) fn next(&mut self) -> Duration {
        self.delays.next().unwrap_or(LONGEST)
    }
}

/// Says whether a failed dial is news.
#[derive(Debug, Default)]
pub(crate) struct Limiter {
    last: Option<(DialResult, Instant)>,
}

impl Limiter {
    pub(crate) fn is_news(&mut self, result: DialResult, now: Instant) -> bool {
        let old = self
            .last
            .is_some_and(|(r, at)| r == result && now.saturating_duration_since(at) < QUIET);
        if !old {
            self.last = Some((result, now));
        }
        !old
    }

    pub(crate) fn reset(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_is_back_within_five_seconds_at_the_worst_moment() {
        let mut redial = Redial::new();
        let waits: Vec<_> = (0..50).map(|_| redial.next()).collect();
        assert!(waits[0] < 2 * FIRST);
        let longest = waits.iter().max().unwrap();
        assert!(*longest + ATTEMPT < Duration::from_secs(5), "{longest:?}");
        assert!(waits.iter().skip(5).any(|w| *w != waits[5]), "no jitter");
    }

    #[test]
    fn only_a_link_that_lived_begins_the_waits_anew() {
        let mut redial = Redial::new();
        for _ in 0..9 {
            redial.next();
        }
        redial.lived(Duration::from_millis(5));
        assert!(redial.next() >= LONGEST);
        redial.lived(GOOD);
        assert!(redial.next() < 2 * FIRST);
    }

    #[test]
    fn the_same_refusal_is_news_once_a_minute() {
        let start = Instant::now();
        let mut l = Limiter::default();
        assert!(l.is_news(DialResult::Unauthorized, start));
        assert!(!l.is_news(DialResult::Unauthorized, start + Duration::from_secs(59)));
        assert!(l.is_news(DialResult::Unauthorized, start + Duration::from_secs(60)));
        assert!(l.is_news(DialResult::Unreachable, start + Duration::from_secs(61)));
        l.reset();
        assert!(l.is_news(DialResult::Unreachable, start + Duration::from_secs(62)));
    }
}
