//! Writes an answer as one of OpenAI's APIs writes it. Pure.

use bytes::{BufMut, Bytes, BytesMut};
use iop_durable::ids::RunId;
use iop_shared::openai::answer::{Approval, ChatAnswer, Close, Item, ResponsesAnswer, Said};
use iop_shared::openai::event::chat_error_event;
use iop_shared::openai::usage::Usage;

use super::fault::Fault;
use super::pause::Pending;
use super::reader::{Answer, End, News};
use super::telling::Part;

/// Between messages of one text.
const BLANK_LINE: &str = "\n\n";

/// Writes a stream.
pub(super) trait Pen: Send + 'static {
    fn opens(&mut self) -> Bytes;
    fn news(&mut self, news: &News) -> Bytes;
    /// The stream cannot go on.
    fn breaks(&mut self, fault: &Fault) -> Bytes;
}

/// What a pause says, in words.
fn words(pending: &[Pending], run: &RunId) -> String {
    let words: Vec<String> = pending.iter().map(|one| one.words(run)).collect();
    words.join(BLANK_LINE)
}

/// A chat completion.
pub(super) struct ChatPen {
    answer: ChatAnswer,
    run: RunId,
    spoke: bool,
}

impl ChatPen {
    pub(super) fn new(answer: ChatAnswer, run: RunId) -> Self {
        Self {
            answer,
            run,
            spoke: false,
        }
    }

    fn text(&mut self, out: &mut BytesMut, text: &str) {
        self.spoke = true;
        out.put(self.answer.text(text));
    }

    /// The answer without a stream: what was said last, or what is waited for.
    ///
    /// # Errors
    /// When the run ended otherwise than well.
    pub(super) fn whole(&self, answer: &Answer) -> Result<Bytes, Fault> {
        let text = match &answer.end {
            Some(End::Paused(pending)) => words(pending, &self.run),
            Some(End::Over(outcome)) => {
                if let Some(fault) = Fault::of_outcome(&self.run, outcome) {
                    return Err(fault);
                }
                let output = outcome.output.as_ref();
                let text = output.and_then(|output| serde_json::from_str(output.get()).ok());
                text.unwrap_or_default()
            }
            None => String::new(),
        };
        Ok(self.answer.whole(&Said::Text(&text), answer.usage))
    }
}

impl Pen for ChatPen {
    fn opens(&mut self) -> Bytes {
        self.answer.text_begins()
    }

    fn news(&mut self, news: &News) -> Bytes {
        let mut out = BytesMut::new();
        match news {
            News::Part(Part::Begins) if self.spoke => self.text(&mut out, BLANK_LINE),
            News::Part(Part::Says(text)) => self.text(&mut out, text),
            News::Part(Part::Begins | Part::Broken(_) | Part::Ends(_)) => {}
            News::End(End::Paused(pending), usage) => {
                if self.spoke {
                    self.text(&mut out, BLANK_LINE);
                }
                let words = words(pending, &self.run);
                self.text(&mut out, &words);
                out.put(self.answer.ends(&Said::Text(""), *usage));
            }
            News::End(End::Over(outcome), usage) => match Fault::of_outcome(&self.run, outcome) {
                Some(fault) => out.put(self.breaks(&fault)),
                None => out.put(self.answer.ends(&Said::Text(""), *usage)),
            },
        }
        out.freeze()
    }

    fn breaks(&mut self, fault: &Fault) -> Bytes {
        chat_error_event(&fault.code, &fault.message, fault.kind)
    }
}

/// One item of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Written {
    Message {
        text: String,
        whole: bool,
    },
    Approval {
        id: String,
        tool: String,
        arguments: String,
    },
}

/// A response.
pub(super) struct ResponsesPen {
    answer: ResponsesAnswer,
    /// `server_label`.
    agent: String,
    run: RunId,
    items: Vec<Written>,
    usage: Option<Usage>,
}

impl ResponsesPen {
    pub(super) fn new(answer: ResponsesAnswer, agent: String, run: RunId) -> Self {
        Self {
            answer,
            agent,
            run,
            items: Vec::new(),
            usage: None,
        }
    }

