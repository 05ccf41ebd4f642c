//! One client request on its way: acquire a lease, dispatch, hold until there is something to answer.
//!
//! Every attempt of every `/v1` request goes through `Exchange::run`; the decision what follows a failed attempt
//! stands in `Exchange::after`. Dropping the future drops the lease, the node's stream and the provider's connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, StatusCode};
use iop_shared::execution::{AttemptResult, Endpoint, FailureCode, Outcome};
use iop_shared::ids::{AttemptId, ProviderKey, RunId};
use iop_shared::openai::event::{Dialect, leading_response_id, response_id};
use iop_shared::openai::multipart::{self, MultipartFacts};
use iop_shared::openai::request::{RequestFacts, SplicedBody, splice};
use iop_shared::openai::usage::usage_from_body;
use iop_shared::wire::headers as wire_headers;
use iop_shared::wire::tunnel::TunnelHead;

use super::failure::{Failure, in_band_status, is_retryable, result_of_status};
use super::guard::{AttemptGuard, RequestGuard};
use super::head;
use super::relay::{Relay, Step};
use super::source::{Pulled, Source};
use crate::app::App;
use crate::error::{ApiError, ErrorKind};
use crate::http::payload::Reservation;
use crate::http::server::ConnHandle;
use crate::metrics::UsageCompleteness;
use crate::pool::{Ask, Lease, Model, Refused, Who};

/// `Retry-After` of a full or timed-out queue.
const BUSY_RETRY_AFTER: Duration = Duration::from_secs(1);
/// `Retry-After` where no provider is there at all.
const ABSENT_RETRY_AFTER: Duration = Duration::from_secs(5);

/// The client's body, kept until commit so that it can be sent again.
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

/// What one client request asks for.
pub(crate) struct Asked {
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
    pub(crate) _held: Option<Reservation>,
    pub(crate) run_id: RunId,
    pub(crate) who: Who,
    /// What its prompt has in common with others, where its model wants that (G30).
    pub(crate) affinity: Option<u64>,
    pub(crate) conn: Option<ConnHandle>,
}

/// One client request on its way. What was asked is boxed: futures are moved, and what they hold moves with them.
pub(crate) struct Exchange {
    pub(super) app: Arc<App>,
    asked: Box<Asked>,
    guard: RequestGuard,
    attempts: Attempts,
}

/// Attempts made so far, seen also by a keep-alive opening (G53).
#[derive(Clone, Default)]
pub(crate) struct Attempts(Arc<AtomicU32>);

