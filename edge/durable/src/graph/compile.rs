//! Checking a graph. Everything that is wrong is found at once and names its node.

use std::collections::{BTreeMap, BTreeSet};

use crate::graph::builder::{Declared, WaitDraft};
use crate::graph::{END, Edges, Graph, GraphBuilder, NodeEntry, WaitRoute};
use crate::ids::{NodeName, check_text};
use crate::machine::retry;
use crate::record::{Budget, DefinitionRef, RetryPolicy};

/// One thing that is wrong with a graph.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    #[error("{what}: {why}")]
    Name { what: String, why: String },
    #[error("node {node:?} is declared twice")]
    DuplicateNode { node: String },
    #[error("{what} of node {node:?} names {target:?}, which is not a node")]
    UnknownTarget {
        node: String,
        what: &'static str,
        target: String,
    },
    #[error("{what} is declared for {node:?}, which is not a node")]
    UnknownNode { node: String, what: &'static str },
    #[error("node {node:?} has more than one {what}")]
    Twice { node: String, what: &'static str },
    #[error("node {node:?} has no outgoing route and is not declared terminal")]
    NoRoute { node: String },
    #[error("node {node:?} is declared terminal and has an outgoing route")]
    TerminalWithRoute { node: String },
    #[error("node {node:?} has a conditional edge without targets")]
    NoTargets { node: String },
    #[error("node {node:?} cannot be reached from the entry")]
    Unreachable { node: String },
    #[error("the retry route of node {node:?} leads to itself")]
    RetryToSelf { node: String },
    #[error("the graph has no nodes")]
    Empty,
    #[error("the entry {node:?} is not a node")]
    UnknownEntry { node: String },
    #[error("budget {budget:?}: {why}")]
    Budget { budget: String, why: String },
    #[error("retry of node {node:?}: {why}")]
    Retry { node: String, why: String },
    #[error("{what} must be at least 1")]
    Zero { what: &'static str },
}

/// All of them, in the order of declaration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GraphErrors(pub Vec<CompileError>);

impl std::fmt::Display for GraphErrors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let texts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&texts.join("; "))
    }
}

impl std::error::Error for GraphErrors {}

/// The nodes by name, and what was found wrong so far.
struct Check {
    names: BTreeMap<String, NodeName>,
    errors: Vec<CompileError>,
}

impl Check {
    fn bad(&mut self, error: CompileError) {
        self.errors.push(error);
    }

    fn text(&mut self, what: &str, text: &str) {
        if let Err(why) = check_text("text", text) {
            self.bad(CompileError::Name {
                what: what.to_owned(),
                why: why.to_string(),
            });
        }
    }

    fn node(&mut self, name: &str) {
        let what = || format!("node {name:?}");
        match NodeName::new(name) {
            Err(why) => self.bad(CompileError::Name {
                what: what(),
                why: why.to_string(),
            }),
            Ok(_) if name == END => self.bad(CompileError::Name {
                what: what(),
                why: "is the name of the end".to_owned(),
            }),
            Ok(node) => {
                if self.names.insert(name.to_owned(), node).is_some() {
                    self.bad(CompileError::DuplicateNode {
                        node: name.to_owned(),
                    });
                }
            }
        }
    }

    /// What is declared for `node`.
    fn declared_for(&mut self, node: &str, what: &'static str) {
        if !self.names.contains_key(node) {
            self.bad(CompileError::UnknownNode {
                node: node.to_owned(),
                what,
            });
        }
    }

    fn target(&mut self, node: &str, what: &'static str, target: &str) -> Option<NodeName> {
        let found = self.names.get(target).cloned();
        if found.is_none() {
            self.bad(CompileError::UnknownTarget {
                node: node.to_owned(),
                what,
                target: target.to_owned(),
            });
        }
        found
    }

    /// Keeps the last of several.
    fn once<T>(&mut self, all: &mut BTreeMap<String, T>, node: String, what: &'static str, value: T) {
        if all.insert(node.clone(), value).is_some() {
            self.bad(CompileError::Twice { node, what });
        }
    }

    fn entry(&mut self, name: Option<&str>) -> Option<NodeName> {
        let Some(name) = name else {
            self.bad(CompileError::Empty);
            return None;
        };
        let entry = self.names.get(name).cloned();
        if entry.is_none() {
            self.bad(CompileError::UnknownEntry {
                node: name.to_owned(),
            });
        }
        entry
    }

