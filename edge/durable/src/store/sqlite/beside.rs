//! The rows that go with a head: sealed before they are queued, written after the guard has held.

use bytes::Bytes;

use super::fail::Fail;
use super::rows::signed;
use super::script::{Args, Script, args};
use super::writer::Tx;
use crate::envelope::{self, ActivityRow, BlobRow, INLINE_MAX, WaitRow};
use crate::ids::RunId;
use crate::payload::Payload;
use crate::record::{DecisionRecord, EventRecord, StepRecord, WaitRecord};
use crate::store::{Commit, StoreError};

/// Longest payload: a row holds 1,000,000,000 bytes, with some columns beside the payload.
const PAYLOAD_MAX: u64 = 999_000_000;

const ACTIVITY: &str = "INSERT INTO activities (run_id, activity_id, activation, state, body, input, input_digest, output, \
     output_digest, seal) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) \
     ON CONFLICT (run_id, activation, activity_id) DO UPDATE SET state = excluded.state, body = excluded.body, \
     input = excluded.input, input_digest = excluded.input_digest, output = excluded.output, \
     output_digest = excluded.output_digest, seal = excluded.seal";

const STEP: &str = "INSERT INTO steps (run_id, activation, node, status, body) VALUES (?, ?, ?, ?, ?) \
     ON CONFLICT (run_id, activation) DO UPDATE SET node = excluded.node, status = excluded.status, body = excluded.body";

const EVENT: &str =
    "INSERT INTO events (run_id, seq, life, name, terminal, time, data) VALUES (?, ?, ?, ?, ?, ?, ?)";

const WAIT: &str = "INSERT INTO waits (run_id, wait_id, correlation_id, activation, status, deadline, armed_at, body, \
     subject, subject_digest, delivered, delivered_digest, seal) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) \
     ON CONFLICT (run_id, wait_id) DO UPDATE SET correlation_id = excluded.correlation_id, \
     activation = excluded.activation, status = excluded.status, deadline = excluded.deadline, \
     armed_at = excluded.armed_at, body = excluded.body, subject = excluded.subject, \
     subject_digest = excluded.subject_digest, delivered = excluded.delivered, \
     delivered_digest = excluded.delivered_digest, seal = excluded.seal";

const DECISION: &str = "INSERT INTO decisions (run_id, scope, decision_id, content, body, created_at) \
     VALUES (?, ?, ?, ?, ?, ?)";

const BLOB: &str = "INSERT OR IGNORE INTO blobs (run_id, digest, bytes) VALUES (?, ?, ?)";

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
pub(super) struct StepRow {
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

/// The rows that most transitions have.
pub(super) struct First {
    pub(super) activity: Option<ActivityRow>,
    pub(super) step: Option<StepRow>,
    pub(super) events: [Option<EventRecord>; 2],
}

/// Rows that go with a head, sealed.
#[derive(Default)]
pub(super) struct Beside {
    activities: Vec<ActivityRow>,
    waits: Vec<WaitRow>,
    steps: Vec<StepRow>,
    decisions: Vec<DecisionRecord>,
    events: Vec<EventRecord>,
    blobs: Vec<BlobRow>,
    /// Long payloads that were read from a store: from this run of it, as a rule, and still there.
    known: Vec<BlobRow>,
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

    /// Takes out the rows that `transition` has columns for, the first ones of their kind.
    pub(super) fn take_first(&mut self) -> First {
        let step = (!self.steps.is_empty()).then(|| self.steps.remove(0));
        let activity = (!self.activities.is_empty()).then(|| self.activities.remove(0));
        let mut events = std::mem::take(&mut self.events).into_iter();
        let first = [events.next(), events.next()];
        self.events = events.collect();
        First {
            activity,
            step,
            events: first,
        }
    }

    pub(super) fn of_post(waits: &[WaitRecord], decisions: Vec<DecisionRecord>) -> Result<Self, StoreError> {
        let mut beside = Self {
            decisions,
            ..Self::default()
        };
        beside.add_waits(waits)?;
        Ok(beside)
    }

    /// A long payload goes to `blobs`; one that is marked as stored only when it turns out not to be.
    fn keep(&mut self, what: &'static str, payload: &Payload) -> Result<(), StoreError> {
        check_length(what, payload)?;
        if payload.bytes().len() > INLINE_MAX {
            let blob = BlobRow {
                digest: *payload.digest(),
                bytes: payload.bytes().clone(),
            };
            if payload.is_stored() {
                self.known.push(blob);
            } else {
                self.blobs.push(blob);
            }
        }
        Ok(())
    }

    /// The mark of a payload may be another run's, and retention may have removed what no row named for a while.
    pub(super) async fn add_missing(&mut self, tx: &mut Tx<'_>, run: &RunId) -> Result<(), Fail> {
        for blob in std::mem::take(&mut self.known) {
            let mut args = args![run.as_str()];
            args.digest(&blob.digest);
            let sql = "SELECT 1 FROM blobs WHERE run_id = ? AND digest = ?";
            if tx.row(sql, args).await?.is_none() {
                self.blobs.push(blob);
            }
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

    pub(super) fn is_empty(&self) -> bool {
        self.activities.is_empty()
            && self.waits.is_empty()
            && self.steps.is_empty()
            && self.decisions.is_empty()
            && self.events.is_empty()
            && self.blobs.is_empty()
    }

    /// Adds the statements that write these rows.
    pub(super) fn write(self, run: &RunId, script: &mut Script) {
        let id = run.as_str();
        for blob in self.blobs {
            script
                .statement(BLOB)
                .put(id)
                .digest(&blob.digest)
                .bytes(blob.bytes);
        }
        for row in self.activities {
            put_activity(script.statement(ACTIVITY).put(id), row);
        }
        for row in self.waits {
            script
                .statement(WAIT)
                .put(id)
                .put(row.wait_id)
                .put(row.correlation_id)
                .put(row.activation)
                .put(row.status)
                .put(row.deadline)
                .put(row.armed_at)
                .bytes(row.body)
                .payload(row.subject)
                .some_payload(row.delivered)
                .some_digest(row.seal.as_ref());
        }
        for row in self.steps {
            put_step(script.statement(STEP).put(id), row);
        }
        for decision in self.decisions {
            script
                .statement(DECISION)
                .put(id)
                .put(decision.scope.to_text())
                .put(decision.id.as_str())
                .digest(&decision.content)
                .bytes(decision.body)
                .put(decision.created_at.as_millis());
        }
        for event in self.events {
            put_event(script.statement(EVENT).put(id), event);
        }
    }
}

pub(super) fn put_activity(args: &mut Args, row: ActivityRow) {
    args.put(row.activity_id)
        .put(row.activation)
        .put(row.state)
        .bytes(row.body)
        .payload(row.input)
        .some_payload(row.output)
        .some_digest(row.seal.as_ref());
}

pub(super) fn put_step(args: &mut Args, row: StepRow) {
    args.put(signed(row.activation))
        .put(row.node)
        .put(row.status)
        .bytes(row.body);
}

pub(super) fn put_event(args: &mut Args, event: EventRecord) {
    args.put(signed(event.seq))
        .put(i64::from(event.life))
        .put(event.name)
        .put(event.terminal)
        .put(event.time.as_millis())
        .bytes(event.data);
}
