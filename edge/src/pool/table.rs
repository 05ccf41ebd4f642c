//! Who is live, with how much room, and which leases are out (G31, G32, G41). Pure.
//!
//! Keyed by generation: what an old connection says or releases never touches the new one. `S` is what the shell keeps
//! with a provider.

use std::collections::BTreeMap;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use iop_shared::execution::Endpoint;
use iop_shared::ids::{ConnectionGeneration, ProviderKey};

use super::route::Candidate;
use super::select::{Choice, seed, select};

/// One provider of a live session.
#[derive(Debug, Clone)]
pub(super) struct Slot<S> {
    pub(super) generation: ConnectionGeneration,
    pub(super) targets: Vec<Arc<str>>,
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) capacity: u32,
    /// The node takes no new work.
    pub(super) draining: bool,
    pub(super) in_flight: u32,
    /// Of the node's last load line, what was not ours: a hint for balance, never a bound.
    pub(super) others: u32,
    /// The node refused for want of room although we saw some.
    pub(super) refused: bool,
    pub(super) with: S,
}

impl<S> Slot<S> {
    fn serves(&self, endpoint: Endpoint, target: &str) -> bool {
        !self.draining && self.endpoints.contains(&endpoint) && self.targets.iter().any(|t| **t == *target)
    }

    fn has_room(&self) -> bool {
        self.in_flight < self.capacity && !self.refused
    }
}

/// What a request may be given.
#[derive(Debug, Clone, Copy)]
pub(super) struct Want<'a> {
    pub(super) endpoint: Endpoint,
    pub(super) candidates: &'a [Candidate],
    /// Only this one.
    pub(super) pinned: Option<(&'a ProviderKey, &'a Arc<str>)>,
    /// Not these.
    pub(super) exclude: &'a [ProviderKey],
    /// Requests of one value go to one provider while it is not crowded.
    pub(super) affinity: Option<u64>,
}

/// What came of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found<S> {
    /// A place was taken; it has to be released.
    Granted {
        provider: ProviderKey,
        target: Arc<str>,
        generation: ConnectionGeneration,
        with: S,
    },
    /// There are providers, and all are full.
    Full,
    /// No live provider serves it.
    Absent,
}

/// All live providers.
pub(super) struct Table<S> {
    slots: HashMap<ProviderKey, Slot<S>>,
    /// Leases of providers that are gone or replaced.
    retired: BTreeMap<(ConnectionGeneration, ProviderKey), u32>,
    turn: u64,
}

impl<S: Clone> Table<S> {
    pub(super) fn new() -> Self {
        Self {
            slots: HashMap::new(),
            retired: BTreeMap::new(),
            turn: 0,
        }
    }

