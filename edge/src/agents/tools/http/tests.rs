use std::collections::BTreeMap;
use std::future::Future;
use std::io;

use iop_tests::provider::{Exchange, Stub};
use serde_json::json;

use super::*;
use crate::agents::spec::{FileRef, HeaderText};

const KEY: &str = "run_1/action/2/call_1.0";
const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const MAX: u64 = 1000;
const EFFECTS: [EffectSpec; 3] = [EffectSpec::ReadOnly, EffectSpec::Idempotent, EffectSpec::Unsafe];

fn spec(method: &str, url: String) -> HttpSpec {
    HttpSpec {
        method: method.to_owned(),
        url,
        headers: BTreeMap::new(),
        timeout: None,
    }
}

fn base(stub: &Stub) -> String {
    format!("http://{}", stub.addr)
}

async fn called(spec: &HttpSpec, effect: EffectSpec, arguments: &str) -> Result<Bytes, CallError> {
    let clients = Clients::new().unwrap();
    let request = HttpCall {
        spec,
        effect,
        arguments: arguments.as_bytes(),
        key: KEY,
        trace: Some(TRACE),
        max_result: MAX,
    };
    call(&clients, &request).await
}

/// A failure's kind, code and whether it may pass; `None` when nothing is known.
fn class(result: Result<Bytes, CallError>) -> Option<(FailureKind, String, bool)> {
    match result.unwrap_err() {
        CallError::Failed { failure, .. } => Some((failure.kind, failure.code, failure.retryable)),
        CallError::Unknown => None,
    }
}

fn failure(result: Result<Bytes, CallError>) -> Failure {
    match result.unwrap_err() {
        CallError::Failed { failure, .. } => failure,
        CallError::Unknown => panic!("it is known"),
    }
}

async fn echo() -> Stub {
    Stub::start(|mut ex: Exchange| async move { ex.reply(200, &[], b"done").await }).await
}

