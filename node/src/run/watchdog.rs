//! Has the provider gone silent? One attempt's watchdog (004, G50). Pure.
//!
//! Time counts only while the attempt waits for the provider: it was asked for output and had none. While the node waits
//! for the edge nobody asks, so back-pressure is never a stall (link.md, rule 2). It decides no retry.

use std::time::{Duration, Instant};

use iop_shared::execution::Disposition;

/// A verdict that comes later than this after its deadline says that the process itself was away (stopped, suspended,
/// starved): the provider's bytes may lie unread, so the wait starts anew.
const AWAY: Duration = Duration::from_secs(1);

/// The provider made no progress for the stall timeout. There is one per attempt at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StallClaim {
    /// Time spent waiting for the provider since its last progress.
    pub(crate) idle: Duration,
}

/// What a wait amounts to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// No stall before this moment; ask again then.
    Until(Instant),
    Stalled(StallClaim),
    /// Nothing is watched: the provider is done, the stall was claimed, or the deadline lies beyond the clock.
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nobody waits for the provider.
    Paused,
    Waiting {
        since: Instant,
    },
    Off,
}

/// The watchdog of one attempt, from its admission on.
#[derive(Debug)]
pub(crate) struct Watchdog {
    timeout: Duration,
    /// Waited since the last progress, in waits that are over.
    waited: Duration,
    state: State,
}

