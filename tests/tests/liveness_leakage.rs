//! What the projections of 004 must never hold: nothing of a prompt, an answer, a credential, a caller or an attempt in a
//! label or in a log, at any level; and no series that was not there from the start (gateway.md G81, G82, §13).

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use futures_util::future::join_all;
use iop_tests::client::{Client, Conn};
use iop_tests::config::{Provider, Setup, key};
use iop_tests::fake_node::{FakeNode, advertisement, provider};
use iop_tests::liveness::{
    ELIGIBILITY, EVIDENCE, HEALTH_LINE, RECOVERY_LINE, RESULTS, STALL_DURATION, STALL_LINE, STALLS,
    TRANSITIONS, node_page, node_process, until_status,
};
use iop_tests::metrics::Page;
use iop_tests::process::Process;
use iop_tests::provider::{Exchange, Stub};
use iop_tests::stack::{LINK_TOKEN, Shape, Stack};
use iop_tests::{fixtures, run, within};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
/// Stands in everything that must not be told; what follows it says where it was planted.
const PLANTED: &str = "zq7planted";
const STALL: &str = "response_stall_timeout = \"1s\"";

fn metered(setup: Setup) -> Setup {
    setup.node("node", "metrics_listen = \"127.0.0.1:0\"")
}

#[test]
fn every_row_of_the_contract_is_there_from_the_start() {
    run(60, async {
        for shape in Shape::ALL {
            let setup = metered(Setup::of(Provider::scripted("up", &["m"], "{}")));
            let stack = Stack::start(shape, setup).await;
            let edge = stack.edge.scrape().await;
            let node = node_page(&stack).await;
            for (family, page) in [
                (EVIDENCE, &edge),
                (TRANSITIONS, &edge),
                (ELIGIBILITY, &edge),
                (RESULTS, &edge),
                (STALLS, &node),
            ] {
                let all = family.all(page);
                let names: BTreeSet<String> = all.keys().cloned().collect();
                assert_eq!(names, family.product(), "{shape:?} {}", family.name);
                assert!(all.values().all(|n| *n == 0), "{shape:?} {}", family.name);
            }
            // The histogram has the rows that can occur: a health goes with its classification only.
            let counts = STALLS.read(&node, &format!("{STALL_DURATION}_count"), &[]);
            assert!(counts.values().all(|n| *n == 0));
            let pairs = ["available", "unavailable", "unknown"]
                .map(|health| format!("{health}/{}", iop_tests::fake_node::classification(health)));
            let of_pair = |row: &String| pairs.iter().any(|pair| row.contains(&format!("/{pair}/")));
            assert!(counts.keys().all(of_pair), "{counts:?}");
            for path in ["normalized", "provider_tunnel"] {
                for pair in &pairs {
                    for fence in ["confirmed", "unconfirmed"] {
                        assert!(
                            counts.contains_key(&format!("{path}/{pair}/{fence}")),
                            "{counts:?}"
                        );
                    }
                }
            }
        }
    });
}

/// Series by name and labels.
fn series(page: &Page) -> BTreeSet<String> {
    page.0
        .iter()
        .map(|s| format!("{} {:?}", s.name, s.labels))
        .collect()
}

