//! Requests waiting for a provider with room: bounded per model, by class, and fair between keys (G33). Pure.
//!
//! Inside a class of a model it is start-time fair queueing with unit cost. A key has a round: where its next request
//! stands. It rises by one with each request that is served, and the requests behind it stand one round apart. A key that
//! comes anew starts at the virtual round, which is the lowest one that waits. So while a key waits, between two of its
//! requests any other key gets two places at most, and before its first one any other key gets one place. Who leaves
//! unserved costs its key no round.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Who;
use crate::config::Priority;

/// Names a waiter; never used twice. Below zero: it came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ticket(i64);

impl Ticket {
    const OLDEST: Self = Self(i64::MIN);

    fn came_back(self) -> bool {
        self.0 < 0
    }
}

const CLASSES: usize = 3;

/// The place of a priority among the classes; the lowest goes first.
fn class_of(priority: Priority) -> usize {
    match priority {
        Priority::High => 0,
        Priority::Normal => 1,
        Priority::Low => 2,
    }
}

struct Waiter<W> {
    model: Arc<str>,
    key: Arc<str>,
    class: usize,
    with: W,
}

/// The line. `W` is what the shell keeps with a waiter.
pub(super) struct Queue<W> {
    waiters: BTreeMap<Ticket, Waiter<W>>,
    /// Of each model that somebody waits for.
    lines: BTreeMap<Arc<str>, Line>,
    next: i64,
    next_front: i64,
    max_depth: usize,
}

#[derive(Default)]
struct Line {
    depth: usize,
    classes: [Class; CLASSES],
}

/// One class of one model.
#[derive(Default)]
struct Class {
    /// Who came back, the latest first; outside of the rounds, for its place was counted when it was served.
    back: BTreeSet<Ticket>,
    /// Keys that wait, and keys whose round is still ahead of the virtual one.
    keys: BTreeMap<Arc<str>, Turn>,
    /// The rounds of `keys`. The first one waits: it is the virtual round.
    rounds: BTreeSet<(u64, Arc<str>)>,
}

struct Turn {
    /// Where the first of `waiting` stands, or the next one to come; the n-th behind it stands n rounds later.
    round: u64,
    waiting: BTreeSet<Ticket>,
}

impl Class {
    fn join(&mut self, key: &Arc<str>, ticket: Ticket) {
        if ticket.came_back() {
            self.back.insert(ticket);
            return;
        }
        // A key that is known is not behind the virtual round: those were forgotten.
        let virtual_round = self.rounds.first().map_or(0, |(round, _)| *round);
        let turn = self.keys.entry(key.clone()).or_insert_with(|| Turn {
            round: virtual_round,
            waiting: BTreeSet::new(),
        });
        turn.waiting.insert(ticket);
        self.rounds.insert((turn.round, key.clone()));
    }

    fn leave(&mut self, key: &Arc<str>, ticket: Ticket, served: bool) {
        if self.back.remove(&ticket) {
            return;
        }
        if let Some(turn) = self.keys.get_mut(key)
            && turn.waiting.remove(&ticket)
            && served
        {
            self.rounds.remove(&(turn.round, key.clone()));
            turn.round += 1;
            self.rounds.insert((turn.round, key.clone()));
        }
        // A key that does not wait and is not ahead starts at the virtual round anyway.
        while let Some((_, key)) = self.rounds.first()
            && self.keys.get(key).is_none_or(|turn| turn.waiting.is_empty())
        {
            self.keys.remove(key);
            self.rounds.pop_first();
        }
    }

    /// Its waiters in their order.
    fn order(&self) -> impl Iterator<Item = Ticket> {
        let turns = self.keys.values();
        let mut rounds: Vec<(u64, Ticket)> = turns
            .flat_map(|turn| (turn.round..).zip(turn.waiting.iter().copied()))
            .collect();
        rounds.sort_unstable();
        let back = self.back.iter().copied();
        back.chain(rounds.into_iter().map(|(_, ticket)| ticket))
    }
}

impl<W> Queue<W> {
    /// `max_depth`: waiters of one model.
    pub(super) fn new(max_depth: usize) -> Self {
        Self {
            waiters: BTreeMap::new(),
            lines: BTreeMap::new(),
            next: 0,
            next_front: -1,
            max_depth,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.waiters.len()
    }

    pub(super) fn depth(&self, model: &str) -> usize {
        self.lines.get(model).map_or(0, |line| line.depth)
    }

    /// Joins the line; `None`: it is full for this model.
    pub(super) fn join(&mut self, model: Arc<str>, who: &Who, with: W) -> Option<Ticket> {
        if self.depth(&model) >= self.max_depth {
            return None;
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.stand(ticket, model, who, with);
        Some(ticket)
    }

    /// Comes back to the head of its class: it was served before, and its place turned out to be taken. No bound, for it
    /// was let in already.
    pub(super) fn come_back(&mut self, model: Arc<str>, who: &Who, with: W) -> Ticket {
        let ticket = Ticket(self.next_front);
        self.next_front -= 1;
        self.stand(ticket, model, who, with);
        ticket
    }

    fn stand(&mut self, ticket: Ticket, model: Arc<str>, who: &Who, with: W) {
        let class = class_of(who.priority);
        let line = self.lines.entry(model.clone()).or_default();
        line.depth += 1;
        line.classes[class].join(&who.key, ticket);
        let key = who.key.clone();
        self.waiters.insert(
            ticket,
            Waiter {
                model,
                key,
                class,
                with,
            },
        );
    }

    /// Leaves the line, wherever in it.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        self.remove(ticket, false);
    }

    fn remove(&mut self, ticket: Ticket, served: bool) -> Option<W> {
        let waiter = self.waiters.remove(&ticket)?;
        if let Some(line) = self.lines.get_mut(&waiter.model) {
            line.classes[waiter.class].leave(&waiter.key, ticket, served);
            line.depth -= 1;
            if line.depth == 0 {
                self.lines.remove(&waiter.model);
            }
        }
        Some(waiter.with)
    }

    /// All waiters: by class, then as the lines of the models merge by the oldest ticket at their heads.
    fn order(&self) -> Vec<Ticket> {
        let mut order = Vec::with_capacity(self.waiters.len());
        for line in self.lines.values() {
            for (class, waiters) in line.classes.iter().enumerate() {
                // A merge by heads takes each one when it takes the newest of those before it.
                let mut newest = Ticket::OLDEST;
                for ticket in waiters.order() {
                    newest = newest.max(ticket);
                    order.push((class, newest, ticket));
                }
            }
        }
        order.sort_by_key(|(class, newest, _)| (*class, *newest));
        order.into_iter().map(|(_, _, ticket)| ticket).collect()
    }

    /// Offers a place to each waiter in order; who takes one leaves the line.
    pub(super) fn offer<T>(&mut self, mut take: impl FnMut(&W) -> Option<T>) -> Vec<(W, T)> {
        let mut served = Vec::new();
        for ticket in self.order() {
            if let Some(place) = self.waiters.get(&ticket).and_then(|waiter| take(&waiter.with))
                && let Some(with) = self.remove(ticket, true)
            {
                served.push((with, place));
            }
        }
        served
    }

    /// All waiters, in no order of service.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &W> {
        self.waiters.values().map(|w| &w.with)
    }
}

#[cfg(test)]
mod tests;
