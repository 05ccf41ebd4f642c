//! Rows of a database as rows of `envelope`, for every adapter that has one. Columns are read by position; the lists of their
//! names stand beside the reading. Where the bytes of a payload come from, the row or `blobs`, is the adapter's affair: it says
//! what stands for them.

mod cells;

pub(super) use cells::{Cells, Row, all, signed, time, unsigned};

use super::{Created, Definition, Due, IdempotencyKey, Lease, Listed, Loaded, Origin, StoreError};
use crate::envelope::{ActivityRow, CheckpointRow, HeadRow, WaitRow, decode_step};
use crate::ids::{DecisionId, Owner, RunId, WaitId};
use crate::record::{
    ActivityRecord, CancelRequest, CheckpointRecord, DecisionRecord, DefinitionRef, EventRecord, Inbox,
    RunHead, Scope, Status, StepRecord, WaitRecord, WaitingKind,
};
use crate::time::Timestamp;

/// The columns of `head`, of a row `r` of `runs`, with what stands for the state.
macro_rules! head_columns {
    ($state:expr) => {
        concat!(
            "r.run_id, r.kind, r.definition, r.status, r.cursor, r.activation, r.revision, r.schema_version, \
             r.parent_id, r.root_id, r.waiting_kind, r.owner, r.deadline, ",
            $state,
            ", r.state_digest, r.budgets, r.outcome, r.body, r.seal, r.created_at, r.updated_at, r.signal, r.cancel, \
             r.quarantine"
        )
    };
}
pub(super) use head_columns;

/// A head with the columns beside it that are not sealed.
pub(super) struct HeadCells {
    pub(super) row: HeadRow,
    pub(super) inbox: Inbox,
}

pub(super) fn head(cells: &mut Cells<'_>) -> Result<HeadCells, StoreError> {
    Ok(HeadCells {
        row: HeadRow {
            run_id: cells.get()?,
            kind: cells.get()?,
            definition: cells.get()?,
            status: cells.get()?,
            cursor: cells.get()?,
            activation: cells.get()?,
            revision: cells.get()?,
            schema_version: cells.get()?,
            parent_id: cells.get()?,
            root_id: cells.get()?,
            waiting_kind: cells.get()?,
            owner: cells.get()?,
            deadline: cells.get()?,
            state: cells.payload("state")?,
            budgets: cells.get()?,
            outcome: cells.get()?,
            body: cells.get()?,
            seal: cells.some_digest("head seal")?,
            created_at: cells.get()?,
            updated_at: cells.get()?,
        },
        inbox: Inbox {
            signal: cells.count()?,
            cancel: cells
                .get::<Option<&str>>()?
                .map(serde_json::from_str::<CancelRequest>)
                .transpose()
                .map_err(|error| StoreError::corrupt(format!("cancel: {error}")))?,
            quarantine: cells.get()?,
        },
    })
}

impl HeadCells {
    /// The head alone.
    fn open_head(self, run: &RunId) -> Result<(RunHead, Inbox), StoreError> {
        let (head, _) = self.row.open(run.as_str())?;
        Ok((head, self.inbox))
    }

    /// Head and state.
    ///
    /// # Errors
    /// `corrupt`, `schema_unsupported`.
    pub(super) fn open(
        self,
        run: &RunId,
        lease: Option<Lease>,
        now: Timestamp,
    ) -> Result<Loaded, StoreError> {
        let (head, seal) = self.row.open(run.as_str())?;
        Ok(Loaded {
            head,
            state: self.row.state.open("state", None)?,
            seal,
            inbox: self.inbox,
            lease,
            now,
        })
    }
}

/// The columns of `listed`; the state is not looked at, `$none` is NULL.
macro_rules! listed_columns {
    ($none:expr) => {
        concat!(
            "r.run_id, r.created_at, r.quarantine, ",
            $crate::store::rows::head_columns!($none)
        )
    };
}
pub(super) use listed_columns;

