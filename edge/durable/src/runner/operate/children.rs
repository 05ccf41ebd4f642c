//! The runs that a run started, when it is cancelled or runs out of time (S82): each that is not over is asked to end before the
//! end of its parent is committed. A host that dies in between leaves a parent that whoever takes it over ends in the same way;
//! asking twice is asking once.

use super::Operator;
use super::cancel::Asked;
use crate::ids::{DecisionId, RunId};
use crate::record::RunHead;
use crate::store::{Listed, Loaded, RunFilter, StoreError};

/// The id of the request. A run has one parent.
const ID: &str = "parent_cancelled";
const REASON: &str = "The run that started it was cancelled.";
const PAGE: u32 = 200;

impl Operator {
    /// Asks the open runs that this one started to end, and those that they started. Those that nobody works on are ended here;
    /// an unknown effect keeps its run as it keeps every cancelled one.
    ///
    /// # Errors
    /// The store's. What was asked stays asked.
    pub(crate) async fn cancel_children(&self, run: &RunId, by: Option<&str>) -> Result<(), StoreError> {
        let mut parents = vec![run.clone()];
        let mut asked = Vec::new();
        while let Some(parent) = parents.pop() {
            for child in self.open_children(&parent).await? {
                if self.ask_child(&child, by).await? {
                    asked.push(child.clone());
                }
                parents.push(child);
            }
        }
        // The last ones first: nobody is woken for an end that does not matter to it any more.
        for run in asked.iter().rev() {
            if let Err(error) = self.finish_cancelled(run).await {
                tracing::debug!(code = error.code(), "a child is left to whoever works on it");
            }
        }
        Ok(())
    }

    /// Asks a run to end whose parent is cancelled. False: there is nothing to be ended.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn ask_child(&self, run: &RunId, by: Option<&str>) -> Result<bool, StoreError> {
        let id = DecisionId::new(ID).map_err(|e| StoreError::corrupt(e.to_string()))?;
        match self.ask(run, &id, REASON, by).await {
            Ok(Asked::Now | Asked::Before(_)) => Ok(true),
            // Somebody took the id for a request of their own.
            Ok(Asked::Otherwise) => Ok(true),
            Ok(Asked::Over(_)) => Ok(false),
            // It does not keep its parent from its end.
            Err(StoreError::NotFound | StoreError::Deleted | StoreError::Corrupt { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn open_children(&self, parent: &RunId) -> Result<Vec<RunId>, StoreError> {
        let mut filter = RunFilter {
            parent: Some(parent.clone()),
            limit: PAGE,
            ..RunFilter::default()
        };
        let mut open = Vec::new();
        loop {
            let page = self.store.list(filter.clone()).await?;
            let full = page.len() as u64 >= u64::from(PAGE);
            for listed in page {
                filter.after = Some(match listed {
                    Listed::Run { head, .. } => {
                        let place = (head.created_at, head.id.clone());
                        if !head.status.is_terminal() {
                            open.push(head.id);
                        }
                        place
                    }
                    Listed::Corrupt { run, created_at, .. } => (created_at, run),
                });
            }
            if !full {
                return Ok(open);
            }
        }
    }
}

/// Whether what a parent starts from here on is not wanted any more: it is cancelled, or about to be.
pub(crate) fn is_given_up(parent: &Loaded) -> bool {
    let RunHead { status, deadline, .. } = &parent.head;
    let late = deadline.is_some_and(|deadline| deadline <= parent.now);
    *status == crate::record::Status::Cancelled
        || !status.is_terminal() && (parent.inbox.cancel.is_some() || late)
}
