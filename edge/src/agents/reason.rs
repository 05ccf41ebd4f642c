//! One model turn: what was said so far, asked once, its answer stored before anything follows from it (D33, D61, D66).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use iop_durable::failure::{Failure, FailureKind};
use iop_durable::graph::{Directive, NoEffect, NodeError, NodeResult};
use iop_durable::ids::RunId;
use iop_durable::record::{ActivityRecord, Effect, Exhausted};
use iop_durable::runner::{BudgetRefused, Ctx};
use iop_durable::store::{Answer, Store, StoreError};
use serde::Serialize;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::journal::{INPUT, MODEL, TURN_COMPLETED, step_name, turn_of};
use super::program::{Program, SAME_CALL, SPEND, SPEND_DECIMALS, TOKENS, TOOL_CALLS, model_retry};
use super::state::{AgentState, Totals};
use super::transcript::{Frame, Transcript, request};
use super::turn::{Delta, ToolCall, TurnAnswer, TurnRequest, turn};
use crate::config::hex;

/// Records of the journal that are read at once.
const PAGE: u32 = 200;

/// What a turn's activity records of its request: the request itself is the transcript, which is in the journal already.
#[derive(Serialize)]
struct Asked<'a> {
    turn: u64,
    request_digest: &'a str,
}

/// The node `reason`.
pub(super) async fn reason(
    program: Arc<Program>,
    ctx: Ctx,
    state: AgentState,
) -> NodeResult<AgentState, NoEffect> {
    let n = turn_of(ctx.activation());
    let transcript = match &state.input {
        Some(input) => {
            let bytes = Bytes::copy_from_slice(input.get().as_bytes());
            ctx.activity(INPUT)
                .implementation("input")
                .effect(Effect::ReadOnly)
                .run(bytes, |call| async move { Ok(call.input) })
                .await?;
            Transcript::begin(input.clone())
        }
        None => {
            let records = records(&program.room.store, ctx.run()).await?;
            Transcript::of(&records, ctx.activation())?
        }
    };
    let spec = program.spec();
    let body = request(
        &transcript,
        &Frame {
            model: &spec.model,
            instructions: spec.instructions.as_deref(),
            tools: program.tools.as_deref(),
            parameters: &spec.parameters,
        },
    )?;
    let answer = ask(&program, &ctx, n, body).await?;

    let mut next = AgentState {
        input: None,
        pending: u32::try_from(answer.tool_calls.len()).unwrap_or(u32::MAX),
        usage: state.usage,
        answer: None,
    };
    let spent = account(&program, &ctx, &transcript, &answer, &mut next)?;
    let calls = answer.tool_calls.len();
    ctx.emit(
        TURN_COMPLETED,
        &json!({ "turn": n, "finish_reason": answer.finish_reason, "tool_calls": calls, "usage": answer.usage.map(Totals::from) }),
    )?;
    if let Some(exhausted) = spent {
        return Ok((next, Directive::exhaust(exhausted)));
    }
    if calls == 0 {
        next.answer = Some(answer.content.or(answer.refusal).unwrap_or_default());
        return Ok((next, Directive::completed().result("answered")));
    }
    let result = if calls == 1 {
        "1 tool call".to_owned()
    } else {
        format!("{calls} tool calls")
    };
    Ok((next, Directive::completed().result(result)))
}

/// Every record of a run's journal.
async fn records(store: &Arc<dyn Store>, run: &RunId) -> Result<Vec<ActivityRecord>, NodeError> {
    let mut records: Vec<ActivityRecord> = Vec::new();
    loop {
        let after = records.last().map(|record| record.id.clone());
        let page = patiently(|| store.activities(run, after.clone(), PAGE)).await?;
        let full = page.len() as u64 >= u64::from(PAGE);
        records.extend(page);
        if !full {
            return Ok(records);
        }
    }
}

/// How long a store that is away is left alone.
pub(super) const ASK_AGAIN: Duration = Duration::from_millis(100);

/// Reads the store from within a node. One that is away is asked again: the run is not at fault, and when its lease is lost
/// meanwhile this is dropped.
///
/// # Errors
/// What does not pass.
pub(super) async fn patiently<'s, T>(read: impl Fn() -> Answer<'s, T>) -> Result<T, NodeError> {
    loop {
        let (kind, code) = match read().await {
            Ok(found) => return Ok(found),
            Err(StoreError::Unavailable { .. } | StoreError::Unconfirmed { .. }) => {
                tokio::time::sleep(ASK_AGAIN).await;
                continue;
            }
            Err(StoreError::Corrupt { .. }) => (FailureKind::Internal, "run_corrupt"),
            Err(_) => (FailureKind::Internal, "journal_invalid"),
        };
        return Err(Failure::new(kind, "the run's journal could not be read")
            .code(code)
            .into());
    }
}

