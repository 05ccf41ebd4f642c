//! `GET /v1/models` and `GET /v1/models/{id}` (G3): what this key may ask for now.

use http::HeaderMap;
use serde::Serialize;

use super::answer::{Answer, json};
use crate::app::App;
use crate::config::Role;
use crate::error::{ApiError, ErrorKind};
use crate::pool::ListedModel;

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Entry<'a>>,
}

#[derive(Serialize)]
struct Entry<'a> {
    id: &'a str,
    object: &'static str,
    created: i64,
    owned_by: &'a str,
}

impl<'a> From<&'a ListedModel> for Entry<'a> {
    fn from(model: &'a ListedModel) -> Self {
        Self {
            id: &model.id,
            object: "model",
            created: model.created,
            owned_by: model.owned_by,
        }
    }
}

pub(super) fn list(app: &App, headers: &HeaderMap) -> Result<Answer, ApiError> {
    let caller = app.keys.authenticate(headers)?;
    caller.require(Role::Inference)?;
    let listed = app.pool.listed();
    let data = listed
        .iter()
        .filter(|m| caller.may_use(&m.id))
        .map(Entry::from)
        .collect();
    Ok(json(&List { object: "list", data }))
}

/// `id` as it stands in the path: names hold slashes, and clients percent-encode them or do not.
pub(super) fn one(app: &App, headers: &HeaderMap, id: &str) -> Result<Answer, ApiError> {
    let caller = app.keys.authenticate(headers)?;
    caller.require(Role::Inference)?;
    let name = percent_encoding::percent_decode_str(id).decode_utf8_lossy();
    // A model that the key may not use looks like one that is not there: the list does not show it either.
    let listed = app.pool.listed();
    let found = listed.iter().find(|m| *m.id == *name && caller.may_use(&m.id));
    found.map(|m| json(&Entry::from(m))).ok_or_else(|| {
        ApiError::new(
            ErrorKind::ModelNotFound,
            "The model does not exist or is not served now.",
        )
        .with_param("model")
    })
}
