//! Each gate on the way to a replay, seen where an operator sees it: one row per liveness cycle, with its four labels,
//! and the structured line beside it (004; gateway.md G55, G82, §13 "Recovery metrics").
//!
//! A whole run is compared at once: rows that nobody asked for fail it as well as rows that are missing.

use std::time::Duration;

use futures_util::future::join_all;
use iop_tests::client::{Answer, Client};
use iop_tests::config::{Provider, Setup};
use iop_tests::fake_node::classification;
use iop_tests::liveness::{
    ELIGIBILITY, RECOVERY_LINE, RESULTS, Rows, STALL_LINE, STALLS, edge_rows, lines, node_page, node_process,
    node_rows, rows,
};
use iop_tests::stack::{Shape, Stack};
use iop_tests::{fixtures, run};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
/// `response_stall_timeout` of every provider that stalls.
const STALL: Duration = Duration::from_secs(1);
/// Above `gate.snapshot_bytes` of these tests.
const LARGE: usize = 64 * 1024;
const WELL: &str = "the second provider is well";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    Tunnel,
    Normalized,
}

impl Path {
    fn label(self) -> &'static str {
        match self {
            Path::Tunnel => "provider_tunnel",
            Path::Normalized => "normalized",
        }
    }

    fn script(self) -> &'static str {
        match self {
            Path::Tunnel => "",
            Path::Normalized => ", normalized = true",
        }
    }
}

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// The second provider's answer, and nothing of the first.
    Elsewhere,
    /// The same provider's own answer.
    Again,
    /// 504 `response_stalled`, after one attempt.
    Refused,
    /// Content, then one typed error.
    Broken,
    /// 400 before any provider is asked.
    Invalid,
    /// The client left.
    Left,
}

/// One way to stall.
struct Case {
    name: &'static str,
    script: &'static str,
    /// More lines of the provider.
    lines: &'static [&'static str],
    /// Another provider serves the model as well.
    second: bool,
    path: &'static str,
    body: fn(&str) -> Value,
    seen: Seen,
    /// Health, commit state and eligibility of its one row; none: no liveness cycle.
    row: Option<&'static str>,
}

fn chat(model: &str) -> Value {
    fixtures::chat(model, "hello", false)
}

fn chat_stream(model: &str) -> Value {
    fixtures::chat(model, "hello", true)
}

fn with(mut body: Value, key: &str, value: Value) -> Value {
    body[key] = value;
    body
}

fn namespace(member: &str) -> Value {
    let member =
        json!({"type": member, "name": "lookup", "parameters": {"type": "object", "properties": {}}});
    json!([{"type": "namespace", "name": "repo", "description": "what Codex sends", "tools": [member]}])
}

const fn case(name: &'static str, script: &'static str, seen: Seen, row: &'static str) -> Case {
    Case {
        name,
        script,
        lines: &[],
        second: true,
        path: CHAT,
        body: chat,
        seen,
        row: Some(row),
    }
}

const fn alone(name: &'static str, script: &'static str, seen: Seen, row: &'static str) -> Case {
    Case {
        second: false,
        ..case(name, script, seen, row)
    }
}

