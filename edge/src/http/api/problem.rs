//! How an error of `/api/v1` is written: `{"error":{…}}`, or the members of RFC 9457 for whom they were asked (durable-api §1).

use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{HeaderMap as Headers, StatusCode};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::accept;
use crate::http::answer::{Answer, whole};
use crate::runs::problem::{Code, Problem};

const PROBLEM_JSON: &str = "application/problem+json";
/// Headers of an error that its handler set and that stay.
const KEPT: [HeaderName; 2] = [header::ALLOW, header::ETAG];

/// The body of every error.
#[derive(Serialize, ToSchema)]
pub(super) struct ErrorBody {
    error: ErrorMembers,
}

/// What went wrong, and what the caller needs to go on. Some codes have members of their own.
#[derive(Serialize, ToSchema)]
struct ErrorMembers {
    /// OpenAI's word for the class of an error.
    #[serde(rename = "type")]
    kind: String,
    code: Code,
    message: String,
    /// The field at fault.
    param: Option<String>,
    run_id: Option<String>,
    /// Whether the same request may succeed later without anybody changing anything.
    retryable: bool,
    /// With `stale_token`: the token to use.
    current_resume_token: Option<String>,
    /// What a resume would meet.
    decision: Option<String>,
}

/// Handlers hand the error on as it is; what it looks like is decided where the request's headers are known.
impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = self.code.status().into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// The form a caller asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Object,
    Rfc9457,
}

impl Form {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        if accept::names(headers, PROBLEM_JSON) {
            Self::Rfc9457
        } else {
            Self::Object
        }
    }

    pub(super) fn answer(self, problem: &Problem, headers: &Headers) -> Answer {
        let (media, body) = match self {
            Self::Object => ("application/json", json!({ "error": object(problem) })),
            Self::Rfc9457 => (PROBLEM_JSON, Value::Object(rfc9457(problem))),
        };
        let mut answer = whole(problem.code.status(), media, body.to_string());
        let out = answer.headers_mut();
        for name in KEPT {
            if let Some(value) = headers.get(&name) {
                out.insert(name, value.clone());
            }
        }
        if problem.code.status() == StatusCode::UNAUTHORIZED {
            out.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(after) = problem.retry_after {
            // Whole seconds, rounded up, so that a client never comes too early.
            let secs = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            out.insert(header::RETRY_AFTER, HeaderValue::from(secs));
        }
        answer
    }
}

fn object(problem: &Problem) -> Map<String, Value> {
    let mut out = Map::new();
    out.insert("type".to_owned(), problem.code.kind().into());
    out.insert("code".to_owned(), problem.code.as_str().into());
    out.insert("message".to_owned(), (*problem.message).into());
    out.insert("param".to_owned(), problem.param.as_deref().into());
    details(problem, &mut out);
    out
}

fn rfc9457(problem: &Problem) -> Map<String, Value> {
    let mut out = Map::new();
    let code = problem.code.as_str();
    out.insert("type".to_owned(), format!("urn:iop:problem:{code}").into());
    out.insert("title".to_owned(), title(code).into());
    out.insert("status".to_owned(), problem.code.status().as_u16().into());
    out.insert("detail".to_owned(), (*problem.message).into());
    out.insert("code".to_owned(), code.into());
    out.insert("param".to_owned(), problem.param.as_deref().into());
    details(problem, &mut out);
    out
}

/// What both forms have.
fn details(problem: &Problem, out: &mut Map<String, Value>) {
    if let Some(run) = &problem.run_id {
        out.insert("run_id".to_owned(), run.as_str().into());
    }
    out.insert("retryable".to_owned(), problem.retryable.into());
    if let Some(token) = &problem.current_resume_token {
        out.insert("current_resume_token".to_owned(), token.as_str().into());
    }
    if let Some(decision) = problem.decision {
        out.insert("decision".to_owned(), decision.into());
    }
    for (name, value) in &problem.more {
        out.insert((*name).to_owned(), value.clone());
    }
}

/// `stale_token` → `Stale token`.
fn title(code: &str) -> String {
    let mut title = code.replace('_', " ");
    if let Some(first) = title.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    title
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use http_body_util::BodyExt;

    use super::*;

    fn written(form: Form, problem: &Problem) -> (Headers, Value) {
        let (parts, body) = form.answer(problem, &Headers::new()).into_parts();
        assert_eq!(parts.status, problem.code.status());
        let bytes = body.collect().now_or_never().unwrap().unwrap().to_bytes();
        (parts.headers, serde_json::from_slice(&bytes).unwrap())
    }

    fn stale() -> Problem {
        let mut problem = Problem::new(Code::StaleToken, "old")
            .at("resume_token")
            .of("run_1");
        problem.current_resume_token = Some("rt_1".to_owned());
        problem.decision = Some("stale");
        problem.with("waiting_on", json!([]))
    }

    #[test]
    fn an_error_has_the_members_of_the_contract() {
        let (headers, body) = written(Form::Object, &stale());
        assert_eq!(headers[header::CONTENT_TYPE], "application/json");
        assert_eq!(
            body,
            json!({ "error": {
                "type": "invalid_request_error", "code": "stale_token", "message": "old", "param": "resume_token",
                "run_id": "run_1", "retryable": false, "current_resume_token": "rt_1", "decision": "stale", "waiting_on": [] } })
        );
        let (_, body) = written(Form::Object, &Problem::new(Code::NotFound, "no"));
        assert_eq!(
            body,
            json!({ "error": { "type": "invalid_request_error", "code": "not_found", "message": "no", "param": null,
                "retryable": false } })
        );
    }

    #[test]
    fn rfc9457_has_its_own_members_and_the_same() {
        let (headers, body) = written(Form::Rfc9457, &stale());
        assert_eq!(headers[header::CONTENT_TYPE], PROBLEM_JSON);
        assert_eq!(
            body,
            json!({ "type": "urn:iop:problem:stale_token", "title": "Stale token", "status": 409, "detail": "old",
                "code": "stale_token", "param": "resume_token", "run_id": "run_1", "retryable": false,
                "current_resume_token": "rt_1", "decision": "stale", "waiting_on": [] })
        );
    }

    #[test]
    fn every_code_is_written_and_what_may_pass_says_when() {
        for code in Code::ALL {
            let problem = Problem::new(*code, "x");
            let (headers, body) = written(Form::Object, &problem);
            assert_eq!(body["error"]["code"], code.as_str());
            let unavailable = problem.code.status() == StatusCode::SERVICE_UNAVAILABLE;
            assert!(
                !unavailable || (headers.contains_key(header::RETRY_AFTER) && problem.retryable),
                "{code}"
            );
        }
        let mut late = Problem::new(Code::StoreUnavailable, "x");
        late.retry_after = Some(std::time::Duration::from_millis(1_001));
        assert_eq!(written(Form::Object, &late).0[header::RETRY_AFTER], "2");
    }

    #[test]
    fn the_form_is_the_callers_choice() {
        let of = |accept: &'static str| {
            Form::of(&HeaderMap::from_iter([(
                header::ACCEPT,
                HeaderValue::from_static(accept),
            )]))
        };
        assert_eq!(Form::of(&HeaderMap::new()), Form::Object);
        assert_eq!(of("*/*"), Form::Object);
        assert_eq!(of("text/event-stream"), Form::Object);
        assert_eq!(
            of("application/json, Application/Problem+JSON;q=0.5"),
            Form::Rfc9457
        );
    }
}
