//! Whether a failed attempt is followed by another (G55, seed 004): one total function of the facts. Pure.
//!
//! It decides; `exchange` gathers the facts and acts. Nothing else in the gate weighs a replay.

use iop_shared::execution::{AttemptFence, CommitState, Eligibility, ProviderHealth};

use super::asked::Origin;
use crate::pool::Prospects;

/// What made an attempt fail, as far as a replay is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Nothing was sent to a provider: always safe to send elsewhere.
    Connect,
    /// The node's watchdog ended it (004 `response_stalled`).
    Stall,
    /// The link went down under it.
    NodeLost,
    /// No content in time (G54).
    FirstContent,
    /// The provider said no in a way that may pass: 408, 409, 425, 429, 5xx, or such an error inside a 200.
    Answered,
    /// The connection or the node went before there was an answer.
    Cut,
    /// Empty, malformed, or no answer to what was asked.
    Broken,
    /// The request itself is at fault: another provider would say the same (G59).
    Final,
}

/// Everything the decision looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) origin: Origin,
    pub(crate) cause: Cause,
    /// 004 `recovery_handoff=confirmed`; looked at for a stall only, as the fence and the health are.
    pub(crate) handoff: bool,
    pub(crate) fence: AttemptFence,
    pub(crate) health: ProviderHealth,
    pub(crate) commit: CommitState,
    /// The client has left.
    pub(crate) cancelled: bool,
    /// No tool of the request runs at the provider, and no state of it lives there.
    pub(crate) replay_safe: bool,
    /// Attempts and time are left.
    pub(crate) budget: bool,
    /// The request's bytes are still here.
    pub(crate) snapshot: bool,
    /// The operator allows a replay after a failure there.
    pub(crate) allowed: bool,
    /// The provider said when it may be asked again, and that is worth waiting for.
    pub(crate) comes_back: bool,
    pub(crate) prospects: Prospects,
}

/// What follows a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Whoever asked gets what there is.
    Answer,
    /// A provider that was not tried. `fallback`: should none be left by then, the one that failed, which is proven
    /// available (004 `AllowAvoidedProviderFallback`).
    Elsewhere { fallback: bool },
    /// The one that failed, for no other is there; `paused`: after the pause that it asked for.
    Same { paused: bool },
}

/// 004's word for it, and what to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) eligibility: Eligibility,
    pub(crate) plan: Plan,
}

/// Whether another attempt is the run's to make: a provider answered, and what it said belongs to the retry of the run's
/// own (durable-api §8). Where no provider answered, the gate goes on to another one.
const fn is_the_runs(origin: Origin, cause: Cause) -> bool {
    match (origin, cause) {
        (Origin::Run, Cause::Answered | Cause::Broken | Cause::Final) => true,
        (Origin::Run, Cause::Connect | Cause::Stall | Cause::NodeLost | Cause::FirstContent | Cause::Cut)
        | (Origin::Client, _) => false,
    }
}

