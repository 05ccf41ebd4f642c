//! Who serves what, and who has room: lookup by provider identity with typed failures, capacity as a hard bound (G32).
//!
//! Nothing queues here. A place is a `Permit`; dropping it gives the place back, on every path.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use iop_shared::config::{Adapter, Targets};
use iop_shared::execution::{Endpoint, ExecutionPath, FailureCode};
use iop_shared::ids::ProviderId;
use iop_shared::wire::session::{ProviderAdvertisement, ProviderLoad};
use iop_shared::wire::terminal::NodeError;
use parking_lot::RwLock;
use prometheus::IntGauge;
use tokio::sync::Notify;

use super::{Backend, ProviderSettings};

/// Targets of one provider.
enum TargetSet {
    /// As configured; nothing else is served.
    Fixed(Arc<[String]>),
    /// As the provider last told; what it does not list may still be asked, the provider decides.
    Auto(RwLock<Arc<[String]>>),
}

/// One provider and its places.
pub(crate) struct Slot {
    pub(crate) id: ProviderId,
    pub(crate) adapter: Adapter,
    pub(crate) backend: Backend,
    pub(crate) capacity: u32,
    endpoints: Vec<Endpoint>,
    targets: TargetSet,
    /// Those of the targets that are served by runs, and by no tunnel.
    normalized: Vec<String>,
    in_flight: AtomicU32,
    response_stall_timeout_ms: i64,
    first_content_timeout_ms: Option<u64>,
    replay: bool,
}

impl Slot {
    pub(crate) fn new(settings: &ProviderSettings, backend: Backend) -> Self {
        let config = &settings.config;
        let targets = match (&config.targets, &config.script) {
            (Some(Targets::List(list)), _) => TargetSet::Fixed(list.clone().into()),
            (_, Some(script)) => TargetSet::Fixed(script.keys().cloned().collect()),
            (Some(Targets::Auto) | None, None) => TargetSet::Auto(RwLock::new(Arc::new([]))),
        };
        let by_runs = |target: &&String| {
            let script = config.script.as_ref().and_then(|scripts| scripts.get(*target));
            script.is_some_and(|script| script.normalized)
        };
        let normalized = match &targets {
            TargetSet::Fixed(list) => list.iter().filter(by_runs).cloned().collect(),
            TargetSet::Auto(_) => Vec::new(),
        };
        Self {
            id: config.id.clone(),
            adapter: config.adapter,
            backend,
            capacity: config.capacity,
            endpoints: config.served_endpoints(),
            targets,
            normalized,
            in_flight: AtomicU32::new(0),
            response_stall_timeout_ms: config.response_stall_timeout.map_or(0, |p| p.as_millis_i64()),
            first_content_timeout_ms: config
                .first_content_timeout
                .filter(|p| !p.0.is_zero())
                .and_then(|p| u64::try_from(p.as_millis_i64()).ok()),
            replay: config.replay,
        }
    }

    /// Whether the provider itself says what it serves.
    pub(crate) fn asks_for_targets(&self) -> bool {
        matches!(self.targets, TargetSet::Auto(_))
    }

    pub(crate) fn targets(&self) -> Arc<[String]> {
        match &self.targets {
            TargetSet::Fixed(list) => Arc::clone(list),
            TargetSet::Auto(list) => Arc::clone(&list.read()),
        }
    }

    /// Takes what the provider told; `true` when it is news.
    pub(crate) fn learn_targets(&self, new: Vec<String>) -> bool {
        match &self.targets {
            TargetSet::Fixed(_) => false,
            TargetSet::Auto(list) => {
                let mut list = list.write();
                if **list == *new {
                    return false;
                }
                *list = new.into();
                true
            }
        }
    }

    /// Whether this provider may be asked that, that way.
    ///
    /// # Errors
    /// The typed failure for an endpoint or target that it does not serve.
    pub(crate) fn check(
        &self,
        path: ExecutionPath,
        endpoint: Endpoint,
        target: &str,
    ) -> Result<(), NodeError> {
        if !self.endpoints.contains(&endpoint) {
            let text = format!("provider {} does not serve {endpoint}", self.id);
            return Err(NodeError::new(FailureCode::ProviderUnavailable, text));
        }
        let missing = |what: &str| {
            let text = format!("provider {} has no such target{what}", self.id);
            Err(NodeError::new(FailureCode::TargetMissing, text))
        };
        match &self.targets {
            TargetSet::Fixed(list) if !list.iter().any(|t| t == target) => return missing(""),
            TargetSet::Fixed(_) | TargetSet::Auto(_) => {}
        }
        match (path, self.normalized.iter().any(|t| t == target)) {
            (ExecutionPath::Normalized, false) => missing(" for runs"),
            (ExecutionPath::ProviderTunnel | ExecutionPath::Unknown, true) => missing(" for tunnels"),
            (ExecutionPath::Normalized, true)
            | (ExecutionPath::ProviderTunnel | ExecutionPath::Unknown, false) => Ok(()),
        }
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    fn enter(&self) -> bool {
        self.in_flight
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| {
                (n < self.capacity).then_some(n + 1)
            })
            .is_ok()
    }

