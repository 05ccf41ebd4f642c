use super::*;
use proptest::prelude::*;

const RULES: EjectionSettings = EjectionSettings {
    consecutive: 3,
    base: Duration::from_secs(2),
    max: Duration::from_secs(20),
};

fn secs(s: u64) -> Duration {
    Duration::from_secs(s)
}

fn failure(at: Instant) -> Told {
    Told::of(AttemptResult::Http5xx, None, || at)
}

fn success(at: Instant) -> Told {
    Told::of(AttemptResult::Success, None, || at)
}

/// One request after the other.
fn one(e: &mut Ejection, told: Told, now: Instant) -> (Pass, Option<Instant>) {
    let pass = e.admit(now);
    (pass, e.settle(pass, told, &RULES, true))
}

fn ejected(now: Instant) -> Ejection {
    let mut e = Ejection::default();
    for _ in 0..RULES.consecutive {
        one(&mut e, failure(now), now);
    }
    assert_eq!(e.standing(now), Standing::Ejected);
    e
}

#[test]
fn each_result_says_one_thing() {
    let now = Instant::now();
    for result in AttemptResult::ALL {
        let want = match result.as_str() {
            "success" => Word::Success,
            "connect_error" | "http_5xx" | "rate_limited" => Word::Failure { at: now },
            _ => Word::Nothing,
        };
        assert_eq!(Told::of(*result, None, || now).word, want, "{result}");
    }
}

#[test]
fn a_thousand_client_errors_eject_nobody() {
    let now = Instant::now();
    let mut e = Ejection::default();
    for _ in 0..1000 {
        one(&mut e, Told::of(AttemptResult::Http4xx, None, || now), now);
    }
    assert_eq!(e.standing(now), Standing::Open);
}

#[test]
fn failures_in_a_row_eject_and_a_success_between_them_does_not() {
    let now = Instant::now();
    let mut e = Ejection::default();
    for told in [failure, failure, success, failure, failure] {
        one(&mut e, told(now), now);
    }
    assert_eq!(e.standing(now), Standing::Open);
    let (_, wake) = one(&mut e, failure(now), now);
    assert_eq!(wake, Some(now + secs(2)));
    assert_eq!(e.standing(now), Standing::Ejected);
    assert_eq!(e.ejected_until(now), Some(now + secs(2)));
}

#[test]
fn a_trial_that_fails_ejects_longer_up_to_the_limit_and_a_success_forgets_it() {
    let mut now = Instant::now();
    let mut e = ejected(now);
    for length in [2, 4, 8, 16, 20, 20] {
        assert_eq!(e.ejected_until(now), Some(now + secs(length)));
        now += secs(length);
        assert_eq!(e.standing(now), Standing::Open);
        assert!(matches!(one(&mut e, failure(now), now).0, Pass::Trial(..)));
    }
    now += secs(20);
    one(&mut e, success(now), now);
    assert_eq!(one(&mut e, failure(now), now).0, Pass::Plain);
    for _ in 0..2 {
        one(&mut e, failure(now), now);
    }
    assert_eq!(e.ejected_until(now), Some(now + secs(2)));
}

#[test]
fn there_is_one_trial_at_a_time_and_one_without_a_word_is_given_again() {
    let mut now = Instant::now();
    let mut e = ejected(now);
    now += secs(2);
    for told in [
        Told::default(),
        Told::of(AttemptResult::Cancelled, None, || now),
        Told::of(AttemptResult::Http4xx, None, || now),
    ] {
        let trial = e.admit(now);
        assert!(matches!(trial, Pass::Trial(..)));
        assert_eq!(e.standing(now), Standing::Ejected);
        assert!(matches!(e.admit(now), Pass::Despite(_)));
        e.settle(trial, told, &RULES, true);
        assert_eq!(e.standing(now), Standing::Open);
    }
}

