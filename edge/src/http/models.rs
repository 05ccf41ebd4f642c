//! `GET /v1/models` and `GET /v1/models/{id}` (G3): what this key may ask for now, agents among them.

use std::borrow::Cow;
use std::sync::Arc;

use http::HeaderMap;
use serde::Serialize;

use super::agent_models::PREFIX;
use super::answer::{Answer, json};
use super::auth::Caller;
use crate::app::App;
use crate::config::Role;
use crate::error::{ApiError, ErrorKind};
use crate::pool::ListedModel;
use crate::runs::catalog::Version;

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

/// The agents as models that this key may ask for: an agent asks its own model, with the same key.
fn agents<'a>(app: &App, caller: &Caller) -> Vec<Entry<'a>> {
    let agents = app.runs().map(|runs| runs.catalog().readable());
    let entry = |agent: Arc<Version>| {
        let id = format!("{PREFIX}{}", agent.name);
        (caller.may_use(&id) && caller.may_use(&agent.spec.model)).then(|| Entry {
            id: Cow::Owned(id),
            object: "model",
            created: agent.created_at.as_millis().div_euclid(1000),
            owned_by: "iop",
        })
    };
    agents.into_iter().flatten().filter_map(entry).collect()
}

/// The models that this key may ask for.
fn entries<'a>(
    app: &'a App,
    caller: &'a Caller,
    listed: &'a [ListedModel],
) -> impl Iterator<Item = Entry<'a>> {
    let served = listed.iter().filter(|model| caller.may_use(&model.id));
    served.map(Entry::from).chain(agents(app, caller))
}

pub(super) fn list(app: &App, headers: &HeaderMap) -> Result<Answer, ApiError> {
    let caller = app.keys.authenticate(headers)?;
    caller.require(Role::Inference)?;
    let listed = app.pool.listed();
    let data = entries(app, &caller, &listed).collect();
    Ok(json(&List { object: "list", data }))
}

/// `id` as it stands in the path: names hold slashes, and clients percent-encode them or do not.
pub(super) fn one(app: &App, headers: &HeaderMap, id: &str) -> Result<Answer, ApiError> {
    let caller = app.keys.authenticate(headers)?;
    caller.require(Role::Inference)?;
    let name = percent_encoding::percent_decode_str(id).decode_utf8_lossy();
    // A model that the key may not use looks like one that is not there: the list does not show it either.
    let listed = app.pool.listed();
    let found = entries(app, &caller, &listed).find(|m| m.id == name);
    found.map(|m| json(&m)).ok_or_else(|| {
        ApiError::new(
            ErrorKind::ModelNotFound,
            "The model does not exist or is not served now.",
        )
        .with_param("model")
    })
}
