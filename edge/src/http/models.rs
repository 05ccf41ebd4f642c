//! `GET /v1/models` and `GET /v1/models/{id}` (G3): what this key may ask for now, agents among them.

use std::borrow::Cow;

use http::HeaderMap;
use serde::Serialize;

use super::agent_models::PREFIX;
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
    id: Cow<'a, str>,
    object: &'static str,
    created: i64,
    owned_by: &'a str,
}

impl<'a> From<&'a ListedModel> for Entry<'a> {
    fn from(model: &'a ListedModel) -> Self {
        Self {
            id: Cow::Borrowed(&model.id),
            object: "model",
            created: model.created,
            owned_by: model.owned_by,
        }
    }
}

/// The agents as models.
fn agents<'a>(app: &App) -> impl Iterator<Item = Entry<'a>> + use<'a> {
    let names = app.runs().map(|runs| runs.catalog().names()).unwrap_or_default();
    names.into_iter().map(|(name, made)| Entry {
        id: Cow::Owned(format!("{PREFIX}{name}")),
        object: "model",
        created: made.as_millis().div_euclid(1000),
        owned_by: "iop",
    })
}

pub(super) fn list(app: &App, headers: &HeaderMap) -> Result<Answer, ApiError> {
    let caller = app.keys.authenticate(headers)?;
    caller.require(Role::Inference)?;
    let listed = app.pool.listed();
    let data = listed
        .iter()
        .map(Entry::from)
        .chain(agents(app))
        .filter(|m| caller.may_use(&m.id))
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
    let models = listed.iter().map(Entry::from).chain(agents(app));
    let found = models.into_iter().find(|m| m.id == name && caller.may_use(&m.id));
    found.map(|m| json(&m)).ok_or_else(|| {
        ApiError::new(
            ErrorKind::ModelNotFound,
            "The model does not exist or is not served now.",
        )
        .with_param("model")
    })
}
