//! A provider that needs no model (design §4): answers like an OpenAI server and misbehaves as configured.
//!
//! `plan` decides what happens in which order (pure); this shell waits, sends and goes silent. Behaviour comes from
//! the target's script, never from client fields.

mod chat;
mod events;
mod plan;
mod prompt;
mod responses;

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use http::{Method, Response};
use http_body_util::{BodyExt, Limited};
use iop_shared::config::{Adapter, ProbeScript, ProviderConfig, Script, Targets};
use iop_shared::execution::FailureCode;
use iop_shared::ids::ProviderId;
use iop_shared::wire::terminal::NodeError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

use super::hold::{Hold, Holding};
use super::{Piece, ProviderBody, RunAsk, TunnelAsk};
use crate::probe::{Identity, ProbeError, ProbeReport, ProviderProber, Status};
use crate::tasks::{self, Kind};
use plan::{Facts, Head, Step};

/// The same as an edge takes from a client by default.
const MAX_BODY: usize = 64 << 20;
/// How long a stalled engine that ignores its caller's leaving stays busy: without a bound it would be lost for good.
const STALLED_ENGINE: Duration = Duration::from_secs(10);

struct Model {
    script: Script,
    attempts: AtomicU32,
}

impl Model {
    /// What is known of the request that begins now.
    fn begin<'a>(&self, target: &'a str) -> Facts<'a> {
        Facts {
            target,
            id: uuid::Uuid::now_v7(),
            created: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |d| d.as_secs()),
            attempt: self.attempts.fetch_add(1, Ordering::Relaxed),
        }
    }
}

/// The scripted provider.
pub(crate) struct Scripted {
    id: ProviderId,
    models: BTreeMap<String, Model>,
    /// What does the work: as many requests at once as the provider has places.
    engine: Arc<Semaphore>,
}

impl Scripted {
    pub(crate) fn new(config: &ProviderConfig) -> Self {
        let mut models: BTreeMap<String, Model> = BTreeMap::new();
        let model = |script: Script| Model {
            script,
            attempts: AtomicU32::new(0),
        };
        for (name, script) in config.script.iter().flatten() {
            models.insert(name.clone(), model(script.clone()));
        }
        if let Some(Targets::List(list)) = &config.targets {
            for name in list {
                models
                    .entry(name.clone())
                    .or_insert_with(|| model(Script::default()));
            }
        }
        Self {
            id: config.id.clone(),
            models,
            engine: Arc::new(Semaphore::new(config.capacity as usize)),
        }
    }

    pub(crate) async fn call(
        &self,
        target: &str,
        ask: TunnelAsk,
        hold: &mut Hold,
    ) -> Result<Response<ProviderBody>, NodeError> {
        match (self.models.get(target), plan::api(ask.endpoint)) {
            (Some(model), Some(api)) if ask.method == Method::POST && ask.path.is_none() => {
                let body = Limited::new(ask.body, MAX_BODY)
                    .collect()
                    .await
                    .map_err(|_| {
                        NodeError::new(FailureCode::InvalidRequest, "the request's body ended early")
                    })?
                    .to_bytes();
                let steps = plan::tunnel(api, &model.script, &body, &model.begin(target));
                self.work(steps, model.script.ignores_cancel, hold).await
            }
            _ => self.work(plan::not_served(), false, hold).await,
        }
    }

    /// The same for the normalized path.
    pub(crate) async fn run(
        &self,
        target: &str,
        ask: &RunAsk,
        hold: &mut Hold,
    ) -> Result<Response<ProviderBody>, NodeError> {
        let model = self
            .models
            .get(target)
            .ok_or_else(|| NodeError::new(FailureCode::TargetMissing, "no script has that name"))?;
        let steps = plan::run(&model.script, &ask.messages, &model.begin(target));
        self.work(steps, model.script.ignores_cancel, hold).await
    }

    /// Waits for a place in the engine, then does the steps up to the head.
    async fn work(
        &self,
        steps: VecDeque<Step>,
        ignores_cancel: bool,
        hold: &mut Hold,
    ) -> Result<Response<ProviderBody>, NodeError> {
        // A closed semaphore does not happen: nothing closes it.
        let permit = Arc::clone(&self.engine)
            .acquire_owned()
            .await
            .map_err(|_| NodeError::new(FailureCode::Internal, "the scripted engine is closed"))?;
        let place = Place {
            _permit: permit,
            holding: Holding::new(),
        };
        hold.take(place.holding.held());
        let mut work = Work {
            steps,
            sleep: None,
            ignores_cancel,
            place: Some(place),
        };
        let head = std::future::poll_fn(|cx| work.poll_head(cx)).await?;
        let mut response = Response::new(ProviderBody::Scripted(ScriptBody(work)));
        *response.status_mut() = head.status;
        *response.headers_mut() = head.headers;
        Ok(response)
    }
}

