//! What must hold of a run that is over, whatever happened to its workers, its store and those around it.

use std::collections::{BTreeMap, BTreeSet};

use iop_durable::ids::{Revision, RunId};
use iop_durable::record::{
    ActivityRecord, ActivityState, AttemptClass, Effect, EventName, EventRecord, Origin, Outcome, Reason,
    Status, StepRecord, WaitStatus,
};
use iop_durable::runner::idempotency_key;
use iop_durable::store::{Loaded, Store};

use super::graph::{CALLS, EFFECTS, FAILURES, State, TRAIL};
use super::ledger::{Ledger, Line};
use super::world::answers;

/// Everything the store has of a run, verified by reading it.
pub struct Found {
    pub loaded: Loaded,
    pub events: Vec<EventRecord>,
    pub steps: Vec<StepRecord>,
    pub activities: Vec<ActivityRecord>,
    pub lines: Vec<Line>,
}

/// What runs met on their way.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Met {
    pub runs: usize,
    /// Attempts whose worker was lost.
    pub abandoned: usize,
    pub ambiguous: usize,
    /// Unsafe calls an operator found applied, and found not applied.
    pub completed_by_hand: usize,
    pub failed_by_hand: usize,
}

impl Met {
    pub fn of(found: &Found) -> Self {
        let by_hand = |state: ActivityState| {
            let settled = |a: &&ActivityRecord| a.origin == Some(Origin::Manual) && a.state == state;
            found.activities.iter().filter(settled).count()
        };
        let attempts = found.activities.iter().flat_map(|a| &a.attempts);
        let ambiguous = EventName::Ambiguous.as_str();
        Self {
            runs: 1,
            abandoned: attempts.filter(|a| a.class == AttemptClass::Abandoned).count(),
            ambiguous: found.events.iter().filter(|e| e.name == ambiguous).count(),
            completed_by_hand: by_hand(ActivityState::Completed),
            failed_by_hand: by_hand(ActivityState::Failed),
        }
    }
}

impl std::ops::AddAssign for Met {
    fn add_assign(&mut self, other: Self) {
        self.runs += other.runs;
        self.abandoned += other.abandoned;
        self.ambiguous += other.ambiguous;
        self.completed_by_hand += other.completed_by_hand;
        self.failed_by_hand += other.failed_by_hand;
    }
}

/// Checks a run that is over and gives what was read. `what` says which case it is.
pub async fn check_run(what: &str, store: &dyn Store, ledger: &dyn Ledger, run: &RunId) -> Found {
    let found = read(store, ledger, run).await;
    let head = &found.loaded.head;
    assert!(head.status.is_terminal(), "{what}: {head:?}");
    assert_eq!(found.loaded.lease, None, "{what}: no lease is left");
    assert_eq!(found.loaded.inbox.quarantine, None, "{what}");
    assert_eq!((head.open_activities, head.armed_waits), (0, 0), "{what}");
    assert_eq!(head.waiting, None, "{what}");
    assert_eq!(head.cursor.is_some(), head.status == Status::Failed, "{what}");
    check_events(what, &found);
    check_history(what, store, &found).await;
    check_steps(what, &found);
    check_activities(what, &found);
    check_commits(what, &found);
    let armed = store.waits(run).await.unwrap();
    let armed = armed.iter().filter(|wait| wait.status == WaitStatus::Armed);
    assert_eq!(armed.count(), 0, "{what}: no wait is armed");
    let due = store.due(found.loaded.now, None, 10_000).await.unwrap();
    assert!(due.iter().all(|due| due.run != *run), "{what}: it is not due");
    found
}

async fn read(store: &dyn Store, ledger: &dyn Ledger, run: &RunId) -> Found {
    let mut events: Vec<EventRecord> = Vec::new();
    loop {
        // Small pages: the cursor must lose and repeat nothing.
        let page = store
            .events(run, events.last().map_or(0, |e| e.seq), 7)
            .await
            .unwrap();
        if page.is_empty() {
            break;
        }
        events.extend(page);
    }
    Found {
        loaded: store.load(run).await.unwrap(),
        events,
        steps: store.steps(run, 0, 10_000).await.unwrap(),
        activities: store.activities(run, None, 10_000).await.unwrap(),
        lines: ledger.lines(run),
    }
}

