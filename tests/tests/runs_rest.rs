//! Runs over REST: accepted, listed, watched, read. Idempotency, events as pages and as streams, versions of agents.

use std::time::Duration;

use iop_tests::client::Answer;
use iop_tests::llm::Say;
use iop_tests::runs::agents::{FRAGILE, GUARDED, WORKER, all};
use iop_tests::runs::{Api, BOSS, Db, OWNER, World, encode};
use iop_tests::{eventually, run};
use serde_json::{Value, json};

const SSE: (&str, &str) = ("accept", "text/event-stream");

fn input(text: &str) -> Value {
    json!({ "agent": WORKER, "input": text })
}

async fn put(api: &Api, name: &str, spec: &Value) -> Answer {
    let path = format!("/api/v1/agents/{name}");
    api.client
        .request("PUT", &path, &[], spec.to_string().as_bytes())
        .await
}

async fn delete(api: &Api, name: &str) -> Answer {
    let path = format!("/api/v1/agents/{name}");
    api.client.request("DELETE", &path, &[], b"").await
}

#[test]
fn a_run_is_accepted_watched_and_read() {
    run(120, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let api = world.api();
            world.stubs.llm.plays(
                "buy",
                vec![
                    Say::call("call_1", "lookup", "{\"sku\": \"a b\"}"),
                    Say::text("bought it"),
                ],
            );
            let body = json!({ "agent": WORKER, "input": "buy", "metadata": { "team": "x" }, "budgets": { "turns": 5 } });
            let answer = api.post("/runs", &body).await;
            assert_eq!(answer.status(), 202, "{}", answer.text());
            let made = answer.json();
            let id = made["id"].as_str().unwrap();
            assert_eq!(
                answer.header("location"),
                Some(format!("/api/v1/runs/{id}").as_str())
            );
            let tag = format!("\"{}\"", made["revision"].as_str().unwrap());
            assert_eq!(answer.header("etag"), Some(tag.as_str()));
            for (member, value) in [
                ("object", json!("run")),
                ("kind", json!("agent")),
                ("agent", json!(WORKER)),
                ("life", json!(1)),
                ("parent_run_id", json!(null)),
                ("root_run_id", json!(id)),
                ("outcome", json!(null)),
                ("metadata", json!({ "team": "x" })),
                ("guarantee", json!("at_least_once_with_stable_keys")),
                ("blocked", json!(null)),
            ] {
                assert_eq!(made[member], value, "{member}");
            }
            let done = api.succeeded(id).await;
            assert_eq!(done["budgets"]["turns"], json!({ "used": 2, "limit": 5 }));
            assert_eq!(done["outcome"]["output"], "bought it");
            assert_eq!((&done["resumable"], &done["step"]), (&json!(false), &json!(null)));
            let result = api.get(&format!("/runs/{id}/result")).await;
            let run_text = api.get(&format!("/runs/{id}")).await.text();
            assert!(
                run_text.contains(&result.text()),
                "the outcome is not the same bytes everywhere"
            );

            let steps = api
                .all(&format!("/runs/{id}/steps?limit=1").replace("?limit=1", ""))
                .await;
            let told: Vec<_> = steps
                .iter()
                .map(|s| (s["name"].as_str().unwrap(), s["kind"].as_str().unwrap()))
                .collect();
            assert_eq!(
                told,
                [
                    ("turn-1", "model_turn"),
                    ("turn-1", "tool_call"),
                    ("turn-2", "model_turn")
                ]
            );
            let turns = api.all(&format!("/runs/{id}/turns")).await;
            assert_eq!(turns.len(), 2);
            assert_eq!(turns[0]["n"], 1);
            assert!(
                turns[0]["request_digest"]
                    .as_str()
                    .unwrap()
                    .starts_with("sha256:")
            );
            assert_eq!(
                turns[0]["response"]["tool_calls"][0]["arguments"],
                "{\"sku\": \"a b\"}"
            );
            assert_eq!(turns[1]["response"]["content"], "bought it");
            let first = api.seen(&format!("/runs/{id}/turns?limit=1")).await;
            assert_eq!(
                (&first["has_more"], &first["next_after"]),
                (&json!(true), &json!("1"))
            );

            let history = api.all(&format!("/runs/{id}/history")).await;
            let revisions: Vec<u64> = history
                .iter()
                .map(|h| h["revision"].as_str().unwrap().parse().unwrap())
                .collect();
            let count = revisions.len() as u64;
            assert_eq!(revisions, (1..=count).collect::<Vec<_>>());
            let (first, last) = (&history[0], history.last().unwrap());
            assert_eq!(done["revision"], last["revision"]);
            let page = api.seen(&format!("/runs/{id}/history?limit=2&after=1")).await;
            assert_eq!(page["data"], json!(history[1..3]));
            assert_eq!(
                (&page["has_more"], &page["next_after"]),
                (&json!(true), &json!("3"))
            );
            let digest = last["digest"].as_str().unwrap();
            let path = format!("/runs/{id}/history/{count}");
            let exact = api.seen(&format!("{path}?digest={digest}")).await;
            assert_eq!(exact["digest"], digest);
            let other = first["digest"].as_str().unwrap();
            api.get(&format!("{path}?digest={other}"))
                .await
                .assert_error(409, "digest_mismatch");
            api.get(&path).await.assert_error(400, "invalid_request");
            for wrong in ["0", "-1", "01", "x"] {
                let answer = api
                    .get(&format!("/runs/{id}/history/{wrong}?digest={digest}"))
                    .await;
                answer.assert_error(400, "invalid_request");
            }
            let absent = format!("/runs/{id}/history/{}?digest={digest}", count + 1);
            api.get(&absent).await.assert_error(410, "checkpoint_unavailable");
            world.holds().await;
        }
    });
}

