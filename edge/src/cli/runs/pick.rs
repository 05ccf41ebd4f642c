//! Which approval, question or call is meant. Pure: what the edge has told comes in. What is named is taken whatever its state, since
//! the edge says what is wrong with deciding it; what is not named has to be the only one that is open.

use super::Decide;
use super::render::{self, plain};
use super::wire::{Activity, Approval, Run, WaitingOn};

/// # Errors
/// Why it cannot be told which one is meant.
pub(super) fn approval<'a>(all: &'a [Approval], what: &Decide) -> Result<&'a Approval, String> {
    let run = plain(&what.run);
    if let Some(named) = &what.approval {
        let found = all.iter().find(|approval| approval.id == *named);
        return found
            .ok_or_else(|| format!("approval_not_found: run {run} has no approval {}", plain(named)));
    }
    let repeated =
        |approval: &&Approval| what.decision_id.is_some() && approval.decision_id == what.decision_id;
    if let Some(decided) = all.iter().find(repeated) {
        return Ok(decided);
    }
    let pending = all.iter().filter(|approval| approval.is_pending());
    let none = format!("no call of run {run} waits for an approval");
    only(pending, &none, "calls", "approval", &run, |one| {
        format!(
            "{} {} {}",
            plain(&one.id),
            plain(&one.tool),
            render::arguments(one.arguments.as_deref())
        )
    })
}

/// The question, and what the run says of it. One that was named may have its answer already: then it is not there, and the edge
/// answers for it.
///
/// # Errors
/// As `approval`.
pub(super) fn input<'a>(
    run: &'a Run,
    named: Option<&'a str>,
) -> Result<(&'a str, Option<&'a WaitingOn>), String> {
    let asked = || run.waiting_on.iter().filter(|on| on.kind == "input");
    if let Some(named) = named {
        return Ok((named, asked().find(|on| on.id.as_deref() == Some(named))));
    }
    let id = plain(&run.id);
    let none = format!("run {id} asks nothing");
    let one = only(asked(), &none, "questions", "input", &id, |one| {
        let words = [&one.id, &one.prompt].into_iter().flatten();
        words.map(|word| plain(word)).collect::<Vec<_>>().join(" ")
    })?;
    match &one.id {
        Some(id) => Ok((id, Some(one))),
        None => Err(format!("the question of run {id} has no id")),
    }
}

/// The call of unknown effect, or the one that this decision was about.
///
/// # Errors
/// As `approval`.
pub(super) fn effect<'a>(
    all: &'a [Activity],
    run: &str,
    named: Option<&str>,
    decision_id: Option<&str>,
) -> Result<&'a Activity, String> {
    let run = plain(run);
    if let Some(named) = named {
        let found = all.iter().find(|activity| activity.id == named);
        return found
            .ok_or_else(|| format!("activity_not_found: run {run} has no activity {}", plain(named)));
    }
    let repeated = |activity: &&Activity| activity.decision(decision_id).is_some();
    if let Some(decided) = all.iter().find(repeated) {
        return Ok(decided);
    }
    let unknown = all.iter().filter(|activity| activity.is_unknown());
    let none = format!("run {run} has no call of unknown effect");
    only(
        unknown,
        &none,
        "calls of unknown effect",
        "activity",
        &run,
        |one| {
            let tool = one.tool.as_deref().unwrap_or_default();
            format!(
                "{} {} {}",
                plain(&one.id),
                plain(tool),
                render::arguments(one.input.as_deref())
            )
        },
    )
}

/// The only one that is open.
fn only<'a, T>(
    open: impl Iterator<Item = &'a T>,
    none: &str,
    things: &str,
    word: &str,
    run: &str,
    told: impl Fn(&T) -> String,
) -> Result<&'a T, String> {
    let open: Vec<&T> = open.collect();
    match *open {
        [] => Err(format!("run_not_waiting: {none}")),
        [one] => Ok(one),
        _ => {
            let lines: Vec<String> = open
                .iter()
                .map(|one| format!("\n  {}", told(one).trim_end()))
                .collect();
            Err(format!(
                "run {run} waits with {} {things}: name the {word} that is meant:{}",
                open.len(),
                lines.concat()
            ))
        }
    }
}

#[cfg(test)]
mod tests;
