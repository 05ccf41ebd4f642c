//! Ends that come from outside while a run is somewhere else, or nowhere (durable-scenarios §4).

use std::time::{Duration, Instant};

use iop_tests::llm::Say;
use iop_tests::runs::agents::{GUARDED, WORKER, all};
use iop_tests::runs::{Api, Db, World};
use iop_tests::{eventually, run};
use serde_json::json;

async fn cancel(api: &Api, run: &str) -> iop_tests::client::Answer {
    let body = json!({"cancel_id": "x1", "reason": "enough"});
    api.post(&format!("/runs/{run}/cancel"), &body).await
}

/// S39, S40 over two edges: a request on one ends a call that the other one makes; what the call brings is kept and changes nothing.
#[test]
fn a_cancellation_on_one_edge_ends_what_another_one_does() {
    run(120, async {
        let mut world = World::start(Db::Postgres, all).await;
        for (input, tool, arguments) in [("pay", "charge", "{\"amount\":1}"), ("ship", "deploy", "{}")] {
            world
                .stubs
                .llm
                .plays(input, vec![Say::call("c1", tool, arguments), Say::text("done")]);
        }
        let (charge, deploy) = (
            world.stubs.tools.received("/charge"),
            world.stubs.tools.applied("/deploy"),
        );
        charge.close();
        deploy.close();
        let pay = world.api().run(WORKER, "pay").await;
        charge.reached(1).await;
        let ship = world.api().run(WORKER, "ship").await;
        deploy.reached(1).await;
        world.stubs.llm.asked.close();
        let think = world.api().run(WORKER, "think").await;
        world.stubs.llm.asked.reached(1).await;
        // Whoever comes now holds none of them.
        world.add_edge().await;
        let there = world.api_of(1);

        let mut stream = there.stream(&pay, None).await;
        // 200: it was over before that was answered.
        let answer = cancel(&there, &pay).await;
        assert!([200, 202].contains(&answer.status()), "{}", answer.text());
        world.stubs.tools.hung_up(0).await;
        let told = stream.rest().await;
        assert_eq!(told.last().unwrap().name, "run.cancelled");
        assert_eq!(world.stubs.tools.effects("/charge"), 0);
        charge.open();

        let answer = cancel(&there, &think).await;
        assert!([200, 202].contains(&answer.status()), "{}", answer.text());
        let seen = there.over(&think).await;
        assert_eq!(seen["status"], "cancelled", "{seen}");
        world.stubs.llm.asked.open();

        assert_eq!(cancel(&there, &ship).await.status(), 202);
        eventually("the request is seen", Duration::from_secs(20), || async {
            let seen = there.seen_run(&ship).await;
            match seen["cancel_requested_at"].as_str() {
                Some(_) => Ok(()),
                None => Err(seen.to_string()),
            }
        })
        .await;
        deploy.open();
        let seen = there.over(&ship).await;
        assert_eq!(
            (&seen["status"], &seen["outcome"]["reason"]),
            (&json!("cancelled"), &json!("cancelled"))
        );
        let activities = there.activities(&ship).await;
        assert_eq!(
            (&activities[0]["state"], &activities[0]["output"]),
            (&json!("completed"), &json!({"ok": true})),
            "{activities:?}"
        );
        for (run, input) in [(&pay, "pay"), (&ship, "ship"), (&think, "think")] {
            assert_eq!(world.stubs.llm.requests_of(input).len(), 1, "{input}");
            for api in [&world.api(), &there] {
                api.resume(run).await.assert_error(409, "run_terminal");
            }
        }
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        world.holds().await;
    });
}

/// S42 for a model: a turn that is to be asked for again much later is not, and its run is over at once.
#[test]
fn a_cancelled_pause_before_a_turn_is_over_at_once() {
    run(60, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let refused = Say::Status(429, vec![("retry-after".to_owned(), "600".to_owned())]);
            world.stubs.llm.next(vec![refused]);
            let api = world.api();
            let run = api.run(WORKER, "later").await;
            let on = api.waits_on(&run, "retry", 1).await;
            assert!(
                on[0]["due_at"].is_string() || on[0]["next_attempt_at"].is_string(),
                "{on:?}"
            );
            let asked = Instant::now();
            let answer = cancel(&api, &run).await;
            assert!([200, 202].contains(&answer.status()), "{}", answer.text());
            let seen = api.over(&run).await;
            assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
            assert_eq!(seen["status"], "cancelled", "{seen}");
            assert_eq!(world.stubs.llm.requests().len(), 1);
            world.holds().await;
        }
    });
}

