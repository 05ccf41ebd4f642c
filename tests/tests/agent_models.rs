//! Agents as models (durable-api §2): `agent:<name>` on chat and responses, a pause and its answer over the same API.

use std::time::Duration;

use iop_tests::client::{Answer, Client, sse_data};
use iop_tests::config::{Provider, Setup, key};
use iop_tests::llm::{Llm, MODEL, Say, told};
use iop_tests::runs::agents::{GUARDED, WORKER, all};
use iop_tests::runs::{Db, OTHER, OWNER, Options, ROOT, World};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{eventually, run};
use serde_json::{Value, json};

const RUN_ID: &str = "x-iop-run-id";

fn model(agent: &str) -> String {
    format!("agent:{agent}")
}

fn messages(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

async fn chat(client: &Client, agent: &str, text: &str) -> Answer {
    let body = json!({"model": model(agent), "messages": messages(text)});
    client.post("/v1/chat/completions", &body).await
}

/// `POST /v1/responses` with these members besides the model.
async fn respond(client: &Client, agent: &str, members: &Value) -> Answer {
    let mut body = members.clone();
    body["model"] = json!(model(agent));
    client.post("/v1/responses", &body).await
}

/// The same, for what must be answered.
async fn response(client: &Client, agent: &str, members: &Value) -> Value {
    let answer = respond(client, agent, members).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    answer.json()
}

/// The events of a streamed response; they are numbered from 0 and have one id.
async fn streamed(client: &Client, agent: &str, members: &Value) -> Vec<Value> {
    let mut members = members.clone();
    members["stream"] = json!(true);
    let answer = respond(client, agent, &members).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    assert!(answer.complete);
    let events: Vec<Value> = sse_data(&answer.text())
        .iter()
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    for (n, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], n, "{event}");
    }
    events
}

fn ended(events: &[Value]) -> &Value {
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed", "{last}");
    &last["response"]
}

fn output_text(response: &Value) -> String {
    let items = response["output"].as_array().unwrap();
    let texts = items
        .iter()
        .filter_map(|item| item["content"][0]["text"].as_str());
    texts.collect::<Vec<_>>().join("|")
}

fn approvals(response: &Value) -> Vec<Value> {
    let items = response["output"].as_array().unwrap();
    let asked = items.iter().filter(|item| item["type"] == "mcp_approval_request");
    asked.cloned().collect()
}

fn decision(approval: &Value, approve: bool) -> Value {
    json!({"type": "mcp_approval_response", "approval_request_id": approval["id"], "approve": approve})
}

fn run_of(response: &Value) -> String {
    response["metadata"]["iop_run_id"].as_str().unwrap().to_owned()
}

fn deploys(world: &World, input: &str) {
    let turns = vec![
        Say::call("c1", "deploy", "{\"region\": \"eu\"}"),
        Say::text("it is deployed"),
    ];
    world.stubs.llm.plays(input, turns);
}

/// An agent stands among the models, and one that is not there is no model.
#[test]
fn agents_are_models() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client();
        let listed = client.get("/v1/models").await.json();
        let ids: Vec<&str> = listed["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|model| model["id"].as_str().unwrap())
            .collect();
        for id in [MODEL, "agent:worker", "agent:guarded"] {
            assert!(ids.contains(&id), "{id} in {ids:?}");
        }
        for path in ["/v1/models/agent:worker", "/v1/models/agent%3Aworker"] {
            let one = client.get(path).await;
            assert_eq!(
                (one.status(), one.json()["id"].as_str()),
                (200, Some("agent:worker"))
            );
            assert!(one.json()["created"].as_i64().unwrap() > 1_600_000_000);
        }
        client
            .get("/v1/models/agent:nobody")
            .await
            .assert_error(404, "model_not_found");
        let none = chat(&client, "nobody", "x").await;
        none.assert_error(404, "model_not_found");
        assert_eq!(none.json()["error"]["param"], "model");
        let none = respond(&client, "nobody", &json!({"input": "x"})).await;
        none.assert_error(404, "model_not_found");
        // A declaration over REST is a model at once, and none when it is withdrawn.
        let spec = json!({"model": MODEL});
        let put = client
            .request("PUT", "/api/v1/agents/late", &[], spec.to_string().as_bytes())
            .await;
        assert_eq!(put.status(), 201, "{}", put.text());
        assert_eq!(client.get("/v1/models/agent:late").await.status(), 200);
        assert_eq!(chat(&client, "late", "x").await.status(), 200);
        client.request("DELETE", "/api/v1/agents/late", &[], b"").await;
        client
            .get("/v1/models/agent:late")
            .await
            .assert_error(404, "model_not_found");
        chat(&client, "late", "x")
            .await
            .assert_error(404, "model_not_found");
        // What an agent does not take is named, and no run begins.
        let before = world.api().all("/runs").await.len();
        let tools =
            json!({"model": "agent:worker", "messages": messages("x"), "tools": [{"type": "function"}]});
        let refused = client.post("/v1/chat/completions", &tools).await;
        refused.assert_error(400, "invalid_request_error");
        assert_eq!(refused.json()["error"]["param"], "tools");
        let refused = respond(&client, WORKER, &json!({"input": "x", "store": false})).await;
        refused.assert_error(400, "invalid_request_error");
        assert_eq!(refused.json()["error"]["param"], "store");
        assert_eq!(world.api().all("/runs").await.len(), before);
    });
}

