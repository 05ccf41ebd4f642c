//! The contract of `/api/v1` read sentence by sentence: what a client may send besides what is meant, and what it is told.

use iop_tests::llm::{MODEL, Say};
use iop_tests::run;
use iop_tests::runs::agents::{FRAGILE, GUARDED, WORKER, all};
use iop_tests::runs::{Api, BOSS, Db, OWNER, Options, Sse, World, encode};
use iop_tests::tool_stub::Answer as ToolAnswer;
use serde_json::{Value, json};

/// What a key without the role sends: nothing of it would be taken from anybody.
const WRONG: [&[u8]; 4] = [b"", b"{", b"\xff", b"{\"x\":1}"];

async fn send(api: &Api, method: &str, path: &str, body: &[u8]) -> iop_tests::client::Answer {
    let path = format!("/api/v1{path}");
    api.client.request(method, &path, &[], body).await
}

#[test]
fn who_may_not_ask_is_told_that_and_nothing_of_what_was_asked() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let (owner, boss) = (world.api().with_key(OWNER), world.api().with_key(BOSS));
        let cases = [
            (&owner, "PUT", "/agents/x"),
            (&owner, "PUT", "/agents/x%20y"),
            (&boss, "PUT", "/agents/x"),
            (&owner, "DELETE", "/agents/absent"),
            (&owner, "GET", "/agents/absent"),
            (&owner, "GET", "/agents?limit=0"),
            (&owner, "GET", "/nodes?x=1"),
            (&boss, "POST", "/runs"),
            (&boss, "POST", "/runs?wait=soon"),
            (&owner, "POST", "/runs/absent/approvals/absent"),
            (&owner, "POST", "/runs/absent/inputs/absent"),
            (&owner, "POST", "/runs/absent/waits/absent/deliveries"),
            (&owner, "POST", "/runs/absent/waits/absent/cancel"),
            (&owner, "POST", "/runs/absent/activities/absent/reconcile"),
            (&owner, "POST", "/runs/absent/activities/absent/resolve"),
            (&owner, "DELETE", "/runs/absent"),
            (&boss, "DELETE", "/runs/absent"),
        ];
        for (api, method, path) in cases {
            for body in WRONG {
                let answer = send(api, method, path, body).await;
                assert_eq!(answer.status(), 403, "{method} {path}: {}", answer.text());
                assert_eq!(answer.json()["error"]["code"], "permission_denied");
            }
        }
        let nobody = world.api().with_key("sk-nobody");
        for (_, method, path) in cases {
            let answer = send(&nobody, method, path, b"{").await;
            answer.assert_error(401, "invalid_api_key");
        }
    });
}

/// A run that waits for a decision, and its approval as `waiting_on` has it.
async fn paused(world: &World, api: &Api, input: &str) -> (String, Value) {
    let say = vec![Say::call("c1", "deploy", "{\"to\":\"eu\"}"), Say::text("done")];
    world.stubs.llm.plays(input, say);
    let run = api.run(GUARDED, input).await;
    let on = api.waits_on(&run, "approval", 1).await;
    // It is listed as soon as it is armed; the run has its revision when it is parked.
    api.until(&run, &["waiting"]).await;
    (run, on[0].clone())
}