#[test]
fn ten_thousand_invented_model_names_add_no_series() {
    const CONNECTIONS: usize = 8;
    const EACH: usize = 1_250;
    run(120, async {
        for shape in Shape::ALL {
            let setup = metered(Setup::of(Provider::scripted("up", &["m"], "{}")).model("known", "up", "m"));
            let stack = Stack::start(shape, setup).await;
            assert_eq!(stack.chat("known", "hello").await.status(), 200);
            stack.settled(Duration::from_secs(2)).await;
            let before = (
                series(&stack.edge.scrape().await),
                series(&node_page(&stack).await),
            );
            let asked = (0..CONNECTIONS).map(|n| {
                let addr = stack.edge.http.clone();
                async move {
                    let mut conn = Conn::open(&addr).await.unwrap();
                    // Any generator will do: what counts is that no name comes twice.
                    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(n as u64 + 1);
                    for i in 0..EACH {
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        let name = match i % 4 {
                            0 => format!("model-{n}-{state:016x}"),
                            1 => format!("org/{state:x}:{n}\"}} 1\niop_edge_requests_total{{x=\"{i}"),
                            2 => format!("известная-{n}-{state}"),
                            _ => format!("known{state}"),
                        };
                        let (path, body) = if i % 2 == 0 {
                            (CHAT, fixtures::chat(&name, "hello", false))
                        } else {
                            (RESPONSES, fixtures::responses(&name, "hello", true))
                        };
                        let body = body.to_string();
                        let headers = [("content-type", "application/json")];
                        conn.request("POST", path, &headers, body.as_bytes())
                            .await
                            .unwrap();
                        let answer = conn.answer().await.unwrap();
                        assert_eq!(answer.status(), 404, "{name}: {}", answer.text());
                    }
                }
            });
            join_all(asked).await;
            let page = stack.edge.scrape().await;
            assert_eq!(
                page.sum("iop_edge_requests_total", &[("outcome", "client_error")])
                    + page.sum("iop_edge_requests_total", &[("outcome", "rejected")]),
                (CONNECTIONS * EACH) as f64
            );
            assert_eq!(series(&page), before.0, "{shape:?}: edge");
            assert_eq!(series(&node_page(&stack).await), before.1, "{shape:?}: node");
        }
    });
}

fn planted(what: &str) -> String {
    format!("{PLANTED}-{what}")
}

/// An engine that leaves its mark in everything it says. What it does is what the prompt ends with.
async fn engine(mut ex: Exchange) -> io::Result<()> {
    if ex.method == "GET" {
        // The target of `ill` is missing.
        let list =
            json!({"object": "list", "data": [{"id": "t-up"}, {"id": "t-next"}, {"id": planted("other")}]});
        return ex.json_reply(200, &list).await;
    }
    let body = ex.json();
    let prompt = body["input"].as_str().or(body["messages"][0]["content"].as_str());
    let case = prompt
        .and_then(|p| p.rsplit(':').next())
        .unwrap_or_default()
        .to_owned();
    let (stream, is_chat) = (body["stream"] == true, ex.path.contains("/completions"));
    let words = planted("provider-error");
    let error = json!({"error": {"message": words, "type": words, "param": words, "code": words}});
    let mark = planted("provider-header");
    let text = planted("answer");
    let headers = |kind: &'static str| {
        vec![
            ("content-type", kind),
            ("x-of-the-provider", mark.as_str()),
            ("set-cookie", mark.as_str()),
        ]
    };
    match case.as_str() {
        "stall" => {
            ex.gone().await;
            Ok(())
        }
        "reset" => {
            ex.cut(true);
            Ok(())
        }
        "no http" => {
            ex.raw(format!("{words}\r\n\r\n").as_bytes()).await?;
            ex.cut(false);
            Ok(())
        }
        "html" => {
            ex.reply(502, &headers("text/html"), format!("<p>{words}</p>").as_bytes())
                .await
        }
        "redirect" => {
            let to = format!("http://127.0.0.1:9/{words}");
            ex.reply(302, &[("location", &to)], b"").await
        }
        "encoded" => {
            let mut headers = headers("application/json");
            headers.push(("content-encoding", "zq7planted-coding"));
            ex.reply(200, &headers, text.as_bytes()).await
        }
        status if status.parse::<u16>().is_ok() => {
            ex.reply(
                status.parse().unwrap_or(500),
                &headers("application/json"),
                error.to_string().as_bytes(),
            )
            .await
        }
        _ if !stream => {
            let whole = if is_chat {
                fixtures::chat_answer("t", &text)
            } else {
                let items = json!([fixtures::message_item(&text, "completed")]);
                fixtures::response_object(&planted("response-id"), "t", "completed", &items)
            };
            ex.reply(200, &headers("application/json"), whole.to_string().as_bytes())
                .await
        }
        _ => {
            ex.head(200, &headers("text/event-stream")).await?;
            let content = if is_chat {
                format!("data: {}\n\n", fixtures::text_chunk(&text)).into_bytes()
            } else {
                let events = fixtures::response_events(&planted("response-id"), "t", &[&text]);
                events.iter().take(5).flat_map(fixtures::named_event).collect()
            };
            match case.as_str() {
                "error first" => ex.data(&error.to_string()).await?,
                "malformed" => ex.data(&format!("{{{words}")).await?,
                "stall later" => {
                    ex.chunk(&content).await?;
                    ex.gone().await;
                    return Ok(());
                }
                "cut later" => {
                    ex.chunk(&content).await?;
                    ex.cut(true);
                    return Ok(());
                }
                _ if is_chat => ex.chunk(&fixtures::chat_stream(&[&text])).await?,
                _ => {
                    let all = fixtures::response_stream(&planted("response-id"), &[&text]);
                    ex.chunk(&all).await?;
                }
            }
            ex.end().await
        }
    }
}

