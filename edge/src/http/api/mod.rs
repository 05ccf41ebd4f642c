//! `/api/v1`: ours. One resource per file; each gives its routes with what they say of themselves, and the OpenAPI document is
//! made from that. What all requests have in common is here: encoding, the form of errors, panics, what is in flight.

mod accept;
mod activities;
mod after;
mod agents;
mod approvals;
mod callers;
mod capabilities;
mod extract;
mod inputs;
mod list;
mod matching;
mod nodes;
mod openapi;
mod polite;
mod problem;
mod runs;
mod shown;
mod sse;
mod steer;
mod waits;

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, LazyLock};

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use http::header::{self, HeaderMap};
use http::{HeaderValue, Method, Request, StatusCode, Version};
use http_body_util::BodyExt;
use hyper_util::service::TowerToHyperService;
use iop_shared::execution::Outcome;
use tokio::time::Instant;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::polite::Polite;
use self::problem::Form;
pub(super) use self::runs::{check_metadata, idempotency_key, traceparent};
use super::answer::{self, Answer};
use super::connection::BoxError;
use super::request_id::RequestId;
use crate::app::App;
use crate::gate::{GateBody, RequestGuard};
use crate::runs::problem::{Code, Problem};

/// Where it all is.
const ROOT: &str = "/api/v1";

/// The resources, in the order of the document.
fn resources() -> OpenApiRouter {
    OpenApiRouter::new()
        .merge(agents::router())
        .merge(runs::router())
        .merge(steer::router())
        .merge(approvals::router())
        .merge(inputs::router())
        .merge(waits::router())
        .merge(activities::router())
        .merge(nodes::router())
        .merge(capabilities::router())
        .routes(routes!(document))
}

/// Made once: which path leads where, and what that says of itself.
struct Api {
    router: TowerToHyperService<Router>,
    document: Bytes,
}

static API: LazyLock<Api> = LazyLock::new(|| {
    let (router, document) = OpenApiRouter::with_openapi(openapi::base())
        .nest(ROOT, resources())
        .split_for_parts();
    let router = router
        .fallback(nothing_there)
        .method_not_allowed_fallback(wrong_method);
    let document = openapi::finished(document);
    Api {
        router: TowerToHyperService::new(router),
        document: serde_json::to_vec(&document).unwrap_or_default().into(),
    }
});

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "meta", security(()), responses((status = 200, body = Object)))]
async fn document() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], API.document.clone()).into_response()
}

async fn nothing_there(uri: http::Uri) -> Problem {
    Problem::new(Code::NotFound, answer::not_found(uri.path()).message)
}

async fn wrong_method(uri: http::Uri) -> Problem {
    Problem::new(
        Code::MethodNotAllowed,
        answer::method_not_allowed(uri.path()).message,
    )
}

/// Answers one request below `/api/v1`.
pub(super) async fn serve<B>(app: Arc<App>, id: RequestId, request: Request<B>) -> Answer
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let guard = RequestGuard::beside(app.metrics.clone(), id.clone(), Instant::now());
    let form = Form::of(request.headers());
    let (method, version) = (request.method().clone(), request.version());
    let write_timeout = app.settings.gate.client_write_timeout;
    let mut response = match AssertUnwindSafe(dispatch(&app, request)).catch_unwind().await {
        Ok(response) => response,
        Err(_) => {
            app.metrics.panics.inc();
            tracing::error!(request_id = %id, "a request panicked");
            Problem::new(Code::InternalError, "The gateway failed to handle this request.").into_response()
        }
    };
    allow_options(response.headers_mut());
    if response.status() == StatusCode::METHOD_NOT_ALLOWED && method == Method::OPTIONS {
        let allow = response.headers_mut().remove(header::ALLOW);
        response = StatusCode::NO_CONTENT.into_response();
        response
            .headers_mut()
            .extend(allow.map(|allow| (header::ALLOW, allow)));
    }
    let outcome = outcome(response.status());
    match response.extensions_mut().remove::<Problem>() {
        Some(problem) => {
            if problem.code == Code::InternalError {
                tracing::error!(request_id = %id, why = %problem.message, "a request failed");
            }
            let answer = form.answer(&problem, response.headers());
            let (parts, body) = answer.into_parts();
            settled(Response::from_parts(parts, Body::new(body)), guard, outcome).await
        }
        None if version < Version::HTTP_2 => settled(response, guard, outcome).await,
        None => {
            // One connection carries many streams, so a blocked socket does not tell of one that nobody reads.
            let answer = settled(response, guard, outcome).await;
            answer.map(|body| body.pumped(write_timeout))
        }
    }
}

async fn dispatch<B>(app: &Arc<App>, request: Request<B>) -> Response
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    if let Err(problem) = extract::check_encoding(request.uri()) {
        return problem.into_response();
    }
    let (mut parts, body) = request.into_parts();
    let waits_for_a_word = parts.headers.contains_key(header::EXPECT);
    parts.extensions.insert(Arc::clone(app));
    let body = Body::new(Polite::new(body, waits_for_a_word));
    let routed = hyper::service::Service::call(&API.router, Request::from_parts(parts, body));
    match routed.await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

/// The methods of a path, with the one that names them.
fn allow_options(headers: &mut HeaderMap) {
    let Some(allow) = headers.get(header::ALLOW).and_then(|v| v.to_str().ok()) else {
        return;
    };
    let mut methods: Vec<&str> = allow
        .split(',')
        .map(str::trim)
        .filter(|m| !m.is_empty())
        .collect();
    methods.push("OPTIONS");
    methods.sort_unstable();
    if let Ok(value) = HeaderValue::from_str(&methods.join(", ")) {
        headers.insert(header::ALLOW, value);
    }
}

fn outcome(status: StatusCode) -> Outcome {
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Outcome::Rejected,
        StatusCode::NOT_IMPLEMENTED => Outcome::ClientError,
        s if s.is_server_error() => Outcome::InternalError,
        s if s.is_client_error() => Outcome::ClientError,
        _ => Outcome::Success,
    }
}

/// The answer with its request's guard: a whole body settles it when it is taken; a stream is a success once it is open, and its
/// reader may leave when it likes.
async fn settled(response: Response, guard: RequestGuard, outcome: Outcome) -> Answer {
    let (parts, body) = response.into_parts();
    let body = if http_body::Body::size_hint(&body).exact().is_some() {
        match body.collect().await {
            Ok(whole) => GateBody::full(whole.to_bytes(), guard, outcome),
            Err(_) => GateBody::full(Bytes::new(), guard, Outcome::InternalError),
        }
    } else {
        GateBody::streamed(body, guard, outcome)
    };
    Answer::from_parts(parts, body)
}

#[cfg(test)]
mod tests;
