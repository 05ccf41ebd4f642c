//! How a run is entered: fresh, claimed by a worker, or resumed by somebody who holds its token. One function decides for all
//! of them (D94), in the order of seed 003: token, head and revision, hook, overlay, counters, metadata, target, pointer.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::graph::caught;
use crate::ids::NodeName;
use crate::record::{EventName, Exhausted, Outcome, Status, Waiting, WaitingKind};
use crate::runner::draft::Halt;
use crate::runner::ending::outcome_of;
use crate::runner::operate::is_given_up;
use crate::runner::segment::Segment;
use crate::runner::step::enter;
use crate::runner::{RunError, Runner};
use crate::store::{Loaded, StoreError};
use crate::token::ResumeToken;

/// Where a resumed run goes on (D97).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResumePlan {
    Current,
    To(String),
}

type Overlay<S> = Box<dyn FnOnce(S) -> Result<S, String> + Send>;
type Target<S> = Box<dyn FnOnce(&S, &NodeName) -> ResumePlan + Send>;

/// What a resume brings along. All of it is optional; nothing of it is applied when any part is refused.
pub struct Resume<S> {
    pub(crate) overlay: Option<Overlay<S>>,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) budgets_used: BTreeMap<String, u64>,
    pub(crate) target: Option<Target<S>>,
}

impl<S> Default for Resume<S> {
    fn default() -> Self {
        Self {
            overlay: None,
            metadata: BTreeMap::new(),
            budgets_used: BTreeMap::new(),
            target: None,
        }
    }
}

impl<S> Resume<S> {
    pub fn new() -> Self {
        Self::default()
    }

    /// Merges the caller's data into the state, deterministically (D95).
    #[must_use]
    pub fn overlay(mut self, merge: impl FnOnce(S) -> Result<S, String> + Send + 'static) -> Self {
        self.overlay = Some(Box::new(merge));
        self
    }

    /// Merged over the run's metadata (D96).
    #[must_use]
    pub fn metadata(mut self, key: &str, value: &str) -> Self {
        self.metadata.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Sets what is used of a declared budget (D96).
    #[must_use]
    pub fn budget_used(mut self, name: &str, used: u64) -> Self {
        self.budgets_used.insert(name.to_owned(), used);
        self
    }

    /// Decides, after the overlay, where the run goes on (D97). A run that waits is moved by it: its waits are withdrawn.
    #[must_use]
    pub fn target(mut self, policy: impl FnOnce(&S, &NodeName) -> ResumePlan + Send + 'static) -> Self {
        self.target = Some(Box::new(policy));
        self
    }
}

/// What a resume with this token would meet (D93).
#[derive(Debug, Clone, PartialEq)]
pub enum ResumeDecision {
    Ready,
    /// The run has moved on; the current token is beside.
    Stale,
    /// A delivery, a decision or the timer moves it, or a resume with a target.
    Waiting(Box<Waiting>),
    Ambiguous(Box<Waiting>),
    /// Somebody is working on it.
    Busy,
    /// Over; a success is answered from the store.
    Terminal(Status),
    DefinitionChanged(String),
}

/// A decision and the token that is current.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluated {
    pub decision: ResumeDecision,
    pub current: ResumeToken,
}

pub(crate) enum Intent<S> {
    /// Created running, under this lease.
    Fresh,
    Claimed,
    Resume(Resume<S>),
    /// The same, left to the workers.
    Enqueue(Resume<S>),
}

impl<S> Intent<S> {
    /// Whether it says where the run goes on.
    pub(crate) fn moves(&self) -> bool {
        match self {
            Self::Resume(resume) | Self::Enqueue(resume) => resume.target.is_some(),
            Self::Fresh | Self::Claimed => false,
        }
    }
}

