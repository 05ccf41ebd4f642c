use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::inspect;
use super::*;

fn key(body: &str) -> Option<u64> {
    affinity_key(&inspect(body.as_bytes()).unwrap(), body.as_bytes())
}

fn key_of(body: &Value) -> Option<u64> {
    key(&body.to_string())
}

fn chat(messages: &[Value]) -> Value {
    json!({"model": "m", "messages": messages})
}

fn responses(instructions: &str, input: &Value) -> Value {
    json!({"model": "m", "instructions": instructions, "input": input})
}

#[test]
fn it_is_one_number_in_every_process() {
    let text = |n: usize, s: &str| [&(n as u64).to_le_bytes()[..], s.as_bytes()].concat();
    let hash = |parts: &[Vec<u8>]| {
        let digest: [u8; 32] = Sha256::digest(parts.concat()).into();
        Some(u64::from_le_bytes(digest[..8].try_into().unwrap()))
    };
    assert_eq!(
        key(r#"{"model":"m","prompt_cache_key":"k1","input":"x"}"#),
        hash(&[b"k".to_vec(), text(2, "k1")])
    );
    assert_eq!(
        key(r#"{"model":"m","messages":[{"role":"system","content":"s"},{"content":"hi","role":"user"}]}"#),
        hash(&[
            b"m".to_vec(),
            text(31, r#"{"role":"system","content":"s"}"#),
            b"t".to_vec(),
            text(4, r#""hi""#)
        ])
    );
}

#[test]
fn what_has_no_beginning_has_no_affinity() {
    for body in [
        r#"{"model":"m"}"#,
        r#"{"model":"m","messages":[]}"#,
        r#"{"model":"m","messages":[{"role":"system","content":"s"}]}"#,
        r#"{"model":"m","messages":"hi"}"#,
        r#"{"model":"m","messages":null}"#,
        r#"{"model":"m","messages":[1,"user",null,["role","user"],{"role":["user"]}]}"#,
        r#"{"model":"m","messages":[{"role":"system"} {"role":"user"}]}"#,
        r#"{"model":"m","instructions":"i"}"#,
        r#"{"model":"m","input":["a","b"]}"#,
        r#"{"model":"m","input":7}"#,
        r#"{"model":"m","prompt_cache_key":""}"#,
        r#"{"model":"m","prompt_cache_key":7}"#,
        r#"{"model":"m","prompt":"p"}"#,
    ] {
        assert_eq!(key(body), None, "{body}");
    }
}

#[test]
fn the_clients_own_key_wins() {
    let with = |key: Value, words: &str| json!({"model": "m", "prompt_cache_key": key, "messages": [{"role": "user", "content": words}]});
    assert_eq!(key_of(&with(json!("k"), "a")), key_of(&with(json!("k"), "b")));
    assert_ne!(key_of(&with(json!("k"), "a")), key_of(&with(json!("l"), "a")));
    for none in [json!(null), json!(""), json!(7)] {
        assert_eq!(
            key_of(&with(none, "a")),
            key_of(&chat(&[json!({"role": "user", "content": "a"})]))
        );
    }
}

#[test]
fn a_codex_session_keeps_its_value() {
    // The form that Codex sends: developer text, surroundings as the user's first words, then the turns.
    let turn = |items: &[Value]| {
        json!({"model": "gpt-test", "instructions": "You are Codex.", "input": items, "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": true, "stream": true, "store": false,
            "include": ["reasoning.encrypted_content"]})
    };
    let message = |role: &str, words: &str| json!({"type": "message", "role": role, "content": [{"type": "input_text", "text": words}]});
    let mut items = vec![
        message("developer", "<permissions>"),
        message("user", "<environment_context>"),
        message("user", "fix it"),
    ];
    let first = key_of(&turn(&items));
    assert!(first.is_some());
    items.push(json!({"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"}));
    items.push(json!({"type": "function_call_output", "call_id": "c", "output": "ok"}));
    items.push(message("user", "and that"));
    assert_eq!(key_of(&turn(&items)), first);
    items[1] = message("user", "<other_place>");
    assert_ne!(key_of(&turn(&items)), first);
}

#[test]
fn a_text_that_becomes_a_list_is_the_same_conversation() {
    let first = key_of(&responses("i", &json!("hi")));
    let second = json!([
        {"role": "user", "content": "hi"},
        {"id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]},
        {"role": "user", "content": "more"},
    ]);
    assert_eq!(key_of(&responses("i", &second)), first);
    assert_ne!(key_of(&responses("j", &json!("hi"))), first);
    assert_ne!(key_of(&responses("i", &json!("ho"))), first);
    assert_eq!(
        key(r#"{"model":"m","instructions":null,"input":"hi"}"#),
        key(r#"{"model":"m","input":"hi"}"#)
    );
}

#[test]
fn long_beginnings_differ_by_their_start_and_their_length() {
    let system = |a: &str, n: usize, z: &str| {
        chat(&[
            json!({"role": "system", "content": format!("{a}{}{z}", "x".repeat(n))}),
            json!({"role": "user", "content": "hi"}),
        ])
    };
    let n = 2 * HASHED_MAX;
    let whole = key_of(&system("a", n, "z"));
    assert_ne!(key_of(&system("b", n, "z")), whole);
    assert_ne!(key_of(&system("a", n + 1, "z")), whole);
    // Behind the bound: a conversation like it may share its provider.
    assert_eq!(key_of(&system("a", n, "y")), whole);
}

fn item() -> impl Strategy<Value = Value> {
    let role = prop::sample::select(vec!["system", "developer", "assistant", "tool"]);
    (
        role,
        "[a-z\"\\\\{}\\[\\]é\u{1F600}]{0,8}",
        prop::option::of("[a-z]{1,3}"),
    )
        .prop_map(|(role, words, id)| match id {
            Some(id) => json!({"id": id, "role": role, "content": [{"type": "text", "text": words}]}),
            None => json!({"role": role, "content": words}),
        })
}

fn said() -> impl Strategy<Value = Value> {
    prop_oneof![
        "[a-z\"\\\\{}\\[\\]é\u{1F600}]{0,8}".prop_map(Value::from),
        "[a-z]{0,4}".prop_map(|t| json!([{"type": "input_text", "text": t}])),
    ]
    .prop_map(|content| json!({"role": "user", "content": content}))
}

proptest! {
    #[test]
    fn every_turn_has_the_value_of_the_first(
        before in prop::collection::vec(item(), 0..3),
        first in said(),
        after in prop::collection::vec(prop_oneof![item(), said()], 0..6),
        instructions in "[a-z]{0,5}",
        others in prop::collection::btree_map("[a-d]{1,3}", any::<i64>(), 0..3),
        pretty in any::<bool>(),
    ) {
        let beginning: Vec<Value> = before.into_iter().chain([first]).collect();
        let mut turn = beginning.clone();
        turn.extend(after);
        for (short, long) in [
            (chat(&beginning), chat(&turn)),
            (responses(&instructions, &json!(beginning)), responses(&instructions, &json!(turn))),
        ] {
            let mut long = long;
            for (name, value) in &others {
                long[name] = json!(value);
            }
            prop_assert!(key_of(&short).is_some());
            let text = if pretty { serde_json::to_string_pretty(&long).unwrap() } else { long.to_string() };
            if pretty {
                // Blanks inside an item are the client's, and it keeps them.
                let short = serde_json::to_string_pretty(&short).unwrap();
                prop_assert_eq!(key(&text), key(&short));
            } else {
                prop_assert_eq!(key(&text), key_of(&short));
            }
        }
    }

    #[test]
    fn another_beginning_has_another_value(
        a in prop::collection::vec(item(), 0..3), b in prop::collection::vec(item(), 0..3),
        x in said(), y in said(),
    ) {
        let (one, two): (Vec<Value>, Vec<Value>) = (a.into_iter().chain([x]).collect(), b.into_iter().chain([y]).collect());
        prop_assert_eq!(key_of(&chat(&one)) == key_of(&chat(&two)), one == two);
    }

    #[test]
    fn near_json_never_panics(middle in "[{}\\[\\]\",:\\\\rolecntus0-9. ]{0,60}") {
        for body in [format!("{{\"model\":\"m\",\"messages\":{middle}}}"), format!("{{\"model\":\"m\",\"input\":[{middle}]}}")] {
            if let Ok(facts) = inspect(body.as_bytes()) {
                let _ = affinity_key(&facts, body.as_bytes());
            }
        }
    }
}
