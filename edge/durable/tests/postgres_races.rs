//! What waits for a lock decides by what it finds after the wait, not by what it saw before.
//!
//! Each case holds a run's head in a transaction of its own, starts an operation of the store that has to wait for it, changes
//! the rows as another store would, and lets go.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod postgres;
mod stored;

use std::sync::Arc;
use std::time::Duration;

use iop_durable::record::Status;
use iop_durable::store::{Authority, Commit, Committed, Lease, Renewal, Store, StoreError};
use iop_durable::testing::Fixture as _;
use iop_durable::testing::build::{
    LONG, activity, advance, advance_loaded, completed, create_with, ended, lease_for, payload, post, run,
};
use iop_tests::eventually;
use postgres::PostgresFixture;
use sqlx::{Connection as _, Executor as _, PgConnection};
use stored::{held, queued};
use tokio::task::JoinHandle;

const WITHIN: Duration = Duration::from_secs(20);

/// A server with one store.
struct Race {
    fixture: PostgresFixture,
    store: Arc<dyn Store>,
}

impl Race {
    async fn new() -> Self {
        let fixture = PostgresFixture::start().await;
        let store: Arc<dyn Store> = fixture.store();
        Self { fixture, store }
    }

    /// Starts an operation of the store.
    fn starts<T, Fut>(&self, operation: impl FnOnce(Arc<dyn Store>) -> Fut) -> JoinHandle<T>
    where
        T: Send + 'static,
        Fut: Future<Output = T> + Send + 'static,
    {
        tokio::spawn(operation(Arc::clone(&self.store)))
    }

    /// Starts an operation of the store and waits until it waits for a lock.
    async fn blocks<T, Fut>(&self, operation: impl FnOnce(Arc<dyn Store>) -> Fut) -> JoinHandle<T>
    where
        T: Send + 'static,
        Fut: Future<Output = T> + Send + 'static,
    {
        let task = self.starts(operation);
        self.waiting("> 0").await;
        assert!(!task.is_finished());
        task
    }

    /// The same with a commit.
    async fn blocks_commit(&self, commit: Commit) -> JoinHandle<Result<Committed, StoreError>> {
        self.blocks(|store| async move { store.commit(commit).await })
            .await
    }

    /// Waits until so many of the store's statements wait for a lock.
    async fn waiting(&self, so_many: &str) {
        let sql = format!(
            "SELECT count(*) {so_many} FROM pg_stat_activity \
             WHERE application_name = 'iop-durable' AND wait_event_type = 'Lock'"
        );
        self.fixture.server.answers(&sql, "t").await;
    }

    fn sql(&self, sql: &str) -> String {
        self.fixture.server.sql(sql).unwrap()
    }

    fn incarnation(&self) -> String {
        self.sql("SELECT incarnation FROM run_leases WHERE run_id = 'r'")
    }
}

/// Somebody else's transaction that has locked the head of `r`.
struct Other {
    conn: PgConnection,
}

impl Other {
    async fn holding(race: &Race) -> Self {
        let mut conn = PgConnection::connect(&race.fixture.server.url()).await.unwrap();
        conn.execute("BEGIN").await.unwrap();
        let mut other = Self { conn };
        other
            .sql("SELECT 1 FROM runs WHERE run_id = 'r' FOR UPDATE")
            .await;
        other
    }

    async fn sql(&mut self, sql: &'static str) {
        self.conn.execute(sql).await.unwrap();
    }

    /// The lease of `r` as another acquirer writes it.
    async fn takes_the_lease(&mut self) {
        self.sql("SELECT 1 FROM run_leases WHERE run_id = 'r' FOR UPDATE")
            .await;
        self.sql("UPDATE run_fences SET fence = fence + 1 WHERE run_id = 'r'")
            .await;
        self.sql(
            "UPDATE run_leases l SET owner = 'other', incarnation = f.fence, expires_at = 253402300799999 \
             FROM run_fences f WHERE f.run_id = 'r' AND l.run_id = 'r'",
        )
        .await;
    }

    async fn lets_go(mut self) {
        self.sql("COMMIT").await;
    }
}

fn kind<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> &'static str {
    answer.expect_err("it is refused").kind()
}

#[tokio::test]
async fn a_commit_is_refused_when_the_lease_was_taken_while_it_waited() {
    let race = Race::new().await;
    let store = &*race.store;
    let acquired = held(store, "r", LONG).await;
    let mut other = Other::holding(&race).await;
    let commit = advance(&acquired);
    let task = race.blocks_commit(commit).await;
    other.takes_the_lease().await;
    other.lets_go().await;
    assert_eq!(kind(task.await.unwrap()), "lease_lost");
    assert_eq!(store.load(&run("r")).await.unwrap().head, acquired.loaded.head);
}

