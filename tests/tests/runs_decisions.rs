//! What people, operators and the world outside say to runs: resolutions, resumes, cancellations, deliveries, deletion. Each is
//! stored once, answered the same again, and refused by name when it does not fit.

use std::time::Duration;

use iop_tests::client::{Answer, Client};
use iop_tests::llm::{self, Say};
use iop_tests::run;
use iop_tests::runs::agents::{FRAGILE, GUARDED, WORKER, agent, all};
use iop_tests::runs::{Api, BOSS, Db, OTHER, OWNER, Options, Sse, World, encode, waiting_ids};
use iop_tests::tool_stub;
use serde_json::{Value, json};

/// An error's code and the field it names.
#[track_caller]
fn at_fault(answer: &Answer, status: u16, code: &str, param: &str) {
    answer.assert_error(status, code);
    assert_eq!(answer.json()["error"]["param"], param, "{}", answer.text());
}

#[track_caller]
fn is_replay(answer: &Answer) {
    assert_eq!(
        (answer.status(), answer.header("idempotency-replayed")),
        (200, Some("true")),
        "{}",
        answer.text()
    );
}

async fn send(api: &Api, method: &str, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    api.client
        .request(method, &format!("/api/v1{path}"), headers, body.as_bytes())
        .await
}

async fn delete(api: &Api, path: &str) -> Answer {
    send(api, "DELETE", path, &[], &Value::Null).await
}

/// A run that waits for `deploy` to be approved, and what it waits on.
async fn paused(world: &World, api: &Api, input: &str) -> (String, Value) {
    let say = vec![
        Say::call("c1", "deploy", "{\"region\":\"eu\"}"),
        Say::text("done"),
    ];
    world.stubs.llm.plays(input, say);
    let run = api.run(GUARDED, input).await;
    let on = api.waits_on(&run, "approval", 1).await;
    (run, on[0].clone())
}

/// A run with an unsafe call of unknown effect, and where its activity is.
async fn ambiguous(world: &World, input: &str) -> (String, String) {
    world
        .stubs
        .tools
        .script("/deploy", vec![tool_stub::Answer::cut()]);
    let say = vec![
        Say::call("c1", "deploy", "{\"region\":\"eu\"}"),
        Say::text("done"),
    ];
    world.stubs.llm.plays(input, say);
    let api = world.api();
    let run = api.run(WORKER, input).await;
    let seen = api.until(&run, &["ambiguous"]).await;
    let activity = seen["waiting_on"][0]["activity_id"].as_str().unwrap();
    (run.clone(), format!("/runs/{run}/activities/{activity}"))
}

