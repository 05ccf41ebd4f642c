//! A request that goes on from a response: with decisions on the calls it ended with, with the answer to what a person was asked,
//! or, when the run is over, with a new run of the same conversation.

use std::collections::BTreeSet;
use std::sync::Arc;

use iop_durable::ids::WaitId;
use iop_durable::record::{Outcome, RunHead, Status};
use iop_durable::store::Store;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use super::ask::responses::{Conversation, Decision, ResponsesAsk, plain};
use super::fault::Fault;
use super::id::ResponseId;
use super::is_agent;
use super::pause::Pending;
use super::reader::{Answer, End, Reader, output, pauses, stored};
use crate::agents::journal::{ApprovalDecision, INPUT, InputSubject};
use crate::config::Role;
use crate::http::auth::Caller;
use crate::runs::people::{self, Decide};
use crate::runs::problem::{Code, Problem};
use crate::runs::{Runs, Seen};

/// What a request leads to.
pub(super) enum Going {
    /// A run to begin.
    Run { input: Box<RawValue> },
    /// The run that is there, from where the request's word counts.
    Same { id: ResponseId, reader: Box<Reader> },
}

/// A conversation that begins.
pub(super) fn fresh(sent: &ResponsesAsk) -> Result<Going, Fault> {
    if !sent.decisions.is_empty() {
        let why =
            "An approval is answered together with `previous_response_id`, the response that asked for it.";
        return Err(Fault::invalid("previous_response_id", why));
    }
    run(sent, Vec::new())
}

fn run(sent: &ResponsesAsk, mut before: Vec<Box<RawValue>>) -> Result<Going, Fault> {
    if sent.messages.is_empty() {
        return Err(Fault::invalid("input", "`input` has no message."));
    }
    before.extend(sent.messages.iter().cloned());
    let conversation = Conversation::new(sent.instructions.as_deref(), before)?;
    Ok(Going::Run {
        input: conversation.input()?,
    })
}

/// # Errors
/// 404 for a response that this caller does not have, 400 for what does not fit it, 409 for a run in another state; those of
/// decisions and answers.
pub(super) async fn from(
    runs: &Arc<Runs>,
    caller: &Caller,
    agent: &str,
    previous: &str,
    sent: &ResponsesAsk,
) -> Result<Going, Fault> {
    const FIELD: &str = "previous_response_id";
    let id = ResponseId::parse(previous).ok_or_else(|| Fault::no_response(FIELD))?;
    let Seen { engine, loaded } = runs
        .see(caller, id.run.as_str())
        .await
        .map_err(|problem| Fault::unseen(problem, FIELD))?;
    let head = &loaded.head;
    if !is_agent(head) || head.definition.name != agent {
        let why = format!("The response is of the model agent:{}.", head.definition.name);
        return Err(Fault::invalid(FIELD, why));
    }
    let store = &engine.store;
    if !begins(store, &id).await? {
        return Err(Fault::no_response(FIELD));
    }
    let answer = stored(store, &id).await?;
    let going = Step {
        runs,
        caller,
        head,
        id: &id,
        answer: &answer,
    };
    let word = if sent.decisions.is_empty() {
        going.word(store, sent).await?
    } else {
        Some(going.decisions(sent)?)
    };
    let Some(word) = word else {
        return run(sent, conversation(store, head).await?);
    };
    let begins = going.begins(store, &word).await?;
    // Followed before anything is said, so that nothing that comes of it is missed.
    let reader = Reader::new(engine, &id.run, begins);
    going.say(word).await.map_err(|fault| fault.of(&id.run))?;
    Ok(Going::Same {
        id: id.at(begins),
        reader: Box::new(reader),
    })
}

/// Whether a response of this id can be: answers begin with a run or behind a pause.
///
/// # Errors
/// The store's.
pub(super) async fn begins(store: &Arc<dyn Store>, id: &ResponseId) -> Result<bool, Problem> {
    let Some(before) = id.after.checked_sub(1) else {
        return Ok(true);
    };
    let events = store.events(&id.run, before, 1).await?;
    let found = events.first().filter(|event| event.seq == id.after);
    Ok(found.and_then(super::telling::pause).is_some())
}

/// What a request says to a run.
enum Word {
    /// Decisions, and the answer to the one thing that was asked besides.
    Decisions(Vec<(Decide, String)>, Option<(WaitId, String)>),
    Answer(WaitId, String),
}

impl Word {
    fn waits(&self) -> BTreeSet<String> {
        let approval = |id: &str| crate::agents::journal::wait_of_approval(id);
        let (decided, answered) = match self {
            Self::Decisions(decided, answered) => {
                (decided.as_slice(), answered.as_ref().map(|(wait, _)| wait))
            }
            Self::Answer(wait, _) => (&[][..], Some(wait)),
        };
        let decided = decided.iter().filter_map(|(_, id)| approval(id));
        decided
            .chain(answered.cloned())
            .map(|wait| wait.as_str().to_owned())
            .collect()
    }
}

