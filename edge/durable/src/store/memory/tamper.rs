//! Changes of stored rows behind the store's back, for the conformance suite.
#![expect(
    clippy::expect_used,
    reason = "tests: tampering with a row that is not there is a mistake of the test"
)]

use bytes::Bytes;

use super::MemoryStore;
use super::tables::Tables;
use crate::envelope::PayloadColumns;
use crate::ids::{Revision, RunId};
use crate::testing::{Tamper, flipped};

fn flip(bytes: &mut Bytes) {
    *bytes = flipped(bytes).into();
}

fn flip_inline(payload: &mut PayloadColumns) {
    flip(payload.inline.as_mut().expect("the payload is in its row"));
}

fn row_of(revision: Revision) -> i64 {
    i64::try_from(revision.get()).expect("a revision is 63 bits")
}

impl MemoryStore {
    /// Does to a run's rows what `what` says. Panics when there is no such row.
    pub fn tamper(&self, run: &RunId, what: Tamper) {
        self.tables.lock().tamper(run, what);
    }

    /// Puts the body `[]` in the place of this version's of an agent. Panics when there is no such version.
    pub fn spoil(&self, agent: &str, version: u64) {
        let mut tables = self.tables.lock();
        let name = tables
            .definitions
            .get_mut(&("agent".to_owned(), agent.to_owned()));
        let row = name.and_then(|name| name.versions.get_mut(&version));
        row.expect("there is such a version").body = Bytes::from_static(b"[]");
    }
}

impl Tables {
    fn tamper(&mut self, run: &RunId, what: Tamper) {
        let other = if let Tamper::CopyHeadFrom(other) = &what {
            self.runs.get(other).map(|rows| rows.head.clone())
        } else {
            None
        };
        let rows = self.runs.get_mut(run).expect("there is such a run");
        match what {
            Tamper::HeadState => flip_inline(&mut rows.head.state),
            Tamper::HeadBody => flip(&mut rows.head.body),
            Tamper::DropHeadSeal => rows.head.seal = None,
            Tamper::CopyHeadFrom(_) => {
                rows.head = other.expect("there is such a run");
                rows.head.run_id = run.as_str().to_owned();
            }
            Tamper::SchemaVersion(version) => rows.head.schema_version = version,
            Tamper::Revision { revision, seal } => {
                rows.head.revision = row_of(revision);
                rows.head.seal = Some(seal);
            }
            Tamper::DueAt(due_at) => rows.due_at = due_at,
            Tamper::WaitingKind(kind) => rows.head.waiting_kind = kind.map(str::to_owned),
            Tamper::Owner(owner) => rows.head.owner = owner.map(str::to_owned),
            Tamper::CheckpointState(revision) => {
                let row = rows.checkpoints.get_mut(&row_of(revision));
                flip_inline(&mut row.expect("there is such a checkpoint").state);
            }
            Tamper::DropCheckpointSeal(revision) => {
                let row = rows.checkpoints.get_mut(&row_of(revision));
                row.expect("there is such a checkpoint").seal = None;
            }
            Tamper::ActivityOutput(id) => {
                let row = rows
                    .activities
                    .values_mut()
                    .find(|row| row.activity_id == id.as_str())
                    .expect("there is such an activity");
                flip_inline(row.output.as_mut().expect("it has an output"));
            }
            Tamper::WaitBody(id) => {
                let row = rows.waits.values_mut().find(|row| row.wait_id == id.as_str());
                flip(&mut row.expect("there is such a wait").body);
            }
            Tamper::WaitKind(id, kind) => {
                let row = rows.waits.values_mut().find(|row| row.wait_id == id.as_str());
                row.expect("there is such a wait").kind = kind.map(str::to_owned);
            }
            Tamper::Blob(digest) => flip(rows.blobs.get_mut(&digest).expect("there is such a blob")),
            Tamper::DropBlob(digest) => {
                assert!(rows.blobs.remove(&digest).is_some(), "there is such a blob");
            }
        }
    }
}
