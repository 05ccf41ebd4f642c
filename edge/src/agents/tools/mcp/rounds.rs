//! Calls in several rounds (MCP 2026-07-28, S106): a server that answers `input_required` is asked again by whoever has the answer. Pure.
//!
//! Nothing here goes on by itself. What is to be kept of a round is bytes, so that it can be the output of one activity
//! and the input of the next.

use std::collections::BTreeMap;

use bytes::Bytes;
use rmcp::model::{ElicitRequestParams, InputRequest, InputRequiredResult};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

/// Begins the output of a round that is not the last. No tool's result begins like this: see [`is_reserved`].
const ASKED: &[u8] = b"\0iop/input-required\0";
/// Begins the arguments of a round that is not the first. No JSON begins like this.
const ANSWERED: &[u8] = b"\0iop/input-responses\0";

/// What a call came to.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Answered {
    /// What the model is told, byte for byte.
    Result(Bytes),
    /// The server wants to know something first.
    InputRequired(Asked),
}

/// What a server wants to know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Asked {
    /// By the server's own names.
    questions: BTreeMap<String, Question>,
    /// The server's, given back as it came.
    state: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Question {
    message: String,
    /// JSON Schema of the answer; without it the person only says that it is done.
    schema: Option<Value>,
}

/// The second half of a later round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Answers {
    pub(super) responses: Option<BTreeMap<String, Value>>,
    pub(super) state: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Continued {
    arguments: String,
    answers: Answers,
}

/// Whether a tool's result would be taken for a question: a text that a tool found somewhere must not ask a person.
pub(super) fn is_reserved(result: &[u8]) -> bool {
    result.starts_with(ASKED)
}

/// The input or the output of a round under the names of the protocol, as JSON; `None` for what is the model's or the tool's own.
pub(crate) fn told(bytes: &[u8]) -> Option<Bytes> {
    if let Some(json) = bytes.strip_prefix(ASKED) {
        let asked: Asked = serde_json::from_slice(json).ok()?;
        let requests: Map<String, Value> = asked
            .questions
            .into_iter()
            .map(|(name, q)| (name, json!({"message": q.message, "requestedSchema": q.schema})))
            .collect();
        let told =
            json!({"resultType": "input_required", "inputRequests": requests, "requestState": asked.state});
        return Some(told.to_string().into());
    }
    let continued: Continued = serde_json::from_slice(bytes.strip_prefix(ANSWERED)?).ok()?;
    let told = Told {
        // They were a JSON object when the first round was sent.
        arguments: serde_json::from_str(&continued.arguments).ok()?,
        input_responses: continued.answers.responses,
        request_state: continued.answers.state,
    };
    serde_json::to_vec(&told).ok().map(Bytes::from)
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Told<'a> {
    arguments: &'a RawValue,
    input_responses: Option<BTreeMap<String, Value>>,
    request_state: Option<String>,
}

impl Answered {
    /// As the output of an activity.
    pub(crate) fn into_output(self) -> Bytes {
        match self {
            Self::Result(result) => result,
            Self::InputRequired(asked) => marked(ASKED, &asked),
        }
    }

    /// What the output of an activity says.
    pub(crate) fn of_output(output: &Bytes) -> Self {
        let asked = output
            .strip_prefix(ASKED)
            .and_then(|json| serde_json::from_slice(json).ok());
        match asked {
            Some(asked) => Self::InputRequired(asked),
            None => Self::Result(output.clone()),
        }
    }
}

