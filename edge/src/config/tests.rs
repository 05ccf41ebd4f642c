use std::io;
use std::path::Path;
use std::time::Duration;

use iop_shared::config::LogFormat;
use proptest::prelude::*;
use secrecy::ExposeSecret;

use super::*;
use crate::pool::Affinity;

/// Design §4 without what is not available yet.
const EVERYTHING: &str = r#"
[server]
listen = "0.0.0.0:8080"
metrics_listen = "0.0.0.0:9090"
body_limit = "32MiB"
body_memory = "2GiB"
drain_timeout = "60s"

[link]
listen = "0.0.0.0:7070"
tokens = [{ env = "IOP_LINK_TOKEN" }, { file = "token" }]

[store]
url = "postgres://iop@db/iop"

[auth]
keys = [
  { name = "ci",  secret = { env = "IOP_KEY_CI" }, roles = ["inference"] },
  { name = "ops", secret_sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", roles = ["inference", "operator", "admin", "metrics"], models = ["*"], concurrency = 32, priority = "high" },
]

[gate]
max_attempts = 2
max_elapsed = "300s"
hold_bytes = "128KiB"
keepalive_open_after = "0s"
keepalive_interval = "0s"
on_node_lost = "fail"
client_write_timeout = "20s"
snapshot_bytes = "8MiB"

[ejection]
consecutive = 4
base = "1s"
max = "10s"

[queue]
max_depth = 10
max_wait = "5s"

[[providers]]
id = "local"
adapter = "openai"
base_url = "http://127.0.0.1:8000/v1"
api_key = { env = "VLLM_API_KEY" }
targets = ["Qwen/Qwen3-8B"]
endpoints = ["chat", "responses", "completions", "embeddings"]
capacity = 8
response_stall_timeout = "300s"

[[models]]
name = "qwen"
candidates = [
  { provider = "local",      target = "Qwen/Qwen3-8B", priority = 0, weight = 3 },
  { provider = "gpu-1/vllm", target = "Qwen/Qwen3-8B", priority = 0 },
  { provider = "gpu-2/ollama", target = "qwen3:8b",    priority = 1 },
]
liveness = "interactive"
response_stall_timeout = "60s"
first_content_timeout = "20s"
affinity = "prefix"

[runs]
workers = 4
lease_ttl = "20s"
poll_interval = "2s"
max_state = "32MiB"
max_result = "8MiB"
cancel_grace = "5s"
dev = true

[prices.qwen]
input = "0.15"
output = "0.60"
cached_input = "0.075"

[agents.deployer]
model = "qwen"
instructions = "You deploy services."
durable = true
deadline = "24h"
budgets = { turns = 20, spend = "2.50" }
approvals = { expires = "72h", deciders = ["ops"] }
approval_rules = [{ tool = "charge", when = "args.amount > 10000" }]

[[agents.deployer.tools]]
name = "charge"
parameters = { type = "object", properties = { amount = { type = "integer" } }, required = ["amount"] }
http = { method = "POST", url = "http://127.0.0.1:9/charges", headers = { authorization = { env = "PAY_TOKEN" } } }
effect = "idempotent"
retry = { max_attempts = 4, initial = "1s", max = "60s", jitter = 0.2 }
reconcile = { url = "http://127.0.0.1:9/charges?key={idempotency_key}", found = "$.id", headers = { authorization = { file = "token" } } }

[[agents.deployer.tools]]
name = "deploy"
mcp = { server = "ops", tool = "deploy" }

[agents.deployer.mcp_servers.ops]
url = "http://127.0.0.1:9/mcp"
headers = { authorization = { env = "PAY_TOKEN" } }

[agents.deployer.retention]
keep_checkpoints = 50
ttl = "90d"

[telemetry]
log = "iop_edge=debug,info"
log_format = "text"
gen_ai_metrics = false
"#;

fn parse(text: &str) -> Result<Settings, ConfigError> {
    let env = |name: &str| match name {
        "IOP_LINK_TOKEN" | "IOP_KEY_CI" | "VLLM_API_KEY" | "IOP_TWIN" | "PAY_TOKEN" => {
            Some(format!("value of {}", name.replace("IOP_TWIN", "IOP_KEY_CI")))
        }
        _ => None,
    };
    let file = |path: &Path| match path.to_str() {
        Some("token") => Ok(String::from("from-file\n")),
        _ => Err(io::Error::from(io::ErrorKind::NotFound)),
    };
    let world = World {
        env: &env,
        file: &file,
    };
    Settings::parse("edge.toml", text, &world).map_err(|refused| refused.faults()[0].clone())
}

/// Line and key of every fault.
fn faults(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Vec<(usize, String)> {
    let file = |_: &Path| Err(io::Error::from(io::ErrorKind::NotFound));
    let refused = Settings::parse("edge.toml", text, &World { env, file: &file })
        .err()
        .unwrap();
    assert_eq!(
        refused.to_string().lines().count(),
        refused.faults().len(),
        "{refused}"
    );
    refused
        .faults()
        .iter()
        .map(|fault| (fault.line, fault.key.clone()))
        .collect()
}

#[test]
fn every_fault_that_stands_alone_is_named_in_the_order_of_the_file() {
    let text = "\
[server]
body_limit = \"1B\"
[gate]
max_attempts = 0
[[providers]]
id = \"p\"
adapter = \"openai\"
[[models]]
name = \"m\"
candidates = [{ provider = \"q\", target = \"t\" }]
[[models]]
name = \"n\"
candidates = []
[auth]
keys = [
  { name = \"a b\", secret = { env = \"NONE\" } },
  { name = \"c\" },
]
[store]
url = \"mysql://\"
[agents.a]
model = \"\"
[agents.b]
model = \"\"
[webhooks.x]
";
    let found = faults(text, &|_| None);
    let keys: Vec<&str> = found.iter().map(|(_, key)| key.as_str()).collect();
    assert_eq!(
        keys,
        [
            "server.body_limit",
            "gate.max_attempts",
            "providers[0].base_url",
            "models[0].candidates[0].provider",
            "models[1].candidates",
            "auth.keys[0].name",
            "auth.keys[1].secret",
            "store.url",
            "agents.a.model",
            "agents.b.model",
            "webhooks",
        ]
    );
    assert!(found.is_sorted_by_key(|(line, _)| *line), "{found:?}");
}

#[test]
fn every_secret_that_is_missing_is_named_once_the_text_is_right() {
    let text = "\
[link]
tokens = [{ env = \"A\" }, { file = \"b\" }]
[auth]
keys = [{ name = \"c\", secret = { env = \"C\" } }, { name = \"d\", secret = { env = \"D\" } }]
[[providers]]
id = \"p\"
adapter = \"openai\"
base_url = \"http://127.0.0.1:1/v1\"
api_key = { env = \"E\" }
";
    let found = faults(text, &|name| (name == "D").then(|| String::from("there")));
    let keys: Vec<&str> = found.iter().map(|(_, key)| key.as_str()).collect();
    assert_eq!(
        keys,
        [
            "link.tokens[0]",
            "link.tokens[1]",
            "auth.keys[0].secret",
            "providers[0].api_key"
        ]
    );
    // Nothing is asked of the outside for a text that is wrong anyway.
    let wrong = text.replace("\"c\"", "\"c c\"");
    assert_eq!(
        faults(&wrong, &|_| None),
        [(4, String::from("auth.keys[0].name"))]
    );
}

#[test]
fn the_store_is_told_without_the_secrets_of_the_edge() {
    let text = "[auth]\nkeys = [{ name = \"a b\", secret = { env = \"NONE\" } }]\n";
    let said = |more: &str| StoreUrl::parse("edge.toml", &format!("{text}{more}"));
    assert!(said("").ok().unwrap() == StoreUrl::Sqlite("sqlite://iop.db".into()));
    let postgres = said("[store]\nurl = \"postgres://iop@db/iop\"\n").ok().unwrap();
    assert!(postgres == StoreUrl::Postgres("postgres://iop@db/iop".into()));
    for (wrong, line, key) in [
        ("[store]\nurl = \"iop.db\"\n", 4, "store.url"),
        ("[store]\nurl = \"memory://\"\n", 4, "store.url"),
        ("[store]\nuri = \"\"\n", 4, "store.uri"),
    ] {
        let e = said(wrong).err().unwrap();
        assert_eq!((e.line, e.key.as_str()), (line, key), "{e}");
    }
}

fn refused(text: &str) -> ConfigError {
    match parse(text) {
        Ok(_) => panic!("accepted: {text}"),
        Err(e) => e,
    }
}

#[test]
fn an_empty_file_has_the_documented_defaults() {
    let s = parse("").ok().unwrap();
    assert_eq!(s.server.listen, "127.0.0.1:8080".parse().unwrap());
    assert_eq!(s.server.metrics_listen, None);
    assert_eq!((s.server.body_limit, s.server.body_memory), (64 << 20, 1 << 30));
    assert_eq!(s.server.drain_timeout, Duration::from_secs(120));
    assert!(s.server.tls.is_none() && s.link.is_none() && s.keys.is_empty());
    assert_eq!(
        s.gate,
        GateSettings {
            max_attempts: 3,
            max_elapsed: Duration::from_secs(600),
            hold_bytes: 256 << 10,
            keepalive_open_after: Some(Duration::from_secs(25)),
            keepalive_interval: Some(Duration::from_secs(15)),
            on_node_lost: OnNodeLost::Replay,
            client_write_timeout: Duration::from_secs(30),
            snapshot_bytes: 64 << 20,
        }
    );
    let ejection = EjectionSettings {
        consecutive: 5,
        base: Duration::from_secs(2),
        max: Duration::from_secs(20),
    };
    assert_eq!(s.ejection, ejection);
    assert_eq!(
        s.queue,
        QueueSettings {
            max_depth: 256,
            max_wait: Duration::from_secs(30)
        }
    );
    let runs = RunsSettings {
        workers: 16,
        lease_ttl: Duration::from_secs(30),
        poll_interval: Duration::from_secs(1),
        max_state: 64 << 20,
        max_result: 16 << 20,
        cancel_grace: Duration::from_secs(10),
    };
    assert_eq!(s.runs, runs);
    assert!(s.store == StoreUrl::Sqlite("sqlite://iop.db".into()));
    assert_eq!(
        (s.telemetry.log.as_str(), s.telemetry.log_format),
        ("info", LogFormat::Json)
    );
    assert!(s.providers.is_empty() && s.models.is_empty() && s.agents.is_empty());
    assert!(
        s.notes.iter().any(|n| n.contains("loopback only")),
        "{:?}",
        s.notes
    );
}

#[test]
fn a_link_listens_on_its_default_port() {
    let s = parse("[link]\ntokens = [{ env = \"IOP_LINK_TOKEN\" }]\n")
        .ok()
        .unwrap();
    assert_eq!(s.link.unwrap().listen, "127.0.0.1:7070".parse().unwrap());
}

#[test]
fn the_whole_file_is_read() {
    let s = parse(EVERYTHING).map_err(|e| e.to_string()).ok().unwrap();
    assert_eq!(s.server.metrics_listen, Some("0.0.0.0:9090".parse().unwrap()));
    assert_eq!((s.server.body_limit, s.server.body_memory), (32 << 20, 2 << 30));
    let link = s.link.unwrap();
    let tokens: Vec<&str> = link.tokens.iter().map(|t| t.expose_secret()).collect();
    assert_eq!(tokens, ["value of IOP_LINK_TOKEN", "from-file"]);
    assert_eq!(s.keys[0].digest, digest("value of IOP_KEY_CI"));
    assert_eq!(
        (s.keys[0].roles, &s.keys[0].models),
        (Roles::of(&[Role::Inference]), &ModelFilter::All)
    );
    assert_eq!(s.keys[1].digest, digest("abc"));
    assert_eq!(
        (s.keys[1].roles, s.keys[1].concurrency, s.keys[1].priority),
        (Roles::ALL, Some(32), Priority::High)
    );
    assert_eq!(
        (s.gate.keepalive_open_after, s.gate.keepalive_interval),
        (None, None)
    );
    assert_eq!((s.gate.on_node_lost, s.gate.max_attempts), (OnNodeLost::Fail, 2));
    assert_eq!(s.queue.max_depth, 10);
    assert_eq!(s.providers[0].config.id.as_str(), "local");
    assert_eq!(
        s.providers[0].api_key.as_ref().map(|k| k.expose_secret()),
        Some("value of VLLM_API_KEY")
    );
    let model = &s.models[0];
    assert_eq!(&*model.name, "qwen");
    let candidates: Vec<_> = model
        .candidates
        .iter()
        .map(|c| (c.provider.as_str(), &*c.target, c.priority, c.weight))
        .collect();
    assert_eq!(
        candidates,
        [
            ("local", "Qwen/Qwen3-8B", 0, 3),
            ("gpu-1/vllm", "Qwen/Qwen3-8B", 0, 1),
            ("gpu-2/ollama", "qwen3:8b", 1, 1)
        ]
    );
    assert_eq!(model.liveness.stall, Some(Duration::from_secs(60)));
    assert_eq!(model.liveness.first_content, Some(Duration::from_secs(20)));
    assert_eq!(model.affinity, Affinity::Prefix);
    assert!(s.store == StoreUrl::Postgres("postgres://iop@db/iop".into()));
    let runs = RunsSettings {
        workers: 4,
        lease_ttl: Duration::from_secs(20),
        poll_interval: Duration::from_secs(2),
        max_state: 32 << 20,
        max_result: 8 << 20,
        cancel_grace: Duration::from_secs(5),
    };
    assert_eq!(s.runs, runs);
    assert!(s.prices.get("qwen").is_some() && s.prices.get("other").is_none());
    let agent = &s.agents["deployer"];
    assert_eq!((agent.model.as_str(), agent.tools.len()), ("qwen", 2));
    assert!(s.notes.is_empty(), "{:?}", s.notes);
}

#[test]
fn the_demo_needs_nothing() {
    let nothing = World {
        env: &|_| None,
        file: &|_| Err(io::Error::from(io::ErrorKind::NotFound)),
    };
    let s = Settings::parse("demo", DEMO, &nothing)
        .map_err(|e| e.to_string())
        .ok()
        .unwrap();
    assert!(s.server.listen.ip().is_loopback() && s.link.is_none());
    assert!(
        s.providers[0]
            .config
            .script
            .as_ref()
            .unwrap()
            .contains_key("demo")
    );
    assert!(
        s.demo && s.agents["deployer"].durable && s.notes.len() == 1,
        "{:?}",
        s.notes
    );
}

#[test]
fn the_demonstration_and_keys_exclude_each_other() {
    let key = "[auth]\nkeys = [{ name = \"ops\", secret = { env = \"IOP_KEY_CI\" } }]\n";
    assert!(!parse(key).unwrap().demo && parse("demo = true").unwrap().demo);
    let refused = refused(&format!("demo = true\n{key}"));
    assert_eq!((refused.key.as_str(), refused.line), ("demo", 1));
}

const PROVIDER: &str = "[[providers]]\nid = \"p\"\nadapter = \"openai\"\nbase_url = \"http://127.0.0.1:1/v1\"\ntargets = [\"t\"]\n";
const MODEL: &str = "[[models]]\nname = \"m\"\ncandidates = [{ provider = \"p\", target = \"t\" }]\n";

#[test]
fn every_rule_names_file_line_and_key() {
    let key = |body: &str| format!("[auth]\nkeys = [\n  {{ name = \"a\", {body} }},\n]\n");
    let model = |body: &str| format!("{PROVIDER}[[models]]\nname = \"m\"\n{body}\n");
    let candidate = |body: &str| model(&format!("candidates = [{{ {body} }}]"));
    let cases: Vec<(String, usize, &str)> = vec![
        ("\n[flows.a]\n".into(), 2, "flows"),
        ("[triggers.a]\n".into(), 1, "triggers"),
        ("[webhooks.a]\n".into(), 1, "webhooks"),
        ("[nats]\nurl = \"nats://127.0.0.1:4222\"\n".into(), 1, "nats"),
        (
            "[telemetry]\notlp_endpoint = \"http://127.0.0.1:4317\"\n".into(),
            2,
            "telemetry.otlp_endpoint",
        ),
        (
            "[telemetry]\ngen_ai_metrics = true\n".into(),
            2,
            "telemetry.gen_ai_metrics",
        ),
        ("[telemetry]\nlog = \"a=b=c\"\n".into(), 2, "telemetry.log"),
        ("[server]\nlisten = \"localhost\"\n".into(), 2, "server.listen"),
        ("[server]\nlisten = \"0.0.0.0:80\"\n".into(), 2, "server.listen"),
        (
            "[server]\nmetrics_listen = \"[::]:80\"\n".into(),
            2,
            "server.metrics_listen",
        ),
        (
            "[link]\nlisten = \"0.0.0.0:1\"\ntokens = [{ env = \"IOP_LINK_TOKEN\" }]\n".into(),
            2,
            "link.listen",
        ),
        ("[server]\nbody_limit = \"10B\"\n".into(), 2, "server.body_limit"),
        (
            "[server]\nbody_memory = \"1MiB\"\nbody_limit = \"2MiB\"\n".into(),
            3,
            "server.body_limit",
        ),
        (
            "[server]\ntls = { cert = \"c\", key = \"k\" }\n".into(),
            2,
            "server.tls.cert",
        ),
        (
            "[server]\ntls = { cert = \"token\", key = \"token\" }\n".into(),
            2,
            "server.tls.cert",
        ),
        (
            "[server]\ntls = { cert = \"c\", key = \"k\", client_ca = \"a\" }\n".into(),
            2,
            "server.tls.client_ca",
        ),
        ("[link]\n".into(), 1, "link.tokens"),
        ("[link]\ntokens = []\n".into(), 2, "link.tokens"),
        (
            "[link]\ntokens = [\n{ env = \"IOP_LINK_TOKEN\" },\n{ env = \"NONE\" }]\n".into(),
            4,
            "link.tokens[1]",
        ),
        ("[store]\nurl = \"mysql://x\"\n".into(), 2, "store.url"),
        ("[store]\nurl = \"sqlite://\"\n".into(), 2, "store.url"),
        ("[gate]\nmax_attempts = 0\n".into(), 2, "gate.max_attempts"),
        ("[gate]\nmax_elapsed = \"0s\"\n".into(), 2, "gate.max_elapsed"),
        ("[gate]\nhold_bytes = \"1B\"\n".into(), 2, "gate.hold_bytes"),
        (
            "[gate]\nclient_write_timeout = \"0s\"\n".into(),
            2,
            "gate.client_write_timeout",
        ),
        ("[gate]\non_node_lost = \"pray\"\n".into(), 2, "gate.on_node_lost"),
        ("[ejection]\nconsecutive = 0\n".into(), 2, "ejection.consecutive"),
        ("[ejection]\nbase = \"30s\"\n".into(), 1, "ejection.max"),
        ("[queue]\nmax_depth = 1000001\n".into(), 2, "queue.max_depth"),
        ("[runs]\nworkers = 0\n".into(), 2, "runs.workers"),
        ("[runs]\nlease_ttl = \"999ms\"\n".into(), 2, "runs.lease_ttl"),
        ("[runs]\nlease_ttl = \"2years\"\n".into(), 2, "runs.lease_ttl"),
        (
            "[runs]\npoll_interval = \"49ms\"\n".into(),
            2,
            "runs.poll_interval",
        ),
        (
            "[runs]\ncancel_grace = \"2years\"\n".into(),
            2,
            "runs.cancel_grace",
        ),
        ("[runs]\nmax_state = \"1B\"\n".into(), 2, "runs.max_state"),
        ("[runs]\nmax_result = \"1GiB\"\n".into(), 2, "runs.max_result"),
        ("[runs]\nmax_result = 5\n".into(), 2, "runs.max_result"),
        ("[store]\nurl = \"memory://\"\n".into(), 2, "store.url"),
        ("[store]\nurl = \"sqlite://:memory:\"\n".into(), 2, "store.url"),
        (
            "[store]\nurl = \"sqlite://x?mode=memory\"\n".into(),
            2,
            "store.url",
        ),
        (
            "[prices.a]\ninput = \"1\"\noutput = \"1\"\n[prices.\"gpt-4.1\"]\ninput = \"1\"\noutput = \"x\"\n".into(),
            6,
            "prices.gpt-4.1.output",
        ),
        (
            "[prices.a]\ninput = 1\noutput = \"1\"\n".into(),
            2,
            "prices.a.input",
        ),
        (
            format!("{PROVIDER}{}", MODEL.replace("\"m\"", "\"agent:m\"")),
            7,
            "models[0].name",
        ),
        (format!("{PROVIDER}capacity = 0\n"), 6, "providers[0].capacity"),
        (format!("{PROVIDER}{PROVIDER}"), 7, "providers[1].id"),
        (
            format!("{PROVIDER}api_key = {{ env = \"NONE\" }}\n"),
            6,
            "providers[0].api_key",
        ),
        (format!("{PROVIDER}{MODEL}{MODEL}"), 10, "models[1].name"),
        (model(""), 6, "models[0].candidates"),
        (model("candidates = []"), 8, "models[0].candidates"),
        (
            format!("{PROVIDER}{}", MODEL.replace("\"m\"", "\"\"")),
            7,
            "models[0].name",
        ),
        (
            candidate("provider = \"q\", target = \"t\""),
            8,
            "models[0].candidates[0].provider",
        ),
        (
            candidate("provider = \"a/b/c\", target = \"t\""),
            8,
            "models[0].candidates[0].provider",
        ),
        (
            candidate("provider = \"p\", target = \"u\""),
            8,
            "models[0].candidates[0].target",
        ),
        (
            candidate("provider = \"n/p\", target = \"\""),
            8,
            "models[0].candidates[0].target",
        ),
        (
            candidate("provider = \"p\", target = \"t\", weight = 0"),
            8,
            "models[0].candidates[0].weight",
        ),
        (
            candidate("provider = \"p\", target = \"t\", priority = -1"),
            8,
            "models[0].candidates[0].priority",
        ),
        (
            model(
                "candidates = [\n{ provider = \"p\", target = \"t\" },\n{ provider = \"p\", target = \"t\", weight = 2 }]",
            ),
            10,
            "models[0].candidates[1]",
        ),
        (
            format!("{PROVIDER}{MODEL}liveness = \"fast\"\n"),
            9,
            "models[0].liveness",
        ),
        (
            format!("{PROVIDER}{MODEL}affinity = \"sticky\"\n"),
            9,
            "models[0].affinity",
        ),
        (
            format!("{PROVIDER}{MODEL}first_content_timeout = \"0s\"\n"),
            9,
            "models[0].first_content_timeout",
        ),
        (key("secret = \"plain\""), 3, "auth.keys[0].secret"),
        (key("secret = { env = \"NONE\" }"), 3, "auth.keys[0].secret"),
        (key("roles = [\"inference\"]"), 3, "auth.keys[0].secret"),
        (key("secret_sha256 = \"ab\""), 3, "auth.keys[0].secret_sha256"),
        (
            key(&format!(
                "secret = {{ env = \"IOP_KEY_CI\" }}, secret_sha256 = \"{}\"",
                "0".repeat(64)
            )),
            3,
            "auth.keys[0].secret_sha256",
        ),
        (
            key("secret = { env = \"IOP_KEY_CI\" }, roles = [\"king\"]"),
            3,
            "auth.keys[0].roles",
        ),
        (
            key("secret = { env = \"IOP_KEY_CI\" }, roles = []"),
            3,
            "auth.keys[0].roles",
        ),
        (
            key("secret = { env = \"IOP_KEY_CI\" }, models = [\"a*b\"]"),
            3,
            "auth.keys[0].models[0]",
        ),
        (
            key("secret = { env = \"IOP_KEY_CI\" }, concurrency = 0"),
            3,
            "auth.keys[0].concurrency",
        ),
        (
            key("secret = { env = \"IOP_KEY_CI\" }, priority = \"urgent\""),
            3,
            "auth.keys[0].priority",
        ),
        (
            key("secret = { env = \"IOP_KEY_CI\" }, rpm = 600"),
            3,
            "auth.keys[0].rpm",
        ),
        (
            key("secret = { env = \"IOP_KEY_CI\" }, tpm = 600"),
            3,
            "auth.keys[0].tpm",
        ),
        (
            key("secret = { env = \"IOP_KEY_CI\" }, budget = { usd = 1 }"),
            3,
            "auth.keys[0].budget",
        ),
        (
            key(
                "secret = { env = \"IOP_KEY_CI\" } },\n  { name = \"a\", secret = { env = \"IOP_LINK_TOKEN\" }",
            ),
            4,
            "auth.keys[1].name",
        ),
        (
            key("secret = { env = \"IOP_KEY_CI\" } },\n  { name = \"b\", secret = { env = \"IOP_TWIN\" }"),
            4,
            "auth.keys[1].secret",
        ),
        (
            key(
                "secret = { env = \"IOP_KEY_CI\" } },\n  { name = \"b c\", secret = { env = \"IOP_LINK_TOKEN\" }",
            ),
            4,
            "auth.keys[1].name",
        ),
    ];
    for (text, line, key) in cases {
        let e = refused(&text);
        // An enum inside a list is named by its element.
        let names = e.key == key || e.key.strip_prefix(key).is_some_and(|rest| rest.starts_with('['));
        assert!(
            names && e.line == line && e.file == "edge.toml",
            "want {line}: {key}, got {e}\n{text}"
        );
    }
}

#[test]
fn a_declaration_that_cannot_run_is_named_by_file_line_and_key() {
    let agent = |body: &str| format!("[agents.deployer]\nmodel = \"m\"\n{body}");
    let tool = |body: &str| {
        agent(&format!(
            "[[agents.deployer.tools]]\nname = \"t\"\nhttp = {{ url = \"http://t.example/\" }}\n{body}\n"
        ))
    };
    let url = |body: &str| {
        agent(&format!(
            "[[agents.deployer.tools]]\nname = \"t\"\nhttp = {{ {body} }}\n"
        ))
    };
    for (text, line, key) in [
        ("[agents.a]\n".to_owned(), 1, "agents.a"),
        ("[agents.\"a b\"]\nmodel = \"m\"\n".to_owned(), 1, "agents.a b"),
        (
            "[agents.a]\nmodel = \"m\"\n[agents.\"a.b\"]\nmodel = \"\"\n".to_owned(),
            4,
            "agents.a.b.model",
        ),
        (agent("durble = true\n"), 3, "agents.deployer.durble"),
        (agent("deadline = 5\n"), 3, "agents.deployer.deadline"),
        (agent("deadline = \"0s\"\n"), 3, "agents.deployer.deadline"),
        (
            agent("budgets = { turns = 5, spend = \"1\" }\n"),
            3,
            "agents.deployer.budgets.spend",
        ),
        (
            agent("budgets = { turns = -1 }\n"),
            3,
            "agents.deployer.budgets.turns",
        ),
        (
            agent("approvals = { default = \"always\" }\n"),
            3,
            "agents.deployer.approvals.default",
        ),
        (
            agent("parameters = { temperature = nan }\n"),
            3,
            "agents.deployer.parameters.temperature",
        ),
        (tool("effect = \"safe\""), 6, "agents.deployer.tools[0].effect"),
        (
            tool("retry = { max_attempts = 2 }"),
            6,
            "agents.deployer.tools[0].retry.max_attempts",
        ),
        (url("url = \"t.example\""), 5, "agents.deployer.tools[0].http.url"),
        (
            url("url = \"http://t.example/\", headers = { x-a = { env = \"NONE\" } }"),
            5,
            "agents.deployer.tools[0].http.headers.x-a",
        ),
        (
            url("url = \"http://t.example/\", headers = { x-a = { file = \"none\" } }"),
            5,
            "agents.deployer.tools[0].http.headers.x-a",
        ),
        (
            agent(
                "[agents.deployer.mcp_servers.ops]\nurl = \"http://o.example/\"\nheaders = { x-a = { env = \"NONE\" } }\n",
            ),
            5,
            "agents.deployer.mcp_servers.ops.headers.x-a",
        ),
        (
            tool(
                "reconcile = { url = \"http://t.example/{a}\", found = \"$.a\", headers = { x-a = { env = \"NONE\" } } }",
            ),
            6,
            "agents.deployer.tools[0].reconcile.headers.x-a",
        ),
    ] {
        let e = refused(&text);
        assert_eq!((e.line, e.key.as_str()), (line, key), "{e}\n{text}");
    }
}

#[test]
fn a_store_that_forgets_is_meant_or_refused() {
    let durable = "[agents.a]\nmodel = \"m\"\ndurable = true\n";
    let memory = "[store]\nurl = \"memory://\"\n";
    let e = refused(&format!("{memory}{durable}"));
    assert!(e.message.contains("dev = true"), "{e}");
    let s = parse(&format!("[runs]\ndev = true\n{memory}{durable}"))
        .ok()
        .unwrap();
    assert!(s.store == StoreUrl::Memory && s.agents["a"].durable);
    for note in ["store.url is memory://", "agents.a.durable"] {
        assert!(s.notes.iter().any(|n| n.contains(note)), "{note}: {:?}", s.notes);
    }
    let file = parse(&format!("[runs]\ndev = true\n{durable}")).ok().unwrap();
    assert!(file.store == StoreUrl::Sqlite("sqlite://iop.db".into()));
}

#[test]
fn what_may_not_work_by_this_file_alone_is_said() {
    let agents = "[agents.a]\nmodel = \"gone\"\ndurable = true\napprovals = { deciders = [\"ci\"] }\n[[agents.a.tools]]\nname = \"ask\"\nagent = { name = \"b\" }\n";
    let s = parse(&format!("{PROVIDER}{agents}")).ok().unwrap();
    for note in [
        "agents.a.model",
        "agents.a.tools[0].agent.name",
        "agents.a.approvals.deciders",
    ] {
        assert!(
            s.notes.iter().any(|n| n.starts_with(note)),
            "{note}: {:?}",
            s.notes
        );
    }
    let keys =
        "[auth]\nkeys = [{ name = \"ci\", secret = { env = \"IOP_KEY_CI\" }, roles = [\"operator\"] }]\n";
    let agents = agents.replace("gone", "t").replace("\"b\"", "\"a\"");
    let s = parse(&format!("{PROVIDER}{keys}{agents}")).ok().unwrap();
    assert!(s.notes.is_empty(), "{:?}", s.notes);
}

#[test]
fn what_comes_later_says_so() {
    for text in [
        "[nats]\nurl = \"x\"\n",
        "[flows.a]\n",
        "[telemetry]\ngen_ai_metrics = true\n",
    ] {
        assert_eq!(refused(text).message, "not available yet");
    }
}

#[test]
fn without_keys_no_listener_is_open_to_others() {
    let e = refused("[server]\nlisten = \"192.168.0.1:80\"\n");
    assert!(
        e.message.contains("no key configured: listens on loopback only"),
        "{e}"
    );
    assert!(parse("[server]\nlisten = \"[::1]:80\"\n").is_ok());
    assert!(parse("[server]\nlisten = \"[::ffff:127.0.0.1]:80\"\n").is_ok());
    let keys = "[auth]\nkeys = [{ name = \"a\", secret = { env = \"IOP_KEY_CI\" } }]\n";
    let s = parse(&format!("[server]\nlisten = \"0.0.0.0:80\"\n{keys}"))
        .ok()
        .unwrap();
    assert_eq!(s.keys[0].roles, Roles::of(&[Role::Inference]));
}

#[test]
fn a_candidate_of_a_node_is_not_judged_but_a_missing_link_is_said() {
    let s = parse("[[models]]\nname = \"m\"\ncandidates = [{ provider = \"gpu-1/vllm\", target = \"t\" }]\n")
        .ok()
        .unwrap();
    assert!(
        s.notes
            .iter()
            .any(|n| n.contains("models[0].candidates[0].provider")),
        "{:?}",
        s.notes
    );
}

#[test]
fn a_script_names_the_targets_it_serves() {
    let scripted = "[[providers]]\nid = \"p\"\nadapter = \"scripted\"\nscript = { t = {} }\n";
    assert!(parse(&format!("{scripted}{MODEL}")).is_ok());
    let e = refused(&format!("{scripted}{}", MODEL.replace("\"t\"", "\"u\"")));
    assert_eq!(e.key, "models[0].candidates[0].target");
}

#[test]
fn every_word_list_agrees_with_itself_about_unknown_keys() {
    for section in [
        "server",
        "link",
        "store",
        "auth",
        "gate",
        "ejection",
        "queue",
        "runs",
        "telemetry",
    ] {
        let e = refused(&format!("[{section}]\nunheard_of = 1\n"));
        assert_eq!((e.line, e.key), (2, format!("{section}.unheard_of")), "{section}");
    }
}

proptest! {
    #[test]
    fn no_mutation_of_a_valid_file_panics(
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..6, ".{0,6}"), 1..6)
    ) {
        let mut chars: Vec<char> = EVERYTHING.chars().collect();
        for (at, cut, insert) in edits {
            let at = at.index(chars.len() + 1);
            let end = (at + cut).min(chars.len());
            chars.splice(at..end, insert.chars());
        }
        let text: String = chars.into_iter().collect();
        if let Err(e) = parse(&text) {
            prop_assert!(e.line >= 1 && e.line <= text.lines().count() + 1 && !e.message.is_empty(), "{}", e);
        }
    }

    #[test]
    fn no_line_of_a_valid_file_is_needed_for_not_panicking(gone in prop::collection::vec(any::<prop::sample::Index>(), 1..8)) {
        let lines: Vec<&str> = EVERYTHING.lines().collect();
        let gone: Vec<usize> = gone.iter().map(|i| i.index(lines.len())).collect();
        let left: Vec<&str> = lines.iter().enumerate().filter(|(i, _)| !gone.contains(i)).map(|(_, l)| *l).collect();
        // Only that it comes back is asked.
        let _ = parse(&left.join("\n"));
    }
}
