//! The machine against a naive model: a list of facts, from which everything is read anew.

use proptest::prelude::*;

use super::tests::{at, context, error, request, resolution};
use super::*;
use crate::ids::DecisionId;

#[derive(Debug, Clone)]
enum Op {
    /// A node asks; an admitted attempt starts.
    Call,
    Complete,
    Fail {
        retryable: bool,
        hint_ms: Option<u8>,
    },
    Abandon,
    LoseWorker,
    NextStepAttempt,
    Pass {
        ms: i8,
    },
    Probe {
        found: bool,
    },
    Decide(Said),
    /// The run's life ends and the next one begins.
    End,
}

#[derive(Debug, Clone, Copy)]
enum Said {
    Done,
    Failed { retryable: bool },
    Again,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => Just(Op::Call),
        1 => Just(Op::Complete),
        5 => (prop::bool::weighted(0.8), prop::option::weighted(0.3, 0..40_u8))
            .prop_map(|(retryable, hint_ms)| Op::Fail { retryable, hint_ms }),
        3 => Just(Op::Abandon),
        3 => Just(Op::LoseWorker),
        2 => Just(Op::NextStepAttempt),
        5 => (-3..40_i8).prop_map(|ms| Op::Pass { ms }),
        1 => prop::bool::weighted(0.3).prop_map(|found| Op::Probe { found }),
        1 => Just(Op::Decide(Said::Done)),
        1 => any::<bool>().prop_map(|retryable| Op::Decide(Said::Failed { retryable })),
        2 => Just(Op::Decide(Said::Again)),
        1 => Just(Op::End),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fact {
    Started {
        recovery: bool,
        step: u32,
    },
    Completed,
    /// Due at, if it were repeated by the policy.
    Failed {
        retryable: bool,
        due: i64,
    },
    Abandoned,
    Found,
    SaidDone,
    SaidFailed,
    SaidAgain {
        due: i64,
    },
    /// The run ended before the retry.
    ClosedRetry,
    /// The run ended over an attempt that was cut off.
    ClosedCut,
}

/// All that happened, in order.
struct Model {
    effect: Effect,
    max: Option<u32>,
    recovery_limit: u32,
    facts: Vec<Fact>,
}

impl Model {
    /// Of each attempt: whether it was a recovery, and the attempt of the step.
    fn started(&self) -> impl Iterator<Item = (bool, u32)> {
        self.facts.iter().filter_map(|fact| match fact {
            Fact::Started { recovery, step } => Some((*recovery, *step)),
            Fact::Completed
            | Fact::Failed { .. }
            | Fact::Abandoned
            | Fact::Found
            | Fact::SaidDone
            | Fact::SaidFailed
            | Fact::SaidAgain { .. }
            | Fact::ClosedRetry
            | Fact::ClosedCut => None,
        })
    }

    fn starts(&self, of: bool) -> u32 {
        self.started().filter(|(recovery, _)| *recovery == of).count() as u32
    }

    fn last_step(&self) -> u32 {
        self.started().last().map_or(0, |(_, step)| step)
    }

    fn under_way(&self) -> bool {
        matches!(self.facts.last(), Some(Fact::Started { .. }))
    }

    fn unknown(&self) -> bool {
        self.facts.last() == Some(&Fact::Abandoned)
    }

    fn done(&self) -> bool {
        matches!(
            self.facts.last(),
            Some(Fact::Completed | Fact::Found | Fact::SaidDone)
        )
    }

    fn at_or_after(due: i64, now: i64) -> Admission {
        if now < due {
            Admission::NotBefore(at(due))
        } else {
            Admission::Dispatch { recovery: false }
        }
    }