struct Step<'a> {
    runs: &'a Arc<Runs>,
    caller: &'a Caller,
    head: &'a RunHead,
    id: &'a ResponseId,
    answer: &'a Answer,
}

impl Step<'_> {
    /// What the previous response ended with.
    fn pending(&self) -> &[Pending] {
        match &self.answer.end {
            Some(End::Paused(pending)) => pending,
            Some(End::Over(_)) | None => &[],
        }
    }

    fn inputs(&self) -> Vec<&WaitId> {
        let inputs = self.pending().iter().filter_map(|one| match one {
            Pending::Input { wait, .. } => Some(wait),
            Pending::Approval { .. } | Pending::Effect { .. } | Pending::Word => None,
        });
        inputs.collect()
    }

    /// The id of a word of this request: the same request is the same word.
    fn word_id(&self, what: &str) -> String {
        format!("{}.{what}", self.id)
    }

    /// Holds decisions against what the previous response asked for, before any is made.
    fn decisions(&self, sent: &ResponsesAsk) -> Result<Word, Fault> {
        self.caller.require(Role::Operator)?;
        let mut decided: Vec<(Decide, String)> = Vec::with_capacity(sent.decisions.len());
        for decision in &sent.decisions {
            let Decision {
                at,
                approval,
                approve,
                reason,
            } = decision;
            let param = format!("input[{at}].approval_request_id");
            let asked = self.pending().iter().find_map(|one| match one {
                Pending::Approval { id, arguments, .. } => (id == approval).then_some(arguments),
                Pending::Input { .. } | Pending::Effect { .. } | Pending::Word => None,
            });
            let Some(arguments) = asked else {
                let why = "The previous response does not ask for this approval.";
                return Err(Fault::conflict(Code::ApprovalNotFound, why).at(param));
            };
            if decided.iter().any(|(_, other)| other == approval) {
                return Err(Fault::invalid(param, "This approval is answered twice."));
            }
            let verdict = if *approve {
                ApprovalDecision::Approve
            } else {
                ApprovalDecision::Deny
            };
            let digest = crate::agents::journal::arguments_digest(arguments);
            let decide = Decide::new(&self.word_id(approval), verdict, digest, reason.clone(), None)
                .map_err(|problem| Fault::from(problem).at(format!("input[{at}].reason")))?;
            decided.push((decide, approval.clone()));
        }
        let answered = if sent.messages.is_empty() {
            None
        } else {
            match (self.inputs().as_slice(), &sent.text) {
                ([wait], Some(text)) => Some(((*wait).clone(), text.clone())),
                _ => {
                    let why = "A message beside decisions must be the text that answers what the run asked.";
                    return Err(Fault::invalid("input", why));
                }
            }
        };
        Ok(Word::Decisions(decided, answered))
    }

    /// What messages alone are: the answer to what the run asked; `None`: a new run's.
    async fn word(&self, store: &Arc<dyn Store>, sent: &ResponsesAsk) -> Result<Option<Word>, Fault> {
        if sent.messages.is_empty() {
            return Err(Fault::invalid("input", "`input` has no message and no decision."));
        }
        let over = self.head.status.is_terminal();
        if let [wait] = self.inputs().as_slice() {
            let record = store.wait(&self.id.run, wait).await.map_err(Problem::from)?;
            let by = record
                .and_then(|record| record.settled)
                .and_then(|settled| settled.by);
            // The same request again is the same answer, also when the run is over by now.
            if !over || by.is_some_and(|by| by.as_str() == self.word_id(wait.as_str())) {
                let text = sent.text.clone().ok_or_else(|| {
                    Fault::invalid(
                        "input",
                        "The run asked a person; the answer is a text of the user.",
                    )
                })?;
                return Ok(Some(Word::Answer((*wait).clone(), text)));
            }
        }
        if over { Ok(None) } else { Err(self.busy()) }
    }

    /// The run is in no state for a message.
    fn busy(&self) -> Fault {
        let run = &self.id.run;
        let waits = self.pending().iter().map(|one| match one {
            Pending::Approval { id, .. } => id.clone(),
            Pending::Input { wait, .. } => wait.as_str().to_owned(),
            Pending::Effect { activity } => activity.clone(),
            Pending::Word => "a resume".to_owned(),
        });
        let waits: Vec<String> = waits.collect();
        let fault = match self.head.status {
            Status::Waiting | Status::Ambiguous if !waits.is_empty() => {
                let why = format!(
                    "The run {run} waits for {}; it takes no message before.",
                    waits.join(", ")
                );
                Fault::conflict(Code::RunWaiting, why)
            }
            Status::Waiting | Status::Ambiguous => Fault::conflict(
                Code::RunWaiting,
                format!("The run {run} waits; it takes no message before."),
            ),
            Status::Queued
            | Status::Running
            | Status::Succeeded
            | Status::Failed
            | Status::Cancelled
            | Status::Exhausted
            | Status::Transferred => {
                let why = format!("The run {run} is not over; it takes no message before.");
                Fault::conflict(Code::RunBusy, why)
            }
        };
        fault.at("input").of(run)
    }

    /// The pause that the word is about, the last that names what it answers: the answer begins behind it. A request that is sent
    /// again begins there again.
    async fn begins(&self, store: &Arc<dyn Store>, word: &Word) -> Result<u64, Problem> {
        let waits = word.waits();
        let first = self.answer.ends_at.unwrap_or(self.id.after);
        let later = pauses(store, &self.id.run, first).await?;
        let about = later
            .iter()
            .rev()
            .find(|(_, on)| on.iter().any(|on| waits.contains(&on.id)));
        Ok(about.map_or(first, |(seq, _)| *seq))
    }

    async fn say(&self, word: Word) -> Result<(), Fault> {
        let run = self.id.run.as_str();
        let (decided, answered) = match word {
            Word::Decisions(decided, answered) => (decided, answered),
            Word::Answer(wait, text) => (Vec::new(), Some((wait, text))),
        };
        for (decide, approval) in &decided {
            self.runs.decide(self.caller, run, approval, decide).await?;
        }
        if let Some((wait, text)) = answered {
            let value = self.value(&wait, &text).await?;
            self.runs
                .answer(
                    self.caller,
                    run,
                    wait.as_str(),
                    &self.word_id(wait.as_str()),
                    &value,
                )
                .await
                .map_err(|problem| {
                    let fault = Fault::from(problem);
                    if fault.param.as_deref() == Some("value") {
                        fault.at("input")
                    } else {
                        fault
                    }
                })?;
        }
        Ok(())
    }

    /// A text as the value that was asked for: JSON, where the prompt's schema wants no text.
    async fn value(&self, wait: &WaitId, text: &str) -> Result<Box<RawValue>, Fault> {
        let Seen { engine, loaded } = self.runs.see(self.caller, self.id.run.as_str()).await?;
        let wait = people::input(&engine.operator, &loaded, wait.as_str()).await?;
        let asked: Option<InputSubject> = serde_json::from_slice(wait.subject.bytes()).ok();
        let schema = asked.and_then(|asked| asked.schema);
        value(schema.as_ref(), text)
            .map_err(|_| Fault::invalid("input", "The text cannot be written as JSON."))
    }
}

