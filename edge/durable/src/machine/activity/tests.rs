use super::*;
use crate::failure::FailureKind;
use crate::ids::DecisionId;
use crate::record::Backoff;

pub(super) fn at(ms: i64) -> Timestamp {
    Timestamp::from_millis(ms).unwrap()
}

pub(super) fn policy(max_attempts: u32) -> RetryPolicy {
    RetryPolicy {
        label: "v1".to_owned(),
        max_attempts,
        backoff: Backoff::Fixed,
        initial: Duration::from_millis(10),
        max: Duration::from_millis(10),
        multiplier_permille: 0,
        jitter_permille: 0,
    }
}

pub(super) fn request(effect: Effect, max_attempts: Option<u32>) -> Request {
    Request {
        run: RunId::new("run_1").unwrap(),
        node: NodeName::new("charge").unwrap(),
        activation: 3,
        key: Key::new("call_7.0").unwrap(),
        implementation: "http/1".to_owned(),
        effect,
        retry: max_attempts.map(policy),
        input: Payload::new("in"),
    }
}

pub(super) fn context(now: i64) -> Context {
    Context {
        step_attempt: 1,
        incarnation: 5,
        now: at(now),
        recovery_limit: 2,
    }
}

pub(super) fn error(retryable: bool) -> Failure {
    Failure::new(FailureKind::ToolError, "503").retryable(retryable)
}

pub(super) fn failed(retryable: bool) -> Settlement {
    Settlement::Failed {
        error: error(retryable),
        retry_after: None,
    }
}

pub(super) fn resolution(record: &ActivityRecord, action: Action) -> Resolution {
    Resolution {
        id: record.id.clone(),
        action,
        decision: DecisionId::new("dec_1").unwrap(),
        input_digest: *record.input.digest(),
        implementation: record.implementation.clone(),
        attempt: record.attempts.last().map_or(0, |a| a.n),
        reason: "seen at the bank".to_owned(),
        evidence: "ticket 9".to_owned(),
    }
}

/// Everything that a record can be, made by the machine. Attempts are made at 1000 and end at 1010.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Made {
    Prepared,
    /// Due at 1020.
    Retry,
    /// Re-opened by an operator, due at 1020.
    ManualRetry,
    Running,
    Completed,
    Reconciled,
    ManualComplete,
    /// Retryable, one attempt.
    FailedOnce,
    /// Retryable, two of two attempts.
    Exhausted,
    FailedLasting,
    ManualFail,
    Unknown,
    /// Two recoveries are used.
    UnknownSpent,
}

impl Made {
    const ALL: [Self; 13] = [
        Self::Prepared,
        Self::Retry,
        Self::ManualRetry,
        Self::Running,
        Self::Completed,
        Self::Reconciled,
        Self::ManualComplete,
        Self::FailedOnce,
        Self::Exhausted,
        Self::FailedLasting,
        Self::ManualFail,
        Self::Unknown,
        Self::UnknownSpent,
    ];

    fn state(self) -> ActivityState {
        match self {
            Self::Prepared | Self::Retry | Self::ManualRetry => ActivityState::Prepared,
            Self::Running => ActivityState::Running,
            Self::Completed | Self::Reconciled | Self::ManualComplete => ActivityState::Completed,
            Self::FailedOnce | Self::Exhausted | Self::FailedLasting | Self::ManualFail => {
                ActivityState::Failed
            }
            Self::Unknown | Self::UnknownSpent => ActivityState::Unknown,
        }
    }

    fn max_attempts(self) -> Option<u32> {
        match self {
            Self::Retry | Self::ManualRetry | Self::Exhausted => Some(2),
            Self::FailedLasting => Some(1),
            Self::Prepared
            | Self::Running
            | Self::Completed
            | Self::Reconciled
            | Self::ManualComplete
            | Self::FailedOnce
            | Self::ManualFail
            | Self::Unknown
            | Self::UnknownSpent => None,
        }
    }

