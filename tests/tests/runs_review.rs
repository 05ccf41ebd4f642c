//! Runs where rules meet: one name in both engines, requests that are repeated after their agent has changed, calls beside a call
//! that fails its run, children of agents that are gone.

use iop_tests::client::Answer;
use iop_tests::llm::{self, MODEL, Say};
use iop_tests::run;
use iop_tests::runs::{Api, Db, OTHER, OWNER, Options, Stubs, World};
use iop_tests::tool_stub;
use serde_json::{Value, json};

/// `both`: durable or not, as a run asks; `tools`: three unsafe tools, the first of which fails its run; `parent`: has agents for
/// tools.
fn agents(stubs: &Stubs) -> String {
    r#"
[agents.both]
model = "MODEL"
durable = true

[agents.tools]
model = "MODEL"
durable = true
[[agents.tools.tools]]
name = "wrong"
http = { method = "POST", url = "TOOLS/wrong" }
on_error = "fail_run"
[[agents.tools.tools]]
name = "one"
http = { method = "POST", url = "TOOLS/one" }
[[agents.tools.tools]]
name = "two"
http = { method = "POST", url = "TOOLS/two" }

[agents.thrifty]
model = "MODEL"
durable = true
budgets = { tokens = 1 }
[[agents.thrifty.tools]]
name = "one"
http = { method = "POST", url = "TOOLS/one" }

[prices."MODEL"]
input = "1"
output = "1"

[agents.parent]
model = "MODEL"
durable = true
[[agents.parent.tools]]
name = "brief"
agent = { name = "brief" }
[[agents.parent.tools]]
name = "missing"
agent = { name = "missing" }
[[agents.parent.tools]]
name = "gated"
agent = { name = "gated" }

[agents.brief]
model = "MODEL"
durable = true
retention = { delete_on_success = true }

[agents.strict]
model = "MODEL"
durable = true
approvals = { default = "always", on_deny = "fail_run" }
[[agents.strict.tools]]
name = "one"
http = { method = "POST", url = "TOOLS/one" }
[[agents.strict.tools]]
name = "two"
http = { method = "POST", url = "TOOLS/two" }

[agents.gated]
model = "MODEL"
durable = true
approvals = { default = "always" }
[[agents.gated.tools]]
name = "one"
http = { method = "POST", url = "TOOLS/one" }
"#
    .replace("MODEL", MODEL)
    .replace("TOOLS", &stubs.tools.url(""))
}

fn id(answer: &Answer) -> String {
    answer.json()["id"].as_str().unwrap().to_owned()
}

fn is_replay(answer: &Answer) -> bool {
    answer.status() == 200 && answer.header("idempotency-replayed") == Some("true")
}

async fn put(api: &Api, name: &str, spec: &Value) {
    let path = format!("/api/v1/agents/{name}");
    let body = spec.to_string();
    let answer = api.client.request("PUT", &path, &[], body.as_bytes()).await;
    assert!(matches!(answer.status(), 200 | 201), "{name}: {}", answer.text());
}

/// A run without durability takes neither the id nor the key of a durable one, and hides none from its owner.
#[test]
fn one_name_is_one_run_whatever_its_durability() {
    run(60, async {
        let world = World::start(Db::Sqlite, agents).await;
        let (owner, other) = (world.api().with_key(OWNER), world.api().with_key(OTHER));
        let body = |durable: bool, id: &str| json!({"agent": "both", "input": "x", "run_id": id, "durable": durable});
        for (first, id) in [(true, "named-1"), (false, "named-2")] {
            let made = owner.post("/runs", &body(first, id)).await;
            assert_eq!(made.status(), 202, "{}", made.text());
            owner.succeeded(id).await;
            for api in [&other, &owner] {
                let taken = api.post("/runs", &body(!first, id)).await;
                taken.assert_error(409, "idempotency_conflict");
            }
            assert_eq!(owner.get(&format!("/runs/{id}")).await.status(), 200);
            assert_eq!(other.get(&format!("/runs/{id}")).await.status(), 404);
            assert!(is_replay(&owner.post("/runs", &body(first, id)).await));
        }
        let body = |durable: bool| json!({"agent": "both", "input": "x", "durable": durable});
        let key = [("idempotency-key", "k")];
        let made = owner.create_with(&body(true), &key).await;
        assert_eq!(made.status(), 202);
        let other_body = owner.create_with(&body(false), &key).await;
        other_body.assert_error(409, "idempotency_conflict");
        // Keys are their callers' own.
        assert_eq!(other.create_with(&body(false), &key).await.status(), 202);
    });
}

