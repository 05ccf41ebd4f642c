//! The stubs of the run tests themselves: one that lies would make every other test worthless.

use iop_tests::client::{Client, sse_data};
use iop_tests::llm::{Llm, MODEL, Say};
use iop_tests::mcp_stub::{McpStub, Reply};
use iop_tests::tool_stub::{Answer, ToolStub};
use iop_tests::{fixtures, run};
use serde_json::{Value, json};

#[test]
fn a_service_counts_calls_and_effects_apart_and_honours_keys() {
    run(30, async {
        let tools = ToolStub::start().await;
        tools.honour_keys("/charge");
        tools.script("/charge", vec![Answer::status(503).retry_after(7)]);
        let client = Client::new(tools.url("").strip_prefix("http://").unwrap());
        let post = async |key: &'static str| {
            client
                .request("POST", "/charge?a=%2Fx+y", &[("idempotency-key", key)], b"{}")
                .await
        };
        let refused = post("k1").await;
        assert_eq!(
            (refused.status(), refused.header("retry-after")),
            (503, Some("7"))
        );
        let found = async |key: &'static str| {
            client.get(&format!("/found/charge?key={key}")).await.json()["id"].clone()
        };
        assert_eq!(found("k1").await, Value::Null);
        let first = post("k1").await.json();
        assert_eq!(post("k1").await.json(), first);
        post("k2").await;
        assert_eq!((tools.calls("/charge").len(), tools.effects("/charge")), (4, 2));
        assert!(tools.honoured().iter().all(|(_, _, n)| *n == 1));
        assert_eq!(found("k1").await, "effect-k1");
        let calls = tools.calls("/charge");
        assert_eq!(calls[0].query["a"], "/x y");
        assert_eq!(
            calls.iter().map(|c| c.applied).collect::<Vec<_>>(),
            [false, true, false, true]
        );
    });
}

#[test]
fn a_caller_that_dies_at_a_barrier_changes_something_only_behind_it() {
    run(30, async {
        let tools = ToolStub::start().await;
        let client = Client::new(tools.url("").strip_prefix("http://").unwrap());
        let (received, applied) = (tools.received("/deploy"), tools.applied("/deploy"));
        for (barrier, effects) in [(&received, 0), (&applied, 1)] {
            barrier.close();
            let conn = client.start("POST", "/deploy", &[], b"{}").await.unwrap();
            barrier.reached(1).await;
            drop(conn);
            barrier.open();
            assert_eq!(tools.effects("/deploy"), effects);
        }
        received.close();
        let mut one = client.start("POST", "/deploy", &[], b"{}").await.unwrap();
        let two = client.start("POST", "/deploy", &[], b"{}").await.unwrap();
        received.reached(2).await;
        received.let_pass(1);
        received.open();
        assert_eq!(one.answer().await.unwrap().status(), 200);
        drop(two);
    });
}

#[test]
fn a_model_answers_by_conversation_and_turn() {
    run(30, async {
        let llm = Llm::start().await;
        llm.plays(
            "buy",
            vec![
                Say::call("c1", "charge", "{\"amount\":1.50}"),
                Say::text("well done"),
            ],
        );
        llm.next(vec![Say::status(429)]);
        let addr = llm.url();
        let client = Client::new(addr.strip_prefix("http://").unwrap().strip_suffix("/v1").unwrap());
        let ask = async |messages: Value| {
            let body = json!({"model": MODEL, "messages": messages, "stream": true});
            client.post("/v1/chat/completions", &body).await
        };
        let user = json!({"role": "user", "content": "buy"});
        assert_eq!(ask(json!([user])).await.status(), 429);
        for _ in 0..2 {
            let chunks = sse_data(&ask(json!([user])).await.text());
            let arguments: String = chunks
                .iter()
                .filter_map(|c| serde_json::from_str::<Value>(c).ok())
                .filter_map(|c| {
                    c["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"]
                        .as_str()
                        .map(str::to_owned)
                })
                .collect();
            assert_eq!(arguments, "{\"amount\":1.50}");
        }
        let assistant = json!({"role": "assistant", "content": null});
        let answer = ask(json!([user, assistant])).await.text();
        assert!(
            answer.contains("well ") && answer.ends_with("data: [DONE]\n\n"),
            "{answer}"
        );
        assert_eq!(llm.requests_of("buy").len(), 4);
        let other = fixtures::chat(MODEL, "else", true);
        assert!(
            client
                .post("/v1/chat/completions", &other)
                .await
                .text()
                .contains("done")
        );
        let cut = {
            llm.next(vec![Say::Cut(1, "a b c".to_owned())]);
            ask(json!([user])).await
        };
        assert!(!cut.complete && cut.text().contains("a "), "{}", cut.text());
    });
}

#[test]
fn an_mcp_server_forgets_sessions_and_keeps_what_was_done() {
    run(30, async {
        let mcp = McpStub::start().await;
        let url = mcp.url();
        let client = Client::new(url.strip_prefix("http://").unwrap().strip_suffix("/mcp").unwrap());
        let post = async |session: Option<&str>, body: Value| {
            let headers: Vec<(&str, &str)> = session.map(|s| ("mcp-session-id", s)).into_iter().collect();
            client
                .request("POST", "/mcp", &headers, body.to_string().as_bytes())
                .await
        };
        let call = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                          "params": {"name": "launch", "arguments": {"n": 1}, "_meta": {"iop/idempotency-key": "k"}}});
        assert_eq!(post(None, call.clone()).await.status(), 400);
        let init = post(None, json!({"jsonrpc": "2.0", "id": 0, "method": "initialize"})).await;
        let session = init.header("mcp-session-id").unwrap().to_owned();
        assert_eq!(post(Some(&session), call.clone()).await.status(), 200);
        mcp.script("launch", vec![Reply::Expired, Reply::Status(503, vec![])]);
        assert_eq!(post(Some(&session), call.clone()).await.status(), 404);
        assert_eq!(post(Some(&session), call.clone()).await.status(), 503);
        assert_eq!((mcp.calls("launch").len(), mcp.effects("launch")), (3, 2));
        assert_eq!(mcp.calls("launch")[0].key.as_deref(), Some("k"));
        mcp.forget_sessions();
        assert_eq!(post(Some(&session), call).await.status(), 404);
        assert_eq!(mcp.calls("launch").len(), 3);
    });
}
