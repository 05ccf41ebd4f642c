//! What can be written in batches: creations, transitions, posts.

use sqlx::postgres::PgRow;

use super::sql::Sql;
use super::verdict::{self, Refusal, Verdict};
use super::work::{Creation, Posting, Rows, Transition};
use super::{commit, create};
use crate::ids::RunId;
use crate::store::rows::Cells;
use crate::store::{Committed, Created, Lease, LeaseRequest, StoreError};
use crate::time::Timestamp;

/// A member that was dealt with.
pub(super) struct Done<T> {
    pub(super) answer: T,
    /// Whether the run can be claimed at once by anybody.
    pub(super) claimable: bool,
}

/// What became of each member.
pub(super) type Answers<T> = Vec<Result<Done<T>, Refusal>>;

/// A kind of write.
pub(super) trait Batched: Sized + Send + Sync {
    type Answer: Send;
    /// Whether it changes the inbox, so that the run's holder is to look at it.
    const POSTS: bool;

    /// One statement for all; `members` are in order of the run ids.
    fn statement(members: &[(&RunId, &Self)]) -> Sql;

    /// What the statement says, in the order of the members.
    ///
    /// # Errors
    /// When the answer cannot be read.
    fn answers(members: &[(&RunId, &Self)], found: &[PgRow]) -> Result<Answers<Self::Answer>, StoreError>;

    /// What to ask when a unique key was taken; `None`: nothing, it means what it says.
    fn who_took(&self, _: &RunId) -> Option<Sql> {
        None
    }

    /// What the rows of `who_took` make of it; `None`: what it says.
    ///
    /// # Errors
    /// What the caller is told.
    fn taken(&self, _: &[PgRow]) -> Result<Option<Self::Answer>, StoreError> {
        Ok(None)
    }

    fn rows(&mut self) -> &mut Rows;

    /// Sends along what was said to be stored.
    fn carry(&mut self) {
        let rows = self.rows();
        rows.blobs.append(&mut rows.known);
    }
}

/// The verdicts in the order of the members.
fn verdicts(members: usize, found: &[PgRow]) -> Result<Vec<Verdict>, StoreError> {
    let mut verdicts = found.iter().map(Verdict::read).collect::<Result<Vec<_>, _>>()?;
    verdicts.sort_by_key(|verdict| verdict.place);
    if verdicts.len() == members {
        Ok(verdicts)
    } else {
        Err(StoreError::corrupt("the statement did not answer for every run"))
    }
}

impl Batched for Transition {
    type Answer = Committed;
    const POSTS: bool = false;

    fn statement(members: &[(&RunId, &Self)]) -> Sql {
        commit::transitions(members)
    }

    fn answers(members: &[(&RunId, &Self)], found: &[PgRow]) -> Result<Answers<Committed>, StoreError> {
        let verdicts = verdicts(members.len(), found)?;
        Ok(members
            .iter()
            .zip(verdicts)
            .map(|((_, work), verdict)| {
                let answer = verdict::committed(&work.guard, work.grows, &verdict)?;
                Ok(Done {
                    answer,
                    claimable: verdict.claimable,
                })
            })
            .collect())
    }

    fn rows(&mut self) -> &mut Rows {
        &mut self.rows
    }
}

impl Batched for Posting {
    type Answer = u64;
    const POSTS: bool = true;

    fn statement(members: &[(&RunId, &Self)]) -> Sql {
        commit::posts(members)
    }

    fn answers(members: &[(&RunId, &Self)], found: &[PgRow]) -> Result<Answers<u64>, StoreError> {
        let verdicts = verdicts(members.len(), found)?;
        let done = |verdict: Verdict| {
            Ok(Done {
                answer: verdict::posted(&verdict)?,
                claimable: verdict.claimable,
            })
        };
        Ok(verdicts.into_iter().map(done).collect())
    }

    fn rows(&mut self) -> &mut Rows {
        &mut self.rows
    }
}

impl Batched for Creation {
    type Answer = Created;
    const POSTS: bool = false;

    fn statement(members: &[(&RunId, &Self)]) -> Sql {
        create::creations(members)
    }

    fn answers(members: &[(&RunId, &Self)], found: &[PgRow]) -> Result<Answers<Created>, StoreError> {
        let now = found
            .first()
            .ok_or_else(|| StoreError::corrupt("the statement did not answer"))?;
        let now = Cells::new(now).time()?;
        let done = |(run, work): &(&RunId, &Self)| {
            Ok(Done {
                answer: Created::New {
                    lease: work.lease.as_ref().map(|request| first_lease(run, request, now)),
                    now,
                },
                claimable: work.lease.is_none() && work.head.due_at.is_some_and(|due| due <= now.as_millis()),
            })
        };
        Ok(members.iter().map(done).collect())
    }

    fn who_took(&self, run: &RunId) -> Option<Sql> {
        let mut sql = Sql::new("SELECT EXISTS (SELECT 1 FROM runs WHERE run_id = ");
        sql.bind(run.as_str());
        sql.push("), EXISTS (SELECT 1 FROM run_fences WHERE run_id = ")
            .bind(run.as_str());
        sql.push("), k.request, k.run_id FROM (SELECT) AS one LEFT JOIN idempotency_keys k ON k.scope = ");
        sql.bind(self.key.as_ref().map(|key| &*key.scope))
            .push(" AND k.key = ");
        sql.bind(self.key.as_ref().map(|key| &*key.key));
        Some(sql)
    }

    /// The key first: whoever repeats a creation has made the run under the same id or under another.
    fn taken(&self, found: &[PgRow]) -> Result<Option<Created>, StoreError> {
        let Some(row) = found.first() else {
            return Ok(None);
        };
        let mut cells = Cells::new(row);
        let (exists, existed): (bool, bool) = (cells.get()?, cells.get()?);
        let (request, made): (Option<&[u8]>, Option<&str>) = (cells.get()?, cells.get()?);
        if let (Some(key), Some(request), Some(made)) = (&self.key, request, made) {
            let run = RunId::new(made).map_err(|error| StoreError::corrupt(error.to_string()))?;
            return Ok(Some(key.answers(request, run)));
        }
        match (exists, existed) {
            (true, _) => Ok(Some(Created::Exists)),
            (false, true) => Err(StoreError::Deleted),
            (false, false) => Ok(None),
        }
    }

    fn rows(&mut self) -> &mut Rows {
        &mut self.rows
    }
}

/// The first lease of a run, as the statement wrote it.
fn first_lease(run: &RunId, request: &LeaseRequest, now: Timestamp) -> Lease {
    Lease {
        run: run.clone(),
        owner: request.owner.clone(),
        incarnation: 1,
        expires_at: now.plus(request.ttl.max(std::time::Duration::from_millis(1))),
    }
}
