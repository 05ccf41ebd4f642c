//! What every request of `/api/v1` meets, whatever its resource.

use futures_util::FutureExt;
use http::header;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};

use super::*;
use crate::http::tests::{KEYS, app};
use crate::metrics::EndpointLabel;

async fn ask(config: &str, method: &str, path: &str, headers: &[(&str, &str)]) -> (Answer, Value) {
    let app = app(config);
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(Bytes::new())).unwrap();
    let id = RequestId::of(request.headers());
    let answer = serve(Arc::clone(&app), id, request).await;
    let (parts, body) = answer.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    let requests = &app.metrics.requests;
    let counted: u64 = Outcome::ALL
        .iter()
        .map(|o| requests.at((EndpointLabel::Other, *o)).get())
        .sum();
    assert_eq!(
        (counted, app.metrics.in_flight.at((EndpointLabel::Other,)).get()),
        (0, 0)
    );
    let value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    (Answer::from_parts(parts, GateBody::from(bytes)), value)
}

#[tokio::test]
async fn what_is_not_there_is_said_in_our_form() {
    for (method, path, status, code, allow) in [
        ("GET", "/api/v1/nowhere", 404, "not_found", None),
        ("GET", "/api/v1/", 404, "not_found", None),
        ("GET", "/api/v1/nodes/", 404, "not_found", None),
        (
            "POST",
            "/api/v1/nodes",
            405,
            "method_not_allowed",
            Some("GET, HEAD, OPTIONS"),
        ),
        (
            "DELETE",
            "/api/v1/openapi.json",
            405,
            "method_not_allowed",
            Some("GET, HEAD, OPTIONS"),
        ),
        ("GET", "/api/v1/nodes?limit=0", 400, "invalid_request", None),
        ("GET", "/api/v1/n%FFdes", 400, "invalid_encoding", None),
        ("GET", "/api/v1/nodes?after=%00", 400, "invalid_encoding", None),
    ] {
        let (answer, body) = ask("", method, path, &[]).await;
        let error = &body["error"];
        assert_eq!(
            (answer.status().as_u16(), error["code"].as_str()),
            (status, Some(code)),
            "{method} {path}"
        );
        let allowed = answer.headers().get(header::ALLOW).map(|v| v.to_str().unwrap());
        assert_eq!(allowed, allow, "{method} {path}");
        assert_eq!(error["retryable"], false);
    }
}

#[tokio::test]
async fn options_and_head_are_answered() {
    let (answer, _) = ask("", "OPTIONS", "/api/v1/nodes", &[]).await;
    assert_eq!(answer.status(), 204);
    assert_eq!(answer.headers()[header::ALLOW], "GET, HEAD, OPTIONS");
    let (answer, body) = ask("", "HEAD", "/api/v1/nodes", &[]).await;
    assert_eq!((answer.status().as_u16(), body), (200, Value::Null));
    assert_ne!(answer.headers()[header::CONTENT_LENGTH], "0");
}

#[tokio::test]
async fn who_may_not_ask_learns_nothing_else() {
    let (answer, body) = ask(KEYS, "GET", "/api/v1/nodes?limit=0", &[]).await;
    assert_eq!(
        (answer.status().as_u16(), &body["error"]["code"]),
        (401, &json!("invalid_api_key"))
    );
    assert_eq!(answer.headers()[header::WWW_AUTHENTICATE], "Bearer");
    let key = [("x-api-key", "A")];
    let (answer, body) = ask(KEYS, "GET", "/api/v1/nodes", &key).await;
    assert_eq!(
        (answer.status().as_u16(), &body["error"]["code"]),
        (403, &json!("permission_denied"))
    );
    let problem = [("x-api-key", "A"), ("accept", "application/problem+json")];
    let (answer, body) = ask(KEYS, "GET", "/api/v1/nodes", &problem).await;
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/problem+json");
    assert_eq!(
        (&body["status"], &body["code"]),
        (&json!(403), &json!("permission_denied"))
    );
}

/// The names that a document refers to, and where it defines them.
fn references(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            if let Some(Value::String(to)) = members.get("$ref") {
                found.push(to.clone());
            }
            members.values().for_each(|member| references(member, found));
        }
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[tokio::test]
async fn the_document_describes_every_operation_and_defines_what_it_names() {
    let (answer, document) = ask("", "GET", "/api/v1/openapi.json", &[]).await;
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/json");
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    let mut names = Vec::new();
    references(&document, &mut names);
    assert!(!names.is_empty());
    for name in names {
        let pointer = name.strip_prefix('#').unwrap();
        assert!(document.pointer(pointer).is_some(), "{name} is not defined");
    }
    let mut ids = std::collections::BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        assert!(path.starts_with("/api/v1/"), "{path}");
        for (method, operation) in item.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(ids.insert(id.to_owned()), "{id} is there twice");
            assert!(operation["summary"].is_string(), "{method} {path}");
            assert!(operation["responses"]["default"].is_object(), "{method} {path}");
            for (status, response) in operation["responses"].as_object().unwrap() {
                let said = response["description"].is_string() || response["$ref"].is_string();
                assert!(said, "{method} {path} {status}");
            }
            let declared = operation["parameters"].as_array().into_iter().flatten();
            let in_path: Vec<&str> = declared
                .filter(|p| p["in"] == "path")
                .map(|p| p["name"].as_str().unwrap())
                .collect();
            let written: Vec<&str> = path
                .split('/')
                .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
                .collect();
            assert_eq!(in_path, written, "{method} {path}");
        }
    }
}

