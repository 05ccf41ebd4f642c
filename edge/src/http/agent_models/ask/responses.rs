//! `/v1/responses`: items of input become the messages of a conversation, or decisions on calls that wait.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use super::super::fault::Fault;
use super::{Members, is_text};

/// A run to begin or to go on with.
#[derive(Debug)]
pub(in super::super) struct ResponsesAsk {
    pub(in super::super) previous: Option<String>,
    pub(in super::super) instructions: Option<String>,
    /// As chat messages.
    pub(in super::super) messages: Vec<Box<RawValue>>,
    /// What the messages say, when they are a person's and text alone.
    pub(in super::super) text: Option<String>,
    pub(in super::super) decisions: Vec<Decision>,
    pub(in super::super) metadata: BTreeMap<String, String>,
}

/// A person's word on a call.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) struct Decision {
    /// Where it stands in `input`.
    pub(in super::super) at: usize,
    pub(in super::super) approval: String,
    pub(in super::super) approve: bool,
    pub(in super::super) reason: Option<String>,
}

/// A run's input.
#[derive(Debug, Serialize, Deserialize)]
pub(in super::super) struct Conversation {
    pub(in super::super) messages: Vec<Box<RawValue>>,
    /// The first message is the request's `instructions`: a request that goes on from this conversation brings its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(in super::super) instructed: bool,
}

impl Conversation {
    /// `instructions` in front of the messages.
    pub(in super::super) fn new(
        instructions: Option<&str>,
        messages: Vec<Box<RawValue>>,
    ) -> Result<Self, Fault> {
        let mut all = Vec::with_capacity(messages.len() + 1);
        if let Some(instructions) = instructions {
            all.push(plain("system", instructions)?);
        }
        all.extend(messages);
        Ok(Self {
            messages: all,
            instructed: instructions.is_some(),
        })
    }

    pub(in super::super) fn input(&self) -> Result<Box<RawValue>, Fault> {
        to_raw_value(self).map_err(unwritten)
    }
}

fn unwritten(_: serde_json::Error) -> Fault {
    Fault::invalid("input", "`input` cannot be written as a conversation.")
}

/// A message of one text.
pub(in super::super) fn plain(role: &str, content: &str) -> Result<Box<RawValue>, Fault> {
    to_raw_value(&Message { role, content }).map_err(unwritten)
}

#[derive(Serialize)]
struct Message<'a, C> {
    role: &'a str,
    content: C,
}

#[derive(Deserialize)]
struct Item<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    approval_request_id: Option<String>,
    approve: Option<bool>,
    reason: Option<String>,
}

