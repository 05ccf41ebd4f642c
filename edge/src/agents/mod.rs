//! Agents: what one is declared to be, and how a declaration becomes a graph of the durable runtime.

pub mod spec;
