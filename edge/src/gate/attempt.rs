//! One attempt: dispatched to the leased provider, held until there is something to answer (G52), bounded until its
//! first content (G54).
//!
//! Knows nothing of other attempts. What it finds is an answer, or a failure for `exchange` to weigh.

use std::time::SystemTime;

use bytes::{Bytes, BytesMut};
use http::header;
use http::{Method, StatusCode};
use iop_shared::execution::{AttemptResult, CommitState, Eligibility, Endpoint, ExecutionPath, FailureCode};
use iop_shared::ids::{AttemptId, RunId};
use iop_shared::openai::event::{TerminalKind, error_in_body, leading_response_id, response_id};
use iop_shared::openai::usage::usage_from_body;
use iop_shared::wire::headers as wire_headers;
use iop_shared::wire::terminal::{NodeError, StallFailure};
use tokio::time::Instant;

use super::cycle::{Stalled, observe};
use super::exchange::{Answer, Exchange};
use super::failure::{
    CREDENTIAL, CUT, Failed, Failure, in_band_status, is_retryable, result_of_status, retry_after,
};
use super::guard::AttemptGuard;
use super::head;
use super::relay::{Relay, Step};
use super::source::{Pulled, Source};
use crate::metrics::{Metrics, UsageCompleteness};
use crate::pool::{Lease, StallObservation};

/// One dispatch to a provider.
pub(crate) struct Attempt {
    pub(crate) source: Source,
    pub(crate) guard: AttemptGuard,
    pub(crate) lease: Lease,
    run_id: RunId,
    id: AttemptId,
}

/// A stall whose terminal was received and given to the overlay.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SeenStall {
    pub(crate) path: ExecutionPath,
    pub(crate) observation: StallObservation,
}

impl Attempt {
    fn new(lease: Lease, guard: AttemptGuard, run_id: RunId) -> Self {
        Self {
            source: Source::none(),
            guard,
            lease,
            run_id,
            id: AttemptId(uuid::Uuid::now_v7()),
        }
    }

    /// Says how the attempt ended, to the counts and to whom its provider's health concerns.
    pub(super) fn settle(&mut self, result: AttemptResult) {
        self.guard.settle(result);
        self.lease.tell(result, None);
    }

    fn fail(&mut self, failure: &mut Failure) {
        self.guard.settle(failure.result);
        self.lease.tell(failure.result, failure.retry_after);
        // Whatever may follow it, a stall is evidence.
        if failure.result == AttemptResult::ResponseStalled {
            failure.stall = Some(self.observe(failure.evidence.as_deref()));
        }
    }

    /// The provider answered with a status that may pass.
    fn refused_by_provider(
        mut self,
        head: head::Head,
        answer: impl FnOnce(head::Head, Self) -> Answer,
    ) -> Failed {
        let (status, retry_after) = (head.status, retry_after(&head.headers, SystemTime::now()));
        let result = result_of_status(status);
        self.guard.settle(result);
        self.lease.tell(result, retry_after);
        Failure::answered(status, retry_after, answer(head, self)).into()
    }

    fn observe(&self, evidence: Option<&StallFailure>) -> SeenStall {
        SeenStall {
            path: self.lease.execution_path(),
            observation: self.lease.observe_stall(self.run_id, self.id, evidence),
        }
    }

    /// The node's error after commit: a stall is evidence all the same, and a cycle that ends here (004).
    pub(super) fn failed_after_commit(&self, metrics: &Metrics, error: &NodeError) {
        if error.code != FailureCode::ResponseStalled {
            return;
        }
        let seen = self.observe(error.failure.as_deref());
        let stalled = Stalled {
            path: seen.path,
            health: seen.observation.health,
            commit: CommitState::StreamOpen,
        };
        let eligibility = if seen.observation.handoff {
            Eligibility::PostCommit
        } else {
            Eligibility::NoOwner
        };
        observe(metrics, stalled, eligibility);
    }
}

/// What was read until something may leave.
enum Read {
    Stream(head::Head, Box<Relay>),
    Whole(head::Head, Bytes),
    Long(head::Head, Bytes),
}