    /// `None` where no such record exists with this effect.
    fn make(self, effect: Effect) -> Option<ActivityRecord> {
        match (effect, self) {
            (Effect::Unsafe, Self::Retry | Self::ManualRetry | Self::Exhausted | Self::UnknownSpent) => {
                return None;
            }
            (Effect::ReadOnly | Effect::Idempotent | Effect::Unsafe, _) => {}
        }
        let mut r = prepare(request(effect, self.max_attempts()));
        let go = |r: &mut ActivityRecord, recovery| start(r, &context(1000), recovery);
        let end = |r: &mut ActivityRecord, s| settle(r, s, at(1010), 0.0);
        let decide = |r: &mut ActivityRecord, action| {
            let resolution = resolution(r, action);
            resolve(r, &resolution, at(1010), 0.0).unwrap();
        };
        if self != Self::Prepared {
            go(&mut r, false);
        }
        match self {
            Self::Prepared | Self::Running => {}
            Self::Completed => {
                end(&mut r, Settlement::Completed(Payload::new("out")));
            }
            Self::FailedOnce | Self::Retry => {
                end(&mut r, failed(true));
            }
            Self::Exhausted => {
                end(&mut r, failed(true));
                go(&mut r, false);
                end(&mut r, failed(true));
            }
            Self::FailedLasting => {
                end(&mut r, failed(false));
            }
            Self::Unknown
            | Self::Reconciled
            | Self::ManualComplete
            | Self::ManualFail
            | Self::ManualRetry => {
                end(&mut r, Settlement::Abandoned);
            }
            Self::UnknownSpent => {
                for _ in 0..2 {
                    end(&mut r, Settlement::Abandoned);
                    go(&mut r, true);
                }
                end(&mut r, Settlement::Abandoned);
            }
        }
        match self {
            Self::Reconciled => {
                assert!(reconcile(&mut r, Some(Payload::new("found")), at(1010)));
            }
            Self::ManualComplete => decide(
                &mut r,
                Action::Complete {
                    output: Payload::new("said"),
                },
            ),
            Self::ManualFail => decide(&mut r, Action::Fail { error: error(true) }),
            Self::ManualRetry => decide(&mut r, Action::Retry),
            Self::Prepared
            | Self::Retry
            | Self::Running
            | Self::Completed
            | Self::FailedOnce
            | Self::Exhausted
            | Self::FailedLasting
            | Self::Unknown
            | Self::UnknownSpent => {}
        }
        assert_eq!(r.state, self.state(), "{self:?} {effect}");
        Some(r)
    }

    fn all() -> impl Iterator<Item = (Self, ActivityRecord)> {
        Self::ALL.into_iter().flat_map(|made| {
            Effect::ALL
                .iter()
                .filter_map(move |e| made.make(*e).map(|r| (made, r)))
        })
    }
}

#[test]
fn every_state_is_among_the_records_that_are_tried() {
    for state in ActivityState::ALL {
        for effect in Effect::ALL {
            assert!(
                Made::ALL
                    .iter()
                    .any(|m| m.state() == *state && m.make(*effect).is_some()),
                "{state} {effect}"
            );
        }
    }
}

#[test]
fn what_may_be_done_for_every_record_effect_and_attempt_of_the_step() {
    use Admission::{Dispatch, Failed, NotBefore, Replay, Unknown};
    let fresh = Ok(Dispatch { recovery: false });
    for (made, record) in Made::all() {
        for (step_attempt, incarnation, now) in [
            (1, 5, 1019),
            (1, 6, 1019),
            (2, 6, 1019),
            (1, 6, 1020),
            (2, 5, 1020),
            (1, 4, 1020),
        ] {
            let context = Context {
                step_attempt,
                incarnation,
                ..context(now)
            };
            let repeat = match record.effect {
                Effect::ReadOnly | Effect::Idempotent => Ok(Dispatch { recovery: true }),
                Effect::Unsafe => Ok(Unknown),
            };
            let expected = match made {
                Made::Prepared => fresh.clone(),
                Made::Retry | Made::ManualRetry if now < 1020 => Ok(NotBefore(at(1020))),
                Made::Retry | Made::ManualRetry => fresh.clone(),
                Made::Running if incarnation == 5 => Err(Refused::InFlight),
                Made::Running | Made::Unknown => repeat,
                Made::UnknownSpent => Err(Refused::RecoveryExhausted { used: 2, limit: 2 }),
                Made::Completed | Made::Reconciled | Made::ManualComplete => Ok(Replay),
                Made::FailedOnce if step_attempt > 1 => fresh.clone(),
                Made::FailedOnce | Made::Exhausted | Made::FailedLasting | Made::ManualFail => Ok(Failed),
            };
            let asked = request(record.effect, made.max_attempts());
            assert_eq!(
                admit(Some(&record), &asked, &context),
                expected,
                "{made:?} {} {context:?}",
                record.effect
            );
        }
    }
    for effect in Effect::ALL {
        assert_eq!(
            admit(None, &request(*effect, None), &context(1)),
            Ok(Dispatch { recovery: false })
        );
    }
}

