//! The recovery gate (D31): what a durable run promises when its host is replaced, in one place.
//!
//! Two processes on one PostgreSQL. The host of every run here is killed, and another one goes on from the checkpoint.

use std::time::Duration;

use futures_util::future::join_all;
use iop_tests::llm::{self, Say};
use iop_tests::run;
use iop_tests::runs::agents::{FRAGILE, WORKER, agent, all};
use iop_tests::runs::{Db, Options, Stubs, World};
use iop_tests::tool_stub::Answer;
use serde_json::{Value, json};

const STRICT: &str = "strict";
const CHIEF: &str = "chief";

/// The shared agents, one whose charges end its run when they fail, and one that delegates.
fn agents(stubs: &Stubs) -> String {
    let charge = "name = \"charge\"\n";
    let strict = agent(stubs, STRICT, "").replace(charge, &format!("{charge}on_error = \"fail_run\"\n"));
    let chief = format!(
        r#"
[agents.{CHIEF}]
model = "{}"
durable = true
[[agents.{CHIEF}.tools]]
name = "delegate"
agent = {{ name = "guarded" }}
effect = "idempotent"
"#,
        llm::MODEL
    );
    format!("{}{strict}{chief}", all(stubs))
}

async fn two_edges() -> World {
    let options = Options {
        lease_ttl: Duration::from_secs(2),
        ..Options::default()
    };
    let mut world = World::with(Db::Postgres, options, agents).await;
    world.add_edge().await;
    for path in ["/reserve", "/charge", "/confirm"] {
        world.stubs.tools.honour_keys(path);
    }
    world
}

