//! Every series of the edge, and nothing else that is counted (G83). Labels are closed enums; provider ids come
//! from authenticated registrations only.

mod runs;

use std::time::Duration;

use iop_shared::execution::{
    AttemptResult, CommitState, Eligibility, Endpoint, EvidenceDecision, EvidenceSource, ExecutionPath,
    Outcome, ProviderHealth, RecoveryResult,
};
use iop_shared::label_enum;
use iop_shared::metric::{Counters, Gauges, Histograms};
use iop_shared::openai::usage::Usage;
use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, IntCounter, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

pub use runs::{CommitError, DecisionLabel, EndStatus, LiveStatus, StepKind, ToolKind, ToolResult};

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
/// A run from its acceptance to its end, seconds: from one turn of a fast model to a decision after a month.
const RUN_BUCKETS: &[f64] = &[
    0.01,
    0.05,
    0.1,
    0.5,
    1.0,
    5.0,
    15.0,
    60.0,
    300.0,
    900.0,
    3600.0,
    14400.0,
    43200.0,
    86400.0,
    259_200.0,
    604_800.0,
    2_592_000.0,
];
/// A decision of a person, seconds: from an answering program to a month.
const DECISION_BUCKETS: &[f64] = &[
    0.1,
    1.0,
    5.0,
    15.0,
    60.0,
    300.0,
    900.0,
    3600.0,
    14400.0,
    43200.0,
    86400.0,
    259_200.0,
    604_800.0,
    2_592_000.0,
];
/// One commit, seconds: from memory to a disk that is overloaded.
const COMMIT_BUCKETS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
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
    /// Runs of both engines that are not over.
    pub runs: Gauges<(LiveStatus,)>,
    pub runs_ended: Counters<(EndStatus,)>,
    /// From the acceptance to the end, whatever was waited for between them.
    pub run_duration: Histograms<(EndStatus,)>,
    /// Of the attempt that settled it; what it waited for before is not in it.
    pub run_step_duration: Histograms<(StepKind,)>,
    pub approvals_pending: IntGauge,
    /// 0 when none is pending.
    pub approval_oldest_seconds: Gauge,
    /// From when an approval was asked for to when it was settled.
    pub approval_latency: Histograms<(DecisionLabel,)>,
    pub checkpoint_commit: Histogram,
    pub checkpoint_errors: Counters<(CommitError,)>,
    pub lease_losses: IntCounter,
    /// Calls of which it is not known whether they were carried out.
    pub ambiguous_effects: IntCounter,
    /// The age of the oldest run that is due and that nobody has claimed; 0 when there is none.
    pub sweeper_lag_seconds: Gauge,
    pub run_workers_busy: IntGauge,
    pub tool_calls: Counters<(ToolKind, ToolResult)>,
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
        let gauge = |name: &str, help: &str| registered(r, IntGauge::new(name, help));
        let seconds = |name: &str, help: &str| registered(r, Gauge::new(name, help));
        let count = |name: &str, help: &str| registered(r, IntCounter::new(name, help));
        let provider_in_flight = registered(
            r,
            IntGaugeVec::new(
                Opts::new("iop_edge_provider_in_flight", "Leases held now, by provider."),
                &["provider"],
            ),
        )?;
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
            queue_wait: registered(
                r,
                Histogram::with_opts(histogram(
                    "iop_edge_queue_wait_seconds",
                    "Time a request waited for a provider with room.",
                    FIRST_TOKEN_BUCKETS,
                )),
            )?,
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
            panics: count("iop_edge_panics_total", "Requests that ended in a panic.")?,
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
            runs: Gauges::register(
                r,
                counter("iop_edge_runs", "Runs that are not over, by where they stand."),
                &["status"],
            )?,
            runs_ended: Counters::register(
                r,
                counter("iop_edge_runs_ended_total", "Runs that ended, by how."),
                &["status"],
            )?,
            run_duration: Histograms::register(
                r,
                histogram(
                    "iop_edge_run_duration_seconds",
                    "From a run's acceptance to its end.",
                    RUN_BUCKETS,
                ),
                &["status"],
            )?,
            run_step_duration: Histograms::register(
                r,
                histogram(
                    "iop_edge_run_step_duration_seconds",
                    "Model turns and tool calls of runs.",
                    DURATION_BUCKETS,
                ),
                &["kind"],
            )?,
            approvals_pending: gauge(
                "iop_edge_approvals_pending",
                "Calls that wait for a person's decision.",
            )?,
            approval_oldest_seconds: seconds(
                "iop_edge_approval_oldest_seconds",
                "How long the oldest pending approval has waited.",
            )?,
            approval_latency: Histograms::register(
                r,
                histogram(
                    "iop_edge_approval_latency_seconds",
                    "From when an approval was asked for to when it was settled.",
                    DECISION_BUCKETS,
                ),
                &["decision"],
            )?,
            checkpoint_commit: registered(
                r,
                Histogram::with_opts(histogram(
                    "iop_edge_checkpoint_commit_seconds",
                    "Commits of runs' checkpoints.",
                    COMMIT_BUCKETS,
                )),
            )?,
            checkpoint_errors: Counters::register(
                r,
                counter("iop_edge_checkpoint_errors_total", "Commits that failed, by why."),
                &["error"],
            )?,
            lease_losses: count(
                "iop_edge_lease_losses_total",
                "Runs whose worker lost its lease while it held them.",
            )?,
            ambiguous_effects: count(
                "iop_edge_ambiguous_effects_total",
                "Calls of which it is not known whether they were carried out.",
            )?,
            sweeper_lag_seconds: seconds(
                "iop_edge_sweeper_lag_seconds",
                "Age of the oldest run that is due and not claimed.",
            )?,
            run_workers_busy: gauge("iop_edge_run_workers_busy", "Workers that hold a run.")?,
            tool_calls: Counters::register(
                r,
                counter(
                    "iop_edge_tool_calls_total",
                    "Tool calls of runs, by what came of them.",
                ),
                &["tool_kind", "result"],
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

/// The collector, once the registry has it.
fn registered<C: Collector + Clone + 'static>(
    registry: &Registry,
    made: prometheus::Result<C>,
) -> prometheus::Result<C> {
    let collector = made?;
    registry.register(Box::new(collector.clone()))?;
    Ok(collector)
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
        for k in ToolKind::ALL {
            for o in ToolResult::ALL {
                assert!(text.contains(&format!(
                    "iop_edge_tool_calls_total{{result=\"{o}\",tool_kind=\"{k}\"}} 0"
                )));
            }
        }
        for s in EndStatus::ALL {
            assert!(text.contains(&format!(
                "iop_edge_run_duration_seconds_count{{status=\"{s}\"}} 0"
            )));
        }
    }
}
