//! Agents as models (durable-api §2): `model: "agent:<name>"` on `/v1/chat/completions` and `/v1/responses` starts a run and answers
//! with what it says. A run that waits ends the answer: on chat in words, on responses in items that the next request answers.
//!
//! An answer is read from the run's events, and where it begins stands in its id: any edge of the store can tell it again.

mod ask;
mod fault;
mod go_on;
mod id;
mod pause;
mod pen;
mod reader;
mod stored;
mod stream;
mod telling;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Method, Response, Uri};
use iop_durable::ids::RunId;
use iop_durable::record::RunHead;
use iop_durable::store::{Loaded, StoreError};
use iop_shared::execution::Endpoint;
use iop_shared::openai::answer::{Author, ChatAnswer, Kept, ResponsesAnswer};
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};

use self::ask::chat::ChatAsk;
use self::ask::responses::ResponsesAsk;
use self::ask::{PREVIOUS, RUN_ID};
use self::fault::Fault;
use self::id::ResponseId;
use self::pen::{ChatPen, ResponsesPen};
use self::reader::Reader;
use super::auth::{Caller, Role};
use super::payload::Reservation;
use crate::app::App;
use crate::error::{ApiError, ErrorKind};
use crate::gate::{GateBody, RequestGuard};
use crate::runs::catalog::AGENT;
use crate::runs::problem::Problem;
use crate::runs::{CreateRun, Engine, Runs, Seen};

/// What the names of agents begin with among models.
pub(super) const PREFIX: &str = "agent:";

/// A request for an agent.
pub(super) struct Ask {
    pub(super) caller: Caller,
    pub(super) endpoint: Endpoint,
    pub(super) method: Method,
    pub(super) uri: Uri,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// `None`: the path names a response.
    pub(super) model: Option<String>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// The response that the path names, or the one before.
    pub(super) response: Option<String>,
    pub(super) held: Option<Reservation>,
}

/// Whether a request is worth asking the store for.
pub(super) fn may_be(app: &App, endpoint: Endpoint, model: Option<&str>, response: Option<&str>) -> bool {
    match endpoint {
        Endpoint::Chat | Endpoint::Responses => {}
        Endpoint::Completions
        | Endpoint::Embeddings
        | Endpoint::Rerank
        | Endpoint::Moderations
        | Endpoint::Images
        | Endpoint::Audio => return false,
    }
    let of_agent = model.is_some_and(|model| model.starts_with(PREFIX));
    let of_run = || endpoint == Endpoint::Responses && response.and_then(ResponseId::parse).is_some();
    app.runs().is_some() && (of_agent || of_run())
}

impl Ask {
    /// Whether it is of an agent; else it goes to the providers. A response of a run's shape is ours when the run is here.
    pub(super) async fn is_ours(&self, app: &App) -> bool {
        if self.agent().is_some() {
            return true;
        }
        let id = self.response.as_deref().and_then(ResponseId::parse);
        let (Some(id), Some(runs)) = (id, app.runs()) else {
            return false;
        };
        // Whoever asks: a run that is not for this caller is not for a provider either.
        for engine in runs.engines() {
            match engine.store.load(&id.run).await {
                Err(StoreError::NotFound) => {}
                Ok(_) | Err(_) => return true,
            }
        }
        false
    }

    fn agent(&self) -> Option<&str> {
        self.model.as_deref()?.strip_prefix(PREFIX)
    }
}

/// An answer that is ready to go.
enum Reply {
    Chat(Reader, ChatPen),
    Responses(Reader, ResponsesPen),
    Whole(Bytes, RunId),
}

/// Answers a request that is ours.
pub(super) async fn serve(app: &Arc<App>, ask: Ask, guard: RequestGuard) -> Response<GateBody> {
    match reply(app, ask).await {
        Ok(Reply::Chat(reader, pen)) => stream::streamed(app, reader, pen, guard),
        Ok(Reply::Responses(reader, pen)) => stream::streamed(app, reader, pen, guard),
        Ok(Reply::Whole(body, run)) => stream::whole(body, &run, guard),
        Err(fault) => fault.into_answer(guard),
    }
}

async fn reply(app: &Arc<App>, ask: Ask) -> Result<Reply, Fault> {
    let Some(runs) = app.runs() else {
        return Err(no_model());
    };
    let Some(model) = &ask.model else {
        return stored::reply(runs, &ask).await;
    };
    let Some(agent) = ask.agent() else {
        let why = "The response is of an agent; ask the agent's model to go on from it.";
        return Err(Fault::invalid("previous_response_id", why));
    };
    if !ask.caller.may_use(model) {
        let why = "This key may not use this model.";
        return Err(Fault::from(ApiError::new(ErrorKind::PermissionDenied, why)).at("model"));
    }
    let agent = agent.to_owned();
    if ask.endpoint == Endpoint::Chat {
        chat(app, runs, agent, ask).await
    } else {
        responses(app, runs, agent, ask).await
    }
}

fn no_model() -> Fault {
    Fault::from(ApiError::new(
        ErrorKind::ModelNotFound,
        "The model does not exist.",
    ))
    .at("model")
}

