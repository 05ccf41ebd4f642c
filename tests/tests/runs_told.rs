//! What followers of a run are told: each call is over once, however it came to its end; a pause names what the run object names; the
//! end reaches whoever follows, also when the run is not kept.

use std::time::Duration;

use iop_tests::client::Client;
use iop_tests::llm::{MODEL, Say};
use iop_tests::mcp_stub::Reply;
use iop_tests::runs::agents::{GUARDED, WORKER, agent, all};
use iop_tests::runs::{Api, Db, Stubs, World};
use iop_tests::skew::Skew;
use iop_tests::tool_stub::Answer;
use iop_tests::{eventually, run};
use serde_json::{Value, json};

/// The data of each `run.tool.completed` of a run.
async fn completed(api: &Api, run: &str) -> Vec<Value> {
    let mut events = api.events(run).await;
    events.retain(|event| event["event"] == "run.tool.completed");
    events.into_iter().map(|event| event["data"].clone()).collect()
}

/// The end of the first call of the first turn.
fn end(tool: &str, result: &str, origin: &str) -> Value {
    json!({"turn": 1, "tool": tool, "call_id": "c1", "ordinal": 0, "attempt": 1, "result": result, "origin": origin})
}

/// What an ambiguous run waits for somebody to say.
async fn unknown(api: &Api, run: &str) -> (String, Value) {
    let seen = api.until(run, &["ambiguous"]).await;
    let activity = seen["waiting_on"][0]["activity_id"].as_str().unwrap();
    let path = format!("/runs/{run}/activities/{activity}");
    let record = api.seen(&path).await;
    (path, record)
}

async fn resolve(api: &Api, run: &str, more: Value) {
    let (path, record) = unknown(api, run).await;
    let mut body = json!({"decision_id": "r1", "attempt": 1, "input_digest": record["input_digest"],
        "reason": "seen", "evidence": "ticket 7"});
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    for _ in 0..2 {
        let resolved = api.post(&format!("{path}/resolve"), &body).await;
        assert_eq!(resolved.status(), 200, "{}", resolved.text());
    }
}

/// The callee's evidence and an operator's word end a call as its own answer does, and are told the same, once.
#[test]
fn a_call_is_told_as_over_once_whoever_says_how_it_ended() {
    run(120, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            for input in ["live", "asked", "late", "done", "failed", "turn"] {
                let tool = match input {
                    "asked" | "late" => "transfer",
                    _ => "deploy",
                };
                let say = vec![Say::call("c1", tool, "{}"), Say::text("over")];
                world.stubs.llm.plays(input, say);
            }
            let api = world.api();
            let live = api.run(WORKER, "live").await;
            api.succeeded(&live).await;
            assert_eq!(completed(&api, &live).await, [end("deploy", "ok", "live")]);

            // The run asks by itself.
            world.stubs.tools.script("/transfer", vec![Answer::cut()]);
            let asked = api.run(WORKER, "asked").await;
            api.succeeded(&asked).await;
            assert_eq!(
                completed(&api, &asked).await,
                [end("transfer", "ok", "reconciled")]
            );

            // Somebody lets it ask again, once there is something to be found.
            let received = world.stubs.tools.received("/transfer");
            received.close();
            let late = api.run(WORKER, "late").await;
            received.reached(1).await;
            world.kill_and_restart(0).await;
            received.open();
            let api = world.api();
            let (path, record) = unknown(&api, &late).await;
            assert_eq!(completed(&api, &late).await, Vec::<Value>::new());
            let url = world.stubs.tools.url("");
            let key = record["idempotency_key"].as_str().unwrap();
            let service = Client::new(url.strip_prefix("http://").unwrap());
            let headers = [("idempotency-key", key)];
            let arrives = service.request("POST", "/transfer", &headers, b"{}").await;
            assert_eq!(arrives.status(), 200);
            for _ in 0..2 {
                let found = api.post(&format!("{path}/reconcile"), &json!({})).await;
                assert_eq!(found.status(), 200, "{}", found.text());
            }
            api.succeeded(&late).await;
            assert_eq!(
                completed(&api, &late).await,
                [end("transfer", "ok", "reconciled")]
            );

            // A person knows.
            world
                .stubs
                .tools
                .script("/deploy", vec![Answer::cut(), Answer::cut()]);
            let done = api.run(WORKER, "done").await;
            let word = json!({"action": "complete", "output": {"up": true}, "resume": true});
            resolve(&api, &done, word).await;
            api.succeeded(&done).await;
            assert_eq!(completed(&api, &done).await, [end("deploy", "ok", "manual")]);
            let failed = api.run(WORKER, "failed").await;
            resolve(&api, &failed, json!({"action": "fail"})).await;
            assert_eq!(completed(&api, &failed).await, [end("deploy", "error", "manual")]);
            assert_eq!(api.resume(&failed).await.status(), 202);
            api.succeeded(&failed).await;
            assert_eq!(completed(&api, &failed).await.len(), 1);
            world.holds().await;
        }
    });
}

