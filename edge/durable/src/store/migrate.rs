//! The schema of a database and whether this program may use it. The steps are embedded from `migrations/`; sqlx's migrator
//! keeps its own table and, on PostgreSQL, its own lock.
//!
//! An empty database is created when it is opened. One that is older is never changed on the way: workers of the older program
//! may be using it, so migration is a step of its own (D122). One that is newer, or whose steps were changed, is refused.

use std::borrow::Cow;

use sqlx::migrate::{AppliedMigration, Migrate, MigrateError, Migration, MigrationType, Migrator};
use sqlx::{Connection, Database, SqlSafeStr as _};

use crate::store::{StoreError, sqlite};

/// The steps of one store, by number from 1.
type Steps = [(&'static str, &'static str)];

const SQLITE: &Steps = &[
    (
        "definitions",
        include_str!("../../../../migrations/sqlite/0001_definitions.sql"),
    ),
    (
        "runs",
        include_str!("../../../../migrations/sqlite/0002_runs.sql"),
    ),
    (
        "agents",
        include_str!("../../../../migrations/sqlite/0003_agents.sql"),
    ),
    (
        "counts",
        include_str!("../../../../migrations/sqlite/0004_counts.sql"),
    ),
];

const POSTGRES: &Steps = &[
    (
        "definitions",
        include_str!("../../../../migrations/postgres/0001_definitions.sql"),
    ),
    (
        "runs",
        include_str!("../../../../migrations/postgres/0002_runs.sql"),
    ),
    (
        "agents",
        include_str!("../../../../migrations/postgres/0003_agents.sql"),
    ),
    (
        "counts",
        include_str!("../../../../migrations/postgres/0004_counts.sql"),
    ),
];

/// The schema that SQLite databases must have.
pub(crate) fn sqlite() -> Migrator {
    migrator(SQLITE)
}

/// The schema that PostgreSQL databases must have.
pub(crate) fn postgres() -> Migrator {
    migrator(POSTGRES)
}

fn migrator(steps: &Steps) -> Migrator {
    let steps = (1..).zip(steps).map(|(version, (description, sql))| {
        Migration::new(
            version,
            Cow::Borrowed(description),
            MigrationType::Simple,
            sql.into_sql_str(),
            false,
        )
    });
    Migrator::with_migrations(steps.collect())
}

/// What was found in a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Empty,
    Current,
    Older { version: i64 },
    Newer { version: i64 },
    Changed { version: i64 },
}

/// `applied` in order of versions. A row that is not a prefix of the known steps counts as changed.
fn judge(applied: &[AppliedMigration], known: &[Migration]) -> Found {
    for (n, row) in applied.iter().enumerate() {
        match known.get(n) {
            Some(step) if step.version == row.version && step.checksum == row.checksum => {}
            None => return Found::Newer { version: row.version },
            Some(step) => {
                return Found::Changed {
                    version: step.version,
                };
            }
        }
    }
    match applied.last() {
        None => Found::Empty,
        Some(_) if applied.len() == known.len() => Found::Current,
        Some(last) => Found::Older {
            version: last.version,
        },
    }
}

fn failed(error: MigrateError) -> StoreError {
    if let MigrateError::Execute(error) = error {
        StoreError::unavailable(error)
    } else {
        StoreError::Open(format!("the database's schema: {error}"))
    }
}

fn newer(version: i64, known: usize) -> StoreError {
    StoreError::Open(format!(
        "the database has schema {version} of a newer program, this one knows up to {known}: use the newer program"
    ))
}

fn changed(version: i64) -> StoreError {
    StoreError::Open(format!(
        "step {version} of the database's schema is not the one that this program knows: it belongs to another program"
    ))
}

/// Creates the tables of an empty database, all or none: a program that is killed meanwhile leaves an empty one. Leaves any
/// other as it is. Of two programs that start at once on one empty database, the second waits for the first.
///
/// # Errors
/// `open` for a database of another schema, saying what to do; `unavailable`. The connection may then still hold the lock and
/// has to be closed.
pub(crate) async fn prepare<C>(conn: &mut C, schema: &Migrator) -> Result<(), StoreError>
where
    C: Connection + Migrate,
    C::Database: Database<Connection = C>,
{
    conn.lock().await.map_err(failed)?;
    conn.ensure_migrations_table(&schema.table_name)
        .await
        .map_err(failed)?;
    let applied = conn
        .list_applied_migrations(&schema.table_name)
        .await
        .map_err(failed)?;
    let known = schema.migrations.len();
    match judge(&applied, &schema.migrations) {
        Found::Empty => {
            let mut creation = conn.begin().await.map_err(StoreError::unavailable)?;
            schema
                .run_direct(None, &mut *creation, false)
                .await
                .map_err(failed)?;
            creation.commit().await.map_err(StoreError::unavailable)?;
        }
        Found::Current => {}
        Found::Older { version } => {
            return Err(StoreError::Open(format!(
                "the database has schema {version}, this program needs {known}: stop every program that uses it, then run \
                 `iop-edge db migrate`"
            )));
        }
        Found::Newer { version } => return Err(newer(version, known)),
        Found::Changed { version } => return Err(changed(version)),
    }
    conn.unlock().await.map_err(failed)
}

