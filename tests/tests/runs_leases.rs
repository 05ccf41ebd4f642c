//! Who may write to a run, and by whose clock (durable-scenarios §3): a process that comes back, clocks that are wrong, hosts that
//! die again and again, deletions and resumes at once, and a crowd.

use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use iop_tests::llm::{self, MODEL, Say};
use iop_tests::runs::agents::{FRAGILE, GUARDED, WORKER, agent, all};
use iop_tests::runs::{Api, Db, Options, Stubs, TERMINAL, World, encode};
use iop_tests::skew::Skew;
use iop_tests::{eventually, run};
use serde_json::{Value, json};

const HOUR: i64 = 3600;

fn short_leases() -> Options {
    Options {
        lease_ttl: Duration::from_secs(1),
        ..Options::default()
    }
}

async fn cancel(api: &Api, run: &str, id: &str) -> iop_tests::client::Answer {
    let body = json!({"cancel_id": id, "reason": "enough"});
    api.post(&format!("/runs/{run}/cancel"), &body).await
}

/// Creates a run with a deadline.
async fn due(api: &Api, agent: &str, input: &str, deadline: &str) -> String {
    let body = json!({"agent": agent, "input": input, "deadline": deadline});
    let made = api.create_with(&body, &[]).await;
    assert_eq!(made.status(), 202, "{}", made.text());
    made.json()["id"].as_str().unwrap().to_owned()
}

/// Who holds a run, and in which incarnation.
fn holder(world: &World, run: &str) -> Vec<Vec<String>> {
    world.query(&format!(
        "SELECT owner, incarnation FROM run_leases WHERE run_id = '{run}'"
    ))
}

/// S25: the same edge started again while its old process sleeps is another writer; the old one can store nothing, keep nothing
/// and give nothing back.
#[test]
fn a_process_that_wakes_up_beside_its_successor_has_no_say() {
    run(120, async {
        let mut world = World::with(Db::Postgres, short_leases(), all).await;
        world.stubs.tools.honour_keys("/charge");
        world.stubs.llm.plays(
            "pay",
            vec![Say::call("c1", "charge", "{\"amount\":1}"), Say::text("paid")],
        );
        world.stubs.llm.plays(
            "ship",
            vec![Say::call("c1", "deploy", "{}"), Say::text("shipped")],
        );
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

        let old = world.edges.remove(0);
        old.process.signal("STOP");
        // In the same folder, with the same configuration.
        world.add_edge().await;
        let api = world.api();
        charge.reached(2).await;
        let unknown = api.until(&ship, &["ambiguous"]).await;
        let held = holder(&world, &pay);

        // The old process finds the answer of its call when it wakes up.
        deploy.open();
        old.process.signal("CONT");
        world.stubs.tools.hung_up(0).await;
        eventually(
            "the old process knows that it lost both",
            Duration::from_secs(30),
            || async {
                let lost = old.scrape().await.sum("iop_edge_lease_losses_total", &[]);
                if lost >= 2.0 {
                    Ok(())
                } else {
                    Err(format!("{lost}"))
                }
            },
        )
        .await;
        assert_eq!(holder(&world, &pay), held);
        assert_eq!(api.seen_run(&ship).await, unknown);

        charge.open();
        let seen = api.succeeded(&pay).await;
        let of_old = Api { client: old.client() };
        assert_eq!(of_old.seen_run(&pay).await, seen);
        let activity = unknown["waiting_on"][0]["activity_id"].as_str().unwrap();
        let path = format!("/runs/{ship}/activities/{activity}");
        let record = api.seen(&path).await;
        let resolve = json!({"action": "complete", "decision_id": "r1", "attempt": 1, "resume": true,
            "input_digest": record["input_digest"], "reason": "seen", "evidence": "log", "output": "up"});
        let resolved = api.post(&format!("{path}/resolve"), &resolve).await;
        assert_eq!(resolved.status(), 200, "{}", resolved.text());
        api.succeeded(&ship).await;
        let tools = &world.stubs.tools;
        assert_eq!((tools.calls("/charge").len(), tools.effects("/charge")), (2, 1));
        assert_eq!(tools.calls("/deploy").len(), 1);
        world.holds().await;
    });
}

