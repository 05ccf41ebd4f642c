//! Where runs live: one trait, three adapters. An adapter is dumb on purpose: it checks a commit's guard and writes its rows
//! in one transaction, or nothing. What the rows mean is decided in `machine`, how they are sealed in `envelope`.
//!
//! Rules every adapter keeps (the conformance suite checks them):
//! - Head first, then lease, then everything else; a commit's revision, signal, incarnation and the lease's life are checked
//!   under those locks, by the store's own clock (D128 to D131).
//! - The store assigns the revision: what it found, plus one (D107). Nothing is answered before it is durable.
//! - A fence survives deletion and is never reset; it is also the tombstone (D125, D228).
//! - `due_at` is the one index of what can be claimed: at that time, when nobody holds a lease.

pub(crate) mod check;
mod definitions;
mod error;
mod gates;
mod hints;
pub(crate) mod index;
pub mod memory;
pub mod migrate;
pub mod postgres;
mod rows;
pub mod sqlite;
pub mod upkeep;

use std::time::Duration;

use futures_util::future::BoxFuture;

pub use definitions::{Define, Defined, Definition, Origin};
pub use error::{Cause, Conflict, StoreError};
pub use gates::{Counts, GateFilter};
pub use hints::{Hint, Hints};

use crate::ids::{ActivityId, CorrelationId, DecisionId, Owner, Revision, RunId, WaitId};
use crate::payload::{Digest, Payload};
use crate::record::{
    ActivityRecord, CancelRequest, CheckpointRecord, DecisionRecord, DefinitionRef, EventRecord, Inbox,
    RunHead, Scope, Status, StepRecord, WaitRecord, WaitStatus, WaitingKind,
};
use crate::time::Timestamp;

/// What a store answers, later.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// A right to write to a run until it expires or is lost (D123). The incarnation is the authority; `owner` is for people and
/// `expires_at` is informational: the store's clock decides (D129).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    pub run: RunId,
    pub owner: Owner,
    /// New for every acquisition, also for the same owner (D124).
    pub incarnation: u64,
    pub expires_at: Timestamp,
}

/// Who asks for a lease, and for how long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseRequest {
    pub owner: Owner,
    /// Rounded up to whole milliseconds; at least one.
    pub ttl: Duration,
}

/// A run as the store has it.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    pub head: RunHead,
    pub state: Payload,
    /// The stored seal. The adapter has verified it; the runtime verifies it again (D114).
    pub seal: Digest,
    pub inbox: Inbox,
    /// A live lease, if there is one.
    pub lease: Option<Lease>,
    /// The store's clock.
    pub now: Timestamp,
}

/// A lease and the run it is for.
#[derive(Debug, Clone, PartialEq)]
pub struct Acquired {
    pub lease: Lease,
    /// `loaded.lease` is this lease.
    pub loaded: Loaded,
}

/// The first commit of a run: head, state, first checkpoint, events and, when asked, a lease and an idempotency key, all or
/// nothing (D25).
#[derive(Debug, Clone)]
pub struct Create {
    /// `revision` is not read: the store assigns `Revision::FIRST`.
    pub head: RunHead,
    pub state: Payload,
    pub events: Vec<EventRecord>,
    pub due_at: Option<Timestamp>,
    pub lease: Option<LeaseRequest>,
    pub idempotency: Option<IdempotencyKey>,
}

/// A caller's key for a creation (durable-api §1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// Whose keys these are.
    pub scope: String,
    pub key: String,
    /// Of method, path and body.
    pub request: Digest,
}

/// What became of a creation.
#[derive(Debug, Clone, PartialEq)]
pub enum Created {
    New {
        lease: Option<Lease>,
        now: Timestamp,
    },
    /// The same key with the same request made this run before; a concurrent twin waits for the first commit.
    Replayed {
        run: RunId,
    },
    /// The same key made this run with another request. Nothing is written.
    KeyConflict {
        run: RunId,
    },
    /// The run id is taken. Nothing is written.
    Exists,
}

