//! Choosing among providers that could take a request now (G30). Pure.

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
}

impl Choice {
    /// Compares `(load + 1) / (weight * capacity)` without a division.
    fn fuller_than(&self, other: &Choice) -> bool {
        let share = |c: &Choice| u128::from(c.weight.max(1)) * u128::from(c.capacity.max(1));
        (u128::from(self.load) + 1) * share(other) > (u128::from(other.load) + 1) * share(self)
    }
}

/// The index of the choice: lowest priority, then least loaded by weight; equals take turns by `turn`.
pub(super) fn select(choices: &[Choice], turn: u64) -> Option<usize> {
    let first = choices.iter().map(|c| c.priority).min()?;
    let mut best: Option<&Choice> = None;
    let mut equals = 0_u64;
    for choice in choices.iter().filter(|c| c.priority == first) {
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
        .filter(|(_, c)| c.priority == first && !c.fuller_than(&best) && !best.fuller_than(c))
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
        }
    }

    #[test]
    fn the_lowest_priority_with_room_goes_first() {
        assert_eq!(select(&[choice(1, 1, 0, 8), choice(0, 1, 7, 8)], 0), Some(1));
        assert_eq!(select(&[], 0), None);
    }

    #[test]
    fn load_spreads_by_weight() {
        let mut choices = [choice(0, 3, 0, 100), choice(0, 1, 0, 100)];
        for turn in 0..40 {
            let i = select(&choices, turn).unwrap();
            choices[i].load += 1;
        }
        assert_eq!((choices[0].load, choices[1].load), (30, 10));
    }

    #[test]
    fn equals_take_turns() {
        let choices = [choice(0, 1, 0, 8); 3];
        let picks: Vec<_> = (0..6).map(|turn| select(&choices, turn).unwrap()).collect();
        assert_eq!(picks, [0, 1, 2, 0, 1, 2]);
    }

    proptest! {
        #[test]
        fn nobody_better_was_passed_over(
            raw in prop::collection::vec((0_u32..3, 1_u32..5, 0_u32..9, 1_u32..9), 1..8),
            turn in any::<u64>(),
        ) {
            let choices: Vec<_> = raw.iter().map(|(p, w, l, c)| choice(*p, *w, *l, *c)).collect();
            let picked = choices[select(&choices, turn).unwrap()];
            let score = |c: &Choice| f64::from(c.load + 1) / f64::from(c.weight * c.capacity);
            for c in &choices {
                prop_assert!(c.priority >= picked.priority);
                prop_assert!(c.priority > picked.priority || score(c) >= score(&picked) - 1e-12);
            }
        }
    }
}
