//! HTTP tools of agents from outside: what a service is sent, what the model is told of its answer, and who tries again
//! (durable-api §5, §8 "Tools", "Who retries").

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use iop_tests::llm::{self, MODEL, Say};
use iop_tests::run;
use iop_tests::runs::{Api, Db, Options, Stubs, World};
use iop_tests::tool_stub::Answer;
use serde_json::{Value, json};

const AGENT: &str = "worker";
const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// One agent with these tools; `TOOLS` stands for the service's URL.
fn agent(tools: &str) -> impl FnOnce(&Stubs) -> String {
    let text = format!("[agents.{AGENT}]\nmodel = \"{MODEL}\"\ndurable = true\n{tools}");
    move |stubs: &Stubs| text.replace("TOOLS", &stubs.tools.url(""))
}

/// A tool that posts to `/NAME`, with further lines.
fn tool(name: &str, lines: &str) -> String {
    format!(
        "[[agents.{AGENT}.tools]]\nname = \"{name}\"\nhttp = {{ method = \"POST\", url = \"TOOLS/{name}\", timeout = \"20s\" }}\n{lines}\n"
    )
}

/// Lets the model make these calls in one turn, and gives the run.
async fn calls(world: &World, input: &str, calls: &[(&str, &str, &str)]) -> String {
    let turns = vec![Say::calls(calls), Say::text("done")];
    world.stubs.llm.plays(input, turns);
    world.api().run(AGENT, input).await
}

/// What the model was told in the turn after the calls, by call id.
fn told(world: &World, input: &str) -> BTreeMap<String, String> {
    llm::told(&world.stubs.llm.requests_of(input)[1])
}

fn told_json(world: &World, input: &str, call: &str) -> Value {
    serde_json::from_str(&told(world, input)[call]).unwrap()
}

async fn activity(api: &Api, run: &str, call: &str) -> Value {
    let all = api.activities(run).await;
    let found = all.iter().find(|a| a["call_id"] == call);
    found.unwrap_or_else(|| panic!("{call}: {all:?}")).clone()
}