/// D153 to D159: an unknown effect is settled by one decision about exactly what was seen.
#[test]
fn an_operator_settles_an_unknown_effect_once() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let (run, path) = ambiguous(&world, "said to have failed").await;
        let seen = api.seen(&path).await;
        assert_eq!(
            (&seen["state"], &seen["tool"], &seen["attempts"][0]["class"]),
            (&json!("unknown"), &json!("deploy"), &json!("abandoned")),
            "{seen}"
        );
        let body = json!({"action": "fail", "decision_id": "r1", "attempt": 1, "reason": "it is not there",
            "evidence": "ticket 7", "input_digest": seen["input_digest"]});
        let resolve = async |change: Value| {
            let mut body = body.clone();
            for (name, value) in change.as_object().unwrap() {
                body[name] = value.clone();
            }
            api.post(&format!("{path}/resolve"), &body).await
        };
        let other = format!("sha256:{}", "0".repeat(64));
        for (change, code) in [
            (json!({"attempt": 2}), "activity_conflict"),
            (json!({"input_digest": other}), "activity_conflict"),
            (json!({"action": "retry"}), "activity_conflict"),
        ] {
            resolve(change).await.assert_error(409, code);
        }
        for (change, param) in [
            (json!({"action": "complete"}), "output"),
            (json!({"output": 1}), "output"),
            (json!({"action": "undo"}), "action"),
            (json!({"reason": " "}), "reason"),
            (json!({"evidence": ""}), "evidence"),
            (json!({"input_digest": "sha256:x"}), "input_digest"),
            (json!({"attempt": -1}), "attempt"),
            (json!({"by": "me"}), "by"),
            (json!({"resume_token": "rt_00"}), "resume_token"),
        ] {
            at_fault(&resolve(change).await, 400, "invalid_request", param);
        }
        at_fault(
            &resolve(json!({"decision_id": ""})).await,
            400,
            "invalid_encoding",
            "decision_id",
        );
        api.with_key(OWNER)
            .post(&format!("{path}/resolve"), &body)
            .await
            .assert_error(403, "permission_denied");
        api.post(&format!("/runs/{run}/activities/act_00/resolve"), &body)
            .await
            .assert_error(404, "activity_not_found");
        let etag = [("if-match", "\"1\"")];
        let stale = send(&api, "POST", &format!("{path}/resolve"), &etag, &body).await;
        stale.assert_error(409, "stale_token");
        let current = api.seen_run(&run).await["resume_token"].clone();
        assert_eq!(stale.json()["error"]["current_resume_token"], current);
        assert_eq!(api.seen(&path).await, seen, "nothing of the above was recorded");

        let resolved = api.with_key(BOSS).post(&format!("{path}/resolve"), &body).await;
        assert_eq!(resolved.status(), 200, "{}", resolved.text());
        let settled = resolved.json();
        assert_eq!(
            (&settled["state"], &settled["origin"], &settled["error"]["code"]),
            (&json!("failed"), &json!("manual"), &json!("resolved_as_failed")),
            "{settled}"
        );
        let decision = &settled["decisions"][0];
        assert_eq!(
            (&decision["decision_id"], &decision["by"], &decision["evidence"]),
            (&json!("r1"), &json!("boss"), &json!("ticket 7"))
        );
        assert_eq!(decision["input_digest"], settled["input_digest"]);
        // The attempt is what it was: the decision stands beside it.
        assert_eq!(settled["attempts"][0]["class"], "abandoned");
        is_replay(&resolve(json!({})).await);
        resolve(json!({"reason": "another"}))
            .await
            .assert_error(409, "activity_conflict");
        resolve(json!({"decision_id": "r2"}))
            .await
            .assert_error(409, "activity_conflict");

        // A resume is a decision of its own.
        let on = api.waits_on(&run, "resume", 1).await;
        assert_eq!(on.len(), 1);
        let token = api.seen_run(&run).await["resume_token"].clone();
        let evaluated = api
            .post(
                &format!("/runs/{run}/resume/evaluate"),
                &json!({"resume_token": token}),
            )
            .await;
        assert_eq!(evaluated.json()["decision"], "ready", "{}", evaluated.text());
        assert_eq!(api.resume(&run).await.status(), 202);
        api.succeeded(&run).await;
        let told = llm::told(&world.stubs.llm.requests_of("said to have failed")[1]);
        assert!(told["c1"].contains("it is not there"), "{}", told["c1"]);
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        world.holds().await;
    });
}

/// D152: without evidence the effect stays unknown; with evidence the run goes on, and nothing is called again.
#[test]
fn a_callee_is_asked_again_when_somebody_says_so() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let received = world.stubs.tools.received("/transfer");
        received.close();
        let say = vec![Say::call("c1", "transfer", "{}"), Say::text("moved")];
        world.stubs.llm.plays("move", say);
        let run = world.api().run(WORKER, "move").await;
        received.reached(1).await;
        world.kill_and_restart(0).await;
        received.open();
        let api = world.api();
        let seen = api.until(&run, &["ambiguous"]).await;
        let activity = seen["waiting_on"][0]["activity_id"].as_str().unwrap();
        let path = format!("/runs/{run}/activities/{activity}/reconcile");
        let absent = api.post(&path, &json!({})).await;
        assert_eq!(absent.status(), 200, "{}", absent.text());
        assert_eq!(absent.json()["state"], "unknown");
        assert_eq!(api.seen_run(&run).await["status"], "ambiguous");
        at_fault(
            &api.post(&path, &json!({"force": true})).await,
            400,
            "invalid_request",
            "force",
        );
        api.with_key(OWNER)
            .post(&path, &json!({}))
            .await
            .assert_error(403, "permission_denied");

        // It arrives after all.
        let key = absent.json()["idempotency_key"].as_str().unwrap().to_owned();
        let url = world.stubs.tools.url("");
        let late = Client::new(url.strip_prefix("http://").unwrap());
        let headers = [("idempotency-key", key.as_str())];
        assert_eq!(
            late.request("POST", "/transfer", &headers, b"{}").await.status(),
            200
        );
        let calls = world.stubs.tools.calls("/transfer").len();
        let found = send(&api, "POST", &path, &[], &Value::Null).await;
        assert_eq!(
            (found.status(), &found.json()["origin"]),
            (200, &json!("reconciled")),
            "{}",
            found.text()
        );
        is_replay(&api.post(&path, &json!({})).await);
        api.succeeded(&run).await;
        assert_eq!(world.stubs.tools.calls("/transfer").len(), calls);

        let (other, path) = ambiguous(&world, "cannot be asked").await;
        let refused = api.post(&format!("{path}/reconcile"), &json!({})).await;
        refused.assert_error(409, "activity_conflict");
        assert_eq!(api.seen_run(&other).await["status"], "ambiguous");
        let cancel = json!({"cancel_id": "c1", "reason": "enough"});
        let asked = api.post(&format!("/runs/{other}/cancel"), &cancel).await;
        assert_eq!(
            (asked.status(), &asked.json()["status"]),
            (202, &json!("ambiguous")),
            "{}",
            asked.text()
        );
        let seen = api.seen(&path).await;
        let body = json!({"action": "complete", "decision_id": "r1", "attempt": 1, "reason": "it is there",
            "evidence": "ticket 8", "input_digest": seen["input_digest"], "output": "deployed"});
        assert_eq!(api.post(&format!("{path}/resolve"), &body).await.status(), 200);
        assert_eq!(api.over(&other).await["status"], "cancelled");
        world.holds().await;
    });
}

