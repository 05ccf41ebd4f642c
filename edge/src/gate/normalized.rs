//! Targets of the normalized path: a client's request as a run, and a run's events as what a native provider would
//! send (G15). Pure.
//!
//! `Renderer` stands between a node's answer and the relay, so that the gate reads one form whichever way an attempt
//! took. It decides nothing about commit, failures or usage accounting.

mod request;

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http::header::{self, HeaderMap, HeaderValue};
use iop_shared::execution::{Endpoint, FailureCode, RuntimeEventKind};
use iop_shared::openai::answer::{Author, ChatAnswer, ResponsesAnswer, Said};
use iop_shared::openai::usage::Usage;
use iop_shared::wire::event::RunEvent;
use iop_shared::wire::terminal::NodeError;

use super::head::Head;
use crate::link::lines::Lines;

pub(crate) use request::run_request;

/// Text that has to be said again at its end, in bytes; no model answers with as much.
const TEXT_MAX: usize = 16 << 20;

/// Turns the lines of one run into the bytes of one native answer.
pub(crate) struct Renderer {
    form: Form,
    lines: Lines,
    /// What was said, where the API says it again at its end.
    text: String,
    usage: Option<Usage>,
    begun: bool,
    /// The run's terminal was read; nothing follows.
    ended: bool,
    failure: Option<NodeError>,
}

/// The four answers that a run can become.
enum Form {
    ChatStream(ChatAnswer),
    ChatWhole(ChatAnswer),
    /// `bool`: its message has begun.
    ResponsesStream(ResponsesAnswer, bool),
    ResponsesWhole(ResponsesAnswer),
}

impl Renderer {
    /// `id`: of the request, the same for all its attempts; `created`: seconds since 1970; `include_usage`: the chat
    /// stream tells usage. An endpoint that `run_request` refuses never gets here; it would read as Chat.
    pub(crate) fn new(
        endpoint: Endpoint,
        stream: bool,
        include_usage: bool,
        model_target: &str,
        id: uuid::Uuid,
        created: i64,
    ) -> Self {
        let author = Author {
            id,
            model: model_target.to_owned(),
            created,
        };
        let form = match (endpoint == Endpoint::Responses, stream) {
            (true, true) => Form::ResponsesStream(ResponsesAnswer::new(author), false),
            (true, false) => Form::ResponsesWhole(ResponsesAnswer::new(author)),
            (false, true) => Form::ChatStream(ChatAnswer::new(author, include_usage)),
            (false, false) => Form::ChatWhole(ChatAnswer::new(author, false)),
        };
        Self {
            form,
            lines: Lines::default(),
            text: String::new(),
            usage: None,
            begun: false,
            ended: false,
            failure: None,
        }
    }

    /// The head that a native provider would send.
    pub(crate) fn head(&self) -> Head {
        let kind = match self.form {
            Form::ChatStream(_) | Form::ResponsesStream(..) => "text/event-stream; charset=utf-8",
            Form::ChatWhole(_) | Form::ResponsesWhole(_) => "application/json",
        };
        let mut headers = HeaderMap::with_capacity(1);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        Head {
            status: StatusCode::OK,
            headers,
            provider_length: None,
        }
    }

    /// Takes a piece of the run, cut anywhere; gives what can leave now, often nothing. Look at `failure` after it.
    pub(crate) fn feed(&mut self, data: &[u8]) -> Bytes {
        let mut out = BytesMut::new();
        self.lines.push(data);
        while !self.ended && self.failure.is_none() {
            match self.lines.next() {
                Ok(None) => break,
                Ok(Some(line)) => match RunEvent::parse(&line) {
                    Ok(event) => self.take(&event, &mut out),
                    Err(e) => self.fail(&e.to_string()),
                },
                Err(_) => self.fail("a line of the run is too long"),
            }
        }
        out.freeze()
    }

    /// Why the run is no answer, besides what its own terminal says. What was given before it stands.
    pub(crate) fn failure(&self) -> Option<&NodeError> {
        self.failure.as_ref()
    }

    fn fail(&mut self, why: &str) {
        // As when a provider's message breaks off: what follows cannot be read.
        self.failure = Some(NodeError::new(FailureCode::ProviderCut, why));
    }

    fn take(&mut self, event: &RunEvent, out: &mut BytesMut) {
        if event.usage.is_some() {
            self.usage = event.usage;
        }
        match event.kind {
            RuntimeEventKind::Start => self.begin(out),
            RuntimeEventKind::Delta | RuntimeEventKind::Message => {
                for text in [&event.delta, &event.message] {
                    if !text.is_empty() {
                        self.say(text, out);
                    }
                }
            }
            RuntimeEventKind::Complete => {
                self.begin(out);
                self.end(out);
                self.ended = true;
            }
            // What went wrong is in the trailers, and a provider that fails writes no end.
            RuntimeEventKind::Error | RuntimeEventKind::Cancelled => self.ended = true,
            RuntimeEventKind::Usage | RuntimeEventKind::Unknown => {}
        }
    }

    fn begin(&mut self, out: &mut BytesMut) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        match &mut self.form {
            Form::ChatStream(answer) => out.extend_from_slice(&answer.text_begins()),
            Form::ResponsesStream(answer, _) => out.extend_from_slice(&answer.begins()),
            Form::ChatWhole(_) | Form::ResponsesWhole(_) => {}
        }
    }

    fn say(&mut self, text: &str, out: &mut BytesMut) {
        self.begin(out);
        match &mut self.form {
            Form::ChatStream(answer) => {
                out.extend_from_slice(&answer.text(text));
                return;
            }
            Form::ResponsesStream(answer, open) => {
                if !std::mem::replace(open, true) {
                    out.extend_from_slice(&answer.text_begins());
                }
                out.extend_from_slice(&answer.text(text));
            }
            Form::ChatWhole(_) | Form::ResponsesWhole(_) => {}
        }
        self.text.push_str(text);
        if self.text.len() > TEXT_MAX {
            self.fail("the run's answer is too long");
        }
    }

    fn end(&mut self, out: &mut BytesMut) {
        let (said, usage) = (Said::Text(&self.text), self.usage);
        match &mut self.form {
            Form::ChatStream(answer) => out.extend_from_slice(&answer.ends(&said, usage)),
            Form::ResponsesStream(answer, open) => {
                if !*open {
                    out.extend_from_slice(&answer.text_begins());
                }
                out.extend_from_slice(&answer.text_ends(&self.text));
                out.extend_from_slice(&answer.ends(&said, usage));
            }
            Form::ChatWhole(answer) => out.extend_from_slice(&answer.whole(&said, usage)),
            Form::ResponsesWhole(answer) => out.extend_from_slice(&answer.whole(&said, usage)),
        }
    }
}

#[cfg(test)]
mod tests;
