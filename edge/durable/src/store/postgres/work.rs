//! What callers want written, sealed and checked before it is queued: encoding and hashing happen in their own tasks.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::batched::Batched;
use super::head::Head;
use crate::envelope::{ActivityRow, BlobRow, INLINE_MAX, WaitRow, encode_step};
use crate::ids::{Revision, RunId};
use crate::payload::Payload;
use crate::record::{ActivityRecord, CancelRequest, DecisionRecord, EventRecord, StepRecord, WaitRecord};
use crate::store::rows::signed;
use crate::store::{Commit, Create, Guard, IdempotencyKey, LeaseRequest, Post, StoreError, check};
use crate::time::Timestamp;

/// A row of `steps`.
pub(super) struct StepRow {
    pub(super) activation: i64,
    pub(super) node: String,
    pub(super) status: &'static str,
    pub(super) body: Bytes,
}

/// The rows beside a head that one write brings along.
#[derive(Default)]
pub(super) struct Rows {
    pub(super) activities: Vec<ActivityRow>,
    pub(super) waits: Vec<WaitRow>,
    pub(super) steps: Vec<StepRow>,
    pub(super) decisions: Vec<DecisionRecord>,
    pub(super) events: Vec<EventRecord>,
    /// Payloads to add to `blobs`.
    pub(super) blobs: Vec<BlobRow>,
    /// Payloads that are said to be in `blobs`: looked for under the lock, and added when they are gone.
    pub(super) known: Vec<BlobRow>,
}

/// The first commit of a run.
pub(super) struct Creation {
    pub(super) head: Head,
    pub(super) lease: Option<LeaseRequest>,
    pub(super) key: Option<IdempotencyKey>,
    pub(super) rows: Rows,
}

/// One transition.
pub(super) struct Transition {
    pub(super) guard: Guard,
    pub(super) head: Head,
    pub(super) release: bool,
    /// By how much the inbox's number grows.
    pub(super) grows: i64,
    pub(super) rows: Rows,
}

/// One change of an inbox.
pub(super) struct Posting {
    pub(super) signal: i64,
    /// As the column has it, and when it was requested.
    pub(super) cancel: Option<(String, i64)>,
    pub(super) wake: bool,
    pub(super) rows: Rows,
}

/// Where the answer goes; nobody may be there any more.
pub(super) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// One write of one run.
pub(super) struct Job<W: Batched> {
    pub(super) run: RunId,
    pub(super) work: W,
    pub(super) reply: Reply<W::Answer>,
}

impl<W: Batched> Job<W> {
    pub(super) fn tell(self, answer: Result<W::Answer, StoreError>) {
        let _ = self.reply.send(answer);
    }
}

/// What waits in the queue.
pub(super) enum Write {
    Create(Box<Job<Creation>>),
    Commit(Box<Job<Transition>>),
    Post(Box<Job<Posting>>),
}

/// Writes of one kind can share a statement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Create,
    Commit,
    Post,
}

/// A span as leases count it: whole milliseconds, at least one, never longer than there is time.
pub(super) fn ttl_ms(ttl: Duration) -> i64 {
    let ms = i64::try_from(ttl.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX);
    ms.clamp(1, Timestamp::MAX.as_millis())
}

impl Rows {
    fn keep(&mut self, payload: &Payload, may_be_known: bool) {
        if payload.bytes().len() <= INLINE_MAX {
            return;
        }
        let row = BlobRow {
            digest: *payload.digest(),
            bytes: payload.bytes().clone(),
        };
        let list = if may_be_known && payload.is_stored() {
            &mut self.known
        } else {
            &mut self.blobs
        };
        if !list.iter().any(|other| other.digest == row.digest) {
            list.push(row);
        }
    }

    /// A row per id: the last one of a commit counts.
    fn activities(&mut self, records: &[ActivityRecord]) -> Result<(), StoreError> {
        let mut rows = BTreeMap::new();
        for record in records {
            self.keep(&record.input, true);
            if let Some(output) = &record.output {
                self.keep(output, true);
            }
            rows.insert((record.activation, &record.id), ActivityRow::seal(record)?);
        }
        self.activities = rows.into_values().collect();
        Ok(())
    }

    fn waits(&mut self, records: &[WaitRecord]) -> Result<(), StoreError> {
        let mut rows = BTreeMap::new();
        for record in records {
            self.keep(&record.subject, true);
            if let Some(payload) = record.settled.as_ref().and_then(|s| s.payload.as_ref()) {
                self.keep(payload, true);
            }
            rows.insert(&record.id, WaitRow::seal(record)?);
        }
        self.waits = rows.into_values().collect();
        Ok(())
    }

