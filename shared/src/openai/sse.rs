//! Byte-exact SSE scanner (G20): finds event boundaries in a byte stream cut anywhere, without changing a byte.
//!
//! WHATWG HTML §9.2.6: lines end in LF, CRLF or CR; a blank line dispatches; a leading BOM is dropped;
//! several `data:` lines join with LF; comments start with a colon; one space after the colon is dropped.
//! A block without a `data` line dispatches nothing, but its blank line is still a boundary.
//!
//! Linear in the input however it is split: a byte is looked at once to find boundaries and at most once more, when
//! the event it belongs to was cut by a chunk. The only state kept between calls is the incomplete event.

use std::borrow::Cow;

use memchr::memchr2;

/// An incomplete event larger than this, in bytes, is still delimited, but its fields are not kept.
pub const MAX_EVENT_BYTES: usize = 16 << 20;

/// The carry's buffer is given back when it has grown past this, in bytes.
const CARRY_KEPT: usize = 16 << 10;

const BOM: &[u8] = b"\xef\xbb\xbf";

/// One complete block up to and including its blank line.
#[derive(Debug, PartialEq, Eq)]
pub struct SseEvent<'a> {
    /// The joined `data` lines without the last LF; `None`: no `data` line (comment, bare fields, lone blank line).
    pub data: Option<Cow<'a, [u8]>>,
    /// The last `event:` field.
    pub name: Option<Cow<'a, [u8]>>,
    /// Offset in the chunk given to `next_event`, just past the event's blank line.
    pub end: usize,
    /// The event passed `MAX_EVENT_BYTES`; its fields are unknown.
    pub oversize: bool,
}

/// The boundary finder.
#[derive(Debug, Default)]
pub struct SseScanner {
    /// The incomplete event's bytes from earlier chunks.
    carry: Vec<u8>,
    /// `carry` belongs to an event already handed out.
    spent: bool,
    oversize: bool,
    /// Bytes of the current line seen in earlier chunks.
    line_bytes: usize,
    /// The last byte was CR: an LF now belongs to that line's end.
    after_cr: bool,
    /// Bytes of the current event seen in earlier chunks.
    event_bytes: usize,
    /// The first event, which may start with a BOM, is behind us.
    started: bool,
}

impl SseScanner {
    pub fn new() -> Self {
        Self::default()
    }

    /// No byte of an incomplete event is pending: something may be inserted here.
    pub fn at_boundary(&self) -> bool {
        self.event_bytes == 0
    }

    /// Bytes of the incomplete event.
    pub fn pending_bytes(&self) -> usize {
        self.event_bytes
    }

    /// The next event that ends in `chunk[*pos..]`; moves `pos` past it.
    /// `None`: the chunk is used up and its incomplete rest is remembered.
    pub fn next_event<'a>(&'a mut self, chunk: &'a [u8], pos: &mut usize) -> Option<SseEvent<'a>> {
        if std::mem::take(&mut self.spent) {
            self.carry.clear();
            self.carry.shrink_to(CARRY_KEPT);
            self.oversize = false;
        }
        let start = *pos;
        let mut at = start;
        if at < chunk.len() && std::mem::take(&mut self.after_cr) && chunk[at] == b'\n' {
            at += 1;
        }
        // The event's own bytes, without the LF that belonged to the event before.
        let from = if self.event_bytes == 0 { at } else { start };
        let mut fields = Fields::default();
        let in_chunk = self.event_bytes == 0;
        loop {
            let line_start = at;
            let Some(eol) = memchr2(b'\n', b'\r', &chunk[at..]).map(|i| at + i) else {
                self.line_bytes += chunk.len() - at;
                self.keep(&chunk[from..]);
                *pos = chunk.len();
                return None;
            };
            let mut line = &chunk[line_start..eol];
            at = eol + 1;
            if chunk[eol] == b'\r' {
                if chunk.get(at) == Some(&b'\n') {
                    at += 1;
                } else {
                    self.after_cr = at == chunk.len();
                }
            }
            let mut line_bytes = std::mem::take(&mut self.line_bytes) + line.len();
            if !self.started {
                if in_chunk && line_start == from {
                    line = line.strip_prefix(BOM).unwrap_or(line);
                    line_bytes = line.len();
                } else if !in_chunk && line_bytes == BOM.len() && self.carry.iter().chain(line).eq(BOM) {
                    line_bytes = 0;
                }
            }
            if line_bytes == 0 {
                break;
            }
            if in_chunk {
                fields.take(line);
            }
        }
        *pos = at;
        let first = !std::mem::replace(&mut self.started, true);
        if in_chunk {
            return Some(fields.event(at));
        }
        self.keep(&chunk[start..at]);
        self.event_bytes = 0;
        self.spent = true;
        if self.oversize {
            return Some(SseEvent {
                data: None,
                name: None,
                end: at,
                oversize: true,
            });
        }
        let mut block = &self.carry[..];
        if first {
            block = block.strip_prefix(BOM).unwrap_or(block);
        }
        Some(Fields::of_block(block).event(at))
    }

    /// At the end of the input: whether a block without its blank line is left, which no reader dispatches.
    pub fn finish(&self) -> bool {
        self.event_bytes > 0
    }

    fn keep(&mut self, bytes: &[u8]) {
        self.event_bytes += bytes.len();
        if self.oversize || self.carry.len() + bytes.len() > MAX_EVENT_BYTES {
            self.oversize = true;
            self.carry = Vec::new();
        } else {
            self.carry.extend_from_slice(bytes);
        }
    }
}

#[derive(Default)]
struct Fields<'a> {
    data: Option<Cow<'a, [u8]>>,
    name: Option<Cow<'a, [u8]>>,
}

impl<'a> Fields<'a> {
    fn of_block(mut block: &'a [u8]) -> Self {
        let mut fields = Self::default();
        while let Some(eol) = memchr2(b'\n', b'\r', block) {
            fields.take(&block[..eol]);
            let crlf = block[eol] == b'\r' && block.get(eol + 1) == Some(&b'\n');
            block = &block[eol + 1 + usize::from(crlf)..];
        }
        fields
    }

    fn take(&mut self, line: &'a [u8]) {
        if let Some(value) = field(line, b"data") {
            self.data = Some(match self.data.take() {
                None => Cow::Borrowed(value),
                Some(so_far) => {
                    let mut joined = so_far.into_owned();
                    joined.push(b'\n');
                    joined.extend_from_slice(value);
                    Cow::Owned(joined)
                }
            });
        } else if let Some(value) = field(line, b"event") {
            self.name = Some(Cow::Borrowed(value));
        }
    }

    fn event(self, end: usize) -> SseEvent<'a> {
        SseEvent {
            data: self.data,
            name: self.name,
            end,
            oversize: false,
        }
    }
}

/// The value of a line whose field is `name`: behind the colon, less one space; empty without a colon.
fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    match line.strip_prefix(name)? {
        [] => Some(&[]),
        [b':', b' ', value @ ..] | [b':', value @ ..] => Some(value),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
