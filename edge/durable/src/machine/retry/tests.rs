use proptest::prelude::*;

use super::*;
use crate::failure::FailureKind;

fn policy() -> RetryPolicy {
    RetryPolicy {
        label: "http".to_owned(),
        max_attempts: 4,
        backoff: Backoff::Exponential,
        initial: Duration::from_secs(1),
        max: Duration::from_secs(60),
        multiplier_permille: 2000,
        jitter_permille: 200,
    }
}

fn at(ms: i64) -> Timestamp {
    Timestamp::from_millis(ms).unwrap()
}

fn node() -> NodeName {
    NodeName::new("charge").unwrap()
}

fn retryable() -> Failure {
    Failure::new(FailureKind::Unavailable, "503")
}

#[test]
fn a_policy_is_checked_rule_by_rule() {
    let refused = |change: fn(&mut RetryPolicy)| {
        let mut p = policy();
        change(&mut p);
        check(&p).unwrap_err()
    };
    assert_eq!(check(&policy()), Ok(()));
    assert_eq!(
        refused(|p| p.label.clear()),
        InvalidPolicy::Label(InvalidId::Empty { field: "label" })
    );
    assert_eq!(
        refused(|p| p.label.push('\0')),
        InvalidPolicy::Label(InvalidId::Nul { field: "label" })
    );
    assert_eq!(refused(|p| p.max_attempts = 0), InvalidPolicy::NoAttempts);
    assert_eq!(
        refused(|p| p.initial = Duration::from_secs(61)),
        InvalidPolicy::InitialOverMax
    );
    assert_eq!(
        refused(|p| p.multiplier_permille = 999),
        InvalidPolicy::Shrinking { permille: 999 }
    );
    assert_eq!(
        refused(|p| p.jitter_permille = 1001),
        InvalidPolicy::Jitter { permille: 1001 }
    );
    let fixed = RetryPolicy {
        backoff: Backoff::Fixed,
        multiplier_permille: 0,
        ..policy()
    };
    assert_eq!(check(&fixed), Ok(()), "the multiplier is read when exponential");
}

#[test]
fn an_unsafe_effect_has_one_attempt() {
    for effect in Effect::ALL {
        for max_attempts in [1, 2, u32::MAX] {
            let p = RetryPolicy {
                max_attempts,
                ..policy()
            };
            let expected = match effect {
                Effect::Unsafe if max_attempts > 1 => Err(InvalidPolicy::Unsafe { max_attempts }),
                Effect::ReadOnly | Effect::Idempotent | Effect::Unsafe => Ok(()),
            };
            assert_eq!(check_for(&p, *effect), expected, "{effect} {max_attempts}");
        }
    }
}

#[test]
fn pauses_double_up_to_the_longest() {
    let pauses: Vec<u64> = (1..=8)
        .map(|used| pause(&policy(), used, 0.0).as_secs())
        .collect();
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
    let fixed = RetryPolicy {
        backoff: Backoff::Fixed,
        ..policy()
    };
    let pauses: Vec<u64> = (1..=3).map(|used| pause(&fixed, used, 0.0).as_secs()).collect();
    assert_eq!(pauses, [1, 1, 1]);
}

#[test]
fn jitter_shortens_by_its_part_and_odd_samples_count_as_the_nearest() {
    for (jitter, ms) in [
        (0.0, 4000),
        (0.5, 3600),
        (1.0, 3200),
        (7.0, 3200),
        (-1.0, 4000),
        (f64::INFINITY, 3200),
        (f64::NEG_INFINITY, 4000),
        (f64::NAN, 4000),
    ] {
        assert_eq!(
            pause(&policy(), 3, jitter),
            Duration::from_millis(ms),
            "jitter {jitter}"
        );
    }
}

#[test]
fn the_largest_numbers_neither_overflow_nor_take_long() {
    let p = RetryPolicy {
        initial: Duration::from_nanos(1000),
        max: Duration::MAX,
        multiplier_permille: 1001,
        jitter_permille: 1000,
        ..policy()
    };
    assert_eq!(pause(&p, u32::MAX, 0.0), Duration::MAX);
    assert_eq!(pause(&p, u32::MAX, 1.0), Duration::ZERO);
    assert_eq!(not_before(&p, u32::MAX, None, at(1), 0.0).at, Timestamp::MAX);
    assert_eq!(
        not_before(&p, 1, Some(Duration::MAX), Timestamp::MAX, 0.0).at,
        Timestamp::MAX
    );
    let wide = RetryPolicy {
        multiplier_permille: u32::MAX,
        initial: Duration::MAX,
        ..p
    };
    assert_eq!(pause(&wide, u32::MAX, 0.0), Duration::MAX);
}

