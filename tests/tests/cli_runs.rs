//! `iop-edge runs`: what it asks an edge for, what it shows, and how it ends. Exit 0 done, 1 refused, 2 usage.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use iop_tests::process::{Finished, finish};
use iop_tests::provider::{Exchange, Stub};
use iop_tests::run;
use iop_tests::shell::{cli_as, done, refused};
use serde_json::{Value, json};

/// Runs a command against an edge.
async fn cli(addr: &str, args: &[&str]) -> Finished {
    cli_as("sk-cli", addr, args).await
}

fn approval(id: &str, status: &str, decision_id: Option<&str>) -> Value {
    json!({"id": id, "run_id": "run_1", "agent": "deployer", "tool": "deploy", "call_id": "call_7",
           "arguments": {"region": "eu"}, "arguments_digest": format!("sha256:of-{id}"), "status": status,
           "decision_id": decision_id, "created_at": "2026-01-02T03:04:05Z", "expires_at": null})
}

fn list(data: &[Value]) -> Value {
    json!({"object": "list", "data": data, "has_more": false, "next_after": null})
}

fn error(code: &str, message: &str) -> Value {
    json!({"error": {"type": "invalid_request_error", "code": code, "message": message, "param": null, "retryable": false}})
}

/// An edge whose run 1 has these approvals and accepts what is decided.
async fn deciding(approvals: Vec<Value>) -> Stub {
    Stub::start(move |mut exchange| {
        let approvals = list(&approvals);
        async move {
            match (&*exchange.method, &*exchange.path) {
                ("GET", path) if path.starts_with("/api/v1/runs/run_1/approvals?") => {
                    exchange.json_reply(200, &approvals).await
                }
                ("POST", path) if path.starts_with("/api/v1/runs/run_1/approvals/apr_") => {
                    exchange
                        .json_reply(200, &approval("apr_1", "approved", None))
                        .await
                }
                _ => {
                    exchange
                        .json_reply(404, &error("run_not_found", "No such run."))
                        .await
                }
            }
        }
    })
    .await
}

#[test]
fn an_approval_shows_the_call_and_sends_its_digest_with_a_fresh_id() {
    run(60, async {
        let edge = deciding(vec![
            approval("apr_0", "denied", Some("d0")),
            approval("apr_1", "pending", None),
        ])
        .await;
        let mut ids = Vec::new();
        for _ in 0..2 {
            let finished = cli(&edge.addr, &["approve", "run_1", "--reason", "looks right"]).await;
            let said = done(&finished);
            for line in [
                "run       run_1",
                "tool      deploy",
                r#"arguments {"region":"eu"}"#,
                "digest    sha256:of-apr_1",
            ] {
                assert!(said.contains(line), "{line:?}: {said}");
            }
            let sent = edge.last();
            assert_eq!(
                (&*sent.method, &*sent.path),
                ("POST", "/api/v1/runs/run_1/approvals/apr_1")
            );
            assert_eq!(sent.header("authorization"), Some("Bearer sk-cli"));
            let mut body = sent.json();
            let id = body.as_object_mut().unwrap().remove("decision_id").unwrap();
            let id = id.as_str().unwrap().to_owned();
            assert!(
                said.ends_with(&format!("approved (decision {id})\n")) && !id.is_empty(),
                "{said}"
            );
            assert_eq!(
                body,
                json!({"decision": "approve", "arguments_digest": "sha256:of-apr_1", "reason": "looks right"})
            );
            ids.push(id);
        }
        assert_ne!(ids[0], ids[1]);
    });
}

