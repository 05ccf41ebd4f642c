use super::*;
use crate::record::{Outcome, Reason};
use crate::testing::build::{self, at};

fn full_head() -> (RunHead, Payload) {
    let state = Payload::new("state");
    let mut head = build::head(&build::run("r"), &state, at(1_000));
    head.lineage.parent = Some(build::run("parent"));
    head.lineage.origin = Some("step".to_owned());
    head.life = 2;
    head.status = Status::Waiting;
    head.activation = 7;
    head.attempt = 3;
    head.recoveries = 1;
    head.incarnation = 5;
    head.budgets = BTreeMap::from([("tokens".to_owned(), Budget { used: 5, limit: 9 })]);
    head.waiting = Some(Waiting {
        reason: "why".to_owned(),
        due_at: Some(at(9_000)),
        on: vec![crate::record::WaitingOn {
            kind: WaitingKind::Timer,
            id: "w".to_owned(),
            node: build::node("n"),
            key: "k".to_owned(),
        }],
    });
    head.outcome = Some(Outcome::new(Status::Failed, Reason::Error).encode().unwrap());
    head.owner = Some("somebody".to_owned());
    head.deadline = Some(at(8_000));
    head.event_seq = 12;
    head.open_activities = 1;
    head.armed_waits = 2;
    head.effects = 3;
    head.traceparent = Some("00-0-0-01".to_owned());
    head.updated_at = at(2_000);
    (head, state)
}

fn head_row() -> HeadRow {
    let (head, state) = full_head();
    HeadRow::seal(&head, &state, head.revision).unwrap()
}

fn wait_row() -> WaitRow {
    let mut wait = build::wait(&build::run("r"), 3, "w", "about", at(1_000));
    wait.deadline = Some(at(5_000));
    WaitRow::seal(&build::delivered(wait, "d", Payload::new("what came"), at(2_000))).unwrap()
}

fn activity_row() -> ActivityRow {
    let activity = build::activity(&build::run("r"), 3, "a");
    ActivityRow::seal(&build::completed(activity, Payload::new("output"), at(2_000))).unwrap()
}

/// The kind of an answer.
fn kind<T>(answer: Result<T, StoreError>) -> &'static str {
    answer.map_or_else(|error| error.kind(), |_| "whole")
}

#[test]
fn a_head_comes_back_whole() {
    let (mut head, state) = full_head();
    let revision = Revision::new(41).unwrap();
    let row = HeadRow::seal(&head, &state, revision).unwrap();
    let (opened, seal) = row.open("r").unwrap();
    head.revision = revision;
    assert_eq!(opened, head);
    assert_eq!(seal, seal_of(&head, &state).unwrap());
}

#[test]
fn every_column_of_a_head_is_sealed() {
    let changes: [fn(&mut HeadRow); 24] = [
        |row| row.kind.push('x'),
        |row| row.definition.push('x'),
        |row| row.status = "queued".to_owned(),
        |row| row.cursor = "end".to_owned(),
        |row| row.cursor.clear(),
        |row| row.activation += 1,
        |row| row.revision += 1,
        |row| row.parent_id = None,
        |row| row.parent_id = Some(String::new()),
        |row| row.root_id.push('x'),
        |row| row.waiting_kind = None,
        |row| row.waiting_kind = Some("retry".to_owned()),
        |row| row.owner = None,
        |row| row.owner = Some("somebody else".to_owned()),
        |row| row.deadline = None,
        |row| row.deadline = Some(8_001),
        |row| row.state.digest = [0; 32],
        |row| row.budgets = Bytes::from_static(b"{}"),
        |row| row.outcome = None,
        |row| row.outcome = Some(Bytes::new()),
        |row| row.body = row.body.slice(..row.body.len() - 1),
        |row| row.created_at += 1,
        |row| row.updated_at += 1,
        |row| row.seal = None,
    ];
    assert_eq!(kind(head_row().open("r")), "whole");
    for (n, change) in changes.iter().enumerate() {
        let mut row = head_row();
        change(&mut row);
        assert_eq!(kind(row.open("r")), "corrupt", "change {n}");
    }
    // What stands beside a column moves nowhere: the fields are length-prefixed.
    let mut row = head_row();
    row.kind = format!("{}{}", row.kind, &row.definition[..1]);
    row.definition.remove(0);
    assert_eq!(kind(row.open("r")), "corrupt");
}

