//! What a creation or a commit must be by itself, before a store looks at what it has. A refusal here is a bug of the caller;
//! nothing is written.

use crate::ids::{RunId, check_text};
use crate::record::{EventRecord, RunHead};
use crate::store::definitions::{KINDS, is_digest_of};
use crate::store::{Authority, Commit, Create, Define, Post, StoreError};

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

/// # Errors
/// `corrupt`.
pub(crate) fn define(define: &Define) -> Result<(), StoreError> {
    hold(
        "there is no such kind of definition",
        KINDS.contains(&&*define.kind),
    )?;
    if let Err(why) = check_text("name", &define.name) {
        return Err(StoreError::corrupt(format!("not written: {why}")));
    }
    // The digest is hex in lower case, or it would not be the one that is computed.
    hold(
        "the digest is not that of the body",
        is_digest_of(&define.digest, &define.body),
    )?;
    let json = std::str::from_utf8(&define.body)
        .is_ok_and(|text| serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok());
    hold("the body of the definition is not JSON", json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::Payload;
    use crate::record::{EventName, Inbox, Scope};
    use crate::store::Loaded;
    use crate::testing::build;

    fn valid_create() -> Create {
        build::create(&build::run("r"), build::at(1))
    }

    fn valid_commit() -> Commit {
        let create = valid_create();
        let loaded = Loaded {
            head: create.head,
            state: create.state,
            seal: [0; 32],
            inbox: Inbox::default(),
            lease: None,
            now: build::at(2),
        };
        build::advance_loaded(&loaded, Authority::Idle)
    }

    fn valid_post() -> Post {
        build::post(&build::run("r"), 0)
    }

    #[test]
    fn a_creation_is_whole() {
        create(&valid_create()).unwrap();
        let mut bare = valid_create();
        bare.events.clear();
        bare.head.event_seq = 0;
        create(&bare).unwrap();
        let wrong: [fn(&mut Create); 5] = [
            |c| c.head.event_seq = 2,
            |c| c.events.clear(),
            |c| {
                c.events[0].seq = 2;
                c.head.event_seq = 2;
            },
            |c| {
                c.events
                    .push(build::event(1, 1, EventName::Started, build::at(1)))
            },
            |c| c.state = Payload::new("another"),
        ];
        for (n, change) in wrong.iter().enumerate() {
            let mut changed = valid_create();
            change(&mut changed);
            assert!(create(&changed).is_err(), "{n}");
        }
    }

    #[test]
    fn a_commit_is_of_one_run() {
        commit(&valid_commit()).unwrap();
        let other = build::run("other");
        let rows: [fn(&mut Commit, &RunId); 6] = [
            |c, run| c.activities.push(build::activity(run, 1, "a")),
            |c, run| c.waits.push(build::wait(run, 1, "w", "about", build::at(1))),
            |c, run| {
                c.decisions
                    .push(build::decision(run, Scope::Operator, "d", build::at(1)));
            },
            |c, run| {
                c.guard.authority = Authority::Lease(crate::store::Lease {
                    run: run.clone(),
                    owner: build::lease_for("w", build::LONG).owner,
                    incarnation: 1,
                    expires_at: build::at(9),
                });
                c.release = true;
            },
            |c, run| {
                let seq = c.head.event_seq + u64::from(run.as_str() == "other");
                c.events[0].seq = seq;
            },
            |c, run| {
                c.state = Payload::new(if run.as_str() == "r" {
                    "state of r at 2"
                } else {
                    "x"
                })
            },
        ];
        for (n, add) in rows.iter().enumerate() {
            let mut changed = valid_commit();
            add(&mut changed, &build::run("r"));
            assert!(commit(&changed).is_ok(), "{n}");
            let mut changed = valid_commit();
            add(&mut changed, &other);
            assert!(commit(&changed).is_err(), "{n}");
        }
        let mut idle = valid_commit();
        idle.release = true;
        assert!(commit(&idle).is_err());
        let mut gap = valid_commit();
        gap.events
            .push(build::event(4, 1, EventName::Started, build::at(1)));
        gap.head.event_seq = 4;
        assert!(commit(&gap).is_err());
    }

    #[test]
    fn a_definition_is_json_with_its_digest_under_a_name() {
        let valid = build::define("deployer", "{\"a\":1}");
        define(&valid).unwrap();
        let wrong: [fn(&mut Define); 8] = [
            |d| d.kind = "graph".to_owned(),
            |d| d.name.clear(),
            |d| d.name = "n".repeat(257),
            |d| d.name = "n\0".to_owned(),
            |d| d.digest = d.digest.to_uppercase(),
            |d| d.body = "{\"a\":2}".into(),
            |d| *d = build::define("deployer", "{"),
            |d| *d = build::define("deployer", vec![b'"', 0xff, b'"']),
        ];
        for (n, change) in wrong.iter().enumerate() {
            let mut changed = valid.clone();
            change(&mut changed);
            assert_eq!(define(&changed).map_err(|e| e.kind()), Err("corrupt"), "{n}");
        }
    }

    #[test]
    fn a_post_is_for_one_run() {
        post(&valid_post()).unwrap();
        let mut wait = valid_post();
        wait.waits = vec![build::wait(&build::run("other"), 1, "w", "about", build::at(1))];
        assert!(post(&wait).is_err());
        let mut decision = valid_post();
        decision.decisions = vec![build::decision(
            &build::run("other"),
            Scope::Cancel,
            "d",
            build::at(1),
        )];
        assert!(post(&decision).is_err());
    }
}
