//! Declaring a graph. Nothing is looked at before `compile`.

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::graph::compile::CompileError;
use crate::graph::{Codec, Invariant, Json, Node, NodeError, Output, Reducer, Route, SnapshotHook};
use crate::ids::NodeName;
use crate::payload::Payload;
use crate::record::{RetryPolicy, WaitLabels};

pub(super) enum Declared<S> {
    To(String),
    Choose { targets: Vec<String>, route: Route<S> },
}

/// A graph in the making. See the crate's guide for an example.
pub struct GraphBuilder<S, E = super::NoEffect> {
    pub(super) kind: String,
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) entry: Option<String>,
    pub(super) nodes: Vec<(String, Arc<dyn Node<S, E>>)>,
    pub(super) edges: Vec<(String, Declared<S>)>,
    pub(super) retry: Vec<(String, RetryPolicy)>,
    pub(super) retry_routes: Vec<(String, String)>,
    pub(super) waits: Vec<(String, WaitDraft<S>)>,
    pub(super) terminal: Vec<String>,
    pub(super) resume_targets: Vec<String>,
    pub(super) reducer: Option<Reducer<S>>,
    pub(super) codec: Arc<dyn Codec<S>>,
    pub(super) hook: Option<Arc<dyn SnapshotHook>>,
    pub(super) invariant: Option<Invariant<S>>,
    pub(super) output: Option<Output<S>>,
    pub(super) usage: Option<Output<S>>,
    pub(super) step_name: Option<super::StepName>,
    pub(super) budgets: Vec<(String, u64)>,
    pub(super) max_steps: u64,
    pub(super) recovery_attempts: u32,
    pub(super) keep_checkpoints: Option<u32>,
    pub(super) delete_on_success: bool,
    pub(super) declared: Option<String>,
    pub(super) refused: Vec<CompileError>,
}

pub(super) struct WaitDraft<S> {
    pub(super) labels: WaitLabels,
    pub(super) on_event: String,
    pub(super) on_timeout: String,
    pub(super) matcher: super::Matcher<S>,
    pub(super) transition: super::Transition<S>,
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
            usage: None,
            step_name: None,
            budgets: Vec::new(),
            max_steps: 10_000,
            recovery_attempts: 10,
            keep_checkpoints: None,
            delete_on_success: false,
            declared: None,
            refused: Vec::new(),
        }
    }

    /// A front-end's own finding: `compile` reports it with the others.
    pub(crate) fn refuse(mut self, error: CompileError) -> Self {
        self.refused.push(error);
        self
    }

    /// The front-end that made this graph; `graph` when not set.
    #[must_use]
    pub fn kind(mut self, kind: &str) -> Self {
        kind.clone_into(&mut self.kind);
        self
    }

    /// The front-end's own digest of the declaration that this graph is made from, `sha256:…`: runs are pinned to it, not to the
    /// graph's facts. The same declaration has to make the same graph.
    #[must_use]
    pub fn declared(mut self, digest: &str) -> Self {
        self.declared = Some(digest.to_owned());
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

    /// `from` leads to `to`: a node, or `END`.
    #[must_use]
    pub fn edge(mut self, from: &str, to: &str) -> Self {
        self.edges.push((from.to_owned(), Declared::To(to.to_owned())));
        self
    }

    /// `from` leads to the one of `targets` that `route` chooses; `END` may be among them. `route` is pure; another name fails
    /// the run.
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

    /// What `outcome.usage` shows of the last committed state, however a segment ends the run (D245). A usage that cannot be
    /// shown is left out.
    #[must_use]
    pub fn usage(
        mut self,
        usage: impl Fn(&S) -> Result<Box<RawValue>, String> + Send + Sync + 'static,
    ) -> Self {
        self.usage = Some(Box::new(usage));
        self
    }

    /// What the outcome of a failed run calls the step it failed in, by node and activation; the node's name when not set.
    #[must_use]
    pub fn step_name(mut self, name: fn(&NodeName, u64) -> String) -> Self {
        self.step_name = Some(name);
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
}
