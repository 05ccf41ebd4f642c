//! Every series of the edge, and nothing else that is counted (G83). Labels are closed enums; provider ids come
//! from authenticated registrations only.

use std::time::Duration;

use iop_shared::execution::{
    AttemptResult, CommitState, Eligibility, Endpoint, EvidenceDecision, EvidenceSource, ExecutionPath,
    Outcome, ProviderHealth, RecoveryResult,
};
use iop_shared::label_enum;
use iop_shared::metric::{Counters, Gauges, Histograms};
use iop_shared::openai::usage::Usage;
use prometheus::{
    Encoder, Histogram, HistogramOpts, IntCounter, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

label_enum! {
    /// `endpoint` of request series (gateway.md §13).
    pub enum EndpointLabel {
        Chat => "chat",
        Responses => "responses",
        Completions => "completions",
        Embeddings => "embeddings",
        Rerank => "rerank",
        Moderations => "moderations",
        Images => "images",
        Audio => "audio",
        Models => "models",
        Other => "other",
    }
}

impl From<Endpoint> for EndpointLabel {
    fn from(e: Endpoint) -> Self {
        match e {
            Endpoint::Chat => EndpointLabel::Chat,
            Endpoint::Responses => EndpointLabel::Responses,
            Endpoint::Completions => EndpointLabel::Completions,
            Endpoint::Embeddings => EndpointLabel::Embeddings,
            Endpoint::Rerank => EndpointLabel::Rerank,
            Endpoint::Moderations => EndpointLabel::Moderations,
            Endpoint::Images => EndpointLabel::Images,
            Endpoint::Audio => EndpointLabel::Audio,
        }
    }
}

label_enum! {
    /// `type` of `iop_edge_tokens_total`; `cached` is part of `input`, `reasoning` of `output`.
    pub enum TokenType {
        Input => "input",
        Output => "output",
        Cached => "cached",
        Reasoning => "reasoning",
    }
}

label_enum! {
    /// `state` of `iop_edge_node_sessions`.
    pub enum SessionState {
        Live => "live",
        Draining => "draining",
    }
}

label_enum! {
    /// Whether an attempt's token counts cover the whole answer.
    pub enum UsageCompleteness {
        Complete => "complete",
        Incomplete => "incomplete",
    }
}

/// Request durations, seconds: from a cache hit to a long reasoning answer.
const DURATION_BUCKETS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
];
/// Time to first token and queue waits, seconds.
const FIRST_TOKEN_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0,
    120.0,
];
/// Gaps between content frames, seconds.
const INTER_TOKEN_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
    2.5,
];

/// The edge's registry and its typed families.
pub struct Metrics {
    registry: Registry,
    pub requests: Counters<(EndpointLabel, Outcome)>,
    pub request_duration: Histograms<(EndpointLabel,)>,
    pub time_to_first_token: Histograms<(EndpointLabel,)>,
    pub inter_token_latency: Histograms<(EndpointLabel,)>,
    pub in_flight: Gauges<(EndpointLabel,)>,
    pub queue_depth: IntGauge,
    pub queue_wait: Histogram,
    pub attempts: Counters<(AttemptResult,)>,
    pub client_cancelled: Counters<(EndpointLabel,)>,
    pub tokens: Counters<(TokenType,)>,
    pub usage_reports: Counters<(UsageCompleteness,)>,
    pub node_sessions: Gauges<(SessionState,)>,
    pub body_memory_bytes: IntGauge,
    pub panics: IntCounter,
    /// 004: what the overlay made of evidence.
    pub health_evidence: Counters<(EvidenceSource, ProviderHealth, EvidenceDecision)>,
    /// 004: changes of the overlay, from and to.
    pub health_transitions: Counters<(ProviderHealth, ProviderHealth)>,
    /// 004: one row per liveness cycle.
    pub recovery_eligibility: Counters<(ExecutionPath, ProviderHealth, CommitState, Eligibility)>,
    /// 004: at most one row per eligible cycle.
    pub recovery_results: Counters<(ExecutionPath, ProviderHealth, RecoveryResult)>,
    provider_in_flight: IntGaugeVec,
}