/// A chat completion is a run: whole it says what came last, streamed every turn as it comes.
#[test]
fn chat_answers_with_what_the_agent_says() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client().with_key(OWNER);
        world.stubs.llm.plays(
            "stock",
            vec![
                Say::call("c1", "lookup", "{\"sku\": \"a1\"}"),
                Say::text("one is left"),
            ],
        );
        let answer = chat(&client, WORKER, "stock").await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let run = answer.header(RUN_ID).unwrap().to_owned();
        let body = answer.json();
        assert_eq!(
            (&body["object"], &body["model"]),
            (&json!("chat.completion"), &json!("agent:worker"))
        );
        assert_eq!(body["choices"][0]["message"]["content"], "one is left");
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        // Two turns, each of twelve tokens.
        assert_eq!(body["usage"]["total_tokens"], 24);
        let seen = world.api().succeeded(&run).await;
        assert_eq!(seen["outcome"]["usage"]["total_tokens"], 24);
        assert_eq!(world.stubs.tools.calls("/items/a1").len(), 1);
        // The run is its key's: another sees none of it.
        let other = world.api().with_key(OTHER);
        other
            .get(&format!("/runs/{run}"))
            .await
            .assert_error(404, "run_not_found");

        let halfway = &world.stubs.llm.halfway;
        halfway.close();
        let body = json!({"model": "agent:worker", "messages": messages("hello"), "stream": true,
                          "stream_options": {"include_usage": true}, "metadata": {"team": "a"}, "temperature": 1});
        world
            .stubs
            .llm
            .plays("hello", vec![Say::text("good morning to you all")]);
        let mut conn = client.open("/v1/chat/completions", &body).await;
        let head = conn.head().await.unwrap();
        assert_eq!(head.status, 200);
        // The first words are there while the model still writes.
        let mut text = conn.until("morning").await;
        halfway.open();
        while let Some(piece) = conn.piece().await.unwrap() {
            text.push_str(std::str::from_utf8(&piece).unwrap());
        }
        let data = sse_data(&text);
        assert_eq!(data.last().map(String::as_str), Some("[DONE]"));
        let chunks: Vec<Value> = data[..data.len() - 1]
            .iter()
            .map(|chunk| serde_json::from_str(chunk).unwrap())
            .collect();
        let said: String = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(said, "good morning to you all");
        assert_eq!(chunks.last().unwrap()["usage"]["total_tokens"], 12);
        let run = head.header(RUN_ID).unwrap();
        let seen = world.api().succeeded(run).await;
        assert_eq!(seen["metadata"], json!({"team": "a"}));
        assert_eq!(world.stubs.llm.requests_of("hello").len(), 1);
        world.holds().await;
    });
}

/// On chat a pause ends the answer, naming what is waited for and where; the run stays.
#[test]
fn a_chat_that_needs_an_approval_says_so() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client();
        deploys(&world, "ship");
        let answer = chat(&client, GUARDED, "ship").await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let run = answer.header(RUN_ID).unwrap().to_owned();
        let on = world.api().waits_on(&run, "approval", 1).await;
        let body = answer.json();
        let content = body["choices"][0]["message"]["content"].as_str().unwrap();
        for word in [
            run.as_str(),
            on[0]["id"].as_str().unwrap(),
            on[0]["url"].as_str().unwrap(),
        ] {
            assert!(content.contains(word), "{word} in {content}");
        }
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        world.api().approve(&run).await;
        world.api().succeeded(&run).await;
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
    });
}

