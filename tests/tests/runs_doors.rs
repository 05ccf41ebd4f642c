//! Ways around an approval, and ids that are nearly the same or none: what is not the thing itself reaches nothing (durable-scenarios
//! §1, §5).

use std::collections::BTreeSet;

use iop_tests::llm::Say;
use iop_tests::run;
use iop_tests::runs::agents::{GUARDED, WORKER, all};
use iop_tests::runs::{Api, BOSS, Db, OTHER, OWNER, World, encode};
use serde_json::{Value, json};

/// S63: a call that waits for a person leaves by the person's decision and by nothing else that a request can name.
#[test]
fn a_call_that_waits_for_a_person_has_no_side_door() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let plan = vec![Say::call("c1", "deploy", "{}"), Say::text("deployed")];
        world.stubs.llm.plays("gated", plan);
        let api = world.api();
        let run = api.run(GUARDED, "gated").await;
        let on = api.waits_on(&run, "approval", 1).await[0].clone();
        let (approval, digest) = (on["id"].as_str().unwrap(), &on["arguments_digest"]);
        let token = api.seen_run(&run).await["resume_token"].clone();
        let says_yes = json!({"decision": "approve", "decision_id": "x", "arguments_digest": digest});
        let path = |rest: &str| format!("/runs/{run}/{rest}");
        let mut tried = vec![
            (
                path(&format!("inputs/{approval}")),
                json!({"value": says_yes, "decision_id": "x"}),
                "input_not_found",
            ),
            (path("resume"), json!({"resume_token": token}), "run_waiting"),
            (
                path("resume"),
                json!({"resume_token": token, "state_overlay": {"approved": true}}),
                "invalid_request",
            ),
            (path("approvals/c1"), says_yes.clone(), "approval_not_found"),
        ];
        // Also the names by which the store knows it, which nobody is told.
        let stored = |sql: &str| -> BTreeSet<String> { world.query(sql).into_iter().flatten().collect() };
        let own = ["c1", approval, &run].map(str::to_owned);
        let mut names = stored("SELECT wait_id, correlation_id FROM waits");
        assert!(!names.is_empty());
        names.extend(own.clone());
        for correlation in &names {
            let delivery = json!({"delivery_id": "x", "correlation_id": correlation, "payload": says_yes});
            for wait in &names {
                let wait = path(&format!("waits/{}/deliveries", encode(wait)));
                tried.push((wait, delivery.clone(), "wait_not_found"));
            }
            tried.push(("/events".to_owned(), delivery, "wait_not_armed"));
        }
        for wait in &names {
            let cancel = json!({"cancel_id": "x", "reason": "r", "evidence": "e"});
            let wait = path(&format!("waits/{}/cancel", encode(wait)));
            tried.push((wait, cancel, "wait_not_found"));
        }
        // The call is none yet; what is stored is the model's turn.
        assert_eq!(api.activities(&run).await, Vec::<Value>::new());
        names = stored("SELECT activity_id FROM activities");
        assert!(!names.is_empty());
        names.extend(own);
        for activity in &names {
            let path = path(&format!("activities/{}", encode(activity)));
            let resolution = |action: &str| {
                json!({"action": action, "decision_id": "x", "input_digest": digest, "attempt": 1,
                       "reason": "r", "evidence": "e"})
            };
            let mut complete = resolution("complete");
            complete["output"] = json!("done");
            for body in [resolution("retry"), complete] {
                tried.push((format!("{path}/resolve"), body, "activity_not_found"));
            }
            tried.push((format!("{path}/reconcile"), json!({}), "activity_not_found"));
        }
        for (path, body, code) in &tried {
            let answer = api.post(path, body).await;
            assert_eq!(answer.error_code(), *code, "{path} {body}: {}", answer.text());
            assert!((400..500).contains(&answer.status()), "{}", answer.text());
        }
        // Who may not decide cannot say it in another way.
        let mine = |key: &str| Api {
            client: world.edges[0].client().with_key(key),
        };
        for key in [OWNER, OTHER] {
            let path = format!("/runs/{run}/approvals/{approval}");
            let answer = mine(key).post(&path, &says_yes).await;
            assert!([403, 404].contains(&answer.status()), "{}", answer.text());
        }
        let seen = api.seen_run(&run).await;
        assert_eq!(
            (&seen["status"], &seen["waiting_on"][0]),
            (&json!("waiting"), &on)
        );
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        let decided = mine(BOSS).decide(&run, &on, "approve", "d1").await;
        assert_eq!(decided.status(), 200, "{}", decided.text());
        api.succeeded(&run).await;
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        world.holds().await;
    });
}

