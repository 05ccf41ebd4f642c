mod model;
mod structure;

use bytes::Bytes;

use super::*;
use crate::record::Scope;

fn at(ms: i64) -> Timestamp {
    Timestamp::from_millis(ms).unwrap()
}

fn labels() -> WaitLabels {
    WaitLabels {
        matcher: "match/1".to_owned(),
        payload: "payload/1".to_owned(),
        continuation: "next/1".to_owned(),
    }
}

const DEADLINE: i64 = 100;
const LIMIT: u32 = 8;

fn spec() -> WaitSpec {
    WaitSpec {
        key: Key::new("signoff").unwrap(),
        correlation: CorrelationId::new("order-7").unwrap(),
        kind: WaitingKind::Event,
        continuation: Continuation::Nodes {
            on_event: NodeName::new("welcome").unwrap(),
            on_timeout: NodeName::new("escalate").unwrap(),
        },
        labels: labels(),
        subject: Payload::new("prompt"),
        deadline: Some(at(DEADLINE)),
        deadline_policy: DeadlinePolicy::FirstCommitted,
    }
}

fn address() -> Address {
    Address {
        run: RunId::new("run_1").unwrap(),
        node: NodeName::new("wait").unwrap(),
        activation: 3,
    }
}

fn wait(policy: DeadlinePolicy) -> WaitRecord {
    let spec = WaitSpec {
        deadline_policy: policy,
        ..spec()
    };
    arm(&address(), &spec, 2, at(10))
}

fn delivery(id: &str, payload: &'static str) -> Delivery {
    Delivery {
        id: DecisionId::new(id).unwrap(),
        correlation: spec().correlation,
        generation: None,
        labels: None,
        payload: Payload::new(payload),
        by: Some("ops".to_owned()),
        revision: Revision::FIRST,
    }
}

fn cancellation(id: &str, reason: &str) -> Cancellation {
    Cancellation {
        id: DecisionId::new(id).unwrap(),
        reason: reason.to_owned(),
        evidence: "ticket 9".to_owned(),
        by: Some("ops".to_owned()),
        revision: Revision::FIRST,
    }
}

fn never() -> bool {
    panic!("the matcher was asked about a delivery that cannot win")
}

/// Delivers a new id; the decision of it.
fn record(wait: &mut WaitRecord, delivery: &Delivery, matched: bool, now: i64) -> DecisionRecord {
    match deliver(wait, delivery, None, || matched, at(now), LIMIT).unwrap() {
        Delivered::Recorded { decision, .. } => decision,
        Delivered::Replayed { .. } => panic!("nothing was recorded before"),
    }
}

fn record_cancel(wait: &mut WaitRecord, cancellation: &Cancellation, now: i64) -> DecisionRecord {
    match cancel(wait, cancellation, None, at(now)).unwrap() {
        Cancelled::Recorded { decision } => decision,
        Cancelled::Replayed => panic!("nothing was recorded before"),
    }
}

#[test]
fn arming_takes_everything_from_the_request() {
    let wait = arm(&address(), &spec(), 2, at(10));
    assert_eq!(
        wait.id,
        WaitId::derive(&wait.run, &wait.node, 3, &Key::new("signoff").unwrap(), 2)
    );
    assert_eq!(
        (wait.status, wait.deliveries, &wait.settled),
        (WaitStatus::Armed, 0, &None)
    );
    assert_eq!(
        (wait.armed_at, wait.deadline, wait.generation),
        (at(10), Some(at(DEADLINE)), 2)
    );
    assert_eq!(
        (&wait.labels, &wait.subject),
        (&labels(), &Payload::new("prompt"))
    );
    assert_ne!(wait.id, arm(&address(), &spec(), 3, at(10)).id);
    assert_eq!(wait.id, arm(&address(), &spec(), 2, at(11)).id);
}

