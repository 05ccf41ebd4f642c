//! The patterns: an agent's loop with its turns, and ordered steps with their state, retries and waits (D8, D34 to D57, D254).
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

#[path = "../support/mod.rs"]
mod support;

mod agent;
mod flow;
mod retries;
mod steps;
mod waits;

use iop_durable::graph::{CompileError, GraphBuilder, GraphErrors};

/// What is wrong with a graph.
fn errors<S, E>(builder: GraphBuilder<S, E>) -> Vec<CompileError>
where
    S: Send + Sync + 'static,
    E: Send + 'static,
{
    match builder.compile() {
        Ok(_) => Vec::new(),
        Err(GraphErrors(errors)) => errors,
    }
}
