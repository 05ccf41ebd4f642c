//! The conformance suite on SQLite, on a file of each case's own.

mod sqlite;

use sqlite::SqliteFixture;

iop_durable::conformance_tests!(SqliteFixture::start().await);

iop_durable::host_clock_tests!({
    let fixture = SqliteFixture::start().await;
    let clock = fixture.clock.clone();
    (fixture, clock)
});
