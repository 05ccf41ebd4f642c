//! Lists (durable-api §1): `limit`, `after`, and an envelope that says whether there is more.

use iop_durable::ids::WaitId;
use iop_durable::time::Timestamp;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::runs::problem::Problem;

const LIMIT_DEFAULT: u32 = 100;
const LIMIT_MAX: u32 = 200;
/// Longest cursor, in characters.
const CURSOR_MAX: usize = 2 * (8 + 3 * 257);

/// How many rows of a list; 1 to 200.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limit(u32);

impl Default for Limit {
    fn default() -> Self {
        Self(LIMIT_DEFAULT)
    }
}

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        match u32::deserialize(d) {
            Ok(n) if (1..=LIMIT_MAX).contains(&n) => Ok(Self(n)),
            Ok(_) | Err(_) => Err(D::Error::custom("limit must be a whole number from 1 to 200")),
        }
    }
}

impl Limit {
    pub(super) fn get(self) -> u32 {
        self.0
    }

    /// One more than asked for: whether it is there says whether there is more.
    pub(super) fn and_one(self) -> u32 {
        self.0 + 1
    }
}

/// Which part of a list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Page {
    /// Rows at most.
    #[serde(default)]
    #[param(value_type = Option<u32>, minimum = 1, maximum = 200, default = 100)]
    pub(super) limit: Limit,
    /// `next_after` of the page before.
    pub(super) after: Option<String>,
}

impl Page {
    /// The wait of a run behind which the page begins.
    ///
    /// # Errors
    /// `invalid_request` at `after`.
    pub(super) fn wait(&self) -> Result<Option<(Timestamp, WaitId)>, Problem> {
        let Some(after) = &self.after else { return Ok(None) };
        let (at, [id]) = place::<1>(after)?;
        match WaitId::new(&id) {
            Ok(id) => Ok(Some((at, id))),
            Err(_) => Err(no_cursor()),
        }
    }
}

/// A page of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct List<T> {
    #[schema(inline)]
    object: Word,
    pub(super) data: Vec<T>,
    pub(super) has_more: bool,
    /// `after` of the next page; null on the last one.
    pub(super) next_after: Option<String>,
}

/// The word of the envelope.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Word {
    List,
}

impl<T> List<T> {
    /// Of one row more than asked for, when there is one.
    pub(super) fn of(mut rows: Vec<T>, limit: Limit, cursor: impl FnOnce(&T) -> String) -> Self {
        let limit = limit.0 as usize;
        let has_more = rows.len() > limit;
        rows.truncate(limit);
        let next_after = rows.last().filter(|_| has_more).map(cursor);
        Self {
            object: Word::List,
            data: rows,
            has_more,
            next_after,
        }
    }

    /// Everything there is.
    pub(super) fn whole(rows: Vec<T>) -> Self {
        Self {
            object: Word::List,
            data: rows,
            has_more: false,
            next_after: None,
        }
    }

    /// As part of a longer list.
    pub(super) fn continued(mut self, has_more: bool, next_after: Option<String>) -> Self {
        (self.has_more, self.next_after) = (has_more, next_after);
        self
    }

    /// As part of the list of a run's waits, which goes on behind this one.
    pub(super) fn behind(self, next: Option<(Timestamp, WaitId)>) -> Self {
        let next = next.map(|(at, wait)| cursor(at, &[wait.as_str()]));
        self.continued(next.is_some(), next)
    }

    pub(super) fn map<U>(self, f: impl FnMut(T) -> U) -> List<U> {
        List {
            object: self.object,
            data: self.data.into_iter().map(f).collect(),
            has_more: self.has_more,
            next_after: self.next_after,
        }
    }
}

/// Part of a whole snapshot. It has no age, so a cursor is the last id seen: what comes and goes between two pages cannot
/// shift the rest.
pub(super) fn cut<T>(mut all: Vec<T>, page: &Page, id: impl Fn(&T) -> &str) -> List<T> {
    all.sort_by(|a, b| id(a).cmp(id(b)));
    if let Some(after) = &page.after {
        all.retain(|item| id(item) > after.as_str());
    }
    List::of(all, page.limit, |last| id(last).to_owned())
}