#[test]
fn recovery_gate_a_waiting_run_and_its_lineage_survive_their_host() {
    run(120, async {
        let mut world = two_edges().await;
        world.stubs.llm.plays(
            "delegate",
            vec![
                Say::call("c1", "delegate", "{\"task\":\"ship\"}"),
                Say::text("all done"),
            ],
        );
        world.stubs.llm.plays(
            "{\"task\":\"ship\"}",
            vec![Say::call("k1", "deploy", "{\"n\":1}"), Say::text("shipped")],
        );
        let parent = world.api_of(0).run(CHIEF, "delegate").await;
        let children = iop_tests::eventually("the child waits", Duration::from_secs(30), || async {
            let runs = world.api_of(1).all(&format!("/runs?parent_id={parent}")).await;
            match runs.first() {
                Some(child) if child["status"] == "waiting" => Ok(runs),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
        assert_eq!(children.len(), 1, "{children:?}");
        let child = children[0]["id"].as_str().unwrap().to_owned();
        let before = world.api_of(1).seen_run(&child).await;
        assert_eq!(
            (&before["parent_run_id"], &before["root_run_id"]),
            (&json!(parent), &json!(parent))
        );
        world.kill(0).await;
        let api = world.api_of(1);
        let after = api.seen_run(&child).await;
        for member in [
            "waiting_on",
            "revision",
            "parent_run_id",
            "root_run_id",
            "step",
            "budgets",
        ] {
            assert_eq!(before[member], after[member], "{member}");
        }
        let on = api.waits_on(&child, "approval", 1).await;
        assert_eq!(api.decide(&child, &on[0], "approve", "d1").await.status(), 200);
        api.succeeded(&child).await;
        let seen = api.succeeded(&parent).await;
        assert_eq!(seen["outcome"]["output"], "all done");
        assert_eq!(api.all(&format!("/runs?parent_id={parent}")).await.len(), 1);
        let steps = api.all(&format!("/runs/{parent}/steps")).await;
        let named: Vec<&Value> = steps.iter().map(|step| &step["child_run_id"]).collect();
        assert_eq!(named, [&Value::Null, &json!(child), &Value::Null], "{steps:?}");
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        world.holds().await;
    });
}

#[test]
fn recovery_gate_duplicate_resumes_start_a_run_once() {
    run(120, async {
        let mut world = two_edges().await;
        world.stubs.llm.plays(
            "again",
            vec![
                Say::call("c1", "reserve", "{}"),
                Say::call("c2", "charge", "{\"amount\":3}"),
                Say::text("paid"),
            ],
        );
        let reserve = world.stubs.tools.received("/reserve");
        reserve.close();
        let run = world.api_of(0).run(FRAGILE, "again").await;
        reserve.reached(1).await;
        world.stubs.llm.next(vec![Say::status(429)]);
        reserve.open();
        let failed = world.api_of(0).over(&run).await;
        assert_eq!(failed["resumable"], true, "{failed}");
        world.kill_and_restart(0).await;
        let body = json!({"resume_token": failed["resume_token"]});
        let resumes = (0..40).map(|n| {
            let (api, path, body) = (world.api_of(n % 2), format!("/runs/{run}/resume"), &body);
            async move { api.post(&path, body).await }
        });
        let answers = join_all(resumes).await;
        let accepted = answers.iter().filter(|a| a.status() == 202).count();
        for answer in answers.iter().filter(|a| a.status() != 202) {
            let known = ["stale_token", "run_busy"].contains(&answer.error_code().as_str());
            assert!(
                answer.status() == 409 && known || answer.status() == 200,
                "{} {}",
                answer.status(),
                answer.text()
            );
        }
        assert_eq!(accepted, 1);
        let seen = world.api_of(1).succeeded(&run).await;
        assert_eq!(seen["life"], 2);
        let tools = &world.stubs.tools;
        assert_eq!(
            (tools.calls("/reserve").len(), tools.calls("/charge").len()),
            (1, 1)
        );
        world.holds().await;
    });
}

#[test]
fn recovery_gate_an_ambiguous_effect_is_not_repeated_by_any_host() {
    run(120, async {
        let mut world = two_edges().await;
        world.stubs.llm.plays(
            "once",
            vec![
                Say::calls(&[("a", "deploy", "{}"), ("b", "charge", "{\"amount\":1}")]),
                Say::text("done"),
            ],
        );
        let deploy = world.stubs.tools.applied("/deploy");
        let charge = world.stubs.tools.applied("/charge");
        deploy.close();
        charge.close();
        let run = world.api_of(0).run(WORKER, "once").await;
        deploy.reached(1).await;
        charge.reached(1).await;
        // Whichever of the two works on the run dies.
        for n in [0, 1] {
            world.kill(n).await;
        }
        for n in [0, 1] {
            world.restart(n).await;
        }
        deploy.open();
        charge.open();
        let api = world.api_of(0);
        let seen = api.until(&run, &["ambiguous"]).await;
        api.resume(&run).await.assert_error(409, "effect_ambiguous");
        let activity = seen["waiting_on"][0]["activity_id"].as_str().unwrap();
        let path = format!("/runs/{run}/activities/{activity}");
        let record = api.seen(&path).await;
        let resolve = json!({"action": "complete", "decision_id": "r1", "attempt": 1, "resume": true,
            "input_digest": record["input_digest"], "reason": "seen", "evidence": "log", "output": "deployed"});
        let resolved = api.post(&format!("{path}/resolve"), &resolve).await;
        assert_eq!(resolved.status(), 200, "{}", resolved.text());
        api.succeeded(&run).await;
        let tools = &world.stubs.tools;
        assert_eq!((tools.calls("/deploy").len(), tools.effects("/deploy")), (1, 1));
        assert_eq!(tools.effects("/charge"), 1);
        world.holds().await;
    });
}

#[test]
fn recovery_gate_a_spent_retry_budget_stays_spent() {
    run(120, async {
        let mut world = two_edges().await;
        world.stubs.tools.always("/charge", Answer::status(503));
        world
            .stubs
            .llm
            .plays("poor", vec![Say::call("c1", "charge", "{\"amount\":1}")]);
        let run = world.api_of(0).run(STRICT, "poor").await;
        let seen = world.api_of(1).over(&run).await;
        assert_eq!(seen["status"], "exhausted", "{seen}");
        assert_eq!(
            seen["outcome"]["exhausted"],
            json!({"budget": "retry:charge", "used": 2, "limit": 2})
        );
        world.kill_and_restart(0).await;
        world.kill_and_restart(1).await;
        for n in [0, 1] {
            world
                .api_of(n)
                .resume(&run)
                .await
                .assert_error(409, "run_terminal");
        }
        let calls = world.stubs.tools.calls("/charge");
        assert_eq!(calls.len(), 2);
        assert_eq!(calls[0].key, calls[1].key);
        let outcome: Value = world.api_of(0).seen_run(&run).await["outcome"].clone();
        assert_eq!(outcome, seen["outcome"]);
        world.holds().await;
    });
}

#[test]
fn recovery_gate_stable_keys_leave_one_effect_however_often_a_host_dies() {
    run(180, async {
        let mut world = two_edges().await;
        world.stubs.llm.plays(
            "deaths",
            vec![
                Say::call("c1", "charge", "{\"amount\":1}"),
                Say::call("c2", "charge", "{\"amount\":2}"),
                Say::text("paid"),
            ],
        );
        let (received, applied) = (
            world.stubs.tools.received("/charge"),
            world.stubs.tools.applied("/charge"),
        );
        received.close();
        let run = world.api_of(0).run(WORKER, "deaths").await;
        for death in 0..4 {
            let point = if death % 2 == 0 { &received } else { &applied };
            point.reached(1).await;
            let next = if death % 2 == 0 { &applied } else { &received };
            world.kill(0).await;
            world.kill(1).await;
            next.close();
            point.open();
            world.restart(0).await;
            world.restart(1).await;
        }
        received.open();
        applied.open();
        world.api_of(1).succeeded(&run).await;
        let honoured = world.stubs.tools.honoured();
        let charges: Vec<_> = honoured.iter().filter(|(path, ..)| path == "/charge").collect();
        assert_eq!(charges.len(), 2, "{charges:?}");
        world.holds().await;
    });
}
