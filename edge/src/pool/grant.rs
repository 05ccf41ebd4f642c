//! Who is given a place: candidates by standing, then by tier and load (G30, G34, G36). Pure.
//!
//! The same for a first resolution and for one out of the queue. Hints are the request's own: they are looked at, and
//! change nothing for anybody else.

use std::sync::Arc;
use std::time::Instant;

use iop_shared::execution::Endpoint;
use iop_shared::ids::{ConnectionGeneration, ProviderKey};

use super::ask::Prospects;
use super::ejection::{Pass, Standing};
use super::route::Candidate;
use super::select::{Choice, seed, select};
use super::table::{Slot, Table, Target};

/// What a request may be given.
#[derive(Debug, Clone, Copy)]
pub(super) struct Want<'a> {
    pub(super) endpoint: Endpoint,
    pub(super) candidates: &'a [Candidate],
    /// Only this one.
    pub(super) pinned: Option<(&'a ProviderKey, &'a Arc<str>)>,
    /// 004 `AvoidProviderID`: not these.
    pub(super) avoid: &'a [ProviderKey],
    /// 004 `AllowAvoidedProviderFallback`: but the last of them, where no other is eligible.
    pub(super) allow_avoided: bool,
    /// Requests of one value go to one provider while it is not crowded.
    pub(super) affinity: Option<u64>,
}

/// A place that was given; immutable (G31).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) provider: ProviderKey,
    pub(super) target: Arc<str>,
    pub(super) generation: ConnectionGeneration,
    pub(super) pass: Pass,
}

/// What came of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found<S> {
    /// A place was taken; it has to be released.
    Granted { place: Place, with: S },
    /// There are providers, and all are full or want to be left alone for a while.
    Full,
    /// Nobody serves it; with something to avoid: nobody is eligible, and no wait will help.
    Absent,
}

/// Candidates with room, and where they stand among all of them. Kept, so that a grant allocates nothing.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    choices: Vec<Choice>,
    of: Vec<usize>,
}

impl Scratch {
    fn clear(&mut self) {
        self.choices.clear();
        self.of.clear();
    }
}

impl<'a> Want<'a> {
    /// Any of these candidates.
    pub(super) fn of(candidates: &'a [Candidate], endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            candidates,
            pinned: None,
            avoid: &[],
            allow_avoided: false,
            affinity: None,
        }
    }

    fn only(&self) -> Option<Candidate> {
        self.pinned.map(|(provider, target)| Candidate {
            provider: provider.clone(),
            target: target.clone(),
            priority: 0,
            weight: 1,
        })
    }

    /// Who is asked: all candidates, or the pinned one.
    fn among<'b>(&self, only: Option<&'b Candidate>) -> &'b [Candidate]
    where
        'a: 'b,
    {
        only.map_or(self.candidates, std::slice::from_ref)
    }
}

impl<S: Clone> Table<S> {
    /// Takes a place for a request, or says why there is none.
    pub(super) fn grant(&mut self, want: Want<'_>, now: Instant) -> Found<S> {
        let only = want.only();
        let candidates = want.among(only.as_ref());
        let mut scratch = std::mem::take(&mut self.scratch);
        let found = match self.survey(&want, candidates, now, &mut scratch) {
            None => Found::Absent,
            Some(_) => match self.pick(&scratch, want.affinity).and_then(|i| candidates.get(i)) {
                None => Found::Full,
                Some(candidate) => self.take(candidate, now),
            },
        };
        self.scratch = scratch;
        found
    }

    /// Whether anybody takes new work of this kind, full or not, avoided or not. Who is lowered does not.
    pub(super) fn any_serving(&self, want: Want<'_>) -> bool {
        let only = want.only();
        let mut candidates = want.among(only.as_ref()).iter();
        candidates.any(|c| self.serving(c, want.endpoint).is_some())
    }

    fn pick(&mut self, scratch: &Scratch, affinity: Option<u64>) -> Option<usize> {
        let i = match &scratch.choices[..] {
            [] => return None,
            [_] => 0,
            several => {
                self.turn = self.turn.wrapping_add(1);
                select(several, affinity, self.turn)?
            }
        };
        scratch.of.get(i).copied()
    }

