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
    /// Whether tables of values are written out row by row: arrays cost more than what is done with a few values.
    by_rows: bool,
    /// The columns of the table that is open: the type, the first parameter and the number of parameters.
    columns: Vec<(&'static str, usize, usize)>,
    /// The first value that could not be encoded.
    failed: Option<BoxDynError>,
}

impl Sql {
    pub(super) fn new(text: &str) -> Self {
        let mut sql = Self::default();
        sql.push(text);
        sql
    }

    /// One whose tables of values are written out row by row, or are arrays of any length.
    pub(super) fn of_rows(by_rows: bool, text: &str) -> Self {
        Self {
            by_rows,
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

    /// All values as one array, `$n::type[]`.
    pub(super) fn array<'t, I>(&mut self, kind: &'static str, values: I) -> &mut Self
    where
        I: Iterator,
        I::Item: Encode<'t, Postgres> + Type<Postgres> + PgHasArrayType,
    {
        self.bind(values.bind_iter()).push("::").push(kind).push("[]")
    }

    /// Begins `name AS (INSERT INTO table (columns) SELECT columns FROM `: what has these columns follows.
    pub(super) fn insert(&mut self, name: &str, table: &str, columns: &str) -> &mut Self {
        self.push(name).push(" AS (INSERT INTO ").push(table).push(" (");
        self.push(columns).push(") SELECT ").push(columns).push(" FROM ")
    }

    /// Opens a table of values: columns follow, all of one length, then its name.
    pub(super) fn table(&mut self) -> &mut Self {
        self.columns.clear();
        self
    }

    /// A column of the open table.
    pub(super) fn column<'t, I>(&mut self, kind: &'static str, values: I) -> &mut Self
    where
        I: Iterator,
        I::Item: Encode<'t, Postgres> + Type<Postgres> + PgHasArrayType,
    {
        let first = self.arguments.len() + 1;
        let added = if self.by_rows {
            let mut values = values;
            values.try_for_each(|value| self.arguments.add(value))
        } else {
            self.arguments.add(values.bind_iter())
        };
        if let Err(error) = added {
            self.failed.get_or_insert(error);
        }
        self.columns.push((kind, first, self.arguments.len() + 1 - first));
        self
    }

    /// Closes the open table under this name, `name(column, …)`; what comes after it may follow.
    pub(super) fn named(&mut self, name: &str) -> &mut Self {
        let columns = std::mem::take(&mut self.columns);
        let (text, by_rows) = (&mut self.text, self.by_rows);
        let rows = columns.first().map_or(0, |(_, _, rows)| *rows);
        text.push_str(if by_rows { "(VALUES " } else { "unnest" });
        for row in 0..rows {
            text.push_str(if row == 0 { "(" } else { ", (" });
            for (at, (kind, first, _)) in columns.iter().enumerate() {
                let comma = if at == 0 { "" } else { ", " };
                let array = if by_rows { "" } else { "[]" };
                let _ = write!(text, "{comma}${}::{kind}{array}", first + row);
            }
            text.push(')');
        }
        text.push_str(if by_rows { ") AS " } else { " AS " });
        self.push(name)
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