#[test]
fn the_later_of_pause_and_hint_counts_and_says_whose_it_is() {
    let now = at(1_000_000);
    for (hint, ms, hinted) in [
        (None, 1_001_000, false),
        (Some(0), 1_001_000, false),
        (Some(1000), 1_001_000, false),
        (Some(1001), 1_001_001, true),
        (Some(3_600_000), 4_600_000, true),
    ] {
        assert_eq!(
            not_before(&policy(), 1, hint.map(Duration::from_millis), now, 0.0),
            NotBefore { at: at(ms), hinted },
            "hint {hint:?}"
        );
    }
}

#[test]
fn a_limit_that_ran_out_is_exhausted_and_one_attempt_is_a_failure() {
    let lasting = Failure::new(FailureKind::InvalidInput, "400");
    let with = |max_attempts| RetryPolicy {
        max_attempts,
        ..policy()
    };
    let told = |used: u64, limit: u64| Next::Final {
        exhausted: Some(Exhausted {
            budget: "retry:charge".to_owned(),
            used,
            limit,
            decimals: 0,
        }),
    };
    let plain = Next::Final { exhausted: None };
    let again = |used| Next::Again(not_before(&with(9), used, None, at(5), 0.25));
    for (max, used, error, expected) in [
        (None, 1, retryable(), plain.clone()),
        (None, 2, retryable(), plain.clone()),
        (Some(1), 1, retryable(), plain.clone()),
        (Some(1), 3, retryable(), plain.clone()),
        (Some(2), 1, retryable(), again(1)),
        (Some(2), 2, retryable(), told(2, 2)),
        (Some(4), 3, retryable(), again(3)),
        (Some(4), 4, retryable(), told(4, 4)),
        (Some(2), 1, lasting.clone(), plain.clone()),
        (Some(2), 2, lasting, plain),
    ] {
        let policy = max.map(with);
        assert_eq!(
            after_failure(policy.as_ref(), &node(), used, &error, None, at(5), 0.25),
            expected,
            "max {max:?} used {used} retryable {}",
            error.retryable
        );
    }
}

fn any_policy() -> impl Strategy<Value = RetryPolicy> {
    (
        any::<bool>(),
        any::<Duration>(),
        any::<Duration>(),
        1000..=u32::MAX,
        0..=1000_u16,
    )
        .prop_map(
            |(fixed, a, b, multiplier_permille, jitter_permille)| RetryPolicy {
                label: "any".to_owned(),
                max_attempts: u32::MAX,
                backoff: if fixed {
                    Backoff::Fixed
                } else {
                    Backoff::Exponential
                },
                initial: a.min(b),
                max: a.max(b),
                multiplier_permille,
                jitter_permille,
            },
        )
}

proptest! {
    #[test]
    fn a_pause_stays_between_its_bounds_and_never_shrinks_with_attempts(
        policy in any_policy(),
        used in 1..=u32::MAX,
        jitter in 0.0..=1.0_f64,
    ) {
        prop_assert_eq!(check(&policy), Ok(()));
        let full = pause(&policy, used, 0.0);
        let cut = pause(&policy, used, jitter);
        prop_assert!(policy.initial <= full && full <= policy.max);
        prop_assert!(cut <= full);
        prop_assert!(pause(&policy, used, 1.0) <= cut);
        prop_assert!(pause(&policy, used.saturating_add(1), jitter) >= cut);
    }

    #[test]
    fn a_next_attempt_is_never_before_the_pause_the_hint_or_the_present(
        policy in any_policy(),
        used in 1..=u32::MAX,
        jitter in 0.0..=1.0_f64,
        now in 1..=Timestamp::MAX.as_millis(),
        hint in any::<Option<Duration>>(),
    ) {
        let now = at(now);
        let next = not_before(&policy, used, hint, now, jitter);
        let own = now.plus(pause(&policy, used, jitter));
        let hint = hint.map(|h| now.plus(h));
        prop_assert!(next.at >= now);
        prop_assert_eq!(next.at, hint.map_or(own, |h| h.max(own)));
        prop_assert_eq!(next.hinted, hint.is_some_and(|h| h > own));
    }
}
