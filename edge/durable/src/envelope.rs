//! Rows and seals: the one place where records become columns and back (D109, D111).
//!
//! A seal is SHA-256 over length-prefixed fields, the run's identity, the revision and the pointer first. It shows that stored
//! bytes changed; it is no authentication and says nothing about meaning (D113). A row whose seal is missing or does not hold,
//! or that belongs to another run, is corrupt: an error of its own, never "not found" (D112).

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::failure::Failure;
use crate::ids::{ActivityId, CorrelationId, DecisionId, Key, NodeName, Revision, RunId, WaitId, digest_of};
use crate::payload::{Digest, Payload};
use crate::record::{
    ActivityRecord, ActivityState, Attempt, Budget, CheckpointRecord, Continuation, DeadlinePolicy,
    DefinitionRef, Effect, Lineage, NotBefore, Origin, RetryPolicy, RunHead, Settled, Status, StepRecord,
    WaitLabels, WaitRecord, WaitStatus, Waiting, WaitingKind,
};
use crate::store::StoreError;
use crate::time::Timestamp;

/// The schema of what is written. A higher one is refused, never guessed at.
pub const SCHEMA_VERSION: u32 = 1;

/// Payloads up to this many bytes stand in their row; longer ones are stored once per run by digest, in `blobs`.
pub const INLINE_MAX: usize = 4096;

/// A payload as its row has it: the bytes, or only their digest when they are in `blobs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PayloadColumns {
    pub inline: Option<Bytes>,
    pub digest: Digest,
}

impl PayloadColumns {
    fn of(payload: &Payload) -> Self {
        let inline = (payload.bytes().len() <= INLINE_MAX).then(|| payload.bytes().clone());
        Self {
            inline,
            digest: *payload.digest(),
        }
    }

    /// The payload; `blob` is what `blobs` has under this digest, when it was asked.
    ///
    /// # Errors
    /// `corrupt` when the bytes are missing or have another digest.
    pub fn open(self, what: &str, blob: Option<Bytes>) -> Result<Payload, StoreError> {
        let Some(bytes) = self.inline.or(blob) else {
            return Err(StoreError::corrupt(format!("{what}: the bytes are missing")));
        };
        let mut payload = Payload::new(bytes);
        if *payload.digest() != self.digest {
            return Err(StoreError::corrupt(format!(
                "{what}: the bytes do not have their digest"
            )));
        }
        payload.mark_stored();
        Ok(payload)
    }
}

/// A row of `blobs`, keyed by run and digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobRow {
    pub digest: Digest,
    pub bytes: Bytes,
}

/// What a commit must add to `blobs` for this payload.
pub fn blob_of(payload: &Payload) -> Option<BlobRow> {
    (payload.bytes().len() > INLINE_MAX && !payload.is_stored()).then(|| BlobRow {
        digest: *payload.digest(),
        bytes: payload.bytes().clone(),
    })
}

/// A row of `runs`, without the index and inbox columns that are not sealed (`due_at`, `signal`, `cancel`, `quarantine`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadRow {
    pub run_id: String,
    /// The front-end's kind.
    pub kind: String,
    /// The definition's name.
    pub definition: String,
    pub status: String,
    /// Empty when the run is over.
    pub cursor: String,
    pub activation: i64,
    pub revision: i64,
    pub schema_version: i64,
    pub parent_id: Option<String>,
    pub root_id: String,
    pub waiting_kind: Option<String>,
    /// A copy of the body's, for lists.
    pub owner: Option<String>,
    /// When the waiting itself ends, from the sealed body.
    pub deadline: Option<i64>,
    pub state: PayloadColumns,
    /// JSON.
    pub budgets: Bytes,
    pub outcome: Option<Bytes>,
    /// JSON: the rest.
    pub body: Bytes,
    /// Missing in a row that was tampered with.
    pub seal: Option<Digest>,
    pub created_at: i64,
    pub updated_at: i64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeadBody {
    definition_version: u64,
    definition_digest: String,
    origin: Option<String>,
    life: u32,
    attempt: u32,
    recoveries: u32,
    metadata: BTreeMap<String, String>,
    /// Left out when there is none: heads of before have the same bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
    waiting: Option<Waiting>,
    event_seq: u64,
    open_activities: u32,
    armed_waits: u32,
    effects: u64,
    traceparent: Option<String>,
    /// Left out before the first lease, as in heads that were written without it.
    #[serde(default, skip_serializing_if = "is_zero")]
    incarnation: u64,
    commit_id: Uuid,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands it over by reference"
)]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