/// A client that leaves does not end its run.
#[test]
fn who_leaves_ends_nothing() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client();
        let asked = &world.stubs.llm.asked;
        asked.close();
        for (path, body) in [
            (
                "/v1/chat/completions",
                json!({"messages": messages("a"), "stream": true}),
            ),
            ("/v1/chat/completions", json!({"messages": messages("b")})),
            ("/v1/responses", json!({"input": "c", "stream": true})),
        ] {
            let mut body = body;
            body["model"] = json!("agent:worker");
            let conn = client.open(path, &body).await;
            asked.reached(1).await;
            drop(conn);
            asked.open();
            let runs = eventually("the run is over", Duration::from_secs(20), || async {
                let runs = world.api().all("/runs").await;
                match runs.iter().all(|run| run["status"] == "succeeded") {
                    true => Ok(runs),
                    false => Err(format!("{runs:?}")),
                }
            })
            .await;
            assert!(!runs.is_empty());
            asked.close();
        }
        asked.open();
        assert_eq!(world.api().all("/runs").await.len(), 3);
    });
}

/// A response asks for an approval, the next one answers it and streams on; each can be read again from any edge, also after the
/// process was killed.
#[test]
fn a_response_asks_and_the_next_one_answers() {
    run(150, async {
        for db in Db::BOTH {
            let mut world = World::start(db, all).await;
            let client = world.edges[0].client();
            deploys(&world, "ship");
            let events = streamed(
                &client,
                GUARDED,
                &json!({"input": "ship", "metadata": {"team": "a"}}),
            )
            .await;
            let first = ended(&events).clone();
            assert_eq!(
                (&first["model"], &first["store"], &first["metadata"]["team"]),
                (&json!("agent:guarded"), &json!(true), &json!("a"))
            );
            let asked = approvals(&first);
            assert_eq!(asked.len(), 1, "{first}");
            assert_eq!(
                (
                    &asked[0]["name"],
                    &asked[0]["arguments"],
                    &asked[0]["server_label"]
                ),
                (
                    &json!("deploy"),
                    &json!("{\"region\": \"eu\"}"),
                    &json!("guarded")
                )
            );
            let run = run_of(&first);
            let on = world.api().waits_on(&run, "approval", 1).await;
            assert_eq!(on[0]["id"], asked[0]["id"]);
            let path = format!("/v1/responses/{}", first["id"].as_str().unwrap());
            assert_eq!(client.get(&path).await.json(), first);

            world.kill_and_restart(0).await;
            if db == Db::Postgres {
                // Asked at one edge, answered at another.
                world.add_edge().await;
            }
            let last = world.edges.len() - 1;
            let client = world.edges[last].client();
            assert_eq!(client.get(&path).await.json(), first);
            let approve = json!({"previous_response_id": first["id"], "input": [decision(&asked[0], true)]});
            let events = streamed(&client, GUARDED, &approve).await;
            let second = ended(&events).clone();
            assert_eq!(output_text(&second), "it is deployed");
            assert_eq!(
                (&second["previous_response_id"], run_of(&second)),
                (&first["id"], run.clone())
            );
            assert_ne!(second["id"], first["id"]);
            world.api_of(last).succeeded(&run).await;
            // The same request is the same decision and the same answer.
            assert_eq!(response(&client, GUARDED, &approve).await, second);
            assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
            assert_eq!(world.stubs.tools.calls("/deploy")[0].body, "{\"region\": \"eu\"}");
            let decided = world.api_of(last).all(&format!("/runs/{run}/approvals")).await;
            assert_eq!(
                (&decided[0]["status"], &decided[0]["decided_by"]),
                (&json!("approved"), &json!("root"))
            );
            // Another word is another decision, and it comes too late.
            let deny = json!({"previous_response_id": first["id"], "input": [decision(&asked[0], false)]});
            let late = respond(&client, GUARDED, &deny).await;
            late.assert_error(409, "approval_already_decided");
            assert_eq!(late.header("x-should-retry"), Some("false"));

            let again = format!("/v1/responses/{}", second["id"].as_str().unwrap());
            for edge in &world.edges {
                let client = edge.client();
                assert_eq!(client.get(&again).await.json(), second);
                let told = client.get(&format!("{again}?stream=true")).await;
                let end = sse_data(&told.text()).pop().unwrap();
                let end: Value = serde_json::from_str(&end).unwrap();
                assert_eq!(end["response"], second);
            }
            let sent = client.get(&format!("{path}/input_items")).await.json();
            assert_eq!(sent["data"][0]["content"][0]["text"], "ship");
            let sent = client.get(&format!("{again}/input_items")).await.json();
            assert_eq!(
                (
                    &sent["data"][0]["approval_request_id"],
                    &sent["data"][0]["approve"]
                ),
                (&asked[0]["id"], &json!(true))
            );
            world.holds().await;
        }
    });
}

