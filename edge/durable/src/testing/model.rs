//! A naive model of runs and leases, and scripts of operations that a store and the model must answer alike.
//!
//! A script is plain bytes, so that any generator can make one and shrink it: four bytes are one operation.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Fixture;
use super::build::{
    LONG, SHORT, advance_loaded, at, create, decision_id, ended, head, lease_for, parked, payload, post, run,
};
use crate::ids::{Revision, RunId};
use crate::payload::Payload;
use crate::record::{CancelRequest, RunHead, Status, WaitingKind};
use crate::store::{
    Authority, Claim, Commit, Create, Created, IdempotencyKey, Lease, Loaded, Renewal, Store, StoreError,
};
use crate::time::Timestamp;

/// Runs that a script uses.
const RUNS: u8 = 4;

/// When a run can be claimed, as far as the model knows the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// In the past; a smaller number is longer ago.
    Past(i64),
    /// Since something was posted: after every `Past`.
    Woken,
    /// Not within the script.
    Far,
    Never,
}

#[derive(Debug)]
struct Run {
    head: RunHead,
    state: Payload,
    signal: u64,
    cancel: Option<CancelRequest>,
    due: Due,
    /// The incarnation that holds it.
    held_by: Option<u64>,
    /// The largest incarnation ever given out.
    fence: u64,
    /// The lives that have ended.
    ended: Vec<u32>,
}

#[derive(Debug)]
enum Slot {
    Absent,
    Deleted,
    Here(Box<Run>),
}

struct Model<'a> {
    fixture: &'a dyn Fixture,
    store: std::sync::Arc<dyn Store>,
    /// Makes ids, keys and the definition this script's own.
    case: &'a str,
    start: Timestamp,
    slots: Vec<Slot>,
    /// Every lease ever given out, live or not.
    handles: Vec<(usize, Lease)>,
    keys: BTreeMap<u8, (u8, RunId)>,
    /// Grows with every due time that a commit sets.
    order: i64,
}

/// Runs a script on the fixture's store and on the model. Several scripts may share one store when their `case` differs.
///
/// # Panics
/// When the two disagree.
pub async fn store_and_model_agree(fixture: &dyn Fixture, case: &str, script: &[[u8; 4]]) {
    let store = fixture.store();
    let mut model = Model {
        start: store.now().await.unwrap(),
        fixture,
        store,
        case,
        slots: (0..RUNS).map(|_| Slot::Absent).collect(),
        handles: Vec::new(),
        keys: BTreeMap::new(),
        order: 0,
    };
    for operation in script {
        model.step(*operation).await;
        model.check_runs().await;
    }
    model.check_rows().await;
}

