//! The data plane's handler: who asks, for what, within which bounds; then the gate answers.
//!
//! Reads of a body only what routes it (G10); every refusal names its field and happens before a provider is called.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{Method, Request, Response, Version, request};
use http_body::Body;
use http_body_util::BodyExt;
use iop_shared::execution::Endpoint;
use iop_shared::ids::RunId;
use iop_shared::openai::multipart;
use iop_shared::openai::request::{RequestError, affinity_key, inspect};
use iop_shared::wire::headers::client_to_provider;
use tokio::time::Instant;

use super::auth::Caller;
use super::payload;
use super::request_id::RequestId;
use super::server::ConnHandle;
use crate::app::{App, ResponseHome};
use crate::error::{ApiError, ErrorKind};
use crate::gate::{self, Asked, Exchange, GateBody, Payload, RequestGuard, X_IOP_ATTEMPTS};
use crate::pool::{Affinity, Model};
use crate::tasks;

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const DRAIN_RETRY_AFTER: Duration = Duration::from_secs(1);
/// How long the rest of a refused upload is read and thrown away.
const LINGER: Duration = Duration::from_secs(5);

/// Answers one `/v1` request whose path belongs to `endpoint`. `path` is what follows `/v1/`, with its query.
pub(crate) async fn handle<B>(
    app: Arc<App>,
    endpoint: Endpoint,
    id: RequestId,
    request: Request<B>,
) -> Response<GateBody>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    let mut guard = RequestGuard::new(app.metrics.clone(), endpoint.into(), id.clone(), Instant::now());
    let (parts, mut body) = request.into_parts();
    let version = parts.version;
    let waits_for_a_word = parts.headers.contains_key(header::EXPECT);
    match admit(&app, endpoint, &id, parts, &mut body).await {
        Ok(admitted) => {
            guard.hold(admitted.concurrency);
            let write_timeout = app.settings.gate.client_write_timeout;
            let response = gate::serve(Exchange::new(app, admitted.asked, guard)).await;
            if version < Version::HTTP_2 {
                return response;
            }
            // One connection carries many streams, so a blocked socket does not tell of one that nobody reads.
            response.map(|body| body.pumped(write_timeout))
        }
        Err(error) => {
            if !waits_for_a_word {
                linger(body);
            }
            refuse(error, guard)
        }
    }
}

/// A client that is still uploading reads its refusal only if its bytes are taken meanwhile; else the kernel resets the
/// connection and the refusal with it. Bounded in time, and by the connection's own end.
pub(super) fn linger<B>(mut body: B)
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    if body.is_end_stream() {
        return;
    }
    tasks::spawn(tasks::Kind::Session, "linger", async move {
        let _ = tokio::time::timeout(LINGER, async { while let Some(Ok(_)) = body.frame().await {} }).await;
    });
}

fn refuse(error: ApiError, guard: RequestGuard) -> Response<GateBody> {
    let outcome = error.kind.outcome();
    let mut response = error
        .into_response::<Bytes>()
        .map(|body| GateBody::full(body, guard, outcome));
    response
        .headers_mut()
        .insert(X_IOP_ATTEMPTS, HeaderValue::from_static("0"));
    response
}

/// A request that may go to a provider, and the place of its key, held until it has ended.
struct Admitted {
    asked: Box<Asked>,
    concurrency: super::auth::ConcurrencyGuard,
}