/// A request that has a mark wherever a client can leave one.
fn marked(path: &str, model: &str, case: &str, stream: bool) -> Value {
    let prompt = format!("{}:{case}", planted("prompt"));
    let mut body = if path == CHAT {
        fixtures::chat(model, &prompt, stream)
    } else {
        let mut body = fixtures::responses(model, &prompt, stream);
        body["instructions"] = json!(planted("instructions"));
        body
    };
    body["user"] = json!(planted("user"));
    body["metadata"] = json!({planted("metadata-key"): planted("metadata")});
    body["prompt_cache_key"] = json!(planted("cache-key"));
    body["safety_identifier"] = json!(planted("safety"));
    body[planted("unknown-field")] = json!(planted("unknown"));
    let function = json!({"name": planted("tool"), "parameters": {"type": "object", "properties": {}}});
    body["tools"] = if path == CHAT {
        json!([{"type": "function", "function": function}])
    } else {
        json!([{"type": "function", "name": planted("tool"), "parameters": {}}])
    };
    body
}

async fn send(client: &Client, path: &str, body: &Value) -> Conn {
    let (header, agent, cookie, query) = (
        planted("client-header"),
        planted("agent"),
        planted("cookie"),
        planted("query"),
    );
    let headers = [
        ("x-of-the-client", header.as_str()),
        ("user-agent", &agent),
        ("cookie", &cookie),
        ("referer", &cookie),
        ("openai-organization", &header),
    ];
    let path = format!("{path}?q={query}");
    client
        .start("POST", &path, &headers, body.to_string().as_bytes())
        .await
        .unwrap()
}

const CASES: [&str; 16] = [
    "ok",
    "429",
    "500",
    "503",
    "400",
    "401",
    "404",
    "html",
    "redirect",
    "encoded",
    "reset",
    "no http",
    "error first",
    "malformed",
    "stall later",
    "cut later",
];

fn whole_setup(stub: &Stub, dead: &str, level: &str, format: &str) -> Setup {
    let secret = planted("provider-key");
    let openai = |id: &str, url: &str| {
        Provider::openai(id, url, &[&format!("t-{id}")])
            .line("api_key = { env = \"IOP_PLANTED_KEY\" }")
            .line(&format!(
                "headers = {{ x-configured = {:?} }}",
                planted("configured")
            ))
            .line(STALL)
    };
    let script = |more: &str| {
        format!(
            "{{ \"t-run\" = {{ reply = {:?}, normalized = true{more} }} }}",
            planted("answer")
        )
    };
    let mut setup = Setup::of(openai("up", &stub.url()))
        .provider(openai("next", &stub.url()))
        .provider(openai("ill", &stub.url()))
        .provider(openai("dead", &format!("http://{dead}/v1")))
        .provider(
            Provider::scripted(
                "run",
                &["t-run"],
                &script(", stall = \"before_headers\", fail_first = 1"),
            )
            .line(STALL),
        )
        .ranked("m", &[("up", "t-up"), ("next", "t-next")])
        .ranked("ill", &[("ill", "t-ill"), ("next", "t-next")])
        .ranked("gone", &[("dead", "t-dead"), ("next", "t-next")])
        .model("run", "run", "t-run")
        .edge("telemetry", &format!("log = {level:?}\nlog_format = {format:?}"))
        .node("telemetry", &format!("log = {level:?}\nlog_format = {format:?}"))
        // The faults of one case must not hide the next.
        .edge("ejection", "consecutive = 1000")
        .edge("queue", "max_wait = \"2s\"")
        .env("IOP_PLANTED_KEY", &secret);
    let roles = ["inference", "operator", "metrics"];
    let own = planted("ops-key");
    setup = setup.keys(
        &[
            key("ops", &own, &roles, ""),
            key("ci", &planted("client-key"), &["inference"], ""),
        ],
        &own,
    );
    metered(setup)
}