/// The request is what the declaration and the model say, byte for byte; secrets are read at each call and stay out of the log.
#[test]
fn a_call_is_sent_as_it_is_declared_and_written() {
    run(60, async {
        let secrets = tempfile::tempdir().unwrap();
        let file = secrets.path().join("token");
        std::fs::write(&file, "Bearer first-token\n").unwrap();
        let tools = format!(
            r#"
[[agents.{AGENT}.tools]]
name = "lookup"
http = {{ url = "TOOLS/items/{{sku}}?v=2", headers = {{ authorization = {{ env = "STOCK_TOKEN" }} }} }}
effect = "read_only"
{}"#,
            tool("charge", "").replace(
                "timeout",
                &format!("headers = {{ x-team = \"ops\", authorization = {{ file = {file:?} }} }}, timeout")
            )
        );
        let mut options = Options::default();
        options
            .env
            .push((String::from("STOCK_TOKEN"), String::from("Bearer stock-token")));
        let world = World::with(Db::Sqlite, options, agent(&tools)).await;
        let written =
            "{ \"amount\" : 1.50,\n \"to\":\"\\u0041cct-77\", \"n\": 123456789012345678901234567890 }";
        let lookup = r#"{"sku":"a/b c","depth":2,"tags":["x", "y"],"none":null}"#;
        let both = [("c1", "lookup", lookup), ("c2", "charge", written)];
        let turns = vec![Say::calls(&both), Say::text("done")];
        world.stubs.llm.plays("first", turns);
        let body = json!({"agent": AGENT, "input": "first"});
        let made = world.api().create_with(&body, &[("traceparent", TRACE)]).await;
        let run = made.json()["id"].as_str().unwrap().to_owned();
        world.api().succeeded(&run).await;

        let seen = &world.stubs.tools.calls("/items/a%2Fb%20c")[0];
        assert_eq!((seen.method.as_str(), seen.body.len()), ("GET", 0));
        let query: Vec<_> = seen.query.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        assert_eq!(query, [("depth", "2"), ("tags", r#"["x","y"]"#), ("v", "2")]);
        assert_eq!(seen.header("authorization"), Some("Bearer stock-token"));

        let seen = &world.stubs.tools.calls("/charge")[0];
        assert_eq!(seen.body, written);
        assert_eq!(seen.header("content-type"), Some("application/json"));
        assert_eq!(seen.header("x-team"), Some("ops"));
        assert_eq!(seen.header("traceparent"), Some(TRACE));
        assert_eq!(seen.header("authorization"), Some("Bearer first-token"));
        let key = seen.key.as_deref().unwrap();
        let activity = activity(&world.api(), &run, "c2").await;
        assert_eq!(activity["idempotency_key"], key);
        assert!(
            key.starts_with(&format!("{run}/")) && key.ends_with("/c2.1"),
            "{key}"
        );
        assert_eq!(key.split('/').count(), 4);

        std::fs::write(&file, "Bearer second-token\n").unwrap();
        let again = calls(&world, "second", &[("c1", "charge", "{}")]).await;
        world.api().succeeded(&again).await;
        let seen = &world.stubs.tools.calls("/charge")[1];
        assert_eq!(seen.header("authorization"), Some("Bearer second-token"));

        for private in ["stock-token", "first-token", "second-token", "cct-77", "a/b c"] {
            assert_eq!(world.edges[0].process.lines_with(private), Vec::<String>::new());
        }
        let metrics = world.edges[0].scrape().await;
        assert!(!format!("{metrics:?}").contains(&run));
        world.holds().await;
    });
}

/// Text is told verbatim, other bytes as base64, and failures as what was answered.
#[test]
fn what_a_tool_answers_is_told_as_it_is() {
    run(60, async {
        let names = ["text", "binary", "empty", "missing", "moved", "large"];
        let tools: String = names.iter().map(|name| tool(name, "")).collect();
        let options = Options::default().line("runs", "max_result = \"64KiB\"");
        let world = World::with(Db::Sqlite, options, agent(&tools)).await;
        let stub = &world.stubs.tools;
        stub.always("/text", Answer::bytes(200, "{ \"ü\": 1.50 }\n".as_bytes()));
        stub.always("/binary", Answer::bytes(200, &[0, 0xff, 1]));
        stub.always("/empty", Answer::bytes(204, b""));
        stub.always("/missing", Answer::bytes(404, b"no such \"thing\""));
        stub.always("/moved", Answer::bytes(302, b"").header("location", "/text"));
        stub.always("/large", Answer::bytes(200, &vec![b'x'; (64 << 10) + 1]));
        let wanted: Vec<_> = names.iter().map(|name| (*name, *name, "{}")).collect();
        let run = calls(&world, "go", &wanted).await;
        world.api().succeeded(&run).await;

        let told = told(&world, "go");
        assert_eq!(told["text"], "{ \"ü\": 1.50 }\n");
        assert_eq!(told["binary"], r#"{"encoding":"base64","data":"AP8B"}"#);
        assert_eq!(told["empty"], "");
        for (name, status, code, body) in [
            ("missing", json!(404), "http_404", Some("no such \"thing\"")),
            ("moved", json!(302), "http_302", Some("")),
            ("large", Value::Null, "payload_too_large", None),
        ] {
            let error = &told_json(&world, "go", name)["error"];
            assert_eq!(
                (&error["status"], &error["code"]),
                (&status, &json!(code)),
                "{name}"
            );
            assert!(body.is_none_or(|body| error["body"] == body), "{error}");
            let activity = activity(&world.api(), &run, name).await;
            assert_eq!(activity["state"], "failed", "{activity}");
            assert_eq!(activity["error"]["code"], code, "{activity}");
        }
        for name in names {
            assert_eq!(stub.calls(&format!("/{name}")).len(), 1, "{name}");
        }
        world.holds().await;
    });
}

/// Calls that cannot be made are told so, and nothing leaves.
#[test]
fn a_call_that_cannot_be_made_is_told_and_not_sent() {
    run(60, async {
        let tools = format!(
            r#"
[[agents.{AGENT}.tools]]
name = "lookup"
parameters = {{ type = "object", properties = {{ sku = {{ type = "string" }} }}, required = ["sku"] }}
http = {{ url = "TOOLS/items/{{sku}}" }}
effect = "read_only"
{}"#,
            tool("deploy", "")
        );
        let world = World::start(Db::Sqlite, agent(&tools)).await;
        let wanted = [
            ("missing", "lookup", "{}"),
            ("kind", "lookup", r#"{"sku":7}"#),
            ("dots", "lookup", r#"{"sku":".."}"#),
            ("empty", "lookup", r#"{"sku":""}"#),
            ("twice", "deploy", r#"{"a":"secret","a":"other"}"#),
            ("list", "deploy", r#"["secret"]"#),
            ("half", "deploy", r#"{"a":"sec"#),
            ("unknown", "launch", "{}"),
        ];
        let run = calls(&world, "go", &wanted).await;
        world.api().succeeded(&run).await;
        let told = told(&world, "go");
        assert_eq!(told.len(), wanted.len());
        for (call, text) in &told {
            let error: Value = serde_json::from_str(text).unwrap();
            assert!(error["error"]["code"].is_string(), "{call}: {text}");
            assert_eq!(error["error"]["status"], Value::Null, "{call}: {text}");
            assert!(!text.contains("secret"), "{call}: {text}");
        }
        assert!(told["missing"].contains("sku"), "{}", told["missing"]);
        assert!(told["kind"].contains("/properties/sku/type"), "{}", told["kind"]);
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 0);
        assert_eq!(world.stubs.tools.calls("/items/").len(), 0);
        assert_eq!(world.stubs.tools.calls("/").len(), 0);
        world.holds().await;
    });
}

/// An answered error is nobody's to repeat when the tool is unsafe, and is no ambiguity.
#[test]
fn an_answered_error_of_an_unsafe_tool_is_told_once() {
    run(60, async {
        let world = World::start(Db::Sqlite, agent(&tool("deploy", ""))).await;
        for status in [500, 503, 429, 408] {
            let answer = Answer::status(status).retry_after(1);
            world.stubs.tools.script("/deploy", vec![answer]);
            let input = format!("go {status}");
            let run = calls(&world, &input, &[("c1", "deploy", "{}")]).await;
            world.api().succeeded(&run).await;
            assert_eq!(told_json(&world, &input, "c1")["error"]["status"], status);
        }
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 4);
        world.holds().await;
    });
}

/// A retry is the run's own, waits as long as the service asks, and ends.
#[test]
fn a_retry_waits_as_long_as_the_service_asks_and_ends() {
    run(90, async {
        let retry =
            "effect = \"idempotent\"\nretry = { max_attempts = 2, backoff = \"fixed\", initial = \"10ms\" }";
        let tools = [
            tool("told", retry),
            tool("fails", &format!("{retry}\non_error = \"fail_run\"")),
        ];
        let world = World::start(Db::Sqlite, agent(&tools.concat())).await;
        let (api, stub) = (world.api(), &world.stubs.tools);

        stub.script("/told", vec![Answer::status(429).retry_after(2)]);
        let begun = Instant::now();
        let run = calls(&world, "hint", &[("c1", "told", "{}")]).await;
        let waits = api.waits_on(&run, "retry", 1).await;
        assert_eq!(stub.calls("/told").len(), 1, "{waits:?}");
        api.succeeded(&run).await;
        assert_eq!(told(&world, "hint")["c1"], r#"{"ok":true}"#);
        let record = activity(&api, &run, "c1").await;
        assert_eq!(record["attempt"], 2, "{record}");
        assert!(begun.elapsed() >= Duration::from_secs(2));
        let keys: Vec<_> = stub.calls("/told").into_iter().map(|c| c.key).collect();
        assert!(keys[0].is_some() && keys[0] == keys[1]);

        stub.script("/told", vec![Answer::status(503), Answer::status(502)]);
        let run = calls(&world, "ends", &[("c1", "told", "{}")]).await;
        api.succeeded(&run).await;
        assert_eq!(told_json(&world, "ends", "c1")["error"]["status"], 502);

        stub.script("/fails", vec![Answer::status(503), Answer::status(503)]);
        let run = calls(&world, "exhausts", &[("c1", "fails", "{}")]).await;
        let seen = api.over(&run).await;
        assert_eq!(seen["status"], "exhausted", "{seen}");
        let exhausted = &seen["outcome"]["exhausted"];
        assert_eq!(exhausted["budget"], "retry:fails", "{seen}");
        assert_eq!((&exhausted["used"], &exhausted["limit"]), (&json!(2), &json!(2)));

        stub.script("/fails", vec![Answer::status(404)]);
        let run = calls(&world, "not again", &[("c1", "fails", "{}")]).await;
        let seen = api.over(&run).await;
        assert_eq!(
            (&seen["status"], &seen["resumable"]),
            (&json!("failed"), &json!(false)),
            "{seen}"
        );
        let error = &seen["outcome"]["error"];
        assert_eq!(
            (&error["kind"], &error["code"]),
            (&json!("tool_error"), &json!("http_404")),
            "{seen}"
        );
        assert_eq!((stub.calls("/told").len(), stub.calls("/fails").len()), (4, 3));
        world.holds().await;
    });
}

/// A call that got no answer is unknown when it is unsafe; the service's own evidence settles it, and nothing is sent twice.
#[test]
fn a_call_without_an_answer_is_unknown_only_when_it_is_unsafe() {
    run(90, async {
        let found = r#"reconcile = { url = "TOOLS/found/transfer?key={idempotency_key}", found = "$.id" }"#;
        let short = |tool: String| tool.replace("20s", "2s");
        let tools = [
            tool("transfer", found),
            short(tool("deploy", "")),
            short(tool("read", "effect = \"read_only\"")),
        ];
        let world = World::start(Db::Sqlite, agent(&tools.concat())).await;
        let (api, stub) = (world.api(), &world.stubs.tools);

        stub.script("/transfer", vec![Answer::cut()]);
        let run = calls(&world, "found", &[("c1", "transfer", "{}")]).await;
        api.succeeded(&run).await;
        let record = activity(&api, &run, "c1").await;
        assert_eq!(record["origin"], "reconciled", "{record}");
        let key = record["idempotency_key"].as_str().unwrap();
        let evidence: Value = serde_json::from_str(&told(&world, "found")["c1"]).unwrap();
        assert_eq!(evidence["id"], format!("effect-{key}"));
        assert_eq!((stub.calls("/transfer").len(), stub.effects("/transfer")), (1, 1));

        stub.received("/deploy").close();
        let run = calls(&world, "late", &[("c1", "deploy", "{}")]).await;
        let seen = api.until(&run, &["ambiguous"]).await;
        assert_eq!(seen["waiting_on"][0]["tool"], "deploy", "{seen}");
        stub.received("/deploy").open();
        assert_eq!(stub.calls("/deploy").len(), 1);

        stub.received("/read").close();
        let run = calls(&world, "slow", &[("c1", "read", "{}")]).await;
        api.succeeded(&run).await;
        stub.received("/read").open();
        let error = &told_json(&world, "slow", "c1")["error"];
        assert_eq!(
            (&error["status"], &error["code"]),
            (&Value::Null, &json!("timeout")),
            "{error}"
        );
        assert_eq!(stub.calls("/read").len(), 1);
        world.holds().await;
    });
}

/// Calls of one turn run beside each other, and each has its own key and its own answer.
#[test]
fn calls_of_one_turn_run_beside_each_other() {
    run(60, async {
        for db in Db::BOTH {
            let world = World::start(db, agent(&tool("charge", "effect = \"idempotent\""))).await;
            let stub = &world.stubs.tools;
            stub.honour_keys("/charge");
            let received = stub.received("/charge");
            received.close();
            let wanted = [
                ("c1", "charge", r#"{"n":1}"#),
                ("c1", "charge", r#"{"n":2}"#),
                ("c3", "charge", r#"{"n":3}"#),
            ];
            let run = calls(&world, "go", &wanted).await;
            // All three are there before any is answered.
            received.reached(3).await;
            received.open();
            world.api().succeeded(&run).await;
            let mut seen = stub.calls("/charge");
            seen.sort_by_key(|c| c.json()["n"].as_u64());
            let keys: Vec<_> = seen.iter().map(|c| c.key.clone().unwrap()).collect();
            for (key, tail) in keys.iter().zip(["/c1.0", "/c1.1", "/c3.2"]) {
                assert!(key.ends_with(tail), "{keys:?}");
            }
            assert_eq!(stub.effects("/charge"), 3);
            world.holds().await;
        }
    });
}
