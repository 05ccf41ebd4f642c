//! The calls of a run to the world outside, as people look at them: with the name of each tool, which only the turn before it
//! says, and with what operators decided.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use iop_durable::ids::{ActivityId, Key, NodeName, RunId};
use iop_durable::patterns::REASON;
use iop_durable::record::{ActivityRecord, ActivityState, Scope};
use iop_durable::store::Store;
use iop_durable::token::ResumeToken;

use super::merged::{PAGE_BYTES, Pace};
use super::problem::{Code, Problem};
use super::view::{ActivityObject, Called, is_shown};
use super::{Runs, Seen};
use crate::agents::journal::{CallEvent, MODEL, TOOL_COMPLETED, call_of, turn_of};
use crate::agents::turn::{ToolCall, TurnAnswer};
use crate::http::auth::Caller;
use crate::metrics::ToolResult;

/// The calls that the turns of one run ask for; a turn is read once.
pub(crate) struct Tools<'a> {
    store: &'a Arc<dyn Store>,
    turns: HashMap<u64, Vec<Called>>,
}

impl<'a> Tools<'a> {
    pub(crate) fn new(store: &'a Arc<dyn Store>) -> Self {
        Self {
            store,
            turns: HashMap::new(),
        }
    }

    /// The call that an activity is of; `None` for what is no call of a turn.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn of(&mut self, record: &ActivityRecord) -> Result<Option<Called>, Problem> {
        let Some((_, ordinal)) = call_of(record.key.as_str()) else {
            return Ok(None);
        };
        if !self.turns.contains_key(&record.activation) {
            let calls = self.turn_before(&record.run, record.activation).await?;
            self.turns.insert(record.activation, calls);
        }
        let calls = self.turns.get(&record.activation);
        Ok(calls.and_then(|calls| calls.get(ordinal)).cloned())
    }

    async fn turn_before(&self, run: &RunId, activation: u64) -> Result<Vec<Called>, Problem> {
        let (Ok(node), Ok(key)) = (NodeName::new(REASON), Key::new(MODEL)) else {
            return Ok(Vec::new());
        };
        let turn = ActivityId::derive(run, &node, activation.saturating_sub(1), &key);
        let turn = self.store.activity(run, &turn).await?;
        let output = turn.and_then(|turn| turn.output);
        let answer = output.and_then(|output| serde_json::from_slice::<TurnAnswer>(output.bytes()).ok());
        let calls = answer.map_or_else(Vec::new, |answer| answer.tool_calls);
        let called = |(ordinal, call): (usize, ToolCall)| Called {
            id: call.id,
            tool: call.name,
            ordinal,
        };
        Ok(calls.into_iter().enumerate().map(called).collect())
    }
}

impl Runs {
    /// The calls of a run, in order: at most `limit` behind this one, fewer when they are long, and the last of them when there are
    /// more.
    ///
    /// # Errors
    /// `run_not_found`, `run_deleted`; `invalid_request` at `after`; the store's.
    pub(crate) async fn activities(
        &self,
        caller: &Caller,
        run: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<(Vec<ActivityObject>, Option<String>), Problem> {
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let (store, run) = (&engine.store, &loaded.head.id);
        let mut after = match after {
            None => None,
            Some(text) => {
                let unknown =
                    || Problem::invalid("after", "after must be the next_after of the page before.");
                let id = ActivityId::new(text).map_err(|_| unknown())?;
                Some(store.activity(run, &id).await?.ok_or_else(unknown)?.id)
            }
        };
        let (mut records, mut told, mut pace) = (Vec::new(), 0, Pace::new());
        let more = 'read: loop {
            let piece = pace.rows();
            let page = store.activities(run, after, piece).await?;
            let full = page.len() as u64 >= u64::from(piece);
            pace.after(page.len(), page.iter().map(bytes).sum());
            after = page.last().map(|record| record.id.clone());
            for record in page.into_iter().filter(is_shown) {
                told += bytes(&record);
                let over = records.len() as u64 >= u64::from(limit) || told > PAGE_BYTES;
                if over && !records.is_empty() {
                    break 'read true;
                }
                records.push(record);
            }
            if !full {
                break false;
            }
        };
        let decisions = store.decisions(run, &Scope::Operator).await?;
        let mut tools = Tools::new(store);
        let mut shown = Vec::with_capacity(records.len());
        for record in &records {
            let called = tools.of(record).await?;
            shown.push(ActivityObject::of(record, called, &decisions));
        }
        let last = records
            .last()
            .filter(|_| more)
            .map(|record| record.id.to_string());
        Ok((shown, last))
    }

    /// One call of a run, and the run's token.
    ///
    /// # Errors
    /// `run_not_found`, `run_deleted`, `activity_not_found`; the store's.
    pub(crate) async fn activity(
        &self,
        caller: &Caller,
        run: &str,
        activity: &str,
    ) -> Result<(ActivityObject, ResumeToken), Problem> {
        let Seen { engine, loaded } = self.see(caller, run).await?;
        let (store, run) = (&engine.store, &loaded.head.id);
        let record = call(store, run, activity).await?;
        let decisions = store.decisions(run, &Scope::Operator).await?;
        let called = Tools::new(store).of(&record).await?;
        let object = ActivityObject::of(&record, called, &decisions);
        Ok((object, loaded.head.token()))
    }
}

/// The event that tells of the end of a call which was not known until now; `None` while it still is not.
pub(crate) fn ended(
    called: Option<Called>,
) -> impl Fn(&ActivityRecord) -> Option<(Cow<'static, str>, Bytes)> {
    move |record| {
        let called = called.as_ref()?;
        let result = match record.state {
            ActivityState::Completed => ToolResult::Ok,
            ActivityState::Failed => ToolResult::Error,
            ActivityState::Prepared | ActivityState::Running | ActivityState::Unknown => return None,
        };
        let event = CallEvent {
            turn: turn_of(record.activation),
            tool: called.tool.clone(),
            call_id: called.id.clone(),
            ordinal: called.ordinal,
        };
        let attempt = record.attempts.last().map(|attempt| attempt.n);
        let data = event.ended(attempt, result, record.origin?);
        Some((TOOL_COMPLETED.into(), Bytes::from(data.to_string())))
    }
}

/// What is long in a call.
fn bytes(record: &ActivityRecord) -> usize {
    let output = record.output.as_ref();
    record.input.bytes().len() + output.map_or(0, |output| output.bytes().len())
}

/// A call that people may look at and decide about.
///
/// # Errors
/// `activity_not_found`; the store's.
pub(crate) async fn call(store: &Arc<dyn Store>, run: &RunId, id: &str) -> Result<ActivityRecord, Problem> {
    let not_found =
        || Problem::new(Code::ActivityNotFound, "This run has no such activity.").of(run.as_str());
    let id = ActivityId::new(id).map_err(|_| not_found())?;
    let record = store.activity(run, &id).await?;
    record.filter(is_shown).ok_or_else(not_found)
}