/// Of two calls each has its own approval; a denial is told to the model, with its reason.
#[test]
fn approvals_are_answered_one_by_one_or_together() {
    run(90, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client();
        let two = [
            ("c1", "deploy", "{\"region\": \"eu\"}"),
            ("c2", "charge", "{\"amount\": 500}"),
        ];
        for input in ["apart", "together"] {
            world
                .stubs
                .llm
                .plays(input, vec![Say::calls(&two), Say::text("all done")]);
        }
        let first = response(&client, GUARDED, &json!({"input": "apart"})).await;
        let asked = approvals(&first);
        let by = |name: &str| asked.iter().find(|item| item["name"] == name).unwrap();
        assert_eq!(asked.len(), 2, "{first}");
        let one = json!({"previous_response_id": first["id"], "input": [decision(by("deploy"), true)]});
        let second = response(&client, GUARDED, &one).await;
        let left = approvals(&second);
        assert_eq!(left, [by("charge").clone()], "{second}");
        // The first response still asks for it: answering it there leads to the same end.
        let mut no = decision(by("charge"), false);
        no["reason"] = json!("too much");
        let other = json!({"previous_response_id": first["id"], "input": [no]});
        let third = response(&client, GUARDED, &other).await;
        assert_eq!(output_text(&third), "all done");
        assert_eq!(approvals(&third), Vec::<Value>::new());
        assert_eq!(third["previous_response_id"], second["id"]);
        let path = format!("/v1/responses/{}", third["id"].as_str().unwrap());
        assert_eq!(client.get(&path).await.json(), third);
        assert_eq!(response(&client, GUARDED, &other).await, third);
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 1);
        assert_eq!(world.stubs.tools.calls("/charge").len(), 0);
        let bodies = world.stubs.llm.requests_of("apart");
        let results = told(bodies.last().unwrap());
        let refused: Value = serde_json::from_str(&results["c2"]).unwrap();
        assert_eq!(
            refused,
            json!({"refused": true, "by": "approval", "reason": "too much"})
        );

        let first = response(&client, GUARDED, &json!({"input": "together"})).await;
        let all: Vec<Value> = approvals(&first)
            .iter()
            .map(|asked| decision(asked, true))
            .collect();
        let both = json!({"previous_response_id": first["id"], "input": all});
        let events = streamed(&client, GUARDED, &both).await;
        assert_eq!(output_text(ended(&events)), "all done");
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 2);
        assert_eq!(world.stubs.tools.calls("/charge").len(), 1);
        world.holds().await;
    });
}

