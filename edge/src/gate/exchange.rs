//! One request on its way: lease, attempt, and what follows a failed one.
//!
//! Every attempt of every `/v1` request goes through `Exchange::run`. Whether another follows is `recovery`'s decision;
//! the facts are gathered in `Exchange::follows`. Dropping the future drops the lease, the node's stream and the
//! provider's connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use iop_shared::execution::{AttemptFence, CommitState, Outcome, ProviderHealth, RecoveryResult};
use iop_shared::ids::ProviderKey;
use iop_shared::openai::event::Dialect;
use tokio::time::Instant;

use super::asked::{Asked, Origin};
use super::attempt::Attempt;
use super::cycle::{Cycle, Stalled};
use super::failure::{Failed, Failure};
use super::guard::RequestGuard;
use super::head;
use super::recovery::{Cause, Facts, Plan, decide};
use super::relay::Relay;
use crate::app::App;
use crate::config::OnNodeLost;
use crate::error::{ApiError, ErrorKind};
use crate::pool::{Ask, Refused};

/// `Retry-After` of a full or timed-out queue.
const BUSY_RETRY_AFTER: Duration = Duration::from_secs(1);
/// A provider's own `Retry-After` is waited for up to this long; a longer wait is the client's, who knows its patience.
const PATIENCE: Duration = Duration::from_secs(5);
/// `Retry-After` where no provider is there at all.
const ABSENT_RETRY_AFTER: Duration = Duration::from_secs(5);

/// One request on its way. What was asked is boxed: futures are moved, and what they hold moves with them.
pub(crate) struct Exchange {
    pub(super) app: Arc<App>,
    pub(super) asked: Box<Asked>,
    pub(super) guard: RequestGuard,
    attempts: Attempts,
    /// Providers that were asked already (004 `AvoidProviderID`); the last may be taken again where that is allowed.
    tried: Vec<ProviderKey>,
    /// 004 `AllowAvoidedProviderFallback`.
    same_allowed: bool,
    /// The last of them stalled, and is proven available.
    last_proven: bool,
    started: Instant,
    /// Time spent waiting for a provider, which counts against no budget.
    queued: Duration,
    cycle: Cycle,
    why: Why,
}