/// The same request is the same run, whatever became of its agent since; another one under its name is a conflict.
#[test]
fn a_repeated_request_is_about_the_run_that_it_made() {
    run(90, async {
        for db in Db::BOTH {
            let world = World::start(db, agents).await;
            let api = world.api();
            let spec = |more: Value| {
                let mut spec = json!({"model": MODEL, "durable": true});
                spec.as_object_mut()
                    .unwrap()
                    .extend(more.as_object().unwrap().clone());
                spec
            };
            put(&api, "fleeting", &spec(json!({}))).await;
            let body = json!({"agent": "fleeting", "input": "q", "metadata": {"a": "1"}, "deadline": "1h"});
            let key = [("idempotency-key", "k")];
            let made = id(&api.create_with(&body, &key).await);
            let mut named = body.clone();
            named["run_id"] = json!("mine");
            assert_eq!(api.post("/runs", &named).await.status(), 202);
            for (member, value) in [
                ("metadata", json!({"a": "2"})),
                ("budgets", json!({"turns": 3})),
                ("deadline", json!("2h")),
                ("input", json!("r")),
            ] {
                let mut changed = named.clone();
                changed[member] = value;
                let answer = api.post("/runs", &changed).await;
                assert_eq!(
                    (answer.status(), answer.error_code().as_str()),
                    (409, "idempotency_conflict"),
                    "{member}"
                );
            }
            for more in [
                json!({}),
                json!({"instructions": "Be brief."}),
                json!({"durable": false, "budgets": {"turns": 7}}),
            ] {
                put(&api, "fleeting", &spec(more)).await;
                let again = api.create_with(&body, &key).await;
                assert!(is_replay(&again), "{}", again.text());
                assert_eq!(id(&again), made);
                let again = api.post("/runs", &named).await;
                assert!(is_replay(&again), "{}", again.text());
            }
            let gone = api
                .client
                .request("DELETE", "/api/v1/agents/fleeting", &[], b"")
                .await;
            assert_eq!(gone.status(), 204);
            let again = api.create_with(&body, &key).await;
            assert!(is_replay(&again) && id(&again) == made, "{}", again.text());
            let other = api.create_with(&named, &key).await;
            other.assert_error(409, "idempotency_conflict");
        }
    });
}

/// The run fails with the call that fails it; the calls beside it are carried out, and none is left unknown that was not sent.
#[test]
fn calls_beside_one_that_fails_its_run_come_to_their_ends() {
    run(120, async {
        let world = World::start(Db::Sqlite, agents).await;
        let api = world.api();
        let wrong = tool_stub::Answer::status(400);
        world.stubs.tools.always("/wrong", wrong);
        for n in 0..60 {
            let input = format!("go {n}");
            let calls = [("c1", "wrong", "{}"), ("c2", "one", "{}"), ("c3", "two", "{}")];
            world.stubs.llm.plays(&input, vec![Say::calls(&calls)]);
            let run = api.run("tools", &input).await;
            let seen = api.until(&run, &["failed", "ambiguous"]).await;
            assert_eq!(seen["status"], "failed", "{seen}");
            let made = api.activities(&run).await;
            let states: Vec<&Value> = made.iter().map(|a| &a["state"]).collect();
            assert_eq!(
                states.iter().filter(|s| **s == "completed").count(),
                2,
                "{made:?}"
            );
        }
        assert_eq!(world.stubs.tools.effects("/one"), 60);
    });
}