#[test]
fn the_same_key_is_the_same_run_and_another_body_is_a_conflict() {
    run(120, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let api = world.api();
            let key = [("idempotency-key", "k-1")];
            let once = input("once");
            let twins = (0..8).map(|_| api.create_with(&once, &key));
            let answers = futures_util::future::join_all(twins).await;
            let id = answers[0].json()["id"].as_str().unwrap().to_owned();
            let mut fresh = 0;
            for answer in &answers {
                assert_eq!(answer.json()["id"], json!(id));
                match (answer.status(), answer.header("idempotency-replayed")) {
                    (202, None) => fresh += 1,
                    (200, Some("true")) => {}
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(fresh, 1);
            api.succeeded(&id).await;
            let late = api.create_with(&input("once"), &key).await;
            assert_eq!(
                (late.status(), late.json()["status"].as_str()),
                (200, Some("succeeded"))
            );
            api.create_with(&input("twice"), &key)
                .await
                .assert_error(409, "idempotency_conflict");
            // Keys belong to their API key.
            let owner = api.with_key(OWNER).create_with(&input("twice"), &key).await;
            assert_eq!(owner.status(), 202, "{}", owner.text());
            let bare = (api.run(WORKER, "x").await, api.run(WORKER, "x").await);
            assert_ne!(bare.0, bare.1);
            api.create_with(&input("x"), &[("idempotency-key", "")])
                .await
                .assert_error(400, "invalid_request");

            let named = json!({ "agent": WORKER, "input": "x", "run_id": "mine/ü" });
            let first = api.post("/runs", &named).await;
            assert_eq!(
                (first.status(), first.header("location")),
                (202, Some("/api/v1/runs/mine%2F%C3%BC"))
            );
            let again = api.post("/runs", &named).await;
            assert_eq!(
                (again.status(), again.header("idempotency-replayed")),
                (200, Some("true"))
            );
            let other = json!({ "agent": WORKER, "input": "y", "run_id": "mine/ü" });
            api.post("/runs", &other)
                .await
                .assert_error(409, "idempotency_conflict");
            assert_eq!(api.seen_run("mine%2F%C3%BC").await["id"], "mine/ü");
            world.stubs.llm.asked(1).await;
        }
    });
}

