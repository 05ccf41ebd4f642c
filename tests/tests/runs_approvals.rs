//! People decide (durable-scenarios §5): what was asked is what runs, once, on whichever edge, however much later.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use iop_tests::llm::{self, Say};
use iop_tests::mcp_stub::Reply;
use iop_tests::run;
use iop_tests::runs::agents::{GUARDED, WORKER, all};
use iop_tests::runs::{BOSS, Db, OTHER, OWNER, Options, World, waiting_ids};
use serde_json::{Value, json};

/// A run that waits for `deploy` to be approved, and what it waits on.
async fn paused(world: &World, input: &str) -> (String, Value) {
    world.stubs.llm.plays(
        input,
        vec![
            Say::call("c1", "deploy", "{\"region\": \"eu\"}"),
            Say::text("deployed"),
        ],
    );
    let api = world.api();
    let run = api.run(GUARDED, input).await;
    let on = api.waits_on(&run, "approval", 1).await;
    (run, on[0].clone())
}

/// Days and restarts later, one request approves what was asked; it runs once.
#[test]
fn an_approval_outlives_its_process_and_runs_what_was_asked() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            let (run, on) = paused(&world, "ship").await;
            assert_eq!(
                (&on["tool"], &on["call_id"], &on["arguments"]),
                (&json!("deploy"), &json!("c1"), &json!({"region": "eu"}))
            );
            let url = on["url"].as_str().unwrap().to_owned();
            assert_eq!(
                url,
                format!("/api/v1/runs/{run}/approvals/{}", on["id"].as_str().unwrap())
            );
            for _ in 0..3 {
                world.kill_and_restart(0).await;
                let again = world.api().waits_on(&run, "approval", 1).await;
                assert_eq!(again[0], on);
            }
            assert!(world.stubs.tools.calls("/deploy").is_empty());
            let api = world.api();
            let listed = api.all("/approvals?status=pending").await;
            assert_eq!(waiting_ids(&listed), [on["id"].as_str().unwrap()]);
            let answer = api.decide(&run, &on, "approve", "d1").await;
            assert_eq!(answer.status(), 200, "{}", answer.text());
            api.succeeded(&run).await;
            let calls = world.stubs.tools.calls("/deploy");
            assert_eq!(calls.len(), 1);
            assert_eq!(calls[0].body, "{\"region\": \"eu\"}");
            // One request per turn: nobody asked the model again for what was approved.
            assert_eq!(world.stubs.llm.requests_of("ship").len(), 2);
            let approvals = api.all(&format!("/runs/{run}/approvals")).await;
            assert_eq!(
                (&approvals[0]["status"], &approvals[0]["decided_by"]),
                (&json!("approved"), &json!("root"))
            );
            world.holds().await;
        }
    });
}

/// The decision is stored before the effect: a process that dies in between needs no second decision.
#[test]
fn a_decision_is_not_asked_for_twice() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            world.stubs.tools.honour_keys("/charge");
            world.stubs.llm.plays(
                "pay",
                vec![Say::call("c1", "charge", "{\"amount\": 500}"), Say::text("paid")],
            );
            let received = world.stubs.tools.received("/charge");
            received.close();
            let run = world.api().run(GUARDED, "pay").await;
            let on = world.api().waits_on(&run, "approval", 1).await;
            let answer = world.api().decide(&run, &on[0], "approve", "d1").await;
            assert_eq!(answer.status(), 200, "{}", answer.text());
            received.reached(1).await;
            world.kill_and_restart(0).await;
            received.open();
            world.api().succeeded(&run).await;
            assert_eq!(world.stubs.tools.effects("/charge"), 1);
            let again = world.api().decide(&run, &on[0], "approve", "d1").await;
            assert_eq!(
                (again.status(), again.header("idempotency-replayed")),
                (200, Some("true"))
            );
            world.holds().await;
        }
    });
}

