//! Building and checking a graph. Everything that is wrong is found at once and names its node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::graph::{
    Codec, Edges, Graph, Invariant, Json, Node, NodeEntry, NodeError, Output, Reducer, Route, SnapshotHook,
    WaitRoute,
};
use crate::ids::{NodeName, check_text, digest_of, hex};
use crate::machine::retry;
use crate::payload::Payload;
use crate::record::{Budget, DefinitionRef, RetryPolicy, WaitLabels};

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

enum Declared<S> {
    To(String),
    Choose { targets: Vec<String>, route: Route<S> },
}

/// A graph in the making. See the crate's guide for an example.
pub struct GraphBuilder<S, E = super::NoEffect> {
    kind: String,
    name: String,
    version: u64,
    entry: Option<String>,
    nodes: Vec<(String, Arc<dyn Node<S, E>>)>,
    edges: Vec<(String, Declared<S>)>,
    retry: Vec<(String, RetryPolicy)>,
    retry_routes: Vec<(String, String)>,
    waits: Vec<(String, WaitDraft<S>)>,
    terminal: Vec<String>,
    resume_targets: Vec<String>,
    reducer: Option<Reducer<S>>,
    codec: Arc<dyn Codec<S>>,
    hook: Option<Arc<dyn SnapshotHook>>,
    invariant: Option<Invariant<S>>,
    output: Option<Output<S>>,
    budgets: Vec<(String, u64)>,
    max_steps: u64,
    recovery_attempts: u32,
    keep_checkpoints: Option<u32>,
    delete_on_success: bool,
}

struct WaitDraft<S> {
    labels: WaitLabels,
    on_event: String,
    on_timeout: String,
    matcher: super::Matcher<S>,
    transition: super::Transition<S>,
}

impl<S, E> GraphBuilder<S, E>
where
    S: Serialize + DeserializeOwned + Send + Sync + 'static,
    E: Send + 'static,
{
    /// A graph whose state is stored as JSON. `version` is the definition's; runs are pinned to it.
    pub fn new(name: &str, version: u64) -> Self {
        Self::with_codec(name, version, Json)
    }
}