/// Numbered from 1 without gaps; one terminal event per life, its last; the last one has the head's outcome, byte for byte.
fn check_events(what: &str, found: &Found) {
    let head = &found.loaded.head;
    let seqs: Vec<u64> = found.events.iter().map(|e| e.seq).collect();
    assert_eq!(
        seqs,
        (1..=head.event_seq).collect::<Vec<_>>(),
        "{what}: event numbers"
    );
    for life in 1..=head.life {
        let of_life: Vec<&EventRecord> = found.events.iter().filter(|e| e.life == life).collect();
        let terminal = of_life.iter().filter(|e| e.terminal).count();
        assert_eq!(terminal, 1, "{what}: terminal events of life {life}");
        assert!(
            of_life.last().unwrap().terminal,
            "{what}: the terminal event is the last"
        );
    }
    let lives: Vec<u32> = found.events.iter().map(|e| e.life).collect();
    assert!(lives.is_sorted(), "{what}: lives of events {lives:?}");
    let last = found.events.last().unwrap();
    let name = EventName::terminal(head.status).unwrap();
    assert_eq!(
        (last.life, last.name.as_ref()),
        (head.life, name.as_str()),
        "{what}"
    );
    let outcome = String::from_utf8(head.outcome.clone().unwrap().to_vec()).unwrap();
    let data = String::from_utf8(last.data.to_vec()).unwrap();
    assert_eq!(
        data,
        format!("{{\"outcome\":{outcome}}}"),
        "{what}: event and outcome"
    );
}

/// Every revision is listed and opens; the newest is the head.
async fn check_history(what: &str, store: &dyn Store, found: &Found) {
    let head = &found.loaded.head;
    let mut revisions = Vec::new();
    let mut before: Option<Revision> = None;
    loop {
        let page = store.history(&head.id, before, 9).await.unwrap();
        let Some(last) = page.last() else { break };
        before = Some(last.revision);
        for listed in page {
            let opened = store.checkpoint(&head.id, listed.revision).await.unwrap();
            assert_eq!(opened.digest, listed.digest, "{what}");
            let state = opened.state.unwrap();
            assert_eq!(*state.digest(), listed.state_digest, "{what}");
            if listed.revision == head.revision {
                let stood = (opened.status, &opened.cursor, opened.activation);
                let stands = (head.status, &head.cursor, head.activation);
                assert_eq!(stood, stands, "{what}: the newest checkpoint is the head");
                assert_eq!(state, found.loaded.state, "{what}");
            }
            revisions.push(listed.revision.get());
        }
    }
    let expected: Vec<u64> = (1..=head.revision.get()).rev().collect();
    assert_eq!(revisions, expected, "{what}: revisions");
}

/// Each activation up to the last one is over once.
fn check_steps(what: &str, found: &Found) {
    let activations: Vec<u64> = found.steps.iter().map(|s| s.activation).collect();
    let expected: Vec<u64> = (1..=found.loaded.head.activation).collect();
    assert_eq!(activations, expected, "{what}: steps {:?}", found.steps);
    let completed = EventName::StepCompleted.as_str();
    let told = found.events.iter().filter(|e| e.name == completed).count();
    // A step that ended a life is told again when it is done.
    let again = found.loaded.head.life as usize - 1;
    assert_eq!(
        told,
        found.steps.len() + again,
        "{what}: events of completed steps"
    );
}

/// The journal and the ledger say the same.
fn check_activities(what: &str, found: &Found) {
    let mut keys = BTreeSet::new();
    for record in &found.activities {
        let key = idempotency_key(&record.run, record.node.as_str(), record.activation, &record.key);
        check_activity(&format!("{what}: {key}"), record, &key, &found.lines);
        keys.insert(key);
    }
    for line in &found.lines {
        if let Line::Call { key, effect, .. } = line {
            let known = keys.contains(key) || effect == Effect::ReadOnly.as_str();
            assert!(known, "{what}: {key} was called and is not in the journal");
        }
    }
}