/// A row of a list. What is corrupt is named.
pub(super) fn listed(row: &dyn Row) -> Result<Listed, StoreError> {
    let mut cells = Cells::new(row);
    let run = cells.run()?;
    // A damaged one must not hide the rows after it.
    let created_at = cells.get().unwrap_or_default();
    let created_at = Timestamp::from_millis(created_at).unwrap_or(Timestamp::MIN);
    let quarantine = cells.get()?;
    if let Some(why) = quarantine {
        return Ok(Listed::Corrupt { run, created_at, why });
    }
    let opened = head(&mut cells).and_then(|head| head.open_head(&run));
    Ok(match opened {
        Ok((head, inbox)) => Listed::Run {
            head: Box::new(head),
            inbox,
        },
        Err(error) => Listed::Corrupt {
            run,
            created_at,
            why: error.to_string(),
        },
    })
}

/// The columns of `due`, of a row `r` of `runs`; whether a live lease stands in the way comes after them.
macro_rules! due_columns {
    () => {
        "r.run_id, r.status, r.waiting_kind, r.due_at"
    };
}
pub(super) use due_columns;

pub(super) fn due(row: &dyn Row) -> Result<Due, StoreError> {
    let mut cells = Cells::new(row);
    Ok(Due {
        run: cells.run()?,
        status: Status::parse(cells.get()?)
            .ok_or_else(|| StoreError::corrupt("status: not a word of the list"))?,
        waiting_kind: cells.get::<Option<&str>>()?.and_then(WaitingKind::parse),
        due_at: cells.time()?,
        leased: cells.get()?,
    })
}

/// The columns of `live_lease`, of a row `l` of `run_leases`. NULL when nobody ever held it.
macro_rules! lease_columns {
    () => {
        "l.owner, l.incarnation, l.expires_at"
    };
}
pub(super) use lease_columns;

/// The lease, when it is live at `now`.
pub(super) fn live_lease(cells: &mut Cells<'_>, run: &RunId, now: i64) -> Result<Option<Lease>, StoreError> {
    let owner: Option<&str> = cells.get()?;
    let incarnation: Option<i64> = cells.get()?;
    let expires_at: Option<i64> = cells.get()?;
    match (owner, incarnation, expires_at) {
        (Some(owner), Some(incarnation), Some(expires_at)) if expires_at > now => Ok(Some(Lease {
            run: run.clone(),
            owner: Owner::new(owner).map_err(|error| StoreError::corrupt(error.to_string()))?,
            incarnation: unsigned(incarnation)?,
            expires_at: time(expires_at)?,
        })),
        _ => Ok(None),
    }
}

/// The columns of a checkpoint, a row `c` of `checkpoints`, with what stands for the state.
macro_rules! checkpoint_columns {
    ($state:expr) => {
        concat!(
            "c.run_id, c.revision, c.status, c.cursor, c.activation, ",
            $state,
            ", c.state_digest, c.seal, c.created_at, c.pruned"
        )
    };
}
pub(super) use checkpoint_columns;

fn checkpoint_row(row: &dyn Row) -> Result<CheckpointRow, StoreError> {
    let mut cells = Cells::new(row);
    Ok(CheckpointRow {
        run_id: cells.get()?,
        revision: cells.get()?,
        status: cells.get()?,
        cursor: cells.get()?,
        activation: cells.get()?,
        state: cells.payload("checkpoint state")?,
        seal: cells.some_digest("checkpoint seal")?,
        created_at: cells.get()?,
        pruned: cells.get()?,
    })
}

/// A checkpoint without its state.
pub(super) fn listed_checkpoint(row: &dyn Row, run: &RunId) -> Result<CheckpointRecord, StoreError> {
    checkpoint_row(row)?.open(run.as_str())
}

