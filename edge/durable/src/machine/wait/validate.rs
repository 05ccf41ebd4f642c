//! What a wait must look like: before it is armed, when it is asked for again, and when it comes back from the store.

use std::collections::BTreeMap;

use super::{Armed, WaitSpec, is_due};
use crate::ids::{InvalidId, Key, NodeName, RunId, WaitId, check_text};
use crate::record::{DeadlinePolicy, Settled, WaitLabels, WaitRecord, WaitStatus, WaitingKind};
use crate::time::Timestamp;

/// Why a wait is not armed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidWait {
    #[error(transparent)]
    Label(#[from] InvalidId),
    #[error("{kind}: not a kind of wait; approval, input, event, timer and children are")]
    Kind { kind: WaitingKind },
    #[error("a timer needs a deadline")]
    TimerWithoutDeadline,
    /// The wait of this address and key was armed with another `what`.
    #[error("this wait was armed with another {what}")]
    Changed { what: &'static str },
}

/// Whether a wait may be armed at all. Its ids were checked when they were made.
///
/// # Errors
/// `InvalidWait`, naming the label or the rule.
pub fn check(spec: &WaitSpec) -> Result<(), InvalidWait> {
    sound(spec.kind, &spec.labels, spec.deadline)
}

fn sound(kind: WaitingKind, labels: &WaitLabels, deadline: Option<Timestamp>) -> Result<(), InvalidWait> {
    match kind {
        WaitingKind::Timer if deadline.is_none() => return Err(InvalidWait::TimerWithoutDeadline),
        WaitingKind::Approval
        | WaitingKind::Input
        | WaitingKind::Event
        | WaitingKind::Timer
        | WaitingKind::Children => {}
        WaitingKind::Retry | WaitingKind::Reconciliation | WaitingKind::Resume | WaitingKind::Handoff => {
            return Err(InvalidWait::Kind { kind });
        }
    }
    check_text("labels.matcher", &labels.matcher)?;
    check_text("labels.payload", &labels.payload)?;
    check_text("labels.continuation", &labels.continuation)?;
    Ok(())
}

/// The same address and key asked again: the record, armed or settled, is the answer (D163). Every part of the request must be
/// what it was. A deadline is absolute: a caller that counts a span from its own entry takes the record's.
///
/// # Errors
/// `Changed`, naming what; and whatever `check` refuses.
pub fn rearm(existing: &WaitRecord, spec: &WaitSpec) -> Result<Armed, InvalidWait> {
    check(spec)?;
    let changes = [
        ("key", existing.key != spec.key),
        ("correlation id", existing.correlation != spec.correlation),
        ("kind", existing.kind != spec.kind),
        ("continuation", existing.continuation != spec.continuation),
        ("labels", existing.labels != spec.labels),
        ("subject", existing.subject != spec.subject),
        ("deadline", existing.deadline != spec.deadline),
        (
            "deadline policy",
            existing.deadline_policy != spec.deadline_policy,
        ),
    ];
    if let Some((what, _)) = changes.into_iter().find(|(_, changed)| *changed) {
        return Err(InvalidWait::Changed { what });
    }
    Ok(match existing.status {
        WaitStatus::Armed => Armed::StillArmed,
        WaitStatus::Delivered | WaitStatus::TimedOut | WaitStatus::Cancelled => Armed::Settled,
    })
}

/// Whether the waits of a run agree with each other and with its sealed head, before anything runs: `activation` is the head's
/// present one, `armed` its count of armed waits. No step is committed over an armed wait, so those are of this activation.
/// Times are not compared with each other except where the machine did: a host's clock may have been set back.
///
/// # Errors
/// What is wrong, naming the wait.
pub fn validate(waits: &[WaitRecord], run: &RunId, activation: u64, armed: u32) -> Result<(), String> {
    let mut generations: BTreeMap<(&NodeName, u64, &Key), BTreeMap<u32, &WaitRecord>> = BTreeMap::new();
    for wait in waits {
        one(wait, run, activation).map_err(|why| format!("wait {}: {why}", wait.id))?;
        let twice = generations
            .entry((&wait.node, wait.activation, &wait.key))
            .or_default()
            .insert(wait.generation, wait);
        if twice.is_some() {
            return Err(format!("wait {}: it is there twice", wait.id));
        }
    }
    for older in generations.values().flat_map(|of| of.values().rev().skip(1)) {
        if older.status == WaitStatus::Armed {
            return Err(format!(
                "wait {}: it is armed beside a later generation",
                older.id
            ));
        }
    }
    let found = waits
        .iter()
        .filter(|wait| wait.status == WaitStatus::Armed)
        .count();
    if u32::try_from(found) != Ok(armed) {
        return Err(format!("{found} waits are armed, the head says {armed}"));
    }
    Ok(())
}

fn one(wait: &WaitRecord, run: &RunId, activation: u64) -> Result<(), String> {
    if wait.run != *run {
        return Err("it belongs to another run".to_owned());
    }
    if wait.id != WaitId::derive(run, &wait.node, wait.activation, &wait.key, wait.generation) {
        return Err("its address is not its identity".to_owned());
    }
    if wait.generation == 0 || wait.activation == 0 {
        return Err("generations and activations count from 1".to_owned());
    }
    if wait.activation > activation {
        return Err(format!(
            "it is of activation {}, the head is at {activation}",
            wait.activation
        ));
    }
    if wait.status == WaitStatus::Armed && wait.activation != activation {
        return Err(format!(
            "it is armed in activation {}, the head is at {activation}",
            wait.activation
        ));
    }
    sound(wait.kind, &wait.labels, wait.deadline).map_err(|e| e.to_string())?;
    if !settled_as_it_says(wait) {
        return Err(format!("it is {}, what settled it says otherwise", wait.status));
    }
    Ok(())
}

fn settled_as_it_says(wait: &WaitRecord) -> bool {
    let Some(Settled { by, payload, at }) = &wait.settled else {
        return wait.status == WaitStatus::Armed;
    };
    match wait.status {
        WaitStatus::Armed => false,
        WaitStatus::Delivered => {
            let late = match wait.deadline_policy {
                DeadlinePolicy::FirstCommitted => false,
                DeadlinePolicy::Hard => is_due(wait, *at),
            };
            by.is_some()
                && payload.is_some()
                && wait.deliveries > 0
                && wait.kind != WaitingKind::Timer
                && !late
        }
        WaitStatus::TimedOut => by.is_none() && payload.is_none() && is_due(wait, *at),
        WaitStatus::Cancelled => payload.is_none(),
    }
}
