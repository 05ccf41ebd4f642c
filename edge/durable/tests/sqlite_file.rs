//! What SQLite is in the way of a file: one store at a time, claimable at once when it is opened again, one schema, and commits
//! that share one wait for the disk.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests: what goes wrong here ends the case"
)]

mod before;
mod sqlite;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use futures_util::future::join_all;
use iop_durable::ids::Revision;
use iop_durable::payload::Payload;
use iop_durable::record::{ActivityState, Scope, Status, StepStatus, WaitStatus, WaitingKind};
use iop_durable::store::migrate::migrate;
use iop_durable::store::sqlite::SqliteStore;
use iop_durable::store::{Authority, Origin, Store, StoreError};
use iop_durable::testing::ManualClock;
use iop_durable::testing::build::{
    LONG, advance, advance_loaded, claim, create, decision, idempotency, lease_for, parked, run, step,
};
use sqlite::{SqliteFixture, connect};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};

async fn refusal(path: &Path) -> String {
    match SqliteStore::open(path).await {
        Ok(_) => panic!("it was opened"),
        Err(error) => {
            assert_eq!(error.kind(), "open", "{error}");
            error.to_string()
        }
    }
}

#[tokio::test]
async fn a_second_store_on_one_file_is_refused_and_the_first_goes_on() {
    let fixture = SqliteFixture::start().await;
    let why = refusal(&fixture.path()).await;
    assert!(why.contains("iop.db.lock") && why.contains("in use"), "{why}");
    let why = migrate(&format!("sqlite://{}", fixture.path().display()))
        .await
        .unwrap_err();
    assert!(why.to_string().contains("iop.db.lock"), "{why}");

    let now = fixture.store.now().await.unwrap();
    fixture.store.create(create(&run("r"), now)).await.unwrap();
    fixture.store.close().await;
    let second = SqliteStore::open(&fixture.path()).await.unwrap();
    assert_eq!(
        second.load(&run("r")).await.unwrap().head.revision,
        Revision::FIRST
    );
    second.close().await;
}

#[tokio::test]
async fn of_two_stores_that_open_an_empty_file_at_once_one_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("iop.db");
    let (a, b) = tokio::join!(SqliteStore::open(&path), SqliteStore::open(&path));
    assert_eq!(usize::from(a.is_ok()) + usize::from(b.is_ok()), 1);
    for store in [a, b].into_iter().flatten() {
        assert_eq!(store.claim(claim("w", 1)).await.unwrap().runs.len(), 0);
        store.close().await;
    }
}

#[tokio::test]
async fn a_file_that_is_opened_again_is_claimable_at_once() {
    let fixture = SqliteFixture::start().await;
    let now = fixture.store.now().await.unwrap();
    let mut new = create(&run("r"), now);
    new.lease = Some(lease_for("first", LONG));
    fixture.store.create(new).await.unwrap();
    let held = fixture.store.load(&run("r")).await.unwrap();
    let lease = held.lease.clone().unwrap();
    assert_eq!(
        fixture.store.claim(claim("other", 1)).await.unwrap().runs.len(),
        0
    );
    fixture.store.close().await;

    // The clock has not moved: the lease would have been good for ten minutes.
    let clock: Arc<ManualClock> = fixture.clock.clone();
    let second = SqliteStore::open_with(&fixture.path(), clock).await.unwrap();
    let late = advance_loaded(&held, Authority::Lease(lease.clone()));
    assert!(matches!(second.commit(late).await, Err(StoreError::LeaseLost)));
    assert!(matches!(
        second.release(lease.clone()).await,
        Err(StoreError::LeaseLost)
    ));
    let claimed = second.claim(claim("second", 1)).await.unwrap();
    assert_eq!(claimed.runs.len(), 1);
    assert!(claimed.runs[0].lease.incarnation > lease.incarnation);
    assert!(matches!(second.release(lease).await, Err(StoreError::LeaseLost)));
    second.commit(advance(&claimed.runs[0])).await.unwrap();
    second.close().await;
}

#[tokio::test]
async fn a_closed_store_refuses_and_finishes_what_was_asked() {
    let fixture = SqliteFixture::start().await;
    let now = fixture.store.now().await.unwrap();
    let asked = join_all((0..50).map(|n| fixture.store.create(create(&run(&format!("r{n}")), now))));
    let (answers, ()) = tokio::join!(asked, fixture.store.close());
    let refused = fixture.store.create(create(&run("late"), now)).await.unwrap_err();
    assert_eq!(refused.kind(), "unavailable");
    assert_eq!(
        fixture.store.load(&run("r0")).await.unwrap_err().kind(),
        "unavailable"
    );

    let second = SqliteStore::open(&fixture.path()).await.unwrap();
    for (n, answer) in answers.into_iter().enumerate() {
        let found = second.load(&run(&format!("r{n}"))).await;
        assert_eq!(answer.is_ok(), found.is_ok(), "r{n}: {answer:?}");
    }
    second.close().await;
}

