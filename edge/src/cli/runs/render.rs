//! Runs and approvals as text. Pure: the time comes in.
//!
//! What a model or a client wrote is shown as it is, but for characters that a terminal would act on or hide: those stand as
//! JSON escapes, so that nobody approves something else than what is there (D73).

mod journal;
mod text;

use std::fmt::Write as _;

use jiff::Timestamp;
use serde_json::value::RawValue;

use self::text::{age, distance, excerpt, indented, line, or_dash, shell, table, until};
pub(super) use self::text::{json, plain};
use super::wire::{Activity, Approval, Budget, Outcome, Run, RunError, Step, Time, Turn, WaitingOn};

/// Runs, one per line.
pub(super) fn runs(runs: &[Run], now: Timestamp) -> String {
    let rows = runs.iter().map(|run| {
        vec![
            plain(&run.id),
            or_dash(run.agent.as_deref()),
            status(run),
            waits(&run.waiting_on),
            age(run.created_at, now),
        ]
    });
    table(&["ID", "AGENT", "STATUS", "WAITING ON", "AGE"], rows)
}

/// Approvals, one per line, with the exact calls.
pub(super) fn approvals(approvals: &[Approval], now: Timestamp) -> String {
    let rows = approvals.iter().map(|approval| {
        vec![
            plain(&approval.run_id),
            plain(&approval.id),
            or_dash(approval.agent.as_deref()),
            age(approval.created_at, now),
            approval
                .expires_at
                .map_or_else(|| String::from("never"), |at| until(at.0, now)),
            plain(&approval.tool),
            arguments(approval.arguments.as_deref()),
        ]
    });
    table(
        &["RUN", "APPROVAL", "AGENT", "AGE", "EXPIRES", "TOOL", "ARGUMENTS"],
        rows,
    )
}

/// A call that somebody decides about, whole.
pub(super) fn call(approval: &Approval) -> String {
    let mut text = String::new();
    line(&mut text, "run", &plain(&approval.run_id));
    line(&mut text, "approval", &plain(&approval.id));
    line(&mut text, "agent", &or_dash(approval.agent.as_deref()));
    line(&mut text, "tool", &plain(&approval.tool));
    line(&mut text, "arguments", &arguments(approval.arguments.as_deref()));
    line(&mut text, "digest", &plain(&approval.arguments_digest));
    text
}

/// A question that somebody answers, whole.
pub(super) fn question(run: &Run, asked: &WaitingOn, now: Timestamp) -> String {
    let mut text = String::new();
    line(&mut text, "run", &plain(&run.id));
    line(&mut text, "input", &or_dash(asked.id.as_deref()));
    line(&mut text, "agent", &or_dash(run.agent.as_deref()));
    line(&mut text, "prompt", &or_dash(asked.prompt.as_deref()));
    if let Some(schema) = &asked.schema {
        line(&mut text, "schema", &json(schema));
    }
    if let Some(Time(at)) = asked.deadline {
        line(&mut text, "deadline", &format!("{at} ({})", distance(at, now)));
    }
    text
}

/// A call of which somebody says what it did, whole.
pub(super) fn effect(activity: &Activity) -> String {
    let mut text = String::new();
    line(&mut text, "run", &plain(&activity.run_id));
    line(&mut text, "activity", &plain(&activity.id));
    line(&mut text, "tool", &or_dash(activity.tool.as_deref()));
    line(&mut text, "arguments", &arguments(activity.input.as_deref()));
    line(&mut text, "digest", &plain(&activity.input_digest));
    line(&mut text, "key", &plain(&activity.idempotency_key));
    line(&mut text, "state", &state(activity));
    for attempt in &activity.attempts {
        let time = |at: Option<Time>| at.map_or_else(|| String::from("-"), |at| at.0.to_string());
        let span = format!("{} to {}", time(attempt.started_at), time(attempt.ended_at));
        line(
            &mut text,
            "attempt",
            &format!("{}, {span}, {}", attempt.n, plain(&attempt.class)),
        );
    }
    text
}

/// What is known of a call, and from whom when its own answer does not say it.
pub(super) fn state(activity: &Activity) -> String {
    let state = plain(&activity.state);
    match activity.origin.as_deref() {
        Some(origin @ ("manual" | "reconciled")) => format!("{state} ({origin})"),
        Some(_) | None => state,
    }
}

