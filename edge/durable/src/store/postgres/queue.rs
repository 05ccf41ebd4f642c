//! What is waiting to be written, and which of it goes together.
//!
//! Nobody waits for a batch to fill. A committer lets those who can push at this moment do so, which costs nothing when there are
//! none, and takes what is there. While one batch is under way the disk is busy with it: a second is worth its own wait for the
//! disk when it is as large as the first, or when the first takes long because it waits for a lock. Creations share no statement
//! with what runs write, and who asks for one is kept waiting by it (durable-api section 7): they go beside whatever else is under way.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::work::{Kind, Write};
use crate::ids::RunId;

/// The most writes of a batch.
const BATCH_MAX: usize = 256;
/// A batch ends when it is about this large; a larger write goes alone.
const BATCH_BYTES: usize = 4 << 20;

/// How often callers that are ready to run are let run before a batch is taken.
const YIELDS: usize = 4;
/// What is worth a second batch beside one that is under way, at least.
const SECOND_MIN: usize = 16;
/// For how long a smaller one waits for the first.
const PATIENCE: Duration = Duration::from_millis(20);

/// Writes of all callers, in the order they came.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    /// The committer that waited last goes first: its connection and the server's process behind it are warm.
    ready: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Write>,
    busy: Busy,
    closed: bool,
}

/// Runs that a committer is writing at this moment, and what is written of each.
type Busy = HashMap<RunId, Kind>;

/// Takes a batch: of one kind, the one that is asked for or that of the first, in order, one write per run and none of a run that
/// is busy. A write that is passed over keeps its place, and those of its run behind it do too.
fn take(waiting: &mut VecDeque<Write>, busy: &Busy, mut kind: Option<Kind>) -> Vec<Write> {
    let mut batch: Vec<Write> = Vec::new();
    let mut bytes = 0;
    let mut seen: HashSet<RunId> = HashSet::new();
    let mut passed: Vec<Write> = Vec::new();
    while batch.len() < BATCH_MAX && bytes < BATCH_BYTES {
        let Some(write) = waiting.pop_front() else {
            break;
        };
        let first_of_run = seen.insert(write.run().clone());
        let fits = kind.is_none_or(|kind| write.kind() == kind)
            && (batch.is_empty() || bytes + write.bytes() <= BATCH_BYTES);
        if fits && first_of_run && !busy.contains_key(write.run()) {
            kind = Some(write.kind());
            bytes += write.bytes();
            batch.push(write);
        } else {
            passed.push(write);
        }
    }
    for write in passed.into_iter().rev() {
        waiting.push_front(write);
    }
    batch
}

impl Queue {
    /// Gives it back when the store is closed.
    pub(super) fn push(&self, write: Write) -> Result<(), Write> {
        {
            let mut state = self.state.lock();
            if state.closed {
                return Err(write);
            }
            state.waiting.push_back(write);
        }
        self.ready.notify_last();
        Ok(())
    }

    /// The next batch; its runs are busy until `done`. `None` when the store is closed and nothing is left.
    pub(super) async fn next(&self) -> Option<Vec<Write>> {
        let mut impatient = false;
        loop {
            self.gather().await;
            let waits = {
                let mut state = self.state.lock();
                let State {
                    waiting,
                    busy,
                    closed,
                } = &mut *state;
                let any = busy.is_empty() || waiting.len() >= busy.len().max(SECOND_MIN) || impatient;
                let creates = busy.values().any(|kind| *kind == Kind::Create);
                if any || !creates {
                    let batch = take(waiting, busy, (!any).then_some(Kind::Create));
                    if !batch.is_empty() {
                        busy.extend(batch.iter().map(|write| (write.run().clone(), write.kind())));
                        return Some(batch);
                    }
                }
                if *closed && waiting.is_empty() {
                    // The next committer is to see it too.
                    self.ready.notify_one();
                    return None;
                }
                !waiting.is_empty()
            };
            impatient = if waits {
                tokio::time::timeout(PATIENCE, self.ready.notified())
                    .await
                    .is_err()
            } else {
                self.ready.notified().await;
                false
            };
        }
    }

    /// Lets callers push that are ready to, for as long as there are any.
    async fn gather(&self) {
        let mut waiting = self.state.lock().waiting.len();
        for _ in 0..YIELDS {
            if waiting == 0 || waiting >= BATCH_MAX {
                return;
            }
            tokio::task::yield_now().await;
            let more = self.state.lock().waiting.len();
            if more == waiting {
                return;
            }
            waiting = more;
        }
    }