/// The commits in the write-ahead log: frames that say how long the database is after them. Header 32 bytes, each frame 24 and
/// a page; <https://www.sqlite.org/fileformat2.html#walformat>.
fn commits(path: &Path) -> usize {
    let log = std::fs::read(path.with_extension("db-wal")).unwrap();
    let (header, frames) = log.split_at(32);
    frames
        .chunks_exact(24 + 4096)
        .filter(|frame| frame[8..16] == header[16..24] && frame[4..8] != [0; 4])
        .count()
}

#[tokio::test]
async fn commits_that_wait_share_one_transaction_and_fail_alone() {
    const RUNS: usize = 40;
    let fixture = SqliteFixture::start().await;
    let store = &fixture.store;
    let now = store.now().await.unwrap();
    for n in 0..RUNS {
        store.create(create(&run(&format!("r{n}")), now)).await.unwrap();
    }
    let held = store.claim(claim("w", 100)).await.unwrap().runs;
    assert_eq!(held.len(), RUNS);
    let before = commits(&fixture.path());

    // Somebody else holds the write lock until all commits are queued.
    let mut other = connect(&fixture.path()).await;
    other.execute("BEGIN IMMEDIATE").await.unwrap();
    let commits_of = held.iter().enumerate().map(|(n, acquired)| {
        let mut commit = advance(acquired);
        let id = &acquired.lease.run;
        match n % 4 {
            1 => commit.guard.revision = commit.guard.revision.next().unwrap(),
            2 => commit.decisions = vec![decision(id, Scope::Operator, "twice", now); 2],
            3 => commit = parked(commit, WaitingKind::Event, None, 7),
            _ => {}
        }
        store.commit(commit)
    });
    let unlock = async {
        // Polled after all the commits, which are queued when they are polled first.
        other.execute("ROLLBACK").await.unwrap();
    };
    let (answers, ()) = tokio::join!(join_all(commits_of), unlock);
    for (n, answer) in answers.into_iter().enumerate() {
        let expected = ["", "conflict", "duplicate", "conflict"][n % 4];
        match answer {
            Ok(committed) => {
                assert_eq!(expected, "");
                assert_eq!(committed.revision.get(), 2);
            }
            Err(error) => assert_eq!(error.kind(), expected, "r{n}: {error}"),
        }
        let loaded = store.load(&held[n].lease.run).await.unwrap();
        assert_eq!(loaded.head.revision.get(), if n % 4 == 0 { 2 } else { 1 });
    }
    // The first may have gone alone, the others waited together.
    let transactions = commits(&fixture.path()) - before;
    assert!((1..=2).contains(&transactions), "{transactions} transactions");
    store.close().await;
}

/// Runs `r0` to `r9` are committed at once, while a trigger of somebody else's answers to what `r5` writes. The kinds of the
/// errors, after a look at what is stored.
async fn commit_with_trigger(fixture: &SqliteFixture, answer: &str) -> Vec<Option<&'static str>> {
    let store = &fixture.store;
    let now = store.now().await.unwrap();
    for n in 0..10 {
        store.create(create(&run(&format!("r{n}")), now)).await.unwrap();
    }
    let held = store.claim(claim("w", 100)).await.unwrap().runs;
    let mut other = connect(&fixture.path()).await;
    other
        .execute(AssertSqlSafe(format!(
            "CREATE TRIGGER theirs BEFORE INSERT ON steps WHEN NEW.run_id = 'r5' BEGIN SELECT RAISE({answer}); END"
        )))
        .await
        .unwrap();
    let commits = held.iter().map(|acquired| {
        let mut commit = advance(acquired);
        commit.steps = vec![step(acquired.loaded.head.activation, now)];
        store.commit(commit)
    });
    let answers = join_all(commits).await;
    let mut kinds = Vec::new();
    for (acquired, answer) in held.iter().zip(answers) {
        let revision = store.load(&acquired.lease.run).await.unwrap().head.revision.get();
        assert_eq!(revision, if answer.is_ok() { 2 } else { 1 }, "{answer:?}");
        kinds.push(answer.err().map(|error| error.kind()));
    }
    other.execute("DROP TRIGGER theirs").await.unwrap();
    for acquired in &held {
        let again = store.commit(advance(acquired)).await;
        let expected = kinds[held.iter().position(|h| h.lease == acquired.lease).unwrap()];
        assert_eq!(again.is_ok(), expected.is_some(), "{again:?}");
    }
    store.close().await;
    kinds
}