/// What an event does, as a word.
fn outcome(wait: &mut WaitRecord, event: &str, now: i64, asked: &mut u32) -> &'static str {
    let before = wait.clone();
    let word = match event {
        "match" | "mismatch" => {
            let matcher = || {
                *asked += 1;
                event == "match"
            };
            match deliver(wait, &delivery("new", "new"), None, matcher, at(now), LIMIT) {
                Ok(Delivered::Recorded { verdict, .. }) => verdict.as_str(),
                Ok(Delivered::Replayed { .. }) => "replayed",
                Err(refused) => refused.kind(),
            }
        }
        "timer" => {
            if time_out(wait, at(now)) {
                "timed_out"
            } else {
                "-"
            }
        }
        "cancel" => match cancel(wait, &cancellation("new", "gone"), None, at(now)) {
            Ok(Cancelled::Recorded { .. }) => "cancelled",
            Ok(Cancelled::Replayed) => "replayed",
            Err(refused) => refused.kind(),
        },
        "end" => {
            if withdraw(wait, at(now)) {
                "withdrawn"
            } else {
                "-"
            }
        }
        other => panic!("{other}"),
    };
    // What the word says is what became of the record, and nothing else did.
    let recorded = ["accepted", "unmatched", "superseded", "canceled"].contains(&word);
    assert_eq!(wait.deliveries, before.deliveries + u32::from(recorded), "{word}");
    let settled = |status, by: Option<&str>, payload| {
        let by = by.map(|id| DecisionId::new(id).unwrap());
        (
            status,
            Some(Settled {
                by,
                payload,
                at: at(now),
            }),
        )
    };
    let expected = match word {
        "accepted" => settled(WaitStatus::Delivered, Some("new"), Some(Payload::new("new"))),
        "timed_out" => settled(WaitStatus::TimedOut, None, None),
        "cancelled" => settled(WaitStatus::Cancelled, Some("new"), None),
        "withdrawn" => settled(WaitStatus::Cancelled, None, None),
        _ => (before.status, before.settled.clone()),
    };
    assert_eq!((wait.status, wait.settled.clone()), expected, "{word}");
    let untouched = WaitRecord {
        status: wait.status,
        settled: wait.settled.clone(),
        deliveries: wait.deliveries,
        ..before
    };
    assert_eq!(*wait, untouched);
    word
}

/// Every status, both policies, before and at the deadline, every event. `(not due, due)` per event.
#[test]
fn every_status_and_event() {
    use DeadlinePolicy::{FirstCommitted, Hard};
    const EVENTS: [&str; 5] = ["match", "mismatch", "timer", "cancel", "end"];
    let open = ["accepted", "unmatched", "-", "cancelled", "withdrawn"];
    let due = ["accepted", "unmatched", "timed_out", "cancelled", "withdrawn"];
    let late = ["expired", "expired", "timed_out", "cancelled", "withdrawn"];
    let lost = ["superseded", "superseded", "-", "already_settled", "-"];
    let over = ["expired", "expired", "-", "already_settled", "-"];
    let gone = ["canceled", "canceled", "-", "already_settled", "-"];
    let table = [
        ("armed", FirstCommitted, open, due),
        ("armed", Hard, open, late),
        ("delivered", FirstCommitted, lost, lost),
        ("delivered", Hard, lost, lost),
        ("timed_out", FirstCommitted, lost, lost),
        ("timed_out", Hard, over, over),
        ("cancelled", FirstCommitted, gone, gone),
        ("cancelled", Hard, gone, gone),
        ("withdrawn", FirstCommitted, gone, gone),
        ("withdrawn", Hard, gone, gone),
    ];
    let mut cells = 0;
    for (status, policy, before, at_deadline) in table {
        for (now, row) in [(DEADLINE - 1, before), (DEADLINE, at_deadline)] {
            for (event, expected) in EVENTS.into_iter().zip(row) {
                let mut wait = wait(policy);
                match status {
                    "armed" => {}
                    "delivered" => drop(record(&mut wait, &delivery("first", "first"), true, 50)),
                    "timed_out" => assert!(time_out(&mut wait, at(DEADLINE))),
                    "cancelled" => drop(record_cancel(&mut wait, &cancellation("first", "first"), 50)),
                    "withdrawn" => assert!(withdraw(&mut wait, at(50))),
                    other => panic!("{other}"),
                }
                let mut asked = 0;
                let got = outcome(&mut wait, event, now, &mut asked);
                assert_eq!(got, expected, "{status} {policy} at {now}: {event}");
                let could_win = ["accepted", "unmatched"].contains(&expected);
                assert_eq!(asked, u32::from(could_win), "{status} {policy} at {now}: {event}");
                cells += 1;
            }
        }
    }
    assert_eq!(cells, 100);
    let covered: std::collections::BTreeSet<_> =
        table.iter().filter_map(|(s, ..)| WaitStatus::parse(s)).collect();
    assert_eq!(covered.len(), WaitStatus::ALL.len());
}