#[test]
fn what_is_asked_of_one_revision_is_not_done_to_another() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let matching = async |method: &str, path: &str, tag: &str, body: &Value| {
            let path = format!("/api/v1{path}");
            let body = if body.is_null() {
                Vec::new()
            } else {
                body.to_string().into_bytes()
            };
            api.client
                .request(method, &path, &[("if-match", tag)], &body)
                .await
        };
        let (id, approval) = paused(&world, &api, "by decision").await;
        let seen = api.seen_run(&id).await;
        let tag = format!("\"{}\"", seen["revision"].as_str().unwrap());
        let decide = format!("/runs/{id}/approvals/{}", approval["id"].as_str().unwrap());
        let decision = json!({"decision": "approve", "decision_id": "d", "arguments_digest": approval["arguments_digest"]});
        let cancel = json!({"reason": "enough", "cancel_id": "c"});
        let cancel_path = format!("/runs/{id}/cancel");
        for (method, path, body) in [
            ("POST", &decide, &decision),
            ("POST", &cancel_path, &cancel),
            ("DELETE", &format!("/runs/{id}"), &Value::Null),
        ] {
            let stale = matching(method, path, "\"1\"", body).await;
            assert_eq!(stale.status(), 409, "{path}: {}", stale.text());
            let error = &stale.json()["error"];
            assert_eq!(
                (&error["code"], &error["current_resume_token"], &error["run_id"]),
                (&json!("stale_token"), &seen["resume_token"], &json!(id)),
                "{path}"
            );
            for wrong in ["*", "1", "\"x\"", "\"1\", \"2\""] {
                let answer = matching(method, path, wrong, body).await;
                assert_eq!(answer.status(), 400, "{path} {wrong}: {}", answer.text());
                assert_eq!(answer.json()["error"]["param"], "If-Match");
            }
        }
        assert_eq!(api.seen_run(&id).await["status"], "waiting");
        assert_eq!(matching("POST", &decide, &tag, &decision).await.status(), 200);
        api.succeeded(&id).await;
        // What was said is answered again, whatever became of the run.
        let again = matching("POST", &decide, &tag, &decision).await;
        assert_eq!(
            (again.status(), again.header("idempotency-replayed")),
            (200, Some("true"))
        );
        matching("DELETE", &format!("/runs/{id}"), &tag, &Value::Null)
            .await
            .assert_error(409, "stale_token");

        let (id, _) = paused(&world, &api, "by cancel").await;
        let tag = format!("\"{}\"", api.seen_run(&id).await["revision"].as_str().unwrap());
        for replayed in [None, Some("true")] {
            let answer = matching("POST", &format!("/runs/{id}/cancel"), &tag, &cancel).await;
            assert_eq!(
                (answer.status(), answer.header("idempotency-replayed")),
                (200, replayed),
                "{}",
                answer.text()
            );
        }
        let tag = format!("\"{}\"", api.seen_run(&id).await["revision"].as_str().unwrap());
        let gone = matching("DELETE", &format!("/runs/{id}"), &tag, &Value::Null).await;
        assert_eq!(gone.status(), 204);

        let ask = Say::call("c1", "request_input", "{\"prompt\":\"How many?\"}");
        for (input, room, body) in [
            ("by answer", "", json!({"decision_id": "i", "value": 1})),
            (
                "by delivery",
                "/deliveries",
                json!({"delivery_id": "i", "payload": 1}),
            ),
        ] {
            let say = vec![ask.clone(), Say::text("thanks")];
            world.stubs.llm.plays(input, say);
            let id = api.run(WORKER, input).await;
            let wait = api.waits_on(&id, "input", 1).await[0]["id"].clone();
            let wait = wait.as_str().unwrap();
            api.until(&id, &["waiting"]).await;
            let (path, body) = if room.is_empty() {
                (format!("/runs/{id}/inputs/{wait}"), body)
            } else {
                let mut body = body;
                body["correlation_id"] = json!(wait);
                (format!("/runs/{id}/waits/{wait}{room}"), body)
            };
            let tag = format!("\"{}\"", api.seen_run(&id).await["revision"].as_str().unwrap());
            let stale = matching("POST", &path, "\"1\"", &body).await;
            stale.assert_error(409, "stale_token");
            assert_eq!(matching("POST", &path, &tag, &body).await.status(), 200, "{path}");
            api.succeeded(&id).await;
            let again = matching("POST", &path, &tag, &body).await;
            assert_eq!(
                (again.status(), again.header("idempotency-replayed")),
                (200, Some("true")),
                "{path}"
            );
        }
    });
}

#[test]
fn a_member_that_may_be_left_out_may_be_null() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let body = json!({"agent": WORKER, "flow": null, "input": "hi", "run_id": null, "metadata": null,
            "deadline": null, "budgets": null, "durable": null, "on_disconnect": null});
        let made = api.post("/runs?wait=20s", &body).await;
        assert_eq!(made.status(), 200, "{}", made.text());
        let made = made.json();
        assert_eq!(
            (&made["metadata"], &made["status"]),
            (&json!({}), &json!("succeeded"))
        );
        let path = format!("/runs/{}/resume", made["id"].as_str().unwrap());
        let mut resume = json!({"resume_token": made["resume_token"], "state_overlay": null,
            "resume_target": null, "metadata": null, "on_disconnect": null});
        assert_eq!(api.post(&path, &resume).await.status(), 200);
        // Nobody follows the run: whose leaving would end it?
        resume["on_disconnect"] = json!("cancel");
        let refused = api.post(&path, &resume).await;
        assert_eq!(
            (refused.status(), &refused.json()["error"]["param"]),
            (400, &json!("on_disconnect"))
        );
    });
}