/// What is known of the last failed attempt, besides what is answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Why {
    /// The status of an answer that could not be used.
    pub(crate) answered: Option<StatusCode>,
    /// Of a stall: whether the provider has surely stopped.
    pub(crate) fence: AttemptFence,
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
    /// A stream that said nothing but that it failed: its events, complete; `status`: what the failure stands for.
    FailedStream {
        head: head::Head,
        events: Bytes,
        status: StatusCode,
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

impl Answer {
    /// What stays of it while another attempt is made: no place at a provider. Of a body too large to hold, its status
    /// and what its head says of another try.
    fn kept(self) -> Self {
        match self {
            Answer::Long { head, .. } => {
                let message = format!("The provider answered with status {}.", head.status.as_u16());
                let body = ApiError::new(ErrorKind::ProviderError, message).body();
                Answer::Whole {
                    head: head.bare(),
                    body,
                }
            }
            other @ (Answer::Stream { .. }
            | Answer::Whole { .. }
            | Answer::FailedStream { .. }
            | Answer::InBand { .. }
            | Answer::Own(_)) => other,
        }
    }
}

/// An answer and what it takes to finish it.
pub(crate) struct Ended {
    pub(crate) answer: Answer,
    pub(crate) guard: RequestGuard,
    pub(crate) attempts: u32,
    pub(crate) dialect: Dialect,
    pub(crate) why: Why,
}

impl Exchange {
    pub(crate) fn new(app: Arc<App>, asked: Box<Asked>, guard: RequestGuard) -> Self {
        let cycle = Cycle::new(app.metrics.clone());
        Self {
            app,
            asked,
            guard,
            attempts: Attempts::default(),
            tried: Vec::new(),
            same_allowed: false,
            last_proven: false,
            started: Instant::now(),
            queued: Duration::ZERO,
            cycle,
            why: Why {
                answered: None,
                fence: AttemptFence::Unknown,
            },
        }
    }

    pub(super) fn is_stream(&self) -> bool {
        self.asked.stream
    }

    /// Who asks is at the other end of a connection, which comments keep open (G21, G53).
    pub(super) fn is_at_a_socket(&self) -> bool {
        self.asked.origin == Origin::Client
    }

    pub(super) fn attempts(&self) -> Attempts {
        self.attempts.clone()
    }

    pub(super) fn model(&self) -> Arc<str> {
        Arc::clone(&self.asked.model.name)
    }

    /// Runs the request to an answer.
    pub(crate) async fn run(mut self) -> Ended {
        let answer = self.answer().await;
        Ended {
            answer,
            dialect: self.asked.dialect(),
            guard: self.guard,
            attempts: self.attempts.get(),
            why: self.why,
        }
    }

    async fn answer(&mut self) -> Answer {
        let mut since = None;
        // What the last failed attempt leaves for the client, should no other come about.
        let mut last: Option<Answer> = None;
        let mut asked_at = self.started;
        loop {
            let acquired = self.app.pool.acquire(self.ask(since)).await;
            let begun = Instant::now();
            self.queued += begun.saturating_duration_since(asked_at);
            let lease = match acquired {
                Ok(lease) => lease,
                Err(refused) => {
                    self.cycle.resolved(RecoveryResult::NotSelected);
                    return last.unwrap_or_else(|| Answer::Own(refusal(refused)));
                }
            };
            self.attempts.begin();
            self.cycle.resolved(RecoveryResult::Redispatched);
            let provider = lease.provider().clone();
            let replay = lease.replay();
            match self.attempt(lease, begun).await {
                Ok(answer) => return answer,
                Err(Failed::Refused) => {
                    self.attempts.take_back();
                    since.get_or_insert(asked_at);
                }
                Err(Failed::By(failure)) => {
                    since = None;
                    self.avoid(provider, &failure);
                    self.why = Why {
                        answered: failure.answered,
                        fence: failure
                            .stall
                            .map_or(AttemptFence::Unknown, |s| s.observation.fence),
                    };
                    let plan = self.follows(&failure, replay);
                    if plan == Plan::Answer {
                        return *failure.last;
                    }
                    // Gives back whatever place it still holds.
                    last = Some(failure.last.kept());
                    self.same_allowed =
                        matches!(plan, Plan::Same { .. } | Plan::Elsewhere { fallback: true });
                    if let (Plan::Same { paused: true }, Some(pause)) = (plan, failure.retry_after) {
                        tokio::time::sleep(pause).await;
                    }
                }
            }
            asked_at = Instant::now();
        }
    }

    fn ask(&self, since: Option<Instant>) -> Ask<'_> {
        Ask {
            model: &self.asked.model,
            endpoint: self.asked.endpoint,
            pinned: self.asked.pinned.as_ref(),
            since,
            who: &self.asked.who,
            affinity: self.asked.affinity,
            avoid: &self.tried,
            allow_avoided: self.same_allowed,
        }
    }

    /// Each provider is asked once. A stall that finds its provider available may be followed by another attempt there,
    /// should no other be left; then one that stalled before in the same way is the better choice.
    fn avoid(&mut self, provider: ProviderKey, failure: &Failure) {
        let proven = failure
            .stall
            .is_some_and(|s| s.observation.handoff && s.observation.health == ProviderHealth::Available);
        self.tried.retain(|tried| *tried != provider);
        let earlier = proven && self.last_proven && !self.tried.is_empty();
        let place = self.tried.len() - usize::from(earlier);
        self.tried.insert(place, provider);
        self.last_proven = proven;
    }

    /// What follows a failed attempt. `replay`: its provider allows another.
    fn follows(&mut self, failure: &Failure, replay: bool) -> Plan {
        let gate = &self.app.settings.gate;
        let elapsed = self.started.elapsed().saturating_sub(self.queued);
        let stall = failure.stall;
        let facts = Facts {
            origin: self.asked.origin,
            cause: failure.cause,
            handoff: stall.is_some_and(|s| s.observation.handoff),
            fence: stall.map_or(AttemptFence::Unknown, |s| s.observation.fence),
            health: stall.map_or(ProviderHealth::Unknown, |s| s.observation.health),
            commit: CommitState::TransportUncommitted,
            // A client that leaves drops this future: see `AttemptGuard`.
            cancelled: false,
            replay_safe: self.asked.replay_safe(),
            budget: self.attempts.get() < gate.max_attempts && elapsed < gate.max_elapsed,
            snapshot: self.asked.snapshot_bytes() <= gate.snapshot_bytes,
            allowed: replay && (failure.cause != Cause::NodeLost || gate.on_node_lost == OnNodeLost::Replay),
            comes_back: failure
                .retry_after
                .is_some_and(|after| after <= PATIENCE && elapsed.saturating_add(after) < gate.max_elapsed),
            prospects: self.app.pool.prospects(&self.ask(None)),
        };
        let decision = decide(&facts);
        if let Some(stall) = stall {
            let stalled = Stalled {
                path: stall.path,
                health: facts.health,
                commit: facts.commit,
            };
            self.cycle.decided(stalled, decision.eligibility);
        }
        decision.plan
    }
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
            "No provider of this model is available now.",
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
