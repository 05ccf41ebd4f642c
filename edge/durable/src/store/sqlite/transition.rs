//! Commits: one transition of one run. What most of them have is one statement, see `transition.sql`; whatever else there is
//! follows it in a script. Rows are sealed before they are queued, so that the writer only writes.

use super::fail::{self, Fail, Refusal};
use super::rows::{Cells, signed};
use super::script::{Args, Script, args};
use super::writer::{Tx, Work};
use crate::envelope::{self, ActivityRow, BlobRow, CheckpointRow, HeadRow, INLINE_MAX, WaitRow};
use crate::ids::{Revision, RunId};
use crate::payload::{Digest, Payload};
use crate::record::{DecisionRecord, EventRecord, StepRecord, WaitRecord};
use crate::store::{Authority, Commit, Committed, Conflict, Guard, Hint, StoreError, check};
use crate::time::Timestamp;

/// Longest payload: a row holds 1,000,000,000 bytes, with some columns beside the payload.
const PAYLOAD_MAX: u64 = 999_000_000;

const WRITE: &str = "INSERT INTO transition VALUES (\
     ?, ?, ?, ?, ?, \
     ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, \
     ?, ?, \
     ?, ?, ?, ?, ?, ?, ?, ?, ?, \
     ?, ?, ?, ?, \
     ?, ?, ?, ?, ?, ?, \
     ?, ?, ?, ?, ?, ?\
     ) RETURNING (SELECT signal FROM runs WHERE run_id = ?)";

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
struct StepRow {
    activation: u64,
    node: String,
    status: &'static str,
    body: bytes::Bytes,
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

