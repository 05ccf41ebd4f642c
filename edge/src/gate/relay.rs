//! One stream through the gate (pure): what is held, when it commits, what is withheld, how it ends.
//!
//! Decides for every event whether it is forwarded, dropped, or the end of the message (G22, G52, G56, G58), and
//! never changes a byte of what it forwards. Only whole events leave, so that a comment or a typed error can always
//! follow; an incomplete event waits in `tail`, and only one larger than `TAIL_MAX` is passed on in pieces.
//! Knows no socket, clock or provider.

use std::collections::VecDeque;

use bytes::Bytes;
use iop_shared::openai::event::{
    CommittedFacts, Dialect, EventKind, InBandError, TerminalKind, classify, error_of_failed, response_id,
    scan_committed, sequence_number,
};
use iop_shared::openai::sse::{SseEvent, SseScanner};
use iop_shared::openai::usage::Usage;

/// An incomplete event larger than this, in bytes, is forwarded in pieces; a failure inside it aborts the connection.
const TAIL_MAX: usize = 1 << 20;

/// Events within which a Responses stream says its id.
const PREAMBLE: u64 = 4;

/// `data: [DONE]`, supplied when the provider finished without it (G22).
const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// What the shell does after a chunk.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing may leave yet.
    Hold,
    /// What `next_out` yields may leave.
    Forward,
    /// What `next_out` yields may leave, then the client's message ends (G22).
    End(TerminalKind),
    /// Nothing was committed and nothing may leave: the attempt failed (G58).
    Fail(Refusal),
}

/// Why an uncommitted stream is no answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The provider said so inside a 200.
    InBand(InBandError),
    /// Bytes that are no event of this API.
    Malformed,
    /// It ended without content.
    Empty,
}

/// How a stream whose provider went silent for good ends towards the client.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// Everything was sent: the missing terminator is supplied where the API has one.
    Complete,
    /// A typed error event can follow (G56).
    ErrorEvent,
    /// Half an event has left; only the connection can say that this is no end.
    Abort,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Uncommitted,
    Committed,
    Ended,
}

/// The scanner, the hold and the facts of one stream.
pub(crate) struct Relay {
    dialect: Dialect,
    /// The client asked for no usage chunk, the gateway did (G14).
    hide_usage: bool,
    hold_bytes: usize,
    state: State,
    terminal: Option<TerminalKind>,
    scanner: SseScanner,
    /// Complete events not yet handed out.
    out: VecDeque<Bytes>,
    out_bytes: usize,
    /// The incomplete event at the end of the input.
    tail: Vec<Bytes>,
    tail_bytes: usize,
    /// Part of the current event has left already.
    inside_event: bool,
    /// Events with data.
    events: u64,
    /// The last `sequence_number` that went by.
    sequence: Option<u64>,
    response_id: Option<String>,
    model: Option<String>,
    conversation: Option<String>,
    /// The data of a Responses stream's own `error` event, which Codex ignores.
    error: Option<Vec<u8>>,
    /// Choices that have to finish, and those that have.
    choices: u32,
    finished: u32,
    usage: Option<Usage>,
    failed_in_band: bool,
    /// What a `response.failed` said that came before any content.
    early_failure: Option<InBandError>,
}

enum Fate {
    Pass,
    Drop,
    Stop(TerminalKind),
    Fail(Refusal),
}

impl Relay {
    pub(crate) fn new(dialect: Dialect, choices: u32, hide_usage: bool, hold_bytes: usize) -> Self {
        Self {
            dialect,
            hide_usage,
            hold_bytes,
            state: State::Uncommitted,
            terminal: None,
            scanner: SseScanner::new(),
            out: VecDeque::new(),
            out_bytes: 0,
            tail: Vec::new(),
            tail_bytes: 0,
            inside_event: false,
            events: 0,
            sequence: None,
            response_id: None,
            model: None,
            conversation: None,
            error: None,
            choices,
            finished: 0,
            usage: None,
            failed_in_band: false,
            early_failure: None,
        }
    }

    /// The terminal event that ended this stream.
    pub(crate) fn terminal(&self) -> Option<TerminalKind> {
        self.terminal
    }