/// A checkpoint with its state.
///
/// # Errors
/// `checkpoint_unavailable` when it was pruned; `corrupt`.
pub(super) fn checkpoint(row: &dyn Row, run: &RunId) -> Result<CheckpointRecord, StoreError> {
    let row = checkpoint_row(row)?;
    let mut record = row.open(run.as_str())?;
    if row.pruned {
        return Err(StoreError::CheckpointUnavailable);
    }
    record.state = Some(row.state.open("checkpoint state", None)?);
    Ok(record)
}

/// The columns of `activity`, of a row `a` of `activities`, with what stands for the input and the output.
macro_rules! activity_columns {
    ($input:expr, $output:expr) => {
        concat!(
            "a.run_id, a.activity_id, a.activation, a.state, a.body, ",
            $input,
            ", a.input_digest, ",
            $output,
            ", a.output_digest, a.seal"
        )
    };
}
pub(super) use activity_columns;

pub(super) fn activity(row: &dyn Row, run: &RunId) -> Result<ActivityRecord, StoreError> {
    let mut cells = Cells::new(row);
    let row = ActivityRow {
        run_id: cells.get()?,
        activity_id: cells.get()?,
        activation: cells.get()?,
        state: cells.get()?,
        body: cells.get()?,
        input: cells.payload("activity input")?,
        output: cells.some_payload("activity output")?,
        seal: cells.some_digest("activity seal")?,
    };
    row.open(run.as_str(), None, None)
}

/// The columns of `wait`, of a row `w` of `waits`, with what stands for the subject and what was delivered.
macro_rules! wait_columns {
    ($subject:expr, $delivered:expr) => {
        concat!(
            "w.run_id, w.wait_id, w.correlation_id, w.activation, w.kind, w.status, w.deadline, w.armed_at, w.body, ",
            $subject,
            ", w.subject_digest, ",
            $delivered,
            ", w.delivered_digest, w.seal"
        )
    };
}
pub(super) use wait_columns;

/// What a key was used for: `request, run_id`.
pub(super) fn keyed(row: &dyn Row, key: &IdempotencyKey) -> Result<Created, StoreError> {
    let mut cells = Cells::new(row);
    let (request, run): (&[u8], &str) = (cells.get()?, cells.get()?);
    let run = RunId::new(run).map_err(|error| StoreError::corrupt(error.to_string()))?;
    Ok(key.answers(request, run))
}

/// A wait of this run; of the run it names when none is expected.
pub(super) fn wait(row: &dyn Row, run: Option<&RunId>) -> Result<WaitRecord, StoreError> {
    let row = wait_row(&mut Cells::new(row))?;
    let expected = run.map_or_else(|| row.run_id.clone(), |run| run.as_str().to_owned());
    row.open(&expected, None, None)
}

fn wait_row(cells: &mut Cells<'_>) -> Result<WaitRow, StoreError> {
    Ok(WaitRow {
        run_id: cells.get()?,
        wait_id: cells.get()?,
        correlation_id: cells.get()?,
        activation: cells.get()?,
        kind: cells.get()?,
        status: cells.get()?,
        deadline: cells.get()?,
        armed_at: cells.get()?,
        body: cells.get()?,
        subject: cells.payload("wait subject")?,
        delivered: cells.some_payload("delivery")?,
        seal: cells.some_digest("wait seal")?,
    })
}

/// Whose column `kind` is not what its sealed body says, and what it should be.
///
/// # Errors
/// `corrupt` when one of the waits is.
pub(super) fn misfiled<R: Row>(rows: &[R], run: &RunId) -> Result<Vec<(WaitId, WaitingKind)>, StoreError> {
    let mut found = Vec::new();
    for row in rows {
        let row = wait_row(&mut Cells::new(row))?;
        let kind = row.kind.clone();
        let wait = row.open(run.as_str(), None, None)?;
        if kind.as_deref() != Some(wait.kind.as_str()) {
            found.push((wait.id, wait.kind));
        }
    }
    Ok(found)
}

/// Where a row stands in a list of gates: `(armed_at, run, wait)`.
pub(super) type GatePlace = (i64, String, String);

