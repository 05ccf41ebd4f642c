use super::*;
use iop_shared::execution::LivenessClassification;
use proptest::prelude::*;

const GENERATION: ConnectionGeneration = ConnectionGeneration(7);

fn key(name: &str) -> ProviderKey {
    ProviderKey::parse(name).unwrap()
}

fn target(name: &str) -> Arc<str> {
    Arc::from(name)
}

fn reading(sequence: u64, health: ProviderHealth) -> Reading {
    Reading {
        fence: AttemptFence::Confirmed,
        sequence: Some(sequence),
        health,
    }
}

fn evidence(source: EvidenceSource, target: &Arc<str>, reading: Reading) -> Evidence<'_> {
    Evidence {
        source,
        bound: true,
        current: true,
        target,
        reading: Some(reading),
    }
}

/// What is known before the evidence comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    Nothing,
    Lowered,
    Raised,
}

/// An overlay whose newest accepted sequence is 0, 5 and 5.
fn overlay(before: Before) -> Overlay {
    let (mut overlay, t) = (Overlay::default(), target("t"));
    let mut take = |source, sequence, health| {
        let verdict = overlay.take(
            GENERATION,
            &key("n/p"),
            &evidence(source, &t, reading(sequence, health)),
        );
        assert_eq!(verdict.decision, EvidenceDecision::Applied);
    };
    match before {
        Before::Nothing => {}
        Before::Lowered => take(EvidenceSource::Stall, 5, ProviderHealth::Unavailable),
        Before::Raised => {
            take(EvidenceSource::Stall, 4, ProviderHealth::Unavailable);
            take(EvidenceSource::Probe, 5, ProviderHealth::Available);
        }
    }
    overlay
}

/// Every combination of facts against the table of 004, each line of it written out.
#[test]
fn every_piece_of_evidence_is_decided_by_the_first_test_it_fails() {
    let (t, other) = (target("t"), target("other"));
    let mut readings = vec![None];
    for fence in AttemptFence::ALL {
        for sequence in [None, Some(0), Some(1), Some(5), Some(6)] {
            for health in ProviderHealth::ALL {
                readings.push(Some(Reading {
                    fence: *fence,
                    sequence,
                    health: *health,
                }));
            }
        }
    }
    let mut seen = std::collections::BTreeMap::new();
    for before in [Before::Nothing, Before::Lowered, Before::Raised] {
        let newest = if before == Before::Nothing { 0 } else { 5 };
        for source in EvidenceSource::ALL {
            for (bound, current) in [(true, true), (true, false), (false, true), (false, false)] {
                for target in [&t, &other] {
                    for reading in &readings {
                        let evidence = Evidence {
                            source: *source,
                            bound,
                            current,
                            target,
                            reading: *reading,
                        };
                        let mut overlay = overlay(before);
                        let verdict = overlay.take(GENERATION, &key("n/p"), &evidence);
                        let wrong_target =
                            *source == EvidenceSource::Probe && before == Before::Lowered && *target == other;
                        let usable = reading.filter(|r| {
                            r.fence == AttemptFence::Confirmed
                                && r.sequence.is_some()
                                && *source != EvidenceSource::Unknown
                        });
                        let want = match usable {
                            _ if !bound || wrong_target => EvidenceDecision::RejectedBinding,
                            _ if !current => EvidenceDecision::RejectedStale,
                            None => EvidenceDecision::RejectedAmbiguous,
                            Some(r) if r.sequence.unwrap() <= newest => EvidenceDecision::RejectedStale,
                            Some(r) if r.health == ProviderHealth::Unknown => EvidenceDecision::Inconclusive,
                            Some(_) => EvidenceDecision::Applied,
                        };
                        assert_eq!(verdict.decision, want, "{before:?} {evidence:?}");
                        let applied =
                            (want == EvidenceDecision::Applied).then(|| (*source, usable.unwrap().health));
                        let lowered = match applied {
                            Some((EvidenceSource::Stall, ProviderHealth::Unavailable)) => true,
                            Some((EvidenceSource::Probe, ProviderHealth::Available)) => false,
                            _ => before == Before::Lowered,
                        };
                        assert_eq!(
                            overlay.lowered_by(GENERATION, &key("n/p")).is_some(),
                            lowered,
                            "{before:?} {evidence:?}"
                        );
                        let word = |lowered| match (current, lowered) {
                            (false, _) => ProviderHealth::Unknown,
                            (true, true) => ProviderHealth::Unavailable,
                            (true, false) => ProviderHealth::Available,
                        };
                        assert_eq!(verdict.from, word(before == Before::Lowered));
                        assert_eq!(verdict.to, word(lowered));
                        let sequence = if applied.is_some() {
                            usable.unwrap().sequence.unwrap()
                        } else {
                            newest
                        };
                        let shown = (before != Before::Nothing || lowered).then(|| {
                            let health = if lowered {
                                ProviderHealth::Unavailable
                            } else {
                                ProviderHealth::Available
                            };
                            (health, sequence)
                        });
                        assert_eq!(overlay.shown(GENERATION, &key("n/p")), shown);
                        *seen.entry(want.as_str()).or_insert(0) += 1;
                    }
                }
            }
        }
    }
    assert_eq!(seen.len(), EvidenceDecision::ALL.len(), "{seen:?}");
}

