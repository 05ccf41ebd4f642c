//! `GET /api/v1/nodes`, `GET /api/v1/providers` (G84): the pool's snapshot, in the list envelope and error form of
//! `durable-api.md` §1. Reads only.

use std::sync::Arc;

use axum::extract::Query;
use http::{Method, Request};
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};

use super::answer::{self, Answer, json, whole};
use crate::app::App;
use crate::config::Role;
use crate::error::{ApiError, ErrorKind};

const GET: &str = "GET, HEAD, OPTIONS";
const LIMIT_MAX: usize = 200;
const LIMIT_DEFAULT: usize = 100;

pub(super) fn route(app: &Arc<App>, rest: &str, request: &Request<Incoming>) -> Answer {
    let path = request.uri().path();
    let read = match rest {
        "nodes" => nodes,
        "providers" => providers,
        _ => return error(&answer::not_found(path)),
    };
    match *request.method() {
        Method::GET | Method::HEAD => {}
        Method::OPTIONS => return answer::options(GET),
        _ => return answer::with_allow(error(&answer::method_not_allowed(path)), GET),
    }
    let asked = || {
        app.keys
            .authenticate(request.headers())?
            .require(Role::Operator)?;
        Page::of(request.uri())
    };
    match asked() {
        Ok(page) => read(app, &page),
        Err(e) => error(&e),
    }
}

fn nodes(app: &App, page: &Page) -> Answer {
    json(&page.cut(app.pool.nodes(), |n| n.id.as_str()))
}

fn providers(app: &App, page: &Page) -> Answer {
    json(&page.cut(app.pool.providers(), |p| p.id.as_str()))
}

#[derive(Serialize)]
struct List<T> {
    object: &'static str,
    data: Vec<T>,
    has_more: bool,
    next_after: Option<String>,
}

/// Which part of a list is asked for. Snapshots have no age, so a cursor is the last id seen: what comes and goes
/// between two pages cannot shift the rest.
#[derive(Debug, PartialEq, Eq)]
struct Page {
    limit: usize,
    after: Option<String>,
}

#[derive(Deserialize)]
struct Written {
    limit: Option<String>,
    after: Option<String>,
}

impl Page {
    fn of(uri: &http::Uri) -> Result<Self, ApiError> {
        let Query(written) = Query::<Written>::try_from_uri(uri)
            .map_err(|_| ApiError::new(ErrorKind::InvalidRequest, "The query cannot be read."))?;
        let limit = match written.limit.as_deref().map(str::parse::<usize>) {
            None => LIMIT_DEFAULT,
            Some(Ok(n)) if (1..=LIMIT_MAX).contains(&n) => n,
            Some(_) => {
                return Err(ApiError::invalid(
                    "limit",
                    "limit must be a whole number from 1 to 200.",
                ));
            }
        };
        match written.after {
            Some(after) if after.is_empty() || after.len() > 256 => Err(ApiError::invalid(
                "after",
                "after must be the next_after of the page before.",
            )),
            after => Ok(Self { limit, after }),
        }
    }

    fn cut<T>(&self, mut all: Vec<T>, id: impl Fn(&T) -> &str) -> List<T> {
        all.sort_by(|a, b| id(a).cmp(id(b)));
        if let Some(after) = &self.after {
            all.retain(|item| id(item) > after.as_str());
        }
        let has_more = all.len() > self.limit;
        all.truncate(self.limit);
        let next_after = all.last().filter(|_| has_more).map(|last| id(last).to_owned());
        List {
            object: "list",
            data: all,
            has_more,
            next_after,
        }
    }
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: ErrorMembers<'a>,
}

#[derive(Serialize)]
struct ErrorMembers<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    code: &'static str,
    message: &'a str,
    param: Option<&'a str>,
    retryable: bool,
}

/// An error as `/api/v1` words it; status and headers as everywhere.
fn error(e: &ApiError) -> Answer {
    let code = if e.kind == ErrorKind::InvalidRequest {
        "invalid_request"
    } else {
        e.kind.as_str()
    };
    let members = ErrorMembers {
        kind: e.kind.openai_type(),
        code,
        message: &e.message,
        param: e.param.as_deref(),
        retryable: e.kind.status().is_server_error() && e.kind != ErrorKind::InternalError,
    };
    let body = serde_json::to_vec(&ErrorBody { error: members }).unwrap_or_default();
    whole(e.kind.status(), "application/json", body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(query: &str) -> Result<Page, ApiError> {
        Page::of(&format!("/api/v1/nodes{query}").parse().unwrap())
    }

    fn ids(list: &List<&str>) -> String {
        list.data.join("")
    }

    #[test]
    fn a_page_is_bounded_and_names_the_wrong_parameter() {
        assert_eq!(
            page("").unwrap(),
            Page {
                limit: 100,
                after: None
            }
        );
        assert_eq!(
            page("?limit=2&after=a%2Fb&x=1").unwrap(),
            Page {
                limit: 2,
                after: Some("a/b".into())
            }
        );
        for (query, param) in [
            ("?limit=0", "limit"),
            ("?limit=201", "limit"),
            ("?limit=-1", "limit"),
            ("?limit=x", "limit"),
            ("?after=", "after"),
        ] {
            assert_eq!(page(query).unwrap_err().param.as_deref(), Some(param), "{query}");
        }
    }

    #[test]
    fn pages_follow_each_other_without_gap_or_repetition() {
        let all = vec!["c", "a", "d", "b", "e"];
        let mut page = Page {
            limit: 2,
            after: None,
        };
        let mut seen = Vec::new();
        loop {
            let list = page.cut(all.clone(), |s| s);
            seen.push(ids(&list));
            assert_eq!(list.has_more, list.next_after.is_some());
            let Some(next) = list.next_after else { break };
            page.after = Some(next);
        }
        assert_eq!(seen, ["ab", "cd", "e"]);
    }

    #[test]
    fn an_error_has_the_members_of_our_own_surface() {
        use futures_util::FutureExt;
        use http_body_util::BodyExt;
        let answer = error(&ApiError::invalid("limit", "no"));
        assert_eq!(answer.status(), 400);
        let body = answer
            .into_body()
            .collect()
            .now_or_never()
            .unwrap()
            .unwrap()
            .to_bytes();
        let v: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            v,
            serde_json::json!({ "error": {
            "type": "invalid_request_error", "code": "invalid_request", "message": "no", "param": "limit", "retryable": false } })
        );
    }
}