#[test]
fn words_about_older_times_decide_nothing() {
    let mut now = Instant::now();
    let mut e = Ejection::default();
    let early = [e.admit(now), e.admit(now), e.admit(now)];
    for _ in 0..RULES.consecutive {
        one(&mut e, failure(now), now);
    }
    let end = e.ejected_until(now);
    // Requests that began before the ejection end during it.
    e.settle(early[0], failure(now), &RULES, true);
    e.settle(early[1], success(now), &RULES, true);
    assert_eq!(e.ejected_until(now), end);
    now += secs(2);
    let old_trial = e.admit(now);
    let despite = e.admit(now);
    e.settle(despite, success(now), &RULES, true);
    assert_eq!(e.standing(now), Standing::Open);
    for _ in 0..RULES.consecutive {
        one(&mut e, failure(now), now);
    }
    now += secs(2);
    let trial = e.admit(now);
    assert!(matches!(trial, Pass::Trial(..)) && trial != old_trial);
    e.settle(old_trial, Told::default(), &RULES, true);
    assert_eq!(e.standing(now), Standing::Ejected);
}

#[test]
fn the_last_one_is_not_ejected_and_is_judged_again_at_its_next_failure() {
    let mut now = Instant::now();
    let mut e = Ejection::default();
    for _ in 0..9 {
        let pass = e.admit(now);
        assert_eq!(e.settle(pass, failure(now), &RULES, false), None);
        assert_eq!(e.standing(now), Standing::Open);
    }
    one(&mut e, failure(now), now);
    assert_eq!(e.standing(now), Standing::Ejected);
    now += secs(2);
    let trial = e.admit(now);
    e.settle(trial, failure(now), &RULES, false);
    assert_eq!(e.standing(now), Standing::Open);
}

#[test]
fn a_cool_down_ejects_nobody_is_capped_and_is_not_shortened() {
    let now = Instant::now();
    let mut e = Ejection::default();
    let limited = |seconds| Told::of(AttemptResult::RateLimited, Some(secs(seconds)), || now);
    assert_eq!(one(&mut e, limited(3600), now).1, Some(now + secs(120)));
    assert_eq!(e.standing(now), Standing::Cooling);
    assert_eq!(e.standing(now + secs(119)), Standing::Cooling);
    assert_eq!(e.standing(now + secs(120)), Standing::Open);
    assert_eq!(e.ejected_until(now), None);
    let early = e.admit(now);
    assert_eq!(e.settle(early, limited(1), &RULES, true), None);
    assert_eq!(e.standing(now + secs(2)), Standing::Cooling);
    // Whoever cools and is ejected is ejected first.
    let pass = e.admit(now);
    assert_eq!(
        e.settle(pass, limited(1), &RULES, true),
        Some(now + secs(2)),
        "the third failure"
    );
    assert_eq!(e.standing(now), Standing::Ejected);
    assert_eq!(e.standing(now + secs(3)), Standing::Cooling);
}

#[derive(Debug, Clone)]
enum Op {
    Admit,
    /// Settles one that is out: which, the result, `Retry-After` in seconds, whether there are others.
    Settle(prop::sample::Index, AttemptResult, Option<u64>, bool),
    /// Milliseconds.
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let results = prop_oneof![
        3 => Just(AttemptResult::Http5xx),
        1 => Just(AttemptResult::Success),
        1 => prop::sample::select(AttemptResult::ALL),
    ];
    prop_oneof![
        3 => Just(Op::Admit),
        3 => (any::<prop::sample::Index>(), results, prop::option::weighted(0.1, 0_u64..200), prop::bool::weighted(0.8))
            .prop_map(|(i, r, after, others)| Op::Settle(i, r, after, others)),
        1 => (0_u64..12_000).prop_map(Op::Wait),
    ]
}

/// One request that is out, as the naive model knows it.
#[derive(Clone, Copy)]
struct Out {
    pass: Pass,
    /// The ejection it was given under, by its place in the list of all.
    under: Option<usize>,
}