/// How a run ended, under a heading.
pub(super) fn end(heading: &str, run: &Run) -> String {
    let mut text = String::new();
    if let Some(ended) = &run.outcome {
        let _ = writeln!(text, "\n{heading}");
        outcome(&mut text, ended);
    }
    text
}

/// Arguments as they were written.
pub(super) fn arguments(arguments: Option<&RawValue>) -> String {
    arguments.map_or_else(|| String::from("-"), json)
}

/// What a run did, as far as it is stored.
#[derive(Default)]
pub(super) struct Did {
    pub(super) turns: Vec<Turn>,
    pub(super) steps: Vec<Step>,
    pub(super) activities: Vec<Activity>,
    pub(super) approvals: Vec<Approval>,
}

/// One run: where it stands, what it waits for, what it did.
pub(super) fn run(run: &Run, did: &Did, now: Timestamp) -> String {
    let Did {
        turns,
        steps,
        activities,
        approvals,
    } = did;
    let mut text = String::new();
    line(&mut text, "run", &plain(&run.id));
    if let Some(parent) = &run.parent_run_id {
        line(&mut text, "parent", &plain(parent));
    }
    let definition = run.definition.as_ref();
    let version = definition.and_then(|d| d.version.as_ref());
    let agent = or_dash(run.agent.as_deref());
    line(
        &mut text,
        "agent",
        &version.map_or_else(|| agent.clone(), |v| format!("{agent}, version {v}")),
    );
    line(&mut text, "status", &status(run));
    if let Some(life) = &run.life {
        line(&mut text, "life", &life.to_string());
    }
    if let Some(step) = &run.step {
        line(&mut text, "step", &plain(step));
    }
    for (name, at) in [
        ("created", run.created_at),
        ("updated", run.updated_at),
        ("deadline", run.deadline),
    ] {
        if let Some(Time(at)) = at {
            line(&mut text, name, &format!("{at} ({})", distance(at, now)));
        }
    }
    if !run.budgets.is_empty() {
        let budgets: Vec<String> = run.budgets.iter().map(|(name, b)| budget(name, b)).collect();
        line(&mut text, "budgets", &budgets.join(", "));
    }
    if !run.waiting_on.is_empty() {
        text.push_str("\nwaits for\n");
        for on in &run.waiting_on {
            waiting_on(&mut text, run, on, now);
        }
    }
    text.push_str(&end("outcome", run));
    journal::decisions(&mut text, approvals, activities, now);
    if !turns.is_empty() {
        text.push_str("\nturns\n");
        for turn in turns {
            self::turn(&mut text, turn);
        }
    }
    journal::calls(&mut text, activities);
    if !steps.is_empty() {
        text.push_str("\nsteps\n");
        let rows = steps.iter().map(|step| {
            vec![
                plain(&step.name),
                or_dash(step.kind.as_deref()),
                plain(&step.status),
                step.attempts.as_ref().map_or_else(String::new, |n| n.to_string()),
                step.error.as_ref().map_or_else(String::new, error),
            ]
        });
        for row in table(&["STEP", "KIND", "STATUS", "ATTEMPTS", "ERROR"], rows).lines() {
            indented(&mut text, row);
        }
    }
    text
}

/// Where a run stands.
pub(super) fn status(run: &Run) -> String {
    // A run whose records do not verify has only its id.
    let mut text = if run.status.is_empty() {
        String::from("unknown")
    } else {
        plain(&run.status)
    };
    if let Some(blocked) = &run.blocked {
        // Writing to a string does not fail.
        let _ = write!(text, " (blocked: {})", plain(blocked));
    } else if run.outcome.is_some() && run.resumable {
        text.push_str(" (resumable)");
    }
    text
}

/// What a run waits for, in a few words; things of one sort are counted.
fn waits(on: &[WaitingOn]) -> String {
    let mut words: Vec<(String, u32)> = Vec::new();
    for one in on {
        let word = match &one.tool {
            Some(tool) => format!("{} {}", plain(&one.kind), plain(tool)),
            None => plain(&one.kind),
        };
        match words.iter_mut().find(|(known, _)| *known == word) {
            Some((_, n)) => *n += 1,
            None => words.push((word, 1)),
        }
    }
    let texts: Vec<String> = words
        .into_iter()
        .map(|(word, n)| if n == 1 { word } else { format!("{n} × {word}") })
        .collect();
    if texts.is_empty() {
        String::from("-")
    } else {
        texts.join(", ")
    }
}

