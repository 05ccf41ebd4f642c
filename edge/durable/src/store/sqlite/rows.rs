//! Rows of the driver as rows of `envelope`. Columns are read by position; the lists of their names stand beside the reading.

use bytes::Bytes;
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use crate::envelope::{ActivityRow, CheckpointRow, HeadRow, PayloadColumns, WaitRow, decode_step};
use crate::ids::{DecisionId, Owner, RunId};
use crate::payload::Digest;
use crate::record::{
    ActivityRecord, CancelRequest, CheckpointRecord, DecisionRecord, EventRecord, Inbox, RunHead, Scope,
    StepRecord, WaitRecord,
};
use crate::store::{Lease, Loaded, StoreError};
use crate::time::Timestamp;

/// Reads one row from left to right.
pub(super) struct Cells<'r> {
    row: &'r SqliteRow,
    next: usize,
}

impl<'r> Cells<'r> {
    pub(super) fn new(row: &'r SqliteRow) -> Self {
        Self { row, next: 0 }
    }

    /// # Errors
    /// `corrupt` when the column cannot hold what it should.
    pub(super) fn get<T>(&mut self) -> Result<T, StoreError>
    where
        T: sqlx::Decode<'r, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
    {
        let value = self
            .row
            .try_get(self.next)
            .map_err(|error| StoreError::corrupt(error.to_string()))?;
        self.next += 1;
        Ok(value)
    }

    fn bytes(&mut self) -> Result<Bytes, StoreError> {
        self.get::<Vec<u8>>().map(Bytes::from)
    }

    fn some_bytes(&mut self) -> Result<Option<Bytes>, StoreError> {
        Ok(self.get::<Option<Vec<u8>>>()?.map(Bytes::from))
    }

    fn some_digest(&mut self, what: &str) -> Result<Option<Digest>, StoreError> {
        self.get::<Option<&[u8]>>()?
            .map(|bytes| {
                Digest::try_from(bytes).map_err(|_| StoreError::corrupt(format!("{what}: is no digest")))
            })
            .transpose()
    }

    pub(super) fn digest(&mut self, what: &str) -> Result<Digest, StoreError> {
        self.some_digest(what)?
            .ok_or_else(|| StoreError::corrupt(format!("{what}: is missing")))
    }

    /// The bytes may come from the row or from `blobs`.
    fn payload(&mut self, what: &str) -> Result<PayloadColumns, StoreError> {
        Ok(PayloadColumns {
            inline: self.some_bytes()?,
            digest: self.digest(what)?,
        })
    }

    fn some_payload(&mut self, what: &str) -> Result<Option<PayloadColumns>, StoreError> {
        let inline = self.some_bytes()?;
        match (inline, self.some_digest(what)?) {
            (inline, Some(digest)) => Ok(Some(PayloadColumns { inline, digest })),
            (None, None) => Ok(None),
            (Some(_), None) => Err(StoreError::corrupt(format!("{what}: the digest is missing"))),
        }
    }

    pub(super) fn count(&mut self) -> Result<u64, StoreError> {
        unsigned(self.get()?)
    }

    pub(super) fn time(&mut self) -> Result<Timestamp, StoreError> {
        Timestamp::from_millis(self.get()?).map_err(|error| StoreError::corrupt(error.to_string()))
    }

    pub(super) fn run(&mut self) -> Result<RunId, StoreError> {
        RunId::new(self.get()?).map_err(|error| StoreError::corrupt(error.to_string()))
    }
}

pub(super) fn unsigned(n: i64) -> Result<u64, StoreError> {
    u64::try_from(n).map_err(|_| StoreError::corrupt("a number is negative"))
}

/// A number as its column has it; one that is too large for SQLite is larger than any that is stored.
pub(super) fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// What SQL is spliced in for the bytes of a payload: from the row, or from `blobs`.
macro_rules! bytes_of {
    ($row:literal, $bytes:literal, $digest:literal) => {
        concat!(
            "coalesce(",
            $row,
            ".",
            $bytes,
            ", (SELECT b.bytes FROM blobs b WHERE b.run_id = ",
            $row,
            ".run_id AND b.digest = ",
            $row,
            ".",
            $digest,
            "))"
        )
    };
}
pub(super) use bytes_of;

/// The columns of `head`, of a row `r` of `runs`, with what stands for the state.
macro_rules! head_columns {
    ($state:expr) => {
        concat!(
            "r.run_id, r.kind, r.definition, r.status, r.cursor, r.activation, r.revision, r.schema_version, \
             r.parent_id, r.root_id, r.waiting_kind, r.deadline, ",
            $state,
            ", r.state_digest, r.budgets, \
             r.outcome, r.body, r.seal, r.created_at, r.updated_at, r.signal, r.cancel, r.quarantine"
        )
    };
}
pub(super) use head_columns;