fn json<T: Serialize>(what: &str, value: &T) -> Result<Bytes, StoreError> {
    serde_json::to_vec(value)
        .map(Bytes::from)
        .map_err(|e| StoreError::corrupt(format!("{what}: {e}")))
}

fn from_json<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(bytes).map_err(|e| StoreError::corrupt(format!("{what}: {e}")))
}

fn column<T, E: std::fmt::Display>(what: &str, value: Result<T, E>) -> Result<T, StoreError> {
    value.map_err(|e| StoreError::corrupt(format!("{what}: {e}")))
}

fn word<T>(what: &str, value: Option<T>) -> Result<T, StoreError> {
    value.ok_or_else(|| StoreError::corrupt(format!("{what}: not a word of the list")))
}

fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn unsigned(what: &str, n: i64) -> Result<u64, StoreError> {
    column(what, u64::try_from(n))
}

fn opt(bytes: Option<&[u8]>) -> [&[u8]; 2] {
    match bytes {
        Some(bytes) => [b"1", bytes],
        None => [b"0", b""],
    }
}

impl HeadRow {
    fn compute_seal(&self) -> Digest {
        let [waiting_set, waiting] = opt(self.waiting_kind.as_deref().map(str::as_bytes));
        let [parent_set, parent] = opt(self.parent_id.as_deref().map(str::as_bytes));
        let [outcome_set, outcome] = opt(self.outcome.as_deref());
        digest_of(&[
            b"head",
            self.run_id.as_bytes(),
            &self.revision.to_be_bytes(),
            self.cursor.as_bytes(),
            &self.activation.to_be_bytes(),
            &self.schema_version.to_be_bytes(),
            self.kind.as_bytes(),
            self.definition.as_bytes(),
            self.status.as_bytes(),
            parent_set,
            parent,
            self.root_id.as_bytes(),
            waiting_set,
            waiting,
            &self.deadline.unwrap_or(0).to_be_bytes(),
            &self.state.digest,
            &self.budgets,
            outcome_set,
            outcome,
            &self.body,
            &self.created_at.to_be_bytes(),
            &self.updated_at.to_be_bytes(),
        ])
    }

    /// The row of `head` at the revision the store assigned.
    ///
    /// # Errors
    /// `corrupt` when the head cannot be encoded.
    pub fn seal(head: &RunHead, state: &Payload, revision: Revision) -> Result<Self, StoreError> {
        let body = HeadBody {
            definition_version: head.definition.version,
            definition_digest: head.definition.digest.clone(),
            origin: head.lineage.origin.clone(),
            life: head.life,
            attempt: head.attempt,
            recoveries: head.recoveries,
            metadata: head.metadata.clone(),
            owner: head.owner.clone(),
            waiting: head.waiting.clone(),
            event_seq: head.event_seq,
            open_activities: head.open_activities,
            armed_waits: head.armed_waits,
            effects: head.effects,
            traceparent: head.traceparent.clone(),
            incarnation: head.incarnation,
            commit_id: head.commit_id,
        };
        let mut row = Self {
            run_id: head.id.as_str().to_owned(),
            kind: head.definition.kind.clone(),
            definition: head.definition.name.clone(),
            status: head.status.as_str().to_owned(),
            cursor: head
                .cursor
                .as_ref()
                .map_or_else(String::new, |c| c.as_str().to_owned()),
            activation: signed(head.activation),
            revision: signed(revision.get()),
            schema_version: i64::from(SCHEMA_VERSION),
            parent_id: head.lineage.parent.as_ref().map(|p| p.as_str().to_owned()),
            root_id: head.lineage.root.as_str().to_owned(),
            waiting_kind: head
                .waiting
                .as_ref()
                .and_then(Waiting::kind)
                .map(|k| k.as_str().to_owned()),
            owner: head.owner.clone(),
            deadline: head.deadline.map(Timestamp::as_millis),
            state: PayloadColumns::of(state),
            budgets: json("budgets", &head.budgets)?,
            outcome: head.outcome.clone(),
            body: json("body", &body)?,
            seal: None,
            created_at: head.created_at.as_millis(),
            updated_at: head.updated_at.as_millis(),
        };
        row.seal = Some(row.compute_seal());
        Ok(row)
    }

