//! Shared by the tests that hurt runs: one graph with everything in it, an outside world that counts what reaches it, a driver
//! that plays the people and the events, and what must hold of a run whatever happened on its way.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::wildcard_enum_match_arm,
    clippy::large_futures,
    reason = "tests: each test crate uses a part of this, and a broken expectation ends the test with its message"
)]

pub mod child;
pub mod clock;
pub mod driver;
pub mod faults;
pub mod fleet;
pub mod graph;
pub mod invariants;
pub mod ledger;
pub mod race;
pub mod recorder;
pub mod seed;
pub mod world;