impl Watchdog {
    pub(crate) const fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            waited: Duration::ZERO,
            state: State::Paused,
        }
    }

    /// The attempt was asked for output and the provider has none. Deadlines never move towards the past.
    pub(crate) fn waiting(&mut self, now: Instant) -> Verdict {
        let since = match self.state {
            State::Off => return Verdict::Off,
            State::Paused => now,
            State::Waiting { since } => since,
        };
        let idle = self.idle(since, now);
        let (from, left) = match idle.checked_sub(self.timeout) {
            None => (since, self.timeout.saturating_sub(self.waited)),
            Some(late) if late > AWAY => {
                self.waited = Duration::ZERO;
                (now, self.timeout)
            }
            Some(_) => {
                self.state = State::Off;
                return Verdict::Stalled(StallClaim { idle });
            }
        };
        self.state = State::Waiting { since: from };
        from.checked_add(left).map_or(Verdict::Off, Verdict::Until)
    }

    fn idle(&self, since: Instant, now: Instant) -> Duration {
        self.waited.saturating_add(now.saturating_duration_since(since))
    }

    /// The provider said something. The clock is asked only where the time matters, which is not in a run of progress.
    pub(crate) fn heard(&mut self, disposition: Disposition, now: impl FnOnce() -> Instant) {
        match (self.state, disposition) {
            (State::Off, _) => {}
            (State::Paused | State::Waiting { .. }, Disposition::Terminal) => self.state = State::Off,
            (State::Paused | State::Waiting { .. }, Disposition::Progress) => {
                self.waited = Duration::ZERO;
                self.state = State::Paused;
            }
            (State::Paused, Disposition::Start | Disposition::None) => {}
            (State::Waiting { since }, Disposition::Start | Disposition::None) => {
                // It goes to the edge, so the wait is over; what was waited stays.
                self.waited = self.idle(since, now());
                self.state = State::Paused;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIMEOUT_MS: u64 = 5;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Event {
        Wait,
        Heard(Disposition),
    }

    const EVENTS: [Event; 5] = [
        Event::Wait,
        Event::Heard(Disposition::Start),
        Event::Heard(Disposition::Progress),
        Event::Heard(Disposition::Terminal),
        Event::Heard(Disposition::None),
    ];

    /// The same rules, one millisecond after the other.
    #[derive(Debug)]
    struct Naive {
        timeout: u64,
        now: u64,
        idle: u64,
        asked: bool,
        off: bool,
    }

    #[derive(Debug, PartialEq, Eq)]
    enum Said {
        Until(u64),
        Stalled(u64),
        Off,
    }

    impl Naive {
        fn pass(&mut self, ms: u64) {
            for _ in 0..ms {
                self.now += 1;
                self.idle += u64::from(self.asked);
            }
        }

        fn apply(&mut self, event: Event) -> Said {
            if self.off {
                return Said::Off;
            }
            match event {
                Event::Wait => {
                    self.asked = true;
                    if self.idle < self.timeout {
                        return Said::Until(self.now + self.timeout - self.idle);
                    }
                    if self.idle > self.timeout + 1000 {
                        self.idle = 0;
                        return Said::Until(self.now + self.timeout);
                    }
                    self.off = true;
                    Said::Stalled(self.idle)
                }
                Event::Heard(d) => {
                    self.asked = false;
                    if d == Disposition::Progress {
                        self.idle = 0;
                    }
                    self.off = d == Disposition::Terminal;
                    Said::Off
                }
            }
        }
    }

    /// Plays events, each that many milliseconds after the one before, and compares every verdict. Gives the claims.
    fn agree(timeout: u64, events: &[(u64, Event)]) -> usize {
        let start = Instant::now();
        let ms = |now: Instant| u64::try_from((now - start).as_millis()).unwrap();
        let mut dog = Watchdog::new(Duration::from_millis(timeout));
        let mut naive = Naive {
            timeout,
            now: 0,
            idle: 0,
            asked: false,
            off: false,
        };
        let (mut now, mut claims, mut last) = (start, 0, start);
        for (wait, event) in events {
            now += Duration::from_millis(*wait);
            naive.pass(*wait);
            let want = naive.apply(*event);
            let got = match *event {
                Event::Wait => match dog.waiting(now) {
                    Verdict::Until(at) => {
                        assert!(at > now && at >= last, "{events:?}");
                        last = at;
                        Said::Until(ms(at))
                    }
                    Verdict::Stalled(claim) => {
                        claims += 1;
                        Said::Stalled(claim.idle.as_millis() as u64)
                    }
                    Verdict::Off => Said::Off,
                },
                Event::Heard(d) => {
                    dog.heard(d, || now);
                    Said::Off
                }
            };
            assert_eq!(got, want, "{events:?}");
        }
        assert!(claims <= 1, "{events:?}");
        claims
    }

    #[test]
    fn every_short_history_agrees_with_the_naive_one() {
        let mut claims = 0;
        let steps: Vec<(u64, Event)> = [0, 2, 5, 1006]
            .into_iter()
            .flat_map(|ms| EVENTS.into_iter().map(move |e| (ms, e)))
            .collect();
        let n = steps.len();
        for code in 0..n.pow(4) {
            let history: Vec<_> = (0..4).map(|i| steps[code / n.pow(i) % n]).collect();
            claims += agree(TIMEOUT_MS, &history);
        }
        assert!(claims > 1000, "{claims}");
    }

    #[test]
    fn the_claim_comes_at_the_deadline_once_and_tells_the_idle_time() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let mut dog = Watchdog::new(Duration::from_secs(10));
        assert_eq!(dog.waiting(at(0)), Verdict::Until(at(10)));
        assert_eq!(dog.waiting(at(9)), Verdict::Until(at(10)));
        let idle = Duration::from_secs(10);
        assert_eq!(dog.waiting(at(10)), Verdict::Stalled(StallClaim { idle }));
        assert_eq!(dog.waiting(at(11)), Verdict::Off);
        dog.heard(Disposition::Progress, || at(12));
        assert_eq!(dog.waiting(at(12)), Verdict::Off);
    }

    #[test]
    fn time_that_the_edge_takes_does_not_count_and_an_empty_frame_changes_nothing() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let mut dog = Watchdog::new(Duration::from_secs(10));
        assert_eq!(dog.waiting(at(0)), Verdict::Until(at(10)));
        dog.heard(Disposition::None, || at(6));
        // Ninety-four seconds with the edge.
        assert_eq!(dog.waiting(at(100)), Verdict::Until(at(104)));
        let idle = Duration::from_secs(10);
        assert_eq!(dog.waiting(at(104)), Verdict::Stalled(StallClaim { idle }));
    }

    #[test]
    fn a_process_that_was_away_waits_anew() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut dog = Watchdog::new(Duration::from_secs(10));
        assert_eq!(dog.waiting(at(0)), Verdict::Until(at(10_000)));
        assert_eq!(dog.waiting(at(11_001)), Verdict::Until(at(21_001)));
        let idle = Duration::from_secs(11);
        assert_eq!(dog.waiting(at(22_001)), Verdict::Stalled(StallClaim { idle }));
    }

    #[test]
    fn a_run_of_progress_never_asks_the_clock_and_a_far_deadline_is_none() {
        let now = Instant::now();
        let mut dog = Watchdog::new(Duration::MAX);
        for d in [Disposition::Progress, Disposition::None, Disposition::Start] {
            dog.heard(d, || panic!("asked for the time"));
        }
        assert_eq!(dog.waiting(now), Verdict::Off);
        dog.heard(Disposition::Progress, || panic!("asked for the time"));
    }

    proptest! {
        #[test]
        fn long_histories_agree_with_the_naive_one(
            timeout in 1u64..50,
            events in proptest::collection::vec(
                (
                    prop_oneof![8 => 0u64..20, 1 => 990u64..1100],
                    // Waits and empty frames most of the time, so that histories live long.
                    prop_oneof![6 => Just(0usize), 3 => Just(4), 1 => 1usize..4],
                ),
                0..80,
            ),
        ) {
            let events: Vec<_> = events.into_iter().map(|(ms, e)| (ms, EVENTS[e])).collect();
            agree(timeout, &events);
        }
    }
}
