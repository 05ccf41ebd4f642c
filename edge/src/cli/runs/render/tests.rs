use super::*;

fn now() -> Timestamp {
    "2026-03-04T12:00:00Z".parse().unwrap()
}

fn read<T: serde::de::DeserializeOwned>(json: &str) -> T {
    serde_json::from_str(json).unwrap()
}

#[test]
fn runs_stand_in_columns() {
    let all: Vec<Run> = read(
        r#"[
        {"id": "run_1", "agent": "deployer", "status": "waiting", "created_at": "2026-03-04T11:15:00.000Z",
         "waiting_on": [{"kind": "approval", "tool": "deploy"}, {"kind": "approval", "tool": "deploy"}, {"kind": "input"}]},
        {"id": "run_22", "agent": "helper", "status": "failed", "created_at": "2026-02-28T12:00:00Z", "resumable": true,
         "outcome": {"status": "failed"}, "waiting_on": []},
        {"id": "run_3", "agent": null, "status": "waiting", "blocked": "definition_missing", "created_at": "2026-03-04T12:00:09Z",
         "waiting_on": [{"kind": "resume"}], "members": "of a newer edge"},
        {"id": "run_4", "object": "run", "blocked": "run_corrupt"}]"#,
    );
    assert_eq!(
        runs(&all, now()),
        "\
ID      AGENT     STATUS                                 WAITING ON                  AGE
run_1   deployer  waiting                                2 × approval deploy, input  45m
run_22  helper    failed (resumable)                     -                           4d
run_3   -         waiting (blocked: definition_missing)  resume                      0s
run_4   -         unknown (blocked: run_corrupt)         -                           -
"
    );
    assert_eq!(runs(&[], now()), "ID  AGENT  STATUS  WAITING ON  AGE\n");
}

