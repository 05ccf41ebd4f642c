//! What is counted of runs: everything that happened, once, and gauges that come back to rest.

use std::time::Duration;

use iop_tests::llm::Say;
use iop_tests::metrics::Page;
use iop_tests::runs::agents::{GUARDED, WORKER, agent, all};
use iop_tests::runs::{Db, World};
use iop_tests::{eventually, run};
use serde_json::json;

/// Gauges are read from the store every few seconds.
const WITHIN: Duration = Duration::from_secs(30);

fn sum(page: &Page, name: &str, labels: &[(&str, &str)]) -> f64 {
    page.sum(&format!("iop_edge_{name}"), labels)
}

/// A name, labels, and the sum of all series that have them.
type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], f64);

/// Waits until an edge shows these values.
async fn shows(world: &World, edge: usize, expected: &[Row<'_>]) {
    eventually("the metrics agree", WITHIN, || async {
        let page = world.edges[edge].scrape().await;
        for (name, labels, value) in expected {
            let found = sum(&page, name, labels);
            if found != *value {
                return Err(format!("{name}{labels:?} is {found}, not {value}"));
            }
        }
        Ok(())
    })
    .await;
}

/// Nothing waits, nothing is due, nobody works.
const AT_REST: [Row<'_>; 5] = [
    ("runs", &[], 0.0),
    ("approvals_pending", &[], 0.0),
    ("approval_oldest_seconds", &[], 0.0),
    ("sweeper_lag_seconds", &[], 0.0),
    ("run_workers_busy", &[], 0.0),
];

#[test]
fn a_run_with_an_approval_is_counted_once() {
    run(120, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let api = world.api();
            let deploy = Say::call("c1", "deploy", "{}");
            world.stubs.llm.plays("ship", vec![deploy, Say::text("done")]);
            let run = api.run(GUARDED, "ship").await;
            api.waits_on(&run, "approval", 1).await;
            shows(
                &world,
                0,
                &[
                    ("runs", &[("status", "waiting")], 1.0),
                    ("runs", &[], 1.0),
                    ("approvals_pending", &[], 1.0),
                    ("run_workers_busy", &[], 0.0),
                    ("sweeper_lag_seconds", &[], 0.0),
                    ("runs_ended_total", &[], 0.0),
                    ("approval_latency_seconds_count", &[], 0.0),
                ],
            )
            .await;
            eventually("the oldest approval grows old", WITHIN, || async {
                let oldest = sum(&world.edges[0].scrape().await, "approval_oldest_seconds", &[]);
                if oldest > 1.0 && oldest < 30.0 {
                    Ok(())
                } else {
                    Err(oldest.to_string())
                }
            })
            .await;
            api.approve(&run).await;
            api.succeeded(&run).await;
            shows(&world, 0, &AT_REST).await;
            shows(
                &world,
                0,
                &[
                    ("approval_latency_seconds_count", &[("decision", "approved")], 1.0),
                    ("approval_latency_seconds_count", &[], 1.0),
                    ("runs_ended_total", &[("status", "succeeded")], 1.0),
                    ("runs_ended_total", &[], 1.0),
                    ("run_duration_seconds_count", &[("status", "succeeded")], 1.0),
                    ("run_step_duration_seconds_count", &[("kind", "model_turn")], 2.0),
                    ("run_step_duration_seconds_count", &[("kind", "tool_call")], 1.0),
                    (
                        "tool_calls_total",
                        &[("tool_kind", "http"), ("result", "ok")],
                        1.0,
                    ),
                    ("tool_calls_total", &[], 1.0),
                    ("checkpoint_errors_total", &[], 0.0),
                    ("lease_losses_total", &[], 0.0),
                    ("ambiguous_effects_total", &[], 0.0),
                ],
            )
            .await;
            let page = world.edges[0].scrape().await;
            assert!(sum(&page, "checkpoint_commit_seconds_count", &[]) >= 5.0);
            // The time of the person is in the run's, not in the call's.
            let waited = sum(&page, "approval_latency_seconds_sum", &[]);
            let lasted = sum(&page, "run_duration_seconds_sum", &[]);
            let worked = sum(&page, "run_step_duration_seconds_sum", &[]);
            assert!(
                waited > 1.0 && lasted >= waited && worked < 1.0,
                "{waited} {lasted} {worked}"
            );
        }
    });
}