/// Small charges need nobody, large ones do, and what no rule can judge does too.
#[test]
fn a_rule_decides_who_is_asked_and_fails_closed() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        world.stubs.llm.plays(
            "rules",
            vec![
                Say::call("small", "charge", "{\"amount\": 100}"),
                Say::call("large", "charge", "{\"amount\": 100.5}"),
                Say::call("odd", "charge", "{\"amount\": \"much\"}"),
                Say::text("done"),
            ],
        );
        let api = world.api();
        let run = api.run(GUARDED, "rules").await;
        let on = api.waits_on(&run, "approval", 1).await;
        assert_eq!(on[0]["call_id"], "large");
        assert_eq!(world.stubs.tools.calls("/charge").len(), 1);
        assert_eq!(api.decide(&run, &on[0], "approve", "d1").await.status(), 200);
        let on = loop {
            let on = api.waits_on(&run, "approval", 1).await;
            if on[0]["call_id"] != "large" {
                break on;
            }
        };
        assert_eq!(on[0]["call_id"], "odd");
        // Arguments that break the schema are not let pass by anybody.
        let approve = api.decide(&run, &on[0], "approve", "d2").await;
        approve.assert_error(422, "schema_violation");
        let edit = json!({"decision": "edit", "decision_id": "d3",
            "arguments_digest": on[0]["arguments_digest"], "edited_arguments": {"amount": 7}});
        let path = format!("/runs/{run}/approvals/{}", on[0]["id"].as_str().unwrap());
        let edited = api.post(&path, &edit).await;
        assert_eq!(edited.status(), 200, "{}", edited.text());
        api.succeeded(&run).await;
        let bodies: Vec<Value> = world
            .stubs
            .tools
            .calls("/charge")
            .iter()
            .map(|c| c.json())
            .collect();
        assert_eq!(
            bodies,
            [
                json!({"amount": 100}),
                json!({"amount": 100.5}),
                json!({"amount": 7})
            ]
        );
        world.holds().await;
    });
}

/// S48: a denial is told to the model and is no success of the tool.
#[test]
fn a_denied_call_is_not_made_and_the_model_is_told_why() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let (run, on) = paused(&world, "no").await;
        let api = world.api();
        let path = format!("/runs/{run}/approvals/{}", on["id"].as_str().unwrap());
        let deny = json!({"decision": "deny", "decision_id": "d1", "reason": "not on Fridays",
                          "arguments_digest": on["arguments_digest"]});
        assert_eq!(api.post(&path, &deny).await.status(), 200);
        api.succeeded(&run).await;
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        let told = llm::told(&world.stubs.llm.requests_of("no")[1]);
        let told: Value = serde_json::from_str(&told["c1"]).unwrap();
        assert_eq!(
            told,
            json!({"refused": true, "by": "approval", "reason": "not on Fridays"})
        );
        let approvals = api.all(&format!("/runs/{run}/approvals")).await;
        assert_eq!(
            (&approvals[0]["status"], &approvals[0]["reason"]),
            (&json!("denied"), &json!("not on Fridays"))
        );
        world.holds().await;
    });
}

/// S49, S62, and decisions about another call.
#[test]
fn a_decision_has_to_be_about_this_run_and_this_call_by_somebody_who_may() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let (one, on_one) = paused(&world, "one").await;
        let (two, on_two) = paused(&world, "two").await;
        let api = world.api();
        let crossed = api.decide(&one, &on_two, "approve", "d1").await;
        crossed.assert_error(404, "approval_not_found");
        let nobody = json!({"id": "apr_00", "arguments_digest": on_one["arguments_digest"]});
        api.decide(&one, &nobody, "approve", "d1")
            .await
            .assert_error(404, "approval_not_found");
        let mut other_call = on_one.clone();
        other_call["arguments_digest"] = json!(format!("sha256:{}", "0".repeat(64)));
        api.decide(&one, &other_call, "approve", "d1")
            .await
            .assert_error(409, "approval_mismatch");
        api.with_key(OWNER)
            .decide(&one, &on_one, "approve", "d1")
            .await
            .assert_error(403, "permission_denied");
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        for (run, on) in [(&one, &on_one), (&two, &on_two)] {
            assert_eq!(api.waits_on(run, "approval", 1).await[0], *on);
            // Nothing of the above was recorded: the id is free.
            let decided = api.with_key(BOSS).decide(run, on, "approve", "d1").await;
            assert_eq!(decided.status(), 200, "{}", decided.text());
            api.succeeded(run).await;
            let approvals = api.all(&format!("/runs/{run}/approvals")).await;
            assert_eq!(approvals[0]["decided_by"], "boss");
        }
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 2);
        world.holds().await;
    });
}