/// An agent whose approvals expire after half an hour.
fn hasty(stubs: &Stubs) -> String {
    let rules = "approvals = { default = \"never\", expires = \"30m\" }\n\
                 [[agents.guarded.approval_rules]]\ntool = \"deploy\"\nwhen = \"always\"\n";
    [agent(stubs, WORKER, ""), agent(stubs, GUARDED, rules)].concat()
}

/// How far the clock of an edge is ahead of the machine's, in seconds, as its answers say.
async fn ahead(api: &Api) -> i64 {
    let answer = api.get("/durable/capabilities").await;
    let date = httpdate::parse_http_date(answer.header("date").unwrap()).unwrap();
    let seconds = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    seconds(date).cast_signed() - seconds(SystemTime::now()).cast_signed()
}

/// S27: an edge whose clock is wrong takes nothing that others hold, nothing before its time, and knows the times of the store.
#[test]
fn an_edge_with_a_wrong_clock_works_by_the_clock_of_the_store() {
    run(180, async {
        for seconds in [HOUR, -HOUR] {
            let mut world = World::with(Db::Postgres, short_leases(), hasty).await;
            world.stubs.tools.honour_keys("/charge");
            for input in ["expires", "ends"] {
                world.stubs.llm.plays(
                    input,
                    vec![Say::call("c1", "deploy", "{}"), Say::text("deployed")],
                );
            }
            world.stubs.llm.plays(
                "held",
                vec![Say::call("c1", "charge", "{\"amount\":1}"), Say::text("paid")],
            );
            let here = world.api();
            let refused = Say::Status(429, vec![("retry-after".to_owned(), "1800".to_owned())]);
            world.stubs.llm.next(vec![refused]);
            let pauses = here.run(WORKER, "pauses").await;
            here.waits_on(&pauses, "retry", 1).await;
            let expires = here.run(GUARDED, "expires").await;
            let asked = here.waits_on(&expires, "approval", 1).await;
            let ends = due(&here, GUARDED, "ends", "30m").await;
            here.waits_on(&ends, "approval", 1).await;
            let charge = world.stubs.tools.received("/charge");
            charge.close();
            let held = here.run(WORKER, "held").await;
            charge.reached(1).await;

            let skew = Skew::of(seconds);
            world.options.env = skew.env();
            world.add_edge().await;
            let there = world.api_of(1);
            let off = ahead(&there).await - seconds;
            assert!(off.abs() < 60, "the clock is not skewed: {off}");
            // What is waited for is that nothing happens: several leases have to pass.
            let stolen = tokio::time::timeout(Duration::from_secs(4), charge.reached(2)).await;
            assert!(stolen.is_err(), "the call was repeated");
            for run in [&pauses, &expires, &ends] {
                assert_eq!(there.seen_run(run).await["status"], "waiting");
            }
            assert_eq!(world.stubs.llm.requests_of("pauses").len(), 1);

            // Times that it gives are the store's, and so are those that it is given.
            let new = due(&there, GUARDED, "ends", "30m").await;
            let seen = there.waits_on(&new, "approval", 1).await;
            let expires_at = seen[0]["expires_at"].as_str().unwrap().to_owned();
            let of = there.seen_run(&new).await;
            for (time, expected) in [
                (of["created_at"].as_str().unwrap(), 0),
                (of["deadline"].as_str().unwrap(), 1800),
                (&expires_at, 1800),
            ] {
                let since = format!(
                    "SELECT abs(extract(epoch FROM '{time}'::timestamptz - now()) - {expected}) < 60"
                );
                assert_eq!(world.query(&since), [["t"]], "{time}");
            }
            let soon = world.query("SELECT to_char((now() + interval '20 minutes') AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')");
            due(&there, GUARDED, "ends", &soon[0][0]).await;

            // Alone it takes over what nobody holds any more, and decides what is still open.
            world.kill(0).await;
            charge.reached(2).await;
            charge.open();
            there.succeeded(&held).await;
            assert_eq!(world.stubs.tools.effects("/charge"), 1);
            let decided = there.decide(&expires, &asked[0], "approve", "d1").await;
            assert_eq!(decided.status(), 200, "{}", decided.text());
            there.succeeded(&expires).await;
            assert_eq!(there.seen_run(&ends).await["status"], "waiting");
            assert_eq!(there.seen_run(&pauses).await["status"], "waiting");
            world.holds().await;
        }
    });
}