    /// The head of this row and its seal, every column checked.
    ///
    /// # Errors
    /// `corrupt`; `schema_unsupported` for a newer schema.
    pub fn open(&self, expected: &str) -> Result<(RunHead, Digest), StoreError> {
        if self.run_id != expected {
            return Err(StoreError::corrupt("head: it belongs to another run"));
        }
        if self.schema_version != i64::from(SCHEMA_VERSION) {
            return Err(match u32::try_from(self.schema_version) {
                Ok(found) if found > SCHEMA_VERSION => StoreError::SchemaUnsupported {
                    found,
                    known: SCHEMA_VERSION,
                },
                _ => StoreError::corrupt("head: schema_version"),
            });
        }
        let seal = self
            .seal
            .ok_or_else(|| StoreError::corrupt("head: the seal is missing"))?;
        if seal != self.compute_seal() {
            return Err(StoreError::corrupt("head: the seal does not hold"));
        }
        let body: HeadBody = from_json("head body", &self.body)?;
        let head = RunHead {
            id: column("run_id", RunId::new(&self.run_id))?,
            revision: column("revision", Revision::new(unsigned("revision", self.revision)?))?,
            definition: DefinitionRef {
                kind: self.kind.clone(),
                name: self.definition.clone(),
                version: body.definition_version,
                digest: body.definition_digest,
            },
            lineage: Lineage {
                parent: column("parent_id", self.parent_id.as_deref().map(RunId::new).transpose())?,
                root: column("root_id", RunId::new(&self.root_id))?,
                origin: body.origin,
            },
            life: body.life,
            status: word("status", Status::parse(&self.status))?,
            cursor: if self.cursor.is_empty() {
                None
            } else {
                Some(column("cursor", NodeName::new(&self.cursor))?)
            },
            activation: unsigned("activation", self.activation)?,
            attempt: body.attempt,
            recoveries: body.recoveries,
            state_digest: self.state.digest,
            budgets: from_json::<BTreeMap<String, Budget>>("budgets", &self.budgets)?,
            metadata: body.metadata,
            owner: body.owner,
            waiting: body.waiting,
            outcome: self.outcome.clone(),
            deadline: column("deadline", self.deadline.map(Timestamp::from_millis).transpose())?,
            event_seq: body.event_seq,
            open_activities: body.open_activities,
            armed_waits: body.armed_waits,
            effects: body.effects,
            traceparent: body.traceparent,
            incarnation: body.incarnation,
            commit_id: body.commit_id,
            created_at: column("created_at", Timestamp::from_millis(self.created_at))?,
            updated_at: column("updated_at", Timestamp::from_millis(self.updated_at))?,
        };
        let waiting_kind = head
            .waiting
            .as_ref()
            .and_then(Waiting::kind)
            .map(WaitingKind::as_str);
        if waiting_kind != self.waiting_kind.as_deref() {
            return Err(StoreError::corrupt("head: waiting_kind"));
        }
        if head.owner != self.owner {
            return Err(StoreError::corrupt("head: owner"));
        }
        Ok((head, seal))
    }
}

