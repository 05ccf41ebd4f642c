//! Coalesce when behind (link.md, rule 3): chunks that are ready together leave as one.
//!
//! hyper's HTTP/1.1 client hands decoded chunks over one at a time, through its connection's task, so a plain
//! pass-through costs one write per chunk. A `Gather` that holds a chunk and finds no other gives that task a few turns
//! by waking itself, then lets go. It sets no timer, never waits for the network, and holds no more than one batch.
//!
//! How many turns is learned: a stream whose chunks come alone soon pays none, one that is behind pays up to three.

use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use iop_shared::wire::terminal::NodeError;

/// Bytes after which a batch leaves without looking for more.
const BATCH: usize = 32 << 10;
/// Turns given away at most. A body is polled twice in one turn of hyper's, so one is not enough.
const TURNS: u8 = 3;
/// Chunks closer together than this belong to a burst.
const CLOSE: Duration = Duration::from_millis(1);

/// Where chunks come from.
pub(crate) trait Source {
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, NodeError>>>;
    /// Known to have no more, without polling.
    fn is_end(&self) -> bool;
}

/// Turns worth giving away, learned from what they brought. Pure.
#[derive(Debug)]
struct Patience {
    turns: u8,
    last: Option<Instant>,
}

impl Patience {
    const fn new() -> Self {
        Self {
            turns: TURNS,
            last: None,
        }
    }

    /// The first chunk of a batch arrived.
    fn begin(&mut self, now: Instant) {
        if self
            .last
            .is_some_and(|last| now.saturating_duration_since(last) < CLOSE)
        {
            self.turns = TURNS;
        }
        self.last = Some(now);
    }

    /// A batch of that many chunks left.
    fn end(&mut self, chunks: usize) {
        self.turns = if chunks > 1 {
            TURNS
        } else {
            self.turns.saturating_sub(1)
        };
    }
}

/// A source whose chunks leave in batches.
pub(crate) struct Gather<S> {
    source: S,
    pieces: Vec<Bytes>,
    held_bytes: usize,
    /// Turns given away since the last chunk.
    given: u8,
    patience: Patience,
    /// The source's end, kept until what is held has left.
    end: Option<Result<(), NodeError>>,
}

impl<S: Source> Gather<S> {
    pub(crate) fn new(source: S) -> Self {
        Self {
            source,
            pieces: Vec::new(),
            held_bytes: 0,
            given: 0,
            patience: Patience::new(),
            end: None,
        }
    }