#[test]
fn another_contract_under_the_same_identity_conflicts_in_every_state() {
    type Change = fn(&mut Request);
    let changes: [(&str, Change); 11] = [
        ("address", |r| r.run = RunId::new("run_2").unwrap()),
        ("address", |r| r.node = NodeName::new("refund").unwrap()),
        ("address", |r| r.activation = 4),
        ("address", |r| r.key = Key::new("call_7.1").unwrap()),
        ("implementation", |r| r.implementation.push('x')),
        ("effect", |r| {
            r.retry = None;
            r.effect = match r.effect {
                Effect::ReadOnly => Effect::Idempotent,
                Effect::Idempotent => Effect::Unsafe,
                Effect::Unsafe => Effect::ReadOnly,
            }
        }),
        ("retry", |r| {
            r.retry = if r.retry.is_some() { None } else { Some(policy(1)) }
        }),
        ("retry", |r| {
            let mut other = r.retry.take().unwrap_or_else(|| policy(1));
            other.label.push('x');
            r.retry = Some(other);
        }),
        ("retry", |r| {
            let mut other = r.retry.take().unwrap_or_else(|| policy(1));
            other.initial = Duration::ZERO;
            r.retry = Some(other);
        }),
        ("input", |r| r.input = Payload::new("other")),
        ("input", |r| r.input = Payload::new("")),
    ];
    for (made, record) in Made::all() {
        for (what, change) in &changes {
            let mut asked = request(record.effect, made.max_attempts());
            change(&mut asked);
            assert_eq!(
                admit(Some(&record), &asked, &context(2000)),
                Err(Refused::Conflict { what }),
                "{made:?} {}",
                record.effect
            );
        }
    }
}

#[test]
fn labels_and_policies_are_checked_before_anything_else() {
    let mut asked = request(Effect::Idempotent, None);
    asked.implementation.clear();
    assert!(matches!(
        admit(None, &asked, &context(1)),
        Err(Refused::InvalidLabel(InvalidId::Empty {
            field: "implementation"
        }))
    ));
    assert_eq!(
        admit(None, &request(Effect::Idempotent, Some(0)), &context(1)),
        Err(Refused::InvalidPolicy {
            why: InvalidPolicy::NoAttempts
        })
    );
    assert_eq!(
        admit(None, &request(Effect::Unsafe, Some(2)), &context(1)),
        Err(Refused::InvalidPolicy {
            why: InvalidPolicy::Unsafe { max_attempts: 2 }
        })
    );
    assert!(admit(None, &request(Effect::Unsafe, Some(1)), &context(1)).is_ok());
}

#[test]
fn an_attempt_is_settled_by_what_came_of_it_and_what_its_policy_allows() {
    let told = || {
        Some(Exhausted {
            budget: "retry:charge".to_owned(),
            used: 2,
            limit: 2,
            decimals: 0,
        })
    };
    for effect in Effect::ALL {
        for (max, earlier, settlement, after) in [
            (
                None,
                0,
                Settlement::Completed(Payload::new("out")),
                After::Completed,
            ),
            (None, 0, failed(true), After::Failed { exhausted: None }),
            (None, 0, failed(false), After::Failed { exhausted: None }),
            (None, 0, Settlement::Abandoned, After::Unknown),
            (Some(1), 0, failed(true), After::Failed { exhausted: None }),
            (Some(2), 0, failed(true), After::Retry(at(1020))),
            (Some(2), 0, failed(false), After::Failed { exhausted: None }),
            (Some(2), 0, Settlement::Abandoned, After::Unknown),
            (Some(2), 1, failed(true), After::Failed { exhausted: told() }),
            (Some(2), 1, failed(false), After::Failed { exhausted: None }),
            (
                Some(2),
                1,
                Settlement::Completed(Payload::new("out")),
                After::Completed,
            ),
            (Some(2), 1, Settlement::Abandoned, After::Unknown),
        ] {
            if *effect == Effect::Unsafe && max == Some(2) {
                continue;
            }
            let mut r = prepare(request(*effect, max));
            for _ in 0..earlier {
                start(&mut r, &context(900), false);
                settle(&mut r, failed(true), at(910), 0.0);
            }
            start(&mut r, &context(1000), false);
            let what = format!("{effect} {max:?} {earlier} {settlement:?}");
            assert_eq!(settle(&mut r, settlement, at(1010), 0.0), after, "{what}");
            let (state, class) = match &after {
                After::Completed => (ActivityState::Completed, AttemptClass::Completed),
                After::Failed { exhausted: _ } => (ActivityState::Failed, AttemptClass::Failed),
                After::Retry(_) => (ActivityState::Prepared, AttemptClass::Failed),
                After::Unknown => (ActivityState::Unknown, AttemptClass::Abandoned),
            };
            let last = r.attempts.last().unwrap();
            assert_eq!(
                (r.state, last.class, last.ended_at),
                (state, class, Some(at(1010))),
                "{what}"
            );
            assert_eq!(r.origin, (!state.is_open()).then_some(Origin::Live), "{what}");
            assert_eq!(r.output.is_some(), state == ActivityState::Completed, "{what}");
            assert_eq!(r.error.is_some(), state == ActivityState::Failed, "{what}");
            let limit = match after {
                After::Failed { exhausted } => exhausted,
                After::Completed | After::Retry(_) | After::Unknown => None,
            };
            assert_eq!(exhausted(&r), limit, "{what}: the same when it is read again");
            let open = u32::from(state.is_open());
            assert_eq!(validate(&[r.clone()], &r.run, 3, open), Ok(()), "{what}");
        }
    }
}

