//! `If-Match` where it is a choice (durable-api §1): what is asked for is asked of the run at this revision and of no other.

use http::HeaderMap;
use http::header::IF_MATCH;
use iop_durable::ids::{DecisionId, WaitId};
use iop_durable::record::Scope;
use iop_durable::runner::RunError;

use crate::agents::journal::wait_of_approval;
use crate::http::auth::Caller;
use crate::runs::problem::Problem;
use crate::runs::steer::resume::token;
use crate::runs::{Runs, Seen};

/// A word to a run that is answered the same again whatever the run's revision is by then.
pub(super) enum Said<'a> {
    /// A decision on an approval, by their ids.
    Decision(&'a str, &'a str),
    /// An answer or a delivery, by the ids of its wait and its own.
    Delivery(&'a str, &'a str),
    Cancel(&'a str),
    /// Without an id.
    Nothing,
}

impl Said<'_> {
    /// Where it is recorded; `None` for what cannot be: that is told by who looks it up.
    fn address(&self) -> Option<(Scope, DecisionId)> {
        let (scope, id) = match *self {
            Self::Decision(approval, id) => (Scope::Wait(wait_of_approval(approval)?), id),
            Self::Delivery(wait, id) => (Scope::Wait(WaitId::new(wait).ok()?), id),
            Self::Cancel(id) => (Scope::Cancel, id),
            Self::Nothing => return None,
        };
        Some((scope, DecisionId::new(id).ok()?))
    }
}

/// Holds a request against the revision that it names, if it names one.
///
/// # Errors
/// `stale_token` with the current token; `invalid_request` for what is no ETag of a run; those of `Runs::see`; the store's.
pub(super) async fn check(
    runs: &Runs,
    caller: &Caller,
    run: &str,
    headers: &HeaderMap,
    said: Said<'_>,
) -> Result<(), Problem> {
    let Some(value) = headers.get(IF_MATCH) else {
        return Ok(());
    };
    let Seen { engine, loaded } = runs.see(caller, run).await?;
    let head = &loaded.head;
    let of = |problem: Problem| problem.of(head.id.as_str());
    let asked = token(&head.id, None, Some(value)).map_err(of)?;
    if asked.is_none_or(|asked| asked.revision == head.revision) {
        return Ok(());
    }
    if let Some((scope, id)) = said.address()
        && engine.store.decision(&head.id, &scope, &id).await?.is_some()
    {
        return Ok(());
    }
    let current = head.token();
    Err(of(RunError::StaleToken { current }.into()))
}
