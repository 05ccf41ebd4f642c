//! A statement that is written and bound in one go, so that text and parameters cannot disagree. The text depends only on which
//! parts a batch needs; the driver keeps a prepared statement per text.

use std::fmt::Write as _;

use sqlx::encode::Encode;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArguments, PgBindIterExt as _, PgConnection, PgHasArrayType, PgRow};
use sqlx::{Arguments as _, AssertSqlSafe, Postgres, Type};

/// Milliseconds since 1970 by the database's clock, at the moment it is asked and not when the transaction began.
pub(super) const NOW: &str = "floor(date_part('epoch', clock_timestamp()) * 1000)::bigint";

/// A statement under construction.
#[derive(Default)]
pub(super) struct Sql {
    text: String,
    arguments: PgArguments,
    /// Whether every table of values has one row, so that values need no arrays: they cost more than what is done with them.
    single: bool,
    /// The first value that could not be encoded.
    failed: Option<BoxDynError>,
}

impl Sql {
    pub(super) fn new(text: &str) -> Self {
        let mut sql = Self::default();
        sql.push(text);
        sql
    }

    /// One whose tables of values have one row each, or any number.
    pub(super) fn of_rows(single: bool, text: &str) -> Self {
        Self {
            single,
            ..Self::new(text)
        }
    }

    pub(super) fn push(&mut self, text: &str) -> &mut Self {
        self.text.push_str(text);
        self
    }

    /// One value, as `$n`.
    pub(super) fn bind<'t, T>(&mut self, value: T) -> &mut Self
    where
        T: Encode<'t, Postgres> + Type<Postgres>,
    {
        if let Err(error) = self.arguments.add(value) {
            self.failed.get_or_insert(error);
        }
        let _ = write!(self.text, "${}", self.arguments.len());
        self
    }

    /// Opens a table of values: columns follow, then `) AS name(column, …)`.
    pub(super) fn table(&mut self) -> &mut Self {
        self.push(if self.single { "(SELECT " } else { "unnest(" })
    }

    /// A column of a table: `$n::type[]`, or `$n::type` for the value of the only row.
    pub(super) fn column<'t, I>(&mut self, kind: &str, mut values: I) -> &mut Self
    where
        I: Iterator,
        I::Item: Encode<'t, Postgres> + Type<Postgres> + PgHasArrayType,
    {
        let array = if self.single { "" } else { "[]" };
        let added = match values.next() {
            Some(only) if self.single => self.arguments.add(only),
            first => self.arguments.add(first.into_iter().chain(values).bind_iter()),
        };
        if let Err(error) = added {
            self.failed.get_or_insert(error);
        }
        let _ = write!(self.text, "${}::{kind}{array}", self.arguments.len());
        self
    }

    /// Runs it to its end. Never with a row limit: a statement that writes must not be left half way.
    pub(super) async fn rows(self, conn: &mut PgConnection) -> Result<Vec<PgRow>, sqlx::Error> {
        if let Some(error) = self.failed {
            return Err(sqlx::Error::Encode(error));
        }
        sqlx::query_with(AssertSqlSafe(self.text), self.arguments)
            .fetch_all(conn)
            .await
    }
}