#[test]
fn a_denial_an_edit_and_a_repetition_say_so() {
    run(60, async {
        let edge = deciding(vec![
            approval("apr_0", "approved", Some("d0")),
            approval("apr_1", "pending", None),
        ])
        .await;
        let finished = cli(&edge.addr, &["deny", "run_1", "apr_1", "--reason", "not now"]).await;
        assert!(
            done(&finished).contains("denied (decision "),
            "{}",
            finished.stdout
        );
        let body = edge.last().json();
        assert_eq!(
            (&body["decision"], &body["reason"]),
            (&json!("deny"), &json!("not now"))
        );

        let finished = cli(
            &edge.addr,
            &["approve", "run_1", "--edit", r#"{"region": "us", "n": 1.00}"#],
        )
        .await;
        let said = done(&finished);
        assert!(
            said.contains(r#"instead   {"region": "us", "n": 1.00}"#)
                && said.contains("approved with other arguments (decision "),
            "{said}"
        );
        let sent = String::from_utf8(edge.last().body.to_vec()).unwrap();
        assert!(
            sent.contains(r#""decision":"edit""#)
                && sent.contains(r#""edited_arguments":{"region": "us", "n": 1.00}"#),
            "{sent}"
        );

        // The decision names its approval, pending or not.
        let finished = cli(&edge.addr, &["approve", "run_1", "--decision-id", "d0"]).await;
        done(&finished);
        let sent = edge.last();
        assert_eq!(sent.path, "/api/v1/runs/run_1/approvals/apr_0");
        assert_eq!(sent.json()["decision_id"], "d0");
    });
}

#[test]
fn of_several_pending_calls_one_has_to_be_named() {
    run(60, async {
        let edge = deciding(vec![
            approval("apr_1", "pending", None),
            approval("apr_2", "pending", None),
        ])
        .await;
        let finished = cli(&edge.addr, &["approve", "run_1"]).await;
        let said = refused(
            &finished,
            &["2 calls", r#"apr_1 deploy {"region":"eu"}"#, "apr_2"],
        );
        assert_eq!(said, "");
        assert!(edge.received().iter().all(|r| r.method == "GET"));
        done(&cli(&edge.addr, &["approve", "run_1", "apr_2"]).await);
        assert_eq!(edge.last().path, "/api/v1/runs/run_1/approvals/apr_2");
    });
}

#[test]
fn what_the_edge_refuses_is_told_with_its_code_and_sentence() {
    run(60, async {
        let edge = Stub::start(|mut exchange| async move {
            if exchange.method == "GET" {
                let data = [approval("apr_1", "expired", None)];
                return exchange.json_reply(200, &list(&data)).await;
            }
            let body = error("approval_expired", "It is too late.\u{1b}[2J");
            exchange.json_reply(410, &body).await
        })
        .await;
        let finished = cli(&edge.addr, &["approve", "run_1", "apr_1"]).await;
        refused(
            &finished,
            &["iop-edge: approval_expired: It is too late.\\u001b[2J"],
        );
        assert_eq!(edge.received().len(), 2, "a refusal is not asked for again");

        let finished = cli(&edge.addr, &["approve", "run_1"]).await;
        refused(&finished, &["run_not_waiting"]);

        let strange = Stub::start(|mut exchange| async move {
            exchange
                .reply(302, &[("location", "http://127.0.0.1:9/")], b"elsewhere")
                .await
        })
        .await;
        let finished = cli(&strange.addr, &["show", "run_1"]).await;
        refused(&finished, &["302", "is it an edge?"]);

        let nobody = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let finished = cli(&nobody.to_string(), &["ls"]).await;
        refused(&finished, &["cannot reach", "refused"]);
    });
}

/// An answer that is cut off after the decision arrived, once or always.
async fn losing(times: usize) -> Stub {
    let left = Arc::new(AtomicUsize::new(times));
    Stub::start(move |mut exchange: Exchange| {
        let left = Arc::clone(&left);
        async move {
            if exchange.method == "GET" {
                return exchange
                    .json_reply(200, &list(&[approval("apr_1", "pending", None)]))
                    .await;
            }
            let lost = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
            if lost.is_ok() {
                exchange.cut(true);
                return Ok::<(), io::Error>(());
            }
            let headers = [
                ("content-type", "application/json"),
                ("idempotency-replayed", "true"),
            ];
            let body = json!({"id": "run_1", "status": "cancelled", "created_at": "2026-01-02T03:04:05Z"});
            exchange.reply(200, &headers, body.to_string().as_bytes()).await
        }
    })
    .await
}

#[test]
fn a_lost_answer_is_asked_for_once_more_with_the_same_id() {
    run(60, async {
        for (verb, id) in [("approve", "decision_id"), ("cancel", "cancel_id")] {
            let edge = losing(1).await;
            let finished = cli(&edge.addr, &[verb, "run_1", "--reason", "r"]).await;
            done(&finished);
            let sent: Vec<Value> = edge
                .received()
                .iter()
                .filter(|r| r.method == "POST")
                .map(|r| r.json())
                .collect();
            assert_eq!(sent.len(), 2, "{verb}");
            assert!(sent[0][id].is_string() && sent[0] == sent[1], "{sent:?}");
            if verb == "approve" {
                assert!(
                    finished.stdout.contains("approved, as before (decision "),
                    "{}",
                    finished.stdout
                );
            }

            let edge = losing(9).await;
            let finished = cli(&edge.addr, &[verb, "run_1"]).await;
            let used = edge.last().json()[id].as_str().unwrap().to_owned();
            let option = format!("--{} {used}", id.replace('_', "-"));
            refused(&finished, &["not known", &option]);
            let sent = edge.received().iter().filter(|r| r.method == "POST").count();
            assert_eq!(sent, 2, "{verb}");
        }
    });
}

/// What was said of an earlier attempt is said of it again, word for word.
#[test]
fn a_resolution_and_an_answer_whose_answers_are_lost_can_be_said_again() {
    run(60, async {
        let edge = Stub::start(|mut exchange| async move {
            let activity = json!({"id": "act_1", "run_id": "run_1", "tool": "deploy", "state": "unknown", "attempt": 3,
                "input": {}, "input_digest": "sha256:1",
                "decisions": [{"decision_id": "r1", "action": "retry", "attempt": 2, "reason": "r", "evidence": "e"}]});
            let asked = json!({"id": "run_1", "status": "waiting", "waiting_on": [{"kind": "input", "id": "wait_1", "prompt": "?"}]});
            match (&*exchange.method, &*exchange.path) {
                ("GET", "/api/v1/runs/run_1") => exchange.json_reply(200, &asked).await,
                ("GET", _) => exchange.json_reply(200, &list(&[activity])).await,
                _ => {
                    exchange.cut(true);
                    Ok(())
                }
            }
        })
        .await;
        let posted = || -> Vec<Value> {
            let all = edge.received();
            all.iter()
                .filter(|r| r.method == "POST")
                .map(|r| r.json())
                .collect()
        };
        let retry = [
            "resolve",
            "run_1",
            "--action",
            "retry",
            "--reason",
            "r",
            "--evidence",
            "e",
        ];
        let finished = cli(&edge.addr, &retry).await;
        let sent = posted();
        assert!(
            sent.len() == 2 && sent[0] == sent[1] && sent[0]["attempt"] == 3,
            "{sent:?}"
        );
        let id = sent[0]["decision_id"].as_str().unwrap();
        refused(&finished, &["not known", &format!("--decision-id {id}")]);
        let again = [&retry[..], &["--decision-id", "r1"]].concat();
        refused(&cli(&edge.addr, &again).await, &["--decision-id r1"]);
        assert_eq!(
            posted()[2],
            json!({"action": "retry", "decision_id": "r1", "input_digest": "sha256:1", "attempt": 2, "reason": "r",
                   "evidence": "e", "resume": false})
        );

        let finished = cli(&edge.addr, &["answer", "run_1", "--text", "a"]).await;
        let sent = posted();
        assert!(sent.len() == 6 && sent[4] == sent[5], "{sent:?}");
        let id = sent[4]["decision_id"].as_str().unwrap();
        refused(&finished, &["not known", &format!("wait_1 --decision-id {id}")]);
    });
}

#[test]
fn a_resume_takes_the_token_of_the_run_and_is_sent_once() {
    run(60, async {
        let edge = Stub::start(|mut exchange| async move {
            let run = json!({"id": "run_1", "agent": "a", "status": "queued", "resume_token": "rt_7", "outcome": null,
                             "waiting_on": [], "created_at": "2026-01-02T03:04:05Z"});
            match (&*exchange.method, &*exchange.path) {
                ("GET", "/api/v1/runs/run_1") => exchange.json_reply(200, &run).await,
                ("POST", "/api/v1/runs/run_1/resume") => exchange.json_reply(202, &run).await,
                ("GET", "/api/v1/runs/run_2") => {
                    let run = json!({"id": "run_2", "status": "waiting", "resume_token": "rt_8"});
                    exchange.json_reply(200, &run).await
                }
                _ => {
                    exchange.cut(true);
                    Ok(())
                }
            }
        })
        .await;
        let finished = cli(&edge.addr, &["resume", "run_1"]).await;
        assert!(done(&finished).contains("queued"), "{}", finished.stdout);
        assert_eq!(edge.last().json(), json!({"resume_token": "rt_7"}));

        let finished = cli(&edge.addr, &["resume", "run_2"]).await;
        refused(&finished, &["not known", "iop-edge runs show run_2"]);
        let sent = edge.received();
        assert_eq!(sent.iter().filter(|r| r.path.contains("run_2/resume")).count(), 1);
    });
}

/// An edge with this many runs, or approvals, that are listed from the oldest on; the cursor is the number of those before.
async fn listing(total: usize) -> Stub {
    Stub::start(move |mut exchange| async move {
        let after: usize = exchange
            .path
            .split_once("after=c%2F")
            .map_or(0, |(_, n)| n.parse().unwrap());
        let limit = exchange.path.split_once("limit=").unwrap().1;
        let limit: usize = limit.split('&').next().unwrap().parse().unwrap();
        // Filters may leave little or nothing of a page that is not the last.
        let limit = if exchange.path.contains("agent=sparse") { after % 2 } else { limit };
        let end = total.min(after + limit);
        let rows: Vec<Value> = (after..end)
            .map(|n| {
                json!({"id": format!("run_{n}"), "run_id": format!("run_{n}"), "agent": "a&b", "status": "waiting", "tool": "t",
                       "waiting_on": [{"kind": "approval", "tool": "deploy"}], "created_at": "2026-01-02T03:04:05Z"})
            })
            .collect();
        let next = if limit == 0 { after + 1 } else { end };
        let page = json!({"object": "list", "data": rows, "has_more": next < total, "next_after": format!("c/{next}")});
        exchange.json_reply(200, &page).await
    })
    .await
}

fn asked(edge: &Stub) -> Vec<String> {
    edge.received().iter().map(|r| r.path.clone()).collect()
}

#[test]
fn the_newest_runs_are_listed_whatever_stands_before_them() {
    run(60, async {
        let edge = listing(510).await;
        let filters = ["--status", "waiting", "--agent", "a&b", "--waiting", "approval"];
        let args = [&["ls", "--limit", "250"][..], &filters].concat();
        let finished = cli(&edge.addr, &args).await;
        assert_eq!(finished.code, Some(0));
        assert!(
            finished.stderr.contains("260 older ones") && finished.stderr.contains("--limit 250"),
            "{}",
            finished.stderr
        );
        let lines: Vec<&str> = finished.stdout.lines().collect();
        assert_eq!(lines.len(), 251);
        assert!(lines[0].starts_with("ID "), "{}", lines[0]);
        assert!(lines[1].starts_with("run_260 "), "{}", lines[1]);
        let words: Vec<&str> = lines[250].split_whitespace().collect();
        assert_eq!(words[..5], ["run_509", "a&b", "waiting", "approval", "deploy"]);
        // To the end, in pages as large as they may be.
        let query = "status=waiting&agent=a%26b&waiting_kind=approval&limit=200";
        assert_eq!(
            asked(&edge),
            ["", "&after=c%2F200", "&after=c%2F400"].map(|after| format!("/api/v1/runs?{query}{after}"))
        );

        let finished = cli(&edge.addr, &["ls", "--limit", "510"]).await;
        assert_eq!(done(&finished).lines().count(), 511, "there are no others");
        let finished = cli(&edge.addr, &["ls", "--limit", "3", "--json"]).await;
        assert!(finished.stderr.contains("507 older ones"), "{}", finished.stderr);
        let page: Value = serde_json::from_str(&finished.stdout).unwrap();
        let ids: Vec<&Value> = page["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|run| &run["id"])
            .collect();
        assert_eq!(ids, ["run_507", "run_508", "run_509"]);
        assert_eq!(
            (&page["has_more"], &page["next_after"]),
            (&json!(false), &Value::Null)
        );

        let few = listing(4).await;
        let finished = cli(&few.addr, &["ls", "--agent", "sparse", "--json"]).await;
        let page: Value = serde_json::from_str(done(&finished)).unwrap();
        assert_eq!(page["data"].as_array().unwrap().len(), 2, "{page}");
        assert_eq!(few.received().len(), 4, "{:?}", asked(&few));
    });
}

#[test]
fn of_approvals_those_that_wait_longest_are_listed() {
    run(60, async {
        let edge = listing(1_000).await;
        let finished = cli(&edge.addr, &["ls", "--approvals", "--limit", "250", "--json"]).await;
        assert!(
            finished.stderr.contains("newer ones: --limit 250"),
            "{}",
            finished.stderr
        );
        let page: Value = serde_json::from_str(&finished.stdout).unwrap();
        let rows = page["data"].as_array().unwrap();
        assert_eq!((rows.len(), &rows[249]["id"]), (250, &json!("run_249")));
        assert_eq!(page["next_after"], "c/250");
        assert_eq!(
            asked(&edge),
            [
                "/api/v1/approvals?status=pending&limit=200",
                "/api/v1/approvals?status=pending&limit=50&after=c%2F200"
            ]
        );
    });
}

#[test]
fn json_is_what_the_edge_answered() {
    run(60, async {
        // Neither a number nor an order of members is made over.
        const RUN: &str = r#"{"z":1,"id":"run_1","status":"waiting","waiting_on":[{"kind":"approval","arguments":{"b":1.00,"a":12345678901234567890.5}}]}"#;
        const TURN: &str = r#"{"n":1,"usage":null,"a":0}"#;
        const CALL: &str = r#"{"id":"act_1","z":2.0,"attempt":1}"#;
        let edge = Stub::start(|mut exchange| async move {
            let body = match &*exchange.path {
                "/api/v1/runs/run_1" => RUN.to_owned(),
                path if path.contains("/turns?") => {
                    format!(r#"{{"object":"list","data":[{TURN}],"has_more":false}}"#)
                }
                path if path.contains("/activities?") => {
                    format!(r#"{{"object":"list","data":[{CALL}],"has_more":false}}"#)
                }
                path if path.contains("/approvals?") => {
                    list(&[approval("apr_1", "pending", None)]).to_string()
                }
                path if path.contains("/approvals/") => {
                    r#"{"id":"apr_1","status":"approved","x":1.0}"#.to_owned()
                }
                _ => list(&[]).to_string(),
            };
            exchange
                .reply(200, &[("content-type", "application/json")], body.as_bytes())
                .await
        })
        .await;
        let finished = cli(&edge.addr, &["show", "run_1", "--json"]).await;
        let pending = approval("apr_1", "pending", None);
        assert_eq!(
            done(&finished),
            format!(
                "{{\"run\":{RUN},\"turns\":[{TURN}],\"steps\":[],\"activities\":[{CALL}],\"approvals\":[{pending}]}}\n"
            )
        );
        let finished = cli(&edge.addr, &["approve", "run_1", "--json"]).await;
        assert_eq!(
            done(&finished),
            "{\"id\":\"apr_1\",\"status\":\"approved\",\"x\":1.0}\n"
        );
        let finished = cli(&edge.addr, &["ls", "--approvals"]).await;
        let asked = edge.last().path;
        assert_eq!(asked, "/api/v1/approvals?status=pending&limit=50");
        done(&finished);
    });
}

#[test]
fn a_wrong_use_ends_with_2() {
    run(60, async {
        for (args, names) in [
            (&["ls", "--status", "idle"][..], "succeeded"),
            (&["approve"], "<RUN>"),
            (&["approve", "run_1", "--edit", "{"], "--edit"),
            (&["show", ".."], "<RUN>"),
            (&["ls", "--url", "127.0.0.1:8080"], "--url"),
            (&["ls", "--limit", "0"], "--limit"),
        ] {
            let finished = cli("127.0.0.1:9", args).await;
            assert_eq!(finished.code, Some(2), "{args:?}: {}", finished.stderr);
            assert!(finished.stderr.contains(names), "{args:?}: {}", finished.stderr);
        }
        let env = [("IOP_URL".to_owned(), "edge".to_owned())];
        let finished = finish("iop-edge", &["runs", "ls"], &env, Path::new("/")).await;
        assert_eq!(finished.code, Some(2));
        assert!(finished.stderr.contains("IOP_URL"), "{}", finished.stderr);
    });
}
