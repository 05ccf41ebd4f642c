//! Runs survive the death of their process (durable-scenarios §1, §2, §3): nothing that was done is done again, nothing that was accepted
//! is lost, and what nobody can know is said.

use std::time::Duration;

use iop_tests::llm::{self, Llm, Say};
use iop_tests::relay::Relay;
use iop_tests::runs::agents::{FRAGILE, WORKER, all};
use iop_tests::runs::{Db, Options, World};
use iop_tests::tool_stub::Answer;
use iop_tests::{run, within};
use serde_json::{Value, json};

/// S1: what was accepted is there, whenever the process dies.
#[test]
fn an_accepted_run_survives_the_death_of_its_process() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            world.stubs.llm.asked.close();
            let mut runs = Vec::new();
            for n in 0..3 {
                let accepted = world
                    .api()
                    .create_with(&json!({"agent": WORKER, "input": format!("run {n}")}), &[])
                    .await;
                world.kill(0).await;
                assert_eq!(accepted.status(), 202, "{}", accepted.text());
                runs.push(accepted.json()["id"].as_str().unwrap().to_owned());
                world.restart(0).await;
            }
            world.stubs.llm.asked.open();
            for run in &runs {
                let seen = world.api().succeeded(run).await;
                assert_eq!(seen["outcome"]["output"], "done", "{seen}");
            }
            world.holds().await;
        }
    });
}

/// S4, S5: a key names one request; without one two requests are two runs.
#[test]
fn a_key_names_one_request_and_no_key_names_none() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let body = json!({"agent": WORKER, "input": "hello"});
        let key = [("idempotency-key", "order-1")];
        let first = api.create_with(&body, &key).await;
        assert_eq!(first.status(), 202, "{}", first.text());
        let again = api.create_with(&body, &key).await;
        assert_eq!(again.status(), 200, "{}", again.text());
        assert_eq!(again.header("idempotency-replayed"), Some("true"));
        assert_eq!(again.json()["id"], first.json()["id"]);
        let other = api
            .create_with(&json!({"agent": WORKER, "input": "other"}), &key)
            .await;
        other.assert_error(409, "idempotency_conflict");
        let run = first.json()["id"].as_str().unwrap().to_owned();
        api.succeeded(&run).await;

        let one = api.create_with(&body, &[]).await.json()["id"].clone();
        let two = api.create_with(&body, &[]).await.json()["id"].clone();
        assert_ne!(one, two);
        for run in [&one, &two] {
            api.succeeded(run.as_str().unwrap()).await;
        }
        world.holds().await;
    });
}

/// S10 as an agent: a call that failed once is tried again under its key; those before it are not.
#[test]
fn a_failed_call_is_tried_again_and_finished_ones_are_not() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            for path in ["/reserve", "/charge", "/confirm"] {
                world.stubs.tools.honour_keys(path);
            }
            world.stubs.tools.script("/charge", vec![Answer::status(503)]);
            world.stubs.llm.plays(
                "buy",
                vec![
                    Say::call("c1", "reserve", "{}"),
                    Say::call("c2", "charge", "{\"amount\":1}"),
                    Say::call("c3", "confirm", "{}"),
                    Say::text("bought"),
                ],
            );
            let confirm = world.stubs.tools.received("/confirm");
            confirm.close();
            let run = world.api().run(WORKER, "buy").await;
            confirm.reached(1).await;
            world.kill_and_restart(0).await;
            confirm.open();
            let seen = world.api().succeeded(&run).await;
            assert_eq!(seen["outcome"]["output"], "bought");
            let tools = &world.stubs.tools;
            assert_eq!(tools.calls("/reserve").len(), 1);
            let charges = tools.calls("/charge");
            assert_eq!(charges.len(), 2);
            assert!(charges[0].key.is_some());
            assert_eq!(charges[0].key, charges[1].key);
            assert_eq!((tools.effects("/charge"), tools.effects("/confirm")), (1, 1));
            world.holds().await;
        }
    });
}

