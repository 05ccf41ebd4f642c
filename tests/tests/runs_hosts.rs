//! Hosts of runs that are cut off, too late, too many or told to stop (durable-scenarios §2 to §4).

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use iop_tests::llm::Say;
use iop_tests::relay::Relay;
use iop_tests::run;
use iop_tests::runs::agents::{GUARDED, WORKER, all};
use iop_tests::runs::{Api, Db, Options, World};
use iop_tests::tool_stub::Answer;
use serde_json::{Value, json};

fn short_leases() -> Options {
    Options {
        lease_ttl: Duration::from_secs(1),
        ..Options::default()
    }
}

async fn cancel(api: &Api, run: &str, id: &str) -> iop_tests::client::Answer {
    let body = json!({"cancel_id": id, "reason": "enough"});
    api.post(&format!("/runs/{run}/cancel"), &body).await
}

/// S13b: the intent is stored and the tool has seen nothing; a host that comes after cannot know that.
#[test]
fn a_stored_intent_counts_as_sent_although_the_tool_saw_nothing() {
    run(120, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let tools = world.stubs.tools.url("");
        let relay = Relay::start(tools.strip_prefix("http://").unwrap()).await;
        world.kill(0).await;
        world.agents = world.agents.replace(&tools, &format!("http://{}", relay.addr));
        world.restart(0).await;
        world.stubs.tools.honour_keys("/charge");
        world
            .stubs
            .llm
            .plays("unsafe", vec![Say::call("c1", "deploy", "{}"), Say::text("done")]);
        world.stubs.llm.plays(
            "safe",
            vec![Say::call("c1", "charge", "{\"amount\":1}"), Say::text("done")],
        );
        relay.black_hole();
        let api = world.api();
        let (deploy, charge) = (api.run(WORKER, "unsafe").await, api.run(WORKER, "safe").await);
        for run in [&deploy, &charge] {
            iop_tests::eventually("the call is under way", Duration::from_secs(20), || async {
                let calls = api.activities(run).await;
                match calls.iter().find(|a| a["state"] == "running") {
                    Some(_) => Ok(()),
                    None => Err(format!("{calls:?}")),
                }
            })
            .await;
        }
        world.kill(0).await;
        // What was under way stays lost; from here on the services are reached by themselves.
        world.agents = world.agents.replace(&format!("http://{}", relay.addr), &tools);
        world.restart(0).await;
        let api = world.api();
        let seen = api.until(&deploy, &["ambiguous"]).await;
        assert_eq!(seen["waiting_on"][0]["tool"], "deploy", "{seen}");
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        api.succeeded(&charge).await;
        assert_eq!(world.stubs.tools.calls("/charge").len(), 1);
        let activities = api.activities(&charge).await;
        let attempts = activities[0]["attempts"].as_array().unwrap().len();
        assert_eq!(attempts, 2, "{activities:?}");
        world.holds().await;
    });
}

/// S26: a host that cannot reach the store for longer than its lease stops what it does; it stores nothing afterwards.
#[test]
fn a_host_without_its_store_gives_its_calls_up() {
    run(120, async {
        let (mut world, relay) = World::behind_relay(short_leases(), all).await;
        world.stubs.tools.honour_keys("/charge");
        world.stubs.llm.plays(
            "cut",
            vec![Say::call("c1", "charge", "{\"amount\":1}"), Say::text("paid")],
        );
        let received = world.stubs.tools.received("/charge");
        received.close();
        let run = world.api().run(WORKER, "cut").await;
        received.reached(1).await;
        relay.black_hole();
        world.stubs.tools.hung_up(0).await;
        // Somebody else goes on, and the one who was cut off finds that out when its path is back.
        world.options.store_url = None;
        world.add_edge().await;
        received.reached(2).await;
        received.open();
        let seen = world.api_of(1).succeeded(&run).await;
        relay.restore();
        iop_tests::eventually("the path is back", Duration::from_secs(30), || async {
            let answer = world.api_of(0).get(&format!("/runs/{run}")).await;
            if answer.status() == 200 && answer.json()["outcome"] == seen["outcome"] {
                Ok(())
            } else {
                Err(answer.text())
            }
        })
        .await;
        assert_eq!(world.stubs.tools.effects("/charge"), 1);
        world.holds().await;
    });
}

