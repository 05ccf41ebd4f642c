use proptest::prelude::*;
use serde_json::{Map, json};

use super::*;
use crate::agents::spec::PriceSpec;

/// The declaration of durable-api §5, whole.
const DEPLOYER: &str = r#"
model = "gpt-oss"
instructions = "You deploy services."
durable = true
deadline = "24h"
budgets = { turns = 20, tool_calls = 50, same_call = 3, tokens = 200000, recovery_attempts = 10 }
approvals = { default = "never", on_invalid_arguments = "require", expires = "72h", on_deny = "tell_model" }
approval_rules = [{ tool = "deploy", when = "always" }, { tool = "charge", when = "args.amount > 10000" }]

[[tools]]
name = "lookup"
description = "Look an item up"
parameters = { type = "object", properties = { sku = { type = "string" } }, required = ["sku"] }
http = { method = "GET", url = "http://inv.example/items/{sku}", timeout = "10s" }
effect = "read_only"

[[tools]]
name = "charge"
http = { method = "POST", url = "http://pay.example/charges", headers = { authorization = { env = "PAY_TOKEN" } } }
effect = "idempotent"
retry = { max_attempts = 4, backoff = "exponential", initial = "1s", max = "60s", jitter = 0.2 }
reconcile = { method = "GET", url = "http://pay.example/charges?key={idempotency_key}", found = "$.id" }

[[tools]]
name = "deploy"
mcp = { server = "ops", tool = "deploy" }
effect = "unsafe"

[mcp_servers.ops]
url = "http://ops.example/mcp"
timeout = "60s"

[retention]
keep_checkpoints = 50
delete_on_success = false
ttl = "90d"
"#;

fn prices() -> Prices {
    let spec = PriceSpec {
        input: "0.15".to_owned(),
        output: "0.60".to_owned(),
        cached_input: None,
    };
    Prices::compile(&BTreeMap::from([("priced".to_owned(), spec)])).unwrap()
}

/// A small valid agent, changed by a JSON merge patch.
fn patched(patch: &Value) -> AgentSpec {
    let mut whole = json!({
        "model": "m", "durable": true,
        "tools": [
            {
                "name": "read",
                "parameters": {"type": "object", "properties": {"id": {"type": "string"}}},
                "http": {"url": "http://t.example/{id}"},
                "effect": "read_only",
            },
            {"name": "write", "http": {"method": "POST", "url": "https://t.example/"}},
        ],
    });
    merge(&mut whole, patch);
    serde_json::from_value(whole).unwrap()
}

/// Like RFC 7396, with `{"0": …}` for an element of a list.
fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(members) = patch else {
        *into = patch.clone();
        return;
    };
    for (key, value) in members {
        if let (Some(list), Ok(at)) = (into.as_array_mut(), key.parse::<usize>()) {
            merge(&mut list[at], value);
            continue;
        }
        if !into.is_object() {
            *into = json!({});
        }
        let map: &mut Map<String, Value> = into.as_object_mut().unwrap();
        if value.is_null() {
            map.remove(key);
        } else {
            merge(map.entry(key).or_insert(Value::Null), value);
        }
    }
}

#[test]
fn the_declaration_of_the_contract_is_one() {
    let spec: AgentSpec = toml::from_str(DEPLOYER).unwrap();
    check(&spec, &Prices::default()).unwrap();
}

