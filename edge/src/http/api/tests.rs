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
