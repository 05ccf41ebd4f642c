//! The gate's body, read into an answer: as SSE, or whole where a provider does not stream.
//!
//! `EventStream` splits events; `Lines` stands before it, so that what it is given is UTF-8, bounded, and one line at a
//! time: what it holds of a line it reads from the start with every piece.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use eventsource_stream::{EventStream, EventStreamError};
use futures_util::{Stream, StreamExt};
use memchr::memchr;

use super::answer::{Assembly, Broken, Delta, Took};

/// A whole answer has this many times the bytes of its texts at most: escapes and what stands around them.
const WRAPPING: usize = 4;
const BOM: &[u8] = b"\xef\xbb\xbf";

/// Reads events until the answer is complete.
///
/// # Errors
/// What the stream itself says is wrong, or that it broke off: then nothing of it counts (S16).
pub(super) async fn read_events<S, E>(
    body: S,
    max: usize,
    into: &mut Assembly,
    tell: &(dyn Fn(Delta) + Send + Sync),
) -> Result<(), Broken>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let mut events = EventStream::new(Lines::new(body, max.saturating_mul(WRAPPING)));
    while let Some(event) = events.next().await {
        let event = event.map_err(|error| match error {
            EventStreamError::Transport(broken) => broken,
            EventStreamError::Utf8(_) | EventStreamError::Parser(_) => Broken::Malformed,
        })?;
        match into.event(&event.data, tell)? {
            Took::More => {}
            Took::Done => return Ok(()),
        }
    }
    // The gate ends a stream that broke off with an error; one that ends cleanly after its last word is complete.
    if into.is_finished() {
        Ok(())
    } else {
        Err(Broken::Cut)
    }
}

/// Reads a whole answer.
///
/// # Errors
/// As `read_events`.
pub(super) async fn read_whole<S, E>(
    mut body: S,
    max: usize,
    into: &mut Assembly,
    tell: &(dyn Fn(Delta) + Send + Sync),
) -> Result<(), Broken>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let mut whole = BytesMut::new();
    while let Some(piece) = body.next().await {
        whole.extend_from_slice(&piece.map_err(|_| Broken::Cut)?);
        if whole.len() > max.saturating_mul(WRAPPING) {
            return Err(Broken::TooLarge(max));
        }
    }
    into.whole(&whole, tell)
}

/// The first bytes of a body that says why there is no answer: up to `max`, and the rest of the piece.
pub(super) async fn read_some<S, E>(mut body: S, max: usize) -> Bytes
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let mut some = BytesMut::new();
    while some.len() < max
        && let Some(Ok(piece)) = body.next().await
    {
        some.extend_from_slice(&piece);
    }
    some.freeze()
}

/// Cuts a body into lines, each with its line feed.
struct Lines<S> {
    body: S,
    /// What is not a line yet, and how much of it was searched for its end.
    held: BytesMut,
    searched: usize,
    /// Bytes of the event that these lines are of.
    event_bytes: usize,
    event_max: usize,
    begun: bool,
    over: bool,
}

impl<S> Lines<S> {
    fn new(body: S, event_max: usize) -> Self {
        Self {
            body,
            held: BytesMut::new(),
            searched: 0,
            event_bytes: 0,
            event_max,
            begun: false,
            over: false,
        }
    }

    /// The next line, or at the end whatever is left.
    fn next_line(&mut self) -> Option<Bytes> {
        let end = match memchr(b'\n', &self.held[self.searched..]) {
            Some(at) => self.searched + at + 1,
            None if self.over => self.held.len(),
            None => {
                self.searched = self.held.len();
                return None;
            }
        };
        self.searched = 0;
        Some(self.held.split_to(end).freeze()).filter(|line| !line.is_empty())
    }

    fn checked(&mut self, mut line: Bytes) -> Result<Bytes, Broken> {
        // `EventStream` takes a byte order mark for one byte.
        while !self.begun && line.starts_with(BOM) {
            line = line.slice(BOM.len()..);
        }
        self.begun = true;
        self.event_bytes += line.len();
        if self.event_bytes > self.event_max {
            return Err(Broken::TooLarge(self.event_max / WRAPPING));
        }
        if matches!(&line[..], b"\n" | b"\r\n") {
            self.event_bytes = 0;
        }
        match std::str::from_utf8(&line) {
            Ok(_) => Ok(line),
            Err(_) => Err(Broken::Malformed),
        }
    }
}

impl<S, E> Stream for Lines<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    type Item = Result<Bytes, Broken>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(line) = self.next_line() {
                return Poll::Ready(Some(self.checked(line)));
            }
            if self.over {
                return Poll::Ready(None);
            }
            if self.held.len() > self.event_max {
                return Poll::Ready(Some(Err(Broken::TooLarge(self.event_max / WRAPPING))));
            }
            match ready!(Pin::new(&mut self.body).poll_next(cx)) {
                Some(Ok(piece)) => self.held.extend_from_slice(&piece),
                Some(Err(_)) => {
                    self.held.clear();
                    self.over = true;
                    return Poll::Ready(Some(Err(Broken::Cut)));
                }
                None => self.over = true,
            }
        }
    }
}

#[cfg(test)]
mod tests;
