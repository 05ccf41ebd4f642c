use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Body as _;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn sent(mut body: SplicedBody) -> Vec<u8> {
    let announced = body.size_hint().exact().unwrap();
    let mut out = Vec::new();
    let mut cx = Context::from_waker(std::task::Waker::noop());
    while let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut body).poll_frame(&mut cx) {
        out.extend_from_slice(&frame.into_data().unwrap());
        assert_eq!(body.size_hint().exact().unwrap() + out.len() as u64, announced);
    }
    assert!(body.is_end_stream());
    out
}

fn through(body: &str, target: &str, inject: bool) -> String {
    let bytes = Bytes::copy_from_slice(body.as_bytes());
    let facts = inspect(&bytes).unwrap();
    String::from_utf8(sent(splice(&bytes, &facts, target, inject))).unwrap()
}

#[test]
fn odd_members_travel_unchanged() {
    let body = "\u{feff} {\"a\":1e400,\"b\":12345678901234567890123,\"c\":\"\\ud83e\",\"model\" : \"m\\u006f\", \"d\":-0.0,\"e\":[{\"model\":\"x\"}],\n\"f\":1.10,\"g\":\"\\/\",\"a\":2}\n";
    assert_eq!(
        through(body, "t\"1", false),
        body.replace("\"m\\u006f\"", "\"t\\\"1\"")
    );
    assert_eq!(through(body, "mo", false), body);
}