/// S19, S20, S36, S37, D91 to D97: one preflight for what is resumed, streamed and only asked about.
#[test]
fn a_resume_needs_the_current_token_and_says_what_it_meets() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world.stubs.llm.next(vec![Say::status(500)]);
        world.stubs.llm.plays("twice", vec![Say::text("well")]);
        let run = api.run(FRAGILE, "twice").await;
        let first = api.seen_run(&run).await["resume_token"].clone();
        let failed = api.over(&run).await;
        assert_eq!(
            (&failed["status"], &failed["resumable"]),
            (&json!("failed"), &json!(true)),
            "{failed}"
        );
        let token = failed["resume_token"].clone();
        let path = format!("/runs/{run}/resume");
        let evaluate = format!("{path}/evaluate");
        // Refused alike, whether it is done, streamed or only asked.
        let stream = [("accept", "text/event-stream")];
        for (body, status, code, param) in [
            (json!({}), 400, "invalid_request", "resume_token"),
            (
                json!({"resume_token": "rt_00"}),
                400,
                "invalid_request",
                "resume_token",
            ),
            (
                json!({"resume_token": token, "state_overlay": {}}),
                400,
                "invalid_request",
                "state_overlay",
            ),
            (
                json!({"resume_token": token, "resume_target": {"step": "reason"}}),
                422,
                "invalid_resume_target",
                "resume_target",
            ),
            (
                json!({"resume_token": token, "resume_target": {}}),
                422,
                "invalid_resume_target",
                "resume_target",
            ),
            (
                json!({"resume_token": token, "token": 1}),
                400,
                "invalid_request",
                "token",
            ),
        ] {
            at_fault(&api.post(&path, &body).await, status, code, param);
            at_fault(
                &send(&api, "POST", &path, &stream, &body).await,
                status,
                code,
                param,
            );
            at_fault(&api.post(&evaluate, &body).await, status, code, param);
        }
        let stale = api.post(&path, &json!({"resume_token": first})).await;
        stale.assert_error(409, "stale_token");
        let error = &stale.json()["error"];
        assert_eq!(
            (&error["current_resume_token"], &error["decision"]),
            (&token, &json!("stale"))
        );
        let asked = api.post(&evaluate, &json!({"resume_token": first})).await;
        assert_eq!(
            (
                asked.status(),
                &asked.json()["decision"],
                &asked.json()["current_resume_token"]
            ),
            (200, &json!("stale"), &token)
        );
        assert_eq!(
            api.seen_run(&run).await,
            failed,
            "nothing of the above changed anything"
        );

        api.with_key(OTHER)
            .post(&path, &json!({"resume_token": token}))
            .await
            .assert_error(404, "run_not_found");
        let etag = format!("\"{}\"", failed["revision"].as_str().unwrap());
        let body = json!({"resume_target": {"current": true}, "metadata": {"who": "me"}});
        let resumed = send(&api, "POST", &path, &[("if-match", &etag)], &body).await;
        assert_eq!(resumed.status(), 202, "{}", resumed.text());
        let done = api.succeeded(&run).await;
        assert_eq!(
            (&done["life"], &done["metadata"]["who"]),
            (&json!(2), &json!("me")),
            "{done}"
        );

        // A success is answered from the store.
        let requests = world.stubs.llm.requests().len();
        let again = api.resume(&run).await;
        assert_eq!(
            (again.status(), &again.json()["outcome"]),
            (200, &done["outcome"]),
            "{}",
            again.text()
        );
        let asked = api
            .post(&evaluate, &json!({"resume_token": done["resume_token"]}))
            .await;
        assert_eq!(asked.json()["decision"], "terminal");
        assert_eq!(world.stubs.llm.requests().len(), requests);
        world.holds().await;
    });
}