/// The seal a head must have; how the runtime verifies a store's answer again (D114).
///
/// # Errors
/// `corrupt` when the head cannot be encoded.
pub fn seal_of(head: &RunHead, state: &Payload) -> Result<Digest, StoreError> {
    Ok(HeadRow::seal(head, state, head.revision)?.compute_seal())
}

/// A row of `checkpoints`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointRow {
    pub run_id: String,
    pub revision: i64,
    pub status: String,
    pub cursor: String,
    pub activation: i64,
    pub state: PayloadColumns,
    pub seal: Option<Digest>,
    pub created_at: i64,
    pub pruned: bool,
}

impl CheckpointRow {
    fn compute_seal(&self) -> Digest {
        digest_of(&[
            b"checkpoint",
            self.run_id.as_bytes(),
            &self.revision.to_be_bytes(),
            self.cursor.as_bytes(),
            &self.activation.to_be_bytes(),
            self.status.as_bytes(),
            &self.state.digest,
            &self.created_at.to_be_bytes(),
        ])
    }

    /// The checkpoint of a head row.
    pub fn of(head: &HeadRow) -> Self {
        let mut row = Self {
            run_id: head.run_id.clone(),
            revision: head.revision,
            status: head.status.clone(),
            cursor: head.cursor.clone(),
            activation: head.activation,
            state: head.state.clone(),
            seal: None,
            created_at: head.updated_at,
            pruned: false,
        };
        row.seal = Some(row.compute_seal());
        row
    }

    /// Without state.
    ///
    /// # Errors
    /// `corrupt`.
    pub fn open(&self, expected: &str) -> Result<CheckpointRecord, StoreError> {
        if self.run_id != expected {
            return Err(StoreError::corrupt("checkpoint: it belongs to another run"));
        }
        let digest = self
            .seal
            .ok_or_else(|| StoreError::corrupt("checkpoint: the seal is missing"))?;
        if digest != self.compute_seal() {
            return Err(StoreError::corrupt("checkpoint: the seal does not hold"));
        }
        Ok(CheckpointRecord {
            run: column("run_id", RunId::new(&self.run_id))?,
            revision: column("revision", Revision::new(unsigned("revision", self.revision)?))?,
            status: word("status", Status::parse(&self.status))?,
            cursor: if self.cursor.is_empty() {
                None
            } else {
                Some(column("cursor", NodeName::new(&self.cursor))?)
            },
            activation: unsigned("activation", self.activation)?,
            state: None,
            state_digest: self.state.digest,
            digest,
            pruned: self.pruned,
            created_at: column("created_at", Timestamp::from_millis(self.created_at))?,
        })
    }
}

/// A row of `activities`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivityRow {
    pub run_id: String,
    pub activity_id: String,
    pub activation: i64,
    pub state: String,
    /// JSON: address, contract, attempts.
    pub body: Bytes,
    pub input: PayloadColumns,
    pub output: Option<PayloadColumns>,
    pub seal: Option<Digest>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ActivityBody {
    node: NodeName,
    key: Key,
    implementation: String,
    effect: Effect,
    retry: Option<RetryPolicy>,
    origin: Option<Origin>,
    attempts: Vec<Attempt>,
    not_before: Option<NotBefore>,
    step_attempt: u32,
    error: Option<Failure>,
    decision: Option<DecisionId>,
}

impl ActivityRow {
    fn compute_seal(&self) -> Digest {
        let [output_set, output] = opt(self.output.as_ref().map(|o| o.digest.as_slice()));
        digest_of(&[
            b"activity",
            self.run_id.as_bytes(),
            self.activity_id.as_bytes(),
            &self.activation.to_be_bytes(),
            self.state.as_bytes(),
            &self.body,
            &self.input.digest,
            output_set,
            output,
        ])
    }