#[tokio::test]
async fn a_commit_is_refused_when_the_lease_expired_while_it_waited() {
    let race = Race::new().await;
    let store = &*race.store;
    let acquired = held(store, "r", Duration::from_millis(700)).await;
    let other = Other::holding(&race).await;
    let commit = advance(&acquired);
    let task = race.blocks_commit(commit).await;
    eventually("the lease ends", WITHIN, || async {
        let now = store.now().await.unwrap();
        if now > acquired.lease.expires_at {
            Ok(())
        } else {
            Err(format!("{now:?}"))
        }
    })
    .await;
    other.lets_go().await;
    assert_eq!(kind(task.await.unwrap()), "lease_lost");
}

#[tokio::test]
async fn an_idle_commit_is_refused_when_the_run_was_taken_while_it_waited() {
    let race = Race::new().await;
    let store = &*race.store;
    let id = queued(store, "r").await;
    let commit = advance_loaded(&store.load(&id).await.unwrap(), Authority::Idle);
    let mut other = Other::holding(&race).await;
    let task = race.blocks_commit(commit).await;
    other.takes_the_lease().await;
    other.lets_go().await;
    assert_eq!(kind(task.await.unwrap()), "busy");
}

#[tokio::test]
async fn a_commit_is_refused_when_the_run_moved_on_while_it_waited() {
    let race = Race::new().await;
    let store = &*race.store;
    let acquired = held(store, "r", LONG).await;
    let mut other = Other::holding(&race).await;
    let commit = advance(&acquired);
    let task = race.blocks_commit(commit).await;
    other
        .sql("UPDATE runs SET revision = revision + 1 WHERE run_id = 'r'")
        .await;
    other.lets_go().await;
    assert_eq!(kind(task.await.unwrap()), "conflict");
}

#[tokio::test]
async fn a_commit_is_refused_when_something_was_posted_while_it_waited() {
    let race = Race::new().await;
    let store = &*race.store;
    let acquired = held(store, "r", LONG).await;
    let mut commit = advance(&acquired);
    commit.guard.signal = Some(0);
    let mut other = Other::holding(&race).await;
    let task = race.blocks_commit(commit).await;
    other
        .sql("UPDATE runs SET signal = signal + 1 WHERE run_id = 'r'")
        .await;
    other.lets_go().await;
    assert_eq!(kind(task.await.unwrap()), "conflict");
}

#[tokio::test]
async fn an_acquisition_that_waited_finds_the_run_held() {
    let race = Race::new().await;
    let store = &*race.store;
    let id = queued(store, "r").await;
    let mut other = Other::holding(&race).await;
    let task = race
        .blocks({
            let id = id.clone();
            |store| async move { store.acquire(&id, lease_for("worker", LONG)).await }
        })
        .await;
    other.takes_the_lease().await;
    other.lets_go().await;
    assert_eq!(kind(task.await.unwrap()), "busy");
    assert_eq!(race.incarnation(), "1");
}

#[tokio::test]
async fn an_acquisition_that_waited_has_the_run_as_it_is_by_then() {
    let race = Race::new().await;
    let store = &*race.store;
    let id = queued(store, "r").await;
    // A long state, written while the acquisition waits: it is in no row that the statement could have seen.
    let mut commit = advance_loaded(&store.load(&id).await.unwrap(), Authority::Idle);
    let state = payload(vec![7; 100_000]);
    commit.head.state_digest = *state.digest();
    commit.state = state.clone();
    let mut other = Other::holding(&race).await;
    let first = race.blocks_commit(commit).await;
    let second = race.starts({
        let id = id.clone();
        |store| async move { store.acquire(&id, lease_for("worker", LONG)).await }
    });
    race.waiting("= 2").await;
    other.sql("SELECT 1").await;
    other.lets_go().await;
    let committed = first.await.unwrap();
    let acquired = second.await.unwrap().unwrap();
    match committed {
        Ok(committed) => {
            assert_eq!(acquired.loaded.head.revision, committed.revision);
            assert_eq!(acquired.loaded.state, state);
            assert_eq!(acquired.loaded.state.bytes(), state.bytes());
        }
        // The acquisition was first: nobody else may write then.
        Err(error) => assert_eq!(error.kind(), "busy"),
    }
}