/// The first gate that is closed names the reason.
pub(crate) fn decide(facts: &Facts) -> Decision {
    let closed = |eligibility| Decision {
        eligibility,
        plan: Plan::Answer,
    };
    let open = |plan| Decision {
        eligibility: Eligibility::Eligible,
        plan,
    };
    let stalled = facts.cause == Cause::Stall;
    let proven = stalled && facts.health == ProviderHealth::Available;
    let elsewhere_only = facts.origin == Origin::Run;
    if facts.cause == Cause::Final || is_the_runs(facts.origin, facts.cause) {
        closed(Eligibility::Other)
    } else if stalled && !facts.handoff {
        closed(Eligibility::NoOwner)
    } else if facts.commit != CommitState::TransportUncommitted {
        closed(Eligibility::PostCommit)
    } else if stalled && facts.fence != AttemptFence::Confirmed {
        closed(Eligibility::UnconfirmedFence)
    } else if facts.cancelled {
        closed(Eligibility::CallerCancelled)
    } else if !facts.replay_safe && facts.cause != Cause::Connect {
        closed(Eligibility::ToolSideEffect)
    } else if !facts.budget {
        closed(Eligibility::BudgetExhausted)
    } else if !facts.snapshot || !facts.allowed {
        closed(Eligibility::Other)
    } else if facts.prospects.other {
        open(Plan::Elsewhere {
            fallback: proven && !elsewhere_only,
        })
    } else if !facts.prospects.same {
        closed(Eligibility::NoCandidate)
    } else if elsewhere_only {
        closed(Eligibility::SameProviderForbidden)
    } else if proven {
        open(Plan::Same { paused: false })
    } else if facts.comes_back {
        open(Plan::Same { paused: true })
    } else {
        closed(Eligibility::SameProviderForbidden)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGINS: [Origin; 2] = [Origin::Client, Origin::Run];
    const CAUSES: [Cause; 8] = [
        Cause::Connect,
        Cause::Stall,
        Cause::NodeLost,
        Cause::FirstContent,
        Cause::Answered,
        Cause::Cut,
        Cause::Broken,
        Cause::Final,
    ];

    /// A stall that may be replayed elsewhere.
    fn best() -> Facts {
        Facts {
            origin: Origin::Client,
            cause: Cause::Stall,
            handoff: true,
            fence: AttemptFence::Confirmed,
            health: ProviderHealth::Unknown,
            commit: CommitState::TransportUncommitted,
            cancelled: false,
            replay_safe: true,
            budget: true,
            snapshot: true,
            allowed: true,
            comes_back: false,
            prospects: Prospects {
                other: true,
                same: true,
            },
        }
    }

    /// Every combination of facts.
    fn all() -> impl Iterator<Item = Facts> {
        let who = ORIGINS.into_iter().flat_map(|o| CAUSES.map(|c| (o, c)));
        who.flat_map(|(origin, cause)| {
            AttemptFence::ALL.iter().flat_map(move |fence| {
                ProviderHealth::ALL.iter().flat_map(move |health| {
                    CommitState::ALL.iter().flat_map(move |commit| {
                        (0_u32..1 << 9).map(move |bits| {
                            let bit = |n: u32| bits >> n & 1 == 1;
                            Facts {
                                origin,
                                cause,
                                handoff: bit(0),
                                fence: *fence,
                                health: *health,
                                commit: *commit,
                                cancelled: bit(1),
                                replay_safe: bit(2),
                                budget: bit(3),
                                snapshot: bit(4),
                                allowed: bit(5),
                                comes_back: bit(6),
                                prospects: Prospects {
                                    other: bit(7),
                                    same: bit(8),
                                },
                            }
                        })
                    })
                })
            })
        })
    }

    #[test]
    fn each_closed_gate_names_itself_and_the_first_one_wins() {
        let mut facts = Facts {
            handoff: false,
            commit: CommitState::StreamOpen,
            fence: AttemptFence::Unconfirmed,
            cancelled: true,
            replay_safe: false,
            budget: false,
            snapshot: false,
            prospects: Prospects {
                other: false,
                same: false,
            },
            ..best()
        };
        type Open = fn(&mut Facts);
        let open: [(Eligibility, Open); 9] = [
            (Eligibility::NoOwner, |f| f.handoff = true),
            (Eligibility::PostCommit, |f| {
                f.commit = CommitState::TransportUncommitted;
            }),
            (Eligibility::UnconfirmedFence, |f| {
                f.fence = AttemptFence::Confirmed;
            }),
            (Eligibility::CallerCancelled, |f| f.cancelled = false),
            (Eligibility::ToolSideEffect, |f| f.replay_safe = true),
            (Eligibility::BudgetExhausted, |f| f.budget = true),
            (Eligibility::Other, |f| f.snapshot = true),
            (Eligibility::NoCandidate, |f| f.prospects.same = true),
            (Eligibility::SameProviderForbidden, |f| {
                f.health = ProviderHealth::Available;
            }),
        ];
        for (reason, open_it) in open {
            assert_eq!(decide(&facts).eligibility, reason);
            open_it(&mut facts);
        }
        assert_eq!(decide(&facts).plan, Plan::Same { paused: false });
    }

    /// What must hold whatever the facts.
    #[test]
    fn no_combination_breaks_a_promise() {
        for facts in all() {
            let Decision { eligibility, plan } = decide(&facts);
            assert_eq!(
                eligibility == Eligibility::Eligible,
                plan != Plan::Answer,
                "{facts:?}"
            );
            if plan == Plan::Answer {
                continue;
            }
            assert_eq!(facts.commit, CommitState::TransportUncommitted, "{facts:?}");
            assert!(
                !facts.cancelled && facts.budget && facts.snapshot && facts.allowed,
                "{facts:?}"
            );
            assert!(facts.replay_safe || facts.cause == Cause::Connect, "{facts:?}");
            assert_ne!(facts.cause, Cause::Final);
            if facts.cause == Cause::Stall {
                assert!(
                    facts.handoff && facts.fence == AttemptFence::Confirmed,
                    "{facts:?}"
                );
            }
            let proven = facts.cause == Cause::Stall && facts.health == ProviderHealth::Available;
            let run = facts.origin == Origin::Run;
            match plan {
                Plan::Elsewhere { fallback } => {
                    assert!(facts.prospects.other && fallback == (proven && !run), "{facts:?}");
                }
                Plan::Same { paused } => {
                    assert!(!run, "{facts:?}");
                    assert!(!facts.prospects.other && facts.prospects.same);
                    assert!(proven || facts.comes_back, "{facts:?}");
                    assert_eq!(paused, !proven, "{facts:?}");
                }
                Plan::Answer => {}
            }
        }
    }

    /// Inside runs the gate goes on only where no provider answered, and only elsewhere; there it asks for no more and no
    /// less than it does for a client.
    #[test]
    fn a_run_owns_what_a_provider_answered() {
        for facts in all().filter(|f| f.origin == Origin::Run) {
            let unanswered = match facts.cause {
                Cause::Connect | Cause::Stall | Cause::NodeLost | Cause::FirstContent | Cause::Cut => true,
                Cause::Answered | Cause::Broken | Cause::Final => false,
            };
            let client = decide(&Facts {
                origin: Origin::Client,
                ..facts
            });
            let want = match client.plan {
                Plan::Elsewhere { .. } if unanswered => Plan::Elsewhere { fallback: false },
                Plan::Elsewhere { .. } | Plan::Same { .. } | Plan::Answer => Plan::Answer,
            };
            let decision = decide(&facts);
            assert_eq!(decision.plan, want, "{facts:?}");
            if client.plan == Plan::Answer && unanswered {
                assert_eq!(decision, client, "{facts:?}");
            }
        }
    }

    /// Fence, health and handoff are a stall's; nothing else is held up by them.
    #[test]
    fn only_a_stall_needs_its_proof() {
        for facts in all().filter(|f| f.cause != Cause::Stall) {
            let proven = Facts {
                handoff: true,
                fence: AttemptFence::Confirmed,
                health: ProviderHealth::Unknown,
                ..facts
            };
            assert_eq!(decide(&facts), decide(&proven), "{facts:?}");
        }
    }

    #[test]
    fn a_refused_connection_is_replayed_with_any_tool() {
        let facts = Facts {
            cause: Cause::Connect,
            replay_safe: false,
            ..best()
        };
        assert_eq!(decide(&facts).plan, Plan::Elsewhere { fallback: false });
    }
}