    /// # Errors
    /// `corrupt` when the record cannot be encoded.
    pub fn seal(record: &ActivityRecord) -> Result<Self, StoreError> {
        let body = ActivityBody {
            node: record.node.clone(),
            key: record.key.clone(),
            implementation: record.implementation.clone(),
            effect: record.effect,
            retry: record.retry.clone(),
            origin: record.origin,
            attempts: record.attempts.clone(),
            not_before: record.not_before.clone(),
            step_attempt: record.step_attempt,
            error: record.error.clone(),
            decision: record.decision.clone(),
        };
        let mut row = Self {
            run_id: record.run.as_str().to_owned(),
            activity_id: record.id.as_str().to_owned(),
            activation: signed(record.activation),
            state: record.state.as_str().to_owned(),
            body: json("activity body", &body)?,
            input: PayloadColumns::of(&record.input),
            output: record.output.as_ref().map(PayloadColumns::of),
            seal: None,
        };
        row.seal = Some(row.compute_seal());
        Ok(row)
    }

    /// The record; `input` and `output` are what `blobs` has for payloads that are not inline. The address is checked against
    /// the id: a journal copied from another run or activation is corrupt (D145).
    ///
    /// # Errors
    /// `corrupt`.
    pub fn open(
        self,
        expected: &str,
        input: Option<Bytes>,
        output: Option<Bytes>,
    ) -> Result<ActivityRecord, StoreError> {
        if self.run_id != expected {
            return Err(StoreError::corrupt("activity: it belongs to another run"));
        }
        match self.seal {
            None => return Err(StoreError::corrupt("activity: the seal is missing")),
            Some(seal) if seal != self.compute_seal() => {
                return Err(StoreError::corrupt("activity: the seal does not hold"));
            }
            Some(_) => {}
        }
        let body: ActivityBody = from_json("activity body", &self.body)?;
        let run = column("run_id", RunId::new(&self.run_id))?;
        let id = column("activity_id", ActivityId::new(&self.activity_id))?;
        let activation = unsigned("activation", self.activation)?;
        if ActivityId::derive(&run, &body.node, activation, &body.key) != id {
            return Err(StoreError::corrupt("activity: its address is not its identity"));
        }
        Ok(ActivityRecord {
            run,
            id,
            node: body.node,
            activation,
            key: body.key,
            implementation: body.implementation,
            effect: body.effect,
            retry: body.retry,
            state: word("activity state", ActivityState::parse(&self.state))?,
            origin: body.origin,
            attempts: body.attempts,
            not_before: body.not_before,
            step_attempt: body.step_attempt,
            input: self.input.open("activity input", input)?,
            output: self
                .output
                .map(|o| o.open("activity output", output))
                .transpose()?,
            error: body.error,
            decision: body.decision,
        })
    }
}