/// Who may not decide, and what does not belong together, decides nothing.
#[test]
fn a_decision_needs_its_role_and_its_response() {
    run(60, async {
        let deciders = |stubs: &iop_tests::runs::Stubs| {
            let rules = r#"
[agents.strict.approvals]
deciders = ["boss"]
[[agents.strict.approval_rules]]
tool = "deploy"
when = "always"
"#;
            let mut agents = all(stubs);
            agents.push_str(&iop_tests::runs::agents::agent(stubs, "strict", rules));
            agents
        };
        let world = World::start(Db::Sqlite, deciders).await;
        let root = world.edges[0].client();
        let owner = root.with_key(OWNER);
        let other = root.with_key(OTHER);
        deploys(&world, "ship");
        deploys(&world, "more");
        let first = response(&owner, GUARDED, &json!({"input": "ship"})).await;
        let asked = approvals(&first);
        let approve = json!({"previous_response_id": first["id"], "input": [decision(&asked[0], true)]});
        respond(&owner, GUARDED, &approve)
            .await
            .assert_error(403, "permission_denied");
        // For another key there is no such response, whatever it does.
        let path = format!("/v1/responses/{}", first["id"].as_str().unwrap());
        respond(&other, GUARDED, &approve)
            .await
            .assert_error(404, "not_found");
        other.get(&path).await.assert_error(404, "not_found");
        let cancel = other.request("POST", &format!("{path}/cancel"), &[], b"").await;
        cancel.assert_error(404, "not_found");
        assert_eq!(owner.get(&path).await.json(), first);

        let second = response(&root, GUARDED, &json!({"input": "more"})).await;
        let theirs = approvals(&second);
        let run = run_of(&first);
        for (previous, approval, status, code) in [
            // An approval of another run, and one that there is none of.
            (&first["id"], &theirs[0]["id"], 404, "approval_not_found"),
            (&first["id"], &json!("apr_0"), 404, "approval_not_found"),
            (&json!(null), &asked[0]["id"], 400, "invalid_request_error"),
            (&json!("resp_1"), &asked[0]["id"], 404, "not_found"),
        ] {
            let item =
                json!({"type": "mcp_approval_response", "approval_request_id": approval, "approve": true});
            let body = json!({"previous_response_id": previous, "input": [item]});
            respond(&root, GUARDED, &body).await.assert_error(status, code);
        }
        // A place in the run where no answer begins.
        let begun = first["id"].as_str().unwrap().strip_suffix("_0").unwrap();
        let nowhere = format!("{begun}_1");
        let mut elsewhere = approve.clone();
        elsewhere["previous_response_id"] = json!(nowhere);
        respond(&root, GUARDED, &elsewhere)
            .await
            .assert_error(404, "not_found");
        let twice = json!({"previous_response_id": first["id"],
                           "input": [decision(&asked[0], true), decision(&asked[0], false)]});
        respond(&root, GUARDED, &twice)
            .await
            .assert_error(400, "invalid_request_error");
        respond(&root, WORKER, &approve)
            .await
            .assert_error(400, "invalid_request_error");
        // A run that waits takes no message.
        let words = json!({"previous_response_id": first["id"], "input": "hurry"});
        let busy = respond(&root, GUARDED, &words).await;
        busy.assert_error(409, "run_waiting");
        assert!(
            busy.text().contains(asked[0]["id"].as_str().unwrap()),
            "{}",
            busy.text()
        );
        assert_eq!(busy.header("x-should-retry"), Some("false"));
        let seen = world.api().seen_run(&run).await;
        assert_eq!(seen["status"], "waiting");

        deploys(&world, "strictly");
        let strict = response(&root, "strict", &json!({"input": "strictly"})).await;
        let body =
            json!({"previous_response_id": strict["id"], "input": [decision(&approvals(&strict)[0], true)]});
        respond(&root, "strict", &body)
            .await
            .assert_error(403, "permission_denied");
        assert!(world.stubs.tools.calls("/deploy").is_empty());
        // The model of a provider cannot go on from a run.
        let foreign = json!({"model": MODEL, "previous_response_id": first["id"], "input": "x"});
        let refused = root.post("/v1/responses", &foreign).await;
        refused.assert_error(400, "invalid_request_error");
        assert_eq!(refused.json()["error"]["param"], "previous_response_id");
    });
}

/// A message after the end is a new run of the same conversation; each request's instructions are its own.
#[test]
fn a_conversation_goes_on_in_a_new_run() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client().with_key(OWNER);
        world
            .stubs
            .llm
            .plays("hello", vec![Say::text("good day"), Say::text("and good night")]);
        let first = response(
            &client,
            WORKER,
            &json!({"input": "hello", "instructions": "be brief"}),
        )
        .await;
        assert_eq!(output_text(&first), "good day");
        let next = json!({"previous_response_id": first["id"], "instructions": "be kind",
                          "input": [{"role": "user", "content": [{"type": "input_text", "text": "and now?"}]}]});
        let second = response(&client, WORKER, &next).await;
        assert_eq!(output_text(&second), "and good night");
        assert_eq!(second["previous_response_id"], first["id"]);
        assert_ne!(run_of(&second), run_of(&first));
        let sent = &world.stubs.llm.requests_of("hello")[1]["messages"];
        assert_eq!(
            *sent,
            json!([
                {"role": "system", "content": "You are tested."},
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "good day"},
                {"role": "user", "content": "and now?"},
            ])
        );
        let path = format!("/v1/responses/{}", second["id"].as_str().unwrap());
        assert_eq!(client.get(&path).await.json(), second);
        let sent = client
            .get(&format!("{path}/input_items?order=asc&limit=2"))
            .await
            .json();
        assert_eq!(
            (sent["data"].as_array().unwrap().len(), &sent["has_more"]),
            (2, &json!(true))
        );
        // Removing it is for admins, as the run is.
        let denied = client.request("DELETE", &path, &[], b"").await;
        denied.assert_error(403, "permission_denied");
        let root = client.with_key(ROOT);
        let gone = root.request("DELETE", &path, &[], b"").await;
        assert_eq!((gone.status(), &gone.json()["deleted"]), (200, &json!(true)));
        client.get(&path).await.assert_error(404, "not_found");
    });
}

