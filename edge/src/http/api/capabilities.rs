//! `GET /api/v1/durable/capabilities`: what runs of this edge are promised, and what it does not do (D30).

use axum::Json as Reply;
use iop_shared::label_enum;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::callers::Reader;
use super::extract::{Edge, Hosted};
use crate::config::StoreUrl;
use crate::runs::problem::Problem;
use crate::runs::view::Guarantee;
use crate::schema::words_schema;

label_enum! {
    /// Where runs are stored.
    pub enum StoreKind {
        Sqlite => "sqlite",
        Postgres => "postgres",
        /// Gone with the process; for development.
        Memory => "memory",
    }
}
words_schema!(StoreKind);

/// What the runs of an edge are promised.
#[derive(Serialize, ToSchema)]
struct CapabilitiesObject {
    /// `capabilities`.
    object: &'static str,
    store: StoreKind,
    /// Whether runs outlive this process.
    durable: bool,
    /// Whether other edges work on the same runs.
    shared: bool,
    guarantee: Guarantee,
    /// Whether a run keeps its id over restarts and has one writer at a time (D75).
    stable_runs: bool,
    features: Features,
    limits: Limits,
}

/// What there is.
#[derive(Serialize, ToSchema)]
struct Features {
    agents: bool,
    approvals: bool,
    inputs: bool,
    history: bool,
    flows: bool,
    triggers: bool,
    fork: bool,
    import: bool,
    migrate: bool,
    rollover: bool,
    handoff: bool,
    exactly_once: bool,
}

/// In bytes, but for ids of runs and lists.
#[derive(Serialize, ToSchema)]
struct Limits {
    max_state: u64,
    max_result: u64,
    max_body: u64,
    max_id: u64,
    max_page: u64,
}

pub(super) fn router() -> OpenApiRouter {
    OpenApiRouter::new().routes(routes!(capabilities))
}

/// What the runs of this edge are promised.
#[utoipa::path(
    get, path = "/durable/capabilities", tag = "meta", operation_id = "get_capabilities",
    responses((status = 200, body = CapabilitiesObject))
)]
async fn capabilities(
    Reader(_caller): Reader,
    Edge(app): Edge,
    Hosted(runs): Hosted,
) -> Result<Reply<CapabilitiesObject>, Problem> {
    let store = match app.settings.store {
        StoreUrl::Sqlite(_) => StoreKind::Sqlite,
        StoreUrl::Postgres(_) => StoreKind::Postgres,
        StoreUrl::Memory => StoreKind::Memory,
    };
    let durable = store != StoreKind::Memory;
    let bytes = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    Ok(Reply(CapabilitiesObject {
        object: "capabilities",
        store,
        durable,
        shared: store == StoreKind::Postgres,
        guarantee: if durable {
            Guarantee::AtLeastOnceWithStableKeys
        } else {
            Guarantee::None
        },
        stable_runs: durable,
        features: Features {
            agents: true,
            approvals: true,
            inputs: true,
            history: true,
            flows: false,
            triggers: false,
            fork: false,
            import: false,
            migrate: false,
            rollover: false,
            handoff: false,
            exactly_once: false,
        },
        limits: Limits {
            max_state: runs.settings().max_state,
            max_result: runs.settings().max_result,
            max_body: bytes(app.settings.server.body_limit),
            max_id: bytes(iop_durable::ids::ID_MAX),
            max_page: 200,
        },
    }))
}
