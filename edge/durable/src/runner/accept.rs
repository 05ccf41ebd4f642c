//! Acceptance: a run is durable before anybody is told so (D25).

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use crate::envelope;
use crate::graph::Deadline;
use crate::ids::{Revision, RunId, check_text};
use crate::record::{EventName, EventRecord, Inbox, Lineage, RunHead, Status};
use crate::runner::{RunError, Runner};
use crate::store::{Acquired, Create, Created, IdempotencyKey, LeaseRequest, Loaded, StoreError};
use crate::time::Timestamp;

/// A run to begin.
#[derive(Debug, Clone)]
pub struct Start<S> {
    /// Made up when absent.
    pub run: Option<RunId>,
    pub state: S,
    pub metadata: BTreeMap<String, String>,
    /// Who makes the run: 1 to 256 bytes, without U+0000.
    pub owner: Option<String>,
    pub deadline: Option<Deadline>,
    /// Limits other than the graph's, for budgets it declares.
    pub budgets: BTreeMap<String, u64>,
    pub parent: Option<Lineage>,
    pub traceparent: Option<String>,
    pub idempotency: Option<IdempotencyKey>,
}

impl<S> Start<S> {
    pub fn new(state: S) -> Self {
        Self {
            run: None,
            state,
            metadata: BTreeMap::new(),
            owner: None,
            deadline: None,
            budgets: BTreeMap::new(),
            parent: None,
            traceparent: None,
            idempotency: None,
        }
    }

    #[must_use]
    pub fn run(mut self, id: RunId) -> Self {
        self.run = Some(id);
        self
    }
}

/// What became of an acceptance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    pub run: RunId,
    /// The same idempotency key made it before.
    pub replayed: bool,
}

