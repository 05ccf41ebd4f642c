//! What nobody asks for and has to happen: gauges, children that ended, tools that are back, what is kept no longer.

use std::sync::Weak;
use std::time::Duration;

use iop_durable::ids::{CorrelationId, DecisionId, RunId};
use iop_durable::machine::wait::Delivery;
use iop_durable::payload::Payload;
use iop_durable::record::{RunHead, Status, WaitingKind};
use iop_durable::store::{Listed, RunFilter, StoreError};
use iop_durable::time::Timestamp;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::catalog::{AGENT, Version};
use super::{Engine, LINGER, Runs};
use crate::agents::action::restored;
use crate::agents::child::ended;
use crate::metrics::LiveStatus;

/// How often the gauges are read.
const GAUGES: Duration = Duration::from_secs(5);
/// How often what is kept no longer is looked for.
const RETENTION: Duration = Duration::from_secs(60);
/// Idempotency keys are kept this long (durable-api §1).
const KEYS: Duration = Duration::from_secs(24 * 3600);
/// A run without durability is kept this long after its end.
const VOLATILE: Duration = Duration::from_secs(15 * 60);
const PAGE: u32 = 200;

/// Runs until the runs are gone.
pub(super) async fn sweep(runs: Weak<Runs>) {
    let Some(interval) = runs
        .upgrade()
        .map(|runs| runs.settings.poll_interval.max(Duration::from_secs(1)))
    else {
        return;
    };
    // A configuration gives tools back by a restart.
    if let Some(runs) = runs.upgrade() {
        runs.restore_all().await;
    }
    let mut tick = tokio::time::interval(interval);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut gauges, mut retention) = (Instant::now(), Instant::now());
    loop {
        let now = tick.tick().await;
        let Some(runs) = runs.upgrade() else { return };
        if let Err(error) = runs.catalog.keep_up().await {
            tracing::warn!(%error, "the agents could not be looked up");
        }
        if now >= gauges {
            gauges = now + GAUGES;
            if let Err(error) = read_gauges(&runs).await {
                tracing::debug!(%error, "the gauges of runs could not be read");
            }
        }
        if now >= retention {
            retention = now + RETENTION;
            if let Err(error) = retain(&runs).await {
                tracing::warn!(%error, "old runs could not be looked up");
            }
        }
    }
}

async fn read_gauges(runs: &Runs) -> Result<(), StoreError> {
    let metrics = &runs.metrics;
    let mut live = [0_i64; LiveStatus::ALL.len()];
    let (mut pending, mut oldest, mut lag) = (0, Duration::ZERO, Duration::ZERO);
    for engine in runs.engines() {
        let counts = engine.store.counts().await?;
        let now = engine.store.now().await?;
        for (status, count) in &counts.runs {
            if let Some(place) = LiveStatus::of(*status).and_then(|status| live.get_mut(status as usize)) {
                *place += i64::try_from(*count).unwrap_or(i64::MAX);
            }
        }
        pending += counts.armed.get(&WaitingKind::Approval).copied().unwrap_or(0);
        if let Some(at) = counts.oldest_armed.get(&WaitingKind::Approval) {
            oldest = oldest.max(now.since(*at));
        }
        let due = engine.store.due(now, None, PAGE).await?;
        if let Some(due) = due.iter().find(|due| !due.leased) {
            lag = lag.max(now.since(due.due_at));
        }
    }
    for (status, count) in LiveStatus::ALL.iter().zip(live) {
        metrics.runs.at((*status,)).set(count);
    }
    metrics
        .approvals_pending
        .set(i64::try_from(pending).unwrap_or(i64::MAX));
    metrics.approval_oldest_seconds.set(oldest.as_secs_f64());
    metrics.sweeper_lag_seconds.set(lag.as_secs_f64());
    let busy = runs.engines().iter().map(|engine| engine.busy()).sum::<u32>();
    metrics.run_workers_busy.set(i64::from(busy));
    let lost = runs.engines().iter().map(|engine| engine.lost()).sum::<u64>();
    metrics
        .lease_losses
        .inc_by(lost.saturating_sub(metrics.lease_losses.get()));
    Ok(())
}

