//! A durable graph runtime: runs that survive anything between two instructions.

pub mod envelope;
pub mod failure;
pub mod graph;
pub mod runner;
pub mod host;
pub mod ids;
pub mod machine;
pub mod payload;
pub mod record;
pub mod store;
mod tasks;
#[cfg(feature = "testing")]
pub mod testing;
pub mod time;
pub mod token;
