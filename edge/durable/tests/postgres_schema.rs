//! The tables and what the statements make of them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "tests: a broken expectation ends the test with its message"
)]

mod before;
mod postgres;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use iop_durable::record::{ActivityState, CancelRequest, Scope, Status, StepStatus, WaitStatus, WaitingKind};
use iop_durable::store::migrate::migrate;
use iop_durable::store::postgres::PostgresStore;
use iop_durable::store::{Authority, GateFilter, Origin, RunFilter, Store};
use iop_durable::testing::build::{
    LONG, activity, advance, advance_loaded, claim, completed, correlation, create, decision, decision_id,
    define, ended, idempotency, lease_for, parked, payload, post, run, step, wait,
};
use postgres::PostgresFixture;

/// Of a list, `'a', 'b'`.
fn listed(predicate: &str) -> BTreeSet<String> {
    predicate
        .split('\'')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

/// Of an expression, `'^(a|b)$'`.
fn matched(constraint: &str) -> BTreeSet<String> {
    let (_, rest) = constraint.split_once("'^(").unwrap();
    let (words, _) = rest.split_once(")$'").unwrap();
    words.split('|').map(str::to_owned).collect()
}

#[tokio::test]
async fn the_words_of_the_checks_are_the_words_of_the_records() {
    let fixture = PostgresFixture::start().await;
    let lists: [(&str, &str, Vec<&str>); 7] = [
        ("runs", "status", Status::ALL.iter().map(|w| w.as_str()).collect()),
        (
            "runs",
            "waiting_kind",
            WaitingKind::ALL.iter().map(|w| w.as_str()).collect(),
        ),
        (
            "steps",
            "status",
            StepStatus::ALL.iter().map(|w| w.as_str()).collect(),
        ),
        (
            "activities",
            "state",
            ActivityState::ALL.iter().map(|w| w.as_str()).collect(),
        ),
        (
            "waits",
            "status",
            WaitStatus::ALL.iter().map(|w| w.as_str()).collect(),
        ),
        (
            "waits",
            "kind",
            WaitingKind::ALL.iter().map(|w| w.as_str()).collect(),
        ),
        (
            "definition_names",
            "origin",
            Origin::ALL.iter().map(|w| w.as_str()).collect(),
        ),
    ];
    let checks = fixture.server.sql("SELECT count(*) FROM pg_constraint WHERE contype = 'c' AND conrelid <> 0 AND conrelid <> 'definitions'::regclass");
    assert_eq!(checks.as_deref(), Ok("7"), "every list is compared here");
    for (table, column, expected) in lists {
        let check = fixture
            .server
            .sql(&format!(
                "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = '{table}_{column}_check'"
            ))
            .unwrap();
        let expected: BTreeSet<String> = expected.into_iter().map(str::to_owned).collect();
        assert_eq!(matched(&check), expected, "{table}.{column}: {check}");
    }
    // The states that hold a step back are the ones of the index they are found by.
    let open: BTreeSet<String> = ActivityState::ALL
        .iter()
        .filter(|state| state.is_open())
        .map(|state| state.as_str().to_owned())
        .collect();
    let index = fixture.server.sql(
        "SELECT pg_get_expr(indpred, indrelid) FROM pg_index WHERE indexrelid = 'activities_open'::regclass",
    );
    assert_eq!(listed(&index.unwrap()), open);
}

#[tokio::test]
async fn a_database_of_another_schema_is_refused_with_what_to_do() {
    let server = iop_tests::postgres::Postgres::start().await;
    migrate(&server.url()).await.unwrap();
    migrate(&server.url()).await.unwrap();
    PostgresStore::connect(&server.url()).await.unwrap();
    let last = server.sql("SELECT max(version) FROM _sqlx_migrations").unwrap();
    let newer = "INSERT INTO _sqlx_migrations SELECT version + 1, description, installed_on, success, checksum, \
                 execution_time FROM _sqlx_migrations ORDER BY version DESC LIMIT 1";
    let older = format!("DELETE FROM _sqlx_migrations WHERE version >= {last}");
    for (change, why) in [(newer, "newer program"), (&*older, "iop-edge db migrate")] {
        server.sql(change).unwrap();
        let error = PostgresStore::connect(&server.url())
            .await
            .expect_err("it is refused");
        assert_eq!(error.kind(), "open");
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[tokio::test]
async fn a_database_of_the_step_before_is_refused_until_it_is_migrated_with_its_rows() {
    let fixture = PostgresFixture::start().await;
    let rows = before::fill(&*fixture.store).await;
    let server = close(fixture).await;
    for statement in before::UNDO {
        server.sql(statement).unwrap();
    }
    let error = PostgresStore::connect(&server.url())
        .await
        .expect_err("it is refused");
    let why = error.to_string();
    assert!(
        why.contains("schema 2") && why.contains("iop-edge db migrate"),
        "{why}"
    );
    migrate(&server.url()).await.unwrap();
    let store = PostgresStore::connect(&server.url()).await.unwrap();
    before::check(&store, &rows).await;
}

#[tokio::test]
async fn what_cannot_be_opened_says_why() {
    let server = iop_tests::postgres::Postgres::start().await;
    for (url, kind) in [
        ("postgres://127.0.0.1:port/postgres".to_owned(), "open"),
        (server.url_of("nowhere"), "open"),
        ("postgres://iop@127.0.0.1:1/postgres".to_owned(), "unavailable"),
    ] {
        let error = PostgresStore::connect(&url)
            .await
            .expect_err("it cannot be opened");
        assert_eq!(error.kind(), kind, "{url}: {error}");
    }
    server
        .sql("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        .unwrap();
    let error = PostgresStore::connect(&server.url_of("latin"))
        .await
        .expect_err("it cannot be opened");
    assert!(error.to_string().contains("LATIN1"), "{error}");
}

/// Every kind of operation, on a few runs among many.
async fn everything(store: &dyn Store, name: &str) {
    let id = run(name);
    let now = store.now().await.unwrap();
    let mut creation = create(&id, now);
    creation.idempotency = Some(idempotency("plans", name, 1));
    creation.state = payload(vec![1; 10_000]);
    creation.head.state_digest = *creation.state.digest();
    store.create(creation.clone()).await.unwrap();
    store.create(creation).await.unwrap();
    let mut acquired = store.acquire(&id, lease_for("worker", LONG)).await.unwrap();
    let mut next = advance(&acquired);
    let called = activity(&id, 1, "call");
    next.activities = vec![completed(called.clone(), payload(vec![2; 10_000]), now)];
    next.waits = vec![wait(&id, 1, "gate", name, now)];
    next.steps = vec![step(1, now)];
    next.decisions = vec![decision(&id, Scope::Operator, "d", now)];
    let gate = next.waits[0].id.clone();
    acquired.loaded.head = next.head.clone();
    acquired.loaded.head.revision = store.commit(next).await.unwrap().revision;
    store.renew(vec![acquired.lease.clone()], LONG).await.unwrap();
    let mut posted = post(&id, 0);
    posted.cancel = Some(CancelRequest {
        id: decision_id("stop"),
        reason: String::new(),
        by: None,
        requested_at: now,
    });
    store.post(posted).await.unwrap();
    store.journal(&id, 1).await.unwrap();
    store.activity(&id, &called.id).await.unwrap().unwrap();
    store.activities(&id, Some(called.id), 10).await.unwrap();
    store.wait(&id, &gate).await.unwrap().unwrap();
    assert_eq!(store.waits(&id).await.unwrap().len(), 1);
    assert_eq!(store.armed(&correlation(name), 10).await.unwrap().len(), 1);
    store
        .decision(&id, &Scope::Operator, &decision_id("d"))
        .await
        .unwrap()
        .unwrap();
    store.decisions(&id, &Scope::Operator).await.unwrap();
    store.steps(&id, 0, 10).await.unwrap();
    store.events(&id, 0, 10).await.unwrap();
    store.history(&id, None, 10).await.unwrap();
    store
        .checkpoint(&id, acquired.loaded.head.revision)
        .await
        .unwrap();
    store.due(now, None, 10).await.unwrap();
    store.counts().await.unwrap();
    for (armed, owner, definition) in [
        (true, None, None),
        (false, None, None),
        (true, Some(name), None),
        (false, None, Some(("graph".to_owned(), "conformance".to_owned()))),
    ] {
        let filter = GateFilter {
            kind: WaitingKind::Event,
            armed,
            definition,
            owner: owner.map(str::to_owned),
            after: Some((now, id.clone(), gate.clone())),
            limit: 3,
        };
        store.gates(filter).await.unwrap();
    }
    store.define(define(name, "[1]")).await.unwrap();
    store.define(define(name, "[1]")).await.unwrap();
    store.define(define(name, "[2]")).await.unwrap();
    store.definition("agent", name, None).await.unwrap().unwrap();
    store.definition("agent", name, Some(1)).await.unwrap().unwrap();
    assert_eq!(store.versions("agent", name, 0, 10).await.unwrap().len(), 2);
    store.definitions("agent", None, 1).await.unwrap();
    assert!(store.withdraw("agent", name).await.unwrap());
    let one = |filter: RunFilter| RunFilter { limit: 3, ..filter };
    for filter in [
        RunFilter::default(),
        RunFilter {
            status: Some(Status::Running),
            ..RunFilter::default()
        },
        RunFilter {
            definition: Some(("graph".to_owned(), "conformance".to_owned())),
            ..RunFilter::default()
        },
        RunFilter {
            parent: Some(id.clone()),
            ..RunFilter::default()
        },
        RunFilter {
            owner: Some(name.to_owned()),
            ..RunFilter::default()
        },
        RunFilter {
            waiting_kind: Some(WaitingKind::Input),
            ..RunFilter::default()
        },
        RunFilter {
            due_before: Some(now),
            ..RunFilter::default()
        },
        RunFilter {
            after: Some((now, id.clone())),
            ..RunFilter::default()
        },
    ] {
        store.list(one(filter)).await.unwrap();
    }
    let park = parked(advance(&acquired), WaitingKind::Event, None, 1);
    acquired.loaded.head = park.head.clone();
    acquired.loaded.head.revision = store.commit(park).await.unwrap().revision;
    store.post(post(&id, 1)).await.unwrap();
    let claimed = store.claim(claim("worker", 2)).await.unwrap();
    assert_eq!(claimed.runs.len(), 2);
    for other in claimed.runs {
        store.release(other.lease).await.unwrap();
    }
    let end = ended(
        advance_loaded(&store.load(&id).await.unwrap(), Authority::Idle),
        Status::Succeeded,
    );
    store.commit(end).await.unwrap();
    assert_eq!(store.prune(&id, 1).await.unwrap(), 3);
    store.quarantine(&id, "why").await.unwrap();
    store.rebuild_index().await.unwrap();
    store.delete_if_idle(&id).await.unwrap();
    let later = now.plus(LONG);
    assert_eq!(store.forget_keys(later, 10).await.unwrap(), 1);
    assert_eq!(
        store.load(&id).await.map_err(|e| e.kind()).map(|_| ()),
        Err("deleted")
    );
}

#[tokio::test]
async fn no_statement_reads_a_whole_table() {
    let fixture = PostgresFixture::start().await;
    let store: Arc<dyn Store> = fixture.store.clone();
    let now = store.now().await.unwrap();
    let mut made = tokio::task::JoinSet::new();
    for n in 0..300 {
        let store = store.clone();
        made.spawn(async move {
            store
                .create(create(&run(&format!("other{n}")), now))
                .await
                .unwrap()
        });
    }
    made.join_all().await;
    // What made the tables has read them.
    fixture.server.sql("SELECT pg_stat_reset()").unwrap();
    everything(&*store, "first").await;
    // Once more on tables that the server knows to be small: an index is still the way.
    fixture.server.sql("ANALYZE").unwrap();
    everything(&*store, "second").await;
    drop(store);
    let server = close(fixture).await;
    let scans = "SELECT string_agg(relname || ': ' || seq_scan, ', ') FROM pg_stat_user_tables \
                 WHERE seq_scan > 0 AND relname <> '_sqlx_migrations'";
    assert_eq!(server.sql(scans).as_deref(), Ok(""));
    let used = "SELECT count(*) FROM pg_stat_user_tables WHERE idx_scan > 0 AND relname IN ('runs', 'run_fences', \
                'run_leases', 'checkpoints', 'steps', 'activities', 'waits', 'decisions', 'events', 'blobs', \
                'idempotency_keys', 'definitions', 'definition_names')";
    assert_eq!(server.sql(used).as_deref(), Ok("13"), "the counters counted");
}

#[tokio::test]
async fn steps_of_a_run_stay_in_the_page_of_its_head() {
    let fixture = PostgresFixture::start().await;
    let store: Arc<dyn Store> = fixture.store.clone();
    let now = store.now().await.unwrap();
    store.create(create(&run("r"), now)).await.unwrap();
    let mut acquired = store.acquire(&run("r"), lease_for("worker", LONG)).await.unwrap();
    for _ in 0..200 {
        let mut next = advance(&acquired);
        next.due_at = Some(now);
        acquired.loaded.head = next.head.clone();
        acquired.loaded.head.revision = store.commit(next).await.unwrap().revision;
    }
    drop(store);
    let server = close(fixture).await;
    // The first step changes the status, which has an index.
    let hot = "SELECT n_tup_upd >= 200 AND n_tup_hot_upd >= n_tup_upd - 2 FROM pg_stat_user_tables WHERE relname = 'runs'";
    assert_eq!(server.sql(hot).as_deref(), Ok("t"));
    let pages = server
        .sql("SELECT pg_relation_size('runs') / current_setting('block_size')::int")
        .unwrap();
    assert!(pages.parse::<u32>().unwrap() <= 4, "{pages} pages");
}

/// Ends the store and waits until its sessions have gone: their counters are complete then.
async fn close(fixture: PostgresFixture) -> iop_tests::postgres::Postgres {
    let PostgresFixture { store, server } = fixture;
    drop(store);
    server
        .answers(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'iop-durable'",
            "0",
        )
        .await;
    server
}

#[test]
fn the_hosts_clock_is_never_asked() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store/postgres");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        files += 1;
        for word in [
            "SystemTime",
            "HostClock",
            "dyn Clock",
            ".wall()",
            "std::time::Instant",
            "now_v7().get_timestamp",
        ] {
            assert!(!text.contains(word), "{}: {word}", path.display());
        }
        for word in [
            "now()",
            "CURRENT_TIMESTAMP",
            "transaction_timestamp",
            "statement_timestamp",
        ] {
            let sql = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            for line in sql {
                assert!(
                    !line.contains(&format!(" {word}")) || line.contains("fn now"),
                    "{}: {line}",
                    path.display()
                );
            }
        }
    }
    assert!(files > 5);
}
