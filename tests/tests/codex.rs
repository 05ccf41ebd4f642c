//! Codex, the coding client, against the gateway: a turn works over HTTP, and one that begins with a WebSocket
//! goes on over HTTP (G5).

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use iop_tests::config::{Provider, Setup};
use iop_tests::relay::Relay;
use iop_tests::stack::{Shape, Stack};
use iop_tests::{openai_like, run, sdk};
use serde_json::Value;

const TURN_WITHIN: Duration = Duration::from_secs(90);

/// One turn; the value is the events that Codex printed.
async fn turn(base_url: &str, websockets: bool) -> Vec<Value> {
    let modules = tokio::task::spawn_blocking(|| sdk::node_modules("codex"))
        .await
        .unwrap();
    let home = tempfile::tempdir().unwrap();
    let work = home.path().join("work");
    std::fs::create_dir(&work).unwrap();
    let config = format!(
        r#"
model = "gpt-test"
model_provider = "iop"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.iop]
name = "iop"
base_url = {base_url:?}
wire_api = "responses"
env_key = "CODEX_TEST_KEY"
supports_websockets = {websockets}
request_max_retries = 0
stream_max_retries = 0
"#
    );
    std::fs::write(home.path().join("config.toml"), config).unwrap();
    let mut command = tokio::process::Command::new(modules.join("node_modules/.bin/codex"));
    command
        .args([
            "exec",
            "--json",
            "--skip-git-repo-check",
            "--sandbox",
            "read-only",
            "-C",
        ])
        .arg(&work)
        .arg("hello")
        .env("CODEX_HOME", home.path())
        .env("HOME", home.path())
        .env("CODEX_TEST_KEY", openai_like::KEY)
        .env_remove("OPENAI_API_KEY");
    // Nothing but loopback is reachable: whatever else it would call meets a closed port.
    let nowhere = "http://127.0.0.1:9";
    for proxy in [
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
    ] {
        command.env(proxy, nowhere);
    }
    command.env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1");
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(TURN_WITHIN, command.output()).await;
    let Ok(output) = output else {
        panic!("codex was not done after {TURN_WITHIN:?}")
    };
    let output = output.unwrap_or_else(|e| panic!("codex: {e}"));
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "codex {}:\n{out}\n{err}", output.status);
    out.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

fn said(events: &[Value]) -> String {
    events
        .iter()
        .filter(|e| e["type"] == "item.completed" && e["item"]["type"] == "agent_message")
        .filter_map(|e| e["item"]["text"].as_str())
        .collect()
}

async fn turns(shape: Shape, websockets: bool) {
    let stub = openai_like::start().await;
    let provider =
        Provider::openai("up", &stub.url(), &["gpt-test"]).line("api_key = { env = \"PROVIDER_KEY\" }");
    let stack = Stack::start(shape, Setup::of(provider).env("PROVIDER_KEY", openai_like::KEY)).await;
    // A relay in between sees what Codex opened its connections with.
    let relay = Relay::start(&stack.edge.http).await;
    let events = turn(&format!("http://{}/v1", relay.addr), websockets).await;
    assert_eq!(said(&events), "Hello w\u{f6}rld \u{1f30d}", "{events:?}");
    assert!(events.iter().any(|e| e["type"] == "turn.completed"), "{events:?}");
    let openings: Vec<String> = relay
        .passages()
        .iter()
        .map(|p| String::from_utf8_lossy(&p.opening).to_ascii_lowercase())
        .collect();
    let upgrades = openings
        .iter()
        .filter(|o| o.contains("upgrade: websocket"))
        .count();
    assert_eq!(upgrades > 0, websockets, "{openings:?}");
    let posts: Vec<_> = stub
        .received()
        .into_iter()
        .filter(|r| r.method == "POST")
        .collect();
    assert!(!posts.is_empty() && posts.iter().all(|r| r.path == "/v1/responses"));
    stack.settled(Duration::from_secs(2)).await;
    let page = stack.edge.scrape().await;
    let count = |outcome| {
        page.sum(
            "iop_edge_requests_total",
            &[("endpoint", "responses"), ("outcome", outcome)],
        )
    };
    assert_eq!(
        count("success"),
        posts.len() as f64,
        "leaving after the terminal event is a success"
    );
    assert_eq!(count("client_cancelled"), 0.0);
}

#[test]
fn embedded_codex_turn_over_http() {
    run(180, turns(Shape::Embedded, false));
}

#[test]
fn linked_codex_turn_over_http() {
    run(180, turns(Shape::Linked, false));
}

#[test]
fn codex_with_websockets_goes_on_over_http() {
    run(180, turns(Shape::Embedded, true));
}

#[test]
fn codex_turn_at_the_provider_itself() {
    run(180, async {
        let stub = openai_like::start().await;
        assert_eq!(
            said(&turn(&stub.url(), false).await),
            "Hello w\u{f6}rld \u{1f30d}"
        );
    });
}

#[test]
fn codex_is_installed_as_pinned() {
    let modules = sdk::node_modules("codex");
    let package = modules.join("node_modules/@openai/codex/package.json");
    let package: Value = serde_json::from_slice(&std::fs::read(&package).unwrap()).unwrap();
    let pins = Path::new(env!("CARGO_MANIFEST_DIR")).join("codex/package.json");
    let pins: Value = serde_json::from_slice(&std::fs::read(pins).unwrap()).unwrap();
    assert_eq!(package["version"], pins["dependencies"]["@openai/codex"]);
}