/// S29: one SQLite file has one host.
#[test]
fn a_second_edge_does_not_start_on_the_same_file() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let dir = world.dir.path().join("second");
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("edge.toml");
        std::fs::write(&file, world.toml()).unwrap();
        let args = ["--config", file.to_str().unwrap()];
        let refused = iop_tests::process::finish("iop-edge", &args, &[], &dir).await;
        assert_ne!(refused.code, Some(0), "{}", refused.stdout);
        assert!(
            refused.stderr.contains("iop.db"),
            "the file is not named: {}",
            refused.stderr
        );
        let run = world.api().run(WORKER, "hello").await;
        world.api().succeeded(&run).await;
        assert!(world.edges[0].process.running());
        world.holds().await;
    });
}

/// S31: a run whose host is dead can be ended from another one.
#[test]
fn a_run_whose_host_is_dead_can_be_cancelled_elsewhere() {
    run(60, async {
        let mut world = World::start(Db::Postgres, all).await;
        world.stubs.llm.asked.close();
        let run = world.api_of(0).run(WORKER, "hello").await;
        world.stubs.llm.asked.reached(1).await;
        world.kill(0).await;
        world.add_edge().await;
        let api = world.api_of(1);
        let answer = cancel(&api, &run, "x1").await;
        assert!([200, 202].contains(&answer.status()), "{}", answer.text());
        let seen = api.over(&run).await;
        assert_eq!(
            (&seen["status"], &seen["outcome"]["reason"]),
            (&json!("cancelled"), &json!("cancelled"))
        );
        world.stubs.llm.asked.open();
        world.holds().await;
    });
}

/// S32: hosts that die on one call again and again use its budget up.
#[test]
fn a_call_that_kills_its_hosts_is_given_up() {
    run(120, async {
        let mut world = World::start(Db::Sqlite, |stubs| {
            let budget = "budgets = { recovery_attempts = 2 }\n";
            iop_tests::runs::agents::agent(stubs, WORKER, budget)
        })
        .await;
        world.stubs.tools.honour_keys("/charge");
        world
            .stubs
            .llm
            .plays("fatal", vec![Say::call("c1", "charge", "{\"amount\":1}")]);
        let received = world.stubs.tools.received("/charge");
        received.close();
        let run = world.api().run(WORKER, "fatal").await;
        for calls in 1..=3 {
            received.reached(calls).await;
            world.kill_and_restart(0).await;
        }
        let api = world.api();
        let seen = api.over(&run).await;
        assert_eq!(seen["status"], "exhausted", "{seen}");
        assert_eq!(
            seen["outcome"]["exhausted"]["budget"], "recovery_attempts",
            "{seen}"
        );
        api.resume(&run).await.assert_error(409, "run_terminal");
        assert_eq!(world.stubs.tools.calls("/charge").len(), 3);
        received.open();
        world.holds().await;
    });
}

/// S33: a run is deleted or worked on, never both.
#[test]
fn a_deleted_run_has_no_host() {
    run(120, async {
        let mut world = World::start(Db::Postgres, all).await;
        world.add_edge().await;
        let races = (0..20).map(|n| {
            let (one, other) = (world.api_of(0), world.api_of(1));
            async move {
                let run = one.run(WORKER, &format!("run {n}")).await;
                loop {
                    let answer = other
                        .client
                        .request("DELETE", &format!("/api/v1/runs/{run}"), &[], b"")
                        .await;
                    match answer.status() {
                        204 => break,
                        _ => answer.assert_error(409, "run_busy"),
                    }
                }
                for api in [&one, &other] {
                    api.get(&format!("/runs/{run}"))
                        .await
                        .assert_error(410, "run_deleted");
                }
                let again = json!({"agent": WORKER, "input": "again", "run_id": run});
                let again = one.create_with(&again, &[]).await;
                // An id is never used twice (D228).
                assert_eq!(again.status(), 409, "{}", again.text());
            }
        });
        join_all(races).await;
        assert!(world.api().all("/runs").await.is_empty());
        world.holds().await;
    });
}