/// Runs are seen by who made them and by operators.
#[test]
fn others_do_not_see_a_run() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let run = api.with_key(OWNER).run(WORKER, "mine").await;
        api.succeeded(&run).await;
        assert_eq!(
            api.with_key(OWNER).get(&format!("/runs/{run}")).await.status(),
            200
        );
        api.with_key(OTHER)
            .get(&format!("/runs/{run}"))
            .await
            .assert_error(404, "run_not_found");
        assert!(api.with_key(OTHER).all("/runs").await.is_empty());
        assert_eq!(api.with_key(OWNER).all("/runs").await.len(), 1);
        world.holds().await;
    });
}

/// S51, and what a second decision is told.
#[test]
fn a_repeated_decision_is_answered_again_and_another_one_loses() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let (run, on) = paused(&world, "twice").await;
        let api = world.api();
        assert_eq!(api.decide(&run, &on, "approve", "d1").await.status(), 200);
        let again = api.decide(&run, &on, "approve", "d1").await;
        assert_eq!(
            (again.status(), again.header("idempotency-replayed")),
            (200, Some("true"))
        );
        api.decide(&run, &on, "deny", "d1")
            .await
            .assert_error(409, "approval_already_decided");
        api.decide(&run, &on, "deny", "d2")
            .await
            .assert_error(409, "approval_already_decided");
        api.succeeded(&run).await;
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        world.holds().await;
    });
}

/// Fifty decisions at once: one wins, the others are told so, the call is made once.
#[test]
fn fifty_decisions_at_once_have_one_winner() {
    run(120, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let (run, on) = paused(&world, "race").await;
            let api = world.api();
            let decisions = (0..50).map(|n| {
                let (api, run, on) = (api.clone(), run.clone(), on.clone());
                async move {
                    let word = if n % 2 == 0 { "approve" } else { "deny" };
                    let answer = api.decide(&run, &on, word, &format!("d{n}")).await;
                    if answer.status() != 200 {
                        answer.assert_error(409, "approval_already_decided");
                        return None;
                    }
                    Some(word)
                }
            });
            let winners: Vec<&str> = join_all(decisions).await.into_iter().flatten().collect();
            assert_eq!(winners.len(), 1, "{winners:?}");
            api.succeeded(&run).await;
            assert_eq!(
                world.stubs.tools.calls("/deploy").len(),
                usize::from(winners[0] == "approve")
            );
            world.holds().await;
        }
    });
}

/// S54: one approval is one call's.
#[test]
fn an_approval_is_for_a_call_and_not_for_a_tool() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        world.stubs.llm.plays(
            "edit",
            vec![
                Say::call("c1", "deploy", "{\"file\":\"a.txt\"}"),
                Say::call("c1", "deploy", "{\"file\":\"/etc/shadow\"}"),
                Say::text("done"),
            ],
        );
        let api = world.api();
        let run = api.run(GUARDED, "edit").await;
        let first = api.waits_on(&run, "approval", 1).await;
        assert_eq!(api.decide(&run, &first[0], "approve", "d1").await.status(), 200);
        let second = loop {
            let on = api.waits_on(&run, "approval", 1).await;
            if on[0]["id"] != first[0]["id"] {
                break on;
            }
        };
        assert_eq!(second[0]["arguments"], json!({"file": "/etc/shadow"}));
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        assert_eq!(api.decide(&run, &second[0], "deny", "d2").await.status(), 200);
        api.succeeded(&run).await;
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        world.holds().await;
    });
}

/// S55: gated calls of one turn are decided one by one, in any order.
#[test]
fn parallel_gated_calls_are_decided_one_by_one() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            // The ids of the model repeat: the place in the turn tells them apart.
            world.stubs.llm.plays(
                "three",
                vec![
                    Say::calls(&[
                        ("c", "deploy", "{\"n\":0}"),
                        ("c", "deploy", "{\"n\":1}"),
                        ("d", "deploy", "{\"n\":2}"),
                    ]),
                    Say::text("done"),
                ],
            );
            let api = world.api();
            let run = api.run(GUARDED, "three").await;
            let mut on = api.waits_on(&run, "approval", 3).await;
            on.sort_by_key(|a| a["arguments"]["n"].as_u64());
            let ids: BTreeSet<String> = waiting_ids(&on).into_iter().collect();
            assert_eq!(ids.len(), 3);
            assert_eq!(api.decide(&run, &on[2], "approve", "d2").await.status(), 200);
            world.kill_and_restart(0).await;
            let api = world.api();
            assert_eq!(api.decide(&run, &on[0], "deny", "d0").await.status(), 200);
            assert_eq!(api.decide(&run, &on[1], "approve", "d1").await.status(), 200);
            api.succeeded(&run).await;
            let mut sent: Vec<u64> = world
                .stubs
                .tools
                .calls("/deploy")
                .iter()
                .filter_map(|c| c.json()["n"].as_u64())
                .collect();
            sent.sort_unstable();
            assert_eq!(sent, [1, 2]);
            let asked = world.stubs.llm.requests_of("three");
            let results: Vec<&Value> = asked[1]["messages"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|m| m["role"] == "tool")
                .collect();
            assert_eq!(results.len(), 3);
            assert!(results[0].to_string().contains("refused"), "{results:?}");
            assert!(!results[1].to_string().contains("refused"), "{results:?}");
            world.holds().await;
        }
    });
}

