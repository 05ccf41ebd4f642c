use std::time::Duration;

use super::*;
use crate::pool::ask::Prospects;
use crate::pool::ejection::{Pass, Standing};
use crate::pool::grant::{Found, Want};
use iop_shared::execution::{AttemptFence, AttemptResult, EvidenceDecision};
use proptest::prelude::*;

const RULES: EjectionSettings = EjectionSettings {
    consecutive: 2,
    base: Duration::from_secs(2),
    max: Duration::from_secs(20),
};

fn key(name: &str) -> ProviderKey {
    ProviderKey::parse(name).unwrap()
}

fn generation(n: u64) -> ConnectionGeneration {
    ConnectionGeneration(n)
}

fn slot(n: u64, capacity: u32) -> Slot<()> {
    Slot {
        generation: generation(n),
        targets: vec![Target::new("t"), Target::new("u")],
        endpoints: vec![Endpoint::Chat],
        capacity,
        draining: false,
        in_flight: 0,
        others: 0,
        refused: false,
        lowered: false,
        with: (),
    }
}

fn candidate(name: &str, target: &str) -> Candidate {
    Candidate {
        provider: key(name),
        target: Arc::from(target),
        priority: 0,
        weight: 1,
    }
}

fn want(candidates: &[Candidate]) -> Want<'_> {
    Want::of(candidates, Endpoint::Chat)
}

/// A table with the providers `n/p` and `n/q` of one generation.
fn pair(capacity: u32) -> (Table<()>, [Candidate; 2], Instant) {
    let mut table = Table::new(RULES);
    table.advertise(
        generation(1),
        vec![(key("n/p"), slot(1, capacity)), (key("n/q"), slot(1, capacity))],
    );
    let candidates = [candidate("n/p", "t"), candidate("n/q", "t")];
    (table, candidates, Instant::now())
}

fn granted(found: Found<()>) -> Option<Place> {
    match found {
        Found::Granted { place, .. } => Some(place),
        Found::Full | Found::Absent => None,
    }
}

fn told(result: AttemptResult, retry_after: Option<u64>, now: Instant) -> Told {
    Told::of(result, retry_after.map(Duration::from_secs), || now)
}

/// Gives a place at `provider` and takes it back with a word.
fn attempt(
    table: &mut Table<()>,
    candidates: &[Candidate],
    provider: &str,
    told: Told,
    now: Instant,
) -> Option<Instant> {
    let only = candidates.iter().find(|c| c.provider == key(provider)).unwrap();
    let place = granted(table.grant(want(std::slice::from_ref(only)), now)).unwrap();
    table.release(&place, told, Endpoint::Chat, candidates)
}

fn lower(table: &mut Table<()>, provider: &str, target: &str, sequence: u64) -> Verdict {
    let reading = Reading {
        fence: AttemptFence::Confirmed,
        sequence: Some(sequence),
        health: ProviderHealth::Unavailable,
    };
    let about = (EvidenceSource::Stall, &Arc::from(target));
    table.observe(generation(1), &key(provider), about, true, Some(reading))
}

fn raise(table: &mut Table<()>, provider: &str, target: &str, sequence: u64) -> Verdict {
    let reading = Reading {
        fence: AttemptFence::Confirmed,
        sequence: Some(sequence),
        health: ProviderHealth::Available,
    };
    let about = (EvidenceSource::Probe, &Arc::from(target));
    table.observe(generation(1), &key(provider), about, true, Some(reading))
}

#[test]
fn capacity_is_a_bound_and_absence_is_not_fullness() {
    let mut table = Table::new(RULES);
    let now = Instant::now();
    let c = [candidate("n/p", "t")];
    assert_eq!(table.grant(want(&c), now), Found::Absent);
    table.advertise(generation(1), vec![(key("n/p"), slot(1, 1))]);
    let place = granted(table.grant(want(&c), now)).unwrap();
    assert_eq!(table.grant(want(&c), now), Found::Full);
    let audio = Want::of(&c, Endpoint::Audio);
    assert_eq!(table.grant(audio, now), Found::Absent);
    table.release(&place, Told::default(), Endpoint::Chat, &c);
    assert!(granted(table.grant(want(&c), now)).is_some());
}