/// A node that leaves its mark in what it says of stalls and of health.
async fn by_a_marked_node(stack: &Stack, client: &Client) -> Vec<String> {
    let link = stack.edge.link.clone().unwrap();
    let ad = advertisement("f1", &[provider("p", &["fake"], 4)]);
    let mut node = FakeNode::dial(&link, &planted("instance"), &ad).await;
    stack
        .edge
        .lists(&["fake".to_owned()], Duration::from_secs(5))
        .await;
    let mut ids = Vec::new();
    let mark = planted("evidence");
    for variant in 0..5 {
        let mut conn = send(client, CHAT, &marked(CHAT, "fake", "ok", false)).await;
        let tunnel = node.tunnel().await;
        ids.extend([tunnel.field("run-id"), tunnel.field("attempt-id")]);
        let mut evidence = tunnel.evidence("unavailable", 5);
        match variant {
            0 => evidence = json!(mark),
            1 => evidence["target"] = json!(mark),
            2 => evidence[&mark] = json!(mark),
            3 => evidence["provider_health"] = json!(mark),
            _ => {}
        }
        let evidence = iop_tests::fake_node::encode(&evidence.to_string());
        tunnel.terminal(&[
            ("iop-terminal", "error"),
            ("iop-error-code", "response_stalled"),
            ("iop-error", &planted("node-words")),
            ("iop-failure", &evidence),
        ]);
        let answer = conn.answer().await.unwrap();
        assert_eq!(answer.status(), 504, "{}", answer.text());
        assert!(!answer.text().contains(PLANTED), "{}", answer.text());
    }
    until_status(stack, "p", "unavailable", Duration::from_secs(5)).await;
    let command = node.command(Duration::from_secs(7)).await;
    let mut answer = command.capabilities("available", 6);
    answer["adapter_key"] = json!(mark);
    command.answer(200, answer.to_string());
    node.say(&json!({"load": [{"id": "p", "in_flight": 0}]}));
    ids
}