#[test]
fn every_event_of_a_stream_says_its_life() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world.stubs.llm.next(vec![Say::status(503)]);
        world.stubs.llm.plays("twice", vec![Say::text("one two three")]);
        let run = api.run(FRAGILE, "twice").await;
        let failed = api.over(&run).await;
        assert_eq!(
            (&failed["status"], &failed["life"]),
            (&json!("failed"), &json!(1))
        );
        let body = json!({"resume_token": failed["resume_token"]}).to_string();
        let path = format!("/api/v1/runs/{run}/resume");
        let headers = [("accept", "text/event-stream")];
        let conn = api.client.start("POST", &path, &headers, body.as_bytes()).await;
        let mut stream = Sse::of(conn.unwrap()).await;
        let told = stream.rest().await;
        for name in ["run.snapshot", "run.resumed", "run.turn.delta", "run.succeeded"] {
            assert!(told.iter().any(|event| event.name == name), "{name}: {told:?}");
        }
        for event in &told {
            assert_eq!(event.body["life"], 2, "{event:?}");
        }
        let first = api.stream(&run, Some(0)).await.rest().await;
        let lives: Vec<u64> = first.iter().map(|e| e.body["life"].as_u64().unwrap()).collect();
        assert_eq!((lives[0], lives[1], lives.last()), (2, 1, Some(&1)), "{first:?}");
    });
}

/// The pages of a list, walked to its end with a cursor; each but the last has rows and no more than asked for.
async fn pages(api: &Api, path: &str, limit: usize) -> Vec<Vec<Value>> {
    let sign = if path.contains('?') { '&' } else { '?' };
    let (mut pages, mut after) = (Vec::new(), String::new());
    loop {
        let page = api.seen(&format!("{path}{sign}limit={limit}{after}")).await;
        let rows = page["data"].as_array().unwrap().clone();
        let more = page["has_more"].as_bool().unwrap();
        assert_eq!(more, page["next_after"].is_string(), "{path}: {page}");
        assert!(
            rows.len() <= limit && !(rows.is_empty() && more),
            "{path}: {} rows, more: {more}",
            rows.len()
        );
        pages.push(rows);
        let Some(next) = page["next_after"].as_str() else {
            return pages;
        };
        after = format!("&after={}", encode(next));
    }
}

#[test]
fn what_a_run_waits_for_is_listed_in_pages_as_everything_is() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let ask = "{\"prompt\":\"?\"}";
        let calls = [
            ("a", "deploy", "{}"),
            ("b", "request_input", ask),
            ("c", "deploy", "{}"),
            ("d", "request_input", ask),
            ("e", "deploy", "{}"),
        ];
        world
            .stubs
            .llm
            .plays("many", vec![Say::calls(&calls), Say::text("done")]);
        let run = api.run(GUARDED, "many").await;
        api.waits_on(&run, "approval", 3).await;
        let other = paused(&world, &api, "another").await.0;
        for (room, count) in [("approvals", 3), ("waits", 2)] {
            let path = format!("/runs/{run}/{room}");
            let whole = pages(&api, &path, 200).await.concat();
            assert_eq!(whole.len(), count);
            for limit in [1, 2] {
                let walked = pages(&api, &path, limit).await;
                assert_eq!(walked.len(), count.div_ceil(limit), "{path}");
                assert_eq!(walked.concat(), whole, "{path}");
            }
            for wrong in ["limit=0", "limit=201", "limit=", "after=", "after=zz", "x=1"] {
                let answer = api.get(&format!("{path}?{wrong}")).await;
                let param = wrong.split('=').next().unwrap();
                assert_eq!(
                    (answer.status(), &answer.json()["error"]["param"]),
                    (400, &json!(param)),
                    "{path}?{wrong}"
                );
            }
        }
        // A cursor says a place, not whose list it is of.
        let next = api.seen(&format!("/runs/{run}/approvals?limit=1")).await["next_after"].clone();
        let next = encode(next.as_str().unwrap());
        let answer = api.get(&format!("/runs/{other}/approvals?after={next}")).await;
        assert_eq!(answer.status(), 200);
        api.get(&format!("/approvals?after={next}"))
            .await
            .assert_error(400, "invalid_request");
    });
}

