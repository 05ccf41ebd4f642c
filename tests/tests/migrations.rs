//! The migrations, applied by the databases themselves: SQLite as Python carries it, and a PostgreSQL of its own.
//! Both stores must refuse the same rows.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use iop_tests::postgres::Postgres;
use iop_tests::run;

fn migrations(store: &str) -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../migrations")
        .join(store);
    let mut found: Vec<(String, String)> = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| {
            let path = file.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, std::fs::read_to_string(path).unwrap())
        })
        .collect();
    found.sort();
    found
}

#[test]
fn both_stores_have_the_same_steps_in_one_unbroken_row() {
    let names = |store| {
        migrations(store)
            .into_iter()
            .map(|(name, _)| name)
            .collect::<Vec<_>>()
    };
    assert_eq!(names("sqlite"), names("postgres"));
    for (n, name) in names("sqlite").iter().enumerate() {
        assert!(
            name.starts_with(&format!("{:04}_", n + 1)) && name.ends_with(".sql"),
            "{name}"
        );
    }
}

/// Runs a command with SQL on its input.
fn pipe(command: &mut Command, sql: &str) -> Result<String, String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    child.stdin.take().unwrap().write_all(sql.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

fn sqlite(file: &Path, sql: &str) -> Result<String, String> {
    const RUN: &str = "\
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
sql = sys.stdin.read()
if sql.startswith('SELECT'):
    print(db.execute(sql).fetchone()[0])
else:
    db.executescript(sql)
";
    pipe(Command::new("python3").args(["-c", RUN]).arg(file), sql)
}

/// The rules of `definitions`, the same in both stores.
fn definitions_hold(store: &str, sql: &dyn Fn(&str) -> Result<String, String>) {
    let digest = "0123456789abcdef".repeat(4);
    let row = |kind: &str, name: &str, version: i64, digest: &str, body: &str| {
        format!(
            "INSERT INTO definitions (kind, name, version, digest, body, created_at) \
             VALUES ('{kind}', '{name}', {version}, '{digest}', '{body}', 1767225600000);"
        )
    };
    let body = r#"{ "b": 1,  "a": [] }"#;
    for good in [
        row("agent", "deployer", 1, &digest, body),
        row("agent", "deployer", 2, &digest, "{}"),
        row("flow", "deployer", 1, &digest, "{}"),
        row("trigger", "user-created", 1, &digest, "{}"),
    ] {
        sql(&good).unwrap_or_else(|e| panic!("{store} refused {good}: {e}"));
    }
    for bad in [
        row("agent", "deployer", 2, &digest, "{}"),
        row("agents", "a", 1, &digest, "{}"),
        row("agent", "", 1, &digest, "{}"),
        row("agent", "a", 0, &digest, "{}"),
        row("agent", "a", 1, &digest[1..], "{}"),
        row("agent", "a", 1, &digest.to_uppercase(), "{}"),
        row("agent", "a", 1, &digest, "{"),
        "INSERT INTO definitions (kind, name, version) VALUES ('agent', 'a', 1);".to_owned(),
    ] {
        assert!(sql(&bad).is_err(), "{store} accepted {bad}");
    }
    let change = "UPDATE definitions SET body = '{}' WHERE name = 'deployer';";
    let refused = sql(change).expect_err("a definition is never changed");
    assert!(refused.contains("immutable"), "{store}: {refused}");
    let stored = "SELECT body FROM definitions WHERE kind = 'agent' AND name = 'deployer' AND version = 1";
    assert_eq!(sql(stored).as_deref(), Ok(body), "{store}: byte for byte");
    assert_eq!(
        sql("SELECT count(*) FROM definitions").as_deref(),
        Ok("4"),
        "{store}"
    );
}

/// The rules of the tables of runs, the same in both stores. `bytes` is a byte string of this store.
fn runs_hold(store: &str, bytes: &str, sql: &dyn Fn(&str) -> Result<String, String>) {
    let run = |id: &str, status: &str, waiting: &str| {
        format!(
            "INSERT INTO runs (run_id, kind, definition, status, cursor, activation, revision, schema_version, root_id, \
             state_digest, budgets, body, waiting_kind, created_at, updated_at) \
             VALUES ('{id}', 'graph', 'g', '{status}', '', 1, 9223372036854775807, 1, '{id}', {bytes}, {bytes}, {bytes}, \
             {waiting}, 1, 1);"
        )
    };
    let event = |seq: i64, life: i64, terminal: bool| {
        format!(
            "INSERT INTO events (run_id, seq, life, name, terminal, time, data) \
             VALUES ('r', {seq}, {life}, 'e', {terminal}, 1, {bytes});"
        )
    };
    let decision = |scope: &str, id: &str| {
        format!(
            "INSERT INTO decisions (run_id, scope, decision_id, content, body, created_at) \
             VALUES ('r', '{scope}', '{id}', {bytes}, {bytes}, 1);"
        )
    };
    let key = |scope: &str, key: &str| {
        format!(
            "INSERT INTO idempotency_keys (scope, key, request, run_id, created_at) VALUES ('{scope}', '{key}', {bytes}, 'r', 1);"
        )
    };
    let step = |status: &str| {
        format!(
            "INSERT INTO steps (run_id, activation, node, status, body) VALUES ('{status}', 1, 'n', '{status}', {bytes});"
        )
    };
    let activity = |state: &str| {
        format!(
            "INSERT INTO activities (run_id, activity_id, activation, state, body, input_digest) \
             VALUES ('{state}', 'a', 1, '{state}', {bytes}, {bytes});"
        )
    };
    let wait = |status: &str| {
        format!(
            "INSERT INTO waits (run_id, wait_id, correlation_id, activation, status, armed_at, body, subject_digest) \
             VALUES ('{status}', 'w', 'c', 1, '{status}', 1, {bytes}, {bytes});"
        )
    };
    for good in [
        run("r", "queued", "NULL"),
        run("R", "waiting", "'retry'"),
        event(1, 1, false),
        event(2, 1, true),
        event(3, 2, false),
        event(4, 2, true),
        decision("operator", "d"),
        decision("cancel", "d"),
        key("a", "k"),
        key("b", "k"),
        step("done"),
        activity("unknown"),
        wait("timed_out"),
        "INSERT INTO run_fences (run_id, fence) VALUES ('r', 1);".to_owned(),
    ] {
        sql(&good).unwrap_or_else(|e| panic!("{store} refused {good}: {e}"));
    }
    for bad in [
        run("r", "queued", "NULL"),
        run("x", "Queued", "NULL"),
        run("x", "waiting", "'nothing'"),
        event(4, 3, false),
        event(5, 2, true),
        decision("operator", "d"),
        key("a", "k"),
        step("finished"),
        activity("finished"),
        wait("finished"),
        wait("timed_out"),
        "INSERT INTO run_fences (run_id, fence) VALUES ('r', 2);".to_owned(),
        "INSERT INTO checkpoints (run_id, revision) VALUES ('r', 1);".to_owned(),
    ] {
        assert!(sql(&bad).is_err(), "{store} accepted {bad}");
    }
    assert_eq!(
        sql("SELECT min(run_id) FROM runs").as_deref(),
        Ok("R"),
        "{store} compares text by its bytes"
    );
    assert_eq!(
        sql("SELECT revision FROM runs WHERE run_id = 'r'").as_deref(),
        Ok("9223372036854775807"),
        "{store} holds the last revision"
    );
}

#[test]
fn sqlite_takes_every_step_and_keeps_the_rules_of_its_tables() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("iop.db");
    for (name, step) in migrations("sqlite") {
        sqlite(&file, &format!("BEGIN;\n{step}\nCOMMIT;")).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    definitions_hold("sqlite", &|sql| sqlite(&file, sql));
    runs_hold("sqlite", "x'00'", &|sql| sqlite(&file, sql));
}

#[test]
fn postgres_takes_every_step_and_keeps_the_rules_of_its_tables() {
    run(60, async {
        let mut postgres = Postgres::start().await;
        for (name, step) in migrations("postgres") {
            postgres
                .sql(&format!("BEGIN;\n{step}\nCOMMIT;"))
                .unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        definitions_hold("postgres", &|sql| postgres.sql(sql));
        runs_hold("postgres", r"'\x00'", &|sql| postgres.sql(sql));
        postgres.stop().await;
    });
}
