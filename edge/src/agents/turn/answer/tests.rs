use std::cell::RefCell;

use super::super::wire::words;
use super::*;

/// What events make of an answer, and what is shown of it.
fn assemble(events: &[&str]) -> Result<(TurnAnswer, Vec<Delta>), Broken> {
    let mut assembly = Assembly::new(1 << 20);
    let deltas = RefCell::new(Vec::new());
    for data in events {
        assembly.event(data, &|delta| deltas.borrow_mut().push(delta))?;
    }
    Ok((assembly.finish(1)?, deltas.into_inner()))
}

/// A chunk with this `delta`.
fn chunk(delta: &str) -> String {
    format!(
        r#"{{"object":"chat.completion.chunk","choices":[{{"index":0,"delta":{delta},"finish_reason":null}}]}}"#
    )
}

fn assembled(deltas: &[&str]) -> TurnAnswer {
    let chunks: Vec<String> = deltas.iter().map(|d| chunk(d)).collect();
    let events: Vec<&str> = chunks.iter().map(String::as_str).collect();
    assemble(&events).unwrap().0
}

fn calls(answer: &TurnAnswer) -> Vec<(&str, &str, &str)> {
    answer
        .tool_calls
        .iter()
        .map(|c| (c.id.as_str(), c.name.as_str(), c.arguments.as_str()))
        .collect()
}

#[test]
fn texts_are_appended_each_to_its_own() {
    let answer = assembled(&[
        r#"{"role":"assistant","content":"","refusal":null}"#,
        r#"{"reasoning_content":"Let me "}"#,
        r#"{"reasoning":"think."}"#,
        r#"{"reasoning_content":" Yes.","reasoning":" Yes."}"#,
        r#"{"content":"Hel"}"#,
        r#"{"content":"lo \"é\" \ud83d\ude00"}"#,
        r#"{"refusal":"No"}"#,
    ]);
    assert_eq!(answer.reasoning.as_deref(), Some("Let me think. Yes."));
    assert_eq!(answer.content.as_deref(), Some("Hello \"é\" 😀"));
    assert_eq!(answer.refusal.as_deref(), Some("No"));
    assert_eq!(
        (answer.finish_reason, answer.usage, answer.model),
        (None, None, None)
    );
}

#[test]
fn a_content_in_parts_is_its_texts() {
    let answer = assembled(&[
        r#"{"content":[{"type":"thinking","thinking":[]},{"type":"text","text":"a"},{"type":"text","text":"b"}]}"#,
    ]);
    assert_eq!(answer.content.as_deref(), Some("ab"));
}

#[test]
fn calls_are_told_apart_by_index_and_said_once() {
    let answer = assembled(&[
        r#"{"tool_calls":[{"index":1,"id":"b","type":"function","function":{"name":"g","arguments":""}}]}"#,
        r#"{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":"{\"x\""}},
            {"index":1,"function":{"arguments":"{}"}}]}"#,
        r#"{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":": 1}"}}]}"#,
        r#"{"tool_calls":[{"index":0,"id":"","function":{"name":"","arguments":null}}]}"#,
    ]);
    assert_eq!(calls(&answer), [("a", "f", "{\"x\": 1}"), ("b", "g", "{}")]);
}

#[test]
fn calls_of_one_index_or_of_none_are_told_apart_by_their_ids_and_names() {
    let one_index = assembled(&[
        r#"{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":"1"}}]}"#,
        r#"{"tool_calls":[{"index":0,"id":"b","function":{"name":"g","arguments":"2"}}]}"#,
        r#"{"tool_calls":[{"index":0,"function":{"arguments":"3"}}]}"#,
    ]);
    assert_eq!(calls(&one_index), [("a", "f", "1"), ("b", "g", "23")]);
    let no_index = assembled(&[
        r#"{"tool_calls":[{"id":"a","function":{"name":"f","arguments":"1"}},{"id":"b","function":{"name":"g"}}]}"#,
        r#"{"tool_calls":[{"function":{"arguments":"2"}}]}"#,
    ]);
    assert_eq!(calls(&no_index), [("a", "f", "1"), ("b", "g", "2")]);
    let no_id = assembled(&[
        r#"{"tool_calls":[{"function":{"name":"f","arguments":"1"}},{"function":{"name":"g","arguments":"2"}}]}"#,
    ]);
    assert_eq!(calls(&no_id), [("call_0", "f", "1"), ("call_1", "g", "2")]);
}

