//! The conformance suite on PostgreSQL, on a server of each case's own.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod postgres;

use postgres::PostgresFixture;

iop_durable::conformance_tests!(PostgresFixture::start().await);