/// S7: ids that differ in their last byte are two runs, with histories of their own; one byte more than an id may have is refused.
#[test]
fn long_ids_that_differ_in_their_last_byte_are_two_runs() {
    run(60, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let api = world.api();
            let create = async |id: &str, input: &str| {
                let body = json!({"agent": WORKER, "input": input, "run_id": id});
                api.create_with(&body, &[]).await
            };
            let prefix = "ü".repeat(127);
            let ids = ["a", "b"].map(|last| format!("{prefix}-{last}"));
            for (id, input) in ids.iter().zip(["first", "second"]) {
                assert_eq!(id.len(), 256);
                let made = create(id, input).await;
                assert_eq!(made.status(), 202, "{}", made.text());
            }
            for (id, input) in ids.iter().zip(["first", "second"]) {
                let seen = api.succeeded(&encode(id)).await;
                assert_eq!(seen["id"], json!(id));
                assert_eq!(world.stubs.llm.requests_of(input).len(), 1);
                let history = api.all(&format!("/runs/{}/history", encode(id))).await;
                let last: Option<&Value> = history.iter().map(|item| &item["revision"]).next_back();
                assert_eq!(last, Some(&seen["revision"]), "{history:?}");
            }
            let long = create(&format!("{prefix}-ab"), "third").await;
            long.assert_error(400, "invalid_encoding");
            assert_eq!(long.json()["error"]["param"], "run_id");
            assert_eq!(api.all("/runs").await.len(), 2);
            world.holds().await;
        }
    });
}

/// S6: an id that is no text is refused, in a path and in a body, and nothing of the request is kept; the character that stands for
/// what could not be read is a character like others.
#[test]
fn ids_that_are_no_text_are_refused_and_not_mended() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        world.stubs.llm.plays(
            "gated",
            vec![Say::call("c1", "deploy", "{}"), Say::text("deployed")],
        );
        let api = world.api();
        let run = "r\u{fffd}";
        let body = json!({"agent": GUARDED, "input": "gated", "run_id": run});
        let made = api.create_with(&body, &[]).await;
        assert_eq!(made.status(), 202, "{}", made.text());
        let path = format!("/runs/{}", encode(run));
        let on = api.waits_on(&encode(run), "approval", 1).await[0].clone();
        let approval = on["id"].as_str().unwrap();
        let decision =
            json!({"decision": "approve", "decision_id": "d?", "arguments_digest": on["arguments_digest"]});
        let delivery = json!({"correlation_id": "c?", "delivery_id": "d", "payload": 1});
        for (path, body) in [
            (
                "/runs".to_owned(),
                json!({"agent": WORKER, "input": "x", "run_id": "r?"}),
            ),
            (format!("{path}/approvals/{approval}"), decision.clone()),
            (
                format!("{path}/cancel"),
                json!({"cancel_id": "c?", "reason": "r"}),
            ),
            (format!("{path}/waits/w/deliveries"), delivery.clone()),
            ("/events".to_owned(), delivery.clone()),
            (
                format!("{path}/inputs/%FF"),
                json!({"value": 1, "decision_id": "d"}),
            ),
            (format!("{path}/approvals/%FF"), decision.clone()),
            (
                "/runs/r%FF/cancel".to_owned(),
                json!({"cancel_id": "c", "reason": "r"}),
            ),
        ] {
            let body: Vec<u8> = body
                .to_string()
                .bytes()
                .map(|b| if b == b'?' { 0xff } else { b })
                .collect();
            let path = format!("/api/v1{path}");
            let answer = api.client.request("POST", &path, &[], &body).await;
            answer.assert_error(400, "invalid_encoding");
        }
        let runs = api.all("/runs").await;
        assert_eq!((runs.len(), &runs[0]["id"]), (1, &json!(run)));
        assert_eq!(
            (&runs[0]["status"], &runs[0]["cancel_requested_at"]),
            (&json!("waiting"), &json!(null))
        );
        let decided = api.decide(&encode(run), &on, "approve", "d\u{fffd}").await;
        assert_eq!(decided.status(), 200, "{}", decided.text());
        assert_eq!(api.succeeded(&encode(run)).await["id"], json!(run));
        world.holds().await;
    });
}
