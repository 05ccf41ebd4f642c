//! Stores without a clock of their own use the host's two: leases live by the monotonic one, due work by the wall clock. A wall
//! clock that steps neither ends a lease nor keeps it alive.

use std::time::Duration;

use super::support::{claimed, held, hold, queued, refused};
use crate::record::WaitingKind;
use crate::store::{Acquired, Renewal, Store};
use crate::testing::build::{advance, lease_for, parked, run};
use crate::testing::{Fixture, ManualClock};
use crate::time::Clock as _;

const TTL: Duration = Duration::from_secs(10);
const HOUR_MS: i64 = 3_600_000;

async fn held_for_ttl(store: &dyn Store) -> Acquired {
    let id = queued(store, "r").await;
    store.acquire(&id, lease_for("worker", TTL)).await.unwrap()
}

pub async fn a_wall_clock_that_steps_does_not_end_a_lease(fixture: &dyn Fixture, clock: &ManualClock) {
    let store = fixture.store();
    let acquired = held_for_ttl(&*store).await;
    for ms in [HOUR_MS, -2 * HOUR_MS, HOUR_MS] {
        clock.step_wall(ms);
        refused(
            store.acquire(&acquired.lease.run, lease_for("other", TTL)).await,
            "busy",
        );
    }
    store.commit(advance(&acquired)).await.unwrap();
}

pub async fn a_wall_clock_that_stands_or_steps_back_does_not_keep_a_lease(
    fixture: &dyn Fixture,
    clock: &ManualClock,
) {
    let store = fixture.store();
    let acquired = held_for_ttl(&*store).await;
    clock.step_wall(-HOUR_MS);
    clock.advance_monotonic(TTL);
    refused(store.commit(advance(&acquired)).await, "lease_lost");
    let renewed = store.renew(vec![acquired.lease.clone()], TTL).await.unwrap();
    assert_eq!(renewed, [Renewal::Lost]);
    assert!(hold(&*store, &acquired.lease.run).await.lease.incarnation > acquired.lease.incarnation);
}

pub async fn a_lease_is_live_to_its_last_moment_and_not_at_its_end(
    fixture: &dyn Fixture,
    clock: &ManualClock,
) {
    let store = fixture.store();
    let acquired = held_for_ttl(&*store).await;
    clock.advance(TTL - Duration::from_millis(1));
    refused(
        store.acquire(&acquired.lease.run, lease_for("other", TTL)).await,
        "busy",
    );
    clock.advance(Duration::from_millis(1));
    refused(store.release(acquired.lease.clone()).await, "lease_lost");
    hold(&*store, &acquired.lease.run).await;
}

pub async fn a_renewed_lease_outlives_its_first_end(fixture: &dyn Fixture, clock: &ManualClock) {
    let store = fixture.store();
    let acquired = held_for_ttl(&*store).await;
    for _ in 0..3 {
        clock.advance(TTL - Duration::from_millis(1));
        let renewed = store.renew(vec![acquired.lease.clone()], TTL).await.unwrap();
        assert_eq!(
            renewed,
            [Renewal::Live {
                expires_at: clock.wall().plus(TTL),
                signal: 0
            }]
        );
    }
    store.commit(advance(&acquired)).await.unwrap();
    clock.advance(TTL);
    refused(store.release(acquired.lease).await, "lease_lost");
}

pub async fn due_work_follows_the_wall_clock(fixture: &dyn Fixture, clock: &ManualClock) {
    let store = fixture.store();
    let acquired = held(&*store, "r").await;
    let due_at = clock.wall().plus(Duration::from_hours(1));
    let park = parked(advance(&acquired), WaitingKind::Timer, Some(due_at), 0);
    store.commit(park).await.unwrap();
    // Monotonic time alone makes nothing due.
    clock.advance_monotonic(Duration::from_hours(2));
    assert_eq!(claimed(&*store, 10).await, [""; 0]);
    clock.step_wall(HOUR_MS - 1);
    assert_eq!(claimed(&*store, 10).await, [""; 0]);
    clock.step_wall(1);
    assert_eq!(claimed(&*store, 10).await, ["r"]);
    assert_eq!(store.now().await.unwrap(), due_at);
    assert_eq!(store.load(&run("r")).await.unwrap().now, due_at);
}
