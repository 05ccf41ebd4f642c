use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::inspect;
use super::*;

fn safe(body: &str) -> bool {
    replay_safe(&inspect(body.as_bytes()).unwrap(), body.as_bytes())
}

fn with_tools(tools: &Value) -> bool {
    safe(&json!({"model": "m", "tools": tools}).to_string())
}

fn function(name: &str) -> Value {
    json!({"type": "function", "name": name, "parameters": {"type": "object", "properties": {
        "type": {"type": "string"}, "tools": {"type": "array"}, "environment": {"type": "object"}}}})
}

/// Each form of `ToolParam` (openai-python 3.57), Chat's tool forms, and what other providers put there.
fn forms() -> Vec<(Value, bool)> {
    let mcp = json!({"type": "mcp", "server_label": "d", "server_url": "https://d.example/mcp", "require_approval": "never"});
    let namespace =
        |tools: Value| json!({"type": "namespace", "name": "crm", "description": "d", "tools": tools});
    vec![
        (function("f"), true),
        (
            json!({"type": "function", "name": "f", "async": true, "defer_loading": true, "strict": null}),
            true,
        ),
        (
            json!({"type": "function", "function": {"name": "f", "parameters": {}}}),
            true,
        ),
        (
            json!({"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}),
            true,
        ),
        (json!({"type": "custom", "custom": {"name": "c"}}), true),
        (
            namespace(json!([function("a"), {"type": "custom", "name": "b"}])),
            true,
        ),
        (namespace(json!([])), true),
        (namespace(json!([namespace(json!([function("a")]))])), true),
        (namespace(json!([function("a"), mcp])), false),
        (
            namespace(json!([namespace(json!([{"type": "web_search"}]))])),
            false,
        ),
        (namespace(json!(null)), false),
        (json!({"type": "namespace", "name": "crm"}), false),
        (json!({"type": "local_shell"}), true),
        (json!({"type": "shell", "environment": {"type": "local"}}), true),
        (
            json!({"type": "shell", "environment": {"type": "local", "skills": [{"name": "s", "path": "/s"}]}}),
            true,
        ),
        (
            json!({"type": "shell", "environment": {"type": "container_auto"}}),
            false,
        ),
        (
            json!({"type": "shell", "environment": {"type": "container_reference", "container_id": "cntr_1"}}),
            false,
        ),
        (json!({"type": "shell", "environment": null}), false),
        (json!({"type": "shell", "environment": "local"}), false),
        (json!({"type": "shell"}), false),
        (json!({"type": "apply_patch"}), true),
        (json!({"type": "computer"}), true),
        (
            json!({"type": "computer_use_preview", "display_width": 1024, "display_height": 768, "environment": "browser"}),
            true,
        ),
        (
            json!({"type": "computer-preview", "environment": "browser"}),
            true,
        ),
        (
            json!({"type": "tool_search", "execution": "client", "description": "d", "parameters": {}}),
            true,
        ),
        (json!({"type": "tool_search", "execution": "server"}), false),
        (json!({"type": "tool_search"}), false),
        (mcp, false),
        (json!({"type": "web_search"}), false),
        (json!({"type": "web_search", "external_web_access": false}), false),
        (json!({"type": "web_search_2025_08_26"}), false),
        (json!({"type": "web_search_preview"}), false),
        (
            json!({"type": "file_search", "vector_store_ids": ["vs_1"]}),
            false,
        ),
        (
            json!({"type": "code_interpreter", "container": {"type": "auto"}}),
            false,
        ),
        (json!({"type": "image_generation"}), false),
        (json!({"type": "programmatic_tool_calling"}), false),
        (
            json!({"type": "builtin_function", "function": {"name": "$web_search"}}),
            false,
        ),
        (json!({"type": "Function", "name": "f"}), false),
        (json!({"type": " function", "name": "f"}), false),
        (json!({"type": ["function"]}), false),
        (json!({"type": null}), false),
        (json!({"type": 1}), false),
        (json!({"googleSearch": {}}), false),
        (json!({"name": "f", "parameters": {}}), false),
        (json!({}), false),
        (json!(null), false),
        (json!("function"), false),
        (json!(["function"]), false),
        (json!(1), false),
    ]
}

#[test]
fn each_form_of_a_tool_has_its_side() {
    for (tool, want) in forms() {
        assert_eq!(with_tools(&json!([tool])), want, "{tool}");
        assert_eq!(
            with_tools(&json!([function("f"), tool])),
            want,
            "{tool} among others"
        );
        assert_eq!(
            with_tools(&json!([tool, function("f")])),
            want,
            "{tool} among others"
        );
        // As Codex and the tool search bring them.
        for item in [
            json!({"type": "additional_tools", "role": "developer", "tools": [tool]}),
            json!({"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [tool]}),
        ] {
            let body = json!({"model": "m", "tools": [], "input": [{"role": "user", "content": "hi"}, item]});
            assert_eq!(safe(&body.to_string()), want, "{body}");
        }
    }
}

#[test]
fn the_rest_of_the_body_counts_too() {
    let body = |members: &str| format!(r#"{{"model":"m"{members}}}"#);
    for (members, want) in [
        ("", true),
        (r#","tools":null"#, true),
        (r#","tools":[]"#, true),
        (r#","tools":{}"#, false),
        (r#","tools":{"type":"function"}"#, false),
        (r#","tools":"function""#, false),
        (r#","tools":false"#, false),
        (r#","tools":[{"type":"function"} {"type":"function"}]"#, false),
        (r#","tools":[{"type":"function"},]"#, false),
        (r#","tools":[{"type" "function"}]"#, false),
        (r#","tools":[{"type":"fun\u0063tion"}]"#, true),
        (r#","tools":[{"typ\u0065":"mcp"}]"#, false),
        (r#","tool\u0073":[{"type":"mcp"}]"#, false),
        // Twice, and the readers differ.
        (r#","tools":[{"type":"mcp"}],"tools":[]"#, false),
        (r#","tools":[],"tools":[{"type":"mcp"}]"#, false),
        (r#","tools":[],"tools":[{"type":"function"}]"#, true),
        (r#","tools":[{"type":"mcp","type":"function"}]"#, false),
        (r#","tools":[{"type":"function","type":"function"}]"#, false),
        (
            r#","tools":[{"type":"shell","environment":{"type":"container_auto"},"environment":{"type":"local"}}]"#,
            false,
        ),
        (
            r#","tools":[{"type":"shell","environment":{"type":"container_auto","type":"local"}}]"#,
            false,
        ),
        (
            r#","tools":[{"type":"tool_search","execution":"client","execution":"server"}]"#,
            false,
        ),
        (r#","web_search_options":{}"#, false),
        (r#","web_search_options":null"#, true),
        (r#","web_search_options":{},"web_search_options":null"#, false),
        (r#","background":true"#, false),
        (r#","background":false"#, true),
        (r#","background":null"#, true),
        (r#","background":true,"background":false"#, false),
        (r#","previous_response_id":"resp_1""#, false),
        (r#","previous_response_id":null"#, true),
        (r#","conversation":"conv_1""#, false),
        (r#","conversation":{"id":"conv_1"}"#, false),
        (r#","prompt":{"id":"pmpt_1","version":"2"}"#, false),
        (r#","prompt":"once upon a time""#, true),
        (r#","prompt":["a","b"]"#, true),
        (r#","prompt":null"#, true),
        (r#","functions":[{"name":"f"}],"function_call":"auto""#, true),
        (r#","tool_choice":{"type":"function","name":"f"}"#, true),
        (
            r#","metadata":{"tools":[{"type":"mcp"}],"background":true}"#,
            true,
        ),
        (
            r#","messages":[{"role":"user","content":"tools","tools":[{"type":"mcp"}]}]"#,
            true,
        ),
        (r#","input":"hi""#, true),
        (r#","input":null"#, true),
        (r#","input":["a","b"]"#, true),
        (r#","input":[[1,2],[3]]"#, true),
        (r#","input":[{"type":"item_reference","id":"msg_1"}]"#, true),
        (r#","input":[{"tools":[]}] "#, true),
        (r#","input":[{"type":"additional_tools"}]"#, true),
        (r#","input":[{"type":"additional_tools","tools":null}]"#, false),
        (r#","input":[{"tools":[{"type":"mcp"}]}],"input":"hi""#, false),
        (
            r#","input":[{"type":"mcp_list_tools","server_label":"d","tools":[{"name":"t","input_schema":{}}]}]"#,
            false,
        ),
        (
            r#","input":[{"role":"user","content":[{"type":"input_text","tools":[1]}]}]"#,
            true,
        ),
        (r#","input":[{"role":"user"} 1]"#, false),
        (r#","input":[{"role" "user"}]"#, false),
    ] {
        assert_eq!(safe(&body(members)), want, "{members}");
    }
}

#[test]
fn namespaces_are_looked_into_so_far() {
    let nested = |depth: u32| {
        let mut tool = function("f");
        for _ in 0..depth {
            tool = json!({"type": "namespace", "name": "n", "tools": [tool]});
        }
        with_tools(&json!([tool]))
    };
    assert!(nested(MAX_NESTING));
    assert!(!nested(MAX_NESTING + 1));
    assert!(!nested(100));
}

/// What Codex 0.171 sends for "hello" (measured), schemas and texts shortened; newer models get no top-level `tools`.
fn codex(tools: Option<&Value>, input: &Value) -> String {
    let mut body = json!({
        "model": "gpt-test",
        "stream": true,
        "input": input,
        "tool_choice": "auto",
        "parallel_tool_calls": false,
        "reasoning": null,
        "store": false,
        "include": [],
        "prompt_cache_key": "019e0000-0000-7000-8000-000000000000",
        "client_metadata": {"originator": "codex_exec"},
    });
    if let Some(tools) = tools {
        body["tools"] = tools.clone();
    }
    body.to_string()
}

#[test]
fn codex_turns_may_be_sent_again_unless_the_provider_searches() {
    let words = |role: &str, text: &str| json!({"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]});
    let names = |names: &[&str]| -> Vec<Value> { names.iter().map(|n| function(n)).collect() };
    let start = [
        words("developer", "<permissions instructions>"),
        words("user", "<environment_context>"),
        words("user", "hello"),
    ];
    let mut tools = names(&["exec_command", "write_stdin", "update_plan", "request_user_input"]);
    tools.push(
        json!({"type": "namespace", "name": "collaboration", "description": "d",
        "tools": names(&["spawn_agent", "send_input", "wait"])}),
    );
    tools.extend(names(&["view_image"]));
    assert!(safe(&codex(Some(&json!(tools)), &json!(start))));
    // Its default, `web_search = "cached"`.
    let mut searching = tools.clone();
    searching.push(json!({"type": "web_search", "external_web_access": false}));
    assert!(!safe(&codex(Some(&json!(searching)), &json!(start))));

    let mut session = start.to_vec();
    session.extend([
        json!({"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}),
        json!({"type": "function_call", "name": "exec_command", "arguments": "{\"cmd\":\"ls\"}", "call_id": "call_1"}),
        json!({"type": "function_call_output", "call_id": "call_1", "output": "a\nb"}),
        json!({"type": "tool_search_call", "call_id": "call_2", "execution": "client", "arguments": {"query": "mail"}}),
        json!({"type": "tool_search_output", "call_id": "call_2", "status": "completed", "execution": "client",
            "tools": [{"type": "namespace", "name": "mcp__mail", "description": "d", "tools": [function("send")]}]}),
        json!({"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch", "call_id": "call_3"}),
    ]);
    tools.push(json!({"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}}));
    assert!(safe(&codex(Some(&json!(tools)), &json!(session))));

    // To newer models it sends its tools in front of the conversation.
    let before = |more: Value| {
        let mut namespaces = vec![
            json!({"type": "namespace", "name": "shell", "description": "d", "tools": [
                {"type": "custom", "name": "exec", "format": {"type": "text"}}, function("wait")]}),
            json!({"type": "namespace", "name": "collaboration", "description": "d", "tools": names(&["spawn_agent"])}),
        ];
        namespaces.extend(more.as_array().cloned().unwrap_or_default());
        let mut items = session.clone();
        items.insert(
            0,
            json!({"type": "additional_tools", "role": "developer", "tools": namespaces}),
        );
        codex(None, &json!(items))
    };
    assert!(safe(&before(json!([]))));
    assert!(!safe(&before(
        json!([{"type": "web_search", "external_web_access": true}])
    )));
}

#[test]
fn bodies_of_the_sdks_have_their_side() {
    for (body, want) in [
        // openai-python and openai-node, Chat with tools and a stream.
        (
            json!({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "weather?"}], "model": "m",
                "stream": true, "stream_options": {"include_usage": true}, "tool_choice": "auto",
                "tools": [{"type": "function", "function": {"name": "get_weather", "strict": true, "parameters": {"type": "object",
                    "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": false}}}]}),
            true,
        ),
        // A search model of Chat.
        (
            json!({"model": "gpt-4o-search-preview", "web_search_options": {"search_context_size": "low"},
                "messages": [{"role": "user", "content": "news"}]}),
            false,
        ),
        // openai-agents with a function and with the hosted search beside it.
        (
            json!({"include": [], "input": [{"content": "hi", "role": "user"}], "instructions": "Be brief.", "model": "m",
                "tools": [{"name": "f", "parameters": {}, "strict": true, "type": "function", "description": ""}]}),
            true,
        ),
        (
            json!({"include": [], "input": [{"content": "hi", "role": "user"}], "model": "m", "tools": [
                {"name": "f", "parameters": {}, "strict": true, "type": "function", "description": ""},
                {"type": "web_search", "filters": null, "search_context_size": "medium", "user_location": null}]}),
            false,
        ),
        // Two turns of a stored conversation.
        (json!({"model": "m", "input": "hi", "store": true}), true),
        (
            json!({"model": "m", "input": "more", "previous_response_id": "resp_1"}),
            false,
        ),
        (
            json!({"model": "o3-deep-research", "input": "hi", "background": true}),
            false,
        ),
        // A hosted tool search over deferred functions.
        (
            json!({"model": "m", "input": "orders", "tools": [
                {"type": "namespace", "name": "crm", "description": "d", "tools": [
                    {"type": "function", "name": "list", "defer_loading": true, "parameters": {"type": "object"}}]},
                {"type": "tool_search"}]}),
            false,
        ),
        // Computer use, one step on.
        (
            json!({"model": "m", "truncation": "auto", "tools": [{"type": "computer"}], "input": [
                {"role": "user", "content": "book it"},
                {"type": "computer_call", "call_id": "c", "action": {"type": "screenshot"}, "pending_safety_checks": []},
                {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": "data:"}}]}),
            true,
        ),
        (
            json!({"model": "m", "input": "embed me", "encoding_format": "base64"}),
            true,
        ),
        (
            json!({"model": "m", "prompt": "complete me", "max_tokens": 7}),
            true,
        ),
    ] {
        assert_eq!(safe(&body.to_string()), want, "{body}");
    }
}

proptest! {
    /// The naive model reads the tree.
    #[test]
    fn a_list_is_safe_if_each_of_it_is(
        picks in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        wrap in any::<bool>(),
        pretty in any::<bool>(),
    ) {
        let forms = forms();
        let picked: Vec<_> = picks.iter().map(|i| i.get(&forms).clone()).collect();
        let mut tools = json!(picked.iter().map(|(tool, _)| tool.clone()).collect::<Vec<_>>());
        if wrap {
            tools = json!([{"type": "namespace", "tools": tools}]);
        }
        let body = json!({"a": [tools], "model": "m", "tools": tools});
        let text = if pretty { serde_json::to_string_pretty(&body).unwrap() } else { body.to_string() };
        prop_assert_eq!(safe(&text), picked.iter().all(|(_, safe)| *safe));
    }

    #[test]
    fn near_json_never_panics(middle in "[{}\\[\\]\",:\\\\typeolsnacm0-9 ]{0,60}") {
        for member in ["tools", "input", "prompt"] {
            let body = format!("{{\"model\":\"m\",\"{member}\":[{middle}]}}");
            if let Ok(facts) = inspect(body.as_bytes()) {
                let _ = replay_safe(&facts, body.as_bytes());
            }
        }
    }
}