#[test]
fn a_wait_without_a_deadline_is_never_due() {
    for policy in DeadlinePolicy::ALL {
        let mut wait = wait(*policy);
        wait.deadline = None;
        assert!(!time_out(&mut wait, Timestamp::MAX));
        let mut asked = 0;
        assert_eq!(
            outcome(&mut wait, "match", 9_999_999, &mut asked),
            "accepted",
            "{policy}"
        );
    }
}

#[test]
fn a_timer_takes_no_deliveries_but_times_out_and_can_be_cancelled() {
    let mut timer = wait(DeadlinePolicy::FirstCommitted);
    timer.kind = WaitingKind::Timer;
    for status in WaitStatus::ALL {
        let mut timer = WaitRecord {
            status: *status,
            ..timer.clone()
        };
        let refused = deliver(&mut timer, &delivery("a", "x"), None, never, at(50), LIMIT);
        assert_eq!(refused, Err(DeliveryRefused::NotArmed), "{status}");
    }
    assert!(time_out(&mut timer.clone(), at(DEADLINE)));
    record_cancel(&mut timer, &cancellation("c", "x"), 50);
    assert_eq!(timer.status, WaitStatus::Cancelled);
}

#[test]
fn a_delivery_for_something_else_is_refused_before_the_matcher_is_asked() {
    let base = delivery("a", "x");
    let labelled = |change: fn(&mut WaitLabels)| {
        let mut labels = labels();
        change(&mut labels);
        Delivery {
            labels: Some(labels),
            ..base.clone()
        }
    };
    let generation = |n| Delivery {
        generation: Some(n),
        ..base.clone()
    };
    let mismatch = |which| DeliveryRefused::LabelMismatch { which };
    let table = [
        (generation(1), DeliveryRefused::StaleGeneration { current: 2 }),
        (generation(3), DeliveryRefused::FutureGeneration),
        (
            Delivery {
                correlation: CorrelationId::new("order-8").unwrap(),
                ..base.clone()
            },
            DeliveryRefused::WrongCorrelation,
        ),
        (
            labelled(|l| l.matcher = "match/2".to_owned()),
            mismatch(Label::Matcher),
        ),
        (
            labelled(|l| l.payload = "payload/2".to_owned()),
            mismatch(Label::Payload),
        ),
        (
            labelled(|l| l.continuation = "next/2".to_owned()),
            mismatch(Label::Continuation),
        ),
    ];
    // Whatever became of the wait: a delivery for something else is no loser of it.
    for policy in DeadlinePolicy::ALL {
        let armed = wait(*policy);
        let mut delivered = armed.clone();
        record(&mut delivered, &delivery("first", "first"), true, 50);
        let mut timed_out = armed.clone();
        assert!(time_out(&mut timed_out, at(DEADLINE)));
        let mut cancelled = armed.clone();
        record_cancel(&mut cancelled, &cancellation("first", "first"), 50);
        for wait in [armed, delivered, timed_out, cancelled] {
            for (delivery, refusal) in &table {
                let mut after = wait.clone();
                let refused = deliver(&mut after, delivery, None, never, at(50), LIMIT);
                assert_eq!(refused, Err(refusal.clone()));
                assert_eq!(after, wait);
            }
        }
    }
    // The right generation and labels, said out loud, are as good as none.
    let exact = Delivery {
        labels: Some(labels()),
        ..generation(2)
    };
    let mut wait = wait(DeadlinePolicy::Hard);
    record(&mut wait, &exact, true, 50);
    assert_eq!(wait.status, WaitStatus::Delivered);
}

