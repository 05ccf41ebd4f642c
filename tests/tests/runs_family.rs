//! Runs that runs start (D7, D11, D73): what becomes of them when the run that started them is cancelled (S82).

use std::time::Duration;

use iop_tests::client::Answer;
use iop_tests::llm::{MODEL, Say};
use iop_tests::runs::agents::{GUARDED, WORKER, all};
use iop_tests::runs::{Api, Db, Options, Stubs, World};
use iop_tests::{eventually, run};
use serde_json::{Value, json};

/// `boss` has `chief` for a tool, and that one the shared agents.
fn agents(stubs: &Stubs) -> String {
    format!(
        r#"{}
[agents.boss]
model = "{MODEL}"
durable = true
[[agents.boss.tools]]
name = "chief"
agent = {{ name = "chief" }}

[agents.chief]
model = "{MODEL}"
durable = true
[[agents.chief.tools]]
name = "guarded"
agent = {{ name = "{GUARDED}" }}
[[agents.chief.tools]]
name = "worker"
agent = {{ name = "{WORKER}" }}
"#,
        all(stubs)
    )
}

async fn cancel(api: &Api, run: &str) -> Answer {
    let body = json!({"cancel_id": "stop", "reason": "enough"});
    api.post(&format!("/runs/{run}/cancel"), &body).await
}

/// The one run that this run started, once it has one of these statuses.
async fn child(api: &Api, run: &str, statuses: &[&str]) -> Value {
    eventually("the child is there", Duration::from_secs(30), || async {
        let children = api.all(&format!("/runs?parent_id={run}")).await;
        match children.as_slice() {
            [child] if statuses.contains(&child["status"].as_str().unwrap()) => Ok(child.clone()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

fn id(run: &Value) -> &str {
    run["id"].as_str().unwrap()
}

/// A cancelled run takes the runs along that it waits for, and those that they wait for.
#[test]
fn a_cancelled_run_cancels_what_it_waits_for() {
    run(90, async {
        for db in Db::BOTH {
            let world = World::start(db, agents).await;
            let (api, llm) = (world.api(), &world.stubs.llm);
            llm.plays("go", vec![Say::call("c1", "chief", "{\"a\":1}")]);
            llm.plays("{\"a\":1}", vec![Say::call("c1", "guarded", "{\"b\":1}")]);
            llm.plays("{\"b\":1}", vec![Say::call("c1", "deploy", "{}")]);
            let boss = api.run("boss", "go").await;
            let chief = child(&api, &boss, &["waiting"]).await;
            let guarded = child(&api, id(&chief), &["waiting"]).await;
            api.waits_on(&boss, "children", 1).await;
            let cancelled = cancel(&api, &boss).await;
            assert!(matches!(cancelled.status(), 200 | 202), "{}", cancelled.text());
            for run in [id(&guarded), id(&chief), &boss] {
                let seen = api.over(run).await;
                assert_eq!(seen["status"], "cancelled", "{seen}");
            }
            let outcome = &api.seen_run(id(&guarded)).await["outcome"];
            assert_eq!(
                outcome["cancel"]["reason"], "The run that started it was cancelled.",
                "{outcome}"
            );
            assert_eq!(api.all("/approvals?status=pending").await, Vec::<Value>::new());
            // Asked for again, nothing changes.
            let before = api.seen_run(id(&guarded)).await;
            cancel(&api, &boss).await;
            assert_eq!(api.seen_run(id(&guarded)).await, before);
            world.holds().await;
        }
    });
}

/// S82: a child in the middle of a call is asked to end, and is not said to have ended before it has.
#[test]
fn a_child_in_a_call_ends_when_the_call_does() {
    run(90, async {
        let options = Options::default().line("runs", "cancel_grace = \"30s\"");
        let world = World::with(Db::Sqlite, options, agents).await;
        let (api, stubs) = (world.api(), &world.stubs);
        stubs
            .llm
            .plays("go", vec![Say::call("c1", "worker", "{\"a\":1}")]);
        stubs
            .llm
            .plays("{\"a\":1}", vec![Say::call("c1", "deploy", "{}")]);
        let deploy = stubs.tools.applied("/deploy");
        deploy.close();
        let chief = api.run("chief", "go").await;
        deploy.reached(1).await;
        let worker = child(&api, &chief, &["running"]).await;
        api.waits_on(&chief, "children", 1).await;
        cancel(&api, &chief).await;
        assert_eq!(api.over(&chief).await["status"], "cancelled");
        let asked = api.seen_run(id(&worker)).await;
        assert_eq!(asked["status"], "running", "{asked}");
        assert!(asked["cancel_requested_at"].is_string(), "{asked}");
        deploy.open();
        let seen = api.over(id(&worker)).await;
        assert_eq!(seen["status"], "cancelled", "{seen}");
        assert_eq!(seen["outcome"]["evidence"].as_array().unwrap().len(), 1, "{seen}");
        world.holds().await;
    });
}

/// A deadline ends a run as a cancellation does, also on a host that did not begin it.
#[test]
fn children_of_a_run_that_ran_out_of_time_end_with_it() {
    run(90, async {
        let mut world = World::start(Db::Sqlite, agents).await;
        let (api, llm) = (world.api(), &world.stubs.llm);
        llm.plays("go", vec![Say::call("c1", "guarded", "{\"b\":1}")]);
        llm.plays("{\"b\":1}", vec![Say::call("c1", "deploy", "{}")]);
        let body = json!({"agent": "chief", "input": "go", "deadline": "3s"});
        let made = api.post("/runs", &body).await;
        let chief = made.json()["id"].as_str().unwrap().to_owned();
        let guarded = child(&api, &chief, &["waiting"]).await;
        world.kill_and_restart(0).await;
        let api = world.api();
        let seen = api.over(&chief).await;
        assert_eq!(
            (&seen["status"], &seen["outcome"]["reason"]),
            (&json!("cancelled"), &json!("deadline")),
            "{seen}"
        );
        let seen = api.over(id(&guarded)).await;
        assert_eq!(seen["status"], "cancelled", "{seen}");
        world.holds().await;
    });
}
