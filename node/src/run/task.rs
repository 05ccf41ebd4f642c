//! The body of one attempt: every byte a provider yields, then exactly one terminal as trailers.
//!
//! Polled inline by whoever serves the tunnel; no task and no channel stands between. Dropping it at any point closes
//! the provider's connection, gives the place back and counts the attempt as cancelled.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::StatusCode;
use http_body::Frame;
use iop_shared::execution::Endpoint;
use iop_shared::wire::terminal::Terminal;

use super::terminal;
use crate::metrics::NodeMetrics;
use crate::providers::ProviderBody;
use crate::providers::registry::{Permit, Slot};

/// What must happen once on every exit of an attempt; armed before the provider is called.
pub(crate) struct RunGuard {
    permit: Permit,
    metrics: Arc<NodeMetrics>,
    endpoint: Endpoint,
    status: Option<StatusCode>,
    settled: bool,
}

impl RunGuard {
    pub(crate) fn new(permit: Permit, metrics: Arc<NodeMetrics>, endpoint: Endpoint) -> Self {
        Self {
            permit,
            metrics,
            endpoint,
            status: None,
            settled: false,
        }
    }

    pub(crate) fn slot(&self) -> &Slot {
        self.permit.slot()
    }

    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.status = Some(status);
    }

    /// Counts the attempt and gives the place back.
    pub(crate) fn settle(mut self, terminal: &Terminal) {
        self.count(terminal);
    }

    fn count(&mut self, terminal: &Terminal) {
        if !std::mem::replace(&mut self.settled, true) {
            self.metrics
                .attempts
                .at((self.endpoint, terminal::result(self.status, terminal)))
                .inc();
        }
    }
}

impl Drop for RunGuard {
    fn drop(&mut self) {
        self.count(&Terminal::Cancelled);
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
    pub(crate) fn new(source: ProviderBody, guard: RunGuard) -> Self {
        RunBody::Streaming { source, guard }
    }

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
            Some(Ok(data)) => return Poll::Ready(Some(Frame::data(data))),
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
