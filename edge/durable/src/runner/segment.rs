//! One stretch of a run under one lease: from a start, a claim or a resume to the next park or end. The order of things in it
//! is the resume pipeline of seed 003.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::failure::{Failure, FailureKind};
use crate::graph::NodeError;
use crate::ids::ActivityId;
use crate::payload::Payload;
use crate::record::{CancelRequest, Exhausted, RunHead};
use crate::runner::draft::{Draft, Halt, persist, read_on};
use crate::runner::drive::{Ending, Why};
use crate::runner::ending;
use crate::runner::keeper::Held;
use crate::runner::ledger::{Holding, Ledger};
use crate::runner::{Inner, RunError, journal};
use crate::store::{Acquired, Authority, StoreError};
use crate::time::Timestamp;

/// How long a store that could not be read is left alone.
const DEAF: Duration = Duration::from_millis(100);

pub(crate) struct Segment<S, E> {
    pub(crate) inner: Arc<Inner<S, E>>,
    pub(crate) held: Arc<Held>,
    pub(crate) head: RunHead,
    pub(crate) state: Payload,
    pub(crate) ledger: Arc<Ledger>,
    /// The inbox as last read.
    pub(crate) signal: u64,
    pub(crate) cancel: Option<CancelRequest>,
    /// The revision at which old checkpoints were last dropped.
    pruned_at: u64,
    /// Activations of this segment.
    pub(crate) steps: u64,
    pub(crate) entered_at: Timestamp,
    /// What was open when the node was last sent back to it.
    sent_back: Option<SentBack>,
    /// The inbox could not be read: not before then again.
    pub(crate) deaf_until: Option<Instant>,
    pub(crate) published: Option<tokio::sync::watch::Sender<u64>>,
    pub(crate) stop: tokio::sync::watch::Receiver<bool>,
}

/// A node that was sent back to the calls it left open.
#[derive(Debug, PartialEq, Eq)]
struct SentBack {
    activation: u64,
    attempt: u32,
    /// Each open call with the number of its attempts.
    open: Vec<(ActivityId, usize)>,
}

/// What a step leads to.
pub(crate) enum Turn {
    /// The next node, or the same one again.
    On,
    /// Parked or over: committed, lease released.
    Done,
}

