//! What a run asks a person (D74).

use axum::response::Response;
use http::HeaderMap;
use serde::Deserialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::after::{After, after};
use super::callers::Operator;
use super::extract::{Hosted, Json, Url};
use super::matching::{self, Said};
use crate::runs::problem::Problem;
use crate::runs::view::WaitObject;

pub(super) fn router() -> OpenApiRouter {
    OpenApiRouter::new().routes(routes!(answer))
}

/// The answer to an input.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct InputAnswer {
    /// Held to the schema of the prompt; given to the model as it is.
    #[schema(value_type = Value)]
    value: Box<RawValue>,
    /// The same id with the same value is answered the same again.
    decision_id: String,
}

/// Answers an input. Role `operator`.
#[utoipa::path(post, path = "/runs/{id}/inputs/{input_id}", tag = "people", operation_id = "answer_input",
    params(("id" = String, Path), ("input_id" = String, Path), ("If-Match" = Option<String>, Header)),
    request_body = InputAnswer, responses((status = 200, body = After<WaitObject>)))]
async fn answer(
    Operator(caller): Operator,
    Hosted(runs): Hosted,
    Url((run, input)): Url<(String, String)>,
    headers: HeaderMap,
    Json(body, _held): Json<InputAnswer>,
) -> Result<Response, Problem> {
    let said = Said::Delivery(&input, &body.decision_id);
    matching::check(&runs, &caller, &run, &headers, said).await?;
    let told = runs
        .answer(&caller, &run, &input, &body.decision_id, &body.value)
        .await
        .map_err(|problem| problem.too_large_at("value"))?;
    Ok(after(WaitObject::of(&told.wait), &told.token, told.replayed))
}
