//! What a tool's answer means: a result, or a failure and whether the call may succeed later (durable-api §8 Who retries, Tools).

use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::runner::CallError;
use serde_json::{Value, json};

/// Bytes of a failed answer's text that are kept.
pub(crate) const TEXT_MAX: usize = 16 << 10;

/// The longest `Retry-After` that is honoured.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

/// A result as the model is told it: text as it is, other bytes as `{"encoding":"base64","data":…}`.
///
/// # Errors
/// `payload_too_large` beyond `max` bytes.
pub(crate) fn result(body: Bytes, max: u64) -> Result<Bytes, Failure> {
    let told = match std::str::from_utf8(&body) {
        Ok(_) => body,
        Err(_) => Bytes::from(format!(
            r#"{{"encoding":"base64","data":"{}"}}"#,
            STANDARD.encode(&body)
        )),
    };
    if told.len() as u64 > max {
        Err(too_large(max))
    } else {
        Ok(told)
    }
}

/// A result of more than `max` bytes. Calling again would not make it smaller.
pub(crate) fn too_large(max: u64) -> Failure {
    Failure::new(
        FailureKind::ToolError,
        format!("the tool answered more than {max} bytes"),
    )
    .code("payload_too_large")
}

/// An answer that is no success. `text` is what it said, for the model; `again` whether this call may be repeated at all.
pub(crate) fn refused(
    status: StatusCode,
    headers: &HeaderMap,
    text: String,
    again: bool,
    now: SystemTime,
) -> CallError {
    let (kind, passing) = match status.as_u16() {
        401 | 403 => (FailureKind::Auth, false),
        429 => (FailureKind::RateLimited, true),
        408 | 425 | 500 | 502 | 503 | 504 => (FailureKind::ToolError, true),
        _ => (FailureKind::ToolError, false),
    };
    let retryable = passing && again;
    CallError::Failed {
        failure: Failure::new(kind, cut(text))
            .code(format!("http_{}", status.as_u16()))
            .retryable(retryable),
        retry_after: retry_after(headers, now).filter(|_| retryable),
    }
}

/// `Retry-After` in seconds or as a date, at most an hour.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    let pause = if text.bytes().all(|b| b.is_ascii_digit()) && !text.is_empty() {
        text.parse().map_or(RETRY_AFTER_MAX, Duration::from_secs)
    } else {
        let date = httpdate::parse_http_date(text).ok()?;
        date.duration_since(now).unwrap_or_default()
    };
    Some(pause.min(RETRY_AFTER_MAX))
}

fn cut(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(TEXT_MAX));
    text
}

/// What the model is told of a call that failed: `{"error":{"status","code","body"}}`. What is wrong on this side is for people
/// alone.
pub(crate) fn told(failure: &Failure) -> Bytes {
    let status = failure
        .code
        .strip_prefix("http_")
        .and_then(|status| status.parse::<u16>().ok());
    let body = match failure.kind {
        FailureKind::Configuration | FailureKind::Internal => "the tool cannot be called here",
        FailureKind::Timeout
        | FailureKind::RateLimited
        | FailureKind::Auth
        | FailureKind::Unavailable
        | FailureKind::ProviderError
        | FailureKind::ToolError
        | FailureKind::Verification
        | FailureKind::InvalidInput
        | FailureKind::Refused => &failure.message,
    };
    let error: Value = json!({ "status": status, "code": failure.code, "body": body });
    Bytes::from(json!({ "error": error }).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(error: CallError) -> (Failure, Option<Duration>) {
        match error {
            CallError::Failed { failure, retry_after } => (failure, retry_after),
            CallError::Unknown => panic!("an answer is never unknown"),
        }
    }

    fn answer(status: u16, again: bool, after: Option<&str>) -> (Failure, Option<Duration>) {
        let mut headers = HeaderMap::new();
        if let Some(after) = after {
            headers.insert(header::RETRY_AFTER, after.parse().unwrap());
        }
        let status = StatusCode::from_u16(status).unwrap();
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        failed(refused(status, &headers, String::from("text"), again, now))
    }

    #[test]
    fn every_status_has_a_kind_and_says_whether_it_may_pass() {
        for status in (100..200).chain(300..600) {
            let (failure, _) = answer(status, true, None);
            let kind = match status {
                401 | 403 => FailureKind::Auth,
                429 => FailureKind::RateLimited,
                _ => FailureKind::ToolError,
            };
            assert_eq!(failure.kind, kind, "{status}");
            assert_eq!(failure.code, format!("http_{status}"));
            assert_eq!(failure.message, "text");
            let passing = [408, 425, 429, 500, 502, 503, 504].contains(&status);
            assert_eq!(failure.retryable, passing, "{status}");
            assert!(!answer(status, false, None).0.retryable);
        }
    }

    #[test]
    fn hints_are_read_and_bounded() {
        for (text, seconds) in [
            ("0", Some(0)),
            (" 7 ", Some(7)),
            ("3601", Some(3600)),
            ("99999999999999999999999", Some(3600)),
            ("Sun, 06 Nov 1994 08:50:07 GMT", Some(30)),
            ("Sun, 06 Nov 1994 08:00:00 GMT", Some(0)),
            ("Sat, 06 Nov 2094 08:49:37 GMT", Some(3600)),
            ("-1", None),
            ("1.5", None),
            ("soon", None),
            ("", None),
        ] {
            let hint = answer(503, true, Some(text)).1;
            assert_eq!(hint, seconds.map(Duration::from_secs), "{text}");
        }
        assert_eq!(answer(503, true, None).1, None);
        assert_eq!(answer(404, true, Some("7")).1, None);
        assert_eq!(answer(503, false, Some("7")).1, None);
    }

    #[test]
    fn results_are_verbatim_or_base64_and_bounded() {
        assert_eq!(result(Bytes::new(), 0).unwrap(), "");
        assert_eq!(result(Bytes::from("{ \"ü\" }\n"), 10).unwrap(), "{ \"ü\" }\n");
        let bytes = Bytes::from_static(&[0xff, 0, 1]);
        assert_eq!(
            result(bytes.clone(), 100).unwrap(),
            r#"{"encoding":"base64","data":"/wAB"}"#
        );
        for (body, max) in [(bytes, 20), (Bytes::from("abc"), 2)] {
            let failure = result(body, max).unwrap_err();
            assert_eq!(
                (failure.kind, failure.code.as_str(), failure.retryable),
                (FailureKind::ToolError, "payload_too_large", false)
            );
        }
    }

    #[test]
    fn the_model_is_told_what_happened_but_not_how_it_is_set_up() {
        let value = |failure: &Failure| -> Value { serde_json::from_slice(&told(failure)).unwrap() };
        assert_eq!(
            value(&answer(503, true, None).0),
            json!({"error": {"status": 503, "code": "http_503", "body": "text"}})
        );
        assert_eq!(
            value(&Failure::new(FailureKind::Timeout, "late")),
            json!({"error": {"status": null, "code": "timeout", "body": "late"}})
        );
        assert_eq!(
            value(&Failure::new(
                FailureKind::Configuration,
                "header a: file /run/x is empty"
            )),
            json!({"error": {"status": null, "code": "configuration", "body": "the tool cannot be called here"}})
        );
        let long = failed(refused(
            StatusCode::BAD_REQUEST,
            &HeaderMap::new(),
            "ü".repeat(TEXT_MAX),
            true,
            SystemTime::now(),
        ))
        .0;
        assert_eq!(long.message.len(), TEXT_MAX);
    }
}