/// S28: the clock of a SQLite host steps back and forth: nothing comes before its time or twice, leases do not mind.
#[test]
fn a_clock_that_steps_lets_nothing_happen_early_or_twice() {
    run(120, async {
        let skew = Skew::of(0);
        let options = Options {
            env: skew.env(),
            ..short_leases()
        };
        let world = World::with(Db::Sqlite, options, hasty).await;
        world.stubs.tools.honour_keys("/charge");
        for input in ["expires", "ends"] {
            world
                .stubs
                .llm
                .plays(input, vec![Say::call("c1", "deploy", "{}"), Say::text("told")]);
        }
        world.stubs.llm.plays(
            "held",
            vec![Say::call("c1", "charge", "{\"amount\":1}"), Say::text("paid")],
        );
        let api = world.api();
        let refused = Say::Status(429, vec![("retry-after".to_owned(), "600".to_owned())]);
        world.stubs.llm.next(vec![refused]);
        let pauses = api.run(WORKER, "pauses").await;
        api.waits_on(&pauses, "retry", 1).await;
        let ends = due(&api, GUARDED, "ends", "20m").await;
        api.waits_on(&ends, "approval", 1).await;
        let expires = api.run(GUARDED, "expires").await;
        api.waits_on(&expires, "approval", 1).await;
        let charge = world.stubs.tools.received("/charge");
        charge.close();
        let held = api.run(WORKER, "held").await;
        charge.reached(1).await;
        let asked = |input: &str| world.stubs.llm.requests_of(input).len();

        skew.step(-2 * HOUR);
        let during = api.run(WORKER, "during").await;
        api.succeeded(&during).await;
        let behind = format!(
            "SELECT CAST(strftime('%s') AS INTEGER) - created_at / 1000 FROM runs WHERE run_id = '{during}'"
        );
        let behind: i64 = world.query(&behind)[0][0].parse().unwrap();
        assert!((behind - 2 * HOUR).abs() < 60, "the clock did not step: {behind}");
        // What is waited for is that nothing happens: several polls and leases have to pass.
        let repeated = tokio::time::timeout(Duration::from_secs(3), charge.reached(2)).await;
        assert!(repeated.is_err(), "the call was repeated");
        for run in [&pauses, &ends, &expires] {
            assert_eq!(api.seen_run(run).await["status"], "waiting");
        }

        // The retry is due, the deadline and the expiry are not.
        skew.step(900);
        api.succeeded(&pauses).await;
        assert_eq!(asked("pauses"), 2);
        for run in [&ends, &expires] {
            assert_eq!(api.seen_run(run).await["status"], "waiting");
        }
        // The deadline is.
        skew.step(1500);
        let seen = api.over(&ends).await;
        assert_eq!(
            (&seen["status"], &seen["outcome"]["reason"]),
            (&json!("cancelled"), &json!("deadline"))
        );
        assert_eq!(api.seen_run(&expires).await["status"], "waiting");
        // The expiry is.
        skew.step(HOUR);
        api.succeeded(&expires).await;
        let approvals = api.all(&format!("/runs/{expires}/approvals")).await;
        assert_eq!(approvals[0]["status"], "expired");

        // Back again: what has happened stays as it is.
        skew.step(-2 * HOUR);
        let late = api.run(WORKER, "late").await;
        api.succeeded(&late).await;
        charge.open();
        api.succeeded(&held).await;
        assert_eq!((asked("pauses"), asked("expires"), asked("ends")), (2, 2, 1));
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        assert_eq!(world.stubs.tools.calls("/charge").len(), 1);
        assert_eq!(
            world.edges[0]
                .scrape()
                .await
                .sum("iop_edge_lease_losses_total", &[]),
            0.0
        );
        world.holds().await;
    });
}