impl<S, E> Runner<S, E>
where
    S: Send + Sync + 'static,
    E: Serialize + DeserializeOwned + Send + Sync + 'static,
{
    pub(super) fn creation(
        &self,
        start: Start<S>,
        now: Timestamp,
        lease: Option<LeaseRequest>,
    ) -> Result<Create, RunError> {
        let graph = &self.inner.graph;
        let state = graph
            .encode(&start.state)
            .map_err(|why| RunError::InvalidRequest { field: "state", why })?;
        self.inner.limits.check_state(&state)?;
        let mut budgets = graph.budgets.clone();
        for (name, limit) in start.budgets {
            match budgets.get_mut(&name) {
                Some(budget) => budget.limit = limit,
                None => {
                    return Err(RunError::InvalidBudget(format!(
                        "budget {name:?} is not declared"
                    )));
                }
            }
        }
        if let Some(key) = &start.idempotency {
            check_text("idempotency.scope", &key.scope)?;
            check_text("idempotency.key", &key.key)?;
        }
        if let Some(owner) = &start.owner {
            check_text("owner", owner)?;
        }
        let id = start.run.unwrap_or_else(RunId::random);
        let running = lease.is_some();
        let mut events = vec![event(1, EventName::Created, now, b"{}")];
        if running {
            events.push(event(
                2,
                EventName::Started,
                now,
                b"{\"life\":1,\"recovered\":false}",
            ));
            let data = serde_json::json!({ "step": graph.entry.as_str(), "activation": 1, "attempt": 1 })
                .to_string();
            events.push(event(3, EventName::StepStarted, now, data.as_bytes()));
        }
        let lineage = start.parent.unwrap_or_else(|| Lineage {
            parent: None,
            root: id.clone(),
            origin: None,
        });
        let head = RunHead {
            id,
            revision: Revision::FIRST,
            definition: graph.definition.clone(),
            lineage,
            life: 1,
            status: if running { Status::Running } else { Status::Queued },
            cursor: Some(graph.entry.clone()),
            activation: 1,
            attempt: 1,
            recoveries: 0,
            state_digest: *state.digest(),
            budgets,
            metadata: start.metadata,
            owner: start.owner,
            waiting: None,
            outcome: None,
            deadline: start.deadline.map(|deadline| match deadline {
                Deadline::At(at) => at,
                Deadline::In(span) => now.plus(span),
            }),
            event_seq: events.len() as u64,
            open_activities: 0,
            armed_waits: 0,
            effects: 0,
            traceparent: start.traceparent,
            incarnation: 0,
            commit_id: Uuid::from_u64_pair(fastrand::u64(..), fastrand::u64(..)),
            created_at: now,
            updated_at: now,
        };
        Ok(Create {
            head,
            state,
            events,
            due_at: Some(now),
            lease,
            idempotency: start.idempotency,
        })
    }

    /// Accepts a run: durable when this returns, run by whoever claims it (D25).
    ///
    /// # Errors
    /// `idempotency_conflict` when the id or the key is taken by another run; `invalid_encoding` for a key or an owner that is no
    /// text; `run_deleted`; `payload_too_large`; `budget_invalid`; the store's.
    pub async fn accept(&self, start: Start<S>) -> Result<Accepted, RunError> {
        let now = self.inner.store.now().await?;
        let create = self.creation(start, now, None)?;
        self.create(create).await.map(|(accepted, _)| accepted)
    }

    pub(super) async fn create(&self, create: Create) -> Result<(Accepted, Option<Acquired>), RunError> {
        let (head, state) = (create.head.clone(), create.state.clone());
        let mut tries = 0;
        // Whether an answer was lost: then what exists may be this very creation.
        let mut unsure = false;
        loop {
            let created = match self.inner.store.create(create.clone()).await {
                // Whether it landed is told by the commit's own id.
                Err(error @ StoreError::Unconfirmed { .. }) => {
                    unsure = true;
                    match self.inner.store.load(&head.id).await {
                        Ok(loaded) if loaded.head.commit_id == head.commit_id => Created::New {
                            lease: loaded.lease,
                            now: loaded.now,
                        },
                        Err(StoreError::NotFound) if tries < 3 => {
                            tries += 1;
                            continue;
                        }
                        Ok(_) | Err(_) => return Err(error.into()),
                    }
                }
                created => created?,
            };
            return match created {
                Created::New { lease, now } => {
                    let accepted = Accepted {
                        run: head.id.clone(),
                        replayed: false,
                    };
                    let acquired = match lease {
                        None => None,
                        Some(lease) => {
                            let (mut head, mut state) = (head, state);
                            head.revision = Revision::FIRST;
                            state.mark_stored();
                            let seal = envelope::seal_of(&head, &state)?;
                            let loaded = Loaded {
                                head,
                                state,
                                seal,
                                inbox: Inbox::default(),
                                lease: Some(lease.clone()),
                                now,
                            };
                            Some(Acquired { lease, loaded })
                        }
                    };
                    Ok((accepted, acquired))
                }
                Created::Replayed { run } if !unsure || run != head.id => {
                    Ok((Accepted { run, replayed: true }, None))
                }
                Created::Exists | Created::Replayed { .. } => self.existing(&head, unsure).await,
                Created::KeyConflict { .. } => Err(RunError::Conflict),
            };
        }
    }

    /// The run that has this id already: this very creation when its answer was lost; the same run asked for again when
    /// owner, definition, first state and limits are the same (D59); else another one. The definition may have a newer version
    /// since: then its own limits say nothing.
    async fn existing(&self, head: &RunHead, unsure: bool) -> Result<(Accepted, Option<Acquired>), RunError> {
        let loaded = self.inner.store.load(&head.id).await?;
        let run = head.id.clone();
        if unsure && loaded.head.commit_id == head.commit_id {
            let acquired = loaded.lease.clone().map(|lease| Acquired { lease, loaded });
            return Ok((Accepted { run, replayed: false }, acquired));
        }
        let second = Revision::FIRST.next().ok();
        let first = self.inner.store.history(&head.id, second, 1).await?;
        let same = is_asked_again(&loaded.head, head)
            && first
                .first()
                .is_some_and(|first| first.state_digest == head.state_digest);
        if same {
            Ok((Accepted { run, replayed: true }, None))
        } else {
            Err(RunError::Conflict)
        }
    }
}

/// Whether a creation asks for a run that exists, but for its first state.
fn is_asked_again(made: &RunHead, asked: &RunHead) -> bool {
    let limits = |head: &RunHead| -> Vec<(String, u64)> {
        let budgets = head.budgets.iter();
        budgets
            .map(|(name, budget)| (name.clone(), budget.limit))
            .collect()
    };
    let span = |head: &RunHead| head.deadline.map(|deadline| deadline.since(head.created_at));
    let of_one_version =
        || limits(made) == limits(asked) && (made.deadline == asked.deadline || span(made) == span(asked));
    made.owner == asked.owner
        && made.definition.kind == asked.definition.kind
        && made.definition.name == asked.definition.name
        && (made.definition != asked.definition || of_one_version())
        // A resume may have changed it.
        && (made.life > 1 || made.metadata == asked.metadata)
}

fn event(seq: u64, name: EventName, time: Timestamp, data: &[u8]) -> EventRecord {
    EventRecord {
        seq,
        life: 1,
        name: Cow::Borrowed(name.as_str()),
        terminal: false,
        time,
        data: Bytes::copy_from_slice(data),
    }
}
