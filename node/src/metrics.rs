//! Every series of the node, and nothing else that is counted. Labels are closed enums: no provider, target or
//! caller text can become a label (G81).

use std::time::Duration;

use iop_shared::execution::{
    AttemptFence, AttemptResult, Endpoint, ExecutionPath, FailureCode, LivenessClassification, ProviderHealth,
};
use iop_shared::label::Label;
use iop_shared::label_enum;
use iop_shared::metric::{Counters, Gauges, Histograms, Labels};
use prometheus::{Encoder, HistogramOpts, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder};

/// Seconds; the default, `interactive` and `batch` stall timeouts lie inside of a bucket, not on its edge.
const STALL_BUCKETS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 360.0, 600.0, 960.0,
];
/// 004's labels of both stall families.
const STALL_LABELS: &[&str] = &[
    "execution_path",
    "provider_health",
    "liveness_classification",
    "attempt_fence",
];

/// What 004 says of one claimed stall; the health follows from the classification, so no other pair can be counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StallRow {
    pub path: ExecutionPath,
    pub classification: LivenessClassification,
    pub fence: AttemptFence,
}

impl Labels for StallRow {
    fn count() -> usize {
        ExecutionPath::ALL.len() * LivenessClassification::ALL.len() * AttemptFence::ALL.len()
    }

    fn place(self) -> usize {
        (self.path.index() * LivenessClassification::ALL.len() + self.classification.index())
            * AttemptFence::ALL.len()
            + self.fence.index()
    }

    fn words() -> Vec<Vec<&'static str>> {
        let mut rows = Vec::with_capacity(Self::count());
        for path in ExecutionPath::ALL {
            for c in LivenessClassification::ALL {
                for fence in AttemptFence::ALL {
                    rows.push(vec![
                        path.as_str(),
                        c.health().as_str(),
                        c.as_str(),
                        fence.as_str(),
                    ]);
                }
            }
        }
        rows
    }
}

label_enum! {
    /// `state` of `iop_node_links`: every configured edge is in exactly one.
    pub enum LinkState {
        Up => "up",
        Down => "down",
    }
}

label_enum! {
    /// `result` of `iop_node_link_dials_total`: how one attempt to reach an edge ended.
    pub enum DialResult {
        Accepted => "accepted",
        Unreachable => "unreachable",
        Timeout => "timeout",
        Unauthorized => "unauthorized",
        VersionRefused => "version_refused",
        Duplicate => "duplicate",
        Refused => "refused",
    }
}

/// The node's typed families, in a registry that may be the edge's.
pub struct NodeMetrics {
    registry: Registry,
    /// Dispatches to providers: exactly one row per call of a provider.
    pub attempts: Counters<(Endpoint, AttemptResult)>,
    /// Tunnels answered by the node itself before any provider was called.
    pub refusals: Counters<(FailureCode,)>,
    /// Claimed stalls: exactly one row per claim (004). Every combination exists, not every one can occur.
    pub stalls: Counters<(
        ExecutionPath,
        ProviderHealth,
        LivenessClassification,
        AttemptFence,
    )>,
    /// Seconds without progress, by stall; only combinations that can occur.
    pub stall_duration: Histograms<StallRow>,
    pub in_flight: IntGauge,
    pub capacity: IntGauge,
    pub draining: IntGauge,
    pub links: Gauges<(LinkState,)>,
    pub dials: Counters<(DialResult,)>,
}

impl NodeMetrics {
    /// Makes every series in `registry`.
    ///
    /// # Errors
    /// When a name is taken there: two nodes in one process, a defect of the caller.
    pub fn register(registry: &Registry) -> prometheus::Result<Self> {
        let r = registry;
        let gauge = |name: &str, help: &str| -> prometheus::Result<IntGauge> {
            let g = IntGauge::new(name, help)?;
            r.register(Box::new(g.clone()))?;
            Ok(g)
        };
        Ok(Self {
            attempts: Counters::register(
                r,
                Opts::new(
                    "iop_node_attempts_total",
                    "Calls of providers, by endpoint and result.",
                ),
                &["endpoint", "result"],
            )?,
            refusals: Counters::register(
                r,
                Opts::new(
                    "iop_node_refusals_total",
                    "Tunnels refused before a provider was called, by code.",
                ),
                &["code"],
            )?,
            stalls: Counters::register(
                r,
                Opts::new(
                    "iop_node_response_stalls_total",
                    "Attempts whose provider made no progress for the stall timeout.",
                ),
                STALL_LABELS,
            )?,
            stall_duration: Histograms::register(
                r,
                HistogramOpts::new(
                    "iop_node_response_stall_duration_seconds",
                    "Time without progress of stalled attempts.",
                )
                .buckets(STALL_BUCKETS.to_vec()),
                STALL_LABELS,
            )?,
            in_flight: gauge(
                "iop_node_in_flight_requests",
                "Requests that hold a place at a provider.",
            )?,
            capacity: gauge("iop_node_capacity", "Places of all providers together.")?,
            draining: gauge("iop_node_draining", "1 while the node takes no new work.")?,
            links: Gauges::register(
                r,
                Opts::new("iop_node_links", "Configured edges, by link state."),
                &["state"],
            )?,
            dials: Counters::register(
                r,
                Opts::new(
                    "iop_node_link_dials_total",
                    "Attempts to reach an edge, by result.",
                ),
                &["result"],
            )?,
            registry: registry.clone(),
        })
    }

