//! What is armed, asked for again, and accepted back from the store.

use super::*;
use crate::ids::InvalidId;

#[test]
fn only_sound_waits_are_armed() {
    for kind in WaitingKind::ALL {
        let spec = WaitSpec {
            kind: *kind,
            ..spec()
        };
        let allowed = ["approval", "input", "event", "timer", "children"].contains(&kind.as_str());
        let expected = if allowed {
            Ok(())
        } else {
            Err(InvalidWait::Kind { kind: *kind })
        };
        assert_eq!(check(&spec), expected);
        // Only a timer must have a deadline; one that is over is a deadline too.
        let open = WaitSpec {
            deadline: None,
            ..spec.clone()
        };
        let expected = if *kind == WaitingKind::Timer {
            Err(InvalidWait::TimerWithoutDeadline)
        } else {
            expected
        };
        assert_eq!(check(&open), expected);
        let over = WaitSpec {
            deadline: Some(Timestamp::MIN),
            ..spec
        };
        assert_eq!(check(&over).is_ok(), allowed);
    }
}

#[test]
fn labels_are_short_text() {
    type Field = (&'static str, fn(&mut WaitLabels) -> &mut String);
    let fields: [Field; 3] = [
        ("labels.matcher", |l| &mut l.matcher),
        ("labels.payload", |l| &mut l.payload),
        ("labels.continuation", |l| &mut l.continuation),
    ];
    for (field, get) in fields {
        let with = |text: &str| {
            let mut spec = spec();
            text.clone_into(get(&mut spec.labels));
            check(&spec)
        };
        assert_eq!(with(""), Err(InvalidWait::Label(InvalidId::Empty { field })));
        assert_eq!(with("a\0b"), Err(InvalidWait::Label(InvalidId::Nul { field })));
        assert_eq!(
            with(&"é".repeat(129)),
            Err(InvalidWait::Label(InvalidId::TooLong { field, bytes: 258 }))
        );
        assert_eq!(with(&"é".repeat(128)), Ok(()));
        assert_eq!(with("\u{fffd}"), Ok(()));
    }
}

#[test]
fn asking_again_finds_the_record_and_a_changed_request_conflicts() {
    let armed = wait(DeadlinePolicy::FirstCommitted);
    let mut delivered = armed.clone();
    record(&mut delivered, &delivery("a", "x"), true, 50);
    let mut timed_out = armed.clone();
    assert!(time_out(&mut timed_out, at(DEADLINE)));
    let mut cancelled = armed.clone();
    assert!(withdraw(&mut cancelled, at(50)));
    let cases = [
        (armed, Armed::StillArmed),
        (delivered, Armed::Settled),
        (timed_out, Armed::Settled),
        (cancelled, Armed::Settled),
    ];
    type Change = (&'static str, fn(&mut WaitSpec));
    let changes: [Change; 9] = [
        ("key", |s| s.key = Key::new("other").unwrap()),
        ("correlation id", |s| {
            s.correlation = CorrelationId::new("order-8").unwrap();
        }),
        ("kind", |s| s.kind = WaitingKind::Input),
        ("continuation", |s| s.continuation = Continuation::Gate),
        ("labels", |s| s.labels.payload = "payload/2".to_owned()),
        ("subject", |s| s.subject = Payload::new("another prompt")),
        ("deadline", |s| s.deadline = None),
        ("deadline", |s| s.deadline = Some(at(DEADLINE + 1))),
        ("deadline policy", |s| s.deadline_policy = DeadlinePolicy::Hard),
    ];
    for (record, answer) in cases {
        assert_eq!(rearm(&record, &spec()), Ok(answer));
        for (what, change) in changes {
            let mut spec = spec();
            change(&mut spec);
            assert_eq!(rearm(&record, &spec), Err(InvalidWait::Changed { what }));
        }
        let unsound = WaitSpec {
            kind: WaitingKind::Retry,
            ..spec()
        };
        assert_eq!(
            rearm(&record, &unsound),
            Err(InvalidWait::Kind {
                kind: WaitingKind::Retry
            })
        );
    }
}

#[test]
fn what_the_machine_made_is_valid_and_what_it_cannot_make_is_not() {
    let run = address().run;
    let valid = |wait: &WaitRecord| {
        let armed = u32::from(wait.status == WaitStatus::Armed);
        validate(std::slice::from_ref(wait), &run, 3, armed)
    };
    let armed = wait(DeadlinePolicy::Hard);
    let mut delivered = armed.clone();
    record(&mut delivered, &delivery("a", "x"), true, 50);
    let mut timed_out = armed.clone();
    assert!(time_out(&mut timed_out, at(DEADLINE)));
    let mut cancelled = armed.clone();
    record_cancel(&mut cancelled, &cancellation("c", "x"), 50);
    let mut withdrawn = armed.clone();
    assert!(withdraw(&mut withdrawn, at(50)));
    // A host's clock that was set back after arming is no damage.
    let mut early = armed.clone();
    record(&mut early, &delivery("a", "x"), true, 1);
    for wait in [&armed, &delivered, &timed_out, &cancelled, &withdrawn, &early] {
        assert_eq!(valid(wait), Ok(()));
    }

    let settled = |change: fn(&mut Settled), from: &WaitRecord| {
        let mut wait = from.clone();
        change(wait.settled.as_mut().unwrap());
        wait
    };
    let turned = |change: fn(&mut WaitRecord), from: &WaitRecord| {
        let mut wait = from.clone();
        change(&mut wait);
        wait
    };
    let at_address = |activation, generation| {
        let address = Address {
            activation,
            ..address()
        };
        arm(&address, &spec(), generation, at(10))
    };
    let over = |mut wait: WaitRecord| {
        assert!(withdraw(&mut wait, at(20)));
        wait
    };
    assert_eq!(valid(&over(at_address(2, 1))), Ok(()));
    let damaged = [
        turned(|w| w.run = RunId::new("run_2").unwrap(), &armed),
        turned(|w| w.node = NodeName::new("other").unwrap(), &armed),
        turned(|w| w.key = Key::new("other").unwrap(), &armed),
        turned(|w| w.generation = 1, &armed),
        turned(|w| w.activation = 2, &armed),
        at_address(3, 0),
        at_address(0, 1),
        at_address(2, 1),
        at_address(4, 1),
        over(at_address(4, 1)),
        over(at_address(0, 1)),
        over(at_address(2, 0)),
        turned(|w| w.kind = WaitingKind::Retry, &armed),
        turned(|w| w.labels.matcher.clear(), &armed),
        turned(
            |w| {
                w.kind = WaitingKind::Timer;
                w.deadline = None;
            },
            &armed,
        ),
        // Status and settlement disagree.
        turned(|w| w.status = WaitStatus::Delivered, &armed),
        turned(|w| w.status = WaitStatus::TimedOut, &armed),
        turned(|w| w.status = WaitStatus::Cancelled, &armed),
        turned(|w| w.status = WaitStatus::Armed, &delivered),
        turned(|w| w.status = WaitStatus::TimedOut, &delivered),
        turned(|w| w.status = WaitStatus::Cancelled, &delivered),
        turned(|w| w.status = WaitStatus::Armed, &timed_out),
        turned(|w| w.status = WaitStatus::Delivered, &timed_out),
        turned(|w| w.status = WaitStatus::Armed, &cancelled),
        turned(|w| w.status = WaitStatus::Delivered, &cancelled),
        turned(|w| w.status = WaitStatus::TimedOut, &cancelled),
        turned(|w| w.settled = None, &delivered),
        settled(|s| s.by = None, &delivered),
        settled(|s| s.payload = None, &delivered),
        turned(|w| w.deliveries = 0, &delivered),
        turned(|w| w.kind = WaitingKind::Timer, &delivered),
        settled(|s| s.at = at(DEADLINE), &delivered),
        settled(|s| s.at = at(DEADLINE - 1), &timed_out),
        settled(|s| s.by = Some(DecisionId::new("x").unwrap()), &timed_out),
        settled(|s| s.payload = Some(Payload::new("x")), &timed_out),
        turned(|w| w.deadline = None, &timed_out),
        settled(|s| s.payload = Some(Payload::new("x")), &cancelled),
    ];
    for wait in &damaged {
        let why = valid(wait).expect_err(&format!("{wait:?}"));
        assert!(why.contains(wait.id.as_str()), "{why}");
    }
}

#[test]
fn the_waits_of_a_run_agree_with_each_other_and_with_the_head() {
    let run = address().run;
    let at_generation = |n| arm(&address(), &spec(), n, at(10));
    let other = {
        let spec = WaitSpec {
            key: Key::new("other").unwrap(),
            ..spec()
        };
        arm(&address(), &spec, 1, at(10))
    };
    let mut old = at_generation(1);
    assert!(withdraw(&mut old, at(20)));
    let mut past = arm(
        &Address {
            activation: 1,
            ..address()
        },
        &spec(),
        1,
        at(10),
    );
    record(&mut past, &delivery("a", "x"), true, 20);

    assert_eq!(validate(&[], &run, 3, 0), Ok(()));
    let whole = [past, at_generation(2), other, old.clone()];
    assert_eq!(validate(&whole, &run, 3, 2), Ok(()));
    for armed in [0, 1, 3, u32::MAX] {
        assert!(validate(&whole, &run, 3, armed).is_err(), "{armed}");
    }
    assert!(validate(&[], &run, 3, 1).is_err());
    // Twice the same, also in two states.
    let twice = [at_generation(1), at_generation(1)];
    assert!(validate(&twice, &run, 3, 2).unwrap_err().contains("twice"));
    assert!(
        validate(&[at_generation(1), old.clone()], &run, 3, 1)
            .unwrap_err()
            .contains("twice")
    );
    // An older generation is over.
    let both = [at_generation(2), at_generation(1)];
    assert!(
        validate(&both, &run, 3, 2)
            .unwrap_err()
            .contains("later generation")
    );
    let mut newer = at_generation(2);
    assert!(withdraw(&mut newer, at(20)));
    assert!(
        validate(&[at_generation(1), newer], &run, 3, 1)
            .unwrap_err()
            .contains("later generation")
    );
}
