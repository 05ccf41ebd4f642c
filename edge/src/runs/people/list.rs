//! Approvals over all runs: both engines as one list.

use iop_durable::ids::{RunId, WaitId};
use iop_durable::record::{DefinitionRef, Scope, WaitRecord, WaitingKind};
use iop_durable::store::GateFilter;
use iop_durable::time::Timestamp;

use crate::http::auth::Caller;
use crate::runs::catalog::AGENT;
use crate::runs::gates;
use crate::runs::merged::{Merged, PAGE_BYTES, Rows};
use crate::runs::problem::Problem;
use crate::runs::view::ApprovalObject;
use crate::runs::{Engine, Runs, Seen, sees};

/// Gates that one page looks at, once it has an approval.
const LOOKED_AT: u32 = 2_000;
/// Gates that one page looks at in any case: only behind that many without one that fits is a page empty and not the last.
const FRUITLESS: u32 = 50_000;

/// A place in the list: when the gate was armed, its run, itself.
pub(crate) type Place = (Timestamp, RunId, WaitId);

fn place(wait: &WaitRecord) -> Place {
    (wait.armed_at, wait.run.clone(), wait.id.clone())
}

/// Which approvals are listed.
pub(crate) struct Wanted<'a> {
    pub(crate) agent: Option<&'a str>,
    /// Only what is armed is read.
    pub(crate) armed: bool,
    /// What is read and does not fit is passed over.
    pub(crate) fits: &'a (dyn Fn(&WaitRecord, Timestamp) -> bool + Sync),
}

/// An approval of a list.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found {
    pub(crate) wait: WaitRecord,
    pub(crate) definition: DefinitionRef,
    pub(crate) durable: bool,
}

/// Gates as the filter says.
struct Gates(GateFilter);

impl Rows for Gates {
    type Row = (WaitRecord, DefinitionRef);
    type Place = Place;

    fn place((wait, _): &Self::Row) -> Place {
        place(wait)
    }

    fn bytes((wait, _): &Self::Row) -> usize {
        bytes(wait)
    }

    async fn read(
        &self,
        engine: &Engine,
        after: Option<Place>,
        limit: u32,
    ) -> Result<Vec<Self::Row>, Problem> {
        let filter = GateFilter {
            after,
            limit,
            ..self.0.clone()
        };
        Ok(engine.store.gates(filter).await?)
    }
}

/// What is long in a gate: the call, and what was decided of it.
fn bytes(wait: &WaitRecord) -> usize {
    let settled = wait.settled.as_ref().and_then(|settled| settled.payload.as_ref());
    wait.subject.bytes().len() + settled.map_or(0, |payload| payload.bytes().len())
}

impl Runs {
    /// Approvals over all runs that the caller may see, in order of their arming: at most `limit`, and where the next page begins
    /// when there may be more. A page may be short of `limit` when much is passed over or what it tells is long.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn approvals(
        &self,
        caller: &Caller,
        wanted: &Wanted<'_>,
        after: Option<Place>,
        limit: u32,
    ) -> Result<(Vec<Found>, Option<Place>), Problem> {
        let all = sees(caller, None);
        let filter = GateFilter {
            kind: WaitingKind::Approval,
            armed: wanted.armed,
            definition: wanted.agent.map(|agent| (AGENT.to_owned(), agent.to_owned())),
            owner: if all {
                None
            } else {
                caller.name().map(|name| name.to_string())
            },
            after: None,
            limit,
        };
        let mut gates = Merged::new(self, Gates(filter), after.as_ref());
        let now = self.engine(true).store.now().await?;
        let mut found: Vec<Found> = Vec::new();
        let (mut last, mut told, mut looked_at) = (None, 0, 0);
        while looked_at < if found.is_empty() { FRUITLESS } else { LOOKED_AT } {
            let Some((engine, (wait, definition))) = gates.next().await? else {
                return Ok((found, None));
            };
            looked_at += 1;
            let here = place(&wait);
            if (wanted.fits)(&wait, now) {
                told += bytes(&wait);
                let full = found.len() as u64 >= u64::from(limit) || told > PAGE_BYTES;
                if full && !found.is_empty() {
                    break;
                }
                found.push(Found {
                    wait,
                    definition,
                    durable: engine.durable,
                });
            }
            last = Some(here);
        }
        Ok((found, last))
    }

    /// An approval as people see it; `None` for a gate whose call cannot be read.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn shown_approval(
        &self,
        engine: &Engine,
        wait: &WaitRecord,
        agent: &str,
    ) -> Result<Option<ApprovalObject>, Problem> {
        let by = match wait.settled.as_ref().and_then(|settled| settled.by.as_ref()) {
            Some(id) => {
                let scope = Scope::Wait(wait.id.clone());
                let decision = engine.store.decision(&wait.run, &scope, id).await?;
                decision.and_then(|decision| gates::sender(&decision))
            }
            None => None,
        };
        let now = engine.store.now().await?;
        Ok(ApprovalObject::of(wait, agent, by, now))
    }

    /// The approvals of a run behind a place, in order of their arming: at most `limit`, and where the next page begins when there
    /// are more.
    ///
    /// # Errors
    /// `run_not_found`, `run_deleted`; the store's.
    pub(crate) async fn approvals_of(
        &self,
        caller: &Caller,
        run: &str,
        after: Option<&(Timestamp, WaitId)>,
        limit: u32,
    ) -> Result<(Vec<ApprovalObject>, Option<(Timestamp, WaitId)>), Problem> {
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let waits = engine.store.waits(&loaded.head.id).await?;
        let (waits, next) = part(waits, |wait| wait.kind == WaitingKind::Approval, after, limit);
        let mut shown = Vec::with_capacity(waits.len());
        for wait in waits {
            shown.extend(
                self.shown_approval(engine, &wait, &loaded.head.definition.name)
                    .await?,
            );
        }
        Ok((shown, next))
    }
}

/// The part of a run's waits that a page has: those that belong to the list, behind a place, at most `limit`, and no more than may be
/// told at once. And the place of its last one when there are more.
pub(crate) fn part(
    mut waits: Vec<WaitRecord>,
    belongs: impl Fn(&WaitRecord) -> bool,
    after: Option<&(Timestamp, WaitId)>,
    limit: u32,
) -> (Vec<WaitRecord>, Option<(Timestamp, WaitId)>) {
    let here = |wait: &WaitRecord| (wait.armed_at, wait.id.clone());
    waits.retain(|wait| belongs(wait) && after.is_none_or(|after| here(wait) > *after));
    let mut told = 0;
    let fit = waits.iter().take_while(|wait| {
        told += bytes(wait);
        told <= PAGE_BYTES
    });
    let end = fit.count().max(1).min(limit as usize);
    let more = waits.len() > end;
    waits.truncate(end);
    let last = waits.last().filter(|_| more).map(here);
    (waits, last)
}