/// What a person is asked is a message; the next text is the answer.
#[test]
fn a_question_is_answered_by_the_next_text() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client();
        let question = "{\"prompt\": \"How many?\", \"schema\": {\"type\": \"integer\", \"minimum\": 1}}";
        world.stubs.llm.plays(
            "order",
            vec![Say::call("c1", "request_input", question), Say::text("ordered")],
        );
        let first = response(&client, WORKER, &json!({"input": "order"})).await;
        assert_eq!(output_text(&first), "How many?");
        let says = |text: &str| json!({"previous_response_id": first["id"], "input": text});
        respond(&client, WORKER, &says("none"))
            .await
            .assert_error(422, "schema_violation");
        let owner = client.with_key(OWNER);
        respond(&owner, WORKER, &says("7"))
            .await
            .assert_error(404, "not_found");
        let second = response(&client, WORKER, &says("7")).await;
        assert_eq!(output_text(&second), "ordered");
        assert_eq!(run_of(&second), run_of(&first));
        assert_eq!(response(&client, WORKER, &says("7")).await, second);
        let bodies = world.stubs.llm.requests_of("order");
        assert_eq!(told(bodies.last().unwrap())["c1"], "7");
        assert_eq!(bodies.len(), 2);
        world.holds().await;
    });
}

/// A run that does not end well is an error in each API's form, and SDKs do not start it again.
#[test]
fn a_failed_run_is_an_error() {
    run(90, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client();
        let runs = || async { world.api().all("/runs").await.len() };
        for input in ["a", "b", "c", "d"] {
            world.stubs.llm.plays(input, vec![Say::status(400)]);
        }
        let whole = chat(&client, WORKER, "a").await;
        assert!((400..=599).contains(&whole.status()), "{}", whole.text());
        assert!(!whole.error_code().is_empty());
        assert_eq!(whole.header("x-should-retry"), Some("false"));
        let run = whole.header(RUN_ID).unwrap();
        let outcome = world.api().over(run).await["outcome"].clone();
        assert_eq!(outcome["error"]["code"], whole.json()["error"]["code"]);
        let body = json!({"model": "agent:worker", "messages": messages("b"), "stream": true});
        let stream = client.post("/v1/chat/completions", &body).await;
        assert_eq!(stream.status(), 200);
        assert!(!stream.text().contains("[DONE]"), "{}", stream.text());
        let last: Value = serde_json::from_str(&sse_data(&stream.text()).pop().unwrap()).unwrap();
        assert_eq!(last["error"]["code"], whole.json()["error"]["code"]);
        let events = streamed(&client, WORKER, &json!({"input": "c"})).await;
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.failed");
        assert_eq!(last["response"]["status"], "failed");
        assert_eq!(last["response"]["error"]["code"], whole.json()["error"]["code"]);
        let path = format!("/v1/responses/{}", last["response"]["id"].as_str().unwrap());
        assert_eq!(client.get(&path).await.json(), last["response"]);
        let whole = respond(&client, WORKER, &json!({"input": "d"})).await;
        assert!(
            whole.status() >= 400 && whole.header(RUN_ID).is_some(),
            "{}",
            whole.text()
        );
        assert_eq!(runs().await, 4);
    });
}

/// A response under way is `in_progress`; it can be cancelled.
#[test]
fn a_response_under_way_is_read_and_cancelled() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client().with_key(OWNER);
        world.stubs.llm.asked.close();
        let body = json!({"model": "agent:worker", "input": "slow", "stream": true});
        let mut conn = client.open("/v1/responses", &body).await;
        conn.head().await.unwrap();
        let mut text = conn.until("response.in_progress").await;
        let created: Value = serde_json::from_str(&sse_data(&text)[0]).unwrap();
        let path = format!("/v1/responses/{}", created["response"]["id"].as_str().unwrap());
        world.stubs.llm.asked.reached(1).await;
        let open = client.get(&path).await.json();
        assert_eq!(
            (&open["status"], &open["output"]),
            (&json!("in_progress"), &json!([]))
        );
        let message = json!({"previous_response_id": open["id"], "input": "more"});
        respond(&client, WORKER, &message)
            .await
            .assert_error(409, "run_busy");
        let cancelled = client.request("POST", &format!("{path}/cancel"), &[], b"").await;
        assert_eq!(cancelled.status(), 200, "{}", cancelled.text());
        while let Some(piece) = conn.piece().await.unwrap() {
            text.push_str(std::str::from_utf8(&piece).unwrap());
        }
        let last: Value = serde_json::from_str(&sse_data(&text).pop().unwrap()).unwrap();
        assert_eq!(
            (&last["type"], &last["response"]["status"]),
            (&json!("response.failed"), &json!("cancelled"))
        );
        assert_eq!(client.get(&path).await.json(), last["response"]);
        world.stubs.llm.asked.open();
    });
}

