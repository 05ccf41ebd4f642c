//! A response that is kept and can be asked for again: several items, and calls that wait for somebody's word.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::{Value, json};

use super::responses::Status;
use super::{Author, ResponsesAnswer};
use crate::openai::usage::Usage;

/// What a kept response says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    pub id: String,
    pub previous: Option<String>,
    pub metadata: BTreeMap<String, String>,
}

/// A call that waits for a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Approval<'a> {
    pub id: &'a str,
    /// Of the tool.
    pub name: &'a str,
    /// As the model wrote them.
    pub arguments: &'a str,
    pub server_label: &'a str,
}

/// One item of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Item<'a> {
    /// `whole`: it did not break off.
    Message {
        text: &'a str,
        whole: bool,
    },
    Approval(Approval<'a>),
}

/// Where a response stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close<'a> {
    NotYet,
    Completed,
    Failed { code: &'a str, message: &'a str },
    Cancelled { code: &'a str, message: &'a str },
}

impl Kept {
    pub(super) fn mark(&self, response: &mut Value) {
        response["store"] = json!(true);
        response["previous_response_id"] = json!(self.previous);
        response["metadata"] = json!(self.metadata);
    }
}

impl Approval<'_> {
    fn item(&self) -> Value {
        json!({"id": self.id, "type": "mcp_approval_request", "name": self.name,
               "arguments": self.arguments, "server_label": self.server_label})
    }
}

impl ResponsesAnswer {
    /// Writes a response of this id.
    pub fn kept(author: Author, kept: Kept) -> Self {
        let stem = kept.id.strip_prefix("resp_").unwrap_or(&kept.id).to_owned();
        Self {
            author,
            id: kept.id.clone(),
            stem,
            kept: Some(kept),
            sequence: 0,
        }
    }

    /// A call that waits, whole at once. `index`: of the item in the output.
    pub fn approval(&mut self, index: usize, approval: &Approval<'_>) -> Bytes {
        let fields = json!({"output_index": index, "item": approval.item()});
        let added = self.event("response.output_item.added", &fields);
        super::joined(&[added, self.event("response.output_item.done", &fields)])
    }

    /// The last event; `output`: every item that was begun, in order.
    pub fn closes(&mut self, output: &[Item<'_>], close: Close<'_>, usage: Option<Usage>) -> Bytes {
        let kind = match close {
            Close::NotYet => "response.in_progress",
            Close::Completed => "response.completed",
            Close::Failed { .. } | Close::Cancelled { .. } => "response.failed",
        };
        let response = self.standing(output, close, usage);
        Bytes::from(self.event(kind, json!({"response": response})))
    }

    /// The response as it stands, without a stream.
    pub fn object(&self, output: &[Item<'_>], close: Close<'_>, usage: Option<Usage>) -> Bytes {
        Bytes::from(super::json(&self.standing(output, close, usage)))
    }

    fn standing(&self, output: &[Item<'_>], close: Close<'_>, usage: Option<Usage>) -> Value {
        let items = output.iter().enumerate().map(|(index, item)| match item {
            Item::Message { text, whole } => self.message_of(index, text, *whole),
            Item::Approval(approval) => approval.item(),
        });
        let output = json!(items.collect::<Vec<_>>());
        let (status, error) = match close {
            Close::NotYet => (Status::InProgress, None),
            Close::Completed => (Status::Completed, None),
            Close::Failed { code, message } => (Status::Failed, Some((code, message))),
            Close::Cancelled { code, message } => (Status::Cancelled, Some((code, message))),
        };
        let mut response = self.response(status, output, usage);
        if let Some((code, message)) = error {
            response["error"] = json!({"code": code, "message": message});
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> ResponsesAnswer {
        let author = Author {
            id: uuid::Uuid::from_u128(7),
            model: "agent:a".into(),
            created: 1,
        };
        let kept = Kept {
            id: "resp_07_3".into(),
            previous: Some("resp_07_0".into()),
            metadata: BTreeMap::from([("iop_run_id".to_owned(), "run_07".to_owned())]),
        };
        ResponsesAnswer::kept(author, kept)
    }

    fn data(bytes: &Bytes) -> Vec<Value> {
        let text = std::str::from_utf8(bytes).unwrap();
        let lines = text.lines().filter_map(|line| line.strip_prefix("data: "));
        lines.map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn several_items_are_numbered_and_the_end_repeats_them() {
        let approval = Approval {
            id: "apr_1",
            name: "deploy",
            arguments: "{\"region\": \"eu\"}",
            server_label: "a",
        };
        let mut answer = answer();
        let mut all = data(&answer.begins());
        for (index, text) in ["one", "two"].into_iter().enumerate() {
            all.extend(data(&answer.message_begins(index)));
            all.extend(data(&answer.message_goes_on(index, text)));
            all.extend(data(&answer.message_ends(index, text, index == 1)));
        }
        all.extend(data(&answer.approval(2, &approval)));
        let items = [
            Item::Message {
                text: "one",
                whole: false,
            },
            Item::Message {
                text: "two",
                whole: true,
            },
            Item::Approval(approval),
        ];
        let end = data(&answer.closes(&items, Close::Completed, None));
        all.extend(end.clone());
        for (n, event) in all.iter().enumerate() {
            assert_eq!(event["sequence_number"], n);
        }
        let response = &end[0]["response"];
        assert_eq!(end[0]["type"], "response.completed");
        assert_eq!(
            (
                &response["id"],
                &response["previous_response_id"],
                &response["store"]
            ),
            (&json!("resp_07_3"), &json!("resp_07_0"), &json!(true))
        );
        assert_eq!(response["metadata"]["iop_run_id"], "run_07");
        let done: Vec<&Value> = all
            .iter()
            .filter(|event| event["type"] == "response.output_item.done")
            .map(|event| &event["item"])
            .collect();
        assert_eq!(json!(done), response["output"]);
        let output = response["output"].as_array().unwrap();
        assert_eq!(output[0]["status"], "incomplete");
        assert_ne!(output[0]["id"], output[1]["id"]);
        assert_eq!(output[2]["arguments"], "{\"region\": \"eu\"}");
        assert_eq!(
            serde_json::from_slice::<Value>(&answer.object(&items, Close::Completed, None)).unwrap(),
            *response
        );
    }

    #[test]
    fn an_end_that_is_none_says_why() {
        let mut answer = answer();
        let why = Close::Failed {
            code: "http_503",
            message: "no",
        };
        let failed = data(&answer.closes(&[], why, None));
        assert_eq!(failed[0]["type"], "response.failed");
        assert_eq!(
            failed[0]["response"]["error"],
            json!({"code": "http_503", "message": "no"})
        );
        let open: Value = serde_json::from_slice(&answer.object(&[], Close::NotYet, None)).unwrap();
        assert_eq!(
            (&open["status"], &open["error"]),
            (&json!("in_progress"), &json!(null))
        );
        let gone = Close::Cancelled {
            code: "run_cancelled",
            message: "",
        };
        let gone: Value = serde_json::from_slice(&answer.object(&[], gone, None)).unwrap();
        assert_eq!(gone["status"], "cancelled");
    }
}