#[test]
fn a_hint_of_the_callee_moves_the_retry_and_says_so() {
    let mut r = prepare(request(Effect::Idempotent, Some(3)));
    start(&mut r, &context(1000), false);
    let hinted = Settlement::Failed {
        error: error(true),
        retry_after: Some(Duration::from_secs(7)),
    };
    assert_eq!(settle(&mut r, hinted, at(1010), 0.0), After::Retry(at(8010)));
    assert_eq!(
        r.not_before,
        Some(NotBefore {
            at: at(8010),
            hinted: true
        })
    );
}

#[test]
fn an_outcome_without_an_attempt_under_way_changes_nothing() {
    for (made, before) in Made::all().filter(|(made, _)| *made != Made::Running) {
        for settlement in [
            Settlement::Completed(Payload::new("late")),
            failed(true),
            failed(false),
            Settlement::Abandoned,
        ] {
            let mut r = before.clone();
            let after = settle(&mut r, settlement, at(3000), 0.5);
            assert_eq!(r, before, "{made:?}");
            let expected = match made {
                Made::Prepared => After::Retry(at(3000)),
                Made::Retry | Made::ManualRetry => After::Retry(at(1020)),
                Made::Completed | Made::Reconciled | Made::ManualComplete => After::Completed,
                Made::Exhausted => After::Failed {
                    exhausted: Some(Exhausted {
                        budget: "retry:charge".to_owned(),
                        used: 2,
                        limit: 2,
                        decimals: 0,
                    }),
                },
                Made::FailedOnce | Made::FailedLasting | Made::ManualFail => {
                    After::Failed { exhausted: None }
                }
                Made::Running | Made::Unknown | Made::UnknownSpent => After::Unknown,
            };
            assert_eq!(after, expected, "{made:?}");
        }
    }
}

#[test]
fn only_a_running_attempt_of_another_lease_is_recovered() {
    for (made, before) in Made::all() {
        for incarnation in [4, 5, 6] {
            let mut r = before.clone();
            let changed = recover(&mut r, incarnation, at(1500));
            assert_eq!(changed, made == Made::Running && incarnation != 5, "{made:?}");
            if !changed {
                assert_eq!(r, before, "{made:?}");
                continue;
            }
            let attempt = r.attempts.last().unwrap();
            assert_eq!(
                (r.state, attempt.class, attempt.ended_at, attempt.incarnation),
                (ActivityState::Unknown, AttemptClass::Abandoned, Some(at(1500)), 5)
            );
            assert_eq!((r.origin, &r.error, &r.output), (None, &None, &None));
            assert!(!recover(&mut r, incarnation, at(1600)), "once");
        }
    }
}

#[test]
fn a_probe_completes_what_is_unknown_and_its_silence_proves_nothing() {
    for (made, before) in Made::all() {
        let mut r = before.clone();
        assert!(!reconcile(&mut r, None, at(1500)));
        assert_eq!(r, before, "{made:?}");
        let changed = reconcile(&mut r, Some(Payload::new("found")), at(1500));
        assert_eq!(changed, made.state() == ActivityState::Unknown, "{made:?}");
        if changed {
            assert_eq!(
                (r.state, r.origin),
                (ActivityState::Completed, Some(Origin::Reconciled))
            );
            assert_eq!(r.output, Some(Payload::new("found")));
            assert_eq!(
                r.attempts, before.attempts,
                "{made:?}: attempts are not rewritten"
            );
        } else {
            assert_eq!(r, before, "{made:?}");
        }
    }
}

fn actions() -> [Action; 3] {
    [
        Action::Complete {
            output: Payload::new("said"),
        },
        Action::Fail { error: error(true) },
        Action::Retry,
    ]
}

#[test]
fn a_decision_is_taken_for_unknown_effects_only() {
    for (made, before) in Made::all() {
        for action in actions() {
            let mut r = before.clone();
            let said = resolution(&r, action.clone());
            let answer = resolve(&mut r, &said, at(1500), 0.0);
            let state = made.state();
            let expected = match (state, &action, r.effect) {
                (ActivityState::Unknown, Action::Complete { .. } | Action::Fail { .. }, _) => Ok(()),
                (ActivityState::Unknown, Action::Retry, Effect::Unsafe) => Err(ResolveRefused::UnsafeRetry),
                (ActivityState::Unknown, Action::Retry, Effect::ReadOnly | Effect::Idempotent) => {
                    Err(ResolveRefused::RetryExhausted { used: 1, limit: 1 })
                }
                (
                    ActivityState::Prepared
                    | ActivityState::Running
                    | ActivityState::Completed
                    | ActivityState::Failed,
                    _,
                    _,
                ) => Err(ResolveRefused::NotUnknown { state }),
            };
            assert_eq!(answer, expected, "{made:?} {action:?}");
            if answer.is_err() {
                assert_eq!(r, before, "{made:?} {action:?}");
                continue;
            }
            assert_eq!(r.attempts, before.attempts, "attempts are not rewritten");
            assert_eq!(r.decision, Some(said.decision));
            assert_eq!(r.origin, Some(Origin::Manual));
            match action {
                Action::Complete { output } => {
                    assert_eq!((r.state, r.output), (ActivityState::Completed, Some(output)));
                }
                Action::Fail { error } => {
                    assert_eq!((r.state, r.error), (ActivityState::Failed, Some(error)));
                }
                Action::Retry => unreachable!("no policy: refused"),
            }
        }
    }
}