/// S56, S57: a store that fails while a pause or a decision is saved lets nothing run and loses nothing.
#[test]
fn a_store_that_fails_lets_nothing_run_and_loses_nothing() {
    run(120, async {
        let mut world = World::start(Db::Postgres, all).await;
        world.stubs.llm.asked.close();
        world.stubs.llm.plays(
            "outage",
            vec![Say::call("c1", "deploy", "{}"), Say::text("deployed")],
        );
        let api = world.api();
        let run = api.run(GUARDED, "outage").await;
        world.stubs.llm.asked.reached(1).await;
        world.postgres.as_mut().unwrap().kill().await;
        world.stubs.llm.asked.open();
        let answer = api.get(&format!("/runs/{run}")).await;
        answer.assert_error(503, "store_unavailable");
        assert!(answer.header("retry-after").is_some());
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        world.postgres.as_mut().unwrap().restart().await;
        let on = api.waits_on(&run, "approval", 1).await;
        assert_eq!(api.all("/approvals?status=pending").await.len(), 1);

        // A decision whose answer was lost is given again until it is answered.
        world.postgres.as_mut().unwrap().kill().await;
        let lost = api.decide(&run, &on[0], "approve", "d1").await;
        assert_eq!(lost.status(), 503, "{}", lost.text());
        world.postgres.as_mut().unwrap().restart().await;
        let decided = iop_tests::eventually("the decision is taken", Duration::from_secs(30), || async {
            let answer = api.decide(&run, &on[0], "approve", "d1").await;
            if answer.status() == 200 {
                Ok(())
            } else {
                Err(answer.text())
            }
        });
        decided.await;
        api.succeeded(&run).await;
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        world.holds().await;
    });
}

/// S58: a resume without a decision goes nowhere and names what is missing.
#[test]
fn a_plain_resume_does_not_pass_an_approval() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let (run, on) = paused(&world, "wait").await;
        let api = world.api();
        let refused = api.resume(&run).await;
        refused.assert_error(409, "run_waiting");
        assert!(
            refused.text().contains(on["id"].as_str().unwrap()),
            "{}",
            refused.text()
        );
        let token = api.seen_run(&run).await["resume_token"].clone();
        let evaluated = api
            .post(
                &format!("/runs/{run}/resume/evaluate"),
                &json!({"resume_token": token}),
            )
            .await;
        assert_eq!(evaluated.status(), 200, "{}", evaluated.text());
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        assert_eq!(api.decide(&run, &on, "approve", "d1").await.status(), 200);
        api.succeeded(&run).await;
        world.holds().await;
    });
}

/// S59: an input is asked for, held to its schema, and given once.
#[test]
fn an_input_is_asked_for_and_given_once() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        world.stubs.llm.plays(
            "ask",
            vec![
                Say::call(
                    "c1",
                    "request_input",
                    "{\"prompt\":\"How many?\",\"schema\":{\"type\":\"integer\"}}",
                ),
                Say::text("thanks"),
            ],
        );
        let run = world.api().run(WORKER, "ask").await;
        let on = world.api().waits_on(&run, "input", 1).await;
        assert_eq!(on[0]["prompt"], "How many?", "{}", on[0]);
        world.kill_and_restart(0).await;
        let api = world.api();
        let id = on[0]["id"].as_str().unwrap();
        let give = |id: &str, value: Value, decision: &str| {
            let (api, path) = (api.clone(), format!("/runs/{run}/inputs/{id}"));
            let body = json!({"value": value, "decision_id": decision});
            async move { api.post(&path, &body).await }
        };
        give("wait_00", json!(3), "d1")
            .await
            .assert_error(404, "input_not_found");
        give(id, json!("three"), "d1")
            .await
            .assert_error(422, "schema_violation");
        api.resume(&run).await.assert_error(409, "run_waiting");
        assert_eq!(api.waits_on(&run, "input", 1).await[0], on[0]);
        let given = give(id, json!(3), "d1").await;
        assert_eq!(given.status(), 200, "{}", given.text());
        let again = give(id, json!(3), "d1").await;
        assert_eq!(
            (again.status(), again.header("idempotency-replayed")),
            (200, Some("true"))
        );
        let late = give(id, json!(4), "d2").await;
        assert_eq!(late.status(), 409, "{}", late.text());
        api.succeeded(&run).await;
        let told = llm::told(&world.stubs.llm.requests_of("ask")[1]);
        assert_eq!(told["c1"], "3");
        world.holds().await;
    });
}

