//! From a path to its handler. `/v1/*` is OpenAI's, `/api/v1/*` is ours, nothing else is served.
//!
//! A match by hand: the data plane is measured, and its way from the socket to its handler is two prefix tests. What
//! every answer has in common is here: ids, a panic that ends one request only, the end of a connection on drain.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, Request, StatusCode, Version};
use hyper::body::Incoming;
use iop_shared::execution::{Endpoint, Outcome};

use super::answer::{self, Answer};
use super::request_id::RequestId;
use super::server::ConnHandle;
use super::{api, demo, health, models, openai};
use crate::app::App;
use crate::config::Role;
use crate::error::{ApiError, ErrorKind};
use crate::metrics::EndpointLabel;

const GET: &str = "GET, HEAD, OPTIONS";

/// The main listener.
pub fn serve(
    app: Arc<App>,
    conn: ConnHandle,
    request: Request<Incoming>,
) -> impl Future<Output = Answer> + Send + 'static {
    let asked = Asked::of(&app, &request);
    let id = asked.id.clone();
    asked.guarded(route(app, id, conn, request))
}

/// The listener of `server.metrics_listen`: no keys, nothing but health and metrics.
pub fn serve_metrics(
    app: Arc<App>,
    request: Request<Incoming>,
) -> impl Future<Output = Answer> + Send + 'static {
    let asked = Asked::of(&app, &request);
    asked.guarded(async move {
        let path = request.uri().path();
        operational(&app, path, request.method(), health::metrics)
            .unwrap_or_else(|| answer::not_found(path).into_response())
    })
}

/// What an answer must know of its request.
pub(super) struct Asked {
    app: Arc<App>,
    id: RequestId,
    version: Version,
}

impl Asked {
    pub(super) fn of<B>(app: &Arc<App>, request: &Request<B>) -> Self {
        Self {
            app: Arc::clone(app),
            id: RequestId::of(request.headers()),
            version: request.version(),
        }
    }

    /// What every answer goes through. Combinators, not `async`: that would keep the handler's future, which is large,
    /// twice for each running request.
    pub(super) fn guarded<F>(self, routed: F) -> impl Future<Output = Answer> + use<F>
    where
        F: Future<Output = Answer>,
    {
        AssertUnwindSafe(routed)
            .catch_unwind()
            .map(move |ended| self.finish(ended))
    }