#[tokio::test]
async fn a_renewal_and_a_release_that_waited_find_the_lease_lost() {
    let race = Race::new().await;
    let store = &*race.store;
    let lease: Lease = held(store, "r", LONG).await.lease;
    let mut other = Other::holding(&race).await;
    let renewal = race
        .blocks({
            let lease = lease.clone();
            |store| async move { store.renew(vec![lease], LONG).await }
        })
        .await;
    let release = race.starts({
        let lease = lease.clone();
        |store| async move { store.release(lease).await }
    });
    race.waiting("= 2").await;
    other.takes_the_lease().await;
    other.lets_go().await;
    assert_eq!(renewal.await.unwrap().unwrap(), [Renewal::Lost]);
    assert_eq!(kind(release.await.unwrap()), "lease_lost");
    assert_eq!(race.incarnation(), "2");
    let live = "SELECT expires_at = 253402300799999 FROM run_leases WHERE run_id = 'r'";
    assert_eq!(race.sql(live), "t", "the successor's lease is untouched");
}

#[tokio::test]
async fn what_waited_for_a_deletion_finds_the_run_deleted() {
    let race = Race::new().await;
    let store = &*race.store;
    let mut acquired = held(store, "r", LONG).await;
    let end = ended(advance(&acquired), Status::Succeeded);
    acquired.loaded.head = end.head.clone();
    acquired.loaded.head.revision = store.commit(end).await.unwrap().revision;
    let mut other = Other::holding(&race).await;
    let acquisition = race
        .blocks(|store| async move { store.acquire(&run("r"), lease_for("worker", LONG)).await })
        .await;
    let posting = race.starts(|store| async move { store.post(post(&run("r"), 0)).await });
    let commit = advance_loaded(&acquired.loaded, Authority::Idle);
    let committing = race.starts(|store| async move { store.commit(commit).await });
    race.waiting(">= 2").await;
    other.sql("DELETE FROM run_leases WHERE run_id = 'r'").await;
    other.sql("DELETE FROM runs WHERE run_id = 'r'").await;
    other.lets_go().await;
    assert_eq!(kind(acquisition.await.unwrap()), "deleted");
    assert_eq!(kind(posting.await.unwrap()), "deleted");
    assert_eq!(kind(committing.await.unwrap()), "deleted");
}

#[tokio::test]
async fn a_refused_deletion_keeps_nothing_locked() {
    let race = Race::new().await;
    let store = &*race.store;
    let acquired = held(store, "r", LONG).await;
    assert_eq!(kind(store.delete_if_idle(&run("r")).await), "busy");
    assert_eq!(kind(store.prune(&run("gone"), 1).await), "not_found");
    let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'iop-durable' AND state LIKE 'idle in%'";
    assert_eq!(race.sql(open), "0");
    store.commit(advance(&acquired)).await.unwrap();
}

#[tokio::test]
async fn a_deletion_that_waited_leaves_nothing_of_what_was_written_meanwhile() {
    let race = Race::new().await;
    let store = &*race.store;
    let acquired = held(store, "r", LONG).await;
    let end = ended(advance(&acquired), Status::Succeeded);
    let other = Other::holding(&race).await;
    let committing = race.blocks_commit(end).await;
    let deleting = race.starts(|store| async move { store.delete_if_idle(&run("r")).await });
    race.waiting("= 2").await;
    other.lets_go().await;
    committing.await.unwrap().unwrap();
    if let Err(error) = deleting.await.unwrap() {
        // It was first: then the run was held.
        assert_eq!(error.kind(), "busy");
        store.delete_if_idle(&run("r")).await.unwrap();
    }
    for table in ["runs", "run_leases", "checkpoints", "events"] {
        let left = race.sql(&format!("SELECT count(*) FROM {table}"));
        assert_eq!(left, "0", "{table}");
    }
}

#[tokio::test]
async fn a_long_payload_that_is_said_to_be_stored_is_sent_when_it_was_pruned_meanwhile() {
    let race = Race::new().await;
    let store = &*race.store;
    let id = run("r");
    let now = store.now().await.unwrap();
    let long = payload(vec![3; 50_000]);
    store.create(create_with(&id, long.clone(), now)).await.unwrap();
    let mut acquired = store.acquire(&id, lease_for("worker", LONG)).await.unwrap();
    let read = acquired.loaded.state.clone();
    let next = advance(&acquired);
    acquired.loaded.head = next.head.clone();
    acquired.loaded.head.revision = store.commit(next).await.unwrap().revision;
    // The first state is only in a checkpoint from here on. A commit that uses it waits while that is pruned.
    let mut uses = advance(&acquired);
    uses.activities = vec![completed(activity(&id, 1, "call"), read, now)];
    let mut other = Other::holding(&race).await;
    let task = race.blocks_commit(uses).await;
    other
        .sql("UPDATE checkpoints SET state = NULL, pruned = true WHERE run_id = 'r' AND revision = 1")
        .await;
    other.sql("DELETE FROM blobs WHERE run_id = 'r'").await;
    other.lets_go().await;
    task.await.unwrap().unwrap();
    let page = store.activities(&id, None, 10).await.unwrap();
    assert_eq!(page[0].output.as_ref().map(|o| o.bytes()), Some(long.bytes()));
}
