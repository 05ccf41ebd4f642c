//! Lists and discovery: filters, order, keyset pages.

use std::time::Duration;

use super::support::{held, new, queued};
use crate::ids::RunId;
use crate::record::{Status, WaitingKind};
use crate::store::{Listed, RunFilter, Store};
use crate::testing::Fixture;
use crate::testing::build::{LONG, advance, at, create, ended, lease_for, parked, run};
use crate::time::Timestamp;

async fn ids(store: &dyn Store, filter: RunFilter) -> Vec<String> {
    store
        .list(filter)
        .await
        .unwrap()
        .into_iter()
        .map(|row| match row {
            Listed::Run { head, .. } => head.id.as_str().to_owned(),
            Listed::Corrupt { run, why, .. } => panic!("{run}: {why}"),
        })
        .collect()
}

fn any() -> RunFilter {
    RunFilter {
        limit: 100,
        ..RunFilter::default()
    }
}

async fn created_at(store: &dyn Store, id: &str, time: Timestamp) {
    new(store.create(create(&run(id), time)).await.unwrap());
}

/// The order of bytes, whatever the database's language.
const ORDERED: [&str; 9] = ["A", "B", "_", "a", "a b", "a-b", "aB", "b", "\u{e9}"];

pub async fn a_list_is_in_order_of_creation_then_id(fixture: &dyn Fixture) {
    let store = fixture.store();
    created_at(&*store, "0 late", at(9_000)).await;
    for id in ORDERED.iter().rev() {
        created_at(&*store, id, at(5_000)).await;
    }
    created_at(&*store, "z early", at(1_000)).await;
    let mut expected = vec!["z early"];
    expected.extend(ORDERED);
    expected.push("0 late");
    assert_eq!(ids(&*store, any()).await, expected);
    // And page by page.
    let mut paged = Vec::new();
    let mut after: Option<(Timestamp, RunId)> = None;
    loop {
        let page = store
            .list(RunFilter {
                after: after.clone(),
                limit: 2,
                ..RunFilter::default()
            })
            .await
            .unwrap();
        assert!(page.len() <= 2);
        let Some(Listed::Run { head, .. }) = page.last() else {
            break;
        };
        after = Some((head.created_at, head.id.clone()));
        for row in page {
            if let Listed::Run { head, .. } = row {
                paged.push(head.id.as_str().to_owned());
            }
        }
        assert!(paged.len() <= expected.len(), "a page came twice");
    }
    assert_eq!(paged, expected);
}

/// One run in each of some states, created in this order.
async fn various(store: &dyn Store) {
    let acquired = held(store, "approval").await;
    let park = parked(advance(&acquired), WaitingKind::Approval, None, 0);
    store.commit(park).await.unwrap();
    let acquired = held(store, "timer").await;
    let far = store.now().await.unwrap().plus(Duration::from_hours(1));
    let park = parked(advance(&acquired), WaitingKind::Timer, Some(far), 0);
    store.commit(park).await.unwrap();
    let acquired = held(store, "failed").await;
    store
        .commit(ended(advance(&acquired), Status::Failed))
        .await
        .unwrap();
    let now = store.now().await.unwrap();
    let mut child = create(&run("child"), now);
    child.head.lineage.parent = Some(run("timer"));
    child.head.definition.kind = "flow".to_owned();
    new(store.create(child).await.unwrap());
    let acquired = held(store, "running").await;
    store.commit(advance(&acquired)).await.unwrap();
}

async fn sorted(store: &dyn Store, filter: RunFilter) -> Vec<String> {
    let mut ids = ids(store, filter).await;
    ids.sort();
    ids
}