    fn edges<S>(
        &mut self,
        declared: Vec<(String, Declared<S>)>,
        terminal: &BTreeSet<String>,
    ) -> BTreeMap<String, Edges<S>> {
        let mut edges = BTreeMap::new();
        for (from, declared) in declared {
            self.declared_for(&from, "an edge");
            if terminal.contains(&from) {
                self.bad(CompileError::TerminalWithRoute { node: from.clone() });
            }
            let resolved = match declared {
                Declared::To(to) if to == END => Edges::End,
                Declared::To(to) => self
                    .target(&from, "the edge", &to)
                    .map_or(Edges::Missing, Edges::To),
                Declared::Choose { targets, route } => {
                    if targets.is_empty() {
                        self.bad(CompileError::NoTargets { node: from.clone() });
                    }
                    let may_end = targets.iter().any(|t| t == END);
                    let nodes = targets.iter().filter(|t| *t != END);
                    let targets = nodes
                        .filter_map(|t| self.target(&from, "the conditional edge", t))
                        .collect();
                    Edges::Choose {
                        targets,
                        may_end,
                        route,
                    }
                }
            };
            self.once(&mut edges, from, "outgoing route", resolved);
        }
        edges
    }

    fn retry_routes(&mut self, declared: &[(String, String)]) -> BTreeMap<String, NodeName> {
        let mut routes = BTreeMap::new();
        for (from, to) in declared {
            self.declared_for(from, "a retry route");
            if from == to {
                self.bad(CompileError::RetryToSelf { node: from.clone() });
            }
            if let Some(target) = self.target(from, "the retry route", to) {
                self.once(&mut routes, from.clone(), "retry route", target);
            }
        }
        routes
    }

    fn retries(&mut self, declared: Vec<(String, RetryPolicy)>) -> BTreeMap<String, RetryPolicy> {
        let mut retries = BTreeMap::new();
        for (node, policy) in declared {
            self.declared_for(&node, "a retry");
            if let Err(why) = retry::check(&policy) {
                self.bad(CompileError::Retry {
                    node: node.clone(),
                    why: why.to_string(),
                });
            }
            self.once(&mut retries, node, "retry", policy);
        }
        retries
    }

    fn waits<S>(&mut self, declared: Vec<(String, WaitDraft<S>)>) -> BTreeMap<String, WaitRoute<S>> {
        let mut waits = BTreeMap::new();
        for (node, draft) in declared {
            self.declared_for(&node, "a wait route");
            let labels = &draft.labels;
            for (what, text) in [
                ("matcher", &labels.matcher),
                ("payload", &labels.payload),
                ("continuation", &labels.continuation),
            ] {
                self.text(&format!("{what} label of the wait route of node {node:?}"), text);
            }
            let on_event = self.target(&node, "the wait route", &draft.on_event);
            let on_timeout = self.target(&node, "the wait route", &draft.on_timeout);
            if let (Some(on_event), Some(on_timeout)) = (on_event, on_timeout) {
                let route = WaitRoute {
                    labels: draft.labels,
                    on_event,
                    on_timeout,
                    matcher: draft.matcher,
                    transition: draft.transition,
                };
                self.once(&mut waits, node, "wait route", route);
            }
        }
        waits
    }

    fn budgets(&mut self, declared: &[(String, u64)]) -> BTreeMap<String, Budget> {
        let mut budgets = BTreeMap::new();
        for (name, limit) in declared {
            let mut bad = |why: String| {
                self.bad(CompileError::Budget {
                    budget: name.clone(),
                    why,
                });
            };
            if let Err(why) = check_text("budget", name) {
                bad(why.to_string());
            }
            if is_own_budget(name) {
                bad("the engine counts this itself".to_owned());
            }
            let budget = Budget {
                used: 0,
                limit: *limit,
            };
            if budgets.insert(name.clone(), budget).is_some() {
                bad("declared twice".to_owned());
            }
        }
        budgets
    }
}

/// Names that the engine itself ends a run with.
fn is_own_budget(name: &str) -> bool {
    matches!(name, "steps" | "recovery_attempts") || name.starts_with("retry:")
}

