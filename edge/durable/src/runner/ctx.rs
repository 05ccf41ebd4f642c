//! What a node has at hand: who it is, the activity boundary, gates, budgets, bindings.

use std::borrow::Cow;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::{Failure, FailureKind};
use crate::graph::{Deadline, NodeError};
use crate::ids::{ActivityId, CorrelationId, InvalidId, Key, NodeName, RunId, check_text};
use crate::machine::activity::{Request, Settlement};
use crate::machine::wait::WaitSpec;
use crate::payload::Payload;
use crate::record::{
    ActivityRecord, Budget, Continuation, DeadlinePolicy, Effect, Exhausted, RetryPolicy, WaitLabels,
    WaitRecord, WaitStatus, WaitingKind,
};
use crate::runner::bindings::Bindings;
use crate::runner::keeper::Held;
use crate::runner::ledger::{Begin, BudgetRefused, End, Ledger};
use crate::time::Timestamp;

/// The context of one entry into a node. Cheap to clone.
#[derive(Clone)]
pub struct Ctx {
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) held: Arc<Held>,
    pub(crate) bindings: Arc<Bindings>,
    pub(crate) metadata: Arc<std::collections::BTreeMap<String, String>>,
    pub(crate) traceparent: Option<Arc<str>>,
    pub(crate) owner: Option<Arc<str>>,
    pub(crate) root: RunId,
}

impl Ctx {
    pub fn run(&self) -> &RunId {
        &self.ledger.entry.run
    }

    pub fn node(&self) -> &NodeName {
        &self.ledger.entry.node
    }

    /// Counts the nodes entered in this run, from 1.
    pub fn activation(&self) -> u64 {
        self.ledger.entry.activation
    }

    /// From 1; grows with every retry of this activation.
    pub fn attempt(&self) -> u32 {
        self.ledger.entry.attempt
    }

    pub fn life(&self) -> u32 {
        self.ledger.entry.life
    }

    /// The store's clock.
    pub fn now(&self) -> Timestamp {
        self.held.now()
    }

    pub fn metadata(&self) -> &std::collections::BTreeMap<String, String> {
        &self.metadata
    }

    /// The W3C trace context that the run was started with (D242).
    pub fn traceparent(&self) -> Option<&str> {
        self.traceparent.as_deref()
    }

    /// Who made the run (D85); a host's word.
    pub fn owner(&self) -> Option<Arc<str>> {
        self.owner.clone()
    }

    /// The first run of the lineage (D11); the run itself when nobody started it.
    pub fn root(&self) -> &RunId {
        &self.root
    }

