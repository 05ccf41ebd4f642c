//! Typed graphs: nodes, routes, budgets and labels, checked once by `compile` and immutable afterwards.

mod builder;
mod compile;
mod digest;
mod directive;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

pub use builder::GraphBuilder;
pub use compile::{CompileError, GraphErrors};
pub(crate) use directive::Base;
pub use directive::{Await, Deadline, Directive, NoEffect, NodeError};

use crate::failure::{Failure, FailureKind};
use crate::ids::NodeName;
use crate::payload::Payload;
use crate::record::{Budget, DefinitionRef, RetryPolicy, WaitLabels};
use crate::runner::Ctx;

/// What a node returns: the state it leaves and how the run goes on.
pub type NodeResult<S, E> = Result<(S, Directive<E>), NodeError>;

/// One node. Async functions `(Ctx, S) -> NodeResult<S, E>` are nodes.
///
/// A node may run again after an uncommitted step (D117): what it computes and reads must be repeatable, and every effect
/// outside goes through `Ctx::activity`.
pub trait Node<S, E>: Send + Sync + 'static {
    fn run(&self, ctx: Ctx, state: S) -> BoxFuture<'static, NodeResult<S, E>>;
}

impl<S, E, F, Fut> Node<S, E> for F
where
    F: Fn(Ctx, S) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = NodeResult<S, E>> + Send + 'static,
{
    fn run(&self, ctx: Ctx, state: S) -> BoxFuture<'static, NodeResult<S, E>> {
        Box::pin(self(ctx, state))
    }
}

/// How a state becomes bytes. The label stands in the definition: another codec is another definition (D116).
pub trait Codec<S>: Send + Sync + 'static {
    fn label(&self) -> &str;
    /// # Errors
    /// A text; the step fails and nothing is saved.
    fn encode(&self, state: &S) -> Result<Bytes, String>;
    /// # Errors
    /// A text; the run is corrupt or of another definition.
    fn decode(&self, bytes: &[u8]) -> Result<S, String>;
}

/// JSON by serde.
#[derive(Debug, Clone, Copy, Default)]
pub struct Json;

impl<S: Serialize + DeserializeOwned> Codec<S> for Json {
    fn label(&self) -> &'static str {
        "json"
    }

    fn encode(&self, state: &S) -> Result<Bytes, String> {
        let bytes = serde_json::to_vec(state).map_err(|e| e.to_string())?;
        // JSON has no infinity: serde writes it as null, and such a state could never be read again.
        if memchr::memmem::find(&bytes, b"null").is_some() {
            serde_json::from_slice::<S>(&bytes).map_err(|e| format!("it does not read back: {e}"))?;
        }
        Ok(Bytes::from(bytes))
    }

    fn decode(&self, bytes: &[u8]) -> Result<S, String> {
        serde_json::from_slice(bytes).map_err(|e| e.to_string())
    }
}

/// State that is bytes already, kept as they are.
#[derive(Debug, Clone, Copy, Default)]
pub struct Raw;

impl Codec<Bytes> for Raw {
    fn label(&self) -> &'static str {
        "raw"
    }

    fn encode(&self, state: &Bytes) -> Result<Bytes, String> {
        Ok(state.clone())
    }

    fn decode(&self, bytes: &[u8]) -> Result<Bytes, String> {
        Ok(Bytes::copy_from_slice(bytes))
    }
}

/// Applied to encoded state, once per checkpoint: encryption, redaction (D118). The two must be each other's inverse.
pub trait SnapshotHook: Send + Sync + 'static {
    /// Stands in the definition.
    fn label(&self) -> &str;
    /// # Errors
    /// A text; the step is not saved.
    fn before_save(&self, state: Bytes) -> Result<Bytes, String>;
    /// # Errors
    /// A text; the run is corrupt.
    fn after_load(&self, state: Bytes) -> Result<Bytes, String>;
}

/// What people call the step of a node at an activation.
pub(crate) type StepName = fn(&NodeName, u64) -> String;
pub(crate) type Reducer<S> = Box<dyn Fn(&S, S) -> S + Send + Sync>;
pub(crate) type Route<S> = Box<dyn Fn(&S) -> Result<String, NodeError> + Send + Sync>;
pub(crate) type Invariant<S> = Box<dyn Fn(&S) -> Result<(), String> + Send + Sync>;
pub(crate) type Output<S> = Box<dyn Fn(&S) -> Result<Box<RawValue>, String> + Send + Sync>;
pub(crate) type Matcher<S> = Box<dyn Fn(&S, &Payload) -> bool + Send + Sync>;
pub(crate) type Transition<S> = Box<dyn Fn(S, &Payload) -> Result<S, String> + Send + Sync>;

