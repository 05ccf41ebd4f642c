use iop_tests::mcp_stub::{McpStub, Reply};
use iop_tests::provider::{Exchange, Stub};
use serde_json::{Value, json};

use super::*;
use crate::agents::spec::EffectSpec;

const KEY: &str = "run_1/action/2/call_1.0";

async fn cutting() -> Stub {
    Stub::start(|mut ex: Exchange| async move {
        if ex.path == "/found" {
            return ex.reply(200, &[], br#"{"id":1}"#).await;
        }
        ex.cut(true);
        Ok(())
    })
    .await
}

fn agent(tools: &Value) -> AgentSpec {
    serde_json::from_value(json!({ "model": "m", "tools": tools })).unwrap()
}

#[tokio::test]
async fn the_effect_is_pinned_and_the_connection_is_the_newest() {
    let (old, new) = (cutting().await, cutting().await);
    let toolbox = Toolbox::new(1000).unwrap();
    let tool = |stub: &Stub, effect: &str| {
        let base = format!("http://{}", stub.addr);
        json!([{
            "name": "charge",
            "http": { "method": "POST", "url": base },
            "effect": effect,
            "reconcile": { "url": format!("{base}/found"), "found": "$.id" },
        }])
    };
    for (then, now, unknown) in [("unsafe", "idempotent", true), ("idempotent", "unsafe", false)] {
        let pinned = agent(&tool(&old, then));
        let newest = agent(&tool(&new, now));
        let result = toolbox.call(&newest, &pinned.tools[0], b"{}", KEY, None).await;
        assert_eq!(matches!(result, Err(CallError::Unknown)), unknown, "{result:?}");
        let evidence = toolbox.found(&newest, &pinned.tools[0], b"{}", KEY).await;
        assert_eq!(evidence.unwrap(), r#"{"id":1}"#);
    }
    assert_eq!((old.received().len(), new.received().len()), (0, 4));
}

#[tokio::test]
async fn a_tool_that_the_newest_version_does_not_have_is_not_called() {
    let toolbox = Toolbox::new(1000).unwrap();
    let stub = cutting().await;
    let url = format!("http://{}", stub.addr);
    let http = json!([{ "name": "a", "http": { "url": url } }]);
    let server = json!({ "ops": { "url": url } });
    let remote = json!([{ "name": "a", "mcp": { "server": "ops", "tool": "a" } }]);
    let child = json!([{ "name": "a", "agent": { "name": "b" } }]);
    let mut with_server = agent(&remote);
    with_server.mcp_servers = serde_json::from_value(server).unwrap();
    for (pinned, newest) in [
        (agent(&http), agent(&json!([]))),
        (agent(&http), agent(&child)),
        (with_server, agent(&remote)),
    ] {
        let tool = &pinned.tools[0];
        let Err(CallError::Failed { failure, .. }) = toolbox.call(&newest, tool, b"{}", KEY, None).await
        else {
            panic!("it is not there");
        };
        assert_eq!(
            (failure.code.as_str(), failure.retryable),
            ("tool_unavailable", false)
        );
        assert_eq!(toolbox.found(&newest, tool, b"{}", KEY).await, None);
    }
    assert!(stub.received().is_empty());
    assert_eq!(agent(&http).tools[0].effect, EffectSpec::Unsafe);
}

#[tokio::test]
async fn what_a_server_says_of_its_secrets_is_told_to_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    std::fs::write(&path, "Bearer a-long-token").unwrap();
    let stub = McpStub::start().await;
    stub.script(
        "whoami",
        vec![
            Reply::text("you are a-long-token"),
            Reply::Error(-32000, String::from("not Bearer a-long-token")),
        ],
    );
    let mut agent = agent(&json!([{ "name": "whoami", "mcp": { "server": "ops", "tool": "whoami" } }]));
    let server = json!({ "ops": { "url": stub.url(), "headers": { "authorization": { "file": path } } } });
    agent.mcp_servers = serde_json::from_value(server).unwrap();
    let toolbox = Toolbox::new(1000).unwrap();
    let told = toolbox.call(&agent, &agent.tools[0], b"{}", KEY, None).await;
    assert_eq!(told.unwrap(), "you are [redacted]");
    let told = toolbox.call(&agent, &agent.tools[0], b"{}", KEY, None).await;
    let Err(CallError::Failed { failure, .. }) = told else {
        panic!("it failed");
    };
    assert_eq!(failure.message, "not [redacted]");
    assert!(stub.calls("whoami").iter().all(|call| {
        let sent =
            |(name, value): &(String, String)| name == "authorization" && value.contains("a-long-token");
        call.headers.iter().any(sent)
    }));
}

#[tokio::test]
async fn a_server_that_says_no_in_http_has_answered() {
    let stub = McpStub::start().await;
    let mut agent = agent(&json!([{ "name": "call", "mcp": { "server": "ops", "tool": "call" } }]));
    agent.mcp_servers = serde_json::from_value(json!({ "ops": { "url": stub.url() } })).unwrap();
    let toolbox = Toolbox::new(1000).unwrap();
    for (status, kind) in [
        (400, FailureKind::ToolError),
        (401, FailureKind::Auth),
        (403, FailureKind::Auth),
        (422, FailureKind::ToolError),
    ] {
        stub.script("call", vec![Reply::Status(status, Vec::new())]);
        let told = toolbox.call(&agent, &agent.tools[0], b"{}", KEY, None).await;
        let Err(CallError::Failed { failure, .. }) = told else {
            panic!("{status} is an answer");
        };
        assert_eq!(
            (failure.kind, failure.code, failure.retryable),
            (kind, format!("http_{status}"), false)
        );
    }
}