/// What the run is told to wait for at its last pause.
async fn paused_on(api: &Api, run: &str) -> Value {
    let events = api.events(run).await;
    let pause = |event: &&Value| event["event"] == "run.waiting" || event["event"] == "run.ambiguous";
    events.iter().rfind(pause).unwrap()["data"]["waiting_on"].clone()
}

/// The event of a pause says what the run object says, and still says it when the pause is over.
#[test]
fn a_pause_is_told_as_the_run_shows_it() {
    run(120, async {
        let chief = |stubs: &Stubs| {
            format!(
                "{}\n[agents.chief]\nmodel = \"{MODEL}\"\ndurable = true\n[[agents.chief.tools]]\nname = \"guarded\"\n\
                 agent = {{ name = \"guarded\" }}\n",
                all(stubs)
            )
        };
        let world = World::start(Db::Sqlite, chief).await;
        let api = world.api();
        let stubs = &world.stubs;
        stubs.mcp.modern();
        let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        let asks = Reply::asks("where", "Which city?", &schema, "state-1");
        stubs.mcp.script("launch", vec![asks]);
        stubs
            .tools
            .script("/charge", vec![Answer::status(503).retry_after(600)]);
        stubs.tools.script("/transfer", vec![Answer::status(500)]);
        stubs.tools.script("/deploy", vec![Answer::cut()]);
        let two = [
            ("c1", "deploy", "{\"region\": \"eu\"}"),
            ("c2", "deploy", "{\"region\":\"us\"}"),
        ];
        stubs.llm.plays("approvals", vec![Say::calls(&two)]);
        let input = Say::call(
            "c1",
            "request_input",
            "{\"prompt\":\"How many?\",\"schema\":{\"type\":\"integer\"}}",
        );
        stubs.llm.plays("input", vec![input]);
        stubs.llm.plays("mcp", vec![Say::call("c1", "launch", "{}")]);
        stubs
            .llm
            .plays("retry", vec![Say::call("c1", "charge", "{\"amount\":1}")]);
        stubs.llm.plays("unknown", vec![Say::call("c1", "deploy", "{}")]);
        stubs
            .llm
            .plays("child", vec![Say::call("c1", "guarded", "{\"task\":1}")]);
        stubs
            .llm
            .plays("{\"task\":1}", vec![Say::call("k1", "deploy", "{}")]);
        let mut told = Vec::new();
        for (agent, input, kind, n) in [
            (GUARDED, "approvals", "approval", 2),
            (WORKER, "input", "input", 1),
            (WORKER, "mcp", "input", 1),
            (WORKER, "retry", "retry", 1),
            (WORKER, "unknown", "reconciliation", 1),
            ("chief", "child", "children", 1),
        ] {
            let run = api.run(agent, input).await;
            api.waits_on(&run, kind, n).await;
            let seen = api.until(&run, &["waiting", "ambiguous"]).await;
            let pause = paused_on(&api, &run).await;
            assert_eq!(pause, seen["waiting_on"], "{input}");
            let name = if input == "unknown" {
                "run.ambiguous"
            } else {
                "run.waiting"
            };
            let mut stream = api.stream(&run, Some(0)).await;
            let streamed = stream.until(name).await.pop().unwrap();
            assert_eq!(streamed.body["data"]["waiting_on"], pause, "{input}");
            told.push((run, pause));
        }
        for (_, pause) in &told[1..5] {
            assert_eq!(pause[0]["call_id"], "c1", "{pause}");
        }

        // What is over is told as it was.
        let (run, pause) = &told[0];
        for (n, approval) in pause.as_array().unwrap().iter().enumerate() {
            let decided = api.decide(run, approval, "deny", &format!("d{n}")).await;
            assert_eq!(decided.status(), 200, "{}", decided.text());
        }
        api.succeeded(run).await;
        assert_eq!(paused_on(&api, run).await, *pause);
        let (run, pause) = &told[4];
        resolve(&api, run, json!({"action": "fail", "resume": true})).await;
        api.succeeded(run).await;
        assert_eq!(paused_on(&api, run).await, *pause);
    });
}

