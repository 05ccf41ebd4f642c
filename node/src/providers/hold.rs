//! What the node holds of a provider while an attempt runs, seen from outside, so that a fence is an observation and no
//! guess (004, close-grace fence), and so that letting go means that it goes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use tokio_util::sync::CancellationToken;

/// The connection does not wait for its peer to take anything.
const FREE: u8 = 0;
/// It does.
const BLOCKED: u8 = 1;
/// It did when nobody wanted it any more.
const CUT: u8 = 2;

#[derive(Debug, Default)]
struct Ends {
    /// What was held is gone.
    gone: CancellationToken,
    sending: AtomicU8,
    sender: AtomicWaker,
}

/// Lives inside of what is held, a connection or a place in an engine, and is dropped with it.
pub(crate) struct Holding(Arc<Ends>);

/// Sees the end of its `Holding`, and can bring it about.
#[derive(Debug, Clone)]
pub(crate) struct Held(Arc<Ends>);

impl Holding {
    pub(crate) fn new() -> Self {
        Self(Arc::default())
    }

    pub(crate) fn held(&self) -> Held {
        Held(Arc::clone(&self.0))
    }

    /// The peer took what was sent.
    pub(crate) fn flows(&self) {
        if self.0.sending.load(Ordering::Relaxed) == BLOCKED {
            self.swap(BLOCKED, FREE);
        }
    }

    /// The peer takes nothing now. Ready when it need not be waited for.
    pub(crate) fn poll_blocked(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.sender.register(cx.waker());
        if self.swap(FREE, BLOCKED) == CUT {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// The state before.
    fn swap(&self, from: u8, to: u8) -> u8 {
        let swapped = self
            .0
            .sending
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
        swapped.unwrap_or_else(|other| other)
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.0.gone.cancel();
    }
}

impl Held {
    /// Breaks off a request that its peer does not take. Any other connection closes without help, and one that serves
    /// another request by now is left alone.
    fn cut(&self) {
        let ends = &self.0;
        let cut = ends
            .sending
            .compare_exchange(BLOCKED, CUT, Ordering::AcqRel, Ordering::Acquire);
        if cut.is_ok() {
            ends.sender.wake();
        }
    }
}

/// The hold of one attempt. Dropped while the provider is waited for, it cuts: hyper itself would keep the connection
/// until a peer that does not read has taken all of a request.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    /// `None`: nothing was taken yet.
    on: Option<Held>,
    /// Output was asked for last and there was none, or the call has no head yet: what is held serves this attempt.
    waits: bool,
}

impl Hold {
    /// This is what the call has got.
    pub(crate) fn take(&mut self, held: Held) {
        self.on = Some(held);
        self.waits = true;
    }

    /// Whether the provider is waited for.
    pub(crate) fn waits(&mut self, waits: bool) {
        self.waits = waits;
    }

    /// Lets go, and resolves when the node holds nothing of the provider any more. To be called after the call or body
    /// was dropped: one that never got a connection gets none then.
    pub(crate) async fn end(mut self) {
        if let Some(held) = self.on.take() {
            held.cut();
            held.0.gone.cancelled().await;
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.waits
            && let Some(held) = &self.on
        {
            held.cut();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Waker;
    use std::time::Duration;

    use futures_util::FutureExt;
    use http::{HeaderMap, HeaderValue, Method};
    use http_body_util::Full;

    use super::*;
    use crate::providers::client::{Client, SendBody, Target};
    use crate::testing::{DO, Stub};

    fn on(holding: &Holding) -> Hold {
        let mut hold = Hold::default();
        hold.take(holding.held());
        hold
    }

    fn blocked(holding: &Holding) -> Poll<()> {
        holding.poll_blocked(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_hold_ends_with_what_is_held_and_nothing_held_has_ended() {
        assert!(Hold::default().end().now_or_never().is_some());
        let holding = Holding::new();
        let mut ended = Box::pin(on(&holding).end());
        assert!(ended.as_mut().now_or_never().is_none());
        drop(holding);
        assert!(ended.now_or_never().is_some());
    }

    #[test]
    fn only_what_is_blocked_and_waited_for_is_cut() {
        for (is_blocked, waits) in [(false, false), (false, true), (true, false), (true, true)] {
            let holding = Holding::new();
            let mut hold = on(&holding);
            hold.waits(waits);
            assert!(!is_blocked || blocked(&holding).is_pending());
            drop(hold);
            assert_eq!(blocked(&holding).is_ready(), is_blocked && waits);
        }
    }

    #[test]
    fn a_connection_that_flows_again_is_not_blocked_and_one_that_was_cut_stays_cut() {
        let holding = Holding::new();
        assert!(blocked(&holding).is_pending());
        holding.flows();
        drop(on(&holding));
        assert!(blocked(&holding).is_pending());
        drop(on(&holding));
        holding.flows();
        assert!(blocked(&holding).is_ready());
    }

    #[tokio::test]
    async fn a_client_that_leaves_does_not_wait_for_a_peer_that_never_reads() {
        let stub = Stub::start().await;
        let client = Client::new(Duration::from_secs(5));
        let to = Target::parse(&stub.url).unwrap();
        let headers = HeaderMap::from_iter([(DO, HeaderValue::from_static("never-read"))]);
        let body = SendBody::new(Full::new(bytes::Bytes::from(vec![0; 32 << 20])));
        let mut hold = Hold::default();
        {
            let mut send = pin!(client.send_held(Method::POST, to, headers, body, &mut hold));
            tokio::select! {
                _ = &mut send => panic!("answered"),
                () = stub.arrived(1) => {}
            }
        }
        let held = hold.on.take().unwrap();
        // The request was dropped; its connection still has to get rid of what it had taken of it.
        while held.0.sending.load(Ordering::Acquire) != BLOCKED {
            tokio::task::yield_now().await;
        }
        assert!(!held.0.gone.is_cancelled());
        hold.take(held.clone());
        drop(hold);
        let gone = tokio::time::timeout(Duration::from_secs(2), held.0.gone.cancelled());
        assert!(gone.await.is_ok());
    }
}
