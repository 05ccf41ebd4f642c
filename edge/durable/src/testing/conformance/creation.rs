//! Creation, idempotency keys, tombstones.

use crate::ids::Revision;
use crate::store::Created;
use crate::testing::Fixture;
use crate::testing::build::{LONG, create, lease_for, run};

pub async fn a_new_run_is_loaded_as_it_was_written(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let id = run("r");
    let mut creation = create(&id, now);
    creation.lease = Some(lease_for("worker", LONG));
    let Created::New {
        lease: Some(lease), ..
    } = store.create(creation.clone()).await.unwrap()
    else {
        panic!("no lease");
    };
    let loaded = store.load(&id).await.unwrap();
    assert_eq!(loaded.head.revision, Revision::FIRST);
    assert_eq!(loaded.head, creation.head);
    assert_eq!(loaded.state, creation.state);
    assert_eq!(loaded.lease, Some(lease));
    assert_eq!(store.events(&id, 0, 10).await.unwrap(), creation.events);
}
