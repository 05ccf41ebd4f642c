//! A disk that is full: every write is refused without a trace, reads go on, and so do writes when there is room again.
#![expect(clippy::unwrap_used, reason = "tests: what goes wrong here ends the case")]

mod sqlite;
mod stored;

use std::path::{Path, PathBuf};
use std::process::Command;

use iop_durable::payload::Payload;
use iop_durable::store::sqlite::SqliteStore;
use iop_durable::store::{Acquired, Store, StoreError};
use iop_durable::testing::build::{LONG, advance, run};
use sqlite::SqliteFixture;
use stored::held;

/// A state that does not fit into the room that is left.
fn large() -> Payload {
    Payload::new((0..3_000_000_u32).map(|n| (n % 251) as u8).collect::<Vec<_>>())
}

/// A commit of this state is refused, and the run stands where it stood.
async fn refused(store: &SqliteStore, held: &Acquired, state: Payload) -> StoreError {
    let mut commit = advance(held);
    commit.head.state_digest = *state.digest();
    commit.state = state;
    let error = store.commit(commit).await.unwrap_err();
    let loaded = store.load(&held.lease.run).await.unwrap();
    assert_eq!(loaded.head.revision, held.loaded.head.revision);
    assert_eq!(loaded.state, held.loaded.state);
    error
}

#[tokio::test]
async fn a_database_that_cannot_grow_refuses_until_it_can() {
    let fixture = SqliteFixture::start().await;
    let store = &fixture.store;
    let held = held(&**store, "r", LONG).await;
    store.limit_growth(Some(50)).await.unwrap();
    for _ in 0..3 {
        let error = refused(store, &held, large()).await;
        assert_eq!(error.kind(), "unavailable", "{error}");
    }
    // What fits is written.
    let committed = store.commit(advance(&held)).await.unwrap();
    assert_eq!(committed.revision.get(), 2);
    store.limit_growth(None).await.unwrap();
    let held = Acquired {
        loaded: store.load(&run("r")).await.unwrap(),
        lease: held.lease,
    };
    let mut commit = advance(&held);
    commit.state = large();
    commit.head.state_digest = *commit.state.digest();
    store.commit(commit).await.unwrap();
    assert_eq!(store.load(&run("r")).await.unwrap().state, large());
    store.close().await;
}

/// A small file system of its own; `None` where this user may not mount one.
struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    fn mount(bytes: u64) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "none"])
            .arg(dir.path())
            .output()
            .is_ok_and(|output| output.status.success());
        mounted.then_some(Self { dir })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let status = Command::new("umount").arg("-l").arg(self.dir.path()).status();
        assert!(status.is_ok_and(|status| status.success()), "umount");
    }
}

/// Takes all the room there is.
fn fill(path: &Path) {
    use std::io::Write as _;
    let mut file = std::fs::File::create(path).unwrap();
    for chunk in [4096, 1] {
        while file.write_all(&vec![0; chunk]).is_ok() {}
    }
}

#[tokio::test]
async fn a_full_disk_refuses_until_there_is_room() {
    let Some(disk) = SmallDisk::mount(16 << 20) else {
        // Without the right to mount a small disk, the file's own limit stands for it.
        let fixture = SqliteFixture::start().await;
        let held = held(&*fixture.store, "r", LONG).await;
        fixture.store.limit_growth(Some(0)).await.unwrap();
        refused(&fixture.store, &held, large()).await;
        fixture.store.limit_growth(None).await.unwrap();
        fixture.store.commit(advance(&held)).await.unwrap();
        return;
    };
    let store = SqliteStore::open(&disk.path("iop.db")).await.unwrap();
    let held = held(&store, "r", LONG).await;
    fill(&disk.path("other"));
    for _ in 0..3 {
        let error = refused(&store, &held, large()).await;
        // The disk fails when the transaction is ended, too late to know.
        assert!(matches!(error.kind(), "unavailable" | "unconfirmed"), "{error}");
    }
    std::fs::remove_file(disk.path("other")).unwrap();
    let committed = store.commit(advance(&held)).await.unwrap();
    assert_eq!(committed.revision.get(), 2);
    store.close().await;
    let store = SqliteStore::open(&disk.path("iop.db")).await.unwrap();
    assert_eq!(store.load(&run("r")).await.unwrap().head.revision.get(), 2);
    store.close().await;
}