    fn take(&mut self, candidate: &Candidate, now: Instant) -> Found<S> {
        let Some(slot) = self.slots.get_mut(&candidate.provider) else {
            return Found::Absent;
        };
        let Some(target) = slot.target_mut(&candidate.target) else {
            return Found::Absent;
        };
        let pass = target.ejection.admit(now);
        slot.in_flight += 1;
        let place = Place {
            provider: candidate.provider.clone(),
            target: candidate.target.clone(),
            generation: slot.generation,
            pass,
        };
        let with = slot.with.clone();
        Found::Granted { place, with }
    }

    /// The best standing there is, and in `scratch` those who have it and room.
    fn survey(
        &self,
        want: &Want<'_>,
        candidates: &[Candidate],
        now: Instant,
        scratch: &mut Scratch,
    ) -> Option<Standing> {
        // A first attempt goes to the best there is; another one only where it may do better.
        let first = want.avoid.is_empty();
        let best = self.look(want, candidates, now, scratch, first, |c| {
            !want.avoid.contains(&c.provider)
        });
        if first || best == Some(Standing::Open) {
            return best;
        }
        // The avoided one, as far as it is not ejected. Its cool-down is the caller's to wait for.
        let last = want.avoid.last().filter(|_| want.allow_avoided);
        self.look(want, candidates, now, scratch, true, |c| {
            Some(&c.provider) == last && self.standing(c, want.endpoint, now) != Some(Standing::Ejected)
        })
    }

    fn look(
        &self,
        want: &Want<'_>,
        candidates: &[Candidate],
        now: Instant,
        scratch: &mut Scratch,
        despite: bool,
        may: impl Fn(&Candidate) -> bool,
    ) -> Option<Standing> {
        let mut best = None;
        scratch.clear();
        for (i, candidate) in candidates.iter().enumerate().filter(|(_, c)| may(c)) {
            let Some((slot, target)) = self.serving(candidate, want.endpoint) else {
                continue;
            };
            let standing = target.ejection.standing(now);
            match best {
                Some(better) if better < standing => continue,
                Some(same) if same == standing => {}
                Some(_) | None => {
                    best = Some(standing);
                    scratch.clear();
                }
            }
            if slot.has_room() && (standing == Standing::Open || despite) {
                scratch.choices.push(Choice {
                    priority: candidate.priority,
                    weight: candidate.weight,
                    load: slot.in_flight.saturating_add(slot.others),
                    capacity: slot.capacity,
                    seed: want
                        .affinity
                        .map_or(0, |_| seed(&candidate.provider, &candidate.target)),
                });
                scratch.of.push(i);
            }
        }
        best
    }

    /// Who takes new work for this endpoint, full or not, ejected or not.
    pub(super) fn serving(&self, candidate: &Candidate, endpoint: Endpoint) -> Option<(&Slot<S>, &Target)> {
        let slot = self.slots.get(&candidate.provider)?;
        Some((slot, slot.serves(endpoint, &candidate.target)?))
    }

    fn standing(&self, candidate: &Candidate, endpoint: Endpoint, now: Instant) -> Option<Standing> {
        self.serving(candidate, endpoint)
            .map(|(_, target)| target.ejection.standing(now))
    }

    /// Will do for a request that can be sent elsewhere, full or not.
    fn eligible(&self, candidate: &Candidate, endpoint: Endpoint, now: Instant) -> bool {
        self.standing(candidate, endpoint, now) == Some(Standing::Open)
    }

    /// Whether a candidate of the model would do in the place's stead.
    pub(super) fn another_eligible(
        &self,
        place: &Place,
        endpoint: Endpoint,
        rivals: &[Candidate],
        now: Instant,
    ) -> bool {
        rivals.iter().any(|c| {
            (&c.provider, &c.target) != (&place.provider, &place.target) && self.eligible(c, endpoint, now)
        })
    }

    /// Who is eligible for a request, full or not (G55). What is pinned has no other.
    pub(super) fn prospects(&self, want: Want<'_>, now: Instant) -> Prospects {
        let only = want.only();
        let candidates = want.among(only.as_ref());
        Prospects {
            other: only.is_none()
                && candidates
                    .iter()
                    .any(|c| !want.avoid.contains(&c.provider) && self.eligible(c, want.endpoint, now)),
            same: candidates.iter().any(|c| {
                let standing = self.standing(c, want.endpoint, now);
                want.avoid.last() == Some(&c.provider)
                    && matches!(standing, Some(Standing::Open | Standing::Cooling))
            }),
        }
    }
}