fn check_activity(what: &str, record: &ActivityRecord, key: &str, lines: &[Line]) {
    assert!(!record.state.is_open(), "{what}: {record:?}");
    let numbers: Vec<u32> = record.attempts.iter().map(|a| a.n).collect();
    let expected: Vec<u32> = (1..).take(numbers.len()).collect();
    assert_eq!(numbers, expected, "{what}: attempts");
    let incarnations: Vec<u64> = record.attempts.iter().map(|a| a.incarnation).collect();
    assert!(incarnations.is_sorted(), "{what}: {incarnations:?}");
    // A completed attempt is the last one.
    let completed = record
        .attempts
        .iter()
        .position(|a| a.class == AttemptClass::Completed);
    assert!(
        completed.is_none_or(|at| at + 1 == record.attempts.len()),
        "{what}: {record:?}"
    );

    let applied = answers(lines, key);
    let mut attempts = BTreeSet::new();
    for line in lines {
        let Line::Call {
            key: called,
            effect,
            attempt,
            input,
            intent,
            incarnation,
            ..
        } = line
        else {
            continue;
        };
        if called != key {
            continue;
        }
        assert_eq!(effect, record.effect.as_str(), "{what}");
        assert_eq!(
            input.as_bytes(),
            record.input.bytes(),
            "{what}: the input never changes"
        );
        if record.effect == Effect::ReadOnly {
            continue;
        }
        assert_ne!(
            *intent,
            Some(false),
            "{what}: attempt {attempt} had no committed intent: {lines:#?}"
        );
        assert!(
            attempts.insert(*attempt),
            "{what}: attempt {attempt} was sent twice: {lines:#?}"
        );
        let recorded = record.attempts.iter().find(|a| a.n == *attempt);
        let recorded = recorded.unwrap_or_else(|| panic!("{what}: attempt {attempt} is not in the journal"));
        assert!(
            incarnation.is_none_or(|i| i == recorded.incarnation),
            "{what}: attempt {attempt} was sent under another lease"
        );
    }
    match record.effect {
        Effect::ReadOnly => {}
        Effect::Idempotent => assert!(applied.len() <= 1, "{what}: applied {} times", applied.len()),
        Effect::Unsafe => {
            assert!(attempts.len() <= 1, "{what}: called {} times", attempts.len());
            assert_eq!(
                record.attempts.len(),
                1,
                "{what}: an unsafe call is never repeated"
            );
        }
    }
    match (record.state, &record.output) {
        (ActivityState::Completed, Some(output)) => {
            let output = String::from_utf8(output.bytes().to_vec()).unwrap();
            assert!(applied.contains(&output), "{what}: {output} is nobody's answer");
        }
        (ActivityState::Failed, None) if record.origin == Some(Origin::Manual) => {
            assert_eq!(applied, Vec::<String>::new(), "{what}: resolved as not applied");
        }
        other => assert_eq!(other.0, ActivityState::Failed, "{what}: {record:?}"),
    }
}

/// Each revision was written once, and never by an older lease than the one before.
fn check_commits(what: &str, found: &Found) {
    let mut seen = BTreeMap::new();
    for line in &found.lines {
        if let Line::Commit {
            revision,
            incarnation,
        } = line
        {
            let first = seen.insert(*revision, *incarnation).is_none();
            assert!(first, "{what}: revision {revision} was written twice");
        }
    }
    let leases: Vec<u64> = seen.values().filter_map(|incarnation| *incarnation).collect();
    assert!(leases.is_sorted(), "{what}: leases by revision {seen:?}");
    let last = found.loaded.head.revision.get();
    assert!(seen.keys().all(|revision| *revision <= last), "{what}: {seen:?}");
}

