//! Odd answers of models and services, and what becomes of them in a run (D56, D69, D102, D241).

use std::path::Path;

use iop_tests::llm::{MODEL, Say, told};
use iop_tests::mcp_stub::Reply;
use iop_tests::process::finish;
use iop_tests::provider::{Exchange, Stub};
use iop_tests::run;
use iop_tests::runs::agents::{GUARDED, WORKER, all};
use iop_tests::runs::{Db, Options, ROOT, Stubs, World};
use iop_tests::tool_stub::Answer;
use serde_json::{Value, json};

const SECRET: &str = "a-long-secret-of-the-tests";

/// A service that says back what it was given, as an answer or as an error.
async fn mirror() -> Stub {
    Stub::start(|mut ex: Exchange| async move {
        let token = ex.header("authorization").unwrap_or_default().to_owned();
        let status = if ex.path.starts_with("/no") { 403 } else { 200 };
        let body = format!("your credential is {token}, of which {SECRET} is the secret");
        ex.reply(status, &[], body.as_bytes()).await
    })
    .await
}

fn agent(mirror: &str, stubs: &Stubs) -> String {
    format!(
        r#"
[agents.odd]
model = "{MODEL}"
durable = true

[[agents.odd.tools]]
name = "yes"
http = {{ url = "http://{mirror}/yes", headers = {{ authorization = {{ env = "ODD_TOKEN" }} }} }}

[[agents.odd.tools]]
name = "no"
http = {{ url = "http://{mirror}/no", headers = {{ authorization = {{ env = "ODD_TOKEN" }} }} }}

[[agents.odd.tools]]
name = "note"
http = {{ method = "POST", url = "{tools}/note" }}
retry = "none"
"#,
        tools = stubs.tools.url("")
    )
}

async fn world(mirror: &Stub) -> World {
    let mut options = Options::default();
    let secret = ("ODD_TOKEN".to_owned(), format!("Bearer {SECRET}"));
    options.env.push(secret);
    World::with(Db::Sqlite, options, |stubs| {
        agent(&mirror.addr.to_string(), stubs)
    })
    .await
}

/// What the model was told last.
fn last(world: &World, input: &str) -> Vec<(String, String)> {
    let requests = world.stubs.llm.requests_of(input);
    told(requests.last().unwrap()).into_iter().collect()
}

/// A service that has a secret said back to it has it; nobody else does, whatever it answers.
#[test]
fn a_secret_that_a_service_says_back_is_in_nothing_that_is_kept() {
    run(60, async {
        let mirror = mirror().await;
        let world = world(&mirror).await;
        let api = world.api();
        let both = Say::calls(&[("c1", "yes", "{}"), ("c2", "no", "{}")]);
        world.stubs.llm.plays("go", vec![both, Say::text("over")]);
        let run = api.run("odd", "go").await;
        api.succeeded(&run).await;
        let sent = mirror.received();
        let bearer = format!("Bearer {SECRET}");
        assert!(
            sent.iter()
                .all(|call| call.header("authorization") == Some(&bearer))
        );
        let said = "your credential is [redacted], of which [redacted] is the secret";
        let no = json!({"error": {"status": 403, "code": "http_403", "body": said}});
        let heard = last(&world, "go");
        assert_eq!(heard[0], ("c1".to_owned(), said.to_owned()));
        assert_eq!(serde_json::from_str::<Value>(&heard[1].1).unwrap(), no);
        for path in ["", "/activities", "/turns", "/steps", "/events", "/result"] {
            let shown = api.seen(&format!("/runs/{run}{path}")).await;
            assert!(!shown.to_string().contains(SECRET), "{path}: {shown}");
        }
        let page = world.edges[0].client().get("/metrics").await;
        assert!(!page.text().contains(SECRET));
        assert!(!world.edges[0].process.log().contains(SECRET));
    });
}

