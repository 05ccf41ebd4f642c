//! Faults of a live SQLite database: rotten rows beside healthy runs, lost answers, a full disk.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::large_futures,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod sqlite;
mod torture;

use std::sync::Arc;
use std::time::Duration;

use iop_durable::store::Store;
use iop_durable::testing::Fixture;

use sqlite::SqliteFixture;
use torture::faults;

/// The clocks of the store go on by themselves while `test` runs.
async fn with_time(fixture: &SqliteFixture, test: impl Future<Output = ()>) {
    let beat = Duration::from_millis(5);
    let time = async {
        loop {
            tokio::time::sleep(beat).await;
            fixture.clock.advance(beat);
        }
    };
    tokio::select! {
        () = time => {}
        () = test => {}
    }
}

#[tokio::test]
async fn rotten_rows_are_named_and_set_aside_while_other_runs_go_on() {
    let fixture = SqliteFixture::start().await;
    with_time(&fixture, faults::rows_rot(&fixture)).await;
    fixture.store.close().await;
}

#[tokio::test]
async fn a_lost_answer_of_any_write_loses_nothing() {
    let fixture = SqliteFixture::start().await;
    with_time(&fixture, faults::answers_get_lost(fixture.store())).await;
    fixture.store.close().await;
}

#[tokio::test]
async fn a_full_disk_refuses_and_runs_go_on_when_there_is_room() {
    let fixture = SqliteFixture::start().await;
    let store: Arc<dyn Store> = fixture.store();
    let (file, database) = (&fixture.store, &*store);
    let full = move |away: faults::Away| async move {
        faults::ended(database, 3).await;
        // A worker that tries a commit again tells nobody: the disk is full as often as it takes until enough are refused.
        let mut times = 0;
        while times < 3 || away.count() <= 5 {
            assert!(times < 50, "only {} were refused", away.count());
            file.limit_growth(Some(1)).await.unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
            file.limit_growth(None).await.unwrap();
            faults::one_more_ended(database).await;
            times += 1;
        }
    };
    let test = async {
        let met = faults::trouble(&store, "full", full).await;
        let refused = met.iter().filter(|error| faults::is_away(error));
        assert!(refused.count() > 5, "{met:?}");
    };
    with_time(&fixture, test).await;
    fixture.store.close().await;
}