impl ProviderProber for Scripted {
    async fn probe(&self, target: &str) -> Result<ProbeReport, ProbeError> {
        let status = match self.models.get(target).map(|m| m.script.probe) {
            Some(ProbeScript::Available) => Status::Available,
            Some(ProbeScript::Missing) | None => Status::Unavailable,
            Some(ProbeScript::Refuse) => return Err(ProbeError::Failed),
            Some(ProbeScript::Hang) => std::future::pending().await,
        };
        Ok(ProbeReport {
            identity: Identity {
                instance: self.id.to_string(),
                adapter: Adapter::Scripted.as_str().to_owned(),
                target: target.to_owned(),
            },
            status,
        })
    }
}

/// A place in the engine; the node's hold on the provider ends with it.
struct Place {
    _permit: OwnedSemaphorePermit,
    holding: Holding,
}

/// A plan under way, and the place that it holds in the engine.
struct Work {
    steps: VecDeque<Step>,
    sleep: Option<Pin<Box<Sleep>>>,
    ignores_cancel: bool,
    place: Option<Place>,
}

impl Work {
    fn poll_wait(&mut self, cx: &mut Context<'_>, wait: Duration) -> Poll<()> {
        let sleep = self
            .sleep
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(wait)));
        std::task::ready!(sleep.as_mut().poll(cx));
        self.sleep = None;
        self.steps.pop_front();
        Poll::Ready(())
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<Head, NodeError>> {
        loop {
            match self.steps.front() {
                Some(Step::Wait(wait)) => {
                    let wait = *wait;
                    std::task::ready!(self.poll_wait(cx, wait));
                }
                Some(Step::Head(_)) => {
                    if let Some(Step::Head(head)) = self.steps.pop_front() {
                        return Poll::Ready(Ok(head));
                    }
                }
                Some(Step::Fail(_)) => {
                    if let Some(error) = self.failed() {
                        return Poll::Ready(Err(error));
                    }
                }
                // A plan has a head before any data; without one it is silent, as a stalled provider is.
                Some(Step::Stall | Step::Data(_)) | None => return Poll::Pending,
            }
        }
    }

    /// The failure that comes next, and nothing after it.
    fn failed(&mut self) -> Option<NodeError> {
        let next = self.steps.pop_front();
        self.steps.clear();
        match next {
            Some(Step::Fail(error)) => Some(error),
            Some(Step::Wait(_) | Step::Head(_) | Step::Data(_) | Step::Stall) | None => None,
        }
    }

    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, NodeError>>> {
        loop {
            match self.steps.front() {
                Some(Step::Wait(wait)) => {
                    let wait = *wait;
                    std::task::ready!(self.poll_wait(cx, wait));
                }
                Some(Step::Stall) => return Poll::Pending,
                Some(Step::Fail(_)) => return Poll::Ready(self.failed().map(Err)),
                Some(Step::Head(_) | Step::Data(_)) => {
                    if let Some(Step::Data(data)) = self.steps.pop_front() {
                        return Poll::Ready(Some(Ok(data)));
                    }
                }
                None => {
                    self.place = None;
                    return Poll::Ready(None);
                }
            }
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        if !self.ignores_cancel || self.steps.is_empty() || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let left = self.steps.iter().fold(Duration::ZERO, |sum, step| match step {
            Step::Wait(wait) => sum.saturating_add(*wait),
            Step::Stall => sum.saturating_add(STALLED_ENGINE),
            Step::Head(_) | Step::Data(_) | Step::Fail(_) => sum,
        });
        tasks::spawn(Kind::Session, "engine", async move {
            tokio::time::sleep(left).await;
            drop(place);
        });
    }
}

/// A scripted answer's body.
pub(crate) struct ScriptBody(Work);

impl ScriptBody {
    pub(crate) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, NodeError>>> {
        self.0.poll_data(cx)
    }
}