#[test]
fn a_late_release_of_an_old_generation_touches_nothing_new() {
    let mut table = Table::new(RULES);
    let now = Instant::now();
    let c = [candidate("n/p", "t")];
    table.advertise(generation(1), vec![(key("n/p"), slot(1, 2))]);
    let old = granted(table.grant(want(&c), now)).unwrap();
    table.advertise(generation(2), vec![(key("n/p"), slot(2, 2))]);
    let new = granted(table.grant(want(&c), now)).unwrap();
    assert_eq!(table.in_flight(&key("n/p")), 2);
    // The old connection speaks and closes late.
    table.advertise(generation(1), vec![(key("n/p"), slot(1, 9))]);
    table.retire(generation(1));
    assert_eq!(table.slots().next().unwrap().1.generation, generation(2));
    for _ in 0..2 {
        table.release(&old, Told::default(), Endpoint::Chat, &c);
    }
    assert_eq!(table.in_flight(&key("n/p")), 1);
    table.release(&new, Told::default(), Endpoint::Chat, &c);
    assert_eq!(table.in_flight(&key("n/p")), 0);
    assert!(table.retired.is_empty());
}

#[test]
fn a_refusal_is_forgotten_by_news() {
    let mut table = Table::new(RULES);
    let now = Instant::now();
    let c = [candidate("n/p", "t")];
    table.advertise(generation(1), vec![(key("n/p"), slot(1, 2))]);
    let place = granted(table.grant(want(&c), now)).unwrap();
    table.refused(&place, Endpoint::Chat);
    assert_eq!(table.in_flight(&key("n/p")), 0);
    assert_eq!(table.grant(want(&c), now), Found::Full);
    table.load(generation(1), &key("n/p"), 1);
    assert!(granted(table.grant(want(&c), now)).is_some());
}

#[test]
fn who_is_lowered_gets_nothing_until_its_own_target_answers() {
    let (mut table, c, now) = pair(8);
    assert!(lower(&mut table, "n/p", "t", 4).changed());
    for _ in 0..6 {
        assert_eq!(granted(table.grant(want(&c), now)).unwrap().provider, key("n/q"));
    }
    // Lowered as a whole: its other target gets nothing either, and it does not serve.
    let other = [candidate("n/p", "u")];
    assert_eq!(table.grant(want(&other), now), Found::Absent);
    assert!(!table.any_serving(want(&other)) && table.any_live(&other));
    assert_eq!(
        raise(&mut table, "n/p", "u", 5).decision,
        EvidenceDecision::RejectedBinding
    );
    assert_eq!(
        raise(&mut table, "n/p", "t", 4).decision,
        EvidenceDecision::RejectedStale
    );
    assert!(raise(&mut table, "n/p", "t", 5).changed());
    assert!(granted(table.grant(want(&other), now)).is_some());
    assert_eq!(
        table.shown(generation(1), &key("n/p")),
        Some((ProviderHealth::Available, 5))
    );
}

#[test]
fn a_lowered_provider_stays_so_while_its_generation_lives_and_no_longer() {
    let (mut table, c, now) = pair(8);
    let only = &c[..1];
    lower(&mut table, "n/p", "t", 1);
    table.advertise(generation(1), vec![(key("n/q"), slot(1, 8))]);
    // Its target is mapped nowhere: an answer about it proves nothing.
    assert_eq!(
        raise(&mut table, "n/p", "t", 2).decision,
        EvidenceDecision::RejectedBinding
    );
    table.advertise(
        generation(1),
        vec![(key("n/p"), slot(1, 8)), (key("n/q"), slot(1, 8))],
    );
    assert_eq!(table.grant(want(only), now), Found::Absent);
    table.advertise(generation(2), vec![(key("n/p"), slot(2, 8))]);
    table.retire(generation(1));
    assert!(granted(table.grant(want(only), now)).is_some());
    assert_eq!(table.shown(generation(2), &key("n/p")), None);
    let late = lower(&mut table, "n/p", "t", 9);
    assert_eq!(late.decision, EvidenceDecision::RejectedStale);
    assert!(granted(table.grant(want(only), now)).is_some());
}

#[test]
fn who_is_ejected_is_passed_over_but_taken_where_nobody_else_is_left() {
    let (mut table, c, now) = pair(2);
    for _ in 0..2 {
        attempt(
            &mut table,
            &c,
            "n/p",
            told(AttemptResult::Http5xx, None, now),
            now,
        );
    }
    let q: Vec<_> = (0..2)
        .map(|_| granted(table.grant(want(&c), now)).unwrap())
        .collect();
    assert!(q.iter().all(|place| place.provider == key("n/q")));
    // Full is not gone: better to wait for it than to ask who fails.
    assert_eq!(table.grant(want(&c), now), Found::Full);
    let p = granted(table.grant(want(&c[..1]), now)).unwrap();
    assert!(matches!(p.pass, Pass::Despite(_)));
    lower(&mut table, "n/q", "t", 1);
    assert_eq!(granted(table.grant(want(&c), now)).unwrap().provider, key("n/p"));
}

