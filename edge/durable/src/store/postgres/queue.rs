//! What is waiting to be written, and which of it goes together. No batch is waited for: a committer takes what is there.

use std::collections::{HashSet, VecDeque};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::work::Write;
use crate::ids::RunId;

/// The most writes of a batch.
const BATCH_MAX: usize = 256;
/// A batch ends when it is about this large; a larger write goes alone.
const BATCH_BYTES: usize = 4 << 20;

/// Writes of all callers, in the order they came.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    ready: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Write>,
    /// Runs that a committer is writing at this moment.
    busy: HashSet<RunId>,
    closed: bool,
}

/// Whether two writes can share a statement.
fn same_kind(a: &Write, b: &Write) -> bool {
    matches!(
        (a, b),
        (Write::Create(_), Write::Create(_))
            | (Write::Commit(_), Write::Commit(_))
            | (Write::Post(_), Write::Post(_))
    )
}

/// Takes a batch: of one kind, in order, one write per run and none of a run that is busy. A write that is passed over keeps
/// its place, and those of its run behind it do too.
fn take(waiting: &mut VecDeque<Write>, busy: &HashSet<RunId>) -> Vec<Write> {
    let mut batch: Vec<Write> = Vec::new();
    let mut bytes = 0;
    let mut seen: HashSet<RunId> = HashSet::new();
    let mut passed: Vec<Write> = Vec::new();
    while batch.len() < BATCH_MAX && bytes < BATCH_BYTES {
        let Some(write) = waiting.pop_front() else {
            break;
        };
        let first_of_run = seen.insert(write.run().clone());
        let fits = batch
            .first()
            .is_none_or(|first| same_kind(first, &write) && bytes + write.bytes() <= BATCH_BYTES);
        if fits && first_of_run && !busy.contains(write.run()) {
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
        self.ready.notify_one();
        Ok(())
    }

    /// The next batch; its runs are busy until `done`. `None` when the store is closed and nothing is left.
    pub(super) async fn next(&self) -> Option<Vec<Write>> {
        loop {
            {
                let mut state = self.state.lock();
                let State {
                    waiting,
                    busy,
                    closed,
                } = &mut *state;
                let batch = take(waiting, busy);
                if !batch.is_empty() {
                    busy.extend(batch.iter().map(|write| write.run().clone()));
                    return Some(batch);
                }
                if *closed && waiting.is_empty() {
                    // The next committer is to see it too.
                    self.ready.notify_one();
                    return None;
                }
            }
            self.ready.notified().await;
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
            self.ready.notify_one();
        }
    }

    /// Takes nothing more; what is queued is still written.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.ready.notify_waiters();
        self.ready.notify_one();
    }
}