async fn admit<B>(
    app: &App,
    endpoint: Endpoint,
    id: &RequestId,
    mut parts: request::Parts,
    body: &mut B,
) -> Result<Admitted, ApiError>
where
    B: Body<Data = Bytes> + Unpin,
{
    if app.drain.is_draining() {
        return Err(
            ApiError::new(ErrorKind::Draining, "This gateway is shutting down; try another.")
                .with_retry_after(DRAIN_RETRY_AFTER),
        );
    }
    let caller = app.keys.authenticate(&parts.headers)?;
    caller.require(super::auth::Role::Inference)?;
    let concurrency = caller.begin()?;
    let conn = parts.extensions.remove::<ConnHandle>();
    let path = below_v1(&parts.uri, endpoint);
    let stored = stored_response_id(&parts.uri);
    let accept_encoding = parts.headers.remove(header::ACCEPT_ENCODING);

    let (bytes, reservation) = if parts.method == Method::POST {
        let (bytes, held) = payload::read(
            &parts.headers,
            body,
            app.settings.server.body_limit,
            app.settings.gate.client_write_timeout,
            &app.body_memory,
        )
        .await?;
        (bytes, Some(held))
    } else {
        (Bytes::new(), None)
    };

    let content_type = parts
        .headers
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default();
    let mut routed = if stored.is_some() {
        Routed {
            payload: passive(bytes),
            model: None,
            stream: asks_for_stream(&parts.uri),
            choices: 1,
            wants_usage: true,
            state_of: stored.clone(),
        }
    } else if content_type
        .trim_start()
        .to_ascii_lowercase()
        .starts_with("multipart/form-data")
    {
        let facts = multipart::inspect(content_type, &bytes).map_err(invalid)?;
        let (model, stream) = (facts.model().to_owned(), facts.stream());
        Routed {
            payload: Payload::Multipart { body: bytes, facts },
            model: Some(model),
            stream,
            choices: 1,
            wants_usage: true,
            state_of: None,
        }
    } else {
        let facts = inspect(&bytes).map_err(invalid)?;
        Routed {
            model: Some(facts.model().to_owned()),
            stream: facts.stream(),
            choices: facts.choices(),
            wants_usage: facts.include_usage(),
            state_of: facts.state_id().map(str::to_owned),
            payload: Payload::Json { body: bytes, facts },
        }
    };

    // State made under a model that this key may not use is as good as unknown to it.
    let state_id = routed.state_of.take();
    let home = state_id
        .as_deref()
        .and_then(|id| app.response_home(id))
        .filter(|h| caller.may_use(&h.model));
    let (model, pinned) = match (routed.model, home) {
        (Some(name), Some(home)) => {
            let model = resolve(app, &caller, &name)?;
            let target = target_at(&model, &home)?;
            (model, Some((home.provider, target)))
        }
        (Some(name), None) => (resolve(app, &caller, &name)?, None),
        (None, home) => {
            let model = home_model(app, &caller, endpoint, home.as_ref())?;
            (model, home.map(|h| (h.provider, h.target)))
        }
    };
    let affinity = affinity(endpoint, &model, &routed.payload);
    let mut headers = parts.headers;
    client_to_provider(&mut headers);
    headers.insert(X_REQUEST_ID, id.header());
    let asked = Box::new(Asked {
        endpoint,
        method: parts.method,
        path,
        model,
        pinned,
        headers,
        accept_encoding,
        payload: routed.payload,
        stream: routed.stream,
        choices: routed.choices,
        wants_usage: routed.wants_usage,
        makes_state: stored.is_none(),
        state_id,
        _held: reservation,
        run_id: RunId(uuid::Uuid::now_v7()),
        who: caller.who(),
        affinity,
        conn,
    });
    Ok(Admitted { asked, concurrency })
}

struct Routed {
    payload: Payload,
    model: Option<String>,
    stream: bool,
    choices: u32,
    wants_usage: bool,
    /// A response id whose state this request needs.
    state_of: Option<String>,
}

/// What the request has in common with others of its conversation, where its model wants them at one provider (G30).
fn affinity(endpoint: Endpoint, model: &Model, payload: &Payload) -> Option<u64> {
    match (model.affinity, endpoint, payload) {
        (Affinity::Prefix, Endpoint::Chat | Endpoint::Responses, Payload::Json { body, facts }) => {
            affinity_key(facts, body)
        }
        _ => None,
    }
}

/// A stored-response verb has no model; a body that comes with it travels unread.
fn passive(bytes: Bytes) -> Payload {
    if bytes.is_empty() {
        Payload::Empty
    } else {
        Payload::Opaque(bytes)
    }
}

