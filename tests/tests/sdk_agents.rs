//! The official Python SDK and the OpenAI Agents SDK drive an agent as a model, through an approval.

use iop_tests::llm::Say;
use iop_tests::runs::agents::{GUARDED, all};
use iop_tests::runs::{Db, ROOT, World};
use iop_tests::{run, sdk};
use serde_json::json;

#[test]
fn sdks_run_an_agent_through_an_approval() {
    run(300, async {
        let world = World::start(Db::Sqlite, all).await;
        let llm = &world.stubs.llm;
        llm.plays("sdk chat", vec![Say::text("hello to you")]);
        let inputs = [
            "sdk responses",
            "sdk denied",
            "agents callback",
            "agents interruption",
        ];
        for input in inputs {
            let turns = vec![
                Say::call("c1", "deploy", "{\"region\": \"eu\"}"),
                Say::text("that is done"),
            ];
            llm.plays(input, turns);
        }
        let base = format!("http://{}/v1", world.edges[0].http);
        let seen = sdk::run_python("agent_models.py", &[&base, ROOT, GUARDED]).await;
        let model = format!("agent:{GUARDED}");
        assert_eq!(seen["models"], json!([true, model]));
        assert_eq!(seen["chat"], json!(["hello to you", 12, "hello to you", 12]));

        let responses = &seen["responses"];
        let asked = json!([["deploy", "{\"region\": \"eu\"}", GUARDED]]);
        let first = &responses["first"];
        assert_eq!(
            (&first["status"], &first["model"], &first["asked"]),
            (&json!("completed"), &json!(model), &asked)
        );
        assert_eq!(responses["read"], *first);
        let second = &responses["second"];
        assert_eq!(
            (&second["status"], &second["text"], &second["asked"]),
            (&json!("completed"), &json!("that is done"), &json!([]))
        );
        assert_eq!(second["run"], first["run"]);
        assert_eq!(
            (&responses["previous"], &responses["team"], &responses["sent"]),
            (
                &json!(true),
                &json!("a"),
                &json!([["mcp_approval_response", true]])
            )
        );
        for kind in [
            "response.created",
            "response.output_text.delta",
            "response.completed",
        ] {
            assert!(
                responses["kinds"].to_string().contains(kind),
                "{kind}: {responses}"
            );
        }

        assert_eq!(seen["denied"][0]["asked"], asked);
        assert_eq!(seen["denied"][1]["text"], "that is done");
        assert_eq!(seen["failed"], json!([404, "model_not_found", "model"]));

        assert_eq!(
            seen["by_callback"],
            json!({"asked": [["deploy", "{\"region\": \"eu\"}"]], "output": "that is done"})
        );
        assert_eq!(
            seen["by_interruption"],
            json!({"asked": ["deploy"], "output": "that is done", "completed": 1})
        );

        // Three approvals and a denial; each run is one run, whoever drove it.
        assert_eq!(world.stubs.tools.calls("/deploy").len(), 3);
        for input in inputs {
            assert_eq!(llm.requests_of(input).len(), 2, "{input}");
        }
        assert_eq!(world.api().all("/runs").await.len(), 2 + inputs.len());
        world.holds().await;
    });
}
