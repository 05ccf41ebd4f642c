//! `[agents]` and `[prices]`: the declarations that come with the configuration.

use std::collections::BTreeMap;

use http::HeaderValue;
use iop_shared::config::{SecretRef, SecretSource};
use secrecy::ExposeSecret;

use super::build::{Checked, Site};
use super::file::EdgeFile;
use super::models;
use super::settings::{Role, StoreUrl};
use crate::agents::prices::Prices;
use crate::agents::spec::check::{check, is_name};
use crate::agents::spec::notes::{self, Around};
use crate::agents::spec::{AgentSpec, HeaderText};

/// Compiles the prices and checks every declaration against them; without prices none can be judged.
pub(super) fn rules(site: &Site<'_>, file: &EdgeFile) -> Option<Prices> {
    let prices =
        Prices::compile(&file.prices).or_else(|e| site.fail(&format!("prices.{}", e.field), e.message));
    let prices = site.keep(prices)?;
    for (name, spec) in &file.agents {
        let key = format!("agents.{name}");
        let checked = if is_name(name) {
            check(spec, &prices).or_else(|e| site.fail(&format!("{key}.{}", e.field), e.message))
        } else {
            site.fail(&key, "must match [A-Za-z0-9._-]{1,64}")
        };
        site.keep(checked);
    }
    Some(prices)
}

/// Reads every secret that the declarations refer to: one that is missing is found at the start, not in a run. They are read
/// again at each call, and never kept.
pub(super) fn secrets(site: &Site<'_>, agents: &BTreeMap<String, AgentSpec>) {
    for (name, spec) in agents {
        for (at, headers) in header_lists(spec) {
            for (header, text) in headers {
                let source = match text {
                    HeaderText::Plain(_) => continue,
                    HeaderText::Env(it) => SecretSource::Env(it.env.clone()),
                    HeaderText::File(it) => SecretSource::File(it.file.clone().into()),
                };
                site.keep(secret(
                    site,
                    &format!("agents.{name}.{at}.headers.{header}"),
                    source,
                ));
            }
        }
    }
}

fn secret(site: &Site<'_>, key: &str, source: SecretSource) -> Checked<()> {
    let secret = site.secret(key, &SecretRef(source))?;
    if HeaderValue::try_from(secret.expose_secret()).is_err() {
        return site.fail(key, "leads to a text that no header can carry");
    }
    Ok(())
}

type Headers = BTreeMap<String, HeaderText>;

fn header_lists(spec: &AgentSpec) -> impl Iterator<Item = (String, &Headers)> {
    let tools = spec.tools.iter().enumerate().flat_map(|(i, tool)| {
        let http = tool
            .http
            .iter()
            .map(move |it| (format!("tools[{i}].http"), &it.headers));
        let reconcile = tool
            .reconcile
            .iter()
            .map(move |it| (format!("tools[{i}].reconcile"), &it.headers));
        http.chain(reconcile)
    });
    let servers = spec
        .mcp_servers
        .iter()
        .map(|(name, it)| (format!("mcp_servers.{name}"), &it.headers));
    tools.chain(servers)
}

/// What may be right, but will not work by this file alone.
pub(super) fn notes(file: &EdgeFile, store: &StoreUrl, out: &mut Vec<String>) {
    let memory = matches!(store, StoreUrl::Memory);
    if memory {
        out.push(String::from(
            "store.url is memory://: declarations and runs end with the process",
        ));
    }
    let around = Around {
        memory,
        serves: &|model| models::may_serve(file, model),
        has_agent: &|name| file.agents.contains_key(name),
        decides: &|name| {
            let mut keys = file.auth.keys.iter();
            keys.any(|key| key.name == name && key.roles.contains(&Role::Operator))
        },
    };
    for (name, spec) in &file.agents {
        let of_agent = notes::notes(spec, &around).into_iter();
        out.extend(of_agent.map(|note| format!("agents.{name}.{note}")));
    }
}