#[test]
fn what_may_be_said() {
    for patch in [
        json!({}),
        json!({"durable": false}),
        json!({"budgets": {"spend": "0.5"}, "model": "priced"}),
        json!({"tools": {"0": {"type": "function"}}}),
        json!({"human_input": false, "tools": {"0": {"name": "request_input"}}}),
        json!({"tools": {"1": {"http": null, "agent": {"name": "other"}}}}),
        json!({"tools": {"1": {"retry": {"max_attempts": 1}}}}),
        json!({"tools": {"1": {"effect": "idempotent", "retry": {"max_attempts": 9, "initial": "1ms", "max": "1ms", "jitter": 1}}}}),
        json!({"tools": {"0": {"http": {"url": "http://t.example/{id}?key={idempotency_key}"}}}}),
        json!({"tools": {"1": {"http": {"url": "http://[::1]:8080/{anything}"}}}}),
        json!({"tools": {"1": {"reconcile": {"url": "http://t.example/{order}", "found": "$"}}}}),
        json!({"tools": {"0": {"parameters": {"type": "object"}}}}),
        json!({"approval_rules": [{"tool": "read", "when": "never"}, {"tool": "*", "when": "always"}]}),
        json!({"approvals": {"deciders": ["ops", "ci"]}}),
        json!({"parameters": {"temperature": 0.2, "tool_choice": "auto", "parallel_tool_calls": false}}),
        json!({"tools": {"1": {"http": {"headers": {"X-Team": "a", "Authorization": {"file": "/run/secret"}}}}}}),
    ] {
        check(&patched(&patch), &prices()).unwrap_or_else(|e| panic!("{patch}: {e}"));
    }
}