/// A row of `waits`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitRow {
    pub run_id: String,
    pub wait_id: String,
    pub correlation_id: String,
    pub activation: i64,
    /// A copy of the body's, for lists; not sealed, derived anew by `rebuild_index`. `None` in rows of before.
    pub kind: Option<String>,
    pub status: String,
    pub deadline: Option<i64>,
    pub armed_at: i64,
    /// JSON: the rest.
    pub body: Bytes,
    pub subject: PayloadColumns,
    pub delivered: Option<PayloadColumns>,
    pub seal: Option<Digest>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WaitBody {
    node: NodeName,
    key: Key,
    generation: u32,
    kind: WaitingKind,
    continuation: Continuation,
    labels: WaitLabels,
    deadline_policy: DeadlinePolicy,
    deliveries: u32,
    settled: Option<SettledBody>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SettledBody {
    by: Option<DecisionId>,
    at: Timestamp,
}

impl WaitRow {
    fn compute_seal(&self) -> Digest {
        let [delivered_set, delivered] = opt(self.delivered.as_ref().map(|d| d.digest.as_slice()));
        digest_of(&[
            b"wait",
            self.run_id.as_bytes(),
            self.wait_id.as_bytes(),
            self.correlation_id.as_bytes(),
            &self.activation.to_be_bytes(),
            self.status.as_bytes(),
            &self.deadline.unwrap_or(0).to_be_bytes(),
            &self.armed_at.to_be_bytes(),
            &self.body,
            &self.subject.digest,
            delivered_set,
            delivered,
        ])
    }

    /// # Errors
    /// `corrupt` when the record cannot be encoded.
    pub fn seal(record: &WaitRecord) -> Result<Self, StoreError> {
        let body = WaitBody {
            node: record.node.clone(),
            key: record.key.clone(),
            generation: record.generation,
            kind: record.kind,
            continuation: record.continuation.clone(),
            labels: record.labels.clone(),
            deadline_policy: record.deadline_policy,
            deliveries: record.deliveries,
            settled: record.settled.as_ref().map(|s| SettledBody {
                by: s.by.clone(),
                at: s.at,
            }),
        };
        let mut row = Self {
            run_id: record.run.as_str().to_owned(),
            wait_id: record.id.as_str().to_owned(),
            correlation_id: record.correlation.as_str().to_owned(),
            activation: signed(record.activation),
            kind: Some(record.kind.as_str().to_owned()),
            status: record.status.as_str().to_owned(),
            deadline: record.deadline.map(Timestamp::as_millis),
            armed_at: record.armed_at.as_millis(),
            body: json("wait body", &body)?,
            subject: PayloadColumns::of(&record.subject),
            delivered: record
                .settled
                .as_ref()
                .and_then(|s| s.payload.as_ref())
                .map(PayloadColumns::of),
            seal: None,
        };
        row.seal = Some(row.compute_seal());
        Ok(row)
    }

    /// The record; `subject` and `delivered` are what `blobs` has for payloads that are not inline.
    ///
    /// # Errors
    /// `corrupt`.
    pub fn open(
        self,
        expected: &str,
        subject: Option<Bytes>,
        delivered: Option<Bytes>,
    ) -> Result<WaitRecord, StoreError> {
        if self.run_id != expected {
            return Err(StoreError::corrupt("wait: it belongs to another run"));
        }
        match self.seal {
            None => return Err(StoreError::corrupt("wait: the seal is missing")),
            Some(seal) if seal != self.compute_seal() => {
                return Err(StoreError::corrupt("wait: the seal does not hold"));
            }
            Some(_) => {}
        }
        let body: WaitBody = from_json("wait body", &self.body)?;
        let run = column("run_id", RunId::new(&self.run_id))?;
        let id = column("wait_id", WaitId::new(&self.wait_id))?;
        let activation = unsigned("activation", self.activation)?;
        if WaitId::derive(&run, &body.node, activation, &body.key, body.generation) != id {
            return Err(StoreError::corrupt("wait: its address is not its identity"));
        }
        let payload = self
            .delivered
            .map(|d| d.open("delivery", delivered))
            .transpose()?;
        let settled = match (body.settled, payload) {
            (Some(settled), payload) => Some(Settled {
                by: settled.by,
                payload,
                at: settled.at,
            }),
            (None, None) => None,
            (None, Some(_)) => return Err(StoreError::corrupt("wait: a delivery without a decision")),
        };
        Ok(WaitRecord {
            run,
            id,
            node: body.node,
            activation,
            key: body.key,
            correlation: column("correlation_id", CorrelationId::new(&self.correlation_id))?,
            generation: body.generation,
            kind: body.kind,
            status: word("wait status", WaitStatus::parse(&self.status))?,
            continuation: body.continuation,
            labels: body.labels,
            subject: self.subject.open("wait subject", subject)?,
            deadline: column("deadline", self.deadline.map(Timestamp::from_millis).transpose())?,
            deadline_policy: body.deadline_policy,
            armed_at: column("armed_at", Timestamp::from_millis(self.armed_at))?,
            deliveries: body.deliveries,
            settled,
        })
    }
}

/// A finished step as JSON.
///
/// # Errors
/// `corrupt` when it cannot be encoded.
pub fn encode_step(step: &StepRecord) -> Result<Bytes, StoreError> {
    json("step", step)
}

/// # Errors
/// `corrupt`.
pub fn decode_step(bytes: &[u8]) -> Result<StepRecord, StoreError> {
    from_json("step", bytes)
}

#[cfg(test)]
mod tests;