#[test]
fn a_page_of_runs_is_bounded_in_bytes_and_the_list_is_whole() {
    const LONG: usize = 3 << 20;
    run(120, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let api = world.api();
            world.stubs.llm.plays("long", vec![Say::text(&"x".repeat(LONG))]);
            let mut made = Vec::new();
            for n in 0..5 {
                let input = if n == 2 { "short" } else { "long" };
                let run = api.run(WORKER, input).await;
                api.succeeded(&run).await;
                made.push(run);
            }
            let pages = pages(&api, "/runs", 200).await;
            let listed: Vec<&str> = pages
                .iter()
                .flatten()
                .map(|run| run["id"].as_str().unwrap())
                .collect();
            assert_eq!(listed, made);
            assert_eq!(pages.iter().map(Vec::len).collect::<Vec<_>>(), [3, 2]);
            let output = pages[1][1]["outcome"]["output"].as_str().unwrap();
            assert_eq!(output.len(), LONG);
        }
    });
}

/// Whoever stops at an empty page still finds what there is.
#[test]
fn an_approval_is_found_behind_thousands_that_do_not_fit() {
    const CALLS: usize = 200;
    const RUNS: usize = 11;
    run(240, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let ids: Vec<String> = (0..CALLS).map(|n| format!("c{n}")).collect();
        let calls: Vec<(&str, &str, &str)> = ids.iter().map(|id| (id.as_str(), "deploy", "{}")).collect();
        world.stubs.llm.plays("much", vec![Say::calls(&calls)]);
        for _ in 0..RUNS {
            let run = api.run(GUARDED, "much").await;
            api.waits_on(&run, "approval", CALLS).await;
            let cancel = json!({"reason": "enough", "cancel_id": "c"});
            let answer = api.post(&format!("/runs/{run}/cancel"), &cancel).await;
            assert_eq!(answer.json()["status"], "cancelled", "{}", answer.text());
        }
        let (run, approval) = paused(&world, &api, "denied").await;
        assert_eq!(api.decide(&run, &approval, "deny", "d").await.status(), 200);
        for limit in [1, 200] {
            let found = pages(&api, "/approvals?status=denied", limit).await;
            assert_eq!(found[0][0]["id"], approval["id"]);
            assert_eq!(found.concat().len(), 1);
        }
        let cancelled = pages(&api, "/approvals?status=cancelled", 200).await;
        assert_eq!(cancelled.concat().len(), CALLS * RUNS);
    });
}

#[test]
fn what_is_too_large_is_refused_before_anything_is_stored_and_named() {
    run(60, async {
        let options = Options::default()
            .line("runs", "max_result = \"64KiB\"")
            .line("runs", "max_state = \"128KiB\"");
        let world = World::with(Db::Sqlite, options, all).await;
        let api = world.api();
        let long = "x".repeat(65 << 10);
        let too_large = async |path: &str, body: Value, field: &str| {
            let answer = api.post(path, &body).await;
            let error = answer.json()["error"].clone();
            assert_eq!(
                (
                    answer.status(),
                    &error["code"],
                    &error["param"],
                    &error["retryable"]
                ),
                (413, &json!("payload_too_large"), &json!(field), &json!(false)),
                "{path}: {}",
                answer.text()
            );
        };
        let create = |input: &str| json!({"agent": WORKER, "input": input, "run_id": "long"});
        too_large("/runs", create(&long), "input").await;
        too_large("/runs", create(&"x".repeat(200 << 10)), "input").await;
        api.get("/runs/long").await.assert_error(404, "run_not_found");
        let fits = "x".repeat((64 << 10) - 2);
        assert_eq!(api.post("/runs", &create(&fits)).await.status(), 202);
        api.succeeded("long").await;

        let calls = [
            ("a", "charge", "{\"amount\":500}"),
            ("b", "request_input", "{\"prompt\":\"?\"}"),
        ];
        let say = vec![Say::calls(&calls), Say::text("done")];
        world.stubs.llm.plays("asks", say);
        let run = api.run(GUARDED, "asks").await;
        let approval = api.waits_on(&run, "approval", 1).await[0].clone();
        let edit = json!({"decision": "edit", "decision_id": "d", "edited_arguments": {"amount": 1, "why": long},
            "arguments_digest": approval["arguments_digest"]});
        let decide = format!("/runs/{run}/approvals/{}", approval["id"].as_str().unwrap());
        too_large(&decide, edit, "edited_arguments").await;
        let wait = api.waits_on(&run, "input", 1).await[0]["id"].clone();
        let wait = wait.as_str().unwrap();
        let answer = json!({"decision_id": "d", "value": long});
        too_large(&format!("/runs/{run}/inputs/{wait}"), answer, "value").await;
        let delivery = json!({"delivery_id": "d", "correlation_id": wait, "payload": long});
        too_large(
            &format!("/runs/{run}/waits/{wait}/deliveries"),
            delivery.clone(),
            "payload",
        )
        .await;
        too_large("/events", delivery, "payload").await;
        // Nothing of it was recorded: the ids are free.
        let seen = api.seen_run(&run).await;
        assert_eq!(seen["waiting_on"].as_array().unwrap().len(), 2, "{seen}");
        let approved = api.decide(&run, &approval, "approve", "d").await;
        assert_eq!(approved.status(), 200, "{}", approved.text());
        let answered = api
            .post(
                &format!("/runs/{run}/inputs/{wait}"),
                &json!({"decision_id": "d", "value": 1}),
            )
            .await;
        assert_eq!(answered.status(), 200, "{}", answered.text());
        api.succeeded(&run).await;
    });
}

