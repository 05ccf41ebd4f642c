use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::error::ErrorKind;

fn asked(endpoint: Endpoint, body: &str) -> Result<RunRequest, ApiError> {
    run_request(
        endpoint,
        body.as_bytes(),
        RunId(uuid::Uuid::from_u128(1)),
        AttemptId(uuid::Uuid::from_u128(2)),
        &ProviderId::new("p").unwrap(),
        "t",
        45_000,
    )
}

fn said(endpoint: Endpoint, body: &str) -> Vec<(String, String)> {
    let request = asked(endpoint, body).unwrap();
    request
        .messages
        .into_iter()
        .map(|m| (m.role, m.content))
        .collect()
}

fn turns(all: &[(&str, &str)]) -> Vec<(String, String)> {
    all.iter()
        .map(|(r, c)| ((*r).to_owned(), (*c).to_owned()))
        .collect()
}

#[test]
fn a_run_says_which_attempt_it_is() {
    let run = asked(Endpoint::Chat, r#"{"messages":[{"role":"user","content":"hi"}]}"#).unwrap();
    assert_eq!(
        (run.endpoint, run.target.as_str(), run.response_stall_timeout_ms),
        (Endpoint::Chat, "t", 45_000)
    );
    assert_eq!((run.run_id.0.as_u128(), run.attempt_id.0.as_u128()), (1, 2));
    assert_eq!(run.provider.as_str(), "p");
}

#[test]
fn a_chat_conversation_is_carried_as_text() {
    let body = "\u{feff}{\"model\":\"m\",\"temperature\":0.5,\"tools\":[],\"n\":1,\"response_format\":{\"type\":\"text\"},\
        \"modalities\":[\"text\"],\"audio\":null,\"logprobs\":false,\"messages\":[\
        {\"role\":\"system\",\"content\":\"be kind\"},{\"role\":\"developer\",\"content\":\"\"},\
        {\"role\":\"user\",\"name\":\"x\",\"content\":[{\"type\":\"text\",\"text\":\"a\\n\"},{\"type\":\"text\",\"text\":\"\\ud83c\\udf0d\"}]},\
        {\"role\":\"assistant\",\"content\":null,\"tool_calls\":[]},{\"role\":\"user\",\"content\":[]}]}";
    assert_eq!(
        said(Endpoint::Chat, body),
        turns(&[
            ("system", "be kind"),
            ("developer", ""),
            ("user", "a\n\u{1F30D}"),
            ("assistant", ""),
            ("user", ""),
        ])
    );
}

#[test]
fn responses_input_and_instructions_are_a_conversation() {
    assert_eq!(
        said(
            Endpoint::Responses,
            r#"{"input":"hi","stream":true,"tools":[],"background":false}"#
        ),
        turns(&[("user", "hi")])
    );
    assert_eq!(
        said(
            Endpoint::Responses,
            r#"{"instructions":"be kind","text":{"format":{"type":"text"},"verbosity":"low"},"previous_response_id":null,
                "input":[{"role":"user","content":"a"},
                {"type":"message","id":"msg_1","status":"completed","role":"assistant","content":[{"type":"output_text","text":"b","annotations":[]}]},
                {"type":"message","role":"user","content":[{"type":"input_text","text":"c"}]}]}"#
        ),
        turns(&[
            ("system", "be kind"),
            ("user", "a"),
            ("assistant", "b"),
            ("user", "c")
        ])
    );
}

