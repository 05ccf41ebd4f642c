//! `POST /link/v1/commands/{…}`: a closed allow-list, checked before any provider is looked up (004, G46).

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Limited};
use iop_shared::execution::FailureCode;
use iop_shared::wire::command::{CapabilitiesResult, Command, CommandRequest, TransportStatusResult};
use iop_shared::wire::terminal::NodeError;
use serde::Serialize;

use super::body::{ResponseBody, json, json_error};
use super::scope::Scope;
use super::{BoxError, Inner};
use crate::probe;
use crate::providers::Backend;
use crate::providers::registry::Slot;

/// Far above any command; an id, a target and a path.
const MAX_BODY: usize = 16 << 10;

pub(super) async fn handle<B>(node: &Inner, scope: &Scope, path: &str, body: B) -> Response<ResponseBody>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let Some(command) = Command::of_path(path) else {
        return json_error(
            StatusCode::NOT_FOUND,
            "unknown_command",
            "the node has no such command",
        );
    };
    let Ok(body) = Limited::new(body, MAX_BODY).collect().await else {
        return json_error(
            StatusCode::BAD_REQUEST,
            "invalid_request",
            "the command's body cannot be read",
        );
    };
    let request: CommandRequest = match serde_json::from_slice(&body.to_bytes()) {
        Ok(request) => request,
        Err(_) => {
            return json_error(
                StatusCode::BAD_REQUEST,
                "invalid_request",
                "the command's body is no command request",
            );
        }
    };
    let slot = match node.registry.find(&request.provider) {
        Ok(slot) => slot,
        Err(e) => return refused(&e),
    };
    match command {
        Command::TransportStatus => answer(&TransportStatusResult {
            adapter_key: slot.id.to_string(),
            in_flight: slot.in_flight(),
            capacity: slot.capacity,
            draining: node.is_draining(),
        }),
        Command::Capabilities => capabilities(slot, scope, request.target).await,
        Command::OllamaApi => ollama(slot, request.path.as_deref()).await,
    }
}

async fn capabilities(slot: &Slot, scope: &Scope, target: Option<String>) -> Response<ResponseBody> {
    let Some(target) = target else {
        return json_error(
            StatusCode::BAD_REQUEST,
            "invalid_request",
            "capabilities needs a target",
        );
    };
    let outcome = probe::health(slot, &target).await;
    // Numbered when final, so that the order of numbers is the order of knowledge.
    let health_observation_seq = scope.next_observation();
    answer(&CapabilitiesResult {
        adapter_key: slot.id.to_string(),
        target,
        provider_status: outcome.health(),
        health_observation_seq,
    })
}

async fn ollama(slot: &Slot, path: Option<&str>) -> Response<ResponseBody> {
    let Backend::Http(provider) = &slot.backend else {
        return json_error(
            StatusCode::BAD_REQUEST,
            "invalid_request",
            "the provider's adapter is not ollama",
        );
    };
    match provider.ollama_get(path.unwrap_or_default()).await {
        Ok((status, body)) => json(status, body),
        Err(e) => refused(&e),
    }
}

fn answer(result: &impl Serialize) -> Response<ResponseBody> {
    match serde_json::to_vec(result) {
        Ok(body) => json(StatusCode::OK, Bytes::from(body)),
        Err(_) => json_error(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "the result cannot be written",
        ),
    }
}

fn refused(e: &NodeError) -> Response<ResponseBody> {
    let status = match e.code {
        FailureCode::ProviderMissing | FailureCode::TargetMissing => StatusCode::NOT_FOUND,
        FailureCode::InvalidRequest => StatusCode::BAD_REQUEST,
        FailureCode::Capacity | FailureCode::Draining | FailureCode::ProviderUnavailable => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        FailureCode::ConnectFailed | FailureCode::ProviderCut => StatusCode::BAD_GATEWAY,
        FailureCode::ResponseStalled => StatusCode::GATEWAY_TIMEOUT,
        FailureCode::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    };
    json_error(status, e.code.as_str(), &e.message)
}
