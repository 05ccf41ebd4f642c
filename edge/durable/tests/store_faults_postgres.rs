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

use iop_durable::host::Host;
use iop_durable::ids::RunId;
use iop_durable::record::Status;
use iop_durable::runner::Start;
use iop_durable::store::postgres::PostgresStore;
use iop_durable::store::{RunFilter, Store};
use iop_durable::testing::Fixture;
use iop_tests::postgres::Postgres;

use postgres::PostgresFixture;
use torture::graph::State;
use torture::invariants::check_run;
use torture::ledger::{Ledger, MemoryLedger};
use torture::recorder::Recorder;
use torture::world::World;
use torture::{faults, fleet};

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

/// Runs that a host claims, beside the others.
struct Hosted {
    host: Host,
    store: Arc<dyn Store>,
    ledger: Arc<dyn Ledger>,
    world: Arc<World>,
    runs: Vec<RunId>,
}

impl Hosted {
    async fn start(store: &Arc<dyn Store>) -> Self {
        let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::default());
        let world = World::new(Arc::clone(&ledger), Arc::clone(store))
            .with_pace(|| Duration::from_millis(fastrand::u64(..200)));
        let world = Arc::new(world);
        let front = fleet::runner(store, &world, "front");
        let mut runs = Vec::new();
        for n in 0..24 {
            let run = RunId::new(&format!("hosted-{n}")).unwrap();
            front
                .accept(Start::new(State::default()).run(run.clone()))
                .await
                .unwrap();
            runs.push(run);
        }
        let recorded: Arc<dyn Store> = Arc::new(Recorder::new(Arc::clone(store), Arc::clone(&ledger)));
        Self {
            host: fleet::host(&recorded, &world, 4),
            store: Arc::clone(store),
            ledger,
            world,
            runs,
        }
    }

    /// Every run ends; a person helps where an unsafe call was cut.
    async fn end(self) {
        let filter = || RunFilter {
            status: Some(Status::Succeeded),
            definition: Some(("graph".to_owned(), "fleet".to_owned())),
            limit: 1000,
            ..RunFilter::default()
        };
        iop_tests::eventually("the host's runs end", Duration::from_secs(60), || async {
            fleet::resolve_all(&self.store, &self.world).await;
            match self.store.list(filter()).await.unwrap().len() {
                n if n == self.runs.len() => Ok(()),
                n => Err(format!("{n} of {}", self.runs.len())),
            }
        })
        .await;
        assert!(self.host.stop(Duration::from_secs(10)).await);
        for run in &self.runs {
            check_run(run.as_str(), &*self.store, &*self.ledger, run).await;
        }
    }
}

/// The server goes and comes back, twice.
async fn gone_and_back(kill: bool) {
    let mut server = Postgres::start().await;
    let store: Arc<dyn Store> = Arc::new(PostgresStore::connect(&server.url()).await.unwrap());
    let hosted = Hosted::start(&store).await;
    let (serving, database) = (&mut server, &*store);
    let gone = move |away: faults::Away| async move {
        for n in 1..=2 {
            faults::ended(database, 6 * n).await;
            if kill {
                serving.kill().await;
            } else {
                serving.stop().await;
            }
            away.grows_by(30).await;
            serving.restart().await;
        }
        faults::ended(database, 15).await;
    };
    let met = faults::trouble(&store, "gone", gone).await;
    let refused = met.iter().filter(|error| faults::is_away(error));
    assert!(refused.count() > 5, "{met:?}");
    hosted.end().await;
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