#[test]
fn every_rule_names_its_field() {
    let tool = |patch: Value| json!({"tools": {"1": patch}});
    let http = |patch: Value| json!({"tools": {"1": {"http": patch}}});
    let header = |name: &str, value: Value| json!({"tools": {"1": {"http": {"headers": {name: value}}}}});
    for (patch, field, why) in [
        (json!({"model": ""}), "model", "512 bytes"),
        (json!({"model": "a\nb"}), "model", "printable"),
        (json!({"model": "agent:b"}), "model", "no model of an agent"),
        (json!({"deadline": "0s"}), "deadline", "longer than zero"),
        (
            json!({"durable": false, "approval_rules": [{"tool": "read", "when": "never"}]}),
            "approval_rules",
            "durable",
        ),
        (
            json!({"durable": false, "approvals": {"default": "always"}}),
            "approvals.default",
            "durable",
        ),
        (json!({"budgets": {"turns": 0}}), "budgets.turns", "at least 1"),
        (
            json!({"budgets": {"tool_calls": 0}}),
            "budgets.tool_calls",
            "at least 1",
        ),
        (
            json!({"budgets": {"same_call": 0}}),
            "budgets.same_call",
            "at least 1",
        ),
        (json!({"budgets": {"tokens": 0}}), "budgets.tokens", "at least 1"),
        (
            json!({"budgets": {"recovery_attempts": 0}}),
            "budgets.recovery_attempts",
            "at least 1",
        ),
        (
            json!({"budgets": {"spend": "1e3"}, "model": "priced"}),
            "budgets.spend",
            "decimal",
        ),
        (
            json!({"budgets": {"spend": "-1"}, "model": "priced"}),
            "budgets.spend",
            "decimal",
        ),
        (
            json!({"budgets": {"spend": "0.0"}, "model": "priced"}),
            "budgets.spend",
            "more than zero",
        ),
        (
            json!({"budgets": {"spend": "1"}}),
            "budgets.spend",
            "[prices.\"m\"]",
        ),
        (
            json!({"approvals": {"expires": "0s"}}),
            "approvals.expires",
            "longer",
        ),
        (
            json!({"approvals": {"deciders": ["a b"]}}),
            "approvals.deciders[0]",
            "key's name",
        ),
        (
            json!({"approvals": {"deciders": ["a", "a"]}}),
            "approvals.deciders[1]",
            "twice",
        ),
        (
            json!({"approvals": {"default": "maybe"}}),
            "approvals.default",
            "no maybe",
        ),
        (
            json!({"approval_rules": [{"tool": "gone", "when": "always"}]}),
            "approval_rules[0].tool",
            "\"gone\"",
        ),
        (
            json!({"approval_rules": [{"tool": "read", "when": "always"}, {"tool": "read", "when": "never"}]}),
            "approval_rules[1].tool",
            "never reached",
        ),
        (
            json!({"approval_rules": [{"tool": "*", "when": "always"}, {"tool": "read", "when": "never"}]}),
            "approval_rules[1].tool",
            "never reached",
        ),
        (
            json!({"approval_rules": [{"tool": "read", "when": "args.x >"}]}),
            "approval_rules[0].when",
            "CEL",
        ),
        (tool(json!({"name": ""})), "tools[1].name", "64"),
        (tool(json!({"name": "a b"})), "tools[1].name", "64"),
        (tool(json!({"name": "x".repeat(65)})), "tools[1].name", "64"),
        (tool(json!({"name": "read"})), "tools[1].name", "twice"),
        (
            tool(json!({"name": "request_input"})),
            "tools[1].name",
            "human_input",
        ),
        (
            json!({"tools": [{"type": "web_search"}]}),
            "tools[0].type",
            "at the provider",
        ),
        (
            json!({"tools": [{"http": {"url": "http://t.example/"}}]}),
            "tools[0].name",
            "64",
        ),
        (tool(json!({"http": null})), "tools[1].http", "exactly one"),
        (
            tool(json!({"mcp": {"server": "ops", "tool": "x"}})),
            "tools[1].mcp",
            "exactly one",
        ),
        (
            tool(json!({"agent": {"name": "x"}})),
            "tools[1].agent",
            "exactly one",
        ),
        (
            tool(json!({"http": null, "mcp": {"server": "ops", "tool": "x"}, "agent": {"name": "x"}})),
            "tools[1].agent",
            "exactly one",
        ),
        (
            tool(json!({"http": null, "mcp": {"server": "ops", "tool": "x"}})),
            "tools[1].mcp.server",
            "mcp_servers.ops",
        ),
        (
            json!({"mcp_servers": {"ops": {"url": "http://o.example/"}}, "tools": {"1": {"http": null, "mcp": {"server": "ops", "tool": ""}}}}),
            "tools[1].mcp.tool",
            "256",
        ),
        (
            tool(json!({"http": null, "agent": {"name": "a/b"}})),
            "tools[1].agent.name",
            "64",
        ),
        (
            tool(json!({"http": null, "agent": {"name": "x"}, "retry": {"max_attempts": 1}})),
            "tools[1].retry",
            "owns",
        ),
        (
            tool(
                json!({"http": null, "agent": {"name": "x"}, "reconcile": {"url": "http://t.example/{a}", "found": "$.a"}}),
            ),
            "tools[1].reconcile",
            "agent's run",
        ),
        (
            tool(json!({"parameters": 5})),
            "tools[1].parameters",
            "JSON Schema",
        ),
        (
            tool(json!({"parameters": []})),
            "tools[1].parameters",
            "JSON Schema",
        ),
        (
            tool(json!({"parameters": {"type": "array"}})),
            "tools[1].parameters.type",
            "object",
        ),
        (
            tool(json!({"parameters": {"type": "object", "required": 5}})),
            "tools[1].parameters",
            "required",
        ),
        (
            tool(json!({"parameters": {"$ref": "http://elsewhere.example/schema"}})),
            "tools[1].parameters",
            "JSON Schema",
        ),
        (
            tool(json!({"retry": {"max_attempts": 2}})),
            "tools[1].retry.max_attempts",
            "unsafe",
        ),
        (
            tool(json!({"retry": {"max_attempts": 0}})),
            "tools[1].retry.max_attempts",
            "at least 1",
        ),
        (
            json!({"tools": {"0": {"retry": {"max_attempts": 2, "initial": "2s", "max": "1s"}}}}),
            "tools[0].retry.max",
            "longest",
        ),
        (
            json!({"tools": {"0": {"retry": {"max_attempts": 2, "initial": "2m"}}}}),
            "tools[0].retry.initial",
            "longest",
        ),
        (
            json!({"tools": {"0": {"retry": {"max_attempts": 2, "initial": "0s"}}}}),
            "tools[0].retry.initial",
            "longer than zero",
        ),
        (
            json!({"tools": {"0": {"retry": {"max_attempts": 2, "jitter": 1.1}}}}),
            "tools[0].retry.jitter",
            "0 to 1",
        ),
        (
            json!({"model_retry": {"max_attempts": 0}}),
            "model_retry.max_attempts",
            "at least 1",
        ),
        (
            tool(json!({"reconcile": {"url": "http://t.example/all", "found": "$.id"}})),
            "tools[1].reconcile.url",
            "idempotency_key",
        ),
        (
            tool(json!({"reconcile": {"method": "POST", "url": "http://t.example/{id}", "found": "$.id"}})),
            "tools[1].reconcile.method",
            "changes nothing",
        ),
        (
            tool(json!({"reconcile": {"url": "http://t.example/{id}", "found": "id"}})),
            "tools[1].reconcile.found",
            "path",
        ),
        (
            json!({"tools": {"0": {"reconcile": {"url": "http://t.example/{other}", "found": "$.id"}}}}),
            "tools[0].reconcile.url",
            "{other}",
        ),
        (
            tool(json!({"reconcile": {"url": "http://t.example/{id}", "found": "$", "timeout": "0s"}})),
            "tools[1].reconcile.timeout",
            "longer",
        ),
        (
            http(json!({"method": "get"})),
            "tools[1].http.method",
            "one of GET",
        ),
        (
            http(json!({"method": "CONNECT"})),
            "tools[1].http.method",
            "one of GET",
        ),
        (http(json!({"url": ""})), "tools[1].http.url", "http"),
        (
            http(json!({"url": "ftp://t.example/"})),
            "tools[1].http.url",
            "http",
        ),
        (
            http(json!({"url": "http://{host}/"})),
            "tools[1].http.url",
            "host",
        ),
        (
            http(json!({"url": "http://user@t.example/"})),
            "tools[1].http.url",
            "headers",
        ),
        (
            http(json!({"url": "http://t.example/{a"})),
            "tools[1].http.url",
            "{",
        ),
        (http(json!({"timeout": "0s"})), "tools[1].http.timeout", "longer"),
        (
            json!({"tools": {"0": {"http": {"url": "http://t.example/{other}"}}}}),
            "tools[0].http.url",
            "{other}",
        ),
        (
            header("a b", json!("x")),
            "tools[1].http.headers.a b",
            "header name",
        ),
        (
            header("x-a", json!("a\nb")),
            "tools[1].http.headers.x-a",
            "header value",
        ),
        (
            header("Host", json!("x")),
            "tools[1].http.headers.Host",
            "set by the edge",
        ),
        (
            header("idempotency-key", json!("x")),
            "tools[1].http.headers.idempotency-key",
            "set by the edge",
        ),
        (
            header("authorization", json!("Bearer x")),
            "tools[1].http.headers.authorization",
            "reference",
        ),
        (
            header("X-Api-Key", json!("x")),
            "tools[1].http.headers.X-Api-Key",
            "reference",
        ),
        (
            header("x-a", json!({"env": ""})),
            "tools[1].http.headers.x-a.env",
            "variable",
        ),
        (
            header("x-a", json!({"file": ""})),
            "tools[1].http.headers.x-a.file",
            "path",
        ),
        (
            json!({"mcp_servers": {"o/p": {"url": "http://o.example/"}}}),
            "mcp_servers.o/p",
            "64",
        ),
        (
            json!({"mcp_servers": {"ops": {"url": "stdio:x"}}}),
            "mcp_servers.ops.url",
            "http",
        ),
        (
            json!({"mcp_servers": {"ops": {"url": "http://o.example/{x}"}}}),
            "mcp_servers.ops.url",
            "same for every call",
        ),
        (
            json!({"mcp_servers": {"ops": {"url": "http://o.example/", "timeout": "0s"}}}),
            "mcp_servers.ops.timeout",
            "longer",
        ),
        (
            json!({"mcp_servers": {"ops": {"url": "http://o.example/", "headers": {"mcp-session-id": "1"}}}}),
            "mcp_servers.ops.headers.mcp-session-id",
            "set by the edge",
        ),
        (
            json!({"retention": {"keep_checkpoints": 0}}),
            "retention.keep_checkpoints",
            "at least 1",
        ),
        (json!({"retention": {"ttl": "0s"}}), "retention.ttl", "longer"),
        (
            json!({"parameters": {"tools": []}}),
            "parameters.tools",
            "recorded",
        ),
        (
            json!({"parameters": {"web_search_options": {}}}),
            "parameters.web_search_options",
            "recorded",
        ),
        (
            json!({"parameters": {"model": "x"}}),
            "parameters.model",
            "every request",
        ),
        (
            json!({"parameters": {"messages": []}}),
            "parameters.messages",
            "every request",
        ),
        (
            json!({"parameters": {"stream": false}}),
            "parameters.stream",
            "every request",
        ),
        (
            json!({"parameters": {"stream_options": {}}}),
            "parameters.stream_options",
            "every request",
        ),
        (json!({"parameters": {"n": 2}}), "parameters.n", "every request"),
    ] {
        let invalid = check(&patched(&patch), &prices()).expect_err(&patch.to_string());
        assert_eq!(invalid.field, field, "{patch}: {invalid}");
        assert!(invalid.message.contains(why), "{patch}: {invalid}");
    }
}

