use iop_durable::store::memory::MemoryStore;
use iop_durable::testing::build;
use iop_durable::time::HostClock;
use tokio::time::timeout;

use super::*;

const LONG: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_secs(5);

fn store() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(Arc::new(HostClock::new())))
}

/// A run with these events.
async fn made(store: &Arc<dyn Store>, names: &[&'static str]) -> RunId {
    let id = RunId::random();
    let now = store.now().await.unwrap();
    let mut create = build::create(&id, now);
    create.head.event_seq = names.len() as u64;
    create.events = (1..)
        .zip(names)
        .map(|(seq, name)| EventRecord {
            seq,
            life: 1,
            name: (*name).into(),
            terminal: false,
            time: now,
            data: Bytes::from(format!("{{\"turn\":{seq}}}")),
        })
        .collect();
    store.create(create).await.unwrap();
    id
}

async fn seen(follow: &mut Follow) -> String {
    match timeout(SOON, follow.next()).await.unwrap().unwrap() {
        Update::Event(event) => format!("{} {}", event.seq, event.name),
        Update::Delta(data) => format!("delta {}", String::from_utf8_lossy(&data)),
    }
}

#[tokio::test]
async fn stored_events_come_in_order_from_any_of_them_on() {
    let store = store();
    let live = Live::default();
    let run = made(&store, &["a", "b", "c"]).await;
    let mut follow = live.follow(Arc::clone(&store), &run, 0, LONG);
    assert_eq!([seen(&mut follow).await, seen(&mut follow).await], ["1 a", "2 b"]);
    let mut late = live.follow(store, &run, 2, LONG);
    assert_eq!(seen(&mut late).await, "3 c");
    assert!(
        timeout(Duration::from_millis(50), late.next()).await.is_err(),
        "and waits for more"
    );
}

#[tokio::test]
async fn a_follower_is_told_of_commits_here_and_finds_those_elsewhere() {
    let store = store();
    let live = Live::default();
    let run = made(&store, &[]).await;
    let told = live.follow(Arc::clone(&store), &run, 0, LONG);
    let looks = live.follow(Arc::clone(&store), &run, 0, Duration::from_millis(20));
    let lease = store.acquire(&run, build::lease_for("w", LONG)).await.unwrap();
    let mut commit = build::advance(&lease);
    commit.head.event_seq = 1;
    commit.events = vec![build::event(
        1,
        1,
        iop_durable::record::EventName::Started,
        lease.loaded.now,
    )];
    // Both wait before anything is written.
    let mut waiting = [told, looks].map(|mut follow| Box::pin(async move { seen(&mut follow).await }));
    for follower in &mut waiting {
        assert!(futures_util::poll!(follower.as_mut()).is_pending());
    }
    store.commit(commit).await.unwrap();
    live.committed(&run, 1);
    for follower in waiting {
        assert_eq!(timeout(SOON, follower).await.unwrap(), "1 run.started");
    }
}

#[tokio::test]
async fn the_pieces_of_an_answer_come_before_the_answer_and_nobody_pays_for_none() {
    let store = store();
    let live = Live::default();
    // Event n tells of the end of turn n.
    let run = made(&store, &["run.created", TURN_COMPLETED, "other"]).await;
    live.delta(&run, 2, || unreachable!("nobody follows"));
    let events = live.follow(Arc::clone(&store), &run, 0, LONG);
    live.delta(&run, 2, || unreachable!("nobody wants pieces"));
    drop(events);
    let mut follow = live.follow(Arc::clone(&store), &run, 0, LONG).with_pieces();
    for (turn, piece) in [(2, "x"), (2, "y"), (3, "z")] {
        live.delta(&run, turn, || Bytes::from_static(piece.as_bytes()));
    }
    let mut all = Vec::new();
    for _ in 0..6 {
        all.push(seen(&mut follow).await);
    }
    let order: Vec<&str> = all.iter().map(String::as_str).collect();
    assert_eq!(
        order,
        [
            "1 run.created",
            "delta x",
            "delta y",
            "2 run.turn.completed",
            "3 other",
            "delta z"
        ]
    );
}

#[tokio::test]
async fn a_slow_follower_loses_pieces_and_never_events() {
    let store = store();
    let live = Live::default();
    let run = made(&store, &["a"]).await;
    let mut follow = live.follow(Arc::clone(&store), &run, 0, LONG).with_pieces();
    for n in 0..(PIECES * 3) {
        live.delta(&run, 1, || Bytes::from(n.to_string()));
    }
    assert_eq!(seen(&mut follow).await, "1 a");
    let mut pieces = 0;
    while timeout(Duration::from_millis(50), follow.next()).await.is_ok() {
        pieces += 1;
    }
    assert!((1..=PIECES).contains(&pieces), "{pieces}");
}

#[tokio::test]
async fn who_stopped_following_leaves_nothing() {
    let store = store();
    let live = Live::default();
    let run = made(&store, &["a"]).await;
    drop(live.follow(Arc::clone(&store), &run, 0, LONG));
    live.committed(&run, 5);
    assert!(live.runs.lock().is_empty());
    for _ in 0..1000 {
        drop(live.follow(Arc::clone(&store), &RunId::random(), 0, LONG));
    }
    assert!(live.runs.lock().len() <= 128, "{}", live.runs.lock().len());
}

#[tokio::test]
async fn a_run_that_is_gone_keeps_nobody_waiting() {
    let store = store();
    let live = Live::default();
    let run = made(&store, &["a"]).await;
    let mut follow = live.follow(Arc::clone(&store), &run, 1, Duration::from_millis(1));
    assert!(
        timeout(Duration::from_millis(50), follow.next()).await.is_err(),
        "a run that is there is waited for"
    );
    let gone = RunId::random();
    let mut follow = live.follow(store, &gone, 0, Duration::from_millis(1));
    let problem = timeout(SOON, follow.next()).await.unwrap().unwrap_err();
    assert_eq!(problem.code, crate::runs::problem::Code::RunNotFound);
}
