//! The pool with the embedded node, under paused time.

use std::sync::Arc;
use std::time::Duration;

use iop_shared::execution::{
    AttemptFence, AttemptResult, Endpoint, EvidenceDecision, EvidenceSource, FailureCode,
    LivenessClassification, ProviderHealth,
};
use iop_shared::ids::{AttemptId, NodeId, ProviderKey, RunId};
use iop_shared::wire::terminal::StallFailure;
use tokio::time::Instant;

use super::{Ask, Lease, Model, Pool, Prospects, ProviderSnapshot, Refused, Who};
use crate::config::settings_of;
use crate::link::Links;
use crate::metrics::Metrics;

const PAIR: &str = r#"
[ejection]
consecutive = 3

[[providers]]
id = "p"
adapter = "scripted"
capacity = 2
script = { t = { reply = "hi" } }

[[providers]]
id = "q"
adapter = "scripted"
capacity = 1
script = { t = { reply = "hi" } }

[[models]]
name = "m"
candidates = [{ provider = "p", target = "t" }, { provider = "q", target = "t", priority = 1 }]

[[models]]
name = "alone"
candidates = [{ provider = "p", target = "t" }]
"#;

struct Site {
    pool: Arc<Pool>,
    metrics: Arc<Metrics>,
    who: Who,
    _links: Links,
}

impl Site {
    fn new(toml: &str) -> Self {
        let settings = settings_of(toml);
        let metrics = Arc::new(Metrics::new().unwrap());
        let pool = Pool::new(
            settings.models,
            settings.queue,
            settings.ejection,
            Arc::clone(&metrics),
        );
        let links = Links::new(Arc::clone(&pool));
        let node = iop_node::Node::new(NodeId::embedded(), &settings.providers, metrics.registry()).unwrap();
        links.embed(node);
        Self {
            pool,
            metrics,
            who: Who::nobody(),
            _links: links,
        }
    }

    fn model(&self, name: &str) -> Arc<Model> {
        self.pool.resolve(name).unwrap()
    }

    async fn acquire(&self, model: &str) -> Result<Lease, Refused> {
        self.avoiding(model, &[], false).await
    }

    async fn avoiding(
        &self,
        model: &str,
        avoid: &[ProviderKey],
        allow_avoided: bool,
    ) -> Result<Lease, Refused> {
        let model = self.model(model);
        let mut ask = Ask::first(&model, Endpoint::Chat, &self.who);
        (ask.avoid, ask.allow_avoided) = (avoid, allow_avoided);
        self.pool.acquire(ask).await
    }

    fn prospects(&self, model: &str, avoid: &[ProviderKey]) -> Prospects {
        let model = self.model(model);
        let mut ask = Ask::first(&model, Endpoint::Chat, &self.who);
        ask.avoid = avoid;
        self.pool.prospects(&ask)
    }

    async fn attempt(
        &self,
        model: &str,
        result: AttemptResult,
        retry_after: Option<Duration>,
    ) -> ProviderKey {
        let mut lease = self.acquire(model).await.unwrap();
        lease.tell(result, retry_after);
        lease.provider().clone()
    }

    fn provider(&self, id: &str) -> ProviderSnapshot {
        let mut all = self.pool.providers();
        all.retain(|p| p.id.as_str() == id);
        all.pop().unwrap()
    }

    fn evidence(&self, source: EvidenceSource, health: ProviderHealth, decision: EvidenceDecision) -> u64 {
        self.metrics.health_evidence.at((source, health, decision)).get()
    }

    fn transitions(&self) -> [u64; 2] {
        let (up, down) = (ProviderHealth::Available, ProviderHealth::Unavailable);
        [(up, down), (down, up)].map(|labels| self.metrics.health_transitions.at(labels).get())
    }

    fn all_evidence(&self) -> u64 {
        EvidenceSource::ALL
            .iter()
            .flat_map(|s| ProviderHealth::ALL.iter().map(move |h| (*s, *h)))
            .flat_map(|(s, h)| EvidenceDecision::ALL.iter().map(move |d| self.evidence(s, h, *d)))
            .sum()
    }
}

fn key(name: &str) -> ProviderKey {
    ProviderKey::parse(name).unwrap()
}

