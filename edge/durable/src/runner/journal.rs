//! A run as somebody holds it: everything stored is verified again before any code of the host sees it, whatever store it came
//! from (D114, D145).

use std::sync::Arc;

use tokio::time::Instant;

use crate::envelope;
use crate::ids::{Revision, RunId};
use crate::machine::{activity, wait};
use crate::record::WaitStatus;
use crate::runner::RunError;
use crate::runner::keeper::{Held, Keeper};
use crate::runner::ledger::{Entry, Ledger};
use crate::store::{Acquired, Loaded, Store, StoreError};
use crate::time::Timestamp;

fn corrupt(what: &str) -> RunError {
    RunError::Corrupt(what.to_owned())
}

/// Takes a lease into care, when the run that came with it is the one it is for, as it was sealed.
///
/// # Errors
/// `run_corrupt`, the lease is given back; `lease_lost`; the store's.
pub(crate) async fn take(
    keeper: &Arc<Keeper>,
    acquired: &Acquired,
    asked: Instant,
) -> Result<Held, RunError> {
    let held = keeper.hold(acquired, asked);
    let (lease, loaded) = (&acquired.lease, &acquired.loaded);
    match verify(&lease.run, loaded) {
        Ok(()) => Ok(held),
        Err(error) => {
            let error = doubted(keeper.store(), &lease.run, loaded.head.revision, error).await;
            keeper.release(&held).await;
            Err(error)
        }
    }
}

/// A head and its journal are two looks. What is corrupt between them may have been written by whoever took the run over since:
/// a worker that was stalled must not set a healthy run aside. Corrupt is what is so while the run stands where it stood; it is
/// set aside then.
pub(crate) async fn doubted(
    store: &Arc<dyn Store>,
    run: &RunId,
    revision: Revision,
    error: RunError,
) -> RunError {
    let RunError::Corrupt(why) = &error else {
        return error;
    };
    match store.load(run).await {
        Ok(found) if found.head.revision != revision => return RunError::LeaseLost,
        Ok(_) | Err(StoreError::Corrupt { .. }) => {}
        Err(other) => return other.into(),
    }
    if let Err(error) = store.quarantine(run, why).await {
        tracing::warn!(%error, "a corrupt run was not set aside");
    }
    error
}

fn verify(run: &RunId, loaded: &Loaded) -> Result<(), RunError> {
    if loaded.head.id != *run || loaded.head.state_digest != *loaded.state.digest() {
        return Err(corrupt("the store answered with another run"));
    }
    if envelope::seal_of(&loaded.head, &loaded.state)? != loaded.seal {
        return Err(corrupt("the seal does not hold"));
    }
    Ok(())
}

/// The journal of the current activation. Attempts of a lost worker are marked in it; the next commit stores that.
///
/// # Errors
/// `run_corrupt`; the store's.
pub(crate) async fn open(
    store: &Arc<dyn Store>,
    loaded: &Loaded,
    entry: Entry,
    now: Timestamp,
) -> Result<Ledger, RunError> {
    let head = &loaded.head;
    let mut journal = store.journal(&head.id, head.activation).await?;
    activity::validate(
        &journal.activities,
        &head.id,
        head.activation,
        head.open_activities,
    )
    .map_err(RunError::Corrupt)?;
    // Gates may have been settled by deliveries since the head was written; none can have been armed.
    let armed = journal.waits.iter().filter(|w| w.status == WaitStatus::Armed);
    let armed = u32::try_from(armed.count()).unwrap_or(u32::MAX);
    if armed > head.armed_waits {
        return Err(corrupt("more waits are armed than the head says"));
    }
    wait::validate(&journal.waits, &head.id, head.activation, armed).map_err(RunError::Corrupt)?;
    let mut recovered = false;
    for record in &mut journal.activities {
        recovered |= activity::recover(record, entry.incarnation, now);
    }
    let ledger = Ledger::new(entry, journal.activities, journal.waits, head.budgets.clone());
    if recovered {
        ledger.touch_recovered();
    }
    Ok(ledger)
}