#[test]
fn a_recorded_delivery_replays_for_ever_and_other_content_conflicts() {
    let sent = delivery("a", "x");
    for matched in [true, false] {
        let verdict = if matched {
            Verdict::Accepted
        } else {
            Verdict::Unmatched
        };
        let mut wait = wait(DeadlinePolicy::Hard);
        let first = record(&mut wait, &sent, matched, 50);
        // Another sender, a later head, a full ledger, after the deadline, after the end: the same answer.
        let again = Delivery {
            by: None,
            revision: Revision::new(9).unwrap(),
            generation: Some(2),
            ..sent.clone()
        };
        for ended in [false, true] {
            if ended {
                assert_eq!(withdraw(&mut wait, at(60)), !matched);
            }
            let before = wait.clone();
            let answer = deliver(&mut wait, &again, Some(&first), never, at(DEADLINE), 0);
            assert_eq!(answer, Ok(Delivered::Replayed { verdict }));
            let changed = [
                delivery("a", "y"),
                Delivery {
                    correlation: CorrelationId::new("order-8").unwrap(),
                    ..sent.clone()
                },
                Delivery {
                    labels: Some(labels()),
                    ..sent.clone()
                },
                Delivery {
                    labels: Some(WaitLabels {
                        matcher: String::new(),
                        payload: String::new(),
                        continuation: String::new(),
                    }),
                    ..sent.clone()
                },
            ];
            for changed in &changed {
                let refused = deliver(&mut wait, changed, Some(&first), never, at(60), LIMIT);
                assert_eq!(refused, Err(DeliveryRefused::Conflict));
            }
            let refused = cancel(&mut wait, &cancellation("a", "x"), Some(&first), at(60));
            assert_eq!(refused, Err(DeliveryRefused::Conflict));
            assert_eq!(wait, before);
        }
    }
}

#[test]
fn a_late_delivery_after_a_cancellation_is_recorded_once_and_replayed() {
    let mut wait = wait(DeadlinePolicy::FirstCommitted);
    let word = cancellation("c", "gone");
    let first = record_cancel(&mut wait, &word, 40);
    let winner = wait.settled.clone();
    let late = delivery("a", "x");
    let Ok(Delivered::Recorded { verdict, decision }) = deliver(&mut wait, &late, None, never, at(50), LIMIT)
    else {
        panic!("a late delivery is recorded");
    };
    assert_eq!((verdict, wait.deliveries), (Verdict::Canceled, 1));
    let again = deliver(&mut wait, &late, Some(&decision), never, at(60), LIMIT);
    assert_eq!(
        again,
        Ok(Delivered::Replayed {
            verdict: Verdict::Canceled
        })
    );
    assert_eq!(wait.deliveries, 1);
    // The cancellation is the same one while its content is, whoever repeats it.
    let repeated = Cancellation {
        by: None,
        revision: Revision::new(7).unwrap(),
        ..word.clone()
    };
    assert_eq!(
        cancel(&mut wait, &repeated, Some(&first), at(60)),
        Ok(Cancelled::Replayed)
    );
    let changed = [
        cancellation("c", "other"),
        Cancellation {
            evidence: String::new(),
            ..word
        },
    ];
    for changed in changed {
        let refused = cancel(&mut wait, &changed, Some(&first), at(60));
        assert_eq!(refused, Err(DeliveryRefused::Conflict));
    }
    // Its id cannot name a delivery.
    let refused = deliver(&mut wait, &delivery("c", "x"), Some(&first), never, at(60), LIMIT);
    assert_eq!(refused, Err(DeliveryRefused::Conflict));
    assert_eq!(wait.settled, winner);
}