#[test]
fn a_page_of_calls_is_bounded_in_bytes_and_the_list_is_whole() {
    const LONG: usize = 3 << 20;
    run(120, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let long = "x".repeat(LONG);
        world
            .stubs
            .tools
            .always("/items/long", ToolAnswer::bytes(200, long.as_bytes()));
        let (long, short) = ("{\"sku\":\"long\"}", "{\"sku\":\"short\"}");
        let calls = [
            ("a", "lookup", long),
            ("b", "lookup", long),
            ("c", "lookup", short),
            ("d", "lookup", long),
            ("e", "lookup", short),
        ];
        let say = vec![Say::calls(&calls), Say::text("done")];
        world.stubs.llm.plays("look", say);
        let run = api.run(WORKER, "look").await;
        api.succeeded(&run).await;
        let path = format!("/runs/{run}/activities");
        let walked = pages(&api, &path, 200).await;
        let whole = walked.concat();
        let mut called: Vec<&str> = whole.iter().map(|a| a["call_id"].as_str().unwrap()).collect();
        called.sort_unstable();
        assert_eq!((walked.len(), called), (2, vec!["a", "b", "c", "d", "e"]));
        for limit in [1, 2, 3] {
            assert_eq!(pages(&api, &path, limit).await.concat(), whole);
        }
    });
}

#[test]
fn an_operator_decides_in_a_response_and_begins_nothing() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let (owner, boss) = (world.api().with_key(OWNER), world.api().with_key(BOSS));
        let say = vec![Say::call("c1", "deploy", "{}"), Say::text("it is done")];
        world.stubs.llm.plays("ship", say);
        let model = format!("agent:{GUARDED}");
        let body = json!({"model": model, "input": "ship"});
        let respond = async |api: &Api, body: &Value| api.client.post("/v1/responses", body).await;
        let first = respond(&owner, &body).await;
        assert_eq!(first.status(), 200, "{}", first.text());
        let first = first.json();
        let asked = &first["output"].as_array().unwrap().last().unwrap()["id"];
        let decided = json!({"type": "mcp_approval_response", "approval_request_id": asked, "approve": true});
        let approve = json!({"model": model, "previous_response_id": first["id"], "input": [decided]});

        let message = json!([{"role": "user", "content": "ship"}]);
        for (path, body) in [
            ("responses", body.clone()),
            ("responses", json!({"model": MODEL, "input": "hi"})),
            ("responses", json!({"model": "absent", "input": "hi"})),
            ("chat/completions", json!({"model": model, "messages": message})),
            ("chat/completions", json!({"model": MODEL, "messages": message})),
        ] {
            let refused = boss.client.post(&format!("/v1/{path}"), &body).await;
            assert_eq!(refused.status(), 403, "{path} {body}: {}", refused.text());
        }
        respond(&owner, &approve)
            .await
            .assert_error(403, "permission_denied");
        let second = respond(&boss, &approve).await;
        assert_eq!(second.status(), 200, "{}", second.text());
        assert!(second.text().contains("it is done"), "{}", second.text());
        let run = first["metadata"]["iop_run_id"].as_str().unwrap();
        let approvals = boss.all(&format!("/runs/{run}/approvals")).await;
        assert_eq!(approvals[0]["decided_by"], "boss");
        // What would go on with another run is not for a decider.
        let more = json!({"model": model, "previous_response_id": second.json()["id"], "input": "again"});
        respond(&boss, &more).await.assert_error(403, "permission_denied");
        assert_eq!(boss.all("/runs").await.len(), 1);
    });
}