const CHIEF: &str = "chief";

/// A worker that two hosts may die on, and a chief that delegates to it.
fn chief(stubs: &Stubs) -> String {
    let worker = agent(stubs, WORKER, "budgets = { recovery_attempts = 2 }\n");
    format!(
        "{worker}\n[agents.{CHIEF}]\nmodel = \"{MODEL}\"\ndurable = true\n[[agents.{CHIEF}.tools]]\n\
         name = \"delegate\"\nagent = {{ name = \"{WORKER}\" }}\neffect = \"idempotent\"\n"
    )
}

/// S32: what its hosts die on is given up, whether a tool or the model; a parent is told so and goes on.
#[test]
fn what_kills_its_hosts_again_and_again_is_given_up_and_its_parent_hears_of_it() {
    run(120, async {
        let mut world = World::start(Db::Sqlite, chief).await;
        world.stubs.tools.honour_keys("/charge");
        world.stubs.llm.plays(
            "delegate",
            vec![
                Say::call("c1", "delegate", "{\"task\":\"pay\"}"),
                Say::text("without it"),
            ],
        );
        world.stubs.llm.plays(
            "{\"task\":\"pay\"}",
            vec![Say::call("k1", "charge", "{\"amount\":1}")],
        );
        let charge = world.stubs.tools.received("/charge");
        charge.close();
        let parent = world.api().run(CHIEF, "delegate").await;
        for calls in 1..=3 {
            charge.reached(calls).await;
            world.kill_and_restart(0).await;
        }
        let api = world.api();
        let seen = api.succeeded(&parent).await;
        assert_eq!(seen["outcome"]["output"], "without it");
        let child = &api.all(&format!("/runs?parent_id={parent}")).await[0];
        assert_eq!(child["status"], "exhausted", "{child}");
        let told = llm::told(&world.stubs.llm.requests_of("delegate")[1]);
        let told: Value = serde_json::from_str(&told["c1"]).unwrap();
        assert_eq!(told["error"]["code"], "run_exhausted", "{told}");
        assert_eq!(world.stubs.tools.calls("/charge").len(), 3);
        charge.open();

        world.stubs.llm.asked.close();
        let turn = api.run(WORKER, "turn").await;
        for asked in 1..=3 {
            world.stubs.llm.asked.reached(asked).await;
            world.kill_and_restart(0).await;
        }
        let api = world.api();
        let seen = api.over(&turn).await;
        assert_eq!(seen["status"], "exhausted", "{seen}");
        assert_eq!(
            seen["outcome"]["exhausted"]["budget"], "recovery_attempts",
            "{seen}"
        );
        assert_eq!(world.stubs.llm.requests_of("turn").len(), 3);
        api.resume(&turn).await.assert_error(409, "run_terminal");
        world.stubs.llm.asked.open();
        world.holds().await;
    });
}