/// Brings the database at this URL to the schema of this program: what `iop-edge db migrate` does. SQLite databases are locked
/// for it as by a store; on PostgreSQL the older programs have to be stopped by hand.
///
/// # Errors
/// `open` when the database is in use, newer, or not one of ours; `unavailable`.
pub async fn migrate(url: &str) -> Result<(), StoreError> {
    if let Some(path) = sqlite::path_of(url) {
        return sqlite::migrate(&path).await;
    }
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        let mut conn = sqlx::PgConnection::connect(url)
            .await
            .map_err(StoreError::unavailable)?;
        apply(&mut conn, &postgres()).await?;
        return conn.close().await.map_err(StoreError::unavailable);
    }
    Err(StoreError::Open(
        "the store's URL begins with neither sqlite:// nor postgres://".to_owned(),
    ))
}

/// Applies what is missing.
pub(crate) async fn apply<C: Migrate>(conn: &mut C, schema: &Migrator) -> Result<(), StoreError> {
    let table = &schema.table_name;
    conn.ensure_migrations_table(table).await.map_err(failed)?;
    let applied = conn.list_applied_migrations(table).await.map_err(failed)?;
    match judge(&applied, &schema.migrations) {
        Found::Empty | Found::Older { .. } | Found::Current => {
            schema.run_direct(None, conn, false).await.map_err(failed)
        }
        Found::Newer { version } => Err(newer(version, schema.migrations.len())),
        Found::Changed { version } => Err(changed(version)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(steps: &[Migration]) -> Vec<AppliedMigration> {
        steps
            .iter()
            .map(|step| AppliedMigration {
                version: step.version,
                checksum: step.checksum.clone(),
            })
            .collect()
    }

    #[test]
    fn a_schema_is_empty_older_current_newer_or_not_ours() {
        let known = sqlite().migrations.into_owned();
        let all = applied(&known);
        assert_eq!(judge(&[], &known), Found::Empty);
        assert_eq!(judge(&all, &known), Found::Current);
        for n in 1..known.len() {
            let version = known[n - 1].version;
            assert_eq!(judge(&all[..n], &known), Found::Older { version });
            assert_eq!(judge(&all, &known[..n]), Found::Newer { version: version + 1 });
        }
        let mut changed = all.clone();
        changed[0].checksum = Cow::Borrowed(b"another");
        assert_eq!(judge(&changed, &known), Found::Changed { version: 1 });
        assert_eq!(judge(&all[1..], &known), Found::Changed { version: 1 });
    }

    #[tokio::test]
    async fn a_creation_that_breaks_off_leaves_an_empty_database() {
        let broken = migrator(&[
            ("good", "CREATE TABLE good (n INTEGER)"),
            ("bad", "CREATE NONSENSE"),
        ]);
        let whole = migrator(&[("good", "CREATE TABLE good (n INTEGER)")]);
        let mut conn = sqlx::SqliteConnection::connect("sqlite::memory:").await.unwrap();
        prepare(&mut conn, &broken).await.unwrap_err();
        let applied = conn.list_applied_migrations(&whole.table_name).await.unwrap();
        assert_eq!(judge(&applied, &whole.migrations), Found::Empty);
        prepare(&mut conn, &whole).await.unwrap();
        let applied = conn.list_applied_migrations(&whole.table_name).await.unwrap();
        assert_eq!(judge(&applied, &whole.migrations), Found::Current);
    }

    #[test]
    fn every_step_of_both_stores_is_embedded() {
        for (store, schema) in [("sqlite", sqlite()), ("postgres", postgres())] {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../../migrations")
                .join(store);
            let mut files: Vec<_> = std::fs::read_dir(folder)
                .unwrap()
                .map(|file| file.unwrap().path())
                .collect();
            files.sort();
            let known: Vec<_> = schema
                .iter()
                .map(|step| {
                    (
                        format!("{:04}_{}.sql", step.version, step.description),
                        step.sql.as_str().to_owned(),
                    )
                })
                .collect();
            let found: Vec<_> = files
                .iter()
                .map(|path| {
                    let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                    (name, std::fs::read_to_string(path).unwrap())
                })
                .collect();
            assert_eq!(known, found, "{store}");
        }
    }
}
