//! Runs on a store, before a test does something to them.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "tests: each file uses a part of it, and what goes wrong here ends the case"
)]

use std::time::Duration;

use iop_durable::ids::RunId;
use iop_durable::store::{Acquired, Store};
use iop_durable::testing::build::{create, lease_for, run};

/// A run of this name that nobody has taken yet.
pub(crate) async fn queued(store: &dyn Store, name: &str) -> RunId {
    let id = run(name);
    let now = store.now().await.unwrap();
    store.create(create(&id, now)).await.unwrap();
    id
}

/// A run of this name, held by `worker`.
pub(crate) async fn held(store: &dyn Store, name: &str, ttl: Duration) -> Acquired {
    let id = queued(store, name).await;
    store.acquire(&id, lease_for("worker", ttl)).await.unwrap()
}
