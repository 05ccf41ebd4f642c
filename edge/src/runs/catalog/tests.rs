use iop_durable::store::memory::MemoryStore;
use iop_durable::testing::FaultStore;
use iop_durable::testing::fault::{Fault, Op};
use iop_durable::time::HostClock;
use serde_json::json;

use super::*;

/// A store that counts what is asked about definitions.
fn store() -> Arc<FaultStore> {
    let memory = Arc::new(MemoryStore::new(Arc::new(HostClock::new())));
    Arc::new(FaultStore::counting(memory, |op| {
        matches!(op, Op::Define | Op::Definition | Op::Definitions | Op::Withdraw)
    }))
}

fn spec(model: &str) -> AgentSpec {
    serde_json::from_value(json!({ "model": model })).unwrap()
}

async fn open(store: &Arc<FaultStore>, alone: bool) -> Catalog {
    let agents = BTreeMap::from([("mine".to_owned(), spec("m"))]);
    let store: Arc<dyn Store> = Arc::clone(store) as Arc<dyn Store>;
    Catalog::open(store, alone, &agents, Prices::default())
        .await
        .unwrap()
}

async fn newest(catalog: &Catalog, agent: &str) -> Result<(u64, String), Code> {
    let version = catalog.newest(agent).await.map_err(|problem| problem.code)?;
    Ok((version.version, version.spec.model.clone()))
}

#[tokio::test]
async fn who_is_alone_knows_its_agents_and_who_is_not_asks() {
    for alone in [true, false] {
        let store = store();
        let catalog = open(&store, alone).await;
        catalog.put("other", spec("a")).await.unwrap();
        catalog.put("other", spec("b")).await.unwrap();
        let before = store.count();
        for _ in 0..3 {
            assert_eq!(newest(&catalog, "mine").await, Ok((1, "m".to_owned())));
            assert_eq!(newest(&catalog, "other").await, Ok((2, "b".to_owned())));
            catalog.keep_up().await.unwrap();
        }
        // Two questions and a look each time.
        assert_eq!(
            store.count() - before,
            if alone { 0 } else { 9 },
            "alone: {alone}"
        );
        catalog.delete("other").await.unwrap();
        assert_eq!(newest(&catalog, "other").await, Err(Code::AgentNotFound));
        assert!(catalog.has("mine") && !catalog.has("other"));
    }
}

#[tokio::test]
async fn a_version_whose_writer_was_told_nothing_is_known_all_the_same() {
    let store = store();
    let catalog = open(&store, true).await;
    catalog.put("other", spec("a")).await.unwrap();
    store.fail(store.count() + 1, Fault::DoneUnconfirmed);
    assert!(catalog.put("other", spec("b")).await.is_err());
    assert_eq!(newest(&catalog, "other").await, Ok((2, "b".to_owned())));
    // A later write does not hide that.
    catalog.put("third", spec("c")).await.unwrap();
    assert_eq!(newest(&catalog, "other").await, Ok((2, "b".to_owned())));
    catalog.keep_up().await.unwrap();
    let before = store.count();
    assert_eq!(newest(&catalog, "other").await, Ok((2, "b".to_owned())));
    assert_eq!(store.count(), before);

    store.fail(store.count() + 2, Fault::DoneUnconfirmed);
    catalog.delete("other").await.unwrap_err();
    assert_eq!(newest(&catalog, "other").await, Err(Code::AgentNotFound));
    catalog.keep_up().await.unwrap();
    assert!(!catalog.has("other"));
    assert_eq!(store.hits().len(), 2);
}
