use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::openai::event::{
    Dialect, EventKind, TerminalKind, classify, response_id, scan_committed, sequence_number,
};
use crate::openai::sse::SseScanner;
use crate::openai::usage::{Usage, usage_from_body};

const USAGE: Usage = Usage {
    input: 3,
    output: 2,
    cached: 1,
    reasoning: 1,
};

fn author() -> Author {
    Author {
        id: uuid::Uuid::from_u128(7),
        model: "m \"q\"".into(),
        created: 1,
    }
}

/// Name and data of every event.
fn events(bytes: &[u8]) -> Vec<(Option<String>, String)> {
    let (mut scanner, mut pos, mut all) = (SseScanner::new(), 0, Vec::new());
    let text = |b: &[u8]| String::from_utf8(b.to_vec()).unwrap();
    while let Some(event) = scanner.next_event(bytes, &mut pos) {
        all.push((
            event.name.as_deref().map(text),
            text(event.data.as_deref().unwrap()),
        ));
    }
    assert!(!scanner.finish());
    all
}

fn kinds(dialect: Dialect, bytes: &[u8]) -> Vec<EventKind> {
    events(bytes)
        .iter()
        .map(|(name, data)| classify(dialect, name.as_deref().map(str::as_bytes), data.as_bytes()))
        .collect()
}

fn chat_text(answer: &ChatAnswer, pieces: &[String], usage: Option<Usage>) -> Vec<u8> {
    let mut all = answer.text_begins().to_vec();
    for piece in pieces {
        all.extend_from_slice(&answer.text(piece));
    }
    all.extend_from_slice(&answer.ends(&Said::Text(&pieces.concat()), usage));
    all
}

fn responses_text(answer: &mut ResponsesAnswer, pieces: &[String], usage: Option<Usage>) -> Vec<u8> {
    let mut all = answer.begins().to_vec();
    all.extend_from_slice(&answer.text_begins());
    for piece in pieces {
        all.extend_from_slice(&answer.text(piece));
    }
    let whole = pieces.concat();
    all.extend_from_slice(&answer.text_ends(&whole));
    all.extend_from_slice(&answer.ends(&Said::Text(&whole), usage));
    all
}

const CALLS: [Call<'static>; 2] = [
    Call {
        name: "f",
        arguments: "{\"city\":\"Paris\"}",
    },
    Call {
        name: "g",
        arguments: "{}",
    },
];

#[test]
fn a_chat_stream_is_what_the_gate_reads() {
    use EventKind::{Content, Finish, Preamble, UsageOnly};
    let done = EventKind::Terminal(TerminalKind::Done);
    let pieces = ["he".to_owned(), "llo".to_owned()];
    for (asked, counted, told) in [
        (true, Some(USAGE), true),
        (true, None, false),
        (false, Some(USAGE), false),
    ] {
        let all = chat_text(&ChatAnswer::new(author(), asked), &pieces, counted);
        let mut want = vec![Preamble, Content, Content, Finish];
        if told {
            want.push(UsageOnly);
        }
        want.push(done.clone());
        assert_eq!(kinds(Dialect::Chat, &all), want);
        let read = events(&all);
        let usage = read
            .iter()
            .find_map(|(_, d)| scan_committed(Dialect::Chat, None, d.as_bytes()).usage);
        assert_eq!(usage, told.then_some(USAGE));
        for (_, data) in &read[..4] {
            let chunk: Value = data.parse().unwrap();
            assert_eq!(chunk.get("usage"), asked.then_some(&Value::Null), "{data}");
        }
    }
}

#[test]
fn a_chat_stream_of_calls_has_dense_indexes_and_whole_arguments() {
    let answer = ChatAnswer::new(author(), false);
    let mut all = answer.calls_begin().to_vec();
    for (i, call) in CALLS.iter().enumerate() {
        all.extend_from_slice(&answer.call_begins(i, call.name));
        all.extend_from_slice(&answer.arguments(i, call.arguments));
    }
    all.extend_from_slice(&answer.ends(&Said::Calls(&CALLS), None));
    assert_eq!(
        kinds(Dialect::Chat, &all)
            .iter()
            .filter(|k| **k == EventKind::Content)
            .count(),
        4
    );
    let whole: Value = serde_json::from_slice(&answer.whole(&Said::Calls(&CALLS), None)).unwrap();
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
    for (_, data) in events(&all) {
        let Ok(chunk) = data.parse::<Value>() else {
            continue;
        };
        let call = &chunk["choices"][0]["delta"]["tool_calls"][0];
        if call["id"].is_string() {
            let index = call["index"].as_u64().unwrap() as usize;
            let same = &whole["choices"][0]["message"]["tool_calls"][index];
            assert_eq!(
                (&call["id"], &call["function"]["name"]),
                (&same["id"], &same["function"]["name"])
            );
        }
    }
}