/// The columns of `gate_place` and `gate`: where a wait stands, the wait `w`, the head `r` of its run.
macro_rules! gate_columns {
    ($subject:expr, $delivered:expr, $none:expr) => {
        concat!(
            "w.armed_at, w.run_id, w.wait_id, ",
            $crate::store::rows::wait_columns!($subject, $delivered),
            ", ",
            $crate::store::rows::head_columns!($none)
        )
    };
}
pub(super) use gate_columns;

pub(super) fn gate_place(row: &dyn Row) -> Result<GatePlace, StoreError> {
    place(&mut Cells::new(row))
}

fn place(cells: &mut Cells<'_>) -> Result<GatePlace, StoreError> {
    Ok((cells.get()?, cells.get()?, cells.get()?))
}

/// A wait and the definition of its run.
///
/// # Errors
/// `corrupt` when one of both is.
pub(super) fn gate(row: &dyn Row) -> Result<(WaitRecord, DefinitionRef), StoreError> {
    let mut cells = Cells::new(row);
    let (_, run, _) = place(&mut cells)?;
    let wait = wait_row(&mut cells)?.open(&run, None, None)?;
    let (head, _) = head(&mut cells)?.row.open(&run)?;
    Ok((wait, head.definition))
}

/// The columns of `definition`, of a row `d` of `definitions` and a row `n` of `definition_names`, with what stands for the body
/// as text.
macro_rules! definition_columns {
    ($body:expr) => {
        concat!(
            "d.kind, d.name, d.version, d.digest, ",
            $body,
            ", n.origin, n.withdrawn, d.created_at"
        )
    };
}
pub(super) use definition_columns;

/// A definition that nobody has compared with its digest.
pub(super) fn definition(row: &dyn Row) -> Result<Definition, StoreError> {
    let mut cells = Cells::new(row);
    Ok(Definition {
        kind: cells.get()?,
        name: cells.get()?,
        version: cells.count()?,
        digest: cells.get()?,
        body: cells.get::<String>()?.into(),
        origin: Origin::parse(cells.get()?)
            .ok_or_else(|| StoreError::corrupt("origin: not a word of the list"))?,
        withdrawn: cells.get()?,
        created_at: cells.time()?,
    })
}

/// The column is `body`.
pub(super) fn step(row: &dyn Row) -> Result<StepRecord, StoreError> {
    decode_step(Cells::new(row).get()?)
}

/// The columns of `event`, of a row `e` of `events`.
macro_rules! event_columns {
    () => {
        "e.seq, e.life, e.name, e.terminal, e.time, e.data"
    };
}
pub(super) use event_columns;

pub(super) fn event(row: &dyn Row) -> Result<EventRecord, StoreError> {
    let mut cells = Cells::new(row);
    Ok(EventRecord {
        seq: cells.count()?,
        life: u32::try_from(cells.get::<i64>()?)
            .map_err(|_| StoreError::corrupt("event life: out of range"))?,
        name: cells.get::<String>()?.into(),
        terminal: cells.get()?,
        time: cells.time()?,
        data: cells.get()?,
    })
}

/// The columns of `decision`, of a row `d` of `decisions`.
macro_rules! decision_columns {
    () => {
        "d.scope, d.decision_id, d.content, d.body, d.created_at"
    };
}
pub(super) use decision_columns;

pub(super) fn decision(row: &dyn Row, run: &RunId) -> Result<DecisionRecord, StoreError> {
    let mut cells = Cells::new(row);
    Ok(DecisionRecord {
        run: run.clone(),
        scope: Scope::parse(cells.get()?)
            .ok_or_else(|| StoreError::corrupt("decision scope: not a word of the list"))?,
        id: DecisionId::new(cells.get()?).map_err(|error| StoreError::corrupt(error.to_string()))?,
        content: cells.digest("decision content")?,
        body: cells.get()?,
        created_at: cells.time()?,
    })
}