    /// Something of the process, put there by `Options::bindings`.
    pub fn binding<T: Send + Sync + 'static>(&self) -> Option<Arc<T>> {
        self.bindings.get()
    }

    /// An effect outside, under a key that is unique within this activation (D138).
    pub fn activity(&self, key: &str) -> Activity {
        Activity {
            ctx: self.clone(),
            key: Key::new(key),
            implementation: "1".to_owned(),
            effect: Effect::Unsafe,
            retry: None,
            reconcile: None,
            announce: None,
        }
    }

    /// A pause inside this node: for an approval, an input or an event, under a key that is unique within this activation.
    pub fn gate(&self, key: &str) -> Gate {
        Gate {
            ctx: self.clone(),
            key: key.to_owned(),
            correlation: None,
            kind: WaitingKind::Approval,
            subject: Bytes::new(),
            deadline: None,
            policy: DeadlinePolicy::FirstCommitted,
        }
    }

    /// How the gate of this key was settled, as far as it is known by now; `None` while it is armed, and when it was not asked for.
    pub fn settled(&self, key: &str) -> Option<Answer> {
        let record = self.ledger.settled(&Key::new(key).ok()?)?;
        answer(&record).ok()
    }

    /// Whether the activity of this key was asked for before: in this entry, or in one whose journal is there.
    pub fn knows(&self, key: &str) -> bool {
        Key::new(key).is_ok_and(|key| self.ledger.knows(&key))
    }

    /// Keeps the run from parking while the node does something of its own beside its gates: a lookup, a computation elsewhere.
    /// Until the guard is dropped a pause of another branch does not end this entry.
    pub fn busy(&self) -> Busy {
        self.ledger.probing(true);
        Busy(Arc::clone(&self.ledger))
    }

    /// Whether a call of this entry is on its way to its callee, at it, or asked about there. Dropping it would leave an effect
    /// that is not known.
    pub fn calls(&self) -> bool {
        self.ledger.calls()
    }

    /// Draws on a named budget. What is drawn counts once the step is committed; a step that is entered again draws again.
    ///
    /// # Errors
    /// `BudgetRefused`; nothing is drawn.
    pub fn use_budget(&self, name: &str, amount: u64) -> Result<(), BudgetRefused> {
        self.ledger.use_budget(name, amount)
    }

    /// Draws what was used already, such as the tokens of an answer: over the limit too. What is drawn counts once the step is
    /// committed. The budget as it is then; the caller decides what follows when it is above its limit.
    ///
    /// # Errors
    /// `BudgetRefused` for a budget that is not declared.
    pub fn charge(&self, name: &str, amount: u64) -> Result<Budget, BudgetRefused> {
        self.ledger.charge(name, amount)
    }

    pub fn budget(&self, name: &str) -> Option<Budget> {
        self.ledger.budget(name)
    }

    /// Adds an event of the host's own to the log, with the next commit of this run. A step that is entered again may add it
    /// again.
    ///
    /// # Errors
    /// A failure when `data` is not JSON or too large, and when the name is no name or the engine's own.
    pub fn emit(&self, name: impl Into<Cow<'static, str>>, data: &impl Serialize) -> Result<(), Failure> {
        let name = name.into();
        check_text("event", &name)
            .map_err(|e| Failure::new(FailureKind::InvalidInput, e.to_string()).code("invalid_encoding"))?;
        if crate::record::EventName::parse(&name).is_some() {
            return Err(Failure::new(
                FailureKind::Configuration,
                format!("event {name} is the engine's own"),
            ));
        }
        let data =
            serde_json::to_vec(data).map_err(|e| Failure::new(FailureKind::InvalidInput, e.to_string()))?;
        within_limit("the event", data.len(), self.ledger.entry.max_payload)?;
        self.ledger.emit(name, Bytes::from(data));
        Ok(())
    }
}

/// A refusal of what is larger than the host allows (D262).
pub(crate) fn within_limit(what: &str, bytes: usize, limit: u64) -> Result<(), Failure> {
    if bytes as u64 <= limit {
        return Ok(());
    }
    let why = format!("{what} is {bytes} bytes, at most {limit} are allowed");
    Err(Failure::new(FailureKind::InvalidInput, why).code("payload_too_large"))
}

/// What is passed to the function that carries a call out.
#[derive(Debug, Clone)]
pub struct Call {
    pub run: RunId,
    pub node: NodeName,
    pub activation: u64,
    pub key: Key,
    pub activity: ActivityId,
    /// From 1, over all causes.
    pub attempt: u32,
    /// The same for every attempt: `<run>/<node>/<activation>/<key>`, each part percent-encoded (durable-api §5).
    pub idempotency_key: String,
    pub input: Bytes,
}

/// How a call did not complete.
#[derive(Debug, Clone)]
pub enum CallError {
    /// It surely failed. `retry_after` is the callee's own hint.
    Failed {
        failure: Failure,
        retry_after: Option<Duration>,
    },
    /// It may have had its effect: a timeout or a cut after it was sent.
    Unknown,
}

impl From<Failure> for CallError {
    fn from(failure: Failure) -> Self {
        Self::Failed {
            failure,
            retry_after: None,
        }
    }
}

/// A call that failed for good.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{failure}")]
pub struct ActivityError {
    pub failure: Failure,
    /// The limit that ran out, when one did.
    pub exhausted: Option<Exhausted>,
}

impl From<ActivityError> for NodeError {
    fn from(error: ActivityError) -> Self {
        match error.exhausted {
            Some(exhausted) => Self::Exhausted {
                exhausted,
                failure: Some(error.failure),
            },
            None => Self::Failed(error.failure),
        }
    }
}

