//! Which provider a request goes to, and how long it waits for one (gateway.md §4).
//!
//! `select`, `table`, `queue`, `overlay` and `ejection` are pure: they take facts and return decisions. `service` is their
//! shell: it locks, asks them, unlocks, and only then wakes anyone.

mod ejection;
mod lease;
mod overlay;
mod queue;
mod route;
mod select;
mod service;
mod snapshot;
mod table;

pub use lease::{Lease, StallObservation};
pub use route::{Affinity, Candidate, Liveness, Model, Preset};
pub use service::{Ask, Pool, Prospects, Refused, Who};
pub use snapshot::{ListedModel, NodeSnapshot, ProviderSnapshot};
