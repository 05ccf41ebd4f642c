//! What of a request routes it, whoever asks: a client over HTTP or a turn of a run.
//!
//! Reads of a body only what it needs (G10). What a key may use is checked here and nowhere else.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Method};
use iop_shared::execution::Endpoint;
use iop_shared::ids::RunId;
use iop_shared::openai::multipart;
use iop_shared::openai::request::{RequestError, affinity_key, inspect};

use super::auth::Caller;
use crate::app::App;
use crate::error::{ApiError, ErrorKind};
use crate::gate::{Asked, Origin, Payload};
use crate::pool::{Affinity, Model};

/// A body and what it says of where it goes.
pub(crate) struct Routed {
    pub(crate) payload: Payload,
    /// `None`: a verb on a stored response names no model.
    pub(crate) model: Option<String>,
    pub(crate) stream: bool,
    pub(crate) choices: u32,
    pub(crate) wants_usage: bool,
    /// A response id whose state this request needs.
    pub(crate) state_of: Option<String>,
}

impl Routed {
    /// # Errors
    /// `invalid_request_error`, naming the member.
    pub(crate) fn json(body: Bytes) -> Result<Self, ApiError> {
        let facts = inspect(&body).map_err(invalid)?;
        Ok(Self {
            model: Some(facts.model().to_owned()),
            stream: facts.stream(),
            choices: facts.choices(),
            wants_usage: facts.include_usage(),
            state_of: facts.state_id().map(str::to_owned),
            payload: Payload::Json { body, facts },
        })
    }

    /// # Errors
    /// `invalid_request_error`, naming the part.
    pub(crate) fn multipart(content_type: &str, body: Bytes) -> Result<Self, ApiError> {
        let facts = multipart::inspect(content_type, &body).map_err(invalid)?;
        Ok(Self {
            model: Some(facts.model().to_owned()),
            stream: facts.stream(),
            choices: 1,
            wants_usage: true,
            state_of: None,
            payload: Payload::Multipart { body, facts },
        })
    }

    /// A verb on a stored response; a body that comes with it travels unread.
    pub(crate) fn stored(id: String, stream: bool, body: Bytes) -> Self {
        Self {
            payload: if body.is_empty() {
                Payload::Empty
            } else {
                Payload::Opaque(body)
            },
            model: None,
            stream,
            choices: 1,
            wants_usage: true,
            state_of: Some(id),
        }
    }

    /// The body as it came; empty for what is no JSON.
    pub(crate) fn body(&self) -> Bytes {
        match &self.payload {
            Payload::Json { body, .. } => body.clone(),
            Payload::Multipart { .. } | Payload::Opaque(_) | Payload::Empty => Bytes::new(),
        }
    }

    /// What the gate is asked: a `POST` to the endpoint's own path that makes a new answer, until the caller says otherwise.
    /// `headers`: as a provider may see them.
    pub(crate) fn asked(
        self,
        origin: Origin,
        endpoint: Endpoint,
        model: Arc<Model>,
        headers: HeaderMap,
        caller: &Caller,
    ) -> Box<Asked> {
        Box::new(Asked {
            origin,
            endpoint,
            method: Method::POST,
            path: None,
            pinned: None,
            headers,
            accept_encoding: None,
            affinity: affinity(endpoint, &model, &self.payload),
            model,
            payload: self.payload,
            stream: self.stream,
            choices: self.choices,
            wants_usage: self.wants_usage,
            makes_state: true,
            state_id: None,
            held: None,
            run_id: RunId(uuid::Uuid::now_v7()),
            who: caller.who(),
            conn: None,
        })
    }
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

fn invalid(error: RequestError) -> ApiError {
    let e = ApiError::new(ErrorKind::InvalidRequest, error.message);
    match error.param {
        Some(param) => e.with_param(param),
        None => e,
    }
}

/// The model of that name, if this caller may use it.
///
/// # Errors
/// `permission_denied`, `model_not_found`.
pub(crate) fn resolve(app: &App, caller: &Caller, name: &str) -> Result<Arc<Model>, ApiError> {
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

/// A model name as an error may repeat it: bounded.
fn shown(name: &str) -> &str {
    let mut end = name.len().min(200);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_is_shown_in_part_and_never_cut_inside_a_character() {
        let name = "é".repeat(300);
        assert_eq!(shown(&name).len(), 200);
        assert_eq!(shown("short"), "short");
    }
}
