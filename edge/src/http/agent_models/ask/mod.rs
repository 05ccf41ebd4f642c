//! What a client asks of an agent in the place of a model. The agent's declaration says how it works: what a request says of
//! sampling is not used, and what would change the answer's form or the agent's tools is refused by name.

pub(super) mod chat;
pub(super) mod responses;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::fault::Fault;

/// Members of a run's metadata that the gateway writes.
pub(super) const RUN_ID: &str = "iop_run_id";
pub(super) const PREVIOUS: &str = "iop_previous_response_id";

/// The members of a body.
pub(super) struct Members<'a>(BTreeMap<String, &'a RawValue>);

impl<'a> Members<'a> {
    pub(super) fn read(body: &'a [u8]) -> Result<Self, Fault> {
        let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
        serde_json::from_slice(body)
            .map(Self)
            .map_err(|e| Fault::invalid("body", format!("The request body cannot be read: {e}.")))
    }

    /// A member that is there and not null.
    fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.0.get(name).copied().filter(|value| value.get() != "null")
    }

    fn typed<T: Deserialize<'a>>(&self, name: &'static str, what: &str) -> Result<Option<T>, Fault> {
        self.get(name)
            .map(|value| serde_json::from_str(value.get()))
            .transpose()
            .map_err(|_| Fault::invalid(name, format!("`{name}` must be {what}.")))
    }

    /// Members that an agent does not take, whatever they say.
    fn without(&self, names: &[&'static str]) -> Result<(), Fault> {
        match names.iter().find(|name| self.get(name).is_some()) {
            Some(name) => Err(Fault::invalid(
                *name,
                format!("`{name}` cannot be used with an agent."),
            )),
            None => Ok(()),
        }
    }

    /// What both APIs have in common. `labelled`: whether tools of type `mcp` may stand for the agent's own, by its name.
    fn check(&self, labelled: Option<&str>) -> Result<(), Fault> {
        #[derive(Deserialize)]
        struct Tool<'t> {
            #[serde(rename = "type")]
            kind: Option<&'t str>,
            server_label: Option<&'t str>,
        }
        let tools: Vec<&RawValue> = self.typed("tools", "a list")?.unwrap_or_default();
        for (n, tool) in tools.iter().enumerate() {
            let own = serde_json::from_str::<Tool<'_>>(tool.get()).is_ok_and(|tool| {
                labelled.is_some() && tool.kind == Some("mcp") && tool.server_label == labelled
            });
            if !own {
                let why = "An agent has the tools of its declaration; a request cannot bring others.";
                let param = if labelled.is_some() {
                    format!("tools[{n}]")
                } else {
                    "tools".to_owned()
                };
                return Err(Fault::invalid(param, why));
            }
        }
        if self
            .get("tool_choice")
            .is_some_and(|choice| !matches!(choice.get(), "\"auto\"" | "\"none\""))
        {
            let why = "`tool_choice` must be auto or none: an agent chooses its tools itself.";
            return Err(Fault::invalid("tool_choice", why));
        }
        if self.get("store").is_some_and(|store| store.get() == "false") {
            let why = "`store` cannot be false: what an agent does is stored.";
            return Err(Fault::invalid("store", why));
        }
        Ok(())
    }

    /// Pairs of texts, without the gateway's own.
    fn metadata(&self) -> Result<BTreeMap<String, String>, Fault> {
        let pairs: BTreeMap<String, &RawValue> = self.typed("metadata", "an object")?.unwrap_or_default();
        let mut metadata = BTreeMap::new();
        for (name, value) in pairs {
            if matches!(name.as_str(), RUN_ID | PREVIOUS) {
                continue;
            }
            let Ok(value) = serde_json::from_str::<String>(value.get()) else {
                let param = format!("metadata.{name}");
                let why = format!("`{param}` must be a string.");
                return Err(Fault::invalid(param, why));
            };
            metadata.insert(name, value);
        }
        super::super::api::check_metadata(&metadata)?;
        Ok(metadata)
    }
}

/// Whether a description of a format asks for anything but text.
fn is_text(format: &RawValue) -> bool {
    #[derive(Deserialize)]
    struct Format<'f> {
        #[serde(rename = "type")]
        kind: Option<&'f str>,
    }
    serde_json::from_str::<Format<'_>>(format.get())
        .is_ok_and(|format| format.kind.is_none_or(|kind| kind == "text"))
}

#[cfg(test)]
mod tests;