impl<S, E> GraphBuilder<S, E>
where
    S: Send + Sync + 'static,
    E: Send + 'static,
{
    /// A graph whose state is stored as `codec` says.
    pub fn with_codec(name: &str, version: u64, codec: impl Codec<S>) -> Self {
        Self {
            kind: "graph".to_owned(),
            name: name.to_owned(),
            version,
            entry: None,
            nodes: Vec::new(),
            edges: Vec::new(),
            retry: Vec::new(),
            retry_routes: Vec::new(),
            waits: Vec::new(),
            terminal: Vec::new(),
            resume_targets: Vec::new(),
            reducer: None,
            codec: Arc::new(codec),
            hook: None,
            invariant: None,
            output: None,
            budgets: Vec::new(),
            max_steps: 10_000,
            recovery_attempts: 10,
            keep_checkpoints: None,
            delete_on_success: false,
        }
    }

    /// The front-end that made this graph; `graph` when not set.
    #[must_use]
    pub fn kind(mut self, kind: &str) -> Self {
        kind.clone_into(&mut self.kind);
        self
    }

    /// Merges what a node returns into the state it was entered with. Pure. Without one the returned state replaces it.
    #[must_use]
    pub fn reducer(mut self, reducer: impl Fn(&S, S) -> S + Send + Sync + 'static) -> Self {
        self.reducer = Some(Box::new(reducer));
        self
    }

    /// Adds a node. The first one is the entry unless `entry` says otherwise.
    #[must_use]
    pub fn node(mut self, name: &str, node: impl Node<S, E>) -> Self {
        self.nodes.push((name.to_owned(), Arc::new(node)));
        self
    }

    #[must_use]
    pub fn entry(mut self, name: &str) -> Self {
        self.entry = Some(name.to_owned());
        self
    }

    /// `from` leads to `to`.
    #[must_use]
    pub fn edge(mut self, from: &str, to: &str) -> Self {
        self.edges.push((from.to_owned(), Declared::To(to.to_owned())));
        self
    }

    /// `from` leads to the one of `targets` that `route` chooses. `route` is pure; another name fails the run.
    #[must_use]
    pub fn conditional_edge(
        mut self,
        from: &str,
        targets: &[&str],
        route: impl Fn(&S) -> Result<String, NodeError> + Send + Sync + 'static,
    ) -> Self {
        let targets = targets.iter().map(|&t| t.to_owned()).collect();
        self.edges.push((
            from.to_owned(),
            Declared::Choose {
                targets,
                route: Box::new(route),
            },
        ));
        self
    }

    /// Where `from` leads when its retries are used up (D250).
    #[must_use]
    pub fn retry_route(mut self, from: &str, to: &str) -> Self {
        self.retry_routes.push((from.to_owned(), to.to_owned()));
        self
    }

    /// When a retryable failure of this node is tried again: the run is parked, its worker freed (D148).
    #[must_use]
    pub fn retry(mut self, node: &str, policy: RetryPolicy) -> Self {
        self.retry.push((node.to_owned(), policy));
        self
    }

    /// Declares that the run may end at this node (D250).
    #[must_use]
    pub fn terminal(mut self, node: &str) -> Self {
        self.terminal.push(node.to_owned());
        self
    }

    /// Declares that a suspension or a resume may lead here, so that no edge needs to.
    #[must_use]
    pub fn resume_target(mut self, node: &str) -> Self {
        self.resume_targets.push(node.to_owned());
        self
    }

    /// Where a wait of this node leads, which deliveries it takes, and what they do to the state. All pure; the labels are
    /// stored with the wait and compared before a callback is called.
    #[must_use]
    pub fn wait_route(
        mut self,
        node: &str,
        labels: WaitLabels,
        on_event: &str,
        on_timeout: &str,
        matcher: impl Fn(&S, &Payload) -> bool + Send + Sync + 'static,
        transition: impl Fn(S, &Payload) -> Result<S, String> + Send + Sync + 'static,
    ) -> Self {
        let draft = WaitDraft {
            labels,
            on_event: on_event.to_owned(),
            on_timeout: on_timeout.to_owned(),
            matcher: Box::new(matcher),
            transition: Box::new(transition),
        };
        self.waits.push((node.to_owned(), draft));
        self
    }

    /// Checked after every step (D101); a failed check fails the run and saves nothing of the step.
    #[must_use]
    pub fn invariant(mut self, check: impl Fn(&S) -> Result<(), String> + Send + Sync + 'static) -> Self {
        self.invariant = Some(Box::new(check));
        self
    }

    /// What `outcome.output` shows of the last state. Without it the output is null.
    #[must_use]
    pub fn output(
        mut self,
        output: impl Fn(&S) -> Result<Box<RawValue>, String> + Send + Sync + 'static,
    ) -> Self {
        self.output = Some(Box::new(output));
        self
    }

    #[must_use]
    pub fn snapshot_hook(mut self, hook: impl SnapshotHook) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// A named budget; what is used of it survives every resume (D251).
    #[must_use]
    pub fn budget(mut self, name: &str, limit: u64) -> Self {
        self.budgets.push((name.to_owned(), limit));
        self
    }

    /// Activations per segment, that is from a start or a resume to the next stop. 10,000 when not set.
    #[must_use]
    pub fn max_steps(mut self, steps: u64) -> Self {
        self.max_steps = steps;
        self
    }

    /// How often one activity, or one activation, may be repeated after lost workers. 10 when not set.
    #[must_use]
    pub fn recovery_attempts(mut self, attempts: u32) -> Self {
        self.recovery_attempts = attempts;
        self
    }

    /// Keeps only the newest checkpoints of a run.
    #[must_use]
    pub fn keep_checkpoints(mut self, keep: u32) -> Self {
        self.keep_checkpoints = Some(keep);
        self
    }

    /// Deletes a run that succeeded, after its terminal commit. Failures are kept.
    #[must_use]
    pub fn delete_on_success(mut self) -> Self {
        self.delete_on_success = true;
        self
    }

    /// Checks everything and makes the graph.
    ///
    /// # Errors
    /// All that is wrong, each naming its node.
    pub fn compile(self) -> Result<Graph<S, E>, GraphErrors> {
        let mut errors = Vec::new();
        for (what, text) in [("name", &self.name), ("kind", &self.kind)] {
            if let Err(e) = check_text("graph", text) {
                errors.push(CompileError::Name {
                    what: what.to_owned(),
                    why: e.to_string(),
                });
            }
        }
        for (what, n) in [
            ("version", self.version),
            ("max_steps", self.max_steps),
            ("keep_checkpoints", u64::from(self.keep_checkpoints.unwrap_or(1))),
        ] {
            if n == 0 {
                errors.push(CompileError::Zero { what });
            }
        }
        let mut names: BTreeMap<String, NodeName> = BTreeMap::new();
        for (name, _) in &self.nodes {
            match NodeName::new(name) {
                Err(e) => errors.push(CompileError::Name {
                    what: format!("node {name:?}"),
                    why: e.to_string(),
                }),
                Ok(node) => {
                    if names.insert(name.clone(), node).is_some() {
                        errors.push(CompileError::DuplicateNode { node: name.clone() });
                    }
                }
            }
        }
        let budgets = check_budgets(&self.budgets, &mut errors);
        let digest = self.digest();
        let entry_text = self
            .entry
            .clone()
            .or_else(|| self.nodes.first().map(|(name, _)| name.clone()));
        let entry = match &entry_text {
            None => {
                errors.push(CompileError::Empty);
                None
            }
            Some(name) => {
                let entry = names.get(name).cloned();
                if entry.is_none() {
                    errors.push(CompileError::UnknownEntry { node: name.clone() });
                }
                entry
            }
        };
        let terminal: BTreeSet<String> = self.terminal.iter().cloned().collect();
        for node in &terminal {
            if !names.contains_key(node) {
                errors.push(CompileError::UnknownNode {
                    node: node.clone(),
                    what: "terminal",
                });
            }
        }

        let find = |node: &str, what: &'static str, target: &str, errors: &mut Vec<CompileError>| {
            let found = names.get(target).cloned();
            if found.is_none() {
                errors.push(CompileError::UnknownTarget {
                    node: node.to_owned(),
                    what,
                    target: target.to_owned(),
                });
            }
            found
        };
        let mut edges: BTreeMap<String, Edges<S>> = BTreeMap::new();
        for (from, declared) in self.edges {
            let resolved = match declared {
                Declared::To(to) => find(&from, "the edge", &to, &mut errors).map(Edges::To),
                Declared::Choose { targets, route } => {
                    if targets.is_empty() {
                        errors.push(CompileError::NoTargets { node: from.clone() });
                    }
                    let all: Vec<NodeName> = targets
                        .iter()
                        .filter_map(|t| find(&from, "the conditional edge", t, &mut errors))
                        .collect();
                    (all.len() == targets.len()).then_some(Edges::Choose { targets: all, route })
                }
            };
            if !names.contains_key(&from) {
                errors.push(CompileError::UnknownNode {
                    node: from.clone(),
                    what: "an edge",
                });
            }
            if terminal.contains(&from) {
                errors.push(CompileError::TerminalWithRoute { node: from.clone() });
            }
            if edges
                .insert(from.clone(), resolved.unwrap_or(Edges::None))
                .is_some()
            {
                errors.push(CompileError::Twice {
                    node: from,
                    what: "outgoing route",
                });
            }
        }
        let mut retry_routes: BTreeMap<String, NodeName> = BTreeMap::new();
        for (from, to) in &self.retry_routes {
            if from == to {
                errors.push(CompileError::RetryToSelf { node: from.clone() });
            }
            if !names.contains_key(from) {
                errors.push(CompileError::UnknownNode {
                    node: from.clone(),
                    what: "a retry route",
                });
            }
            if let Some(target) = find(from, "the retry route", to, &mut errors)
                && retry_routes.insert(from.clone(), target).is_some()
            {
                errors.push(CompileError::Twice {
                    node: from.clone(),
                    what: "retry route",
                });
            }
        }
        let mut retry: BTreeMap<String, RetryPolicy> = BTreeMap::new();
        for (node, policy) in self.retry {
            if !names.contains_key(&node) {
                errors.push(CompileError::UnknownNode {
                    node: node.clone(),
                    what: "a retry",
                });
            }
            if let Err(why) = retry::check(&policy) {
                errors.push(CompileError::Retry {
                    node: node.clone(),
                    why: why.to_string(),
                });
            }
            if retry.insert(node.clone(), policy).is_some() {
                errors.push(CompileError::Twice { node, what: "retry" });
            }
        }
        let mut waits: BTreeMap<String, WaitRoute<S>> = BTreeMap::new();
        for (node, draft) in self.waits {
            if !names.contains_key(&node) {
                errors.push(CompileError::UnknownNode {
                    node: node.clone(),
                    what: "a wait route",
                });
            }
            for (what, text) in [
                ("matcher", &draft.labels.matcher),
                ("payload", &draft.labels.payload),
                ("continuation", &draft.labels.continuation),
            ] {
                if let Err(e) = check_text("label", text) {
                    errors.push(CompileError::Name {
                        what: format!("{what} of the wait route of {node:?}"),
                        why: e.to_string(),
                    });
                }
            }
            let on_event = find(&node, "the wait route", &draft.on_event, &mut errors);
            let on_timeout = find(&node, "the wait route", &draft.on_timeout, &mut errors);
            let (Some(on_event), Some(on_timeout)) = (on_event, on_timeout) else {
                continue;
            };
            let WaitDraft {
                labels,
                matcher,
                transition,
                ..
            } = draft;
            if waits
                .insert(
                    node.clone(),
                    WaitRoute {
                        labels,
                        on_event,
                        on_timeout,
                        matcher,
                        transition,
                    },
                )
                .is_some()
            {
                errors.push(CompileError::Twice {
                    node,
                    what: "wait route",
                });
            }
        }

        let mut nodes: BTreeMap<NodeName, NodeEntry<S, E>> = BTreeMap::new();
        for (name, node) in self.nodes {
            let Some(id) = names.get(&name) else { continue };
            let routed = edges.contains_key(&name) || waits.contains_key(&name);
            if !routed && !terminal.contains(&name) {
                errors.push(CompileError::NoRoute { node: name.clone() });
            }
            let entry = NodeEntry {
                node,
                edges: edges.remove(&name).unwrap_or(Edges::None),
                retry: retry.remove(&name),
                retry_route: retry_routes.remove(&name),
                wait: waits.remove(&name),
            };
            nodes.insert(id.clone(), entry);
        }
        let mut starts: Vec<&NodeName> = entry.iter().collect();
        for target in &self.resume_targets {
            match names.get(target) {
                Some(node) => starts.push(node),
                None => errors.push(CompileError::UnknownNode {
                    node: target.clone(),
                    what: "a resume target",
                }),
            }
        }
        if errors.is_empty() {
            unreachable_nodes(starts, &nodes, &mut errors);
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
                budgets,
                max_steps: self.max_steps,
                recovery_attempts: self.recovery_attempts,
                keep_checkpoints: self.keep_checkpoints,
                delete_on_success: self.delete_on_success,
            }),
            _ => Err(GraphErrors(errors)),
        }
    }

    /// Over everything that is declared: names, routes, labels, limits. Code is the host's: its changes are a new version.
    fn digest(&self) -> String {
        let mut text = vec![
            self.kind.clone(),
            self.name.clone(),
            self.version.to_string(),
            self.codec.label().to_owned(),
        ];
        text.push(
            self.hook
                .as_ref()
                .map_or_else(String::new, |h| h.label().to_owned()),
        );
        text.push(format!("entry {:?}", self.entry));
        text.extend(self.nodes.iter().map(|(name, _)| format!("node {name:?}")));
        text.extend(self.edges.iter().map(|(from, declared)| match declared {
            Declared::To(to) => format!("edge {from:?} {to:?}"),
            Declared::Choose { targets, .. } => format!("choose {from:?} {targets:?}"),
        }));
        text.extend(
            self.retry_routes
                .iter()
                .map(|(from, to)| format!("retry route {from:?} {to:?}")),
        );
        text.extend(
            self.retry
                .iter()
                .map(|(node, policy)| format!("retry {node:?} {policy:?}")),
        );
        text.extend(
            self.waits
                .iter()
                .map(|(node, w)| format!("wait {node:?} {:?} {:?} {:?}", w.labels, w.on_event, w.on_timeout)),
        );
        text.extend(self.terminal.iter().map(|node| format!("terminal {node:?}")));
        text.extend(
            self.budgets
                .iter()
                .map(|(name, limit)| format!("budget {name:?} {limit}")),
        );
        let parts: Vec<&[u8]> = text.iter().map(String::as_bytes).collect();
        format!("sha256:{}", hex(&digest_of(&parts)))
    }
}

