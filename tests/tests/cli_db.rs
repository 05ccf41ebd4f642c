//! `iop-edge db`: a schema is brought up to date by hand and never on the way, a copy is made beside a running edge, and indexes
//! are derived anew.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use iop_tests::llm::Say;
use iop_tests::postgres::Postgres;
use iop_tests::process::{Finished, finish};
use iop_tests::run;
use iop_tests::runs::agents::{GUARDED, WORKER, all};
use iop_tests::runs::{Db, World};
use iop_tests::stack::Edge;
use sha2::{Digest as _, Sha384};

async fn db(dir: &Path, args: &[&str]) -> Finished {
    let all: Vec<&str> = std::iter::once("db").chain(args.iter().copied()).collect();
    finish("iop-edge", &all, &[], dir).await
}

#[track_caller]
fn done<'a>(finished: &'a Finished, says: &str) -> &'a str {
    assert_eq!(
        (finished.code, &*finished.stderr),
        (Some(0), ""),
        "{}",
        finished.stdout
    );
    assert!(finished.stdout.contains(says), "{says:?}: {}", finished.stdout);
    &finished.stdout
}

#[track_caller]
fn refused(finished: &Finished, says: &[&str]) {
    assert_eq!(
        (finished.code, &*finished.stdout),
        (Some(1), ""),
        "{}",
        finished.stderr
    );
    for word in says {
        assert!(finished.stderr.contains(word), "{word:?}: {}", finished.stderr);
    }
}

/// A database of either kind that is spoken to with its own tools.
enum Database {
    Sqlite(PathBuf),
    Postgres(Box<Postgres>),
}

impl Database {
    async fn new(kind: Db, dir: &Path) -> Self {
        match kind {
            Db::Sqlite => Self::Sqlite(dir.join("iop.db")),
            Db::Postgres => Self::Postgres(Box::new(Postgres::start().await)),
        }
    }

    fn url(&self) -> String {
        match self {
            Self::Sqlite(file) => format!("sqlite://{}", file.display()),
            Self::Postgres(server) => server.url(),
        }
    }

    /// Runs statements, or one query whose single value it gives.
    fn sql(&self, sql: &str) -> String {
        match self {
            Self::Sqlite(file) => sqlite(file, sql),
            Self::Postgres(server) => server.sql(sql).unwrap(),
        }
    }

    /// Applies the first steps of the schema, and notes them as the migrator does.
    fn make(&self, steps: usize) {
        let (store, time, bytes) = match self {
            Self::Sqlite(_) => ("sqlite", "TIMESTAMP", "BLOB"),
            Self::Postgres(_) => ("postgres", "TIMESTAMPTZ", "BYTEA"),
        };
        self.sql(&format!(
            "CREATE TABLE _sqlx_migrations (version BIGINT PRIMARY KEY, description TEXT NOT NULL, \
             installed_on {time} NOT NULL DEFAULT CURRENT_TIMESTAMP, success BOOLEAN NOT NULL, \
             checksum {bytes} NOT NULL, execution_time BIGINT NOT NULL)"
        ));
        for (n, (name, text)) in (1..).zip(migrations(store)).take(steps) {
            self.sql(&text);
            let digest: String = Sha384::digest(&text).iter().map(|b| format!("{b:02x}")).collect();
            let digest = match self {
                Self::Sqlite(_) => format!("x'{digest}'"),
                Self::Postgres(_) => format!("'\\x{digest}'"),
            };
            let description = name[5..name.len() - 4].replace('_', " ");
            self.sql(&format!(
                "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                 VALUES ({n}, '{description}', TRUE, {digest}, 0)"
            ));
        }
    }
}

fn sqlite(file: &Path, sql: &str) -> String {
    const RUN: &str = "\
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=10)
sql = sys.argv[2]
if sql.startswith('SELECT'):
    print(db.execute(sql).fetchone()[0])
else:
    db.executescript(sql)
";
    let mut python = Command::new("python3");
    python.args(["-c", RUN]).arg(file).arg(sql).stdin(Stdio::null());
    let output = python.output().unwrap();
    assert!(
        output.status.success(),
        "{sql}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// The steps of a store's schema in their order.
fn migrations(store: &str) -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../migrations")
        .join(store);
    let mut steps: Vec<(String, String)> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read_to_string(path).unwrap())
        })
        .collect();
    steps.sort();
    steps
}

