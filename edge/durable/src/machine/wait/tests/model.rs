//! Random sequences against a naive model: a list of everything that was ever said to the wait, searched from the start.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::envelope::WaitRow;

#[derive(Debug, Clone)]
enum Op {
    /// Some ids return, with the same or with another payload.
    Deliver {
        id: u8,
        payload: u8,
        labelled: bool,
        matched: bool,
    },
    Cancel {
        id: u8,
        reason: u8,
    },
    TimeOut,
    Withdraw,
    /// The clock moves, sometimes back.
    Clock(i64),
    /// The record goes to its row and back.
    Store,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..6u8, 0..2u8, prop::bool::weighted(0.2), prop::bool::weighted(0.3)).prop_map(
            |(id, payload, labelled, matched)| Op::Deliver { id, payload, labelled, matched }
        ),
        2 => (0..6u8, 0..2u8).prop_map(|(id, reason)| Op::Cancel { id, reason }),
        2 => Just(Op::TimeOut),
        1 => prop::bool::weighted(0.2).prop_map(|end| if end { Op::Withdraw } else { Op::Store }),
        3 => (-20..60i64).prop_map(Op::Clock),
    ]
}

/// One thing that was recorded: an id, what it said and what it was told.
struct Said {
    id: u8,
    content: String,
    answer: &'static str,
}

/// The model: answers by searching the past.
#[derive(Default)]
struct Past {
    said: Vec<Said>,
    /// What settled the wait: `delivered`, `timed_out`, `cancelled`.
    over: Option<&'static str>,
}

impl Past {
    /// `accepted` and so on when it is recorded, `replay accepted` when it was before, `refused …` when it is not.
    fn deliver(
        &mut self,
        id: u8,
        content: String,
        matched: bool,
        late: bool,
        hard: bool,
        limit: usize,
    ) -> String {
        if let Some(said) = self.said.iter().find(|said| said.id == id) {
            return if said.content == content {
                format!("replay {}", said.answer)
            } else {
                "refused conflict".to_owned()
            };
        }
        let expired = hard && (self.over == Some("timed_out") || (self.over.is_none() && late));
        if expired {
            return "refused expired".to_owned();
        }
        let deliveries = self.said.iter().filter(|said| said.answer != "cancelled");
        if deliveries.count() == limit {
            return "refused too_many".to_owned();
        }
        let answer = match self.over {
            Some("cancelled") => "canceled",
            Some(_) => "superseded",
            None if matched => {
                self.over = Some("delivered");
                "accepted"
            }
            None => "unmatched",
        };
        self.said.push(Said { id, content, answer });
        answer.to_owned()
    }

    fn cancel(&mut self, id: u8, content: String) -> String {
        if let Some(said) = self.said.iter().find(|said| said.id == id) {
            return if said.content == content {
                format!("replay {}", said.answer)
            } else {
                "refused conflict".to_owned()
            };
        }
        if self.over.is_some() {
            return "refused already_settled".to_owned();
        }
        self.over = Some("cancelled");
        let answer = "cancelled";
        self.said.push(Said { id, content, answer });
        answer.to_owned()
    }
}

