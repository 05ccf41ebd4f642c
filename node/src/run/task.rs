//! The body of one attempt: every byte a provider yields, then exactly one terminal as trailers.
//!
//! Polled inline by whoever serves the tunnel; no task and no channel stands between, until the provider stalls.
//! Dropping it at any point closes the provider's connection, gives the place back and counts the attempt as cancelled.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::Frame;
use iop_shared::execution::event::{classify_runtime_event, classify_tunnel_frame};
use iop_shared::execution::{
    Disposition, Endpoint, ExecutionPath, FailureCode, RuntimeEventKind, TunnelFrameKind,
};
use iop_shared::ids::{AttemptId, RunId};
use iop_shared::wire::terminal::{NodeError, Terminal};

use super::stall::{Joining, Stalled};
use super::terminal;
use super::watch::Watch;
use super::watchdog::StallClaim;
use crate::metrics::NodeMetrics;
use crate::providers::hold::Hold;
use crate::providers::registry::{Permit, Slot};
use crate::providers::{Ask, ProviderBody};
use crate::service::scope::Scope;

/// What an attempt is; fixed at admission.
#[derive(Clone)]
pub(crate) struct Attempt {
    pub(crate) path: ExecutionPath,
    /// As counted.
    pub(crate) endpoint: Endpoint,
    pub(crate) run_id: RunId,
    pub(crate) attempt_id: AttemptId,
    pub(crate) target: String,
    /// Resolved: 004's default already stands for zero.
    pub(crate) stall_timeout: Duration,
    /// The session that asked.
    pub(crate) scope: Arc<Scope>,
}

/// What must happen once on every exit of an attempt; armed before the provider is called.
pub(crate) struct RunGuard {
    permit: Permit,
    metrics: Arc<NodeMetrics>,
    attempt: Attempt,
    status: Option<StatusCode>,
    settled: bool,
}

impl RunGuard {
    pub(crate) fn new(permit: Permit, metrics: Arc<NodeMetrics>, attempt: Attempt) -> Self {
        Self {
            permit,
            metrics,
            attempt,
            status: None,
            settled: false,
        }
    }

    fn slot(&self) -> &Slot {
        self.permit.slot()
    }

    /// Counts the attempt and gives the place back.
    fn settle(mut self, terminal: &Terminal) {
        self.count(terminal);
    }

    /// The one claim of this attempt: it is counted here and now, and its place stays taken until the terminal.
    fn stall(&mut self, claim: StallClaim, hold: Hold) -> Joining {
        self.count(&Terminal::error(FailureCode::ResponseStalled, ""));
        Joining::start(Stalled {
            claim,
            hold,
            attempt: self.attempt.clone(),
            slot: Arc::clone(self.permit.slot()),
            metrics: Arc::clone(&self.metrics),
        })
    }

    fn count(&mut self, terminal: &Terminal) {
        if !std::mem::replace(&mut self.settled, true) {
            self.metrics
                .attempts
                .at((self.attempt.endpoint, terminal::result(self.status, terminal)))
                .inc();
        }
    }
}

impl Drop for RunGuard {
    fn drop(&mut self) {
        self.count(&Terminal::Cancelled);
    }
}

/// Calls the provider of an admitted attempt; resolves at its head. An error is settled already.
pub(crate) async fn dispatch(mut guard: RunGuard, ask: Ask) -> Result<Response<RunBody>, NodeError> {
    let mut watch = Watch::new(guard.attempt.stall_timeout);
    let mut hold = Hold::default();
    let called = {
        let call = pin!(guard.slot().backend.call(&guard.attempt.target, ask, &mut hold));
        watch.until(call).await
    };
    let answered = match called {
        Ok(answered) => answered,
        Err(claim) => Err(guard.stall(claim, std::mem::take(&mut hold)).await),
    };
    hold.waits(false);
    match answered {
        Ok(answer) => {
            guard.status = Some(answer.status());
            watch.heard(of_head(guard.attempt.path));
            Ok(answer.map(|source| RunBody::Streaming {
                source,
                hold,
                watch,
                guard,
            }))
        }
        Err(error) => {
            guard.settle(&Terminal::Error(error.clone()));
            Err(error)
        }
    }
}

/// What a head says about liveness: a tunnel's is the provider's own `response_start`, a run's only says that it began.
fn of_head(path: ExecutionPath) -> Disposition {
    match path {
        ExecutionPath::Normalized => classify_runtime_event(RuntimeEventKind::Start, false, false),
        ExecutionPath::ProviderTunnel | ExecutionPath::Unknown => {
            classify_tunnel_frame(TunnelFrameKind::ResponseStart, 0)
        }
    }
}

/// A provider's body under way.
#[expect(
    clippy::large_enum_variant,
    reason = "a body is streaming for most of its life; a box would be one more allocation per request"
)]
pub(crate) enum RunBody {
    Streaming {
        source: ProviderBody,
        hold: Hold,
        watch: Watch,
        guard: RunGuard,
    },
    /// Nothing more of the provider is read; its terminal is in the making.
    Stalled { joining: Joining, guard: RunGuard },
    /// The terminal was handed out.
    Ended(Terminal),
}

impl RunBody {
    pub(crate) fn terminal(&self) -> Option<&Terminal> {
        match self {
            RunBody::Streaming { .. } | RunBody::Stalled { .. } => None,
            RunBody::Ended(terminal) => Some(terminal),
        }
    }

    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        loop {
            let terminal = match self {
                RunBody::Streaming {
                    source, hold, watch, ..
                } => {
                    let polled = source.poll_data(cx);
                    let waits = polled.is_pending() && !source.has_some();
                    hold.waits(waits);
                    match polled {
                        Poll::Ready(Some(Ok(piece))) => {
                            watch.heard(piece.disposition);
                            return Poll::Ready(Some(Frame::data(piece.bytes)));
                        }
                        Poll::Ready(Some(Err(e))) => Terminal::Error(e),
                        Poll::Ready(None) => Terminal::Complete { usage: None },
                        Poll::Pending if !waits => return Poll::Pending,
                        Poll::Pending => {
                            let claim = std::task::ready!(watch.poll_stall(cx));
                            self.stall(claim);
                            continue;
                        }
                    }
                }
                RunBody::Stalled { joining, .. } => {
                    Terminal::Error(std::task::ready!(Pin::new(joining).poll(cx)))
                }
                RunBody::Ended(_) => return Poll::Ready(None),
            };
            let trailers = terminal.to_trailers();
            self.end(terminal);
            return Poll::Ready(Some(Frame::trailers(trailers)));
        }
    }

    /// The provider is let go at once: whatever it still says is never read (004, late output).
    fn stall(&mut self, claim: StallClaim) {
        match std::mem::replace(self, RunBody::Ended(Terminal::Cancelled)) {
            RunBody::Streaming {
                source,
                hold,
                watch: _,
                mut guard,
            } => {
                drop(source);
                let joining = guard.stall(claim, hold);
                *self = RunBody::Stalled { joining, guard };
            }
            other @ (RunBody::Stalled { .. } | RunBody::Ended(_)) => *self = other,
        }
    }

    /// The one place where an attempt gets its terminal: the provider is let go, the place is free.
    fn end(&mut self, terminal: Terminal) {
        let before = std::mem::replace(self, RunBody::Ended(terminal));
        let RunBody::Ended(terminal) = &*self else { return };
        match before {
            RunBody::Streaming { source, guard, .. } => {
                drop(source);
                guard.settle(terminal);
            }
            RunBody::Stalled { guard, .. } => guard.settle(terminal),
            RunBody::Ended(_) => {}
        }
    }
}

#[cfg(test)]
mod tests;
