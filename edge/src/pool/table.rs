//! Who is live, with how much room, in what health, and which leases are out (G31, G32, G35, G41). Pure.
//!
//! Who is given a place stands in `grant`. Keyed by generation: what an old connection says or releases never touches the new one. `S` is what the shell keeps
//! with a provider.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use foldhash::{HashMap, HashMapExt};
use iop_shared::execution::{Endpoint, EvidenceSource, ProviderHealth};
use iop_shared::ids::{ConnectionGeneration, ProviderKey};

use super::ejection::{Ejection, Told, Word};
use super::grant::{Place, Scratch};
use super::overlay::{Evidence, Overlay, Reading, Verdict};
use super::route::Candidate;
use crate::config::EjectionSettings;

/// One target of a live provider.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) name: Arc<str>,
    pub(super) ejection: Ejection,
}

impl Target {
    pub(super) fn new(name: &str) -> Self {
        Self {
            name: Arc::from(name),
            ejection: Ejection::default(),
        }
    }
}

/// One provider of a live session.
#[derive(Debug, Clone)]
pub(super) struct Slot<S> {
    pub(super) generation: ConnectionGeneration,
    pub(super) targets: Vec<Target>,
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) capacity: u32,
    /// The node takes no new work.
    pub(super) draining: bool,
    pub(super) in_flight: u32,
    /// Of the node's last load line, what was not ours: a hint for balance, never a bound.
    pub(super) others: u32,
    /// The node refused for want of room although we saw some.
    pub(super) refused: bool,
    /// What the overlay says of it (004): no new leases.
    pub(super) lowered: bool,
    pub(super) with: S,
}

impl<S> Slot<S> {
    fn target(&self, name: &str) -> Option<&Target> {
        self.targets.iter().find(|t| *t.name == *name)
    }

    pub(super) fn target_mut(&mut self, name: &str) -> Option<&mut Target> {
        self.targets.iter_mut().find(|t| *t.name == *name)
    }

    /// The target, if it takes new work of this kind; full or not, ejected or not.
    pub(super) fn serves(&self, endpoint: Endpoint, target: &str) -> Option<&Target> {
        if self.draining || self.lowered || !self.endpoints.contains(&endpoint) {
            return None;
        }
        self.target(target)
    }

    pub(super) fn has_room(&self) -> bool {
        self.in_flight < self.capacity && !self.refused
    }
}

/// All live providers.
pub(super) struct Table<S> {
    pub(super) slots: HashMap<ProviderKey, Slot<S>>,
    /// Leases of providers that are gone or replaced.
    retired: BTreeMap<(ConnectionGeneration, ProviderKey), u32>,
    /// Generations that get new leases.
    live: BTreeSet<ConnectionGeneration>,
    overlay: Overlay,
    rules: EjectionSettings,
    pub(super) scratch: Scratch,
    pub(super) turn: u64,
}

impl<S: Clone> Table<S> {
    pub(super) fn new(rules: EjectionSettings) -> Self {
        Self {
            slots: HashMap::new(),
            retired: BTreeMap::new(),
            live: BTreeSet::new(),
            overlay: Overlay::default(),
            rules,
            scratch: Scratch::default(),
            turn: 0,
        }
    }

    /// Replaces what a generation advertises. A provider that a newer generation holds is left alone. Health and
    /// ejections are a generation's own: a new one starts clean.
    pub(super) fn advertise(
        &mut self,
        generation: ConnectionGeneration,
        providers: Vec<(ProviderKey, Slot<S>)>,
    ) {
        self.live.insert(generation);
        let gone: Vec<ProviderKey> = self
            .of_generation(generation)
            .filter(|key| !providers.iter().any(|(k, _)| k == *key))
            .cloned()
            .collect();
        for key in gone {
            self.retire_slot(&key);
        }
        for (key, mut slot) in providers {
            match self.slots.get(&key) {
                Some(newer) if newer.generation > generation => continue,
                Some(same) if same.generation == generation => {
                    (slot.in_flight, slot.others) = (same.in_flight, same.others);
                    for target in &mut slot.targets {
                        if let Some(known) = same.target(&target.name) {
                            target.ejection = known.ejection.clone();
                        }
                    }
                }
                Some(_) | None => {
                    self.retire_slot(&key);
                    slot.in_flight = self.retired.remove(&(generation, key.clone())).unwrap_or(0);
                }
            }
            slot.lowered = self.overlay.lowered_by(generation, &key).is_some();
            self.slots.insert(key, slot);
        }
    }

    /// A generation is gone or gets no new leases.
    pub(super) fn retire(&mut self, generation: ConnectionGeneration) {
        let keys: Vec<ProviderKey> = self.of_generation(generation).cloned().collect();
        for key in keys {
            self.retire_slot(&key);
        }
        self.live.remove(&generation);
        self.overlay.forget(generation);
    }

    fn of_generation(&self, generation: ConnectionGeneration) -> impl Iterator<Item = &ProviderKey> {
        self.slots
            .iter()
            .filter(move |(_, s)| s.generation == generation)
            .map(|(k, _)| k)
    }

    fn retire_slot(&mut self, key: &ProviderKey) {
        if let Some(slot) = self.slots.remove(key)
            && slot.in_flight > 0
        {
            self.retired
                .insert((slot.generation, key.clone()), slot.in_flight);
        }
    }