#[test]
fn the_last_eligible_candidate_is_not_ejected() {
    let (mut table, c, now) = pair(8);
    let failed = told(AttemptResult::ConnectError, None, now);
    for provider in ["n/p", "n/q"] {
        for _ in 0..4 {
            attempt(&mut table, &c, provider, failed, now);
        }
    }
    let standing = |table: &Table<()>, name| {
        let slot = &table.slots[&key(name)];
        slot.targets[0].ejection.standing(now)
    };
    assert_eq!(standing(&table, "n/p"), Standing::Ejected);
    assert_eq!(standing(&table, "n/q"), Standing::Open);
    // Alone in its model, whatever other models do.
    let (mut table, _, now) = pair(8);
    for _ in 0..9 {
        attempt(&mut table, &c[..1], "n/p", failed, now);
    }
    assert_eq!(standing(&table, "n/p"), Standing::Open);
    // A lowered rival is none.
    lower(&mut table, "n/q", "t", 1);
    attempt(&mut table, &c, "n/p", failed, now);
    assert_eq!(standing(&table, "n/p"), Standing::Open);
    raise(&mut table, "n/q", "t", 2);
    attempt(&mut table, &c, "n/p", failed, now);
    assert_eq!(standing(&table, "n/p"), Standing::Ejected);
}

#[test]
fn after_an_ejection_one_request_tries() {
    let (mut table, c, mut now) = pair(8);
    for _ in 0..2 {
        attempt(
            &mut table,
            &c,
            "n/p",
            told(AttemptResult::Http5xx, None, now),
            now,
        );
    }
    now += Duration::from_secs(2);
    let places: Vec<Place> = (0..6)
        .filter_map(|_| granted(table.grant(want(&c), now)))
        .collect();
    let trials: Vec<&Place> = places.iter().filter(|p| p.provider == key("n/p")).collect();
    assert!(matches!(&trials[..], [one] if matches!(one.pass, Pass::Trial(..))));
    table.release(
        trials[0],
        told(AttemptResult::Success, None, now),
        Endpoint::Chat,
        &c,
    );
    let pass = granted(table.grant(want(&c[..1]), now)).unwrap().pass;
    assert_eq!(pass, Pass::Plain);
}

#[test]
fn who_cools_is_left_alone_while_another_will_do() {
    let (mut table, c, now) = pair(8);
    let limited = told(AttemptResult::RateLimited, Some(10), now);
    let end = attempt(&mut table, &c, "n/p", limited, now);
    assert_eq!(end, Some(now + Duration::from_secs(10)));
    for _ in 0..3 {
        assert_eq!(granted(table.grant(want(&c), now)).unwrap().provider, key("n/q"));
    }
    // Its own refusal is the best answer that a model of nobody else has.
    assert!(granted(table.grant(want(&c[..1]), now)).is_some());
}

#[test]
fn what_is_avoided_is_taken_only_when_allowed_and_nobody_else_is_eligible() {
    let (mut table, c, now) = pair(1);
    let avoid = [key("n/q"), key("n/p")];
    let asked = |n: usize, allow_avoided| Want {
        avoid: &avoid[2 - n..],
        allow_avoided,
        ..want(&c)
    };
    // Only n/p is avoided.
    let q = granted(table.grant(asked(1, true), now)).unwrap();
    assert_eq!(q.provider, key("n/q"));
    // Full is eligible: it is waited for.
    assert_eq!(table.grant(asked(1, true), now), Found::Full);
    assert_eq!(
        table.prospects(asked(1, true), now),
        Prospects {
            other: true,
            same: true
        }
    );
    // Both are: the last may be taken, where that is allowed.
    assert_eq!(table.grant(asked(2, false), now), Found::Absent);
    let p = granted(table.grant(asked(2, true), now)).unwrap();
    assert_eq!(p.provider, key("n/p"));
    assert_eq!(
        table.prospects(asked(2, false), now),
        Prospects {
            other: false,
            same: true
        }
    );
    // Its cool-down is waited for by who may take it again; nobody else is sent there.
    let limited = told(AttemptResult::RateLimited, Some(6), now);
    table.release(&p, limited, Endpoint::Chat, &c);
    assert!(table.prospects(asked(2, true), now).same);
    let p = granted(table.grant(asked(2, true), now)).unwrap();
    assert_eq!(p.provider, key("n/p"));
    table.release(&p, told(AttemptResult::Success, None, now), Endpoint::Chat, &c);
    // Who is lowered is no fallback.
    lower(&mut table, "n/p", "t", 1);
    assert_eq!(table.grant(asked(2, true), now), Found::Absent);
    assert!(!table.prospects(asked(2, true), now).same);
}