    fn admission(&self, step: u32, now: i64) -> Result<Admission, Refused> {
        let max = self.max.unwrap_or(1);
        Ok(match self.facts.last() {
            None => Admission::Dispatch { recovery: false },
            Some(Fact::Started { .. }) => return Err(Refused::InFlight),
            Some(Fact::Completed | Fact::Found | Fact::SaidDone) => Admission::Replay,
            Some(Fact::SaidFailed | Fact::Failed { retryable: false, .. }) => Admission::Failed,
            Some(Fact::Failed { retryable: true, due }) => {
                if self.starts(false) < max {
                    Self::at_or_after(*due, now)
                } else if max == 1 && step > self.last_step() {
                    Admission::Dispatch { recovery: false }
                } else {
                    Admission::Failed
                }
            }
            Some(Fact::SaidAgain { due }) => Self::at_or_after(*due, now),
            Some(Fact::ClosedRetry | Fact::ClosedCut) if step <= self.last_step() => Admission::Failed,
            Some(Fact::ClosedRetry) => Admission::Dispatch { recovery: false },
            Some(Fact::Abandoned) if self.effect == Effect::Unsafe => Admission::Unknown,
            Some(Fact::Abandoned | Fact::ClosedCut) => {
                let (used, limit) = (self.starts(true), self.recovery_limit);
                if used >= limit {
                    return Err(Refused::RecoveryExhausted { used, limit });
                }
                Admission::Dispatch { recovery: true }
            }
        })
    }

    /// What the end of the run makes of it.
    fn closed(&self) -> Option<Fact> {
        match self.facts.last()? {
            Fact::Started { .. } | Fact::Abandoned if self.effect == Effect::Unsafe => None,
            Fact::Started { .. } | Fact::Abandoned | Fact::SaidAgain { .. } => Some(Fact::ClosedCut),
            Fact::Failed { retryable, .. } => {
                let pending = *retryable && self.starts(false) < self.max.unwrap_or(1);
                pending.then_some(Fact::ClosedRetry)
            }
            Fact::Completed
            | Fact::Found
            | Fact::SaidDone
            | Fact::SaidFailed
            | Fact::ClosedRetry
            | Fact::ClosedCut => None,
        }
    }