fn said_of_delivery(result: &Result<Delivered, DeliveryRefused>) -> String {
    match result {
        Ok(Delivered::Recorded { verdict, .. }) => verdict.to_string(),
        Ok(Delivered::Replayed { verdict }) => format!("replay {verdict}"),
        Err(refused) => format!("refused {}", refused.kind()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn the_machine_is_the_naive_model(
        hard in any::<bool>(),
        deadline in prop::option::of(40..120i64),
        limit in 0..8u32,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let policy = if hard { DeadlinePolicy::Hard } else { DeadlinePolicy::FirstCommitted };
        let spec = WaitSpec { deadline: deadline.map(at), deadline_policy: policy, ..spec() };
        let mut wait = arm(&address(), &spec, 1, at(10));
        let mut past = Past::default();
        let mut ledger: BTreeMap<u8, DecisionRecord> = BTreeMap::new();
        let mut winner = None;
        let mut now = 10i64;
        for op in ops {
            let due = deadline.is_some_and(|deadline| deadline <= now);
            let before = wait.clone();
            let mut asked = 0;
            match op.clone() {
                Op::Deliver { id, payload, labelled, matched } => {
                    let sent = Delivery {
                        labels: labelled.then(labels),
                        by: Some(now.to_string()),
                        ..delivery(&format!("d{id}"), ["x", "y"][usize::from(payload)])
                    };
                    let result = deliver(&mut wait, &sent, ledger.get(&id), || { asked += 1; matched }, at(now), limit);
                    let content = format!("deliver {payload} {labelled}");
                    let expected = past.deliver(id, content, matched, due, hard, limit as usize);
                    prop_assert_eq!(said_of_delivery(&result), expected.clone(), "{:?}", op);
                    let could_win = ["accepted", "unmatched"].contains(&expected.as_str());
                    prop_assert_eq!(asked, u32::from(could_win), "{:?}", op);
                    if let Ok(Delivered::Recorded { decision, .. }) = result {
                        prop_assert!(ledger.insert(id, decision).is_none(), "an id is decided once");
                    } else {
                        prop_assert_eq!(&wait, &before, "refusals and replays change nothing");
                    }
                }
                Op::Cancel { id, reason } => {
                    let word = cancellation(&format!("d{id}"), ["x", "y"][usize::from(reason)]);
                    let result = cancel(&mut wait, &word, ledger.get(&id), at(now));
                    let got = match &result {
                        Ok(Cancelled::Recorded { .. }) => "cancelled".to_owned(),
                        Ok(Cancelled::Replayed) => "replay cancelled".to_owned(),
                        Err(refused) => format!("refused {}", refused.kind()),
                    };
                    prop_assert_eq!(got, past.cancel(id, format!("cancel {reason}")), "{:?}", op);
                    if let Ok(Cancelled::Recorded { decision }) = result {
                        prop_assert!(ledger.insert(id, decision).is_none(), "an id is decided once");
                    } else {
                        prop_assert_eq!(&wait, &before);
                    }
                }
                Op::TimeOut => {
                    let expected = due && past.over.is_none();
                    prop_assert_eq!(time_out(&mut wait, at(now)), expected);
                    if expected {
                        past.over = Some("timed_out");
                    }
                }
                Op::Withdraw => {
                    prop_assert_eq!(withdraw(&mut wait, at(now)), past.over.is_none());
                    past.over.get_or_insert("cancelled");
                }
                Op::Clock(step) => now = (now + step).max(1),
                Op::Store => {
                    let row = WaitRow::seal(&wait).unwrap();
                    let stored = row.open(wait.run.as_str(), None, None).unwrap();
                    prop_assert_eq!(&stored, &wait);
                    wait = stored;
                }
            }
            // Settled at most once, and what settled it stays.
            prop_assert_eq!(wait.status.as_str(), past.over.unwrap_or("armed"));
            prop_assert_eq!(wait.settled.is_some(), past.over.is_some());
            if winner.is_some() {
                prop_assert_eq!(&wait.settled, &winner);
            }
            winner.clone_from(&wait.settled);
            let deliveries = past.said.iter().filter(|said| said.answer != "cancelled").count();
            prop_assert_eq!(wait.deliveries as usize, deliveries);
            prop_assert!(wait.deliveries <= limit);
            let armed = u32::from(past.over.is_none());
            prop_assert_eq!(validate(std::slice::from_ref(&wait), &wait.run, 3, armed), Ok(()));
            prop_assert_eq!(rearm(&wait, &spec).is_ok_and(|a| a == Armed::StillArmed), past.over.is_none());
        }
        let accepted = past.said.iter().filter(|said| said.answer == "accepted").count();
        prop_assert!(accepted <= 1);
        prop_assert_eq!(accepted == 1, wait.status == WaitStatus::Delivered);
    }
}
