use std::borrow::Cow;
use std::collections::BTreeMap;

use iop_durable::failure::FailureKind;
use iop_durable::ids::{ActivityId, CorrelationId, DecisionId, Key, NodeName, Revision, WaitId};
use iop_durable::payload::Payload;
use iop_durable::record::{
    ActivityRecord, ActivityState, Attempt, AttemptClass, Budget, CancelRequest, CheckpointRecord,
    Continuation, DeadlinePolicy, DecisionRecord, DefinitionRef, Effect, EventName, EventRecord, Exhausted,
    Inbox, Lineage, NotBefore, Outcome, OutcomeCancel, OutcomeError, Reason, RunHead, Scope, Settled, Status,
    StepRecord, StepStatus, WaitLabels, WaitRecord, WaitStatus, Waiting, WaitingKind, WaitingOn,
};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::agents::journal::{ApprovalSubject, arguments_digest};
use crate::agents::program::UNLIMITED;

const RUN: &str = "run/1 é";
const DIGEST: &str = "sha256:00";

fn at(ms: i64) -> Timestamp {
    Timestamp::from_millis(ms).unwrap()
}

fn run() -> RunId {
    RunId::new(RUN).unwrap()
}

fn head(status: Status) -> RunHead {
    RunHead {
        id: run(),
        revision: Revision::new(42).unwrap(),
        definition: DefinitionRef {
            kind: "agent".to_owned(),
            name: "deployer".to_owned(),
            version: 7,
            digest: DIGEST.to_owned(),
        },
        lineage: Lineage {
            parent: None,
            root: run(),
            origin: None,
        },
        life: 1,
        status,
        cursor: Some(NodeName::new("action").unwrap()),
        activation: 6,
        attempt: 1,
        recoveries: 0,
        state_digest: [0; 32],
        budgets: BTreeMap::new(),
        metadata: BTreeMap::new(),
        owner: None,
        waiting: None,
        outcome: None,
        deadline: None,
        event_seq: 9,
        open_activities: 0,
        armed_waits: 0,
        effects: 0,
        traceparent: None,
        incarnation: 9,
        commit_id: uuid::Uuid::nil(),
        created_at: at(1_000),
        updated_at: at(2_345),
    }
}

fn wait(kind: WaitingKind, key: &str, subject: &Value) -> WaitRecord {
    let (node, key) = (NodeName::new("action").unwrap(), Key::new(key).unwrap());
    WaitRecord {
        run: run(),
        id: WaitId::derive(&run(), &node, 6, &key, 1),
        correlation: CorrelationId::new("c-1").unwrap(),
        node,
        activation: 6,
        key,
        generation: 1,
        kind,
        status: WaitStatus::Armed,
        continuation: Continuation::Gate,
        labels: WaitLabels {
            matcher: String::new(),
            payload: String::new(),
            continuation: String::new(),
        },
        subject: Payload::new(subject.to_string()),
        deadline: Some(at(9_000)),
        deadline_policy: DeadlinePolicy::Hard,
        armed_at: at(3_000),
        deliveries: 0,
        settled: None,
    }
}

fn approval(arguments: &str) -> WaitRecord {
    let subject = ApprovalSubject {
        tool: "deploy".to_owned(),
        call_id: "call_7".to_owned(),
        ordinal: 0,
        arguments: arguments.to_owned(),
        arguments_digest: arguments_digest(arguments),
        why: "rule".to_owned(),
    };
    wait(
        WaitingKind::Approval,
        "call_7.0",
        &serde_json::to_value(subject).unwrap(),
    )
}

fn activity(key: &str, implementation: &str, state: ActivityState) -> ActivityRecord {
    let (node, key) = (NodeName::new("action").unwrap(), Key::new(key).unwrap());
    ActivityRecord {
        run: run(),
        id: ActivityId::derive(&run(), &node, 6, &key),
        node,
        activation: 6,
        key,
        implementation: implementation.to_owned(),
        effect: Effect::Unsafe,
        retry: None,
        state,
        origin: None,
        attempts: vec![Attempt {
            n: 1,
            incarnation: 3,
            recovery: false,
            started_at: at(4_000),
            ended_at: Some(at(5_000)),
            class: AttemptClass::Abandoned,
            error: None,
        }],
        not_before: None,
        step_attempt: 1,
        input: Payload::new("{\"region\": \"eu\"}"),
        output: None,
        error: None,
        decision: None,
    }
}

