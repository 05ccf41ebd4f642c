//! What was decided about a run's calls, and what became of them. Pure.

use jiff::Timestamp;
use serde_json::value::RawValue;

use super::super::wire::{Activity, Approval, Resolved, Time};
use super::text::{distance, excerpt, indented, or_dash, table};
use super::{error, json, plain, state};

/// What people said, or left unsaid until it was too late, in the order of time.
pub(super) fn decisions(text: &mut String, approvals: &[Approval], activities: &[Activity], now: Timestamp) {
    let of_people = approvals
        .iter()
        .filter(|approval| !approval.is_pending())
        .map(|approval| Said {
            at: approval.decided_at,
            tool: Some(&approval.tool),
            what: plain(&approval.status),
            id: &approval.id,
            by: approval.decided_by.as_deref(),
            reason: approval.reason.as_deref(),
            instead: approval.edited_arguments.as_deref(),
            evidence: None,
        });
    let of_operators = activities.iter().flat_map(|activity| {
        let said = |resolved| resolution(activity, resolved);
        activity.decisions.iter().map(said)
    });
    let mut all: Vec<Said<'_>> = of_people.chain(of_operators).collect();
    if all.is_empty() {
        return;
    }
    all.sort_by_key(|said| said.at.map(|at| at.0));
    text.push_str("\ndecisions\n");
    for said in &all {
        said.show(text, now);
    }
}

/// Something that was decided about a call.
struct Said<'a> {
    at: Option<Time>,
    tool: Option<&'a str>,
    what: String,
    /// Of the approval or the activity.
    id: &'a str,
    by: Option<&'a str>,
    reason: Option<&'a str>,
    instead: Option<&'a RawValue>,
    evidence: Option<&'a RawValue>,
}

fn resolution<'a>(activity: &'a Activity, resolved: &'a Resolved) -> Said<'a> {
    Said {
        at: resolved.created_at,
        tool: activity.tool.as_deref(),
        what: format!("resolved, {}", plain(&resolved.action)),
        id: &activity.id,
        by: resolved.by.as_deref(),
        reason: resolved.reason.as_deref(),
        instead: None,
        evidence: resolved.evidence.as_deref(),
    }
}

impl Said<'_> {
    fn show(&self, text: &mut String, now: Timestamp) {
        let by = self
            .by
            .map_or_else(String::new, |by| format!(" by {}", plain(by)));
        let at = self
            .at
            .map_or_else(String::new, |Time(at)| format!(", {at} ({})", distance(at, now)));
        indented(
            text,
            &format!("{} {} {}{by}{at}", plain(self.id), or_dash(self.tool), self.what),
        );
        if let Some(reason) = self.reason {
            indented(text, &format!("  reason   {}", excerpt(reason)));
        }
        if let Some(evidence) = self.evidence {
            indented(text, &format!("  evidence {}", json(evidence)));
        }
        if let Some(instead) = self.instead {
            indented(text, &format!("  instead  {}", json(instead)));
        }
    }
}

/// The calls that were made, one per line. Those that were denied are among the decisions.
pub(super) fn calls(text: &mut String, activities: &[Activity]) {
    if activities.is_empty() {
        return;
    }
    text.push_str("\ncalls\n");
    let rows = activities.iter().map(|activity| {
        vec![
            plain(&activity.id),
            or_dash(activity.step.as_deref()),
            or_dash(activity.tool.as_deref()),
            state(activity),
            activity.attempt.to_string(),
            activity.error.as_ref().map_or_else(String::new, error),
        ]
    });
    for row in table(&["ACTIVITY", "STEP", "TOOL", "STATE", "ATTEMPTS", "ERROR"], rows).lines() {
        indented(text, row);
    }
}