/// A configuration that names the database, and nothing else of note.
fn configuration(dir: &Path, url: &str) -> String {
    let toml = format!("[server]\nlisten = \"127.0.0.1:0\"\n\n[store]\nurl = {url:?}\n");
    std::fs::write(dir.join("edge.toml"), &toml).unwrap();
    toml
}

/// S95: every older schema is refused at start and brought up to date by hand, with what it held.
#[test]
fn an_older_schema_is_refused_until_it_is_migrated() {
    run(180, async {
        for kind in Db::BOTH {
            let newest = migrations("sqlite").len();
            for steps in 1..newest {
                let dir = tempfile::tempdir().unwrap();
                let database = Database::new(kind, dir.path()).await;
                database.make(steps);
                let digest = "0123456789abcdef".repeat(4);
                database.sql(&format!(
                    "INSERT INTO definitions (kind, name, version, digest, body, created_at) \
                     VALUES ('agent', 'kept', 1, '{digest}', '{{}}', 1767225600000)"
                ));
                let toml = configuration(dir.path(), &database.url());

                let start = finish("iop-edge", &[], &[], dir.path()).await;
                refused(
                    &start,
                    &[
                        &format!("schema {steps}"),
                        &format!("needs {newest}"),
                        "iop-edge db migrate",
                    ],
                );
                let noted = "SELECT count(*) FROM _sqlx_migrations";
                assert_eq!(database.sql(noted), steps.to_string(), "{kind:?}");
                // The indexes of another schema are not this program's to derive.
                refused(
                    &db(dir.path(), &["rebuild-index"]).await,
                    &["iop-edge db migrate"],
                );

                for _ in 0..2 {
                    done(
                        &db(dir.path(), &["migrate"]).await,
                        "has the schema of this program",
                    );
                    assert_eq!(database.sql(noted), newest.to_string(), "{kind:?}");
                }
                let kept = database.sql("SELECT name FROM definitions");
                assert_eq!(kept, "kept", "{kind:?}");
                let edge = Edge::start(dir.path(), &toml, &[], None).await;
                assert_eq!(edge.client().get("/readyz").await.status(), 200);
            }
        }
    });
}

/// S95: a newer schema is for a newer program.
#[test]
fn a_newer_schema_is_refused_by_everything() {
    run(120, async {
        for kind in Db::BOTH {
            let dir = tempfile::tempdir().unwrap();
            let database = Database::new(kind, dir.path()).await;
            configuration(dir.path(), &database.url());
            done(&db(dir.path(), &["migrate"]).await, "");
            database.sql(
                "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                 SELECT 99, 'later', success, checksum, 0 FROM _sqlx_migrations WHERE version = 1",
            );
            let says = ["schema 99 of a newer program", "use the newer program"];
            refused(&finish("iop-edge", &[], &[], dir.path()).await, &says);
            refused(&db(dir.path(), &["migrate"]).await, &says);
            refused(&db(dir.path(), &["rebuild-index"]).await, &says);
        }
    });
}

