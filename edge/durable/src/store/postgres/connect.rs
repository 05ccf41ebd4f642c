//! Connections: how they are set up, how long anything may take, and what is done with one that was lost.

use std::future::Future;
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions, PgRow};
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, Postgres};
use tokio::time::Instant;

use super::fail::{self, Fault};
use super::sql::Sql;
use crate::store::{StoreError, migrate};

/// How long making a connection may take, or waiting for one.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// How long the server may take over one statement; then its connection is given up as lost. Above `lock_timeout`.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// A connection that was idle for longer is asked whether it still lives before anything is sent on it.
const TRUSTED_FOR: Duration = Duration::from_secs(1);
/// How often a statement is sent that is undone for another transaction's sake.
pub(super) const ATTEMPTS: u32 = 5;
/// Connections for everything but commits.
const POOL: u32 = 8;

/// Every statement here reaches its rows by key, in the order it is written in. The planner is held to that: it would else
/// choose for the table that it saw first, and plan every call of a statement with arrays anew.
const SESSION: [(&str, &str); 6] = [
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("jit", "off"),
    // A row that somebody else has locked for this long makes its caller fail, and nobody else.
    ("lock_timeout", "10s"),
];

/// Said once per connection. Rows are locked and read again as they are: that is READ COMMITTED. A commit that the disk does
/// not have may be lost by a crash, and a fence that is lost is given out twice: a server that is set to answer earlier is not
/// followed in that.
const SETUP: &str = "SET default_transaction_isolation TO 'read committed'; \
     SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'";

/// The same for what need not last.
const SETUP_RELAXED: &str = "SET synchronous_commit TO off";

/// What a URL says, and the session's settings.
///
/// # Errors
/// `open` for a URL that cannot be read.
pub(super) fn options(url: &str) -> Result<PgConnectOptions, StoreError> {
    let options: PgConnectOptions = url
        .parse()
        .map_err(|error| StoreError::Open(format!("the store's URL cannot be read: {error}")))?;
    Ok(options
        .application_name("iop-durable")
        .statement_cache_capacity(512)
        .options(SESSION)
        .disable_statement_logging())
}

/// A connection of its own.
async fn connect(options: &PgConnectOptions, setup: &'static str) -> Result<PgConnection, sqlx::Error> {
    bounded(CONNECT_WITHIN, async {
        let mut conn = options.connect().await?;
        conn.execute(setup).await?;
        Ok(conn)
    })
    .await
}

/// Checks what is at the other end, and creates the tables of an empty database.
///
/// # Errors
/// `open`, `unavailable`.
pub(super) async fn open(options: &PgConnectOptions) -> Result<(), StoreError> {
    const OLDEST: u32 = 130_000;
    let mut conn = connect(options, SETUP).await.map_err(refused)?;
    match conn.server_version_num() {
        Some(version) if version >= OLDEST => {}
        found => {
            let found = found.map_or_else(|| "unknown".to_owned(), |v| (v / 10_000).to_string());
            return Err(StoreError::Open(format!(
                "the database is PostgreSQL {found}, at least 13 is needed"
            )));
        }
    }
    let encoding: String = sqlx::query_scalar("SELECT current_setting('server_encoding')")
        .fetch_one(&mut conn)
        .await
        .map_err(fail::read)?;
    if encoding != "UTF8" {
        return Err(StoreError::Open(format!(
            "the database has encoding {encoding}, it needs UTF8: ids are kept as they are"
        )));
    }
    bounded(ANSWER_WITHIN, async {
        Ok(migrate::prepare(&mut conn, &migrate::postgres()).await)
    })
    .await
    .map_err(fail::read)??;
    conn.close().await.map_err(fail::read)
}

/// A refusal that waiting does not heal is for people.
fn refused(error: sqlx::Error) -> StoreError {
    match &error {
        sqlx::Error::Configuration(_) | sqlx::Error::Tls(_) => StoreError::Open(error.to_string()),
        sqlx::Error::Database(why) => match why.code().as_deref() {
            // No such user, password or database; no right to it.
            Some("28000" | "28P01" | "3D000" | "42501") => {
                StoreError::Open(format!("the database refuses the connection: {why}"))
            }
            _ => StoreError::unavailable(error),
        },
        _ => StoreError::unavailable(error),
    }
}

async fn bounded<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    match tokio::time::timeout(limit, work).await {
        Ok(answer) => answer,
        Err(_) => Err(sqlx::Error::Io(std::io::Error::new(
            std::io::ErrorKind::TimedOut,
            format!("no answer within {limit:?}"),
        ))),
    }
}

/// One long-lived connection that is made again when it was lost.
pub(super) struct Line {
    options: PgConnectOptions,
    setup: &'static str,
    conn: Option<(PgConnection, Instant)>,
}

impl Line {
    pub(super) fn new(options: PgConnectOptions) -> Self {
        Self {
            options,
            setup: SETUP,
            conn: None,
        }
    }

