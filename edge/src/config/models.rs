//! `[[models]]`: public names and the (provider, target) pairs that may serve them.

use std::sync::Arc;

use iop_shared::config::{Adapter, ProviderConfig, Targets};
use iop_shared::ids::ProviderKey;

use super::build::{Checked, Site};
use super::file::{self, CandidateFile, EdgeFile, LivenessPreset, ModelFile};
use crate::pool::{Affinity, Candidate, Liveness, Model, Preset};

/// Longest public model name or target, in bytes.
const NAME_MAX: usize = 512;

pub(super) fn build(
    site: &Site<'_>,
    files: &[ModelFile],
    providers: &[ProviderConfig],
    has_link: bool,
    notes: &mut Vec<String>,
) -> Vec<Model> {
    let models =
        (0..files.len()).filter_map(|i| site.keep(model(site, files, i, providers, has_link, notes)));
    models.collect()
}

/// The model at this place of the list.
fn model(
    site: &Site<'_>,
    files: &[ModelFile],
    i: usize,
    providers: &[ProviderConfig],
    has_link: bool,
    notes: &mut Vec<String>,
) -> Checked<Model> {
    let file = &files[i];
    let at = |field: &str| format!("models[{i}].{field}");
    if !is_name(&file.name) {
        return site.fail(&at("name"), "must be 1 to 512 bytes of printable text");
    }
    if file.name.starts_with("agent:") {
        return site.fail(&at("name"), "agent:NAME is the agent NAME of [agents]");
    }
    if files[..i].iter().any(|m| m.name == file.name) {
        return site.fail(&at("name"), format!("model {:?} is defined twice", file.name));
    }
    if file.candidates.is_empty() {
        return site.fail(&at("candidates"), "must name at least one candidate");
    }
    let mut candidates: Vec<Candidate> = Vec::with_capacity(file.candidates.len());
    for (c, written) in file.candidates.iter().enumerate() {
        let key = at(&format!("candidates[{c}]"));
        let candidate = candidate(site, &key, written, providers)?;
        if candidates
            .iter()
            .any(|o| o.provider == candidate.provider && o.target == candidate.target)
        {
            return site.fail(&key, "names the same provider and target as another candidate");
        }
        if candidate.provider.node().is_some() && !has_link {
            notes.push(format!(
                "{key}.provider is on a node, but without [link] no node can dial in"
            ));
        }
        candidates.push(candidate);
    }
    let period = |field: &str, period| match period {
        Some(p) => site.positive(&at(field), p).map(Some),
        None => Ok(None),
    };
    Ok(Model {
        name: Arc::from(file.name.as_str()),
        candidates,
        advertised: false,
        liveness: Liveness {
            stall: period("response_stall_timeout", file.response_stall_timeout)?,
            first_content: period("first_content_timeout", file.first_content_timeout)?,
            preset: file.liveness.map(|preset| match preset {
                LivenessPreset::Default => Preset::Default,
                LivenessPreset::Interactive => Preset::Interactive,
                LivenessPreset::Batch => Preset::Batch,
            }),
        },
        affinity: match file.affinity {
            file::Affinity::None => Affinity::None,
            file::Affinity::Prefix => Affinity::Prefix,
        },
    })
}

fn candidate(
    site: &Site<'_>,
    key: &str,
    file: &CandidateFile,
    providers: &[ProviderConfig],
) -> Checked<Candidate> {
    let at = |field: &str| format!("{key}.{field}");
    let Ok(provider) = ProviderKey::parse(&file.provider) else {
        return site.fail(
            &at("provider"),
            "must be PROVIDER or NODE/PROVIDER, each part matching [A-Za-z0-9._-]{1,64}",
        );
    };
    if !is_name(&file.target) {
        return site.fail(&at("target"), "must be 1 to 512 bytes of printable text");
    }
    if file.weight == 0 {
        return site.fail(&at("weight"), "must be at least 1");
    }
    // What a node serves is known only once it is here; the embedded node's file is this one.
    if provider.node().is_none() {
        let Some(known) = providers.iter().find(|p| p.id.as_str() == provider.as_str()) else {
            return site.fail(
                &at("provider"),
                format!("no provider {:?} in [[providers]]", provider.as_str()),
            );
        };
        if serves(known, &file.target) == Some(false) {
            return site.fail(
                &at("target"),
                format!("provider {:?} has no target {:?}", provider.as_str(), file.target),
            );
        }
    }
    Ok(Candidate {
        provider,
        target: Arc::from(file.target.as_str()),
        priority: file.priority,
        weight: file.weight,
    })
}

/// `None`: the provider's targets are asked from it later.
fn serves(provider: &ProviderConfig, target: &str) -> Option<bool> {
    match (&provider.targets, provider.adapter) {
        (Some(Targets::List(list)), _) => Some(list.iter().any(|t| t == target)),
        (None, Adapter::Scripted) => Some(provider.script.as_ref().is_some_and(|s| s.contains_key(target))),
        (None | Some(Targets::Auto), Adapter::Openai | Adapter::Ollama | Adapter::Scripted) => None,
    }
}

/// Whether a request for this model may find somebody, as far as the file tells.
pub(super) fn may_serve(file: &EdgeFile, model: &str) -> bool {
    file.link.is_some()
        || file.models.iter().any(|m| m.name == model)
        || file
            .providers
            .iter()
            .any(|provider| serves(provider, model) != Some(false))
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= NAME_MAX && !text.chars().any(char::is_control)
}