    /// What holds whatever happened.
    fn check(&self, record: &ActivityRecord, steps: u32) {
        let (paid, recoveries) = (self.starts(false), self.starts(true));
        let payers = self.max.filter(|m| *m > 1).unwrap_or(steps);
        assert!(paid <= payers, "{paid} paid attempts");
        assert!(recoveries <= self.recovery_limit);
        let numbers: Vec<u32> = (1..).take(self.started().count()).collect();
        let recorded: Vec<u32> = record.attempts.iter().map(|a| a.n).collect();
        assert_eq!(recorded, numbers);
        let ends = |f: &&Fact| matches!(f, Fact::Completed | Fact::Found | Fact::SaidDone);
        let completions = self.facts.iter().filter(ends).count();
        assert!(completions <= 1);
        assert_eq!(completions == 1, record.state == ActivityState::Completed);
        let abandoned = self.facts.iter().position(|f| *f == Fact::Abandoned);
        if let (Effect::Unsafe, Some(i)) = (self.effect, abandoned) {
            let after = self.facts.iter().skip(i);
            assert_eq!(after.filter(|f| matches!(f, Fact::Started { .. })).count(), 0);
        }
        let open = u32::from(record.state.is_open());
        assert_eq!(
            validate(std::slice::from_ref(record), &record.run, 3, open),
            Ok(())
        );
        let under_way = record
            .attempts
            .iter()
            .filter(|a| a.class == AttemptClass::Running)
            .count();
        assert_eq!(under_way, usize::from(self.under_way()));
    }
}

fn contract() -> impl Strategy<Value = (Effect, Option<u32>)> {
    prop_oneof![
        (
            prop::sample::select(&[Effect::ReadOnly, Effect::Idempotent][..]),
            prop::option::of(1..5_u32),
        ),
        (Just(Effect::Unsafe), prop::option::of(Just(1))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn it_agrees_with_the_list_of_all_that_happened(
        (effect, max) in contract(),
        recovery_limit in 0..4_u32,
        ops in prop::collection::vec(op(), 0..60),
    ) {
        let asked = request(effect, max);
        let mut model = Model { effect, max, recovery_limit, facts: Vec::new() };
        let mut here = Context { recovery_limit, ..context(1_000) };
        let mut record = prepare(asked.clone());
        let mut finished: Option<ActivityRecord> = None;
        let mut decisions = 0;
        for op in ops {
            let now = here.now.as_millis();
            match op {
                Op::Call => {
                    let admission = admit(Some(&record), &asked, &here);
                    prop_assert_eq!(&admission, &model.admission(here.step_attempt, now));
                    if let Ok(Admission::Dispatch { recovery }) = admission {
                        start(&mut record, &here, recovery);
                        model.facts.push(Fact::Started { recovery, step: here.step_attempt });
                    }
                }
                Op::Complete => {
                    settle(&mut record, Settlement::Completed(Payload::new("out")), here.now, 0.0);
                    if model.under_way() {
                        model.facts.push(Fact::Completed);
                    }
                }
                Op::Fail { retryable, hint_ms } => {
                    let retry_after = hint_ms.map(|ms| Duration::from_millis(ms.into()));
                    let settlement = Settlement::Failed { error: error(retryable), retry_after };
                    let after = settle(&mut record, settlement, here.now, 0.0);
                    if model.under_way() {
                        let due = now + i64::from(hint_ms.unwrap_or(0)).max(10);
                        model.facts.push(Fact::Failed { retryable, due });
                        let (max, used) = (max.unwrap_or(1), model.starts(false));
                        let expected = if retryable && used < max {
                            After::Retry(at(due))
                        } else {
                            let told = Exhausted {
                                budget: "retry:charge".to_owned(),
                                used: used.into(),
                                limit: max.into(),
                                decimals: 0,
                            };
                            After::Failed { exhausted: (retryable && max > 1).then_some(told) }
                        };
                        prop_assert_eq!(after, expected);
                    }
                }
                Op::Abandon => {
                    settle(&mut record, Settlement::Abandoned, here.now, 0.0);
                    if model.under_way() {
                        model.facts.push(Fact::Abandoned);
                    }
                }
                Op::LoseWorker => {
                    here.incarnation += 1;
                    let unseen = admit(Some(&record), &asked, &here);
                    let changed = recover(&mut record, here.incarnation, here.now);
                    prop_assert_eq!(changed, model.under_way());
                    if changed {
                        model.facts.push(Fact::Abandoned);
                    }
                    prop_assert_eq!(unseen, admit(Some(&record), &asked, &here));
                }
                Op::NextStepAttempt => here.step_attempt += 1,
                Op::Pass { ms } => here.now = at(now + i64::from(ms)),
                Op::Probe { found } => {
                    let found = found.then(|| Payload::new("found"));
                    let expected = found.is_some() && model.unknown();
                    prop_assert_eq!(reconcile(&mut record, found, here.now), expected);
                    if expected {
                        model.facts.push(Fact::Found);
                    }
                }
                Op::Decide(said) => {
                    let (action, fact) = match said {
                        Said::Done => {
                            (Action::Complete { output: Payload::new("said") }, Fact::SaidDone)
                        }
                        Said::Failed { retryable } => {
                            (Action::Fail { error: error(retryable) }, Fact::SaidFailed)
                        }
                        Said::Again => (Action::Retry, Fact::SaidAgain { due: now + 10 }),
                    };
                    let allowed = model.unknown()
                        && (action != Action::Retry
                            || effect != Effect::Unsafe && model.starts(false) < max.unwrap_or(1));
                    decisions += 1;
                    let mut said = resolution(&record, action);
                    said.decision = DecisionId::new(&format!("dec_{decisions}")).unwrap();
                    let before = record.clone();
                    let taken = resolve(&mut record, &said, here.now, 0.0).is_ok();
                    prop_assert_eq!(taken, allowed);
                    if taken {
                        prop_assert_eq!(&record.decision, &Some(said.decision));
                        prop_assert_eq!(&record.attempts, &before.attempts);
                        model.facts.push(fact);
                    } else {
                        prop_assert_eq!(&record, &before);
                    }
                }
                Op::End => {
                    let closed = model.closed();
                    prop_assert_eq!(close(&mut record, &error(false), here.now), closed.is_some());
                    model.facts.extend(closed);
                    here.step_attempt += 1;
                    here.incarnation += 1;
                    let recovered = recover(&mut record, here.incarnation, here.now);
                    prop_assert_eq!(recovered, model.under_way());
                    if recovered {
                        model.facts.push(Fact::Abandoned);
                    }
                }
            }
            model.check(&record, here.step_attempt);
            if let Some(finished) = &finished {
                prop_assert_eq!(finished, &record);
            }
            if model.done() {
                finished = Some(record.clone());
            }
        }
    }
}