async fn ask(program: &Arc<Program>, ctx: &Ctx, n: u64, body: Bytes) -> Result<TurnAnswer, NodeError> {
    let digest = format!("sha256:{}", hex(&Sha256::digest(&body).into()));
    let asked = serde_json::to_vec(&Asked {
        turn: n,
        request_digest: &digest,
    })
    .map_err(|e| Failure::new(FailureKind::Internal, e.to_string()))?;
    let owner = ctx.owner();
    let answer = ctx
        .activity(MODEL)
        .implementation("chat")
        .effect(Effect::ReadOnly)
        .retry(model_retry(program.spec()))
        .run(asked, |call| {
            let (program, body, owner) = (Arc::clone(program), body.clone(), owner.clone());
            let traceparent = ctx.traceparent().map(str::to_owned);
            async move {
                let app = program.room.app()?;
                let live = Arc::clone(&program.room.live);
                let run = call.run.clone();
                let request = TurnRequest {
                    run: call.run.as_str(),
                    model: &program.spec().model,
                    body,
                    owner: owner.as_deref(),
                    traceparent: traceparent.as_deref(),
                };
                let written = AtomicUsize::new(0);
                let told = move |delta: Delta| {
                    let more = match &delta {
                        Delta::Text(text) => text.len(),
                        Delta::Refusal(_) | Delta::Reasoning(_) | Delta::Call { .. } => 0,
                    };
                    let offset = written.fetch_add(more, Ordering::Relaxed);
                    live.delta(&run, n, || delta_data(n, offset, &delta));
                };
                let answer = turn(&app, request, &told).await?;
                serde_json::to_vec(&answer)
                    .map(Bytes::from)
                    .map_err(|e| Failure::new(FailureKind::Internal, e.to_string()).into())
            }
        })
        .await
        .map_err(|mut error| {
            if let Some(exhausted) = error
                .exhausted
                .as_mut()
                .filter(|e| e.budget.starts_with("retry:"))
            {
                exhausted.budget = format!("retry:{}", step_name(ctx.activation()));
            }
            error
        })?;
    serde_json::from_slice(&answer).map_err(|e| {
        let why = format!("the turn's answer cannot be read: {e}");
        NodeError::Failed(Failure::new(FailureKind::Internal, why).code("journal_invalid"))
    })
}

/// The data of `run.turn.delta`. `offset`: bytes of the text that this attempt wrote before; 0 begins the text again.
fn delta_data(n: u64, offset: usize, delta: &Delta) -> Bytes {
    let data = match delta {
        Delta::Text(text) => json!({ "turn": n, "offset": offset, "text": text }),
        Delta::Refusal(text) => json!({ "turn": n, "refusal": text }),
        Delta::Reasoning(text) => json!({ "turn": n, "reasoning": text }),
        Delta::Call {
            index,
            id,
            name,
            arguments,
        } => {
            json!({ "turn": n, "tool_call": { "index": index, "id": id, "name": name, "arguments": arguments } })
        }
    };
    Bytes::from(data.to_string())
}

/// Draws what the turn cost and what it asks for on the run's budgets, before anything of it is carried out (D68). The limit that
/// ran out, when its calls may not be made.
fn account(
    program: &Program,
    ctx: &Ctx,
    transcript: &Transcript,
    answer: &TurnAnswer,
    next: &mut AgentState,
) -> Result<Option<Exhausted>, NodeError> {
    let usage = answer.usage.unwrap_or_default();
    next.usage.add(&usage);
    let mut over = None;
    let spent = program.price.as_ref().map_or(0, |price| price.cost(&usage));
    for (name, amount) in [(TOKENS, usage.input + usage.output), (SPEND, spent)] {
        let budget = ctx.charge(name, amount)?;
        if budget.used > budget.limit {
            over.get_or_insert(Exhausted {
                budget: name.to_owned(),
                used: budget.used,
                limit: budget.limit,
                decimals: if name == SPEND { SPEND_DECIMALS } else { 0 },
            });
        }
    }
    if answer.tool_calls.is_empty() {
        // The answer is there: nothing more is spent.
        return Ok(None);
    }
    if over.is_some() {
        return Ok(over);
    }
    let most = most_of_one(transcript, &answer.tool_calls);
    let seen = ctx.budget(SAME_CALL).map_or(0, |budget| budget.used);
    for (name, amount) in [
        (TOOL_CALLS, answer.tool_calls.len() as u64),
        (SAME_CALL, most.saturating_sub(seen)),
    ] {
        match ctx.use_budget(name, amount) {
            Ok(()) => {}
            Err(BudgetRefused::Exhausted(mut exhausted)) => {
                // Where something is left, what ran out is told by what the turn asks for.
                if exhausted.used < exhausted.limit {
                    exhausted.used = ctx.charge(name, amount)?.used;
                }
                return Ok(Some(exhausted));
            }
            Err(refused @ BudgetRefused::Undeclared(_)) => return Err(refused.into()),
        }
    }
    Ok(None)
}

/// How often the call that was made most often has been made, this turn's calls among them.
fn most_of_one(transcript: &Transcript, calls: &[ToolCall]) -> u64 {
    let of_turn = |call: &ToolCall| {
        let same = |other: &&ToolCall| other.name == call.name && other.arguments == call.arguments;
        calls.iter().filter(same).count() as u64
    };
    calls
        .iter()
        .map(|call| transcript.count(call) + of_turn(call))
        .max()
        .unwrap_or(0)
}
