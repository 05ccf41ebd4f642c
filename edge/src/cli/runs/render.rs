//! Runs and approvals as text. Pure: the time comes in.
//!
//! What a model or a client wrote is shown as it is, but for characters that a terminal would act on or hide: those stand as
//! JSON escapes, so that nobody approves something else than what is there (D73).

use std::fmt::Write as _;

use jiff::Timestamp;
use serde_json::value::RawValue;

use super::wire::{Approval, Budget, Outcome, Run, RunError, Step, Time, Turn, WaitingOn};

/// Longest text of a model or a prompt in an overview.
const EXCERPT: usize = 200;

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
            approval
                .arguments
                .as_deref()
                .map_or_else(|| String::from("-"), json),
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
    let arguments = approval.arguments.as_deref();
    line(
        &mut text,
        "arguments",
        &arguments.map_or_else(|| String::from("-"), json),
    );
    line(&mut text, "digest", &plain(&approval.arguments_digest));
    text
}

/// One run: where it stands, what it waits for, what it did.
pub(super) fn run(run: &Run, steps: &[Step], turns: &[Turn], now: Timestamp) -> String {
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
    if let Some(ended) = &run.outcome {
        text.push_str("\noutcome\n");
        outcome(&mut text, ended);
    }
    if !turns.is_empty() {
        text.push_str("\nturns\n");
        for turn in turns {
            self::turn(&mut text, turn);
        }
    }
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
    if let Some(arguments) = &on.arguments {
        indented(text, &format!("  {}", json(arguments)));
    }
    if let Some(digest) = &on.arguments_digest {
        indented(text, &format!("  {}", plain(digest)));
    }
    match (&*on.kind, &on.id) {
        ("approval", Some(id)) => indented(
            text,
            &format!("  iop-edge runs approve {} {}", plain(&run.id), plain(id)),
        ),
        ("resume", _) => indented(text, &format!("  iop-edge runs resume {}", plain(&run.id))),
        _ => {
            if let Some(url) = &on.url {
                indented(text, &format!("  POST {}", plain(url)));
            }
        }
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

/// Text that a terminal shows and does not act on: control characters, those that turn or join the writing, and those that
/// have no width stand as JSON escapes.
pub(super) fn plain(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(c);
        }
    }
    shown
}

/// JSON as it was sent, on one line.
pub(super) fn json(raw: &RawValue) -> String {
    let (mut quoted, mut escaped) = (false, false);
    let one_line: String = raw
        .get()
        .chars()
        .map(|c| {
            if escaped {
                escaped = false;
            } else if quoted && c == '\\' {
                escaped = true;
            } else if c == '"' {
                quoted = !quoted;
            }
            // Between values only white space is a control character.
            if !quoted && c.is_control() { ' ' } else { c }
        })
        .collect();
    plain(&one_line)
}

fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

/// The beginning of a long text.
fn excerpt(text: &str) -> String {
    match text.char_indices().nth(EXCERPT) {
        None => plain(text),
        Some((end, _)) => format!("{} …", plain(&text[..end])),
    }
}

fn or_dash(text: Option<&str>) -> String {
    text.map_or_else(|| String::from("-"), plain)
}

fn line(text: &mut String, name: &str, value: &str) {
    let _ = writeln!(text, "{name:<10}{value}");
}

fn indented(text: &mut String, value: &str) {
    let _ = writeln!(text, "  {value}");
}

fn age(since: Option<Time>, now: Timestamp) -> String {
    since.map_or_else(|| String::from("-"), |since| span(seconds(since.0, now)))
}

fn until(at: Timestamp, now: Timestamp) -> String {
    match seconds(now, at) {
        0 => String::from("over"),
        left => span(left),
    }
}

/// `in 3h` or `3h ago`.
fn distance(at: Timestamp, now: Timestamp) -> String {
    if at > now {
        format!("in {}", span(seconds(now, at)))
    } else {
        format!("{} ago", span(seconds(at, now)))
    }
}

/// Whole seconds between two times; none when the first is later, as with two clocks that differ.
fn seconds(from: Timestamp, to: Timestamp) -> u64 {
    u64::try_from(to.as_second().saturating_sub(from.as_second())).unwrap_or(0)
}

/// One unit: seconds, minutes, hours up to two days, then days.
fn span(seconds: u64) -> String {
    match seconds {
        0..=59 => format!("{seconds}s"),
        60..=3_599 => format!("{}m", seconds / 60),
        3_600..=172_799 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Columns under their headings; without rows only the headings.
fn table(heads: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let heads = heads.iter().map(|head| (*head).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(heads).chain(rows).collect();
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..columns)
        .map(|n| {
            let cells = rows.iter().filter_map(|row| row.get(n));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}"));
        let whole = cells.collect::<Vec<_>>().join("  ");
        text.push_str(whole.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests;