#[test]
fn decisions_are_counted_by_what_they_were() {
    run(120, async {
        let world = World::start(Db::Sqlite, |stubs| {
            let rules = "approvals = { default = \"always\", expires = \"1s\" }\n";
            format!("{}{}", all(stubs), agent(stubs, "hasty", rules))
        })
        .await;
        let api = world.api();
        let waiting = async |agent: &str, input: &str, call: Say| {
            world.stubs.llm.plays(input, vec![call, Say::text("done")]);
            let run = api.run(agent, input).await;
            let approval = api.waits_on(&run, "approval", 1).await[0].clone();
            (run, approval)
        };
        let (denied, approval) = waiting(GUARDED, "denied", Say::call("c1", "deploy", "{}")).await;
        assert_eq!(api.decide(&denied, &approval, "deny", "d1").await.status(), 200);
        api.succeeded(&denied).await;

        let (edited, approval) =
            waiting(GUARDED, "edited", Say::call("c2", "charge", r#"{"amount":500}"#)).await;
        let body = json!({"decision": "edit", "decision_id": "d2", "edited_arguments": {"amount": 5},
                          "arguments_digest": approval["arguments_digest"]});
        let path = format!("/runs/{edited}/approvals/{}", approval["id"].as_str().unwrap());
        assert_eq!(api.post(&path, &body).await.status(), 200);
        // The same again, and another that comes too late, decide nothing.
        assert_eq!(api.post(&path, &body).await.status(), 200);
        assert_eq!(api.decide(&edited, &approval, "deny", "d3").await.status(), 409);
        api.succeeded(&edited).await;

        world.stubs.llm.plays(
            "expired",
            vec![Say::call("c3", "deploy", "{}"), Say::text("done")],
        );
        let expired = api.run("hasty", "expired").await;
        api.succeeded(&expired).await;

        let (cancelled, _) = waiting(GUARDED, "cancelled", Say::call("c4", "deploy", "{}")).await;
        let body = json!({"reason": "enough", "cancel_id": "x"});
        api.post(&format!("/runs/{cancelled}/cancel"), &body).await;
        api.until(&cancelled, &["cancelled"]).await;

        shows(&world, 0, &AT_REST).await;
        shows(
            &world,
            0,
            &[
                ("approval_latency_seconds_count", &[("decision", "denied")], 1.0),
                ("approval_latency_seconds_count", &[("decision", "edited")], 1.0),
                ("approval_latency_seconds_count", &[("decision", "expired")], 1.0),
                ("approval_latency_seconds_count", &[("decision", "approved")], 0.0),
                (
                    "tool_calls_total",
                    &[("result", "refused"), ("tool_kind", "http")],
                    2.0,
                ),
                (
                    "tool_calls_total",
                    &[("result", "ok"), ("tool_kind", "http")],
                    1.0,
                ),
                ("runs_ended_total", &[("status", "succeeded")], 3.0),
                ("runs_ended_total", &[("status", "cancelled")], 1.0),
                ("runs_ended_total", &[], 4.0),
            ],
        )
        .await;
    });
}

#[test]
fn an_unknown_effect_is_counted_once() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            // Whose effect can be asked for, and was not found.
            let transfer = Say::call("c1", "transfer", "{}");
            world.stubs.llm.plays("pay", vec![transfer, Say::text("done")]);
            world.stubs.tools.received("/transfer").close();
            let run = world.api().run(WORKER, "pay").await;
            world.stubs.tools.called("/transfer", 1).await;
            shows(&world, 0, &[("run_workers_busy", &[], 1.0)]).await;
            world.kill_and_restart(0).await;
            let seen = world.api().until(&run, &["ambiguous"]).await;
            let counted: [Row<'_>; 3] = [
                ("ambiguous_effects_total", &[], 1.0),
                ("runs", &[("status", "ambiguous")], 1.0),
                ("run_workers_busy", &[], 0.0),
            ];
            shows(&world, 0, &counted).await;
            // Neither asking again nor asking for its end makes it another one.
            let cancel = json!({"reason": "enough", "cancel_id": "x"});
            let api = world.api();
            api.post(&format!("/runs/{run}/cancel"), &cancel).await;
            let activity = seen["waiting_on"][0]["activity_id"].as_str().unwrap();
            let path = format!("/runs/{run}/activities/{activity}");
            let asked = api.post(&format!("{path}/reconcile"), &json!({})).await;
            assert_eq!(asked.status(), 200, "{}", asked.text());
            let record = api.seen(&path).await;
            shows(&world, 0, &counted).await;
            let resolve = json!({"action": "complete", "decision_id": "r1", "attempt": 1, "reason": "seen",
                "input_digest": record["input_digest"], "evidence": "log", "output": "up"});
            let resolved = api.post(&format!("{path}/resolve"), &resolve).await;
            assert_eq!(resolved.status(), 200, "{}", resolved.text());
            api.until(&run, &["cancelled"]).await;
            shows(&world, 0, &AT_REST).await;
            shows(&world, 0, &counted[..1]).await;
            world.stubs.tools.received("/transfer").open();
        }
    });
}

#[test]
fn a_worker_that_was_stopped_for_too_long_counts_its_loss() {
    run(120, async {
        let mut world = World::start(Db::Postgres, all).await;
        let lookup = Say::call("c1", "lookup", r#"{"sku":"s"}"#);
        world.stubs.llm.plays("look", vec![lookup, Say::text("done")]);
        world.stubs.tools.received("/items/s").close();
        let run = world.api().run(WORKER, "look").await;
        world.stubs.tools.called("/items/s", 1).await;
        world.edges[0].process.signal("STOP");
        world.add_edge().await;
        // The other edge has taken the run over.
        world.stubs.tools.called("/items/s", 2).await;
        world.edges[0].process.signal("CONT");
        eventually("the loss is counted", WITHIN, || async {
            let lost = sum(&world.edges[0].scrape().await, "lease_losses_total", &[]);
            if lost >= 1.0 {
                Ok(())
            } else {
                Err(lost.to_string())
            }
        })
        .await;
        world.stubs.tools.received("/items/s").open();
        world.api_of(1).succeeded(&run).await;
        for edge in [0, 1] {
            shows(&world, edge, &AT_REST).await;
        }
        let page = world.edges[1].scrape().await;
        assert_eq!(sum(&page, "lease_losses_total", &[]), 0.0);
        assert_eq!(sum(&page, "runs_ended_total", &[]), 1.0);
        assert_eq!(
            sum(&world.edges[0].scrape().await, "runs_ended_total", &[]),
            0.0,
            "who ended the run counts it"
        );
    });
}