/// S33: a failed run is deleted on one edge while it is resumed on another: one of them wins, and a deleted run has no host.
#[test]
fn a_run_is_deleted_or_resumed() {
    run(180, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            if db == Db::Postgres {
                world.add_edge().await;
            }
            let last = world.edges.len() - 1;
            let races = (0..20).map(|n| {
                let (one, other, llm) = (world.api_of(0), world.api_of(last), &world.stubs.llm);
                async move {
                    let input = format!("race {n}");
                    llm.plays(&input, vec![Say::status(429)]);
                    let run = one.run(FRAGILE, &input).await;
                    let failed = one.until(&run, &["failed"]).await;
                    let path = format!("/api/v1/runs/{run}");
                    let (resume, token) = (format!("/runs/{run}/resume"), &failed["resume_token"]);
                    let token = json!({"resume_token": token});
                    let (deleted, resumed) = tokio::join!(
                        other.client.request("DELETE", &path, &[], b""),
                        one.post(&resume, &token)
                    );
                    let asked = match (deleted.status(), resumed.status()) {
                        (204, 410) => Some(1),
                        // Resumed, over again, and deleted then.
                        (204, 202) => Some(2),
                        (409, 202) => None,
                        _ => panic!("{} {}", deleted.text(), resumed.text()),
                    };
                    match asked {
                        Some(asked) => {
                            for api in [&one, &other] {
                                let gone = api.get(&format!("/runs/{run}")).await;
                                gone.assert_error(410, "run_deleted");
                            }
                            assert!(llm.requests_of(&input).len() <= asked);
                        }
                        None => {
                            deleted.assert_error(409, "run_busy");
                            let seen = one.until(&run, &["failed"]).await;
                            assert_eq!(seen["life"], 2, "{seen}");
                        }
                    }
                    (run, asked.is_some())
                }
            });
            for (run, deleted) in join_all(races).await {
                let left = format!("SELECT owner FROM run_leases WHERE run_id = '{run}'");
                assert!(!deleted || world.query(&left).is_empty(), "{run}");
            }
            world.holds().await;
        }
    });
}

/// S34: ends, cancellations and decisions of hundreds of runs at once, on two edges: everybody is answered, nothing is left, and the
/// database has seen no deadlock.
#[test]
fn a_crowd_of_ends_cancellations_and_decisions_leaves_nothing_behind() {
    run(300, async {
        let mut world = World::start(Db::Postgres, all).await;
        world.add_edge().await;
        world
            .stubs
            .llm
            .plays("gate", vec![Say::call("c1", "deploy", "{}"), Say::text("done")]);
        let ask = Say::call("c1", "request_input", "{\"prompt\":\"How many?\"}");
        world.stubs.llm.plays("ask", vec![ask, Say::text("done")]);
        let races = (0..300).map(|n| {
            let (one, other) = (world.api_of(0), world.api_of(1));
            async move {
                let ask = [WORKER, GUARDED, WORKER][n % 3];
                let run = one.run(ask, ["ask", "gate", "quick"][n % 3]).await;
                let answers = match n % 3 {
                    0 => {
                        let on = one.waits_on(&run, "input", 1).await;
                        let path = format!("/runs/{run}/inputs/{}", encode(on[0]["id"].as_str().unwrap()));
                        let given = json!({"value": n, "decision_id": "d1"});
                        // The same answer twice, on two edges.
                        let (given, again, ended) = tokio::join!(
                            one.post(&path, &given),
                            other.post(&path, &given),
                            cancel(&other, &run, "x1")
                        );
                        vec![given, again, ended]
                    }
                    1 => {
                        let on = one.waits_on(&run, "approval", 1).await;
                        let (approved, denied, ended) = tokio::join!(
                            one.decide(&run, &on[0], "approve", "d1"),
                            other.decide(&run, &on[0], "deny", "d2"),
                            cancel(&one, &run, "x1")
                        );
                        vec![approved, denied, ended]
                    }
                    _ => {
                        let (ended, again) =
                            tokio::join!(cancel(&one, &run, "x1"), cancel(&other, &run, "x2"));
                        vec![ended, again]
                    }
                };
                for answer in answers {
                    assert!([200, 202, 409].contains(&answer.status()), "{}", answer.text());
                }
                other.until(&run, &TERMINAL).await
            }
        });
        let ended: Vec<Value> = futures_util::stream::iter(races)
            .buffer_unordered(32)
            .collect()
            .await;
        for run in &ended {
            let status = run["status"].as_str().unwrap();
            assert!(["succeeded", "cancelled"].contains(&status), "{run}");
        }
        assert_eq!(ended.len(), 300);
        let log = world.postgres.as_ref().unwrap().log();
        assert!(!log.contains("deadlock"), "{log}");
        world.holds().await;
    });
}