async fn chat(app: &Arc<App>, runs: &Arc<Runs>, agent: String, ask: Ask) -> Result<Reply, Fault> {
    let ChatAsk { input, metadata } = ChatAsk::read(&ask.body)?;
    let begun = begin(runs, &ask, &agent, input, metadata)
        .await
        .map_err(|fault| on_member(fault, "messages"))?;
    let author = Author {
        id: begun.id.uuid(),
        model: format!("{PREFIX}{agent}"),
        created: jiff::Timestamp::now().as_second(),
    };
    let (stream, include_usage) = (ask.stream, ask.include_usage);
    // The run has its input: the request's body is not needed while it works.
    drop(ask);
    let run = begun.id.run;
    let pen = ChatPen::new(ChatAnswer::new(author, include_usage), run.clone());
    if stream {
        return Ok(Reply::Chat(begun.reader, pen));
    }
    let answer = stream::collected(app, begun.reader).await?;
    Ok(Reply::Whole(pen.whole(&answer)?, run))
}

async fn responses(app: &Arc<App>, runs: &Arc<Runs>, agent: String, ask: Ask) -> Result<Reply, Fault> {
    let sent = ResponsesAsk::read(&ask.body, &agent)?;
    let going = match &sent.previous {
        Some(previous) => go_on::from(runs, &ask.caller, &agent, previous, &sent).await?,
        None => go_on::fresh(&sent)?,
    };
    let begun = match going {
        go_on::Going::Run { input } => {
            let mut metadata = sent.metadata;
            metadata.extend(
                sent.previous
                    .clone()
                    .map(|previous| (PREVIOUS.to_owned(), previous)),
            );
            begin(runs, &ask, &agent, input, metadata)
                .await
                .map_err(|fault| on_member(fault, "input"))?
        }
        go_on::Going::Same { id, reader } => Begun { id, reader: *reader },
    };
    let (stream, caller) = (ask.stream, ask.caller.clone());
    drop(ask);
    let Begun { id, reader } = begun;
    let Seen { engine, loaded } = runs
        .see(&caller, id.run.as_str())
        .await
        .map_err(|problem| Fault::from(problem).of(&id.run))?;
    let pen = pen(engine, &loaded, &id).await?;
    if stream {
        return Ok(Reply::Responses(reader, pen));
    }
    let answer = stream::collected(app, reader).await?;
    if let Some(reader::End::Over(outcome)) = &answer.end
        && let Some(fault) = Fault::of_outcome(&id.run, outcome)
    {
        return Err(fault);
    }
    Ok(Reply::Whole(pen.whole(&answer), id.run))
}

/// A problem with what a run was given, at the member that the client sent.
fn on_member(fault: Fault, member: &'static str) -> Fault {
    match fault.param.as_deref() {
        Some("input") => fault.at(member),
        Some("agent") => fault.at("model"),
        Some(_) | None => fault,
    }
}

/// A run that answers.
struct Begun {
    id: ResponseId,
    reader: Reader,
}

async fn begin(
    runs: &Arc<Runs>,
    ask: &Ask,
    agent: &str,
    input: Box<RawValue>,
    metadata: BTreeMap<String, String>,
) -> Result<Begun, Fault> {
    ask.caller.require(Role::Inference)?;
    let idempotency = super::api::idempotency_key(&ask.headers)?.map(|key| {
        let mut hash = Sha256::new();
        hash.update(b"POST\0/v1/");
        hash.update(ask.endpoint.path());
        hash.update(b"\0");
        hash.update(&ask.body);
        (key, hash.finalize().into())
    });
    // Followed before it begins, so that no piece of its first turn is missed. The run of a key may be there already.
    let version = runs.catalog().newest(agent).await?;
    let own = idempotency.is_none().then(RunId::random);
    let early = own
        .as_ref()
        .map(|run| Reader::new(runs.engine(version.spec.durable), run, 0));
    let made = runs
        .create(
            &ask.caller,
            CreateRun {
                agent: agent.to_owned(),
                input,
                run_id: own.map(|run| run.as_str().to_owned()),
                metadata,
                deadline: None,
                budgets: BTreeMap::new(),
                durable: Some(version.spec.durable),
                idempotency,
                traceparent: super::api::traceparent(&ask.headers),
            },
        )
        .await?;
    let reader = early.unwrap_or_else(|| Reader::new(runs.engine(made.durable), &made.run, 0));
    Ok(Begun {
        id: ResponseId {
            run: made.run,
            after: 0,
        },
        reader,
    })
}

/// Writes a response of a run.
async fn pen(engine: &Engine, loaded: &Loaded, id: &ResponseId) -> Result<ResponsesPen, Fault> {
    let head = &loaded.head;
    let mut begun = head.created_at;
    let mut previous = head.metadata.get(PREVIOUS).cloned();
    if id.after > 0 {
        let of = |problem: Problem| Fault::from(problem).of(&id.run);
        let events = engine.store.events(&head.id, id.after - 1, 1).await;
        let events = events.map_err(|error| of(error.into()))?;
        begun = events.first().map_or(begun, |event| event.time);
        previous = Some(reader::before(&engine.store, id).await.map_err(of)?.to_string());
    }
    let author = Author {
        id: id.uuid(),
        model: format!("{PREFIX}{}", head.definition.name),
        created: begun.as_millis().div_euclid(1000),
    };
    let kept = Kept {
        id: id.to_string(),
        previous,
        metadata: metadata(head),
    };
    let answer = ResponsesAnswer::kept(author, kept);
    Ok(ResponsesPen::new(
        answer,
        head.definition.name.clone(),
        head.id.clone(),
    ))
}

/// The metadata of a response: the run's, and its id.
fn metadata(head: &RunHead) -> BTreeMap<String, String> {
    let mut metadata = head.metadata.clone();
    metadata.remove(PREVIOUS);
    metadata.insert(RUN_ID.to_owned(), head.id.as_str().to_owned());
    metadata
}

/// Whether a run is an agent's: only those are models.
fn is_agent(head: &RunHead) -> bool {
    head.definition.kind == AGENT
}
