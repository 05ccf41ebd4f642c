use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn chat(data: &str) -> EventKind {
    classify(Dialect::Chat, None, data.as_bytes())
}

fn error(kind: EventKind) -> InBandError {
    if let EventKind::Error(error) = kind {
        error
    } else {
        panic!("no error: {kind:?}")
    }
}

fn responses(data: &str) -> EventKind {
    classify(Dialect::Responses, None, data.as_bytes())
}

#[test]
fn chat_events_are_what_they_hold() {
    for (delta, want) in [
        (r#"{"role":"assistant"}"#, EventKind::Preamble),
        (r#"{"role":"assistant","content":""}"#, EventKind::Preamble),
        (
            r#"{"role":"assistant","content":null,"refusal":null}"#,
            EventKind::Preamble,
        ),
        (r#"{"tool_calls":[]}"#, EventKind::Preamble),
        (r#"{"content":" "}"#, EventKind::Content),
        (r#"{"content":"\ud83e"}"#, EventKind::Content),
        (r#"{"reasoning_content":"hm"}"#, EventKind::Content),
        (r#"{"reasoning":"hm"}"#, EventKind::Content),
        (r#"{"refusal":"no"}"#, EventKind::Content),
        (r#"{"tool_calls":[{"index":0}]}"#, EventKind::Content),
        (r#"{"function_call":{"name":"f"}}"#, EventKind::Content),
        (r#"{"audio":{"data":"x"}}"#, EventKind::Content),
    ] {
        let data = format!(r#"{{"choices":[{{"index":0,"delta":{delta},"finish_reason":null}}]}}"#);
        assert_eq!(chat(&data), want, "{delta}");
    }
    assert_eq!(
        chat(r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#),
        EventKind::Finish
    );
    assert_eq!(
        chat(r#"{"choices":[],"usage":{"prompt_tokens":1}}"#),
        EventKind::UsageOnly
    );
    assert_eq!(
        chat(r#"{"choices":[],"prompt_filter_results":[]}"#),
        EventKind::Preamble
    );
    assert_eq!(chat("[DONE]"), EventKind::Terminal(TerminalKind::Done));
    assert_eq!(chat("[DONE] "), EventKind::Terminal(TerminalKind::Done));
    for bad in ["<html>", "[1]", "{\"choices\":", "\"[DONE]\"", "\u{1}"] {
        assert_eq!(chat(bad), EventKind::Malformed, "{bad}");
    }
    let text = classify(Dialect::Completions, None, br#"{"choices":[{"text":"a"}]}"#);
    assert_eq!(text, EventKind::Content);
}

#[test]
fn errors_inside_a_200_keep_their_object_and_get_their_status() {
    for (data, status, raw) in [
        (
            r#"{"error":{"message":"m","code":429}}"#,
            Some(429),
            r#"{"message":"m","code":429}"#,
        ),
        (
            r#"{"error":{"message":"m","code":"503"}}"#,
            Some(503),
            r#"{"message":"m","code":"503"}"#,
        ),
        (
            r#"{"error":{"message":"m","type":"rate_limit_error"}}"#,
            Some(429),
            r#"{"message":"m","type":"rate_limit_error"}"#,
        ),
        (r#"{"error":{"message":"m"}}"#, None, r#"{"message":"m"}"#),
        (
            r#"{"error":"m"}"#,
            None,
            r#"{"message":"m","type":"server_error","param":null,"code":null}"#,
        ),
        (
            r#"{"object":"error","message":"m","code":400}"#,
            Some(400),
            r#"{"object":"error","message":"m","code":400}"#,
        ),
    ] {
        let e = error(chat(data));
        assert_eq!((e.status, &e.raw[..]), (status, raw.as_bytes()), "{data}");
    }
    assert_eq!(
        chat(r#"{"error":null,"choices":[{"delta":{"content":"a"}}]}"#),
        EventKind::Content
    );
    let event = r#"{"type":"error","code":"rate_limit_exceeded","message":"m","sequence_number":0}"#;
    let e = error(responses(event));
    assert_eq!(e.status, Some(429));
    let object: Value = serde_json::from_slice(&e.raw).unwrap();
    assert_eq!(
        object,
        json!({"message":"m","type":"server_error","param":null,"code":"rate_limit_exceeded"})
    );
}

#[test]
fn responses_events_are_what_they_are_called() {
    for (kind, extra, want) in [
        (
            "response.created",
            r#","response":{"id":"r"}"#,
            EventKind::Preamble,
        ),
        ("response.in_progress", "", EventKind::Preamble),
        ("response.output_item.added", "", EventKind::Preamble),
        ("response.content_part.added", "", EventKind::Preamble),
        (
            "response.output_text.delta",
            r#","delta":"a""#,
            EventKind::Content,
        ),
        (
            "response.output_text.delta",
            r#","delta":"""#,
            EventKind::Preamble,
        ),
        (
            "response.reasoning_summary_text.delta",
            r#","delta":"a""#,
            EventKind::Content,
        ),
        (
            "response.function_call_arguments.delta",
            r#","delta":"{""#,
            EventKind::Content,
        ),
        ("response.output_item.done", "", EventKind::Content),
        (
            "response.completed",
            "",
            EventKind::Terminal(TerminalKind::Completed),
        ),
        (
            "response.failed",
            r#","error":null"#,
            EventKind::Terminal(TerminalKind::Failed),
        ),
        (
            "response.incomplete",
            "",
            EventKind::Terminal(TerminalKind::Incomplete),
        ),
        ("response.web_search_call.searching", "", EventKind::Ignored),
    ] {
        assert_eq!(
            responses(&format!(r#"{{"type":"{kind}"{extra}}}"#)),
            want,
            "{kind}"
        );
        // The name stands in for an absent type.
        let named = classify(
            Dialect::Responses,
            Some(kind.as_bytes()),
            format!(r#"{{"x":1{extra}}}"#).as_bytes(),
        );
        assert_eq!(named, want, "{kind}");
    }
}

/// What real providers send beside the book, before commit and after it.
#[test]
fn habits_of_providers_do_not_mislead() {
    for empty in ["", " "] {
        assert_eq!(chat(empty), EventKind::Ignored, "a heartbeat");
        assert_eq!(responses(empty), EventKind::Ignored, "a heartbeat");
    }
    let unfinished = r#"{"choices":[{"delta":{"role":"assistant"},"finish_reason":""}]}"#;
    assert_eq!(chat(unfinished), EventKind::Preamble);
    assert_eq!(
        scan_committed(Dialect::Chat, None, unfinished.as_bytes()),
        CommittedFacts::default()
    );
    for choices in [r#""choices":[],"#, r#""choices":null,"#, ""] {
        let usage = format!(r#"{{{choices}"usage":{{"prompt_tokens":1}}}}"#);
        assert_eq!(chat(&usage), EventKind::UsageOnly, "{choices}");
        assert!(
            scan_committed(Dialect::Chat, None, usage.as_bytes()).usage_only,
            "{choices}"
        );
    }
    let twice = r#"{"choices":[],"choices":[{"delta":{"content":"a"},"delta":{"content":"b"}}],"\ud83e":1}"#;
    assert_eq!(chat(twice), EventKind::Content);
    assert_eq!(
        chat(r#"{"choices":[{"delta":null},null,7]}"#),
        EventKind::Preamble
    );
    let flat = br#"{"object":"error","message":"m","code":400}"#;
    assert!(scan_committed(Dialect::Chat, None, flat).error);
    let object = r#"{"error":{"type":"error","message":"m","more":1}}"#;
    assert_eq!(
        &error(chat(object)).raw[..],
        br#"{"type":"error","message":"m","more":1}"#
    );
}

#[test]
fn the_name_ends_a_stream_whose_data_has_no_type() {
    for (name, terminal, error) in [
        ("response.completed", Some(TerminalKind::Completed), false),
        ("response.failed", Some(TerminalKind::Failed), false),
        ("response.incomplete", Some(TerminalKind::Incomplete), false),
        ("error", None, true),
        ("response.output_text.delta", None, false),
    ] {
        let facts = scan_committed(Dialect::Responses, Some(name.as_bytes()), b"{}");
        assert_eq!((facts.terminal, facts.error), (terminal, error), "{name}");
        let typed = br#"{"type":"response.output_text.delta","delta":"a"}"#;
        let facts = scan_committed(Dialect::Responses, Some(name.as_bytes()), typed);
        assert_eq!(facts, CommittedFacts::default(), "`type` wins over {name}");
    }
}

#[test]
fn tokens_of_images_and_speech_are_counted() {
    let done = br#"{"type":"transcript.text.done","text":"\"usage\":1","usage":{"type":"tokens","input_tokens":3,"output_tokens":4}}"#;
    let facts = scan_committed(Dialect::Other, None, done);
    assert_eq!(facts.usage.unwrap().output, 4);
    assert!(scan_committed(Dialect::Other, None, br#"{"error":{"message":"m"}}"#).error);
    let text = br#"{"type":"transcript.text.delta","delta":"a \"usage"}"#;
    assert_eq!(
        scan_committed(Dialect::Other, None, text),
        CommittedFacts::default()
    );
}

#[test]
fn text_that_looks_like_a_signal_is_text() {
    for content in [
        "[DONE]",
        r#"{"usage":{"prompt_tokens":9}}"#,
        r#""finish_reason":"stop""#,
        r#""error":{"x":1}"#,
        "response.completed",
    ] {
        let chunk =
            json!({"choices":[{"index":0,"delta":{"content":content},"finish_reason":null}],"usage":null});
        assert_eq!(
            scan_committed(Dialect::Chat, None, chunk.to_string().as_bytes()),
            CommittedFacts::default()
        );
        let event = json!({"type":"response.output_text.delta","delta":content});
        assert_eq!(
            scan_committed(Dialect::Responses, None, event.to_string().as_bytes()),
            CommittedFacts::default()
        );
    }
}

#[test]
fn terminals_and_usage_are_seen_after_commit() {
    let done = scan_committed(Dialect::Chat, None, b"[DONE]");
    assert_eq!(done.terminal, Some(TerminalKind::Done));
    let last = scan_committed(Dialect::Chat, None, br#"{"choices":[{"delta":{},"finish_reason" : "stop"}],"usage": {"prompt_tokens":1,"completion_tokens":2}}"#);
    assert!(last.finishes == 1 && !last.usage_only);
    assert_eq!(last.usage.unwrap().output, 2);
    let only = scan_committed(
        Dialect::Chat,
        None,
        br#"{"choices":[],"usage":{"prompt_tokens":1}}"#,
    );
    assert!(only.usage_only && only.finishes == 0);
    let completed = scan_committed(
        Dialect::Responses,
        Some(b"response.completed"),
        br#"{"type":"response.completed","response":{"id":"r","usage":{"input_tokens":3,"output_tokens":4}}}"#,
    );
    assert_eq!(completed.terminal, Some(TerminalKind::Completed));
    assert_eq!(completed.usage.unwrap().input, 3);
}

#[test]
fn bodies_that_are_errors_are_told_from_answers() {
    let is = |dialect, body: &str| error_in_body(dialect, body.as_bytes()).is_some();
    assert!(is(Dialect::Chat, r#"{"error":{"message":"m"}}"#));
    assert!(is(
        Dialect::Chat,
        r#"{"object":"error","error":null,"message":"m"}"#
    ));
    assert!(!is(
        Dialect::Chat,
        r#"{"choices":[{"message":{"content":"\"error\":{}"}}],"error":null}"#
    ));
    assert!(!is(
        Dialect::Responses,
        r#"{"object":"response","status":"failed","error":{"code":"x"}}"#
    ));
    assert!(!is(Dialect::Chat, "not json \"error\""));
}

#[test]
fn made_events_read_back_as_what_they_say() {
    let failed = responses_failed_event("resp_1", "m\"", 7, 4, "response_stalled", "a \"b\"\n");
    let text = std::str::from_utf8(&failed).unwrap();
    let data = text
        .strip_prefix("event: response.failed\ndata: ")
        .unwrap()
        .strip_suffix("\n\n")
        .unwrap();
    assert!(!data.contains('\n'));
    assert_eq!(responses(data), EventKind::Terminal(TerminalKind::Failed));
    assert_eq!(sequence_number(data.as_bytes()), Some(4));
    assert_eq!(
        response_id(data.as_bytes()),
        Identity {
            id: Some("resp_1".into()),
            model: Some("m\"".into()),
            conversation: None
        }
    );
    let error = chat_error_event("node_lost", "x", "server_error");
    assert!(matches!(
        chat(std::str::from_utf8(&error[6..]).unwrap().trim()),
        EventKind::Error(_)
    ));
}

fn chunk() -> impl Strategy<Value = Value> {
    let text = prop_oneof![
        "[a-z\"{}:\\\\]{0,5}",
        Just("usage".to_owned()),
        Just("\"finish_reason".to_owned()),
        Just("error".to_owned()),
        Just("\"error\":1".to_owned()),
    ];
    (
        prop::option::of(text),
        prop::option::of("[a-z]{0,4}"),
        prop::option::of((0_u64..9, 0_u64..9)),
        prop::option::of(any::<bool>()),
        0_usize..3,
    )
        .prop_map(|(content, finish, usage, error, choices)| {
            let mut chunk = json!({
                "id": "x",
                "choices": (0..choices).map(|i| json!({"index": i, "delta": {"content": content}, "finish_reason": finish})).collect::<Vec<_>>(),
            });
            if let Some((i, o)) = usage {
                chunk["usage"] = json!({"prompt_tokens": i, "completion_tokens": o});
            }
            if let Some(real) = error {
                chunk["error"] = if real { json!({"message": "m"}) } else { Value::Null };
            }
            chunk
        })
}

fn event() -> impl Strategy<Value = (Option<&'static str>, Value)> {
    let word = prop::sample::select(vec![
        "response.created",
        "response.output_text.delta",
        "response.completed",
        "response.failed",
        "response.incomplete",
        "error",
        "keepalive",
    ]);
    let text = prop::sample::select(vec![
        "",
        "a",
        "error",
        "response.completed",
        "\"response.failed\"",
        "\"usage\"",
    ]);
    (
        prop::option::of(word.clone()),
        prop::option::of(word),
        prop::option::of(text),
        prop::option::of(prop::bool::ANY),
        prop::option::of(0_u64..9),
    )
        .prop_map(|(name, kind, delta, error, usage)| {
            let mut event = json!({"sequence_number": 1});
            if let Some(kind) = kind {
                event["type"] = json!(kind);
            }
            if let Some(delta) = delta {
                event["delta"] = json!(delta);
            }
            if let Some(real) = error {
                event["error"] = if real {
                    json!({"message": "m"})
                } else {
                    Value::Null
                };
            }
            if let Some(n) = usage {
                event["response"] = json!({"id": "r", "error": null, "usage": {"input_tokens": n}});
            }
            (name, event)
        })
}

proptest! {
    #[test]
    fn the_scan_agrees_with_the_exact_reader(chunk in chunk(), pretty in any::<bool>()) {
        let text = if pretty { serde_json::to_string_pretty(&chunk).unwrap() } else { chunk.to_string() };
        let exact = ChatChunk::parse(text.as_bytes()).unwrap().committed();
        prop_assert_eq!(scan_committed(Dialect::Chat, None, text.as_bytes()), exact);
    }

    #[test]
    fn the_scan_agrees_with_the_exact_reader_of_responses((name, event) in event(), pretty in any::<bool>()) {
        let text = if pretty { serde_json::to_string_pretty(&event).unwrap() } else { event.to_string() };
        let name = name.map(str::as_bytes);
        let exact = ResponsesEvent::parse(text.as_bytes()).unwrap().committed(name);
        prop_assert_eq!(scan_committed(Dialect::Responses, name, text.as_bytes()), exact);
        let terminal = match classify(Dialect::Responses, name, text.as_bytes()) {
            EventKind::Terminal(kind) => (Some(kind), false),
            EventKind::Error(_) => (None, true),
            EventKind::Preamble | EventKind::Content | EventKind::Ignored => (None, false),
            EventKind::Finish | EventKind::UsageOnly | EventKind::Malformed => unreachable!(),
        };
        prop_assert_eq!((exact.terminal.filter(|_| !exact.error), exact.error), terminal);
    }

    #[test]
    fn arbitrary_bytes_never_panic(data in prop::collection::vec(any::<u8>(), 0..60)) {
        for dialect in [Dialect::Chat, Dialect::Completions, Dialect::Responses, Dialect::Other] {
            let _ = classify(dialect, None, &data);
            let _ = scan_committed(dialect, None, &data);
        }
    }
}

#[test]
fn a_conversation_and_a_beginning_are_enough_to_know_where_state_lives() {
    let body = br#"{"id":"resp_1","object":"response","conversation":{"id":"conv_1"},"model":"m"}"#;
    assert_eq!(response_id(body).conversation.as_deref(), Some("conv_1"));
    assert_eq!(leading_response_id(&body[..40]).as_deref(), Some("resp_1"));
    assert_eq!(leading_response_id(br#"{"id":"chatcmpl-1","#), None);
    assert_eq!(leading_response_id(br#"{"id":"resp_"#), None);
}