impl<S, E> Runner<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// What `resume` would say, without touching the run.
    ///
    /// # Errors
    /// The store's, and `run_not_found`, `run_deleted`, `run_corrupt`.
    pub async fn evaluate_resume(&self, token: &ResumeToken) -> Result<Evaluated, RunError> {
        let loaded = self.inner.store.load(&token.run).await?;
        let current = loaded.head.token();
        Ok(Evaluated {
            decision: self.decide(token, &loaded),
            current,
        })
    }

    pub(crate) fn decide(&self, token: &ResumeToken, loaded: &Loaded) -> ResumeDecision {
        let head = &loaded.head;
        if token.revision != head.revision {
            return ResumeDecision::Stale;
        }
        if let Some(why) = self.inner.mismatch(head) {
            return ResumeDecision::DefinitionChanged(why);
        }
        let waiting = || {
            Box::new(head.waiting.clone().unwrap_or(Waiting {
                reason: String::new(),
                due_at: None,
                on: Vec::new(),
            }))
        };
        match head.status {
            Status::Failed if is_resumable(head.outcome.as_deref()) => match loaded.lease {
                Some(_) => ResumeDecision::Busy,
                None => ResumeDecision::Ready,
            },
            Status::Succeeded
            | Status::Failed
            | Status::Cancelled
            | Status::Exhausted
            | Status::Transferred => ResumeDecision::Terminal(head.status),
            Status::Queued | Status::Running | Status::Waiting | Status::Ambiguous
                if loaded.lease.is_some() =>
            {
                ResumeDecision::Busy
            }
            Status::Ambiguous => ResumeDecision::Ambiguous(waiting()),
            Status::Queued | Status::Running => ResumeDecision::Ready,
            Status::Waiting => match head.waiting.as_ref().and_then(Waiting::kind) {
                Some(WaitingKind::Resume) => ResumeDecision::Ready,
                Some(_) | None => ResumeDecision::Waiting(waiting()),
            },
        }
    }
}

fn is_resumable(outcome: Option<&[u8]>) -> bool {
    outcome
        .and_then(|bytes| Outcome::decode(bytes).ok())
        .is_some_and(|outcome| outcome.resumable())
}

