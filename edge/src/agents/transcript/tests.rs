use iop_durable::ids::{ActivityId, Key, NodeName, RunId};
use iop_durable::payload::Payload;
use iop_durable::record::Effect;
use serde_json::{Value, json};

use super::*;

fn record(activation: u64, key: &str, output: Option<&str>) -> ActivityRecord {
    let run = RunId::new("run_1").unwrap();
    let node = NodeName::new(if activation % 2 == 1 { "reason" } else { "action" }).unwrap();
    let key = Key::new(key).unwrap();
    ActivityRecord {
        id: ActivityId::derive(&run, &node, activation, &key),
        run,
        node,
        activation,
        key,
        implementation: "test".to_owned(),
        effect: Effect::ReadOnly,
        retry: None,
        state: if output.is_some() {
            ActivityState::Completed
        } else {
            ActivityState::Unknown
        },
        origin: None,
        attempts: Vec::new(),
        not_before: None,
        step_attempt: 1,
        input: Payload::new(""),
        output: output.map(|text| Payload::new(text.to_owned())),
        error: None,
        decision: None,
    }
}

fn answer(content: Option<&str>, calls: &[(&str, &str, &str)]) -> String {
    let calls: Vec<Value> = calls
        .iter()
        .map(|(id, name, arguments)| json!({ "id": id, "name": name, "arguments": arguments }))
        .collect();
    json!({ "content": content, "tool_calls": calls, "attempts": 1 }).to_string()
}

fn sent(transcript: &Transcript) -> Value {
    let frame = Frame {
        model: "m",
        instructions: Some("Be brief."),
        tools: None,
        parameters: &serde_json::Map::from_iter([("temperature".to_owned(), json!(0.5))]),
    };
    serde_json::from_slice(&request(transcript, &frame).unwrap()).unwrap()
}

fn raw_json(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap()
}

#[test]
fn the_first_request_is_instructions_and_input() {
    let sent = sent(&Transcript::begin(raw_json("\"hi\"")));
    assert_eq!(
        sent,
        json!({
            "model": "m",
            "messages": [{ "role": "system", "content": "Be brief." }, { "role": "user", "content": "hi" }],
            "stream": true,
            "stream_options": { "include_usage": true },
            "temperature": 0.5,
        })
    );
}