#[tokio::test]
async fn a_statement_that_fails_fails_its_caller_alone() {
    let fixture = SqliteFixture::start().await;
    let kinds = commit_with_trigger(&fixture, "ABORT, 'no'").await;
    for (n, kind) in kinds.into_iter().enumerate() {
        assert_eq!(kind, (n == 5).then_some("corrupt"), "r{n}");
    }
}

#[tokio::test]
async fn a_transaction_that_is_lost_has_written_nothing_and_says_so() {
    let fixture = SqliteFixture::start().await;
    let kinds = commit_with_trigger(&fixture, "ROLLBACK, 'no'").await;
    assert_eq!(kinds[5], Some("unavailable"));
    for (n, kind) in kinds.into_iter().enumerate() {
        assert!(matches!(kind, None | Some("unavailable")), "r{n}: {kind:?}");
    }
}

#[tokio::test]
async fn a_long_state_is_not_written_again() {
    let fixture = SqliteFixture::start().await;
    let store = &fixture.store;
    let now = store.now().await.unwrap();
    let state = Payload::new(vec![7; 1 << 20]);
    let mut new = iop_durable::testing::build::create_with(&run("r"), state.clone(), now);
    new.lease = Some(lease_for("w", LONG));
    store.create(new).await.unwrap();
    let size = || {
        std::fs::metadata(fixture.path().with_extension("db-wal"))
            .unwrap()
            .len()
    };
    let before = size();
    let loaded = store.load(&run("r")).await.unwrap();
    let mut commit = advance_loaded(&loaded, Authority::Lease(loaded.lease.clone().unwrap()));
    commit.head.state_digest = *loaded.state.digest();
    commit.state = loaded.state.clone();
    store.commit(commit).await.unwrap();
    assert!(size() - before < 100_000, "{} bytes", size() - before);
    assert_eq!(store.load(&run("r")).await.unwrap().state, state);
    store.close().await;
}

/// The log is begun anew again and again although there is no moment without somebody who writes, and nothing is lost by it.
#[tokio::test]
async fn the_log_stays_short_under_a_constant_load() {
    const WRITERS: usize = 8;
    const RUNS: usize = 250;
    let fixture = SqliteFixture::start().await;
    let store = &fixture.store;
    let now = store.now().await.unwrap();
    let state = |writer: usize, n: usize| Payload::new(format!("{writer}-{n};").repeat(6_000).into_bytes());
    let state = &state;
    join_all((0..WRITERS).map(|writer| async move {
        for n in 0..RUNS {
            let id = run(&format!("r{writer}-{n}"));
            let new = iop_durable::testing::build::create_with(&id, state(writer, n), now);
            store.create(new).await.unwrap();
        }
    }))
    .await;
    let log = std::fs::metadata(fixture.path().with_extension("db-wal"))
        .unwrap()
        .len();
    let database = std::fs::metadata(fixture.path()).unwrap().len();
    assert!(database > 50 << 20, "{database} bytes: the log was not copied");
    assert!(log < 25 << 20, "{log} bytes beside {database}");
    store.close().await;

    assert!(!fixture.path().with_extension("db-wal").exists());
    let store = SqliteStore::open(&fixture.path()).await.unwrap();
    for writer in 0..WRITERS {
        for n in [0, RUNS / 2, RUNS - 1] {
            let found = store.load(&run(&format!("r{writer}-{n}"))).await.unwrap();
            assert_eq!(found.state, state(writer, n));
        }
    }
    store.close().await;
}

#[tokio::test]
async fn many_keys_are_forgotten_in_several_writes() {
    let fixture = SqliteFixture::start().await;
    let store = &fixture.store;
    let now = store.now().await.unwrap();
    let made = (0..1_002).map(|n| {
        let mut new = create(&run(&format!("r{n}")), now);
        new.head.status = Status::Succeeded;
        new.idempotency = Some(idempotency("caller", &format!("k{n}"), 1));
        store.create(new)
    });
    for answer in join_all(made).await {
        answer.unwrap();
    }
    let before = commits(&fixture.path());
    let later = now.plus(LONG);
    assert_eq!(store.forget_keys(later, 1_001).await.unwrap(), 1_001);
    assert!(commits(&fixture.path()) - before >= 3);
    assert_eq!(store.forget_keys(later, 1_001).await.unwrap(), 1);
    store.close().await;
}

