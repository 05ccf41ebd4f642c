//! Choosing among providers that could take a request now (G30). Pure.
//!
//! Without an affinity the least loaded goes first. With one, weighted rendezvous hashing names an order of providers
//! for each value, the same on every edge, and the first one that is not much fuller than its share is taken: requests
//! with one beginning meet one KV cache, and a crowd of them still spreads.

use std::hash::Hasher;

use iop_shared::ids::ProviderKey;

/// A provider with room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) priority: u32,
    /// At least 1.
    pub(super) weight: u32,
    /// Requests it has now, other edges' included.
    pub(super) load: u32,
    /// At least 1.
    pub(super) capacity: u32,
    /// Who it is, by `seed`; only an affinity looks at it.
    pub(super) seed: u64,
}

/// What a provider and its target are to rendezvous hashing: the same in every process.
pub(super) fn seed(provider: &ProviderKey, target: &str) -> u64 {
    let mut fnv = fnv::FnvHasher::default();
    fnv.write(provider.as_str().as_bytes());
    // No key has this byte.
    fnv.write(&[0]);
    fnv.write(target.as_bytes());
    fnv.finish()
}

impl Choice {
    /// Its part of the load of its tier.
    fn share(&self) -> u128 {
        u128::from(self.weight.max(1)) * u128::from(self.capacity.max(1))
    }

    /// Compares `(load + 1) / (weight * capacity)` without a division.
    fn fuller_than(&self, other: &Choice) -> bool {
        (u128::from(self.load) + 1) * other.share() > (u128::from(other.load) + 1) * self.share()
    }

    /// One more request would bring it over 5/4 of its fair part of `total` requests (that one counted), and more than
    /// one whole request over it. `shares`: of the whole tier.
    fn crowded(&self, total: u128, shares: u128) -> bool {
        let load = u128::from(self.load);
        let fair = total * self.share();
        (load + 1) * shares * 4 > fair * 5 && load > fair.div_ceil(shares)
    }