#[test]
fn what_is_shown_names_a_call_once() {
    let first = chunk(r#"{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":""}}]}"#);
    let again = chunk(r#"{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":"{}"}}]}"#);
    let empty = chunk(r#"{"tool_calls":[{"index":0,"function":{"arguments":""}}],"content":""}"#);
    let (_, deltas) = assemble(&[&first, &again, &empty]).unwrap();
    let call = |id: Option<&str>, name: Option<&str>, arguments: &str| Delta::Call {
        index: 0,
        id: id.map(str::to_owned),
        name: name.map(str::to_owned),
        arguments: arguments.to_owned(),
    };
    assert_eq!(deltas, [call(Some("a"), Some("f"), ""), call(None, None, "{}")]);
}

#[test]
fn an_id_that_can_be_no_key_is_refused() {
    let with = |id: &str| {
        let call = format!(r#"{{"tool_calls":[{{"index":0,"id":{id},"function":{{"name":"f"}}}}]}}"#);
        assemble(&[&chunk(&call)]).map(|(answer, _)| answer.tool_calls[0].id.clone())
    };
    let long = |n: usize| format!("\"{}\"", "x".repeat(n));
    for none in ["null", "\"\"", "7"] {
        assert_eq!(with(none).unwrap(), "call_0");
    }
    assert_eq!(with(&long(240)).unwrap().len(), 240);
    for id in [&long(241), "\"a\\u0000b\""] {
        assert_eq!(with(id), Err(Broken::BadId), "{id}");
    }
    // An id that comes late is one all the same.
    let answer = assembled(&[
        r#"{"tool_calls":[{"index":0,"id":"","function":{"name":"f"}}]}"#,
        r#"{"tool_calls":[{"index":0,"id":"late"}]}"#,
    ]);
    assert_eq!(answer.tool_calls[0].id, "late");
}

#[test]
fn the_end_of_an_answer_tells_why_and_what_it_took() {
    let finish = r#"{"model":"q","choices":[{"index":0,"delta":{},"finish_reason":"length"}],"usage":null}"#;
    let usage = r#"{"model":"r","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,
        "prompt_tokens_details":{"cached_tokens":5},"completion_tokens_details":{"reasoning_tokens":1}}}"#;
    let unsaid =
        r#"{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":""}],"usage":{"prompt_tokens":1}}"#;
    let mut assembly = Assembly::new(100);
    assert_eq!(assembly.event(unsaid, &|_| {}), Ok(Took::More));
    assert!(!assembly.is_finished());
    assert_eq!(assembly.event(finish, &|_| {}), Ok(Took::More));
    assert!(assembly.is_finished());
    assert_eq!(assembly.event(usage, &|_| {}), Ok(Took::More));
    assert_eq!(assembly.event(" ", &|_| {}), Ok(Took::More));
    assert_eq!(assembly.event("[DONE]", &|_| {}), Ok(Took::Done));
    let answer = assembly.finish(3).unwrap();
    assert_eq!(answer.finish_reason.as_deref(), Some("length"));
    assert_eq!((answer.attempts, answer.model.as_deref()), (3, Some("q")));
    let usage = answer.usage.unwrap();
    assert_eq!(
        (usage.input, usage.output, usage.cached, usage.reasoning),
        (9, 4, 5, 1)
    );
}

#[test]
fn only_the_first_choice_counts() {
    let two = r#"{"choices":[{"index":1,"delta":{"content":"b"}},{"index":0,"delta":{"content":"a"}}]}"#;
    assert_eq!(assemble(&[two]).unwrap().0.content.as_deref(), Some("a"));
}

#[test]
fn an_error_in_the_stream_is_kept_as_it_is_written_and_its_word_in_a_text_is_none() {
    let error = r#"{"error":{"message":"no","code":"slow_down"}}"#;
    let Broken::Said(said) = assemble(&[error]).unwrap_err() else {
        panic!("it is the provider's own");
    };
    assert_eq!(said.status, Some(503));
    let want = (Some("no".to_owned()), Some("slow_down".to_owned()));
    assert_eq!(words(&said.raw), want);
    let quoted = chunk(r#"{"content":"{\"error\":{\"message\":\"no\"}}"}"#);
    assert!(assemble(&[&quoted]).is_ok());
    let null = r#"{"error":null,"choices":[{"delta":{"content":"a"}}]}"#;
    assert_eq!(assemble(&[null]).unwrap().0.content.as_deref(), Some("a"));
}

#[test]
fn what_is_no_chunk_is_malformed() {
    for data in [
        "{",
        "[]",
        "\"text\"",
        "7",
        r#"{"choices":7}"#,
        &chunk(r#"{"content":"\ud83d"}"#),
    ] {
        assert_eq!(assemble(&[data]).unwrap_err(), Broken::Malformed, "{data}");
    }
    let mut assembly = Assembly::new(100);
    for body in [
        "",
        "[]",
        "{}",
        r#"{"choices":[]}"#,
        r#"{"choices":[{"index":0}]}"#,
    ] {
        assert_eq!(
            assembly.whole(body.as_bytes(), &|_| {}),
            Err(Broken::Malformed),
            "{body}"
        );
    }
}

#[test]
fn an_answer_is_bounded_over_all_its_texts() {
    let texts = [
        r#"{"content":"12345"}"#,
        r#"{"reasoning":"12345"}"#,
        r#"{"refusal":"12345"}"#,
        r#"{"tool_calls":[{"index":0,"id":"12345","function":{"name":"12345","arguments":"12345"}}]}"#,
    ];
    let whole = 30 + CALL_WEIGHT;
    for (max, fits) in [(whole, true), (whole - 1, false)] {
        let mut assembly = Assembly::new(max);
        let took: Result<Vec<_>, _> = texts.iter().map(|t| assembly.event(&chunk(t), &|_| {})).collect();
        match took {
            Ok(_) => assert!(fits),
            Err(e) => assert_eq!((fits, e), (false, Broken::TooLarge(max))),
        }
    }
    // A piece that says nothing costs something when it begins a call.
    let mut assembly = Assembly::new(CALL_WEIGHT * 2);
    let begins = |n: u32| chunk(&format!(r#"{{"tool_calls":[{{"index":{n}}}]}}"#));
    assert!(assembly.event(&begins(0), &|_| {}).is_ok());
    assert!(assembly.event(&begins(u32::MAX), &|_| {}).is_ok());
    assert_eq!(
        assembly.event(&begins(1), &|_| {}),
        Err(Broken::TooLarge(CALL_WEIGHT * 2))
    );
}

#[test]
fn no_index_follows_the_last_one() {
    let answer = assemble(&[
        &chunk(r#"{"tool_calls":[{"index":4294967295,"id":"a","function":{"name":"f"}}]}"#),
        &chunk(r#"{"tool_calls":[{"index":4294967295,"id":"b","function":{"name":"g"}}]}"#),
    ]);
    assert_eq!(answer.unwrap_err(), Broken::Malformed);
}

#[test]
fn a_stored_answer_reads_back_and_says_nothing_of_what_is_not_there() {
    let answer = TurnAnswer {
        tool_calls: vec![ToolCall {
            id: "a".to_owned(),
            name: "f".to_owned(),
            arguments: "{\"n\": 1.50}".to_owned(),
        }],
        attempts: 1,
        ..TurnAnswer::default()
    };
    let text = serde_json::to_string(&answer).unwrap();
    assert_eq!(
        text,
        r#"{"tool_calls":[{"id":"a","name":"f","arguments":"{\"n\": 1.50}"}],"attempts":1}"#
    );
    assert_eq!(serde_json::from_str::<TurnAnswer>(&text).unwrap(), answer);
}
