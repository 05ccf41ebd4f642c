//! Hints: they may be lost, but a store that never gives one is broken.

use std::time::Duration;

use tokio::sync::broadcast::Receiver;
use tokio::time::timeout;

use super::support::{held, queued};
use crate::store::Hint;
use crate::testing::Fixture;
use crate::testing::build::{advance, parked, post};

/// Whether this hint comes within a second.
async fn comes(hints: &mut Receiver<Hint>, expected: &Hint) -> bool {
    timeout(Duration::from_secs(1), async {
        loop {
            if let Ok(hint) = hints.recv().await
                && hint == *expected
            {
                return;
            }
        }
    })
    .await
    .is_ok()
}

pub async fn a_new_run_is_hinted_at(fixture: &dyn Fixture) {
    let store = fixture.store();
    let mut hints = store.hints().subscribe();
    for n in 0..10 {
        let id = queued(&*store, &format!("r{n}")).await;
        if comes(&mut hints, &Hint::Claimable(id)).await {
            return;
        }
    }
    panic!("ten runs and no hint");
}

pub async fn a_post_is_hinted_at(fixture: &dyn Fixture) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let park = parked(advance(&acquired), crate::record::WaitingKind::Event, None, 0);
    store.commit(park).await.unwrap();
    let mut hints = store.hints().subscribe();
    for signal in 0..10 {
        store.post(post(&acquired.lease.run, signal)).await.unwrap();
        if comes(&mut hints, &Hint::Posted(acquired.lease.run.clone())).await {
            return;
        }
    }
    panic!("ten posts and no hint");
}