/// D232: a resume as a stream, and what cannot be resumed at all.
#[test]
fn a_resumed_run_is_followed_to_its_end() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world.stubs.llm.next(vec![Say::status(500)]);
        world.stubs.llm.plays("streamed", vec![Say::text("well")]);
        let run = api.run(FRAGILE, "streamed").await;
        let failed = api.over(&run).await;
        let body = json!({"resume_token": failed["resume_token"]}).to_string();
        let path = format!("/api/v1/runs/{run}/resume");
        let headers = [("accept", "text/event-stream")];
        let conn = api
            .client
            .start("POST", &path, &headers, body.as_bytes())
            .await
            .unwrap();
        let seen = Sse::of(conn).await.rest().await;
        let names: Vec<&str> = seen.iter().map(|event| event.name.as_str()).collect();
        assert_eq!(
            (names[0], *names.last().unwrap()),
            ("run.snapshot", "run.succeeded"),
            "{names:?}"
        );
        assert!(names.contains(&"run.resumed"), "{names:?}");
        assert!(
            seen.iter()
                .all(|event| event.id.is_none() || event.body["life"] == 2),
            "{seen:?}"
        );

        world.stubs.llm.plays("short", vec![Say::text("well")]);
        let short = json!({"agent": WORKER, "input": "short", "durable": false});
        let run = api.post("/runs", &short).await.json()["id"]
            .as_str()
            .unwrap()
            .to_owned();
        api.succeeded(&run).await;
        for path in ["resume", "resume/evaluate"] {
            let refused = api.post(&format!("/runs/{run}/{path}"), &json!({})).await;
            refused.assert_error(409, "run_not_durable");
        }
        world.holds().await;
    });
}

/// S39, S40, S42, D134, D228: a cancellation is stored, acted on and answered again; what is over can be deleted, its id is gone.
#[test]
fn a_cancelled_run_is_over_and_a_deleted_one_is_gone() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let received = world.stubs.tools.received("/items/7");
        received.close();
        let say = vec![Say::call("c1", "lookup", "{\"sku\":\"7\"}"), Say::text("never")];
        world.stubs.llm.plays("busy", say);
        let run = api.run(WORKER, "busy").await;
        received.reached(1).await;
        delete(&api, &format!("/runs/{run}"))
            .await
            .assert_error(409, "run_busy");
        let path = format!("/runs/{run}/cancel");
        at_fault(
            &api.post(&path, &json!({"reason": "x"})).await,
            400,
            "invalid_request",
            "cancel_id",
        );
        at_fault(
            &api.post(&path, &json!({"cancel_id": "c1"})).await,
            400,
            "invalid_request",
            "reason",
        );
        at_fault(
            &api.post(&path, &json!({"cancel_id": "", "reason": "x"})).await,
            400,
            "invalid_encoding",
            "cancel_id",
        );
        let body = json!({"cancel_id": "c1", "reason": "enough"});
        let asked = api.post(&path, &body).await;
        assert!([200, 202].contains(&asked.status()), "{}", asked.text());
        let ended = api.over(&run).await;
        assert_eq!(
            (
                &ended["status"],
                &ended["outcome"]["cancel"]["by"],
                &ended["outcome"]["cancel"]["reason"]
            ),
            (&json!("cancelled"), &json!("root"), &json!("enough")),
            "{ended}"
        );
        received.open();
        is_replay(&api.post(&path, &body).await);
        let other = json!({"cancel_id": "c1", "reason": "another"});
        at_fault(
            &api.post(&path, &other).await,
            409,
            "delivery_conflict",
            "cancel_id",
        );
        let late = api
            .post(&path, &json!({"cancel_id": "c2", "reason": "again"}))
            .await;
        assert_eq!(
            (late.status(), &late.json()["status"]),
            (200, &json!("cancelled"))
        );
        api.resume(&run).await.assert_error(409, "run_terminal");

        // One that waits is over at once.
        let (waiting, on) = paused(&world, &api, "waiting").await;
        delete(&api, &format!("/runs/{waiting}"))
            .await
            .assert_error(409, "run_busy");
        let cancelled = api.post(&format!("/runs/{waiting}/cancel"), &body).await;
        assert_eq!(
            (cancelled.status(), &cancelled.json()["status"]),
            (200, &json!("cancelled"))
        );
        api.decide(&waiting, &on, "approve", "d1")
            .await
            .assert_error(409, "run_terminal");
        let approvals = api.all(&format!("/runs/{waiting}/approvals")).await;
        assert_eq!(approvals[0]["status"], "cancelled");

        delete(&api.with_key(BOSS), &format!("/runs/{run}"))
            .await
            .assert_error(403, "permission_denied");
        let deleted = delete(&api, &format!("/runs/{run}")).await;
        assert_eq!((deleted.status(), deleted.text().as_str()), (204, ""));
        for path in [
            "",
            "/result",
            "/events",
            "/steps",
            "/turns",
            "/activities",
            "/approvals",
            "/waits",
            "/history",
        ] {
            api.get(&format!("/runs/{run}{path}"))
                .await
                .assert_error(410, "run_deleted");
        }
        for (path, body) in [
            ("cancel", body.clone()),
            ("resume", json!({"resume_token": ended["resume_token"]})),
            (
                "approvals/apr_00",
                json!({"decision": "deny", "decision_id": "d", "arguments_digest": ""}),
            ),
            ("inputs/wait_00", json!({"value": 1, "decision_id": "d"})),
        ] {
            api.post(&format!("/runs/{run}/{path}"), &body)
                .await
                .assert_error(410, "run_deleted");
        }
        delete(&api, &format!("/runs/{run}"))
            .await
            .assert_error(410, "run_deleted");
        delete(&api, "/runs/nowhere")
            .await
            .assert_error(404, "run_not_found");
        let again = json!({"agent": WORKER, "input": "busy", "run_id": run});
        api.post("/runs", &again)
            .await
            .assert_error(409, "idempotency_conflict");
        assert!(
            api.all("/runs")
                .await
                .iter()
                .all(|listed| listed["id"] != run.as_str())
        );
        world.holds().await;
    });
}