/// A model that fails in the middle is asked again; what it said before does not count.
#[test]
fn what_an_attempt_said_before_it_failed_does_not_count() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client();
        world.stubs.llm.plays("cut", vec![Say::text("the whole answer")]);
        world
            .stubs
            .llm
            .next(vec![Say::Cut(3, "a half that nobody keeps".to_owned())]);
        let events = streamed(&client, WORKER, &json!({"input": "cut"})).await;
        let output = ended(&events)["output"].as_array().unwrap();
        let whole: Vec<&Value> = output
            .iter()
            .filter(|item| item["status"] == "completed")
            .collect();
        assert_eq!(whole.len(), 1, "{output:?}");
        assert_eq!(whole[0]["content"][0]["text"], "the whole answer");
        let half: Vec<&Value> = output
            .iter()
            .filter(|item| item["status"] == "incomplete")
            .collect();
        assert_eq!(half.len(), 1, "{output:?}");
    });
}

/// The same key is the same run, for who sends a request again.
#[test]
fn an_idempotency_key_makes_one_run() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client();
        world.stubs.llm.plays("once", vec![Say::text("said once")]);
        let headers = [("idempotency-key", "k1"), ("content-type", "application/json")];
        let mut runs = Vec::new();
        for stream in [false, true] {
            let body = json!({"model": "agent:worker", "input": "once"}).to_string();
            let answer = client
                .request("POST", "/v1/responses", &headers, body.as_bytes())
                .await;
            assert_eq!(answer.status(), 200, "{}", answer.text());
            assert_eq!(output_text(&answer.json()), "said once");
            runs.push(answer.header(RUN_ID).unwrap().to_owned());
            let other = json!({"model": "agent:worker", "input": "twice", "stream": stream}).to_string();
            let taken = client
                .request("POST", "/v1/responses", &headers, other.as_bytes())
                .await;
            taken.assert_error(409, "idempotency_conflict");
        }
        assert_eq!(runs[0], runs[1]);
        assert_eq!(world.stubs.llm.requests_of("once").len(), 1);
    });
}

/// Ids of other shapes, and of runs that are not here, are the providers'.
#[test]
fn foreign_responses_go_to_their_providers() {
    run(60, async {
        let world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client();
        let unknown = format!("resp_{}_0", "0".repeat(32));
        for id in ["resp_of_a_provider", unknown.as_str()] {
            // The stub answers every GET with its models.
            let answer = client.get(&format!("/v1/responses/{id}")).await;
            assert_eq!((answer.status(), &answer.json()["object"]), (200, &json!("list")));
        }
    });
}

/// A call that nobody knows the effect of ends the answer, and says where it is resolved.
#[test]
fn an_effect_that_nobody_knows_of_is_told() {
    run(60, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let client = world.edges[0].client();
        deploys(&world, "blind");
        let received = world.stubs.tools.received("/deploy");
        received.close();
        let body = json!({"model": "agent:worker", "messages": messages("blind"), "stream": true});
        let mut conn = client.open("/v1/chat/completions", &body).await;
        let head = conn.head().await.unwrap();
        let run = head.header(RUN_ID).unwrap();
        received.reached(1).await;
        world.kill_and_restart(0).await;
        received.open();
        world.api().until(run, &["ambiguous"]).await;
        let client = world.edges[0].client();
        let path = format!("/v1/responses/resp_{}_0", run.strip_prefix("run_").unwrap());
        let told = client.get(&path).await.json();
        assert_eq!(told["status"], "completed");
        let on = world.api().seen_run(run).await["waiting_on"][0].clone();
        assert!(
            output_text(&told).contains(on["url"].as_str().unwrap()),
            "{told} {on}"
        );
        let words = json!({"previous_response_id": told["id"], "input": "and?"});
        respond(&client, WORKER, &words)
            .await
            .assert_error(409, "run_waiting");
    });
}

/// A run that is deleted at its end has answered before.
#[test]
fn a_run_that_is_deleted_has_answered() {
    run(60, async {
        let brief = |stubs: &iop_tests::runs::Stubs| {
            let rules = "[agents.brief.retention]\ndelete_on_success = true\n";
            iop_tests::runs::agents::agent(stubs, "brief", rules)
        };
        let world = World::start(Db::Sqlite, brief).await;
        let client = world.edges[0].client();
        let mut runs = Vec::new();
        for n in 0..5 {
            let answer = chat(&client, "brief", &format!("x{n}")).await;
            assert_eq!(answer.json()["choices"][0]["message"]["content"], "done");
            runs.push(answer.header(RUN_ID).unwrap().to_owned());
        }
        for run in runs {
            let path = format!("/runs/{run}");
            eventually("the run is deleted", Duration::from_secs(10), || async {
                match world.api().get(&path).await.status() {
                    410 => Ok(()),
                    other => Err(other.to_string()),
                }
            })
            .await;
        }
    });
}