fn called(tool: &str) -> Called {
    Called {
        id: "call_7".to_owned(),
        tool: tool.to_owned(),
        ordinal: 0,
    }
}

fn json_of<T: Serialize>(value: &T) -> Value {
    serde_json::to_value(value).unwrap()
}

fn object(head: &RunHead, open: &Open) -> Value {
    json_of(&RunObject::of(head, &Inbox::default(), open, true, None))
}

#[test]
fn a_waiting_run_is_shown_as_the_contract_has_it() {
    let mut head = head(Status::Waiting);
    let gate = approval(r#"{"region": "eu"}"#);
    head.waiting = Some(Waiting {
        reason: "approval".to_owned(),
        due_at: None,
        on: vec![WaitingOn {
            kind: WaitingKind::Approval,
            id: gate.id.to_string(),
            node: gate.node.clone(),
            key: "call_7.0".to_owned(),
        }],
    });
    head.budgets = BTreeMap::from([
        ("turns".to_owned(), Budget { used: 3, limit: 20 }),
        (
            "tokens".to_owned(),
            Budget {
                used: 91,
                limit: UNLIMITED,
            },
        ),
        (
            "same_call".to_owned(),
            Budget {
                used: 0,
                limit: UNLIMITED,
            },
        ),
        (
            "spend".to_owned(),
            Budget {
                used: 1_500_000_000_001,
                limit: 2_000_000_000_000,
            },
        ),
    ]);
    let id = approval_id_of(&gate);
    let token = head.token().to_string();
    let open = Open {
        waits: vec![gate],
        activities: Vec::new(),
    };
    assert_eq!(
        object(&head, &open),
        json!({
            "id": RUN, "object": "run", "kind": "agent", "agent": "deployer",
            "definition": { "version": 7, "digest": DIGEST }, "status": "waiting", "life": 1,
            "parent_run_id": null, "root_run_id": RUN, "revision": "42", "resume_token": token,
            "incarnation": "9", "step": "turn-3",
            "waiting_on": [{ "kind": "approval", "id": id, "tool": "deploy", "call_id": "call_7",
                "arguments": { "region": "eu" }, "arguments_digest": arguments_digest(r#"{"region": "eu"}"#),
                "expires_at": "1970-01-01T00:00:09.000Z",
                "url": format!("/api/v1/runs/run%2F1%20%C3%A9/approvals/{id}") }],
            "budgets": { "turns": { "used": 3, "limit": 20 }, "tokens": { "used": 91, "limit": null },
                "spend": { "used": 1.500000000001, "limit": 2 } },
            "outcome": null, "resumable": true, "guarantee": "at_least_once_with_stable_keys", "blocked": null,
            "metadata": {}, "cancel_requested_at": null, "created_at": "1970-01-01T00:00:01.000Z",
            "updated_at": "1970-01-01T00:00:02.345Z", "deadline": null
        })
    );
    let text = serde_json::to_string(&RunObject::of(&head, &Inbox::default(), &open, true, None)).unwrap();
    assert!(text.contains(r#""arguments":{"region": "eu"}"#), "{text}");
}

fn approval_id_of(wait: &WaitRecord) -> String {
    crate::agents::journal::approval_id(&wait.id)
}

#[test]
fn an_outcome_is_passed_on_byte_for_byte_and_says_whether_the_run_can_go_on() {
    let mut outcome = Outcome::new(Status::Failed, Reason::Error);
    let mut ended = head(Status::Failed);
    for (kind, resumable) in FailureKind::ALL.map(|kind| (kind, kind.resumable())) {
        outcome.error = Some(OutcomeError {
            failure: Failure::new(kind, "x"),
            step: Some("turn-3".to_owned()),
            attempt: 1,
        });
        let bytes = outcome.encode().unwrap();
        ended.outcome = Some(bytes.clone());
        let of = |durable| RunObject::of(&ended, &Inbox::default(), &Open::default(), durable, None);
        let text = serde_json::to_string(&of(true)).unwrap();
        assert!(text.contains(std::str::from_utf8(&bytes).unwrap()));
        assert_eq!(json_of(&of(true))["resumable"], resumable, "{kind:?}");
        let volatile = json_of(&of(false));
        assert_eq!(
            (&volatile["resumable"], &volatile["guarantee"]),
            (&json!(false), &json!("none"))
        );
    }
    ended.status = Status::Succeeded;
    ended.cursor = None;
    let told = object(&ended, &Open::default());
    assert_eq!(
        (&told["step"], &told["waiting_on"], &told["resumable"]),
        (&json!(null), &json!([]), &json!(false))
    );
}

#[test]
fn a_cancellation_and_a_missing_definition_are_shown() {
    let inbox = Inbox {
        signal: 1,
        cancel: Some(CancelRequest {
            id: DecisionId::new("d").unwrap(),
            reason: "why".to_owned(),
            by: None,
            requested_at: at(7_000),
        }),
        quarantine: None,
    };
    let blocked = Some(Blocked::DefinitionMissing);
    let told = json_of(&RunObject::of(
        &head(Status::Queued),
        &inbox,
        &Open::default(),
        true,
        blocked,
    ));
    assert_eq!(told["cancel_requested_at"], "1970-01-01T00:00:07.000Z");
    assert_eq!(told["blocked"], "definition_missing");
}

/// A run whose head names one thing.
fn named(kind: WaitingKind, id: &str, key: &str, due_at: Option<Timestamp>) -> RunHead {
    let mut head = head(Status::Waiting);
    head.waiting = Some(Waiting {
        reason: kind.as_str().to_owned(),
        due_at,
        on: vec![WaitingOn {
            kind,
            id: id.to_owned(),
            node: NodeName::new("action").unwrap(),
            key: key.to_owned(),
        }],
    });
    head
}

#[test]
fn every_kind_of_waiting_has_its_members() {
    let call = activity("call_7.0", "http", ActivityState::Unknown);
    let mut retrying = call.clone();
    retrying.not_before = Some(NotBefore {
        at: at(8_000),
        hinted: false,
    });
    let id = call.id.to_string();
    let run_url = "/api/v1/runs/run%2F1%20%C3%A9";
    for (kind, open, expected) in [
        (
            WaitingKind::Reconciliation,
            Open {
                waits: Vec::new(),
                activities: vec![(call, Some(called("charge")))],
            },
            json!({ "kind": "reconciliation", "activity_id": id, "tool": "charge", "call_id": "call_7", "attempt": 1,
                "url": format!("{run_url}/activities/{id}/resolve") }),
        ),
        (
            WaitingKind::Retry,
            Open {
                waits: Vec::new(),
                activities: vec![(retrying, Some(called("charge")))],
            },
            json!({ "kind": "retry", "activity_id": id, "tool": "charge", "call_id": "call_7", "attempt": 1,
                "next_attempt_at": "1970-01-01T00:00:08.000Z" }),
        ),
        (WaitingKind::Resume, Open::default(), json!({ "kind": "resume" })),
        (
            WaitingKind::Timer,
            Open::default(),
            json!({ "kind": "timer", "id": id, "due_at": "1970-01-01T00:00:06.000Z" }),
        ),
        (
            WaitingKind::Handoff,
            Open::default(),
            json!({ "kind": "handoff" }),
        ),
    ] {
        let head = named(kind, &id, "call_7.0", Some(at(6_000)));
        assert_eq!(json_of(&waiting_on(&head, &open)), json!([expected]), "{kind}");
    }
    let step = named(WaitingKind::Retry, "", "", Some(at(6_000)));
    let told = json_of(&waiting_on(&step, &Open::default()));
    assert_eq!(
        told,
        json!([{ "kind": "retry", "attempt": 1, "next_attempt_at": "1970-01-01T00:00:06.000Z" }])
    );

    let asks = wait(
        WaitingKind::Input,
        "call_8.1",
        &json!({ "prompt": "Which?", "schema": { "type": "string" }, "call_id": "call_8" }),
    );
    let hears = wait(WaitingKind::Event, "k", &json!({}));
    let parent = wait(
        WaitingKind::Children,
        "child/0/call_9.2",
        &json!({ "child_run_id": "run_2" }),
    );
    let (a, h, p) = (asks.id.to_string(), hears.id.to_string(), parent.id.to_string());
    let open = Open {
        waits: vec![asks, hears, parent],
        activities: Vec::new(),
    };
    let mut running = head(Status::Running);
    running.armed_waits = 3;
    assert_eq!(
        json_of(&waiting_on(&running, &open)),
        json!([
            { "kind": "input", "id": a, "prompt": "Which?", "schema": { "type": "string" }, "call_id": "call_8",
                "deadline": "1970-01-01T00:00:09.000Z", "url": format!("{run_url}/inputs/{a}") },
            { "kind": "event", "id": h, "key": "k", "correlation_id": "c-1", "deadline": "1970-01-01T00:00:09.000Z",
                "url": format!("{run_url}/waits/{h}/deliveries") },
            { "kind": "children", "id": p, "child_run_id": "run_2" }
        ])
    );
}

#[test]
fn a_settled_gate_is_not_waited_for_any_more() {
    let mut gate = approval("{}");
    gate.status = WaitStatus::Delivered;
    let head = named(WaitingKind::Approval, gate.id.as_str(), "call_7.0", None);
    let open = Open {
        waits: vec![gate],
        activities: Vec::new(),
    };
    assert_eq!(json_of(&waiting_on(&head, &open)), json!([]));
}

#[test]
fn arguments_that_are_no_json_are_shown_as_text() {
    let gate = approval("{\"a\":");
    let open = Open {
        waits: vec![gate],
        activities: Vec::new(),
    };
    let told = json_of(&waiting_on(&head(Status::Running), &open));
    assert_eq!(told[0]["arguments"], "{\"a\":");
}

#[test]
fn json_that_no_reader_follows_is_shown_as_text() {
    let nested = |levels: usize| format!("{{\"a\":{}{}}}", "[".repeat(levels), "]".repeat(levels));
    let brackets = format!("{{\"a\":\"\\\"{}\"}}", "[".repeat(9000));
    for (text, is_text) in [
        (nested(99), false),
        (nested(100), true),
        (nested(9000), true),
        (brackets, false),
        (format!("[{}]", vec!["[]"; 9000].join(",")), false),
    ] {
        let open = Open {
            waits: vec![approval(&text)],
            activities: Vec::new(),
        };
        let on = serde_json::to_string(&waiting_on(&head(Status::Running), &open)).unwrap();
        let told: Value = serde_json::from_str(&on).unwrap();
        assert_eq!(told[0]["arguments"] == text, is_text);
        let payload = shown(&Bytes::from(text.clone()));
        assert_eq!(payload.get().starts_with('"'), is_text);
    }
}

fn event(name: EventName, data: &Value, open: &Open) -> Value {
    let record = EventRecord {
        seq: 7,
        life: 1,
        name: Cow::Borrowed(name.as_str()),
        terminal: false,
        time: at(1_500),
        data: Bytes::from(data.to_string()),
    };
    json_of(&EventObject::of(&run(), &record, open))
}

#[test]
fn events_speak_of_turns_and_approvals() {
    assert_eq!(
        event(
            EventName::StepCompleted,
            &json!({ "step": "reason", "activation": 5, "attempt": 1, "status": "done" }),
            &Open::default(),
        ),
        json!({ "seq": 7, "life": 1, "event": "run.step.completed", "time": "1970-01-01T00:00:01.500Z",
            "data": { "step": "turn-3", "kind": "model_turn", "activation": 5, "attempt": 1, "status": "done" } })
    );
    assert_eq!(
        event(EventName::Created, &json!({}), &Open::default())["data"],
        json!({})
    );
}

/// However long ago: the decision was taken since, and the call tried again.
#[test]
fn an_event_of_a_pause_says_what_the_run_said_then() {
    let mut gate = approval(r#"{"region": "eu"}"#);
    let mut retrying = activity("1/call_7.0", "mcp", ActivityState::Prepared);
    retrying.not_before = Some(NotBefore {
        at: at(8_000),
        hinted: false,
    });
    let mut head = named(WaitingKind::Approval, gate.id.as_str(), "call_7.0", None);
    let on = &mut head.waiting.as_mut().unwrap().on;
    for (kind, id) in [
        (WaitingKind::Retry, retrying.id.as_str()),
        (WaitingKind::Resume, ""),
    ] {
        let node = NodeName::new("action").unwrap();
        let (id, key) = (id.to_owned(), "1/call_7.0".to_owned());
        on.push(WaitingOn { kind, id, node, key });
    }
    let said = json!({ "reason": "approval", "waiting_on": [
        { "kind": "approval", "id": gate.id.as_str(), "node": "action", "key": "call_7.0" },
        { "kind": "retry", "id": retrying.id.as_str(), "node": "action", "key": "1/call_7.0", "attempt": 1, "at": 8_000 },
        { "kind": "resume", "id": "", "node": "action", "key": "" } ] });
    let open = |gate: &WaitRecord, call: &ActivityRecord| Open {
        waits: vec![gate.clone()],
        activities: vec![(call.clone(), Some(called("deploy")))],
    };
    let shown = json_of(&waiting_on(&head, &open(&gate, &retrying)));
    assert_eq!(shown[0]["arguments"], json!({ "region": "eu" }));
    assert_eq!(
        shown[1],
        json!({ "kind": "retry", "activity_id": retrying.id.as_str(), "tool": "deploy", "call_id": "call_7",
            "attempt": 1, "next_attempt_at": "1970-01-01T00:00:08.000Z" })
    );
    let told = event(EventName::Waiting, &said, &open(&gate, &retrying));
    assert_eq!(told["data"], json!({ "reason": "approval", "waiting_on": shown }));
    gate.status = WaitStatus::Delivered;
    retrying.state = ActivityState::Completed;
    retrying.not_before = None;
    let again = retrying.attempts[0].clone();
    retrying.attempts.push(Attempt { n: 2, ..again });
    let later = event(EventName::Waiting, &said, &open(&gate, &retrying));
    assert_eq!(later["data"], told["data"]);

    let record = EventRecord {
        seq: 7,
        life: 1,
        name: Cow::Borrowed(EventName::Waiting.as_str()),
        terminal: false,
        time: at(1_500),
        data: Bytes::from(said.to_string()),
    };
    let expected = [Mentioned::Wait(gate.id), Mentioned::Activity(retrying.id)];
    assert_eq!(mentioned(&record), expected);
}

/// The names that a schema has for the members of an object, those that it has to have first.
fn members<T: utoipa::PartialSchema>() -> (Vec<String>, Vec<String>) {
    let schema = json_of(&T::schema());
    let all = schema["properties"].as_object().unwrap().keys().cloned();
    let required = schema["required"].as_array().into_iter().flatten();
    let required = required.map(|name| name.as_str().unwrap().to_owned());
    (required.collect(), all.collect())
}

fn keys(value: &Value) -> Vec<String> {
    value.as_object().unwrap().keys().cloned().collect()
}

#[test]
fn an_outcome_has_the_members_that_the_document_describes() {
    let mut outcome = Outcome::new(Status::Exhausted, Reason::Budget);
    outcome.exhausted = Some(Exhausted {
        budget: "turns".to_owned(),
        used: 3,
        limit: 3,
        decimals: 0,
    });
    outcome.error = Some(OutcomeError {
        failure: Failure::new(FailureKind::Timeout, "late"),
        step: None,
        attempt: 1,
    });
    outcome.cancel = Some(OutcomeCancel {
        by: None,
        reason: "deadline".to_owned(),
        deadline: None,
    });
    let told = json_of(&outcome);
    for (value, (required, all)) in [
        (&told, members::<outcome::OutcomeObject>()),
        (&told["error"], members::<outcome::OutcomeErrorObject>()),
        (&told["exhausted"], members::<outcome::ExhaustedObject>()),
        (&told["cancel"], members::<outcome::CancelObject>()),
    ] {
        let mut all = all;
        all.sort();
        let mut keys = keys(value);
        keys.sort();
        assert_eq!(keys, all);
        assert!(!required.is_empty());
        assert!(required.iter().all(|name| !value[name].is_null()), "{value}");
    }
}

#[test]
fn an_event_that_is_not_stored_has_the_members_that_the_document_describes() {
    let told = Transient::new(TransientWord::Snapshot, 2, at(1_000), written(b"{\"run\":{}}"));
    let told = json_of(&told);
    assert_eq!(told["event"], "run.snapshot");
    assert_eq!(told["data"], json!({ "run": {} }));
    let (mut required, _) = members::<Transient>();
    let mut keys = keys(&told);
    required.sort();
    keys.sort();
    assert_eq!(keys, required);
}

#[test]
fn a_terminal_event_has_the_outcomes_bytes() {
    let data = br#"{"outcome":{"status":"succeeded","output":{"n": 1.0}}}"#;
    let record = EventRecord {
        seq: 1,
        life: 1,
        name: Cow::Borrowed("run.succeeded"),
        terminal: true,
        time: at(1),
        data: Bytes::from_static(data),
    };
    let told = EventObject::of(&run(), &record, &Open::default());
    let text = serde_json::to_string(&told).unwrap();
    assert!(text.contains(std::str::from_utf8(data).unwrap()), "{text}");
}

#[test]
fn steps_are_the_finished_ones_and_the_present_one() {
    let done = StepRecord {
        activation: 5,
        node: NodeName::new("reason").unwrap(),
        status: StepStatus::Failed,
        attempts: 2,
        result: Some("1 tool call".to_owned()),
        error: Some(Failure::new(FailureKind::Timeout, "late").code("response_stalled")),
        effects: Vec::new(),
        started_at: at(1_000),
        ended_at: at(2_000),
    };
    assert_eq!(
        json_of(&StepObject::of(&done)),
        json!({ "name": "turn-3", "kind": "model_turn", "activation": 5, "status": "failed", "attempts": 2,
            "result": "1 tool call",
            "error": { "kind": "timeout", "code": "response_stalled", "message": "late", "retryable": true },
            "child_run_id": null, "verification": null, "started_at": "1970-01-01T00:00:01.000Z",
            "ended_at": "1970-01-01T00:00:02.000Z" })
    );
    for status in Status::ALL {
        let present = current_step(&head(*status), &[]);
        assert_eq!(present.is_none(), status.is_terminal(), "{status}");
    }
    // It took as many attempts as the call of it that took most.
    let mut often = activity("call_8.1", "http", ActivityState::Prepared);
    let again = often.attempts[0].clone();
    often.attempts.extend([again.clone(), again]);
    for (calls, attempts) in [
        (vec![], 1),
        (
            vec![
                activity("call_7.0", "http", ActivityState::Completed),
                often,
                activity("call_9.2", "http", ActivityState::Completed),
            ],
            3,
        ),
    ] {
        let present = json_of(&current_step(&head(Status::Waiting), &calls));
        assert_eq!(
            (&present["name"], &present["kind"], &present["status"]),
            (&json!("turn-3"), &json!("tool_call"), &json!("waiting"))
        );
        assert_eq!(present["attempts"], attempts);
    }
}

#[test]
fn a_turn_is_its_model_call() {
    let mut record = activity("model", "chat", ActivityState::Completed);
    record.activation = 5;
    record.input = Payload::new(r#"{"turn":3,"request_digest":"sha256:aa"}"#);
    record.output = Some(Payload::new(
        r#"{"content":"hi","usage":{"input_tokens":3,"output_tokens":4,"cached_tokens":0,"reasoning_tokens":0,"total_tokens":7},"attempts":1}"#,
    ));
    let turn = json_of(&TurnObject::of(&record));
    assert_eq!(turn["n"], 3);
    assert_eq!(turn["request_digest"], "sha256:aa");
    assert_eq!(turn["response"]["content"], "hi");
    assert_eq!(
        turn["usage"],
        json!({ "input_tokens": 3, "output_tokens": 4, "cached_tokens": 0, "reasoning_tokens": 0, "total_tokens": 7 })
    );
    assert_eq!(turn["attempts"], 1);
}

#[test]
fn an_activity_has_its_key_attempts_and_decisions() {
    let record = activity("call_7.0", "http", ActivityState::Unknown);
    let decision = |id: &str, scope: Scope, of: &str| DecisionRecord {
        run: run(),
        scope,
        id: DecisionId::new(id).unwrap(),
        content: [0; 32],
        body: Bytes::from(json!({ "action": "retry", "activity_id": of, "by": "ada" }).to_string()),
        created_at: at(6_000),
    };
    let decisions = [
        decision("d-1", Scope::Operator, record.id.as_str()),
        decision("d-2", Scope::Operator, "act_other"),
        decision("d-3", Scope::Cancel, record.id.as_str()),
    ];
    let told = json_of(&ActivityObject::of(&record, Some(called("deploy")), &decisions));
    assert_eq!(told["call_id"], "call_7");
    assert_eq!(told["idempotency_key"], "run%2F1%20%C3%A9/turn-3/6/call_7.0");
    assert_eq!(told["input"], json!({ "region": "eu" }));
    assert_eq!(told["input_digest"], record.input.digest_text());
    assert_eq!(
        (&told["state"], &told["attempt"], &told["output"]),
        (&json!("unknown"), &json!(1), &json!(null))
    );
    assert_eq!(told["attempts"][0]["class"], "abandoned");
    assert_eq!(
        told["decisions"],
        json!([{ "decision_id": "d-1", "created_at": "1970-01-01T00:00:06.000Z", "action": "retry", "by": "ada" }])
    );
}

#[test]
fn what_is_no_call_to_the_world_is_not_among_activities() {
    let shown =
        |key: &str, implementation: &str| is_shown(&activity(key, implementation, ActivityState::Completed));
    assert!(shown("call_7.0", "http") && shown("call_7.0", "agent"));
    assert!(!shown("call_7.0", "refusal") && !shown("input", "input") && !shown("model", "chat"));
    // The start of a child is not; a call is, whatever the model calls it.
    let mut start = activity("start/call_7.0", "agent", ActivityState::Completed);
    start.effect = iop_durable::record::Effect::Idempotent;
    assert!(!is_shown(&start));
    assert!(shown("start/call_7.0", "http"));
}

#[test]
fn an_approval_tells_its_decision() {
    let now = at(5_000);
    let of = |wait: &WaitRecord, now| json_of(&ApprovalObject::of(wait, "deployer", None, now).unwrap());
    let mut gate = approval(r#"{"region":"eu"}"#);
    assert_eq!(of(&gate, now)["status"], "pending");
    assert_eq!(of(&gate, at(9_000))["status"], "expired");
    for (decision, status) in [("approve", "approved"), ("deny", "denied"), ("edit", "edited")] {
        gate.status = WaitStatus::Delivered;
        let answer = json!({ "decision": decision, "arguments_digest": "x", "reason": "why", "edited_arguments": "{\"region\":\"us\"}" });
        gate.settled = Some(Settled {
            by: Some(DecisionId::new("d-1").unwrap()),
            payload: Some(Payload::new(answer.to_string())),
            at: at(4_000),
        });
        let told = json_of(&ApprovalObject::of(&gate, "deployer", Some("ada".to_owned()), now).unwrap());
        assert_eq!(told["status"], status);
        assert_eq!(
            (&told["decided_by"], &told["decision_id"], &told["reason"]),
            (&json!("ada"), &json!("d-1"), &json!("why"))
        );
        assert_eq!(told["edited_arguments"], json!({ "region": "us" }));
        assert_eq!(told["decided_at"], "1970-01-01T00:00:04.000Z");
    }
    gate.settled = None;
    for (status, word) in [
        (WaitStatus::TimedOut, "expired"),
        (WaitStatus::Cancelled, "cancelled"),
    ] {
        gate.status = status;
        assert_eq!(of(&gate, now)["status"], word);
    }
    assert!(ApprovalObject::of(&wait(WaitingKind::Input, "k", &json!({})), "a", None, now).is_none());
}

#[test]
fn waits_and_revisions_are_shown() {
    let asks = wait(
        WaitingKind::Input,
        "call_8.1",
        &json!({ "prompt": "Which?", "call_id": "call_8" }),
    );
    let told = json_of(&WaitObject::of(&asks));
    assert_eq!(
        (&told["prompt"], &told["status"], &told["step"]),
        (&json!("Which?"), &json!("armed"), &json!("turn-3"))
    );
    let checkpoint = CheckpointRecord {
        run: run(),
        revision: Revision::FIRST,
        status: Status::Queued,
        cursor: Some(NodeName::new("reason").unwrap()),
        activation: 1,
        state: Some(Payload::new("{\"pending\":0}")),
        state_digest: [1; 32],
        digest: [0xab; 32],
        pruned: false,
        created_at: at(1),
    };
    let told = json_of(&HistoryObject::of(&checkpoint));
    assert_eq!(told["digest"], format!("sha256:{}", "ab".repeat(32)));
    assert_eq!(
        (&told["revision"], &told["cursor"]),
        (&json!("1"), &json!("turn-1"))
    );
    assert_eq!(
        json_of(&CheckpointObject::of(&checkpoint))["state"],
        json!({ "pending": 0 })
    );
    let pruned = CheckpointRecord {
        state: None,
        pruned: true,
        ..checkpoint
    };
    assert!(CheckpointObject::of(&pruned).is_none());
}

#[test]
fn payloads_are_shown_without_loss() {
    let show = |bytes: &'static [u8]| shown(&Bytes::from_static(bytes)).get().to_owned();
    assert_eq!(show(b"{\"a\": 1.00}"), "{\"a\": 1.00}");
    assert_eq!(show(b"plain"), "\"plain\"");
    assert_eq!(show(b"\"quoted\""), r#""\"quoted\"""#);
    assert_eq!(show(b""), "\"\"");
    assert_eq!(show(b"\xff\x00"), r#"{"encoding":"base64","data":"/wA="}"#);
    for (bytes, text) in [
        (&b""[..], ""),
        (b"f", "Zg=="),
        (b"fo", "Zm8="),
        (b"foo", "Zm9v"),
        (b"foob", "Zm9vYg=="),
    ] {
        assert_eq!(base64(bytes), text);
    }
}

proptest! {
    #[test]
    fn money_is_exact(units in any::<u64>()) {
        let mut budgets = head(Status::Running);
        budgets.budgets = BTreeMap::from([("spend".to_owned(), Budget { used: units, limit: 1 })]);
        let text = serde_json::to_string(&RunObject::of(&budgets, &Inbox::default(), &Open::default(), true, None)).unwrap();
        let used = text.split("\"spend\":{\"used\":").nth(1).unwrap().split(',').next().unwrap();
        let (whole, part) = used.split_once('.').unwrap_or((used, ""));
        prop_assert!(part.len() <= 12 && !part.ends_with('0'));
        let read: u64 = format!("{whole}{part:0<12}").parse().unwrap();
        prop_assert_eq!(read, units);
    }

    #[test]
    fn a_text_is_shown_as_itself(text in "\\PC{0,40}") {
        let told: Value = serde_json::from_str(shown(&Bytes::from(text.clone())).get()).unwrap();
        if let Value::String(told) = told {
            prop_assert_eq!(told, text);
        } else {
            prop_assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), told);
        }
    }

    #[test]
    fn times_are_read_back(ms in 1..253_402_300_799_999_i64) {
        let read: jiff::Timestamp = time(at(ms)).parse().unwrap();
        prop_assert_eq!(read.as_millisecond(), ms);
    }
}