/// The name and the data of an event that tells of an attempt, by its number.
type Announcement = Box<dyn FnOnce(u32) -> (Cow<'static, str>, Bytes) + Send>;
type Probe = Box<dyn FnOnce(ActivityRecord) -> BoxFuture<'static, Option<Bytes>> + Send>;

/// A call in the making. Nothing happens before `run`.
#[must_use = "nothing happens before `run`"]
pub struct Activity {
    ctx: Ctx,
    key: Result<Key, InvalidId>,
    implementation: String,
    effect: Effect,
    retry: Option<RetryPolicy>,
    reconcile: Option<Probe>,
    announce: Option<Announcement>,
}

impl Activity {
    /// A label of what carries the call out; a recorded call with another label conflicts (D141).
    pub fn implementation(mut self, label: &str) -> Self {
        label.clone_into(&mut self.implementation);
        self
    }

    /// What repeating it does; `Unsafe` when not said.
    pub fn effect(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }

    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = Some(policy);
        self
    }

    /// A read-only question to the callee whether an attempt of unknown effect was carried out: its output, or `None` when
    /// there is no evidence (D152).
    pub fn reconcile<F, Fut>(mut self, probe: F) -> Self
    where
        F: FnOnce(ActivityRecord) -> Fut + Send + 'static,
        Fut: Future<Output = Option<Bytes>> + Send + 'static,
    {
        self.reconcile = Some(Box::new(move |record| Box::pin(probe(record))));
        self
    }

    /// An event of the host's own that is committed with the intent of an attempt; nothing is told of a replay. `data` is JSON.
    pub fn announce(
        mut self,
        event: impl FnOnce(u32) -> (Cow<'static, str>, Bytes) + Send + 'static,
    ) -> Self {
        self.announce = Some(Box::new(event));
        self
    }

    /// Carries the call out, or answers from the journal: a completed call is never dispatched again (D141). The intent is
    /// committed before `dispatch` is called (D139). A call that has to wait, for its retry or for an operator, parks the run:
    /// this does not return, and the node is entered again later.
    ///
    /// # Errors
    /// `ActivityError` when the call failed for good.
    pub async fn run<F, Fut>(mut self, input: impl Into<Bytes>, dispatch: F) -> Result<Bytes, ActivityError>
    where
        F: Fn(Call) -> Fut + Send,
        Fut: Future<Output = Result<Bytes, CallError>> + Send,
    {
        let failed = |failure, exhausted| ActivityError { failure, exhausted };
        let entry = &self.ctx.ledger.entry;
        let key = match &self.key {
            Ok(key) => key.clone(),
            Err(e) => {
                return Err(failed(
                    Failure::new(FailureKind::InvalidInput, e.to_string()).code("invalid_encoding"),
                    None,
                ));
            }
        };
        let request = Request {
            run: entry.run.clone(),
            node: entry.node.clone(),
            activation: entry.activation,
            key: key.clone(),
            implementation: self.implementation.clone(),
            effect: self.effect,
            retry: self.retry.clone(),
            input: Payload::new(input),
        };
        loop {
            match self.ctx.ledger.begin(request.clone(), self.ctx.now()) {
                Begin::Replay(output) => return Ok(output),
                Begin::Failed(failure, exhausted) => return Err(failed(failure, exhausted)),
                Begin::Never => std::future::pending::<()>().await,
                Begin::Unknown(record) => {
                    let id = record.id.clone();
                    let found = match self.reconcile.take() {
                        Some(probe) => {
                            let _busy = self.ctx.busy();
                            probe(*record).await
                        }
                        None => None,
                    }
                    // What is too large to be stored is no evidence that can be used.
                    .filter(|found| found.len() as u64 <= entry.max_payload);
                    if let Some(output) =
                        self.ctx
                            .ledger
                            .reconciled(&id, found.map(Payload::new), self.ctx.now())
                    {
                        return Ok(output);
                    }
                    std::future::pending::<()>().await;
                }
                Begin::Dispatch {
                    id,
                    attempt,
                    confirmed,
                } => {
                    if let Some(announce) = self.announce.take() {
                        let (name, data) = announce(attempt);
                        self.ctx.ledger.emit(name, data);
                    }
                    let mut cut = CutOff {
                        ctx: &self.ctx,
                        id: Some(&id),
                    };
                    if let Some(confirmed) = confirmed
                        && confirmed.await.is_err()
                    {
                        // The intent did not land: nothing is dispatched, and the segment is over.
                        std::future::pending::<()>().await;
                    }
                    if !self.ctx.held.is_live() {
                        std::future::pending::<()>().await;
                    }
                    let call = Call {
                        run: entry.run.clone(),
                        node: entry.node.clone(),
                        activation: entry.activation,
                        key: key.clone(),
                        activity: id.clone(),
                        attempt,
                        idempotency_key: idempotency_key(
                            &entry.run,
                            entry.node.as_str(),
                            entry.activation,
                            &key,
                        ),
                        input: request.input.bytes().clone(),
                    };
                    let settlement = match dispatch(call).await {
                        Ok(output) if output.len() as u64 > entry.max_payload => Settlement::Failed {
                            error: Failure::new(
                                FailureKind::ToolError,
                                format!(
                                    "the output is {} bytes, at most {} are allowed",
                                    output.len(),
                                    entry.max_payload
                                ),
                            )
                            .code("payload_too_large")
                            .retryable(false),
                            retry_after: None,
                        },
                        Ok(output) => Settlement::Completed(Payload::new(output)),
                        Err(CallError::Failed { failure, retry_after }) => Settlement::Failed {
                            error: failure,
                            retry_after,
                        },
                        Err(CallError::Unknown) => Settlement::Abandoned,
                    };
                    cut.id = None;
                    match self
                        .ctx
                        .ledger
                        .finish(&id, settlement, self.ctx.now(), fastrand::f64())
                    {
                        End::Completed(output) => return Ok(output),
                        End::Failed(failure, exhausted) => return Err(failed(failure, exhausted)),
                        End::Unknown => {}
                        End::Never => std::future::pending::<()>().await,
                    }
                }
            }
        }
    }

    /// `run` with JSON in and out.
    ///
    /// # Errors
    /// Also when the input cannot be encoded or the output cannot be decoded.
    pub async fn run_json<I, O, F, Fut>(self, input: &I, dispatch: F) -> Result<O, ActivityError>
    where
        I: Serialize + Sync,
        O: Serialize + DeserializeOwned,
        F: Fn(Call) -> Fut + Send + Sync,
        Fut: Future<Output = Result<O, CallError>> + Send,
    {
        let invalid = |e: serde_json::Error| Failure::new(FailureKind::InvalidInput, e.to_string());
        let input = serde_json::to_vec(input).map_err(|e| ActivityError {
            failure: invalid(e),
            exhausted: None,
        })?;
        let output = self
            .run(input, |call| {
                let answer = dispatch(call);
                async move {
                    let output = answer.await?;
                    serde_json::to_vec(&output)
                        .map(Bytes::from)
                        .map_err(|e| CallError::from(invalid(e)))
                }
            })
            .await?;
        serde_json::from_slice(&output).map_err(|e| ActivityError {
            failure: invalid(e),
            exhausted: None,
        })
    }
}

/// Keeps a run from parking; see `Ctx::busy`.
#[must_use = "the run may park once this is dropped"]
pub struct Busy(Arc<Ledger>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.probing(false);
    }
}

