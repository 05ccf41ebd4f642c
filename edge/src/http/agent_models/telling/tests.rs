use iop_durable::record::Status;
use iop_durable::time::Timestamp;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn event(name: &'static str, terminal: bool, data: &Value) -> EventRecord {
    EventRecord {
        seq: 1,
        life: 1,
        name: name.into(),
        terminal,
        time: Timestamp::MIN,
        data: data.to_string().into(),
    }
}

fn says(turn: u64, offset: usize, text: &str) -> Vec<u8> {
    json!({"turn": turn, "offset": offset, "text": text})
        .to_string()
        .into_bytes()
}

fn answer(text: &str) -> TurnAnswer {
    TurnAnswer {
        content: Some(text.to_owned()).filter(|text| !text.is_empty()),
        ..TurnAnswer::default()
    }
}

fn waiting(kinds: &[&str]) -> EventRecord {
    let on: Vec<Value> = kinds
        .iter()
        .map(|kind| json!({"kind": kind, "id": "w", "node": "action", "key": "c.0"}))
        .collect();
    event("run.waiting", false, &json!({"reason": "x", "waiting_on": on}))
}

/// Messages as a reader of the parts has them: what was said, and whether it counts.
fn read(parts: &[Part]) -> Vec<(String, bool)> {
    let (mut messages, mut open): (Vec<_>, Option<String>) = (Vec::new(), None);
    for part in parts {
        match part {
            Part::Begins => assert_eq!(open.replace(String::new()), None),
            Part::Says(text) => open.as_mut().unwrap().push_str(text),
            Part::Broken(text) | Part::Ends(text) => {
                let said = open.take().unwrap();
                assert_eq!(said, *text);
                messages.push((said, matches!(part, Part::Ends(_))));
            }
        }
    }
    assert_eq!(open, None);
    messages
}

#[test]
fn pieces_are_told_at_once_and_the_stored_text_completes_them() {
    let mut telling = Telling::default();
    let mut parts = telling.piece(&says(1, 0, "a"));
    assert_eq!(parts, [Part::Begins, Part::Says("a".to_owned())]);
    parts.extend(telling.piece(&says(1, 1, "b")));
    parts.extend(telling.turn(1, answer("abc")));
    assert_eq!(read(&parts), [("abc".to_owned(), true)]);
    // What comes after the turn is stored is old.
    assert_eq!(telling.piece(&says(1, 0, "a")), []);
    // A turn of calls alone says nothing.
    assert_eq!(telling.turn(2, answer("")), []);
}

#[test]
fn an_attempt_that_was_given_up_is_broken_off() {
    let mut telling = Telling::default();
    let mut parts = telling.piece(&says(1, 0, "half"));
    parts.extend(telling.piece(&says(1, 0, "other")));
    parts.extend(telling.turn(1, answer("other text")));
    assert_eq!(
        read(&parts),
        [("half".to_owned(), false), ("other text".to_owned(), true)]
    );
    parts = telling.piece(&says(2, 0, "never"));
    parts.extend(telling.ends(None));
    assert_eq!(read(&parts), [("never".to_owned(), false)]);
}

#[test]
fn a_missed_piece_waits_for_the_stored_text() {
    let mut telling = Telling::default();
    // Begun before anybody listened.
    assert_eq!(telling.piece(&says(1, 4, "late")), []);
    let mut parts = telling.turn(1, answer("too late"));
    parts.extend(telling.piece(&says(2, 0, "one")));
    assert_eq!(telling.piece(&says(2, 5, "three")), []);
    assert_eq!(telling.piece(&says(2, 3, "!!")), []);
    parts.extend(telling.turn(2, answer("one, three")));
    assert_eq!(
        read(&parts),
        [("too late".to_owned(), true), ("one, three".to_owned(), true)]
    );
}

#[test]
fn an_answer_ends_where_only_people_can_go_on() {
    let mut telling = Telling::default();
    for (kinds, ends) in [
        (&["approval"][..], true),
        (&["approval", "input"], true),
        (&["reconciliation", "approval"], true),
        (&["resume"], true),
        (&["approval", "retry"], false),
        (&["approval", "children"], false),
        (&["timer"], false),
        (&["event"], false),
        (&[], false),
    ] {
        let heard = telling.event(&waiting(kinds));
        assert_eq!(matches!(heard, Heard::Pause(_)), ends, "{kinds:?}");
    }
    let outcome = json!({"status": "failed", "reason": "error", "output": null, "error": null, "exhausted": null,
        "cancel": null, "effects": [], "evidence": [], "usage": null});
    let heard = telling.event(&event("run.failed", true, &json!({"outcome": outcome})));
    assert!(matches!(heard, Heard::Over(outcome) if outcome.status == Status::Failed));
    let created = event("run.created", false, &json!({}));
    assert!(matches!(telling.event(&created), Heard::Nothing));
}

#[test]
fn the_text_of_a_turn_that_is_gone_is_the_output() {
    let mut outcome = Outcome::new(Status::Succeeded, iop_durable::record::Reason::Completed);
    outcome.output = Some(serde_json::value::to_raw_value("the end").unwrap());
    for heard in [None, Some("the e"), Some("other")] {
        let mut telling = Telling::default();
        let mut parts = Vec::new();
        if let Some(heard) = heard {
            parts.extend(telling.piece(&says(1, 0, heard)));
        }
        telling.gone(1);
        parts.extend(telling.ends(Some(&outcome)));
        assert_eq!(read(&parts).last().unwrap(), &("the end".to_owned(), true));
    }
    // A turn that was told is not told again.
    let mut telling = Telling::default();
    telling.turn(1, answer("the end"));
    assert_eq!(telling.ends(Some(&outcome)), []);
}

#[test]
fn usage_is_the_sum_of_the_turns() {
    let mut telling = Telling::default();
    assert_eq!(telling.usage(), None);
    for turn in 1..=2 {
        let usage = json!({"input_tokens": 3, "output_tokens": 2, "cached_tokens": 1, "reasoning_tokens": 0, "total_tokens": 5});
        let done = json!({"turn": turn, "finish_reason": "stop", "tool_calls": 0, "usage": usage});
        let heard = telling.event(&event(TURN_COMPLETED, false, &done));
        assert!(matches!(heard, Heard::Turn(n) if n == turn));
    }
    assert_eq!(
        telling.usage(),
        Some(Usage {
            input: 6,
            output: 4,
            cached: 2,
            reasoning: 0
        })
    );
}

proptest! {
    /// Whatever pieces of whatever attempts arrive or are lost, what counts is the stored text, once, and it comes last.
    #[test]
    fn the_stored_text_is_what_counts(
        attempts in prop::collection::vec(prop::collection::vec(("[a-cé]{0,3}", any::<bool>()), 0..5), 1..4),
    ) {
        let mut telling = Telling::default();
        let (mut parts, mut stored) = (Vec::new(), String::new());
        for attempt in &attempts {
            stored.clear();
            for (text, lost) in attempt {
                if !lost {
                    parts.extend(telling.piece(&says(1, stored.len(), text)));
                }
                stored.push_str(text);
            }
        }
        parts.extend(telling.turn(1, answer(&stored)));
        let messages = read(&parts);
        let counting: Vec<&String> = messages.iter().filter(|(_, whole)| *whole).map(|(text, _)| text).collect();
        if stored.is_empty() {
            prop_assert!(counting.iter().all(|text| text.is_empty()));
        } else {
            prop_assert_eq!(counting, [&stored]);
            prop_assert!(messages.last().is_some_and(|(_, whole)| *whole));
        }
    }
}