pub async fn a_list_can_be_filtered(fixture: &dyn Fixture) {
    let store = fixture.store();
    various(&*store).await;
    let status = |status| RunFilter {
        status: Some(status),
        ..any()
    };
    assert_eq!(sorted(&*store, any()).await.len(), 5);
    assert_eq!(
        sorted(&*store, status(Status::Waiting)).await,
        ["approval", "timer"]
    );
    assert_eq!(sorted(&*store, status(Status::Failed)).await, ["failed"]);
    assert_eq!(sorted(&*store, status(Status::Queued)).await, ["child"]);
    assert_eq!(sorted(&*store, status(Status::Running)).await, ["running"]);
    assert_eq!(sorted(&*store, status(Status::Cancelled)).await, [""; 0]);
    let waiting_kind = |kind| RunFilter {
        waiting_kind: Some(kind),
        ..any()
    };
    assert_eq!(
        sorted(&*store, waiting_kind(WaitingKind::Approval)).await,
        ["approval"]
    );
    assert_eq!(sorted(&*store, waiting_kind(WaitingKind::Retry)).await, [""; 0]);
    let definition = |kind: &str, name: &str| RunFilter {
        definition: Some((kind.to_owned(), name.to_owned())),
        ..any()
    };
    assert_eq!(
        sorted(&*store, definition("flow", "conformance")).await,
        ["child"]
    );
    assert_eq!(sorted(&*store, definition("graph", "conformance")).await.len(), 4);
    assert_eq!(sorted(&*store, definition("flow", "other")).await, [""; 0]);
    let parent = |id: &str| RunFilter {
        parent: Some(run(id)),
        ..any()
    };
    assert_eq!(sorted(&*store, parent("timer")).await, ["child"]);
    assert_eq!(sorted(&*store, parent("child")).await, [""; 0]);
    let both = RunFilter {
        status: Some(Status::Waiting),
        waiting_kind: Some(WaitingKind::Timer),
        ..any()
    };
    assert_eq!(sorted(&*store, both).await, ["timer"]);
    let neither = RunFilter {
        status: Some(Status::Failed),
        waiting_kind: Some(WaitingKind::Timer),
        ..any()
    };
    assert_eq!(sorted(&*store, neither).await, [""; 0]);
}

pub async fn a_list_can_be_of_one_owner(fixture: &dyn Fixture) {
    let store = fixture.store();
    for (n, (id, owner)) in [
        ("b", Some("mine")),
        ("a", Some("mine")),
        ("theirs", Some("Mine")),
        ("nobody", None),
        ("flow", Some("mine")),
    ]
    .into_iter()
    .enumerate()
    {
        let mut creation = create(&run(id), at(1_000 * i64::try_from(n + 1).unwrap()));
        creation.head.owner = owner.map(str::to_owned);
        if id == "flow" {
            creation.head.definition.kind = "flow".to_owned();
        }
        new(store.create(creation).await.unwrap());
    }
    let of = |owner: &str| RunFilter {
        owner: Some(owner.to_owned()),
        ..any()
    };
    assert_eq!(ids(&*store, of("mine")).await, ["b", "a", "flow"]);
    assert_eq!(ids(&*store, of("Mine")).await, ["theirs"]);
    assert_eq!(ids(&*store, of("")).await, [""; 0]);
    assert_eq!(ids(&*store, any()).await.len(), 5);
    let page = RunFilter {
        after: Some((at(1_000), run("b"))),
        limit: 1,
        ..of("mine")
    };
    assert_eq!(ids(&*store, page).await, ["a"]);
    let flows = RunFilter {
        definition: Some(("flow".to_owned(), "conformance".to_owned())),
        ..of("mine")
    };
    assert_eq!(ids(&*store, flows).await, ["flow"]);
    // The owner stays through commits, and every other filter goes with it.
    let acquired = store.acquire(&run("a"), lease_for("worker", LONG)).await.unwrap();
    assert_eq!(acquired.loaded.head.owner.as_deref(), Some("mine"));
    let park = parked(advance(&acquired), WaitingKind::Approval, None, 0);
    store.commit(park).await.unwrap();
    let loaded = store.load(&run("a")).await.unwrap();
    assert_eq!(loaded.head.owner.as_deref(), Some("mine"));
    let waiting = |owner| RunFilter {
        status: Some(Status::Waiting),
        waiting_kind: Some(WaitingKind::Approval),
        ..of(owner)
    };
    assert_eq!(ids(&*store, waiting("mine")).await, ["a"]);
    assert_eq!(ids(&*store, waiting("Mine")).await, [""; 0]);
    let live = |owner| RunFilter {
        status: Some(Status::Waiting),
        ..of(owner)
    };
    assert_eq!(ids(&*store, live("mine")).await, ["a"]);
    assert_eq!(ids(&*store, live("Mine")).await, [""; 0]);
    let over = RunFilter {
        status: Some(Status::Failed),
        ..of("mine")
    };
    assert_eq!(ids(&*store, over).await, [""; 0]);
}