    /// The node's own count of requests at a provider.
    pub(super) fn load(&mut self, generation: ConnectionGeneration, key: &ProviderKey, in_flight: u32) {
        if let Some(slot) = self.slot_of(generation, key) {
            slot.others = in_flight.saturating_sub(slot.in_flight);
            slot.refused = false;
        }
    }

    /// Gives a place back because the node said that it is full: no further place until news or `forget_refusal`.
    pub(super) fn refused(&mut self, place: &Place, endpoint: Endpoint) {
        self.release(place, Told::default(), endpoint, &[]);
        if let Some(slot) = self.slot_of(place.generation, &place.provider) {
            slot.refused = true;
        }
    }

    /// Asks again where a node had refused.
    pub(super) fn forget_refusal(&mut self, key: &ProviderKey) {
        if let Some(slot) = self.slots.get_mut(key) {
            slot.refused = false;
        }
    }

    fn slot_of(&mut self, generation: ConnectionGeneration, key: &ProviderKey) -> Option<&mut Slot<S>> {
        self.slots.get_mut(key).filter(|s| s.generation == generation)
    }

    /// Gives a place back, with what is told of it. A place that was given back already changes nothing. `rivals` are the
    /// candidates of its model; only a failure looks at them. Gives the time at which who waits should be looked at again.
    pub(super) fn release(
        &mut self,
        place: &Place,
        told: Told,
        endpoint: Endpoint,
        rivals: &[Candidate],
    ) -> Option<Instant> {
        let others = match told.word {
            Word::Failure { at } => self.another_eligible(place, endpoint, rivals, at),
            Word::Nothing | Word::Success => false,
        };
        let rules = self.rules;
        if let Some(slot) = self.slot_of(place.generation, &place.provider) {
            slot.in_flight = slot.in_flight.saturating_sub(1);
            slot.refused = false;
            let target = slot.target_mut(&place.target)?;
            return target.ejection.settle(place.pass, told, &rules, others);
        }
        let key = (place.generation, place.provider.clone());
        if let Some(left) = self.retired.get_mut(&key) {
            *left -= 1;
            if *left == 0 {
                self.retired.remove(&key);
            }
        }
        None
    }

    /// What was given as a trial has begun to answer.
    pub(super) fn prove(&mut self, place: &Place) {
        if let Some(target) = self
            .slot_of(place.generation, &place.provider)
            .and_then(|slot| slot.target_mut(&place.target))
        {
            target.ejection.prove(place.pass);
        }
    }

    /// Gives the overlay one piece of evidence. What a probe says holds only while its target is mapped there.
    pub(super) fn observe(
        &mut self,
        generation: ConnectionGeneration,
        key: &ProviderKey,
        (source, target): (EvidenceSource, &Arc<str>),
        bound: bool,
        reading: Option<Reading>,
    ) -> Verdict {
        let slot = self.slots.get(key);
        let mapped = slot.is_some_and(|s| s.generation == generation && s.target(target).is_some());
        let newer = slot.is_some_and(|s| s.generation > generation);
        let evidence = Evidence {
            source,
            bound: bound && (mapped || source != EvidenceSource::Probe),
            current: self.live.contains(&generation) && !newer,
            target,
            reading,
        };
        let verdict = self.overlay.take(generation, key, &evidence);
        let lowered = self.overlay.lowered_by(generation, key).is_some();
        if let Some(slot) = self.slot_of(generation, key) {
            slot.lowered = lowered;
        }
        verdict
    }

    /// The target that lowered a provider and has to answer before it is raised; `None`: it is not lowered.
    pub(super) fn lowered_by(
        &self,
        generation: ConnectionGeneration,
        key: &ProviderKey,
    ) -> Option<&Arc<str>> {
        self.overlay.lowered_by(generation, key)
    }

    /// What the overlay shows of a provider; `None`: it was never lowered.
    pub(super) fn shown(
        &self,
        generation: ConnectionGeneration,
        key: &ProviderKey,
    ) -> Option<(ProviderHealth, u64)> {
        self.overlay.shown(generation, key)
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = (&ProviderKey, &Slot<S>)> {
        self.slots.iter()
    }

    /// Leases of a provider, over all generations.
    pub(super) fn in_flight(&self, key: &ProviderKey) -> u32 {
        let retired: u32 = self
            .retired
            .iter()
            .filter(|((_, k), _)| k == key)
            .map(|(_, n)| *n)
            .sum();
        retired + self.slots.get(key).map_or(0, |s| s.in_flight)
    }

    fn live<'a>(&'a self, candidates: &'a [Candidate]) -> impl Iterator<Item = &'a Slot<S>> {
        candidates.iter().filter_map(|c| {
            self.slots
                .get(&c.provider)
                .filter(|s| s.target(&c.target).is_some())
        })
    }

    /// Whether any candidate's session lives, whatever state it is in.
    pub(super) fn any_live(&self, candidates: &[Candidate]) -> bool {
        self.live(candidates).next().is_some()
    }

    /// Every live candidate serves other endpoints only: no wait will help.
    pub(super) fn never_serves(&self, candidates: &[Candidate], endpoint: Endpoint) -> bool {
        let mut live = self.live(candidates).peekable();
        live.peek().is_some() && live.all(|s| !s.endpoints.contains(&endpoint))
    }
}

#[cfg(test)]
mod tests;