#[test]
fn what_cannot_be_carried_is_a_400_that_names_it() {
    let chat = json!({"model": "m", "messages": [{"role": "user", "content": "sesame"}]});
    let responses = json!({"model": "m", "input": "sesame"});
    let with = |base: &Value, key: &str, value: Value| {
        let mut body = base.clone();
        body[key] = value;
        body
    };
    let message = |value: Value| {
        with(
            &chat,
            "messages",
            json!([{"role": "user", "content": "a"}, value]),
        )
    };
    let item = |value: Value| with(&responses, "input", json!([value]));
    for (endpoint, body, param) in [
        (
            Endpoint::Chat,
            with(&chat, "tools", json!([{"type": "function"}])),
            "tools",
        ),
        (Endpoint::Chat, with(&chat, "functions", json!([{}])), "functions"),
        (
            Endpoint::Chat,
            with(&chat, "web_search_options", json!({"a": 1})),
            "web_search_options",
        ),
        (
            Endpoint::Chat,
            with(&chat, "audio", json!({"voice": "x"})),
            "audio",
        ),
        (Endpoint::Chat, with(&chat, "logprobs", json!(true)), "logprobs"),
        (Endpoint::Chat, with(&chat, "n", json!(2)), "n"),
        (
            Endpoint::Chat,
            with(&chat, "modalities", json!(["text", "audio"])),
            "modalities",
        ),
        (
            Endpoint::Chat,
            with(&chat, "response_format", json!({"type": "json_object"})),
            "response_format",
        ),
        (Endpoint::Chat, with(&chat, "messages", json!([])), "messages"),
        (Endpoint::Chat, with(&chat, "messages", json!("hi")), "messages"),
        (Endpoint::Chat, json!({"model": "m"}), "messages"),
        (
            Endpoint::Chat,
            message(json!({"role": "tool", "content": "1"})),
            "messages[1].role",
        ),
        (
            Endpoint::Chat,
            message(json!({"content": "1"})),
            "messages[1].role",
        ),
        (
            Endpoint::Chat,
            message(json!({"role": "user"})),
            "messages[1].content",
        ),
        (
            Endpoint::Chat,
            message(json!({"role": "user", "content": 1})),
            "messages[1].content",
        ),
        (
            Endpoint::Chat,
            message(json!({"role": "assistant", "content": null, "tool_calls": [{}]})),
            "messages[1].tool_calls",
        ),
        (
            Endpoint::Chat,
            message(
                json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}),
            ),
            "messages[1].content[1].type",
        ),
        (
            Endpoint::Chat,
            message(json!({"role": "user", "content": [{"type": "text"}]})),
            "messages[1].content[0].text",
        ),
        (
            Endpoint::Chat,
            message(json!({"role": "user", "content": ["a"]})),
            "messages[1].content[0]",
        ),
        (
            Endpoint::Responses,
            with(&responses, "tools", json!([{"type": "custom"}])),
            "tools",
        ),
        (
            Endpoint::Responses,
            with(&responses, "previous_response_id", json!("resp_1")),
            "previous_response_id",
        ),
        (
            Endpoint::Responses,
            with(&responses, "conversation", json!({"id": "c"})),
            "conversation",
        ),
        (
            Endpoint::Responses,
            with(&responses, "prompt", json!({"id": "p"})),
            "prompt",
        ),
        (
            Endpoint::Responses,
            with(&responses, "background", json!(true)),
            "background",
        ),
        (
            Endpoint::Responses,
            with(&responses, "text", json!({"format": {"type": "json_schema"}})),
            "text.format",
        ),
        (Endpoint::Responses, with(&responses, "text", json!(1)), "text"),
        (
            Endpoint::Responses,
            with(&responses, "instructions", json!([])),
            "instructions",
        ),
        (Endpoint::Responses, json!({"model": "m"}), "input"),
        (Endpoint::Responses, with(&responses, "input", json!([])), "input"),
        (Endpoint::Responses, with(&responses, "input", json!(1)), "input"),
        (
            Endpoint::Responses,
            item(json!({"type": "function_call_output"})),
            "input[0].type",
        ),
        (
            Endpoint::Responses,
            item(json!({"role": "user", "content": [{"type": "input_image"}]})),
            "input[0].content[0].type",
        ),
        (Endpoint::Completions, json!({"prompt": "sesame"}), "model"),
        (Endpoint::Embeddings, json!({"input": "sesame"}), "model"),
    ] {
        let error = asked(endpoint, &body.to_string()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidRequest, "{body}");
        assert_eq!(error.param.as_deref(), Some(param), "{body}");
        assert!(!error.message.contains("sesame"), "{}", error.message);
    }
}

#[test]
fn text_that_is_none_is_refused_where_it_stands() {
    for (endpoint, body, param) in [
        (
            Endpoint::Chat,
            r#"{"messages":[{"role":"user","content":"\ud83e"}]}"#,
            "messages[0].content",
        ),
        (Endpoint::Responses, r#"{"input":"\ud83e"}"#, "input"),
        (Endpoint::Chat, r#"{"\ud83e":1}"#, "messages"),
    ] {
        assert_eq!(
            asked(endpoint, body).unwrap_err().param.as_deref(),
            Some(param),
            "{body}"
        );
    }
    // Elsewhere it is nobody's business.
    assert_eq!(
        said(
            Endpoint::Chat,
            r#"{"user":"\ud83e","messages":[{"role":"user","name":"\ud83e","content":"a"}]}"#
        ),
        turns(&[("user", "a")])
    );
}

proptest! {
    #[test]
    fn near_requests_never_panic(
        key in prop::sample::select(vec!["messages", "input", "instructions", "tools", "text", "n"]),
        value in prop_oneof![
            Just(json!(null)), Just(json!([null])), Just(json!([[]])), Just(json!([{}])), Just(json!({})),
            Just(json!([{"role": null}])), Just(json!([{"role": "user", "content": [null]}])), Just(json!(0)),
        ],
        rest in prop::collection::vec(any::<u8>(), 0..8),
    ) {
        let mut body = json!({ key: value }).to_string().into_bytes();
        for endpoint in Endpoint::ALL {
            let text = String::from_utf8_lossy(&body).into_owned();
            let _ = asked(*endpoint, &text);
        }
        body.extend_from_slice(&rest);
        for endpoint in Endpoint::ALL {
            let _ = asked(*endpoint, &String::from_utf8_lossy(&body));
        }
    }

    #[test]
    fn every_text_is_carried_whole(text in "\\PC{0,20}|[\\r\\n\"\\\\]{0,4}") {
        let chat = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]});
        prop_assert_eq!(said(Endpoint::Chat, &chat.to_string()), turns(&[("user", &text)]));
        let responses = json!({"input": text, "instructions": text});
        prop_assert_eq!(
            said(Endpoint::Responses, &responses.to_string()),
            turns(&[("system", &text), ("user", &text)])
        );
    }
}