#[test]
fn an_ejected_candidate_is_no_alternative() {
    let (mut table, c, now) = pair(8);
    let failed = told(AttemptResult::Http5xx, None, now);
    for _ in 0..2 {
        attempt(&mut table, &c, "n/p", failed, now);
    }
    let avoid = [key("n/q")];
    let asked = Want {
        avoid: &avoid,
        ..want(&c)
    };
    assert_eq!(table.grant(asked, now), Found::Absent);
    assert_eq!(
        table.prospects(asked, now),
        Prospects {
            other: false,
            same: true
        }
    );
    // Its trial is one.
    let due = now + Duration::from_secs(2);
    assert!(table.prospects(asked, due).other);
    assert!(granted(table.grant(asked, due)).is_some());
    assert!(!table.prospects(asked, due).other);
}

#[test]
fn what_is_pinned_has_no_other() {
    let (mut table, c, now) = pair(1);
    let (p, t) = (key("n/p"), Arc::from("t"));
    let avoid = [key("n/p")];
    let mut asked = Want {
        pinned: Some((&p, &t)),
        avoid: &avoid,
        ..want(&c)
    };
    assert_eq!(
        table.prospects(asked, now),
        Prospects {
            other: false,
            same: true
        }
    );
    assert_eq!(table.grant(asked, now), Found::Absent);
    asked.allow_avoided = true;
    assert_eq!(granted(table.grant(asked, now)).unwrap().provider, p);
}

#[derive(Debug, Clone)]
enum Op {
    Advertise(u64, u32, bool),
    Retire(u64),
    Grant {
        avoid: Vec<usize>,
        allow: bool,
        pinned: Option<usize>,
    },
    Release(prop::sample::Index, AttemptResult, Option<u64>),
    Refused(prop::sample::Index),
    Observe {
        generation: u64,
        provider: usize,
        stall: bool,
        target: usize,
        sequence: u64,
        health: ProviderHealth,
    },
    /// Milliseconds.
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let results = prop_oneof![
        3 => Just(AttemptResult::Http5xx),
        2 => prop::sample::select(AttemptResult::ALL),
    ];
    let grant = (
        prop::collection::vec(0_usize..2, 0..3),
        any::<bool>(),
        prop::option::weighted(0.1, 0_usize..3),
    )
        .prop_map(|(avoid, allow, pinned)| Op::Grant { avoid, allow, pinned });
    let observe = (
        (1_u64..4, 0_usize..2, any::<bool>(), 0_usize..2),
        1_u64..9,
        prop::sample::select(ProviderHealth::ALL),
    )
        .prop_map(
            |((generation, provider, stall, target), sequence, health)| Op::Observe {
                generation,
                provider,
                stall,
                target,
                sequence,
                health,
            },
        );
    prop_oneof![
        2 => (1_u64..4, 1_u32..4, any::<bool>()).prop_map(|(g, c, both)| Op::Advertise(g, c, both)),
        1 => (1_u64..4).prop_map(Op::Retire),
        8 => grant,
        6 => (any::<prop::sample::Index>(), results, prop::option::weighted(0.2, 0_u64..12))
            .prop_map(|(i, r, after)| Op::Release(i, r, after)),
        1 => any::<prop::sample::Index>().prop_map(Op::Refused),
        2 => observe,
        2 => (0_u64..6000).prop_map(Op::Wait),
    ]
}

const PROVIDERS: [&str; 2] = ["n/p", "n/q"];
const TARGETS: [&str; 2] = ["t", "u"];

/// What a reader of the rules would keep on paper.
#[derive(Default)]
struct Naive {
    /// Per provider: generation, capacity, refused, a record per target.
    slots: BTreeMap<ProviderKey, (u64, u32, bool, BTreeMap<String, Ejection>)>,
    live: BTreeSet<u64>,
    overlay: Overlay,
    out: Vec<Place>,
}