impl<S, E> Segment<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// Commits the entry. False: there is nothing to run; the lease is released. After an error it is not.
    pub(crate) async fn admit(&mut self, intent: Intent<S>) -> Result<bool, RunError> {
        let (resume, enqueue) = match intent {
            Intent::Fresh => return Ok(true),
            Intent::Claimed => (None, false),
            Intent::Resume(resume) => (Some(resume), false),
            Intent::Enqueue(resume) => (Some(resume), true),
        };
        let now = self.held.now();
        let over = self.head.deadline.is_some_and(|deadline| deadline <= now);
        let ended = match self.head.status {
            Status::Failed => resume.is_none(),
            Status::Succeeded | Status::Cancelled | Status::Exhausted | Status::Transferred => true,
            Status::Queued | Status::Running | Status::Waiting | Status::Ambiguous => false,
        };
        if ended {
            let held = std::sync::Arc::clone(&self.held);
            self.inner.keeper.release(&held).await;
            return Ok(false);
        }
        if self.head.status == Status::Ambiguous && self.ledger.holding().unknown {
            // Neither a request to cancel nor a deadline resolves an effect.
            return self.nothing_to_do().await;
        }
        if self.head.event_seq <= 1 {
            self.ask_parent().await?;
        }
        if (self.cancel.is_some() || over) && self.head.status != Status::Failed {
            // The first turn ends it. A failure has had its end: that of the next life needs the next life.
            return Ok(true);
        }

        let mut draft = self.draft();
        draft.head.status = Status::Running;
        draft.head.waiting = None;
        let mut moved = None;
        let mut lost_worker = false;
        let mut rests = false;
        match self.head.status {
            Status::Queued => {}
            Status::Running => {
                lost_worker = true;
                draft.head.recoveries += 1;
            }
            Status::Failed => {
                draft.head.life += 1;
                draft.head.attempt += 1;
                draft.head.outcome = None;
            }
            Status::Ambiguous => {}
            Status::Waiting => {
                moved = self.ledger.time_out_route(now);
                self.ledger.time_out_gates(now);
                let kind = self.head.waiting.as_ref().and_then(Waiting::kind);
                let suspended = kind == Some(WaitingKind::Resume);
                let due = self
                    .head
                    .waiting
                    .as_ref()
                    .and_then(|w| w.due_at)
                    .is_some_and(|at| at <= now);
                // An answered gate does not shorten the pause of its step, nor stand for the resume it waits for.
                let settled =
                    self.ledger.open().1 < self.head.armed_waits && !suspended && !self.step_is_paused();
                let target = resume.as_ref().is_some_and(|r| r.target.is_some());
                let wakes = moved.is_some() || due || settled || (suspended && resume.is_some());
                rests = !wakes;
                if rests && !target {
                    return self.nothing_to_do().await;
                }
            }
            Status::Succeeded | Status::Cancelled | Status::Exhausted | Status::Transferred => {
                return Ok(false);
            }
        }
        if let Some(to) = moved {
            enter(&mut draft.head, to);
        }
        if let Some(resume) = resume {
            self.apply(&mut draft, resume, rests)?;
        }
        let cursor = draft.head.cursor.clone();
        let Some(cursor) = cursor.filter(|cursor| self.inner.graph.nodes.contains_key(cursor)) else {
            return Err(RunError::Corrupt(
                "the run points at no node of its graph".to_owned(),
            ));
        };
        if lost_worker && draft.head.recoveries > self.inner.graph.recovery_attempts {
            let exhausted = Exhausted {
                budget: "recovery_attempts".to_owned(),
                used: self.head.recoveries.into(),
                limit: self.inner.graph.recovery_attempts.into(),
                decimals: 0,
            };
            return self.give_up(exhausted).await;
        }
        if enqueue {
            draft.head.status = Status::Queued;
            draft.watch_inbox = true;
            draft.release = true;
            draft.take(self.ledger.take_dirty(), self.ledger.open());
            if draft.head.activation != self.head.activation {
                draft.head.armed_waits = 0;
            }
            return self.write(draft).await.map(|()| false).map_err(RunError::from);
        }
        let first = draft.head.event_seq <= 1;
        let name = if first {
            EventName::Started
        } else {
            EventName::Resumed
        };
        draft.engine_event(
            name,
            &serde_json::json!({ "life": draft.head.life, "recovered": lost_worker }),
        );
        let entered =
            draft.head.activation != self.head.activation || draft.head.attempt != self.head.attempt;
        if first || entered || self.is_unstarted().await? {
            draft.step_started(&cursor);
        }
        // Waits were settled or withdrawn against what the inbox said.
        draft.watch_inbox = true;
        draft.take(self.ledger.take_dirty(), self.ledger.open());
        if draft.head.activation != self.head.activation {
            draft.head.armed_waits = 0;
        }
        match self.write(draft).await {
            Ok(()) => {
                self.restart();
                Ok(true)
            }
            Err(halt) => Err(RunError::from(halt)),
        }
    }

    /// Before the first step of a run that another one started: one that came into being while its parent was being cancelled
    /// ends as those do that its parent knew of.
    async fn ask_parent(&mut self) -> Result<(), RunError> {
        let Some(parent) = &self.head.lineage.parent else {
            return Ok(());
        };
        let parent = match self.inner.store.load(parent).await {
            Ok(parent) => parent,
            Err(StoreError::NotFound | StoreError::Deleted | StoreError::Corrupt { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if is_given_up(&parent) {
            let by = parent
                .inbox
                .cancel
                .as_ref()
                .and_then(|cancel| cancel.by.as_deref());
            self.inner.operator().ask_child(&self.head.id, by).await?;
            self.read_inbox().await?;
        }
        Ok(())
    }

    /// Whether the run waits for the next attempt of its step.
    fn step_is_paused(&self) -> bool {
        let on = self.head.waiting.as_ref().and_then(|waiting| waiting.on.first());
        on.is_some_and(|on| on.kind == WaitingKind::Retry && on.id.is_empty())
    }

    /// Whether the step at the pointer was entered by a commit that parked the run or left it in the queue: nothing of it has
    /// happened yet and no event has told of it.
    async fn is_unstarted(&self) -> Result<bool, RunError> {
        match self.head.status {
            Status::Waiting if self.step_is_paused() => Ok(true),
            // A resolved effect belongs to the step; behind a suspension there is nothing.
            Status::Waiting => Ok(self.ledger.is_empty()
                && self.head.waiting.as_ref().and_then(Waiting::kind) == Some(WaitingKind::Resume)),
            // By a delivery or a resume, or stopped in the middle of it.
            Status::Queued if (self.ledger.is_empty() || self.head.life > 1) && self.head.event_seq > 1 => {
                let last = self
                    .inner
                    .store
                    .events(&self.head.id, self.head.event_seq - 1, 1)
                    .await?;
                Ok(last
                    .iter()
                    .any(|event| event.terminal || event.name == EventName::Waiting.as_str()))
            }
            Status::Queued
            | Status::Running
            | Status::Ambiguous
            | Status::Succeeded
            | Status::Failed
            | Status::Cancelled
            | Status::Exhausted
            | Status::Transferred => Ok(false),
        }
    }

    /// Overlay, metadata, budgets, target: in this order, all or nothing. `rests`: without a move there is nothing to do.
    fn apply(
        &mut self,
        draft: &mut crate::runner::draft::Draft,
        resume: Resume<S>,
        rests: bool,
    ) -> Result<(), RunError> {
        let graph = &self.inner.graph;
        let invalid = |why: String| RunError::InvalidRequest {
            field: "state_overlay",
            why,
        };
        let overlaid = resume.overlay.is_some();
        // Nobody looks at the state for metadata alone (D118).
        let mut typed = match overlaid || resume.target.is_some() {
            true => Some(self.inner.decode(&self.state)?),
            false => None,
        };
        if let Some(overlay) = resume.overlay {
            let overlaid = typed.map(|state| {
                caught(|| overlay(state)).unwrap_or_else(|| Err("the overlay panicked".to_owned()))
            });
            typed = overlaid.transpose().map_err(invalid)?;
        }
        draft.head.metadata.extend(resume.metadata);
        for (name, used) in resume.budgets_used {
            match draft.head.budgets.get_mut(&name) {
                Some(budget) if used <= budget.limit => budget.used = used,
                Some(budget) => {
                    let why = format!("budget {name:?}: {used} is more than its limit {}", budget.limit);
                    return Err(RunError::InvalidBudget(why));
                }
                None => {
                    return Err(RunError::InvalidBudget(format!(
                        "budget {name:?} is not declared"
                    )));
                }
            }
        }
        if let (Some(target), Some(current), Some(typed)) = (resume.target, draft.head.cursor.clone(), &typed)
        {
            let plan = caught(|| target(typed, &current)).ok_or_else(|| RunError::InvalidRequest {
                field: "resume_target",
                why: "the policy panicked".to_owned(),
            })?;
            match plan {
                ResumePlan::Current if rests => {
                    let waiting = self.head.waiting.clone().unwrap_or(Waiting {
                        reason: String::new(),
                        due_at: None,
                        on: Vec::new(),
                    });
                    return Err(RunError::Waiting(Box::new(waiting)));
                }
                ResumePlan::Current => {}
                ResumePlan::To(name) => {
                    let Some(node) = graph.nodes.keys().find(|node| node.as_str() == name).cloned() else {
                        return Err(RunError::InvalidResumeTarget(format!(
                            "resume_target: {name:?} is not a node"
                        )));
                    };
                    if self.ledger.open().0 > 0 {
                        let why = "resume_target: an activity of the current step is unresolved".to_owned();
                        return Err(RunError::InvalidResumeTarget(why));
                    }
                    self.ledger.withdraw_waits(self.held.now());
                    enter(&mut draft.head, node);
                }
            }
        }
        if let (true, Some(typed)) = (overlaid, &typed) {
            let state = graph.encode(typed).map_err(invalid)?;
            self.inner.limits.check_state(&state)?;
            draft.head.state_digest = *state.digest();
            draft.state = state;
        }
        Ok(())
    }

    /// Claimed too early, or for nothing: the index is put right and the lease given back.
    async fn nothing_to_do(&mut self) -> Result<bool, RunError> {
        let mut draft = self.draft();
        let due = self.head.waiting.as_ref().and_then(|w| w.due_at);
        draft.due_at = if self.head.status == Status::Ambiguous {
            None
        } else {
            [due, self.head.deadline].into_iter().flatten().min()
        };
        draft.watch_inbox = true;
        draft.release = true;
        draft.take(self.ledger.take_dirty(), self.ledger.open());
        match self.write(draft).await {
            Ok(()) => Ok(false),
            Err(halt) => Err(RunError::from(halt)),
        }
    }
}

/// The refusal that a decision is, for `resume`; `None` when it may go on. A finished success is no refusal: its caller gets
/// the stored result (D64).
pub(crate) fn refusal(decision: ResumeDecision, loaded: &Loaded, moves: bool) -> Option<RunError> {
    match decision {
        ResumeDecision::Ready => None,
        ResumeDecision::Stale => Some(RunError::StaleToken {
            current: loaded.head.token(),
        }),
        ResumeDecision::Waiting(_) if moves => None,
        ResumeDecision::Waiting(waiting) => Some(RunError::Waiting(waiting)),
        ResumeDecision::Ambiguous(waiting) => Some(RunError::Ambiguous(waiting)),
        ResumeDecision::Busy => Some(RunError::Busy),
        ResumeDecision::Terminal(Status::Succeeded) => None,
        ResumeDecision::Terminal(status) => Some(RunError::Terminal {
            status,
            outcome: outcome_of(&loaded.head),
        }),
        ResumeDecision::DefinitionChanged(why) => Some(RunError::DefinitionChanged(why)),
    }
}

impl From<Halt> for RunError {
    fn from(halt: Halt) -> Self {
        match halt {
            Halt::LeaseLost => Self::LeaseLost,
            Halt::Signal => Self::Busy,
            Halt::Store(error @ StoreError::Unconfirmed { .. }) => Self::JournalUnavailable(error),
            Halt::Store(error) => Self::from(error),
            Halt::Undecodable(why) => Self::DefinitionChanged(format!("the state cannot be decoded: {why}")),
        }
    }
}