fn value(schema: Option<&Value>, text: &str) -> serde_json::Result<Box<RawValue>> {
    let wants_text = schema.is_none_or(|schema| schema.get("type").is_none_or(|kind| kind == "string"));
    if !wants_text && let Ok(json) = serde_json::from_str::<Box<RawValue>>(text) {
        return Ok(json);
    }
    to_raw_value(text)
}

/// What was said up to the end of a run: its input, and its answer. A request's `instructions` are of that request alone.
async fn conversation(store: &Arc<dyn Store>, head: &RunHead) -> Result<Vec<Box<RawValue>>, Fault> {
    let corrupt = || Problem::new(Code::RunCorrupt, "The run's input cannot be read.").of(head.id.as_str());
    let input: Box<RawValue> = match output(store, &head.id, 1, INPUT).await? {
        Some(input) => serde_json::from_slice(&input).map_err(|_| corrupt())?,
        None => {
            let why = "The run ended before it began; send the whole conversation.";
            return Err(Fault::conflict(Code::RunTerminal, why).of(&head.id));
        }
    };
    let mut messages = crate::agents::transcript::conversation(&input).map_err(|_| corrupt())?;
    let instructed = serde_json::from_str::<Conversation>(input.get()).is_ok_and(|c| c.instructed);
    if instructed && !messages.is_empty() {
        messages.remove(0);
    }
    let outcome = head
        .outcome
        .as_deref()
        .and_then(|outcome| Outcome::decode(outcome).ok());
    let said = outcome
        .and_then(|outcome| outcome.output)
        .and_then(|output| serde_json::from_str::<String>(output.get()).ok());
    if let Some(said) = said {
        messages.push(plain("assistant", &said)?);
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_text_answers_in_the_form_that_was_asked_for() {
        let of = |schema: Option<Value>, text: &str| value(schema.as_ref(), text).unwrap().get().to_owned();
        assert_eq!(of(None, "7"), "\"7\"");
        assert_eq!(of(Some(json!({"type": "string"})), "7"), "\"7\"");
        assert_eq!(of(Some(json!({"type": "number"})), "7"), "7");
        assert_eq!(of(Some(json!({"type": "number"})), "seven"), "\"seven\"");
        assert_eq!(
            of(Some(json!({"type": "object"})), "{\"a\": 1.0}"),
            "{\"a\": 1.0}"
        );
    }
}