impl IdempotencyKey {
    /// What a creation with this key comes to when the key has made `run` by another or the same `request`.
    pub(crate) fn answers(&self, request: &[u8], run: RunId) -> Created {
        if request == self.request {
            Created::Replayed { run }
        } else {
            Created::KeyConflict { run }
        }
    }
}

/// On what authority a commit writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authority {
    /// The holder of this lease, while it lives.
    Lease(Lease),
    /// Anybody, while nobody holds a live lease: deliveries, operators (D128).
    Idle,
}

/// What must still be true when a commit is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guard {
    pub revision: Revision,
    pub authority: Authority,
    /// When set, the inbox must not have changed since: for commits that park, arm, settle or end.
    pub signal: Option<u64>,
}

/// One transition of a run, whole (D110): the new head, a checkpoint of it, and the rows that changed.
#[derive(Debug, Clone)]
pub struct Commit {
    pub guard: Guard,
    /// As it will be, except `revision`, which the store assigns.
    pub head: RunHead,
    pub state: Payload,
    /// Written over a row of the same id.
    pub activities: Vec<ActivityRecord>,
    /// Written over a row of the same id.
    pub waits: Vec<WaitRecord>,
    pub steps: Vec<StepRecord>,
    pub decisions: Vec<DecisionRecord>,
    pub events: Vec<EventRecord>,
    pub due_at: Option<Timestamp>,
    /// Gives the lease back in the same commit. `Authority::Lease` only.
    pub release: bool,
}

impl Commit {
    /// Whether it settles a wait or ends the run. Then it grows the inbox's number by one, as a post does: of a timer and a
    /// delivery that read the same armed wait, one is written, and nobody cancels a run that has just ended.
    pub(crate) fn settles(&self) -> bool {
        self.head.status.is_terminal() || self.waits.iter().any(|wait| wait.status != WaitStatus::Armed)
    }
}

/// What a commit did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    pub revision: Revision,
    /// The inbox's present number: another than the last one seen means there is something to read. A commit that settles a
    /// wait or ends the run has grown it by one.
    pub signal: u64,
    pub now: Timestamp,
}

/// A change of the inbox, allowed while somebody else holds the lease. Grows `signal` by one; the head's revision stays.
#[derive(Debug, Clone)]
pub struct Post {
    pub run: RunId,
    /// The number the poster read; another one is a conflict.
    pub signal: u64,
    /// Set when the run is to be cancelled; the first request stays.
    pub cancel: Option<CancelRequest>,
    /// Gates settled by a delivery.
    pub waits: Vec<WaitRecord>,
    pub decisions: Vec<DecisionRecord>,
    /// Makes the run claimable at once. False for a delivery that changes nothing (unmatched, superseded).
    pub wake: bool,
}

/// What renewing did, lease by lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    Live { expires_at: Timestamp, signal: u64 },
    Lost,
}

/// What a claim found.
#[derive(Debug, Default)]
pub struct Claimed {
    pub runs: Vec<Acquired>,
    /// Runs found corrupt on the way and set aside, with the reason.
    pub quarantined: Vec<(RunId, String)>,
}

/// What a claim looks for.
#[derive(Debug, Clone)]
pub struct Claim {
    pub lease: LeaseRequest,
    /// `(kind, name)` of the definitions this worker can run; others are left alone. At least one.
    pub definitions: Vec<(String, String)>,
    /// Runs to pass over.
    pub except: Vec<RunId>,
    /// At most this many.
    pub limit: u32,
}

/// The journal of a run as a segment needs it: what belongs to the activation, and whatever is still open.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Journal {
    pub activities: Vec<ActivityRecord>,
    pub waits: Vec<WaitRecord>,
}

/// Filters of a list; all given ones must match. Order is `(created_at, id)`.
#[derive(Debug, Clone, Default)]
pub struct RunFilter {
    pub status: Option<Status>,
    /// `(kind, name)`.
    pub definition: Option<(String, String)>,
    pub parent: Option<RunId>,
    /// Who made the run, exactly.
    pub owner: Option<String>,
    pub waiting_kind: Option<WaitingKind>,
    pub due_before: Option<Timestamp>,
    pub after: Option<(Timestamp, RunId)>,
    /// From 1.
    pub limit: u32,
}