    fn steps(&mut self, records: &[StepRecord]) -> Result<(), StoreError> {
        let mut rows = BTreeMap::new();
        for record in records {
            let row = StepRow {
                activation: signed(record.activation),
                node: record.node.as_str().to_owned(),
                status: record.status.as_str(),
                body: encode_step(record)?,
            };
            rows.insert(record.activation, row);
        }
        self.steps = rows.into_values().collect();
        Ok(())
    }

    /// Roughly what it takes on the wire.
    fn bytes(&self) -> usize {
        const ROW: usize = 256;
        let inline =
            |payload: &crate::envelope::PayloadColumns| payload.inline.as_ref().map_or(0, Bytes::len);
        let some = |payload: &Option<crate::envelope::PayloadColumns>| payload.as_ref().map_or(0, inline);
        let sum = |sizes: &mut dyn Iterator<Item = usize>| sizes.map(|size| size + ROW).sum::<usize>();
        sum(&mut self
            .activities
            .iter()
            .map(|row| row.body.len() + inline(&row.input) + some(&row.output)))
            + sum(&mut self
                .waits
                .iter()
                .map(|row| row.body.len() + inline(&row.subject) + some(&row.delivered)))
            + sum(&mut self.steps.iter().map(|row| row.body.len()))
            + sum(&mut self.decisions.iter().map(|row| row.body.len()))
            + sum(&mut self.events.iter().map(|row| row.data.len()))
            + sum(&mut self.blobs.iter().map(|row| row.bytes.len()))
    }
}

impl Creation {
    /// # Errors
    /// `corrupt` for what cannot be a first commit.
    pub(super) fn new(create: Create) -> Result<Self, StoreError> {
        check::create(&create)?;
        let head = Head::seal(&create.head, &create.state, Revision::FIRST, create.due_at)?;
        let mut rows = Rows {
            events: create.events,
            ..Rows::default()
        };
        // The state may have been read from another run: the new one has nothing yet.
        rows.keep(&create.state, false);
        Ok(Self {
            head,
            lease: create.lease,
            key: create.idempotency,
            rows,
        })
    }
}

impl Transition {
    /// At the revision after the one that the guard names.
    ///
    /// # Errors
    /// `corrupt` for what cannot be a commit.
    pub(super) fn new(commit: Commit, revision: Revision) -> Result<Self, StoreError> {
        check::commit(&commit)?;
        let grows = i64::from(commit.settles());
        let head = Head::seal(&commit.head, &commit.state, revision, commit.due_at)?;
        let mut rows = Rows {
            events: commit.events,
            decisions: commit.decisions,
            ..Rows::default()
        };
        rows.keep(&commit.state, true);
        rows.activities(&commit.activities)?;
        rows.waits(&commit.waits)?;
        rows.steps(&commit.steps)?;
        Ok(Self {
            guard: commit.guard,
            head,
            release: commit.release,
            grows,
            rows,
        })
    }
}

impl Posting {
    /// # Errors
    /// `corrupt` for what cannot be posted.
    pub(super) fn new(post: Post) -> Result<Self, StoreError> {
        check::post(&post)?;
        let cancel = post.cancel.as_ref().map(cancel_columns).transpose()?;
        let mut rows = Rows {
            decisions: post.decisions,
            ..Rows::default()
        };
        rows.waits(&post.waits)?;
        Ok(Self {
            signal: signed(post.signal),
            cancel,
            wake: post.wake,
            rows,
        })
    }
}

fn cancel_columns(cancel: &CancelRequest) -> Result<(String, i64), StoreError> {
    let text = serde_json::to_string(cancel).map_err(|e| StoreError::corrupt(format!("cancel: {e}")))?;
    Ok((text, cancel.requested_at.as_millis()))
}

impl Write {
    pub(super) fn run(&self) -> &RunId {
        match self {
            Self::Create(job) => &job.run,
            Self::Commit(job) => &job.run,
            Self::Post(job) => &job.run,
        }
    }

    pub(super) const fn kind(&self) -> Kind {
        match self {
            Self::Create(_) => Kind::Create,
            Self::Commit(_) => Kind::Commit,
            Self::Post(_) => Kind::Post,
        }
    }

    /// Roughly what it takes on the wire.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Create(job) => job.work.head.bytes() + job.work.rows.bytes(),
            Self::Commit(job) => job.work.head.bytes() + job.work.rows.bytes(),
            Self::Post(job) => job.work.rows.bytes(),
        }
    }
}
