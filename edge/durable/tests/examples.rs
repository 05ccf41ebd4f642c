//! Every example is run as a process of its own: its assertions hold and it ends in time.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::process::{Command, Stdio};

use iop_tests::process::bin_dir;

/// Runs it and returns what it said.
fn run(example: &str) -> String {
    let path = bin_dir().join("examples").join(example);
    assert!(
        path.is_file(),
        "{} is missing: build it first (cargo build -p iop-durable --examples) or set IOP_BIN_DIR",
        path.display()
    );
    let output = Command::new(&path).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{example}: {}\n{said}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    said
}

#[test]
fn an_agent_buys_what_is_approved() {
    let said = run("react");
    for line in ["decided: approve", "decided: deny", "exhausted: 4 of 4 turns"] {
        assert!(said.contains(line), "{line:?} is missing in:\n{said}");
    }
}

#[test]
fn a_flow_retries_waits_and_shows_its_events() {
    let said = run("flow");
    for line in ["run.created", "run.waiting", "run.succeeded", "welcomed: true"] {
        assert!(said.contains(line), "{line:?} is missing in:\n{said}");
    }
}

#[test]
fn a_process_that_dies_between_effect_and_commit_repeats_nothing_it_must_not() {
    let said = run("crash");
    for line in [
        "process 1 ended by signal 6: the run is running at \"charge\"",
        "process 2 ended by signal 9: the run is running at \"charge\"",
        "process 3 ended by signal 6: the run is running at \"mail\"",
        "process 4 ended by itself: the run is ambiguous at \"mail\"",
        "calls received and effects applied: reserve (1, 1), charge (3, 1), mail (1, 1)",
        "resumed: the run is succeeded",
    ] {
        assert!(said.contains(line), "{line:?} is missing in:\n{said}");
    }
}