/// A row of a list. A corrupt run is named and does not hide the healthy ones (D231).
#[derive(Debug, Clone, PartialEq)]
pub enum Listed {
    Run {
        head: Box<RunHead>,
        inbox: Inbox,
    },
    Corrupt {
        run: RunId,
        /// Its place in the list.
        created_at: Timestamp,
        why: String,
    },
}

/// Work that is due or will be: found, not accepted (D160, D175).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Due {
    pub run: RunId,
    pub status: Status,
    pub waiting_kind: Option<WaitingKind>,
    pub due_at: Timestamp,
    /// Whether a live lease stands in the way.
    pub leased: bool,
}

/// What was repaired by `rebuild_index`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rebuilt {
    pub runs: u64,
    pub repaired: u64,
    pub quarantined: u64,
}

/// Storage of runs and their leases, in one coordination domain (D121).
pub trait Store: Send + Sync + 'static {
    /// `deleted` when the id has a tombstone; `busy` never.
    fn create(&self, create: Create) -> Answer<'_, Created>;

    /// A lease on this run. `busy` while a live lease exists, also for the same owner (D127); `not_found`, `deleted`;
    /// `corrupt` (and the run is set aside).
    fn acquire(&self, run: &RunId, request: LeaseRequest) -> Answer<'_, Acquired>;

    /// Leases on runs that are due and unheld, oldest first; runs of lost workers are among them. Runs that others are
    /// claiming at this moment are skipped, never waited for.
    fn claim(&self, claim: Claim) -> Answer<'_, Claimed>;

    /// One answer per lease, in the order asked. A lease that has expired is lost even when nobody took it.
    fn renew(&self, leases: Vec<Lease>, ttl: Duration) -> Answer<'_, Vec<Renewal>>;

    /// `lease_lost` when it is not live any more; the successor's is untouched.
    fn release(&self, lease: Lease) -> Answer<'_, ()>;

    /// `conflict`, `lease_lost`, `busy` (`Idle` while leased), `not_found`, `deleted`, `duplicate` (a decision or a second terminal
    /// event of a life), `unavailable` (nothing was written) or `unconfirmed` (it may have been).
    fn commit(&self, commit: Commit) -> Answer<'_, Committed>;

    /// The new signal. `conflict` when the inbox changed meanwhile; `duplicate` when a decision id is taken.
    fn post(&self, post: Post) -> Answer<'_, u64>;

    /// `not_found`, `deleted`, `corrupt`.
    fn load(&self, run: &RunId) -> Answer<'_, Loaded>;

    /// Activities and waits of this activation, and any other that is open or armed.
    fn journal(&self, run: &RunId, activation: u64) -> Answer<'_, Journal>;

    fn activity(&self, run: &RunId, id: &ActivityId) -> Answer<'_, Option<ActivityRecord>>;
    /// In order `(activation, id)`, after this id.
    fn activities(
        &self,
        run: &RunId,
        after: Option<ActivityId>,
        limit: u32,
    ) -> Answer<'_, Vec<ActivityRecord>>;

    fn wait(&self, run: &RunId, id: &WaitId) -> Answer<'_, Option<WaitRecord>>;
    /// In order `(armed_at, id)`; all of them: a run has few.
    fn waits(&self, run: &RunId) -> Answer<'_, Vec<WaitRecord>>;
    /// Armed waits for an event, over all runs, at most `limit`.
    fn armed(&self, correlation: &CorrelationId, limit: u32) -> Answer<'_, Vec<WaitRecord>>;
    /// Waits for an event, over all runs and whatever became of them, whose ledger has this id: where a delivery went that is
    /// sent once more. At most `limit`; a corrupt row hides nothing.
    fn addressed(
        &self,
        correlation: &CorrelationId,
        id: &DecisionId,
        limit: u32,
    ) -> Answer<'_, Vec<WaitRecord>>;
    /// Gates and waits of a kind over all runs, each with the definition of its run. What is corrupt, or of a run that is set
    /// aside, is left out and hides nothing; fewer than `limit` are all there are.
    fn gates(&self, filter: GateFilter) -> Answer<'_, Vec<(WaitRecord, DefinitionRef)>>;

    fn decision(&self, run: &RunId, scope: &Scope, id: &DecisionId) -> Answer<'_, Option<DecisionRecord>>;
    /// In order of `created_at`, then id.
    fn decisions(&self, run: &RunId, scope: &Scope) -> Answer<'_, Vec<DecisionRecord>>;

    /// Finished activations above `after`, in order.
    fn steps(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<StepRecord>>;
    /// Events above `after`, in order.
    fn events(&self, run: &RunId, after: u64, limit: u32) -> Answer<'_, Vec<EventRecord>>;

    /// Committed revisions below `before`, newest first, without state.
    fn history(&self, run: &RunId, before: Option<Revision>, limit: u32)
    -> Answer<'_, Vec<CheckpointRecord>>;
    /// Exactly this revision. `checkpoint_unavailable` when pruned or never written, `corrupt` when its seal does not hold.
    fn checkpoint(&self, run: &RunId, revision: Revision) -> Answer<'_, CheckpointRecord>;

    fn list(&self, filter: RunFilter) -> Answer<'_, Vec<Listed>>;
    /// Runs with `due_at` at or before `until`, in order `(due_at, run)`, after this one.
    fn due(&self, until: Timestamp, after: Option<(Timestamp, RunId)>, limit: u32) -> Answer<'_, Vec<Due>>;

    /// Served from indexes: what is over costs nothing.
    fn counts(&self) -> Answer<'_, Counts>;

    /// Makes this body the newest version of its name, unless it is that already. Of two at once with one digest, one is new.
    /// A withdrawn name is restored. `corrupt` for what is no definition; nothing is written then.
    fn define(&self, define: Define) -> Answer<'_, Defined>;
    /// This version, or the newest; also of a withdrawn name. `corrupt` when the body does not have its digest.
    fn definition(&self, kind: &str, name: &str, version: Option<u64>) -> Answer<'_, Option<Definition>>;
    /// The newest version of each name in the order of names, after this one; of withdrawn names too. What is corrupt is left
    /// out and hides nothing; fewer than `limit` are all there are.
    fn definitions(&self, kind: &str, after: Option<String>, limit: u32) -> Answer<'_, Vec<Definition>>;
    /// Versions above `after`, in order. What is corrupt is left out as above.
    fn versions(&self, kind: &str, name: &str, after: u64, limit: u32) -> Answer<'_, Vec<Definition>>;
    /// Withdraws a name; its versions stay. False when there is no such name, or it is withdrawn.
    fn withdraw(&self, kind: &str, name: &str) -> Answer<'_, bool>;

    /// What this key was used for before: `Replayed` or `KeyConflict`, of a run that may be over or gone; `None` for a key that is
    /// not known.
    fn keyed(&self, key: &IdempotencyKey) -> Answer<'_, Option<Created>>;

    /// Drops idempotency keys that are older than `before` and whose run is over or gone, the oldest first, at most `limit`
    /// (durable-api §1). How many were dropped.
    fn forget_keys(&self, before: Timestamp, limit: u32) -> Answer<'_, u64>;

    /// Keeps the newest `keep` checkpoints (from 1) with their state; the others stay listed as pruned. How many were pruned.
    fn prune(&self, run: &RunId, keep: u32) -> Answer<'_, u64>;
    /// Removes a run that is over and unheld; its fence stays. `busy` while a live lease exists, `not_idle` when it is not over.
    fn delete_if_idle(&self, run: &RunId) -> Answer<'_, ()>;

    /// Sets a run aside; it is listed as corrupt and not claimed until `rebuild_index` finds it whole.
    fn quarantine(&self, run: &RunId, why: &str) -> Answer<'_, ()>;
    /// Derives every index column anew from sealed heads and re-examines what was set aside (D231).
    fn rebuild_index(&self) -> Answer<'_, Rebuilt>;

    /// The store's clock.
    fn now(&self) -> Answer<'_, Timestamp>;

    /// What may be worth looking at now. Only a hint: everything is also found by polling.
    fn hints(&self) -> &Hints;
}