/// Cases that both paths have.
fn common() -> Vec<Case> {
    let uncommitted = "available/transport_uncommitted/eligible";
    vec![
        case(
            "before",
            r#"stall = "before_headers""#,
            Seen::Elsewhere,
            uncommitted,
        ),
        Case {
            body: chat_stream,
            ..case(
                "headers",
                r#"stall = "after_headers""#,
                Seen::Elsewhere,
                uncommitted,
            )
        },
        Case {
            body: chat_stream,
            ..case(
                "preamble",
                r#"stall = "after_preamble""#,
                Seen::Elsewhere,
                uncommitted,
            )
        },
        case(
            "missing",
            r#"stall = "before_headers", probe = "missing""#,
            Seen::Elsewhere,
            "unavailable/transport_uncommitted/eligible",
        ),
        case(
            "hanging",
            r#"stall = "before_headers", probe = "hang""#,
            Seen::Elsewhere,
            "unknown/transport_uncommitted/eligible",
        ),
        case(
            "refusing",
            r#"stall = "before_headers", probe = "refuse""#,
            Seen::Elsewhere,
            "unknown/transport_uncommitted/eligible",
        ),
        alone(
            "again",
            r#"reply = "again, and whole", stall = "before_headers", fail_first = 1"#,
            Seen::Again,
            uncommitted,
        ),
        Case {
            body: chat_stream,
            ..case(
                "committed",
                "stall = { after_chunks = 3 }",
                Seen::Broken,
                "available/stream_open/post_commit",
            )
        },
        case(
            "unfenced",
            r#"stall = "before_headers", ignores_cancel = true"#,
            Seen::Refused,
            "available/transport_uncommitted/unconfirmed_fence",
        ),
        alone(
            "lowered",
            r#"stall = "before_headers", probe = "missing""#,
            Seen::Refused,
            "unavailable/transport_uncommitted/no_candidate",
        ),
        alone(
            "unproven",
            r#"stall = "before_headers", probe = "hang""#,
            Seen::Refused,
            "unknown/transport_uncommitted/same_provider_forbidden",
        ),
        Case {
            lines: &["replay = false"],
            ..case(
                "forbidden",
                r#"stall = "before_headers""#,
                Seen::Refused,
                "available/transport_uncommitted/other",
            )
        },
        Case {
            body: |model| fixtures::chat(model, &"x".repeat(LARGE), false),
            ..case(
                "large",
                r#"stall = "before_headers""#,
                Seen::Refused,
                "available/transport_uncommitted/other",
            )
        },
        case(
            "left",
            r#"stall = "before_headers", probe = "hang""#,
            Seen::Left,
            "unknown/transport_uncommitted/caller_cancelled",
        ),
        // Failures that are replayed and are no liveness cycle.
        Case {
            lines: &[
                r#"first_content_timeout = "500ms""#,
                r#"response_stall_timeout = "300s""#,
            ],
            row: None,
            ..case("silent", r#"stall = "before_headers""#, Seen::Elsewhere, "")
        },
        Case {
            row: None,
            ..case("unwell", "status = 503", Seen::Elsewhere, "")
        },
        Case {
            row: None,
            body: chat_stream,
            ..case("cut", "cut = { after_chunks = 0 }", Seen::Elsewhere, "")
        },
    ]
}

fn searching(model: &str) -> Value {
    // Empty, it asks for a search as the provider thinks fit.
    with(chat(model), "web_search_options", json!({}))
}

fn calling(model: &str) -> Value {
    let tools = json!([{"type": "function", "function": {"name": "lookup", "parameters": {}}}]);
    with(chat(model), "tools", tools)
}

/// Tools and Responses requests on the tunnel.
fn of_tunnels() -> Vec<Case> {
    let uncommitted = "available/transport_uncommitted/eligible";
    let responses = |name, body: fn(&str) -> Value, seen, row| Case {
        path: RESPONSES,
        body,
        ..case(name, r#"stall = "before_headers""#, seen, row)
    };
    let hosted = "available/transport_uncommitted/tool_side_effect";
    vec![
        Case {
            body: searching,
            ..case("searching", r#"stall = "before_headers""#, Seen::Refused, hosted)
        },
        Case {
            body: calling,
            ..case(
                "function",
                r#"stall = "before_headers""#,
                Seen::Elsewhere,
                uncommitted,
            )
        },
        Case {
            path: RESPONSES,
            body: |model| fixtures::responses(model, "hello", true),
            ..case(
                "r-preamble",
                r#"stall = "after_preamble""#,
                Seen::Elsewhere,
                uncommitted,
            )
        },
        Case {
            path: RESPONSES,
            body: |model| fixtures::responses(model, "hello", true),
            ..case(
                "r-committed",
                "stall = { after_chunks = 3 }",
                Seen::Broken,
                "available/stream_open/post_commit",
            )
        },
        responses(
            "r-hosted",
            |m| {
                with(
                    fixtures::responses(m, "hello", false),
                    "tools",
                    json!([{"type": "web_search"}]),
                )
            },
            Seen::Refused,
            hosted,
        ),
        responses(
            "r-codex",
            |m| {
                with(
                    fixtures::responses(m, "hello", true),
                    "tools",
                    namespace("function"),
                )
            },
            Seen::Elsewhere,
            uncommitted,
        ),
        responses(
            "r-nested",
            |m| {
                with(
                    fixtures::responses(m, "hello", false),
                    "tools",
                    namespace("code_interpreter"),
                )
            },
            Seen::Refused,
            hosted,
        ),
    ]
}

fn provider_of(case: &Case, path: Path) -> Provider {
    let target = format!("t-{}", case.name);
    let script = format!("{{ {target:?} = {{ {}{} }} }}", case.script, path.script());
    let mut provider = Provider::scripted(case.name, &[&target], &script);
    if !case.lines.iter().any(|l| l.starts_with("response_stall_timeout")) {
        provider = provider.line(&format!("response_stall_timeout = \"{}s\"", STALL.as_secs()));
    }
    for line in case.lines {
        provider = provider.line(line);
    }
    provider
}

fn setup_of(cases: &[Case], path: Path) -> Setup {
    let well = format!("{{ \"t-well\" = {{ reply = {WELL:?}{} }} }}", path.script());
    let mut setup = Setup::of(Provider::scripted("well", &["t-well"], &well))
        .node("node", "metrics_listen = \"127.0.0.1:0\"")
        .edge("gate", "snapshot_bytes = \"32KiB\"");
    for case in cases {
        let target = format!("t-{}", case.name);
        let first = (case.name, target.as_str());
        setup = setup.provider(provider_of(case, path));
        setup = if case.second {
            setup.ranked(case.name, &[first, ("well", "t-well")])
        } else {
            setup.ranked(case.name, &[first])
        };
    }
    setup
}

/// Sends the request of a case and judges what its client sees.
async fn ask(client: &Client, case: &Case) {
    let body = (case.body)(case.name);
    if case.seen == Seen::Left {
        let conn = client.open(case.path, &body).await;
        // Past the stall limit and before the probe's bound: this wait is the scenario itself.
        tokio::time::sleep(STALL * 5 / 2).await;
        drop(conn);
        return;
    }
    let answer = client.post(case.path, &body).await;
    let text = answer.text();
    let name = case.name;
    let attempts = answer.header("x-iop-attempts").unwrap_or_default();
    match case.seen {
        Seen::Elsewhere => {
            assert_eq!((answer.status(), answer.complete), (200, true), "{name}: {text}");
            assert_eq!(attempts, "2", "{name}");
            assert!(said(&answer).contains(WELL), "{name}: {text}");
        }
        Seen::Again => {
            assert_eq!((answer.status(), answer.complete), (200, true), "{name}: {text}");
            assert_eq!(attempts, "2", "{name}");
            assert!(said(&answer).contains("again, and whole"), "{name}: {text}");
        }
        Seen::Refused => {
            answer.assert_error(504, "response_stalled");
            assert_eq!(attempts, "1", "{name}");
            assert_eq!(answer.header("x-should-retry"), Some("false"), "{name}");
        }
        Seen::Broken => {
            assert_eq!((answer.status(), answer.complete), (200, true), "{name}: {text}");
            assert_eq!(attempts, "1", "{name}");
            assert_eq!(text.matches("\"response_stalled\"").count(), 1, "{name}: {text}");
            assert!(
                !text.contains("[DONE]") && !text.contains("response.completed") && !text.contains(WELL),
                "{name}: {text}"
            );
        }
        Seen::Invalid => {
            assert_eq!(answer.status(), 400, "{name}: {text}");
            answer.assert_error(400, "invalid_request_error");
        }
        Seen::Left => unreachable!("has returned"),
    }
}

/// The text of an answer, put together where it came as a stream.
fn said(answer: &Answer) -> String {
    let text = answer.text();
    if !text.contains("data:") {
        return text;
    }
    iop_tests::client::sse_data(&text)
        .iter()
        .filter_map(|data| serde_json::from_str::<Value>(data).ok())
        .filter_map(|event| {
            let chat = event["choices"][0]["delta"]["content"]
                .as_str()
                .map(str::to_owned);
            let is_delta = event["type"] == "response.output_text.delta";
            chat.or_else(|| event["delta"].as_str().filter(|_| is_delta).map(str::to_owned))
        })
        .collect()
}

/// Stands before each row of `path`.
fn on(path: Path, expected: &[(String, u64)]) -> Rows {
    let mut all = Rows::new();
    for (row, n) in expected {
        *all.entry(format!("{}/{row}", path.label())).or_default() += n;
    }
    all
}

/// Compares counters and lines of a whole run with what its cycles should have left.
async fn assert_cycles(stack: &Stack, path: Path, cycles: &[&str]) {
    let eligibility = on(
        path,
        &cycles
            .iter()
            .map(|row| ((*row).to_owned(), 1))
            .collect::<Vec<_>>(),
    );
    let replayed = cycles
        .iter()
        .filter_map(|row| row.strip_suffix("/transport_uncommitted/eligible"));
    let results = on(
        path,
        &replayed
            .map(|health| (format!("{health}/redispatched"), 1))
            .collect::<Vec<_>>(),
    );
    edge_rows(stack, ELIGIBILITY, &eligibility).await;
    edge_rows(stack, RESULTS, &results).await;

    // One line per row, and nothing in a line that the row does not say.
    let edge = &stack.edge.process;
    let decided = |rows: &Rows| -> Rows {
        let line = |(row, n): (&String, &u64)| {
            let phase = if row.ends_with("/eligible") {
                "eligible_pending"
            } else {
                "idle"
            };
            (format!("{phase}/{row}/"), *n)
        };
        rows.iter().map(line).collect()
    };
    let mut expected = decided(&eligibility);
    let fields = [
        "phase",
        "execution_path",
        "provider_health",
        "commit_state",
        "eligibility",
        "recovery_result",
    ];
    for line in RECOVERY_LINE.of(edge) {
        let phase = line["phase"].as_str().unwrap_or_default().to_owned();
        assert!(["idle", "eligible_pending"].contains(&phase.as_str()), "{line}");
        // The line of a result: which phase it ends in is not told by 004.
        if line["eligibility"] == "" && line["recovery_result"] != "" {
            let row: Vec<&str> = fields
                .iter()
                .map(|f| line[f].as_str().unwrap_or_default())
                .collect();
            *expected.entry(row.join("/")).or_default() += 1;
        }
    }
    lines(edge, RECOVERY_LINE, &fields, &expected).await;
    let of_results = ["execution_path", "provider_health", "recovery_result"];
    let mut logged = RECOVERY_LINE.rows(edge, &of_results);
    logged.retain(|row, _| !row.ends_with('/'));
    assert_eq!(logged, results);
}

async fn whole_table(shape: Shape, path: Path) {
    let mut cases = common();
    if path == Path::Tunnel {
        cases.extend(of_tunnels());
    }
    let stack = Stack::start(shape, setup_of(&cases, path)).await;
    let client = stack.client();
    join_all(cases.iter().map(|case| ask(&client, case))).await;

    let cycles: Vec<&str> = cases.iter().filter_map(|c| c.row).collect();
    assert_cycles(&stack, path, &cycles).await;
    let page = stack.edge.scrape().await;
    // The caller that left cancelled its attempt; every other cycle is an attempt that stalled.
    let stalled = page.sum("iop_edge_attempts_total", &[("result", "response_stalled")]);
    assert_eq!(stalled, (cycles.len() - 1) as f64);
    assert_eq!(
        page.sum("iop_edge_requests_total", &[("outcome", "client_cancelled")]),
        1.0
    );

    // The node counted the same stalls.
    let mut expected = Rows::new();
    for case in cases.iter().filter(|c| c.seen != Seen::Left) {
        let Some(health) = case.row.and_then(|row| row.split('/').next()) else {
            continue;
        };
        let fence = if case.name == "unfenced" {
            "unconfirmed"
        } else {
            "confirmed"
        };
        let row = format!("{}/{health}/{}/{fence}", path.label(), classification(health));
        *expected.entry(row).or_default() += 1;
    }
    let mut seen = STALLS.rows(&node_page(&stack).await);
    for (row, n) in &expected {
        let there = seen.entry(row.clone()).or_default();
        assert!(*there >= *n, "{row}: {there}, not {n}");
        *there -= n;
    }
    seen.retain(|_, n| *n > 0);
    // What the caller that left did not wait for is a claimed stall as well; nothing was learnt of its provider.
    let of_left = format!("{}/unknown/health_unknown/", path.label());
    let (row, n) = seen.iter().next().expect("the stall that nobody waited for");
    assert!(
        seen.len() == 1 && *n == 1 && row.starts_with(&of_left),
        "{seen:?}"
    );
    assert_eq!(STALL_LINE.of(node_process(&stack)).len(), cycles.len());
}

#[test]
fn embedded_tunnels_leave_exactly_the_rows_of_their_cycles() {
    run(90, whole_table(Shape::Embedded, Path::Tunnel));
}

#[test]
fn linked_tunnels_leave_exactly_the_rows_of_their_cycles() {
    run(90, whole_table(Shape::Linked, Path::Tunnel));
}

#[test]
fn embedded_runs_leave_exactly_the_rows_of_their_cycles() {
    run(90, whole_table(Shape::Embedded, Path::Normalized));
}

#[test]
fn linked_runs_leave_exactly_the_rows_of_their_cycles() {
    run(90, whole_table(Shape::Linked, Path::Normalized));
}

/// A run carries text only: what asks for tools is refused instead of answered without them.
#[test]
fn a_run_that_asks_for_tools_is_refused_and_leaves_no_row() {
    run(60, async {
        for shape in Shape::ALL {
            let refused = |name, body: fn(&str) -> Value| Case {
                body,
                row: None,
                ..case(name, r#"stall = "before_headers""#, Seen::Invalid, "")
            };
            let hosted = |model: &str| {
                let tools = json!([{"type": "web_search"}]);
                with(fixtures::responses(model, "hello", false), "tools", tools)
            };
            let cases = [
                refused("function", calling),
                Case {
                    path: RESPONSES,
                    ..refused("hosted", hosted)
                },
                refused("searching", searching),
            ];
            let stack = Stack::start(shape, setup_of(&cases, Path::Normalized)).await;
            for case in &cases {
                ask(&stack.client(), case).await;
            }
            assert_cycles(&stack, Path::Normalized, &[]).await;
            node_rows(&stack, STALLS, &Rows::new()).await;
            stack.settled(Duration::from_secs(2)).await;
        }
    });
}

/// A spent budget: by attempts, by time.
async fn spent(shape: Shape, path: Path, limit: &str) {
    let cases = [case(
        "spent",
        r#"stall = "before_headers""#,
        Seen::Refused,
        "available/transport_uncommitted/budget_exhausted",
    )];
    let setup = setup_of(&cases, path).edge("gate", limit);
    let stack = Stack::start(shape, setup).await;
    ask(&stack.client(), &cases[0]).await;
    assert_cycles(
        &stack,
        path,
        &["available/transport_uncommitted/budget_exhausted"],
    )
    .await;
    let expected = rows(&[(
        &format!("{}/available/request_stalled/confirmed", path.label()),
        1,
    )]);
    node_rows(&stack, STALLS, &expected).await;
    stack.settled(Duration::from_secs(2)).await;
}

#[test]
fn a_spent_budget_is_budget_exhausted_in_both_shapes_and_on_both_paths() {
    run(90, async {
        let all = Shape::ALL.into_iter().flat_map(|shape| {
            [Path::Tunnel, Path::Normalized]
                .into_iter()
                .flat_map(move |path| {
                    ["max_attempts = 1", "max_elapsed = \"500ms\""].map(|limit| (shape, path, limit))
                })
        });
        for (shape, path, limit) in all {
            spent(shape, path, limit).await;
        }
    });
}

#[test]
fn three_stalls_in_a_row_are_three_cycles_of_which_two_were_replayed() {
    run(60, async {
        for shape in Shape::ALL {
            let stalls = |id: &str| {
                let script = format!("{{ \"t-{id}\" = {{ stall = \"before_headers\" }} }}");
                Provider::scripted(id, &[&format!("t-{id}")], &script).line("response_stall_timeout = \"1s\"")
            };
            let setup = Setup::of(stalls("a"))
                .provider(stalls("b"))
                .provider(stalls("c"))
                .provider(stalls("d"))
                .node("node", "metrics_listen = \"127.0.0.1:0\"")
                .ranked("m", &[("a", "t-a"), ("b", "t-b"), ("c", "t-c"), ("d", "t-d")]);
            let stack = Stack::start(shape, setup).await;
            let answer = stack.chat("m", "hello").await;
            answer.assert_error(504, "response_stalled");
            assert_eq!(answer.header("x-iop-attempts"), Some("3"));
            let row = "available/transport_uncommitted";
            let (eligible, spent) = (format!("{row}/eligible"), format!("{row}/budget_exhausted"));
            assert_cycles(&stack, Path::Tunnel, &[&eligible, &eligible, &spent]).await;
            stack.settled(Duration::from_secs(2)).await;
        }
    });
}

#[test]
fn a_connection_that_is_refused_is_replayed_and_leaves_no_row() {
    run(60, async {
        for shape in Shape::ALL {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let closed = listener.local_addr().unwrap();
            drop(listener);
            let well = format!("{{ \"t-well\" = {{ reply = {WELL:?} }} }}");
            let setup = Setup::of(Provider::openai(
                "closed",
                &format!("http://{closed}/v1"),
                &["t-closed"],
            ))
            .provider(Provider::scripted("well", &["t-well"], &well))
            .node("node", "metrics_listen = \"127.0.0.1:0\"")
            .ranked("m", &[("closed", "t-closed"), ("well", "t-well")]);
            let stack = Stack::start(shape, setup).await;
            // A hosted tool forbids no replay of a request that never arrived.
            let hosted = with(
                fixtures::responses("m", "hello", false),
                "tools",
                json!([{"type": "web_search"}]),
            );
            for (path, body) in [(CHAT, chat("m")), (CHAT, chat_stream("m")), (RESPONSES, hosted)] {
                let answer = stack.client().post(path, &body).await;
                assert_eq!(answer.status(), 200, "{}", answer.text());
                assert_eq!(answer.header("x-iop-attempts"), Some("2"));
                assert!(said(&answer).contains(WELL), "{}", answer.text());
            }
            assert_cycles(&stack, Path::Tunnel, &[]).await;
            node_rows(&stack, STALLS, &Rows::new()).await;
            stack.settled(Duration::from_secs(2)).await;
        }
    });
}
