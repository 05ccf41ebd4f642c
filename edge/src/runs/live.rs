//! Who follows a run in this process: told at once of what is committed here, and of the pieces of a turn as they come. What is
//! committed elsewhere is found by looking.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use iop_durable::ids::RunId;
use iop_durable::record::EventRecord;
use iop_durable::store::Store;
use parking_lot::Mutex;
use tokio::sync::{broadcast, watch};

use super::problem::Problem;
use crate::agents::journal::TURN_COMPLETED;

/// Events that are read at once.
const PAGE: u32 = 200;
/// Looks at a run that tells nothing, after which it is asked for itself: one that was deleted tells nothing any more.
const LOOKS: u32 = 4;
/// Pieces that a slow follower may be behind; more are lost to it, as they are not stored.
const PIECES: usize = 1024;

/// The runs that are followed.
#[derive(Default)]
pub(crate) struct Live {
    runs: Mutex<HashMap<RunId, Weak<Channel>>>,
}

struct Channel {
    /// The number of the last event that was committed here.
    committed: watch::Sender<u64>,
    /// Made when somebody wants pieces: most who follow wait for an end.
    pieces: OnceLock<broadcast::Sender<Piece>>,
}

/// A piece of a turn's answer.
#[derive(Debug, Clone)]
struct Piece {
    turn: u64,
    data: Bytes,
}

impl Live {
    /// Follows a run from behind this event. `poll`: how often the store is looked at without a word.
    pub(crate) fn follow(&self, store: Arc<dyn Store>, run: &RunId, after: u64, poll: Duration) -> Follow {
        let channel = {
            let mut runs = self.runs.lock();
            match runs.get(run).and_then(Weak::upgrade) {
                Some(channel) => channel,
                None => {
                    let channel = Arc::new(Channel {
                        committed: watch::channel(0).0,
                        pieces: OnceLock::new(),
                    });
                    // Who stopped following leaves an empty place.
                    if runs.len() >= 64 && runs.len().is_power_of_two() {
                        runs.retain(|_, channel| channel.strong_count() > 0);
                    }
                    runs.insert(run.clone(), Arc::downgrade(&channel));
                    channel
                }
            }
        };
        Follow {
            run: run.clone(),
            store,
            poll,
            after,
            page: VecDeque::new(),
            pieces: VecDeque::new(),
            committed: channel.committed.subscribe(),
            incoming: None,
            read: None,
            looks: 0,
            channel,
        }
    }

    /// An event up to this number is in the store.
    pub(crate) fn committed(&self, run: &RunId, event_seq: u64) {
        if let Some(channel) = self.channel(run) {
            channel.committed.send_if_modified(|seq| {
                let news = event_seq > *seq;
                *seq = event_seq.max(*seq);
                news
            });
        }
    }

    /// A piece of a turn; `data` is made only where somebody follows.
    pub(crate) fn delta(&self, run: &RunId, turn: u64, data: impl FnOnce() -> Bytes) {
        if let Some(channel) = self.channel(run)
            && let Some(pieces) = channel.pieces.get()
        {
            let _ = pieces.send(Piece { turn, data: data() });
        }
    }

    fn channel(&self, run: &RunId) -> Option<Arc<Channel>> {
        let mut runs = self.runs.lock();
        let channel = runs.get(run)?.upgrade();
        if channel.is_none() {
            runs.remove(run);
        }
        channel
    }
}

/// Something that happened to a followed run.
#[derive(Debug, Clone)]
pub(crate) enum Update {
    /// Stored; in order and without a gap.
    Event(EventRecord),
    /// The data of `run.turn.delta`: of turns that run in this process, never stored.
    Delta(Bytes),
}

/// One follower. Reading is from the store, so a slow one costs no memory.
pub(crate) struct Follow {
    run: RunId,
    store: Arc<dyn Store>,
    poll: Duration,
    after: u64,
    page: VecDeque<EventRecord>,
    pieces: VecDeque<Piece>,
    committed: watch::Receiver<u64>,
    /// `None` for who wants events alone.
    incoming: Option<broadcast::Receiver<Piece>>,
    /// What was known to be committed when the store was last read.
    read: Option<u64>,
    /// Looks since the last event.
    looks: u32,
    channel: Arc<Channel>,
}

impl Follow {
    /// The pieces of turns too, from here on.
    pub(crate) fn with_pieces(mut self) -> Self {
        let pieces = self.channel.pieces.get_or_init(|| broadcast::channel(PIECES).0);
        self.incoming = Some(pieces.subscribe());
        self
    }

    /// What happens next; waits for it.
    ///
    /// # Errors
    /// `run_not_found`, `run_deleted`; the store's: reading may go on after it.
    pub(crate) async fn next(&mut self) -> Result<Update, Problem> {
        loop {
            self.gather();
            if let Some(event) = self.page.front() {
                // The pieces of an answer come before the answer.
                let turn = (!self.pieces.is_empty()).then(|| completed_turn(event)).flatten();
                if let (Some(turn), Some(piece)) = (turn, self.pieces.front())
                    && piece.turn <= turn
                    && let Some(piece) = self.pieces.pop_front()
                {
                    return Ok(Update::Delta(piece.data));
                }
                if let Some(event) = self.page.pop_front() {
                    self.after = event.seq;
                    return Ok(Update::Event(event));
                }
            }
            let known = *self.committed.borrow_and_update();
            if self.read.is_none_or(|read| known > read.max(self.after)) {
                let page = self.store.events(&self.run, self.after, PAGE).await?;
                let full = page.len() as u64 >= u64::from(PAGE);
                self.read = (!full).then_some(known);
                if !page.is_empty() {
                    self.looks = 0;
                    self.page.extend(page);
                    continue;
                }
                self.looks += 1;
                if self.looks.is_multiple_of(LOOKS) {
                    self.store.load(&self.run).await?;
                }
            }
            if let Some(piece) = self.pieces.pop_front() {
                return Ok(Update::Delta(piece.data));
            }
            tokio::select! {
                biased;
                piece = received(&mut self.incoming) => match piece {
                    Ok(piece) => self.pieces.push_back(piece),
                    // What is lost is not stored either.
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => self.read = None,
                },
                // The sender lives as long as this follower.
                _ = self.committed.changed() => self.read = None,
                () = tokio::time::sleep(self.poll) => self.read = None,
            }
        }
    }

    fn gather(&mut self) {
        let Some(incoming) = &mut self.incoming else {
            return;
        };
        while self.pieces.len() < PIECES {
            match incoming.try_recv() {
                Ok(piece) => self.pieces.push_back(piece),
                Err(broadcast::error::TryRecvError::Lagged(_)) => {}
                Err(broadcast::error::TryRecvError::Empty | broadcast::error::TryRecvError::Closed) => return,
            }
        }
    }
}

/// The next piece, for who wants pieces.
async fn received(
    incoming: &mut Option<broadcast::Receiver<Piece>>,
) -> Result<Piece, broadcast::error::RecvError> {
    match incoming {
        Some(incoming) => incoming.recv().await,
        None => std::future::pending().await,
    }
}

/// The turn that an event tells the end of.
fn completed_turn(event: &EventRecord) -> Option<u64> {
    #[derive(serde::Deserialize)]
    struct Turn {
        turn: u64,
    }
    if event.name != TURN_COMPLETED {
        return None;
    }
    serde_json::from_slice::<Turn>(&event.data)
        .ok()
        .map(|turn| turn.turn)
}

#[cfg(test)]
mod tests;