impl Asked {
    /// # Errors
    /// When the server asks for what no person was promised to give.
    pub(super) fn of(result: InputRequiredResult) -> Result<Self, &'static str> {
        let mut questions = BTreeMap::new();
        for (name, request) in result.input_requests.unwrap_or_default() {
            let InputRequest::Elicitation(request) = request else {
                return Err("the tool asks for something other than a person's answer");
            };
            let question = match request.params {
                ElicitRequestParams::FormElicitationParams {
                    message,
                    requested_schema,
                    ..
                } => Question {
                    message,
                    schema: serde_json::to_value(requested_schema).ok(),
                },
                ElicitRequestParams::UrlElicitationParams { message, url, .. } => Question {
                    message: format!("{message}\n{url}"),
                    schema: None,
                },
                _ => return Err("the tool asks in a way that is not known"),
            };
            questions.insert(name, question);
        }
        Ok(Self {
            questions,
            state: result.request_state,
        })
    }

    /// Whether nobody has to be asked: the server only wants to be called again.
    pub(crate) fn is_silent(&self) -> bool {
        self.questions.is_empty()
    }

    /// What a person is asked: one question, or all of them, one a line.
    pub(crate) fn prompt(&self) -> String {
        let messages: Vec<&str> = self.questions.values().map(|q| q.message.as_str()).collect();
        messages.join("\n")
    }

    /// JSON Schema of the value that [`Asked::answered`] takes: the one question's own, or an object with a member per question.
    pub(crate) fn schema(&self) -> Option<Value> {
        if let Some(question) = self.only() {
            return question.schema.clone();
        }
        let members: Map<String, Value> = self
            .questions
            .iter()
            .map(|(name, q)| (name.clone(), q.schema.clone().unwrap_or_else(|| json!({}))))
            .collect();
        let names: Vec<&String> = self.questions.keys().collect();
        Some(json!({"type": "object", "properties": members, "required": names}))
    }

    /// The arguments of the next round. `arguments`: those of the first; `value`: the person's answer, where null declines.
    pub(crate) fn answered(&self, arguments: &str, value: &Value) -> Bytes {
        let response = |q: &Question, value: &Value| match (value, &q.schema) {
            (Value::Null, _) => json!({"action": "decline"}),
            (_, None) => json!({"action": "accept"}),
            (value, Some(_)) => json!({"action": "accept", "content": value}),
        };
        let responses: BTreeMap<String, Value> = match self.only() {
            Some(question) => {
                let name = self.questions.keys().cloned();
                name.map(|name| (name, response(question, value))).collect()
            }
            None => self
                .questions
                .iter()
                .map(|(name, q)| (name.clone(), response(q, value.get(name).unwrap_or(&Value::Null))))
                .collect(),
        };
        let continued = Continued {
            arguments: arguments.to_owned(),
            answers: Answers {
                responses: (!responses.is_empty()).then_some(responses),
                state: self.state.clone(),
            },
        };
        marked(ANSWERED, &continued)
    }

    fn only(&self) -> Option<&Question> {
        let mut questions = self.questions.values();
        questions.next().filter(|_| questions.next().is_none())
    }
}

/// The model's arguments and what was answered since.
///
/// # Errors
/// When the bytes are neither.
pub(super) fn split(arguments: &[u8]) -> Result<(String, Option<Answers>), String> {
    if let Some(json) = arguments.strip_prefix(ANSWERED) {
        let continued: Continued =
            serde_json::from_slice(json).map_err(|_| String::from("the answers cannot be read"))?;
        return Ok((continued.arguments, Some(continued.answers)));
    }
    let text = std::str::from_utf8(arguments).map_err(|_| String::from("the arguments are no UTF-8"))?;
    Ok((text.to_owned(), None))
}