#[tokio::test]
async fn an_older_schema_is_refused_until_it_is_migrated() {
    let fixture = SqliteFixture::start().await;
    fixture.store.close().await;
    let url = format!("sqlite://{}", fixture.path().display());
    let mut conn = connect(&fixture.path()).await;
    let tables: Vec<String> = sqlx::query_scalar(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT IN ('definitions', '_sqlx_migrations')",
    )
    .fetch_all(&mut conn)
    .await
    .unwrap();
    for table in tables {
        conn.execute(AssertSqlSafe(format!("DROP TABLE {table}")))
            .await
            .unwrap();
    }
    conn.execute("DELETE FROM _sqlx_migrations WHERE version > 1")
        .await
        .unwrap();
    conn.close().await.unwrap();

    let why = refusal(&fixture.path()).await;
    assert!(why.contains("iop-edge db migrate"), "{why}");
    // Refusing has changed nothing and keeps nobody out.
    let why = refusal(&fixture.path()).await;
    assert!(why.contains("iop-edge db migrate"), "{why}");
    migrate(&url).await.unwrap();
    migrate(&url).await.unwrap();
    let store = SqliteStore::open(&fixture.path()).await.unwrap();
    let now = store.now().await.unwrap();
    store.create(create(&run("r"), now)).await.unwrap();
    store.close().await;
}

#[tokio::test]
async fn a_file_of_the_step_before_is_refused_until_it_is_migrated_with_its_rows() {
    let fixture = SqliteFixture::start().await;
    let rows = before::fill(&*fixture.store).await;
    fixture.store.close().await;
    let mut conn = connect(&fixture.path()).await;
    for statement in before::UNDO {
        conn.execute(statement).await.unwrap();
    }
    conn.close().await.unwrap();
    let why = refusal(&fixture.path()).await;
    assert!(
        why.contains("schema 2") && why.contains("iop-edge db migrate"),
        "{why}"
    );
    migrate(&format!("sqlite://{}", fixture.path().display()))
        .await
        .unwrap();
    let clock: Arc<ManualClock> = fixture.clock.clone();
    let store = SqliteStore::open_with(&fixture.path(), clock).await.unwrap();
    before::check(&store, &rows).await;
    store.close().await;
}

#[tokio::test]
async fn a_newer_schema_and_one_of_somebody_else_are_refused() {
    let fixture = SqliteFixture::start().await;
    fixture.store.close().await;
    let url = format!("sqlite://{}", fixture.path().display());
    let mut conn = connect(&fixture.path()).await;
    conn.execute(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
         VALUES (99, 'later', TRUE, x'00', 0)",
    )
    .await
    .unwrap();
    let why = refusal(&fixture.path()).await;
    assert!(why.contains("newer"), "{why}");
    assert_eq!(migrate(&url).await.unwrap_err().kind(), "open");

    conn.execute("DELETE FROM _sqlx_migrations WHERE version = 99")
        .await
        .unwrap();
    conn.execute("UPDATE _sqlx_migrations SET checksum = x'00' WHERE version = 1")
        .await
        .unwrap();
    let why = refusal(&fixture.path()).await;
    assert!(why.contains("another program"), "{why}");
    assert_eq!(migrate(&url).await.unwrap_err().kind(), "open");
    conn.close().await.unwrap();
}

#[tokio::test]
async fn a_file_that_is_no_database_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("iop.db");
    std::fs::write(&path, "a letter to a friend, nothing else; ".repeat(100)).unwrap();
    let why = refusal(&path).await;
    assert!(why.contains("iop.db"), "{why}");
    assert!(
        std::fs::read_to_string(&path).unwrap().starts_with("a letter"),
        "it was left alone"
    );
    let why = refusal(&dir.path().join("no/such/folder/iop.db")).await;
    assert!(why.contains("no/such/folder"), "{why}");
}

#[tokio::test]
async fn the_lists_of_words_agree_with_the_enums() {
    let fixture = SqliteFixture::start().await;
    let mut conn = connect(&fixture.path()).await;
    for (table, column, words) in [
        ("runs", "status", words(Status::ALL, Status::as_str)),
        (
            "runs",
            "waiting_kind",
            words(WaitingKind::ALL, WaitingKind::as_str),
        ),
        ("steps", "status", words(StepStatus::ALL, StepStatus::as_str)),
        (
            "activities",
            "state",
            words(ActivityState::ALL, ActivityState::as_str),
        ),
        ("waits", "status", words(WaitStatus::ALL, WaitStatus::as_str)),
        ("waits", "kind", words(WaitingKind::ALL, WaitingKind::as_str)),
        ("definition_names", "origin", words(Origin::ALL, Origin::as_str)),
    ] {
        let sql: String = sqlx::query_scalar("SELECT sql FROM sqlite_schema WHERE name = ?")
            .bind(table)
            .fetch_one(&mut conn)
            .await
            .unwrap();
        let found: BTreeSet<_> = sql
            .split(&format!("{column} = '"))
            .skip(1)
            .map(|rest| rest.split_once('\'').unwrap().0.to_owned())
            .collect();
        assert_eq!(found, words, "{table}.{column}");
    }
    fixture.store.close().await;
}

fn words<T: Copy>(all: &[T], word: fn(T) -> &'static str) -> BTreeSet<String> {
    all.iter().map(|value| word(*value).to_owned()).collect()
}