/// What happens when a wait of this node is settled (D164, D166). The callbacks are pure.
pub struct WaitRoute<S> {
    pub(crate) labels: WaitLabels,
    pub(crate) on_event: NodeName,
    pub(crate) on_timeout: NodeName,
    pub(crate) matcher: Matcher<S>,
    pub(crate) transition: Transition<S>,
}

/// As the target of an edge: the run succeeds. No node has this name.
pub const END: &str = "__end__";

pub(crate) enum Edges<S> {
    /// Completing ends the run: a declared terminal node, or an edge to `END`.
    End,
    /// Only a wait leads on from here; completing is a failure.
    Missing,
    To(NodeName),
    Choose {
        targets: Vec<NodeName>,
        /// Whether `END` is among the targets.
        may_end: bool,
        route: Route<S>,
    },
}

pub(crate) struct NodeEntry<S, E> {
    pub(crate) node: Arc<dyn Node<S, E>>,
    pub(crate) edges: Edges<S>,
    pub(crate) retry: Option<RetryPolicy>,
    pub(crate) retry_route: Option<NodeName>,
    pub(crate) wait: Option<WaitRoute<S>>,
}

/// A compiled graph.
pub struct Graph<S, E = NoEffect> {
    pub(crate) definition: DefinitionRef,
    pub(crate) entry: NodeName,
    pub(crate) nodes: BTreeMap<NodeName, NodeEntry<S, E>>,
    pub(crate) reducer: Option<Reducer<S>>,
    pub(crate) codec: Arc<dyn Codec<S>>,
    pub(crate) hook: Option<Arc<dyn SnapshotHook>>,
    pub(crate) invariant: Option<Invariant<S>>,
    pub(crate) output: Option<Output<S>>,
    pub(crate) usage: Option<Output<S>>,
    pub(crate) step_name: Option<StepName>,
    pub(crate) budgets: BTreeMap<String, Budget>,
    pub(crate) max_steps: u64,
    pub(crate) recovery_attempts: u32,
    pub(crate) keep_checkpoints: Option<u32>,
    pub(crate) delete_on_success: bool,
}

impl<S: 'static, E> Graph<S, E> {
    /// What runs of this graph are pinned to.
    pub fn definition(&self) -> &DefinitionRef {
        &self.definition
    }

    pub(crate) fn encode(&self, state: &S) -> Result<Payload, String> {
        codec(|| {
            let bytes = self.codec.encode(state)?;
            let bytes = match &self.hook {
                Some(hook) => hook.before_save(bytes)?,
                None => bytes,
            };
            Ok(Payload::new(bytes))
        })
    }

    pub(crate) fn decode(&self, payload: &Payload) -> Result<S, String> {
        codec(|| match &self.hook {
            Some(hook) => self.codec.decode(&hook.after_load(payload.bytes().clone())?),
            None => self.codec.decode(payload.bytes()),
        })
    }

    /// Where a completed node leads: `None` is the end of the run.
    pub(crate) fn route(&self, entry: &NodeEntry<S, E>, state: &S) -> Result<Option<NodeName>, NodeError> {
        let invalid =
            |why: String| NodeError::Failed(Failure::new(FailureKind::Internal, why).code("route_invalid"));
        match &entry.edges {
            Edges::End => Ok(None),
            Edges::Missing => Err(invalid(
                "the node completed, but only a wait leads on from it".to_owned(),
            )),
            Edges::To(next) => Ok(Some(next.clone())),
            Edges::Choose {
                targets,
                may_end,
                route,
            } => {
                let chosen = route(state)?;
                match targets.iter().find(|t| t.as_str() == chosen) {
                    Some(next) => Ok(Some(next.clone())),
                    None if *may_end && chosen == END => Ok(None),
                    None => Err(invalid(format!(
                        "the route chose {chosen:?}, which is not among its declared targets"
                    ))),
                }
            }
        }
    }
}

/// What code of the host says, or `None` when it panics (D257).
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).ok()
}

fn codec<T>(call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    caught(call).unwrap_or_else(|| Err("the codec panicked".to_owned()))
}

impl<S, E> std::fmt::Debug for Graph<S, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph")
            .field("definition", &self.definition)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