    pub(crate) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, NodeError>>> {
        loop {
            if self.end.is_some() || self.held_bytes >= BATCH {
                if !self.pieces.is_empty() {
                    return Poll::Ready(Some(Ok(self.batch())));
                }
                return Poll::Ready(match self.end.replace(Ok(())) {
                    Some(Err(e)) => Some(Err(e)),
                    Some(Ok(())) | None => None,
                });
            }
            match self.source.poll_data(cx) {
                Poll::Ready(Some(Ok(piece))) => {
                    if piece.is_empty() {
                        continue;
                    }
                    if self.pieces.is_empty() {
                        self.patience.begin(Instant::now());
                    }
                    self.held_bytes += piece.len();
                    self.pieces.push(piece);
                    self.given = 0;
                    if self.source.is_end() {
                        self.end = Some(Ok(()));
                    }
                }
                Poll::Ready(Some(Err(e))) => self.end = Some(Err(e)),
                Poll::Ready(None) => self.end = Some(Ok(())),
                Poll::Pending if self.pieces.is_empty() => return Poll::Pending,
                Poll::Pending if self.given < self.patience.turns => {
                    self.given += 1;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Pending => return Poll::Ready(Some(Ok(self.batch()))),
            }
        }
    }

    pub(crate) fn has_some(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// What is held, as one piece; a lone chunk is not copied.
    fn batch(&mut self) -> Bytes {
        self.patience.end(self.pieces.len());
        self.given = 0;
        let held = std::mem::take(&mut self.held_bytes);
        if self.pieces.len() == 1 {
            return self.pieces.pop().unwrap_or_default();
        }
        let mut all = BytesMut::with_capacity(held);
        for piece in self.pieces.drain(..) {
            all.extend_from_slice(&piece);
        }
        all.freeze()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use iop_shared::execution::FailureCode;
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Chunk(usize),
        /// Nothing now; more at the next poll.
        Turn,
        /// Nothing until woken from outside.
        Silence,
    }

    struct Scripted {
        steps: VecDeque<Step>,
        sent: Vec<u8>,
        fails: bool,
    }

    impl Source for Scripted {
        fn poll_data(&mut self, _: &mut Context<'_>) -> Poll<Option<Result<Bytes, NodeError>>> {
            match self.steps.front().cloned() {
                Some(Step::Chunk(n)) => {
                    self.steps.pop_front();
                    let from = self.sent.len();
                    self.sent.extend((0..n).map(|i| (from + i) as u8));
                    Poll::Ready(Some(Ok(Bytes::copy_from_slice(&self.sent[from..]))))
                }
                Some(Step::Turn) => {
                    self.steps.pop_front();
                    Poll::Pending
                }
                Some(Step::Silence) => Poll::Pending,
                None if std::mem::take(&mut self.fails) => {
                    Poll::Ready(Some(Err(NodeError::new(FailureCode::ProviderCut, "cut"))))
                }
                None => Poll::Ready(None),
            }
        }
        fn is_end(&self) -> bool {
            self.steps.is_empty() && !self.fails
        }
    }

    #[derive(Default)]
    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn gather(steps: Vec<Step>, fails: bool) -> Gather<Scripted> {
        Gather::new(Scripted {
            steps: steps.into(),
            sent: Vec::new(),
            fails,
        })
    }

    /// Polls as a runtime would: again only when woken. Gives the batches and how it ended.
    fn run(g: &mut Gather<Scripted>) -> (Vec<Bytes>, Option<Result<(), NodeError>>) {
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut cx = Context::from_waker(&waker);
        let mut out = Vec::new();
        loop {
            let woken = count.0.load(Ordering::SeqCst);
            match g.poll_data(&mut cx) {
                Poll::Ready(Some(Ok(b))) => out.push(b),
                Poll::Ready(Some(Err(e))) => return (out, Some(Err(e))),
                Poll::Ready(None) => return (out, Some(Ok(()))),
                Poll::Pending if count.0.load(Ordering::SeqCst) > woken => assert!(g.has_some()),
                Poll::Pending => {
                    assert!(!g.has_some());
                    // Otherwise the source itself is what wakes.
                    if let Some(Step::Silence) = g.source.steps.front() {
                        return (out, None);
                    }
                }
            }
        }
    }

    #[test]
    fn chunks_a_turn_apart_leave_together() {
        let mut g = gather(
            vec![
                Step::Chunk(3),
                Step::Turn,
                Step::Chunk(4),
                Step::Turn,
                Step::Turn,
                Step::Chunk(5),
            ],
            false,
        );
        let (out, end) = run(&mut g);
        assert_eq!(out.iter().map(Bytes::len).collect::<Vec<_>>(), [12]);
        assert_eq!(end, Some(Ok(())));
    }

    #[test]
    fn a_chunk_that_is_alone_leaves_before_silence() {
        let mut g = gather(vec![Step::Chunk(3), Step::Silence], false);
        let (out, end) = run(&mut g);
        assert_eq!((out.len(), end), (1, None));
    }

    #[test]
    fn what_was_held_leaves_before_the_error() {
        let mut g = gather(vec![Step::Chunk(3), Step::Turn, Step::Chunk(3)], true);
        let (out, end) = run(&mut g);
        assert_eq!(out.iter().map(Bytes::len).sum::<usize>(), 6);
        assert_eq!(end.unwrap().unwrap_err().code, FailureCode::ProviderCut);
    }

    #[test]
    fn patience_is_lost_to_lone_chunks_and_found_in_a_burst() {
        let start = Instant::now();
        let mut p = Patience::new();
        for i in 0..4 {
            p.begin(start + Duration::from_millis(20 * i));
            p.end(1);
        }
        assert_eq!(p.turns, 0);
        p.begin(start + Duration::from_micros(60_300));
        assert_eq!(p.turns, TURNS);
        p.end(1);
        assert_eq!(p.turns, TURNS - 1);
        p.end(2);
        assert_eq!(p.turns, TURNS);
    }

    proptest! {
        #[test]
        fn bytes_arrive_once_in_order_and_never_wait_for_silence(
            steps in proptest::collection::vec(prop_oneof![(0usize..20_000).prop_map(Step::Chunk), Just(Step::Turn)], 0..40),
            fails in any::<bool>(),
            silent in any::<bool>(),
        ) {
            let mut steps = steps;
            if silent { steps.push(Step::Silence); }
            let mut g = gather(steps, fails);
            let (out, end) = run(&mut g);
            prop_assert_eq!(out.concat(), g.source.sent.clone());
            prop_assert_eq!(end.is_none(), silent);
            prop_assert!(out.iter().all(|b| !b.is_empty() && b.len() < BATCH + 20_000));
            if !silent {
                prop_assert_eq!(end.unwrap().is_err(), fails);
            }
        }
    }
}