/// An edge that goes says so; the run goes on where the store is opened next.
#[test]
fn an_edge_that_goes_leaves_the_run_to_the_next() {
    run(60, async {
        let options = Options::default().line("runs", "cancel_grace = \"500ms\"");
        let mut world = World::with(Db::Sqlite, options, all).await;
        let client = world.edges[0].client();
        world.stubs.llm.plays("long", vec![Say::text("said in the end")]);
        world.stubs.llm.asked.close();
        let body = json!({"model": "agent:worker", "messages": messages("long"), "stream": true});
        let mut streamed = client.open("/v1/chat/completions", &body).await;
        assert_eq!(streamed.head().await.unwrap().status, 200);
        world.stubs.llm.asked.reached(1).await;
        let body = json!({"model": "agent:worker", "input": "long"});
        let mut whole = client.open("/v1/responses", &body).await;
        world.stubs.llm.asked.reached(2).await;
        world.edges[0].process.signal("TERM");
        let text = String::from_utf8(streamed.body().await.unwrap().to_vec()).unwrap();
        let last: Value = serde_json::from_str(&sse_data(&text).pop().unwrap()).unwrap();
        assert_eq!(last["error"]["code"], "draining", "{text}");
        let answer = whole.answer().await.unwrap();
        answer.assert_error(503, "draining");
        // Sent again it would be another run.
        assert_eq!(answer.header("x-should-retry"), Some("false"));
        let run = answer.header(RUN_ID).unwrap();
        world.edges[0].process.exit(Duration::from_secs(20)).await;
        world.stubs.llm.asked.open();
        world.restart(0).await;
        world.api().succeeded(run).await;
        let hex = run.strip_prefix("run_").unwrap();
        let path = format!("/v1/responses/resp_{hex}_0");
        let read = world.edges[0].client().get(&path).await.json();
        assert_eq!(output_text(&read), "said in the end");
        world.holds().await;
    });
}

/// A key needs the agent and the agent's model in its list, and one place is enough for its runs. Runs that no store keeps answer
/// alike.
#[test]
fn a_keys_models_and_places_hold_for_agents() {
    run(60, async {
        let llm = Llm::start().await;
        let keyed = |name: &str, models: &str| {
            let more = format!(", concurrency = 1, models = {models}");
            key(name, &format!("sk-{name}"), &["inference"], &more)
        };
        let keys = [
            key("root", ROOT, &["inference", "operator", "admin", "metrics"], ""),
            keyed("both", "[\"agent:solo\", \"gpt-test\"]"),
            keyed("agent", "[\"agent:solo\"]"),
            keyed("model", "[\"gpt-test\"]"),
        ];
        let dir = tempfile::tempdir().unwrap();
        let store = format!("url = \"sqlite://{}/iop.db\"", dir.path().display());
        let provider = Provider::openai("p", &llm.url(), &[MODEL]);
        let setup = Setup::of(provider)
            .keys(&keys, ROOT)
            .edge("store", &store)
            .edge("agents.solo", &format!("model = {MODEL:?}"))
            .edge("agents.solo", "durable = false");
        let stack = Stack::start_empty(Shape::Embedded, setup).await;
        let client = stack.client();
        for (name, status) in [("both", 200), ("agent", 403), ("model", 403)] {
            let client = client.with_key(&format!("sk-{name}"));
            // What is listed can be called, and nothing else.
            let sees = status == 200;
            let listed = client.get("/v1/models").await.text();
            assert_eq!(listed.contains("agent:solo"), sees, "{name}: {listed}");
            let one = client.get("/v1/models/agent:solo").await;
            assert_eq!(one.status(), if sees { 200 } else { 404 }, "{name}");
            let answer = chat(&client, "solo", name).await;
            assert_eq!(answer.status(), status, "{name}: {}", answer.text());
            if status == 403 {
                answer.assert_error(403, "permission_denied");
                assert_eq!(answer.json()["error"]["param"], "model");
            }
        }
        let first = response(&client.with_key("sk-both"), "solo", &json!({"input": "again"})).await;
        assert_eq!(output_text(&first), "done");
        let path = format!("/v1/responses/{}", first["id"].as_str().unwrap());
        assert_eq!(client.get(&path).await.json(), first);
        let next = json!({"previous_response_id": first["id"], "input": "more"});
        let second = response(&client.with_key("sk-both"), "solo", &next).await;
        assert_eq!(output_text(&second), "done");
        assert_eq!(llm.requests().len(), 3);
    });
}