    /// Its place in the order of one affinity, highest first: `share / -ln(u)`, with `u` in (0, 1) drawn by hash, wins
    /// with a probability in proportion to `share`.
    #[expect(
        clippy::cast_precision_loss,
        reason = "53 bits are drawn; a share's low bits do not matter"
    )]
    fn rendezvous(&self, affinity: u64) -> f64 {
        let u = ((mix(affinity ^ mix(self.seed)) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        self.share() as f64 / -u.ln()
    }
}

/// MurmurHash3's 64-bit finalizer: each bit of `x` changes each bit of the result with even odds.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// The index of the choice: of the lowest priority, the affinity's own provider, or the next in its order that is not
/// crowded. Without an affinity, the least loaded by weight; equals take turns by `turn`.
pub(super) fn select(choices: &[Choice], affinity: Option<u64>, turn: u64) -> Option<usize> {
    let first = choices.iter().map(|c| c.priority).min()?;
    match affinity {
        Some(affinity) => at_home(choices, first, affinity),
        None => least_loaded(choices, first, turn),
    }
}

fn at_home(choices: &[Choice], priority: u32, affinity: u64) -> Option<usize> {
    let tier = || choices.iter().enumerate().filter(|(_, c)| c.priority == priority);
    let shares: u128 = tier().map(|(_, c)| c.share()).sum();
    let total: u128 = tier().map(|(_, c)| u128::from(c.load)).sum::<u128>() + 1;
    // Somebody is below the fair part: the parts sum up to one more than the loads.
    tier()
        .filter(|(_, c)| !c.crowded(total, shares))
        .max_by(|(_, a), (_, b)| {
            let (x, y) = (a.rendezvous(affinity), b.rendezvous(affinity));
            x.total_cmp(&y).then(a.seed.cmp(&b.seed))
        })
        .map(|(i, _)| i)
}

fn least_loaded(choices: &[Choice], priority: u32, turn: u64) -> Option<usize> {
    let mut best: Option<&Choice> = None;
    let mut equals = 0_u64;
    for choice in choices.iter().filter(|c| c.priority == priority) {
        match best {
            Some(b) if choice.fuller_than(b) => {}
            Some(b) if !b.fuller_than(choice) => equals += 1,
            Some(_) | None => (best, equals) = (Some(choice), 1),
        }
    }
    let best = *best?;
    let pick = turn.checked_rem(equals)?;
    choices
        .iter()
        .enumerate()
        .filter(|(_, c)| c.priority == priority && !c.fuller_than(&best) && !best.fuller_than(c))
        .nth(usize::try_from(pick).ok()?)
        .map(|(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn choice(priority: u32, weight: u32, load: u32, capacity: u32) -> Choice {
        Choice {
            priority,
            weight,
            load,
            capacity,
            seed: 0,
        }
    }

    #[test]
    fn the_lowest_priority_with_room_goes_first() {
        assert_eq!(
            select(&[choice(1, 1, 0, 8), choice(0, 1, 7, 8)], None, 0),
            Some(1)
        );
        assert_eq!(select(&[], None, 0), None);
    }

    #[test]
    fn load_spreads_by_weight() {
        let mut choices = [choice(0, 3, 0, 100), choice(0, 1, 0, 100)];
        for turn in 0..40 {
            let i = select(&choices, None, turn).unwrap();
            choices[i].load += 1;
        }
        assert_eq!((choices[0].load, choices[1].load), (30, 10));
    }

    #[test]
    fn equals_take_turns() {
        let choices = [choice(0, 1, 0, 8); 3];
        let picks: Vec<_> = (0..6).map(|turn| select(&choices, None, turn).unwrap()).collect();
        assert_eq!(picks, [0, 1, 2, 0, 1, 2]);
    }

    /// A tier of equal priority, one choice for each (weight, capacity), with no load.
    fn tier(raw: &[(u32, u32)]) -> Vec<Choice> {
        let named = |(i, (weight, capacity)): (usize, &(u32, u32))| Choice {
            seed: seed(&ProviderKey::parse(&format!("n{i}/p")).unwrap(), "t"),
            ..choice(0, *weight, 0, *capacity)
        };
        raw.iter().enumerate().map(named).collect()
    }

    #[test]
    fn a_provider_and_its_target_have_one_seed_for_ever() {
        let p = |key| ProviderKey::parse(key).unwrap();
        assert_eq!(seed(&p("gpu-1/vllm"), "Qwen/Qwen3-8B"), 0x18a4_1b3c_e9c7_154c);
        assert_ne!(seed(&p("p"), "t"), seed(&p("q"), "t"));
        assert_ne!(seed(&p("p"), "t"), seed(&p("p"), "u"));
    }

    #[test]
    fn affinities_spread_by_weight() {
        let choices = tier(&[(3, 8), (1, 8), (2, 16), (1, 1)]);
        let shares = [24, 8, 32, 1];
        let mut hits = [0_u32; 4];
        const N: u32 = 65_000;
        for affinity in 0..u64::from(N) {
            hits[select(&choices, Some(affinity), 0).unwrap()] += 1;
        }
        for (hit, share) in hits.into_iter().zip(shares) {
            // Five standard deviations of a binomial draw.
            let expected = f64::from(N) * f64::from(share) / 65.0;
            assert!(
                (f64::from(hit) - expected).abs() < 5.0 * expected.sqrt(),
                "{hits:?}"
            );
        }
    }

    #[test]
    fn a_crowd_with_one_affinity_spreads() {
        let mut choices = tier(&[(1, 100); 4]);
        for n in 0..200 {
            let i = select(&choices, Some(7), n).unwrap();
            choices[i].load += 1;
        }
        let loads: Vec<u32> = choices.iter().map(|c| c.load).collect();
        assert!(
            loads.iter().all(|load| (10..=62).contains(load)),
            "5/4 of 50: {loads:?}"
        );
        // Two at once stay together: one request above the mean is no crowd.
        let mut pair = tier(&[(1, 100); 4]);
        let first = select(&pair, Some(7), 0).unwrap();
        pair[first].load = 1;
        assert_eq!(select(&pair, Some(7), 1), Some(first));
    }

    #[test]
    fn an_affinity_does_not_leave_the_lowest_priority() {
        for affinity in 0..100 {
            let mut choices = tier(&[(1, 8), (9, 9), (1, 8)]);
            choices[1].priority = 1;
            assert_ne!(select(&choices, Some(affinity), 0), Some(1));
        }
    }

    proptest! {
        #[test]
        fn nobody_better_was_passed_over(
            raw in prop::collection::vec((0_u32..3, 1_u32..5, 0_u32..9, 1_u32..9), 1..8),
            turn in any::<u64>(),
        ) {
            let choices: Vec<_> = raw.iter().map(|(p, w, l, c)| choice(*p, *w, *l, *c)).collect();
            let picked = choices[select(&choices, None, turn).unwrap()];
            let score = |c: &Choice| f64::from(c.load + 1) / f64::from(c.weight * c.capacity);
            for c in &choices {
                prop_assert!(c.priority >= picked.priority);
                prop_assert!(c.priority > picked.priority || score(c) >= score(&picked) - 1e-12);
            }
        }

        #[test]
        fn one_affinity_has_one_provider_while_load_is_even(
            raw in prop::collection::vec((1_u32..5, 1_u32..9), 1..8),
            each in 0_u32..50,
            affinity in any::<u64>(),
            turns in any::<(u64, u64)>(),
        ) {
            let idle = tier(&raw);
            let mut even = idle.clone();
            for c in &mut even {
                c.load = each * c.weight * c.capacity;
            }
            let home = select(&idle, Some(affinity), turns.0);
            prop_assert_eq!(select(&even, Some(affinity), turns.1), home);
            even.reverse();
            prop_assert_eq!(select(&even, Some(affinity), 0), home.map(|i| even.len() - 1 - i));
        }

        #[test]
        fn who_leaves_moves_only_its_own_affinities(
            raw in prop::collection::vec((1_u32..5, 1_u32..9), 2..8),
            gone in any::<prop::sample::Index>(),
            affinities in prop::collection::vec(any::<u64>(), 50),
        ) {
            let all = tier(&raw);
            let gone = gone.index(all.len());
            let mut rest = all.clone();
            rest.remove(gone);
            for affinity in affinities {
                let home = select(&all, Some(affinity), 0).unwrap();
                if home != gone {
                    prop_assert_eq!(rest[select(&rest, Some(affinity), 0).unwrap()], all[home]);
                }
            }
        }

        /// The load after it stays within 5/4 of the fair part, or one above; whoever stands before it in the order would
        /// pass that bound.
        #[test]
        fn the_load_is_bounded_and_nobody_is_passed_over_without_need(
            raw in prop::collection::vec((1_u32..5, 0_u32..40, 1_u32..9), 1..8),
            affinity in any::<u64>(),
        ) {
            let mut choices = tier(&raw.iter().map(|(w, _, c)| (*w, *c)).collect::<Vec<_>>());
            for (c, (_, load, _)) in choices.iter_mut().zip(&raw) {
                c.load = *load;
            }
            let total = f64::from(choices.iter().map(|c| c.load).sum::<u32>() + 1);
            let shares = f64::from(choices.iter().map(|c| c.weight * c.capacity).sum::<u32>());
            let over = |c: &Choice| {
                let fair = total * f64::from(c.weight * c.capacity) / shares;
                f64::from(c.load + 1) - (fair * 1.25).max(1.0 + (fair - 1e-9).ceil())
            };
            let picked = choices[select(&choices, Some(affinity), 0).unwrap()];
            prop_assert!(over(&picked) < 1e-6);
            for c in choices.iter().filter(|c| c.rendezvous(affinity) > picked.rendezvous(affinity)) {
                prop_assert!(over(c) > 1e-6);
            }
        }
    }
}
