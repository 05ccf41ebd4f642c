//! The data plane's handler: who asks, for what, within which bounds; then the gate answers.
//!
//! Reads of a body only what routes it (G10); every refusal names its field and happens before a provider is called.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, Version, request};
use http_body::Body;
use http_body_util::BodyExt;
use iop_shared::execution::Endpoint;
use iop_shared::wire::headers::client_to_provider;
use tokio::time::Instant;

use super::agent_models;
use super::auth::{Caller, Role};
use super::payload;
use super::request_id::{RequestId, X_REQUEST_ID};
use super::route::{Routed, resolve};
use super::server::ConnHandle;
use crate::app::{App, ResponseHome};
use crate::error::{ApiError, ErrorKind};
use crate::gate::{self, Asked, Exchange, GateBody, Origin, RequestGuard, X_IOP_ATTEMPTS};
use crate::pool::Model;
use crate::tasks;

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
            let write_timeout = app.settings.gate.client_write_timeout;
            let response = match admitted {
                Admitted::Provider { asked, concurrency } => {
                    guard.hold(concurrency);
                    gate::serve(Exchange::new(app, asked, guard)).await
                }
                // Boxed: requests of providers do not carry its size.
                Admitted::Agent(ask) => Box::pin(agent_models::serve(&app, *ask, guard)).await,
            };
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

/// A request that may be answered.
enum Admitted {
    /// By a provider; the place of its key is held until it has ended.
    Provider {
        asked: Box<Asked>,
        concurrency: super::auth::ConcurrencyGuard,
    },
    /// By an agent: the turns of its run take the places of its key.
    Agent(Box<agent_models::Ask>),
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
    // An operator may decide in a response of an agent's run (durable-api §9): which request does that shows its body.
    if endpoint != Endpoint::Responses || !caller.has(Role::Operator) {
        caller.require(Role::Inference)?;
    }
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
    let mut routed = if let Some(id) = &stored {
        Routed::stored(id.clone(), asks_for_stream(&parts.uri), bytes)
    } else if content_type
        .trim_start()
        .to_ascii_lowercase()
        .starts_with("multipart/form-data")
    {
        Routed::multipart(content_type, bytes)?
    } else {
        Routed::json(bytes)?
    };

    let (model, response) = (routed.model.as_deref(), routed.state_of.as_deref());
    if agent_models::may_be(app, endpoint, model, response) {
        let mut ask = Box::new(agent_models::Ask {
            caller: caller.clone(),
            endpoint,
            method: parts.method.clone(),
            uri: parts.uri.clone(),
            headers: parts.headers.clone(),
            body: routed.body(),
            model: routed.model.clone(),
            stream: routed.stream,
            include_usage: routed.wants_usage,
            response: routed.state_of.clone(),
            held: None,
        });
        if Box::pin(ask.is_ours(app)).await {
            ask.held = reservation;
            return Ok(Admitted::Agent(ask));
        }
    }
    caller.require(Role::Inference)?;

    // State made under a model that this key may not use is as good as unknown to it.
    let state_id = routed.state_of.take();
    let home = state_id
        .as_deref()
        .and_then(|id| app.response_home(id))
        .filter(|h| caller.may_use(&h.model));
    let (model, pinned) = match (routed.model.take(), home) {
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
    let mut headers = parts.headers;
    client_to_provider(&mut headers);
    headers.insert(X_REQUEST_ID, id.header());
    let asked = Box::new(Asked {
        method: parts.method,
        path,
        pinned,
        accept_encoding,
        makes_state: stored.is_none(),
        state_id,
        held: reservation,
        conn,
        ..*routed.asked(Origin::Client, endpoint, model, headers, &caller)
    });
    Ok(Admitted::Provider { asked, concurrency })
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
}