fn ids() -> (RunId, AttemptId) {
    (RunId(uuid::Uuid::now_v7()), AttemptId(uuid::Uuid::now_v7()))
}

fn stall((run, attempt): (RunId, AttemptId), health: ProviderHealth, sequence: u64) -> StallFailure {
    StallFailure {
        failure_code: FailureCode::ResponseStalled,
        provider_health: health,
        liveness_classification: *LivenessClassification::ALL
            .iter()
            .find(|c| c.health() == health)
            .unwrap(),
        idle_duration_ms: 300_000,
        run_id: run.to_string(),
        attempt_id: attempt.to_string(),
        attempt_fence: AttemptFence::Confirmed,
        adapter: "scripted".into(),
        target: "t".into(),
        health_observation_seq: Some(sequence),
    }
}

/// Lowers the lease's provider.
fn lower(lease: &Lease, sequence: u64) {
    let ids = ids();
    let failure = stall(ids, ProviderHealth::Unavailable, sequence);
    assert!(lease.observe_stall(ids.0, ids.1, Some(&failure)).handoff);
}

#[tokio::test(start_paused = true)]
async fn a_stall_counts_only_as_its_own_leases_and_the_place_comes_back_once() {
    let site = Site::new(PAIR);
    let ids = ids();
    let good = stall(ids, ProviderHealth::Unavailable, 5);
    type Change = fn(&mut StallFailure);
    let cases: [(EvidenceDecision, bool, Change); 8] = [
        (EvidenceDecision::RejectedBinding, false, |f| {
            f.run_id = uuid::Uuid::now_v7().to_string();
        }),
        (EvidenceDecision::RejectedBinding, false, |f| {
            f.attempt_id.clear();
        }),
        (EvidenceDecision::RejectedBinding, false, |f| {
            f.adapter = "openai".into();
        }),
        (EvidenceDecision::RejectedBinding, false, |f| {
            f.target = "u".into()
        }),
        (EvidenceDecision::RejectedAmbiguous, false, |f| {
            f.health_observation_seq = None;
        }),
        // Proven to be this lease's own, and of no use to the overlay.
        (EvidenceDecision::RejectedAmbiguous, true, |f| {
            f.attempt_fence = AttemptFence::Unconfirmed;
        }),
        (EvidenceDecision::RejectedStale, true, |f| {
            f.health_observation_seq = Some(0);
        }),
        (EvidenceDecision::Applied, true, |_| {}),
    ];
    for (n, (decision, handoff, change)) in (1..).zip(cases) {
        let lease = site.acquire("alone").await.unwrap();
        let mut failure = good.clone();
        change(&mut failure);
        let before = site.evidence(EvidenceSource::Stall, ProviderHealth::Unavailable, decision);
        let seen = lease.observe_stall(ids.0, ids.1, Some(&failure));
        assert_eq!(seen.handoff, handoff, "{failure:?}");
        let (fence, health) = if handoff {
            (failure.attempt_fence, ProviderHealth::Unavailable)
        } else {
            (AttemptFence::Unknown, ProviderHealth::Unknown)
        };
        assert_eq!((seen.fence, seen.health), (fence, health));
        let after = site.evidence(EvidenceSource::Stall, ProviderHealth::Unavailable, decision);
        assert_eq!((after - before, site.all_evidence()), (1, n), "{failure:?}");
        assert_eq!(site.provider("p").in_flight, 1);
        drop(lease);
        assert_eq!(site.provider("p").in_flight, 0);
        assert_eq!(
            site.provider("p").status == "unavailable",
            decision == EvidenceDecision::Applied
        );
    }
    assert_eq!(site.transitions(), [1, 0]);
}