/// S34: cancels and decisions at once: everything is answered, nothing is left.
#[test]
fn cancels_and_decisions_at_once_leave_nothing_behind() {
    run(300, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            if db == Db::Postgres {
                world.add_edge().await;
            }
            world
                .stubs
                .llm
                .plays("race", vec![Say::call("c1", "deploy", "{}"), Say::text("done")]);
            let last = world.edges.len() - 1;
            let races = (0..60).map(|n| {
                let (one, other) = (world.api_of(0), world.api_of(last));
                async move {
                    let run = one.run(GUARDED, "race").await;
                    let on = one.waits_on(&run, "approval", 1).await;
                    let id = format!("d{n}");
                    let (decided, cancelled) = tokio::join!(
                        one.decide(&run, &on[0], "approve", &id),
                        cancel(&other, &run, "x1")
                    );
                    assert!([200, 202].contains(&cancelled.status()), "{}", cancelled.text());
                    assert!([200, 409].contains(&decided.status()), "{}", decided.text());
                    one.until(&run, &["cancelled", "succeeded"]).await;
                }
            });
            join_all(races).await;
            world.holds().await;
        }
    });
}

/// S39, S40: what is in flight is waited for or given up by what it is; a cancelled run stays cancelled.
#[test]
fn a_cancelled_run_keeps_what_it_knows_of_its_last_call() {
    run(120, async {
        let options = Options::default().line("runs", "cancel_grace = \"1s\"");
        let world = World::with(Db::Sqlite, options, all).await;
        for (input, tool, arguments) in [
            ("idempotent", "charge", "{\"amount\":1}"),
            ("answered", "deploy", "{}"),
            ("silent", "deploy", "{ }"),
        ] {
            world
                .stubs
                .llm
                .plays(input, vec![Say::call("c1", tool, arguments), Say::text("done")]);
        }
        let api = world.api();
        let (charge, deploy) = (
            world.stubs.tools.received("/charge"),
            world.stubs.tools.applied("/deploy"),
        );

        // Idempotent: aborted at once.
        charge.close();
        let run = api.run(WORKER, "idempotent").await;
        charge.reached(1).await;
        let answer = cancel(&api, &run, "x1").await;
        assert!([200, 202].contains(&answer.status()), "{}", answer.text());
        assert_eq!(api.over(&run).await["status"], "cancelled");
        charge.open();

        // Unsafe and answered within its grace: kept as evidence.
        deploy.close();
        let run = api.run(WORKER, "answered").await;
        deploy.reached(1).await;
        assert_eq!(cancel(&api, &run, "x1").await.status(), 202);
        deploy.open();
        let seen = api.over(&run).await;
        assert_eq!(seen["status"], "cancelled", "{seen}");
        let activities = api.activities(&run).await;
        assert_eq!(activities[0]["state"], "completed", "{activities:?}");
        api.resume(&run).await.assert_error(409, "run_terminal");

        // Unsafe and silent: nobody knows, until somebody says.
        deploy.close();
        let run = api.run(WORKER, "silent").await;
        deploy.reached(1).await;
        assert_eq!(cancel(&api, &run, "x1").await.status(), 202);
        let seen = api.until(&run, &["ambiguous"]).await;
        assert!(seen["cancel_requested_at"].is_string(), "{seen}");
        let activity = seen["waiting_on"][0]["activity_id"].as_str().unwrap();
        let path = format!("/runs/{run}/activities/{activity}");
        let record = api.seen(&path).await;
        let resolve = json!({"action": "complete", "decision_id": "r1", "attempt": 1,
            "input_digest": record["input_digest"], "reason": "seen", "evidence": "log", "output": "deployed"});
        let resolved = api.post(&format!("{path}/resolve"), &resolve).await;
        assert_eq!(resolved.status(), 200, "{}", resolved.text());
        assert_eq!(api.over(&run).await["status"], "cancelled");
        deploy.open();
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 2);
        assert_eq!(world.stubs.llm.requests_of("silent").len(), 1);
        world.holds().await;
    });
}

