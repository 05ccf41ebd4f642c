//! What a client may and may not have seen.

use serde_json::Value;

use super::answers::{Answers, Api};
use super::bench::{Bench, Cell, Seen};
use super::script::WORDS;
use crate::client::{Answer, sse_data};

/// The name of the first provider, in everything it sends.
pub const PRIMARY: &str = "primary";
/// The name of the second provider, in everything it sends.
pub const SECOND: &str = "second";

impl Seen {
    /// Everything that the client got, as text.
    fn everything(&self) -> String {
        let head: String = self
            .answer
            .head
            .headers
            .iter()
            .map(|(k, v)| format!("{k}: {v}\n"))
            .collect();
        format!("{}\n{head}\n{}", self.answer.status(), self.answer.text())
    }

    /// `x-iop-attempts`.
    ///
    /// # Panics
    /// When it is missing or no number.
    pub fn attempts(&self) -> usize {
        let value = self.answer.header("x-iop-attempts");
        value
            .and_then(|v| v.parse().ok())
            .unwrap_or_else(|| panic!("x-iop-attempts: {value:?} in\n{}", self.everything()))
    }

    /// Checks that this is the whole good answer of one provider after so many attempts, and of nobody else.
    ///
    /// # Panics
    /// When it is not.
    pub fn assert_clean(&self, cell: Cell, answers: &Answers, attempts: usize) {
        self.assert_clean_words(cell, answers, attempts, WORDS);
    }

    /// The same for a stream of so many words.
    ///
    /// # Panics
    /// When it is not.
    pub fn assert_clean_words(&self, cell: Cell, answers: &Answers, attempts: usize, words: usize) {
        let (all, what) = (self.everything(), cell.model());
        let answer = &self.answer;
        assert_eq!((answer.status(), answer.complete), (200, true), "{what}:\n{all}");
        assert_eq!(self.attempts(), attempts, "{what}:\n{all}");
        let marks = [
            ("x-provider", answers.provider.clone()),
            ("x-request-id", format!("req-{}", answers.provider)),
            ("openai-version", format!("of-{}", answers.provider)),
        ];
        for (name, value) in marks {
            assert_eq!(answer.head.all(name), [value.as_str()], "{what}: {name}:\n{all}");
        }
        for name in ["retry-after", "retry-after-ms", "x-should-retry"] {
            assert_eq!(answer.header(name), None, "{what}: {name}:\n{all}");
        }
        assert!(answer.header("x-iop-request-id").is_some(), "{what}:\n{all}");
        let media = answer.header("content-type").unwrap_or_default();
        let expected = if cell.stream {
            assert!(media.starts_with("text/event-stream"), "{what}: {media}");
            answers.stream(words).all().concat()
        } else {
            assert!(media.starts_with("application/json"), "{what}: {media}");
            answers.whole()
        };
        assert_bytes(&what, &answer.body, &expected);
        let other = if answers.provider == PRIMARY {
            SECOND
        } else {
            PRIMARY
        };
        assert!(!all.contains(other), "{what}: a trace of {other}:\n{all}");
        if cell.stream && cell.api == Api::Responses {
            assert_gapless(&answer.text());
        }
    }

    /// Checks that a stream is `sent`, byte for byte, then one typed error with this code, then nothing.
    ///
    /// # Panics
    /// When it is not.
    pub fn assert_broken_off(&self, cell: Cell, answers: &Answers, sent: &[Vec<u8>], code: &str) {
        let (what, answer) = (cell.model(), &self.answer);
        let all = self.everything();
        assert_eq!((answer.status(), answer.complete), (200, true), "{what}:\n{all}");
        let prefix = sent.concat();
        let shared = answer.body.len().min(prefix.len());
        assert_bytes(&what, &answer.body[..shared], &prefix);
        let rest = String::from_utf8_lossy(&answer.body[prefix.len()..]).into_owned();
        let error = typed_error(cell.api, answers, sent.len(), &rest);
        assert_eq!(error["code"], code, "{what}: {rest}");
        assert!(
            error["message"].as_str().is_some_and(|m| !m.is_empty()),
            "{what}: {rest}"
        );
        for success in ["[DONE]", "response.completed"] {
            assert!(!answer.text().contains(success), "{what}: {success}:\n{all}");
        }
    }
}