    /// Counts one claimed stall.
    pub fn stalled(&self, row: StallRow, idle: Duration) {
        self.stalls
            .at((
                row.path,
                row.classification.health(),
                row.classification,
                row.fence,
            ))
            .inc();
        self.stall_duration.at(row).observe(idle.as_secs_f64());
    }

    /// What only a process of its own exposes: build and process figures.
    ///
    /// # Errors
    /// When a name is taken.
    pub fn register_process(registry: &Registry) -> prometheus::Result<()> {
        let build = IntGaugeVec::new(Opts::new("iop_node_build_info", "1, by version."), &["version"])?;
        build
            .get_metric_with_label_values(&[env!("CARGO_PKG_VERSION")])?
            .set(1);
        registry.register(Box::new(build))?;
        registry.register(Box::new(
            prometheus::process_collector::ProcessCollector::for_self(),
        ))
    }

    /// Prometheus text format of the whole registry.
    ///
    /// # Errors
    /// Only when a collector misbehaves.
    pub fn encode(&self) -> prometheus::Result<Vec<u8>> {
        let mut out = Vec::with_capacity(16 << 10);
        TextEncoder::new().encode(&self.registry.gather(), &mut out)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_series_exist_from_the_start() {
        let registry = Registry::new();
        NodeMetrics::register_process(&registry).unwrap();
        let text = String::from_utf8(NodeMetrics::register(&registry).unwrap().encode().unwrap()).unwrap();
        for e in Endpoint::ALL {
            for r in AttemptResult::ALL {
                assert!(text.contains(&format!(
                    "iop_node_attempts_total{{endpoint=\"{e}\",result=\"{r}\"}} 0"
                )));
            }
        }
        for d in DialResult::ALL {
            assert!(text.contains(&format!("iop_node_link_dials_total{{result=\"{d}\"}} 0")));
        }
        assert!(text.contains("iop_node_build_info{version="));
        let series = |prefix: &str| text.lines().filter(|l| l.starts_with(prefix)).count();
        assert_eq!(series("iop_node_response_stalls_total{"), 81);
        assert_eq!(series("iop_node_response_stall_duration_seconds_count{"), 27);
    }

    #[test]
    fn a_stall_is_one_row_of_each_family_and_every_row_has_its_own_place() {
        let metrics = NodeMetrics::register(&Registry::new()).unwrap();
        let mut places = Vec::new();
        for path in ExecutionPath::ALL {
            for classification in LivenessClassification::ALL {
                for fence in AttemptFence::ALL {
                    let (path, classification, fence) = (*path, *classification, *fence);
                    let row = StallRow {
                        path,
                        classification,
                        fence,
                    };
                    places.push(row.place());
                    metrics.stalled(row, Duration::from_millis(1500));
                    let health = classification.health();
                    assert_eq!(metrics.stalls.at((path, health, classification, fence)).get(), 1);
                    assert_eq!(metrics.stall_duration.at(row).get_sample_count(), 1);
                    assert_eq!(
                        StallRow::words()[row.place()],
                        [
                            path.as_str(),
                            health.as_str(),
                            classification.as_str(),
                            fence.as_str()
                        ]
                    );
                }
            }
        }
        assert_eq!(places, (0..StallRow::count()).collect::<Vec<_>>());
        let text = String::from_utf8(metrics.encode().unwrap()).unwrap();
        let counted = text
            .lines()
            .filter(|l| l.starts_with("iop_node_response_stalls_total{") && l.ends_with(" 1"));
        assert_eq!(counted.count(), 27);
        let sums = text.lines().filter(|l| {
            l.starts_with("iop_node_response_stall_duration_seconds_sum{") && l.ends_with(" 1.5")
        });
        assert_eq!(sums.count(), 27);
    }
}