impl Attempts {
    pub(crate) fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    fn begin(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// A refusal for want of room was no attempt (gateway.md §13, Budgets).
    fn take_back(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One dispatch that has a provider's head.
pub(crate) struct Attempt {
    pub(crate) source: Source,
    pub(crate) guard: AttemptGuard,
    pub(crate) lease: Lease,
}

/// What a request came to.
pub(crate) enum Answer {
    /// A committed stream.
    Stream {
        head: head::Head,
        relay: Box<Relay>,
        attempt: Attempt,
    },
    /// A complete body.
    Whole {
        head: head::Head,
        body: Bytes,
    },
    /// A body too large to hold: what was read, and the rest.
    Long {
        head: head::Head,
        prefix: Bytes,
        attempt: Attempt,
    },
    /// The provider's own error object with the status it stands for.
    InBand {
        status: StatusCode,
        object: Bytes,
    },
    Own(ApiError),
}

/// An answer and what it takes to finish it.
pub(crate) struct Ended {
    pub(crate) answer: Answer,
    pub(crate) guard: RequestGuard,
    pub(crate) attempts: u32,
    pub(crate) dialect: Dialect,
}

impl Asked {
    fn dialect(&self) -> Dialect {
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

    /// Usage is counted on every stream; where the client did not ask, the gateway asks and hides the answer (G14).
    fn injects_usage(&self) -> bool {
        self.stream && !self.wants_usage && matches!(self.endpoint, Endpoint::Chat | Endpoint::Completions)
    }
}

impl Exchange {
    pub(crate) fn new(app: Arc<App>, asked: Box<Asked>, guard: RequestGuard) -> Self {
        Self {
            app,
            asked,
            guard,
            attempts: Attempts::default(),
        }
    }

    pub(super) fn is_stream(&self) -> bool {
        self.asked.stream
    }

    pub(super) fn attempts(&self) -> Attempts {
        self.attempts.clone()
    }

    /// Runs the request to an answer.
    pub(crate) async fn run(mut self) -> Ended {
        let answer = self.answer().await;
        Ended {
            answer,
            dialect: self.asked.dialect(),
            guard: self.guard,
            attempts: self.attempts.get(),
        }
    }

    async fn answer(&mut self) -> Answer {
        let mut since = None;
        loop {
            let asked_at = Instant::now();
            let ask = Ask {
                model: &self.asked.model,
                endpoint: self.asked.endpoint,
                pinned: self.asked.pinned.as_ref(),
                since,
                who: &self.asked.who,
                affinity: self.asked.affinity,
                avoid: &[],
                allow_avoided: false,
            };
            let lease = match self.app.pool.acquire(ask).await {
                Ok(lease) => lease,
                Err(refused) => return Answer::Own(refusal(refused)),
            };
            match self.attempt(lease).await {
                Ok(answer) => return answer,
                Err(failure) => {
                    if let Some(answer) = self.after(failure) {
                        return answer;
                    }
                    since.get_or_insert(asked_at);
                }
            }
        }
    }

    /// What follows a failed attempt: an answer, or `None` for another. A refusal for want of room queues again; every
    /// other failure is answered.
    fn after(&mut self, failure: Failure) -> Option<Answer> {
        match failure {
            Failure::Refused(FailureCode::Capacity | FailureCode::Draining) => {
                self.attempts.take_back();
                None
            }
            // A refused credential is the gateway's own affair, and the provider's text may show a part of it (G11).
            Failure::InBand(error) if error.status == Some(StatusCode::UNAUTHORIZED.as_u16()) => {
                let refused = Failure::unusable(
                    "The provider refused the gateway's credential.",
                    StatusCode::UNAUTHORIZED,
                );
                Some(Answer::Own(refused.into_error()))
            }
            Failure::InBand(error) => Some(Answer::InBand {
                status: in_band_status(&error),
                object: error.raw,
            }),
            other @ (Failure::Own { .. } | Failure::Refused(_)) => Some(Answer::Own(other.into_error())),
        }
    }

    async fn attempt(&mut self, lease: Lease) -> Result<Answer, Failure> {
        self.attempts.begin();
        let mut guard = AttemptGuard::new(self.app.metrics.clone(), self.asked.makes_state);
        match self.dispatch(&lease).await {
            Ok((head, source)) => self.read(head, Attempt { source, guard, lease }).await,
            Err(failure) => {
                guard.settle(failure.result());
                if matches!(failure, Failure::Refused(_)) {
                    lease.refused();
                }
                Err(failure)
            }
        }
    }

    async fn dispatch(&self, lease: &Lease) -> Result<(head::Head, Source), Failure> {
        let (head, body) = self.tunnel(lease);
        let headers = self.asked.headers.clone();
        let response = lease
            .session()
            .tunnel(head, headers, body)
            .await
            .map_err(|_| Failure::node_lost())?;
        let (parts, body) = response.into_parts();
        let mut source = Source::new(body);
        if parts.headers.get(wire_headers::ORIGIN) == Some(&wire_headers::ORIGIN_PROVIDER) {
            return Ok((head::Head::of_provider(parts), source));
        }
        // The node answered itself: an empty body and the reason in its terminal.
        loop {
            match source.pull().await {
                Pulled::Data(_) => {}
                Pulled::Failed(error) => return Err(Failure::of_node(&error)),
                Pulled::Complete | Pulled::Lost => return Err(Failure::node_lost()),
            }
        }
    }

    fn tunnel(&self, lease: &Lease) -> (TunnelHead, SplicedBody) {
        let (asked, target) = (&*self.asked, lease.target());
        let body = match &asked.payload {
            Payload::Json { body, facts } => splice(body, facts, target, asked.injects_usage()),
            Payload::Multipart { body, facts } => multipart::splice(body, facts, target),
            Payload::Opaque(body) => SplicedBody::whole(body.clone()),
            Payload::Empty => SplicedBody::whole(Bytes::new()),
        };
        let head = TunnelHead {
            endpoint: asked.endpoint,
            run_id: asked.run_id,
            attempt_id: AttemptId(uuid::Uuid::now_v7()),
            provider: lease.provider_id().clone(),
            target: target.to_string(),
            response_stall_timeout_ms: i64::try_from(lease.stall_timeout().as_millis()).unwrap_or(i64::MAX),
            method: asked.method.clone(),
            path: asked.path.clone(),
            accept_encoding: asked.accept_encoding.clone(),
        };
        (head, body)
    }

    async fn read(&mut self, head: head::Head, mut attempt: Attempt) -> Result<Answer, Failure> {
        if let Some(conn) = &self.asked.conn {
            conn.limit_write_stall(attempt.lease.stall_timeout() / 2);
        }
        let read = match head::judge(
            &head,
            self.asked.endpoint,
            self.asked.stream,
            self.asked.accept_encoding.as_ref(),
        ) {
            head::Shape::Unusable(why) => Err(Failure::unusable(why, head.status)),
            head::Shape::Events => self
                .read_stream(head, &mut attempt)
                .await
                .map(|(head, relay)| (head, Read::Stream(relay))),
            head::Shape::Whole { json } => self.read_whole(head, json, &mut attempt).await,
        };
        match read {
            Ok((head, Read::Stream(relay))) => Ok(Answer::Stream { head, relay, attempt }),
            Ok((head, Read::Long(prefix))) => Ok(Answer::Long {
                head,
                prefix,
                attempt,
            }),
            Ok((head, Read::Whole(body))) => Ok(Answer::Whole { head, body }),
            Err(failure) => {
                attempt.guard.settle(failure.result());
                Err(failure)
            }
        }
    }

    /// Holds a stream until content arrives (G52).
    async fn read_stream(
        &mut self,
        head: head::Head,
        attempt: &mut Attempt,
    ) -> Result<(head::Head, Box<Relay>), Failure> {
        let mut relay = Box::new(Relay::new(
            self.asked.dialect(),
            self.asked.choices,
            self.asked.injects_usage(),
            self.app.settings.gate.hold_bytes,
        ));
        loop {
            match attempt.source.pull().await {
                Pulled::Data(chunk) => match relay.feed(&chunk) {
                    Step::Hold => {}
                    Step::Fail(refusal) => return Err(Failure::of_refusal(refusal)),
                    Step::Forward | Step::End(_) => break,
                },
                Pulled::Complete => match relay.finish(true) {
                    Err(refusal) => return Err(Failure::of_refusal(refusal)),
                    Ok(_) => break,
                },
                Pulled::Failed(error) => return Err(Failure::of_node(&error)),
                Pulled::Lost => return Err(Failure::node_lost()),
            }
        }
        self.guard.first_token(Instant::now());
        let ids = [
            relay.response_id(),
            relay.conversation(),
            self.asked.state_id.as_deref(),
        ];
        self.remember(ids, &attempt.lease);
        Ok((head, relay))
    }

    /// Holds a whole body up to `hold_bytes` (G52).
    async fn read_whole(
        &mut self,
        mut head: head::Head,
        json: bool,
        attempt: &mut Attempt,
    ) -> Result<(head::Head, Read), Failure> {
        let hold = self.app.settings.gate.hold_bytes;
        let mut first = Bytes::new();
        let mut more = BytesMut::new();
        loop {
            match attempt.source.pull().await {
                Pulled::Data(chunk) if first.is_empty() && more.is_empty() => first = chunk,
                Pulled::Data(chunk) => {
                    if more.is_empty() {
                        more.reserve(first.len() + chunk.len());
                        more.extend_from_slice(&first);
                        first = Bytes::new();
                    }
                    more.extend_from_slice(&chunk);
                }
                Pulled::Complete => break,
                Pulled::Failed(error) => return Err(Failure::of_node(&error)),
                Pulled::Lost => return Err(Failure::node_lost()),
            }
            if first.len() + more.len() > hold {
                let prefix = if more.is_empty() { first } else { more.freeze() };
                let id = leading_response_id(&prefix).filter(|_| self.asked.endpoint == Endpoint::Responses);
                self.remember([id.as_deref(), None, None], &attempt.lease);
                return Ok((head, Read::Long(prefix)));
            }
        }
        let body = if more.is_empty() { first } else { more.freeze() };
        if head.provider_length.is_some_and(|n| n != body.len() as u64) && self.asked.method != Method::HEAD {
            return Err(Failure::Own {
                error: ErrorKind::ProviderDisconnected,
                message: "The provider's answer is shorter than it said.",
                result: AttemptResult::Cut,
            });
        }
        if json && head.status.is_success() && head.status != StatusCode::NO_CONTENT {
            self.check_json(&head, &body)?;
        }
        attempt.guard.settle(result_of_status(head.status));
        if head.status.is_success() {
            if self.asked.makes_state {
                if let Some(usage) = usage_from_body(&body) {
                    attempt.guard.usage(Some(usage), UsageCompleteness::Complete);
                }
                if self.asked.endpoint == Endpoint::Responses {
                    let identity = response_id(&body);
                    let ids = [
                        identity.id.as_deref(),
                        identity.conversation.as_deref(),
                        self.asked.state_id.as_deref(),
                    ];
                    self.remember(ids, &attempt.lease);
                }
            }
        } else if is_retryable(head.status) {
            head.forbid_client_retry();
        }
        Ok((head, Read::Whole(body)))
    }

    /// Where the state of this answer lives: under its own id, its conversation's and the one it went on from.
    fn remember(&self, ids: [Option<&str>; 3], lease: &Lease) {
        if self.asked.makes_state {
            for id in ids.into_iter().flatten() {
                self.app.remember_response(id, lease);
            }
        }
    }

    /// A JSON endpoint's 200 has to be JSON, and must not be an error in disguise (G58).
    fn check_json(&self, head: &head::Head, body: &Bytes) -> Result<(), Failure> {
        let starts_as_json = body
            .iter()
            .find(|b| !b.is_ascii_whitespace())
            .is_some_and(|b| matches!(b, b'{' | b'['));
        if !starts_as_json && !head.headers.contains_key(header::CONTENT_ENCODING) {
            return Err(Failure::unusable(
                "The provider's answer is not JSON.",
                head.status,
            ));
        }
        // Without a length nothing but the text itself says that it is whole.
        if head.provider_length.is_none()
            && !head.headers.contains_key(header::CONTENT_ENCODING)
            && serde_json::from_slice::<serde::de::IgnoredAny>(body).is_err()
        {
            return Err(Failure::Own {
                error: ErrorKind::ProviderDisconnected,
                message: "The provider ended the connection before its answer was complete.",
                result: AttemptResult::Cut,
            });
        }
        match iop_shared::openai::event::error_in_body(self.asked.dialect(), body) {
            Some(error) => Err(Failure::InBand(error)),
            None => Ok(()),
        }
    }
}

enum Read {
    Stream(Box<Relay>),
    Whole(Bytes),
    Long(Bytes),
}

fn refusal(refused: Refused) -> ApiError {
    match refused {
        Refused::QueueFull => ApiError::new(ErrorKind::CapacityExhausted, "The queue of this model is full.")
            .with_retry_after(BUSY_RETRY_AFTER),
        Refused::QueueTimeout => ApiError::new(
            ErrorKind::CapacityExhausted,
            "No provider of this model had room in time.",
        )
        .with_retry_after(BUSY_RETRY_AFTER),
        Refused::OtherEndpoint => ApiError::new(
            ErrorKind::InvalidRequest,
            "This model does not serve this endpoint.",
        )
        .with_param("model"),
        Refused::NoProvider => ApiError::new(
            ErrorKind::NoProviderAvailable,
            "No provider of this model is connected.",
        )
        .with_retry_after(ABSENT_RETRY_AFTER),
    }
}

/// How a request that was answered with this status is counted.
pub(crate) fn outcome_of_status(status: StatusCode) -> Outcome {
    if status.is_client_error() {
        Outcome::ClientError
    } else if status.is_server_error() {
        Outcome::ProviderError
    } else {
        Outcome::Success
    }
}
