//! `/api/v1` as its own document describes it, called with what a generator makes of that document (schemathesis): no request is
//! answered with a failure of the edge, every answer is one that the document knows, and what the document forbids is refused.

use std::path::Path;
use std::time::Duration;

use iop_tests::llm::Say;
use iop_tests::run;
use iop_tests::runs::agents::{FRAGILE, GUARDED, WORKER, all};
use iop_tests::runs::{Api, Db, OWNER, ROOT, World};
use iop_tests::sdk::{fuzzer, source_dir};
use iop_tests::tool_stub::Answer;
use serde_json::{Value, json};

/// What is looked for: failures of the edge, answers that the document does not know, requests that it forbids and the edge takes, and
/// operations that are open to everybody.
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,\
                      response_schema_conformance,negative_data_rejection,use_after_free,unsupported_method,\
                      allow_header_conformance,ignored_auth";

/// Runs in every state that a run can rest in, with what a request about them needs to know.
async fn known(world: &World) -> Vec<Value> {
    let (api, llm) = (world.api(), &world.stubs.llm);
    llm.plays("ask", vec![Say::call("c1", "deploy", "{}"), Say::text("done")]);
    let prompt = "{\"prompt\":\"How many?\",\"schema\":{\"type\":\"integer\"}}";
    llm.plays(
        "count",
        vec![Say::call("c1", "request_input", prompt), Say::text("done")],
    );
    llm.plays("cut", vec![Say::call("c1", "deploy", "{}"), Say::text("done")]);
    llm.plays("fail", vec![Say::status(429)]);
    llm.plays(
        "look",
        vec![Say::call("c1", "lookup", "{\"sku\":\"a\"}"), Say::text("done")],
    );
    let mut runs = Vec::new();
    for _ in 0..4 {
        let asks = api.run(GUARDED, "ask").await;
        let on = api.waits_on(&asks, "approval", 1).await;
        runs.push(
            json!({"id": asks, "approval_id": on[0]["id"], "arguments_digest": on[0]["arguments_digest"]}),
        );

        let counts = api.run(WORKER, "count").await;
        let on = api.waits_on(&counts, "input", 1).await;
        let waits = api.all(&format!("/runs/{counts}/waits")).await;
        runs.push(
            json!({"id": counts, "input_id": on[0]["id"], "wait_id": on[0]["id"],
                         "correlation_id": waits[0]["correlation_id"]}),
        );

        world.stubs.tools.script("/deploy", vec![Answer::cut()]);
        let unknown = api.run(WORKER, "cut").await;
        let seen = api.until(&unknown, &["ambiguous"]).await;
        let activity = seen["waiting_on"][0]["activity_id"].as_str().unwrap();
        let record = api.seen(&format!("/runs/{unknown}/activities/{activity}")).await;
        runs.push(
            json!({"id": unknown, "activity_id": activity, "input_digest": record["input_digest"],
                         "attempt": 1}),
        );

        let failed = api.run(FRAGILE, "fail").await;
        api.until(&failed, &["failed"]).await;
        runs.push(json!({"id": failed}));
        let done = api.run(WORKER, "look").await;
        api.succeeded(&done).await;
        runs.push(json!({"id": done}));
    }
    for run in &mut runs {
        let id = run["id"].as_str().unwrap().to_owned();
        run["resume_token"] = api.seen_run(&id).await["resume_token"].clone();
        let first = &api.all(&format!("/runs/{id}/history")).await[0];
        run["revision"] = first["revision"].clone();
        run["digest"] = first["digest"].clone();
    }
    runs
}

/// One session of the generator with a key, or with none: what it found.
async fn found(api: &Api, dir: &Path, key: Option<&str>, examples: u32) -> Option<String> {
    let program = tokio::task::spawn_blocking(fuzzer).await.unwrap();
    let hooks = source_dir().join("fuzz_hooks.py");
    let mut config = format!(
        "hooks = {hooks:?}\n[checks]\nnot_a_server_error.expected-statuses = [\"2xx\", \"4xx\", 501]\n"
    );
    if let Some(key) = key {
        config.push_str(&format!("[auth.openapi.api_key]\nbearer = {key:?}\n"));
    }
    std::fs::write(dir.join("schemathesis.toml"), config).unwrap();
    let (address, examples) = (format!("http://{}", api.client.addr), examples.to_string());
    let mut command = tokio::process::Command::new(program);
    command
        .args(["--config-file", "schemathesis.toml", "run", "openapi.json"])
        .args(["--url", &address, "--checks", CHECKS, "--max-examples", &examples])
        .args([
            "--seed",
            "5",
            "--continue-on-failure",
            "--no-shrink",
            "--no-color",
        ])
        .args([
            "--suppress-health-check",
            "all",
            "--request-timeout",
            "20",
            "--warnings",
            "off",
        ])
        .env("FUZZ_KNOWN", dir.join("known.json"))
        .env("NO_PROXY", "*")
        .current_dir(dir)
        .kill_on_drop(true);
    let output = tokio::time::timeout(Duration::from_secs(120), command.output()).await;
    let output = output.expect("the generator does not end").unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    // Not one operation was left out.
    let document: Value = serde_json::from_slice(&std::fs::read(dir.join("openapi.json")).unwrap()).unwrap();
    let paths = document["paths"].as_object().unwrap().values();
    let operations: usize = paths.map(|path| path.as_object().unwrap().len()).sum();
    assert!(operations > 30, "{operations}");
    assert!(
        said.contains(&format!("Tested: {operations}\n")),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    (!output.status.success()).then(|| format!("with {key:?}: {said}"))
}

/// Sessions without a key, with the least and with the most that a key may do, each of so many requests per operation.
async fn sessions(db: Db, sessions: &[(Option<&str>, u32)]) {
    let world = World::start(db, all).await;
    let api = world.api();
    let dir = tempfile::tempdir().unwrap();
    let document = api.get("/openapi.json").await;
    assert_eq!(document.status(), 200, "{}", document.text());
    std::fs::write(dir.path().join("openapi.json"), document.text()).unwrap();
    let told = json!({"agent": WORKER, "runs": known(&world).await, "spare": known(&world).await});
    std::fs::write(dir.path().join("known.json"), told.to_string()).unwrap();

    let mut wrong = Vec::new();
    for (key, examples) in sessions {
        wrong.extend(found(&api, dir.path(), *key, *examples).await);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));

    // They came as far as what is stored.
    let scopes = world.query("SELECT DISTINCT scope FROM decisions");
    for scope in ["cancel", "wait:"] {
        assert!(
            scopes.iter().any(|s| s[0].starts_with(scope)),
            "{scope}: {scopes:?}"
        );
    }
    let edge = &world.edges[0];
    assert_eq!(edge.scrape().await.sum("iop_edge_panics_total", &[]), 0.0);
    let errors = edge.process.lines_with("\"level\":\"ERROR\"");
    assert!(errors.is_empty(), "{errors:?}");
    world.holds().await;
}

#[test]
fn generated_requests_are_answered_as_the_document_says() {
    run(
        300,
        sessions(Db::Sqlite, &[(None, 3), (Some(OWNER), 5), (Some(ROOT), 12)]),
    );
}

/// The same of what another database takes for text, a number or a time.
#[test]
fn generated_requests_are_answered_the_same_on_postgresql() {
    run(300, sessions(Db::Postgres, &[(Some(ROOT), 8)]));
}
