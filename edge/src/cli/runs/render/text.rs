//! Pieces of text: what a terminal may show, times, tables. Pure.

use std::fmt::Write as _;

use jiff::Timestamp;
use serde_json::value::RawValue;

use super::super::wire::Time;

/// Longest text of a model or a prompt in an overview.
const EXCERPT: usize = 200;

/// Text that a terminal shows and does not act on: control characters, those that turn or join the writing, and those that
/// have no width stand as JSON escapes.
pub(in crate::cli::runs) fn plain(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(c);
        }
    }
    shown
}

/// JSON as it was sent, on one line.
pub(in crate::cli::runs) fn json(raw: &RawValue) -> String {
    let (mut quoted, mut escaped) = (false, false);
    let one_line: String = raw
        .get()
        .chars()
        .map(|c| {
            if escaped {
                escaped = false;
            } else if quoted && c == '\\' {
                escaped = true;
            } else if c == '"' {
                quoted = !quoted;
            }
            // Between values only white space is a control character.
            if !quoted && c.is_control() { ' ' } else { c }
        })
        .collect();
    plain(&one_line)
}

fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

/// A word that a shell takes as one, whatever a client called its run.
pub(super) fn shell(text: &str) -> String {
    let is_safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let shown = plain(text);
    if !shown.is_empty() && shown.chars().all(is_safe) {
        shown
    } else {
        format!("'{}'", shown.replace('\'', r"'\''"))
    }
}

/// The beginning of a long text.
pub(super) fn excerpt(text: &str) -> String {
    match text.char_indices().nth(EXCERPT) {
        None => plain(text),
        Some((end, _)) => format!("{} …", plain(&text[..end])),
    }
}

pub(super) fn or_dash(text: Option<&str>) -> String {
    text.map_or_else(|| String::from("-"), plain)
}

pub(super) fn line(text: &mut String, name: &str, value: &str) {
    let _ = writeln!(text, "{name:<10}{value}");
}

pub(super) fn indented(text: &mut String, value: &str) {
    let _ = writeln!(text, "  {value}");
}

pub(super) fn age(since: Option<Time>, now: Timestamp) -> String {
    since.map_or_else(|| String::from("-"), |since| span(seconds(since.0, now)))
}

pub(super) fn until(at: Timestamp, now: Timestamp) -> String {
    match seconds(now, at) {
        0 => String::from("over"),
        left => span(left),
    }
}

/// `in 3h` or `3h ago`.
pub(super) fn distance(at: Timestamp, now: Timestamp) -> String {
    if at > now {
        format!("in {}", span(seconds(now, at)))
    } else {
        format!("{} ago", span(seconds(at, now)))
    }
}

/// Whole seconds between two times; none when the first is later, as with two clocks that differ.
fn seconds(from: Timestamp, to: Timestamp) -> u64 {
    u64::try_from(to.as_second().saturating_sub(from.as_second())).unwrap_or(0)
}

/// One unit: seconds, minutes, hours up to two days, then days.
fn span(seconds: u64) -> String {
    match seconds {
        0..=59 => format!("{seconds}s"),
        60..=3_599 => format!("{}m", seconds / 60),
        3_600..=172_799 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Columns under their headings; without rows only the headings.
pub(super) fn table(heads: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let heads = heads.iter().map(|head| (*head).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(heads).chain(rows).collect();
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..columns)
        .map(|n| {
            let cells = rows.iter().filter_map(|row| row.get(n));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}"));
        let whole = cells.collect::<Vec<_>>().join("  ");
        text.push_str(whole.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests;
