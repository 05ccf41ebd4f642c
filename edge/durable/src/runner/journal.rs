//! A run as somebody holds it: everything stored is verified again before any code of the host sees it, whatever store it came
//! from (D114, D145).

use std::sync::Arc;

use crate::envelope;
use crate::ids::RunId;
use crate::machine::{activity, wait};
use crate::record::WaitStatus;
use crate::runner::RunError;
use crate::runner::ledger::{Entry, Ledger};
use crate::store::{Loaded, Store};
use crate::time::Timestamp;

fn corrupt(what: &str) -> RunError {
    RunError::Corrupt(what.to_owned())
}

/// Whether this is the run that was asked for, as it was sealed.
///
/// # Errors
/// `run_corrupt`.
pub(crate) fn verify(run: &RunId, loaded: &Loaded) -> Result<(), RunError> {
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