impl Naive {
    fn lowered(&self, provider: &ProviderKey) -> bool {
        self.slots
            .get(provider)
            .is_some_and(|(g, ..)| self.overlay.lowered_by(generation(*g), provider).is_some())
    }

    fn standing(&self, c: &Candidate, now: Instant) -> Option<Standing> {
        let (_, _, _, records) = self.slots.get(&c.provider)?;
        (!self.lowered(&c.provider)).then(|| records[&*c.target].standing(now))
    }

    fn room(&self, c: &Candidate) -> bool {
        let (g, capacity, refused, _) = &self.slots[&c.provider];
        let here = |p: &&Place| p.generation == generation(*g) && p.provider == c.provider;
        !refused && (self.out.iter().filter(here).count() as u32) < *capacity
    }

    /// Who may be given, and whether the answer is `Full` if nobody may.
    fn allowed<'a>(
        &self,
        want: &Want<'a>,
        among: &[&'a Candidate],
        now: Instant,
    ) -> (Vec<&'a Candidate>, bool) {
        let of = |standing| -> Vec<&'a Candidate> {
            let mut found = among.to_vec();
            found.retain(|c| self.standing(c, now) == Some(standing));
            found
        };
        let roomy = |mut found: Vec<&'a Candidate>| {
            found.retain(|c| self.room(c));
            found
        };
        if !of(Standing::Open).is_empty() {
            (roomy(of(Standing::Open)), true)
        } else if !want.avoid.is_empty() {
            (Vec::new(), false)
        } else if !of(Standing::Ejected).is_empty() {
            (roomy(of(Standing::Ejected)), true)
        } else {
            (roomy(of(Standing::Cooling)), !of(Standing::Cooling).is_empty())
        }
    }

    fn expected<'a>(
        &self,
        want: &Want<'a>,
        all: &[&'a Candidate],
        now: Instant,
    ) -> (Vec<&'a Candidate>, bool) {
        let mut others = all.to_vec();
        others.retain(|c| !want.avoid.contains(&c.provider));
        let (found, full) = self.allowed(want, &others, now);
        if full || want.avoid.is_empty() || !want.allow_avoided {
            return (found, full);
        }
        let mut last = all.to_vec();
        last.retain(|c| {
            let ejected = self.standing(c, now) == Some(Standing::Ejected);
            Some(&c.provider) == want.avoid.last() && !ejected
        });
        let Some(best) = last.iter().filter_map(|c| self.standing(c, now)).min() else {
            return (Vec::new(), false);
        };
        last.retain(|c| self.standing(c, now) == Some(best) && self.room(c));
        (last, true)
    }
}