/// The file is locked for the life of an edge: nothing but a copy goes on beside it, and the copy is a database by itself.
#[test]
fn a_sqlite_database_is_copied_beside_a_running_edge_and_not_changed() {
    run(120, async {
        let mut world = World::start(Db::Sqlite, all).await;
        let deploy = Say::call("c1", "deploy", r#"{"region":"eu"}"#);
        world.stubs.llm.next(vec![deploy]);
        let api = world.api();
        let waiting = api.run(GUARDED, "deploy it").await;
        api.waits_on(&waiting, "approval", 1).await;
        let dir = world.dir.path().join("edge-0");

        let file = world.sqlite_file();
        for verb in ["migrate", "rebuild-index"] {
            refused(&db(&dir, &[verb]).await, &[file.to_str().unwrap(), "in use"]);
        }
        done(&db(&dir, &["backup", "copy.db"]).await, "copy.db: written");
        let copy = dir.join("copy.db");
        let bytes = std::fs::read(&copy).unwrap();
        refused(
            &db(&dir, &["backup", "copy.db"]).await,
            &["copy.db", "is there already"],
        );
        assert_eq!(std::fs::read(&copy).unwrap(), bytes);
        refused(
            &db(&dir, &["backup", "nowhere/copy.db"]).await,
            &["nowhere/copy.db"],
        );

        // What happens after the copy is not in it.
        api.approve(&waiting).await;
        api.succeeded(&waiting).await;
        world.kill(0).await;
        world.options.store_url = Some(format!("sqlite://{}", copy.display()));
        world.restart(0).await;
        let api = world.api();
        assert_eq!(api.waits_on(&waiting, "approval", 1).await.len(), 1);
        assert_eq!(api.all("/runs").await.len(), 1);
    });
}

#[test]
fn a_postgres_database_is_copied_by_its_own_tools() {
    run(120, async {
        let world = World::start(Db::Postgres, all).await;
        let dir = world.dir.path().join("edge-0");
        refused(&db(&dir, &["backup", "copy.db"]).await, &["pg_dump"]);
        assert!(!dir.join("copy.db").exists());
        // Edges may run meanwhile.
        done(&db(&dir, &["migrate"]).await, "");
        done(&db(&dir, &["rebuild-index"]).await, "0 runs looked at");
        assert_eq!(world.edges[0].client().get("/readyz").await.status(), 200);
    });
}

/// D231: what can be claimed is derived from what is sealed, and what is not whole is set aside.
#[test]
fn a_lost_index_is_derived_anew_and_a_broken_run_is_set_aside() {
    run(180, async {
        for kind in Db::BOTH {
            let mut world = World::start(kind, all).await;
            world.stubs.llm.asked.close();
            let api = world.api();
            let lost = api.run(WORKER, "lost").await;
            let broken = api.run(WORKER, "broken").await;
            world.stubs.llm.asked.reached(2).await;
            world.kill(0).await;

            let flip = match kind {
                Db::Sqlite => "x'00'",
                Db::Postgres => "'\\x00'",
            };
            for sql in [
                format!("UPDATE runs SET due_at = 9000000000000 WHERE run_id = '{lost}'"),
                format!("UPDATE runs SET body = {flip} WHERE run_id = '{broken}'"),
            ] {
                match &world.postgres {
                    None => sqlite(&world.sqlite_file(), &sql),
                    Some(server) => server.sql(&sql).unwrap(),
                };
            }
            let dir = world.dir.path().join("edge-0");
            done(
                &db(&dir, &["rebuild-index"]).await,
                "2 runs looked at, 1 repaired, 1 set aside as corrupt",
            );
            done(
                &db(&dir, &["rebuild-index"]).await,
                "2 runs looked at, 0 repaired",
            );
            world.stubs.llm.asked.open();
            world.restart(0).await;
            world.api().succeeded(&lost).await;
            let answer = world.api().get(&format!("/runs/{broken}")).await;
            answer.assert_error(500, "run_corrupt");
        }
    });
}

#[test]
fn what_is_no_database_is_named() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        configuration(dir.path(), "sqlite://gone.db");
        for args in [&["rebuild-index"][..], &["backup", "copy.db"]] {
            refused(&db(dir.path(), args).await, &["gone.db"]);
        }
        assert!(!dir.path().join("gone.db").exists() && !dir.path().join("copy.db").exists());

        std::fs::write(
            dir.path().join("text.db"),
            "a text that is no database ".repeat(20),
        )
        .unwrap();
        configuration(dir.path(), "sqlite://text.db");
        for args in [&["migrate"][..], &["rebuild-index"], &["backup", "copy.db"]] {
            refused(&db(dir.path(), args).await, &["text.db"]);
        }

        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        configuration(
            dir.path(),
            &format!("postgres://iop:secret-of-the-store@127.0.0.1:{port}/iop"),
        );
        for verb in ["migrate", "rebuild-index"] {
            let finished = db(dir.path(), &[verb]).await;
            refused(&finished, &["not available"]);
            assert!(!finished.stderr.contains("secret"), "{}", finished.stderr);
        }
        refused(
            &finish(
                "iop-edge",
                &["db", "migrate", "--config", "none.toml"],
                &[],
                dir.path(),
            )
            .await,
            &["none.toml"],
        );
        let wrong = db(dir.path(), &["backup"]).await;
        assert_eq!(wrong.code, Some(2), "{}", wrong.stderr);
    });
}

