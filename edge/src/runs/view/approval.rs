//! Approvals: calls that wait for a person's decision, and what it was (D76 to D89).

use iop_durable::record::{WaitRecord, WaitStatus};
use iop_durable::time::Timestamp;
use iop_shared::label_enum;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::waiting::arguments;
use super::{time, url_of};
use crate::agents::journal::{ApprovalAnswer, ApprovalDecision, ApprovalSubject, approval_id};
use crate::schema::words_schema;

label_enum! {
    /// Where an approval stands.
    pub enum ApprovalStatus {
        Pending => "pending",
        Approved => "approved",
        Denied => "denied",
        Edited => "edited",
        Expired => "expired",
        /// It ended with its run, or with a life of it.
        Cancelled => "cancelled",
    }
}
words_schema!(ApprovalStatus);

/// An approval.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct ApprovalObject {
    pub(crate) id: String,
    run_id: String,
    agent: String,
    tool: String,
    call_id: String,
    /// As the model wrote them; a text when they are no JSON.
    #[schema(value_type = Value)]
    arguments: Box<RawValue>,
    arguments_digest: String,
    /// `rule`, or `invalid_arguments` when no rule could judge them.
    why: String,
    pub(crate) status: ApprovalStatus,
    decision_id: Option<String>,
    /// The name of the key that decided.
    decided_by: Option<String>,
    reason: Option<String>,
    /// Of an edit: what is sent instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Value>)]
    edited_arguments: Option<Box<RawValue>>,
    created_at: String,
    decided_at: Option<String>,
    expires_at: Option<String>,
    url: String,
}

impl ApprovalStatus {
    /// One whose time is over is expired, whether its timer was committed or not (D87).
    pub(crate) fn of(wait: &WaitRecord, now: Timestamp) -> Self {
        match wait.status {
            WaitStatus::Armed if wait.deadline.is_some_and(|deadline| deadline <= now) => Self::Expired,
            WaitStatus::Armed => Self::Pending,
            WaitStatus::TimedOut => Self::Expired,
            WaitStatus::Cancelled => Self::Cancelled,
            WaitStatus::Delivered => match answer(wait).map(|answer| answer.decision) {
                Some(ApprovalDecision::Approve) => Self::Approved,
                Some(ApprovalDecision::Edit) => Self::Edited,
                Some(ApprovalDecision::Deny) | None => Self::Denied,
            },
        }
    }
}

fn answer(wait: &WaitRecord) -> Option<ApprovalAnswer> {
    let payload = wait.settled.as_ref()?.payload.as_ref()?;
    serde_json::from_slice(payload.bytes()).ok()
}

impl ApprovalObject {
    /// `decided_by`: who sent the delivery that settled the gate. `None` for a gate that holds no approval.
    pub(crate) fn of(
        wait: &WaitRecord,
        agent: &str,
        decided_by: Option<String>,
        now: Timestamp,
    ) -> Option<Self> {
        let subject: ApprovalSubject = serde_json::from_slice(wait.subject.bytes()).ok()?;
        let answer = answer(wait);
        let id = approval_id(&wait.id);
        let settled = wait.settled.as_ref();
        let (reason, edited) = answer.map_or((None, None), |a| (a.reason, a.edited_arguments));
        Some(Self {
            url: format!("{}/approvals/{id}", url_of(&wait.run)),
            id,
            run_id: wait.run.as_str().to_owned(),
            agent: agent.to_owned(),
            tool: subject.tool,
            call_id: subject.call_id,
            arguments: arguments(&subject.arguments),
            arguments_digest: subject.arguments_digest,
            why: subject.why,
            status: ApprovalStatus::of(wait, now),
            decision_id: settled
                .and_then(|s| s.by.as_ref())
                .map(|by| by.as_str().to_owned()),
            decided_by,
            reason,
            edited_arguments: edited.as_deref().map(arguments),
            created_at: time(wait.armed_at),
            decided_at: settled.map(|settled| time(settled.at)),
            expires_at: wait.deadline.map(time),
        })
    }
}
