//! Passive ejection of a provider's target, and its cool-down (G36). Pure: time comes in as a value.
//!
//! Failures in a row eject for a time that doubles; then one leased trial decides. A cool-down is what the provider asked
//! for itself and ejects nobody. Both look at how attempts ended, never at health.

use std::time::{Duration, Instant};

use iop_shared::execution::AttemptResult;

use crate::config::EjectionSettings;

/// The longest cool-down a provider can ask for (gateway.md §13).
const LONGEST_COOL_DOWN: Duration = Duration::from_secs(120);

/// A trial that has said nothing for so long decides nothing: the next request is another.
const TRIAL: Duration = Duration::from_secs(10);

/// What an attempt's end says of its target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Word {
    /// Nothing: the client's fault, nobody's, or the business of the overlay.
    #[default]
    Nothing,
    Success,
    Failure {
        at: Instant,
    },
}

/// What is told with a place that is given back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) word: Word,
    /// The provider wants to be left alone until then.
    pub(super) cool_until: Option<Instant>,
}

impl Told {
    /// G36 counts connect errors, 5xx and 429; `now` is asked where it matters.
    pub(super) fn of(
        result: AttemptResult,
        retry_after: Option<Duration>,
        now: impl Fn() -> Instant,
    ) -> Self {
        let word = match result {
            AttemptResult::Success => Word::Success,
            AttemptResult::ConnectError | AttemptResult::Http5xx | AttemptResult::RateLimited => {
                Word::Failure { at: now() }
            }
            AttemptResult::Http4xx
            | AttemptResult::Cut
            | AttemptResult::ResponseStalled
            | AttemptResult::FirstContentTimeout
            | AttemptResult::NodeLost
            | AttemptResult::Capacity
            | AttemptResult::Cancelled => Word::Nothing,
        };
        Self {
            word,
            cool_until: retry_after.map(|after| now() + after.min(LONGEST_COOL_DOWN)),
        }
    }
}

/// Whether a target may be given requests. In order of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Standing {
    /// Like any other; after an ejection its next request is the trial.
    Open,
    /// Only where nobody else is left.
    Ejected,
    /// Only where nobody else is left: it said so itself.
    Cooling,
}

/// As what a place was given. The number names the ejection it was given under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Plain,
    /// The one trial after an ejection, which counts until then.
    Trial(u32, Instant),
    /// Although ejected, for nobody else was left.
    Despite(u32),
}

/// The record of one target.
#[derive(Debug, Clone, Default)]
pub(super) struct Ejection {
    /// Failures since the last success.
    failures: u32,
    /// Ejections since the last success.
    row: u32,
    /// The end of the ejection that is not decided yet; it may be over.
    until: Option<Instant>,
    /// Counts ejections, so that a word about an older one is known as such.
    number: u32,
    /// The trial is out, and counts until then.
    trial: Option<Instant>,
    cool_until: Option<Instant>,
}

impl Ejection {
    pub(super) fn standing(&self, now: Instant) -> Standing {
        match (self.cool_until, self.until) {
            (_, Some(end)) if end > now || self.on_trial(now) => Standing::Ejected,
            (Some(end), _) if end > now => Standing::Cooling,
            _ => Standing::Open,
        }
    }

    fn on_trial(&self, now: Instant) -> bool {
        self.trial.is_some_and(|until| until > now)
    }

    /// A place is given.
    pub(super) fn admit(&mut self, now: Instant) -> Pass {
        match self.until {
            None => Pass::Plain,
            Some(end) if end > now || self.on_trial(now) => Pass::Despite(self.number),
            Some(_) => {
                let until = now + TRIAL;
                self.trial = Some(until);
                Pass::Trial(self.number, until)
            }
        }
    }

    /// The trial's answer has begun: that is its success, however long the answer takes.
    pub(super) fn prove(&mut self, pass: Pass) {
        if self.until.is_some() && matches!(pass, Pass::Trial(number, _) if number == self.number) {
            (self.failures, self.row, self.until, self.trial) = (0, 0, None, None);
        }
    }

    /// A place comes back. `others`: whether another candidate of the model is eligible; the last one is not ejected.
    /// Gives the time at which who waits should be looked at again.
    pub(super) fn settle(
        &mut self,
        pass: Pass,
        told: Told,
        rules: &EjectionSettings,
        others: bool,
    ) -> Option<Instant> {
        let current = |number| self.until.is_some() && number == self.number;
        let (trial, despite) = match pass {
            Pass::Plain => (false, false),
            Pass::Trial(number, _) => (current(number), false),
            Pass::Despite(number) => (false, current(number)),
        };
        // Another trial may have begun while this one hung.
        if matches!(pass, Pass::Trial(_, until) if trial && self.trial == Some(until)) {
            self.trial = None;
        }
        let mut wake = None;
        if told.cool_until > self.cool_until {
            self.cool_until = told.cool_until;
            wake = told.cool_until;
        }
        match told.word {
            Word::Nothing => {}
            Word::Success => {
                // What began before the ejection says nothing about the time after it.
                if self.until.is_none() || trial || despite {
                    (self.failures, self.row, self.until, self.trial) = (0, 0, None, None);
                }
            }
            Word::Failure { at } => {
                if self.until.is_none() || trial {
                    self.failures = self.failures.saturating_add(1);
                    self.until = None;
                    if self.failures >= rules.consecutive && others {
                        let end = at + back_off(rules, self.row);
                        self.until = Some(end);
                        self.trial = None;
                        self.row = self.row.saturating_add(1);
                        self.number = self.number.wrapping_add(1);
                        wake = wake.max(Some(end));
                    }
                }
            }
        }
        wake
    }

    /// The end of an ejection that lasts.
    pub(super) fn ejected_until(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|end| *end > now)
    }
}

/// `base`, doubled with each ejection in a row, at most `max`.
fn back_off(rules: &EjectionSettings, row: u32) -> Duration {
    let factor = 1_u32.checked_shl(row).unwrap_or(u32::MAX);
    rules.base.saturating_mul(factor).min(rules.max)
}

#[cfg(test)]
mod tests;
