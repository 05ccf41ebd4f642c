//! From a byte offset in a TOML text to the key that stands there, and back.

use std::ops::Range;

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

/// The offset of a dotted path, or of its deepest part that is written in the text.
pub(super) fn offset_of(text: &str, path: &str) -> usize {
    let (root, _) = DeTable::parse_recoverable(text);
    let mut at = 0;
    let mut here: Option<&DeTable<'_>> = Some(root.get_ref());
    for part in path.split('.') {
        let (name, indexes) = part.split_once('[').unwrap_or((part, ""));
        let Some((key, value)) = here.and_then(|t| t.iter().find(|(k, _)| k.get_ref() == name)) else {
            break;
        };
        at = key.span().start;
        let mut value = value;
        for index in indexes
            .split('[')
            .filter_map(|i| i.trim_end_matches(']').parse::<usize>().ok())
        {
            let Some(item) = value.get_ref().as_array().and_then(|a| a.get(index)) else {
                break;
            };
            at = item.span().start;
            value = item;
        }
        here = value.get_ref().as_table();
    }
    at
}
