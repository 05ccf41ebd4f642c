//! Vocabulary and wire of iop: what edge and node both say, and nothing that runs.
//!
//! No runtime, no clock, no I/O, no randomness: those come in as arguments. Every closed list of
//! words (labels, codes, dispositions) lives here once, as an enum with one total match.

pub mod config;
pub mod execution;
pub mod ids;
pub mod label;
pub mod metric;
pub mod openai;
pub mod wire;