#[test]
fn lists_are_filtered() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world.stubs.llm.plays(
            "ship",
            vec![Say::call("call_1", "deploy", "{}"), Say::text("shipped")],
        );
        let waits = api.run(GUARDED, "ship").await;
        let ends = api.run(WORKER, "hi").await;
        api.waits_on(&waits, "approval", 1).await;
        api.succeeded(&ends).await;
        let ids = async |query: &str| {
            let found = api.all(&format!("/runs?{query}")).await;
            found
                .iter()
                .map(|run| run["id"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(ids("status=waiting").await, [&*waits]);
        assert_eq!(ids("waiting_kind=approval").await, [&*waits]);
        assert_eq!(ids("status=succeeded").await, [&*ends]);
        assert_eq!(ids(&format!("agent={WORKER}")).await, [&*ends]);
        assert!(ids("flow=anything").await.is_empty());
        assert!(ids(&format!("parent_id={waits}")).await.is_empty());
        assert!(ids("waiting_kind=timer").await.is_empty());
        assert!(ids("due_before=2000-01-01T00:00:00Z").await.is_empty());
        api.get("/runs?agent=a&flow=f")
            .await
            .assert_error(400, "invalid_request");

        let waiting = api.get(&format!("/runs/{waits}/result")).await;
        waiting.assert_error(409, "run_waiting");
        assert_eq!(waiting.json()["error"]["waiting_on"][0]["tool"], "deploy");
        assert_eq!(waiting.json()["error"]["run_id"], json!(waits));
    });
}

#[test]
fn a_waiting_run_shows_the_exact_call() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world.stubs.llm.plays(
            "ship",
            vec![
                Say::call("call_7", "deploy", "{\"region\": \"eu\"}"),
                Say::text("shipped"),
            ],
        );
        let run = api.run(GUARDED, "ship").await;
        let on = api.waits_on(&run, "approval", 1).await.remove(0);
        let id = on["id"].as_str().unwrap();
        assert_eq!(
            (&on["tool"], &on["call_id"], &on["arguments"]),
            (&json!("deploy"), &json!("call_7"), &json!({ "region": "eu" }))
        );
        assert_eq!(on["url"], format!("/api/v1/runs/{run}/approvals/{id}"));
        assert!(on["arguments_digest"].as_str().unwrap().starts_with("sha256:"));
        let seen = api.until(&run, &["waiting"]).await;
        assert_eq!(
            (&seen["step"], &seen["resumable"]),
            (&json!("turn-1"), &json!(true))
        );
        let pending = api.all(&format!("/runs/{run}/steps")).await;
        assert_eq!(pending.last().unwrap()["status"], "waiting");
        let waited = api.seen(&format!("/runs/{run}/wait?timeout=30s")).await;
        assert_eq!(waited["status"], "waiting");
    });
}

#[test]
fn a_creation_can_wait_for_its_run() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let answer = api.post("/runs?wait=30s", &input("quick")).await;
        assert_eq!(
            (answer.status(), answer.json()["status"].as_str()),
            (200, Some("succeeded")),
            "{}",
            answer.text()
        );
        world.stubs.llm.asked.close();
        let slow = api.post("/runs?wait=200ms", &input("slow")).await;
        assert_eq!(slow.status(), 202, "{}", slow.text());
        let id = slow.json()["id"].as_str().unwrap().to_owned();
        let waited = api.seen(&format!("/runs/{id}/wait?timeout=100ms")).await;
        assert!(
            ["queued", "running"].contains(&waited["status"].as_str().unwrap()),
            "{waited}"
        );
        api.get(&format!("/runs/{id}/result"))
            .await
            .assert_error(409, "run_busy");
        world.stubs.llm.asked.open();
        let waited = api.seen(&format!("/runs/{id}/wait?timeout=30s")).await;
        assert_eq!(waited["status"], "succeeded");
        api.post("/runs?wait=1h", &input("x"))
            .await
            .assert_error(400, "invalid_request");
    });
}