#[test]
fn two_spellings_of_one_header_are_one_header() {
    let mut spec = patched(&json!({"tools": {"1": {"http": {"headers": {"X-A": "1"}}}}}));
    let headers = &mut spec.tools[1].http.as_mut().unwrap().headers;
    headers.insert("x-a".to_owned(), headers["X-A"].clone());
    let invalid = check(&spec, &prices()).unwrap_err();
    assert_eq!(invalid.field, "tools[1].http.headers.x-a");
}

#[test]
fn the_canonical_form_has_its_keys_in_order_and_its_own_digest() {
    let spec = patched(&json!({"parameters": {"z": 1, "a": {"d": 1.5, "c": [true, "é\n"]}}, "tools": null}));
    let (body, digest) = canonical(&spec);
    assert_eq!(
        std::str::from_utf8(&body).unwrap(),
        concat!(
            r#"{"approvals":{"default":"never","on_deny":"tell_model","on_invalid_arguments":"require"},"#,
            r#""budgets":{},"durable":true,"human_input":true,"model":"m","#,
            r#""parameters":{"a":{"c":[true,"é\n"],"d":1.5},"z":1},"retention":{"delete_on_success":false}}"#
        )
    );
    assert_eq!(digest, hex(&Sha256::digest(&body).into()));
}

