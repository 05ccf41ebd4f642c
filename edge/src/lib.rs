//! The edge of iop: OpenAI clients in front, nodes behind, one StreamGate per request between them.
//!
//! `http` takes requests in, `gate` owns each of them, `pool` says which provider gets it, `link` carries it there.

pub mod agents;
pub mod app;
pub mod config;
pub mod drain;
pub mod error;
pub mod gate;
pub mod http;
pub mod link;
pub mod metrics;
pub mod pool;
pub mod runs;
pub mod tasks;

mod schema;

#[cfg(test)]
mod simulation;
