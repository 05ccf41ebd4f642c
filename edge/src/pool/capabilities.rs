//! Evidence about providers' health: handed to the overlay, counted, logged; and the question whether a lowered provider
//! serves again (004, G35).
//!
//! A lowered provider is asked for the target that lowered it, 5 s after, then after 10, 20, 40 and every 60 s, until it is
//! raised or its generation is gone. Only an answer is evidence; none is nothing.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use iop_shared::execution::{EvidenceSource, ProviderHealth};
use iop_shared::ids::{ConnectionGeneration, ProviderId, ProviderKey};
use iop_shared::openai::request::SplicedBody;
use iop_shared::wire::COMMAND_PREFIX;
use iop_shared::wire::command::{CapabilitiesResult, Command, CommandRequest};

use super::overlay::{Reading, Verdict};
use super::service::Pool;
use crate::link::{LinkError, Session};
use crate::tasks;

/// From a lowering to the first question; doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The node takes five seconds at most for its probe.
const ANSWER: Duration = Duration::from_secs(8);
/// Bytes of an answer; an id, a target and two words.
const MAX_ANSWER: usize = 16 << 10;

static CAPABILITIES: LazyLock<String> =
    LazyLock::new(|| format!("{COMMAND_PREFIX}{}", Command::Capabilities));

impl Pool {
    /// Gives the overlay one piece of evidence. Counted and logged once everything is decided and the lock is released
    /// (004); whoever is lowered by it is asked again.
    pub(super) fn observe(
        self: &Arc<Self>,
        generation: ConnectionGeneration,
        provider: &ProviderKey,
        (source, target): (EvidenceSource, &Arc<str>),
        bound: bool,
        reading: Option<Reading>,
    ) -> Verdict {
        let verdict = {
            let mut state = self.state.lock();
            state
                .table
                .observe(generation, provider, (source, target), bound, reading)
        };
        if verdict.changed() {
            self.pump();
        }
        let evidence_health = reading.map_or(ProviderHealth::Unknown, |r| r.health);
        self.metrics
            .health_evidence
            .at((source, evidence_health, verdict.decision))
            .inc();
        if verdict.changed() {
            self.metrics
                .health_transitions
                .at((verdict.from, verdict.to))
                .inc();
        }
        tracing::info!(
            source = source.as_str(),
            evidence_health = evidence_health.as_str(),
            decision = verdict.decision.as_str(),
            from_health = verdict.from.as_str(),
            to_health = verdict.to.as_str(),
            state_changed = verdict.changed(),
            "edge_provider_health_observation"
        );
        if verdict.changed() && verdict.to == ProviderHealth::Unavailable {
            self.recover(generation, provider.clone());
        }
        verdict
    }

    /// Asks a lowered provider until it is raised or its generation is gone. Lowered once, asked by one task.
    fn recover(self: &Arc<Self>, generation: ConnectionGeneration, provider: ProviderKey) {
        let pool = Arc::downgrade(self);
        tasks::spawn(tasks::Kind::Session, "recover_provider", async move {
            let mut pause = FIRST_PAUSE;
            loop {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
                let Some(question) = pool.upgrade().and_then(|p| p.question(generation, &provider)) else {
                    return;
                };
                let answer = tokio::time::timeout(ANSWER, question.ask()).await;
                let Some(pool) = pool.upgrade() else { return };
                if let Ok(Ok(result)) = answer {
                    let (bound, reading) = question.read(result.as_ref());
                    let about = (EvidenceSource::Probe, &question.target);
                    // Whoever lowers it again starts a task of its own.
                    if pool
                        .observe(generation, &provider, about, bound, reading)
                        .changed()
                    {
                        return;
                    }
                }
            }
        });
    }

    /// What a lowered provider has to be asked; `None`: it is not lowered, or its session is gone.
    fn question(&self, generation: ConnectionGeneration, provider: &ProviderKey) -> Option<Question> {
        let state = self.state.lock();
        let target = state.table.lowered_by(generation, provider)?.clone();
        let session = state.sessions.get(&generation)?.session.clone();
        // The part of the key that the node gave it; it always is a name.
        let id = provider.as_str().rsplit('/').next()?;
        Some(Question {
            session,
            provider: ProviderId::new(id).ok()?,
            target,
        })
    }
}

struct Question {
    session: Arc<Session>,
    provider: ProviderId,
    target: Arc<str>,
}

impl Question {
    /// `None`: an answer that is no result.
    ///
    /// # Errors
    /// `Lost` when no answer came.
    async fn ask(&self) -> Result<Option<CapabilitiesResult>, LinkError> {
        let command = CommandRequest {
            provider: self.provider.clone(),
            target: Some(self.target.to_string()),
            path: None,
        };
        // Plain strings always serialize.
        let body = serde_json::to_vec(&command).unwrap_or_default();
        let mut request = Request::new(SplicedBody::whole(Bytes::from(body)));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_static(&CAPABILITIES);
        let response = self.session.call(request).await?;
        let (head, body) = response.into_parts();
        match Limited::new(body, MAX_ANSWER).collect().await {
            Ok(body) if head.status == StatusCode::OK => Ok(serde_json::from_slice(&body.to_bytes()).ok()),
            Ok(_) => Ok(None),
            Err(error) if error.is::<LengthLimitError>() => Ok(None),
            Err(_) => Err(LinkError::Lost),
        }
    }

    /// Whether the answer is about what was asked, and what it says.
    fn read(&self, result: Option<&CapabilitiesResult>) -> (bool, Option<Reading>) {
        let bound =
            result.is_none_or(|r| r.adapter_key == self.provider.as_str() && *r.target == *self.target);
        (bound, result.map(Reading::of_probe))
    }
}
