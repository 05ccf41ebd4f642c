//! What holds after every scenario (durable-scenarios, I1–I5), as far as it is seen from outside.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::{TERMINAL, World, encode};
use crate::eventually;

impl World {
    /// Checks every run that the store has. Stubs have to be released: nothing may be left to do.
    ///
    /// # Panics
    /// When something does not hold.
    pub async fn holds(&self) {
        let edge = self.edges.len() - 1;
        let api = self.api_of(edge);
        self.nobody_is_left_running(edge).await;
        for run in api.all("/runs").await {
            // An id may be any text.
            let id = &encode(run["id"].as_str().unwrap());
            // Of one moment: a run may have been woken by the last thing that a test did.
            let (run, events) = eventually("a run stands still", Duration::from_secs(10), || async {
                let run = api.seen_run(id).await;
                let events = api.events(id).await;
                if api.seen_run(id).await["revision"] == run["revision"] {
                    Ok((run, events))
                } else {
                    Err(run.to_string())
                }
            })
            .await;
            gapless(id, &events);
            ends_once(id, &run, &events);
        }
        for (path, key, effects) in self.stubs.tools.honoured() {
            assert!(
                effects <= 1 && !key.is_empty(),
                "I3: {path} was applied {effects} times for {key:?}"
            );
        }
        let gaps = self.query(
            "SELECT count(*), min(revision), max(revision), run_id FROM checkpoints GROUP BY run_id \
             HAVING min(revision) <> 1 OR max(revision) <> count(*)",
        );
        assert!(gaps.is_empty(), "I5: revisions: {gaps:?}");
    }

    /// I4: a run is `running` only under a live lease, so that with nothing to do none is.
    async fn nobody_is_left_running(&self, edge: usize) {
        let api = self.api_of(edge);
        let bound = self.options.lease_ttl + self.options.poll_interval + Duration::from_secs(10);
        eventually("I4: no run is left running", bound, || async {
            let running = api.all("/runs?status=running").await;
            match running.first() {
                None => Ok(()),
                Some(run) => Err(run.to_string()),
            }
        })
        .await;
    }

    /// Rows of a read-only query, as the database's own tools give them.
    ///
    /// # Panics
    /// When it is refused.
    pub fn query(&self, sql: &str) -> Vec<Vec<String>> {
        const READ: &str = "\
import sqlite3, sys
db = sqlite3.connect('file:' + sys.argv[1] + '?mode=ro', uri=True, timeout=10)
for row in db.execute(sys.argv[2]):
    print('|'.join('' if v is None else str(v) for v in row))
";
        let text = match &self.postgres {
            Some(postgres) => postgres.sql(sql).unwrap(),
            None => {
                let mut python = Command::new("python3");
                python.args(["-c", READ]).arg(self.sqlite_file()).arg(sql);
                let output = python.stdin(Stdio::null()).output().unwrap();
                assert!(
                    output.status.success(),
                    "{}",
                    String::from_utf8_lossy(&output.stderr)
                );
                String::from_utf8_lossy(&output.stdout).into_owned()
            }
        };
        let rows = text.lines().filter(|l| !l.is_empty());
        rows.map(|l| l.split('|').map(str::to_owned).collect()).collect()
    }
}

/// I5: events are numbered from 1 without gaps, and lives only grow.
fn gapless(id: &str, events: &[Value]) {
    let mut life = 1;
    for (n, event) in events.iter().enumerate() {
        assert_eq!(event["seq"].as_u64(), Some(n as u64 + 1), "I5: {id}: {events:?}");
        let next = event["life"].as_u64().unwrap();
        assert!(next == life || next == life + 1, "I5: lives of {id}: {events:?}");
        life = next;
    }
}

/// I1, I2: each life that is over has one terminal event, the last of it, with the outcome of the run.
fn ends_once(id: &str, run: &Value, events: &[Value]) {
    let terminal = |event: &&Value| {
        let name = event["event"].as_str().unwrap_or_default();
        TERMINAL.iter().any(|s| name.strip_prefix("run.") == Some(*s))
    };
    let life = run["life"].as_u64().unwrap();
    for n in 1..=life {
        let of_life: Vec<&Value> = events.iter().filter(|e| e["life"] == n).collect();
        let ends = of_life.iter().copied().filter(terminal).count();
        let over = n < life || TERMINAL.contains(&run["status"].as_str().unwrap());
        assert_eq!(
            ends,
            usize::from(over),
            "I1: terminal events of {id} in life {n}: {events:?}"
        );
        if over {
            assert!(
                of_life.last().is_some_and(terminal),
                "I1: {id} goes on after its end: {events:?}"
            );
        }
    }
    if TERMINAL.contains(&run["status"].as_str().unwrap()) {
        let end = events.iter().rfind(terminal).unwrap();
        assert_eq!(end["data"]["outcome"], run["outcome"], "I2: the outcome of {id}");
    }
}