#[test]
fn a_decision_must_fit_what_stands_there_and_say_why() {
    type Change = fn(&mut Resolution);
    let cases: [(ResolveRefused, Change); 9] = [
        (ResolveRefused::OtherActivity, |s| {
            s.id = ActivityId::new("act_0").unwrap();
        }),
        (ResolveRefused::NoReason, |s| s.reason.clear()),
        (ResolveRefused::NoReason, |s| s.reason = " \n".to_owned()),
        (ResolveRefused::NoEvidence, |s| s.evidence.clear()),
        (ResolveRefused::NoEvidence, |s| s.evidence = "\t".to_owned()),
        (ResolveRefused::OtherInput, |s| s.input_digest[31] ^= 1),
        (ResolveRefused::OtherImplementation, |s| {
            s.implementation = "http/2".to_owned();
        }),
        (ResolveRefused::OtherAttempt { given: 0, last: 1 }, |s| {
            s.attempt = 0;
        }),
        (ResolveRefused::OtherAttempt { given: 2, last: 1 }, |s| {
            s.attempt = 2;
        }),
    ];
    for effect in Effect::ALL {
        let before = Made::Unknown.make(*effect).unwrap();
        for (expected, change) in &cases {
            for action in actions() {
                let mut r = before.clone();
                let mut said = resolution(&r, action);
                change(&mut said);
                assert_eq!(resolve(&mut r, &said, at(1500), 0.0).as_ref(), Err(expected));
                assert_eq!(r, before);
            }
        }
    }
}

#[test]
fn a_manual_retry_waits_its_pause_and_neither_resets_nor_exceeds_the_limit() {
    let mut r = prepare(request(Effect::Idempotent, Some(2)));
    start(&mut r, &context(1000), false);
    settle(&mut r, Settlement::Abandoned, at(1010), 0.0);
    let said = resolution(&r, Action::Retry);
    resolve(&mut r, &said, at(2000), 0.0).unwrap();
    assert_eq!(
        (r.state, r.origin, r.attempts.len()),
        (ActivityState::Prepared, None, 1)
    );
    let asked = request(Effect::Idempotent, Some(2));
    assert_eq!(
        admit(Some(&r), &asked, &context(2009)),
        Ok(Admission::NotBefore(at(2010)))
    );
    assert_eq!(
        admit(Some(&r), &asked, &context(2010)),
        Ok(Admission::Dispatch { recovery: false })
    );
    start(&mut r, &context(2010), false);
    assert_eq!(
        r.decision,
        Some(said.decision),
        "a new dispatch keeps the decision"
    );
    assert_eq!(r.attempts.last().unwrap().n, 2);
    settle(&mut r, Settlement::Abandoned, at(2020), 0.0);
    let before = r.clone();
    let again = resolution(&r, Action::Retry);
    assert_eq!(
        resolve(&mut r, &again, at(2030), 0.0),
        Err(ResolveRefused::RetryExhausted { used: 2, limit: 2 })
    );
    assert_eq!(r, before);
}

#[test]
fn crashes_use_up_the_recovery_limit_and_no_retries() {
    for effect in [Effect::ReadOnly, Effect::Idempotent] {
        let asked = request(effect, Some(2));
        let mut r = prepare(asked.clone());
        let context = |incarnation| Context {
            incarnation,
            recovery_limit: RECOVERY_LIMIT,
            ..context(1000)
        };
        for crash in 0..=u64::from(RECOVERY_LIMIT) {
            let recovery = crash > 0;
            assert_eq!(
                admit(Some(&r), &asked, &context(crash)),
                Ok(Admission::Dispatch { recovery })
            );
            start(&mut r, &context(crash), recovery);
        }
        assert_eq!((paid(&r), recoveries(&r)), (1, RECOVERY_LIMIT));
        let next = context(99);
        assert!(recover(&mut r, next.incarnation, next.now));
        let spent = Err(Refused::RecoveryExhausted {
            used: RECOVERY_LIMIT,
            limit: RECOVERY_LIMIT,
        });
        assert_eq!(admit(Some(&r), &asked, &next), spent);
        assert_eq!(validate(&[r.clone()], &r.run, 3, 1), Ok(()));
    }
}

