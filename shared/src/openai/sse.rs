//! Byte-exact SSE scanner (G20): finds event boundaries in a byte stream cut anywhere, without changing a byte.
//!
//! WHATWG HTML §9.2.6: lines end in LF, CRLF or CR; a blank line dispatches; a leading BOM is dropped;
//! several `data:` lines join with LF; comments start with a colon; one space after the colon is dropped.
//! An event without a `data` line is not dispatched but is still a boundary.
//!
//! Linear in the input however it is split; the only state kept between calls is the incomplete event.

/// One complete block up to and including its blank line.
#[derive(Debug, PartialEq, Eq)]
pub struct SseEvent<'a> {
    /// The joined `data` lines without the last LF; `None`: no `data` line (comment or bare field block).
    pub data: Option<std::borrow::Cow<'a, [u8]>>,
    /// The last `event:` field.
    pub name: Option<std::borrow::Cow<'a, [u8]>>,
    /// Offset in the chunk given to `next_event`, just past the event's blank line.
    pub end: usize,
}
