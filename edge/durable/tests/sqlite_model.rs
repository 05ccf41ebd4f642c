//! Random scripts of operations, on the SQLite store and on a naive model.

mod sqlite;

use sqlite::SqliteFixture;

iop_durable::model_test!(64, SqliteFixture::start().await);