impl Metrics {
    /// # Errors
    /// When two families share a name: a defect of this file, found at start.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let r = &registry;
        let counter = |name: &str, help: &str| Opts::new(name, help);
        let histogram = |name: &str, help: &str, buckets: &[f64]| {
            HistogramOpts::new(name, help).buckets(buckets.to_vec())
        };
        let gauge = |name: &str, help: &str| -> prometheus::Result<IntGauge> {
            let g = IntGauge::new(name, help)?;
            r.register(Box::new(g.clone()))?;
            Ok(g)
        };
        let queue_wait = Histogram::with_opts(histogram(
            "iop_edge_queue_wait_seconds",
            "Time a request waited for a provider with room.",
            FIRST_TOKEN_BUCKETS,
        ))?;
        r.register(Box::new(queue_wait.clone()))?;
        let provider_in_flight = IntGaugeVec::new(
            Opts::new("iop_edge_provider_in_flight", "Leases held now, by provider."),
            &["provider"],
        )?;
        r.register(Box::new(provider_in_flight.clone()))?;
        let panics = IntCounter::new("iop_edge_panics_total", "Requests that ended in a panic.")?;
        r.register(Box::new(panics.clone()))?;
        let build = IntGaugeVec::new(Opts::new("iop_edge_build_info", "1, by version."), &["version"])?;
        build
            .get_metric_with_label_values(&[env!("CARGO_PKG_VERSION")])?
            .set(1);
        r.register(Box::new(build))?;
        r.register(Box::new(
            prometheus::process_collector::ProcessCollector::for_self(),
        ))?;
        Ok(Self {
            requests: Counters::register(
                r,
                counter(
                    "iop_edge_requests_total",
                    "Requests, by endpoint and how they ended.",
                ),
                &["endpoint", "outcome"],
            )?,
            request_duration: Histograms::register(
                r,
                histogram(
                    "iop_edge_request_duration_seconds",
                    "From arrival to the last byte.",
                    DURATION_BUCKETS,
                ),
                &["endpoint"],
            )?,
            time_to_first_token: Histograms::register(
                r,
                histogram(
                    "iop_edge_time_to_first_token_seconds",
                    "From arrival to the first content.",
                    FIRST_TOKEN_BUCKETS,
                ),
                &["endpoint"],
            )?,
            inter_token_latency: Histograms::register(
                r,
                histogram(
                    "iop_edge_inter_token_latency_seconds",
                    "Between content frames of a stream.",
                    INTER_TOKEN_BUCKETS,
                ),
                &["endpoint"],
            )?,
            in_flight: Gauges::register(
                r,
                counter("iop_edge_in_flight_requests", "Requests not yet ended."),
                &["endpoint"],
            )?,
            queue_depth: gauge("iop_edge_queue_depth", "Requests waiting for a provider.")?,
            queue_wait,
            attempts: Counters::register(
                r,
                counter("iop_edge_attempts_total", "Dispatches to providers, by result."),
                &["result"],
            )?,
            client_cancelled: Counters::register(
                r,
                counter(
                    "iop_edge_client_cancelled_total",
                    "Requests whose client left before the end.",
                ),
                &["endpoint"],
            )?,
            tokens: Counters::register(
                r,
                counter("iop_edge_tokens_total", "Tokens reported by providers."),
                &["type"],
            )?,
            usage_reports: Counters::register(
                r,
                counter(
                    "iop_edge_usage_reports_total",
                    "Attempts with content, by whether usage was reported to the end.",
                ),
                &["completeness"],
            )?,
            node_sessions: Gauges::register(
                r,
                counter("iop_edge_node_sessions", "Node sessions, embedded included."),
                &["state"],
            )?,
            body_memory_bytes: gauge(
                "iop_edge_body_memory_bytes",
                "Bytes of request bodies held for replay.",
            )?,
            panics,
            health_evidence: Counters::register(
                r,
                counter(
                    "iop_edge_provider_health_evidence_total",
                    "Evidence about providers' health, by what the overlay made of it.",
                ),
                &["source", "evidence_health", "decision"],
            )?,
            health_transitions: Counters::register(
                r,
                counter(
                    "iop_edge_provider_health_transitions_total",
                    "Changes of the runtime health overlay.",
                ),
                &["from_health", "to_health"],
            )?,
            recovery_eligibility: Counters::register(
                r,
                counter(
                    "iop_edge_liveness_recovery_eligibility_total",
                    "Stalled attempts, by whether the request could be replayed.",
                ),
                &["execution_path", "provider_health", "commit_state", "eligibility"],
            )?,
            recovery_results: Counters::register(
                r,
                counter(
                    "iop_edge_liveness_recovery_results_total",
                    "Eligible stalls, by what came of the replay.",
                ),
                &["execution_path", "provider_health", "recovery_result"],
            )?,
            provider_in_flight,
            registry,
        })
    }

    /// The registry, for what registers itself (the embedded node).
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The gauge of one provider; kept by its lease table.
    pub fn provider_in_flight(&self, provider: &iop_shared::ids::ProviderKey) -> IntGauge {
        self.provider_in_flight.with_label_values(&[provider.as_str()])
    }

    /// Forgets a provider whose node left.
    pub fn forget_provider(&self, provider: &iop_shared::ids::ProviderKey) {
        // Absent already is as good as removed.
        let _ = self.provider_in_flight.remove_label_values(&[provider.as_str()]);
    }

    pub fn count_usage(&self, usage: Option<Usage>, completeness: UsageCompleteness) {
        self.usage_reports.at((completeness,)).inc();
        let Some(u) = usage else { return };
        for (kind, n) in [
            (TokenType::Input, u.input),
            (TokenType::Output, u.output),
            (TokenType::Cached, u.cached),
            (TokenType::Reasoning, u.reasoning),
        ] {
            self.tokens.at((kind,)).inc_by(n);
        }
    }

    pub fn observe_wait(&self, wait: Duration) {
        self.queue_wait.observe(wait.as_secs_f64());
    }

    /// Prometheus text format.
    ///
    /// # Errors
    /// Only when a collector misbehaves.
    pub fn encode(&self) -> prometheus::Result<Vec<u8>> {
        let mut out = Vec::with_capacity(32 << 10);
        TextEncoder::new().encode(&self.registry.gather(), &mut out)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_series_exist_from_the_start() {
        let text = String::from_utf8(Metrics::new().unwrap().encode().unwrap()).unwrap();
        for e in EndpointLabel::ALL {
            for o in Outcome::ALL {
                assert!(text.contains(&format!(
                    "iop_edge_requests_total{{endpoint=\"{e}\",outcome=\"{o}\"}} 0"
                )));
            }
        }
        for a in AttemptResult::ALL {
            assert!(text.contains(&format!("iop_edge_attempts_total{{result=\"{a}\"}} 0")));
        }
    }
}