/// S12: an idempotent call in flight is sent once more with its key, and its effect is there once.
#[test]
fn an_idempotent_call_in_flight_is_sent_again_with_its_key() {
    run(120, async {
        for db in Db::BOTH {
            for applied in [false, true] {
                let mut world = World::start(db, all).await;
                let tools = &world.stubs.tools;
                tools.honour_keys("/charge");
                let point = if applied {
                    tools.applied("/charge")
                } else {
                    tools.received("/charge")
                };
                point.close();
                world.stubs.llm.plays(
                    "pay",
                    vec![
                        Say::call("c/1 ü", "charge", "{\"amount\": 1.50}"),
                        Say::text("paid"),
                    ],
                );
                let run = world.api().run(WORKER, "pay").await;
                point.reached(1).await;
                world.kill(0).await;
                point.open();
                world.restart(0).await;
                let api = world.api();
                api.succeeded(&run).await;
                let calls = world.stubs.tools.calls("/charge");
                assert_eq!(calls.len(), 2);
                assert_eq!(calls[0].key, calls[1].key);
                assert_eq!(calls[0].body, "{\"amount\": 1.50}");
                assert_eq!(calls[0].body, calls[1].body);
                let key = calls[0].key.clone().unwrap();
                assert!(
                    key.starts_with(&format!("{run}/")) && key.ends_with("/c%2F1%20%C3%BC.0"),
                    "{key}"
                );
                assert_eq!(world.stubs.tools.effects("/charge"), 1);
                let activities = api.activities(&run).await;
                let charge = activities.iter().find(|a| a["tool"] == "charge").unwrap();
                assert_eq!(charge["state"], "completed", "{charge}");
                assert_eq!(charge["origin"], "live", "{charge}");
                assert_eq!(charge["attempts"].as_array().unwrap().len(), 2, "{charge}");
                assert_eq!(charge["idempotency_key"], key.as_str());
                world.holds().await;
            }
        }
    });
}

/// An unsafe call in flight is nobody's to repeat: the run says so and waits for a person.
#[test]
fn an_unsafe_call_in_flight_is_ambiguous_until_somebody_says_what_became_of_it() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            let applied = world.stubs.tools.applied("/deploy");
            applied.close();
            world.stubs.llm.plays(
                "ship",
                vec![
                    Say::call("c1", "deploy", "{\"region\":\"eu\"}"),
                    Say::text("shipped"),
                ],
            );
            let run = world.api().run(WORKER, "ship").await;
            applied.reached(1).await;
            world.kill_and_restart(0).await;
            applied.open();
            let api = world.api();
            let seen = api.until(&run, &["ambiguous"]).await;
            let on = &seen["waiting_on"][0];
            assert_eq!(on["kind"], "reconciliation", "{seen}");
            assert_eq!(
                (&on["tool"], &on["call_id"], &on["attempt"]),
                (&json!("deploy"), &json!("c1"), &json!(1))
            );
            api.resume(&run).await.assert_error(409, "effect_ambiguous");
            let activity = on["activity_id"].as_str().unwrap();
            let path = format!("/runs/{run}/activities/{activity}");
            let record = api.seen(&path).await;
            let resolve = json!({"action": "complete", "decision_id": "r1", "attempt": 1, "resume": true,
                "input_digest": record["input_digest"], "reason": "seen in the console", "evidence": "ticket 7",
                "output": {"deployed": true}});
            let resolved = api.post(&format!("{path}/resolve"), &resolve).await;
            assert_eq!(resolved.status(), 200, "{}", resolved.text());
            let again = api.post(&format!("{path}/resolve"), &resolve).await;
            assert_eq!(
                (again.status(), again.header("idempotency-replayed")),
                (200, Some("true"))
            );
            api.succeeded(&run).await;
            assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
            let asked = world.stubs.llm.requests_of("ship");
            assert_eq!(llm::told(&asked[1])["c1"], "{\"deployed\":true}");
            world.holds().await;
        }
    });
}

/// The same over MCP (S105): the client library repeats nothing either.
#[test]
fn an_unsafe_mcp_call_whose_session_expires_is_ambiguous() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        world
            .stubs
            .mcp
            .script("launch", vec![iop_tests::mcp_stub::Reply::Expired]);
        world.stubs.llm.plays(
            "launch",
            vec![
                Say::call("c1", "launch", "{\"n\":1}"),
                Say::call("c2", "launch", "{\"n\":2}"),
                Say::text("launched"),
            ],
        );
        let api = world.api();
        let run = api.run(WORKER, "launch").await;
        let seen = api.until(&run, &["ambiguous"]).await;
        assert_eq!(world.stubs.mcp.calls("launch").len(), 1);
        let activity = seen["waiting_on"][0]["activity_id"].as_str().unwrap();
        let path = format!("/runs/{run}/activities/{activity}");
        let record = api.seen(&path).await;
        let resolve = json!({"action": "complete", "decision_id": "r1", "attempt": 1, "resume": true,
            "input_digest": record["input_digest"], "reason": "seen", "evidence": "log", "output": "up"});
        let resolved = api.post(&format!("{path}/resolve"), &resolve).await;
        assert_eq!(resolved.status(), 200, "{}", resolved.text());
        api.succeeded(&run).await;
        let calls = world.stubs.mcp.calls("launch");
        assert_eq!(calls.len(), 2);
        let key = calls[1].key.as_deref().unwrap();
        assert!(
            key.starts_with(&run) && key.ends_with("/c2.0") && Some(key) != calls[0].key.as_deref(),
            "{key}"
        );
        world.holds().await;
    });
}

