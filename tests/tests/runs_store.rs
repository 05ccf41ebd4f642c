//! What is stored of runs: pinned definitions, damaged rows, sizes, and what is never written anywhere (durable-scenarios §4, §8, §10).

use std::process::Command;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use iop_tests::llm::{self, Say};
use iop_tests::runs::agents::{GUARDED, WORKER, agent, all};
use iop_tests::runs::{Db, Options, TERMINAL, World};
use iop_tests::tool_stub::Answer;
use iop_tests::{eventually, run};
use serde_json::{Value, json};

/// Changes rows of a SQLite file whose edge is down, as no edge would: what the tables themselves refuse is let pass.
fn damage(world: &World, sql: &str) {
    const RUN: &str = "\
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
guards = db.execute(\"SELECT name, sql FROM sqlite_master WHERE type = 'trigger'\").fetchall()
for name, _ in guards:
    db.execute(f'DROP TRIGGER \"{name}\"')
changed = db.execute(sys.argv[2]).rowcount
for _, guard in guards:
    db.execute(guard)
db.commit()
print(changed)
";
    let mut python = Command::new("python3");
    python.args(["-c", RUN]).arg(world.sqlite_file()).arg(sql);
    let output = python.output().unwrap();
    let changed = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(
        output.status.success() && changed != "0",
        "{changed} {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A run that waits for its deployment to be approved.
async fn paused(world: &World, input: &str) -> (String, Value) {
    world.stubs.llm.plays(
        input,
        vec![Say::call("c1", "deploy", "{}"), Say::text("deployed")],
    );
    let run = world.api().run(GUARDED, input).await;
    let on = world.api().waits_on(&run, "approval", 1).await;
    (run, on[0].clone())
}

/// A run keeps the prompts and rules that it began with, and reaches its tools where they are today.
#[test]
fn a_run_keeps_its_version_and_reaches_its_tools_where_they_are_today() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let (run, on) = paused(&world, "pinned").await;
        world.kill(0).await;
        world.agents = world
            .agents
            .replace("You are tested.", "You are another one.")
            .replace("/deploy\"", "/v2/deploy\"");
        world.restart(0).await;
        let api = world.api();
        let seen = api.seen_run(&run).await;
        assert_eq!(
            (&seen["definition"]["version"], &seen["blocked"]),
            (&json!(1), &Value::Null)
        );
        assert_eq!(api.decide(&run, &on, "approve", "d1").await.status(), 200);
        api.succeeded(&run).await;
        let asked = world.stubs.llm.requests_of("pinned");
        assert_eq!(asked[1]["messages"][0]["content"], "You are tested.");
        let tools = &world.stubs.tools;
        assert_eq!(
            (tools.calls("/deploy").len(), tools.calls("/v2/deploy").len()),
            (0, 1)
        );
        let next = api.run(WORKER, "newer").await;
        let seen = api.succeeded(&next).await;
        assert_eq!(seen["definition"]["version"], 2);
        world.holds().await;
    });
}

/// S46: runs of an agent that is gone are listed as such, and come free when it is back.
#[test]
fn runs_of_an_agent_that_is_gone_are_blocked_and_not_lost() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let (run, on) = paused(&world, "orphan").await;
        world.kill(0).await;
        let declared = world.agents.clone();
        world.agents = agent(&world.stubs, WORKER, "");
        world.restart(0).await;
        let api = world.api();
        let listed = api.all("/runs").await;
        assert_eq!(
            (&listed[0]["id"], &listed[0]["status"], &listed[0]["blocked"]),
            (&json!(run), &json!("waiting"), &json!("definition_missing"))
        );
        api.decide(&run, &on, "approve", "d1")
            .await
            .assert_error(409, "definition_missing");
        api.resume(&run).await.assert_error(409, "definition_missing");
        world.kill(0).await;
        world.agents = declared;
        world.restart(0).await;
        let api = world.api();
        assert_eq!(api.seen_run(&run).await["blocked"], Value::Null);
        assert_eq!(api.decide(&run, &on, "approve", "d1").await.status(), 200);
        api.succeeded(&run).await;
        world.holds().await;
    });
}

/// S45: a stored version that is not what it was is not run.
#[test]
fn a_version_that_was_changed_in_the_store_is_not_run() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let (run, on) = paused(&world, "changed").await;
        world.kill(0).await;
        damage(
            &world,
            "UPDATE definitions SET body = replace(body, 'You are tested.', 'You obey.') WHERE name = 'guarded'",
        );
        world.restart(0).await;
        let api = world.api();
        let refused = api.decide(&run, &on, "approve", "d1").await;
        refused.assert_error(409, "definition_changed");
        let seen = api.seen_run(&run).await;
        assert_eq!(seen["status"], "waiting", "{seen}");
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        assert_eq!(world.stubs.llm.requests_of("changed").len(), 1);
    });
}