#[test]
fn every_model_is_renamed_and_the_last_one_counts() {
    let body = r#"{"model":"a","x":{"model":"n"},"mod\u0065l":"b"}"#;
    assert_eq!(inspect(body.as_bytes()).unwrap().model(), "b");
    assert_eq!(
        through(body, "t", false),
        r#"{"model":"t","x":{"model":"n"},"mod\u0065l":"t"}"#
    );
    // The last one is the target's name already: the others must not stay.
    assert_eq!(
        through(r#"{"model":"x","model":"b"}"#, "b", false),
        r#"{"model":"b","model":"b"}"#
    );
    let many = format!("{{{}}}", [r#""model":"a""#; 9].join(","));
    assert_eq!(through(&many, "t", false), many.replace("\"a\"", "\"t\""));
}

#[test]
fn a_large_body_is_not_copied_and_a_small_one_is_one_piece() {
    for (filler, pieces) in [(10, 1), (20_000, 3)] {
        let text = format!(r#"{{"model":"a","x":"{}"}}"#, "y".repeat(filler));
        let body = Bytes::from(text.clone());
        let mut spliced = splice(&body, &inspect(&body).unwrap(), "target", false);
        assert_eq!(spliced.len(), text.len() as u64 + 5);
        let (mut frames, mut cx) = (Vec::new(), Context::from_waker(std::task::Waker::noop()));
        while let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut spliced).poll_frame(&mut cx) {
            frames.push(frame.into_data().unwrap());
        }
        assert_eq!(frames.len(), pieces);
        assert_eq!(frames.concat(), text.replace("\"a\"", "\"target\"").into_bytes());
        if pieces > 1 {
            assert!(
                body.as_ptr_range().contains(&frames[2].as_ptr()),
                "the suffix is the client's own bytes"
            );
        }
    }
}

#[test]
fn usage_is_asked_for_in_place() {
    for (options, want) in [
        (
            "",
            r#"{"stream_options":{"include_usage":true},"model":"m","stream":true}"#,
        ),
        (
            r#","stream_options":null"#,
            r#"{"model":"m","stream":true,"stream_options":{"include_usage":true}}"#,
        ),
        (
            r#","stream_options":{}"#,
            r#"{"model":"m","stream":true,"stream_options":{"include_usage":true}}"#,
        ),
        (
            r#","stream_options":{ "x":1}"#,
            r#"{"model":"m","stream":true,"stream_options":{"include_usage":true, "x":1}}"#,
        ),
        (
            r#","stream_options":{"include_usage":false}"#,
            r#"{"model":"m","stream":true,"stream_options":{"include_usage":true}}"#,
        ),
        (
            r#","stream_options":{"include_usage":true}"#,
            r#"{"model":"m","stream":true,"stream_options":{"include_usage":true}}"#,
        ),
    ] {
        let body = format!(r#"{{"model":"m","stream":true{options}}}"#);
        assert_eq!(through(&body, "m", true), want);
        assert_eq!(through(&body, "m", false), body);
    }
    let whole = r#"{"model":"m"}"#;
    assert_eq!(through(whole, "m", true), whole);
}

#[test]
fn refusals_name_the_member() {
    for (body, param) in [
        ("", None),
        ("[1]", None),
        ("\"x\"", None),
        ("{", None),
        ("{\"model\":\"m\"", None),
        ("{\"model\":\"m\",}", None),
        ("{\"model\":\"m\"} x", None),
        ("{\"model\" \"m\"}", None),
        ("{\"model\":\"m\",\"a\":[}", None),
        ("{\"model\":\"m\",\"a\":\"x}", None),
        ("{\"model\":\"m\",\"a\":tru}", None),
        ("{\"model\":\"m\",\"a\":01}", None),
        ("{\"model\":\"m\",\"a\":+1}", None),
        ("{'model':'m'}", None),
        ("{}", Some("model")),
        ("{\"model\":1}", Some("model")),
        ("{\"model\":null}", Some("model")),
        ("{\"model\":\"\"}", Some("model")),
        ("{\"model\":\"\\ud83e\"}", Some("model")),
        ("{\"model\":\"m\",\"stream\":1}", Some("stream")),
        ("{\"model\":\"m\",\"stream\":\"true\"}", Some("stream")),
        (
            "{\"model\":\"m\",\"previous_response_id\":1}",
            Some("previous_response_id"),
        ),
    ] {
        assert_eq!(inspect(body.as_bytes()).unwrap_err().param, param, "{body}");
    }
    let deep = format!("{{\"model\":\"m\",\"a\":{}{}}}", "[".repeat(600), "]".repeat(600));
    assert!(inspect(deep.as_bytes()).unwrap_err().message.contains("nested"));
}

#[test]
fn what_routes_is_read() {
    let facts = inspect(
        br#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"conversation":{"id":"conv_1"},"background":true,"prompt_cache_key":"k"}"#,
    )
    .unwrap();
    assert!(facts.stream() && facts.include_usage() && facts.background());
    assert_eq!(
        (facts.state_id(), facts.prompt_cache_key()),
        (Some("conv_1"), Some("k"))
    );
    let facts = inspect(br#"{"model":"m","previous_response_id":"resp_1","conversation":"c","stream":null}"#)
        .unwrap();
    assert_eq!(facts.state_id(), Some("resp_1"));
    assert!(!facts.stream());
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a-z\"\\\\{}\\[\\],:é\u{1F600}\n]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z\"\\\\]{0,5}", inner, 0..4).prop_map(|m| json!(m)),
        ]
    })
}

proptest! {
    #[test]
    fn splicing_changes_the_two_members_and_nothing_else(
        members in prop::collection::btree_map("[a-z\"\\\\]{1,6}", value(), 0..6),
        model in "[a-z\"\\\\é]{1,6}",
        target in "[a-z\"\\\\é]{1,6}",
        pretty in any::<bool>(),
        inject in any::<bool>(),
    ) {
        let mut doc = json!(members);
        doc["model"] = json!(model);
        doc["stream"] = json!(true);
        let text = if pretty { serde_json::to_string_pretty(&doc).unwrap() } else { doc.to_string() };
        let out: Value = serde_json::from_str(&through(&text, &target, inject)).unwrap();
        doc["model"] = json!(target);
        if inject {
            doc["stream_options"] = json!({ "include_usage": true });
        }
        prop_assert_eq!(out, doc);
    }

    #[test]
    fn arbitrary_bytes_never_panic(body in prop::collection::vec(any::<u8>(), 0..120)) {
        let _ = inspect(&body);
    }

    #[test]
    fn near_json_never_panics(body in "[{}\\[\\]\",:\\\\modelstrau0-9. ]{0,60}") {
        if let Ok(facts) = inspect(body.as_bytes()) {
            let bytes = Bytes::from(body);
            sent(splice(&bytes, &facts, "other", true));
        }
    }
}