/// A declared `reconcile` is asked by the recovery itself: found goes on, absent stays.
#[test]
fn recovery_asks_the_service_what_became_of_a_call() {
    run(60, async {
        for applied in [true, false] {
            let mut world = World::start(Db::Sqlite, all).await;
            let tools = &world.stubs.tools;
            let point = if applied {
                tools.applied("/transfer")
            } else {
                tools.received("/transfer")
            };
            point.close();
            world.stubs.llm.plays(
                "move",
                vec![Say::call("c1", "transfer", "{}"), Say::text("moved")],
            );
            let run = world.api().run(WORKER, "move").await;
            point.reached(1).await;
            world.kill(0).await;
            world.restart(0).await;
            let api = world.api();
            if applied {
                api.succeeded(&run).await;
                let activities = api.activities(&run).await;
                let transfer = activities.iter().find(|a| a["tool"] == "transfer").unwrap();
                assert_eq!(transfer["origin"], "reconciled", "{transfer}");
            } else {
                api.until(&run, &["ambiguous"]).await;
                assert_eq!(world.stubs.tools.effects("/transfer"), 0);
            }
            assert_eq!(world.stubs.tools.calls("/transfer").len(), 1);
            point.open();
            world.holds().await;
        }
    });
}

/// S14: one call's outcome is stored, its step is not: the outcome is read, the call is not made again.
#[test]
fn a_stored_outcome_is_read_and_its_call_is_not_repeated() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            let tools = &world.stubs.tools;
            tools.honour_keys("/reserve");
            tools.honour_keys("/charge");
            let charge = tools.received("/charge");
            charge.close();
            world.stubs.llm.plays(
                "both",
                vec![
                    Say::calls(&[("a", "reserve", "{}"), ("b", "charge", "{\"amount\":2}")]),
                    Say::text("ok"),
                ],
            );
            let api = world.api();
            let run = api.run(WORKER, "both").await;
            charge.reached(1).await;
            let mut stream = api.stream(&run, Some(0)).await;
            within("reserve is done", Duration::from_secs(20), async {
                while !stream
                    .until("run.tool.completed")
                    .await
                    .iter()
                    .any(|e| e.body["data"]["tool"] == "reserve" && e.body["data"]["result"] == "ok")
                {
                }
            })
            .await;
            world.kill_and_restart(0).await;
            charge.open();
            world.api().succeeded(&run).await;
            let tools = &world.stubs.tools;
            assert_eq!(
                (tools.calls("/reserve").len(), tools.calls("/charge").len()),
                (1, 2)
            );
            assert_eq!(tools.effects("/charge"), 1);
            let told = llm::told(&world.stubs.llm.requests_of("both")[1]);
            assert_eq!(told.keys().collect::<Vec<_>>(), ["a", "b"]);
            world.holds().await;
        }
    });
}

/// Between the model's answer and its tools: the arguments that were written are the ones that run, and nobody asks the model again.
#[test]
fn the_tools_of_a_stored_turn_run_without_asking_the_model_again() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let deploy = world.stubs.tools.received("/charge");
        deploy.close();
        world.stubs.llm.plays(
            "once",
            vec![Say::call("c1", "charge", "{ \"amount\" : 1e1 }"), Say::text("ok")],
        );
        let run = world.api().run(WORKER, "once").await;
        deploy.reached(1).await;
        world.kill(0).await;
        // Whatever the model would say to a second request, nobody makes one.
        world
            .stubs
            .llm
            .plays("once", vec![Say::text("something else"), Say::text("ok")]);
        deploy.open();
        world.restart(0).await;
        world.api().succeeded(&run).await;
        assert_eq!(world.stubs.llm.requests_of("once").len(), 2);
        for call in world.stubs.tools.calls("/charge") {
            assert_eq!(call.body, "{ \"amount\" : 1e1 }");
        }
        world.holds().await;
    });
}

