//! Cuts what a node says into lines of bounded length: the session, and the events of a run. Pure.

use bytes::{Bytes, BytesMut};

/// Longest line, in bytes without its line feed (docs/link.md).
pub(crate) const LINE_MAX: usize = 1 << 20;

/// A line grew past `LINE_MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooLong;

/// Bytes received, lines taken out.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    held: BytesMut,
    /// Bytes of `held` known to have no line feed.
    seen: usize,
}

impl Lines {
    pub(crate) fn push(&mut self, data: &[u8]) {
        self.held.extend_from_slice(data);
    }

    /// The next whole line that is not blank.
    pub(crate) fn next(&mut self) -> Result<Option<Bytes>, TooLong> {
        while let Some(at) = memchr::memchr(b'\n', &self.held[self.seen..]) {
            let mut line = self.held.split_to(self.seen + at + 1).freeze();
            self.seen = 0;
            line.truncate(line.len() - 1);
            if line.len() > LINE_MAX {
                return Err(TooLong);
            }
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line));
            }
        }
        self.seen = self.held.len();
        if self.seen > LINE_MAX {
            Err(TooLong)
        } else {
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(pieces: &[&str]) -> Vec<String> {
        let (mut lines, mut out) = (Lines::default(), Vec::new());
        for piece in pieces {
            lines.push(piece.as_bytes());
            while let Some(line) = lines.next().unwrap() {
                out.push(String::from_utf8(line.to_vec()).unwrap());
            }
        }
        out
    }

    #[test]
    fn lines_do_not_depend_on_where_data_was_cut() {
        let text = "{\"a\":1}\n\n{\"b\":2}\r\n  \n{\"c\":3}\nrest";
        let whole = cut(&[text]);
        assert_eq!(whole, ["{\"a\":1}", "{\"b\":2}\r", "{\"c\":3}"]);
        for at in 0..text.len() {
            assert_eq!(cut(&[&text[..at], &text[at..]]), whole, "{at}");
        }
    }

    #[test]
    fn a_line_is_bounded_finished_or_not() {
        let mut lines = Lines::default();
        lines.push(&vec![b'x'; LINE_MAX]);
        assert_eq!(lines.next(), Ok(None));
        lines.push(b"\n");
        assert_eq!(lines.next().unwrap().unwrap().len(), LINE_MAX);
        lines.push(&vec![b'x'; LINE_MAX + 1]);
        assert_eq!(lines.next(), Err(TooLong));
        let mut whole = Lines::default();
        whole.push(&vec![b'x'; LINE_MAX + 1]);
        whole.push(b"\n");
        assert_eq!(whole.next(), Err(TooLong));
    }
}