fn check_budgets(declared: &[(String, u64)], errors: &mut Vec<CompileError>) -> BTreeMap<String, Budget> {
    let mut budgets = BTreeMap::new();
    for (name, limit) in declared {
        if let Err(e) = check_text("budget", name) {
            errors.push(CompileError::Budget {
                budget: name.clone(),
                why: e.to_string(),
            });
        }
        if budgets
            .insert(
                name.clone(),
                Budget {
                    used: 0,
                    limit: *limit,
                },
            )
            .is_some()
        {
            errors.push(CompileError::Budget {
                budget: name.clone(),
                why: "declared twice".to_owned(),
            });
        }
    }
    budgets
}

fn unreachable_nodes<'a, S, E>(
    mut open: Vec<&'a NodeName>,
    nodes: &'a BTreeMap<NodeName, NodeEntry<S, E>>,
    errors: &mut Vec<CompileError>,
) {
    let mut seen: BTreeSet<&NodeName> = BTreeSet::new();
    while let Some(name) = open.pop() {
        if !seen.insert(name) {
            continue;
        }
        let Some(node) = nodes.get(name) else { continue };
        match &node.edges {
            Edges::None => {}
            Edges::To(to) => open.push(to),
            Edges::Choose { targets, .. } => open.extend(targets),
        }
        open.extend(node.retry_route.as_ref());
        if let Some(wait) = &node.wait {
            open.extend([&wait.on_event, &wait.on_timeout]);
        }
    }
    for name in nodes.keys().filter(|name| !seen.contains(name)) {
        errors.push(CompileError::Unreachable {
            node: name.as_str().to_owned(),
        });
    }
}
