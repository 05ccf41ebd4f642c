//! What any answer must be, whatever happened on the way to it.

use std::collections::BTreeSet;

use iop_durable::runner::CallError;
use iop_shared::execution::Endpoint;

use super::plan::{Asking, REPLY};
use super::{MAX_ATTEMPTS, Saw};
use crate::agents::turn::TurnAnswer;

/// What any answer must be, whatever happened on the way.
pub(super) fn judge_answer(asking: &Asking, saw: &Saw) {
    if saw.left {
        return;
    }
    let text = String::from_utf8_lossy(&saw.body);
    assert!(saw.attempts <= MAX_ATTEMPTS, "{} attempts", saw.attempts);
    let said: BTreeSet<char> = content(&text);
    assert!(said.len() <= 1, "two providers in one answer: {text}");
    if asking.stream && saw.status == 200 {
        let success = text.contains("data: [DONE]") || text.contains("\"response.completed\"");
        let error = text.contains("data: {\"error\":") || text.contains("\"response.failed\"");
        assert!(
            u8::from(success) + u8::from(error) + u8::from(saw.broke_off) == 1,
            "a stream ends in exactly one way: {text}"
        );
        if asking.endpoint == Endpoint::Responses {
            judge_numbers(&text);
        }
    } else {
        assert!(!saw.broke_off, "{text}");
        let value: serde_json::Value = serde_json::from_slice(&saw.body).expect(&text);
        assert_eq!(
            saw.status == 200,
            value.get("error").is_none_or(serde_json::Value::is_null),
            "{text}"
        );
    }
}

/// What any turn must come to: one provider's whole answer, or a failure that says what it is.
pub(super) fn judge_turn(turn: &Result<TurnAnswer, CallError>) {
    match turn {
        Ok(answer) => {
            let content = answer.content.as_deref().unwrap_or_default();
            let said: BTreeSet<char> = content.chars().collect();
            assert_eq!((content.len(), said.len()), (REPLY, 1), "{answer:?}");
            assert_eq!(answer.finish_reason.as_deref(), Some("stop"));
            assert!((1..=MAX_ATTEMPTS).contains(&answer.attempts), "{answer:?}");
        }
        Err(CallError::Failed { failure, .. }) => {
            assert!(
                !failure.code.is_empty() && !failure.message.is_empty(),
                "{failure:?}"
            );
            assert!(!failure.retryable || failure.kind.resumable(), "{failure:?}");
        }
        Err(CallError::Unknown) => panic!("a turn has no effect that could be unknown"),
    }
}

/// `sequence_number` counts from 0 without a gap, under one id.
fn judge_numbers(text: &str) {
    let mut next = 0;
    let mut ids = BTreeSet::new();
    for data in text.lines().filter_map(|l| l.strip_prefix("data: ")) {
        let event: serde_json::Value = serde_json::from_str(data).expect(data);
        assert_eq!(event["sequence_number"], next, "{text}");
        next += 1;
        if let Some(id) = event["response"]["id"].as_str() {
            ids.insert(id.to_owned());
        }
    }
    assert!(ids.len() <= 1, "two responses in one stream: {text}");
    assert_eq!(
        text.matches("event: response.created").count(),
        usize::from(next > 0),
        "{text}"
    );
}

/// The letters of all deltas and answers: runs of one provider's letter inside `"content":"…"` and its kin.
fn content(text: &str) -> BTreeSet<char> {
    let mut letters = BTreeSet::new();
    for key in ["\"content\":\"", "\"delta\":\"", "\"text\":\""] {
        for (i, _) in text.match_indices(key) {
            letters.extend(text[i + key.len()..].chars().take_while(|c| *c != '"'));
        }
    }
    letters
}