#[test]
fn a_wait_takes_so_many_deliveries_and_no_more() {
    let mut wait = wait(DeadlinePolicy::FirstCommitted);
    let sent = [delivery("a", "x"), delivery("b", "x")];
    let kept: Vec<_> = sent.iter().map(|d| record(&mut wait, d, false, 50)).collect();
    let full = wait.clone();
    let refused = deliver(&mut wait, &delivery("c", "x"), None, never, at(50), 2);
    assert_eq!(refused, Err(DeliveryRefused::TooMany { limit: 2 }));
    for (sent, kept) in sent.iter().zip(&kept) {
        let replayed = deliver(&mut wait, sent, Some(kept), never, at(50), 2);
        assert_eq!(
            replayed,
            Ok(Delivered::Replayed {
                verdict: Verdict::Unmatched
            })
        );
    }
    assert_eq!(wait, full);
    // A cancellation is no delivery, and neither is the timer.
    assert!(time_out(&mut wait.clone(), at(DEADLINE)));
    record_cancel(&mut wait, &cancellation("d", "flooded"), 50);
    let refused = deliver(&mut wait, &delivery("c", "x"), None, never, at(50), 2);
    assert_eq!(refused, Err(DeliveryRefused::TooMany { limit: 2 }));
}

#[test]
fn decisions_say_who_decided_what_on_which_evidence() {
    let mut wait = wait(DeadlinePolicy::FirstCommitted);
    let sent = Delivery {
        labels: Some(labels()),
        ..delivery("a", "secret")
    };
    let decision = record(&mut wait, &sent, false, 50);
    assert_eq!(
        (&decision.run, &decision.scope, decision.created_at),
        (&wait.run, &Scope::Wait(wait.id.clone()), at(50))
    );
    let body: serde_json::Value = serde_json::from_slice(&decision.body).unwrap();
    assert_eq!(
        body,
        serde_json::json!({
            "act": "deliver",
            "verdict": "unmatched",
            "generation": 2,
            "revision": "1",
            "by": "ops",
            "correlation_id": "order-7",
            "labels": { "matcher": "match/1", "payload": "payload/1", "continuation": "next/1" },
            "payload_bytes": 6,
            "payload_digest": Payload::new("secret").digest_text(),
        })
    );
    let decision = record_cancel(&mut wait, &cancellation("c", "gone \0 \u{fffd}"), 60);
    let body: serde_json::Value = serde_json::from_slice(&decision.body).unwrap();
    assert_eq!(
        body,
        serde_json::json!({
            "act": "cancel",
            "generation": 2,
            "revision": "1",
            "by": "ops",
            "reason": "gone \0 \u{fffd}",
            "evidence": "ticket 9",
        })
    );
    assert!(matches!(
        WaitDecision::decode(&decision.body),
        Ok(WaitDecision::Cancel { generation: 2, .. })
    ));
}

#[test]
fn a_decision_of_another_ledger_is_corrupt_and_answers_nothing() {
    let mut wait = wait(DeadlinePolicy::FirstCommitted);
    let sent = delivery("a", "x");
    let good = record(&mut wait, &sent, false, 50);
    let mut other = arm(&address(), &spec(), 1, at(10));
    let cancelled = record_cancel(&mut other, &cancellation("a", "x"), 50);
    let tampered = [
        DecisionRecord {
            run: RunId::new("run_2").unwrap(),
            ..good.clone()
        },
        DecisionRecord {
            scope: Scope::Cancel,
            ..good.clone()
        },
        DecisionRecord {
            scope: cancelled.scope.clone(),
            ..good.clone()
        },
        DecisionRecord {
            id: DecisionId::new("b").unwrap(),
            ..good.clone()
        },
        DecisionRecord {
            body: Bytes::from_static(b"{}"),
            ..good.clone()
        },
        // The content of the delivery over the body of a cancellation.
        DecisionRecord {
            body: cancelled.body.clone(),
            ..good.clone()
        },
    ];
    for record in &tampered {
        let before = wait.clone();
        let refused = deliver(&mut wait, &sent, Some(record), never, at(50), LIMIT).unwrap_err();
        assert_eq!(refused.kind(), "corrupt");
        assert_eq!(wait, before);
    }
    let wrong_body = DecisionRecord {
        body: good.body,
        ..cancelled
    };
    let refused = cancel(&mut other, &cancellation("a", "x"), Some(&wrong_body), at(50)).unwrap_err();
    assert_eq!(refused.kind(), "corrupt");
}