    fn advertisement(&self) -> ProviderAdvertisement {
        ProviderAdvertisement {
            id: self.id.clone(),
            adapter: self.adapter.as_str().to_owned(),
            targets: self.targets().to_vec(),
            endpoints: self.endpoints.clone(),
            normalized_targets: self.normalized.clone(),
            capacity: self.capacity,
            response_stall_timeout_ms: self.response_stall_timeout_ms,
            first_content_timeout_ms: self.first_content_timeout_ms,
            replay: self.replay,
        }
    }
}

/// Counts what is under way, and tells when nothing is.
#[derive(Debug, Default)]
pub(crate) struct Busy {
    count: AtomicU32,
    idle: Notify,
}

impl Busy {
    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::SeqCst)
    }

    fn enter(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    fn leave(&self) {
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.idle.notify_waiters();
        }
    }

    /// Resolves when nothing is under way, at once if so now.
    pub(crate) async fn idle(&self) {
        loop {
            let mut notified = std::pin::pin!(self.idle.notified());
            // Registered before looking, so that the last one to leave cannot slip between.
            notified.as_mut().enable();
            if self.count() == 0 {
                return;
            }
            notified.await;
        }
    }
}

/// A place at a provider.
pub(crate) struct Permit {
    slot: Arc<Slot>,
    node: Arc<Busy>,
    link: Arc<Busy>,
    gauge: IntGauge,
}

impl Permit {
    /// # Errors
    /// `capacity`, when every place is taken.
    pub(crate) fn take(
        slot: &Arc<Slot>,
        node: &Arc<Busy>,
        link: &Arc<Busy>,
        gauge: &IntGauge,
    ) -> Result<Self, NodeError> {
        if !slot.enter() {
            return Err(NodeError::new(
                FailureCode::Capacity,
                format!("provider {} is at capacity", slot.id),
            ));
        }
        node.enter();
        link.enter();
        gauge.inc();
        Ok(Self {
            slot: Arc::clone(slot),
            node: Arc::clone(node),
            link: Arc::clone(link),
            gauge: gauge.clone(),
        })
    }

    pub(crate) fn slot(&self) -> &Arc<Slot> {
        &self.slot
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.slot.in_flight.fetch_sub(1, Ordering::SeqCst);
        self.gauge.dec();
        self.link.leave();
        self.node.leave();
    }
}

/// Every provider of the node, in configuration order.
pub(crate) struct Registry {
    slots: Vec<Arc<Slot>>,
}

impl Registry {
    pub(crate) fn new(slots: Vec<Arc<Slot>>) -> Self {
        Self { slots }
    }

    pub(crate) fn slots(&self) -> &[Arc<Slot>] {
        &self.slots
    }

    /// # Errors
    /// `provider_missing`, when no provider of this node has that id.
    pub(crate) fn find(&self, id: &ProviderId) -> Result<&Arc<Slot>, NodeError> {
        // A node has a handful of providers: a walk is quicker than a hash.
        self.slots.iter().find(|s| s.id == *id).ok_or_else(|| {
            NodeError::new(
                FailureCode::ProviderMissing,
                format!("no provider {id} on this node"),
            )
        })
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.slots.iter().fold(0, |sum, s| sum.saturating_add(s.capacity))
    }

    pub(crate) fn advertisements(&self) -> Vec<ProviderAdvertisement> {
        self.slots.iter().map(|s| s.advertisement()).collect()
    }

