//! What the conformance suite needs of an adapter under test.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::ids::{ActivityId, Revision, RunId, WaitId};
use crate::payload::Digest;
use crate::store::Store;
use crate::time::Timestamp;

/// One empty store under test, made anew for every case.
pub trait Fixture: Send + Sync {
    fn store(&self) -> Arc<dyn Store>;

    /// Returns when the store's clock (both, where it has two) has moved on by at least this much: at once with a manual clock,
    /// after waiting with a database's own. The suite asks for 300 ms at most.
    fn pass(&self, span: Duration) -> BoxFuture<'_, ()>;

    /// Changes stored rows of this run behind the adapter's back. Panics when there is no such row.
    fn tamper<'a>(&'a self, run: &'a RunId, tamper: Tamper) -> BoxFuture<'a, ()>;

    /// Puts the body `[]` in the place of this version's of an agent. Panics when there is no such version.
    fn spoil<'a>(&'a self, agent: &'a str, version: u64) -> BoxFuture<'a, ()>;
}

/// What is done to stored rows. Payloads that the suite tampers with stand in their row, except for the `Blob` kinds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tamper {
    /// One byte of `runs.state` is flipped.
    HeadState,
    /// One byte of `runs.body` is flipped.
    HeadBody,
    /// `runs.seal` is NULL.
    DropHeadSeal,
    /// Every column of that other run's head row, except `run_id`, is copied over this run's.
    CopyHeadFrom(RunId),
    /// `runs.schema_version`.
    SchemaVersion(i64),
    /// `runs.revision` and `runs.seal` together; the suite has computed a seal that holds.
    Revision { revision: Revision, seal: Digest },
    /// `runs.due_at`, which is not sealed.
    DueAt(Option<Timestamp>),
    /// `runs.waiting_kind`, which is.
    WaitingKind(Option<&'static str>),
    /// `runs.owner`, a copy of what is sealed.
    Owner(Option<&'static str>),
    /// One byte of `checkpoints.state` of this revision is flipped.
    CheckpointState(Revision),
    /// `checkpoints.seal` of this revision is NULL.
    DropCheckpointSeal(Revision),
    /// One byte of `activities.output` is flipped.
    ActivityOutput(ActivityId),
    /// One byte of `waits.body` is flipped.
    WaitBody(WaitId),
    /// `waits.kind`, which is not sealed.
    WaitKind(WaitId, Option<&'static str>),
    /// One byte of `blobs.bytes` of this run and digest is flipped.
    Blob(Digest),
    /// The row of `blobs` is gone.
    DropBlob(Digest),
}

/// The bytes with one of them changed: a digit to another one where there is a digit, so that JSON stays JSON and only a seal
/// or a digest tells.
///
/// # Panics
/// When there are no bytes.
pub fn flipped(bytes: &[u8]) -> Vec<u8> {
    let mut changed = bytes.to_vec();
    let at = changed
        .iter()
        .rposition(u8::is_ascii_digit)
        .unwrap_or(changed.len() - 1);
    changed[at] ^= 1;
    changed
}
