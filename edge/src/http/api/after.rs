//! Answers to what changes a run: the object that was changed, where its run stands, and whether the same was answered before.

use axum::Json as Reply;
use axum::response::{IntoResponse, Response};
use iop_durable::token::ResumeToken;
use serde::Serialize;
use utoipa::ToSchema;

use super::shown;

/// An object, and what a resume of its run needs after the change.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct After<T> {
    #[serde(flatten)]
    object: T,
    /// Of the run, a decimal number.
    revision: String,
    resume_token: String,
}

/// 200 with the object, the run's ETag, and `Idempotency-Replayed` when it was answered before.
pub(super) fn after<T: Serialize>(object: T, token: &ResumeToken, replayed: bool) -> Response {
    let revision = token.revision.to_string();
    let tag = shown::etag(&revision);
    let mut response = Reply(After {
        object,
        revision,
        resume_token: token.to_string(),
    })
    .into_response();
    response.headers_mut().extend(tag);
    shown::replayed(response, replayed)
}
