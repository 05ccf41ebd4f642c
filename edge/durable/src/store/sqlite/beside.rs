//! The rows that go with a head: sealed before they are queued, written after the guard has held.

use bytes::Bytes;
use rusqlite::params;

use super::fail::Fail;
use super::writer::Tx;
use crate::envelope::{self, ActivityRow, BlobRow, INLINE_MAX, PayloadColumns, WaitRow};
use crate::ids::RunId;
use crate::payload::{Digest, Payload};
use crate::record::{DecisionRecord, EventRecord, StepRecord, WaitRecord};
use crate::store::rows::signed;
use crate::store::{Commit, StoreError};

/// Longest payload: a row holds 1,000,000,000 bytes, with some columns beside the payload.
const PAYLOAD_MAX: u64 = 999_000_000;

/// # Errors
/// `too_large`.
fn check_length(what: &'static str, payload: &Payload) -> Result<(), StoreError> {
    let bytes = payload.bytes().len() as u64;
    if bytes > PAYLOAD_MAX {
        return Err(StoreError::TooLarge {
            what,
            bytes,
            limit: PAYLOAD_MAX,
        });
    }
    Ok(())
}

/// A finished step as its row has it.
struct StepRow {
    activation: u64,
    node: String,
    status: &'static str,
    body: Bytes,
}

impl StepRow {
    fn of(step: &StepRecord) -> Result<Self, StoreError> {
        Ok(Self {
            activation: step.activation,
            node: step.node.as_str().to_owned(),
            status: step.status.as_str(),
            body: envelope::encode_step(step)?,
        })
    }
}

/// Rows that go with a head, sealed.
#[derive(Default)]
pub(super) struct Beside {
    activities: Vec<ActivityRow>,
    waits: Vec<WaitRow>,
    steps: Vec<StepRow>,
    decisions: Vec<DecisionRecord>,
    events: Vec<EventRecord>,
    blobs: Vec<Blob>,
}

/// A payload that is too long for its row.
struct Blob {
    row: BlobRow,
    /// It was read from a store: from this run of it, as a rule, and it is still there.
    known: bool,
}

impl Beside {
    pub(super) fn of_creation(state: &Payload, events: Vec<EventRecord>) -> Result<Self, StoreError> {
        let mut beside = Self {
            events,
            ..Self::default()
        };
        beside.keep("state", state)?;
        Ok(beside)
    }

    /// Everything of a commit but its head.
    pub(super) fn of_commit(commit: &mut Commit) -> Result<Self, StoreError> {
        let mut beside = Self {
            steps: commit.steps.iter().map(StepRow::of).collect::<Result<_, _>>()?,
            decisions: std::mem::take(&mut commit.decisions),
            events: std::mem::take(&mut commit.events),
            ..Self::default()
        };
        beside.keep("state", &commit.state)?;
        for activity in &commit.activities {
            beside.keep("the input of an activity", &activity.input)?;
            if let Some(output) = &activity.output {
                beside.keep("the output of an activity", output)?;
            }
            beside.activities.push(ActivityRow::seal(activity)?);
        }
        beside.add_waits(&commit.waits)?;
        Ok(beside)
    }

    pub(super) fn of_post(waits: &[WaitRecord], decisions: Vec<DecisionRecord>) -> Result<Self, StoreError> {
        let mut beside = Self {
            decisions,
            ..Self::default()
        };
        beside.add_waits(waits)?;
        Ok(beside)
    }

    /// A long payload goes to `blobs`.
    fn keep(&mut self, what: &'static str, payload: &Payload) -> Result<(), StoreError> {
        check_length(what, payload)?;
        if payload.bytes().len() > INLINE_MAX {
            self.blobs.push(Blob {
                row: BlobRow {
                    digest: *payload.digest(),
                    bytes: payload.bytes().clone(),
                },
                known: payload.is_stored(),
            });
        }
        Ok(())
    }

    fn add_waits(&mut self, waits: &[WaitRecord]) -> Result<(), StoreError> {
        for wait in waits {
            self.keep("the subject of a wait", &wait.subject)?;
            if let Some(delivered) = wait.settled.as_ref().and_then(|s| s.payload.as_ref()) {
                self.keep("a delivery", delivered)?;
            }
            self.waits.push(WaitRow::seal(wait)?);
        }
        Ok(())
    }

