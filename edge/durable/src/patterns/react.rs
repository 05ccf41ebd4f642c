//! The loop of an agent: reason, act on what is pending, reason again, so many times at most.

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::graph::{CompileError, END, GraphBuilder, Node, NodeError, NodeResult};
use crate::runner::Ctx;

/// The node that decides what to do next.
pub const REASON: &str = "reason";
/// The node that does it.
pub const ACTION: &str = "action";
/// The budget that counts the reason steps.
pub const TURNS: &str = "turns";

/// `reason`, then `action` while `has_pending` says so of the state, then `reason` again; the run succeeds when nothing is
/// pending. `has_pending` is pure.
///
/// A turn is one reason step that is committed. The run may end in turn number `max_iterations`; one turn more is not begun and
/// ends the run `exhausted`, with the budget `turns` (D8, D17, D253). Turns count over the whole run: a resume does not begin
/// anew, and a start may bring another limit.
///
/// `max_iterations` of 0 is refused by `compile`.
pub fn react<S, E>(
    name: &str,
    version: u64,
    reason: impl Node<S, E>,
    action: impl Node<S, E>,
    has_pending: impl Fn(&S) -> bool + Send + Sync + 'static,
    max_iterations: u64,
) -> GraphBuilder<S, E>
where
    S: Serialize + DeserializeOwned + Send + Sync + 'static,
    E: Send + 'static,
{
    let builder = GraphBuilder::new(name, version)
        .node(REASON, Turn(reason))
        .node(ACTION, action)
        .conditional_edge(REASON, &[ACTION, END], move |state| {
            Ok(if has_pending(state) { ACTION } else { END }.to_owned())
        })
        .edge(ACTION, REASON)
        .budget(TURNS, max_iterations);
    if max_iterations == 0 {
        return builder.refuse(CompileError::Zero {
            what: "max_iterations",
        });
    }
    builder
}

/// Draws on the turns before its node runs. An entry that is not committed draws nothing.
struct Turn<N>(N);

impl<S: Send + 'static, E: Send + 'static, N: Node<S, E>> Node<S, E> for Turn<N> {
    fn run(&self, ctx: Ctx, state: S) -> BoxFuture<'static, NodeResult<S, E>> {
        match ctx.use_budget(TURNS, 1) {
            Ok(()) => self.0.run(ctx, state),
            Err(refused) => Box::pin(async move { Err(NodeError::from(refused)) }),
        }
    }
}