/// An empty id, the same id twice, and a name twice in the arguments: each call is one of its own, and only what one reader would
/// read as another does is sent.
#[test]
fn odd_calls_are_calls_all_the_same() {
    run(60, async {
        let mirror = mirror().await;
        let world = world(&mirror).await;
        let api = world.api();
        let odd = Say::calls(&[
            ("", "note", r#"{"n":0}"#),
            ("", "note", r#"{"n":1}"#),
            ("twin", "note", r#"{"n":2}"#),
            ("twin", "note", r#"{"n":3}"#),
            ("c", "note", r#"{"n":4,"n":5}"#),
        ]);
        world.stubs.llm.plays("go", vec![odd, Say::text("over")]);
        let run = api.run("odd", "go").await;
        api.succeeded(&run).await;
        let calls = world.stubs.tools.calls("/note");
        let mut sent: Vec<(String, i64)> = calls
            .iter()
            .map(|call| {
                let key = call.key.as_deref().unwrap().rsplit('/').next();
                (key.unwrap().to_owned(), call.json()["n"].as_i64().unwrap())
            })
            .collect();
        sent.sort();
        let keys = [("call_0.0", 0), ("call_1.1", 1), ("twin.2", 2), ("twin.3", 3)];
        assert_eq!(sent, keys.map(|(key, n)| (key.to_owned(), n)));
        let heard = last(&world, "go");
        let (_, refused) = heard.iter().find(|(id, _)| id == "c").unwrap();
        assert!(refused.contains("schema_violation"), "{refused}");
        assert_eq!(api.activities(&run).await.len(), 4);
    });
}

/// `iop-edge runs show` counts the tokens that `/turns` counts.
#[test]
fn the_command_line_shows_the_tokens_of_a_turn() {
    run(60, async {
        let mirror = mirror().await;
        let world = world(&mirror).await;
        let api = world.api();
        let run = api.run("odd", "go").await;
        api.succeeded(&run).await;
        let usage = api.seen(&format!("/runs/{run}/turns")).await["data"][0]["usage"].clone();
        let env = [
            ("IOP_URL".to_owned(), format!("http://{}", world.edges[0].http)),
            ("IOP_API_KEY".to_owned(), ROOT.to_owned()),
        ];
        let shown = finish("iop-edge", &["runs", "show", &run], &env, Path::new("/")).await;
        let tokens = format!("1, {} + {} tokens", usage["input_tokens"], usage["output_tokens"]);
        assert!(shown.stdout.contains(&tokens), "{tokens}: {}", shown.stdout);
        assert!(usage["input_tokens"].as_u64().unwrap() > 0);
    });
}

/// What a decision rests on may be a text or other JSON, and is shown as it was said (D90).
#[test]
fn evidence_is_a_text_or_other_json() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        for (n, evidence, status) in [
            (0, json!("ticket 7"), 200),
            (1, json!({"ticket": "OPS-7", "seen": [1, 2.50]}), 200),
            (2, json!(["a", null]), 200),
            (3, json!(null), 400),
            (4, json!(" "), 400),
        ] {
            let input = format!("go {n}");
            world.stubs.tools.script("/deploy", vec![Answer::cut()]);
            let say = vec![Say::call("c1", "deploy", "{}"), Say::text("over")];
            world.stubs.llm.plays(&input, say);
            let run = api.run(WORKER, &input).await;
            let seen = api.until(&run, &["ambiguous"]).await;
            let activity = seen["waiting_on"][0]["activity_id"].as_str().unwrap();
            let path = format!("/runs/{run}/activities/{activity}");
            let digest = api.seen(&path).await["input_digest"].clone();
            let body = json!({"action": "complete", "decision_id": "d", "attempt": 1, "input_digest": digest,
                "reason": "seen", "evidence": evidence, "output": "deployed", "resume": true});
            let answer = api.post(&format!("{path}/resolve"), &body).await;
            assert_eq!(answer.status(), status, "{}", answer.text());
            if status != 200 {
                assert_eq!(answer.json()["error"]["param"], "evidence");
                continue;
            }
            assert_eq!(answer.json()["decisions"][0]["evidence"], evidence);
            let again = api.post(&format!("{path}/resolve"), &body).await;
            assert_eq!(again.header("idempotency-replayed"), Some("true"));
            api.succeeded(&run).await;
        }
    });
}

/// A call that asks a person is one call: it is over once, it is shown in the words of the protocol, and one that never stops asking is
/// given up and told (S106).
#[test]
fn a_tool_that_asks_is_one_call_and_may_not_ask_for_ever() {
    run(60, async {
        let world = World::start(Db::Sqlite, |stubs| {
            stubs.mcp.modern();
            all(stubs)
        })
        .await;
        let api = world.api();
        let schema =
            json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
        let asks = Reply::asks("q", "Where to?", &schema, "s-1");
        world.stubs.mcp.script("launch", vec![asks, Reply::text("flown")]);
        let say = vec![Say::call("c1", "launch", r#"{"n": 1.50}"#), Say::text("over")];
        world.stubs.llm.plays("go", say.clone());
        let run = api.run(WORKER, "go").await;
        let on = api.waits_on(&run, "input", 1).await;
        let answer = json!({"decision_id": "d1", "value": {"city": "Paris"}});
        let path = format!("/runs/{run}/inputs/{}", on[0]["id"].as_str().unwrap());
        assert_eq!(api.post(&path, &answer).await.status(), 200);
        api.succeeded(&run).await;
        let names = api.event_names(&run).await;
        assert_eq!(
            names.iter().filter(|name| *name == "run.tool.completed").count(),
            1
        );
        let shown = api.activities(&run).await;
        let of =
            |member: &str, holds: &dyn Fn(&Value) -> bool| shown.iter().filter(|a| holds(&a[member])).count();
        assert_eq!(shown.len(), 2);
        assert_eq!(of("input", &|it| *it == json!({"n": 1.5})), 1, "{shown:?}");
        let responses = json!({"q": {"action": "accept", "content": {"city": "Paris"}}});
        assert_eq!(
            of("input", &|it| it["inputResponses"] == responses
                && it["requestState"] == "s-1"),
            1
        );
        assert_eq!(
            of("output", &|it| it["inputRequests"]["q"]["message"] == "Where to?"),
            1
        );
        assert_eq!(of("output", &|it| it == "flown"), 1);

        let later = Reply::Result(json!({"resultType": "input_required", "requestState": "later"}));
        world.stubs.mcp.script("launch", vec![later; 20]);
        world.stubs.llm.plays("round and round", say);
        let run = api.run(WORKER, "round and round").await;
        api.succeeded(&run).await;
        assert_eq!(world.stubs.mcp.calls("launch").len(), 2 + 10);
        let heard = last(&world, "round and round");
        assert!(heard[0].1.contains("too_many_rounds"), "{heard:?}");
        let names = api.event_names(&run).await;
        assert_eq!(
            names.iter().filter(|name| *name == "run.tool.completed").count(),
            1
        );
    });
}

/// What ran out is at least its limit: a turn that asks for more than is left is told with what it asks for (D17).
#[test]
fn a_spent_budget_of_calls_says_what_was_asked_for() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let reserve = |n: usize| (format!("c{n}"), "reserve".to_owned(), format!("{{\"n\":{n}}}"));
        for (input, limits, turns, used, sent) in [
            ("at once", json!({"tool_calls": 3}), vec![5], 5, 0),
            ("one by one", json!({"tool_calls": 2}), vec![1, 1, 1], 2, 2),
            ("the last two", json!({"tool_calls": 2}), vec![1, 2], 3, 1),
        ] {
            let before = world.stubs.tools.calls("/reserve").len();
            let mut made = 0..;
            let say = turns
                .into_iter()
                .map(|calls| Say::Calls(made.by_ref().take(calls).map(reserve).collect()));
            world.stubs.llm.plays(input, say.collect());
            let body = json!({"agent": WORKER, "input": input, "budgets": limits});
            let run = api.post("/runs", &body).await.json()["id"]
                .as_str()
                .unwrap()
                .to_owned();
            let seen = api.over(&run).await;
            let exhausted = json!({"budget": "tool_calls", "used": used, "limit": limits["tool_calls"]});
            assert_eq!(seen["outcome"]["exhausted"], exhausted, "{input}: {seen}");
            assert_eq!(seen["budgets"]["tool_calls"]["used"], used, "{input}");
            let calls = world.stubs.tools.calls("/reserve").len() - before;
            assert_eq!(calls, sent, "{input}");
        }
        let twice = Say::calls(&[("a", "reserve", "{}"), ("b", "reserve", "{}")]);
        world.stubs.llm.plays("twice", vec![twice]);
        let body = json!({"agent": WORKER, "input": "twice", "budgets": {"same_call": 1}});
        let run = api.post("/runs", &body).await.json()["id"]
            .as_str()
            .unwrap()
            .to_owned();
        let seen = api.over(&run).await;
        let exhausted = json!({"budget": "same_call", "used": 2, "limit": 1});
        assert_eq!(seen["outcome"]["exhausted"], exhausted, "{seen}");
    });
}

/// `outcome.error.attempt` counts the attempts of the call that failed (D14).
#[test]
fn an_error_says_which_attempt_it_was() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        world.stubs.llm.next(vec![Say::status(503), Say::status(503)]);
        let run = api.run(WORKER, "go").await;
        let outcome = api.over(&run).await["outcome"].clone();
        let exhausted = json!({"budget": "retry:turn-1", "used": 2, "limit": 2});
        assert_eq!(outcome["exhausted"], exhausted, "{outcome}");
        assert_eq!(outcome["error"]["attempt"], 2, "{outcome}");
        // So do its step and the event of it.
        let steps = api.all(&format!("/runs/{run}/steps")).await;
        assert_eq!(steps[0]["attempts"], 2, "{steps:?}");
        let events = api.events(&run).await;
        let over = events.iter().find(|event| event["event"] == "run.step.completed");
        assert_eq!(over.unwrap()["data"]["attempt"], 2, "{events:?}");
        world.stubs.llm.next(vec![Say::status(503), Say::status(400)]);
        let run = api.run(WORKER, "go").await;
        let outcome = api.over(&run).await["outcome"].clone();
        assert_eq!(outcome["status"], "failed", "{outcome}");
        assert_eq!(outcome["error"]["attempt"], 2, "{outcome}");
    });
}