/// The words that the document has for a member, wherever it defines them.
fn words(document: &Value, pointer: &str) -> Vec<String> {
    let mut schema = document
        .pointer(pointer)
        .unwrap_or_else(|| panic!("{pointer} is not there"));
    if let Some(parts) = schema["oneOf"].as_array() {
        schema = parts.iter().find(|part| part["type"] != "null").unwrap();
    }
    if let Some(name) = schema["$ref"].as_str() {
        schema = document.pointer(name.strip_prefix('#').unwrap()).unwrap();
    }
    let words = schema["enum"].as_array().into_iter().flatten();
    words.map(|word| word.as_str().unwrap().to_owned()).collect()
}

fn listed<T: std::fmt::Display>(words: &[T]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn the_document_has_the_words_of_every_closed_list() {
    use iop_durable::failure::FailureKind;
    use iop_durable::record::{EventName, Reason, Status, StepStatus, WaitStatus, WaitingKind};

    use crate::runs::view::ApprovalStatus;

    let (_, document) = ask("", "GET", "/api/v1/openapi.json", &[]).await;
    let of = |schema: &str, member: &str| {
        words(
            &document,
            &format!("/components/schemas/{schema}/properties/{member}"),
        )
    };
    let kinds: Vec<String> = FailureKind::ALL
        .iter()
        .map(|kind| kind.as_str().to_owned())
        .collect();
    assert_eq!(of("RunObject", "status"), listed(Status::ALL));
    assert_eq!(of("ChildObject", "status"), listed(Status::ALL));
    assert_eq!(of("HistoryObject", "status"), listed(Status::ALL));
    assert_eq!(of("StepObject", "status"), listed(StepStatus::ALL));
    assert_eq!(of("WaitObject", "status"), listed(WaitStatus::ALL));
    assert_eq!(of("WaitObject", "kind"), listed(WaitingKind::ALL));
    assert_eq!(of("ApprovalObject", "status"), listed(ApprovalStatus::ALL));
    assert_eq!(of("OutcomeObject", "status"), listed(Status::ALL));
    assert_eq!(of("OutcomeObject", "reason"), listed(Reason::ALL));
    assert_eq!(of("OutcomeErrorObject", "kind"), kinds);
    assert_eq!(of("FailureObject", "kind"), kinds);
    let mut events = listed(EventName::ALL);
    events.extend(["run.turn.completed", "run.tool.started", "run.tool.completed"].map(str::to_owned));
    assert_eq!(of("EventObject", "event"), events);
    assert_eq!(of("Transient", "event"), ["run.snapshot", "run.turn.delta"]);

    let outcome = document
        .pointer("/components/schemas/RunObject/properties/outcome")
        .unwrap();
    assert!(
        outcome.to_string().contains("#/components/schemas/OutcomeObject"),
        "{outcome}"
    );
    let query = document.pointer("/paths/~1api~1v1~1runs/get/parameters").unwrap();
    for (name, words_of) in [
        ("status", listed(Status::ALL)),
        ("waiting_kind", listed(WaitingKind::ALL)),
    ] {
        let i = query
            .as_array()
            .unwrap()
            .iter()
            .position(|p| p["name"] == name)
            .unwrap();
        let at = format!("/paths/~1api~1v1~1runs/get/parameters/{i}/schema");
        assert_eq!(words(&document, &at), words_of, "{name}");
    }
}

#[tokio::test]
async fn a_stream_may_hold_what_the_document_says() {
    let (_, document) = ask("", "GET", "/api/v1/openapi.json", &[]).await;
    for operation in [
        "/paths/~1api~1v1~1runs/post",
        "/paths/~1api~1v1~1runs~1{id}~1events/get",
        "/paths/~1api~1v1~1runs~1{id}~1resume/post",
    ] {
        let at = format!("{operation}/responses/200/content/text~1event-stream/schema/$ref");
        let name = document
            .pointer(&at)
            .unwrap_or_else(|| panic!("{operation} has no stream"));
        assert_eq!(name, "#/components/schemas/Streamed");
    }
    let streamed = document.pointer("/components/schemas/Streamed/oneOf").unwrap();
    let parts: Vec<&str> = streamed
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|part| part["$ref"].as_str())
        .collect();
    let schemas = ["EventObject", "Transient", "ErrorBody"];
    assert_eq!(parts, schemas.map(|name| format!("#/components/schemas/{name}")));
    let required = |schema: &str| {
        document
            .pointer(&format!("/components/schemas/{schema}/required"))
            .unwrap()
            .clone()
    };
    assert_eq!(
        required("EventObject"),
        json!(["seq", "life", "event", "time", "data"])
    );
    assert_eq!(required("Transient"), json!(["life", "event", "time", "data"]));
    // Edited arguments are an object or a text.
    let edited = document
        .pointer("/components/schemas/EditedArguments/oneOf")
        .unwrap();
    let types: Vec<&Value> = edited
        .as_array()
        .unwrap()
        .iter()
        .map(|part| &part["type"])
        .collect();
    assert_eq!(types, ["object", "string"]);
}

#[test]
fn a_panic_is_a_500_in_our_form() {
    let app = app("");
    let id = RequestId::of(&HeaderMap::new());
    let request = Request::builder().uri("/api/v1/nodes").body(Broken).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let answer = runtime.block_on(serve(Arc::clone(&app), id, request));
    assert_eq!((answer.status().as_u16(), app.metrics.panics.get()), (500, 1));
    let bytes = answer
        .into_body()
        .collect()
        .now_or_never()
        .unwrap()
        .unwrap()
        .to_bytes();
    let body: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(body["error"]["code"], "internal_error");
    assert_eq!(app.metrics.in_flight.at((EndpointLabel::Other,)).get(), 0);
}

/// A body that cannot even say whether it is over.
struct Broken;

impl http_body::Body for Broken {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        panic!("a defect")
    }

    fn is_end_stream(&self) -> bool {
        panic!("a defect")
    }
}