#[test]
fn a_recovered_attempt_that_fails_leaves_the_retries_of_the_policy() {
    let mut r = prepare(request(Effect::Idempotent, Some(2)));
    start(&mut r, &context(1000), false);
    recover(&mut r, 6, at(1010));
    start(&mut r, &context(1010), true);
    assert_eq!(
        settle(&mut r, failed(true), at(1020), 0.0),
        After::Retry(at(1030))
    );
    start(&mut r, &context(1030), false);
    let after = settle(&mut r, failed(true), at(1040), 0.0);
    let told = Exhausted {
        budget: "retry:charge".to_owned(),
        used: 2,
        limit: 2,
        decimals: 0,
    };
    assert_eq!(
        after,
        After::Failed {
            exhausted: Some(told)
        }
    );
    let numbers: Vec<u32> = r.attempts.iter().map(|a| a.n).collect();
    assert_eq!(numbers, [1, 2, 3]);
}

#[test]
fn a_retry_of_the_step_repeats_a_single_failed_attempt_and_clears_its_outcome() {
    for effect in Effect::ALL {
        let mut r = Made::FailedOnce.make(*effect).unwrap();
        let second = Context {
            step_attempt: 2,
            ..context(2000)
        };
        start(&mut r, &second, false);
        assert_eq!((r.origin, &r.error, r.step_attempt), (None, &None, 2));
        assert_eq!(
            settle(&mut r, failed(true), at(2010), 0.0),
            After::Failed { exhausted: None },
            "the step's policy paid"
        );
        assert_eq!(
            admit(Some(&r), &request(*effect, None), &second),
            Ok(Admission::Failed)
        );
        assert_eq!(validate(&[r.clone()], &r.run, 3, 0), Ok(()));
    }
}

#[test]
fn a_run_that_ends_closes_what_may_be_repeated_and_a_later_life_repeats_it() {
    use Admission::{Dispatch, Failed};
    let why = Failure::new(FailureKind::Refused, "the run was cancelled");
    for (made, before) in Made::all() {
        let mut r = before.clone();
        let what = format!("{made:?} {}", before.effect);
        let changed = close(&mut r, &why, at(1500));
        let cut = match (made, before.effect) {
            (Made::Running | Made::Unknown | Made::UnknownSpent, Effect::Unsafe) => None,
            (
                Made::Running | Made::Unknown | Made::UnknownSpent | Made::ManualRetry,
                Effect::ReadOnly | Effect::Idempotent,
            ) => Some(true),
            (Made::Retry, _) => Some(false),
            (
                Made::Prepared
                | Made::ManualRetry
                | Made::Completed
                | Made::Reconciled
                | Made::ManualComplete
                | Made::FailedOnce
                | Made::Exhausted
                | Made::FailedLasting
                | Made::ManualFail,
                _,
            ) => None,
        };
        assert_eq!(changed, cut.is_some(), "{what}");
        let Some(cut) = cut else {
            assert_eq!(r, before, "{what}");
            continue;
        };
        assert_eq!(
            (r.state, r.origin, &r.not_before, &r.decision),
            (ActivityState::Failed, Some(Origin::Live), &None, &before.decision),
            "{what}"
        );
        let told = if cut {
            why.clone().retryable(true)
        } else {
            error(true)
        };
        assert_eq!(r.error, Some(told), "{what}");
        assert_eq!(exhausted(&r), None, "{what}: no limit ran out");
        assert_eq!(validate(&[r.clone()], &r.run, 3, 0), Ok(()), "{what}");
        assert!(!close(&mut r, &why, at(1600)), "{what}: once");
        let asked = request(before.effect, made.max_attempts());
        let later = Context {
            step_attempt: 2,
            incarnation: 6,
            ..context(1600)
        };
        assert_eq!(admit(Some(&r), &asked, &context(1600)), Ok(Failed), "{what}");
        let expected = if made == Made::UnknownSpent {
            Err(Refused::RecoveryExhausted { used: 2, limit: 2 })
        } else {
            Ok(Dispatch { recovery: cut })
        };
        assert_eq!(admit(Some(&r), &asked, &later), expected, "{what}");
    }
}

#[test]
fn an_interrupted_last_attempt_is_recovered_in_a_later_life_and_its_limit_is_told_then() {
    let mut r = prepare(request(Effect::Idempotent, Some(2)));
    start(&mut r, &context(1000), false);
    settle(&mut r, failed(true), at(1010), 0.0);
    start(&mut r, &context(1020), false);
    assert!(close(&mut r, &error(false), at(1030)));
    let later = Context {
        step_attempt: 2,
        incarnation: 6,
        ..context(2000)
    };
    assert_eq!(
        admit(Some(&r), &request(Effect::Idempotent, Some(2)), &later),
        Ok(Admission::Dispatch { recovery: true })
    );
    start(&mut r, &later, true);
    let told = Exhausted {
        budget: "retry:charge".to_owned(),
        used: 2,
        limit: 2,
        decimals: 0,
    };
    assert_eq!(
        settle(&mut r, failed(true), at(2010), 0.0),
        After::Failed {
            exhausted: Some(told)
        }
    );
}

