//! Rows of the driver as rows of `envelope`. Columns are read by position; the lists of their names stand beside the reading.

use bytes::Bytes;
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::envelope::{ActivityRow, CheckpointRow, HeadRow, PayloadColumns, WaitRow, decode_step};
use crate::ids::{DecisionId, Owner, RunId};
use crate::payload::Digest;
use crate::record::{
    ActivityRecord, CancelRequest, DecisionRecord, EventRecord, Inbox, Scope, StepRecord, WaitRecord,
};
use crate::store::{Lease, Loaded, StoreError};
use crate::time::Timestamp;

/// Reads one row from left to right.
pub(super) struct Cells<'r> {
    row: &'r PgRow,
    next: usize,
}

impl<'r> Cells<'r> {
    pub(super) fn new(row: &'r PgRow) -> Self {
        Self { row, next: 0 }
    }

    /// # Errors
    /// `corrupt` when the column cannot hold what it should.
    pub(super) fn get<T>(&mut self) -> Result<T, StoreError>
    where
        T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
    {
        let value = self
            .row
            .try_get(self.next)
            .map_err(|error| StoreError::corrupt(error.to_string()))?;
        self.next += 1;
        Ok(value)
    }

    pub(super) fn bytes(&mut self) -> Result<Bytes, StoreError> {
        self.get::<&[u8]>().map(Bytes::copy_from_slice)
    }