#[test]
fn a_stream_begins_with_a_snapshot_and_ends_with_the_one_terminal_event() {
    run(120, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let api = world.api();
            world.stubs.llm.plays(
                "buy",
                vec![
                    Say::call("call_1", "lookup", "{\"sku\":\"a\"}"),
                    Say::text("one two three"),
                ],
            );
            let run = api.run(WORKER, "buy").await;
            let events = api.stream(&run, Some(0)).await.rest().await;
            let done = api.succeeded(&run).await;
            let (first, last) = (&events[0], events.last().unwrap());
            assert_eq!((first.id, first.name.as_str()), (None, "run.snapshot"));
            assert_eq!(first.body["data"]["run"]["id"], json!(run));
            assert_eq!(first.body["data"].get("gap"), None);
            assert_eq!(
                (last.name.as_str(), &last.body["data"]["outcome"]),
                ("run.succeeded", &done["outcome"])
            );
            let stored: Vec<u64> = events.iter().filter_map(|e| e.id).collect();
            assert_eq!(stored, (1..=stored.len() as u64).collect::<Vec<_>>());
            for event in events.iter().filter(|e| e.id.is_some()) {
                assert_eq!(
                    (event.body["seq"].as_u64(), &event.body["event"]),
                    (event.id, &json!(event.name))
                );
            }
            let page = api.events(&run).await;
            let streamed: Vec<&Value> = events
                .iter()
                .filter(|e| e.id.is_some())
                .map(|e| &e.body)
                .collect();
            assert_eq!(streamed, page.iter().collect::<Vec<_>>());
            let names: Vec<&str> = page.iter().map(|e| e["event"].as_str().unwrap()).collect();
            for name in [
                "run.created",
                "run.started",
                "run.step.started",
                "run.turn.completed",
                "run.tool.started",
                "run.tool.completed",
                "run.step.completed",
            ] {
                assert!(names.contains(&name), "{name}: {names:?}");
            }
            assert_eq!(page[2]["data"]["step"], "turn-1");

            let middle = api.stream(&run, Some(3)).await.rest().await;
            assert_eq!(
                middle.iter().filter_map(|e| e.id).collect::<Vec<_>>(),
                stored[3..]
            );
            let over = api.stream(&run, None).await.rest().await;
            let told: Vec<&str> = over.iter().map(|e| e.name.as_str()).collect();
            assert_eq!(told, ["run.snapshot", "run.succeeded"]);
            let nothing_left = api.stream(&run, Some(stored.len() as u64)).await.rest().await;
            assert_eq!(nothing_left.len(), 1);
            let unknown = api.stream(&run, Some(10_000)).await.rest().await;
            assert_eq!(unknown[0].body["data"]["gap"], true);
            assert_eq!(unknown.last().unwrap().name, "run.succeeded");
            let bad = api
                .client
                .request(
                    "GET",
                    &format!("/api/v1/runs/{run}/events"),
                    &[SSE, ("last-event-id", "x")],
                    b"",
                )
                .await;
            bad.assert_error(400, "invalid_request");
        }
    });
}

#[test]
fn a_creation_streams_its_run_with_the_pieces_of_its_turns() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world.stubs.llm.plays("talk", vec![Say::text("one two three")]);
        let body = input("talk").to_string();
        let conn = api
            .client
            .start("POST", "/api/v1/runs", &[SSE], body.as_bytes())
            .await
            .unwrap();
        let mut stream = iop_tests::runs::Sse::of(conn).await;
        assert_eq!(stream.head.status, 200);
        assert_eq!(stream.head.header("content-type"), Some("text/event-stream"));
        let location = stream.head.header("location").unwrap().to_owned();
        let events = stream.rest().await;
        assert_eq!(events[0].name, "run.snapshot");
        assert_eq!(
            location,
            format!(
                "/api/v1/runs/{}",
                events[0].body["data"]["run"]["id"].as_str().unwrap()
            )
        );
        let deltas: Vec<&Value> = events
            .iter()
            .filter(|e| e.name == "run.turn.delta")
            .map(|e| &e.body)
            .collect();
        let text: String = deltas.iter().filter_map(|d| d["data"]["text"].as_str()).collect();
        assert_eq!(text, "one two three");
        assert!(deltas.iter().all(|d| d.get("seq").is_none()));
        assert_eq!(events[1].name, "run.created");
        let ends = events
            .iter()
            .filter(|e| e.body["data"]["outcome"].is_object())
            .count();
        assert_eq!((ends, events.last().unwrap().name.as_str()), (1, "run.succeeded"));
    });
}

#[test]
fn a_client_that_leaves_cancels_its_run_only_where_it_said_so() {
    run(120, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world.stubs.llm.asked.close();
        let mut runs = Vec::new();
        for on_disconnect in ["continue", "cancel"] {
            let body =
                json!({ "agent": WORKER, "input": "talk", "on_disconnect": on_disconnect }).to_string();
            let conn = api
                .client
                .start("POST", "/api/v1/runs", &[SSE], body.as_bytes())
                .await
                .unwrap();
            let mut stream = iop_tests::runs::Sse::of(conn).await;
            stream.until("run.step.started").await;
            let location = stream.head.header("location").unwrap();
            runs.push(location.rsplit('/').next().unwrap().to_owned());
        }
        let cancelled = api.until(&runs[1], &["cancelled"]).await;
        assert_eq!(cancelled["outcome"]["reason"], "cancelled");
        world.stubs.llm.asked.open();
        api.succeeded(&runs[0]).await;
    });
}

