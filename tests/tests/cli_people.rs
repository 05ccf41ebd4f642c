//! `iop-edge runs` in the hands of people: runs of real agents are approved, denied, answered, resolved, resumed and cancelled from the
//! shell.

use std::time::Duration;

use iop_tests::client::Client;
use iop_tests::llm::{Say, told};
use iop_tests::runs::agents::{FRAGILE, GUARDED, WORKER, all};
use iop_tests::runs::{BOSS, Db, OWNER, ROOT, World};
use iop_tests::shell::{cli_as, done, refused};
use iop_tests::{eventually, run, tool_stub};

/// A run that waits for a person, with the call it waits with.
async fn paused(world: &World, call: Say, input: &str) -> String {
    world.stubs.llm.plays(input, vec![call, Say::text("done")]);
    let run = world.api().run(GUARDED, input).await;
    world.api().waits_on(&run, "approval", 1).await;
    run
}

#[test]
fn a_person_approves_a_paused_run_from_the_shell() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            let deploy = Say::call("c1", "deploy", r#"{"region": "eu", "n": 1.00}"#);
            let run = paused(&world, deploy, "ship it").await;
            world.kill_and_restart(0).await;
            let edge = world.edges[0].http.clone();
            let cli = |args: &'static [&'static str]| {
                let (edge, run) = (edge.clone(), run.clone());
                async move {
                    let args: Vec<&str> = args
                        .iter()
                        .map(|arg| if *arg == "RUN" { run.as_str() } else { *arg })
                        .collect();
                    cli_as(ROOT, &edge, &args).await
                }
            };
            let exact = r#"{"region": "eu", "n": 1.00}"#;
            for args in [&["ls", "--approvals"][..], &["show", "RUN"]] {
                let finished = cli(args).await;
                let said = done(&finished);
                assert!(said.contains(&run) && said.contains(exact), "{args:?}: {said}");
            }
            let finished = cli(&[
                "ls",
                "--status",
                "waiting",
                "--agent",
                GUARDED,
                "--waiting",
                "approval",
            ])
            .await;
            assert!(done(&finished).contains("approval deploy"), "{}", finished.stdout);

            let finished = cli(&["approve", "RUN", "--reason", "seen", "--decision-id", "d1"]).await;
            let said = done(&finished);
            assert!(
                said.contains(exact) && said.contains("approved (decision d1)"),
                "{said}"
            );
            let ended = world.api().succeeded(&run).await;
            assert_eq!(ended["outcome"]["output"], "done");
            let calls = world.stubs.tools.calls("/deploy");
            assert_eq!(calls.len(), 1);
            assert_eq!(calls[0].body, exact);

            let again = cli(&["approve", "RUN", "--reason", "seen", "--decision-id", "d1"]).await;
            assert!(
                done(&again).contains("approved, as before (decision d1)"),
                "{}",
                again.stdout
            );
            let approval = world.api().all(&format!("/runs/{run}/approvals")).await[0]["id"].clone();
            let (edge, approval) = (&world.edges[0].http, approval.as_str().unwrap());
            let late = cli_as(ROOT, edge, &["deny", &run, approval]).await;
            refused(&late, &["iop-edge: approval_already_decided: "]);
            let finished = cli(&["show", "RUN"]).await;
            let said = done(&finished);
            for part in [
                "succeeded, completed",
                "\"done\"",
                "tokens",
                "model_turn",
                "tool_calls",
            ] {
                assert!(said.contains(part), "{part}: {said}");
            }
            assert_eq!(done(&cli(&["ls", "--approvals"]).await).lines().count(), 1);
            world.holds().await;
        }
    });
}