#[derive(Deserialize)]
struct Part<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    refusal: Option<&'a RawValue>,
    #[serde(borrow)]
    image_url: Option<&'a RawValue>,
    #[serde(borrow)]
    detail: Option<&'a RawValue>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ChatPart<'a> {
    Text { text: &'a RawValue },
    ImageUrl { image_url: Image<'a> },
}

#[derive(Serialize)]
struct Image<'a> {
    url: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<&'a RawValue>,
}

impl ResponsesAsk {
    /// # Errors
    /// 400, naming the member or the item.
    pub(in super::super) fn read(body: &[u8], agent: &str) -> Result<Self, Fault> {
        let members = Members::read(body)?;
        members.check(Some(agent))?;
        members.without(&["conversation", "prompt"])?;
        if members
            .get("background")
            .is_some_and(|value| value.get() != "false")
        {
            let why = "`background` cannot be used with an agent; its run goes on when the client leaves.";
            return Err(Fault::invalid("background", why));
        }
        #[derive(Deserialize)]
        struct Text<'t> {
            #[serde(borrow)]
            format: Option<&'t RawValue>,
        }
        let text: Option<Text<'_>> = members.typed("text", "an object")?;
        if text
            .and_then(|text| text.format)
            .is_some_and(|format| !is_text(format))
        {
            let why = "`text.format` must be text: an agent's answer has the form its declaration gives it.";
            return Err(Fault::invalid("text.format", why));
        }
        let mut ask = Self {
            previous: members.typed("previous_response_id", "a string")?,
            instructions: members.typed("instructions", "a string")?,
            messages: Vec::new(),
            text: None,
            decisions: Vec::new(),
            metadata: members.metadata()?,
        };
        let missing = || Fault::invalid("input", "The member `input` is missing.");
        let input = members.get("input").ok_or_else(missing)?;
        if input.get().starts_with('"') {
            ask.messages.push(
                to_raw_value(&Message {
                    role: "user",
                    content: input,
                })
                .map_err(unwritten)?,
            );
            ask.text = decoded(input);
            return Ok(ask);
        }
        let items: Vec<&RawValue> = members
            .typed("input", "a string or a list of items")?
            .unwrap_or_default();
        let mut texts = Some(String::new());
        for (at, item) in items.into_iter().enumerate() {
            ask.item(at, item, &mut texts)?;
        }
        ask.text = texts.filter(|text| !text.is_empty());
        Ok(ask)
    }

    fn item(&mut self, at: usize, item: &RawValue, texts: &mut Option<String>) -> Result<(), Fault> {
        let named = |what: &str| format!("input[{at}]{what}");
        let read: Item<'_> = serde_json::from_str(item.get())
            .map_err(|e| Fault::invalid(named(""), format!("{} is no item: {e}.", named(""))))?;
        match read.kind.as_deref().unwrap_or("message") {
            "message" => {
                let role = match read.role.as_deref() {
                    Some("user") => "user",
                    Some("assistant") => "assistant",
                    Some("system" | "developer") => "system",
                    Some(_) | None => {
                        let why = "The role must be user, assistant, system or developer.";
                        return Err(Fault::invalid(named(".role"), why));
                    }
                };
                let missing = || Fault::invalid(named(".content"), "The message has no content.");
                let content = read.content.ok_or_else(missing)?;
                let (message, text) = message(role, content, &named(".content"))?;
                self.messages.push(message);
                match (role, text, texts.as_mut()) {
                    ("user", Some(text), Some(texts)) => {
                        if !texts.is_empty() {
                            texts.push('\n');
                        }
                        texts.push_str(&text);
                    }
                    _ => *texts = None,
                }
            }
            "mcp_approval_response" => {
                let missing = |member: &str| {
                    let member = named(member);
                    let why = format!("`{member}` is missing.");
                    Fault::invalid(member, why)
                };
                self.decisions.push(Decision {
                    at,
                    approval: read
                        .approval_request_id
                        .ok_or_else(|| missing(".approval_request_id"))?,
                    approve: read.approve.ok_or_else(|| missing(".approve"))?,
                    reason: read.reason,
                });
            }
            // Clients send back what they were told; the run has it.
            "mcp_approval_request" => {}
            other => {
                let why = format!(
                    "An agent takes messages and mcp_approval_response, not an item of type {other:?}."
                );
                return Err(Fault::invalid(named(".type"), why));
            }
        }
        Ok(())
    }
}

fn decoded(text: &RawValue) -> Option<String> {
    serde_json::from_str(text.get()).ok()
}

/// A chat message and its text, when it is text alone.
fn message(role: &str, content: &RawValue, at: &str) -> Result<(Box<RawValue>, Option<String>), Fault> {
    if content.get().starts_with('"') {
        let message = to_raw_value(&Message { role, content }).map_err(unwritten)?;
        return Ok((message, decoded(content)));
    }
    let parts: Vec<Part<'_>> = serde_json::from_str(content.get()).map_err(|e| {
        Fault::invalid(
            at.to_owned(),
            format!("`{at}` must be a string or a list of parts: {e}."),
        )
    })?;
    let mut chat = Vec::with_capacity(parts.len());
    for (n, part) in parts.into_iter().enumerate() {
        let invalid = |why: &str| {
            let param = format!("{at}[{n}]");
            let why = format!("`{param}`: {why}.");
            Fault::invalid(param, why)
        };
        let text = |text: Option<_>| text.map(|text| ChatPart::Text { text });
        let converted = match part.kind.as_str() {
            "input_text" | "output_text" | "text" => text(part.text),
            "refusal" => text(part.refusal),
            "input_image" => part.image_url.map(|url| ChatPart::ImageUrl {
                image_url: Image {
                    url,
                    detail: part.detail,
                },
            }),
            other => return Err(invalid(&format!("a part of type {other:?} cannot be used"))),
        };
        chat.push(converted.ok_or_else(|| invalid("its content is missing"))?);
    }
    if let [ChatPart::Text { text }] = chat.as_slice() {
        let message = to_raw_value(&Message { role, content: *text }).map_err(unwritten)?;
        return Ok((message, decoded(text)));
    }
    let said = chat.iter().map(|part| match part {
        ChatPart::Text { text } => decoded(text),
        ChatPart::ImageUrl { .. } => None,
    });
    let said: Option<String> = said.collect();
    let message = to_raw_value(&Message { role, content: &chat }).map_err(unwritten)?;
    Ok((message, said))
}