/// S41: a deadline ends a run wherever it stands, also when it passes while no host is there. What is not known outlives it.
#[test]
fn a_deadline_that_passes_unseen_ends_every_run_but_an_unknown_one() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            for (input, tool) in [("asks", "deploy"), ("ships", "deploy")] {
                world
                    .stubs
                    .llm
                    .plays(input, vec![Say::call("c1", tool, "{}"), Say::text("done")]);
            }
            let prompt = Say::call("c1", "request_input", "{\"prompt\":\"How many?\"}");
            world.stubs.llm.plays("counts", vec![prompt, Say::text("done")]);
            let api = world.api();
            let started = Instant::now();
            let begin = async |agent: &str, input: &str| -> String {
                let body = json!({"agent": agent, "input": input, "deadline": "6s"});
                let made = api.create_with(&body, &[]).await;
                assert_eq!(made.status(), 202, "{}", made.text());
                made.json()["id"].as_str().unwrap().to_owned()
            };
            let refused = Say::Status(429, vec![("retry-after".to_owned(), "600".to_owned())]);
            world.stubs.llm.next(vec![refused]);
            let pauses = begin(WORKER, "pauses").await;
            api.waits_on(&pauses, "retry", 1).await;
            let asks = begin(GUARDED, "asks").await;
            let on = api.waits_on(&asks, "approval", 1).await;
            let counts = begin(WORKER, "counts").await;
            api.waits_on(&counts, "input", 1).await;
            let deploy = world.stubs.tools.received("/deploy");
            deploy.close();
            let ships = begin(WORKER, "ships").await;
            deploy.reached(1).await;
            world.stubs.llm.asked.close();
            let thinks = begin(WORKER, "thinks").await;
            world.stubs.llm.asked.reached(1).await;
            world.kill(0).await;
            deploy.open();
            eventually("the deadlines pass", Duration::from_secs(20), || async {
                let passed = started.elapsed();
                if passed > Duration::from_secs(10) {
                    Ok(())
                } else {
                    Err(format!("{passed:?}"))
                }
            })
            .await;
            world.restart(0).await;
            world.stubs.llm.asked.open();
            let api = world.api();
            for run in [&pauses, &asks, &counts, &thinks] {
                let seen = api.over(run).await;
                assert_eq!(
                    (&seen["status"], &seen["outcome"]["reason"], &seen["resumable"]),
                    (&json!("cancelled"), &json!("deadline"), &json!(false)),
                    "{seen}"
                );
            }
            let late = api.decide(&asks, &on[0], "approve", "d1").await;
            assert!([409, 410].contains(&late.status()), "{}", late.text());
            let seen = api.until(&ships, &["ambiguous"]).await;
            let activity = seen["waiting_on"][0]["activity_id"].as_str().unwrap();
            let path = format!("/runs/{ships}/activities/{activity}");
            let record = api.seen(&path).await;
            let resolve = json!({"action": "complete", "decision_id": "r1", "attempt": 1, "resume": true,
                "input_digest": record["input_digest"], "reason": "seen", "evidence": "log", "output": "up"});
            let resolved = api.post(&format!("{path}/resolve"), &resolve).await;
            assert_eq!(resolved.status(), 200, "{}", resolved.text());
            let seen = api.over(&ships).await;
            assert_eq!(
                (&seen["status"], &seen["outcome"]["reason"]),
                (&json!("cancelled"), &json!("deadline")),
                "{seen}"
            );
            let turns = |input: &str| world.stubs.llm.requests_of(input).len();
            assert_eq!(
                ["pauses", "asks", "counts", "ships", "thinks"].map(turns),
                [1, 1, 1, 1, 1]
            );
            assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
            world.holds().await;
        }
    });
}