    pub(super) fn some_bytes(&mut self) -> Result<Option<Bytes>, StoreError> {
        Ok(self.get::<Option<&[u8]>>()?.map(Bytes::copy_from_slice))
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

    fn payload(&mut self, what: &str) -> Result<PayloadColumns, StoreError> {
        Ok(PayloadColumns {
            inline: self.some_bytes()?,
            digest: self.digest(what)?,
        })
    }

    fn some_payload(&mut self, what: &str) -> Result<Option<PayloadColumns>, StoreError> {
        let inline = self.some_bytes()?;
        let digest = self.some_digest(what)?;
        match (inline, digest) {
            (inline, Some(digest)) => Ok(Some(PayloadColumns { inline, digest })),
            (None, None) => Ok(None),
            (Some(_), None) => Err(StoreError::corrupt(format!("{what}: the digest is missing"))),
        }
    }

    pub(super) fn count(&mut self) -> Result<u64, StoreError> {
        unsigned(self.get()?)
    }

    pub(super) fn time(&mut self) -> Result<Timestamp, StoreError> {
        time(self.get()?)
    }

    pub(super) fn run(&mut self) -> Result<RunId, StoreError> {
        RunId::new(self.get()?).map_err(|error| StoreError::corrupt(error.to_string()))
    }
}

pub(super) fn time(ms: i64) -> Result<Timestamp, StoreError> {
    Timestamp::from_millis(ms).map_err(|error| StoreError::corrupt(error.to_string()))
}

pub(super) fn unsigned(n: i64) -> Result<u64, StoreError> {
    u64::try_from(n).map_err(|_| StoreError::corrupt("a number is negative"))
}

/// The columns of `head`, of a row `r` of `runs`.
pub(super) const HEAD: &str = "r.run_id, r.kind, r.definition, r.status, r.cursor, r.activation, r.revision, \
     r.schema_version, r.parent_id, r.root_id, r.waiting_kind, r.deadline, r.state, r.state_digest, r.budgets, \
     r.outcome, r.body, r.seal, r.created_at, r.updated_at, r.due_at, r.signal, r.cancel, r.quarantine";

/// A head with the columns beside it that are not sealed.
pub(super) struct HeadCells {
    pub(super) row: HeadRow,
    pub(super) due_at: Option<i64>,
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
        due_at: cells.get()?,
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
    /// # Errors
    /// `corrupt`, `schema_unsupported`.
    pub(super) fn open(
        self,
        run: &RunId,
        blob: Option<Bytes>,
        lease: Option<Lease>,
        now: Timestamp,
    ) -> Result<Loaded, StoreError> {
        let (head, seal) = self.row.open(run.as_str())?;
        Ok(Loaded {
            head,
            state: self.row.state.open("state", blob)?,
            seal,
            inbox: self.inbox,
            lease,
            now,
        })
    }
}

/// The columns of `lease`, of a row `l` of `run_leases`. NULL when nobody ever held it.
pub(super) const LEASE: &str = "l.owner, l.incarnation, l.expires_at";

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

/// The columns of `checkpoint`.
pub(super) const CHECKPOINT: &str =
    "run_id, revision, status, cursor, activation, state, state_digest, seal, created_at, pruned";
/// The same without the state.
pub(super) const CHECKPOINT_LISTED: &str =
    "run_id, revision, status, cursor, activation, NULL::bytea, state_digest, seal, created_at, pruned";

pub(super) fn checkpoint(cells: &mut Cells<'_>) -> Result<CheckpointRow, StoreError> {
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

/// Activities `a` with the bytes that are not in their row.
pub(super) const ACTIVITIES: &str = "SELECT a.run_id, a.activity_id, a.activation, a.state, a.body, a.input, \
     a.input_digest, a.output, a.output_digest, a.seal, i.bytes, o.bytes \
     FROM activities a \
     LEFT JOIN blobs i ON a.input IS NULL AND i.run_id = a.run_id AND i.digest = a.input_digest \
     LEFT JOIN blobs o ON a.output IS NULL AND o.run_id = a.run_id AND o.digest = a.output_digest ";

pub(super) fn activity(row: &PgRow, run: &RunId) -> Result<ActivityRecord, StoreError> {
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
    let (input, output) = (cells.some_bytes()?, cells.some_bytes()?);
    row.open(run.as_str(), input, output)
}

/// Waits `w` with the bytes that are not in their row.
pub(super) const WAITS: &str = "SELECT w.run_id, w.wait_id, w.correlation_id, w.activation, w.status, w.deadline, \
     w.armed_at, w.body, w.subject, w.subject_digest, w.delivered, w.delivered_digest, w.seal, s.bytes, d.bytes \
     FROM waits w \
     LEFT JOIN blobs s ON w.subject IS NULL AND s.run_id = w.run_id AND s.digest = w.subject_digest \
     LEFT JOIN blobs d ON w.delivered IS NULL AND d.run_id = w.run_id AND d.digest = w.delivered_digest ";

/// `run` is whose wait it must be; `None`: whose it says it is.
pub(super) fn wait(row: &PgRow, run: Option<&RunId>) -> Result<WaitRecord, StoreError> {
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
    let (subject, delivered) = (cells.some_bytes()?, cells.some_bytes()?);
    let expected = run.map_or_else(|| row.run_id.clone(), |run| run.as_str().to_owned());
    row.open(&expected, subject, delivered)
}

/// The columns of `decision`.
pub(super) const DECISION: &str = "scope, decision_id, content, body, created_at";

pub(super) fn decision(row: &PgRow, run: &RunId) -> Result<DecisionRecord, StoreError> {
    let mut cells = Cells::new(row);
    Ok(DecisionRecord {
        run: run.clone(),
        scope: Scope::parse(cells.get()?)
            .ok_or_else(|| StoreError::corrupt("decision scope: not a word of the list"))?,
        id: DecisionId::new(cells.get()?).map_err(|error| StoreError::corrupt(error.to_string()))?,
        content: cells.digest("decision content")?,
        body: cells.bytes()?,
        created_at: cells.time()?,
    })
}

/// The columns of `event`.
pub(super) const EVENT: &str = "seq, life, name, terminal, time, data";

pub(super) fn event(row: &PgRow) -> Result<EventRecord, StoreError> {
    let mut cells = Cells::new(row);
    Ok(EventRecord {
        seq: cells.count()?,
        life: u32::try_from(cells.get::<i64>()?)
            .map_err(|_| StoreError::corrupt("event life: out of range"))?,
        name: cells.get::<String>()?.into(),
        terminal: cells.get()?,
        time: cells.time()?,
        data: cells.bytes()?,
    })
}

pub(super) fn step(row: &PgRow) -> Result<StepRecord, StoreError> {
    decode_step(&Cells::new(row).bytes()?)
}