impl Exchange {
    /// Makes one attempt, that begins now.
    pub(super) async fn attempt(&mut self, lease: Lease, now: Instant) -> Result<Answer, Failed> {
        let guard = AttemptGuard::new(
            self.app.metrics.clone(),
            self.asked.makes_state,
            lease.execution_path(),
            lease.stall_timeout(),
            now,
        );
        let limit = lease.first_content_timeout();
        let mut attempt = Attempt::new(lease, guard, self.asked.run_id);
        let read = match limit {
            None => self.until_content(&mut attempt).await,
            Some(limit) => tokio::time::timeout(limit, self.until_content(&mut attempt))
                .await
                .unwrap_or_else(|_| Err(Failure::first_content().into())),
        };
        match read {
            Ok(Read::Stream(head, relay)) => Ok(Answer::Stream { head, relay, attempt }),
            Ok(Read::Whole(head, body)) if is_retryable(head.status) => {
                Err(attempt.refused_by_provider(head, |head, _| Answer::Whole { head, body }))
            }
            Ok(Read::Whole(head, body)) => Ok(Answer::Whole { head, body }),
            Ok(Read::Long(head, prefix)) if is_retryable(head.status) => {
                Err(attempt.refused_by_provider(head, |head, attempt| Answer::Long {
                    head,
                    prefix,
                    attempt,
                }))
            }
            Ok(Read::Long(head, prefix)) => Ok(Answer::Long {
                head,
                prefix,
                attempt,
            }),
            Err(Failed::By(mut failure)) => {
                attempt.fail(&mut failure);
                Err(Failed::By(failure))
            }
            Err(Failed::Refused) => {
                attempt.guard.settle(AttemptResult::Capacity);
                attempt.lease.refused();
                Err(Failed::Refused)
            }
        }
    }

    async fn until_content(&mut self, attempt: &mut Attempt) -> Result<Read, Failed> {
        if let Some(conn) = &self.asked.conn {
            conn.limit_write_stall(attempt.lease.stall_timeout() / 2);
        }
        let mut head = self.dispatch(attempt).await?;
        attempt.guard.progress(Instant::now());
        let shape = head::judge(
            &head,
            self.asked.endpoint,
            self.asked.wanted(),
            self.asked.accept_encoding.as_ref(),
        );
        Ok(match shape {
            head::Shape::Unusable(why) => return Err(Failure::unusable(why, head.status).into()),
            head::Shape::Events => self.read_stream(head, attempt).await?,
            head::Shape::Whole { json } => {
                if is_retryable(head.status) {
                    head.forbid_client_retry();
                }
                let refused = head.status.is_client_error() && !is_retryable(head.status);
                self.read_whole(head, json, attempt).await.map_err(|failure| {
                    // The provider has judged the request, whatever becomes of its words (G59).
                    if refused { failure.final_word() } else { failure }
                })?
            }
        })
    }

    async fn dispatch(&self, attempt: &mut Attempt) -> Result<head::Head, Failed> {
        let session = attempt.lease.session();
        let (response, rendered) = if attempt.lease.execution_path() == ExecutionPath::Normalized {
            let (request, renderer) = self
                .asked
                .run(&attempt.lease, attempt.id)
                .map_err(Failure::refused_by_edge)?;
            (session.run(&request).await, Some(renderer))
        } else {
            let (head, body) = self.asked.tunnel(&attempt.lease, attempt.id);
            (session.tunnel(head, self.asked.headers.clone(), body).await, None)
        };
        let (parts, body) = response.map_err(|_| Failure::node_lost())?.into_parts();
        if parts.headers.get(wire_headers::ORIGIN) == Some(&wire_headers::ORIGIN_PROVIDER) {
            // A refusal comes as the provider wrote it.
            return Ok(match rendered.filter(|_| parts.status.is_success()) {
                None => {
                    attempt.source = Source::new(body);
                    head::Head::of_provider(parts)
                }
                Some(renderer) => {
                    let head = renderer.head();
                    attempt.source = Source::rendered(body, renderer);
                    head
                }
            });
        }
        // The node answered itself: an empty body and the reason in its terminal.
        attempt.source = Source::new(body);
        loop {
            match attempt.source.pull().await {
                Pulled::Data(_) => {}
                Pulled::Failed(error) if is_refusal(error.code) => return Err(Failed::Refused),
                Pulled::Failed(error) => return Err(Failure::of_node(error).into()),
                Pulled::Complete | Pulled::Lost => return Err(Failure::node_lost().into()),
            }
        }
    }

    /// Holds a stream until content arrives (G52).
    async fn read_stream(&mut self, head: head::Head, attempt: &mut Attempt) -> Result<Read, Failure> {
        let mut relay = Box::new(Relay::new(
            self.asked.dialect(),
            self.asked.choices,
            self.asked.injects_usage(),
            self.app.settings.gate.hold_bytes,
        ));
        loop {
            match attempt.source.pull().await {
                Pulled::Data(chunk) => match relay.feed(&chunk) {
                    Step::Hold => attempt.guard.progress(Instant::now()),
                    Step::Fail(refusal) => return Err(Failure::of_refusal(refusal)),
                    Step::End(TerminalKind::Failed) if relay.early_failure().is_some() => {
                        attempt.guard.usage(relay.usage(), UsageCompleteness::Complete);
                        return Err(failed_stream(head, &mut relay));
                    }
                    Step::Forward | Step::End(_) => break,
                },
                Pulled::Complete => match relay.finish(true) {
                    Err(refusal) => return Err(Failure::of_refusal(refusal)),
                    Ok(_) => break,
                },
                Pulled::Failed(error) => return Err(Failure::of_node(error)),
                Pulled::Lost => return Err(Failure::node_lost()),
            }
        }
        attempt.guard.committed();
        attempt.lease.proven();
        self.guard.first_token(Instant::now());
        let ids = [
            relay.response_id(),
            relay.conversation(),
            self.asked.state_id.as_deref(),
        ];
        self.remember(ids, &attempt.lease);
        Ok(Read::Stream(head, relay))
    }

