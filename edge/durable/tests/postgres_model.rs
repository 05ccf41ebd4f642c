//! Random scripts of operations, on PostgreSQL and on a naive model.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod postgres;

use postgres::PostgresFixture;

iop_durable::model_test!(48, PostgresFixture::start().await);