/// JSON as TOML writes it, on one line; with the keys in the other order.
fn toml_of(value: &Value) -> String {
    match value {
        Value::Null => panic!("TOML has no null"),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(_) => value.to_string().replace('\u{7f}', "\\u007f"),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(toml_of).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(members) => {
            let mut members: Vec<(&String, &Value)> = members.iter().collect();
            members.sort_by(|a, b| b.0.cmp(a.0));
            let members: Vec<String> = members
                .into_iter()
                .map(|(key, value)| format!("{} = {}", toml_of(&Value::from(key.as_str())), toml_of(value)))
                .collect();
            format!("{{ {} }}", members.join(", "))
        }
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e15_f64..1e15).prop_map(Value::from),
        any::<f64>()
            .prop_filter("finite", |it| it.is_finite())
            .prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            any_object(inner).prop_map(Value::Object),
        ]
    })
}

fn any_object(inner: impl Strategy<Value = Value>) -> impl Strategy<Value = Map<String, Value>> {
    prop::collection::btree_map(".{0,6}", inner, 0..4).prop_map(|it| it.into_iter().collect())
}

fn any_span() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("90s"),
        Just("1m 30s"),
        Just("24h"),
        Just("1day"),
        Just("10ms"),
        Just("1d"),
        Just("60s"),
    ]
    .prop_map(str::to_owned)
}

