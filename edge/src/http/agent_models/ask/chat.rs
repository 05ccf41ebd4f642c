//! `/v1/chat/completions`: the messages are the run's conversation, as they were sent.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use super::super::fault::Fault;
use super::{Members, is_text};

/// A run to begin.
#[derive(Debug)]
pub(in super::super) struct ChatAsk {
    /// `{"messages":[…]}`.
    pub(in super::super) input: Box<RawValue>,
    pub(in super::super) metadata: BTreeMap<String, String>,
}

impl ChatAsk {
    /// # Errors
    /// 400, naming the member.
    pub(in super::super) fn read(body: &[u8]) -> Result<Self, Fault> {
        let members = Members::read(body)?;
        members.check(None)?;
        members.without(&["functions", "function_call", "audio"])?;
        if members.get("n").is_some_and(|n| n.get() != "1") {
            return Err(Fault::invalid("n", "`n` must be 1: a run has one answer."));
        }
        if members
            .get("response_format")
            .is_some_and(|format| !is_text(format))
        {
            let why =
                "`response_format` must be text: an agent's answer has the form its declaration gives it.";
            return Err(Fault::invalid("response_format", why));
        }
        let messages = members
            .get("messages")
            .ok_or_else(|| Fault::invalid("messages", "The member `messages` is missing."))?;
        let input = RawValue::from_string(format!("{{\"messages\":{}}}", messages.get()))
            .map_err(|_| Fault::invalid("messages", "`messages` cannot be read."))?;
        crate::agents::transcript::conversation(&input)
            .map_err(|why| Fault::invalid("messages", format!("{why}.")))?;
        Ok(Self {
            input,
            metadata: members.metadata()?,
        })
    }
}