    /// # Errors
    /// `duplicate` for a decision or an event that is there already; `corrupt` when events before the first one are missing.
    pub(super) fn write(&self, tx: &Tx<'_>, run: &RunId) -> Result<(), Fail> {
        let id = run.as_str();
        for blob in &self.blobs {
            write_blob(tx, id, blob)?;
        }
        for row in &self.activities {
            write_activity(tx, id, row)?;
        }
        for row in &self.waits {
            write_wait(tx, id, row)?;
        }
        for row in &self.steps {
            tx.execute(
                "INSERT INTO steps (run_id, activation, node, status, body) VALUES (?, ?, ?, ?, ?) \
                 ON CONFLICT (run_id, activation) DO UPDATE SET node = excluded.node, status = excluded.status, \
                 body = excluded.body",
                params![id, signed(row.activation), row.node, row.status, &*row.body],
            )?;
        }
        for decision in &self.decisions {
            tx.execute(
                "INSERT INTO decisions (run_id, scope, decision_id, content, body, created_at) \
                 VALUES (?, ?, ?, ?, ?, ?)",
                params![
                    id,
                    decision.scope.to_text(),
                    decision.id.as_str(),
                    decision.content,
                    &*decision.body,
                    decision.created_at.as_millis(),
                ],
            )?;
        }
        self.write_events(tx, id)
    }

    fn write_events(&self, tx: &Tx<'_>, id: &str) -> Result<(), Fail> {
        if let Some(first) = self.events.first()
            && first.seq > 1
        {
            let sql = "SELECT 1 FROM events WHERE run_id = ? AND seq = ?";
            let before = signed(first.seq - 1);
            if tx.row(sql, params![id, before], |_| Ok(()))?.is_none() {
                return Err(StoreError::corrupt("not written: events are missing before these").into());
            }
        }
        for event in &self.events {
            tx.execute(
                "INSERT INTO events (run_id, seq, life, name, terminal, time, data) VALUES (?, ?, ?, ?, ?, ?, ?)",
                params![
                    id,
                    signed(event.seq),
                    event.life,
                    event.name,
                    event.terminal,
                    event.time.as_millis(),
                    &*event.data,
                ],
            )?;
        }
        Ok(())
    }
}

/// A known one is looked for first: it may have been read from another run, and retention may have removed what no row named
/// for a while.
fn write_blob(tx: &Tx<'_>, id: &str, blob: &Blob) -> Result<(), Fail> {
    let Blob { row, known } = blob;
    if *known {
        let sql = "SELECT 1 FROM blobs WHERE run_id = ? AND digest = ?";
        if tx.row(sql, params![id, row.digest], |_| Ok(()))?.is_some() {
            return Ok(());
        }
    }
    tx.execute(
        "INSERT OR IGNORE INTO blobs (run_id, digest, bytes) VALUES (?, ?, ?)",
        params![id, row.digest, &*row.bytes],
    )?;
    Ok(())
}

/// The columns of a payload that need not be there.
fn columns(payload: Option<&PayloadColumns>) -> (Option<&[u8]>, Option<&Digest>) {
    match payload {
        Some(payload) => (payload.inline.as_deref(), Some(&payload.digest)),
        None => (None, None),
    }
}

fn write_activity(tx: &Tx<'_>, id: &str, row: &ActivityRow) -> Result<(), Fail> {
    let (output, output_digest) = columns(row.output.as_ref());
    tx.execute(
        "INSERT INTO activities (run_id, activity_id, activation, state, body, input, input_digest, output, \
         output_digest, seal) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) \
         ON CONFLICT (run_id, activation, activity_id) DO UPDATE SET state = excluded.state, body = excluded.body, \
         input = excluded.input, input_digest = excluded.input_digest, output = excluded.output, \
         output_digest = excluded.output_digest, seal = excluded.seal",
        params![
            id,
            row.activity_id,
            row.activation,
            row.state,
            &*row.body,
            row.input.inline.as_deref(),
            row.input.digest,
            output,
            output_digest,
            row.seal,
        ],
    )?;
    Ok(())
}

fn write_wait(tx: &Tx<'_>, id: &str, row: &WaitRow) -> Result<(), Fail> {
    let (delivered, delivered_digest) = columns(row.delivered.as_ref());
    tx.execute(
        "INSERT INTO waits (run_id, wait_id, correlation_id, activation, kind, status, deadline, armed_at, body, subject, \
         subject_digest, delivered, delivered_digest, seal) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) \
         ON CONFLICT (run_id, wait_id) DO UPDATE SET correlation_id = excluded.correlation_id, \
         activation = excluded.activation, kind = excluded.kind, status = excluded.status, deadline = excluded.deadline, \
         armed_at = excluded.armed_at, body = excluded.body, subject = excluded.subject, \
         subject_digest = excluded.subject_digest, delivered = excluded.delivered, \
         delivered_digest = excluded.delivered_digest, seal = excluded.seal",
        params![
            id,
            row.wait_id,
            row.correlation_id,
            row.activation,
            row.kind,
            row.status,
            row.deadline,
            row.armed_at,
            &*row.body,
            row.subject.inline.as_deref(),
            row.subject.digest,
            delivered,
            delivered_digest,
            row.seal,
        ],
    )?;
    Ok(())
}