    pub(crate) fn loads(&self) -> Vec<ProviderLoad> {
        self.slots
            .iter()
            .map(|s| ProviderLoad {
                id: s.id.clone(),
                in_flight: s.in_flight(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::providers::scripted::Scripted;

    fn slot(toml: &str) -> Arc<Slot> {
        let config: iop_shared::config::ProviderConfig = toml::from_str(toml).unwrap();
        let backend = Backend::Scripted(Scripted::new(&config));
        Arc::new(Slot::new(
            &ProviderSettings {
                config,
                api_key: None,
            },
            backend,
        ))
    }

    const TWO: &str = "id = \"s\"\nadapter = \"scripted\"\ncapacity = 2\nscript = { a = {}, b = {} }\n";

    #[test]
    fn lookup_fails_with_the_code_of_what_is_missing() {
        let r = Registry::new(vec![slot(TWO)]);
        let find = |id: &str| r.find(&ProviderId::new(id).unwrap());
        assert_eq!(find("x").err().unwrap().code, FailureCode::ProviderMissing);
        let s = find("s").unwrap();
        let check = |endpoint, target| s.check(ExecutionPath::ProviderTunnel, endpoint, target);
        assert_eq!(check(Endpoint::Chat, "a"), Ok(()));
        assert_eq!(
            check(Endpoint::Chat, "c").unwrap_err().code,
            FailureCode::TargetMissing
        );
        assert_eq!(
            check(Endpoint::Images, "a").unwrap_err().code,
            FailureCode::ProviderUnavailable
        );
    }

    #[test]
    fn a_target_is_served_by_runs_or_by_tunnels_and_says_which() {
        let s = slot(
            "id = \"s\"\nadapter = \"scripted\"\ntargets = [\"a\", \"b\"]\n\
             script = { a = {}, b = { normalized = true }, c = { normalized = true } }\n",
        );
        let ad = s.advertisement();
        assert_eq!(
            (ad.targets, ad.normalized_targets),
            (vec!["a".into(), "b".into()], vec!["b".to_owned()])
        );
        for (path, target, served) in [
            (ExecutionPath::ProviderTunnel, "a", true),
            (ExecutionPath::ProviderTunnel, "b", false),
            (ExecutionPath::Normalized, "a", false),
            (ExecutionPath::Normalized, "b", true),
            (ExecutionPath::Normalized, "c", false),
        ] {
            let checked = s.check(path, Endpoint::Chat, target).map_err(|e| e.code);
            let want = if served {
                Ok(())
            } else {
                Err(FailureCode::TargetMissing)
            };
            assert_eq!(checked, want, "{path} {target}");
        }
    }

    #[test]
    fn capacity_is_a_hard_bound_under_contention_and_whole_afterwards() {
        let s = slot(TWO);
        let (node, link) = (Arc::new(Busy::default()), Arc::new(Busy::default()));
        let gauge = IntGauge::new("g", "g").unwrap();
        let most = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        if let Ok(p) = Permit::take(&s, &node, &link, &gauge) {
                            most.fetch_max(p.slot().in_flight(), Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert!((1..=2).contains(&most.load(Ordering::SeqCst)));
        assert_eq!(
            (s.in_flight(), node.count(), link.count(), gauge.get()),
            (0, 0, 0, 0)
        );
        let held: Vec<_> = (0..2)
            .map(|_| Permit::take(&s, &node, &link, &gauge).ok().unwrap())
            .collect();
        assert_eq!(
            Permit::take(&s, &node, &link, &gauge).err().unwrap().code,
            FailureCode::Capacity
        );
        drop(held);
        assert_eq!(s.in_flight(), 0);
    }

    #[test]
    fn idle_resolves_when_the_last_one_leaves() {
        let s = slot(TWO);
        let busy = Arc::new(Busy::default());
        let gauge = IntGauge::new("g", "g").unwrap();
        let p = Permit::take(&s, &busy, &busy, &gauge).ok().unwrap();
        let mut idle = std::pin::pin!(busy.idle());
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(idle.as_mut().poll(&mut cx).is_pending());
        drop(p);
        assert!(idle.as_mut().poll(&mut cx).is_ready());
    }

    use std::task::Context;

    #[test]
    fn only_asked_targets_can_be_learned() {
        assert!(!slot(TWO).learn_targets(vec!["x".into()]));
        let auto = {
            let config: iop_shared::config::ProviderConfig =
                toml::from_str("id = \"o\"\nadapter = \"openai\"\nbase_url = \"http://127.0.0.1:1/v1\"\n")
                    .unwrap();
            let backend = Backend::Scripted(Scripted::new(&config));
            Slot::new(
                &ProviderSettings {
                    config,
                    api_key: None,
                },
                backend,
            )
        };
        assert!(auto.asks_for_targets() && auto.targets().is_empty());
        assert!(auto.learn_targets(vec!["x".into()]));
        assert!(!auto.learn_targets(vec!["x".into()]));
        let tunnel = ExecutionPath::ProviderTunnel;
        assert_eq!(auto.check(tunnel, Endpoint::Chat, "other"), Ok(()));
        let run = auto.check(ExecutionPath::Normalized, Endpoint::Chat, "x");
        assert_eq!(run.unwrap_err().code, FailureCode::TargetMissing);
    }
}