#[test]
fn a_stream_of_a_waiting_run_goes_on_with_its_decision_and_a_drain_ends_it() {
    run(120, async {
        let mut world = World::start(Db::Postgres, all).await;
        world.add_edge().await;
        let (here, there) = (world.api_of(0), world.api_of(1));
        world.stubs.llm.plays(
            "ship",
            vec![Say::call("call_1", "deploy", "{}"), Say::text("shipped")],
        );
        world
            .stubs
            .llm
            .plays("wait", vec![Say::call("call_1", "deploy", "{}")]);
        let run = here.run(GUARDED, "ship").await;
        here.waits_on(&run, "approval", 1).await;
        // From one edge the stream, to the other the decision.
        let mut stream = there.stream(&run, None).await;
        assert_eq!(stream.next().await.unwrap().name, "run.snapshot");
        here.approve(&run).await;
        let rest = stream.rest().await;
        assert_eq!(rest.last().unwrap().name, "run.succeeded");
        let seen: Vec<u64> = rest.iter().filter_map(|e| e.id).collect();
        assert!(seen.windows(2).all(|pair| pair[1] == pair[0] + 1), "{seen:?}");

        let parked = there.run(GUARDED, "wait").await;
        there.waits_on(&parked, "approval", 1).await;
        let mut stream = there.stream(&parked, None).await;
        assert_eq!(stream.next().await.unwrap().name, "run.snapshot");
        world.edges[1].process.signal("TERM");
        assert!(stream.rest().await.iter().all(|event| event.id.is_none()));
        let ended = world.edges[1].process.exit(Duration::from_secs(30)).await;
        assert!(ended.success(), "{ended}");
        assert_eq!(here.seen_run(&parked).await["status"], "waiting");
        world.edges.truncate(1);
    });
}

#[test]
fn agents_are_declared_in_versions_and_withdrawn() {
    run(120, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let api = world.api();
            let spec = |instructions: &str| json!({ "model": iop_tests::llm::MODEL, "durable": true, "instructions": instructions });
            let first = put(&api, "clerk", &spec("be brief")).await;
            assert_eq!(first.status(), 201, "{}", first.text());
            let body = first.json();
            assert_eq!(
                (&body["object"], &body["name"], &body["version"]),
                (&json!("agent"), &json!("clerk"), &json!(1))
            );
            assert_eq!(body["definition"]["instructions"], "be brief");
            let same = put(&api, "clerk", &spec("be brief")).await;
            assert_eq!(
                (same.status(), same.json()["digest"].as_str()),
                (200, body["digest"].as_str())
            );
            let second = put(&api, "clerk", &spec("be kind")).await;
            assert_eq!(
                (second.status(), second.json()["version"].as_u64()),
                (201, Some(2))
            );
            let versions = api.all("/agents/clerk/versions").await;
            let numbers: Vec<u64> = versions.iter().map(|v| v["version"].as_u64().unwrap()).collect();
            assert_eq!(numbers, [1, 2]);
            let names: Vec<String> = api
                .all("/agents")
                .await
                .iter()
                .map(|a| a["name"].as_str().unwrap().to_owned())
                .collect();
            assert_eq!(names, ["clerk", FRAGILE, GUARDED, WORKER]);

            for (spec, field) in [
                (json!({ "model": "m", "tols": [] }), "tols"),
                (json!({ "model": 5 }), "model"),
                (json!({ "model": "m", "tools": [{ "name": "x" }] }), "tools[0]"),
            ] {
                let refused = put(&api, "broken", &spec).await;
                refused.assert_error(422, "invalid_definition");
                let param = refused.json()["error"]["param"].as_str().unwrap().to_owned();
                assert!(param.starts_with(field), "{param} {field}");
            }
            // What may come later is no error, but it is said.
            assert_eq!(body["warnings"], json!([]), "{body}");
            let hopes = json!({
                "model": "absent-model", "approvals": { "deciders": ["stranger"] },
                "tools": [{ "name": "ask", "agent": { "name": "nobody" } }],
            });
            let hopeful = put(&api, "hopeful", &hopes).await;
            assert_eq!(hopeful.status(), 201, "{}", hopeful.text());
            let warnings = hopeful.json()["warnings"].clone();
            let said = ["model", "tools[0].agent.name", "approvals.deciders"];
            for (i, field) in said.iter().enumerate() {
                assert!(warnings[i].as_str().unwrap().starts_with(field), "{warnings}");
            }
            assert_eq!(warnings.as_array().unwrap().len(), said.len(), "{warnings}");
            assert_eq!(delete(&api, "hopeful").await.status(), 204);

            let syntax = api
                .client
                .request("PUT", "/api/v1/agents/broken", &[], b"{")
                .await;
            syntax.assert_error(400, "invalid_request");

            let run = api.run("clerk", "hello").await;
            api.succeeded(&run).await;
            assert_eq!(api.seen_run(&run).await["definition"]["version"], 2);
            world.stubs.llm.asked.close();
            let blocked = api.run("clerk", "again").await;
            assert_eq!(delete(&api, "clerk").await.status(), 204);
            api.get("/agents/clerk")
                .await
                .assert_error(404, "agent_not_found");
            delete(&api, "clerk").await.assert_error(404, "agent_not_found");
            api.post("/runs", &json!({ "agent": "clerk", "input": "x" }))
                .await
                .assert_error(404, "agent_not_found");
            assert_eq!(api.seen_run(&blocked).await["blocked"], "definition_missing");
            assert_eq!(put(&api, "clerk", &spec("be kind")).await.status(), 200);
            world.stubs.llm.asked.open();
            api.succeeded(&blocked).await;
            assert_eq!(api.seen_run(&blocked).await["blocked"], json!(null));
        }
    });
}