/// Who looks after a database need not have what the edge's keys, providers and tools need.
#[test]
fn a_database_is_looked_after_without_the_secrets_of_the_edge() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        let store = "[store]\nurl = \"sqlite://iop.db\"\n";
        let secrets = "[auth]\nkeys = [{ name = \"ops\", secret = { env = \"OPS_KEY\" } }]\n\
            [[providers]]\nid = \"p\"\nadapter = \"openai\"\nbase_url = \"http://127.0.0.1:9/v1\"\napi_key = { file = \"key\" }\n\
            [agents.a]\nmodel = \"m\"\n[[agents.a.tools]]\nname = \"t\"\n\
            http = { url = \"http://t.example\", headers = { x = { env = \"TOOL_KEY\" } } }\n";
        std::fs::write(dir.path().join("edge.toml"), format!("{store}{secrets}")).unwrap();
        let start = finish("iop-edge", &[], &[], dir.path()).await;
        refused(&start, &["OPS_KEY"]);
        done(&db(dir.path(), &["migrate"]).await, "iop.db: created");
        done(&db(dir.path(), &["backup", "copy.db"]).await, "copy.db: written");
        done(&db(dir.path(), &["rebuild-index"]).await, "0 runs looked at");

        let mistake = "[store]\nurl = \"iop.db\"\n";
        std::fs::write(dir.path().join("edge.toml"), format!("{mistake}{secrets}")).unwrap();
        refused(&db(dir.path(), &["migrate"]).await, &["edge.toml:2: store.url: "]);
    });
}

#[test]
fn a_database_that_is_not_there_is_named_with_who_says_where_it_is() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        let missing = |file: &str| format!("there is no database {}", dir.path().join(file).display());
        let verbs = [&["rebuild-index"][..], &["backup", "copy.db"]];
        for args in verbs {
            let says = [&*missing("iop.db"), "demonstration", "no edge.toml here"];
            refused(&db(dir.path(), args).await, &says);
        }
        configuration(dir.path(), "sqlite://data/gone.db");
        for args in verbs {
            let says = [&*missing("data/gone.db"), "(store.url of edge.toml)"];
            refused(&db(dir.path(), args).await, &says);
        }
        let left: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|file| file.unwrap().file_name())
            .collect();
        assert_eq!(left, ["edge.toml"]);
    });
}

/// An empty database is brought to the schema like an old one, so that a script need not know which it has; but a file that was not
/// there is told from one that was.
#[test]
fn a_sqlite_file_that_is_not_there_is_created_and_that_is_said() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        configuration(dir.path(), "sqlite://new.db");
        done(&db(dir.path(), &["migrate"]).await, "new.db: created");
        let again = db(dir.path(), &["migrate"]).await;
        assert!(!done(&again, "has the schema").contains("created"));
        let empty = dir.path().join("empty.db");
        std::fs::write(&empty, "").unwrap();
        configuration(dir.path(), "sqlite://empty.db");
        assert!(!done(&db(dir.path(), &["migrate"]).await, "has the schema").contains("created"));
        configuration(dir.path(), "sqlite://no/such/place.db");
        refused(&db(dir.path(), &["migrate"]).await, &["place.db"]);
        assert!(!dir.path().join("no").exists());
    });
}

#[test]
fn a_store_that_cannot_be_opened_says_why_once_and_keeps_its_password() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        for (url, cause) in [
            ("postgres://nobody:hidden@127.0.0.1:1/none", "Connection refused"),
            ("sqlite://missing/iop.db", "No such file or directory"),
        ] {
            let toml = format!("[server]\nlisten = \"127.0.0.1:0\"\n[store]\nurl = {url:?}\n");
            std::fs::write(dir.path().join("edge.toml"), toml).unwrap();
            let ended = finish("iop-edge", &["--config", "edge.toml"], &[], dir.path()).await;
            assert_eq!((ended.code, &*ended.stdout), (Some(1), ""), "{}", ended.stderr);
            let said = ended.stderr.lines().last().unwrap();
            assert!(said.starts_with("iop-edge: store.url: "), "{said}");
            assert_eq!(said.matches(cause).count(), 1, "{said}");
            assert!(!ended.stderr.contains("hidden"), "{}", ended.stderr);
        }
    });
}
