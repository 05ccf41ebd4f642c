//! The runner on the memory store: what it commits, refuses, repeats and tells, by theme.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests: a broken expectation ends the test with its message"
)]

#[path = "../support/mod.rs"]
mod support;

mod activities;
mod answers;
mod attempts;
mod budgets;
mod calls;
mod cancel;
mod cancel_races;
mod children;
mod control;
mod corrupt;
mod deadline;
mod dropped;
mod effects;
mod front_ends;
mod gate_pauses;
mod gate_races;
mod gates;
mod hooks;
mod leases;
mod lives;
mod refusals;
mod resolve;
mod resume;
mod retention;
mod retries;
mod stage;
mod stored;
mod stream;
mod unknown;
mod wait_ends;
mod waits;
