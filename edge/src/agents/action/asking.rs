//! What of a call is put to a person: whether it may be made, what the model wants to know, what a tool wants to know in the middle
//! of it (D74, D78, D81).

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Deadline, NodeError};
use iop_durable::record::{DENIED, DeadlinePolicy, WaitingKind};
use iop_durable::runner::Answer;
use serde_json::{Value, json};

use super::{Approved, One, bytes_of, error};
use crate::agents::journal::{
    ApprovalAnswer, ApprovalDecision, ApprovalSubject, InputSubject, arguments_digest, call_key, round_key,
};
use crate::agents::policy::Judgement;
use crate::agents::spec::{OnDeny, ToolSpec};
use crate::agents::tools::mcp::Asked;
use crate::agents::tools::schema::Arguments;
use crate::agents::turn::ToolCall;
use crate::metrics::ToolResult;

/// What became of an approval.
enum Decided {
    /// These arguments may be sent.
    Pass(String),
    /// Nothing is sent, for this reason.
    Deny(Option<String>),
}

impl Decided {
    /// `asked`: the arguments that the person was shown.
    fn of(answer: Answer, asked: &str) -> Result<Self, Failure> {
        let Answer::Delivered(payload) = answer else {
            return Ok(Self::Deny(Some("The approval expired.".to_owned())));
        };
        let answer: ApprovalAnswer = serde_json::from_slice(&payload)
            .map_err(|e| Failure::new(FailureKind::Internal, format!("a decision cannot be read: {e}")))?;
        Ok(match (answer.decision, answer.edited_arguments) {
            (ApprovalDecision::Approve, _) if answer.arguments_digest == arguments_digest(asked) => {
                Self::Pass(asked.to_owned())
            }
            (ApprovalDecision::Edit, Some(edited)) => Self::Pass(edited),
            (ApprovalDecision::Approve | ApprovalDecision::Edit | ApprovalDecision::Deny, _) => {
                Self::Deny(answer.reason)
            }
        })
    }
}

/// The arguments of a call. Many models write nothing where a tool takes nothing.
fn written(call: &ToolCall) -> &str {
    if call.arguments.trim().is_empty() {
        "{}"
    } else {
        &call.arguments
    }
}

impl One {
    /// What may be sent, once nobody objects; `None`: the call has its answer already.
    pub(super) async fn approved(&self, tool: &ToolSpec) -> Result<Option<Approved>, NodeError> {
        let text = written(&self.call);
        let why = match self.program.policy.judge(&tool.name, text) {
            Judgement::Free => {
                return match self.program.check_arguments(&tool.name, text) {
                    Ok(()) => Ok(Some(Approved {
                        arguments: text.to_owned(),
                    })),
                    Err(why) => self.refuse(error("schema_violation", &why)).await.map(|()| None),
                };
            }
            Judgement::Refuse { why } => {
                return self.refuse(error("invalid_arguments", &why)).await.map(|()| None);
            }
            Judgement::Ask { why } => why,
        };
        let approvals = &self.program.spec().approvals;
        let subject = ApprovalSubject {
            tool: tool.name.clone(),
            call_id: self.call.id.clone(),
            ordinal: self.ordinal,
            arguments: text.to_owned(),
            arguments_digest: arguments_digest(text),
            why: why.as_str().to_owned(),
        };
        let mut gate = self
            .ctx
            .gate(&self.key)
            .kind(WaitingKind::Approval)
            .deadline_policy(DeadlinePolicy::Hard)
            .subject(bytes_of(&subject)?);
        if let Some(expires) = approvals.expires {
            gate = gate.deadline(Deadline::In(expires.0));
        }
        let reason = match Decided::of(gate.wait().await?, text)? {
            // What a person lets pass is held to the tool's schema all the same.
            Decided::Pass(arguments) => {
                return match self.program.check_arguments(&tool.name, &arguments) {
                    Ok(()) => Ok(Some(Approved { arguments })),
                    Err(why) => self.refuse(error("schema_violation", &why)).await.map(|()| None),
                };
            }
            Decided::Deny(reason) => reason,
        };
        if approvals.on_deny == OnDeny::FailRun {
            let why = format!("the call of {} was denied", tool.name);
            return Err(Failure::new(FailureKind::Refused, why).code(DENIED).into());
        }
        let told = json!({ "refused": true, "by": "approval", "reason": reason });
        self.refuse(told).await.map(|()| None)
    }

    /// Whether the denial of another call of this turn fails the run: it comes before every call that has not left.
    pub(super) fn is_doomed(&self) -> bool {
        let denied = |(ordinal, call): (usize, &ToolCall)| {
            let answer = self.ctx.settled(&call_key(&call.id, ordinal));
            let is_approval = self.program.tool(&call.name).is_some();
            is_approval
                && answer.is_some_and(|a| matches!(Decided::of(a, written(call)), Ok(Decided::Deny(_))))
        };
        self.program.spec().approvals.on_deny == OnDeny::FailRun && self.turn.iter().enumerate().any(denied)
    }

    /// `request_input`: a person's answer is the result (D74).
    pub(super) async fn ask_person(&self) -> Result<(), NodeError> {
        #[derive(serde::Deserialize)]
        struct Question {
            prompt: String,
            schema: Option<Value>,
        }
        let Ok(Question { prompt, schema }) = serde_json::from_str(&self.call.arguments) else {
            return self
                .refuse(error(
                    "invalid_arguments",
                    "request_input takes {prompt, schema?}.",
                ))
                .await;
        };
        if let Some(schema) = &schema
            && let Err(why) = Arguments::compile_foreign(schema)
        {
            return self
                .refuse(error("invalid_arguments", &format!("schema: {why}")))
                .await;
        }
        let subject = InputSubject {
            prompt,
            schema,
            call_id: self.call.id.clone(),
        };
        let gate = self
            .ctx
            .gate(&self.key)
            .kind(WaitingKind::Input)
            .subject(bytes_of(&subject)?);
        let told = match gate.wait().await? {
            Answer::Delivered(value) => plain(value),
            Answer::TimedOut => bytes_of(&error("timeout", "Nobody answered."))?,
        };
        self.told(&self.key, "input", ToolResult::Ok, told).await
    }

    /// What a tool asks in the middle of a call, put to a person (S106).
    pub(super) async fn ask_for(&self, asked: &Asked, round: u32) -> Result<Value, NodeError> {
        if asked.is_silent() {
            return Ok(Value::Null);
        }
        let subject = InputSubject {
            prompt: asked.prompt(),
            schema: asked.schema(),
            call_id: self.call.id.clone(),
        };
        let gate = self
            .ctx
            .gate(&format!("asked/{}", round_key(&self.key, round)))
            .kind(WaitingKind::Input)
            .subject(bytes_of(&subject)?);
        match gate.wait().await? {
            Answer::Delivered(value) => serde_json::from_slice(&value).map_err(|e| {
                Failure::new(FailureKind::Internal, format!("an answer cannot be read: {e}")).into()
            }),
            Answer::TimedOut => Ok(Value::Null),
        }
    }
}

/// A text is told as it is; other JSON as JSON.
fn plain(value: Bytes) -> Bytes {
    match serde_json::from_slice::<String>(&value) {
        Ok(text) => Bytes::from(text),
        Err(_) => value,
    }
}