/// A place in a list that is ordered by time and ids, as opaque text.
pub(super) fn cursor(at: Timestamp, ids: &[&str]) -> String {
    use std::fmt::Write as _;
    let mut bytes = at.as_millis().to_be_bytes().to_vec();
    bytes.extend(ids.join("\0").as_bytes());
    bytes.iter().fold(String::new(), |mut out, b| {
        let _ = write!(out, "{b:02x}");
        out
    })
}

/// The place of a cursor with `N` ids.
///
/// # Errors
/// `invalid_request` at `after`.
pub(super) fn place<const N: usize>(cursor: &str) -> Result<(Timestamp, [String; N]), Problem> {
    let read = || {
        let bytes = bytes_of(cursor)?;
        let (at, ids) = bytes.split_first_chunk::<8>()?;
        let at = Timestamp::from_millis(i64::from_be_bytes(*at)).ok()?;
        let ids: Vec<String> = std::str::from_utf8(ids)
            .ok()?
            .split('\0')
            .map(str::to_owned)
            .collect();
        Some((at, <[String; N]>::try_from(ids).ok()?))
    };
    read().ok_or_else(no_cursor)
}

/// What is no cursor of this list.
pub(super) fn no_cursor() -> Problem {
    Problem::invalid("after", "after must be the next_after of the page before.")
}

fn bytes_of(text: &str) -> Option<Vec<u8>> {
    if text.len() > CURSOR_MAX {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|n| u8::try_from(n).ok());
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    pairs
        .iter()
        .map(|[high, low]| Some((digit(*high)? << 4) | digit(*low)?))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::extract::query;
    use super::*;

    fn page(text: &str) -> Result<Page, Problem> {
        query(&format!("/api/v1/nodes{text}").parse().unwrap())
    }

    #[test]
    fn a_page_is_bounded_and_names_the_wrong_parameter() {
        let all = page("").unwrap();
        assert_eq!((all.limit.get(), all.after), (100, None));
        let some = page("?limit=2&after=a%2Fb").unwrap();
        assert_eq!((some.limit.get(), some.after.as_deref()), (2, Some("a/b")));
        for (text, param) in [
            ("?limit=0", "limit"),
            ("?limit=201", "limit"),
            ("?limit=-1", "limit"),
            ("?limit=x", "limit"),
            ("?after=", "after"),
            ("?x=1", "x"),
        ] {
            let problem = page(text).unwrap_err();
            assert_eq!(problem.param.as_deref(), Some(param), "{text}");
        }
    }

    #[test]
    fn pages_follow_each_other_without_gap_or_repetition() {
        let all = vec!["c", "a", "d", "b", "e"];
        let mut page = page("?limit=2").unwrap();
        let mut seen = Vec::new();
        loop {
            let list = cut(all.clone(), &page, |s| s);
            seen.push(list.data.join(""));
            assert_eq!(list.has_more, list.next_after.is_some());
            let Some(next) = list.next_after else { break };
            page.after = Some(next);
        }
        assert_eq!(seen, ["ab", "cd", "e"]);
    }

    proptest! {
        #[test]
        fn a_cursor_is_read_back_and_nothing_else_is_one(ms in 1..253_402_300_799_999_i64, a in "[^\0]{0,20}", b in "[^\0]{0,20}", noise in ".{0,40}") {
            let at = Timestamp::from_millis(ms).unwrap();
            let text = cursor(at, &[&a, &b]);
            prop_assert_eq!(place::<2>(&text).unwrap(), (at, [a, b]));
            prop_assert!(place::<1>(&text).is_err() && place::<3>(&text).is_err());
            if let Ok((at, ids)) = place::<1>(&noise) {
                prop_assert_eq!(cursor(at, &[&ids[0]]), noise.to_ascii_lowercase());
            }
        }
    }
}