    /// Holds a whole body up to `hold_bytes` (G52).
    async fn read_whole(
        &mut self,
        head: head::Head,
        json: bool,
        attempt: &mut Attempt,
    ) -> Result<Read, Failure> {
        let hold = self.app.settings.gate.hold_bytes;
        let mut first = Bytes::new();
        let mut more = BytesMut::new();
        loop {
            match attempt.source.pull().await {
                Pulled::Data(chunk) if first.is_empty() && more.is_empty() => {
                    attempt.guard.progress(Instant::now());
                    first = chunk;
                }
                Pulled::Data(chunk) => {
                    attempt.guard.progress(Instant::now());
                    if more.is_empty() {
                        more.reserve(first.len() + chunk.len());
                        more.extend_from_slice(&first);
                        first = Bytes::new();
                    }
                    more.extend_from_slice(&chunk);
                }
                Pulled::Complete => break,
                Pulled::Failed(error) => return Err(Failure::of_node(error)),
                Pulled::Lost => return Err(Failure::node_lost()),
            }
            if first.len() + more.len() > hold {
                let prefix = if more.is_empty() { first } else { more.freeze() };
                let id = leading_response_id(&prefix).filter(|_| self.asked.endpoint == Endpoint::Responses);
                self.remember([id.as_deref(), None, None], &attempt.lease);
                attempt.guard.committed();
                if head.status.is_success() {
                    attempt.lease.proven();
                }
                return Ok(Read::Long(head, prefix));
            }
        }
        let body = if more.is_empty() { first } else { more.freeze() };
        if head.provider_length.is_some_and(|n| n != body.len() as u64) && self.asked.method != Method::HEAD {
            return Err(Failure::cut("The provider's answer is shorter than it said."));
        }
        if json && head.status.is_success() && head.status != StatusCode::NO_CONTENT {
            self.check_json(&head, &body)?;
        }
        if head.status.is_success() && self.asked.makes_state {
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
        if !is_retryable(head.status) {
            attempt.settle(result_of_status(head.status));
        }
        Ok(Read::Whole(head, body))
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
        if !head.headers.contains_key(header::CONTENT_ENCODING) {
            let text = body.trim_ascii();
            if !matches!(text.first(), Some(b'{' | b'[')) {
                return Err(Failure::unusable(
                    "The provider's answer is not JSON.",
                    head.status,
                ));
            }
            // Without a length nothing but the text itself says that it is whole; with one, its ends are looked at.
            if head.provider_length.is_none() {
                if serde_json::from_slice::<serde::de::IgnoredAny>(text).is_err() {
                    return Err(Failure::cut(CUT));
                }
            } else if !matches!(text, [b'{', .., b'}'] | [b'[', .., b']']) {
                return Err(Failure::unusable(
                    "The provider's answer is not whole JSON.",
                    head.status,
                ));
            }
        }
        match error_in_body(self.asked.dialect(), body) {
            Some(error) => Err(Failure::in_band(error)),
            None => Ok(()),
        }
    }
}

/// The node had no room, or takes no new work.
fn is_refusal(code: FailureCode) -> bool {
    matches!(code, FailureCode::Capacity | FailureCode::Draining)
}

/// A Responses stream whose first word is `response.failed`: the failure that it names, and its own events if nothing
/// else is tried.
fn failed_stream(head: head::Head, relay: &mut Relay) -> Failure {
    let status = relay
        .early_failure()
        .map_or(StatusCode::BAD_GATEWAY, in_band_status);
    if relay.early_failure().and_then(|e| e.status) == Some(StatusCode::UNAUTHORIZED.as_u16()) {
        return Failure::unusable(CREDENTIAL, StatusCode::UNAUTHORIZED);
    }
    let mut events = BytesMut::new();
    while let Some(piece) = relay.next_out() {
        events.extend_from_slice(&piece);
    }
    let events = events.freeze();
    let answer = Answer::FailedStream { head, events, status };
    Failure::answered(status, None, answer)
}