/// Rows that were written when no head had an owner or an incarnation: their bytes are what is sealed, and what a head without
/// them has.
#[test]
fn a_head_without_an_owner_is_what_it_was_before_there_were_owners() {
    let (mut head, state) = full_head();
    head.owner = None;
    head.incarnation = 0;
    head.commit_id = Uuid::nil();
    head.metadata.clear();
    let row = HeadRow::seal(&head, &state, head.revision).unwrap();
    let body = "{\"definition_version\":3,\"definition_digest\":\"sha256:00\",\"origin\":\"step\",\"life\":2,\"attempt\":3,\
                \"recoveries\":1,\"metadata\":{},\"waiting\":{\"reason\":\"why\",\"due_at\":9000,\"on\":[{\"kind\":\"timer\",\
                \"id\":\"w\",\"node\":\"n\",\"key\":\"k\"}]},\"event_seq\":12,\"open_activities\":1,\"armed_waits\":2,\
                \"effects\":3,\"traceparent\":\"00-0-0-01\",\"commit_id\":\"00000000-0000-0000-0000-000000000000\"}";
    assert_eq!(std::str::from_utf8(&row.body).unwrap(), body);
    let (opened, seal) = row.open("r").unwrap();
    assert_eq!(seal, seal_of(&opened, &state).unwrap());
}

/// The kind of a wait stands in its body; the column only files it.
#[test]
fn the_column_of_a_waits_kind_may_be_missing_or_wrong() {
    for filed in [None, Some("approval".to_owned())] {
        let mut row = wait_row();
        assert_eq!(row.kind.as_deref(), Some("event"));
        row.kind = filed;
        assert_eq!(row.open("r", None, None).unwrap().kind, WaitingKind::Event);
    }
}

#[test]
fn a_row_of_another_run_is_corrupt() {
    assert_eq!(kind(head_row().open("other")), "corrupt");
    let mut copied = head_row();
    copied.run_id = "other".to_owned();
    assert_eq!(kind(copied.open("other")), "corrupt");
    assert_eq!(kind(CheckpointRow::of(&head_row()).open("other")), "corrupt");
    assert_eq!(kind(activity_row().open("other", None, None)), "corrupt");
    assert_eq!(kind(wait_row().open("other", None, None)), "corrupt");
}

#[test]
fn a_newer_schema_is_told_apart_from_corruption() {
    let with = |version| {
        let mut row = head_row();
        row.schema_version = version;
        row.open("r")
    };
    let known = SCHEMA_VERSION;
    assert!(matches!(
        with(i64::from(known) + 1),
        Err(StoreError::SchemaUnsupported { found, known: k }) if (found, k) == (known + 1, known)
    ));
    for version in [0, -1, i64::MIN, i64::MAX] {
        assert_eq!(kind(with(version)), "corrupt", "{version}");
    }
}

#[test]
fn every_column_of_a_checkpoint_is_sealed() {
    let row = || CheckpointRow::of(&head_row());
    let opened = row().open("r").unwrap();
    let (head, state) = full_head();
    assert_eq!(opened.state_digest, *state.digest());
    assert_eq!(
        (opened.status, opened.cursor, opened.created_at),
        (head.status, head.cursor, head.updated_at)
    );
    let changes: [fn(&mut CheckpointRow); 7] = [
        |row| row.revision += 1,
        |row| row.status = "queued".to_owned(),
        |row| row.cursor = "end".to_owned(),
        |row| row.activation += 1,
        |row| row.state.digest = [0; 32],
        |row| row.created_at += 1,
        |row| row.seal = None,
    ];
    for (n, change) in changes.iter().enumerate() {
        let mut changed = row();
        change(&mut changed);
        assert_eq!(kind(changed.open("r")), "corrupt", "change {n}");
    }
    // A pruned one has lost its bytes, not its identity.
    let mut pruned = row();
    pruned.pruned = true;
    pruned.state.inline = None;
    assert_eq!(pruned.open("r").unwrap().digest, opened.digest);
}