pub async fn a_list_can_be_of_what_is_due(fixture: &dyn Fixture) {
    let store = fixture.store();
    various(&*store).await;
    let now = store.now().await.unwrap();
    let before = |hours| RunFilter {
        due_before: Some(now.plus(Duration::from_hours(hours))),
        ..any()
    };
    assert_eq!(sorted(&*store, before(2)).await, ["child", "running", "timer"]);
    let soon = RunFilter {
        due_before: Some(now.plus(Duration::from_mins(1))),
        ..any()
    };
    assert_eq!(sorted(&*store, soon).await, ["child", "running"]);
}

pub async fn a_listed_head_is_the_loaded_head(fixture: &dyn Fixture) {
    let store = fixture.store();
    various(&*store).await;
    for row in store.list(any()).await.unwrap() {
        let Listed::Run { head, inbox } = row else {
            panic!("{row:?}");
        };
        let loaded = store.load(&head.id).await.unwrap();
        assert_eq!((*head, inbox), (loaded.head, loaded.inbox));
    }
}

pub async fn due_work_comes_in_pages_in_order(fixture: &dyn Fixture) {
    let store = fixture.store();
    let now = store.now().await.unwrap();
    let mut expected = Vec::new();
    for (n, id) in ORDERED.iter().enumerate() {
        let mut creation = create(&run(id), now);
        // Three at a time are due together.
        let due_at = at(now.as_millis() - 9_000 + 1_000 * i64::try_from(n / 3).unwrap());
        creation.due_at = Some(due_at);
        new(store.create(creation).await.unwrap());
        expected.push((due_at, run(id)));
    }
    let mut never = create(&run("never"), now);
    never.due_at = None;
    new(store.create(never).await.unwrap());
    let mut later = create(&run("later"), now);
    later.due_at = Some(now.plus(Duration::from_hours(1)));
    new(store.create(later).await.unwrap());
    let mut paged = Vec::new();
    let mut after = None;
    loop {
        let page = store.due(now, after.clone(), 2).await.unwrap();
        assert!(page.len() <= 2);
        let Some(last) = page.last() else { break };
        after = Some((last.due_at, last.run.clone()));
        paged.extend(page.iter().map(|due| (due.due_at, due.run.clone())));
        assert!(paged.len() <= expected.len(), "a page came twice");
    }
    assert_eq!(paged, expected);
    // At or before.
    let until = expected[5].0;
    assert_eq!(store.due(until, None, 100).await.unwrap().len(), 6);
}

pub async fn due_work_says_whether_it_is_held(fixture: &dyn Fixture) {
    let store = fixture.store();
    various(&*store).await;
    queued(&*store, "free").await;
    let far = store.now().await.unwrap().plus(Duration::from_hours(2));
    let due = store.due(far, None, 100).await.unwrap();
    let of = |id: &str| {
        let due = due.iter().find(|due| due.run.as_str() == id).unwrap();
        (due.status, due.waiting_kind, due.leased)
    };
    assert_eq!(due.len(), 4);
    assert_eq!(of("running"), (Status::Running, None, true));
    assert_eq!(of("free"), (Status::Queued, None, false));
    assert_eq!(of("timer"), (Status::Waiting, Some(WaitingKind::Timer), false));
    // Finding is not accepting: it can still be taken.
    store
        .acquire(&run("free"), lease_for("worker", LONG))
        .await
        .unwrap();
}