/// A run that is ended from outside says what it used, as one that ends by itself does (D245).
#[test]
fn a_run_that_is_cancelled_while_it_waits_says_what_it_used() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let api = world.api();
        let say = Say::call("c1", "deploy", "{}");
        world.stubs.llm.plays("go", vec![say]);
        let cancel = json!({"cancel_id": "k", "reason": "no more"});
        let run = api.run(GUARDED, "go").await;
        api.waits_on(&run, "approval", 1).await;
        api.post(&format!("/runs/{run}/cancel"), &cancel).await;
        let waiting = api.over(&run).await;
        world.stubs.tools.script("/deploy", vec![Answer::cut()]);
        let run = api.run(WORKER, "go").await;
        let seen = api.until(&run, &["ambiguous"]).await;
        api.post(&format!("/runs/{run}/cancel"), &cancel).await;
        let activity = seen["waiting_on"][0]["activity_id"].as_str().unwrap();
        let path = format!("/runs/{run}/activities/{activity}");
        let digest = api.seen(&path).await["input_digest"].clone();
        let body = json!({"action": "fail", "decision_id": "d", "attempt": 1, "input_digest": digest,
            "reason": "seen", "evidence": "ticket 7"});
        api.post(&format!("{path}/resolve"), &body).await;
        for seen in [waiting, api.over(&run).await] {
            assert_eq!(seen["status"], "cancelled", "{seen}");
            let id = seen["id"].as_str().unwrap();
            let turn = api.seen(&format!("/runs/{id}/turns")).await["data"][0]["usage"].clone();
            assert!(turn["total_tokens"].as_u64().unwrap() > 0, "{turn}");
            assert_eq!(seen["outcome"]["usage"], turn, "{seen}");
        }
    });
}
