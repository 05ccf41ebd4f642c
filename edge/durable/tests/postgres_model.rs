//! Random scripts of operations, on PostgreSQL and on a naive model.

mod postgres;

use postgres::PostgresFixture;

iop_durable::model_test!(48, PostgresFixture::start().await);