impl Model<'_> {
    async fn step(&mut self, [op, a, b, c]: [u8; 4]) {
        let n = usize::from(a % RUNS);
        match op % 16 {
            0 | 1 => self.create(n, b, c).await,
            2 | 3 => self.acquire(n, b.is_multiple_of(4)).await,
            4 | 5 => self.claim(u32::from(b % 4) + 1, (c < 64).then_some(n)).await,
            6 => self.renew(b).await,
            7 => self.release(b).await,
            8..=12 => self.commit(n, b, c).await,
            13 | 14 => self.post(n, b).await,
            _ => self.delete(n).await,
        }
    }

    fn id(&self, n: usize) -> RunId {
        run(&format!("{} {n}", self.case))
    }

    fn due_at(&mut self, due: u8) -> (Due, Option<Timestamp>) {
        match due % 4 {
            0 | 1 => {
                self.order += 1;
                let time = at(self.start.as_millis() - 1_000_000 + self.order);
                (Due::Past(self.order), Some(time))
            }
            2 => (Due::Far, Some(self.start.plus(Duration::from_hours(24)))),
            _ => (Due::Never, None),
        }
    }

    fn here(&mut self, n: usize) -> &mut Run {
        match &mut self.slots[n] {
            Slot::Here(run) => run,
            gone @ (Slot::Absent | Slot::Deleted) => panic!("run {n} is {gone:?}"),
        }
    }

    /// That a lease is a new one, and notes it.
    fn granted(&mut self, n: usize, lease: &Lease, lives: bool) {
        let run = self.here(n);
        assert!(lease.incarnation > run.fence, "an old incarnation: {lease:?}");
        run.fence = lease.incarnation;
        run.held_by = lives.then_some(lease.incarnation);
        self.handles.push((n, lease.clone()));
    }

    async fn create(&mut self, n: usize, how: u8, due: u8) {
        let id = self.id(n);
        let (due, due_at) = self.due_at(due);
        let mut creation: Create = create(&id, self.store.now().await.unwrap());
        self.case.clone_into(&mut creation.head.definition.name);
        creation.due_at = due_at;
        creation.lease = how.is_multiple_of(2).then(|| lease_for("creator", LONG));
        let key = (how / 2).is_multiple_of(2).then_some((how / 4) % 3);
        let request = (how / 16) % 2;
        creation.idempotency = key.map(|key| IdempotencyKey {
            scope: self.case.to_owned(),
            key: key.to_string(),
            request: [request; 32],
        });
        let answer = self.store.create(creation.clone()).await;
        if let Some((made_with, made)) = key.and_then(|key| self.keys.get(&key)) {
            let run = made.clone();
            let expected = if *made_with == request {
                Created::Replayed { run }
            } else {
                Created::KeyConflict { run }
            };
            assert_eq!(answer.unwrap(), expected);
            return;
        }
        match &self.slots[n] {
            Slot::Here(_) => assert_eq!(answer.unwrap(), Created::Exists),
            Slot::Deleted => expect(answer, &["deleted"]),
            Slot::Absent => {
                let Created::New { lease, .. } = answer.unwrap() else {
                    panic!("not new");
                };
                assert_eq!(lease.is_some(), creation.lease.is_some());
                if let Some(key) = key {
                    self.keys.insert(key, (request, id));
                }
                self.slots[n] = Slot::Here(Box::new(Run {
                    head: creation.head,
                    state: creation.state,
                    signal: 0,
                    cancel: None,
                    due,
                    held_by: None,
                    fence: 0,
                    ended: Vec::new(),
                }));
                if let Some(lease) = lease {
                    self.granted(n, &lease, true);
                }
            }
        }
    }

    /// With `lost`, the lease has expired by the time the next operation comes.
    async fn acquire(&mut self, n: usize, lost: bool) {
        let ttl = if lost { SHORT } else { LONG };
        let answer = self.store.acquire(&self.id(n), lease_for("worker", ttl)).await;
        match &self.slots[n] {
            Slot::Absent => expect(answer, &["not_found"]),
            Slot::Deleted => expect(answer, &["deleted"]),
            Slot::Here(run) if run.held_by.is_some() => expect(answer, &["busy"]),
            Slot::Here(run) => {
                let acquired = answer.unwrap();
                assert_eq!(acquired.loaded.head, run.head);
                assert_eq!(acquired.loaded.lease.as_ref(), Some(&acquired.lease));
                self.granted(n, &acquired.lease, !lost);
                if lost {
                    self.fixture.pass(SHORT).await;
                }
            }
        }
    }

    async fn claim(&mut self, limit: u32, except: Option<usize>) {
        let claimed = self
            .store
            .claim(Claim {
                lease: lease_for("claimer", LONG),
                definitions: vec![(super::build::DEFINITION.0.to_owned(), self.case.to_owned())],
                except: except.iter().map(|n| self.id(*n)).collect(),
                limit,
            })
            .await
            .unwrap();
        assert!(claimed.quarantined.is_empty(), "{:?}", claimed.quarantined);
        let mut claimable: BTreeMap<RunId, (Due, usize)> = BTreeMap::new();
        for (n, slot) in self.slots.iter().enumerate() {
            if let Slot::Here(run) = slot
                && run.held_by.is_none()
                && except != Some(n)
                && run.due <= Due::Woken
            {
                claimable.insert(self.id(n), (run.due, n));
            }
        }
        let expected = claimable.len().min(limit as usize);
        assert_eq!(claimed.runs.len(), expected, "of {claimable:?}");
        let mut last = Due::Past(0);
        for acquired in claimed.runs {
            let Some((due, n)) = claimable.remove(&acquired.lease.run) else {
                panic!("not claimable: {}", acquired.lease.run);
            };
            assert!(due >= last, "{} out of order", acquired.lease.run);
            last = due;
            assert_eq!(acquired.loaded.head, self.here(n).head);
            self.granted(n, &acquired.lease, true);
        }
        assert!(
            claimable.values().all(|(due, _)| *due >= last),
            "longer due: {claimable:?}"
        );
    }

    fn handle(&self, pick: u8) -> Option<(usize, Lease)> {
        let len = self.handles.len().max(1);
        self.handles.get(usize::from(pick) % len).cloned()
    }

    fn is_held_by(&self, n: usize, lease: &Lease) -> bool {
        matches!(&self.slots[n], Slot::Here(run) if run.held_by == Some(lease.incarnation))
    }

    async fn renew(&mut self, pick: u8) {
        let Some((n, lease)) = self.handle(pick) else {
            return;
        };
        let lives = self.is_held_by(n, &lease);
        let answer = self.store.renew(vec![lease], LONG).await.unwrap();
        match answer[..] {
            [Renewal::Live { signal, .. }] => {
                assert!(lives, "renewed what was lost");
                assert_eq!(signal, self.here(n).signal);
            }
            [Renewal::Lost] => assert!(!lives, "lost what was live"),
            _ => panic!("{answer:?}"),
        }
    }

    async fn release(&mut self, pick: u8) {
        let Some((n, lease)) = self.handle(pick) else {
            return;
        };
        let lives = self.is_held_by(n, &lease);
        let answer = self.store.release(lease).await;
        if lives {
            answer.unwrap();
            self.here(n).held_by = None;
        } else {
            expect(answer, &["lease_lost", "deleted", "not_found"]);
        }
    }

    fn commit_of(&mut self, n: usize, how: u8, detail: u8, now: Timestamp) -> (Commit, Due) {
        let (base, state, signal) = match &self.slots[n] {
            Slot::Here(run) => (run.head.clone(), run.state.clone(), run.signal),
            Slot::Absent | Slot::Deleted => {
                let state = payload("never stored");
                (head(&self.id(n), &state, now), state, 0)
            }
        };
        let loaded = Loaded {
            head: base,
            state,
            seal: [0; 32],
            inbox: crate::record::Inbox::default(),
            lease: None,
            now,
        };
        // Mostly the newest handle on this run; now and then any handle on it, or none.
        let mut handles = self.handles.iter().filter(|(run, _)| *run == n);
        let of_run: Vec<Lease> = handles.by_ref().map(|(_, lease)| lease.clone()).collect();
        let lease = match how % 8 {
            0 => None,
            1 => of_run.get(usize::from(detail) % of_run.len().max(1)).cloned(),
            _ => of_run.last().cloned(),
        };
        let authority = lease.map_or(Authority::Idle, Authority::Lease);
        let leased = matches!(authority, Authority::Lease(_));
        let mut commit = advance_loaded(&loaded, authority);
        let (mut due, due_at) = self.due_at(detail / 16);
        commit.due_at = due_at;
        match detail % 8 {
            0 => commit = parked(commit, WaitingKind::Event, None, signal),
            1 => {
                let far = self.start.plus(Duration::from_hours(24));
                commit = parked(commit, WaitingKind::Timer, Some(far), signal);
                due = Due::Far;
            }
            2 | 3 => commit = ended(commit, Status::Succeeded),
            _ => commit.release = leased && detail.is_multiple_of(2),
        }
        if commit.due_at.is_none() {
            due = Due::Never;
        }
        match (how / 8) % 8 {
            0 => commit.guard.revision = loaded.head.revision.next().unwrap(),
            1 => commit.guard.revision = Revision::FIRST,
            2 => commit.guard.signal = Some(signal + 1),
            3 => commit.guard.signal = Some(signal),
            // A resume: the next life.
            4 | 5 => {
                commit.head.life += 1;
                for event in &mut commit.events {
                    event.life += 1;
                }
            }
            _ => {}
        }
        (commit, due)
    }

    async fn commit(&mut self, n: usize, how: u8, detail: u8) {
        let now = self.store.now().await.unwrap();
        let (commit, due) = self.commit_of(n, how, detail, now);
        let answer = self.store.commit(commit.clone()).await;
        let run = match &mut self.slots[n] {
            Slot::Absent => return expect(answer, &["not_found"]),
            Slot::Deleted => return expect(answer, &["deleted"]),
            Slot::Here(run) => run,
        };
        let mut refusals = Vec::new();
        if commit.guard.revision != run.head.revision {
            refusals.push("conflict");
        }
        if commit.guard.signal.is_some_and(|seen| seen != run.signal) {
            refusals.push("conflict");
        }
        match (&commit.guard.authority, run.held_by) {
            (Authority::Idle, Some(_)) => refusals.push("busy"),
            (Authority::Lease(lease), held_by) if held_by != Some(lease.incarnation) => {
                refusals.push("lease_lost");
            }
            (Authority::Idle | Authority::Lease(_), _) => {}
        }
        let terminal = commit.events.iter().any(|event| event.terminal);
        if refusals.is_empty() && terminal && run.ended.contains(&commit.head.life) {
            refusals.push("duplicate");
        }
        if !refusals.is_empty() {
            return expect(answer, &refusals);
        }
        let committed = answer.unwrap();
        assert_eq!(committed.revision, run.head.revision.next().unwrap());
        run.signal += u64::from(commit.settles());
        assert_eq!(committed.signal, run.signal);
        run.head = commit.head;
        run.head.revision = committed.revision;
        run.state = commit.state;
        run.due = due;
        if terminal {
            run.ended.push(run.head.life);
        }
        if commit.release {
            run.held_by = None;
        }
    }

    async fn post(&mut self, n: usize, how: u8) {
        let seen = match &self.slots[n] {
            Slot::Here(run) => run.signal,
            Slot::Absent | Slot::Deleted => 0,
        };
        let stale = how.is_multiple_of(5);
        let mut posted = post(&self.id(n), if stale { seen + 1 } else { seen });
        posted.wake = how.is_multiple_of(2);
        posted.cancel = how.is_multiple_of(3).then(|| CancelRequest {
            id: decision_id(&format!("cancel {how}")),
            reason: String::new(),
            by: None,
            requested_at: self.start,
        });
        let answer = self.store.post(posted.clone()).await;
        match &mut self.slots[n] {
            Slot::Absent => expect(answer, &["not_found"]),
            Slot::Deleted => expect(answer, &["deleted"]),
            Slot::Here(_) if stale => expect(answer, &["conflict"]),
            Slot::Here(run) => {
                run.signal += 1;
                assert_eq!(answer.unwrap(), run.signal);
                if run.cancel.is_none() {
                    run.cancel = posted.cancel;
                }
                if posted.wake && !run.head.status.is_terminal() {
                    run.due = Due::Woken;
                }
            }
        }
    }

    async fn delete(&mut self, n: usize) {
        let answer = self.store.delete_if_idle(&self.id(n)).await;
        match &self.slots[n] {
            Slot::Absent => expect(answer, &["not_found"]),
            Slot::Deleted => expect(answer, &["deleted"]),
            Slot::Here(run) => {
                let mut refusals = Vec::new();
                if run.held_by.is_some() {
                    refusals.push("busy");
                }
                if !run.head.status.is_terminal() {
                    refusals.push("not_idle");
                }
                if refusals.is_empty() {
                    answer.unwrap();
                    self.slots[n] = Slot::Deleted;
                } else {
                    expect(answer, &refusals);
                }
            }
        }
    }

    /// The heads, inboxes and leases.
    async fn check_runs(&self) {
        for (n, slot) in self.slots.iter().enumerate() {
            let answer = self.store.load(&self.id(n)).await;
            match slot {
                Slot::Absent => expect(answer, &["not_found"]),
                Slot::Deleted => expect(answer, &["deleted"]),
                Slot::Here(run) => {
                    let loaded = answer.unwrap();
                    assert_eq!(loaded.head, run.head);
                    assert_eq!(loaded.state, run.state);
                    assert_eq!(loaded.inbox.signal, run.signal);
                    assert_eq!(loaded.inbox.cancel, run.cancel);
                    assert_eq!(loaded.lease.map(|lease| lease.incarnation), run.held_by);
                }
            }
        }
    }

    /// Histories, event logs and the index, once at the end.
    async fn check_rows(&self) {
        let due = self.store.due(Timestamp::MAX, None, 100_000).await.unwrap();
        for (n, slot) in self.slots.iter().enumerate() {
            let id = self.id(n);
            let found = due.iter().find(|due| due.run == id);
            let Slot::Here(run) = slot else {
                assert_eq!(found, None);
                continue;
            };
            assert_eq!(found.is_some(), run.due != Due::Never, "{:?}", run.due);
            if let Some(found) = found {
                assert_eq!(found.leased, run.held_by.is_some());
                assert_eq!(found.due_at > self.start.plus(LONG), run.due == Due::Far);
            }
            let history = self.store.history(&id, None, 1_000).await.unwrap();
            let revisions: Vec<u64> = history.iter().map(|c| c.revision.get()).collect();
            let expected: Vec<u64> = (1..=run.head.revision.get()).rev().collect();
            assert_eq!(revisions, expected);
            let events = self.store.events(&id, 0, 1_000).await.unwrap();
            let seqs: Vec<u64> = events.iter().map(|event| event.seq).collect();
            let expected: Vec<u64> = (1..=run.head.event_seq).collect();
            assert_eq!(seqs, expected);
            let ends = events.iter().filter(|event| event.terminal).count();
            assert_eq!(ends, run.ended.len());
        }
    }
}

