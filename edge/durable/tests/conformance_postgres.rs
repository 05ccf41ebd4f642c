//! The conformance suite on PostgreSQL, on a server of each case's own.

mod postgres;

use postgres::PostgresFixture;

iop_durable::conformance_tests!(PostgresFixture::start().await);