    /// One whose transactions need not be on disk when they are answered.
    pub(super) fn relaxed(options: PgConnectOptions) -> Self {
        Self {
            setup: SETUP_RELAXED,
            ..Self::new(options)
        }
    }

    /// A connection that was alive a moment ago.
    ///
    /// # Errors
    /// `unavailable`: nothing was sent.
    pub(super) async fn ready(&mut self) -> Result<(), StoreError> {
        if let Some((conn, used)) = &mut self.conn
            && used.elapsed() > TRUSTED_FOR
            && bounded(CONNECT_WITHIN, conn.ping()).await.is_err()
        {
            self.conn = None;
        }
        if self.conn.is_none() {
            let conn = connect(&self.options, self.setup)
                .await
                .map_err(StoreError::unavailable)?;
            self.conn = Some((conn, Instant::now()));
        }
        Ok(())
    }

    /// Runs a statement on it; a connection that is lost over it is dropped.
    pub(super) async fn rows(&mut self, sql: Sql) -> Result<Vec<PgRow>, sqlx::Error> {
        let Some((conn, used)) = &mut self.conn else {
            return Err(sqlx::Error::WorkerCrashed);
        };
        let answer = bounded(ANSWER_WITHIN, sql.rows(conn)).await;
        *used = Instant::now();
        if answer.as_ref().is_err_and(|e| fail::fault(e) == Fault::Lost) {
            self.conn = None;
        }
        answer
    }
}

/// The connections for everything but commits.
#[derive(Clone)]
pub(super) struct Pool(PgPool);

impl Pool {
    pub(super) fn new(options: PgConnectOptions) -> Self {
        let pool = PgPoolOptions::new()
            .max_connections(POOL)
            .acquire_timeout(CONNECT_WITHIN)
            .test_before_acquire(false)
            .before_acquire(|conn, about| {
                Box::pin(async move {
                    let trusted = about.idle_for <= TRUSTED_FOR;
                    Ok(trusted || bounded(CONNECT_WITHIN, conn.ping()).await.is_ok())
                })
            })
            .after_connect(|conn, _| {
                Box::pin(async move {
                    conn.execute(SETUP).await?;
                    Ok(())
                })
            })
            .connect_lazy_with(options);
        Self(pool)
    }

    /// Reads. What was asked on a connection that turns out to be lost is asked once more on one that lives.
    pub(super) async fn read(&self, sql: impl Fn() -> Sql + Send) -> Result<Vec<PgRow>, StoreError> {
        let first = self.0.acquire().await.map_err(fail::read)?;
        match run(first, sql()).await {
            Err(error) if fail::fault(&error) == Fault::Lost => {
                let again = self.living().await?;
                run(again, sql()).await.map_err(fail::read)
            }
            answer => answer.map_err(fail::read),
        }
    }

    /// Writes. What was undone for another transaction's sake is done again.
    ///
    /// # Errors
    /// `unavailable` when nothing was sent, `unconfirmed` when the connection was lost over it.
    pub(super) async fn write(&self, sql: impl Fn() -> Sql + Send) -> Result<Vec<PgRow>, StoreError> {
        let mut left = ATTEMPTS;
        loop {
            left -= 1;
            match run(self.living().await?, sql()).await {
                Err(error) if left > 0 && fail::fault(&error) == Fault::Again => {}
                answer => return answer.map_err(fail::write),
            }
        }
    }

    /// The same with several statements.
    pub(super) async fn transaction<T>(
        &self,
        work: impl for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, sqlx::Error>> + Send,
    ) -> Result<T, StoreError> {
        let mut left = ATTEMPTS;
        loop {
            left -= 1;
            let mut conn = self.living().await?;
            let answer = bounded(ANSWER_WITHIN, work(&mut conn)).await;
            match kept(conn, answer) {
                Err(error) if left > 0 && fail::fault(&error) == Fault::Again => {}
                answer => return answer.map_err(fail::write),
            }
        }
    }

    /// A connection that answers at this moment: after a restart of the server all others are found out and replaced.
    async fn living(&self) -> Result<PoolConnection<Postgres>, StoreError> {
        for _ in 0..=POOL {
            let mut conn = self.0.acquire().await.map_err(fail::read)?;
            if bounded(CONNECT_WITHIN, conn.ping()).await.is_ok() {
                return Ok(conn);
            }
            drop(conn.detach());
        }
        Err(StoreError::unavailable("every connection was lost"))
    }
}

async fn run(mut conn: PoolConnection<Postgres>, sql: Sql) -> Result<Vec<PgRow>, sqlx::Error> {
    let answer = bounded(ANSWER_WITHIN, sql.rows(&mut conn)).await;
    kept(conn, answer)
}

/// Gives the connection back to the pool, unless it was lost.
fn kept<T>(conn: PoolConnection<Postgres>, answer: Result<T, sqlx::Error>) -> Result<T, sqlx::Error> {
    if answer.as_ref().is_err_and(|e| fail::fault(e) == Fault::Lost) {
        drop(conn.detach());
    }
    answer
}