fn waiting_on(text: &mut String, run: &Run, on: &WaitingOn, now: Timestamp) {
    let mut head = plain(&on.kind);
    for word in [&on.id, &on.activity_id, &on.child_run_id, &on.key, &on.tool]
        .into_iter()
        .flatten()
    {
        let _ = write!(head, " {}", plain(word));
    }
    if let Some(attempt) = &on.attempt {
        let _ = write!(head, ", attempt {attempt}");
    }
    for (what, at) in [
        ("expires", on.expires_at),
        ("next attempt", on.next_attempt_at),
        ("due", on.due_at),
        ("deadline", on.deadline),
    ] {
        if let Some(Time(at)) = at {
            let _ = write!(head, ", {what} {at} ({})", distance(at, now));
        }
    }
    indented(text, &head);
    if let Some(prompt) = &on.prompt {
        indented(text, &format!("  {}", plain(prompt)));
    }
    if let Some(schema) = &on.schema {
        indented(text, &format!("  schema {}", json(schema)));
    }
    if let Some(arguments) = &on.arguments {
        indented(text, &format!("  {}", json(arguments)));
    }
    if let Some(digest) = &on.arguments_digest {
        indented(text, &format!("  {}", plain(digest)));
    }
    for command in commands(run, on) {
        indented(text, &format!("  {command}"));
    }
}

/// What somebody types who has an answer.
fn commands(run: &Run, on: &WaitingOn) -> Vec<String> {
    let run = shell(&run.id);
    let verb = |verb: &str, id: &str| format!("iop-edge runs {verb} {run} {}", shell(id));
    match (&*on.kind, &on.id, &on.activity_id) {
        ("approval", Some(id), _) => vec![verb("approve", id), verb("deny", id)],
        ("input", Some(id), _) => vec![format!("{} --text …", verb("answer", id))],
        ("reconciliation", _, Some(id)) => vec![
            verb("reconcile", id),
            format!("{} --action complete|fail|retry …", verb("resolve", id)),
        ],
        ("resume", _, _) => vec![format!("iop-edge runs resume {run}")],
        _ => on.url.iter().map(|url| format!("POST {}", plain(url))).collect(),
    }
}

fn outcome(text: &mut String, outcome: &Outcome) {
    let mut head = plain(&outcome.status);
    if let Some(reason) = &outcome.reason {
        let _ = write!(head, ", {}", plain(reason));
    }
    indented(text, &head);
    if let Some(spent) = &outcome.exhausted {
        let mut budget = format!("budget {}", plain(&spent.budget));
        if let (Some(used), Some(limit)) = (&spent.used, &spent.limit) {
            let _ = write!(budget, ", {used} of {limit}");
        }
        indented(text, &budget);
    }
    if let Some(failed) = &outcome.error {
        indented(text, &error(failed));
    }
    if let Some(output) = &outcome.output {
        indented(text, &json(output));
    }
}

fn error(error: &RunError) -> String {
    let words = [&error.kind, &error.code].into_iter().flatten();
    let mut text = words.map(|word| plain(word)).collect::<Vec<_>>().join(" ");
    if let Some(step) = &error.step {
        let _ = write!(text, " at {}", plain(step));
    }
    if let Some(message) = &error.message {
        let _ = write!(text, ": {}", excerpt(message));
    }
    text
}

fn turn(text: &mut String, turn: &Turn) {
    let mut head = turn.n.to_string();
    if let Some(usage) = &turn.usage {
        let count = |n: Option<u64>| n.map_or_else(|| String::from("?"), |n| n.to_string());
        let _ = write!(
            head,
            ", {} + {} tokens",
            count(usage.input_tokens),
            count(usage.output_tokens)
        );
    }
    if let Some(attempts) = turn.attempts.as_ref().filter(|n| n.as_u64() != Some(1)) {
        let _ = write!(head, ", {attempts} attempts");
    }
    indented(text, &head);
    let Some(response) = &turn.response else { return };
    for said in [&response.content, &response.refusal].into_iter().flatten() {
        if !said.is_empty() {
            indented(text, &format!("  {}", excerpt(said)));
        }
    }
    for call in &response.tool_calls {
        indented(
            text,
            &format!("  {} {}", plain(&call.name), plain(&call.arguments)),
        );
    }
}

fn budget(name: &str, budget: &Budget) -> String {
    let number = |n: &Option<Box<RawValue>>| n.as_deref().map_or_else(|| String::from("-"), json);
    format!(
        "{} {}/{}",
        plain(name),
        number(&budget.used),
        number(&budget.limit)
    )
}

#[cfg(test)]
mod tests;