#[tokio::test(start_paused = true)]
async fn absent_and_contradictory_evidence_is_counted_as_unknown() {
    let site = Site::new(PAIR);
    let ids = ids();
    let mut contradictory = stall(ids, ProviderHealth::Unavailable, 1);
    contradictory.liveness_classification = LivenessClassification::RequestStalled;
    for failure in [None, Some(&contradictory)] {
        let lease = site.acquire("m").await.unwrap();
        assert!(!lease.observe_stall(ids.0, ids.1, failure).handoff);
    }
    let ambiguous = EvidenceDecision::RejectedAmbiguous;
    assert_eq!(
        site.evidence(EvidenceSource::Stall, ProviderHealth::Unknown, ambiguous),
        2
    );
    assert_eq!(site.all_evidence(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_lowered_provider_is_asked_until_a_newer_answer_raises_it_and_who_waits_is_served() {
    let site = Site::new(PAIR);
    let lowered = Instant::now();
    // The node's first answers have the numbers 1 and 2, too old; the third is news.
    lower(&site.acquire("alone").await.unwrap(), 2);
    let p = site.provider("p");
    assert_eq!(
        (p.status, p.health, p.capacity, p.effective_capacity),
        ("unavailable", ProviderHealth::Unavailable, 2, 0)
    );
    let overlay = p.overlay.unwrap();
    assert_eq!(
        (overlay.health, overlay.sequence),
        (ProviderHealth::Unavailable, 2)
    );
    assert!(site.provider("q").overlay.is_none());
    assert!(site.pool.listed().iter().any(|m| *m.id == *"alone"));
    assert_eq!(
        site.acquire("m").await.unwrap().provider(),
        &key("q"),
        "others go elsewhere"
    );
    // Its longest wait is shorter than three questions.
    assert_eq!(site.acquire("alone").await.err(), Some(Refused::NoProvider));
    assert_eq!(lowered.elapsed().as_secs(), 30);
    drop(site.acquire("alone").await.unwrap());
    assert_eq!(lowered.elapsed().as_secs(), 5 + 10 + 20);
    let p = site.provider("p");
    assert_eq!(
        (p.status, p.health, p.effective_capacity),
        ("available", ProviderHealth::Available, 2)
    );
    let overlay = p.overlay.unwrap();
    assert_eq!((overlay.health, overlay.sequence), (ProviderHealth::Available, 3));
    let probe = |d| site.evidence(EvidenceSource::Probe, ProviderHealth::Available, d);
    assert_eq!(probe(EvidenceDecision::RejectedStale), 2);
    assert_eq!(probe(EvidenceDecision::Applied), 1);
    assert_eq!(site.transitions(), [1, 1]);
    // Nobody asks about who is well.
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(site.all_evidence(), 4);
}

#[tokio::test(start_paused = true)]
async fn nobody_is_sent_at_once_to_where_a_node_was_just_lost() {
    let site = Site::new(PAIR);
    let begun = Instant::now();
    assert_eq!(
        site.attempt("alone", AttemptResult::NodeLost, None).await,
        key("p")
    );
    drop(site.acquire("alone").await.unwrap());
    assert_eq!(begun.elapsed(), super::service::REFUSAL_RETRY);
    assert_eq!(site.provider("p").in_flight, 0);
    // Any other end gives the place to the next at once.
    site.attempt("alone", AttemptResult::Cut, None).await;
    drop(site.acquire("alone").await.unwrap());
    assert_eq!(begun.elapsed(), super::service::REFUSAL_RETRY);
}

#[tokio::test(start_paused = true)]
async fn who_stays_lowered_is_asked_less_and_less_often() {
    let missing = PAIR.replacen("reply = \"hi\"", "probe = \"missing\"", 1);
    let site = Site::new(&missing);
    let lowered = Instant::now();
    lower(&site.acquire("alone").await.unwrap(), 1);
    let asked = || {
        EvidenceDecision::ALL
            .iter()
            .map(|d| site.evidence(EvidenceSource::Probe, ProviderHealth::Unavailable, *d))
            .sum::<u64>()
    };
    let mut at = Vec::new();
    while lowered.elapsed() < Duration::from_secs(260) {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if asked() > at.len() as u64 {
            at.push(lowered.elapsed().as_secs());
        }
    }
    assert_eq!(at, [5, 15, 35, 75, 135, 195, 255]);
    assert_eq!(site.provider("p").status, "unavailable");
}

#[tokio::test(start_paused = true)]
async fn failures_in_a_row_eject_and_the_end_of_the_ejection_wakes_who_waits() {
    let site = Site::new(PAIR);
    for _ in 0..3 {
        assert_eq!(site.attempt("m", AttemptResult::Http5xx, None).await, key("p"));
    }
    let ejected = Instant::now();
    let until: jiff::Timestamp = site.provider("p").ejected_until.unwrap().parse().unwrap();
    let left = until.duration_since(jiff::Timestamp::now());
    assert!((1..=2).contains(&left.as_secs()), "{left}");
    assert!(site.provider("q").ejected_until.is_none());
    let q = site.acquire("m").await.unwrap();
    assert_eq!(q.provider(), &key("q"));
    // The only other place is taken; the trial comes when the ejection ends.
    let mut trial = site.acquire("m").await.unwrap();
    assert_eq!((trial.provider(), ejected.elapsed().as_secs()), (&key("p"), 2));
    assert!(site.provider("p").ejected_until.is_none());
    trial.tell(AttemptResult::ConnectError, None);
    drop(trial);
    let trial = site.acquire("m").await.unwrap();
    assert_eq!((trial.provider(), ejected.elapsed().as_secs()), (&key("p"), 6));
    // It ends without a word: the next one is the trial, and its success opens the rest.
    drop(trial);
    assert_eq!(site.attempt("m", AttemptResult::Success, None).await, key("p"));
    let all = [site.acquire("m").await.unwrap(), site.acquire("m").await.unwrap()];
    assert!(all.iter().all(|lease| lease.provider() == &key("p")));
    assert_eq!(ejected.elapsed().as_secs(), 6);
}

#[tokio::test(start_paused = true)]
async fn the_only_candidate_is_never_ejected() {
    let site = Site::new(PAIR);
    let begun = Instant::now();
    for _ in 0..20 {
        assert_eq!(
            site.attempt("alone", AttemptResult::ConnectError, None).await,
            key("p")
        );
    }
    assert!(site.provider("p").ejected_until.is_none());
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn who_cools_is_still_there_for_who_has_nobody_else() {
    let site = Site::new(PAIR);
    let (p, begun) = ([key("p")], Instant::now());
    let after = Some(Duration::from_secs(10));
    site.attempt("alone", AttemptResult::RateLimited, after).await;
    assert!(site.provider("p").ejected_until.is_none());
    let same = Prospects {
        other: false,
        same: true,
    };
    assert_eq!(site.prospects("alone", &p), same);
    // The pause is the gate's; the pool gives the place at once to who may have it.
    assert_eq!(site.avoiding("alone", &p, true).await.unwrap().provider(), &p[0]);
    assert_eq!(
        site.avoiding("alone", &p, false).await.err(),
        Some(Refused::NoProvider)
    );
    drop(site.acquire("alone").await.unwrap());
    assert_eq!(begun.elapsed().as_secs(), 0);
}

#[tokio::test(start_paused = true)]
async fn who_avoids_waits_for_others_only_while_one_is_eligible() {
    let site = Site::new(PAIR);
    let p = [key("p")];
    assert_eq!(
        site.avoiding("alone", &p, false).await.err(),
        Some(Refused::NoProvider)
    );
    let q = site.avoiding("m", &p, false).await.unwrap();
    assert_eq!(q.provider(), &key("q"));
    assert_eq!(
        site.prospects("m", &p),
        Prospects {
            other: true,
            same: true
        }
    );
    let begun = Instant::now();
    // Full is waited for, with the avoided one at hand all the time.
    let waiting = site.avoiding("m", &p, true);
    let freed = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        drop(q);
    };
    let (q, ()) = tokio::join!(waiting, freed);
    let q = q.unwrap();
    assert_eq!((q.provider(), begun.elapsed().as_secs()), (&key("q"), 2));
    // Its last hope goes: no wait will help.
    let waiting = site.avoiding("m", &p, false);
    let lowered = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        lower(&q, 9);
    };
    let (none, ()) = tokio::join!(waiting, lowered);
    assert_eq!(
        (none.err(), begun.elapsed().as_secs()),
        (Some(Refused::NoProvider), 3)
    );
    let same = Prospects {
        other: false,
        same: true,
    };
    assert_eq!(site.prospects("m", &p), same);
    assert_eq!(site.avoiding("m", &p, true).await.unwrap().provider(), &key("p"));
    assert_eq!(site.metrics.queue_depth.get(), 0);
}
