//! Runs: begun, watched, read (durable-api §2 "runs").

mod begin;
mod events;
mod follow;
mod journal;
mod read;

pub(in crate::http) use begin::{check_metadata, idempotency_key, traceparent};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter {
    OpenApiRouter::new()
        .routes(routes!(begin::create, read::list))
        .routes(routes!(read::one))
        .routes(routes!(read::result))
        .routes(routes!(follow::wait))
        .routes(routes!(events::events))
        .routes(routes!(journal::steps))
        .routes(routes!(journal::turns))
        .routes(routes!(read::children))
        .routes(routes!(journal::history))
        .routes(routes!(journal::checkpoint))
}