/// S46, D269: a run whose agent is gone is listed and looked at, and waits until the agent is there again.
#[test]
fn a_run_without_its_definition_waits_for_it() {
    run(60, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let api = world.api();
            let declared = json!({
                "model": llm::MODEL, "durable": true, "approvals": {"default": "always"},
                "tools": [{"name": "deploy", "http": {"method": "POST", "url": world.stubs.tools.url("/deploy")}}],
            });
            let put = send(&api, "PUT", "/agents/passing", &[], &declared).await;
            assert_eq!(put.status(), 201, "{}", put.text());
            let say = vec![
                Say::calls(&[
                    ("c1", "deploy", "{}"),
                    ("c2", "request_input", "{\"prompt\":\"Why?\"}"),
                ]),
                Say::text("done"),
            ];
            world.stubs.llm.plays("passing", say);
            let run = api.run("passing", "passing").await;
            let on = api.waits_on(&run, "approval", 1).await;
            let asked = api.waits_on(&run, "input", 1).await;
            api.until(&run, &["waiting"]).await;
            assert_eq!(delete(&api, "/agents/passing").await.status(), 204);

            let seen = api.seen_run(&run).await;
            assert_eq!(
                (&seen["status"], &seen["blocked"]),
                (&json!("waiting"), &json!("definition_missing")),
                "{seen}"
            );
            let waits = api.all(&format!("/runs/{run}/waits")).await;
            assert_eq!(waiting_ids(&waits), waiting_ids(&asked));
            assert_eq!(waits[0]["prompt"], "Why?");
            assert_eq!(
                waiting_ids(&api.all("/approvals?status=pending&agent=passing").await),
                waiting_ids(&on)
            );
            api.decide(&run, &on[0], "approve", "d1")
                .await
                .assert_error(409, "definition_missing");
            let input = format!("/runs/{run}/inputs/{}", asked[0]["id"].as_str().unwrap());
            let answer = json!({"value": "because", "decision_id": "i1"});
            api.post(&input, &answer)
                .await
                .assert_error(409, "definition_missing");
            api.resume(&run).await.assert_error(409, "definition_missing");
            let token = json!({"resume_token": seen["resume_token"]});
            let met = api.post(&format!("/runs/{run}/resume/evaluate"), &token).await;
            assert_eq!(met.json()["decision"], "definition_missing", "{}", met.text());
            assert!(world.stubs.tools.calls("/deploy").is_empty());

            let put = send(&api, "PUT", "/agents/passing", &[], &declared).await;
            assert_eq!(put.status(), 200, "{}", put.text());
            assert_eq!(api.decide(&run, &on[0], "approve", "d1").await.status(), 200);
            assert_eq!(api.post(&input, &answer).await.status(), 200);
            api.succeeded(&run).await;
            assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
            world.holds().await;
        }
    });
}