    /// These runs are written.
    pub(super) fn done<'a>(&self, runs: impl Iterator<Item = &'a RunId>) {
        let waiting = {
            let mut state = self.state.lock();
            for run in runs {
                state.busy.remove(run);
            }
            !state.waiting.is_empty()
        };
        if waiting {
            self.ready.notify_last();
        }
    }

    /// Takes nothing more; what is queued is still written.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.ready.notify_waiters();
        self.ready.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::sync::oneshot;

    use super::*;
    use crate::store::postgres::work::{Creation, Job, Posting, Rows};
    use crate::testing::build;
    use crate::time::Timestamp;

    fn post(run: &str) -> Write {
        let (reply, _) = oneshot::channel();
        Write::Post(Box::new(Job {
            run: RunId::new(run).unwrap(),
            work: Posting {
                signal: 0,
                cancel: None,
                wake: true,
                rows: Rows::default(),
            },
            reply,
        }))
    }

    fn creation(run: &str) -> Write {
        let run = RunId::new(run).unwrap();
        let (reply, _) = oneshot::channel();
        let work = Creation::new(build::create(&run, Timestamp::from_millis(1).unwrap())).unwrap();
        Write::Create(Box::new(Job { run, work, reply }))
    }

    fn runs(writes: impl IntoIterator<Item = Write>) -> Vec<String> {
        writes
            .into_iter()
            .map(|write| write.run().as_str().to_owned())
            .collect()
    }

    proptest! {
        /// However writes come and go: each is in one batch, no batch has two of a run or one of a busy run, and those of one
        /// run keep their order.
        #[test]
        fn batches_are_disjoint_and_keep_the_order_of_each_run(
            arrivals in proptest::collection::vec((0..6_u8, 0..4_u8), 0..40),
        ) {
            let mut waiting = VecDeque::new();
            let mut under_way: Vec<Vec<String>> = Vec::new();
            let mut taken: Vec<String> = Vec::new();
            let mut signals: Vec<i64> = Vec::new();
            let mut come = 0;
            for (run, turn) in arrivals {
                let mut write = post(&run.to_string());
                if let Write::Post(job) = &mut write {
                    job.work.signal = come;
                }
                come += 1;
                waiting.push_back(write);
                if turn == 0 && !under_way.is_empty() {
                    under_way.remove(0);
                }
                if turn <= 1 && under_way.len() < 2 {
                    let busy = under_way.iter().flatten().map(|run| (RunId::new(run).unwrap(), Kind::Post)).collect();
                    let batch = take(&mut waiting, &busy, None);
                    signals.extend(batch.iter().map(|write| match write {
                        Write::Post(job) => job.work.signal,
                        Write::Create(_) | Write::Commit(_) => unreachable!(),
                    }));
                    let batch = runs(batch);
                    let distinct: HashSet<_> = batch.iter().collect();
                    prop_assert_eq!(distinct.len(), batch.len());
                    prop_assert!(batch.iter().all(|run| !under_way.iter().flatten().any(|other| other == run)));
                    taken.extend(batch.iter().cloned());
                    under_way.push(batch);
                }
            }
            while !waiting.is_empty() {
                let batch = take(&mut waiting, &Busy::new(), None);
                prop_assert!(!batch.is_empty());
                signals.extend(batch.iter().map(|write| match write {
                    Write::Post(job) => job.work.signal,
                    Write::Create(_) | Write::Commit(_) => unreachable!(),
                }));
                taken.extend(runs(batch));
            }
            prop_assert_eq!(i64::try_from(taken.len()).unwrap(), come);
            for run in 0..6_u8 {
                let run = run.to_string();
                let order: Vec<i64> = taken.iter().zip(&signals).filter(|(r, _)| **r == run).map(|(_, s)| *s).collect();
                prop_assert!(order.is_sorted(), "{:?}", order);
            }
        }
    }

    #[test]
    fn a_batch_is_bounded_and_a_large_write_goes_alone() {
        let mut waiting: VecDeque<Write> = (0..BATCH_MAX + 10).map(|n| post(&format!("r{n}"))).collect();
        assert_eq!(take(&mut waiting, &Busy::new(), None).len(), BATCH_MAX);
        assert_eq!(waiting.len(), 10);
        let mut large = post("large");
        if let Write::Post(job) = &mut large {
            job.work.rows.blobs.push(crate::envelope::BlobRow {
                digest: [0; 32],
                bytes: vec![0; BATCH_BYTES + 1].into(),
            });
        }
        waiting.push_front(large);
        waiting.push_front(post("small"));
        assert_eq!(
            runs(take(&mut waiting, &Busy::new(), None)).len(),
            11,
            "the others pass it"
        );
        assert_eq!(runs(take(&mut waiting, &Busy::new(), None)), ["large"]);
        assert!(waiting.is_empty());
    }

    /// The one that waits has a long patience: the clock stands still.
    #[tokio::test(start_paused = true)]
    async fn a_creation_waits_for_creations_only() {
        let queue = Queue::default();
        assert!(queue.push(post("a")).is_ok());
        let under_way = queue.next().await.unwrap();
        assert_eq!(runs(under_way), ["a"]);
        for write in [post("b"), creation("c"), post("d"), creation("e")] {
            assert!(queue.push(write).is_ok());
        }
        let began = tokio::time::Instant::now();
        let creations = queue.next().await.unwrap();
        assert_eq!(runs(creations), ["c", "e"]);
        assert_eq!(began.elapsed(), Duration::ZERO);
        // One statement of creations at a time: the next ones gather meanwhile.
        assert!(queue.push(creation("f")).is_ok());
        let next = queue.next();
        tokio::pin!(next);
        assert!(futures_util::poll!(next.as_mut()).is_pending());
        queue.done([RunId::new("c").unwrap(), RunId::new("e").unwrap()].iter());
        assert_eq!(runs(next.await.unwrap()), ["f"]);
        assert_eq!(began.elapsed(), Duration::ZERO);
        // What was passed over kept its place.
        queue.done([RunId::new("a").unwrap(), RunId::new("f").unwrap()].iter());
        assert_eq!(runs(queue.next().await.unwrap()), ["b", "d"]);
    }

    #[tokio::test]
    async fn a_closed_queue_is_written_to_its_end_by_every_committer() {
        let queue = Queue::default();
        assert!(queue.push(post("a")).is_ok());
        let first = queue.next().await.unwrap();
        assert!(queue.push(post("a")).is_ok());
        queue.close();
        assert!(queue.push(post("b")).is_err());
        let committer = async || {
            let mut written = Vec::new();
            while let Some(batch) = queue.next().await {
                queue.done(batch.iter().map(Write::run));
                written.extend(runs(batch));
            }
            written
        };
        let first_is_done = async {
            tokio::task::yield_now().await;
            queue.done(first.iter().map(Write::run));
        };
        let (mut one, two, ()) = tokio::join!(committer(), committer(), first_is_done);
        one.extend(two);
        assert_eq!(one, ["a"]);
    }
}