#[test]
fn a_denial_reaches_the_model_and_an_edit_the_tool() {
    run(120, async {
        let world = World::start(Db::Sqlite, all).await;
        let edge = &world.edges[0].http;
        let run = paused(&world, Say::call("c1", "deploy", "{}"), "denied").await;
        done(&cli_as(ROOT, edge, &["deny", &run, "--reason", "not on a Friday"]).await);
        world.api().succeeded(&run).await;
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 0);
        let told = told(world.stubs.llm.requests_of("denied").last().unwrap());
        assert!(told["c1"].contains("not on a Friday"), "{told:?}");

        let run = paused(&world, Say::call("c2", "charge", r#"{"amount":500}"#), "edited").await;
        let wrong = cli_as(ROOT, edge, &["approve", &run, "--edit", r#"{"amount":"few"}"#]).await;
        refused(&wrong, &["iop-edge: schema_violation: "]);
        let edited = cli_as(ROOT, edge, &["approve", &run, "--edit", r#"{"amount": 5.0}"#]).await;
        assert!(
            done(&edited).contains("approved with other arguments (decision "),
            "{}",
            edited.stdout
        );
        world.api().succeeded(&run).await;
        assert_eq!(world.stubs.tools.calls("/charge")[0].body, r#"{"amount": 5.0}"#);
        world.holds().await;
    });
}

#[test]
fn runs_are_resumed_and_cancelled_from_the_shell() {
    run(120, async {
        let world = World::start(Db::Sqlite, all).await;
        let edge = &world.edges[0].http;
        world.stubs.llm.next(vec![Say::status(503), Say::text("at last")]);
        let failed = world.api().run(FRAGILE, "flaky").await;
        world.api().until(&failed, &["failed"]).await;
        let shown = cli_as(ROOT, edge, &["ls"]).await;
        assert!(done(&shown).contains("(resumable)"), "{}", shown.stdout);
        let resumed = cli_as(ROOT, edge, &["resume", &failed]).await;
        assert!(done(&resumed).contains(&failed), "{}", resumed.stdout);
        let ended = world.api().succeeded(&failed).await;
        assert_eq!(ended["outcome"]["output"], "at last");

        let run = paused(&world, Say::call("c1", "deploy", "{}"), "cancelled").await;
        let busy = cli_as(ROOT, edge, &["resume", &run]).await;
        refused(&busy, &["iop-edge: run_waiting: "]);
        let args = ["cancel", &run, "--reason", "enough", "--cancel-id", "c"];
        for _ in 0..2 {
            let cancelled = cli_as(ROOT, edge, &args).await;
            assert!(
                done(&cancelled).contains("\noutcome\n  cancelled, cancelled\n"),
                "{}",
                cancelled.stdout
            );
            let ended = world.api().until(&run, &["cancelled"]).await;
            assert_eq!(ended["outcome"]["reason"], "cancelled", "{ended}");
        }
        refused(
            &cli_as(ROOT, edge, &["approve", &run]).await,
            &["run_not_waiting"],
        );
        // One that is over has its end already.
        let late = cli_as(ROOT, edge, &["cancel", &failed]).await;
        assert!(
            done(&late)
                .contains("not cancelled, it was over before\n  succeeded, completed\n  \"at last\"\n"),
            "{}",
            late.stdout
        );
        world.holds().await;
    });
}

#[test]
fn a_shown_run_says_who_decided_what_and_what_became_of_its_calls() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let edge = &world.edges[0].http;
        let refusal = tool_stub::Answer::status(422);
        world.stubs.tools.script("/confirm", vec![refusal]);
        let calls = Say::calls(&[
            ("c1", "deploy", r#"{"region":"eu"}"#),
            ("c2", "charge", r#"{"amount":500}"#),
            ("c3", "deploy", r#"{"region":"us"}"#),
            ("c4", "confirm", "{}"),
        ]);
        world.stubs.llm.plays("much", vec![calls, Say::text("done")]);
        let run = world.api().run(GUARDED, "much").await;
        let on = world.api().waits_on(&run, "approval", 3).await;
        let of = |call: &str| {
            let found = on.iter().find(|on| on["call_id"] == call).unwrap();
            found["id"].as_str().unwrap().to_owned()
        };
        let (eu, charge, us) = (of("c1"), of("c2"), of("c3"));
        for args in [
            &["approve", &run, &eu, "--reason", "go ahead"][..],
            &["approve", &run, &charge, "--edit", r#"{"amount": 5.0}"#],
            &["deny", &run, &us, "--reason", "not on a Friday"],
        ] {
            done(&cli_as(BOSS, edge, args).await);
        }
        world.api().succeeded(&run).await;
        let finished = cli_as(BOSS, edge, &["show", &run]).await;
        let said = done(&finished);
        let (_, said) = said.split_once("\ndecisions\n").unwrap();
        for part in [
            format!("{eu} deploy approved by boss, "),
            String::from("reason   go ahead"),
            format!("{charge} charge edited by boss, "),
            String::from(r#"instead  {"amount": 5.0}"#),
            format!("{us} deploy denied by boss, "),
            String::from("reason   not on a Friday"),
        ] {
            assert!(said.contains(&part), "{part}: {said}");
        }
        let (_, calls) = said.split_once("\ncalls\n").unwrap();
        let (calls, _) = calls.split_once("\n\n").unwrap();
        let words: Vec<Vec<&str>> = calls
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            words[0],
            ["ACTIVITY", "STEP", "TOOL", "STATE", "ATTEMPTS", "ERROR"]
        );
        let of = |tool: &str| {
            let found: Vec<&Vec<&str>> = words.iter().filter(|row| row[2] == tool).collect();
            assert_eq!(found.len(), 1, "{tool}: {calls}");
            found[0][3..].to_vec()
        };
        assert_eq!(of("deploy"), ["completed", "1"]);
        assert_eq!(of("charge"), ["completed", "1"]);
        assert_eq!(of("confirm")[..2], ["failed", "1"], "{calls}");
        assert!(of("confirm").contains(&"http_422:"), "{calls}");
        world.holds().await;
    });
}

#[test]
fn an_unknown_effect_is_settled_from_the_shell() {
    run(120, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let received = world.stubs.tools.received("/transfer");
        received.close();
        let say = vec![Say::call("c1", "transfer", "{}"), Say::text("moved")];
        world.stubs.llm.plays("move", say);
        let moved = world.api().run(WORKER, "move").await;
        received.reached(1).await;
        world.kill_and_restart(0).await;
        received.open();
        let say = vec![Say::call("c1", "deploy", r#"{"region":"eu"}"#), Say::text("done")];
        world.stubs.llm.plays("ship", say);
        world
            .stubs
            .tools
            .script("/deploy", vec![tool_stub::Answer::cut()]);
        let shipped = world.api().run(WORKER, "ship").await;
        world.api().until(&moved, &["ambiguous"]).await;
        world.api().until(&shipped, &["ambiguous"]).await;
        let edge = world.edges[0].http.clone();

        // What the run shows is what is typed.
        let finished = cli_as(BOSS, &edge, &["show", &shipped]).await;
        let said = done(&finished);
        let on = world.api().waits_on(&shipped, "reconciliation", 1).await;
        let activity = on[0]["activity_id"].as_str().unwrap();
        for verb in ["reconcile", "resolve"] {
            let command = format!("iop-edge runs {verb} {shipped} {activity}");
            assert!(said.contains(&command), "{command}: {said}");
        }

        let found = cli_as(BOSS, &edge, &["reconcile", &moved]).await;
        let said = done(&found);
        assert!(
            said.contains("nothing was found") && said.contains("ambiguous"),
            "{said}"
        );
        let key = world.api().activities(&moved).await[0]["idempotency_key"]
            .as_str()
            .unwrap()
            .to_owned();
        let late = Client::new(world.stubs.tools.url("").strip_prefix("http://").unwrap());
        let headers = [("idempotency-key", key.as_str())];
        let arrived = late.request("POST", "/transfer", &headers, b"{}").await;
        assert_eq!(arrived.status(), 200);
        let found = cli_as(BOSS, &edge, &["reconcile", &moved]).await;
        let said = done(&found);
        assert!(
            said.contains(&format!("key       {key}")) && said.contains("reconciled: completed (reconciled)"),
            "{said}"
        );
        world.api().succeeded(&moved).await;
        let cannot = cli_as(BOSS, &edge, &["reconcile", &shipped]).await;
        refused(&cannot, &["iop-edge: activity_conflict: ", "resolve"]);

        let why = [
            "--reason",
            "it is there",
            "--evidence",
            "ticket 7",
            "--decision-id",
            "r1",
        ];
        let complete = [
            "resolve",
            &*shipped,
            "--action",
            "complete",
            "--output",
            r#"{"id": 1.0}"#,
        ];
        let args = [&complete[..], &why].concat();
        refused(&cli_as(OWNER, &edge, &args).await, &["iop-edge: run_not_found: "]);
        let resolved = cli_as(BOSS, &edge, &args).await;
        let said = done(&resolved);
        for part in [
            r#"arguments {"region":"eu"}"#,
            "resolved: complete (decision r1)",
            "resume",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let again = cli_as(BOSS, &edge, &args).await;
        assert!(
            done(&again).contains("resolved: complete, as before (decision r1)"),
            "{}",
            again.stdout
        );
        let other = [&["resolve", &*shipped, "--action", "fail"][..], &why].concat();
        refused(
            &cli_as(BOSS, &edge, &other).await,
            &["iop-edge: activity_conflict: "],
        );
        let nothing = [&["resolve", &*shipped, "--action", "fail"][..], &why[..4]].concat();
        refused(&cli_as(BOSS, &edge, &nothing).await, &["run_not_waiting: "]);
        done(&cli_as(BOSS, &edge, &["resume", &shipped]).await);
        world.api().succeeded(&shipped).await;
        let told = told(world.stubs.llm.requests_of("ship").last().unwrap());
        assert_eq!(told["c1"], r#"{"id": 1.0}"#);
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        let finished = cli_as(BOSS, &edge, &["show", &shipped]).await;
        for part in [
            "deploy resolved, complete by boss, ",
            "evidence \"ticket 7\"",
            "completed (manual)",
        ] {
            assert!(done(&finished).contains(part), "{part}: {}", finished.stdout);
        }
        world.holds().await;
    });
}

#[test]
fn a_resolution_may_let_its_run_go_on_at_once() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let edge = &world.edges[0].http;
        let say = vec![Say::call("c1", "deploy", "{}"), Say::text("done")];
        world.stubs.llm.plays("ship", say);
        world
            .stubs
            .tools
            .script("/deploy", vec![tool_stub::Answer::cut()]);
        let run = world.api().run(WORKER, "ship").await;
        world.api().until(&run, &["ambiguous"]).await;
        let fail = [
            "resolve",
            &*run,
            "--action",
            "fail",
            "--reason",
            "it is not there",
            "--evidence",
            "its log",
            "--resume",
        ];
        let resolved = cli_as(BOSS, edge, &fail).await;
        assert!(
            done(&resolved).contains("resolved: fail (decision "),
            "{}",
            resolved.stdout
        );
        world.api().succeeded(&run).await;
        let told = told(world.stubs.llm.requests_of("ship").last().unwrap());
        assert!(told["c1"].contains("it is not there"), "{told:?}");
        world.holds().await;
    });
}

#[test]
fn a_question_is_answered_from_the_shell() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let edge = &world.edges[0].http;
        let asks = |id: &str, arguments: &str| Say::call(id, "request_input", arguments);
        let sized = r#"{"prompt": "How many?", "schema": {"type": "object", "required": ["n"]}}"#;
        let say = vec![
            asks("c1", r#"{"prompt": "Which one?"}"#),
            asks("c2", sized),
            Say::text("done"),
        ];
        world.stubs.llm.plays("ask", say);
        let run = world.api().run(WORKER, "ask").await;
        let on = world.api().waits_on(&run, "input", 1).await;
        let first = on[0]["id"].as_str().unwrap();
        let args = [
            "answer",
            &*run,
            first,
            "--text",
            "the \"blue\" one",
            "--decision-id",
            "d1",
        ];
        let answered = cli_as(BOSS, edge, &args).await;
        let said = done(&answered);
        assert!(
            said.contains("prompt    Which one?") && said.ends_with("answered (decision d1)\n"),
            "{said}"
        );
        let api = world.api();
        eventually("the second question", Duration::from_secs(20), || async {
            let on = api.waits_on(&run, "input", 1).await;
            if on[0]["id"] == *first {
                Err(format!("{on:?}"))
            } else {
                Ok(())
            }
        })
        .await;
        let again = cli_as(BOSS, edge, &args).await;
        assert_eq!(done(&again), "answered, as before (decision d1)\n");

        let shown = cli_as(BOSS, edge, &["show", &run]).await;
        let command = format!("iop-edge runs answer {run} wait_");
        assert!(done(&shown).contains(&command), "{}", shown.stdout);
        let wrong = cli_as(BOSS, edge, &["answer", &run, "--text", "three"]).await;
        refused(&wrong, &["iop-edge: schema_violation: "]);
        let answered = cli_as(BOSS, edge, &["answer", &run, "--value", r#"{"n": 3.0}"#]).await;
        assert!(done(&answered).contains(r#"schema    {"#), "{}", answered.stdout);
        world.api().succeeded(&run).await;
        let told = told(world.stubs.llm.requests_of("ask").last().unwrap());
        assert_eq!(
            (&*told["c1"], &*told["c2"]),
            ("the \"blue\" one", r#"{"n": 3.0}"#)
        );
        refused(
            &cli_as(BOSS, edge, &["answer", &run, "--text", "late"]).await,
            &["run_not_waiting: ", "asks nothing"],
        );
        world.holds().await;
    });
}

#[test]
fn a_key_does_no_more_in_the_shell_than_elsewhere() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let edge = &world.edges[0].http;
        let run = paused(&world, Say::call("c1", "deploy", "{}"), "guarded").await;
        // Somebody else's run is not there for a key that only makes runs.
        refused(
            &cli_as(OWNER, edge, &["approve", &run]).await,
            &["iop-edge: run_not_found: "],
        );
        refused(
            &cli_as("sk-nobody", edge, &["ls"]).await,
            &["iop-edge: invalid_api_key: "],
        );
        refused(
            &cli_as(ROOT, edge, &["show", "run_that_is/not there"]).await,
            &["iop-edge: run_not_found: "],
        );
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 0);
    });
}