/// S106: a tool of an MCP server that asks in the middle of a call waits for a person like any other question.
#[test]
fn a_tool_that_asks_waits_for_a_person() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        world.stubs.mcp.modern();
        let schema =
            json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
        world.stubs.mcp.script(
            "launch",
            vec![
                Reply::asks("where", "Which city?", &schema, "state-1"),
                Reply::text("launched"),
            ],
        );
        world.stubs.llm.plays(
            "ask",
            vec![Say::call("c1", "launch", "{\"n\":1}"), Say::text("up")],
        );
        let run = world.api().run(WORKER, "ask").await;
        let on = world.api().waits_on(&run, "input", 1).await;
        assert_eq!(on[0]["prompt"], "Which city?", "{}", on[0]);
        assert_eq!(on[0]["call_id"], "c1", "{}", on[0]);
        world.kill_and_restart(0).await;
        let api = world.api();
        assert_eq!(api.waits_on(&run, "input", 1).await, on);
        assert_eq!(world.stubs.mcp.calls("launch").len(), 1);
        let path = format!("/runs/{run}/inputs/{}", on[0]["id"].as_str().unwrap());
        let wrong = json!({"value": {"town": "Oslo"}, "decision_id": "d1"});
        api.post(&path, &wrong)
            .await
            .assert_error(422, "schema_violation");
        let right = json!({"value": {"city": "Oslo"}, "decision_id": "d1"});
        let given = api.post(&path, &right).await;
        assert_eq!(given.status(), 200, "{}", given.text());
        api.succeeded(&run).await;
        let calls = world.stubs.mcp.calls("launch");
        assert_eq!(calls.len(), 2);
        assert_eq!(
            (&calls[1].arguments, &calls[1].state),
            (&json!({"n": 1}), &json!("state-1"))
        );
        assert_eq!(
            calls[1].answers,
            json!({"where": {"action": "accept", "content": {"city": "Oslo"}}})
        );
        let told = llm::told(&world.stubs.llm.requests_of("ask")[1]);
        assert_eq!(told["c1"], "launched");
        // Both requests are of the model's one call.
        let made = api.activities(&run).await;
        let of: Vec<_> = made.iter().map(|a| (&a["call_id"], &a["tool"])).collect();
        let call = (&json!("c1"), &json!("launch"));
        assert_eq!(of, [call, call], "{made:?}");
        world.holds().await;
    });
}

/// S60: a tool that is gone is not called, and comes back.
#[test]
fn an_approved_tool_that_is_gone_keeps_its_run_waiting() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let (run, on) = paused(&world, "gone").await;
        world.kill(0).await;
        let declared = world.agents.clone();
        let deploy = "[[agents.guarded.tools]]\nname = \"deploy\"";
        assert!(declared.contains(deploy));
        world.agents = declared
            .replace(deploy, "[[agents.guarded.tools]]\nname = \"undeploy\"")
            .replace(
                "[[agents.guarded.approval_rules]]\ntool = \"deploy\"\nwhen = \"always\"\n",
                "",
            );
        world.restart(0).await;
        let refused = world.api().decide(&run, &on, "approve", "d1").await;
        refused.assert_error(409, "tool_unavailable");
        assert_eq!(world.api().seen_run(&run).await["status"], "waiting");
        world.kill(0).await;
        world.agents = declared;
        world.restart(0).await;
        let api = world.api();
        let decided = api.decide(&run, &on, "approve", "d1").await;
        assert_eq!(decided.status(), 200, "{}", decided.text());
        api.succeeded(&run).await;
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        world.holds().await;
    });
}