#[test]
fn a_completed_record_is_not_started_again() {
    for (made, before) in Made::all().filter(|(made, _)| made.state() == ActivityState::Completed) {
        for recovery in [false, true] {
            let mut r = before.clone();
            start(&mut r, &context(5000), recovery);
            assert_eq!(r, before, "{made:?}");
        }
    }
}

#[test]
fn an_attempt_of_a_lost_lease_is_closed_when_the_next_one_starts() {
    let mut r = Made::Running.make(Effect::ReadOnly).unwrap();
    let next = Context {
        incarnation: 6,
        ..context(1500)
    };
    start(&mut r, &next, true);
    let classes: Vec<_> = r.attempts.iter().map(|a| (a.n, a.class, a.ended_at)).collect();
    assert_eq!(
        classes,
        [
            (1, AttemptClass::Abandoned, Some(at(1500))),
            (2, AttemptClass::Running, None)
        ]
    );
}

#[test]
fn a_clock_that_steps_back_does_not_end_an_attempt_before_it_starts() {
    let mut r = Made::Running.make(Effect::Unsafe).unwrap();
    settle(&mut r, Settlement::Completed(Payload::new("out")), at(1), 0.0);
    assert_eq!(r.attempts[0].ended_at, Some(at(1000)));
    assert_eq!(validate(&[r.clone()], &r.run, 3, 0), Ok(()));
}

#[test]
fn whatever_the_machine_makes_is_valid_in_its_own_run_at_its_time() {
    for (made, r) in Made::all() {
        let open = u32::from(made.state().is_open());
        let all = std::slice::from_ref(&r);
        assert_eq!(validate(all, &r.run, 3, open), Ok(()), "{made:?}");
        assert_eq!(validate(all, &r.run, 4, open), Ok(()), "{made:?}");
        assert!(validate(all, &r.run, 2, open).unwrap_err().contains("future"));
        let other = RunId::new("run_2").unwrap();
        assert!(
            validate(all, &other, 3, open)
                .unwrap_err()
                .contains("another run")
        );
        assert!(
            validate(all, &r.run, 3, 1 - open)
                .unwrap_err()
                .contains("the head says")
        );
        let twice = [r.clone(), r.clone()];
        assert!(
            validate(&twice, &r.run, 3, 2 * open)
                .unwrap_err()
                .contains("twice")
        );
    }
    let run = RunId::new("run_1").unwrap();
    assert_eq!(validate(&[], &run, 1, 0), Ok(()));
    assert_eq!(
        validate(&[], &run, 1, 1),
        Err("activities: 0 are open, the head says 1".to_owned())
    );
}

