//! The store that fails where it is told to.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::sync::Arc;
use std::time::Duration;

use iop_durable::store::memory::MemoryStore;
use iop_durable::store::{Store, StoreError};
use iop_durable::testing::build::{LONG, advance, create, lease_for, run};
use iop_durable::testing::fault::{Hit, Op};
use iop_durable::testing::{Fault, FaultStore, ManualClock, MemoryFixture};
use iop_durable::time::{Clock, Timestamp};

fn kind<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> &'static str {
    match answer {
        Ok(_) => "done",
        Err(error) => error.kind(),
    }
}

/// One short run; its last operation is a commit.
async fn scenario(store: &dyn Store) -> Result<(), StoreError> {
    let now = store.now().await?;
    store.create(create(&run("r"), now)).await?;
    let acquired = store.acquire(&run("r"), lease_for("worker", LONG)).await?;
    store.commit(advance(&acquired)).await?;
    Ok(())
}

const SCENARIO: [Op; 4] = [Op::Now, Op::Create, Op::Acquire, Op::Commit];

#[tokio::test]
async fn operations_are_counted_in_order() {
    let store = FaultStore::new(MemoryFixture::new().store);
    scenario(&store).await.unwrap();
    assert_eq!(store.operations(), SCENARIO);
    assert_eq!(store.count(), 4);
    assert_eq!(store.hits(), []);
}

#[tokio::test]
async fn each_operation_can_be_refused() {
    for k in 1..=4 {
        let memory = MemoryFixture::new().store;
        let store = FaultStore::new(memory.clone());
        store.fail(k, Fault::Refused);
        assert_eq!(kind(scenario(&store).await), "unavailable");
        let op = SCENARIO[usize::try_from(k).unwrap() - 1];
        let fault = Fault::Refused;
        assert_eq!(store.hits(), [Hit { k, op, fault }]);
        assert_eq!(store.count(), k);
        // Nothing was done by it.
        let revision = memory.load(&run("r")).await.map(|l| l.head.revision.get());
        assert_eq!(revision.ok(), (k > 2).then_some(1));
        // A fault is met once: the same operation passes the next time.
        let rest = if k > 2 {
            store.load(&run("r")).await.map(|_| ())
        } else {
            scenario(&store).await
        };
        assert_eq!(kind(rest), "done");
    }
}

#[tokio::test]
async fn an_unconfirmed_write_may_be_done_or_lost() {
    for (fault, revision) in [(Fault::DoneUnconfirmed, 2), (Fault::LostUnconfirmed, 1)] {
        let memory = MemoryFixture::new().store;
        let store = FaultStore::counting(memory.clone(), |op| op == Op::Commit);
        store.fail(1, fault);
        assert_eq!(kind(scenario(&store).await), "unconfirmed");
        assert_eq!(store.operations(), [Op::Commit]);
        let loaded = memory.load(&run("r")).await.unwrap();
        assert_eq!(loaded.head.revision.get(), revision, "{fault}");
    }
}

#[tokio::test]
async fn a_read_is_never_unconfirmed() {
    let store = FaultStore::new(MemoryFixture::new().store);
    for (k, fault) in [(1, Fault::DoneUnconfirmed), (2, Fault::LostUnconfirmed)] {
        store.fail(k, fault);
        assert_eq!(kind(store.now().await), "unavailable");
    }
    assert_eq!(kind(store.now().await), "done");
    let writes: Vec<&str> = Op::ALL
        .iter()
        .filter(|op| op.writes())
        .map(|op| op.as_str())
        .collect();
    let expected = "create acquire claim renew release commit post define withdraw forget_keys prune delete quarantine rebuild";
    assert_eq!(writes.join(" "), expected);
}

#[tokio::test]
async fn a_store_that_is_down_does_nothing_until_it_is_back() {
    let memory = MemoryFixture::new().store;
    let store = FaultStore::counting(memory.clone(), |op| op == Op::Commit);
    store.set_down(true);
    let now = memory.now().await.unwrap();
    assert_eq!(kind(store.create(create(&run("r"), now)).await), "unavailable");
    assert_eq!(kind(memory.load(&run("r")).await), "not_found");
    store.set_down(false);
    scenario(&store).await.unwrap();
}

/// Says on stderr, past any capture, that the store looked at its clock: that an operation was under way.
#[derive(Default)]
struct TellingClock(ManualClock);

impl Clock for TellingClock {
    fn wall(&self) -> Timestamp {
        let _ = std::io::stderr().write_all(b"[looked]");
        self.0.wall()
    }

    fn monotonic(&self) -> Duration {
        self.0.monotonic()
    }
}

const CHILD: &str = "IOP_TEST_ABORT";

#[tokio::test]
async fn the_process_ends_before_or_after_an_operation() {
    if let Ok(word) = std::env::var(CHILD) {
        let memory = MemoryStore::new(Arc::new(TellingClock::default()));
        let store = FaultStore::new(Arc::new(memory));
        store.fail(1, Fault::parse(&word).unwrap());
        let answer = store.create(create(&run("r"), Timestamp::MIN)).await;
        unreachable!("the process has ended by now: {answer:?}");
    }
    for (fault, looked) in [(Fault::AbortBefore, false), (Fault::AbortAfter, true)] {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_process_ends_before_or_after_an_operation"])
            .env(CHILD, fault.as_str())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stderr).into_owned();
        // SIGABRT.
        assert_eq!(child.status.signal(), Some(6), "{fault}: {said}");
        assert_eq!(said.contains("[looked]"), looked, "{fault}: {said}");
    }
}
