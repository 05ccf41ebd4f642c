//! Faults of a live PostgreSQL database: rotten rows beside healthy runs, lost answers, a server that is stopped or killed and
//! comes back.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::large_futures,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod postgres;
mod torture;

use std::sync::Arc;
use std::time::Duration;

use iop_durable::runner::RunError;
use iop_durable::store::Store;
use iop_durable::store::postgres::PostgresStore;
use iop_durable::testing::Fixture;
use iop_tests::postgres::Postgres;

use postgres::PostgresFixture;
use torture::faults;

#[tokio::test]
async fn rotten_rows_are_named_and_set_aside_while_other_runs_go_on() {
    let fixture = PostgresFixture::start().await;
    faults::rows_rot(&fixture).await;
}

#[tokio::test]
async fn a_lost_answer_of_any_write_loses_nothing() {
    let fixture = PostgresFixture::start().await;
    faults::answers_get_lost(fixture.store()).await;
}

/// The server goes and comes back, twice each way.
async fn gone_and_back(kill: bool) {
    let mut server = Postgres::start().await;
    let store: Arc<dyn Store> = Arc::new(PostgresStore::connect(&server.url()).await.unwrap());
    let gone = async {
        for n in 1..=2 {
            faults::ended(&*store, 3 * n).await;
            if kill {
                server.kill().await;
            } else {
                server.stop().await;
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
            server.restart().await;
        }
        faults::ended(&*store, 9).await;
    };
    let met = faults::trouble(&store, "gone", gone).await;
    let refused = met.iter().filter(|error| {
        matches!(
            error,
            RunError::StoreUnavailable(_) | RunError::JournalUnavailable(_)
        )
    });
    assert!(refused.count() > 5, "{met:?}");
    drop(store);
    server.stop().await;
}

#[tokio::test]
async fn runs_go_on_when_a_server_that_was_stopped_is_back() {
    gone_and_back(false).await;
}

#[tokio::test]
async fn runs_go_on_when_a_server_that_was_killed_is_back() {
    gone_and_back(true).await;
}
