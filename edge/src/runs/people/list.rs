//! Approvals over all runs: both engines as one list.

use std::collections::VecDeque;

use iop_durable::ids::{RunId, WaitId};
use iop_durable::record::{DefinitionRef, Scope, WaitRecord, WaitingKind};
use iop_durable::store::GateFilter;
use iop_durable::time::Timestamp;

use crate::http::auth::Caller;
use crate::runs::catalog::AGENT;
use crate::runs::gates;
use crate::runs::problem::Problem;
use crate::runs::view::ApprovalObject;
use crate::runs::{Engine, Runs, Seen, sees};

/// Gates that one page of a list looks at.
const LOOKED_AT: u32 = 2_000;

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

/// Gates of one engine, page by page.
struct Gates<'a> {
    engine: &'a Engine,
    filter: GateFilter,
    page: VecDeque<(WaitRecord, DefinitionRef)>,
    done: bool,
}

impl Gates<'_> {
    /// The place of the next one.
    async fn peek(&mut self) -> Result<Option<Place>, Problem> {
        if self.page.is_empty() && !self.done {
            let page = self.engine.store.gates(self.filter.clone()).await?;
            self.done = (page.len() as u64) < u64::from(self.filter.limit);
            if let Some((last, _)) = page.last() {
                self.filter.after = Some(place(last));
            }
            self.page = page.into();
        }
        Ok(self.page.front().map(|(wait, _)| place(wait)))
    }
}

impl Runs {
    /// Approvals over all runs that the caller may see, in order of their arming: at most `limit`, and where the next page begins
    /// when there may be more. A page may be short of `limit` when much is passed over.
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
            after,
            limit: limit.saturating_add(1),
        };
        let mut gates = self.engines().map(|engine| Gates {
            engine,
            filter: filter.clone(),
            page: VecDeque::new(),
            done: false,
        });
        let now = self.engine(true).store.now().await?;
        let mut found: Vec<Found> = Vec::new();
        let mut last = None;
        for _ in 0..LOOKED_AT {
            let [first, second] = &mut gates;
            let next = match (first.peek().await?, second.peek().await?) {
                (None, None) => return Ok((found, None)),
                (Some(a), Some(b)) if b < a => second,
                (Some(_), _) => first,
                (None, Some(_)) => second,
            };
            let Some((wait, definition)) = next.page.pop_front() else {
                break;
            };
            if (wanted.fits)(&wait, now) {
                if found.len() as u64 >= u64::from(limit) {
                    return Ok((found, last));
                }
                last = Some(place(&wait));
                found.push(Found {
                    wait,
                    definition,
                    durable: next.engine.durable,
                });
            } else {
                last = Some(place(&wait));
            }
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

    /// The approvals of a run, in order of their arming.
    ///
    /// # Errors
    /// `run_not_found`, `run_deleted`; the store's.
    pub(crate) async fn approvals_of(
        &self,
        caller: &Caller,
        run: &str,
    ) -> Result<Vec<ApprovalObject>, Problem> {
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let mut shown = Vec::new();
        for wait in engine.store.waits(&loaded.head.id).await? {
            if wait.kind == WaitingKind::Approval {
                shown.extend(
                    self.shown_approval(engine, &wait, &loaded.head.definition.name)
                        .await?,
                );
            }
        }
        Ok(shown)
    }
}