    pub(crate) fn has_out(&self) -> bool {
        !self.out.is_empty()
    }

    pub(crate) fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// The provider reported its own failure inside the stream.
    pub(crate) fn failed_in_band(&self) -> bool {
        self.failed_in_band
    }

    /// What a `response.failed` said that came before any content: nothing has left, though it could.
    pub(crate) fn early_failure(&self) -> Option<&InBandError> {
        self.early_failure.as_ref()
    }

    /// The id of a Responses stream, once seen.
    pub(crate) fn response_id(&self) -> Option<&str> {
        self.response_id.as_deref()
    }

    /// The id of the conversation that a Responses stream belongs to.
    pub(crate) fn conversation(&self) -> Option<&str> {
        self.conversation.as_deref()
    }

    /// The provider's own `error` event of a Responses stream.
    pub(crate) fn error(&self) -> Option<&[u8]> {
        self.error.as_deref()
    }

    pub(crate) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// The `sequence_number` that a synthesized event would carry (G16).
    pub(crate) fn next_sequence(&self) -> u64 {
        // A provider that numbers nothing is counted for.
        self.sequence.map_or(self.events, |last| last.saturating_add(1))
    }

    /// The next piece that may leave. Call only after `Forward` or `End`.
    pub(crate) fn next_out(&mut self) -> Option<Bytes> {
        let piece = self.out.pop_front()?;
        self.out_bytes -= piece.len();
        Some(piece)
    }

    /// Takes a chunk of the provider's body.
    pub(crate) fn feed(&mut self, chunk: &Bytes) -> Step {
        if self.state == State::Ended {
            return Step::Hold;
        }
        let mut pos = 0;
        // Start of what of this chunk is to be forwarded next, and end of the last complete event.
        let (mut from, mut boundary) = (0, 0);
        let mut stop = None;
        let mut scanner = std::mem::take(&mut self.scanner);
        while let Some(event) = scanner.next_event(chunk, &mut pos) {
            let end = event.end;
            match self.judge(&event) {
                Fate::Pass => {}
                Fate::Drop => {
                    self.emit(chunk, from, boundary);
                    if boundary == 0 {
                        self.drop_tail();
                    }
                    from = end;
                }
                Fate::Stop(kind) => {
                    boundary = end;
                    stop = Some(kind);
                    break;
                }
                Fate::Fail(refusal) => {
                    self.state = State::Ended;
                    return Step::Fail(refusal);
                }
            }
            boundary = end;
        }
        self.scanner = scanner;
        self.emit(chunk, from, boundary);
        if let Some(kind) = stop {
            self.state = State::Ended;
            self.terminal = Some(kind);
            return Step::End(kind);
        }
        if boundary < chunk.len() {
            self.tail_bytes += chunk.len() - boundary;
            self.tail.push(chunk.slice(boundary..));
        }
        self.bound_memory();
        match self.state {
            State::Uncommitted => Step::Hold,
            State::Committed | State::Ended => Step::Forward,
        }
    }

    /// The provider's body ended; `clean` when its message was complete.
    ///
    /// Uncommitted streams are refused; committed ones close as `Closing` says and `next_out` yields what is left.
    pub(crate) fn finish(&mut self, clean: bool) -> Result<Closing, Refusal> {
        match self.state {
            State::Uncommitted => {
                self.state = State::Ended;
                return Err(Refusal::Empty);
            }
            State::Ended => return Ok(Closing::Complete),
            State::Committed => self.state = State::Ended,
        }
        if self.inside_event {
            return Ok(Closing::Abort);
        }
        match self.dialect {
            Dialect::Chat | Dialect::Completions if self.finished >= self.choices => {
                self.push(DONE);
                Ok(Closing::Complete)
            }
            Dialect::Other if clean => Ok(Closing::Complete),
            Dialect::Chat | Dialect::Completions | Dialect::Responses | Dialect::Other => {
                Ok(Closing::ErrorEvent)
            }
        }
    }

    /// Whether a comment may be put in here (G21).
    pub(crate) fn between_events(&self) -> bool {
        !self.inside_event
    }

