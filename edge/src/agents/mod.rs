//! Agents: what one is declared to be, and how a declaration becomes a graph of the durable runtime.

pub(crate) mod action;
pub(crate) mod child;
pub(crate) mod journal;
pub(crate) mod policy;
pub mod prices;
pub(crate) mod program;
mod reason;
pub mod spec;
pub(crate) mod state;
pub(crate) mod tools;
pub(crate) mod transcript;
pub(crate) mod turn;