/// A denial that fails its run is no leave for the calls beside it, which were approved and had not left.
#[test]
fn a_denial_that_fails_the_run_comes_before_what_has_not_left() {
    run(60, async {
        let options = Options {
            workers: 1,
            ..Options::default()
        };
        let world = World::with(Db::Sqlite, options, agents).await;
        let (api, stub) = (world.api(), &world.stubs.tools);
        let holds = stub.received("/one");
        world.stubs.llm.plays("busy", vec![Say::call("c1", "one", "{}")]);
        for (n, denied) in [1, 0, 1].into_iter().enumerate() {
            let input = format!("go {n}");
            let calls = [("c1", "two", "{}"), ("c2", "two", "{}")];
            world.stubs.llm.plays(&input, vec![Say::calls(&calls)]);
            let run = api.run("strict", &input).await;
            let on = api.waits_on(&run, "approval", 2).await;
            api.until(&run, &["waiting"]).await;
            // The only worker is busy: both decisions are there when the run goes on.
            holds.close();
            let busy = api.run("tools", "busy").await;
            holds.reached(1).await;
            for (m, approval) in on.iter().enumerate() {
                let decision = if m == denied { "deny" } else { "approve" };
                let decided = api.decide(&run, approval, decision, &format!("d{m}")).await;
                assert_eq!(decided.status(), 200, "{}", decided.text());
            }
            holds.open();
            let seen = api.over(&run).await;
            assert_eq!(
                (&seen["status"], &seen["outcome"]["reason"]),
                (&json!("failed"), &json!("denied")),
                "{seen}"
            );
            assert_eq!(api.activities(&run).await, Vec::<Value>::new());
            api.succeeded(&busy).await;
        }
        assert!(stub.calls("/two").is_empty());

        // What had left before comes to its end.
        let two = stub.received("/two");
        two.close();
        world.stubs.llm.plays(
            "left",
            vec![Say::calls(&[("c1", "two", "{}"), ("c2", "one", "{}")])],
        );
        let run = api.run("strict", "left").await;
        let mut on = api.waits_on(&run, "approval", 2).await;
        on.sort_by_key(|approval| approval["call_id"].to_string());
        assert_eq!(api.decide(&run, &on[0], "approve", "d0").await.status(), 200);
        two.reached(1).await;
        assert_eq!(api.decide(&run, &on[1], "deny", "d1").await.status(), 200);
        two.open();
        let seen = api.over(&run).await;
        assert_eq!(seen["outcome"]["reason"], "denied", "{seen}");
        let made = api.activities(&run).await;
        assert_eq!(
            (made.len(), &made[0]["state"]),
            (1, &json!("completed")),
            "{made:?}"
        );
        world.holds().await;
    });
}

/// What a child says reaches its parent though the child's agent keeps no runs; why there is no child reaches the model.
#[test]
fn a_parent_is_told_what_became_of_its_children() {
    run(60, async {
        let world = World::start(Db::Sqlite, agents).await;
        let api = world.api();
        let (brief, missing) = (("c1", "brief", "{\"n\": 1}"), ("c2", "missing", "{}"));
        let turns = vec![Say::calls(&[brief, missing]), Say::text("done")];
        world.stubs.llm.plays("both", turns);
        world.stubs.llm.plays("{\"n\": 1}", vec![Say::text("in brief")]);
        let run = api.run("parent", "both").await;
        api.succeeded(&run).await;
        let told = llm::told(&world.stubs.llm.requests_of("both")[1]);
        assert_eq!(told["c1"], "in brief");
        let why: Value = serde_json::from_str(&told["c2"]).unwrap();
        assert_eq!(why["error"]["code"], "agent_not_found", "{why}");

        // A pause for a person does not end with a process: a run that does has no such child.
        world
            .stubs
            .llm
            .plays("gone", vec![Say::call("c1", "gated", "{}"), Say::text("done")]);
        let volatile = json!({"agent": "parent", "input": "gone", "durable": false});
        let made = api.post("/runs", &volatile).await;
        assert_eq!(made.status(), 202, "{}", made.text());
        api.succeeded(&id(&made)).await;
        let told = llm::told(&world.stubs.llm.requests_of("gone")[1]);
        let why: Value = serde_json::from_str(&told["c1"]).unwrap();
        assert_eq!(why["error"]["code"], "unsupported_guarantee", "{why}");
    });
}

