//! `GET /api/v1/nodes`, `GET /api/v1/providers` (G84): the pool's snapshot. Reads only.

use axum::Json as Reply;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::callers::Operator;
use super::extract::{Edge, Search};
use super::list::{List, Page, cut};
use crate::pool::{NodeSnapshot, ProviderSnapshot};
use crate::runs::problem::Problem;

pub(super) fn router() -> OpenApiRouter {
    OpenApiRouter::new()
        .routes(routes!(nodes))
        .routes(routes!(providers))
}

/// Connected nodes. Role `operator`.
#[utoipa::path(get, path = "/nodes", tag = "nodes", params(Page), responses((status = 200, body = List<NodeSnapshot>)))]
async fn nodes(
    Edge(app): Edge,
    _: Operator,
    Search(page): Search<Page>,
) -> Result<Reply<List<NodeSnapshot>>, Problem> {
    Ok(Reply(cut(app.pool.nodes(), &page, |n| n.id.as_str())))
}

/// Providers of connected nodes, and how busy they are. Role `operator`.
#[utoipa::path(get, path = "/providers", tag = "nodes", params(Page), responses((status = 200, body = List<ProviderSnapshot>)))]
async fn providers(
    Edge(app): Edge,
    _: Operator,
    Search(page): Search<Page>,
) -> Result<Reply<List<ProviderSnapshot>>, Problem> {
    Ok(Reply(cut(app.pool.providers(), &page, |p| p.id.as_str())))
}