proptest! {
    /// The naive model keeps every ejection there was and every request that is out.
    #[test]
    fn it_agrees_with_the_list_of_all_ejections(ops in prop::collection::vec(op(), 0..200)) {
        let mut now = Instant::now();
        let mut e = Ejection::default();
        let mut out: Vec<Out> = Vec::new();
        // Their ends; the last one is undecided while `open`.
        let mut ejections: Vec<Instant> = Vec::new();
        let mut open = false;
        let (mut failures, mut in_a_row) = (0, 0);
        let mut cool = now;
        let mut trial: Option<Instant> = None;
        for op in ops {
            match op {
                Op::Wait(ms) => now += Duration::from_millis(ms),
                Op::Admit => {
                    let pass = e.admit(now);
                    let under = open.then(|| ejections.len() - 1);
                    match under {
                        None => prop_assert_eq!(pass, Pass::Plain),
                        Some(i) if ejections[i] <= now && trial.is_none_or(|until| until <= now) => {
                            prop_assert!(matches!(pass, Pass::Trial(..)));
                            trial = Some(now + TRIAL);
                        }
                        Some(_) => prop_assert!(matches!(pass, Pass::Despite(_))),
                    }
                    out.push(Out { pass, under });
                }
                Op::Settle(i, result, after, others) => {
                    if out.is_empty() {
                        continue;
                    }
                    let Out { pass, under } = out.swap_remove(i.index(out.len()));
                    let told = Told::of(result, after.map(secs), || now);
                    e.settle(pass, told, &RULES, others);
                    if let Some(after) = after {
                        cool = cool.max(now + secs(after.min(120)));
                    }
                    let of_this = open && under == Some(ejections.len() - 1);
                    let is_trial = of_this && matches!(pass, Pass::Trial(..));
                    if let Pass::Trial(_, until) = pass
                        && is_trial
                        && trial == Some(until)
                    {
                        trial = None;
                    }
                    match result.as_str() {
                        "success" if !open || of_this => {
                            (failures, in_a_row, open, trial) = (0, 0, false, None);
                        }
                        "connect_error" | "http_5xx" | "rate_limited" if !open || is_trial => {
                            failures += 1;
                            open = failures >= 3 && others;
                            if open {
                                trial = None;
                                ejections.push(now + secs([2, 4, 8, 16].get(in_a_row).copied().unwrap_or(20)));
                                in_a_row += 1;
                            }
                        }
                        _ => {}
                    }
                }
            }
            let want = if open && (trial.is_some_and(|until| until > now) || *ejections.last().unwrap() > now) {
                Standing::Ejected
            } else if cool > now {
                Standing::Cooling
            } else {
                Standing::Open
            };
            prop_assert_eq!(e.standing(now), want);
            prop_assert_eq!(e.ejected_until(now), ejections.last().copied().filter(|end| open && *end > now));
        }
    }
}

#[test]
fn a_trial_whose_answer_has_begun_is_no_longer_one() {
    let now = Instant::now();
    let mut ejection = Ejection::default();
    for _ in 0..RULES.consecutive {
        let failed = Told::of(AttemptResult::Http5xx, None, || now);
        ejection.settle(Pass::Plain, failed, &RULES, true);
    }
    let later = now + RULES.max;
    let pass = ejection.admit(later);
    assert!(matches!(pass, Pass::Trial(..)));
    assert_eq!(ejection.standing(later), Standing::Ejected);
    ejection.prove(Pass::Plain);
    assert_eq!(ejection.standing(later), Standing::Ejected);
    ejection.prove(pass);
    assert_eq!(
        (ejection.standing(later), ejection.admit(later)),
        (Standing::Open, Pass::Plain)
    );
    // What becomes of that answer counts as any other's end.
    ejection.settle(
        pass,
        Told::of(AttemptResult::Http5xx, None, || later),
        &RULES,
        true,
    );
    assert_eq!(ejection.standing(later), Standing::Open);
}

#[test]
fn a_trial_that_hangs_makes_room_for_another() {
    let now = Instant::now();
    let mut e = Ejection::default();
    for _ in 0..RULES.consecutive {
        let failed = Told::of(AttemptResult::Http5xx, None, || now);
        e.settle(Pass::Plain, failed, &RULES, true);
    }
    let due = now + RULES.base;
    assert!(matches!(e.admit(due), Pass::Trial(..)));
    assert!(matches!(e.admit(due + secs(1)), Pass::Despite(_)));
    let later = due + TRIAL;
    assert_eq!(e.standing(later), Standing::Open);
    assert!(matches!(e.admit(later), Pass::Trial(..)));
    assert_eq!(e.standing(later), Standing::Ejected);
}