prop_compose! {
    fn any_tool()(
        name in "[a-z]{1,8}",
        description in prop::option::of(".{0,20}"),
        schema in prop::option::of(any_object(any_value())),
        effect in prop::option::of(prop::sample::select(vec!["read_only", "idempotent", "unsafe"])),
        timeout in prop::option::of(any_span()),
        headers in prop::collection::btree_map("[a-z]{1,6}", ".{0,10}", 0..3),
        attempts in prop::option::of((1_u32..9, 0.0_f64..1.0)),
    ) -> Value {
        let mut http = json!({"url": "http://t.example/", "headers": headers, "method": "POST"});
        if let Some(timeout) = timeout { http["timeout"] = timeout.into(); }
        let mut tool = json!({"name": name, "http": http});
        if let Some(it) = description { tool["description"] = it.into(); }
        if let Some(it) = schema { tool["parameters"] = Value::Object(it); }
        if let Some(it) = effect { tool["effect"] = it.into(); }
        if let Some((attempts, jitter)) = attempts {
            tool["retry"] = json!({"max_attempts": attempts, "jitter": jitter});
        }
        tool
    }
}

prop_compose! {
    fn any_declaration()(
        model in ".{0,10}",
        instructions in prop::option::of(".{0,40}"),
        durable: bool,
        deadline in prop::option::of(any_span()),
        turns in prop::option::of(0_u64..=i64::MAX as u64),
        deciders in prop::collection::vec("[a-z]{1,4}", 0..3),
        parameters in any_object(any_value()),
        tools in prop::collection::vec(any_tool(), 0..4),
        ttl in prop::option::of(any_span()),
    ) -> Value {
        let mut spec = json!({
            "model": model, "durable": durable, "approvals": {"deciders": deciders},
            "parameters": parameters, "tools": tools,
        });
        if let Some(it) = instructions { spec["instructions"] = it.into(); }
        if let Some(it) = deadline { spec["deadline"] = it.into(); }
        if let Some(it) = turns { spec["budgets"] = json!({"turns": it}); }
        if let Some(it) = ttl { spec["retention"] = json!({"ttl": it}); }
        spec
    }
}

proptest! {
    #[test]
    fn toml_and_json_of_one_declaration_have_one_digest(declaration in any_declaration()) {
        let json: AgentSpec = serde_json::from_str(&declaration.to_string()).unwrap();
        let text = format!("it = {}", toml_of(&declaration));
        let toml: BTreeMap<String, AgentSpec> = toml::from_str(&text).unwrap();
        let toml = &toml["it"];
        prop_assert_eq!(&json, toml);
        prop_assert_eq!(canonical(&json), canonical(toml));
    }

    #[test]
    fn what_is_stored_reads_back_as_itself(declaration in any_declaration()) {
        let spec: AgentSpec = serde_json::from_value(declaration).unwrap();
        let (body, digest) = canonical(&spec);
        let again: AgentSpec = serde_json::from_slice(&body).unwrap();
        prop_assert_eq!(&spec, &again);
        prop_assert_eq!(canonical(&again), (body, digest));
    }

    #[test]
    fn no_declaration_panics(declaration in any_declaration()) {
        let spec: AgentSpec = serde_json::from_value(declaration).unwrap();
        if let Err(invalid) = check(&spec, &Prices::default()) {
            prop_assert!(!invalid.field.is_empty() && !invalid.message.is_empty());
        }
    }
}