fn invalid(error: RequestError) -> ApiError {
    let e = ApiError::new(ErrorKind::InvalidRequest, error.message);
    match error.param {
        Some(param) => e.with_param(param),
        None => e,
    }
}

fn resolve(app: &App, caller: &Caller, name: &str) -> Result<Arc<Model>, ApiError> {
    if !caller.may_use(name) {
        return Err(
            ApiError::new(ErrorKind::PermissionDenied, "This key may not use this model.")
                .with_param("model"),
        );
    }
    app.pool.resolve(name).ok_or_else(|| {
        ApiError::new(
            ErrorKind::ModelNotFound,
            Cow::Owned(format!("The model `{}` does not exist.", shown(name))),
        )
        .with_param("model")
    })
}

/// What the provider that holds a response's state calls the model now asked for.
fn target_at(model: &Model, home: &ResponseHome) -> Result<Arc<str>, ApiError> {
    if model.name == home.model {
        return Ok(home.target.clone());
    }
    let there = model.candidates.iter().find(|c| c.provider == home.provider);
    there.map(|c| c.target.clone()).ok_or_else(|| {
        ApiError::invalid(
            "model",
            "The state this request goes on from is held by a provider that does not serve this model.",
        )
    })
}

/// The model under which a stored response is asked for again; where its home is unknown, the chosen provider decides.
fn home_model(
    app: &App,
    caller: &Caller,
    endpoint: Endpoint,
    home: Option<&ResponseHome>,
) -> Result<Arc<Model>, ApiError> {
    match home {
        Some(home) => app.pool.resolve(&home.model),
        None => app.pool.serving(endpoint, |name| caller.may_use(name)),
    }
    .ok_or_else(|| ApiError::new(ErrorKind::NotFound, "No provider that stores responses is known."))
}

/// `?stream=true` on a stored response.
fn asks_for_stream(uri: &http::Uri) -> bool {
    uri.query()
        .is_some_and(|q| q.split('&').any(|p| p == "stream=true"))
}

/// A client's model name as an error may repeat it: bounded.
fn shown(name: &str) -> &str {
    let mut end = name.len().min(200);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

/// Path and query below `/v1/`, unless it is the endpoint's own.
fn below_v1(uri: &http::Uri, endpoint: Endpoint) -> Option<String> {
    let whole = uri.path_and_query().map_or("", http::uri::PathAndQuery::as_str);
    let below = whole.strip_prefix("/v1/")?;
    (below != endpoint.path()).then(|| below.to_owned())
}

/// The id in `/v1/responses/{id}` and below.
fn stored_response_id(uri: &http::Uri) -> Option<String> {
    let rest = uri.path().strip_prefix("/v1/responses/")?;
    let id = rest.split('/').next()?;
    Some(id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_foreign_path_travels() {
        for (uri, endpoint, want) in [
            ("/v1/chat/completions", Endpoint::Chat, None),
            (
                "/v1/chat/completions?a=b",
                Endpoint::Chat,
                Some("chat/completions?a=b"),
            ),
            (
                "/v1/responses/resp_1/input_items",
                Endpoint::Responses,
                Some("responses/resp_1/input_items"),
            ),
            (
                "/v1/audio/transcriptions",
                Endpoint::Audio,
                Some("audio/transcriptions"),
            ),
            ("/v1/audio/speech", Endpoint::Audio, None),
        ] {
            assert_eq!(
                below_v1(&uri.parse().unwrap(), endpoint).as_deref(),
                want,
                "{uri}"
            );
        }
        assert_eq!(
            stored_response_id(&"/v1/responses/resp_1/cancel".parse().unwrap()).as_deref(),
            Some("resp_1")
        );
        assert_eq!(stored_response_id(&"/v1/responses".parse().unwrap()), None);
    }

    #[test]
    fn a_long_name_is_shown_in_part_and_never_cut_inside_a_character() {
        let name = "é".repeat(300);
        assert_eq!(shown(&name).len(), 200);
        assert_eq!(shown("short"), "short");
    }
}