    fn finish(&self, ended: std::thread::Result<Answer>) -> Answer {
        let mut response = ended.unwrap_or_else(|_| {
            self.app.metrics.panics.inc();
            tracing::error!(request_id = %self.id, "a request panicked");
            ApiError::new(
                ErrorKind::InternalError,
                "The gateway failed to handle this request.",
            )
            .into_response()
        });
        let headers = response.headers_mut();
        self.id.stamp(headers);
        if self.version < Version::HTTP_2 && self.app.drain.is_draining() {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

async fn route(app: Arc<App>, id: RequestId, conn: ConnHandle, mut request: Request<Incoming>) -> Answer {
    let path = request.uri().path();
    if let Some(rest) = path.strip_prefix("/v1/") {
        return match v1(rest, request.method(), request.headers()) {
            Route::Data(endpoint) => {
                request.extensions_mut().insert(conn);
                // hyper keeps room for the whole future as long as the connection lives; boxed, it is gone once the
                // head is out, and an open stream or an idle connection does not carry it.
                Box::pin(openai::handle(app, endpoint, id, request)).await
            }
            Route::Small(small) => counted(&app, small, &request),
        };
    }
    if path.starts_with("/api/v1/") {
        return Box::pin(api::serve(app, id, request)).await;
    }
    if app.settings.demo && path.starts_with("/demo/") {
        return Box::pin(demo::serve(&app, request)).await;
    }
    let with_role = |app: &App| {
        app.keys.authenticate(request.headers())?.require(Role::Metrics)?;
        health::metrics(app)
    };
    let on_main = |path: &str| path != "/metrics" || app.settings.server.metrics_listen.is_none();
    operational(&app, path, request.method(), with_role)
        .filter(|_| on_main(path))
        .unwrap_or_else(|| answer::not_found(path).into_response())
}

/// `/livez`, `/readyz`, `/metrics`; `None`: none of them.
fn operational(
    app: &App,
    path: &str,
    method: &Method,
    metrics: impl FnOnce(&App) -> Result<Answer, ApiError>,
) -> Option<Answer> {
    if !matches!(path, "/livez" | "/readyz" | "/metrics") {
        return None;
    }
    Some(match *method {
        Method::GET | Method::HEAD => match path {
            "/livez" => health::livez(),
            "/readyz" => health::readyz(app),
            _ => metrics(app).unwrap_or_else(ApiError::into_response),
        },
        Method::OPTIONS => answer::options(GET),
        _ => wrong_method(path, GET),
    })
}

/// Where a path below `/v1/` leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route<'a> {
    /// To a provider, by way of the gate.
    Data(Endpoint),
    Small(Small<'a>),
}

/// What needs no provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Small<'a> {
    Models,
    Model(&'a str),
    /// A method that models do not take, on one model.
    NotOnModel(&'a str),
    Options(EndpointLabel, &'static str),
    WrongMethod(EndpointLabel, &'static str),
    /// Codex asks for a WebSocket first (G5).
    WebSocket,
    Unknown,
}

fn v1<'a>(rest: &'a str, method: &Method, headers: &HeaderMap) -> Route<'a> {
    let Some(endpoint) = Endpoint::of_path(rest) else {
        return Route::Small(models_or_nothing(rest, method));
    };
    let allow = allowed(endpoint, rest);
    if *method != Method::OPTIONS && allow.split(", ").any(|m| m == method.as_str()) {
        Route::Data(endpoint)
    } else if *method == Method::GET && rest == "responses" && is_websocket(headers) {
        Route::Small(Small::WebSocket)
    } else {
        Route::Small(other_method(endpoint.into(), method, allow))
    }
}

fn models_or_nothing<'a>(rest: &'a str, method: &Method) -> Small<'a> {
    let model = match rest.strip_prefix("models") {
        Some("") => None,
        Some(id) if id.len() > 1 && id.starts_with('/') => Some(&id[1..]),
        _ => return Small::Unknown,
    };
    match *method {
        Method::GET | Method::HEAD => model.map_or(Small::Models, Small::Model),
        Method::OPTIONS => Small::Options(EndpointLabel::Models, GET),
        _ => model.map_or(Small::WrongMethod(EndpointLabel::Models, GET), Small::NotOnModel),
    }
}

fn other_method(endpoint: EndpointLabel, method: &Method, allow: &'static str) -> Small<'static> {
    if *method == Method::OPTIONS {
        Small::Options(endpoint, allow)
    } else {
        Small::WrongMethod(endpoint, allow)
    }
}

/// The methods of a data-plane path; all but one endpoint only take `POST`.
fn allowed(endpoint: Endpoint, rest: &str) -> &'static str {
    match endpoint {
        Endpoint::Responses => match rest.strip_prefix("responses/") {
            None => "POST, OPTIONS",
            Some(stored) if stored.ends_with("/cancel") => "POST, OPTIONS",
            Some(stored) if stored.ends_with("/input_items") => "GET, OPTIONS",
            Some(_) => "GET, DELETE, OPTIONS",
        },
        Endpoint::Chat
        | Endpoint::Completions
        | Endpoint::Embeddings
        | Endpoint::Rerank
        | Endpoint::Moderations
        | Endpoint::Images
        | Endpoint::Audio => "POST, OPTIONS",
    }
}

fn is_websocket(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::UPGRADE)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .any(|p| p.trim().eq_ignore_ascii_case("websocket"))
}

fn wrong_method(path: &str, allow: &'static str) -> Answer {
    answer::with_allow(answer::method_not_allowed(path).into_response(), allow)
}

/// Answers what needs no provider, and counts it.
fn counted(app: &App, small: Small<'_>, request: &Request<Incoming>) -> Answer {
    let started = Instant::now();
    let path = request.uri().path();
    let (endpoint, answered) = match small {
        Small::Models => (EndpointLabel::Models, models::list(app, request.headers())),
        Small::Model(id) => (EndpointLabel::Models, models::one(app, request.headers(), id)),
        Small::Options(endpoint, allow) => (endpoint, Ok(answer::options(allow))),
        // Whether the method is wrong or the model absent depends on the model.
        Small::NotOnModel(id) => {
            let found = models::one(app, request.headers(), id);
            (EndpointLabel::Models, found.map(|_| wrong_method(path, GET)))
        }
        Small::WrongMethod(endpoint, allow) => (endpoint, Ok(wrong_method(path, allow))),
        Small::WebSocket => (
            EndpointLabel::Responses,
            Err(ApiError::new(
                ErrorKind::UpgradeRequired,
                "WebSockets are not served here; send POST /v1/responses over HTTP.",
            )),
        ),
        Small::Unknown => (EndpointLabel::Other, Err(answer::not_found(path))),
    };
    let answer = answered.unwrap_or_else(ApiError::into_response);
    let outcome = match answer.status() {
        s if s.is_success() => Outcome::Success,
        StatusCode::INTERNAL_SERVER_ERROR => Outcome::InternalError,
        _ => Outcome::ClientError,
    };
    app.metrics.requests.at((endpoint, outcome)).inc();
    app.metrics
        .request_duration
        .at((endpoint,))
        .observe(started.elapsed().as_secs_f64());
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(method: &str, rest: &'static str) -> Route<'static> {
        v1(rest, &method.parse().unwrap(), &HeaderMap::new())
    }

    #[test]
    fn every_endpoint_is_reached_by_its_methods_alone() {
        for endpoint in Endpoint::ALL {
            assert_eq!(to("POST", endpoint.path()), Route::Data(*endpoint));
            assert_eq!(
                to("PUT", endpoint.path()),
                Route::Small(Small::WrongMethod((*endpoint).into(), "POST, OPTIONS"))
            );
            assert_eq!(
                to("OPTIONS", endpoint.path()),
                Route::Small(Small::Options((*endpoint).into(), "POST, OPTIONS"))
            );
        }
        for (method, rest) in [
            ("GET", "responses/resp_1"),
            ("DELETE", "responses/resp_1"),
            ("POST", "responses/resp_1/cancel"),
            ("GET", "responses/resp_1/input_items"),
        ] {
            assert_eq!(
                to(method, rest),
                Route::Data(Endpoint::Responses),
                "{method} {rest}"
            );
        }
        for (method, rest, allow) in [
            ("POST", "responses/resp_1", "GET, DELETE, OPTIONS"),
            ("GET", "responses/resp_1/cancel", "POST, OPTIONS"),
            ("DELETE", "responses/resp_1/input_items", "GET, OPTIONS"),
            ("GET", "responses", "POST, OPTIONS"),
        ] {
            assert_eq!(
                to(method, rest),
                Route::Small(Small::WrongMethod(EndpointLabel::Responses, allow)),
                "{method} {rest}"
            );
        }
    }

    #[test]
    fn model_names_may_hold_slashes() {
        assert_eq!(to("GET", "models"), Route::Small(Small::Models));
        assert_eq!(
            to("HEAD", "models/Qwen/Qwen3-8B"),
            Route::Small(Small::Model("Qwen/Qwen3-8B"))
        );
        assert_eq!(to("DELETE", "models/m"), Route::Small(Small::NotOnModel("m")));
        assert_eq!(
            to("POST", "models"),
            Route::Small(Small::WrongMethod(EndpointLabel::Models, GET))
        );
        for rest in ["models/", "files", "", "modelsx", "chat", "chat/completions/x"] {
            assert_eq!(to("GET", rest), Route::Small(Small::Unknown), "{rest}");
        }
    }

    #[test]
    fn a_websocket_is_told_apart_from_a_wrong_method() {
        let mut headers = HeaderMap::new();
        headers.insert(header::UPGRADE, HeaderValue::from_static("h2c, WebSocket"));
        assert_eq!(
            v1("responses", &Method::GET, &headers),
            Route::Small(Small::WebSocket)
        );
        assert_eq!(
            v1("responses", &Method::POST, &headers),
            Route::Data(Endpoint::Responses)
        );
        headers.insert(header::UPGRADE, HeaderValue::from_static("h2c"));
        assert_eq!(
            v1("responses", &Method::GET, &headers),
            Route::Small(Small::WrongMethod(EndpointLabel::Responses, "POST, OPTIONS"))
        );
    }
}
