//! The body of one attempt: every byte a provider yields, then exactly one terminal as trailers.
//!
//! Polled inline by whoever serves the tunnel; no task and no channel stands between. Dropping it at any point closes
//! the provider's connection, gives the place back and counts the attempt as cancelled.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::Frame;
use iop_shared::execution::{Endpoint, ExecutionPath};
use iop_shared::ids::{AttemptId, RunId};
use iop_shared::wire::terminal::{NodeError, Terminal};

use super::terminal;
use crate::metrics::NodeMetrics;
use crate::providers::registry::{Permit, Slot};
use crate::providers::{Ask, ProviderBody};
use crate::service::scope::Scope;

/// What an attempt is; fixed at admission.
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
    let called = guard.slot().backend.call(&guard.attempt.target, ask).await;
    match called {
        Ok(answer) => {
            guard.status = Some(answer.status());
            Ok(answer.map(|source| RunBody::Streaming { source, guard }))
        }
        Err(error) => {
            guard.settle(&Terminal::Error(error.clone()));
            Err(error)
        }
    }
}

/// A provider's body under way.
pub(crate) enum RunBody {
    Streaming {
        source: ProviderBody,
        guard: RunGuard,
    },
    /// The terminal was handed out.
    Ended(Terminal),
}

impl RunBody {
    pub(crate) fn terminal(&self) -> Option<&Terminal> {
        match self {
            RunBody::Streaming { .. } => None,
            RunBody::Ended(terminal) => Some(terminal),
        }
    }

    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        let RunBody::Streaming { source, .. } = self else {
            return Poll::Ready(None);
        };
        let terminal = match std::task::ready!(source.poll_data(cx)) {
            Some(Ok(piece)) => return Poll::Ready(Some(Frame::data(piece.bytes))),
            Some(Err(e)) => Terminal::Error(e),
            None => Terminal::Complete { usage: None },
        };
        let trailers = terminal.to_trailers();
        self.end(terminal);
        Poll::Ready(Some(Frame::trailers(trailers)))
    }

    /// The one place where an attempt gets its terminal: the provider is let go, the place is free.
    fn end(&mut self, terminal: Terminal) {
        let before = std::mem::replace(self, RunBody::Ended(terminal));
        if let (RunBody::Streaming { source, guard }, RunBody::Ended(terminal)) = (before, &*self) {
            drop(source);
            guard.settle(terminal);
        }
    }
}
