//! The suite's fixture over `MemoryStore`.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::ids::RunId;
use crate::store::Store;
use crate::store::memory::MemoryStore;
use crate::testing::{Fixture, ManualClock, Tamper};

/// An empty memory store and its clock.
#[derive(Debug)]
pub struct MemoryFixture {
    pub clock: Arc<ManualClock>,
    pub store: Arc<MemoryStore>,
}

impl MemoryFixture {
    pub fn new() -> Self {
        let clock = Arc::new(ManualClock::new());
        Self {
            store: Arc::new(MemoryStore::new(clock.clone())),
            clock,
        }
    }
}

impl Default for MemoryFixture {
    fn default() -> Self {
        Self::new()
    }
}

impl Fixture for MemoryFixture {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    fn pass(&self, span: Duration) -> BoxFuture<'_, ()> {
        Box::pin(async move { self.clock.advance(span) })
    }

    fn tamper<'a>(&'a self, run: &'a RunId, tamper: Tamper) -> BoxFuture<'a, ()> {
        Box::pin(async move { self.store.tamper(run, tamper) })
    }

    fn spoil<'a>(&'a self, agent: &'a str, version: u64) -> BoxFuture<'a, ()> {
        Box::pin(async move { self.store.spoil(agent, version) })
    }
}
