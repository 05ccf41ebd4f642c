//! What a provider says when nothing is wrong, as bytes.

use serde_json::{Value, json};

use crate::fixtures;

/// The two APIs that streams and replays have to get right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Api {
    Chat,
    Responses,
}

impl Api {
    /// Both.
    pub const ALL: [Api; 2] = [Api::Chat, Api::Responses];

    pub fn name(self) -> &'static str {
        match self {
            Api::Chat => "chat",
            Api::Responses => "responses",
        }
    }

    pub fn path(self) -> &'static str {
        match self {
            Api::Chat => "/v1/chat/completions",
            Api::Responses => "/v1/responses",
        }
    }

    /// The API of a request's path.
    pub fn of_path(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|api| api.path() == path)
    }

    /// A plain request.
    pub fn request(self, model: &str, stream: bool) -> Value {
        match self {
            Api::Chat => fixtures::chat(model, "hi", stream),
            Api::Responses => fixtures::responses(model, "hi", stream),
        }
    }
}

/// The good answers of one provider to one target.
#[derive(Debug, Clone)]
pub struct Answers {
    pub api: Api,
    /// The provider's own name; stands in ids and text.
    pub provider: String,
    pub target: String,
}

impl Answers {
    /// The id of the answer.
    pub fn id(&self) -> String {
        match self.api {
            Api::Chat => format!("chatcmpl-{}", self.provider),
            Api::Responses => format!("resp_{}", self.provider),
        }
    }

    /// A whole answer.
    pub fn whole(&self) -> Vec<u8> {
        let text = format!("all of {}", self.provider);
        let answer = match self.api {
            Api::Chat => {
                let mut answer = fixtures::chat_answer(&self.target, &text);
                answer["id"] = json!(self.id());
                answer
            }
            Api::Responses => {
                let output = json!([fixtures::message_item(&text, "completed")]);
                fixtures::response_object(&self.id(), &self.target, "completed", &output)
            }
        };
        answer.to_string().into_bytes()
    }

    /// The events of a stream that says `n` words.
    pub fn stream(&self, n: usize) -> Events {
        let words = words(&self.provider, n);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match self.api {
            Api::Chat => {
                let role = json!({"role": "assistant", "content": ""});
                let mut all = vec![self.chunk(&role, None)];
                all.extend(words.iter().map(|w| self.chunk(&json!({"content": w}), None)));
                all.push(self.chunk(&json!({}), Some("stop")));
                Events {
                    preamble: all.drain(..1).collect(),
                    content: all.drain(..n).collect(),
                    finish: all,
                    terminal: vec![b"data: [DONE]\n\n".to_vec()],
                }
            }
            Api::Responses => {
                let events = fixtures::response_events(&self.id(), &self.target, &words);
                let mut all: Vec<Vec<u8>> = events.iter().map(fixtures::named_event).collect();
                Events {
                    preamble: all.drain(..4).collect(),
                    content: all.drain(..n).collect(),
                    finish: all.drain(..3).collect(),
                    terminal: all,
                }
            }
        }
    }

    fn chunk(&self, delta: &Value, finish: Option<&str>) -> Vec<u8> {
        let mut chunk = fixtures::chat_chunk(delta, finish);
        chunk["id"] = json!(self.id());
        chunk["model"] = json!(self.target);
        format!("data: {chunk}\n\n").into_bytes()
    }
}

/// A stream in its parts, one event each.
#[derive(Debug, Clone)]
pub struct Events {
    /// The role chunk, or `response.created` up to the first part: no content.
    pub preamble: Vec<Vec<u8>>,
    pub content: Vec<Vec<u8>>,
    /// The chunk with `finish_reason`, or the `done` events.
    pub finish: Vec<Vec<u8>>,
    /// `[DONE]`, or `response.completed`.
    pub terminal: Vec<Vec<u8>>,
}

impl Events {
    /// Everything in order.
    pub fn all(&self) -> Vec<Vec<u8>> {
        [&self.preamble, &self.content, &self.finish, &self.terminal]
            .into_iter()
            .flatten()
            .cloned()
            .collect()
    }
}

/// The words that a provider's stream says, one per content event.
pub fn words(provider: &str, n: usize) -> Vec<String> {
    (0..n).map(|i| format!("{provider}-{i} ")).collect()
}