#[tokio::test]
async fn a_get_has_its_arguments_in_the_url_and_no_body() {
    let stub = echo().await;
    for method in ["GET", "HEAD", "DELETE"] {
        let spec = spec(method, format!("{}/items/{{sku}}?v=2", base(&stub)));
        let result = called(&spec, EffectSpec::ReadOnly, r#"{"sku":"a/b","n": 1.0}"#)
            .await
            .unwrap();
        assert_eq!(result, if method == "HEAD" { "" } else { "done" });
        let seen = stub.last();
        assert_eq!(
            (seen.method.as_str(), seen.path.as_str()),
            (method, "/items/a%2Fb?v=2&n=1.0")
        );
        assert_eq!(seen.header("idempotency-key"), Some(KEY));
        assert!(seen.body.is_empty() && seen.header("content-type").is_none());
    }
}

#[tokio::test]
async fn other_methods_send_the_arguments_byte_for_byte() {
    let stub = echo().await;
    let arguments = "{ \"b\" : 1.50,\n\"a\":\"\\u0041\", \"big\": 123456789012345678901234567890 }";
    for method in ["POST", "PUT", "PATCH"] {
        for effect in EFFECTS {
            let mut spec = spec(method, format!("{}/x/{{a}}/{{idempotency_key}}", base(&stub)));
            spec.headers
                .insert(String::from("x-team"), HeaderText::Plain(String::from("a")));
            called(&spec, effect, arguments).await.unwrap();
            let seen = stub.last();
            assert_eq!(
                (seen.method.as_str(), seen.body.as_ref()),
                (method, arguments.as_bytes())
            );
            assert_eq!(seen.path, "/x/A/run_1%2Faction%2F2%2Fcall_1.0");
            assert_eq!(seen.header("idempotency-key"), Some(KEY));
            assert_eq!(seen.header("content-type"), Some("application/json"));
            assert_eq!(seen.header("x-team"), Some("a"));
            assert_eq!(seen.header("traceparent"), Some(TRACE));
            for absent in ["accept-encoding", "cookie", "referer"] {
                assert_eq!(seen.header(absent), None);
            }
        }
    }
}

#[tokio::test]
async fn what_is_not_right_is_never_sent() {
    let stub = echo().await;
    let url = |path: &str| format!("{}{path}", base(&stub));
    let mut unset = spec("GET", url("/x"));
    let env = crate::agents::spec::EnvRef {
        env: String::from("IOP_TEST_NOBODY_SETS_THIS"),
    };
    unset
        .headers
        .insert(String::from("authorization"), HeaderText::Env(env));
    let table = [
        (spec("GET", url("/{a}")), r#"{"a":".."}"#, "invalid_arguments"),
        (spec("GET", url("/{a}")), "{}", "invalid_arguments"),
        (spec("POST", url("/x")), "[1]", "invalid_arguments"),
        (spec("POST", url("/x")), r#"{"a":1,"a":2}"#, "invalid_arguments"),
        (spec("POST", url("/x")), "{", "invalid_arguments"),
        (spec("CONNECT", url("/x")), "{}", "configuration"),
        (spec("get", url("/x")), "{}", "configuration"),
        (
            spec("GET", String::from("http://{a}/")),
            r#"{"a":"h"}"#,
            "configuration",
        ),
        (unset, "{}", "configuration"),
    ];
    for (spec, arguments, code) in table {
        for effect in EFFECTS {
            let (kind, told, retryable) = class(called(&spec, effect, arguments).await).unwrap();
            let expected = if code == "configuration" {
                FailureKind::Configuration
            } else {
                FailureKind::InvalidInput
            };
            assert_eq!(
                (kind, told.as_str(), retryable),
                (expected, code, false),
                "{spec:?}"
            );
        }
    }
    assert!(stub.received().is_empty());
}

#[tokio::test]
async fn a_secret_is_read_at_each_call_and_told_to_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    // The service says back what it was given.
    let stub = Stub::start(|mut ex: Exchange| async move {
        let token = ex.header("authorization").unwrap_or_default().to_owned();
        let status = if ex.path == "/" { 403 } else { 200 };
        ex.reply(status, &[], format!("{{\"id\":\"{token}\"}}").as_bytes())
            .await
    })
    .await;
    let mut spec = spec("POST", base(&stub));
    let file = HeaderText::File(FileRef {
        file: path.display().to_string(),
    });
    spec.headers.insert(String::from("authorization"), file);
    for token in ["Bearer first-secret", "Bearer second-secret"] {
        std::fs::write(&path, token).unwrap();
        let failure = failure(called(&spec, EffectSpec::Unsafe, "{}").await);
        assert_eq!(stub.last().header("authorization"), Some(token));
        assert_eq!(
            (failure.kind, failure.code.as_str()),
            (FailureKind::Auth, "http_403")
        );
        assert_eq!(failure.message, r#"{"id":"[redacted]"}"#);
        let open = HttpSpec {
            url: format!("{}/open", base(&stub)),
            ..spec.clone()
        };
        let result = called(&open, EffectSpec::Unsafe, "{}").await.unwrap();
        assert_eq!(result, r#"{"id":"[redacted]"}"#);
        let reconcile = ReconcileSpec {
            method: String::from("GET"),
            url: open.url,
            headers: open.headers,
            found: String::from("$.id"),
            timeout: None,
        };
        let clients = Clients::new().unwrap();
        let evidence = found(&clients, &reconcile, b"{}", KEY, MAX).await.unwrap();
        assert_eq!(evidence, r#"{"id":"[redacted]"}"#);
    }
}

#[tokio::test]
async fn an_answer_is_a_failure_and_never_unknown() {
    let stub = Stub::start(|mut ex: Exchange| async move {
        let status = ex.path[1..].parse().unwrap();
        ex.reply(status, &[("retry-after", "7"), ("location", "/200")], b"why")
            .await
    })
    .await;
    for status in [
        301_u16, 302, 307, 400, 401, 404, 408, 409, 422, 425, 429, 500, 501, 502, 503, 504,
    ] {
        for effect in EFFECTS {
            let spec = spec("POST", format!("{}/{status}", base(&stub)));
            let CallError::Failed { failure, retry_after } = called(&spec, effect, "{}").await.unwrap_err()
            else {
                panic!("{status} was an answer");
            };
            assert_eq!(
                (failure.code, failure.message),
                (format!("http_{status}"), String::from("why"))
            );
            let again = effect != EffectSpec::Unsafe && [408, 425, 429, 500, 502, 503, 504].contains(&status);
            assert_eq!(failure.retryable, again, "{status} {effect:?}");
            assert_eq!(retry_after, again.then_some(Duration::from_secs(7)));
        }
    }
    // No redirect was followed.
    assert!(stub.received().iter().all(|r| r.path != "/200"));
}

#[tokio::test]
async fn results_are_verbatim_base64_or_nothing() {
    let stub = Stub::start(|mut ex: Exchange| async move {
        match ex.path.as_str() {
            "/text" => {
                ex.reply(
                    200,
                    &[("content-type", "text/html; charset=latin1")],
                    "{ \"ü\" }\n".as_bytes(),
                )
                .await
            }
            "/gzip" => {
                ex.reply(200, &[("content-encoding", "gzip")], &[0x1f, 0x8b, 0xff])
                    .await
            }
            _ => {
                ex.head(204, &[]).await?;
                ex.end().await
            }
        }
    })
    .await;
    for (path, told) in [
        ("/text", "{ \"ü\" }\n"),
        ("/gzip", r#"{"encoding":"base64","data":"H4v/"}"#),
        ("/none", ""),
    ] {
        let spec = spec("POST", format!("{}{path}", base(&stub)));
        assert_eq!(called(&spec, EffectSpec::Unsafe, "{}").await.unwrap(), told);
    }
}

#[tokio::test]
async fn reading_ends_where_a_result_is_too_large() {
    let stub = Stub::start(|mut ex: Exchange| async move {
        match ex.path.as_str() {
            "/said" => ex.reply(200, &[], &vec![b'x'; MAX as usize + 1]).await,
            "/bytes" => ex.reply(200, &[], &vec![0xff; MAX as usize]).await,
            "/most" => ex.reply(200, &[], &vec![b'x'; MAX as usize]).await,
            // Without an end: only whoever stops reading ends it.
            _ => {
                ex.head(if ex.path == "/failed" { 500 } else { 200 }, &[]).await?;
                loop {
                    ex.chunk(&[b'x'; 4096]).await?;
                }
            }
        }
    })
    .await;
    let at = |path: &str| spec("POST", format!("{}{path}", base(&stub)));
    for effect in EFFECTS {
        for path in ["/said", "/bytes", "/endless"] {
            let class = class(called(&at(path), effect, "{}").await);
            let expected = (FailureKind::ToolError, String::from("payload_too_large"), false);
            assert_eq!(class, Some(expected), "{path} {effect:?}");
        }
        assert_eq!(
            called(&at("/most"), effect, "{}").await.unwrap().len() as u64,
            MAX
        );
        let failed = failure(called(&at("/failed"), effect, "{}").await);
        assert_eq!(
            (failed.code.as_str(), failed.message.len()),
            ("http_500", TEXT_MAX)
        );
    }
}

/// A port that nobody listens on: it was somebody's a moment ago.
async fn closed() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}/", listener.local_addr().unwrap())
}

#[tokio::test]
async fn without_a_connection_nothing_was_sent() {
    let mut listeners = Vec::new();
    let refused = closed().await;
    // TLS never comes about: the connection is there, but nothing of the request can leave.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = format!("https://{}/", listener.local_addr().unwrap());
    listeners.push(listener);
    for (url, timeout) in [(refused, None), (silent, Some(Span(Duration::from_millis(50))))] {
        for effect in EFFECTS {
            let mut spec = spec("POST", url.clone());
            spec.timeout = timeout;
            let failure = failure(called(&spec, effect, "{}").await);
            assert!(failure.retryable);
            if effect == EffectSpec::Unsafe || timeout.is_none() {
                assert_eq!(
                    (failure.kind, failure.code.as_str()),
                    (FailureKind::Unavailable, "connect_failed")
                );
            }
            assert!(!failure.message.contains("127.0.0.1"), "{}", failure.message);
        }
    }
}

/// Calls a service that behaves so, once per effect; classes in the order of `EFFECTS`.
async fn classes<F, Fut>(answer: F) -> Vec<Option<(FailureKind, String, bool)>>
where
    F: Fn(Exchange) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = io::Result<()>> + Send + 'static,
{
    let stub = Stub::start(answer).await;
    let mut spec = spec("POST", base(&stub));
    // Long enough for a connection on a busy machine.
    spec.timeout = Some(Span(Duration::from_millis(1500)));
    let calls = EFFECTS.map(|effect| called(&spec, effect, "{}"));
    let classes = futures_util::future::join_all(calls)
        .await
        .into_iter()
        .map(class)
        .collect();
    assert_eq!(stub.received().len(), EFFECTS.len(), "one request per call");
    classes
}

#[tokio::test]
async fn a_cut_behind_the_request_is_unknown_only_for_unsafe_calls() {
    let lost = Some((FailureKind::Unavailable, String::from("connection_lost"), true));
    let before_the_head = classes(|mut ex: Exchange| async move {
        ex.cut(true);
        Ok(())
    });
    assert_eq!(before_the_head.await, [lost.clone(), lost.clone(), None]);
    let in_the_body = classes(|mut ex: Exchange| async move {
        ex.head(200, &[]).await?;
        ex.chunk(b"half").await?;
        ex.cut(false);
        Ok(())
    });
    assert_eq!(in_the_body.await, [lost.clone(), lost, None]);
    let garbage = classes(|mut ex: Exchange| async move {
        ex.raw(b"SMTP ready\r\n\r\n").await?;
        ex.cut(false);
        Ok(())
    });
    assert_eq!(garbage.await[2], None);
}

#[tokio::test]
async fn a_timeout_behind_the_request_is_unknown_only_for_unsafe_calls() {
    let late = Some((FailureKind::Timeout, String::from("timeout"), true));
    let without_a_head = classes(|mut ex: Exchange| async move {
        ex.gone().await;
        Ok(())
    });
    assert_eq!(without_a_head.await, [late.clone(), late.clone(), None]);
    let in_the_body = classes(|mut ex: Exchange| async move {
        ex.head(200, &[]).await?;
        ex.chunk(b"half").await?;
        ex.gone().await;
        Ok(())
    });
    assert_eq!(in_the_body.await, [late.clone(), late, None]);
}

#[tokio::test]
async fn a_failed_answer_whose_text_stalls_or_breaks_is_still_an_answer() {
    for cut in [true, false] {
        let classes = classes(move |mut ex: Exchange| async move {
            ex.head(404, &[]).await?;
            ex.chunk(b"not h").await?;
            if cut {
                ex.cut(false);
            } else {
                ex.gone().await;
            }
            Ok(())
        });
        let expected = Some((FailureKind::ToolError, String::from("http_404"), false));
        assert_eq!(classes.await, vec![expected; 3]);
    }
}

#[tokio::test]
async fn calls_that_may_be_repeated_share_connections_and_unsafe_ones_do_not() {
    let stub = echo().await;
    let clients = Clients::new().unwrap();
    for (effect, sockets) in [(EffectSpec::Idempotent, 1), (EffectSpec::Unsafe, 4)] {
        for _ in 0..3 {
            let spec = spec("POST", base(&stub));
            let request = HttpCall {
                spec: &spec,
                effect,
                arguments: b"{}",
                key: KEY,
                trace: None,
                max_result: MAX,
            };
            call(&clients, &request).await.unwrap();
        }
        assert_eq!(stub.sockets(), sockets);
    }
}

#[tokio::test]
async fn a_call_that_nobody_waits_for_lets_go_of_the_tool() {
    let stub = Stub::start(|mut ex: Exchange| async move {
        ex.gone().await;
        Ok(())
    })
    .await;
    let spec = spec("POST", base(&stub));
    tokio::select! {
        result = called(&spec, EffectSpec::Unsafe, "{}") => panic!("{result:?}"),
        () = stub.arrived(1) => {}
    }
    stub.hung_up(0, Duration::from_secs(10)).await;
}

fn reconcile(url: String, path: &str) -> ReconcileSpec {
    ReconcileSpec {
        method: String::from("GET"),
        url,
        headers: BTreeMap::new(),
        found: path.to_owned(),
        timeout: Some(Span(Duration::from_millis(1500))),
    }
}

#[tokio::test]
async fn evidence_is_a_success_with_something_in_its_place() {
    let stub = Stub::start(|mut ex: Exchange| async move {
        let path = ex.path.split('?').next().unwrap_or_default().to_owned();
        match path.as_str() {
            "/there" => ex.reply(200, &[], br#"{"data": [{"id": false}]}"#).await,
            "/null" => ex.reply(200, &[], br#"{"data":[{"id":null}]}"#).await,
            "/empty" => ex.reply(200, &[], br#"{"data":[]}"#).await,
            "/text" => ex.reply(200, &[], b"data").await,
            "/missing" => ex.reply(404, &[], br#"{"data":[{"id":1}]}"#).await,
            "/moved" => {
                ex.reply(302, &[("location", "/there")], br#"{"data":[{"id":1}]}"#)
                    .await
            }
            "/large" => {
                ex.reply(
                    200,
                    &[],
                    json!({"data": [{"id": "x".repeat(2000)}]}).to_string().as_bytes(),
                )
                .await
            }
            "/stalled" => {
                ex.gone().await;
                Ok(())
            }
            _ => {
                ex.cut(true);
                Ok(())
            }
        }
    })
    .await;
    let clients = Clients::new().unwrap();
    let ask = async |path: &str, arguments: &str| {
        let url = format!("{}{path}?key={{idempotency_key}}&to={{to}}", base(&stub));
        let spec = reconcile(url, "$.data[0].id");
        found(&clients, &spec, arguments.as_bytes(), KEY, MAX).await
    };
    let arguments = r#"{"to":"a b","other":1}"#;
    let evidence = ask("/there", arguments).await;
    assert_eq!(evidence.unwrap(), r#"{"data": [{"id": false}]}"#);
    let seen = stub.last();
    assert_eq!(seen.path, "/there?key=run_1%2Faction%2F2%2Fcall_1.0&to=a%20b");
    assert_eq!((seen.header("idempotency-key"), seen.body.len()), (None, 0));
    for (path, why) in [
        ("/null", "there is nothing at $.data[0].id in its answer"),
        ("/empty", "there is nothing at $.data[0].id in its answer"),
        ("/text", "it answered no JSON"),
        ("/missing", "it answered 404"),
        ("/moved", "it answered 302"),
        ("/large", "the tool answered more than 1000 bytes"),
        ("/stalled", "the tool did not answer in time"),
        ("/cut", "the connection to the tool broke"),
    ] {
        let error = ask(path, arguments).await.unwrap_err();
        assert!(error.starts_with(why), "{path}: {error}");
    }
    let asked = stub.received().len();
    assert_eq!(ask("/there", "{}").await.unwrap_err(), "argument to is missing");
    assert_eq!(
        stub.received().len(),
        asked,
        "without its arguments nothing is asked"
    );
    let nobody = reconcile(closed().await, "$");
    let error = found(&clients, &nobody, b"{}", KEY, MAX).await.unwrap_err();
    assert!(error.starts_with("no connection to the tool"), "{error}");
}
