//! The tool calls of one turn: each judged, asked about where a rule wants that, carried out once and journalled by itself (D78,
//! D81 to D83). All of them are under way together.

mod asking;

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Deadline, Directive, NoEffect, NodeError, NodeResult};
use iop_durable::ids::{ActivityId, Key, NodeName};
use iop_durable::patterns::REASON;
use iop_durable::record::{Effect, Origin, WaitingKind};
use iop_durable::runner::{Call, CallError, Ctx};
use serde_json::{Value, json};

use super::child::look_again;
use super::journal::{
    CallEvent, MCP, MODEL, REFUSAL, REQUEST_INPUT, TOOL_COMPLETED, TOOL_STARTED, call_key, effect_key,
    round_key, start_key, turn_of,
};
use super::program::{Program, Room, effect, retry_policy};
use super::reason::{ASK_AGAIN, patiently};
use super::spec::{AgentSpec, OnError, ToolSpec};
use super::state::AgentState;
use super::tools::mcp::Answered;
use super::turn::{ToolCall, TurnAnswer};
use crate::metrics::{ToolKind, ToolResult};
use crate::runs::problem::Code;

/// The node `action`.
pub(super) async fn act(
    program: Arc<Program>,
    ctx: Ctx,
    state: AgentState,
) -> NodeResult<AgentState, NoEffect> {
    let calls = calls(&program, &ctx).await?;
    let count = calls.len();
    let turn: Arc<[ToolCall]> = calls.into();
    let mut under_way: FuturesUnordered<_> = turn
        .iter()
        .enumerate()
        .map(|(ordinal, call)| {
            One {
                program: Arc::clone(&program),
                ctx: ctx.clone(),
                turn: Arc::clone(&turn),
                key: call_key(&call.id, ordinal),
                ordinal,
                call: call.clone(),
            }
            .answer()
        })
        .collect();
    let mut failed = None;
    poll_fn(|cx| {
        loop {
            match under_way.poll_next_unpin(cx) {
                Poll::Ready(Some(Ok(()))) => {}
                Poll::Ready(Some(Err(error))) => {
                    failed.get_or_insert(error);
                }
                Poll::Ready(None) => return Poll::Ready(()),
                // The run fails with the first failure, once no call is on its way to a callee or at one: what is cut off
                // there is an effect that nobody knows of. Pauses are not waited for.
                Poll::Pending if failed.is_some() && !ctx.calls() => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await;
    drop(under_way);
    if let Some(error) = failed {
        return Err(error);
    }
    let next = AgentState { pending: 0, ..state };
    let result = if count == 1 {
        "1 result".to_owned()
    } else {
        format!("{count} results")
    };
    Ok((next, Directive::completed().result(result)))
}

/// The calls of the turn before this step, as they were stored with it.
async fn calls(program: &Program, ctx: &Ctx) -> Result<Vec<ToolCall>, NodeError> {
    let internal =
        |why: String| NodeError::Failed(Failure::new(FailureKind::Internal, why).code("journal_invalid"));
    let node = NodeName::new(REASON).map_err(|e| internal(e.to_string()))?;
    let key = Key::new(MODEL).map_err(|e| internal(e.to_string()))?;
    let id = ActivityId::derive(ctx.run(), &node, ctx.activation().saturating_sub(1), &key);
    let record = patiently(|| program.room.store.activity(ctx.run(), &id)).await?;
    let output = record
        .and_then(|record| record.output)
        .ok_or_else(|| internal("the turn of this step is missing".to_owned()))?;
    let answer: TurnAnswer = serde_json::from_slice(output.bytes())
        .map_err(|e| internal(format!("the turn of this step cannot be read: {e}")))?;
    Ok(answer.tool_calls)
}

/// One call on its way to a result.
#[derive(Clone)]
struct One {
    program: Arc<Program>,
    ctx: Ctx,
    /// All calls of the turn.
    turn: Arc<[ToolCall]>,
    ordinal: usize,
    key: String,
    call: ToolCall,
}

/// What is sent to a callee.
struct Approved {
    arguments: String,
}

impl One {
    async fn answer(self) -> Result<(), NodeError> {
        if self.call.name == REQUEST_INPUT && self.program.asks_people() {
            return self.ask_person().await;
        }
        let program = Arc::clone(&self.program);
        let Some(tool) = program.tool(&self.call.name) else {
            return self
                .refuse(error("tool_not_found", "There is no such tool."))
                .await;
        };
        match self.approved(tool).await? {
            Some(approved) => {
                let available = self.available(tool).await?;
                self.carry_out(tool, approved, available).await
            }
            None => Ok(()),
        }
    }

    /// Comes back when a call of this key may leave: one that never left does not leave any more once the run fails.
    async fn may_leave(&self, key: &str) {
        if self.is_doomed() && !self.ctx.knows(key) {
            std::future::pending::<()>().await;
        }
    }

    /// Answers the call without a dispatch.
    async fn refuse(&self, told: Value) -> Result<(), NodeError> {
        self.refuse_at(&self.key, told).await
    }

    /// The same with the key of a round.
    async fn refuse_at(&self, key: &str, told: Value) -> Result<(), NodeError> {
        self.told(key, REFUSAL, ToolResult::Refused, bytes_of(&told)?)
            .await
    }

    /// Journals what the model is told of a call that nobody was asked to carry out.
    async fn told(
        &self,
        key: &str,
        implementation: &'static str,
        result: ToolResult,
        told: Bytes,
    ) -> Result<(), NodeError> {
        let ended = self.ended(result);
        self.ctx
            .activity(key)
            .implementation(implementation)
            .effect(Effect::ReadOnly)
            .run(self.call.arguments.clone(), |_| {
                ended();
                std::future::ready(Ok(told.clone()))
            })
            .await?;
        Ok(())
    }

    /// The newest declaration of the tool's agent, for its connections. A tool that is gone from it is revoked: the run waits until
    /// it is there again (D84, durable-api §8 "Which definition").
    async fn available(&self, tool: &ToolSpec) -> Result<Arc<AgentSpec>, NodeError> {
        let agent = &self.program.version.name;
        for n in 0_u64.. {
            let busy = self.ctx.busy();
            let newest = newest(&self.program, agent).await?;
            drop(busy);
            if let Some(spec) = newest.filter(|spec| spec.tools.iter().any(|other| other.name == tool.name)) {
                return Ok(spec);
            }
            let subject = json!({ "tool": tool.name, "reason": "tool_unavailable" });
            self.ctx
                .gate(&format!("{n}/{}", self.key))
                .kind(WaitingKind::Event)
                .correlation(&restored(agent, &tool.name))
                .subject(bytes_of(&subject)?)
                .deadline(Deadline::In(look_again(n)))
                .wait()
                .await?;
        }
        Err(Failure::new(FailureKind::Internal, "a tool was looked for too often").into())
    }

    async fn carry_out(
        &self,
        tool: &ToolSpec,
        approved: Approved,
        available: Arc<AgentSpec>,
    ) -> Result<(), NodeError> {
        if let Some(child) = &tool.agent {
            return self
                .delegate(&child.name, &approved.arguments, tool.on_error)
                .await;
        }
        let mut arguments = Bytes::from(approved.arguments.clone());
        for round in 0..MAX_ROUNDS {
            let output = match self.round(tool, &available, round, arguments).await {
                Ok(output) => output,
                Err(error) => return self.settle(Err(error), tool.on_error),
            };
            let asked = match Answered::of_output(&output) {
                Answered::InputRequired(asked) if tool.mcp.is_some() => asked,
                Answered::InputRequired(_) | Answered::Result(_) => return Ok(()),
            };
            let value = self.ask_for(&asked, round).await?;
            arguments = asked.answered(&approved.arguments, &value);
        }
        let why = format!("{} asked more than {MAX_ROUNDS} times", tool.name);
        if tool.on_error == OnError::TellModel {
            let last = round_key(&self.key, MAX_ROUNDS);
            return self.refuse_at(&last, error("too_many_rounds", &why)).await;
        }
        Err(Failure::new(FailureKind::ToolError, why)
            .code("too_many_rounds")
            .into())
    }

    /// One request to the tool, or what the journal has of it.
    async fn round(
        &self,
        tool: &ToolSpec,
        available: &Arc<AgentSpec>,
        round: u32,
        arguments: Bytes,
    ) -> Result<Bytes, iop_durable::runner::ActivityError> {
        let key = round_key(&self.key, round);
        self.may_leave(&key).await;
        let label = if tool.mcp.is_some() { MCP } else { "http" };
        let mut activity = self
            .ctx
            .activity(&key)
            .implementation(label)
            .effect(effect(tool.effect))
            .announce(self.started());
        if let Some(retry) = &tool.retry {
            activity = activity.retry(retry_policy(&tool.name, retry));
        }
        if tool.reconcile.is_some() {
            let (one, available, tool) = (self.clone(), Arc::clone(available), tool.clone());
            activity = activity.reconcile(move |record| async move {
                let key = effect_key(&record.run, record.activation, &record.key);
                let app = one.program.room.app().ok()?;
                let toolbox = app.runs()?.toolbox();
                let found = toolbox
                    .found(&available, &tool, record.input.bytes(), &key)
                    .await?;
                let attempt = record.attempts.last().map(|attempt| attempt.n);
                one.tell(&one.event().ended(attempt, ToolResult::Ok, Origin::Reconciled));
                Some(found)
            });
        }
        activity
            .run(arguments, |call: Call| {
                let (program, available, tool) =
                    (Arc::clone(&self.program), Arc::clone(available), tool.clone());
                let trace = self.ctx.traceparent().map(str::to_owned);
                async move {
                    // A decision may have come while the intent was stored.
                    let result = if self.is_doomed() {
                        let why = "another call of this turn was denied";
                        let failure = Failure::new(FailureKind::Refused, why).code("not_carried_out");
                        Err(failure.retryable(false).into())
                    } else {
                        dispatch(&program, &available, &tool, &call, trace.as_deref()).await
                    };
                    // A tool that asks first has not answered.
                    let asks = |output| matches!(Answered::of_output(output), Answered::InputRequired(_));
                    if tool.mcp.is_none() || !result.as_ref().is_ok_and(asks) {
                        self.completed(&result, call.attempt);
                    }
                    result
                }
            })
            .await
    }

    /// A failure that is told to the model stands in the journal and ends nothing.
    fn settle(
        &self,
        ran: Result<(), iop_durable::runner::ActivityError>,
        on_error: OnError,
    ) -> Result<(), NodeError> {
        match ran {
            Ok(()) => Ok(()),
            // Lost workers are nobody's answer.
            Err(error)
                if error
                    .exhausted
                    .as_ref()
                    .is_some_and(|e| e.budget == "recovery_attempts") =>
            {
                Err(error.into())
            }
            Err(_) if on_error == OnError::TellModel => Ok(()),
            Err(mut error) => {
                if let Some(exhausted) = &mut error.exhausted {
                    exhausted.budget = format!("retry:{}", self.call.name);
                }
                Err(error.into())
            }
        }
    }

    /// A run of another agent: its id is derived, so that a repeated dispatch finds the same run (D7, D73).
    async fn delegate(&self, agent: &str, arguments: &str, on_error: OnError) -> Result<(), NodeError> {
        self.may_leave(&start_key(&self.key)).await;
        let child = super::child::Child {
            program: &self.program,
            ctx: &self.ctx,
            key: &self.key,
            agent,
            arguments,
        };
        let ran = child
            .run(self.started(), |result, attempt| self.completed(result, attempt))
            .await?;
        self.settle(ran, on_error)
    }

    /// `run.tool.started`, committed with the intent of the attempt.
    fn started(&self) -> impl FnOnce(u32) -> (std::borrow::Cow<'static, str>, Bytes) + Send + 'static {
        let event = self.event();
        move |attempt| {
            let data = event.started(attempt);
            (TOOL_STARTED.into(), Bytes::from(data.to_string()))
        }
    }

    /// `run.tool.completed`, committed with the outcome. What nobody knows of is not over.
    fn completed(&self, result: &Result<Bytes, CallError>, attempt: u32) {
        let result = match result {
            Ok(_) => ToolResult::Ok,
            Err(CallError::Failed { .. }) => ToolResult::Error,
            Err(CallError::Unknown) => ToolResult::Unknown,
        };
        self.count(result);
        if result != ToolResult::Unknown {
            self.tell(&self.event().ended(Some(attempt), result, Origin::Live));
        }
    }

    /// The same of a call that was not dispatched.
    fn ended(&self, result: ToolResult) -> impl Fn() + '_ {
        move || {
            self.count(result);
            self.tell(&self.event().ended(None, result, Origin::Live));
        }
    }

    fn count(&self, result: ToolResult) {
        let kind = match self.program.tool(&self.call.name) {
            Some(tool) if tool.mcp.is_some() => ToolKind::Mcp,
            Some(tool) if tool.agent.is_some() => ToolKind::Agent,
            Some(_) => ToolKind::Http,
            None => ToolKind::Input,
        };
        self.program.room.metrics.tool_calls.at((kind, result)).inc();
    }

    fn tell(&self, data: &Value) {
        // Its name is ours and its data is small: it cannot be refused.
        let _ = self.ctx.emit(TOOL_COMPLETED, data);
    }

    fn event(&self) -> CallEvent {
        CallEvent {
            turn: turn_of(self.ctx.activation()),
            tool: self.call.name.clone(),
            call_id: self.call.id.clone(),
            ordinal: self.ordinal,
        }
    }
}

/// How often one call may ask a person before it is given up.
const MAX_ROUNDS: u32 = 10;

/// What a run waits for whose tool is revoked.
pub(crate) fn restored(agent: &str, tool: &str) -> String {
    format!("tool_restored/{agent}/{tool}")
}

/// The newest declaration of an agent, `None` while it is gone. A store that is away for a moment is asked again.
async fn newest(program: &Program, agent: &str) -> Result<Option<Arc<AgentSpec>>, Failure> {
    loop {
        let app = program.room.app()?;
        let runs = app.runs().ok_or_else(Room::ending)?;
        match runs.catalog().newest(agent).await {
            Ok(newest) => return Ok(Some(Arc::clone(&newest.spec))),
            Err(problem) if problem.code == Code::AgentNotFound => return Ok(None),
            Err(problem) if problem.retryable => {}
            Err(problem) => {
                return Err(Failure::new(FailureKind::Internal, problem.message).code(problem.code.as_str()));
            }
        }
        drop(app);
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

async fn dispatch(
    program: &Program,
    available: &AgentSpec,
    tool: &ToolSpec,
    call: &Call,
    trace: Option<&str>,
) -> Result<Bytes, CallError> {
    let app = program.room.app()?;
    let runs = app.runs().ok_or_else(Room::ending)?;
    let key = effect_key(&call.run, call.activation, &call.key);
    runs.toolbox()
        .call(available, tool, &call.input, &key, trace)
        .await
}

fn error(code: &str, why: &str) -> Value {
    json!({ "error": { "status": null, "code": code, "body": why } })
}

fn bytes_of(value: &impl serde::Serialize) -> Result<Bytes, Failure> {
    serde_json::to_vec(value)
        .map(Bytes::from)
        .map_err(|e| Failure::new(FailureKind::Internal, e.to_string()))
}
