//! The client's body: polled by hyper, it pulls from the node inline; no task and no channel per stream.
//!
//! Everything that must happen when it ends or is dropped hangs on the guards inside.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use iop_shared::execution::{AttemptResult, Outcome};
use iop_shared::openai::event::{Dialect, TerminalKind};
use iop_shared::openai::usage::usage_from_body;
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

use super::attempt::Attempt;
use super::closing;
use super::exchange::{Answer, Ended, outcome_of_status};
use super::failure::{CUT, LOST, ending, result_of_status};
use super::guard::RequestGuard;
use super::relay::{Closing, Relay, Step};
use super::source::Pulled;
use crate::error::ErrorKind;
use crate::metrics::UsageCompleteness;
use crate::tasks;

/// The comment that keeps proxies from cutting a silent stream (G21).
const KEEP_ALIVE: Bytes = Bytes::from_static(b": keep-alive\n\n");

/// After the client's terminal event the provider has this long to end its own message; its connection is gone well
/// within the second that G22 allows.
const DRAIN: Duration = Duration::from_millis(500);

/// The answer cannot be completed: hyper closes the connection, so that no client takes it for an end.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the answer broke off")]
pub struct Aborted;

/// A response body of the data plane.
pub struct GateBody(Kind);

enum Kind {
    Full {
        bytes: Bytes,
        settle: Option<(RequestGuard, Outcome)>,
    },
    Live(Box<Live>),
    Long(Box<Long>),
    Opened(Box<Opened>),
    /// A stream that is not of a provider; its request is settled, and ends with it.
    Streamed {
        body: axum::body::Body,
        _guard: RequestGuard,
    },
    /// `None` in the channel is the end; a channel that closes without it broke off.
    Pumped {
        frames: mpsc::Receiver<Result<Option<Bytes>, Aborted>>,
        length: Option<u64>,
        over: bool,
    },
}

impl From<Bytes> for GateBody {
    fn from(bytes: Bytes) -> Self {
        Self(Kind::Full { bytes, settle: None })
    }
}

impl GateBody {
    /// A complete body; the request is settled when hyper takes it, at once where there is nothing to take.
    pub(crate) fn full(bytes: Bytes, mut guard: RequestGuard, outcome: Outcome) -> Self {
        if bytes.is_empty() {
            guard.settle(outcome);
        }
        Self(Kind::Full {
            bytes,
            settle: Some((guard, outcome)),
        })
    }

    /// A stream of the edge's own; `outcome` counts however much of it is taken.
    pub(crate) fn streamed(body: axum::body::Body, mut guard: RequestGuard, outcome: Outcome) -> Self {
        guard.settle(outcome);
        Self(Kind::Streamed { body, _guard: guard })
    }

    pub(super) fn live(
        relay: Box<Relay>,
        attempt: Attempt,
        guard: RequestGuard,
        dialect: Dialect,
        pace: Pace,
    ) -> Self {
        Self(Kind::Live(Box::new(Live::new(
            relay, attempt, guard, dialect, pace,
        ))))
    }

    pub(super) fn long(
        prefix: Bytes,
        attempt: Attempt,
        guard: RequestGuard,
        status: StatusCode,
        length: Option<u64>,
    ) -> Self {
        Self(Kind::Long(Box::new(Long {
            prefix,
            attempt: Some(attempt),
            guard,
            outcome: outcome_of_status(status),
            result: result_of_status(status),
            length,
            sent: 0,
            tail: Vec::new(),
            broken: false,
        })))
    }

