//! From a byte offset in a TOML text to the key that stands there, and back.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The line of an offset, counted from 1.
pub(super) fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes()
        .iter()
        .take(offset)
        .filter(|b| **b == b'\n')
        .count()
        + 1
}

/// The dotted path of the innermost key or element that covers an offset.
pub(super) fn key_at(text: &str, offset: usize) -> Option<String> {
    let (root, _) = DeTable::parse_recoverable(text);
    let mut path = String::new();
    in_table(root.get_ref(), offset, &mut path);
    (!path.is_empty()).then_some(path)
}

fn covers(span: &Range<usize>, offset: usize) -> bool {
    span.contains(&offset) || span.start == offset
}

fn in_table(table: &DeTable<'_>, offset: usize, path: &mut String) -> bool {
    let before = path.len();
    for (key, value) in table {
        if before > 0 {
            path.push('.');
        }
        path.push_str(key.get_ref());
        // A table defined over several headers has no one span: look inside before judging by the span.
        if in_value(value.get_ref(), offset, path)
            || covers(&key.span(), offset)
            || covers(&value.span(), offset)
        {
            return true;
        }
        path.truncate(before);
    }
    false
}

fn in_value(value: &DeValue<'_>, offset: usize, path: &mut String) -> bool {
    if let Some(table) = value.as_table() {
        return in_table(table, offset, path);
    }
    let Some(array) = value.as_array() else {
        return false;
    };
    let before = path.len();
    for (i, item) in array.iter().enumerate() {
        path.push_str(&format!("[{i}]"));
        if in_value(item.get_ref(), offset, path) || covers(&item.span(), offset) {
            return true;
        }
        path.truncate(before);
    }
    false
}

/// The offset of a dotted path, or of its deepest part that is written in the text. Keys may have dots of their own.
pub(super) fn offset_of(text: &str, path: &str) -> usize {
    let (root, _) = DeTable::parse_recoverable(text);
    let mut at = 0;
    let mut here: Option<&DeTable<'_>> = Some(root.get_ref());
    let mut rest = path;
    while let Some((key, value, after)) = here.and_then(|table| longest(table, rest)) {
        at = key;
        let mut value = value;
        rest = after;
        while let Some((index, after)) = rest.strip_prefix('[').and_then(|r| r.split_once(']')) {
            let item = index.parse::<usize>().ok();
            let Some(item) = item.and_then(|i| value.get_ref().as_array()?.get(i)) else {
                return at;
            };
            at = item.span().start;
            value = item;
            rest = after;
        }
        rest = rest.strip_prefix('.').unwrap_or(rest);
        here = value.get_ref().as_table();
    }
    at
}

/// The longest key of a table that a path begins with: where it stands, its value, and the rest of the path.
fn longest<'a, 't>(
    table: &'a DeTable<'t>,
    path: &'a str,
) -> Option<(usize, &'a Spanned<DeValue<'t>>, &'a str)> {
    let ends = |rest: &str| rest.is_empty() || rest.starts_with(['.', '[']);
    table
        .iter()
        .filter_map(|(key, value)| {
            let rest = path.strip_prefix(key.get_ref().as_ref())?;
            ends(rest).then_some((key.span().start, value, rest))
        })
        .min_by_key(|(_, _, rest)| rest.len())
}