fn marked(mark: &[u8], value: &impl Serialize) -> Bytes {
    let mut out = mark.to_vec();
    // These are maps with text as keys: they always are JSON.
    let _ = serde_json::to_writer(&mut out, value);
    out.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn asked(requests: &Value, state: Option<&str>) -> Asked {
        let mut result = json!({"resultType": "input_required", "inputRequests": requests});
        if let Some(state) = state {
            result["requestState"] = json!(state);
        }
        Asked::of(serde_json::from_value(result).unwrap()).unwrap()
    }

    fn form(message: &str) -> Value {
        json!({"method": "elicitation/create", "params": {"mode": "form", "message": message,
            "requestedSchema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}})
    }

    #[test]
    fn one_question_is_asked_in_its_own_schema() {
        let asked = asked(&json!({"q": form("Which city?")}), Some("s-1"));
        assert_eq!(asked.prompt(), "Which city?");
        assert_eq!(asked.schema().unwrap()["required"], json!(["city"]));
        let next = asked.answered("{\"a\":1}", &json!({"city": "Paris"}));
        let (arguments, answers) = split(&next).unwrap();
        let answers = answers.unwrap();
        assert_eq!(arguments, "{\"a\":1}");
        assert_eq!(answers.state.as_deref(), Some("s-1"));
        assert_eq!(
            json!(answers.responses),
            json!({"q": {"action": "accept", "content": {"city": "Paris"}}})
        );
    }

    #[test]
    fn several_questions_are_members_of_one_answer() {
        let url = json!({"method": "elicitation/create",
                         "params": {"mode": "url", "message": "Sign here", "url": "http://sign.example/1"}});
        let asked = asked(&json!({"b": form("Where?"), "a": url}), None);
        assert_eq!(asked.prompt(), "Sign here\nhttp://sign.example/1\nWhere?");
        assert_eq!(asked.schema().unwrap()["required"], json!(["a", "b"]));
        let next = asked.answered("{}", &json!({"a": true}));
        let responses = split(&next).unwrap().1.unwrap().responses;
        assert_eq!(
            json!(responses),
            json!({"a": {"action": "accept"}, "b": {"action": "decline"}})
        );
    }

    #[test]
    fn a_server_that_only_wants_to_be_called_again_asks_nobody() {
        let result = json!({"resultType": "input_required", "requestState": "later"});
        let asked = Asked::of(serde_json::from_value(result).unwrap()).unwrap();
        assert!(asked.is_silent());
        let answers = split(&asked.answered("{}", &Value::Null)).unwrap().1.unwrap();
        assert_eq!(
            (answers.responses, answers.state),
            (None, Some("later".to_owned()))
        );
    }

    #[test]
    fn a_round_is_told_in_the_words_of_the_protocol() {
        let read = |bytes: Bytes| serde_json::from_slice::<Value>(&bytes).unwrap();
        let asked = asked(&json!({"q": form("Which city?")}), Some("s-1"));
        let question = told(&Answered::InputRequired(asked.clone()).into_output()).unwrap();
        assert!(!question.contains(&0));
        let schema = &form("")["params"]["requestedSchema"];
        assert_eq!(
            read(question),
            json!({"resultType": "input_required", "requestState": "s-1",
                   "inputRequests": {"q": {"message": "Which city?", "requestedSchema": schema}}})
        );
        let next = told(&asked.answered("{\"n\":1.00}", &json!({"city": "Paris"}))).unwrap();
        assert!(next.starts_with(b"{\"arguments\":{\"n\":1.00},"));
        let responses = json!({"q": {"action": "accept", "content": {"city": "Paris"}}});
        assert_eq!(read(next.clone())["inputResponses"], responses);
        assert_eq!(read(next)["requestState"], "s-1");
        assert_eq!(told(b"{\"a\":1}"), None);
    }

    #[test]
    fn what_no_person_can_give_is_refused() {
        let roots = json!({"resultType": "input_required", "inputRequests": {"r": {"method": "roots/list"}}});
        assert!(Asked::of(serde_json::from_value(roots).unwrap()).is_err());
    }

    proptest! {
        #[test]
        fn a_result_is_kept_as_it_is(bytes: Vec<u8>) {
            let output = Answered::Result(bytes.clone().into()).into_output();
            prop_assert_eq!(&output[..], &bytes[..]);
            prop_assert_eq!(Answered::of_output(&output), Answered::Result(bytes.into()));
        }

        #[test]
        fn a_question_survives_its_journal(message in ".*", name in ".*", state in proptest::option::of(".*")) {
            let mut requests = Map::new();
            requests.insert(name, form(&message));
            let asked = asked(&Value::Object(requests), state.as_deref());
            let answered = Answered::InputRequired(asked);
            let output = answered.clone().into_output();
            prop_assert_eq!(Answered::of_output(&output), answered);
        }

        #[test]
        fn arguments_without_answers_are_the_text_itself(text in "\\{.*") {
            prop_assert_eq!(split(text.as_bytes()).unwrap(), (text, None));
        }
    }
}
