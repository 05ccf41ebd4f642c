//! What a provider does with the attempts that reach it.

use std::time::Duration;

use serde_json::json;

/// How many words a good stream says.
pub const WORDS: usize = 60;

/// An answer with a status of its own; `NAME` in the body is replaced by the provider's name.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    /// An OpenAI error.
    pub fn error(status: u16, code: &str) -> Self {
        let error = json!({"error": {"message": format!("{status} of NAME"), "type": "t", "param": null,
                                     "code": code}});
        Self {
            status,
            headers: vec![("content-type".to_owned(), "application/json".to_owned())],
            body: error.to_string(),
        }
    }

    /// A web page.
    pub fn html(status: u16) -> Self {
        Self {
            status,
            headers: vec![("content-type".to_owned(), "text/html".to_owned())],
            body: format!("<html>{status} of NAME</html>"),
        }
    }

    /// One more header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Another body, as it is.
    #[must_use]
    pub fn body(mut self, body: &str) -> Self {
        self.body = body.to_owned();
        self
    }

    /// The body as this provider sends it.
    pub fn body_of(&self, provider: &str) -> String {
        self.body.replace("NAME", provider)
    }
}

/// What comes after the good part of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Nothing, on an open connection.
    Silence,
    /// The connection is closed inside the message.
    Cut,
    /// An error in the stream: `data: {"error":…}`, `event: error`; a whole body is the error object instead.
    Error,
    /// `response.failed`; on Chat the same as `Error`.
    Failed,
    /// The message ends as if it were complete.
    End,
}

/// What a provider does with one attempt.
#[derive(Debug, Clone)]
pub enum Act {
    /// The whole good answer.
    Good,
    Status(Reply),
    /// The head of an error with this status, then this.
    StatusThen(u16, Then),
    /// This, so much later.
    After(Duration, Box<Act>),
    /// The connection is reset before any answer.
    Reset,
    /// The connection is closed before any answer.
    HangUp,
    /// The request is taken and never answered.
    Silence,
    /// The head of a 200, then this.
    Head(Then),
    /// Head and preamble (of a whole body: its first half), then this.
    Preamble(Then),
    /// The same, larger than what is held before content, then this.
    Large(Then),
    /// Head, preamble and so many content events, then this.
    Content(usize, Then),
    /// A good stream whose content event of this number is no JSON.
    Malformed(usize),
    /// A good stream without its terminal event.
    NoTerminal,
    /// A head, then a comment (of a whole body: a blank) at this interval, for ever.
    Comments(Duration),
    /// A good stream of so many words, silent before the first one and between them; a whole answer is silent at first.
    Paced {
        words: usize,
        first: Duration,
        gap: Duration,
    },
}

/// Attempts in order: the first ones one by one, then the last for ever.
#[derive(Debug, Clone)]
pub struct Script {
    first: Vec<Act>,
    last: Act,
}

impl Script {
    pub fn good() -> Self {
        Self::always(Act::Good)
    }

    pub fn always(act: Act) -> Self {
        Self {
            first: Vec::new(),
            last: act,
        }
    }

    /// `act` once, good from then on.
    pub fn once(act: Act) -> Self {
        Self {
            first: vec![act],
            last: Act::Good,
        }
    }

    /// These one by one, then `last` for ever.
    pub fn series(first: Vec<Act>, last: Act) -> Self {
        Self { first, last }
    }

    pub(super) fn act(&self, attempt: usize) -> Act {
        self.first.get(attempt).unwrap_or(&self.last).clone()
    }
}