/// Deletes what is kept no longer: keys, runs beyond their agent's `retention.ttl`, runs without durability.
async fn retain(runs: &Runs) -> Result<(), StoreError> {
    let [durable, volatile] = runs.engines();
    let now = durable.store.now().await?;
    if let Some(before) = earlier(now, KEYS) {
        durable.store.forget_keys(before, 10_000).await?;
    }
    let mut after = None;
    loop {
        let page = match runs.catalog.list(after.as_deref(), PAGE).await {
            Ok(page) => page,
            Err(_) => return Ok(()),
        };
        for version in &page {
            let retention = &version.spec.retention;
            let of_agent = RunFilter {
                definition: Some((AGENT.to_owned(), version.name.clone())),
                ..RunFilter::default()
            };
            // What a process left that ended before it deleted them.
            if retention.delete_on_success {
                let succeeded = RunFilter {
                    status: Some(Status::Succeeded),
                    ..of_agent.clone()
                };
                let alone = |head: &RunHead| head.lineage.parent.is_none();
                delete_older(durable, succeeded, now, LINGER, alone).await?;
            }
            if let Some(ttl) = retention.ttl {
                delete_older(durable, of_agent, now, ttl.0, |_| true).await?;
            }
        }
        if (page.len() as u64) < u64::from(PAGE) {
            break;
        }
        after = page.last().map(|version| version.name.clone());
    }
    let now = volatile.store.now().await?;
    delete_older(volatile, RunFilter::default(), now, VOLATILE, |_| true).await
}

/// Deletes the runs among these that ended longer ago than `ttl`.
async fn delete_older(
    engine: &Engine,
    mut filter: RunFilter,
    now: Timestamp,
    ttl: Duration,
    these: impl Fn(&RunHead) -> bool,
) -> Result<(), StoreError> {
    let Some(before) = earlier(now, ttl) else {
        return Ok(());
    };
    filter.limit = PAGE;
    loop {
        let page = engine.store.list(filter.clone()).await?;
        let full = page.len() as u64 >= u64::from(PAGE);
        for listed in &page {
            let Listed::Run { head, .. } = listed else {
                continue;
            };
            if head.created_at >= before {
                return Ok(());
            }
            filter.after = Some((head.created_at, head.id.clone()));
            if head.status.is_terminal() && head.updated_at < before && these(head) {
                match engine.store.delete_if_idle(&head.id).await {
                    Ok(()) | Err(StoreError::NotFound | StoreError::Deleted | StoreError::Busy) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        if !full || page.iter().all(|listed| matches!(listed, Listed::Corrupt { .. })) {
            return Ok(());
        }
    }
}

fn earlier(now: Timestamp, span: Duration) -> Option<Timestamp> {
    let ms = i64::try_from(span.as_millis()).ok()?;
    Timestamp::from_millis(now.as_millis().checked_sub(ms)?).ok()
}

/// Wakes the parents of runs that ended here. A parent that is not told looks by itself.
pub(super) async fn tell_parents(runs: Weak<Runs>, mut ended_runs: mpsc::UnboundedReceiver<RunId>) {
    while let Some(run) = ended_runs.recv().await {
        let Some(runs) = runs.upgrade() else { return };
        for engine in runs.engines() {
            deliver_all(engine, &ended(&run), "ended", Status::Succeeded.as_str()).await;
        }
    }
}

impl Runs {
    /// Wakes runs that wait for tools which the agents have.
    async fn restore_all(&self) {
        for known in self.catalog.readable() {
            if let Ok(version) = self.catalog.newest(&known.name).await {
                self.restore(&version).await;
            }
        }
    }

    /// Wakes runs that wait for tools of this version which were revoked before (D84).
    pub(crate) async fn restore(&self, version: &Version) {
        for engine in self.engines() {
            for tool in &version.spec.tools {
                let id = format!("restored-{}", version.version);
                deliver_all(engine, &restored(&version.name, &tool.name), &id, &version.digest).await;
            }
        }
    }
}

/// Delivers to every gate that waits for this.
async fn deliver_all(engine: &Engine, correlation: &str, id: &str, payload: &str) {
    let (Ok(correlation), Ok(id)) = (CorrelationId::new(correlation), DecisionId::new(id)) else {
        return;
    };
    let payload = Payload::new(serde_json::Value::from(payload).to_string());
    let waits = match engine.store.armed(&correlation, PAGE).await {
        Ok(waits) => waits,
        Err(error) => {
            tracing::debug!(%error, "waits could not be looked up");
            return;
        }
    };
    for wait in waits {
        let delivery = Delivery {
            id: id.clone(),
            correlation: correlation.clone(),
            generation: None,
            labels: None,
            payload: payload.clone(),
            by: None,
            revision: iop_durable::ids::Revision::FIRST,
        };
        if let Err(error) = engine
            .operator
            .deliver_to_gate(&wait.run, &wait.id, &delivery)
            .await
        {
            tracing::debug!(code = error.code(), "a wait could not be told");
        }
    }
}