/// Approvals over all runs: by status and agent, page by page, and only of the runs that the key may see.
#[test]
fn approvals_are_listed_for_who_may_see_their_runs() {
    run(60, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let (api, owner, other) = (
                world.api(),
                world.api().with_key(OWNER),
                world.api().with_key(OTHER),
            );
            let mut runs = Vec::new();
            for n in 0..4 {
                let api = if n == 3 { &other } else { &owner };
                runs.push(paused(&world, api, &format!("listed {n}")).await);
            }
            let ids: Vec<&str> = runs.iter().map(|(_, on)| on["id"].as_str().unwrap()).collect();
            let boss = api.with_key(BOSS);
            assert_eq!(waiting_ids(&boss.all("/approvals").await), ids);
            assert_eq!(
                waiting_ids(&owner.all("/approvals?status=pending").await),
                ids[..3]
            );
            assert_eq!(waiting_ids(&other.all("/approvals").await), ids[3..]);
            assert!(api.all(&format!("/approvals?agent={WORKER}")).await.is_empty());
            other
                .get(&format!("/runs/{}/approvals", runs[0].0))
                .await
                .assert_error(404, "run_not_found");
            let mut paged = Vec::new();
            let mut after = String::new();
            loop {
                let page = api
                    .seen(&format!(
                        "/approvals?status=pending&agent={GUARDED}&limit=1{after}"
                    ))
                    .await;
                paged.extend(waiting_ids(page["data"].as_array().unwrap()));
                if page["has_more"] != true {
                    break;
                }
                after = format!("&after={}", encode(page["next_after"].as_str().unwrap()));
            }
            assert_eq!(paged, ids);

            assert_eq!(
                boss.decide(&runs[1].0, &runs[1].1, "deny", "d1").await.status(),
                200
            );
            assert_eq!(
                boss.decide(&runs[2].0, &runs[2].1, "approve", "d1")
                    .await
                    .status(),
                200
            );
            let by_status =
                async |status: &str| waiting_ids(&api.all(&format!("/approvals?status={status}")).await);
            assert_eq!(by_status("pending").await, [ids[0], ids[3]]);
            assert_eq!(by_status("denied").await, [ids[1]]);
            assert_eq!(by_status("approved").await, [ids[2]]);
            for status in ["edited", "expired", "cancelled"] {
                assert!(by_status(status).await.is_empty(), "{status}");
            }
            for (query, param) in [
                ("status=open", "status"),
                ("limit=0", "limit"),
                ("after=x", "after"),
                ("run=1", "run"),
            ] {
                at_fault(
                    &api.get(&format!("/approvals?{query}")).await,
                    400,
                    "invalid_request",
                    param,
                );
            }
            world.holds().await;
        }
    });
}

/// `approvals.deciders`: who is not named may not decide, whatever else the key may.
#[test]
fn an_agent_names_who_decides() {
    run(60, async {
        let world = World::start(Db::Sqlite, |stubs| {
            agent(
                stubs,
                GUARDED,
                "approvals = { default = \"always\", deciders = [\"boss\"] }\n",
            )
        })
        .await;
        let api = world.api();
        let (run, on) = paused(&world, &api, "named").await;
        api.decide(&run, &on, "approve", "d1")
            .await
            .assert_error(403, "decider_not_allowed");
        api.decide(&run, &on, "deny", "d1")
            .await
            .assert_error(403, "decider_not_allowed");
        assert_eq!(
            api.with_key(BOSS)
                .decide(&run, &on, "approve", "d1")
                .await
                .status(),
            200
        );
        // A replay is the decider's.
        is_replay(&api.with_key(BOSS).decide(&run, &on, "approve", "d1").await);
        api.decide(&run, &on, "approve", "d1")
            .await
            .assert_error(403, "decider_not_allowed");
        api.succeeded(&run).await;
        world.holds().await;
    });
}