/// S41: a deadline ends a run as cancelled, and says why.
#[test]
fn a_deadline_ends_a_run_in_the_middle_of_a_call() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        world.stubs.llm.plays(
            "late",
            vec![Say::call("c1", "lookup", "{\"sku\":\"a\"}"), Say::text("done")],
        );
        let received = world.stubs.tools.received("/items/a");
        received.close();
        let api = world.api();
        let body = json!({"agent": WORKER, "input": "late", "deadline": "1s"});
        let made = api.create_with(&body, &[]).await;
        assert_eq!(made.status(), 202, "{}", made.text());
        let run = made.json()["id"].as_str().unwrap().to_owned();
        received.reached(1).await;
        let seen = api.over(&run).await;
        assert_eq!(
            (&seen["status"], &seen["outcome"]["reason"]),
            (&json!("cancelled"), &json!("deadline"))
        );
        // D15: when it should have ended.
        assert!(seen["deadline"].is_string(), "{seen}");
        assert_eq!(
            seen["outcome"]["cancel"],
            json!({"by": null, "reason": "deadline", "deadline": seen["deadline"]})
        );
        received.open();
        world.holds().await;
    });
}

/// S42: a pause between attempts ends with its run.
#[test]
fn a_cancelled_pause_between_attempts_is_over_at_once() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        world
            .stubs
            .tools
            .script("/charge", vec![Answer::status(503).retry_after(600)]);
        world
            .stubs
            .llm
            .plays("pause", vec![Say::call("c1", "charge", "{\"amount\":1}")]);
        let api = world.api();
        let run = api.run(WORKER, "pause").await;
        api.waits_on(&run, "retry", 1).await;
        let asked = Instant::now();
        let answer = cancel(&api, &run, "x1").await;
        assert!([200, 202].contains(&answer.status()), "{}", answer.text());
        let seen = api.over(&run).await;
        assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
        assert_eq!(seen["status"], "cancelled");
        assert_eq!(world.stubs.tools.calls("/charge").len(), 1);
        world.holds().await;
    });
}

/// S69: a pause between attempts is not begun anew by a restart.
#[test]
fn restarts_do_not_move_the_next_attempt() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            world.stubs.tools.honour_keys("/charge");
            world
                .stubs
                .tools
                .script("/charge", vec![Answer::status(503).retry_after(6)]);
            world.stubs.llm.plays(
                "pause",
                vec![Say::call("c1", "charge", "{\"amount\":1}"), Say::text("paid")],
            );
            let run = world.api().run(WORKER, "pause").await;
            world.stubs.tools.called("/charge", 1).await;
            let first = Instant::now();
            let on = world.api().waits_on(&run, "retry", 1).await;
            for _ in 0..3 {
                world.kill_and_restart(0).await;
                let again: Vec<Value> = world.api().waits_on(&run, "retry", 1).await;
                assert_eq!(again, on);
            }
            world.stubs.tools.called("/charge", 2).await;
            let after = first.elapsed();
            assert!(
                after >= Duration::from_secs(5) && after < Duration::from_secs(9),
                "{after:?}"
            );
            world.api().succeeded(&run).await;
            let calls = world.stubs.tools.calls("/charge");
            assert_eq!(calls.len(), 2);
            assert_eq!(calls[0].key, calls[1].key);
            world.holds().await;
        }
    });
}
