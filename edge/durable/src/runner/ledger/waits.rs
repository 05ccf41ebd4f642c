//! Waits of the activation: gates that its node asks for, and the wait of the graph behind it.

use std::time::Duration;

use super::{Ledger, ParkedOn, conflict};
use crate::failure::{Failure, FailureKind};
use crate::ids::{Key, NodeName, WaitId};
use crate::machine::wait::{self, Address, Armed, WaitSpec};
use crate::record::{Continuation, WaitRecord, WaitStatus};
use crate::time::Timestamp;

/// Whether a wait ended with its run, without anybody's word.
fn was_withdrawn(wait: &WaitRecord) -> bool {
    wait.status == WaitStatus::Cancelled && wait.settled.as_ref().is_some_and(|settled| settled.by.is_none())
}

impl Ledger {
    /// Settles the armed wait of the graph by its timer, when it is due. Its route, or `None`.
    pub(crate) fn time_out_route(&self, now: Timestamp) -> Option<NodeName> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        for (id, record) in &mut inner.waits {
            if let Continuation::Nodes { on_timeout, .. } = &record.continuation {
                let to = on_timeout.clone();
                if wait::time_out(record, now) {
                    inner.dirty_waits.insert(id.clone());
                    return Some(to);
                }
            }
        }
        None
    }

    /// Withdraws every armed wait: a resume goes on elsewhere.
    pub(crate) fn withdraw_waits(&self, now: Timestamp) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        for (id, record) in &mut inner.waits {
            if wait::withdraw(record, now) {
                inner.dirty_waits.insert(id.clone());
            }
        }
    }

    /// Asks for a gate: its settled record, or `None` while it is armed. A new one is armed with the next commit.
    pub(crate) fn gate(
        &self,
        mut spec: WaitSpec,
        within: Option<Duration>,
        now: Timestamp,
    ) -> Result<Option<WaitRecord>, Failure> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let mut generation = 1;
        let id = loop {
            let (run, node) = (&self.entry.run, &self.entry.node);
            let id = WaitId::derive(run, node, self.entry.activation, &spec.key, generation);
            match inner.waits.get(&id) {
                // Withdrawn when an earlier life ended: this one asks anew.
                Some(wait) if was_withdrawn(wait) => generation += 1,
                Some(_) | None => break id,
            }
        };
        let Some(existing) = inner.waits.get(&id) else {
            if inner.stopping {
                return Ok(None);
            }
            spec.deadline = spec.deadline.or_else(|| within.map(|within| now.plus(within)));
            wait::check(&spec).map_err(|e| Failure::new(FailureKind::Configuration, e.to_string()))?;
            let address = Address {
                run: self.entry.run.clone(),
                node: self.entry.node.clone(),
                activation: self.entry.activation,
            };
            let record = wait::arm(&address, &spec, generation, now);
            inner.parked.insert(ParkedOn::Gate(id.clone()), record.deadline);
            inner.dirty_waits.insert(id.clone());
            inner.waits.insert(id, record);
            return Ok(None);
        };
        if within.is_some() {
            // A span counts from when the gate was armed.
            spec.deadline = existing.deadline;
        }
        match wait::rearm(existing, &spec) {
            Ok(Armed::Settled) => {
                inner.parked.remove(&ParkedOn::Gate(id.clone()));
                Ok(inner.waits.get(&id).cloned())
            }
            Ok(Armed::StillArmed) => {
                inner.parked.insert(ParkedOn::Gate(id), existing.deadline);
                Ok(None)
            }
            Err(e) => Err(conflict(e)),
        }
    }

    /// The gate of this key that is settled; `None` while it is armed, and when nobody asked for it.
    pub(crate) fn settled(&self, key: &Key) -> Option<WaitRecord> {
        let inner = self.inner.lock();
        let of = |generation| {
            let (run, node) = (&self.entry.run, &self.entry.node);
            let id = WaitId::derive(run, node, self.entry.activation, key, generation);
            inner.waits.get(&id)
        };
        let asked_for = (1..).map_while(of).find(|wait| !was_withdrawn(wait))?;
        (asked_for.status != WaitStatus::Armed).then(|| asked_for.clone())
    }

    pub(crate) async fn wait_changed(&self) {
        self.waits_changed.notified().await;
    }

    /// What the inbox says about the gates; the calls that wait for them look again.
    pub(crate) fn refresh_waits(&self, waits: Vec<WaitRecord>) {
        let mut inner = self.inner.lock();
        for wait in waits {
            // What is stored was there first: a settlement of ours that did not land gives way.
            inner.dirty_waits.remove(&wait.id);
            if wait.status != WaitStatus::Armed {
                inner.parked.remove(&ParkedOn::Gate(wait.id.clone()));
            }
            inner.waits.insert(wait.id.clone(), wait);
        }
        drop(inner);
        self.waits_changed.notify_waiters();
    }

    /// Lets the timer settle gates whose deadline has passed. Whether any was.
    pub(crate) fn time_out_gates(&self, now: Timestamp) -> bool {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let mut any = false;
        for (id, record) in &mut inner.waits {
            if wait::time_out(record, now) {
                inner.dirty_waits.insert(id.clone());
                any = true;
            }
        }
        any
    }

    /// Whether the step of this activation is over and recorded: the run waits behind it.
    pub(crate) fn step_is_recorded(&self) -> bool {
        let inner = self.inner.lock();
        inner
            .waits
            .values()
            .any(|wait| matches!(wait.continuation, Continuation::Nodes { .. }))
    }

    /// Changes one wait.
    pub(crate) fn put_wait(&self, record: WaitRecord) {
        let mut inner = self.inner.lock();
        inner.dirty_waits.insert(record.id.clone());
        inner.waits.insert(record.id.clone(), record);
    }
}
