//! The digest that runs are pinned to (D116).

use crate::graph::GraphBuilder;
use crate::graph::builder::Declared;
use crate::ids::{digest_of, hex};

fn fact(parts: &[&str]) -> [u8; 32] {
    let parts: Vec<&[u8]> = parts.iter().map(|part| part.as_bytes()).collect();
    digest_of(&parts)
}

impl<S: 'static, E> GraphBuilder<S, E> {
    pub(super) fn entry_name(&self) -> Option<&str> {
        let first = || self.nodes.first().map(|(name, _)| name.as_str());
        self.entry.as_deref().or_else(first)
    }

    /// Over everything that says how a run goes: names, routes, labels, limits, in whatever order they were declared. Code is
    /// the host's: its changes are a new version. Retention is not part of it: what is kept of a run may change under it.
    pub(super) fn digest(&self) -> String {
        let mut facts = vec![
            fact(&["kind", &self.kind]),
            fact(&["name", &self.name]),
            fact(&["version", &self.version.to_string()]),
            fact(&["codec", self.codec.label()]),
            fact(&["max steps", &self.max_steps.to_string()]),
            fact(&["recovery attempts", &self.recovery_attempts.to_string()]),
        ];
        facts.extend(self.hook.iter().map(|hook| fact(&["hook", hook.label()])));
        facts.extend(self.entry_name().map(|name| fact(&["entry", name])));
        facts.extend(self.nodes.iter().map(|(name, _)| fact(&["node", name])));
        facts.extend(self.edges.iter().map(|(from, declared)| match declared {
            Declared::To(to) => fact(&["edge", from, to]),
            Declared::Choose { targets, .. } => {
                let mut sorted: Vec<&str> = targets.iter().map(String::as_str).collect();
                sorted.sort_unstable();
                sorted.dedup();
                fact(&[&["choose", from.as_str()], sorted.as_slice()].concat())
            }
        }));
        let retry_routes = self.retry_routes.iter();
        facts.extend(retry_routes.map(|(from, to)| fact(&["retry route", from, to])));
        facts.extend(self.retry.iter().map(|(node, policy)| {
            fact(&[
                "retry",
                node,
                &policy.label,
                &policy.max_attempts.to_string(),
                policy.backoff.as_str(),
                &policy.initial.as_nanos().to_string(),
                &policy.max.as_nanos().to_string(),
                &policy.multiplier_permille.to_string(),
                &policy.jitter_permille.to_string(),
            ])
        }));
        facts.extend(self.waits.iter().map(|(node, wait)| {
            let labels = &wait.labels;
            fact(&[
                "wait",
                node,
                &labels.matcher,
                &labels.payload,
                &labels.continuation,
                &wait.on_event,
                &wait.on_timeout,
            ])
        }));
        facts.extend(self.terminal.iter().map(|node| fact(&["terminal", node])));
        let resume_targets = self.resume_targets.iter();
        facts.extend(resume_targets.map(|node| fact(&["resume target", node])));
        let budgets = self.budgets.iter();
        facts.extend(budgets.map(|(name, limit)| fact(&["budget", name, &limit.to_string()])));
        facts.sort_unstable();
        let parts: Vec<&[u8]> = facts.iter().map(<[u8; 32]>::as_slice).collect();
        format!("sha256:{}", hex(&digest_of(&parts)))
    }
}