#[test]
fn an_input_is_a_text_a_conversation_or_any_json() {
    let said = |input: &str| -> Vec<Value> {
        let messages = conversation(&raw_json(input)).unwrap();
        messages
            .iter()
            .map(|m| serde_json::from_str(m.get()).unwrap())
            .collect()
    };
    assert_eq!(said(r#""a\nb""#), [json!({ "role": "user", "content": "a\nb" })]);
    assert_eq!(
        said(r#"{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y"}]}"#),
        [
            json!({ "role": "user", "content": "x" }),
            json!({ "role": "assistant", "content": "y" })
        ]
    );
    for other in [
        r#"{"sku": "a",  "n": 1.50}"#,
        "[1,2]",
        "null",
        "12345678901234567890",
    ] {
        // Spelling and all.
        assert_eq!(said(other), [json!({ "role": "user", "content": other })]);
    }
    for (bad, word) in [
        (r#"{"messages":[]}"#, "empty"),
        (r#"{"messages":"x"}"#, "list"),
        (r#"{"messages":[{"content":"x"}]}"#, "messages[0]"),
        (r#"{"messages":[{"role":"user"},3]}"#, "messages[1]"),
    ] {
        let why = conversation(&raw_json(bad)).unwrap_err();
        assert!(why.contains(word), "{bad}: {why}");
    }
}

#[test]
fn turns_follow_in_order_with_their_results_at_their_calls() {
    // In any order, and later ones are not looked at.
    let mut failed = record(4, "c.1", None);
    failed.state = ActivityState::Failed;
    failed.error = Some(Failure::new(FailureKind::ToolError, "gone").code("http_404"));
    let records = [
        record(4, "c.0", Some("second")),
        failed,
        record(
            3,
            MODEL,
            Some(&answer(
                Some("two"),
                &[("c", "t", "{}"), ("c", "t", "{}"), ("d", "u", "1")],
            )),
        ),
        record(1, INPUT, Some("\"hi\"")),
        record(2, "c.0", Some("first")),
        record(1, MODEL, Some(&answer(None, &[("c", "t", "{}")]))),
        record(5, MODEL, Some(&answer(Some("later"), &[]))),
    ];
    let transcript = Transcript::of(&records, 5).unwrap();
    let sent = sent(&transcript);
    let messages = sent["messages"].as_array().unwrap();
    let roles: Vec<&str> = messages.iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(
        roles,
        [
            "system",
            "user",
            "assistant",
            "tool",
            "assistant",
            "tool",
            "tool",
            "tool"
        ]
    );
    assert_eq!(messages[2]["tool_calls"][0]["function"]["arguments"], "{}");
    assert_eq!(
        messages[3],
        json!({ "role": "tool", "tool_call_id": "c", "content": "first" })
    );
    assert_eq!(messages[4]["content"], "two");
    assert_eq!(messages[5]["content"], "second");
    assert!(
        messages[6]["content"].as_str().unwrap().contains("404"),
        "{}",
        messages[6]
    );
    // The last call never came to a result.
    assert_eq!(messages[7]["tool_call_id"], "d");
    assert!(
        messages[7]["content"]
            .as_str()
            .unwrap()
            .contains("not_carried_out")
    );
    let call = |name: &str, arguments: &str| ToolCall {
        id: "x".to_owned(),
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    };
    assert_eq!(transcript.count(&call("t", "{}")), 3);
    assert_eq!(transcript.count(&call("t", "{ }")), 0);
}

#[test]
fn the_same_journal_asks_the_same() {
    let records = [
        record(
            1,
            INPUT,
            Some(r#"{"messages":[{"role":"user","content":"x","n":1.0}]}"#),
        ),
        record(1, MODEL, Some(&answer(Some("a"), &[("c", "t", "{}")]))),
        record(2, "c.0", Some("r")),
    ];
    let mut turned = records.clone();
    turned.reverse();
    let frame = Frame {
        model: "m",
        instructions: None,
        tools: Some(&raw_json(r#"[{"type":"function"}]"#)),
        parameters: &serde_json::Map::new(),
    };
    let bytes = |records: &[ActivityRecord]| request(&Transcript::of(records, 3).unwrap(), &frame).unwrap();
    assert_eq!(bytes(&records), bytes(&turned));
    let text = String::from_utf8(bytes(&records).to_vec()).unwrap();
    assert!(
        text.contains(r#""n":1.0"#) && text.contains(r#""tools":[{"type":"function"}]"#),
        "{text}"
    );
}

#[test]
fn a_journal_that_is_no_agents_is_said_to_be_so() {
    for records in [
        vec![],
        vec![record(1, INPUT, Some("not json"))],
        vec![record(1, INPUT, Some("1")), record(1, MODEL, Some("{"))],
    ] {
        let failure = Transcript::of(&records, 9).unwrap_err();
        assert_eq!(failure.code, "journal_invalid");
    }
}

#[test]
fn a_child_that_could_not_be_started_is_told_with_its_reason() {
    let mut start = record(2, "start/a.0", None);
    start.implementation = "agent".to_owned();
    start.effect = Effect::Idempotent;
    start.state = ActivityState::Failed;
    start.error = Some(Failure::new(FailureKind::Configuration, "no such agent").code("agent_not_found"));
    let mut other = record(2, "start/start/b.1", Some("run_7"));
    other.implementation = "agent".to_owned();
    other.effect = Effect::Idempotent;
    let records = [
        record(1, INPUT, Some("\"hi\"")),
        record(
            1,
            MODEL,
            Some(&answer(None, &[("a", "kid", "{}"), ("start/b", "kid", "{}")])),
        ),
        start,
        other,
        record(2, "start/b.1", Some("the child's answer")),
    ];
    let messages = sent(&Transcript::of(&records, 3).unwrap())["messages"].take();
    let told: Value = serde_json::from_str(messages[3]["content"].as_str().unwrap()).unwrap();
    assert_eq!(told["error"]["code"], "agent_not_found");
    assert_eq!(messages[4]["content"], "the child's answer");
}

#[test]
fn only_a_server_that_may_ask_is_taken_at_its_word() {
    let question = "\0iop/input-required\0{\"questions\":{},\"state\":null}";
    let of = |implementation: &str| {
        let mut result = record(2, "a.0", Some(question));
        result.implementation = implementation.to_owned();
        let records = [
            record(1, INPUT, Some("\"hi\"")),
            record(1, MODEL, Some(&answer(None, &[("a", "look", "{}")]))),
            result,
        ];
        sent(&Transcript::of(&records, 3).unwrap())["messages"][3]["content"].take()
    };
    assert_eq!(of("http"), question);
    assert!(of("mcp").as_str().unwrap().contains("not_carried_out"));
}