    /// The response without a stream.
    pub(super) fn whole(mut self, answer: &Answer) -> Bytes {
        self.items
            .extend(answer.messages.iter().map(|(text, whole)| Written::Message {
                text: text.clone(),
                whole: *whole,
            }));
        let fault = match &answer.end {
            Some(End::Paused(pending)) => {
                let waiting = pending.iter().map(|one| written(one, &self.run));
                self.items.extend(waiting);
                None
            }
            Some(End::Over(outcome)) => Fault::of_outcome(&self.run, outcome),
            None => None,
        };
        let close = match &fault {
            Some(fault) => closing(fault),
            None if answer.end.is_none() => Close::NotYet,
            None => Close::Completed,
        };
        self.answer
            .object(&items(&self.items, &self.agent), close, answer.usage)
    }

    fn closes(&mut self, close: Close<'_>) -> Bytes {
        self.answer
            .closes(&items(&self.items, &self.agent), close, self.usage)
    }

    fn message(&mut self, text: String, whole: bool) -> Bytes {
        let index = self.items.len();
        let ends = self.answer.message_ends(index, &text, whole);
        self.items.push(Written::Message { text, whole });
        ends
    }
}

/// What is waited for as an item.
fn written(pending: &Pending, run: &RunId) -> Written {
    match pending {
        Pending::Approval {
            id, tool, arguments, ..
        } => Written::Approval {
            id: id.clone(),
            tool: tool.clone(),
            arguments: arguments.clone(),
        },
        // The next request's text is the answer.
        Pending::Input { prompt, .. } => Written::Message {
            text: prompt.clone(),
            whole: true,
        },
        Pending::Effect { .. } | Pending::Word => Written::Message {
            text: pending.words(run),
            whole: true,
        },
    }
}

fn items<'a>(written: &'a [Written], agent: &'a str) -> Vec<Item<'a>> {
    let item = |one: &'a Written| match one {
        Written::Message { text, whole } => Item::Message { text, whole: *whole },
        Written::Approval { id, tool, arguments } => Item::Approval(approval(id, tool, arguments, agent)),
    };
    written.iter().map(item).collect()
}

fn approval<'a>(id: &'a str, name: &'a str, arguments: &'a str, server_label: &'a str) -> Approval<'a> {
    Approval {
        id,
        name,
        arguments,
        server_label,
    }
}

fn closing(fault: &Fault) -> Close<'_> {
    let (code, message) = (fault.code.as_ref(), fault.message.as_ref());
    match code {
        "run_cancelled" => Close::Cancelled { code, message },
        _ => Close::Failed { code, message },
    }
}

impl Pen for ResponsesPen {
    fn opens(&mut self) -> Bytes {
        self.answer.begins()
    }

    fn news(&mut self, news: &News) -> Bytes {
        let index = self.items.len();
        match news {
            News::Part(Part::Begins) => self.answer.message_begins(index),
            News::Part(Part::Says(text)) => self.answer.message_goes_on(index, text),
            News::Part(Part::Broken(text)) => self.message(text.clone(), false),
            News::Part(Part::Ends(text)) => self.message(text.clone(), true),
            News::End(End::Paused(pending), usage) => {
                self.usage = *usage;
                let mut out = BytesMut::new();
                for one in pending {
                    let index = self.items.len();
                    match written(one, &self.run) {
                        Written::Message { text, .. } => {
                            out.put(self.answer.message_begins(index));
                            out.put(self.answer.message_goes_on(index, &text));
                            out.put(self.message(text, true));
                        }
                        Written::Approval { id, tool, arguments } => {
                            let item = approval(&id, &tool, &arguments, &self.agent);
                            out.put(self.answer.approval(index, &item));
                            self.items.push(Written::Approval { id, tool, arguments });
                        }
                    }
                }
                out.put(self.closes(Close::Completed));
                out.freeze()
            }
            News::End(End::Over(outcome), usage) => {
                self.usage = *usage;
                match Fault::of_outcome(&self.run, outcome) {
                    Some(fault) => self.breaks(&fault),
                    None => self.closes(Close::Completed),
                }
            }
        }
    }

    fn breaks(&mut self, fault: &Fault) -> Bytes {
        self.closes(closing(fault))
    }
}

#[cfg(test)]
mod tests;
