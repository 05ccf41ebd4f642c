//! What a creation or a commit must be by itself, before a store looks at what it has. A refusal here is a bug of the caller;
//! nothing is written.

use crate::ids::RunId;
use crate::record::{EventRecord, RunHead};
use crate::store::{Authority, Commit, Create, Post, StoreError};

fn hold(what: &str, holds: bool) -> Result<(), StoreError> {
    if holds {
        Ok(())
    } else {
        Err(StoreError::corrupt(format!("not written: {what}")))
    }
}

/// Events are numbered on from what the run has, without gaps, up to the number in the head (D243).
fn events(head: &RunHead, events: &[EventRecord]) -> Result<(), StoreError> {
    let numbered = events
        .iter()
        .rev()
        .zip(0..)
        .all(|(event, back)| head.event_seq.checked_sub(back) == Some(event.seq) && event.seq > 0);
    hold("the events are not numbered up to the head's number", numbered)
}

/// # Errors
/// `corrupt`.
pub(crate) fn create(create: &Create) -> Result<(), StoreError> {
    events(&create.head, &create.events)?;
    hold(
        "the first events of a run are not numbered from 1",
        create.head.event_seq == create.events.len() as u64,
    )?;
    hold(
        "the head has the digest of another state",
        create.head.state_digest == *create.state.digest(),
    )
}

/// # Errors
/// `corrupt`.
pub(crate) fn commit(commit: &Commit) -> Result<(), StoreError> {
    let id = &commit.head.id;
    events(&commit.head, &commit.events)?;
    hold(
        "the head has the digest of another state",
        commit.head.state_digest == *commit.state.digest(),
    )?;
    let idle = match &commit.guard.authority {
        Authority::Lease(lease) => {
            hold("the lease is for another run", lease.run == *id)?;
            false
        }
        Authority::Idle => true,
    };
    hold("there is no lease to give back", !(idle && commit.release))?;
    hold(
        "an activity is of another run",
        commit.activities.iter().all(|a| a.run == *id),
    )?;
    rows(
        id,
        commit.waits.iter().map(|w| &w.run),
        commit.decisions.iter().map(|d| &d.run),
    )
}

/// # Errors
/// `corrupt`.
pub(crate) fn post(post: &Post) -> Result<(), StoreError> {
    rows(
        &post.run,
        post.waits.iter().map(|w| &w.run),
        post.decisions.iter().map(|d| &d.run),
    )
}

fn rows<'a>(
    id: &RunId,
    mut waits: impl Iterator<Item = &'a RunId>,
    mut decisions: impl Iterator<Item = &'a RunId>,
) -> Result<(), StoreError> {
    hold("a wait is of another run", waits.all(|run| run == id))?;
    hold("a decision is of another run", decisions.all(|run| run == id))
}