#[test]
fn approvals_show_the_exact_call() {
    let all: Vec<Approval> = read(
        r#"[
        {"id": "apr_1", "run_id": "run_1", "agent": "deployer", "tool": "deploy", "status": "pending",
         "arguments": {"b": 1.00, "a": 12345678901234567890123}, "arguments_digest": "sha256:1",
         "created_at": "2026-03-04T09:00:00Z", "expires_at": "2026-03-07T12:00:00Z"},
        {"id": "apr_2", "run_id": "run_2", "agent": "deployer", "tool": "charge", "status": "pending",
         "arguments": "no {json", "arguments_digest": "sha256:2", "created_at": "2026-03-04T11:59:01Z", "expires_at": null}]"#,
    );
    assert_eq!(
        approvals(&all, now()),
        "\
RUN    APPROVAL  AGENT     AGE  EXPIRES  TOOL    ARGUMENTS
run_1  apr_1     deployer  3h   3d       deploy  {\"b\": 1.00, \"a\": 12345678901234567890123}
run_2  apr_2     deployer  59s  never    charge  \"no {json\"
"
    );
    assert_eq!(
        call(&all[0]),
        "\
run       run_1
approval  apr_1
agent     deployer
tool      deploy
arguments {\"b\": 1.00, \"a\": 12345678901234567890123}
digest    sha256:1
"
    );
}

#[test]
fn a_run_is_shown_with_all_that_it_waits_for() {
    let waiting: Run = read(
        r#"{"id": "run_1", "agent": "deployer", "definition": {"version": 7, "digest": "sha256:0"}, "status": "waiting",
         "step": "turn-2", "life": 1, "created_at": "2026-03-04T09:00:00Z", "updated_at": "2026-03-04T11:59:00Z",
         "deadline": "2026-03-05T12:00:00Z",
         "budgets": {"turns": {"used": 2, "limit": 20}, "spend": {"used": 0.50, "limit": 2.5}},
         "waiting_on": [
          {"kind": "approval", "id": "apr_1", "tool": "deploy", "call_id": "c", "arguments": {"region": "eu"},
           "arguments_digest": "sha256:1", "expires_at": "2026-03-06T12:00:00Z", "url": "/api/v1/runs/run_1/approvals/apr_1"},
          {"kind": "input", "id": "wait_1", "prompt": "Which one?", "schema": {"type": "string"}, "url": "/api/v1/runs/run_1/inputs/wait_1"},
          {"kind": "reconciliation", "activity_id": "act_1", "tool": "charge", "attempt": 2, "url": "/api/v1/runs/run_1/activities/act_1/resolve"},
          {"kind": "retry", "next_attempt_at": "2026-03-04T12:00:30Z"},
          {"kind": "timer", "id": "wait_2", "due_at": "2026-03-04T13:00:00Z"},
          {"kind": "children", "id": "wait_3", "child_run_id": "run_7"}]}"#,
    );
    let turns: Vec<Turn> = read(
        r#"[{"n": 1, "usage": {"input_tokens": 10, "output_tokens": 4}, "attempts": 1,
             "response": {"content": "", "tool_calls": [{"id": "c0", "name": "lookup", "arguments": "{\"sku\":1}"}]}},
            {"n": 2, "usage": null, "attempts": 2, "response": {"content": "Shall I?", "tool_calls": []}}]"#,
    );
    let steps: Vec<Step> = read(
        r#"[{"name": "turn-1", "kind": "reason", "status": "completed", "attempts": 1},
            {"name": "turn-1", "kind": "action", "status": "failed", "attempts": 3,
             "error": {"kind": "tool_error", "code": "http_503", "message": "busy", "step": "turn-1"}}]"#,
    );
    let activities: Vec<Activity> = read(
        r#"[{"id": "act_0", "step": "turn-1", "tool": "lookup", "state": "completed", "origin": "live", "attempt": 3},
            {"id": "act_2", "step": "turn-2", "tool": "charge", "state": "failed", "origin": "manual", "attempt": 1,
             "error": {"kind": "tool_error", "code": "resolved_as_failed", "message": "not there", "retryable": false},
             "decisions": [{"decision_id": "r1", "created_at": "2026-03-04T11:00:00Z", "action": "fail", "attempt": 1, "by": "boss",
                            "reason": "not there", "evidence": "ticket 7"}]},
            {"id": "act_1", "step": "turn-2", "tool": "charge", "state": "unknown", "origin": null, "attempt": 2}]"#,
    );
    let approvals: Vec<Approval> = read(
        r#"[{"id": "apr_0", "tool": "deploy", "status": "denied", "decided_by": "ops\u001b", "reason": "not on a Friday",
             "decided_at": "2026-03-04T11:30:00Z"},
            {"id": "apr_1", "tool": "deploy", "status": "pending"},
            {"id": "apr_2", "tool": "charge", "status": "edited", "decided_by": "ops", "reason": null,
             "edited_arguments": {"amount": 5.0}, "decided_at": "2026-03-04T10:00:00Z"},
            {"id": "apr_3", "tool": "deploy", "status": "expired", "decided_at": "2026-03-04T11:59:00Z"}]"#,
    );
    let did = Did {
        turns,
        steps,
        activities,
        approvals,
    };
    assert_eq!(
        run(&waiting, &did, now()),
        "\
run       run_1
agent     deployer, version 7
status    waiting
life      1
step      turn-2
created   2026-03-04T09:00:00Z (3h ago)
updated   2026-03-04T11:59:00Z (1m ago)
deadline  2026-03-05T12:00:00Z (in 24h)
budgets   spend 0.50/2.5, turns 2/20

waits for
  approval apr_1 deploy, expires 2026-03-06T12:00:00Z (in 2d)
    {\"region\": \"eu\"}
    sha256:1
    iop-edge runs approve run_1 apr_1
    iop-edge runs deny run_1 apr_1
  input wait_1
    Which one?
    schema {\"type\": \"string\"}
    iop-edge runs answer run_1 wait_1 --text …
  reconciliation act_1 charge, attempt 2
    iop-edge runs reconcile run_1 act_1
    iop-edge runs resolve run_1 act_1 --action complete|fail|retry …
  retry, next attempt 2026-03-04T12:00:30Z (in 30s)
  timer wait_2, due 2026-03-04T13:00:00Z (in 1h)
  children wait_3 run_7

decisions
  apr_2 charge edited by ops, 2026-03-04T10:00:00Z (2h ago)
    instead  {\"amount\": 5.0}
  act_2 charge resolved, fail by boss, 2026-03-04T11:00:00Z (1h ago)
    reason   not there
    evidence \"ticket 7\"
  apr_0 deploy denied by ops\\u001b, 2026-03-04T11:30:00Z (30m ago)
    reason   not on a Friday
  apr_3 deploy expired, 2026-03-04T11:59:00Z (1m ago)

turns
  1, 10 + 4 tokens
    lookup {\"sku\":1}
  2, 2 attempts
    Shall I?

calls
  ACTIVITY  STEP    TOOL    STATE            ATTEMPTS  ERROR
  act_0     turn-1  lookup  completed        3
  act_2     turn-2  charge  failed (manual)  1         tool_error resolved_as_failed: not there
  act_1     turn-2  charge  unknown          2

steps
  STEP    KIND    STATUS     ATTEMPTS  ERROR
  turn-1  reason  completed  1
  turn-1  action  failed     3         tool_error http_503 at turn-1: busy
"
    );
}

#[test]
fn an_end_is_shown_with_its_reason() {
    for (outcome, shown) in [
        (
            r#"{"status": "succeeded", "reason": "completed", "output": {"a": [1, 2.0]}}"#,
            "  succeeded, completed\n  {\"a\": [1, 2.0]}\n",
        ),
        (
            r#"{"status": "failed", "reason": "error", "output": null,
                "error": {"kind": "rate_limited", "code": "http_429", "message": "slow down", "step": "turn-3", "attempt": 3}}"#,
            "  failed, error\n  rate_limited http_429 at turn-3: slow down\n",
        ),
        (
            r#"{"status": "exhausted", "reason": "budget", "exhausted": {"budget": "turns", "used": 20, "limit": 20}}"#,
            "  exhausted, budget\n  budget turns, 20 of 20\n",
        ),
    ] {
        let ended: Run = read(&format!(
            r#"{{"id": "r", "status": "over", "outcome": {outcome}}}"#
        ));
        let text = run(&ended, &Did::default(), now());
        let (_, said) = text.split_once("\noutcome\n").unwrap();
        assert_eq!(said, shown);
    }
}