    fn is_empty(&self) -> bool {
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

fn put_activity(args: &mut Args, row: ActivityRow) {
    args.put(row.activity_id)
        .put(row.activation)
        .put(row.state)
        .bytes(row.body)
        .payload(row.input)
        .some_payload(row.output)
        .some_digest(row.seal.as_ref());
}

fn put_step(args: &mut Args, row: StepRow) {
    args.put(signed(row.activation))
        .put(row.node)
        .put(row.status)
        .bytes(row.body);
}

fn put_event(args: &mut Args, event: EventRecord) {
    args.put(signed(event.seq))
        .put(i64::from(event.life))
        .put(event.name)
        .put(event.terminal)
        .put(event.time.as_millis())
        .bytes(event.data);
}

/// The columns of a head from `kind` to `updated_at`, in the order in which `transition` and `runs` are written.
pub(super) fn put_head(args: &mut Args, head: HeadRow, due_at: Option<Timestamp>) {
    args.put(head.kind)
        .put(head.definition)
        .put(head.status)
        .put(head.cursor)
        .put(head.activation)
        .put(head.schema_version)
        .put(head.parent_id)
        .put(head.root_id)
        .payload(head.state)
        .bytes(head.budgets)
        .some_bytes(head.outcome)
        .bytes(head.body)
        .some_digest(head.seal.as_ref())
        .put(head.waiting_kind)
        .put(due_at.map(Timestamp::as_millis))
        .put(head.deadline)
        .put(head.created_at)
        .put(head.updated_at);
}

/// A commit, sealed and ready to be written.
pub(super) struct Transition {
    run: RunId,
    guard: Guard,
    revision: Revision,
    head: HeadRow,
    checkpoint_seal: Option<Digest>,
    due_at: Option<Timestamp>,
    release: bool,
    activity: Option<ActivityRow>,
    step: Option<StepRow>,
    events: [Option<EventRecord>; 2],
    /// What the statement has no columns for.
    more: Beside,
}

impl Transition {
    /// # Errors
    /// `corrupt` when the commit is none; `too_large`. `None` for the revision after the last one, see `LastRevision`.
    pub(super) fn new(commit: Commit) -> Result<Option<Self>, StoreError> {
        check::commit(&commit)?;
        // The guard pins what is found, so the revision that will be assigned is known here.
        let Ok(revision) = commit.guard.revision.next() else {
            return Ok(None);
        };
        let head = HeadRow::seal(&commit.head, &commit.state, revision)?;
        let mut more = Beside::default();
        more.keep("state", &commit.state)?;
        let mut activities = Vec::with_capacity(commit.activities.len());
        for activity in &commit.activities {
            more.keep("the input of an activity", &activity.input)?;
            if let Some(output) = &activity.output {
                more.keep("the output of an activity", output)?;
            }
            activities.push(ActivityRow::seal(activity)?);
        }
        more.add_waits(&commit.waits)?;
        more.decisions = commit.decisions;
        let mut activities = activities.into_iter();
        let mut steps = commit.steps.iter().map(StepRow::of);
        let mut events = commit.events.into_iter();
        let activity = activities.next();
        let step = steps.next().transpose()?;
        let first = [events.next(), events.next()];
        more.activities = activities.collect();
        more.steps = steps.collect::<Result<_, _>>()?;
        more.events = events.collect();
        Ok(Some(Self {
            run: commit.head.id,
            guard: commit.guard,
            revision,
            checkpoint_seal: CheckpointRow::of(&head).seal,
            head,
            due_at: commit.due_at,
            release: commit.release,
            activity,
            step,
            events: first,
            more,
        }))
    }
}

impl Work for Transition {
    type Answer = Committed;

    async fn run(mut self, tx: &mut Tx<'_>) -> Result<Committed, Fail> {
        let run = self.run;
        self.more.add_missing(tx, &run).await?;
        let incarnation = match &self.guard.authority {
            Authority::Lease(lease) => Some(signed(lease.incarnation)),
            Authority::Idle => None,
        };
        let mut script = Script::new();
        let mut alone = Args::default();
        let is_alone = self.more.is_empty();
        let args = if is_alone {
            &mut alone
        } else {
            script.statement(WRITE)
        };
        args.put(run.as_str())
            .put(signed(self.guard.revision.get()))
            .put(incarnation)
            .put(self.guard.signal.map(signed))
            .put(tx.now());
        put_head(args, self.head, self.due_at);
        args.some_digest(self.checkpoint_seal.as_ref()).put(self.release);
        match self.activity {
            Some(row) => put_activity(args, row),
            None => drop(args.nulls(9)),
        }
        match self.step {
            Some(row) => put_step(args, row),
            None => drop(args.nulls(4)),
        }
        for event in self.events {
            match event {
                Some(event) => put_event(args, event),
                None => drop(args.nulls(6)),
            }
        }
        args.put(run.as_str());

        let answer = if is_alone {
            tx.statement(WRITE, alone).await?
        } else {
            self.more.write(&run, &mut script);
            let rows = tx.script(script).await?;
            rows.map(|rows| rows.into_iter().next())
        };
        let row = match answer {
            Ok(row) => row.ok_or_else(|| StoreError::corrupt("not written: no answer"))?,
            Err((Refusal::Guard, _)) => return Err(verdict(tx, &run, &self.guard).await?.into()),
            Err((refusal, error)) => return Err(fail::refused(refusal, &error).into()),
        };
        let now = tx.wall();
        if (self.release || incarnation.is_none()) && self.due_at.is_some_and(|due| due <= now) {
            tx.hint(Hint::Claimable(run));
        }
        Ok(Committed {
            revision: self.revision,
            signal: Cells::new(&row).count()?,
            now,
        })
    }
}

/// A commit over the last revision there is: refused, after the guard has had its say (D108).
pub(super) struct LastRevision {
    pub(super) run: RunId,
    pub(super) guard: Guard,
}

impl Work for LastRevision {
    type Answer = Committed;

    async fn run(self, tx: &mut Tx<'_>) -> Result<Committed, Fail> {
        Err(verdict(tx, &self.run, &self.guard).await?.into())
    }
}

/// Why a guard does not hold: head first, then lease, then inbox.
async fn verdict(tx: &mut Tx<'_>, run: &RunId, guard: &Guard) -> Result<StoreError, Fail> {
    let sql = "SELECT r.revision, r.signal, l.incarnation FROM runs r \
         LEFT JOIN run_leases l ON l.run_id = r.run_id AND l.expires_at > ? WHERE r.run_id = ?";
    let row = tx.row(sql, args![tx.now(), run.as_str()]).await?;
    let Some(row) = row else {
        return absent(tx, run).await;
    };
    let mut cells = Cells::new(&row);
    let found = cells.count()?;
    let signal = cells.count()?;
    let live = cells.get::<Option<i64>>()?;
    let found = Revision::new(found).map_err(|_| StoreError::corrupt("head: revision"))?;
    if found != guard.revision {
        return Ok(StoreError::Conflict(Conflict::Revision(found)));
    }
    match &guard.authority {
        Authority::Lease(lease) if live != Some(signed(lease.incarnation)) => {
            return Ok(StoreError::LeaseLost);
        }
        Authority::Idle if live.is_some() => return Ok(StoreError::Busy),
        Authority::Lease(_) | Authority::Idle => {}
    }
    match guard.signal {
        Some(seen) if seen != signal => Ok(StoreError::Conflict(Conflict::Signal(signal))),
        Some(_) | None => Ok(StoreError::RevisionsExhausted),
    }
}

/// What is said of a run that has no row: a fence without one is a tombstone.
pub(super) async fn absent(tx: &mut Tx<'_>, run: &RunId) -> Result<StoreError, Fail> {
    let sql = "SELECT 1 FROM run_fences WHERE run_id = ?";
    Ok(match tx.row(sql, args![run.as_str()]).await? {
        Some(_) => StoreError::Deleted,
        None => StoreError::NotFound,
    })
}