    /// For HTTP/2: a task moves pieces towards the client and ends the request when the client takes none for
    /// `write_timeout` (link.md, rule 1). A complete body needs none.
    pub(crate) fn pumped(self, write_timeout: Duration) -> Self {
        if let Kind::Full { .. } = self.0 {
            return self;
        }
        let length = self.size_hint().exact();
        let (pieces, frames) = mpsc::channel(1);
        tasks::spawn(tasks::Kind::Session, "http2_stream", async move {
            let mut body = self;
            // A client that left takes no more: the permit fails at once, also while the provider is silent.
            let left = pieces.clone();
            let moving = async {
                loop {
                    let piece = match body.frame().await {
                        None => Ok(None),
                        Some(frame) => frame.map(|f| Some(f.into_data().unwrap_or_default())),
                    };
                    let last = !matches!(piece, Ok(Some(_)));
                    let limit = body
                        .write_limit()
                        .map_or(write_timeout, |half| half.min(write_timeout));
                    if pieces.send_timeout(piece, limit).await.is_err() || last {
                        break;
                    }
                }
            };
            tokio::select! {
                () = moving => {}
                () = left.closed() => {}
            }
        });
        Self(Kind::Pumped {
            frames,
            length,
            over: false,
        })
    }

    /// How long a client may take nothing, by its attempt's stall timeout: half of it (link.md, rule 1).
    fn write_limit(&self) -> Option<Duration> {
        let attempt = match &self.0 {
            Kind::Live(live) => live.attempt.as_ref(),
            Kind::Long(long) => long.attempt.as_ref(),
            Kind::Opened(opened) => match &opened.then {
                Some(Then::Live(live)) => live.attempt.as_ref(),
                Some(Then::Said(_)) | None => None,
            },
            Kind::Full { .. } | Kind::Streamed { .. } | Kind::Pumped { .. } => None,
        };
        attempt.map(|a| a.lease.stall_timeout() / 2)
    }

    pub(super) fn opened(
        running: Pin<Box<dyn Future<Output = Ended> + Send>>,
        model: Arc<str>,
        pace: Pace,
    ) -> Self {
        Self(Kind::Opened(Box::new(Opened {
            running: Some(running),
            model,
            pace,
            then: None,
            greeted: false,
        })))
    }
}

