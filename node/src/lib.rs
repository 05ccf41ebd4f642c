//! The provider side of iop: a tower service beside the engines, called in-process by the edge or over the link.
//!
//! Decides which provider answers a tunnel and how its attempt ended; never retries, never queues, never looks into
//! a payload. `iop-node` (main.rs) is this service behind dialed links.

pub mod admin;
pub mod config;
pub mod link;
pub mod metrics;
pub mod tasks;

mod probe;
mod providers;
mod run;
mod service;
#[cfg(test)]
mod testing;

pub use providers::ProviderSettings;
pub use service::body::ResponseBody;
pub use service::{BoxError, Node, NodeBuildError};