#[test]
fn a_stall_says_something_only_as_one_of_the_three_pairs() {
    for code in FailureCode::ALL {
        for classification in LivenessClassification::ALL {
            for health in ProviderHealth::ALL {
                let failure = StallFailure {
                    failure_code: *code,
                    provider_health: *health,
                    liveness_classification: *classification,
                    idle_duration_ms: 1,
                    run_id: String::new(),
                    attempt_id: String::new(),
                    attempt_fence: AttemptFence::Confirmed,
                    adapter: String::new(),
                    target: String::new(),
                    health_observation_seq: Some(3),
                };
                let pair = matches!(
                    (classification.as_str(), health.as_str()),
                    ("request_stalled", "available")
                        | ("provider_unhealthy", "unavailable")
                        | ("health_unknown", "unknown")
                );
                let want = (pair && *code == FailureCode::ResponseStalled).then(|| reading(3, *health));
                assert_eq!(Reading::of_stall(&failure), want);
            }
        }
    }
}

#[test]
fn a_second_stall_does_not_change_who_has_to_answer() {
    let mut overlay = overlay(Before::Lowered);
    let (t, other) = (target("t"), target("other"));
    let lower = evidence(
        EvidenceSource::Stall,
        &other,
        reading(6, ProviderHealth::Unavailable),
    );
    assert!(!overlay.take(GENERATION, &key("n/p"), &lower).changed());
    assert_eq!(overlay.lowered_by(GENERATION, &key("n/p")), Some(&t));
}

#[derive(Debug, Clone)]
enum Op {
    /// Evidence of a generation and provider: source, bound, target, fence, sequence, health.
    Take {
        generation: u64,
        provider: bool,
        probe: bool,
        bound: bool,
        target: bool,
        fence: AttemptFence,
        sequence: Option<u64>,
        health: ProviderHealth,
    },
    Gone(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let take = (
        (1_u64..4, any::<bool>(), any::<bool>()),
        prop::bool::weighted(0.9),
        prop::bool::weighted(0.8),
        prop_oneof![4 => Just(AttemptFence::Confirmed), 1 => Just(AttemptFence::Unconfirmed)],
        prop::option::weighted(0.9, 0_u64..12),
        prop::sample::select(ProviderHealth::ALL),
    )
        .prop_map(
            |((generation, provider, probe), bound, target, fence, sequence, health)| Op::Take {
                generation,
                provider,
                probe,
                bound,
                target,
                fence,
                sequence,
                health,
            },
        );
    prop_oneof![12 => take, 1 => (1_u64..4).prop_map(Op::Gone)]
}

/// Of which generation and provider, and what: a probe or not, the target, the sequence, the health.
type Accepted = ((u64, bool), (bool, usize, u64, ProviderHealth));

proptest! {
    /// The naive model keeps the whole list of accepted evidence and derives everything from it.
    #[test]
    fn it_agrees_with_the_list_of_all_accepted_evidence(ops in prop::collection::vec(op(), 0..120)) {
        let targets = [target("t"), target("u")];
        let mut overlay = Overlay::default();
        let mut accepted: Vec<Accepted> = Vec::new();
        let lowered_by = |list: &[Accepted], of: (u64, bool)| {
            let mut lowered = None;
            for (_, (probe, target, _, health)) in list.iter().filter(|(k, _)| *k == of) {
                match (probe, health) {
                    (false, ProviderHealth::Unavailable) => lowered = lowered.or(Some(*target)),
                    (true, ProviderHealth::Available) => lowered = None,
                    _ => {}
                }
            }
            lowered
        };
        for op in ops {
            match op {
                Op::Gone(generation) => {
                    overlay.forget(ConnectionGeneration(generation));
                    accepted.retain(|((g, _), _)| *g != generation);
                }
                Op::Take { generation, provider, probe, bound, target, fence, sequence, health } => {
                    let of = (generation, provider);
                    let target = usize::from(target);
                    let newest = accepted.iter().filter(|(k, _)| *k == of).map(|(_, (_, _, s, _))| *s).max().unwrap_or(0);
                    let before = lowered_by(&accepted, of);
                    let ok = bound
                        && !(probe && before.is_some_and(|t| t != target))
                        && fence == AttemptFence::Confirmed
                        && sequence.is_some_and(|s| s > newest)
                        && health != ProviderHealth::Unknown;
                    if ok {
                        accepted.push((of, (probe, target, sequence.unwrap(), health)));
                    }
                    let verdict = overlay.take(
                        ConnectionGeneration(generation),
                        &key(if provider { "n/p" } else { "n/q" }),
                        &Evidence {
                            source: if probe { EvidenceSource::Probe } else { EvidenceSource::Stall },
                            bound,
                            current: true,
                            target: &targets[target],
                            reading: Some(Reading { fence, sequence, health }),
                        },
                    );
                    prop_assert_eq!(verdict.decision == EvidenceDecision::Applied, ok);
                    prop_assert_eq!(verdict.changed(), before.is_some() != lowered_by(&accepted, of).is_some());
                }
            }
            for generation in 1..4 {
                for provider in [true, false] {
                    let lowered = overlay.lowered_by(ConnectionGeneration(generation), &key(if provider { "n/p" } else { "n/q" }));
                    let naive = lowered_by(&accepted, (generation, provider)).map(|t| &targets[t]);
                    prop_assert_eq!(lowered, naive);
                }
            }
        }
    }
}
