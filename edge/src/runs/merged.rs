//! Lists over both engines, read piece by piece: rows may be as long as an outcome, and nobody holds a page of those.

use std::collections::VecDeque;

use super::problem::Problem;
use super::{Engine, Runs};

/// Bytes that one read of rows is to have, as far as the rows before tell.
const PIECE: usize = 4 << 20;
/// Rows of the first read.
const FIRST: u32 = 8;
/// Rows of a read at most.
const MOST: u32 = 200;

/// Bytes of rows in one page, beyond which no more are told.
pub(crate) const PAGE_BYTES: usize = 8 << 20;

/// How many rows are read at once: few at first, then more as long as they are short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace(u32);

impl Pace {
    pub(crate) const fn new() -> Self {
        Self(FIRST)
    }

    pub(crate) const fn rows(self) -> u32 {
        self.0
    }

    /// After a read of so many rows with so many bytes in all.
    pub(crate) fn after(&mut self, rows: usize, bytes: usize) {
        let average = (bytes / rows.max(1)).max(1);
        let fit = u32::try_from(PIECE / average).unwrap_or(u32::MAX);
        self.0 = fit.min(self.0.saturating_mul(2)).clamp(1, MOST);
    }
}

/// Rows of one kind, as one engine has them.
pub(crate) trait Rows: Sync {
    type Row: Send;
    /// Where a row stands in the list.
    type Place: Ord + Clone + Send;

    fn place(row: &Self::Row) -> Self::Place;

    /// Roughly, what is long in it.
    fn bytes(row: &Self::Row) -> usize;

    /// At most `limit` rows behind a place, in order.
    fn read(
        &self,
        engine: &Engine,
        after: Option<Self::Place>,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<Self::Row>, Problem>> + Send;
}

/// The rows of both engines in order.
pub(crate) struct Merged<'a, R: Rows> {
    rows: R,
    sides: [Side<'a, R>; 2],
}

struct Side<'a, R: Rows> {
    engine: &'a Engine,
    read: VecDeque<R::Row>,
    after: Option<R::Place>,
    pace: Pace,
    done: bool,
}

impl<R: Rows> Side<'_, R> {
    /// The place of the next row.
    async fn peek(&mut self, rows: &R) -> Result<Option<R::Place>, Problem> {
        if self.read.is_empty() && !self.done {
            let limit = self.pace.rows();
            let read = rows.read(self.engine, self.after.clone(), limit).await?;
            self.done = (read.len() as u64) < u64::from(limit);
            self.pace.after(read.len(), read.iter().map(R::bytes).sum());
            self.after = read.last().map(R::place).or_else(|| self.after.take());
            self.read = read.into();
        }
        Ok(self.read.front().map(R::place))
    }
}

impl<'a, R: Rows> Merged<'a, R> {
    /// The rows behind a place.
    pub(crate) fn new(runs: &'a Runs, rows: R, after: Option<&R::Place>) -> Self {
        let sides = runs.engines().map(|engine| Side {
            engine,
            read: VecDeque::new(),
            after: after.cloned(),
            pace: Pace::new(),
            done: false,
        });
        Self { rows, sides }
    }

    /// The next row and whose it is; `None` behind the last one.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn next(&mut self) -> Result<Option<(&'a Engine, R::Row)>, Problem> {
        let Self { rows, sides } = self;
        let [first, second] = sides;
        let side = match (first.peek(rows).await?, second.peek(rows).await?) {
            (None, None) => return Ok(None),
            (Some(a), Some(b)) if b < a => second,
            (Some(_), _) => first,
            (None, Some(_)) => second,
        };
        Ok(side.read.pop_front().map(|row| (side.engine, row)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn short_rows_are_read_in_ever_longer_pieces_and_long_ones_alone() {
        let mut pace = Pace::new();
        let mut read = vec![pace.rows()];
        for _ in 0..6 {
            pace.after(pace.rows() as usize, 500 * pace.rows() as usize);
            read.push(pace.rows());
        }
        assert_eq!(read, [8, 16, 32, 64, 128, 200, 200]);
        pace.after(200, 200 * (16 << 20));
        assert_eq!(pace.rows(), 1);
        pace.after(1, 500);
        assert_eq!(pace.rows(), 2);
    }

    proptest! {
        #[test]
        fn a_piece_has_at_least_one_row_and_no_more_than_fit(sizes in prop::collection::vec((0..300_usize, 0..(1_usize << 34)), 0..20)) {
            let mut pace = Pace::new();
            for (rows, bytes) in sizes {
                let before = pace.rows();
                pace.after(rows, bytes);
                let now = pace.rows();
                prop_assert!((1..=MOST).contains(&now) && now <= before.saturating_mul(2));
                prop_assert!(now == 1 || now as usize * (bytes / rows.max(1)) <= PIECE);
            }
        }
    }
}
