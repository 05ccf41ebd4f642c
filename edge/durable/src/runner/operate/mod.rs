//! What people and other systems do to runs: cancel, deliver, resolve, reconcile. None of it calls a node, a dispatcher or a
//! codec (D155), so all of it works for runs whose graph is not loaded; only a delivery to a wait of the graph needs its
//! route, and lives in `Runner::deliver`. Where the host can tell the usage of a state (`Operator::usage`), an end shows it; nothing else
//! depends on that.

mod cancel;
mod children;
mod deliver;
mod resolve;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::value::RawValue;
use tokio::time::Instant;

pub use cancel::{CancelOutcome, Cancelled};
pub(crate) use children::is_given_up;
pub use deliver::{Addressed, DeliverOutcome};
pub use resolve::{Reconciled, Resolved};

use crate::graph::caught;
use crate::ids::{NodeName, Owner, RunId};
use crate::record::{ActivityRecord, Outcome};
use crate::runner::draft::{Draft, persist};
use crate::runner::ending::{end, outcome_of};
use crate::runner::keeper::{Held, Keeper};
use crate::runner::ledger::{Entry, Ledger};
use crate::runner::{Limits, RunError, journal};
use crate::store::{Acquired, Authority, Loaded, Store};
use crate::token::ResumeToken;

/// How often a change is tried against others' changes, and how long a live lease is waited out.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(10);

/// Operations that need no graph.
pub struct Operator {
    store: Arc<dyn Store>,
    keeper: Arc<Keeper>,
    limits: Limits,
    tell: Option<Arc<Tell>>,
    usage: Option<Arc<Usage>>,
}

/// `outcome.usage` of a state.
type Usage = dyn Fn(&[u8]) -> Option<Box<RawValue>> + Send + Sync;

/// The name and the data of the event that tells of a settled effect.
type Tell = dyn Fn(&ActivityRecord) -> Option<HostEvent> + Send + Sync;
type HostEvent = (Cow<'static, str>, Bytes);

impl Operator {
    /// `ttl` bounds how long one operation holds a run.
    pub fn new(store: Arc<dyn Store>, owner: Owner, ttl: Duration, limits: Limits) -> Self {
        let keeper = Keeper::new(Arc::clone(&store), owner, ttl);
        Self::of(store, keeper, limits)
    }

    /// One that shares a runner's keeper.
    pub(crate) fn of(store: Arc<dyn Store>, keeper: Arc<Keeper>, limits: Limits) -> Self {
        Self {
            store,
            keeper,
            limits,
            tell: None,
            usage: None,
        }
    }

    /// What `outcome.usage` shows of the last committed state of a run that is ended here (D245). A state that it does not know has none.
    #[must_use]
    pub fn usage(mut self, usage: impl Fn(&[u8]) -> Option<Box<RawValue>> + Send + Sync + 'static) -> Self {
        self.usage = Some(Arc::new(usage));
        self
    }

    /// The same, with an event of the host's own for each effect that it resolves or reconciles: committed with the outcome.
    /// `data` is JSON.
    #[must_use]
    pub fn telling(
        &self,
        tell: impl Fn(&ActivityRecord) -> Option<(Cow<'static, str>, Bytes)> + Send + Sync + 'static,
    ) -> Self {
        Self {
            store: Arc::clone(&self.store),
            keeper: Arc::clone(&self.keeper),
            limits: self.limits,
            tell: Some(Arc::new(tell)),
            usage: self.usage.clone(),
        }
    }

    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// A lease on a run nobody works on; waits out a moment's holder.
    async fn acquire(&self, run: &RunId) -> Result<(Acquired, Held), RunError> {
        let started = Instant::now();
        loop {
            match self.acquire_now(run).await {
                Err(RunError::Busy) if started.elapsed() < PATIENCE / 10 => tokio::time::sleep(PAUSE).await,
                acquired => return acquired,
            }
        }
    }

    async fn acquire_now(&self, run: &RunId) -> Result<(Acquired, Held), RunError> {
        let asked = Instant::now();
        let acquired = self.store.acquire(run, self.keeper.request()).await?;
        let held = journal::take(&self.keeper, &acquired, asked).await?;
        Ok((acquired, held))
    }

    /// The journal of a held run, verified, as a ledger.
    async fn ledger(&self, acquired: &Acquired) -> Result<Ledger, RunError> {
        let Acquired { lease, loaded } = acquired;
        let node = match &loaded.head.cursor {
            Some(node) => node.clone(),
            None => NodeName::new("-")?,
        };
        let entry = Entry {
            max_payload: self.limits.max_payload,
            ..Entry::of(&loaded.head, node, lease.incarnation)
        };
        match journal::open(&self.store, loaded, entry, loaded.now).await {
            Err(error) => Err(journal::doubted(&self.store, &lease.run, loaded.head.revision, error).await),
            opened => opened,
        }
    }

    /// Ends a held run.
    async fn end(&self, held: &Held, draft: &mut Draft, mut outcome: Outcome) -> Result<(), RunError> {
        let usage = self.usage.as_ref();
        outcome.usage = usage.and_then(|usage| caught(|| usage(draft.state.bytes())).flatten());
        Ok(end(&self.store, held, draft, outcome).await?)
    }

    /// Commits a draft under a lease and gives the lease back. Where the run stands then.
    async fn write(&self, mut draft: Draft, held: &Held, signal: u64) -> Result<Resolved, RunError> {
        draft.release = true;
        draft.watch_inbox = true;
        let status = draft.head.status;
        let commit = draft.commit(Authority::Lease(held.lease().clone()), Some(signal));
        let committed = persist(&self.store, held, &commit, false).await?;
        Ok(Resolved {
            replayed: false,
            status,
            token: ResumeToken {
                run: commit.head.id,
                revision: committed.revision,
            },
        })
    }
}

/// Whether a change is of the run as it is.
fn fresh(token: &ResumeToken, loaded: &Loaded) -> Result<(), RunError> {
    if loaded.head.status.is_terminal() {
        return Err(RunError::Terminal {
            status: loaded.head.status,
            outcome: outcome_of(&loaded.head),
        });
    }
    let current = loaded.head.token();
    if current == *token {
        Ok(())
    } else {
        Err(RunError::StaleToken { current })
    }
}

/// The answer to a change that was made before.
fn replayed(loaded: &Loaded) -> Resolved {
    Resolved {
        replayed: true,
        status: loaded.head.status,
        token: loaded.head.token(),
    }
}