/// The error of the one event that ends a stream, `number` events after its beginning.
///
/// # Panics
/// When the text is anything else than that event.
pub fn typed_error(api: Api, answers: &Answers, number: usize, text: &str) -> Value {
    let data = sse_data(text);
    assert_eq!(data.len(), 1, "one event: {text:?}");
    let json: Value = serde_json::from_str(&data[0]).unwrap();
    match api {
        Api::Chat => {
            assert_eq!(text, format!("data: {}\n\n", data[0]), "no more than the event");
            let error = &json["error"];
            for key in ["message", "type", "param", "code"] {
                assert!(error.get(key).is_some(), "without {key}: {text}");
            }
            error.clone()
        }
        Api::Responses => {
            let whole = format!("event: response.failed\ndata: {}\n\n", data[0]);
            assert_eq!(text, whole, "no more than the event");
            assert_eq!(json["type"], "response.failed", "{text}");
            assert_eq!(json["sequence_number"], number, "{text}");
            assert_eq!(json["response"]["id"], answers.id().as_str(), "{text}");
            assert_eq!(json["response"]["status"], "failed", "{text}");
            json["response"]["error"].clone()
        }
    }
}

/// Checks that a Responses stream is numbered from 0 without a gap, with one `response.created` and one id.
///
/// # Panics
/// When it is not.
pub fn assert_gapless(text: &str) {
    let events: Vec<Value> = sse_data(text)
        .iter()
        .map(|d| serde_json::from_str(d).unwrap())
        .collect();
    let numbers: Vec<u64> = events
        .iter()
        .map(|e| e["sequence_number"].as_u64().unwrap())
        .collect();
    let dense: Vec<u64> = (0..events.len() as u64).collect();
    assert_eq!(numbers, dense, "{text}");
    let created = events.iter().filter(|e| e["type"] == "response.created").count();
    assert_eq!(created, 1, "{text}");
    let mut ids: Vec<&str> = events
        .iter()
        .filter_map(|e| e["response"]["id"].as_str())
        .collect();
    ids.dedup();
    assert_eq!(ids.len(), 1, "{text}");
}

/// Compares bytes and shows where they part.
///
/// # Panics
/// When they differ.
pub fn assert_bytes(what: &str, seen: &[u8], expected: &[u8]) {
    if seen == expected {
        return;
    }
    let at = seen
        .iter()
        .zip(expected)
        .position(|(a, b)| a != b)
        .unwrap_or(seen.len().min(expected.len()));
    let around = |bytes: &[u8]| {
        let from = at.saturating_sub(80).min(bytes.len());
        String::from_utf8_lossy(&bytes[from..(at + 160).min(bytes.len())]).into_owned()
    };
    panic!(
        "{what}: {} bytes, not {}; they part at {at}:\n{:?}\nexpected\n{:?}",
        seen.len(),
        expected.len(),
        around(seen),
        around(expected)
    );
}

/// Checks status and body of a provider's own answer.
///
/// # Panics
/// When they differ.
pub fn assert_own_answer(what: &str, answer: &Answer, status: u16, body: &str) {
    assert_eq!(
        (answer.status(), answer.complete),
        (status, true),
        "{what}: {}",
        answer.text()
    );
    assert_bytes(what, &answer.body, body.as_bytes());
}

impl Bench {
    /// Checks how many attempts each provider saw on the target of a cell.
    ///
    /// # Panics
    /// When it were others.
    pub fn assert_counts(&self, cell: Cell, primary: usize, second: usize) {
        let target = cell.target();
        assert_eq!(
            (self.primary.attempts(&target), self.second.attempts(&target)),
            (primary, second),
            "attempts on (primary, second) of {}",
            cell.model()
        );
    }

    /// The good answers of the first provider to a cell.
    pub fn of_primary(&self, cell: Cell) -> Answers {
        self.primary.answers(cell.api, &cell.target())
    }

    /// The good answers of the second provider to a cell.
    pub fn of_second(&self, cell: Cell) -> Answers {
        self.second.answers(cell.api, &cell.target())
    }
}