/// S16: half a turn is no turn.
#[test]
fn half_a_turn_is_asked_for_again_and_is_nowhere() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            world
                .stubs
                .llm
                .plays("talk", vec![Say::text("one two three four five six")]);
            world.stubs.llm.halfway.close();
            let api = world.api();
            let run = api.run(WORKER, "talk").await;
            world.stubs.llm.halfway.reached(1).await;
            world.kill(0).await;
            world.stubs.llm.halfway.open();
            world.restart(0).await;
            let seen = world.api().succeeded(&run).await;
            assert_eq!(seen["outcome"]["output"], "one two three four five six");
            let asked = world.stubs.llm.requests_of("talk");
            assert_eq!(asked.len(), 2);
            assert_eq!(asked[0]["messages"], asked[1]["messages"]);
            let turns = world.api().all(&format!("/runs/{run}/turns")).await;
            assert_eq!(turns.len(), 1, "{turns:?}");
            world.holds().await;
        }
    });
}

/// A provider that breaks off in the middle is asked again within the turn's own attempts, and nothing of the first half stays.
#[test]
fn a_turn_that_was_cut_is_asked_for_again() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        world
            .stubs
            .llm
            .next(vec![Say::Cut(2, "half a sentence".to_owned())]);
        world.stubs.llm.plays("cut", vec![Say::text("whole")]);
        let api = world.api();
        let run = api.run(WORKER, "cut").await;
        let seen = api.succeeded(&run).await;
        assert_eq!(seen["outcome"]["output"], "whole");
        let asked = world.stubs.llm.requests_of("cut");
        assert!(
            asked
                .iter()
                .all(|b| !b["messages"].to_string().contains("half a"))
        );
        world.holds().await;
    });
}

/// S19: a run that failed for want of a provider goes on where it was, also after a restart, plain and as a stream.
#[test]
fn a_run_that_failed_for_want_of_a_provider_is_resumed_where_it_was() {
    run(120, async {
        for streaming in [false, true] {
            let mut world = World::start(Db::Sqlite, all).await;
            world.stubs.tools.honour_keys("/reserve");
            world
                .stubs
                .llm
                .plays("later", vec![Say::call("c1", "reserve", "{}"), Say::text("late")]);
            let reserve = world.stubs.tools.received("/reserve");
            reserve.close();
            let run = world.api().run(FRAGILE, "later").await;
            reserve.reached(1).await;
            world.stubs.llm.next(vec![Say::status(429)]);
            reserve.open();
            let failed = world.api().over(&run).await;
            assert_eq!(failed["status"], "failed", "{failed}");
            assert_eq!(failed["outcome"]["error"]["kind"], "rate_limited", "{failed}");
            assert_eq!(failed["resumable"], true, "{failed}");
            world.kill_and_restart(0).await;
            let api = world.api();
            let token = api.seen_run(&run).await["resume_token"].clone();
            let body = json!({"resume_token": token}).to_string();
            let path = format!("/api/v1/runs/{run}/resume");
            if streaming {
                let headers = [("accept", "text/event-stream")];
                let answer = api.client.request("POST", &path, &headers, body.as_bytes()).await;
                assert_eq!(answer.status(), 200, "{}", answer.text());
                assert!(
                    answer.text().contains("event: run.succeeded"),
                    "{}",
                    answer.text()
                );
            } else {
                let answer = api.client.request("POST", &path, &[], body.as_bytes()).await;
                assert_eq!(answer.status(), 202, "{}", answer.text());
            }
            let seen = api.succeeded(&run).await;
            assert_eq!(
                (&seen["outcome"]["output"], &seen["life"]),
                (&json!("late"), &json!(2))
            );
            assert_eq!(world.stubs.tools.calls("/reserve").len(), 1);
            world.holds().await;
        }
    });
}

/// S20: a run that is over well is not run again.
#[test]
fn resuming_a_succeeded_run_answers_what_is_stored() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        world
            .stubs
            .llm
            .plays("once", vec![Say::call("c1", "reserve", "{}"), Say::text("done")]);
        let run = world.api().run(WORKER, "once").await;
        let seen = world.api().succeeded(&run).await;
        world.kill_and_restart(0).await;
        let answer = world.api().resume(&run).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        assert_eq!(answer.json()["outcome"], seen["outcome"]);
        assert_eq!(world.stubs.llm.requests().len(), 2);
        assert_eq!(world.stubs.tools.calls("/reserve").len(), 1);
        world.holds().await;
    });
}