/// Each broken record, the effect it is made with, and a word of the answer.
type Broken = (Made, &'static str, fn(&mut ActivityRecord));

const BROKEN: &[Broken] = &[
    (Made::Prepared, "identity", |r| r.key = Key::new("other").unwrap()),
    (Made::Prepared, "identity", |r| r.activation = 2),
    (Made::Prepared, "count from 1", |r| {
        r.activation = 0;
        r.id = ActivityId::derive(&r.run, &r.node, 0, &r.key);
    }),
    (Made::Prepared, "no label", |r| r.implementation.clear()),
    (Made::Prepared, "policy", |r| r.retry = Some(policy(0))),
    (Made::Completed, "policy", |r| {
        r.effect = Effect::Unsafe;
        r.retry = Some(policy(2));
    }),
    (Made::UnknownSpent, "more attempts", |r| {
        r.retry = Some(policy(2));
        r.attempts.iter_mut().for_each(|a| a.recovery = false);
    }),
    (Made::Prepared, "attempt of the step", |r| r.step_attempt = 1),
    (Made::Completed, "attempt of the step", |r| r.step_attempt = 0),
    (Made::Completed, "numbered", |r| r.attempts[0].n = 2),
    (Made::Completed, "numbered", |r| r.attempts[0].n = 0),
    (Made::Exhausted, "numbered", |r| r.attempts.swap(0, 1)),
    (Made::Exhausted, "numbered", |r| r.attempts[1].n = 3),
    (Made::Exhausted, "older lease", |r| r.attempts[1].incarnation = 4),
    (Made::Running, "end and error", |r| {
        r.attempts[0].ended_at = Some(at(2000));
    }),
    (Made::Running, "end and error", |r| {
        r.attempts[0].error = Some(error(true));
    }),
    (Made::Completed, "end and error", |r| {
        r.attempts[0].ended_at = None
    }),
    (Made::Completed, "end and error", |r| {
        r.attempts[0].error = Some(error(true));
    }),
    (Made::Unknown, "end and error", |r| r.attempts[0].ended_at = None),
    (Made::FailedOnce, "end and error", |r| r.attempts[0].error = None),
    (Made::Unknown, "before it starts", |r| {
        r.attempts[0].ended_at = Some(at(999));
    }),
    (Made::Running, "recovers nothing", |r| {
        r.attempts[0].recovery = true
    }),
    (Made::Exhausted, "follows a failure", |r| {
        r.attempts[1].recovery = true;
    }),
    (Made::Exhausted, "not retryable", |r| {
        r.attempts[0].error = Some(error(false));
    }),
    (Made::Exhausted, "that completed", |r| {
        r.attempts[0].class = AttemptClass::Completed;
        r.attempts[0].error = None;
    }),
    (Made::Exhausted, "under way", |r| {
        r.attempts[0].class = AttemptClass::Running;
        r.attempts[0].error = None;
        r.attempts[0].ended_at = None;
    }),
    (Made::UnknownSpent, "unsafe one", |r| r.effect = Effect::Unsafe),
    (Made::UnknownSpent, "neither", |r| r.attempts[1].recovery = false),
    (Made::Prepared, "does not fit its attempts", |r| {
        r.not_before = Some(NotBefore {
            at: at(5),
            hinted: false,
        });
    }),
    (Made::Retry, "does not fit its attempts", |r| r.not_before = None),
    (Made::Retry, "does not fit its attempts", |r| r.retry = None),
    (Made::ManualRetry, "does not fit its attempts", |r| {
        r.decision = None
    }),
    (Made::Running, "does not fit its attempts", |r| {
        r.state = ActivityState::Prepared;
    }),
    (Made::Running, "does not fit its attempts", |r| {
        r.state = ActivityState::Unknown;
    }),
    (Made::Unknown, "does not fit its attempts", |r| {
        r.state = ActivityState::Running;
    }),
    (Made::Unknown, "does not fit its attempts", |r| {
        r.state = ActivityState::Completed;
        r.output = Some(Payload::new("out"));
        r.origin = Some(Origin::Live);
    }),
    (Made::Unknown, "does not fit its attempts", |r| {
        r.state = ActivityState::Failed;
        r.error = Some(error(true));
        r.origin = Some(Origin::Reconciled);
    }),
    (Made::Completed, "does not fit its attempts", |r| {
        r.state = ActivityState::Prepared;
    }),
    (Made::Completed, "does not fit its attempts", |r| r.origin = None),
    (Made::Completed, "does not fit its attempts", |r| {
        r.origin = Some(Origin::Replayed);
    }),
    (Made::Completed, "does not fit its attempts", |r| {
        r.origin = Some(Origin::Reconciled);
    }),
    (Made::ManualComplete, "does not fit its attempts", |r| {
        r.decision = None
    }),
    (Made::ManualFail, "does not fit its attempts", |r| {
        r.decision = None
    }),
    (Made::ManualFail, "does not fit its attempts", |r| {
        r.origin = Some(Origin::Live);
        r.error = Some(error(false));
    }),
    (Made::ManualFail, "does not fit its attempts", |r| {
        r.origin = Some(Origin::Live);
        r.effect = Effect::Unsafe;
    }),
    (Made::FailedLasting, "does not fit its attempts", |r| {
        r.error = Some(error(true));
    }),
    (Made::Completed, "output, error and origin", |r| r.output = None),
    (Made::Completed, "output, error and origin", |r| {
        r.error = Some(error(true));
    }),
    (Made::FailedLasting, "output, error and origin", |r| {
        r.output = Some(Payload::new("out"));
    }),
    (Made::ManualFail, "output, error and origin", |r| r.error = None),
    (Made::Running, "output, error and origin", |r| {
        r.origin = Some(Origin::Live);
    }),
    (Made::Unknown, "output, error and origin", |r| {
        r.output = Some(Payload::new("out"));
    }),
    (Made::Running, "has a time", |r| {
        r.not_before = Some(NotBefore {
            at: at(5),
            hinted: true,
        });
    }),
];

#[test]
fn what_the_machine_cannot_have_made_is_corrupt() {
    for (made, word, change) in BROKEN {
        let mut r = made.make(Effect::Idempotent).unwrap();
        change(&mut r);
        let open = u32::from(r.state.is_open());
        let run = RunId::new("run_1").unwrap();
        let answer = validate(&[r], &run, 3, open);
        assert!(
            answer.as_ref().is_err_and(|why| why.contains(word)),
            "{made:?}: expected {word:?}, got {answer:?}"
        );
    }
}
