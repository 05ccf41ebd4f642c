//! For tests of stores: the conformance suite every adapter passes, a clock that is moved by hand, and a store that fails where
//! it is told to.
//!
//! An adapter's test file is a `Fixture` and one line:
//!
//! ```text
//! iop_durable::conformance_tests!(MyFixture::start().await);
//! ```
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests: a broken expectation ends the case with its message"
)]

pub mod build;
mod clock;
pub mod conformance;
pub mod fault;
mod fixture;
mod memory;
pub mod model;

pub use clock::ManualClock;
pub use fault::{Fault, FaultStore};
pub use fixture::{Fixture, Tamper, flipped};
pub use memory::MemoryFixture;