/// Tells the ledger when a node drops a call that is under way.
struct CutOff<'a> {
    ctx: &'a Ctx,
    id: Option<&'a ActivityId>,
}

impl Drop for CutOff<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.ctx.ledger.abandon(id, self.ctx.now());
        }
    }
}

/// `<run>/<node>/<activation>/<key>`, each part percent-encoded outside `[A-Za-z0-9._~-]` (D55, durable-api §5).
///
/// A front-end that has other names for its steps may make its own keys of them; what counts is that a call has one key for ever.
pub fn idempotency_key(run: &RunId, node: &str, activation: u64, key: &Key) -> String {
    let mut out = String::new();
    for (n, part) in [run.as_str(), node, &activation.to_string(), key.as_str()]
        .into_iter()
        .enumerate()
    {
        if n > 0 {
            out.push('/');
        }
        for byte in part.bytes() {
            if byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'~' | b'-') {
                out.push(char::from(byte));
            } else {
                use std::fmt::Write as _;
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

/// How a gate was settled.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// By the delivery that was committed first.
    Delivered(Bytes),
    /// By its deadline.
    TimedOut,
}

/// A gate in the making.
#[must_use = "nothing happens before `wait`"]
pub struct Gate {
    ctx: Ctx,
    key: String,
    correlation: Option<String>,
    kind: WaitingKind,
    subject: Bytes,
    deadline: Option<Deadline>,
    policy: DeadlinePolicy,
}

impl Gate {
    /// `Approval` when not said; `Input`, `Event`, `Timer` or `Children`.
    pub fn kind(mut self, kind: WaitingKind) -> Self {
        self.kind = kind;
        self
    }

    /// What an event from outside finds it by; the gate's idempotency key when not said.
    pub fn correlation(mut self, id: &str) -> Self {
        self.correlation = Some(id.to_owned());
        self
    }

    /// What people are shown, saved with the pause: the exact call to approve, a prompt.
    pub fn subject(mut self, bytes: impl Into<Bytes>) -> Self {
        self.subject = bytes.into();
        self
    }

    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = Some(deadline);
        self
    }

    pub fn deadline_policy(mut self, policy: DeadlinePolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Returns when the gate is settled. Until then the pause is saved, the run parks once nothing else of this node is under
    /// way, and worker and lease are free; the node is entered again after the answer.
    ///
    /// # Errors
    /// A failure when the gate is invalid or was armed with other content.
    pub async fn wait(self) -> Result<Answer, Failure> {
        let invalid =
            |e: InvalidId| Failure::new(FailureKind::InvalidInput, e.to_string()).code("invalid_encoding");
        let entry = &self.ctx.ledger.entry;
        let key = Key::new(&self.key).map_err(invalid)?;
        within_limit("the subject", self.subject.len(), entry.max_payload)?;
        let correlation = match &self.correlation {
            Some(id) => CorrelationId::new(id).map_err(invalid)?,
            None => {
                let id = crate::ids::WaitId::derive(&entry.run, &entry.node, entry.activation, &key, 1);
                CorrelationId::new(id.as_str()).map_err(invalid)?
            }
        };
        let (at, within) = match self.deadline {
            None => (None, None),
            Some(Deadline::At(at)) => (Some(at), None),
            Some(Deadline::In(span)) => (None, Some(span)),
        };
        let gate = || "gate".to_owned();
        let spec = WaitSpec {
            key,
            correlation,
            kind: self.kind,
            continuation: Continuation::Gate,
            labels: WaitLabels {
                matcher: gate(),
                payload: gate(),
                continuation: gate(),
            },
            subject: Payload::new(self.subject.clone()),
            deadline: at,
            deadline_policy: self.policy,
        };
        loop {
            let changed = self.ctx.ledger.wait_changed();
            tokio::pin!(changed);
            // Registered before looking, so that no settlement falls between.
            futures_util::poll!(&mut changed).is_ready();
            if let Some(record) = self.ctx.ledger.gate(spec.clone(), within, self.ctx.now())? {
                return answer(&record);
            }
            changed.await;
        }
    }
}

fn answer(record: &WaitRecord) -> Result<Answer, Failure> {
    match record.status {
        WaitStatus::TimedOut => Ok(Answer::TimedOut),
        WaitStatus::Delivered => Ok(Answer::Delivered(
            record
                .settled
                .as_ref()
                .and_then(|s| s.payload.as_ref())
                .map_or_else(Bytes::new, |p| p.bytes().clone()),
        )),
        WaitStatus::Cancelled => {
            Err(Failure::new(FailureKind::Refused, "the wait was cancelled").code("wait_cancelled"))
        }
        WaitStatus::Armed => Err(Failure::new(FailureKind::Internal, "an armed gate has no answer")),
    }
}
