//! Who waits for whom, and which provider a conversation meets: classes and turns of the queue (G33), affinity (G30).

use std::collections::BTreeSet;
use std::time::Duration;

use iop_tests::config::{Provider, Setup, key};
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{eventually, fixtures, run};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";

async fn answer(mut ex: Exchange) -> std::io::Result<()> {
    let body = if ex.path.ends_with("/responses") {
        let said = json!([fixtures::message_item("ok", "completed")]);
        fixtures::response_object("resp_1", "m", "completed", &said)
    } else {
        fixtures::chat_answer("m", "ok")
    };
    ex.json_reply(200, &body).await
}

async fn in_line(stack: &Stack, n: f64) {
    eventually(&format!("{n} in line"), Duration::from_secs(10), || async {
        let depth = stack.edge.scrape().await.sum("iop_edge_queue_depth", &[]);
        if depth == n {
            Ok(())
        } else {
            Err(format!("{depth}"))
        }
    })
    .await;
}

async fn turns_in_line(shape: Shape) {
    let (open, gate) = tokio::sync::watch::channel(false);
    let stub = Stub::start(move |mut ex| {
        let mut gate = gate.clone();
        async move {
            ex.until(async { gate.wait_for(|open| *open).await.is_ok() })
                .await?;
            answer(ex).await
        }
    })
    .await;
    let keys = [
        key(
            "own",
            "sk-own",
            &["inference", "operator", "admin", "metrics"],
            "",
        ),
        key("crowd", "sk-crowd", &["inference"], ""),
        key("late", "sk-late", &["inference"], ""),
        key("vip", "sk-vip", &["inference"], ", priority = \"high\""),
        key("batch", "sk-batch", &["inference"], ", priority = \"low\""),
    ];
    let setup = Setup::of(Provider::openai("up", &stub.url(), &["m"]).capacity(1)).keys(&keys, "sk-own");
    let stack = Stack::start(shape, setup).await;
    let mut conns = Vec::new();
    for (n, (key, words)) in [
        ("sk-batch", "running"),
        ("sk-batch", "batch 1"),
        ("sk-crowd", "crowd 1"),
        ("sk-crowd", "crowd 2"),
        ("sk-crowd", "crowd 3"),
        ("sk-late", "late 1"),
        ("sk-late", "late 2"),
        ("sk-vip", "vip 1"),
    ]
    .into_iter()
    .enumerate()
    {
        let client = stack.client().with_key(key);
        conns.push(client.open(CHAT, &fixtures::chat("m", words, false)).await);
        if n == 0 {
            stub.arrived(1).await;
        } else {
            in_line(&stack, n as f64).await;
        }
    }
    open.send_replace(true);
    for conn in &mut conns {
        assert_eq!(conn.answer().await.unwrap().status(), 200);
    }
    let order: Vec<String> = stub
        .received()
        .iter()
        .map(|r| r.json()["messages"][0]["content"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(
        order,
        [
            "running", "vip 1", "crowd 1", "late 1", "crowd 2", "late 2", "crowd 3", "batch 1"
        ]
    );
    stack.settled(Duration::from_secs(2)).await;
}

#[test]
fn embedded_line_goes_by_class_and_in_turn_between_keys() {
    run(60, turns_in_line(Shape::Embedded));
}

#[test]
fn linked_line_goes_by_class_and_in_turn_between_keys() {
    run(60, turns_in_line(Shape::Linked));
}

/// The bodies of three turns, each the one before and more.
fn conversation(path: &str, n: usize) -> Vec<Value> {
    let first = json!({"role": "user", "content": format!("question {n}")});
    let mut turns = Vec::new();
    let mut said = vec![first];
    for turn in 0..3 {
        turns.push(if path == CHAT {
            let mut messages = vec![json!({"role": "system", "content": "Be brief."})];
            messages.extend(said.clone());
            json!({"model": "shared", "messages": messages})
        } else {
            json!({"model": "shared", "instructions": "Be brief.", "input": said, "store": false})
        });
        said.push(json!({"role": "assistant", "content": format!("answer {turn}")}));
        said.push(json!({"role": "user", "content": format!("more {turn}")}));
    }
    turns
}

/// A conversation's number, from what a provider received.
fn number(body: &Value) -> String {
    let first = if body["messages"].is_array() {
        &body["messages"][1]
    } else {
        &body["input"][0]
    };
    first["content"].as_str().unwrap().to_owned()
}

async fn conversations(shape: Shape) {
    let stubs = [Stub::start(answer).await, Stub::start(answer).await];
    let stack = Stack::start(
        shape,
        Setup::of(Provider::openai("a", &stubs[0].url(), &["t"]))
            .provider(Provider::openai("b", &stubs[1].url(), &["t"]))
            .candidates("shared", &[("a", "t"), ("b", "t")])
            .model_line("affinity = \"prefix\""),
    )
    .await;
    const CONVERSATIONS: usize = 16;
    for path in [CHAT, RESPONSES] {
        let before = stubs.each_ref().map(|s| s.received().len());
        let all: Vec<Vec<Value>> = (0..CONVERSATIONS).map(|n| conversation(path, n)).collect();
        for turn in 0..3 {
            for turns in &all {
                assert_eq!(stack.client().post(path, &turns[turn]).await.status(), 200);
            }
        }
        let met: Vec<BTreeSet<String>> = stubs
            .iter()
            .zip(before)
            .map(|(stub, before)| {
                stub.received()[before..]
                    .iter()
                    .map(|r| number(&r.json()))
                    .collect()
            })
            .collect();
        assert!(
            met[0].is_disjoint(&met[1]),
            "a conversation keeps its provider: {met:?}"
        );
        assert_eq!(met[0].len() + met[1].len(), CONVERSATIONS);
        assert!(met.iter().all(|m| m.len() > 2), "both have some: {met:?}");
    }
    // The client's own word goes before what it says.
    let before = stubs.each_ref().map(|s| s.received().len());
    for n in 0..10 {
        let mut body = fixtures::chat("shared", &format!("apart {n}"), false);
        body["prompt_cache_key"] = json!("one");
        assert_eq!(stack.client().post(CHAT, &body).await.status(), 200);
    }
    let mut got: Vec<usize> = stubs
        .iter()
        .zip(before)
        .map(|(stub, before)| stub.received().len() - before)
        .collect();
    got.sort_unstable();
    assert_eq!(got, [0, 10]);
}

#[test]
fn embedded_conversations_keep_their_provider() {
    run(60, conversations(Shape::Embedded));
}

#[test]
fn linked_conversations_keep_their_provider() {
    run(60, conversations(Shape::Linked));
}