/// S87, S88: a run whose rows were damaged or exchanged is said to be corrupt; the others live on.
#[test]
fn damaged_rows_are_never_taken_for_runs() {
    run(120, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let (good, on_good) = paused(&world, "good").await;
        let mut bad = Vec::new();
        for input in ["head", "copied", "state"] {
            bad.push(paused(&world, input).await);
        }
        world.kill(0).await;
        damage(
            &world,
            &format!(
                "UPDATE runs SET body = CAST(substr(body, 1, length(body) - 1) || x'00' AS BLOB) WHERE run_id = '{}'",
                bad[0].0
            ),
        );
        damage(
            &world,
            &format!(
                "UPDATE runs SET (body, seal, state, state_digest, budgets) = (SELECT body, seal, state, state_digest, budgets \
                 FROM runs WHERE run_id = '{good}') WHERE run_id = '{}'",
                bad[1].0
            ),
        );
        damage(
            &world,
            &format!(
                "UPDATE runs SET state_digest = zeroblob(32) WHERE run_id = '{}'",
                bad[2].0
            ),
        );
        world.restart(0).await;
        let api = world.api();
        for (run, on) in &bad {
            api.get(&format!("/runs/{run}"))
                .await
                .assert_error(500, "run_corrupt");
            let decided = api.decide(run, on, "approve", "d1").await;
            decided.assert_error(500, "run_corrupt");
        }
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        assert_eq!(api.decide(&good, &on_good, "approve", "d1").await.status(), 200);
        api.succeeded(&good).await;
        let listed = api.get("/runs?limit=200").await;
        assert_eq!(listed.status(), 200, "{}", listed.text());
        assert!(listed.text().contains(&good));
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
    });
}

/// S90: results up to the limit are kept, those over it are refused and said to be too large; nothing is tried for ever.
#[test]
fn a_result_over_the_limit_is_refused_and_a_large_one_is_kept() {
    run(180, async {
        for db in Db::BOTH {
            let world = World::start(db, all).await;
            let large = "x".repeat(8 * 1024 * 1024);
            let over = "y".repeat(17 * 1024 * 1024);
            world.stubs.tools.script(
                "/reserve",
                vec![
                    Answer::bytes(200, large.as_bytes()),
                    Answer::bytes(200, over.as_bytes()),
                ],
            );
            world.stubs.llm.plays(
                "large",
                vec![
                    Say::call("c1", "reserve", "{}"),
                    Say::call("c2", "reserve", "{ }"),
                    Say::text("done"),
                ],
            );
            let api = world.api();
            let run = api.run(WORKER, "large").await;
            api.succeeded(&run).await;
            let asked = world.stubs.llm.requests_of("large");
            let told = llm::told(&asked[2]);
            assert_eq!(told["c1"].len(), large.len());
            let error: Value = serde_json::from_str(&told["c2"]).unwrap();
            assert_eq!(error["error"]["code"], "payload_too_large", "{error}");
            assert_eq!(world.stubs.tools.calls("/reserve").len(), 2);
            let input = "z".repeat(65 * 1024 * 1024);
            let refused = api.post("/runs", &json!({"agent": WORKER, "input": input})).await;
            refused.assert_error(413, "payload_too_large");
            world.holds().await;
        }
    });
}

/// S92: many runs, readers and streams on one SQLite file: nobody is told that a database is locked.
#[test]
fn many_runs_on_one_sqlite_file_get_in_nobodys_way() {
    run(180, async {
        let world = World::start(Db::Sqlite, all).await;
        world.stubs.llm.plays(
            "many",
            vec![
                Say::calls(&[("a", "lookup", "{\"sku\":\"1\"}"), ("b", "reserve", "{}")]),
                Say::text("done"),
            ],
        );
        let api = world.api();
        let runs = (0..100).map(|_| async {
            let run = api.run(WORKER, "many").await;
            let mut stream = api.stream(&run, Some(0)).await;
            assert_eq!(stream.head.status, 200);
            let listed = api.get("/runs?status=running").await;
            assert_eq!(listed.status(), 200, "{}", listed.text());
            let seen = stream.rest().await;
            assert_eq!(seen.last().unwrap().name, "run.succeeded");
        });
        join_all(runs).await;
        assert!(world.edges[0].process.lines_with("locked").is_empty());
        world.holds().await;
    });
}

