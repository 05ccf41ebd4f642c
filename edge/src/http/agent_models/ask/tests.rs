use proptest::prelude::*;
use serde_json::{Value, json};

use super::chat::ChatAsk;
use super::responses::{Conversation, Decision, ResponsesAsk};
use super::*;

fn chat(body: &Value) -> Result<ChatAsk, Fault> {
    ChatAsk::read(body.to_string().as_bytes())
}

fn responses(body: &Value) -> Result<ResponsesAsk, Fault> {
    ResponsesAsk::read(body.to_string().as_bytes(), "ops")
}

fn with(base: &Value, name: &str, value: Value) -> Value {
    let mut body = base.clone();
    body[name] = value;
    body
}

fn param(fault: &Fault) -> &str {
    assert_eq!(fault.status, 400, "{fault:?}");
    fault.param.as_deref().unwrap_or_default()
}

#[test]
fn chat_messages_travel_as_they_were_sent() {
    let body = r#"{"model":"agent:a", "temperature": 2, "messages": [ {"role":"user","content":"\ud83e", "x": 1.0} ],
        "metadata":{"k":"v","iop_run_id":"r"},"tools":[],"tool_choice":"none","n":1,"user":"u"}"#;
    let ask = ChatAsk::read(body.as_bytes()).unwrap();
    assert_eq!(
        ask.input.get(),
        r#"{"messages":[ {"role":"user","content":"\ud83e", "x": 1.0} ]}"#
    );
    assert_eq!(ask.metadata, BTreeMap::from([("k".to_owned(), "v".to_owned())]));
}

#[test]
fn what_an_agent_does_not_take_is_named() {
    let base = json!({"model": "agent:ops", "messages": [{"role": "user", "content": "x"}]});
    assert!(chat(&base).is_ok());
    for (name, value, at) in [
        ("tools", json!([{"type": "function"}]), "tools"),
        ("tools", json!([{"type": "mcp", "server_label": "ops"}]), "tools"),
        ("tool_choice", json!("required"), "tool_choice"),
        ("tool_choice", json!({"type": "function"}), "tool_choice"),
        ("n", json!(2), "n"),
        ("store", json!(false), "store"),
        ("functions", json!([]), "functions"),
        (
            "response_format",
            json!({"type": "json_object"}),
            "response_format",
        ),
        ("metadata", json!({"k": 1}), "metadata.k"),
        ("metadata", json!("k"), "metadata"),
        ("messages", json!([]), "messages"),
        ("messages", json!("x"), "messages"),
        ("messages", json!([{"content": "x"}]), "messages"),
        ("messages", json!(null), "messages"),
    ] {
        let fault = chat(&with(&base, name, value.clone())).unwrap_err();
        assert_eq!(param(&fault), at, "{name}={value}");
    }
    let base = json!({"model": "agent:ops", "input": "x"});
    assert!(responses(&base).is_ok());
    for (name, value, at) in [
        ("tools", json!([{"type": "function"}]), "tools[0]"),
        (
            "tools",
            json!([{"type": "mcp", "server_label": "ops"}, {"type": "mcp", "server_label": "other"}]),
            "tools[1]",
        ),
        ("tools", json!({}), "tools"),
        ("tool_choice", json!("required"), "tool_choice"),
        ("store", json!(false), "store"),
        ("background", json!(true), "background"),
        ("conversation", json!("c"), "conversation"),
        ("prompt", json!({"id": "p"}), "prompt"),
        ("text", json!({"format": {"type": "json_schema"}}), "text.format"),
        ("instructions", json!([1]), "instructions"),
        ("input", json!(null), "input"),
        ("input", json!(7), "input"),
        ("input", json!([7]), "input[0]"),
        (
            "input",
            json!([{"role": "tool", "content": "x"}]),
            "input[0].role",
        ),
        ("input", json!([{"role": "user"}]), "input[0].content"),
        (
            "input",
            json!([{"role": "user", "content": [{"type": "input_file"}]}]),
            "input[0].content[0]",
        ),
        (
            "input",
            json!([{"role": "user", "content": [{"type": "input_text"}]}]),
            "input[0].content[0]",
        ),
        (
            "input",
            json!([{"role": "user", "content": "x"}, {"type": "function_call_output", "call_id": "c", "output": "x"}]),
            "input[1].type",
        ),
        (
            "input",
            json!([{"type": "mcp_approval_response", "approve": true}]),
            "input[0].approval_request_id",
        ),
        (
            "input",
            json!([{"type": "mcp_approval_response", "approval_request_id": "apr_1"}]),
            "input[0].approve",
        ),
    ] {
        let fault = responses(&with(&base, name, value.clone())).unwrap_err();
        assert_eq!(param(&fault), at, "{name}={value}");
    }
}

#[test]
fn members_that_say_nothing_are_none() {
    let ask = responses(&json!({
        "model": "agent:ops", "input": "x", "tools": [{"type": "mcp", "server_label": "ops", "require_approval": "always"}],
        "store": true, "background": false, "conversation": null, "previous_response_id": null,
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "temperature": 1, "include": [], "metadata": null,
    }))
    .unwrap();
    assert_eq!((ask.previous, ask.text.as_deref()), (None, Some("x")));
}

#[test]
fn items_become_messages_and_decisions() {
    let ask = responses(&json!({
        "model": "agent:ops",
        "instructions": "be brief",
        "previous_response_id": "resp_1",
        "input": [
            {"role": "developer", "content": "d"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "two", "annotations": []}]},
            {"role": "user", "content": [{"type": "input_text", "text": "a"},
                {"type": "input_image", "image_url": "data:x", "detail": "low"}]},
            {"type": "mcp_approval_request", "id": "apr_1", "name": "n", "arguments": "{}", "server_label": "ops"},
            {"type": "mcp_approval_response", "approval_request_id": "apr_1", "approve": false, "reason": "no"},
        ],
    }))
    .unwrap();
    let messages = serde_json::to_value(&ask.messages).unwrap();
    assert_eq!(
        messages,
        json!([
            {"role": "system", "content": "d"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": [{"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}]},
        ])
    );
    assert_eq!(ask.text, None);
    assert_eq!(
        ask.decisions,
        [Decision {
            at: 5,
            approval: "apr_1".to_owned(),
            approve: false,
            reason: Some("no".to_owned())
        }]
    );
    let conversation = Conversation::new(ask.instructions.as_deref(), ask.messages).unwrap();
    let input = conversation.input().unwrap();
    let read: Conversation = serde_json::from_str(input.get()).unwrap();
    assert!(read.instructed && read.messages.len() == 5);
    assert_eq!(
        read.messages[0].get(),
        r#"{"role":"system","content":"be brief"}"#
    );
    assert_eq!(crate::agents::transcript::conversation(&input).unwrap().len(), 5);
}

#[test]
fn a_persons_words_are_joined() {
    let ask = responses(&json!({"model": "agent:ops", "input": [
        {"role": "user", "content": "one"}, {"role": "user", "content": [{"type": "input_text", "text": "two"}]},
    ]}))
    .unwrap();
    assert_eq!(ask.text.as_deref(), Some("one\ntwo"));
}

proptest! {
    /// Whatever comes is read or refused with a field.
    #[test]
    fn nothing_breaks_the_readers(body in "[\\[\\]{}\":,a-z0-9 ]{0,80}") {
        for fault in [ChatAsk::read(body.as_bytes()).err(), ResponsesAsk::read(body.as_bytes(), "ops").err()]
            .into_iter()
            .flatten()
        {
            prop_assert_eq!(fault.status.as_u16(), 400);
            prop_assert!(fault.param.is_some());
        }
    }
}
