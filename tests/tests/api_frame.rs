//! What every request of `/api/v1` meets: the form of errors, encodings, bounds, roles, lists, and the document.

use std::collections::BTreeSet;

use iop_tests::run;
use iop_tests::runs::agents::{WORKER, all};
use iop_tests::runs::{BOSS, Db, OTHER, OWNER, Options, ROOT, World, encode};
use serde_json::{Value, json};

async fn world() -> World {
    let options = Options::default().line("server", "body_limit = \"64KiB\"");
    World::with(Db::Sqlite, options, all).await
}

/// One request with the key of everything.
async fn ask(
    world: &World,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> iop_tests::client::Answer {
    let client = world.edges[0].client();
    client
        .request(method, &format!("/api/v1{path}"), headers, body)
        .await
}

/// Method, path, body; status, code and field of the answer.
type Case = (
    &'static str,
    String,
    Vec<u8>,
    u16,
    &'static str,
    Option<&'static str>,
);

#[test]
fn what_is_wrong_with_a_request_is_said_in_one_form_and_nothing_is_stored() {
    run(60, async {
        let world = world().await;
        let long = format!("/runs/{}", "x".repeat(257));
        let deep = format!("{{\"agent\":{}1{}}}", "[".repeat(500), "]".repeat(500));
        let run_with = |member: &str| format!("{{\"agent\":\"{WORKER}\",\"input\":\"hi\",{member}}}");
        let cases: Vec<Case> = vec![
            ("GET", "/nowhere".into(), b"".to_vec(), 404, "not_found", None),
            ("GET", "/flows".into(), b"".to_vec(), 404, "not_found", None),
            (
                "POST",
                "/triggers/x".into(),
                b"{}".to_vec(),
                404,
                "not_found",
                None,
            ),
            (
                "PUT",
                "/runs".into(),
                b"{}".to_vec(),
                405,
                "method_not_allowed",
                None,
            ),
            (
                "GET",
                "/runs/%FF".into(),
                b"".to_vec(),
                400,
                "invalid_encoding",
                Some("path"),
            ),
            (
                "GET",
                "/runs/%00".into(),
                b"".to_vec(),
                400,
                "invalid_encoding",
                Some("path"),
            ),
            (
                "GET",
                "/runs/%4".into(),
                b"".to_vec(),
                400,
                "invalid_encoding",
                Some("path"),
            ),
            (
                "GET",
                "/runs?agent=%FF".into(),
                b"".to_vec(),
                400,
                "invalid_encoding",
                Some("query"),
            ),
            ("GET", long, b"".to_vec(), 400, "invalid_encoding", Some("run_id")),
            (
                "GET",
                "/runs/absent".into(),
                b"".to_vec(),
                404,
                "run_not_found",
                None,
            ),
            (
                "GET",
                "/runs/%EF%BF%BD".into(),
                b"".to_vec(),
                404,
                "run_not_found",
                None,
            ),
            (
                "GET",
                "/runs?limit=0".into(),
                b"".to_vec(),
                400,
                "invalid_request",
                Some("limit"),
            ),
            (
                "GET",
                "/runs?limit=201".into(),
                b"".to_vec(),
                400,
                "invalid_request",
                Some("limit"),
            ),
            (
                "GET",
                "/runs?status=done".into(),
                b"".to_vec(),
                400,
                "invalid_request",
                Some("status"),
            ),
            (
                "GET",
                "/runs?state=done".into(),
                b"".to_vec(),
                400,
                "invalid_request",
                Some("state"),
            ),
            (
                "GET",
                "/runs?after=zz".into(),
                b"".to_vec(),
                400,
                "invalid_request",
                Some("after"),
            ),
            (
                "GET",
                "/runs?due_before=noon".into(),
                b"".to_vec(),
                400,
                "invalid_request",
                Some("due_before"),
            ),
            (
                "GET",
                "/agents/absent".into(),
                b"".to_vec(),
                404,
                "agent_not_found",
                Some("agent"),
            ),
            ("POST", "/runs".into(), b"".to_vec(), 400, "invalid_request", None),
            (
                "POST",
                "/runs".into(),
                b"{".to_vec(),
                400,
                "invalid_request",
                None,
            ),
            (
                "POST",
                "/runs".into(),
                b"[]".to_vec(),
                400,
                "invalid_request",
                None,
            ),
            (
                "POST",
                "/runs".into(),
                deep.into_bytes(),
                400,
                "invalid_request",
                Some("agent"),
            ),
            (
                "POST",
                "/runs".into(),
                b"{\"input\":\"\xff\"}".to_vec(),
                400,
                "invalid_encoding",
                None,
            ),
            (
                "POST",
                "/runs".into(),
                b"{\"input\":\"hi\"}".to_vec(),
                400,
                "invalid_request",
                Some("agent"),
            ),
            (
                "POST",
                "/runs".into(),
                b"{\"agent\":\"worker\"}".to_vec(),
                400,
                "invalid_request",
                Some("input"),
            ),
            (
                "POST",
                "/runs".into(),
                b"{\"agent\":\"absent\",\"input\":1}".to_vec(),
                404,
                "agent_not_found",
                Some("agent"),
            ),
            (
                "POST",
                "/runs".into(),
                b"{\"flow\":\"f\",\"input\":1}".to_vec(),
                404,
                "flow_not_found",
                Some("flow"),
            ),
            (
                "POST",
                "/runs".into(),
                run_with("\"inputs\":1").into(),
                400,
                "invalid_request",
                Some("inputs"),
            ),
            (
                "POST",
                "/runs".into(),
                run_with("\"run_id\":\"a\\u0000\"").into(),
                400,
                "invalid_encoding",
                Some("run_id"),
            ),
            (
                "POST",
                "/runs".into(),
                run_with("\"deadline\":\"soon\"").into(),
                400,
                "invalid_request",
                Some("deadline"),
            ),
            (
                "POST",
                "/runs".into(),
                run_with("\"budgets\":{\"wishes\":3}").into(),
                422,
                "budget_invalid",
                Some("budgets.wishes"),
            ),
            (
                "POST",
                "/runs".into(),
                run_with("\"budgets\":{\"turns\":-1}").into(),
                422,
                "budget_invalid",
                Some("budgets.turns"),
            ),
            (
                "POST",
                "/runs".into(),
                run_with("\"metadata\":{\"k\":1}").into(),
                400,
                "invalid_request",
                Some("metadata.k"),
            ),
            (
                "POST",
                "/runs".into(),
                run_with("\"on_disconnect\":\"cancel\"").into(),
                400,
                "invalid_request",
                Some("on_disconnect"),
            ),
            (
                "POST",
                "/runs?wait=soon".into(),
                run_with("\"run_id\":\"w\"").into(),
                400,
                "invalid_request",
                Some("wait"),
            ),
            (
                "POST",
                "/runs".into(),
                vec![b' '; 70_000],
                413,
                "payload_too_large",
                None,
            ),
        ];
        for (method, path, body, status, code, param) in cases {
            let answer = ask(&world, method, &path, &[], &body).await;
            let shown = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
            let error = answer.json()["error"].clone();
            assert_eq!(
                (answer.status(), error["code"].as_str(), error["param"].as_str()),
                (status, Some(code), param),
                "{method} {path} {shown}: {}",
                answer.text()
            );
            let members: BTreeSet<&str> = error.as_object().unwrap().keys().map(String::as_str).collect();
            assert!(
                ["type", "code", "message", "param", "retryable"]
                    .iter()
                    .all(|m| members.contains(m)),
                "{error}"
            );
            assert_eq!(answer.header("allow").is_some(), status == 405, "{method} {path}");
            assert!(answer.header("x-iop-request-id").is_some());
        }
        let huge = format!("{{\"agent\":\"{WORKER}\",\"input\":\"{}\"}}", "x".repeat(70_000));
        ask(&world, "POST", "/runs", &[], huge.as_bytes())
            .await
            .assert_error(413, "payload_too_large");
        assert_eq!(world.api().all("/runs").await, Vec::<Value>::new());
    });
}

#[test]
fn an_error_has_the_members_of_rfc_9457_for_whom_they_were_asked() {
    run(60, async {
        let world = world().await;
        let problem = [("accept", "application/problem+json")];
        let answer = ask(&world, "GET", "/runs/absent", &problem, b"").await;
        assert_eq!(answer.status(), 404);
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        let body = answer.json();
        assert_eq!(
            (
                &body["status"],
                &body["code"],
                &body["run_id"],
                &body["retryable"]
            ),
            (
                &json!(404),
                &json!("run_not_found"),
                &json!("absent"),
                &json!(false)
            )
        );
        for member in ["type", "title", "detail"] {
            assert!(body[member].is_string(), "{member}: {body}");
        }
    });
}

#[test]
fn each_role_opens_what_it_names_and_runs_of_others_are_not_there() {
    run(60, async {
        let world = world().await;
        let api = world.api();
        let (owner, other, boss) = (api.with_key(OWNER), api.with_key(OTHER), api.with_key(BOSS));
        let run = owner.run(WORKER, "hello").await;
        let path = format!("/runs/{run}");
        owner.succeeded(&run).await;
        for room in [
            "",
            "/result",
            "/wait",
            "/events",
            "/steps",
            "/turns",
            "/children",
            "/history",
            "/approvals",
            "/waits",
            "/activities",
        ] {
            let path = format!("{path}{room}");
            for api in [&owner, &boss, &api] {
                assert_eq!(api.get(&path).await.status(), 200, "{path}");
            }
            other.get(&path).await.assert_error(404, "run_not_found");
        }
        let seen = async |api: &iop_tests::runs::Api| api.all("/runs").await.len();
        assert_eq!(
            (seen(&owner).await, seen(&boss).await, seen(&other).await),
            (1, 1, 0)
        );

        let body = json!({ "agent": WORKER, "input": "x" });
        boss.post("/runs", &body)
            .await
            .assert_error(403, "permission_denied");
        for (who, status) in [(&owner, 403), (&boss, 200), (&api, 200)] {
            assert_eq!(who.get("/agents").await.status(), status);
            assert_eq!(who.get("/nodes").await.status(), status);
        }
        for who in [&owner, &boss] {
            let put = who
                .client
                .request("PUT", "/api/v1/agents/x", &[], b"{\"model\":\"m\"}")
                .await;
            put.assert_error(403, "permission_denied");
            let delete = who
                .client
                .request("DELETE", "/api/v1/agents/worker", &[], b"")
                .await;
            delete.assert_error(403, "permission_denied");
        }
        for path in [
            "/runs",
            "/runs/absent",
            "/agents",
            "/nodes",
            "/durable/capabilities",
        ] {
            api.with_key("sk-unknown")
                .get(path)
                .await
                .assert_error(401, "invalid_api_key");
        }
        assert_eq!(
            api.with_key("sk-unknown").get("/openapi.json").await.status(),
            200
        );
        let log = world.edges[0].process.log();
        assert!(![ROOT, BOSS, OWNER].iter().any(|key| log.contains(key)), "{log}");
    });
}

#[test]
fn options_and_head_are_answered() {
    run(60, async {
        let world = world().await;
        let options = ask(&world, "OPTIONS", "/runs", &[], b"").await;
        assert_eq!(options.status(), 204);
        assert_eq!(options.header("allow"), Some("GET, HEAD, OPTIONS, POST"));
        let wrong = ask(&world, "PATCH", "/runs", &[], b"").await;
        wrong.assert_error(405, "method_not_allowed");
        assert_eq!(wrong.header("allow"), Some("GET, HEAD, OPTIONS, POST"));
    });
}

#[test]
fn a_list_is_walked_whole_while_it_grows() {
    run(120, async {
        let world = world().await;
        let api = world.api();
        for n in 0..12 {
            api.run(WORKER, &format!("first {n}")).await;
        }
        let writer = async {
            for n in 0..12 {
                api.run(WORKER, &format!("later {n}")).await;
            }
        };
        let reader = async {
            let mut seen = Vec::new();
            let mut after = String::new();
            loop {
                let page = api.seen(&format!("/runs?limit=5{after}")).await;
                assert_eq!(page["object"], "list");
                let data = page["data"].as_array().unwrap();
                assert!(data.len() <= 5);
                seen.extend(data.iter().map(|run| {
                    let text = |name: &str| run[name].as_str().unwrap().to_owned();
                    (text("created_at"), text("id"))
                }));
                assert_eq!(page["has_more"] == true, page["next_after"].is_string());
                let Some(next) = page["next_after"].as_str() else {
                    return seen;
                };
                after = format!("&after={}", encode(next));
            }
        };
        let ((), seen) = tokio::join!(writer, reader);
        assert!(seen.is_sorted(), "{seen:?}");
        let ids: BTreeSet<&String> = seen.iter().map(|(_, id)| id).collect();
        assert_eq!(ids.len(), seen.len(), "a run was listed twice");
        assert!(seen.len() >= 12, "{}", seen.len());
        assert_eq!(api.all("/runs").await.len(), 24);
    });
}

/// Every operation of the document: method, path, operation.
fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            found.push((method.to_uppercase(), path.clone(), operation.clone()));
        }
    }
    found
}