impl<S, E> Segment<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// Opens a run somebody holds.
    pub(crate) async fn open(
        inner: Arc<Inner<S, E>>,
        acquired: Acquired,
        held: Held,
        published: Option<tokio::sync::watch::Sender<u64>>,
        stop: tokio::sync::watch::Receiver<bool>,
    ) -> Result<Self, RunError> {
        let held = Arc::new(held);
        let Acquired { lease, loaded } = acquired;
        let opened = async {
            inner.check_definition(&loaded.head)?;
            let entry = inner.entry(&loaded.head, lease.incarnation);
            journal::open(&inner.store, &loaded, entry, held.now()).await
        };
        let ledger = match opened.await {
            Ok(ledger) => ledger,
            Err(error) => {
                let error = journal::doubted(&inner.store, &lease.run, loaded.head.revision, error).await;
                inner.keeper.release(&held).await;
                return Err(error);
            }
        };
        let now = held.now();
        if let Some(published) = &published {
            published.send_replace(loaded.head.event_seq);
        }
        Ok(Self {
            inner,
            held,
            pruned_at: loaded.head.revision.get(),
            head: loaded.head,
            state: loaded.state,
            ledger: Arc::new(ledger),
            signal: loaded.inbox.signal,
            cancel: loaded.inbox.cancel,
            steps: 0,
            entered_at: now,
            sent_back: None,
            deaf_until: None,
            published,
            stop,
        })
    }

    pub(crate) fn draft(&self) -> Draft {
        Draft::new(&self.head, &self.state, self.held.now())
    }

    /// Writes a draft and takes it over. After an error nothing has changed, and what the ledger gave is back in it.
    pub(crate) async fn write(&mut self, draft: Draft) -> Result<(), Halt> {
        let outcome = draft.outcome;
        let signal = draft.watch_inbox.then_some(self.signal);
        let commit = draft.commit(Authority::Lease(self.held.lease().clone()), signal);
        match persist(&self.inner.store, &self.held, &commit, outcome).await {
            Ok(committed) => {
                // Its own settling is no news.
                if let Some(seen) = signal
                    && commit.settles()
                {
                    self.signal = seen + 1;
                }
                self.landed(commit, committed.revision);
                Ok(())
            }
            Err(halt) => {
                self.ledger.put_back(&commit.activities, &commit.waits, outcome);
                Err(halt)
            }
        }
    }

    /// Writes the last draft of this segment, against the inbox as it is. `On` when something came in that changes what is to
    /// be done: a request to cancel, or a settled gate.
    pub(crate) async fn leave(&mut self, mut draft: Draft) -> Result<Turn, Halt> {
        draft.release = true;
        loop {
            let armed = self.ledger.open().1;
            match self.write(draft.clone()).await {
                Ok(()) => return Ok(Turn::Done),
                Err(Halt::Signal) => self.read_inbox().await?,
                Err(halt) => return Err(halt),
            }
            if self.cancel.is_some() || self.ledger.open().1 != armed || !draft.waits.is_empty() {
                self.reenter();
                return Ok(Turn::On);
            }
        }
    }

    /// A commit is in the store.
    pub(crate) fn landed(&mut self, commit: crate::store::Commit, revision: crate::ids::Revision) {
        self.ledger.mark_stored(&commit.activities);
        self.steps += commit.steps.len() as u64;
        self.head = commit.head;
        self.head.revision = revision;
        self.state = commit.state;
        self.state.mark_stored();
        if let Some(published) = &self.published {
            published.send_replace(self.head.event_seq);
        }
    }

    /// Reads the inbox when there is news. A store that is away for a moment is asked again later: what is under way is not
    /// cut off for that.
    pub(crate) async fn hear(&mut self) -> Result<(), Halt> {
        if self.deaf_until.is_some_and(|until| Instant::now() < until) || !self.held.has_news(self.signal) {
            return Ok(());
        }
        self.deaf_until = None;
        match self.read_inbox().await {
            Err(Halt::Store(StoreError::Unavailable { .. })) => {
                self.held.poke();
                self.deaf_until = Some(Instant::now() + DEAF);
                Ok(())
            }
            heard => heard,
        }
    }

    /// Reads what others put into the inbox: all of it, or nothing is taken over. A number without the waits it stands for would
    /// let a commit pass that has not seen them.
    pub(crate) async fn read_inbox(&mut self) -> Result<(), Halt> {
        let (store, id, activation) = (&self.inner.store, &self.head.id, self.head.activation);
        let outcome = self.ledger.has_outcome();
        let loaded = read_on(&self.held, outcome, || store.load(id)).await?;
        if loaded.head.revision != self.head.revision {
            self.held.lose();
            return Err(Halt::LeaseLost);
        }
        if self.head.armed_waits > 0 {
            let journal = read_on(&self.held, outcome, || store.journal(id, activation)).await?;
            self.ledger.refresh_waits(journal.waits);
        }
        self.signal = loaded.inbox.signal;
        self.cancel = loaded.inbox.cancel;
        Ok(())
    }

    /// A fresh ledger for another entry into the same activation, or for the next one.
    pub(crate) fn reenter(&mut self) {
        let entry = self.inner.entry(&self.head, self.held.lease().incarnation);
        let budgets = self.head.budgets.clone();
        let next = if entry.activation == self.ledger.entry.activation {
            self.ledger.again(entry, budgets)
        } else {
            Ledger::new(entry, Vec::new(), Vec::new(), budgets)
        };
        self.ledger = Arc::new(next);
        self.entered_at = self.held.now();
    }

    /// Runs to the next park or end. Everything before has been committed by `admit`.
    pub(crate) async fn run(&mut self) -> Result<(), RunError> {
        loop {
            match self.turn().await {
                Ok(Turn::On) => {}
                Ok(Turn::Done) => return Ok(()),
                Err(Halt::Signal) => match self.read_inbox().await {
                    Ok(()) => self.reenter(),
                    Err(halt) => return Err(self.halted(halt)),
                },
                Err(halt) => return Err(self.halted(halt)),
            }
        }
    }

    /// The entry is committed: the first turn works on what it left.
    pub(crate) fn restart(&mut self) {
        self.reenter();
    }

    /// A lost worker too many.
    pub(crate) async fn give_up(&mut self, exhausted: Exhausted) -> Result<bool, RunError> {
        let failure = Failure::new(
            FailureKind::Unavailable,
            "the workers of this step were lost too often",
        );
        loop {
            match self.exhaust(exhausted.clone(), Some(failure.clone())).await {
                Ok(Turn::Done) => return Ok(false),
                // A request to cancel came first: the next turn ends it.
                Ok(Turn::On) if self.cancel.is_some() => return Ok(true),
                Ok(Turn::On) => {}
                Err(halt) => return Err(self.halted(halt)),
            }
        }
    }

    pub(crate) fn halted(&self, halt: Halt) -> RunError {
        match halt {
            Halt::LeaseLost => RunError::LeaseLost,
            Halt::Signal => RunError::Busy,
            Halt::Store(error @ StoreError::Unavailable { .. }) if self.head.open_activities > 0 => {
                RunError::JournalUnavailable(error)
            }
            Halt::Store(_) | Halt::Undecodable(_) => RunError::from(halt),
        }
    }

    /// Retention while the segment runs: its error is the segment's (D226).
    async fn prune(&mut self) -> Result<(), Halt> {
        let Some(keep) = self.inner.graph.keep_checkpoints else {
            return Ok(());
        };
        if self.head.revision.get() < self.pruned_at + 2 * u64::from(keep) {
            return Ok(());
        }
        self.inner
            .store
            .prune(&self.head.id, keep)
            .await
            .map_err(Halt::Store)?;
        self.pruned_at = self.head.revision.get();
        Ok(())
    }

    async fn turn(&mut self) -> Result<Turn, Halt> {
        self.hear().await?;
        self.prune().await?;
        if self.cancel.is_some() {
            return self.interrupt(Why::Cancel).await;
        }
        if self
            .head
            .deadline
            .is_some_and(|deadline| deadline <= self.held.now())
        {
            return self.interrupt(Why::Deadline).await;
        }
        if *self.stop.borrow() {
            return self.interrupt(Why::Stop).await;
        }
        let inner = Arc::clone(&self.inner);
        let Some((name, entry)) = self
            .head
            .cursor
            .clone()
            .and_then(|name| Some((name.clone(), inner.graph.nodes.get(&name)?)))
        else {
            return self
                .fail(
                    Failure::new(FailureKind::Internal, "the run points at no node"),
                    None,
                )
                .await;
        };
        if self.steps >= inner.graph.max_steps {
            let exhausted = Exhausted {
                budget: "steps".to_owned(),
                used: self.steps,
                limit: inner.graph.max_steps,
                decimals: 0,
            };
            return self.exhaust(exhausted, None).await;
        }
        let typed = inner.graph.decode(&self.state).map_err(Halt::Undecodable)?;
        match self.drive(entry, typed).await? {
            Ending::Parked => self.hold().await,
            Ending::Interrupted(why) => self.interrupt(why).await,
            Ending::Panicked => {
                let failure = Failure::new(FailureKind::Internal, "the node panicked").code("panic");
                self.node_failed(&name, entry, NodeError::Failed(failure)).await
            }
            Ending::Returned(Err(error)) => self.node_failed(&name, entry, error).await,
            Ending::Returned(Ok((update, directive))) => {
                self.node_done(&name, entry, update, directive).await
            }
        }
    }

    /// What holds the step back parks the run, or brings it back to the node when nothing outside is needed.
    pub(crate) async fn hold(&mut self) -> Result<Turn, Halt> {
        let now = self.held.now();
        self.ledger.abandon_in_flight(now);
        let timed_out = self.ledger.time_out_gates(now);
        let holding = self.ledger.holding();
        if timed_out
            || (!holding.unknown && holding.due_at.is_some_and(|at| at <= now))
            || holding.on.is_empty()
        {
            let back = SentBack {
                activation: self.head.activation,
                attempt: self.head.attempt,
                open: self.ledger.open_attempts(),
            };
            if !timed_out && !back.open.is_empty() && self.sent_back.as_ref() == Some(&back) {
                return self.unresolved().await;
            }
            self.sent_back = Some(back);
            let mut draft = self.draft();
            draft.watch_inbox = timed_out;
            draft.take(self.ledger.take_dirty(), self.ledger.open());
            self.write(draft).await?;
            self.reenter();
            return Ok(Turn::On);
        }
        let mut draft = self.draft();
        draft.take(self.ledger.take_dirty(), self.ledger.open());
        self.park(draft, holding, None).await
    }

    /// A node that does not come back to a call it left open: there is no way past it (D143).
    fn unresolved(&mut self) -> BoxFuture<'_, Result<Turn, Halt>> {
        let (failure, exhausted) = match self.ledger.recoveries_exhausted() {
            Some(exhausted) => {
                let failure = Failure::new(FailureKind::Unavailable, "a call was cut off too often");
                (failure, Some(exhausted))
            }
            None => {
                let why = "the node left a call open and does not ask for it again";
                let failure = Failure::new(FailureKind::Internal, why).code("activity_unresolved");
                (failure, None)
            }
        };
        Box::pin(self.fail(failure, exhausted))
    }

    pub(crate) async fn park(
        &mut self,
        mut draft: Draft,
        holding: Holding,
        reason: Option<String>,
    ) -> Result<Turn, Halt> {
        ending::park(&mut draft, holding, reason);
        self.leave(draft).await
    }
}