/// A run that is not kept is there until whoever follows it has heard its end, on any edge.
#[test]
fn the_end_of_a_run_that_is_not_kept_reaches_its_followers() {
    run(90, async {
        let brief = |stubs: &Stubs| {
            agent(
                stubs,
                "brief",
                "[agents.brief.retention]\ndelete_on_success = true\n",
            )
        };
        let mut world = World::start(Db::Postgres, brief).await;
        world.add_edge().await;
        let asked = world.stubs.llm.asked.clone();
        let mut runs = Vec::new();
        for n in 0..5 {
            asked.close();
            let input = format!("go {n}");
            let run = world.api().run("brief", &input).await;
            asked.reached(1).await;
            let mut streams = Vec::new();
            for edge in 0..2 {
                let mut stream = world.api_of(edge).stream(&run, Some(0)).await;
                stream.until("run.step.started").await;
                streams.push(stream);
            }
            asked.open();
            for mut stream in streams {
                let seen = stream.rest().await;
                let last = seen.last().unwrap();
                assert_eq!(last.name, "run.succeeded", "{seen:?}");
                assert_eq!(last.body["data"]["outcome"]["output"], "done");
            }
            runs.push(run);
        }
        for run in runs {
            eventually("the run is deleted", Duration::from_secs(20), || async {
                match world.api_of(1).get(&format!("/runs/{run}")).await.status() {
                    410 => Ok(()),
                    other => Err(other.to_string()),
                }
            })
            .await;
        }
    });
}

/// A process that ended before it had deleted such a run leaves that to the next one.
#[test]
fn a_run_that_is_not_kept_does_not_outlive_its_process_for_long() {
    run(60, async {
        let brief = |stubs: &Stubs| {
            let rules = "[agents.brief.retention]\ndelete_on_success = true\n";
            format!("{}{}", agent(stubs, "brief", rules), agent(stubs, WORKER, ""))
        };
        let mut world = World::start(Db::Sqlite, brief).await;
        let gone = world.api().run("brief", "go").await;
        world.api().succeeded(&gone).await;
        let kept = world.api().run(WORKER, "go").await;
        world.api().succeeded(&kept).await;
        world.kill(0).await;
        let skew = Skew::of(600);
        world.options.env = skew.env();
        world.restart(0).await;
        eventually("the run is deleted", Duration::from_secs(20), || async {
            match world.api().get(&format!("/runs/{gone}")).await.status() {
                410 => Ok(()),
                other => Err(other.to_string()),
            }
        })
        .await;
        world.api().succeeded(&kept).await;
    });
}
