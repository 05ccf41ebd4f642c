//! `targets = "auto"`: asks each provider what it serves, at start and then again and again.
//!
//! A provider that fails keeps its last list; one that was never reached serves nothing. Never on a request's path.

use std::sync::{Arc, Weak};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

use super::Backend;
use super::registry::Slot;
use crate::service::Inner;
use crate::tasks::{self, Kind};

/// Between two questions to a provider that answers.
const REFRESH: Duration = Duration::from_secs(10);

/// Between two questions to one that does not: a provider that is just starting is found soon, a dead one is asked
/// at most once a minute. Jitter may double a delay.
fn failing() -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_secs(1))
        .with_max_delay(Duration::from_secs(30))
        .with_factor(2.0)
        .with_jitter()
        .without_max_times()
        .build()
}

/// Starts a task for each provider that must be asked.
pub(crate) fn start(node: &Arc<Inner>) {
    for slot in node.registry().slots() {
        if slot.asks_for_targets() {
            let task = refresh(Arc::downgrade(node), Arc::downgrade(slot));
            tasks::spawn(Kind::Session, "targets", task);
        }
    }
}

async fn refresh(node: Weak<Inner>, slot: Weak<Slot>) {
    let mut backoff = None;
    loop {
        let Some(provider) = slot.upgrade() else { return };
        let Backend::Http(http) = &provider.backend else {
            return;
        };
        let delay = match http.list_models().await {
            Ok(list) => {
                if backoff.take().is_some() {
                    tracing::info!(provider = %provider.id, "provider tells its models again");
                }
                if provider.learn_targets(list)
                    && let Some(node) = node.upgrade()
                {
                    tracing::info!(provider = %provider.id, targets = provider.targets().len(), "targets changed");
                    node.publish();
                }
                REFRESH
            }
            Err(e) => {
                if backoff.is_none() {
                    tracing::warn!(provider = %provider.id, reason = %e, "provider does not tell its models");
                }
                backoff.get_or_insert_with(failing).next().unwrap_or(REFRESH)
            }
        };
        // Only weak handles are held while waiting: the task must not keep a dropped node alive.
        drop(provider);
        tokio::time::sleep(delay).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_provider_is_asked_within_seconds_at_first_and_at_most_once_a_minute_later() {
        let delays: Vec<_> = failing().take(30).collect();
        assert!(delays[0] <= Duration::from_secs(2));
        assert!(delays.iter().all(|d| *d <= Duration::from_secs(60)));
        assert!(delays[29] >= Duration::from_secs(30));
    }
}