/// A head with the columns beside it that are not sealed.
pub(super) struct HeadCells {
    row: HeadRow,
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
            deadline: cells.get()?,
            state: cells.payload("state")?,
            budgets: cells.bytes()?,
            outcome: cells.some_bytes()?,
            body: cells.bytes()?,
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
    ///
    /// # Errors
    /// `corrupt`, `schema_unsupported`.
    pub(super) fn open_head(self, run: &str) -> Result<(RunHead, Inbox), StoreError> {
        let (head, _) = self.row.open(run)?;
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

/// `owner`, `incarnation` and `expires_at` of a row of `run_leases` that need not be there.
pub(super) fn some_lease(cells: &mut Cells<'_>, run: &RunId) -> Result<Option<Lease>, StoreError> {
    let owner: Option<&str> = cells.get()?;
    let incarnation: Option<i64> = cells.get()?;
    let expires_at: Option<i64> = cells.get()?;
    let (Some(owner), Some(incarnation), Some(expires_at)) = (owner, incarnation, expires_at) else {
        return Ok(None);
    };
    Ok(Some(Lease {
        run: run.clone(),
        owner: Owner::new(owner).map_err(|error| StoreError::corrupt(error.to_string()))?,
        incarnation: unsigned(incarnation)?,
        expires_at: Timestamp::from_millis(expires_at)
            .map_err(|error| StoreError::corrupt(error.to_string()))?,
    }))
}

/// The columns of `checkpoint`, with what stands for the state.
macro_rules! checkpoint_columns {
    ($state:expr) => {
        concat!(
            "c.run_id, c.revision, c.status, c.cursor, c.activation, ",
            $state,
            ", c.state_digest, c.seal, \
             c.created_at, c.pruned"
        )
    };
}
pub(super) use checkpoint_columns;

/// A checkpoint with its state, where the row has it.
pub(super) fn checkpoint(cells: &mut Cells<'_>, run: &RunId) -> Result<CheckpointRecord, StoreError> {
    let row = CheckpointRow {
        run_id: cells.get()?,
        revision: cells.get()?,
        status: cells.get()?,
        cursor: cells.get()?,
        activation: cells.get()?,
        state: cells.payload("checkpoint state")?,
        seal: cells.some_digest("checkpoint seal")?,
        created_at: cells.get()?,
        pruned: cells.get()?,
    };
    let mut record = row.open(run.as_str())?;
    if row.state.inline.is_some() {
        record.state = Some(row.state.open("checkpoint state", None)?);
    }
    Ok(record)
}

/// The columns of `activity`, of a row `a` of `activities`.
macro_rules! activity_columns {
    () => {
        concat!(
            "a.run_id, a.activity_id, a.activation, a.state, a.body, ",
            bytes_of!("a", "input", "input_digest"),
            ", a.input_digest, ",
            bytes_of!("a", "output", "output_digest"),
            ", a.output_digest, a.seal"
        )
    };
}
pub(super) use activity_columns;

pub(super) fn activity(row: &SqliteRow, run: &RunId) -> Result<ActivityRecord, StoreError> {
    let mut cells = Cells::new(row);
    let row = ActivityRow {
        run_id: cells.get()?,
        activity_id: cells.get()?,
        activation: cells.get()?,
        state: cells.get()?,
        body: cells.bytes()?,
        input: cells.payload("activity input")?,
        output: cells.some_payload("activity output")?,
        seal: cells.some_digest("activity seal")?,
    };
    row.open(run.as_str(), None, None)
}

/// The columns of `wait`, of a row `w` of `waits`.
macro_rules! wait_columns {
    () => {
        concat!(
            "w.run_id, w.wait_id, w.correlation_id, w.activation, w.status, w.deadline, w.armed_at, w.body, ",
            bytes_of!("w", "subject", "subject_digest"),
            ", w.subject_digest, ",
            bytes_of!("w", "delivered", "delivered_digest"),
            ", w.delivered_digest, w.seal"
        )
    };
}
pub(super) use wait_columns;

/// A wait of this run; of the run it names when none is expected.
pub(super) fn wait(row: &SqliteRow, run: Option<&RunId>) -> Result<WaitRecord, StoreError> {
    let mut cells = Cells::new(row);
    let row = WaitRow {
        run_id: cells.get()?,
        wait_id: cells.get()?,
        correlation_id: cells.get()?,
        activation: cells.get()?,
        status: cells.get()?,
        deadline: cells.get()?,
        armed_at: cells.get()?,
        body: cells.bytes()?,
        subject: cells.payload("wait subject")?,
        delivered: cells.some_payload("delivery")?,
        seal: cells.some_digest("wait seal")?,
    };
    let expected = run.map_or_else(|| row.run_id.clone(), |run| run.as_str().to_owned());
    row.open(&expected, None, None)
}

pub(super) fn step(row: &SqliteRow) -> Result<StepRecord, StoreError> {
    decode_step(Cells::new(row).get()?)
}

/// The columns of `event`.
macro_rules! event_columns {
    () => {
        "e.seq, e.life, e.name, e.terminal, e.time, e.data"
    };
}
pub(super) use event_columns;

pub(super) fn event(row: &SqliteRow) -> Result<EventRecord, StoreError> {
    let mut cells = Cells::new(row);
    Ok(EventRecord {
        seq: cells.count()?,
        life: u32::try_from(cells.get::<i64>()?).map_err(|_| StoreError::corrupt("event: life"))?,
        name: cells.get::<String>()?.into(),
        terminal: cells.get()?,
        time: cells.time()?,
        data: cells.bytes()?,
    })
}

/// The columns of `decision`.
macro_rules! decision_columns {
    () => {
        "d.scope, d.decision_id, d.content, d.body, d.created_at"
    };
}
pub(super) use decision_columns;

pub(super) fn decision(row: &SqliteRow, run: &RunId) -> Result<DecisionRecord, StoreError> {
    let mut cells = Cells::new(row);
    Ok(DecisionRecord {
        run: run.clone(),
        scope: Scope::parse(cells.get()?).ok_or_else(|| StoreError::corrupt("decision: scope"))?,
        id: DecisionId::new(cells.get()?).map_err(|error| StoreError::corrupt(error.to_string()))?,
        content: cells.digest("decision content")?,
        body: cells.bytes()?,
        created_at: cells.time()?,
    })
}
