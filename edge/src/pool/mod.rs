//! Which provider a request goes to, and how long it waits for one (gateway.md §4).
//!
//! `select`, `grant`, `table`, `queue`, `overlay` and `ejection` are pure: they take facts and return decisions. `service`
//! is their shell: it locks, asks them, unlocks, and only then wakes anyone.

mod ask;
mod capabilities;
mod ejection;
mod grant;
mod lease;
mod overlay;
mod queue;
mod route;
mod select;
mod service;
mod sessions;
mod snapshot;
mod table;
#[cfg(test)]
mod tests;

pub use ask::{Ask, Prospects, Refused, Who};
pub use lease::{Lease, StallObservation};
pub use route::{Affinity, Candidate, Liveness, Model, Preset};
pub use service::Pool;
pub use snapshot::{ListedModel, NodeSnapshot, ProviderSnapshot};