/// S65, D166 to D173: prompts are answered by deliveries too; a wait that nobody will answer ends its run.
#[test]
fn waits_take_deliveries_and_events_and_can_be_given_up() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let ask = "{\"prompt\":\"How many?\",\"schema\":{\"type\":\"integer\"}}";
        let waits_for_input = async |input: &str| {
            let say = vec![Say::call("c1", "request_input", ask), Say::text("thanks")];
            world.stubs.llm.plays(input, say);
            let run = api.run(WORKER, input).await;
            api.waits_on(&run, "input", 1).await;
            let waits = api.all(&format!("/runs/{run}/waits")).await;
            assert_eq!((waits.len(), &waits[0]["status"]), (1, &json!("armed")));
            (run, waits[0].clone())
        };
        let (run, wait) = waits_for_input("by delivery").await;
        let path = format!("/runs/{run}/waits/{}", wait["id"].as_str().unwrap());
        let about = wait["correlation_id"].clone();
        let delivery = |id: &str, about: &Value, payload: Value| json!({"delivery_id": id, "correlation_id": about, "payload": payload});
        let deliver = async |body: Value| api.post(&format!("{path}/deliveries"), &body).await;
        deliver(delivery("e1", &json!("another"), json!(3)))
            .await
            .assert_error(409, "delivery_conflict");
        at_fault(
            &deliver(delivery("e1", &about, json!("x"))).await,
            422,
            "schema_violation",
            "payload",
        );
        at_fault(
            &deliver(delivery("", &about, json!(3))).await,
            400,
            "invalid_encoding",
            "delivery_id",
        );
        api.post(
            &format!("/runs/{run}/waits/wait_00/deliveries"),
            &delivery("e1", &about, json!(3)),
        )
        .await
        .assert_error(404, "wait_not_found");
        let accepted = deliver(delivery("e1", &about, json!(3))).await;
        assert_eq!(
            (
                accepted.status(),
                &accepted.json()["decision"],
                &accepted.json()["run"]["id"]
            ),
            (200, &json!("accepted"), &json!(run)),
            "{}",
            accepted.text()
        );
        for _ in 0..4 {
            is_replay(&deliver(delivery("e1", &about, json!(3))).await);
        }
        at_fault(
            &deliver(delivery("e1", &about, json!(4))).await,
            409,
            "delivery_conflict",
            "delivery_id",
        );
        let late = deliver(delivery("e2", &about, json!(4))).await;
        assert_eq!(
            (late.status(), &late.json()["decision"]),
            (200, &json!("superseded"))
        );
        api.succeeded(&run).await;
        assert_eq!(
            llm::told(&world.stubs.llm.requests_of("by delivery")[1])["c1"],
            "3"
        );

        // An event finds its wait; a key that may not answer people finds none.
        let nowhere = api
            .post("/events", &delivery("e1", &json!("nobody"), json!(1)))
            .await;
        nowhere.assert_error(409, "wait_not_armed");
        assert!(nowhere.header("retry-after").is_some());
        let (run, wait) = waits_for_input("by event").await;
        let event = delivery("e1", &wait["correlation_id"], json!(5));
        api.with_key(OWNER)
            .post("/events", &event)
            .await
            .assert_error(409, "wait_not_armed");
        let found = api.with_key(BOSS).post("/events", &event).await;
        assert_eq!(
            (found.status(), &found.json()["decision"]),
            (200, &json!("accepted")),
            "{}",
            found.text()
        );
        api.succeeded(&run).await;

        // The same event again is the same answer, for the wait that had it.
        is_replay(&api.with_key(BOSS).post("/events", &event).await);
        let changed = delivery("e1", &wait["correlation_id"], json!(6));
        at_fault(
            &api.post("/events", &changed).await,
            409,
            "delivery_conflict",
            "delivery_id",
        );
        api.with_key(OWNER)
            .post("/events", &event)
            .await
            .assert_error(409, "wait_not_armed");

        // Approvals are decided, not delivered to.
        let (paused, on) = paused(&world, &api, "no delivery").await;
        let hidden = on["id"].as_str().unwrap().replace("apr_", "wait_");
        let around = json!({"decision": "approve", "arguments_digest": on["arguments_digest"]});
        for about in [&json!(hidden), &json!("x")] {
            let body = delivery("e1", about, around.clone());
            api.post(&format!("/runs/{paused}/waits/{hidden}/deliveries"), &body)
                .await
                .assert_error(404, "wait_not_found");
            api.post("/events", &body)
                .await
                .assert_error(409, "wait_not_armed");
        }
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        api.decide(&paused, &on, "deny", "d1").await;
        api.succeeded(&paused).await;

        // Nobody will answer.
        let (run, wait) = waits_for_input("given up").await;
        let path = format!("/runs/{run}/waits/{}/cancel", wait["id"].as_str().unwrap());
        let body = json!({"cancel_id": "g1", "reason": "nobody knows", "evidence": "ticket 9"});
        at_fault(
            &api.post(&path, &json!({"cancel_id": "g1", "reason": "x", "evidence": " "}))
                .await,
            400,
            "invalid_request",
            "evidence",
        );
        send(&api, "POST", &path, &[("if-match", "\"1\"")], &body)
            .await
            .assert_error(409, "stale_token");
        let ended = api.post(&path, &body).await;
        assert_eq!(
            (
                ended.status(),
                &ended.json()["status"],
                &ended.json()["outcome"]["reason"]
            ),
            (200, &json!("cancelled"), &json!("wait_cancelled")),
            "{}",
            ended.text()
        );
        is_replay(&api.post(&path, &body).await);
        let late = api
            .post(
                &path.replace("/cancel", "/deliveries"),
                &delivery("e9", &wait["correlation_id"], json!(1)),
            )
            .await;
        assert_eq!(
            (late.status(), &late.json()["decision"]),
            (200, &json!("canceled")),
            "{}",
            late.text()
        );
        world.holds().await;
    });
}

