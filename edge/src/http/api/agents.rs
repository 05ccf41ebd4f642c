//! Agents: what they are declared to be, in immutable versions (durable-api §2, §5).

use std::sync::Arc;

use axum::Json as Reply;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::callers::{Admin, Overseer};
use super::extract::{Declared, Edge, Hosted, Search, Url};
use super::list::{List, Page, no_cursor};
use crate::agents::spec::AgentSpec;
use crate::agents::spec::notes::{Around, notes};
use crate::app::App;
use crate::config::StoreUrl;
use crate::http::auth::Role;
use crate::runs::Runs;
use crate::runs::catalog::Version;
use crate::runs::problem::Problem;
use crate::runs::view::time;

pub(super) fn router() -> OpenApiRouter {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(put, one, delete))
        .routes(routes!(versions))
}

/// One version of an agent.
#[derive(Serialize, ToSchema)]
struct AgentObject {
    /// `agent`.
    object: &'static str,
    name: String,
    /// From 1.
    version: u64,
    /// `sha256:…` of the canonical declaration: equal declarations have equal digests.
    digest: String,
    created_at: String,
    #[schema(value_type = AgentSpec)]
    definition: Arc<AgentSpec>,
}

impl AgentObject {
    fn of(version: &Version) -> Self {
        Self {
            object: "agent",
            name: version.name.clone(),
            version: version.version,
            digest: version.digest.clone(),
            created_at: time(version.created_at),
            definition: Arc::clone(&version.spec),
        }
    }
}

/// What was declared.
#[derive(Serialize, ToSchema)]
struct Accepted {
    #[serde(flatten)]
    agent: AgentObject,
    /// What does not work on this edge as things are, each for people and with its field first: a model that nothing serves, a tool's
    /// agent that is not there, deciders without a key.
    warnings: Vec<String>,
}

/// What does not work as things are: what the configuration's check notes of its own agents.
fn warnings(app: &App, runs: &Runs, spec: &AgentSpec) -> Vec<String> {
    let around = Around {
        memory: matches!(app.settings.store, StoreUrl::Memory),
        serves: &|model| app.pool.resolve(model).is_some(),
        has_agent: &|name| runs.catalog().has(name),
        decides: &|name| app.keys.may(name, Role::Operator),
    };
    notes(spec, &around)
}

/// Declares an agent. Role `admin`.
///
/// A declaration that differs from the newest version is a new one; runs under way stay with theirs.
#[utoipa::path(
    put, path = "/agents/{name}", tag = "agents", operation_id = "put_agent",
    params(("name" = String, Path)),
    request_body = AgentSpec,
    responses(
        (status = 201, description = "A new version.", body = Accepted),
        (status = 200, description = "The newest version has this digest.", body = Accepted),
    )
)]
async fn put(
    _: Admin,
    Edge(app): Edge,
    Hosted(runs): Hosted,
    Url(name): Url<String>,
    Declared(spec, _held): Declared<AgentSpec>,
) -> Result<Response, Problem> {
    let (version, new) = runs.catalog().put(&name, spec).await?;
    runs.restore(&version).await;
    let status = if new { StatusCode::CREATED } else { StatusCode::OK };
    let accepted = Accepted {
        agent: AgentObject::of(&version),
        warnings: warnings(&app, &runs, &version.spec),
    };
    Ok((status, Reply(accepted)).into_response())
}

/// The newest version of each agent, by name. Role `operator`.
#[utoipa::path(
    get, path = "/agents", tag = "agents", operation_id = "list_agents",
    params(Page),
    responses((status = 200, body = List<AgentObject>))
)]
async fn list(
    Overseer(_caller): Overseer,
    Hosted(runs): Hosted,
    Search(page): Search<Page>,
) -> Result<Reply<List<AgentObject>>, Problem> {
    let found = runs
        .catalog()
        .list(page.after.as_deref(), page.limit.and_one())
        .await?;
    let list = List::of(found, page.limit, |last| last.name.clone());
    Ok(Reply(list.map(|version| AgentObject::of(&version))))
}

/// The newest version of an agent. Role `operator`.
#[utoipa::path(
    get, path = "/agents/{name}", tag = "agents", operation_id = "get_agent",
    params(("name" = String, Path)),
    responses((status = 200, body = AgentObject))
)]
async fn one(
    Overseer(_caller): Overseer,
    Hosted(runs): Hosted,
    Url(name): Url<String>,
) -> Result<Reply<AgentObject>, Problem> {
    Ok(Reply(AgentObject::of(&*runs.catalog().newest(&name).await?)))
}

/// The versions of an agent, the first one first. Role `operator`.
#[utoipa::path(
    get, path = "/agents/{name}/versions", tag = "agents", operation_id = "list_agent_versions",
    params(("name" = String, Path), Page),
    responses((status = 200, body = List<AgentObject>))
)]
async fn versions(
    Overseer(_caller): Overseer,
    Hosted(runs): Hosted,
    Url(name): Url<String>,
    Search(page): Search<Page>,
) -> Result<Reply<List<AgentObject>>, Problem> {
    let after = page.after.as_deref().map_or(Ok(0), str::parse::<u64>);
    let after = after.map_err(|_| no_cursor())?;
    let found = runs
        .catalog()
        .versions(&name, after, page.limit.and_one())
        .await?;
    let list = List::of(found, page.limit, |last| last.version.to_string());
    Ok(Reply(list.map(|version| AgentObject::of(&version))))
}

/// Withdraws an agent. Role `admin`.
///
/// Its runs wait, blocked, until it is declared again.
#[utoipa::path(
    delete, path = "/agents/{name}", tag = "agents", operation_id = "delete_agent",
    params(("name" = String, Path)),
    responses((status = 204))
)]
async fn delete(_: Admin, Hosted(runs): Hosted, Url(name): Url<String>) -> Result<StatusCode, Problem> {
    runs.catalog().delete(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}