proptest! {
    /// Places are never lost, doubled or overrun, and go only to whom the rules allow, whatever happens to health,
    /// ejections, cool-downs and generations in between.
    #[test]
    fn places_are_never_lost_doubled_overrun_or_given_to_who_may_not_have_them(
        ops in prop::collection::vec(op(), 0..150),
    ) {
        let mut table = Table::new(RULES);
        let mut naive = Naive::default();
        let mut now = Instant::now();
        let candidates = [candidate("n/p", "t"), candidate("n/q", "t"), candidate("n/p", "u")];
        let targets: Vec<Arc<str>> = TARGETS.iter().map(|t| Arc::from(*t)).collect();
        for op in ops {
            match op {
                Op::Wait(ms) => now += Duration::from_millis(ms),
                Op::Advertise(g, capacity, both) => {
                    let names = if both { &PROVIDERS[..] } else { &PROVIDERS[..1] };
                    let providers = names.iter().map(|p| (key(p), slot(g, capacity))).collect();
                    table.advertise(generation(g), providers);
                    naive.live.insert(g);
                    naive.slots.retain(|k, (of, ..)| *of != g || names.contains(&k.as_str()));
                    for name in names {
                        let records = match naive.slots.get(&key(name)) {
                            Some((newer, ..)) if *newer > g => continue,
                            Some((same, _, _, records)) if *same == g => records.clone(),
                            _ => TARGETS.iter().map(|t| ((*t).to_owned(), Ejection::default())).collect(),
                        };
                        naive.slots.insert(key(name), (g, capacity, false, records));
                    }
                }
                Op::Retire(g) => {
                    table.retire(generation(g));
                    naive.live.remove(&g);
                    naive.slots.retain(|_, (of, ..)| *of != g);
                    naive.overlay.forget(generation(g));
                }
                Op::Grant { avoid, allow, pinned } => {
                    let avoid: Vec<ProviderKey> = avoid.into_iter().map(|i| key(PROVIDERS[i])).collect();
                    let pinned = pinned.map(|i| &candidates[i]);
                    let want = Want {
                        avoid: &avoid,
                        allow_avoided: allow,
                        pinned: pinned.map(|c| (&c.provider, &c.target)),
                        ..want(&candidates)
                    };
                    let all: Vec<&Candidate> = pinned.map_or_else(|| candidates.iter().collect(), |c| vec![c]);
                    let (allowed, full) = naive.expected(&want, &all, now);
                    let prospects = table.prospects(want, now);
                    if !avoid.is_empty() && pinned.is_none_or(|c| avoid.contains(&c.provider)) {
                        prop_assert_eq!(full, prospects.other || (allow && prospects.same));
                    }
                    match table.grant(want, now) {
                        Found::Granted { place, .. } => {
                            let given = allowed
                                .iter()
                                .find(|c| (&c.provider, &c.target) == (&place.provider, &place.target));
                            prop_assert!(given.is_some(), "{:?} of {:?}", place, allowed);
                            let (g, _, _, records) = naive.slots.get_mut(&place.provider).unwrap();
                            prop_assert_eq!(place.generation, generation(*g));
                            prop_assert_eq!(place.pass, records.get_mut(&*place.target).unwrap().admit(now));
                            naive.out.push(place);
                        }
                        Found::Full => prop_assert!(full && allowed.is_empty(), "{:?}", allowed),
                        Found::Absent => prop_assert!(!full),
                    }
                }
                Op::Release(i, result, after) => {
                    if naive.out.is_empty() {
                        continue;
                    }
                    let place = naive.out.swap_remove(i.index(naive.out.len()));
                    let told = told(result, after, now);
                    let others = candidates.iter().any(|c| {
                        (&c.provider, &c.target) != (&place.provider, &place.target)
                            && naive.standing(c, now) == Some(Standing::Open)
                    });
                    let wake = table.release(&place, told, Endpoint::Chat, &candidates);
                    match naive.slots.get_mut(&place.provider) {
                        Some((g, _, refused, records)) if generation(*g) == place.generation => {
                            *refused = false;
                            let record = records.get_mut(&*place.target).unwrap();
                            prop_assert_eq!(wake, record.settle(place.pass, told, &RULES, others));
                        }
                        _ => prop_assert_eq!(wake, None),
                    }
                }
                Op::Refused(i) => {
                    if naive.out.is_empty() {
                        continue;
                    }
                    let place = naive.out.swap_remove(i.index(naive.out.len()));
                    table.refused(&place, Endpoint::Chat);
                    if let Some((g, _, refused, records)) = naive.slots.get_mut(&place.provider)
                        && generation(*g) == place.generation
                    {
                        *refused = true;
                        let record = records.get_mut(&*place.target).unwrap();
                        record.settle(place.pass, Told::default(), &RULES, false);
                    }
                }
                Op::Observe { generation: g, provider, stall, target, sequence, health } => {
                    let provider = key(PROVIDERS[provider]);
                    let source = if stall { EvidenceSource::Stall } else { EvidenceSource::Probe };
                    let reading = Some(Reading { fence: AttemptFence::Confirmed, sequence: Some(sequence), health });
                    let at = naive.slots.get(&provider).map(|(of, ..)| *of);
                    let evidence = Evidence {
                        source,
                        bound: stall || at == Some(g),
                        current: naive.live.contains(&g) && at.is_none_or(|of| of <= g),
                        target: &targets[target],
                        reading,
                    };
                    let expected = naive.overlay.take(generation(g), &provider, &evidence);
                    let verdict = table.observe(generation(g), &provider, (source, &targets[target]), true, reading);
                    prop_assert_eq!(verdict, expected);
                }
            }
            for provider in PROVIDERS {
                let held = naive.out.iter().filter(|p| p.provider == key(provider)).count();
                prop_assert_eq!(table.in_flight(&key(provider)) as usize, held);
            }
            for (key, slot) in table.slots() {
                let held = naive.out.iter().filter(|p| p.provider == *key && p.generation == slot.generation);
                prop_assert_eq!(slot.in_flight as usize, held.count());
                prop_assert_eq!(slot.lowered, naive.lowered(key));
            }
        }
        for place in naive.out {
            table.release(&place, Told::default(), Endpoint::Chat, &candidates);
        }
        prop_assert!(table.retired.is_empty());
        prop_assert!(table.slots().all(|(_, slot)| slot.in_flight == 0));
    }
}