/// S66, S67: two runs that wait for one thing are told apart by their waits, and a delivery outlives the process.
#[test]
fn an_event_that_several_runs_wait_for_is_for_none_of_them() {
    run(90, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let with = |name: &str, world: &World| {
            json!({
                "model": llm::MODEL, "durable": true,
                "tools": [{"name": name, "http": {"method": "POST", "url": world.stubs.tools.url("/confirm")}}],
            })
        };
        let api = world.api();
        let put = send(&api, "PUT", "/agents/revoked", &[], &with("confirm", &world)).await;
        assert_eq!(put.status(), 201, "{}", put.text());
        world.stubs.llm.asked.close();
        let mut runs = Vec::new();
        for input in ["one", "two"] {
            let say = vec![Say::call("c1", "confirm", "{}"), Say::text("confirmed")];
            world.stubs.llm.plays(input, say);
            runs.push(api.run("revoked", input).await);
        }
        world.stubs.llm.asked.reached(2).await;
        let put = send(&api, "PUT", "/agents/revoked", &[], &with("another", &world)).await;
        assert_eq!(put.status(), 201, "{}", put.text());
        world.stubs.llm.asked.open();
        let mut waits = Vec::new();
        for run in &runs {
            waits.extend(api.waits_on(run, "event", 1).await);
        }
        let about = waits[0]["correlation_id"].clone();
        assert_eq!(about, waits[1]["correlation_id"]);
        assert!(world.stubs.tools.calls("/confirm").is_empty());
        let event = json!({"delivery_id": "e1", "correlation_id": about, "payload": null});
        let refused = api.with_key(OWNER).post("/events", &event).await;
        refused.assert_error(409, "ambiguous_correlation");
        let mut named = waiting_named(&refused);
        let mut armed: Vec<(String, String)> = runs
            .iter()
            .zip(&waits)
            .map(|(run, on)| (run.clone(), on["id"].as_str().unwrap().to_owned()))
            .collect();
        named.sort();
        armed.sort();
        assert_eq!(named, armed);

        let path = format!(
            "/runs/{}/waits/{}/deliveries",
            runs[0],
            waits[0]["id"].as_str().unwrap()
        );
        let told = api.post(&path, &event).await;
        assert_eq!(
            (told.status(), &told.json()["decision"]),
            (200, &json!("accepted")),
            "{}",
            told.text()
        );
        world.kill_and_restart(0).await;
        let api = world.api();
        is_replay(&api.post(&path, &event).await);
        // It looked again, and waits for the next word.
        let again = api.waits_on(&runs[0], "event", 1).await;
        assert_ne!(again[0]["id"], waits[0]["id"]);
        assert_eq!(api.waits_on(&runs[1], "event", 1).await[0], waits[1]);
        let put = send(&api, "PUT", "/agents/revoked", &[], &with("confirm", &world)).await;
        assert_eq!(put.status(), 201, "{}", put.text());
        for run in &runs {
            api.succeeded(run).await;
        }
        assert_eq!(world.stubs.tools.calls("/confirm").len(), 2);
        world.holds().await;
    });
}

/// The runs and waits that an answer names.
fn waiting_named(answer: &Answer) -> Vec<(String, String)> {
    let named = answer.json()["error"]["waits"].clone();
    let text = |wait: &Value, name: &str| wait[name].as_str().unwrap().to_owned();
    named
        .as_array()
        .unwrap()
        .iter()
        .map(|wait| (text(wait, "run_id"), text(wait, "wait_id")))
        .collect()
}

/// A decision is acted on when it is told, not when the workers look the next time.
#[test]
fn a_decision_is_acted_on_at_once() {
    run(90, async {
        let options = Options {
            poll_interval: Duration::from_secs(20),
            ..Options::default()
        };
        let world = World::with(Db::Sqlite, options, all).await;
        let api = world.api();
        let mut runs = Vec::new();
        for n in 0..20 {
            runs.push(paused(&world, &api, &format!("soon {n}")).await);
        }
        let mut spans: Vec<Duration> = Vec::new();
        for (n, (run, on)) in runs.iter().enumerate() {
            let began = std::time::Instant::now();
            let answer = api.decide(run, on, "approve", "d1").await;
            assert_eq!(answer.status(), 200, "{}", answer.text());
            world.stubs.tools.called("/deploy", n + 1).await;
            spans.push(began.elapsed());
        }
        spans.sort();
        assert!(spans[10] < Duration::from_secs(1), "{spans:?}");
        world.holds().await;
    });
}