/// What more must hold of a run of `everything`: it succeeded, each node and each effect once, the model's answer recorded
/// before its tools ran.
pub fn check_everything(what: &str, found: &Found) {
    let head = &found.loaded.head;
    assert_eq!(head.status, Status::Succeeded, "{what}: {:?}", head.outcome);
    // The failure of the last call ended the first life, unless it was lost with its worker.
    let notify = found
        .activities
        .iter()
        .find(|a| a.key.as_str() == "notify")
        .unwrap();
    let failed = notify
        .attempts
        .iter()
        .filter(|a| a.class == AttemptClass::Failed)
        .count();
    assert_eq!(head.life as usize, 1 + failed, "{what}: {notify:?}");
    let state: State = serde_json::from_slice(found.loaded.state.bytes()).unwrap();
    assert_eq!(state.trail, TRAIL, "{what}");
    assert_eq!(head.budgets["turns"].used, 1, "{what}: drawn once");

    let outcome = Outcome::decode(&head.outcome.clone().unwrap()).unwrap();
    let effects: Vec<String> = outcome
        .effects
        .iter()
        .map(|text| serde_json::from_str(text.get()).unwrap())
        .collect();
    assert_eq!(effects, EFFECTS, "{what}: typed effects");
    assert_eq!(
        outcome.output.unwrap().get().as_bytes(),
        found.loaded.state.bytes(),
        "{what}"
    );

    let called: Vec<&str> = state.answers.keys().map(String::as_str).collect();
    let expected: BTreeSet<&str> = CALLS.into_iter().collect();
    assert_eq!(called, expected.into_iter().collect::<Vec<_>>(), "{what}");
    for (name, answer) in &state.answers {
        check_answer(what, found, name, answer);
    }
    let fails = found
        .lines
        .iter()
        .filter(|line| matches!(line, Line::Fail { .. }));
    assert_eq!(fails.count(), FAILURES + 1, "{what}: failures that were answered");
    check_tools(what, found, &state.answers["model"]);
}

/// What more must hold of a run of `everything` that was cancelled after its second step: that far and no further, each effect
/// once.
pub fn check_cancelled(what: &str, found: &Found, trail: &[&str]) {
    let head = &found.loaded.head;
    assert_eq!((head.status, head.life), (Status::Cancelled, 1), "{what}");
    let outcome = Outcome::decode(&head.outcome.clone().unwrap()).unwrap();
    assert_eq!(outcome.reason, Reason::Cancelled, "{what}");
    let state: State = serde_json::from_slice(found.loaded.state.bytes()).unwrap();
    assert_eq!(state.trail, trail, "{what}");
    for (name, answer) in &state.answers {
        check_answer(what, found, name, answer);
    }
}

/// A state's answer is the output of the one completed call of that name, and that call had its effect once.
fn check_answer(what: &str, found: &Found, name: &str, answer: &str) {
    let of_name = |record: &&ActivityRecord| {
        let key = record.key.as_str();
        key == name || key.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'))
    };
    let records: Vec<&ActivityRecord> = found.activities.iter().filter(of_name).collect();
    let completed: Vec<&&ActivityRecord> = records
        .iter()
        .filter(|r| r.state == ActivityState::Completed)
        .collect();
    assert_eq!(completed.len(), 1, "{what}: {name}: {records:?}");
    let record = completed[0];
    assert_eq!(
        record.output.as_ref().unwrap().bytes(),
        answer.as_bytes(),
        "{what}: {name}"
    );
    let applied: usize = records
        .iter()
        .map(|r| {
            answers(
                &found.lines,
                &idempotency_key(&r.run, r.node.as_str(), r.activation, &r.key),
            )
            .len()
        })
        .sum();
    match record.effect {
        Effect::ReadOnly => {}
        Effect::Idempotent | Effect::Unsafe => assert_eq!(applied, 1, "{what}: {name} had its effect once"),
    }
}

/// Tools get the recorded answer of the model, which is stored by then.
fn check_tools(what: &str, found: &Found, model: &str) {
    for line in &found.lines {
        let Line::Call {
            key,
            input,
            completed,
            ..
        } = line
        else {
            continue;
        };
        let tool = key.rsplit('/').next().unwrap();
        if ["reserve", "charge.1", "charge.2", "lookup"].contains(&tool) {
            assert_eq!(input, model, "{what}: {key}");
            let stored = |completed: &Vec<String>| completed.iter().any(|key| key == "model");
            assert!(
                completed.as_ref().is_none_or(stored),
                "{what}: {key} ran before the model's answer was stored"
            );
        }
    }
}