    fn judge(&mut self, event: &SseEvent<'_>) -> Fate {
        let Some(data) = event.data.as_deref() else {
            return Fate::Pass;
        };
        let name = event.name.as_deref();
        if self.dialect == Dialect::Responses
            && let Some(number) = sequence_number(data)
        {
            self.sequence = Some(number);
        }
        self.events += 1;
        if self.state == State::Committed {
            // A preamble over the hold was committed before it said whose it is.
            if self.response_id.is_none() && self.events <= PREAMBLE && self.dialect == Dialect::Responses {
                self.identify(data);
            }
            let facts = scan_committed(self.dialect, name, data);
            if facts.error && self.dialect == Dialect::Responses {
                self.error = Some(data.to_vec());
            }
            return self.judge_committed(facts);
        }
        let kind = classify(self.dialect, name, data);
        match kind {
            EventKind::Preamble | EventKind::Ignored => {
                if self.dialect == Dialect::Responses && self.response_id.is_none() {
                    self.identify(data);
                }
                Fate::Pass
            }
            EventKind::Error(error) => Fate::Fail(Refusal::InBand(error)),
            EventKind::Malformed => Fate::Fail(Refusal::Malformed),
            // A terminator after nothing is no answer; a Responses terminal carries the whole answer itself.
            EventKind::Terminal(TerminalKind::Done) => Fate::Fail(Refusal::Empty),
            EventKind::UsageOnly if self.hide_usage => {
                self.judge_committed(scan_committed(self.dialect, name, data));
                Fate::Drop
            }
            EventKind::Content | EventKind::Finish | EventKind::UsageOnly | EventKind::Terminal(_) => {
                if kind == EventKind::Terminal(TerminalKind::Failed) {
                    self.early_failure = Some(error_of_failed(data));
                }
                self.state = State::Committed;
                if self.dialect == Dialect::Responses && self.response_id.is_none() {
                    self.identify(data);
                }
                self.judge_committed(scan_committed(self.dialect, name, data))
            }
        }
    }

    fn identify(&mut self, data: &[u8]) {
        let identity = response_id(data);
        self.response_id = identity.id;
        self.model = identity.model;
        self.conversation = identity.conversation;
    }

    fn judge_committed(&mut self, facts: CommittedFacts) -> Fate {
        self.finished = self.finished.saturating_add(facts.finishes);
        self.failed_in_band |= facts.error;
        if facts.usage.is_some() {
            self.usage = facts.usage;
        }
        if let Some(kind) = facts.terminal {
            self.failed_in_band |= kind == TerminalKind::Failed;
            return Fate::Stop(kind);
        }
        if facts.error && self.dialect != Dialect::Responses {
            // The provider's own error is the one typed error (G56); a Responses stream goes on to its `response.failed`.
            return Fate::Stop(TerminalKind::Failed);
        }
        if facts.usage_only && self.hide_usage && !self.inside_event {
            Fate::Drop
        } else {
            Fate::Pass
        }
    }

    /// Hands out the withheld beginning of the event, then this part of the chunk.
    fn emit(&mut self, chunk: &Bytes, from: usize, to: usize) {
        if to > from || (to > 0 && from == 0) {
            self.flush_tail();
            self.push(chunk.slice(from..to));
            self.inside_event = false;
        }
    }

    fn flush_tail(&mut self) {
        for piece in std::mem::take(&mut self.tail) {
            self.push(piece);
        }
        self.tail_bytes = 0;
    }

    fn drop_tail(&mut self) {
        self.tail.clear();
        self.tail_bytes = 0;
    }

    fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.out_bytes += piece.len();
            self.out.push_back(piece);
        }
    }

    /// Over `hold_bytes` the gate commits (gateway.md §13); over `TAIL_MAX` an event leaves in pieces.
    fn bound_memory(&mut self) {
        if self.state == State::Uncommitted && self.out_bytes + self.tail_bytes > self.hold_bytes {
            self.state = State::Committed;
        }
        if self.state == State::Committed && self.tail_bytes > TAIL_MAX {
            self.flush_tail();
            self.inside_event = true;
        }
    }
}

#[cfg(test)]
mod tests;