    /// Replaces what a generation advertises. A provider that a newer generation holds is left alone.
    pub(super) fn advertise(
        &mut self,
        generation: ConnectionGeneration,
        providers: Vec<(ProviderKey, Slot<S>)>,
    ) {
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
                }
                Some(_) | None => {
                    self.retire_slot(&key);
                    slot.in_flight = self.retired.remove(&(generation, key.clone())).unwrap_or(0);
                }
            }
            self.slots.insert(key, slot);
        }
    }

    /// A generation is gone or gets no new leases.
    pub(super) fn retire(&mut self, generation: ConnectionGeneration) {
        let keys: Vec<ProviderKey> = self.of_generation(generation).cloned().collect();
        for key in keys {
            self.retire_slot(&key);
        }
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
        if let Some(slot) = self.current(generation, key) {
            slot.others = in_flight.saturating_sub(slot.in_flight);
            slot.refused = false;
        }
    }

    /// Gives a place back because the node said that it is full: no further place until news or `forget_refusal`.
    pub(super) fn refused(&mut self, generation: ConnectionGeneration, key: &ProviderKey) {
        self.release(generation, key);
        if let Some(slot) = self.current(generation, key) {
            slot.refused = true;
        }
    }

    /// Asks again where a node had refused.
    pub(super) fn forget_refusal(&mut self, key: &ProviderKey) {
        if let Some(slot) = self.slots.get_mut(key) {
            slot.refused = false;
        }
    }

    fn current(&mut self, generation: ConnectionGeneration, key: &ProviderKey) -> Option<&mut Slot<S>> {
        self.slots.get_mut(key).filter(|s| s.generation == generation)
    }

    /// Takes a place for a request, or says why there is none.
    pub(super) fn grant(&mut self, want: Want<'_>) -> Found<S> {
        let pinned;
        let candidates = match want.pinned {
            None => want.candidates,
            Some((provider, target)) => {
                pinned = [Candidate {
                    provider: provider.clone(),
                    target: target.clone(),
                    priority: 0,
                    weight: 1,
                }];
                &pinned[..]
            }
        };
        let serving = |c: &&Candidate| {
            !want.exclude.contains(&c.provider)
                && self
                    .slots
                    .get(&c.provider)
                    .is_some_and(|s| s.serves(want.endpoint, &c.target))
        };
        let mut choices: Vec<(Choice, &Candidate)> = Vec::new();
        let mut seen = false;
        for candidate in candidates.iter().filter(serving) {
            seen = true;
            let Some(slot) = self.slots.get(&candidate.provider).filter(|s| s.has_room()) else {
                continue;
            };
            let load = slot.in_flight.saturating_add(slot.others);
            let choice = Choice {
                priority: candidate.priority,
                weight: candidate.weight,
                load,
                capacity: slot.capacity,
                seed: want.affinity.map_or(0, |_| seed(&candidate.provider, &candidate.target)),
            };
            choices.push((choice, candidate));
        }
        let picked = match &choices[..] {
            [] => return if seen { Found::Full } else { Found::Absent },
            [(_, only)] => *only,
            several => {
                let plain: Vec<Choice> = several.iter().map(|(c, _)| *c).collect();
                self.turn = self.turn.wrapping_add(1);
                match select(&plain, want.affinity, self.turn).and_then(|i| several.get(i)) {
                    Some((_, picked)) => *picked,
                    None => return Found::Full,
                }
            }
        };
        let (provider, target) = (picked.provider.clone(), picked.target.clone());
        match self.slots.get_mut(&provider) {
            Some(slot) => {
                slot.in_flight += 1;
                Found::Granted {
                    provider,
                    target,
                    generation: slot.generation,
                    with: slot.with.clone(),
                }
            }
            None => Found::Absent,
        }
    }

    /// Gives a place back. A place that was never granted, or was given back already, changes nothing.
    pub(super) fn release(&mut self, generation: ConnectionGeneration, key: &ProviderKey) {
        if let Some(slot) = self.current(generation, key) {
            slot.in_flight = slot.in_flight.saturating_sub(1);
            slot.refused = false;
            return;
        }
        let place = (generation, key.clone());
        if let Some(left) = self.retired.get_mut(&place) {
            *left -= 1;
            if *left == 0 {
                self.retired.remove(&place);
            }
        }
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
                .filter(|s| s.targets.iter().any(|t| **t == *c.target))
        })
    }

    /// Whether any candidate's session lives, full or draining or not.
    pub(super) fn any_live(&self, candidates: &[Candidate]) -> bool {
        self.live(candidates).next().is_some()
    }

    /// Whether any candidate takes new work for this endpoint, full or not.
    pub(super) fn any_serving(&self, candidates: &[Candidate], endpoint: Endpoint) -> bool {
        self.live(candidates)
            .any(|s| !s.draining && s.endpoints.contains(&endpoint))
    }

    /// Every live candidate serves other endpoints only: no wait will help.
    pub(super) fn never_serves(&self, candidates: &[Candidate], endpoint: Endpoint) -> bool {
        let mut live = self.live(candidates).peekable();
        live.peek().is_some() && live.all(|s| !s.endpoints.contains(&endpoint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(name: &str) -> ProviderKey {
        ProviderKey::parse(name).unwrap()
    }

    fn slot(generation: u64, capacity: u32) -> Slot<()> {
        Slot {
            generation: ConnectionGeneration(generation),
            targets: vec![Arc::from("t")],
            endpoints: vec![Endpoint::Chat],
            capacity,
            draining: false,
            in_flight: 0,
            others: 0,
            refused: false,
            with: (),
        }
    }

    fn candidate(name: &str) -> Candidate {
        Candidate {
            provider: key(name),
            target: Arc::from("t"),
            priority: 0,
            weight: 1,
        }
    }

    fn want(candidates: &[Candidate]) -> Want<'_> {
        Want {
            endpoint: Endpoint::Chat,
            candidates,
            pinned: None,
            exclude: &[],
            affinity: None,
        }
    }

    #[test]
    fn capacity_is_a_bound_and_absence_is_not_fullness() {
        let mut table = Table::new();
        let c = [candidate("n/p")];
        assert_eq!(table.grant(want(&c)), Found::Absent);
        table.advertise(ConnectionGeneration(1), vec![(key("n/p"), slot(1, 1))]);
        assert!(matches!(table.grant(want(&c)), Found::Granted { .. }));
        assert_eq!(table.grant(want(&c)), Found::Full);
        assert_eq!(
            table.grant(Want {
                endpoint: Endpoint::Audio,
                ..want(&c)
            }),
            Found::Absent
        );
        assert_eq!(
            table.grant(Want {
                exclude: &[key("n/p")],
                ..want(&c)
            }),
            Found::Absent
        );
        table.release(ConnectionGeneration(1), &key("n/p"));
        assert!(matches!(table.grant(want(&c)), Found::Granted { .. }));
    }

    #[test]
    fn a_late_release_of_an_old_generation_touches_nothing_new() {
        let mut table = Table::new();
        let c = [candidate("n/p")];
        table.advertise(ConnectionGeneration(1), vec![(key("n/p"), slot(1, 2))]);
        table.grant(want(&c));
        table.advertise(ConnectionGeneration(2), vec![(key("n/p"), slot(2, 2))]);
        table.grant(want(&c));
        assert_eq!(table.in_flight(&key("n/p")), 2);
        // The old connection speaks and closes late.
        table.advertise(ConnectionGeneration(1), vec![(key("n/p"), slot(1, 9))]);
        table.retire(ConnectionGeneration(1));
        assert_eq!(
            table.slots().next().unwrap().1.generation,
            ConnectionGeneration(2)
        );
        table.release(ConnectionGeneration(1), &key("n/p"));
        table.release(ConnectionGeneration(1), &key("n/p"));
        assert_eq!(table.in_flight(&key("n/p")), 1);
        table.release(ConnectionGeneration(2), &key("n/p"));
        assert_eq!(table.in_flight(&key("n/p")), 0);
        assert!(table.retired.is_empty());
    }

    #[test]
    fn a_refusal_is_forgotten_by_news() {
        let mut table = Table::new();
        let c = [candidate("n/p")];
        table.advertise(ConnectionGeneration(1), vec![(key("n/p"), slot(1, 2))]);
        table.grant(want(&c));
        table.refused(ConnectionGeneration(1), &key("n/p"));
        assert_eq!(table.in_flight(&key("n/p")), 0);
        assert_eq!(table.grant(want(&c)), Found::Full);
        table.load(ConnectionGeneration(1), &key("n/p"), 1);
        assert!(matches!(table.grant(want(&c)), Found::Granted { .. }));
    }

    #[derive(Debug, Clone)]
    enum Op {
        Advertise(u64, u32, bool),
        Retire(u64),
        Grant,
        Release(prop::sample::Index),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (1_u64..4, 1_u32..4, any::<bool>()).prop_map(|(g, c, both)| Op::Advertise(g, c, both)),
            (1_u64..4).prop_map(Op::Retire),
            Just(Op::Grant),
            Just(Op::Grant),
            any::<prop::sample::Index>().prop_map(Op::Release),
        ]
    }

    proptest! {
        /// The naive model is the list of leases that are out.
        #[test]
        fn places_are_never_lost_doubled_or_overrun(ops in prop::collection::vec(op(), 0..60)) {
            let mut table = Table::new();
            let mut out: Vec<(ConnectionGeneration, ProviderKey)> = Vec::new();
            let candidates = [candidate("n/p"), candidate("n/q")];
            for op in ops {
                match op {
                    Op::Advertise(g, capacity, both) => {
                        let mut providers = vec![(key("n/p"), slot(g, capacity))];
                        if both {
                            providers.push((key("n/q"), slot(g, capacity)));
                        }
                        table.advertise(ConnectionGeneration(g), providers);
                    }
                    Op::Retire(g) => table.retire(ConnectionGeneration(g)),
                    Op::Grant => {
                        if let Found::Granted { provider, generation, .. } = table.grant(want(&candidates)) {
                            let slot = table.slots().find(|(k, _)| **k == provider).unwrap().1;
                            prop_assert!(slot.in_flight <= slot.capacity);
                            prop_assert_eq!(slot.generation, generation);
                            out.push((generation, provider));
                        }
                    }
                    Op::Release(i) => {
                        if !out.is_empty() {
                            let (generation, provider) = out.swap_remove(i.index(out.len()));
                            table.release(generation, &provider);
                        }
                    }
                }
                for c in &candidates {
                    let n = out.iter().filter(|(_, p)| *p == c.provider).count();
                    prop_assert_eq!(table.in_flight(&c.provider) as usize, n);
                }
            }
            for (generation, provider) in out {
                table.release(generation, &provider);
            }
            prop_assert!(table.retired.is_empty());
        }
    }
}
