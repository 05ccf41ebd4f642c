//! A request body with spans replaced: the client's own bytes with ours between them, nothing parsed again.

use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::{RequestFacts, StreamOptions};

/// A body as pieces of the client's bytes with ours between them. Cheap to clone, so that it can be sent again.
#[derive(Debug, Clone, Default)]
pub struct SplicedBody {
    pieces: [Bytes; INLINE],
    /// Beyond `INLINE` pieces: duplicate members only.
    more: Vec<Bytes>,
    next: usize,
    left: u64,
}

const INLINE: usize = 6;

/// Bodies up to this size, in bytes, leave as one piece: a copy costs less than the frames it saves.
const ONE_PIECE: u64 = 16 << 10;

impl SplicedBody {
    /// A body sent as it is.
    pub fn whole(body: Bytes) -> Self {
        let mut out = Self::default();
        out.push(body);
        out
    }

    /// Replaces spans of a body. Edits must be ordered and apart.
    pub(in crate::openai) fn edited(
        body: &Bytes,
        edits: impl IntoIterator<Item = (Range<usize>, Bytes)>,
    ) -> Self {
        let (mut out, mut from) = (Self::default(), 0);
        for (span, with) in edits {
            out.push(body.slice(from..span.start));
            out.push(with);
            from = span.end;
        }
        out.push(body.slice(from..));
        if out.left > ONE_PIECE {
            out
        } else {
            Self::whole(out.joined())
        }
    }

    fn joined(&self) -> Bytes {
        let mut all = Vec::with_capacity(self.pieces.iter().chain(&self.more).map(Bytes::len).sum());
        for piece in self.pieces.iter().chain(&self.more) {
            all.extend_from_slice(piece);
        }
        Bytes::from(all)
    }

    fn push(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        self.left += piece.len() as u64;
        match self.pieces.iter_mut().find(|p| p.is_empty()) {
            Some(free) if self.more.is_empty() => *free = piece,
            _ => self.more.push(piece),
        }
    }

    /// Bytes not yet sent.
    pub fn len(&self) -> u64 {
        self.left
    }

    pub fn is_empty(&self) -> bool {
        self.left == 0
    }
}

impl Body for SplicedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let i = self.next;
        self.next += 1;
        let piece = match self.pieces.get_mut(i) {
            Some(piece) => std::mem::take(piece),
            None => std::mem::take(&mut self.more[i - INLINE]),
        };
        self.left -= piece.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// The body for a provider that knows the model as `target`; with `inject_usage` a stream's usage is asked for (G14).
pub fn splice(body: &Bytes, facts: &RequestFacts, target: &str, inject_usage: bool) -> SplicedBody {
    // Of several models only the last was read; a provider that reads another one must find the same.
    let rename = facts.model != target || facts.model_spans.len() > 1;
    let usage = if inject_usage && facts.stream {
        usage_edit(facts)
    } else {
        None
    };
    if !rename && usage.is_none() {
        return SplicedBody::whole(body.clone());
    }
    let mut edits: Vec<(Range<usize>, Bytes)> = Vec::with_capacity(facts.model_spans.len() + 1);
    if rename {
        let name = Bytes::from(serde_json::to_string(target).unwrap_or_default());
        edits.extend(facts.model_spans.iter().map(|span| (span.clone(), name.clone())));
    }
    edits.extend(usage);
    edits.sort_by_key(|(span, _)| span.start);
    SplicedBody::edited(body, edits)
}

fn usage_edit(facts: &RequestFacts) -> Option<(Range<usize>, Bytes)> {
    let insert = |at: usize, text: &'static str| Some((at..at, Bytes::from_static(text.as_bytes())));
    match &facts.options {
        // The object has at least `model`, so a comma always follows.
        StreamOptions::Absent => insert(facts.open, r#""stream_options":{"include_usage":true},"#),
        StreamOptions::Null(span) => Some((span.clone(), Bytes::from_static(br#"{"include_usage":true}"#))),
        StreamOptions::Object {
            include_usage: Some((true, _)),
            ..
        }
        | StreamOptions::Foreign => None,
        StreamOptions::Object {
            include_usage: Some((false, span)),
            ..
        } => Some((span.clone(), Bytes::from_static(b"true"))),
        StreamOptions::Object {
            open, empty: true, ..
        } => insert(*open, r#""include_usage":true"#),
        StreamOptions::Object {
            open, empty: false, ..
        } => insert(*open, r#""include_usage":true,"#),
    }
}