#[test]
fn the_document_names_what_is_served_and_what_is_served_is_in_it() {
    run(60, async {
        let world = world().await;
        let document = world.api().seen("/openapi.json").await;
        let operations = operations(&document);
        let named: BTreeSet<String> = operations
            .iter()
            .map(|(method, path, _)| {
                let parts = path
                    .split('/')
                    .map(|part| if part.starts_with('{') { "{}" } else { part });
                format!("{method} {}", parts.collect::<Vec<_>>().join("/"))
            })
            .collect();
        for served in [
            "PUT /api/v1/agents/{}",
            "GET /api/v1/agents",
            "GET /api/v1/agents/{}",
            "GET /api/v1/agents/{}/versions",
            "DELETE /api/v1/agents/{}",
            "GET /api/v1/durable/capabilities",
            "POST /api/v1/runs",
            "GET /api/v1/runs",
            "GET /api/v1/runs/{}",
            "GET /api/v1/runs/{}/result",
            "GET /api/v1/runs/{}/wait",
            "GET /api/v1/runs/{}/events",
            "GET /api/v1/runs/{}/steps",
            "GET /api/v1/runs/{}/turns",
            "GET /api/v1/runs/{}/activities",
            "GET /api/v1/runs/{}/activities/{}",
            "POST /api/v1/runs/{}/resume",
            "POST /api/v1/runs/{}/resume/evaluate",
            "POST /api/v1/runs/{}/cancel",
            "DELETE /api/v1/runs/{}",
            "GET /api/v1/approvals",
            "GET /api/v1/runs/{}/approvals",
            "POST /api/v1/runs/{}/approvals/{}",
            "POST /api/v1/runs/{}/inputs/{}",
            "GET /api/v1/runs/{}/waits",
            "POST /api/v1/runs/{}/waits/{}/deliveries",
            "POST /api/v1/runs/{}/waits/{}/cancel",
            "POST /api/v1/events",
            "POST /api/v1/runs/{}/activities/{}/reconcile",
            "POST /api/v1/runs/{}/activities/{}/resolve",
            "GET /api/v1/runs/{}/children",
            "GET /api/v1/runs/{}/history",
            "GET /api/v1/runs/{}/history/{}",
            "GET /api/v1/nodes",
            "GET /api/v1/providers",
            "GET /api/v1/openapi.json",
        ] {
            assert!(
                named.contains(served),
                "{served} is not in the document: {named:?}"
            );
        }
        for (method, path, _) in &operations {
            let path = path.replace(['{', '}'], "");
            let path = path.strip_prefix("/api/v1").unwrap();
            let answer = ask(&world, method, path, &[], b"").await;
            let code = answer.json()["error"]["code"].clone();
            assert!(
                answer.status() < 500 && code != "not_found" && code != "method_not_allowed",
                "{method} {path}: {} {}",
                answer.status(),
                answer.text()
            );
        }
    });
}