impl<S, E> GraphBuilder<S, E>
where
    S: Send + Sync + 'static,
    E: Send + 'static,
{
    /// Checks everything and makes the graph.
    ///
    /// # Errors
    /// All that is wrong, each naming its node. Whether every node can be reached is looked at once nothing else is wrong.
    pub fn compile(mut self) -> Result<Graph<S, E>, GraphErrors> {
        let mut check = Check {
            names: BTreeMap::new(),
            errors: std::mem::take(&mut self.refused),
        };
        check.text("name", &self.name);
        check.text("kind", &self.kind);
        for (what, n) in [
            ("version", self.version),
            ("max_steps", self.max_steps),
            ("keep_checkpoints", u64::from(self.keep_checkpoints.unwrap_or(1))),
        ] {
            if n == 0 {
                check.bad(CompileError::Zero { what });
            }
        }
        for (name, _) in &self.nodes {
            check.node(name);
        }
        let budgets = check.budgets(&self.budgets);
        let digest = self.declared.clone().unwrap_or_else(|| self.digest());
        let entry = check.entry(self.entry_name());
        let terminal: BTreeSet<String> = self.terminal.iter().cloned().collect();
        for node in &terminal {
            check.declared_for(node, "terminal");
        }
        let mut edges = check.edges(self.edges, &terminal);
        let mut retry_routes = check.retry_routes(&self.retry_routes);
        let mut retry = check.retries(self.retry);
        let mut waits = check.waits(self.waits);
        let mut starts: Vec<NodeName> = entry.iter().cloned().collect();
        for target in &self.resume_targets {
            check.declared_for(target, "a resume target");
            starts.extend(check.names.get(target).cloned());
        }

        let mut nodes: BTreeMap<NodeName, NodeEntry<S, E>> = BTreeMap::new();
        for (name, node) in self.nodes {
            // Of a name that is declared twice, the first is looked at.
            let Some(id) = check.names.remove(&name) else {
                continue;
            };
            let ends = terminal.contains(&name);
            if !ends && !edges.contains_key(&name) && !waits.contains_key(&name) {
                check.bad(CompileError::NoRoute { node: name.clone() });
            }
            let unrouted = if ends { Edges::End } else { Edges::Missing };
            let entry = NodeEntry {
                node,
                edges: edges.remove(&name).unwrap_or(unrouted),
                retry: retry.remove(&name),
                retry_route: retry_routes.remove(&name),
                wait: waits.remove(&name),
            };
            nodes.insert(id, entry);
        }
        let mut errors = check.errors;
        if errors.is_empty() {
            errors = unreachable_nodes(starts.iter().collect(), &nodes);
        }
        match entry {
            Some(entry) if errors.is_empty() => Ok(Graph {
                definition: DefinitionRef {
                    kind: self.kind,
                    name: self.name,
                    version: self.version,
                    digest,
                },
                entry,
                nodes,
                reducer: self.reducer,
                codec: self.codec,
                hook: self.hook,
                invariant: self.invariant,
                output: self.output,
                usage: self.usage,
                step_name: self.step_name,
                budgets,
                max_steps: self.max_steps,
                recovery_attempts: self.recovery_attempts,
                keep_checkpoints: self.keep_checkpoints,
                delete_on_success: self.delete_on_success,
            }),
            _ => Err(GraphErrors(errors)),
        }
    }
}

fn unreachable_nodes<'a, S, E>(
    mut open: Vec<&'a NodeName>,
    nodes: &'a BTreeMap<NodeName, NodeEntry<S, E>>,
) -> Vec<CompileError> {
    let mut seen: BTreeSet<&NodeName> = BTreeSet::new();
    while let Some(name) = open.pop() {
        if !seen.insert(name) {
            continue;
        }
        let Some(node) = nodes.get(name) else { continue };
        match &node.edges {
            Edges::End | Edges::Missing => {}
            Edges::To(to) => open.push(to),
            Edges::Choose { targets, .. } => open.extend(targets),
        }
        open.extend(node.retry_route.as_ref());
        if let Some(wait) = &node.wait {
            open.extend([&wait.on_event, &wait.on_timeout]);
        }
    }
    let unseen = nodes.keys().filter(|name| !seen.contains(name));
    unseen
        .map(|name| CompileError::Unreachable {
            node: name.as_str().to_owned(),
        })
        .collect()
}