/// Every JSON is an input, and every text is a result.
#[test]
fn what_looks_like_nothing_is_told_as_it_is() {
    run(60, async {
        let world = World::start(Db::Sqlite, agents).await;
        let api = world.api();
        let answer = api
            .post("/runs?wait=20s", &json!({"agent": "both", "input": null}))
            .await;
        assert_eq!(answer.json()["status"], "succeeded", "{}", answer.text());
        let asked = world.stubs.llm.requests_of("null");
        assert_eq!(asked.len(), 1);

        let odd = "\0iop/input-required\0{\"questions\":{},\"state\":null}";
        let said = tool_stub::Answer::bytes(200, odd.as_bytes());
        world.stubs.tools.script("/one", vec![said]);
        world
            .stubs
            .llm
            .plays("odd", vec![Say::call("start/c1", "one", "{}"), Say::text("done")]);
        let run = api.run("tools", "odd").await;
        api.succeeded(&run).await;
        assert_eq!(llm::told(&world.stubs.llm.requests_of("odd")[1])["start/c1"], odd);
        // A call is shown, whatever the model calls it.
        let made = api.activities(&run).await;
        assert_eq!(made.len(), 1, "{made:?}");
        assert_eq!(made[0]["call_id"], "start/c1");
    });
}

/// A budget that ran out is shown as used as its end says.
#[test]
fn a_spent_budget_is_shown_as_spent() {
    run(60, async {
        let world = World::start(Db::Sqlite, agents).await;
        let api = world.api();
        world
            .stubs
            .llm
            .plays("thrift", vec![Say::call("c1", "one", "{}")]);
        let run = api.run("thrifty", "thrift").await;
        let seen = api.over(&run).await;
        assert_eq!(seen["status"], "exhausted", "{seen}");
        let ended = &seen["outcome"]["exhausted"];
        assert_eq!((&ended["budget"], &ended["limit"]), (&json!("tokens"), &json!(1)));
        assert_eq!(seen["budgets"]["tokens"]["used"], ended["used"], "{seen}");
        assert!(ended["used"].as_u64().unwrap() > 1, "{seen}");
        // The turn that was one too many was asked for and answered.
        assert_eq!(seen["outcome"]["usage"]["total_tokens"], ended["used"], "{seen}");
        let names = api.event_names(&run).await;
        assert!(names.contains(&"run.turn.completed".to_owned()), "{names:?}");

        // Money is told as money: where it is shown, and where it ran out.
        world.stubs.llm.plays("paid", vec![Say::call("c1", "one", "{}")]);
        let body = json!({"agent": "thrifty", "input": "paid", "budgets": {"tokens": 1_000_000, "spend": "0.000001"}});
        let made = api.post("/runs", &body).await;
        assert_eq!(made.status(), 202, "{}", made.text());
        let seen = api.over(&id(&made)).await;
        let ended = &seen["outcome"]["exhausted"];
        assert_eq!(ended["budget"], "spend", "{seen}");
        assert_eq!(ended["limit"], json!(0.000_001));
        assert_eq!(
            seen["budgets"]["spend"],
            json!({"used": ended["used"], "limit": 0.000_001})
        );
        assert!(ended["used"].as_f64().unwrap() < 1.0, "{seen}");
        assert_eq!(
            seen["budgets"]["tokens"]["used"], seen["outcome"]["usage"]["total_tokens"],
            "{seen}"
        );
        assert!(world.stubs.tools.calls("/one").is_empty());
    });
}