/// S61: who hears of a pause may answer it at once, however large the run is.
#[test]
fn a_pause_can_be_decided_the_moment_it_is_told() {
    run(120, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let input = "x".repeat(5 * 1024 * 1024);
            world.stubs.llm.plays(
                &input,
                vec![Say::call("c1", "deploy", "{}"), Say::text("deployed")],
            );
            let api = world.api();
            let run = api.run(GUARDED, &input).await;
            let mut stream = api.stream(&run, Some(0)).await;
            let seen = stream.until("run.waiting").await;
            let told = seen.last().unwrap().body["data"]["waiting_on"][0].clone();
            let on = &api.all(&format!("/runs/{run}/approvals")).await[0];
            assert_eq!(told["id"], on["id"]);
            let decided = api.decide(&run, on, "approve", "d1").await;
            assert_eq!(decided.status(), 200, "{}", decided.text());
            let rest = stream.rest().await;
            assert_eq!(rest.last().unwrap().name, "run.succeeded");
            assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
            world.holds().await;
        }
    });
}

/// An approval that nobody gave in time is a denial, and a late decision is told so.
#[test]
fn an_approval_expires() {
    run(60, async {
        let world = World::start(Db::Sqlite, |stubs| {
            let rules = "approvals = { default = \"always\", expires = \"1s\" }\n";
            iop_tests::runs::agents::agent(stubs, GUARDED, rules)
        })
        .await;
        let (run, on) = paused(&world, "late").await;
        let api = world.api();
        api.succeeded(&run).await;
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        api.decide(&run, &on, "approve", "d1")
            .await
            .assert_error(410, "approval_expired");
        let approvals = api.all(&format!("/runs/{run}/approvals")).await;
        assert_eq!(approvals[0]["status"], "expired");
        world.holds().await;
    });
}

/// Two edges on PostgreSQL: asked on one, listed and followed on the other, approved there.
#[test]
fn what_one_edge_asks_another_one_answers() {
    run(60, async {
        let mut world = World::start(Db::Postgres, all).await;
        world.add_edge().await;
        let (run, on) = paused(&world, "across").await;
        let (here, there) = (world.api_of(0), world.api_of(1));
        assert_eq!(
            waiting_ids(&there.all("/approvals?status=pending").await),
            [on["id"].as_str().unwrap()]
        );
        let mut streams = [
            here.stream(&run, Some(0)).await,
            there.stream(&run, Some(0)).await,
        ];
        assert_eq!(there.decide(&run, &on, "approve", "d1").await.status(), 200);
        let mut told = Vec::new();
        for stream in &mut streams {
            let seen = stream.rest().await;
            let stored: Vec<(u64, String)> = seen
                .iter()
                .filter_map(|e| Some((e.id?, e.name.clone())))
                .collect();
            assert_eq!(stored.last().unwrap().1, "run.succeeded");
            told.push(stored);
        }
        assert_eq!(told[0], told[1]);
        assert_eq!(told[0][0].0, 1);
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        world.holds().await;
    });
}

/// A worker that sleeps past its lease wakes up to find that it has no say any more.
#[test]
fn a_worker_that_slept_past_its_lease_is_fenced() {
    run(120, async {
        let options = Options {
            lease_ttl: Duration::from_secs(1),
            ..Options::default()
        };
        let mut world = World::with(Db::Postgres, options, all).await;
        world.stubs.tools.honour_keys("/charge");
        world.stubs.llm.plays(
            "sleep",
            vec![Say::call("c1", "charge", "{\"amount\":1}"), Say::text("paid")],
        );
        let received = world.stubs.tools.received("/charge");
        received.close();
        let run = world.api().run(WORKER, "sleep").await;
        received.reached(1).await;
        world.edges[0].process.signal("STOP");
        world.add_edge().await;
        // The other edge takes the run over and calls again, with the same key.
        received.reached(2).await;
        received.open();
        let seen = world.api_of(1).succeeded(&run).await;
        world.edges[0].process.signal("CONT");
        // The sleeper is alive again and answers what the other one stored.
        assert_eq!(world.api_of(0).seen_run(&run).await["outcome"], seen["outcome"]);
        let calls = world.stubs.tools.calls("/charge");
        assert_eq!(calls.len(), 2);
        assert_eq!(calls[0].key, calls[1].key);
        assert_eq!(world.stubs.tools.effects("/charge"), 1);
        world.holds().await;
    });
}