/// S94: what was pruned says so, what is busy is not deleted, and an id is used once.
#[test]
fn history_is_pruned_and_says_so() {
    run(60, async {
        let world = World::start(Db::Sqlite, |stubs| {
            let keep = format!("[agents.{WORKER}.retention]\nkeep_checkpoints = 3\n");
            agent(stubs, WORKER, &keep)
        })
        .await;
        world.stubs.llm.plays(
            "long",
            vec![
                Say::call("c1", "reserve", "{}"),
                Say::call("c2", "reserve", "{ }"),
                Say::call("c3", "reserve", "{  }"),
                Say::text("done"),
            ],
        );
        let api = world.api();
        let run = api.run(WORKER, "long").await;
        let seen = api.succeeded(&run).await;
        // What is pruned at the end is pruned behind the answer.
        let history = eventually("old checkpoints are pruned", Duration::from_secs(20), || async {
            let history = api.all(&format!("/runs/{run}/history")).await;
            let kept = history.iter().filter(|c| c["pruned"] == false).count();
            if kept <= 4 && kept < history.len() {
                Ok(history)
            } else {
                Err(format!("{history:?}"))
            }
        })
        .await;
        let at = |revision: &Value| history.iter().find(|c| c["revision"] == *revision).unwrap();
        let (first, last) = (at(&json!("1")), at(&seen["revision"]));
        assert_eq!((&first["pruned"], &last["pruned"]), (&json!(true), &json!(false)));
        let digest = |item: &Value| item["digest"].as_str().unwrap().to_owned();
        let path = |item: &Value| {
            format!(
                "/runs/{run}/history/{}?digest={}",
                item["revision"].as_str().unwrap(),
                digest(item)
            )
        };
        api.get(&path(first))
            .await
            .assert_error(410, "checkpoint_unavailable");
        assert_eq!(api.get(&path(last)).await.status(), 200);
        api.get(&format!("/runs/{run}/history/0"))
            .await
            .assert_error(400, "invalid_request");
        world.holds().await;
    });
}

/// S91: a run's stored bytes grow with what is said in it, not with its square.
#[test]
fn a_transcript_is_stored_once() {
    run(180, async {
        let world = World::start(Db::Sqlite, all).await;
        let size = |turns: usize| {
            let world = &world;
            async move {
                let input = format!("{turns} turns");
                let mut script: Vec<Say> = (0..turns)
                    .map(|n| Say::call(&format!("c{n}"), "reserve", &format!("{{\"n\":{n}}}")))
                    .collect();
                script.push(Say::text("done"));
                world.stubs.llm.plays(&input, script);
                let run = world.api().run(WORKER, &input).await;
                world.api().succeeded(&run).await;
                let bytes =
                    |sql: &str| -> u64 { world.query(&sql.replace("RUN", &run))[0][0].parse().unwrap() };
                bytes("SELECT sum(length(state)) FROM checkpoints WHERE run_id = 'RUN'")
                    + bytes("SELECT sum(length(body)) FROM runs WHERE run_id = 'RUN'")
                    + bytes(
                        "SELECT sum(coalesce(length(input), 0) + coalesce(length(output), 0)) FROM activities \
                         WHERE run_id = 'RUN'",
                    )
            }
        };
        world
            .stubs
            .tools
            .always("/reserve", Answer::bytes(200, "r".repeat(1024).as_bytes()));
        let (short, long) = (size(10).await, size(40).await);
        // Four times the turns: far from sixteen times the bytes.
        assert!(long < short * 6, "10 turns: {short} B, 40 turns: {long} B");
        world.holds().await;
    });
}

/// S104: nobody is told of an end that is not stored.
#[test]
fn an_end_is_told_after_it_is_stored() {
    run(60, async {
        let options = Options {
            lease_ttl: Duration::from_secs(20),
            ..Options::default()
        };
        let (world, relay) = World::behind_relay(options, all).await;
        world.stubs.llm.asked.close();
        let api = world.api();
        let run = api.run(WORKER, "hello").await;
        world.stubs.llm.asked.reached(1).await;
        let mut stream = api.stream(&run, Some(0)).await;
        stream.until("run.step.started").await;
        relay.black_hole();
        let silent = Instant::now();
        world.stubs.llm.asked.open();
        // What is waited for is that nothing is told.
        let told = tokio::time::timeout(Duration::from_secs(3), stream.until("run.succeeded")).await;
        assert!(told.is_err(), "an end was told after {:?}", silent.elapsed());
        relay.restore();
        let mut again = api.stream(&run, Some(0)).await;
        let seen = again.rest().await;
        let ends = seen
            .iter()
            .filter(|e| TERMINAL.iter().any(|t| e.name == format!("run.{t}")))
            .count();
        assert_eq!((ends, seen.last().unwrap().name.as_str()), (1, "run.succeeded"));
        world.holds().await;
    });
}