#[test]
fn a_deleted_run_is_gone_and_its_id_stays_taken() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let made = api
            .post(
                "/runs?wait=30s",
                &json!({ "agent": WORKER, "input": "x", "run_id": "r-1" }),
            )
            .await;
        assert_eq!(made.json()["status"], "succeeded", "{}", made.text());
        let remove = async |api: &Api| api.client.request("DELETE", "/api/v1/runs/r-1", &[], b"").await;
        remove(&api.with_key(BOSS))
            .await
            .assert_error(403, "permission_denied");
        assert_eq!(remove(&api).await.status(), 204);
        for path in ["", "/result", "/events", "/wait", "/steps", "/turns", "/history"] {
            api.get(&format!("/runs/r-1{path}"))
                .await
                .assert_error(410, "run_deleted");
        }
        let again = json!({ "agent": WORKER, "input": "x", "run_id": "r-1" });
        api.post("/runs", &again)
            .await
            .assert_error(409, "idempotency_conflict");
        assert!(api.all("/runs").await.is_empty());
    });
}

#[test]
fn a_volatile_run_is_told_to_be_one() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let body = json!({ "agent": WORKER, "input": "x", "durable": false });
        let made = api.post("/runs?wait=30s", &body).await;
        assert_eq!(made.json()["status"], "succeeded", "{}", made.text());
        assert_eq!(made.json()["guarantee"], "none");
        let id = made.json()["id"].as_str().unwrap().to_owned();
        let listed = api.all(&format!("/runs?agent={}", encode(WORKER))).await;
        assert_eq!(listed.len(), 1);
        api.resume(&id).await.assert_error(409, "run_not_durable");
        let guarded = json!({ "agent": GUARDED, "input": "x", "durable": false });
        api.post("/runs", &guarded)
            .await
            .assert_error(501, "unsupported_guarantee");
        let capabilities = api.seen("/durable/capabilities").await;
        assert_eq!(
            (
                &capabilities["store"],
                &capabilities["durable"],
                &capabilities["shared"]
            ),
            (&json!("sqlite"), &json!(true), &json!(false))
        );
    });
}

#[test]
fn an_open_stream_costs_a_comment_now_and_then_and_ends_with_its_run() {
    run(90, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world
            .stubs
            .llm
            .plays("ship", vec![Say::call("call_1", "deploy", "{}")]);
        let run = api.run(GUARDED, "ship").await;
        api.waits_on(&run, "approval", 1).await;
        let path = format!("/api/v1/runs/{run}/events");
        let mut conn = api.client.start("GET", &path, &[SSE], b"").await.unwrap();
        conn.head().await.unwrap();
        conn.until("run.snapshot").await;
        // Nothing happens: the next bytes are the comment.
        conn.until(": keep-alive\n\n").await;
        let cancel = json!({ "reason": "enough", "cancel_id": "c-1" });
        let answer = api.post(&format!("/runs/{run}/cancel"), &cancel).await;
        assert!(answer.status() < 300, "{}", answer.text());
        conn.until("run.cancelled").await;
        eventually("no stream is left", Duration::from_secs(10), || async {
            let page = world.edges[0].scrape().await;
            match page.sum("iop_edge_in_flight_requests", &[("endpoint", "other")]) {
                0.0 => Ok(()),
                open => Err(format!("{open}")),
            }
        })
        .await;
    });
}