impl Body for GateBody {
    type Data = Bytes;
    type Error = Aborted;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Aborted>>> {
        let next = match &mut self.0 {
            Kind::Full { bytes, settle } => {
                if let Some((mut guard, outcome)) = settle.take() {
                    guard.settle(outcome);
                }
                let bytes = std::mem::take(bytes);
                if bytes.is_empty() {
                    Ok(None)
                } else {
                    Ok(Some(bytes))
                }
            }
            Kind::Live(live) => ready!(live.poll(cx)),
            Kind::Long(long) => ready!(long.poll(cx)),
            Kind::Opened(opened) => ready!(opened.poll(cx)),
            Kind::Streamed { body, .. } => match ready!(Pin::new(body).poll_frame(cx)) {
                None => Ok(None),
                Some(Ok(frame)) => Ok(Some(frame.into_data().unwrap_or_default())),
                Some(Err(_)) => Err(Aborted),
            },
            Kind::Pumped { over: true, .. } => Ok(None),
            Kind::Pumped { frames, over, .. } => {
                let next = ready!(frames.poll_recv(cx)).unwrap_or(Err(Aborted));
                *over = !matches!(next, Ok(Some(_)));
                next
            }
        };
        Poll::Ready(next.transpose().map(|r| r.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Full { bytes, settle } => bytes.is_empty() && settle.is_none(),
            Kind::Live(live) => live.is_over(),
            Kind::Long(long) => long.is_over(),
            Kind::Streamed { body, .. } => body.is_end_stream(),
            Kind::Opened(_) | Kind::Pumped { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Full { bytes, .. } => SizeHint::with_exact(bytes.len() as u64),
            Kind::Long(long) => long
                .length
                .map_or_else(SizeHint::default, |n| SizeHint::with_exact(n - long.sent)),
            Kind::Streamed { body, .. } => body.size_hint(),
            Kind::Pumped { length: Some(n), .. } => SizeHint::with_exact(*n),
            Kind::Live(_) | Kind::Opened(_) | Kind::Pumped { length: None, .. } => SizeHint::default(),
        }
    }
}

/// When comments go out: after `interval` without a byte towards the client; `None`: never.
pub(super) struct Pace {
    interval: Option<Duration>,
    sleep: Option<Pin<Box<Sleep>>>,
    last: Instant,
}

impl Pace {
    pub(super) fn new(interval: Option<Duration>, now: Instant) -> Self {
        Self {
            interval,
            sleep: None,
            last: now,
        }
    }

    /// Ready when a comment is due. The timer is armed on the first wait and moved only when it fires.
    fn poll_due(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(interval) = self.interval else {
            return Poll::Pending;
        };
        loop {
            let due = self.last + interval;
            let sleep = self
                .sleep
                .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
            ready!(sleep.as_mut().poll(cx));
            if Instant::now() >= due {
                self.last = Instant::now();
                sleep.as_mut().reset(self.last + interval);
                return Poll::Ready(());
            }
            sleep.as_mut().reset(due);
        }
    }
}

/// A committed stream.
struct Live {
    relay: Box<Relay>,
    /// `None` once the provider's part is over.
    attempt: Option<Attempt>,
    guard: RequestGuard,
    dialect: Dialect,
    pace: Pace,
    last_content: Instant,
    /// A synthesized last event.
    last_words: Option<Bytes>,
    aborted: bool,
}

impl Live {
    fn new(relay: Box<Relay>, attempt: Attempt, guard: RequestGuard, dialect: Dialect, pace: Pace) -> Self {
        Self {
            relay,
            attempt: Some(attempt),
            guard,
            dialect,
            last_content: pace.last,
            pace,
            last_words: None,
            aborted: false,
        }
    }

    fn is_over(&self) -> bool {
        self.attempt.is_none() && !self.relay.has_out() && self.last_words.is_none() && !self.aborted
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Aborted>> {
        loop {
            if let Some(kind) = self.relay.terminal()
                && self.attempt.is_some()
            {
                self.end(kind, cx);
            }
            if let Some(piece) = self.relay.next_out() {
                self.pace.last = self.last_content;
                return Poll::Ready(Ok(Some(piece)));
            }
            let Some(attempt) = self.attempt.as_mut() else {
                if std::mem::take(&mut self.aborted) {
                    return Poll::Ready(Err(Aborted));
                }
                return Poll::Ready(Ok(self.last_words.take()));
            };
            match attempt.source.poll_pull(cx) {
                Poll::Ready(Pulled::Data(chunk)) => {
                    let now = Instant::now();
                    self.guard.token_gap(self.last_content, now);
                    self.last_content = now;
                    if let Step::Fail(_) = self.relay.feed(&chunk) {
                        self.close(false, AttemptResult::Cut, ErrorKind::ProviderDisconnected, CUT);
                    }
                }
                Poll::Ready(Pulled::Complete) => {
                    self.close(true, AttemptResult::Cut, ErrorKind::ProviderDisconnected, CUT);
                }
                Poll::Ready(Pulled::Failed(error)) => {
                    attempt.failed_after_commit(self.guard.metrics(), &error);
                    let (_, result, kind, message) = ending(error.code);
                    self.close(false, result, kind, message);
                }
                Poll::Ready(Pulled::Lost) => {
                    attempt.lease.tell(AttemptResult::NodeLost, None);
                    self.close(false, AttemptResult::NodeLost, ErrorKind::NodeLost, LOST);
                }
                Poll::Pending => {
                    ready!(self.pace.poll_due(cx));
                    if self.relay.between_events() {
                        return Poll::Ready(Ok(Some(KEEP_ALIVE)));
                    }
                }
            }
        }
    }

    /// The terminal event went by: the client's message ends now, the provider gets a moment to end its own.
    fn end(&mut self, kind: TerminalKind, cx: &mut Context<'_>) {
        let Some(mut attempt) = self.attempt.take() else {
            return;
        };
        let failed = kind == TerminalKind::Failed || self.relay.failed_in_band();
        self.finish(&mut attempt, failed);
        let_end(attempt, cx);
    }

    /// The provider's message is complete. `failed`: it says itself that its answer is none.
    fn finish(&mut self, attempt: &mut Attempt, failed: bool) {
        let outcome = if failed {
            // What a provider reports after content is no word on whether to ask it again.
            attempt.guard.settle(AttemptResult::Http5xx);
            Outcome::ProviderError
        } else {
            attempt.settle(AttemptResult::Success);
            Outcome::Success
        };
        // A Responses stream tells its usage with its failure; a Chat stream's error is all that comes.
        let completeness = if failed && self.dialect != Dialect::Responses {
            UsageCompleteness::Incomplete
        } else {
            UsageCompleteness::Complete
        };
        attempt.guard.usage(self.relay.usage(), completeness);
        self.guard.settle(outcome);
    }

    /// The provider's part is over without a terminal event (G22, G56).
    fn close(&mut self, clean: bool, result: AttemptResult, error: ErrorKind, message: &'static str) {
        let Some(mut attempt) = self.attempt.take() else {
            return;
        };
        match self.relay.finish(clean) {
            Ok(Closing::Complete) => self.finish(&mut attempt, self.relay.failed_in_band()),
            closing @ (Ok(Closing::ErrorEvent | Closing::Abort) | Err(_)) => {
                attempt.guard.settle(result);
                attempt
                    .guard
                    .usage(self.relay.usage(), UsageCompleteness::Incomplete);
                self.guard.settle(match error.outcome() {
                    Outcome::ResponseStalled => Outcome::ResponseStalled,
                    Outcome::Success
                    | Outcome::ClientError
                    | Outcome::ProviderError
                    | Outcome::Rejected
                    | Outcome::ClientCancelled
                    | Outcome::Incomplete
                    | Outcome::InternalError => Outcome::Incomplete,
                });
                if matches!(closing, Ok(Closing::ErrorEvent)) {
                    self.last_words = Some(closing::error_event(self.dialect, &self.relay, error, message));
                } else {
                    self.aborted = true;
                }
            }
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Some(attempt) = &mut self.attempt {
            attempt
                .guard
                .usage(self.relay.usage(), UsageCompleteness::Incomplete);
        }
    }
}

/// A body too large to hold, passed on as it comes.
struct Long {
    prefix: Bytes,
    attempt: Option<Attempt>,
    guard: RequestGuard,
    outcome: Outcome,
    /// How the attempt is counted when all of it came.
    result: AttemptResult,
    /// The provider's `content-length`.
    length: Option<u64>,
    sent: u64,
    /// The last bytes that went by, where the usage stands.
    tail: Vec<u8>,
    broken: bool,
}

/// Bytes of a long body's end that are kept to find its usage.
const USAGE_TAIL: usize = 4 << 10;

impl Long {
    fn is_over(&self) -> bool {
        self.attempt.is_none() && self.prefix.is_empty() && !self.broken
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Aborted>> {
        if self.broken {
            return Poll::Ready(Err(Aborted));
        }
        if !self.prefix.is_empty() {
            let piece = std::mem::take(&mut self.prefix);
            return Poll::Ready(self.pass(piece, cx));
        }
        let Some(attempt) = self.attempt.as_mut() else {
            return Poll::Ready(Ok(None));
        };
        let pulled = ready!(attempt.source.poll_pull(cx));
        let whole = self.length.is_none_or(|n| n == self.sent);
        Poll::Ready(match pulled {
            Pulled::Data(piece) => self.pass(piece, cx),
            Pulled::Complete if whole => {
                self.complete(cx);
                Ok(None)
            }
            Pulled::Complete => self.breaks(AttemptResult::Cut),
            Pulled::Failed(error) => {
                attempt.failed_after_commit(self.guard.metrics(), &error);
                self.breaks(ending(error.code).1)
            }
            Pulled::Lost => {
                attempt.lease.tell(AttemptResult::NodeLost, None);
                self.breaks(AttemptResult::NodeLost)
            }
        })
    }

    /// More bytes than announced cannot be sent: the message is broken as much as with fewer. With the last announced
    /// byte the answer is complete: hyper asks for nothing after it.
    fn pass(&mut self, piece: Bytes, cx: &mut Context<'_>) -> Result<Option<Bytes>, Aborted> {
        self.sent += piece.len() as u64;
        if self.length.is_some_and(|n| self.sent > n) {
            return self.breaks(AttemptResult::Cut);
        }
        let kept = piece.len().min(USAGE_TAIL);
        self.tail
            .drain(..(self.tail.len() + kept).saturating_sub(USAGE_TAIL));
        self.tail.extend_from_slice(&piece[piece.len() - kept..]);
        if self.length == Some(self.sent) {
            self.complete(cx);
        }
        Ok(Some(piece))
    }

    fn complete(&mut self, cx: &mut Context<'_>) {
        let Some(mut attempt) = self.attempt.take() else {
            return;
        };
        attempt.settle(self.result);
        if let Some(usage) = usage_from_body(&self.tail) {
            attempt.guard.usage(Some(usage), UsageCompleteness::Complete);
        }
        self.guard.settle(self.outcome);
        let_end(attempt, cx);
    }

    fn breaks(&mut self, result: AttemptResult) -> Result<Option<Bytes>, Aborted> {
        if let Some(mut attempt) = self.attempt.take() {
            attempt.guard.settle(result);
        }
        self.broken = true;
        self.guard.settle(Outcome::Incomplete);
        Err(Aborted)
    }
}

/// The client has all it gets; the provider gets a moment to end its own message, so that its connection can be used again.
fn let_end(mut attempt: Attempt, cx: &mut Context<'_>) {
    loop {
        match attempt.source.poll_pull(cx) {
            Poll::Ready(Pulled::Data(_)) => {}
            Poll::Ready(Pulled::Complete | Pulled::Failed(_) | Pulled::Lost) => return,
            Poll::Pending => break,
        }
    }
    tasks::spawn(tasks::Kind::Session, "drain_after_terminal", async move {
        // Too long: dropping the attempt closes the provider's connection.
        let _ = tokio::time::timeout(DRAIN, async {
            while let Pulled::Data(_) = attempt.source.pull().await {}
        })
        .await;
    });
}

/// A stream opened by keep-alive: comments while the request is still running, then its answer in-band (G53).
struct Opened {
    running: Option<Pin<Box<dyn Future<Output = Ended> + Send>>>,
    /// The public name.
    model: Arc<str>,
    pace: Pace,
    then: Option<Then>,
    greeted: bool,
}

enum Then {
    Live(Box<Live>),
    Said(Option<Bytes>),
}

impl Opened {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Aborted>> {
        if !std::mem::replace(&mut self.greeted, true) {
            self.pace.last = Instant::now();
            return Poll::Ready(Ok(Some(KEEP_ALIVE)));
        }
        if let Some(running) = &mut self.running {
            match running.as_mut().poll(cx) {
                Poll::Pending => {
                    ready!(self.pace.poll_due(cx));
                    return Poll::Ready(Ok(Some(KEEP_ALIVE)));
                }
                Poll::Ready(ended) => {
                    self.running = None;
                    self.then = Some(self.answer(ended));
                }
            }
        }
        match &mut self.then {
            Some(Then::Live(live)) => live.poll(cx),
            Some(Then::Said(words)) => Poll::Ready(Ok(words.take())),
            None => Poll::Ready(Ok(None)),
        }
    }

    fn answer(&self, ended: Ended) -> Then {
        let Ended {
            answer,
            mut guard,
            dialect,
            ..
        } = ended;
        let words = match answer {
            Answer::Stream { relay, attempt, .. } => {
                let pace = Pace::new(self.pace.interval, Instant::now());
                return Then::Live(Box::new(Live::new(relay, attempt, guard, dialect, pace)));
            }
            Answer::Whole { head, body } => {
                guard.settle(outcome_of_status(head.status));
                closing::late_answer(dialect, &self.model, head.status, &body)
            }
            Answer::FailedStream { events, status, .. } => {
                guard.settle(outcome_of_status(status));
                events
            }
            Answer::Long {
                head,
                prefix,
                mut attempt,
            } => {
                attempt.settle(result_of_status(head.status));
                guard.settle(outcome_of_status(head.status));
                closing::late_answer(dialect, &self.model, head.status, &prefix)
            }
            Answer::InBand { status, object } => {
                guard.settle(outcome_of_status(status));
                closing::late_object(dialect, &self.model, &object)
            }
            Answer::Own(error) => {
                guard.settle(error.kind.outcome());
                closing::late_error(dialect, &self.model, error.kind, &error.message)
            }
        };
        Then::Said(Some(words))
    }
}
