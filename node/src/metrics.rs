//! Every series of the node, and nothing else that is counted. Labels are closed enums: no provider, target or
//! caller text can become a label (G81).

use iop_shared::execution::{AttemptResult, Endpoint, FailureCode};
use iop_shared::label_enum;
use iop_shared::metric::{Counters, Gauges};
use prometheus::{Encoder, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder};

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
    }
}