async fn everything(shape: Shape, level: &str, format: &str) {
    let stub = Stub::start(engine).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let dead = listener.local_addr().unwrap().to_string();
    drop(listener);
    let mut stack = Stack::start(shape, whole_setup(&stub, &dead, level, format)).await;
    let client = stack.client().with_key(&planted("client-key"));

    let mut all = Vec::new();
    for case in CASES {
        for path in [CHAT, RESPONSES] {
            for stream in [false, true] {
                all.push((path, marked(path, "m", case, stream)));
            }
        }
    }
    // Stalls: replayed, refused for a hosted tool, on the normalized path; connections refused; nobody's model.
    all.push((CHAT, marked(CHAT, "ill", "stall", false)));
    let mut hosted = marked(RESPONSES, "m", "stall", true);
    hosted["tools"] = json!([{"type": "web_search", "filters": planted("filter")}]);
    all.push((RESPONSES, hosted));
    all.push((CHAT, marked(CHAT, "run", "ok", true)));
    all.push((CHAT, marked(CHAT, "gone", "ok", false)));
    all.push((CHAT, marked(CHAT, &planted("model"), "ok", false)));
    all.push(("/v1/zq7planted/path", json!({"model": planted("model")})));
    all.push((CHAT, json!(planted("no request"))));
    join_all(all.iter().map(|(path, body)| {
        let client = &client;
        async move {
            // Whatever the answer is; a cut one is one as well.
            let mut conn = send(client, path, body).await;
            let head = conn.head().await.unwrap();
            assert!(head.status >= 200, "{head:?}");
            conn.body().await.unwrap();
        }
    }))
    .await;
    // A client that leaves in the middle, and one whose key is none.
    let mut conn = send(&client, CHAT, &marked(CHAT, "m", "stall later", true)).await;
    conn.head().await.unwrap();
    conn.until(PLANTED).await;
    drop(conn);
    let stranger = client.with_key(&planted("wrong-key"));
    let mut conn = send(&stranger, CHAT, &marked(CHAT, "m", "ok", false)).await;
    assert_eq!(conn.answer().await.unwrap().status(), 401);

    let mut secret = vec![PLANTED.to_owned(), LINK_TOKEN.to_owned()];
    if shape == Shape::Linked {
        secret.extend(by_a_marked_node(&stack, &client).await);
        let addr = stack.edge.link.clone().unwrap();
        let mut conn = Conn::open(&addr).await.unwrap();
        let bearer = format!("Bearer {}", planted("link-token"));
        let headers = [
            ("connection", "upgrade"),
            ("upgrade", "iop-link/1"),
            ("authorization", bearer.as_str()),
            ("iop-node-id", "n9"),
        ];
        conn.request("GET", "/link", &headers, b"").await.unwrap();
        assert_eq!(conn.answer().await.unwrap().status(), 401);
    }

    // What was planted has been through: the engine saw it, and each projection has something to tell.
    assert!(
        stub.received()
            .iter()
            .any(|r| r.header("authorization") == Some(&format!("Bearer {}", planted("provider-key"))))
    );
    let node_lines = STALL_LINE.count(node_process(&stack));
    assert!(node_lines >= 4, "{node_lines} stalls");
    for line in [HEALTH_LINE, RECOVERY_LINE] {
        assert!(line.count(&stack.edge.process) >= 4, "{}", line.message);
    }
    for process in [&stack.edge.process, node_process(&stack)] {
        let lines = process.lines_with(&level.to_ascii_uppercase());
        assert!(!lines.is_empty(), "{} is as talkative as {level}", process.name);
    }
    assert!(!stack.edge.process.lines_with("request_ended").is_empty());

    let mut pages = vec![("edge", stack.client().get("/metrics").await.text())];
    if let Some(addr) = stack.nodes.first().and_then(|n| n.metrics.clone()) {
        pages.push(("node", Client::new(&addr).get("/metrics").await.text()));
    }
    for (whose, page) in &pages {
        for word in &secret {
            let line = page.lines().find(|l| l.contains(word.as_str()));
            assert_eq!(line, None, "{word} in the metrics of the {whose}");
        }
        for sample in &Page::parse(page).0 {
            for (label, value) in &sample.labels {
                assert!(!is_id(value), "{}: {label}={value:?}", sample.name);
            }
        }
    }

    // To the last line: the node is lost under a request, then the edge drains.
    if shape == Shape::Linked {
        let mut conn = send(&client, CHAT, &marked(CHAT, "m", "stall later", true)).await;
        conn.head().await.unwrap();
        conn.until(PLANTED).await;
        stack.nodes[0].process.kill().await;
        within(
            "the stream ends with its node",
            Duration::from_secs(5),
            conn.body(),
        )
        .await
        .unwrap();
    }
    stack.edge.process.signal("TERM");
    stack.edge.process.exit(Duration::from_secs(20)).await;
    let mut processes = vec![&stack.edge.process];
    processes.extend(stack.nodes.iter().map(|n| &n.process));
    for process in processes {
        assert_silent(process, &secret);
    }
}

/// No line of the process holds one of these.
fn assert_silent(process: &Process, secret: &[String]) {
    for word in secret {
        let lines = process.lines_with(word);
        assert!(
            lines.is_empty(),
            "{}: {} lines hold {word:?}, such as {}",
            process.name,
            lines.len(),
            lines[0]
        );
    }
}

/// Looks like an id that was made for one request or attempt: 32 hexadecimal digits, with or without hyphens.
fn is_id(value: &str) -> bool {
    let digits: Vec<char> = value.chars().filter(|c| *c != '-').collect();
    digits.len() >= 32 && digits.iter().all(char::is_ascii_hexdigit)
}

#[test]
fn embedded_debug_logs_and_metrics_tell_nothing_of_anybody() {
    run(90, everything(Shape::Embedded, "debug", "json"));
}

#[test]
fn linked_debug_logs_and_metrics_tell_nothing_of_anybody() {
    run(90, everything(Shape::Linked, "debug", "text"));
}

#[test]
fn embedded_trace_logs_and_metrics_tell_nothing_of_anybody() {
    run(90, everything(Shape::Embedded, "trace", "text"));
}

#[test]
fn linked_trace_logs_and_metrics_tell_nothing_of_anybody() {
    run(90, everything(Shape::Linked, "trace", "json"));
}