/// S21: a call may take many times the lease's time.
#[test]
fn a_call_may_outlast_its_lease_many_times() {
    run(90, async {
        for db in Db::BOTH {
            let options = Options {
                lease_ttl: Duration::from_secs(1),
                ..Options::default()
            };
            let world = World::with(db, options, all).await;
            let deploy = world.stubs.tools.received("/deploy");
            deploy.close();
            world
                .stubs
                .llm
                .plays("slow", vec![Say::call("c1", "deploy", "{}"), Say::text("done")]);
            let api = world.api();
            let run = api.run(WORKER, "slow").await;
            deploy.reached(1).await;
            // What is waited for is that nothing happens: ten leases have to pass.
            let over = tokio::time::timeout(Duration::from_secs(10), deploy.reached(2)).await;
            assert!(over.is_err(), "the call was repeated");
            assert_eq!(api.seen_run(&run).await["status"], "running");
            deploy.open();
            api.succeeded(&run).await;
            assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
            world.holds().await;
        }
    });
}

/// S22: nothing that a tool or a model says takes the process down.
#[test]
fn nothing_that_a_tool_says_takes_the_process_down() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        world.stubs.tools.script(
            "/reserve",
            vec![
                Answer::bytes(200, deep.as_bytes()),
                Answer::bytes(200, b"\xff\xfe\x00"),
                Answer::bytes(200, b""),
            ],
        );
        world.stubs.llm.plays(
            "odd",
            vec![
                Say::call("c1", "reserve", "{}"),
                Say::call("c2", "reserve", "{ }"),
                Say::call("c3", "reserve", "{  }"),
                Say::call("c4", "charge", &deep),
                Say::call("c5", "nobody_has_this", "{}"),
                Say::text("still here"),
            ],
        );
        let api = world.api();
        let run = api.run(WORKER, "odd").await;
        let seen = api.succeeded(&run).await;
        assert_eq!(seen["outcome"]["output"], "still here");
        let asked = world.stubs.llm.requests_of("odd");
        let told = llm::told(asked.last().unwrap());
        assert_eq!(told["c1"], deep);
        let binary: Value = serde_json::from_str(&told["c2"]).unwrap();
        assert_eq!(binary, json!({"encoding": "base64", "data": "//4A"}));
        assert_eq!(told["c3"], "");
        for refused in ["c4", "c5"] {
            let error: Value = serde_json::from_str(&told[refused]).unwrap();
            assert!(error["error"]["code"].is_string(), "{error}");
        }
        assert!(world.stubs.tools.calls("/charge").is_empty());
        world.holds().await;
    });
}

/// S30: a restart on SQLite knows that the old process is dead, and waits for no lease.
#[test]
fn a_restart_on_sqlite_takes_its_runs_up_at_once() {
    run(60, async {
        let options = Options {
            lease_ttl: Duration::from_secs(600),
            ..Options::default()
        };
        let mut world = World::with(Db::Sqlite, options, all).await;
        world.stubs.llm.asked.close();
        let run = world.api().run(WORKER, "hello").await;
        world.stubs.llm.asked.reached(1).await;
        world.kill(0).await;
        world.stubs.llm.asked.open();
        world.restart(0).await;
        world.api().succeeded(&run).await;
        world.holds().await;
    });
}

/// S108: a provider that dies in the middle of a run is no matter of the run's: another one takes the next turn, no tool is called again.
#[test]
fn another_provider_takes_over_in_the_middle_of_a_run() {
    run(60, async {
        let first = Llm::start().await;
        let addr = first.url();
        let addr = addr
            .strip_prefix("http://")
            .and_then(|a| a.strip_suffix("/v1"))
            .unwrap();
        let relay = Relay::start(addr).await;
        let world = World::start(Db::Sqlite, |stubs| {
            let (url, model) = (format!("http://{}/v1", relay.addr), llm::MODEL);
            format!(
                "{}\n[[providers]]\nid = \"first\"\nadapter = \"openai\"\ntargets = [{model:?}]\nbase_url = {url:?}\n\
                 [[models]]\nname = {model:?}\ncandidates = [{{ provider = \"first\", target = {model:?}, priority = 0 }}, \
                 {{ provider = \"p\", target = {model:?}, priority = 1 }}]\n",
                all(stubs)
            )
        })
        .await;
        let script = vec![
            Say::call("c1", "deploy", "{}"),
            Say::call("c2", "deploy", "{ }"),
            Say::text("done"),
        ];
        first.plays("failover", script.clone());
        world.stubs.llm.plays("failover", script);
        let deploy = world.stubs.tools.received("/deploy");
        deploy.close();
        let api = world.api();
        let run = api.run(WORKER, "failover").await;
        deploy.let_pass(1);
        deploy.reached(2).await;
        relay.cut();
        drop(relay);
        deploy.open();
        api.succeeded(&run).await;
        assert_eq!(first.requests_of("failover").len(), 2);
        assert_eq!(world.stubs.llm.requests_of("failover").len(), 1);
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 2);
        world.holds().await;
    });
}