#[track_caller]
fn expect<T: std::fmt::Debug>(answer: Result<T, StoreError>, kinds: &[&str]) {
    match answer {
        Ok(done) => panic!("expected one of {kinds:?}, but it was done: {done:?}"),
        Err(error) => assert!(kinds.contains(&error.kind()), "{kinds:?}, not {error}"),
    }
}

/// One `#[test]`: that many random scripts on the store of one fixture, which is made once. The calling crate needs `proptest`.
#[macro_export]
macro_rules! model_test {
    ($cases:expr, $fixture:expr) => {
        #[test]
        fn store_and_model_agree() {
            use proptest::prelude::*;
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            let fixture = runtime.block_on(async { $fixture });
            let case = std::cell::Cell::new(0);
            let config = ProptestConfig {
                cases: $cases,
                failure_persistence: None,
                ..ProptestConfig::default()
            };
            proptest::test_runner::TestRunner::new(config)
                .run(
                    &proptest::collection::vec(any::<[u8; 4]>(), 1..80),
                    |script| {
                        case.set(case.get() + 1);
                        let name = format!("script {}", case.get());
                        runtime.block_on($crate::testing::model::store_and_model_agree(
                            &fixture, &name, &script,
                        ));
                        Ok(())
                    },
                )
                .unwrap_or_else(|failure| panic!("{failure}"));
        }
    };
}
