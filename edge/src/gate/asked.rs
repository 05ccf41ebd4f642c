//! What one request asks for, and what of it a provider is sent. Kept until commit, so that it can be sent again.

use std::sync::Arc;

use bytes::Bytes;
use http::Method;
use http::header::{HeaderMap, HeaderValue};
use iop_shared::execution::Endpoint;
use iop_shared::ids::{AttemptId, ProviderKey, RunId};
use iop_shared::openai::event::Dialect;
use iop_shared::openai::multipart::{self, MultipartFacts};
use iop_shared::openai::request::{RequestFacts, SplicedBody, replay_safe, splice};
use iop_shared::wire::event::RunRequest;
use iop_shared::wire::tunnel::TunnelHead;

use super::head::Wanted;
use super::normalized::{Renderer, run_request};
use crate::error::ApiError;
use crate::http::payload::Reservation;
use crate::http::server::ConnHandle;
use crate::pool::{Lease, Model, Who};

/// The client's body.
pub(crate) enum Payload {
    Json {
        body: Bytes,
        facts: RequestFacts,
    },
    Multipart {
        body: Bytes,
        facts: MultipartFacts,
    },
    /// Sent on unread.
    Opaque(Bytes),
    /// `GET` and `DELETE`.
    Empty,
}

/// Who asks. A client at a socket is kept company while it waits; whoever asks owns what may follow a provider's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Over HTTP. The gate is the one that repeats its request.
    Client,
    /// A turn of a run, which has a retry of its own (durable-api §8).
    Run,
}

/// What one request asks for.
pub(crate) struct Asked {
    pub(crate) origin: Origin,
    pub(crate) endpoint: Endpoint,
    pub(crate) method: Method,
    /// Path and query below `/v1/` where it is not the endpoint's own.
    pub(crate) path: Option<String>,
    pub(crate) model: Arc<Model>,
    /// State of this request lives at this provider only (gateway.md §13).
    pub(crate) pinned: Option<(ProviderKey, Arc<str>)>,
    /// The client's end-to-end headers as a provider may see them.
    pub(crate) headers: HeaderMap,
    pub(crate) accept_encoding: Option<HeaderValue>,
    pub(crate) payload: Payload,
    /// The body asked for a stream.
    pub(crate) stream: bool,
    /// Choices asked for.
    pub(crate) choices: u32,
    /// The client asked for the usage chunk itself.
    pub(crate) wants_usage: bool,
    /// Its answer is new: tokens are counted and its id is remembered. A stored response that is asked for again is not.
    pub(crate) makes_state: bool,
    /// The response or conversation that this request goes on from.
    pub(crate) state_id: Option<String>,
    /// The body's part of the memory for bodies, given back with it.
    pub(crate) held: Option<Reservation>,
    pub(crate) run_id: RunId,
    pub(crate) who: Who,
    /// What its prompt has in common with others, where its model wants that (G30).
    pub(crate) affinity: Option<u64>,
    pub(crate) conn: Option<ConnHandle>,
}

impl Asked {
    pub(super) fn dialect(&self) -> Dialect {
        match self.endpoint {
            Endpoint::Chat => Dialect::Chat,
            Endpoint::Completions => Dialect::Completions,
            Endpoint::Responses => Dialect::Responses,
            Endpoint::Embeddings
            | Endpoint::Rerank
            | Endpoint::Moderations
            | Endpoint::Images
            | Endpoint::Audio => Dialect::Other,
        }
    }

    /// The form of answer that it can read. A turn of a run has no use for the pieces but to show them.
    pub(super) fn wanted(&self) -> Wanted {
        match (self.stream, self.origin) {
            (false, _) => Wanted::Whole,
            (true, Origin::Client) => Wanted::Stream,
            (true, Origin::Run) => Wanted::Either,
        }
    }

    /// Usage is counted on every stream; where the client did not ask, the gateway asks and hides the answer (G14).
    pub(super) fn injects_usage(&self) -> bool {
        self.stream && !self.wants_usage && matches!(self.endpoint, Endpoint::Chat | Endpoint::Completions)
    }

    /// Whether sending it twice could do something twice (G55). Verbs on stored responses live where they are.
    pub(super) fn replay_safe(&self) -> bool {
        match &self.payload {
            Payload::Json { body, facts } => replay_safe(facts, body),
            Payload::Multipart { .. } => true,
            Payload::Opaque(_) | Payload::Empty => false,
        }
    }

    /// Bytes that a replay would need.
    pub(super) fn snapshot_bytes(&self) -> usize {
        match &self.payload {
            Payload::Json { body, .. } | Payload::Multipart { body, .. } | Payload::Opaque(body) => {
                body.len()
            }
            Payload::Empty => 0,
        }
    }

    /// What the leased provider is sent.
    pub(super) fn tunnel(&self, lease: &Lease, attempt_id: AttemptId) -> (TunnelHead, SplicedBody) {
        let target = lease.target();
        let body = match &self.payload {
            Payload::Json { body, facts } => splice(body, facts, target, self.injects_usage()),
            Payload::Multipart { body, facts } => multipart::splice(body, facts, target),
            Payload::Opaque(body) => SplicedBody::whole(body.clone()),
            Payload::Empty => SplicedBody::whole(Bytes::new()),
        };
        let head = TunnelHead {
            endpoint: self.endpoint,
            run_id: self.run_id,
            attempt_id,
            provider: lease.provider_id().clone(),
            target: target.to_string(),
            response_stall_timeout_ms: stall_timeout_ms(lease),
            method: self.method.clone(),
            path: self.path.clone(),
            accept_encoding: self.accept_encoding.clone(),
        };
        (head, body)
    }
}

impl Asked {
    /// The same for a target of the normalized path, and what makes a native answer of its events.
    ///
    /// # Errors
    /// What a run cannot carry, naming the field.
    pub(super) fn run(
        &self,
        lease: &Lease,
        attempt_id: AttemptId,
    ) -> Result<(RunRequest, Renderer), ApiError> {
        let body = match &self.payload {
            Payload::Json { body, .. } | Payload::Multipart { body, .. } | Payload::Opaque(body) => &body[..],
            Payload::Empty => &[],
        };
        let (endpoint, provider, target) = (self.endpoint, lease.provider_id(), lease.target());
        let request = run_request(
            endpoint,
            body,
            self.run_id,
            attempt_id,
            provider,
            target,
            stall_timeout_ms(lease),
        )?;
        let usage = self.wants_usage || self.injects_usage();
        let created = jiff::Timestamp::now().as_second();
        let renderer = Renderer::new(endpoint, self.stream, usage, target, attempt_id.0, created);
        Ok((request, renderer))
    }
}

fn stall_timeout_ms(lease: &Lease) -> i64 {
    i64::try_from(lease.stall_timeout().as_millis()).unwrap_or(i64::MAX)
}
