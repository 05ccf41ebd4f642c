//! What of a chat completion is read: the few members that make an answer, in the spellings that providers have for them. Pure.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::answer::Broken;

/// A chunk of a stream, or a whole completion.
#[derive(Deserialize)]
pub(super) struct Chunk<'a> {
    #[serde(borrow, default)]
    pub(super) choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow, default)]
    pub(super) usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) model: Option<&'a RawValue>,
}

/// One choice; `delta` in a chunk, `message` in a whole completion.
#[derive(Deserialize)]
pub(super) struct Choice<'a> {
    #[serde(default)]
    pub(super) index: Option<u32>,
    #[serde(borrow, default)]
    pub(super) delta: Option<Message<'a>>,
    #[serde(borrow, default)]
    pub(super) message: Option<Message<'a>>,
    #[serde(borrow, default)]
    pub(super) finish_reason: Option<&'a RawValue>,
}

/// What of a message is text or a call.
#[derive(Deserialize)]
pub(super) struct Message<'a> {
    #[serde(borrow, default)]
    pub(super) content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) refusal: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) reasoning_content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) reasoning: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) tool_calls: Option<Vec<Piece<'a>>>,
}

/// A piece of a tool call, or all of it.
#[derive(Deserialize)]
pub(super) struct Piece<'a> {
    #[serde(default)]
    pub(super) index: Option<u32>,
    #[serde(borrow, default)]
    pub(super) id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) function: Option<Function<'a>>,
}

/// Its function.
#[derive(Deserialize)]
pub(super) struct Function<'a> {
    #[serde(borrow, default)]
    pub(super) name: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) arguments: Option<&'a RawValue>,
}

/// A part of a `content` that is a list.
#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow, default)]
    text: Option<&'a RawValue>,
}

impl<'a> Chunk<'a> {
    /// # Errors
    /// `Malformed`: no JSON object, or a member that is not what it has to be.
    pub(super) fn read(data: &'a [u8]) -> Result<Self, Broken> {
        // serde takes a list for an object without names.
        if !data.trim_ascii_start().starts_with(b"{") {
            return Err(Broken::Malformed);
        }
        serde_json::from_slice(data).map_err(|_| Broken::Malformed)
    }
}

impl Choice<'_> {
    /// A turn asks for one choice; the first counts.
    pub(super) fn is_first(&self) -> bool {
        self.index.unwrap_or(0) == 0
    }
}

/// The text of a JSON string; `None` for any other value.
pub(super) fn text(raw: &RawValue) -> Result<Option<String>, Broken> {
    if !raw.get().starts_with('"') {
        return Ok(None);
    }
    serde_json::from_str(raw.get())
        .map(Some)
        .map_err(|_| Broken::Malformed)
}

/// A text that says something.
pub(super) fn said(raw: Option<&RawValue>) -> Result<Option<String>, Broken> {
    let text = raw.map(text).transpose()?.flatten();
    Ok(text.filter(|t| !t.is_empty()))
}

/// A content: a text, or a list of parts of which those with a text count.
pub(super) fn content(raw: Option<&RawValue>) -> Result<Option<String>, Broken> {
    let Some(list) = raw.filter(|r| r.get().starts_with('[')) else {
        return said(raw);
    };
    let parts: Vec<Part<'_>> = serde_json::from_str(list.get()).map_err(|_| Broken::Malformed)?;
    let mut whole = String::new();
    for part in parts {
        whole.push_str(&said(part.text)?.unwrap_or_default());
    }
    Ok((!whole.is_empty()).then_some(whole))
}

/// Arguments: a text, or from some providers the object itself, which is kept as it is written.
pub(super) fn written(raw: Option<&RawValue>) -> Result<Option<String>, Broken> {
    match raw {
        Some(object) if object.get().starts_with('{') => Ok(Some(object.get().to_owned())),
        other => said(other),
    }
}

/// The message and the code of a provider's error object, as far as it has them.
pub(super) fn words(object: &Bytes) -> (Option<String>, Option<String>) {
    #[derive(Deserialize)]
    struct Words<'a> {
        #[serde(borrow, default)]
        message: Option<&'a RawValue>,
        #[serde(borrow, default)]
        code: Option<&'a RawValue>,
    }
    let Ok(words) = serde_json::from_slice::<Words<'_>>(object) else {
        return (None, None);
    };
    let word = |raw| said(raw).ok().flatten();
    (word(words.message), word(words.code))
}