#[test]
fn each_life_has_one_terminal_event_and_closes_its_streams() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world.stubs.llm.next(vec![Say::status(503)]);
        let run = api.run(FRAGILE, "hello").await;
        let failed = api.over(&run).await;
        assert_eq!(
            (&failed["status"], &failed["resumable"]),
            (&json!("failed"), &json!(true))
        );
        let first = api.stream(&run, Some(0)).await.rest().await;
        assert_eq!(first.last().unwrap().name, "run.failed");

        let body = json!({ "resume_token": failed["resume_token"] }).to_string();
        let path = format!("/api/v1/runs/{run}/resume");
        let conn = api
            .client
            .start("POST", &path, &[SSE], body.as_bytes())
            .await
            .unwrap();
        let resumed = iop_tests::runs::Sse::of(conn).await.rest().await;
        let names: Vec<&str> = resumed.iter().map(|e| e.name.as_str()).collect();
        assert_eq!((names[0], names[1]), ("run.snapshot", "run.resumed"), "{names:?}");
        assert_eq!(*names.last().unwrap(), "run.succeeded");
        assert!(
            resumed
                .iter()
                .skip(1)
                .filter(|e| e.id.is_some())
                .all(|e| e.body["life"] == 2)
        );

        // From the start: to the end of the first life, and from there to the end of the second.
        let again = api.stream(&run, Some(0)).await.rest().await;
        assert_eq!(again.last().unwrap().name, "run.failed");
        let rest = api.stream(&run, again.last().unwrap().id).await.rest().await;
        assert_eq!(rest.last().unwrap().name, "run.succeeded");
        let seen: Vec<u64> = again.iter().chain(&rest).filter_map(|e| e.id).collect();
        assert_eq!(seen, (1..=seen.len() as u64).collect::<Vec<_>>());
        let done = api.seen_run(&run).await;
        assert_eq!((&done["life"], &done["resumable"]), (&json!(2), &json!(false)));
        world.holds().await;
    });
}

#[test]
fn a_run_says_under_which_lease_it_was_last_written() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world.stubs.llm.plays(
            "ship",
            vec![Say::call("call_1", "deploy", "{}"), Say::text("shipped")],
        );
        let run = api.run(GUARDED, "ship").await;
        api.waits_on(&run, "approval", 1).await;
        let lease = |seen: &Value| seen["incarnation"].as_str().unwrap().parse::<u64>().unwrap();
        let waiting = lease(&api.until(&run, &["waiting"]).await);
        assert!(waiting >= 1);
        assert_eq!(lease(&api.all("/runs").await[0]), waiting);
        api.approve(&run).await;
        assert!(lease(&api.succeeded(&run).await) > waiting);
    });
}

#[test]
fn a_draining_edge_takes_no_runs() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world.stubs.llm.asked.close();
        // Somebody's answer is still due, so that the process stays for a while.
        let chat = iop_tests::fixtures::chat(iop_tests::llm::MODEL, "hi", true);
        let mut held = api.client.open("/v1/chat/completions", &chat).await;
        world.stubs.llm.asked(1).await;
        world.edges[0].process.signal("TERM");
        eventually("the edge drains", Duration::from_secs(10), || async {
            // A connection that had not brought a request yet may be closed when the drain begins.
            match api.client.try_request("GET", "/readyz", &[], b"").await {
                Ok(answer) if answer.status() == 503 => Ok(()),
                Ok(answer) => Err(answer.status().to_string()),
                Err(error) => Err(error.to_string()),
            }
        })
        .await;
        let refused = api.post("/runs", &input("late")).await;
        refused.assert_error(503, "draining");
        assert_eq!(refused.json()["error"]["retryable"], true);
        assert!(refused.header("retry-after").is_some());
        world.stubs.llm.asked.open();
        held.answer().await.unwrap();
        let ended = world.edges[0].process.exit(Duration::from_secs(30)).await;
        assert!(ended.success(), "{ended}");
        world.restart(0).await;
        assert!(world.api().all("/runs").await.is_empty());
    });
}