/// S107: a provider that falls silent is one typed failure.
#[test]
fn a_stalled_provider_is_one_typed_failure() {
    run(120, async {
        let world = World::start(Db::Sqlite, |stubs| {
            let once = agent(stubs, WORKER, "").replace("max_attempts = 2", "max_attempts = 1");
            let models = format!(
                "\n[[models]]\nname = \"{m}\"\ncandidates = [{{ provider = \"p\", target = \"{m}\" }}]\n\
                 response_stall_timeout = \"2s\"\nfirst_content_timeout = \"2s\"\n",
                m = llm::MODEL
            );
            format!("{once}{models}")
        })
        .await;
        world.stubs.llm.next(vec![Say::Stall]);
        let api = world.api();
        let run = api.run(WORKER, "silence").await;
        let seen = api.over(&run).await;
        assert_eq!(
            (
                &seen["status"],
                &seen["outcome"]["error"]["kind"],
                &seen["resumable"]
            ),
            (&json!("failed"), &json!("timeout"), &json!(true)),
            "{seen}"
        );
        let code = seen["outcome"]["error"]["code"].as_str().unwrap();
        assert!(
            ["response_stalled", "first_content_timeout"].contains(&code),
            "{seen}"
        );
        assert_eq!(world.stubs.llm.requests().len(), 1);
        assert_eq!(api.resume(&run).await.status(), 202);
        api.succeeded(&run).await;
        world.holds().await;
    });
}

/// S110: what people, models and tools say, and what keys are, is in no log and on no label.
#[test]
fn nothing_that_was_said_is_logged_or_measured() {
    run(60, async {
        const WORDS: [&str; 8] = [
            "PROMPTWORD",
            "ARGUMENTWORD",
            "RESULTWORD",
            "ANSWERWORD",
            "REASONWORD",
            "SECRETWORD",
            "MCPWORD",
            "METADATAWORD",
        ];
        let mut options = Options::default().line("telemetry", "log = \"debug\"");
        options
            .env
            .push(("TOOL_SECRET".to_owned(), "SECRETWORD".to_owned()));
        let mut world = World::with(Db::Sqlite, options, |stubs| {
            let url = "/deploy\", timeout";
            let header = "/deploy\", headers = { authorization = { env = \"TOOL_SECRET\" } }, timeout";
            all(stubs).replace(url, header)
        })
        .await;
        world.stubs.tools.script(
            "/deploy",
            vec![Answer::ok(&json!({"said": "RESULTWORD"})), Answer::cut()],
        );
        world
            .stubs
            .mcp
            .script("launch", vec![iop_tests::mcp_stub::Reply::failed("MCPWORD")]);
        world.stubs.llm.plays(
            "PROMPTWORD",
            vec![
                Say::call("c1", "deploy", "{\"to\":\"ARGUMENTWORD\"}"),
                Say::call("c2", "launch", "{\"to\":\"ARGUMENTWORD\"}"),
                Say::call("c3", "deploy", "{\"to\":\"ARGUMENTWORD again\"}"),
                Say::text("ANSWERWORD"),
            ],
        );
        let api = world.api();
        let body = json!({"agent": GUARDED, "input": "PROMPTWORD", "metadata": {"note": "METADATAWORD"}});
        let made = api
            .create_with(&body, &[("idempotency-key", "SECRETWORD-key")])
            .await;
        let run = made.json()["id"].as_str().unwrap().to_owned();
        for (n, call) in ["c1", "c2", "c3"].iter().enumerate() {
            let on = loop {
                let on = api.waits_on(&run, "approval", 1).await;
                if on[0]["call_id"] == *call {
                    break on;
                }
            };
            let path = format!("/runs/{run}/approvals/{}", on[0]["id"].as_str().unwrap());
            let decision = json!({"decision": "approve", "decision_id": format!("d{n}"), "reason": "REASONWORD",
                                  "arguments_digest": on[0]["arguments_digest"]});
            let decided = api.post(&path, &decision).await;
            assert_eq!(decided.status(), 200, "{}", decided.text());
        }
        api.until(&run, &["ambiguous"]).await;
        assert_eq!(
            world.stubs.tools.calls("/deploy")[0].header("authorization"),
            Some("SECRETWORD")
        );
        for restarted in [false, true] {
            if restarted {
                world.kill_and_restart(0).await;
                world.api().until(&run, &["ambiguous"]).await;
            }
            let metrics = world.api().client.get("/metrics").await;
            assert_eq!(metrics.status(), 200, "{}", metrics.text());
            for word in WORDS {
                let logged = world.edges[0].process.lines_with(word);
                assert!(logged.is_empty(), "{word}: {logged:?}");
                assert!(!metrics.text().contains(word), "{word} is measured");
            }
            assert!(!metrics.text().contains(&run) && !metrics.text().contains("\"c1\""));
        }
    });
}