#[test]
fn a_responses_stream_has_one_id_and_ends_with_the_whole_response() {
    let pieces = ["he".to_owned(), "llo".to_owned()];
    let mut answer = ResponsesAnswer::new(author());
    let text = responses_text(&mut answer, &pieces, Some(USAGE));
    let whole_text = answer.whole(&Said::Text("hello"), Some(USAGE));
    let mut answer = ResponsesAnswer::new(author());
    let mut calls = answer.begins().to_vec();
    for (i, call) in CALLS.iter().enumerate() {
        calls.extend_from_slice(&answer.call_begins(i, call.name));
        calls.extend_from_slice(&answer.arguments(i, call.arguments));
        calls.extend_from_slice(&answer.arguments_end(i, *call));
        calls.extend_from_slice(&answer.call_ends(i, *call));
    }
    calls.extend_from_slice(&answer.ends(&Said::Calls(&CALLS), Some(USAGE)));
    let whole_calls = answer.whole(&Said::Calls(&CALLS), Some(USAGE));
    for (all, whole) in [(text, whole_text), (calls, whole_calls)] {
        let read = events(&all);
        let id = response_id(&whole).id;
        for (n, (name, data)) in read.iter().enumerate() {
            assert_eq!(sequence_number(data.as_bytes()), Some(n as u64));
            let event: Value = data.parse().unwrap();
            assert_eq!(event["type"].as_str(), name.as_deref());
            if event.get("response").is_some() {
                assert_eq!(response_id(data.as_bytes()).id, id);
            }
        }
        let (name, data) = read.last().unwrap();
        assert_eq!(name.as_deref(), Some("response.completed"));
        let last: Value = data.parse().unwrap();
        assert_eq!(last["response"], serde_json::from_slice::<Value>(&whole).unwrap());
        assert_eq!(usage_from_body(&whole), Some(USAGE));
        let kinds = kinds(Dialect::Responses, &all);
        assert_eq!(kinds[..2], [EventKind::Preamble, EventKind::Preamble]);
        assert_eq!(kinds.last(), Some(&EventKind::Terminal(TerminalKind::Completed)));
        assert!(!kinds.contains(&EventKind::Malformed) && !kinds.contains(&EventKind::Ignored));
    }
}

proptest! {
    /// Whatever is said: the pieces of the stream, its end and the whole answer say the same.
    #[test]
    fn pieces_add_up_to_the_whole(pieces in prop::collection::vec(".{0,6}|\\PC{0,4}|[\\r\\n\"\\\\]{1,3}", 0..6)) {
        let text = pieces.concat();
        let chat = ChatAnswer::new(author(), true);
        let said: String = events(&chat_text(&chat, &pieces, Some(USAGE)))
            .iter()
            .filter_map(|(_, d)| d.parse::<Value>().ok())
            .filter_map(|v| v["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
            .collect();
        prop_assert_eq!(&said, &text);
        let whole: Value = serde_json::from_slice(&chat.whole(&Said::Text(&text), None)).unwrap();
        prop_assert_eq!(whole["choices"][0]["message"]["content"].as_str(), Some(text.as_str()));

        let read = events(&responses_text(&mut ResponsesAnswer::new(author()), &pieces, None));
        let values: Vec<Value> = read.iter().map(|(_, d)| d.parse().unwrap()).collect();
        let said: String = values.iter().filter_map(|v| v["delta"].as_str()).collect();
        prop_assert_eq!(&said, &text);
        let done = values.iter().find(|v| v["type"] == "response.output_text.done").unwrap();
        prop_assert_eq!(done["text"].as_str(), Some(text.as_str()));
        let output = &values.last().unwrap()["response"]["output"][0]["content"][0]["text"];
        prop_assert_eq!(output.as_str(), Some(text.as_str()));
    }
}