#[test]
fn every_column_of_an_activity_is_sealed() {
    assert_eq!(kind(activity_row().open("r", None, None)), "whole");
    let changes: [fn(&mut ActivityRow); 9] = [
        |row| row.activity_id.push('x'),
        |row| row.activation += 1,
        |row| row.state = "failed".to_owned(),
        |row| {
            let body = String::from_utf8(row.body.to_vec()).unwrap();
            row.body = body.replace("charge@1", "charge@2").into();
        },
        |row| row.input = PayloadColumns::of(&Payload::new("another")),
        |row| row.input.inline = Some(Bytes::from_static(b"another")),
        |row| row.output = Some(PayloadColumns::of(&Payload::new("another"))),
        |row| row.output = None,
        |row| row.seal = None,
    ];
    for (n, change) in changes.iter().enumerate() {
        let mut row = activity_row();
        change(&mut row);
        assert_eq!(kind(row.open("r", None, None)), "corrupt", "change {n}");
    }
}

#[test]
fn every_column_of_a_wait_is_sealed() {
    assert_eq!(kind(wait_row().open("r", None, None)), "whole");
    let changes: [fn(&mut WaitRow); 12] = [
        |row| row.wait_id.push('x'),
        |row| row.correlation_id.push('x'),
        |row| row.activation += 1,
        |row| row.status = "armed".to_owned(),
        |row| row.deadline = None,
        |row| row.armed_at += 1,
        |row| {
            let body = String::from_utf8(row.body.to_vec()).unwrap();
            row.body = body.replace("first_committed", "hard").into();
        },
        |row| row.subject = PayloadColumns::of(&Payload::new("another")),
        |row| row.subject.inline = None,
        |row| row.delivered = Some(PayloadColumns::of(&Payload::new("another"))),
        |row| row.delivered = None,
        |row| row.seal = None,
    ];
    for (n, change) in changes.iter().enumerate() {
        let mut row = wait_row();
        change(&mut row);
        assert_eq!(kind(row.open("r", None, None)), "corrupt", "change {n}");
    }
}

/// A seal that holds is not enough: the address in the body must be the identity in the key (D145).
#[test]
fn a_resealed_copy_of_another_address_is_corrupt() {
    for (run, activation) in [("other", 3), ("r", 4)] {
        let mut row = activity_row();
        row.run_id = run.to_owned();
        row.activation = activation;
        row.seal = Some(row.compute_seal());
        assert_eq!(kind(row.open(run, None, None)), "corrupt");
        let mut row = wait_row();
        row.run_id = run.to_owned();
        row.activation = activation;
        row.seal = Some(row.compute_seal());
        assert_eq!(kind(row.open(run, None, None)), "corrupt");
    }
}

#[test]
fn payloads_stand_in_their_row_or_in_blobs() {
    for (len, inline) in [(0, true), (INLINE_MAX, true), (INLINE_MAX + 1, false)] {
        let payload = Payload::new(vec![7; len]);
        let columns = PayloadColumns::of(&payload);
        assert_eq!(columns.inline.is_some(), inline, "{len}");
        assert_eq!(blob_of(&payload).is_none(), inline, "{len}");
        let blob = blob_of(&payload).map(|blob| blob.bytes);
        assert_eq!(columns.open("payload", blob).unwrap(), payload);
    }
    let long = PayloadColumns::of(&Payload::new(vec![7; INLINE_MAX + 1]));
    assert_eq!(kind(long.clone().open("payload", None)), "corrupt");
    let other = Bytes::from(vec![8; INLINE_MAX + 1]);
    assert_eq!(kind(long.open("payload", Some(other))), "corrupt");
}

#[test]
fn a_step_comes_back_byte_for_byte() {
    let mut step = build::step(4, at(1_000));
    step.effects = vec![serde_json::value::RawValue::from_string("{\"a\":1.50}".to_owned()).unwrap()];
    step.error = Some(Failure::new(crate::failure::FailureKind::Timeout, "late"));
    let bytes = encode_step(&step).unwrap();
    let again = decode_step(&bytes).unwrap();
    assert_eq!(encode_step(&again).unwrap(), bytes);
    assert_eq!(again.effects[0].get(), "{\"a\":1.50}");
    assert_eq!(kind(decode_step(&bytes[..bytes.len() - 1])), "corrupt");
}
