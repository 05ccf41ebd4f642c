//! A durable graph runtime: runs that survive anything between two instructions.
//!
//! A *graph* is a set of async functions over a typed state, with routes between them. A *run* of it is stored after every
//! step; a process that dies is no event, the next one goes on from the last commit. Effects outside go through a *journal*:
//! the intent is stored before the call, the outcome after it, and a call whose outcome is known is never made again. Runs
//! wait for people and events without holding a worker. There is no HTTP here and no model: a host brings those.
//!
//! `docs/durable.md` says what is promised and what is not. This page is a guide of ten minutes; the examples `react`, `flow` and
//! `crash` are whole programs that check themselves: an agent with approvals, a flow with a wait of the graph, a host and a
//! resume, and processes that die in the middle of effects until an operator resolves one.
//!
//! # A graph
//!
//! Nodes take a [`Ctx`](runner::Ctx) and the state, and return the new state with a [`Directive`](graph::Directive): that they
//! are done, that the run ends, fails, waits, or is to be tried again. They never name the next node; edges do.
//!
//! ```
//! use iop_durable::graph::{Directive, GraphBuilder};
//! use iop_durable::record::Effect;
//! use iop_durable::runner::Ctx;
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Clone, Default, Serialize, Deserialize)]
//! struct Order { sku: String, charge: Option<String> }
//!
//! # fn graph() -> Result<iop_durable::graph::Graph<Order>, Box<dyn std::error::Error>> {
//! let graph = GraphBuilder::<Order>::new("order", 1)
//!     .node("charge", |ctx: Ctx, mut order: Order| async move {
//!         let answer = ctx
//!             .activity("charge")
//!             .effect(Effect::Idempotent)
//!             .run(order.sku.clone(), |call| async move {
//!                 // Send `call.input` with `call.idempotency_key` to the service that charges.
//!                 Ok(format!("charged for {}", call.idempotency_key).into())
//!             })
//!             .await?;
//!         order.charge = Some(String::from_utf8_lossy(&answer).into_owned());
//!         Ok((order, Directive::completed()))
//!     })
//!     .node("ship", |_: Ctx, order: Order| async move { Ok((order, Directive::end())) })
//!     .edge("charge", "ship")
//!     .terminal("ship")
//!     .compile()?;
//! # Ok(graph) }
//! # graph().unwrap();
//! ```
//!
//! `compile` finds everything that is wrong at once: duplicate names, routes to nowhere, dead ends, unreachable nodes.
//!
//! # Running it
//!
//! ```
//! # use iop_durable::graph::{Directive, GraphBuilder};
//! # use iop_durable::runner::Ctx;
//! # let graph = GraphBuilder::<u32>::new("count", 1)
//! #     .node("only", |_: Ctx, n: u32| async move { Ok((n + 1, Directive::end())) })
//! #     .terminal("only").compile().unwrap();
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! use std::sync::Arc;
//! use iop_durable::ids::Owner;
//! use iop_durable::runner::{Options, Runner, Start};
//! use iop_durable::store::sqlite::SqliteStore;
//!
//! let dir = tempfile::tempdir()?;
//! let store = Arc::new(SqliteStore::open(&dir.path().join("runs.db")).await?);
//! let runner = Runner::new(Arc::new(graph), store, Options::new(Owner::new("worker-1")?))?;
//! let result = runner.start(Start::new(41)).await?;
//! assert_eq!(result.state, 42);
//! # Ok::<(), Box<dyn std::error::Error>>(()) }).unwrap();
//! ```
//!
//! `start` runs to the first pause or end. `accept` only stores the run; a [`Host`](host::Host) with workers claims and runs
//! it, here or in another process on the same PostgreSQL. `start_stream` gives the events as they are committed.
//!
//! # Effects
//!
//! [`Effect`](record::Effect) says what repeating a call does, and that alone decides what happens when a worker dies in the
//! middle of it: `ReadOnly` and `Idempotent` calls are made again, the latter with the same key; an `Unsafe` one is never
//! repeated by the engine: the run becomes `ambiguous` until its `reconcile` probe finds evidence or an operator
//! [`resolve`](runner::Operator::resolve)s it. A retry policy parks the run until its next attempt is due; no worker sleeps.
//! Several calls of one node may be joined; their intents share a commit.
//!
//! Everything else in a node may run again after a crash, so it has to be repeatable: compute, read, decide.
//!
//! # Waiting
//!
//! A *gate* pauses inside a node, for an approval or an input:
//!
//! ```
//! # use iop_durable::graph::{Directive, NodeResult, NoEffect};
//! # use iop_durable::runner::{Answer, Ctx};
//! async fn deploy(ctx: Ctx, region: String) -> NodeResult<String, NoEffect> {
//!     // The exact call is saved with the pause; what is approved is what runs.
//!     match ctx.gate("approve").subject(region.clone()).wait().await? {
//!         Answer::Delivered(decision) if &decision[..] == b"approve" => {}
//!         Answer::Delivered(_) | Answer::TimedOut => return Ok((region, Directive::end())),
//!     }
//!     ctx.activity("deploy").run(region.clone(), |call| async move { Ok(call.input) }).await?;
//!     Ok((region, Directive::end()))
//! }
//! # let _ = deploy;
//! ```
//!
//! While it waits the run holds neither worker nor lease. A delivery ([`Runner::deliver`](runner::Runner::deliver), or
//! [`Operator::deliver_to_gate`](runner::Operator::deliver_to_gate) without the graph) settles it exactly once; the node is then
//! entered again, its finished calls answer from the journal, and the gate has its answer. `Directive::wait` is the other form:
//! the node is over, and the event or the deadline selects the next one.
//!
//! # Patterns
//!
//! [`patterns::react`] is the loop of an agent: reason, act, again, up to a number of turns. [`patterns::ordered_steps`] is a flow:
//! named steps in order, each with its retry, over data that one step hands to the next.
//!
//! # Resuming
//!
//! The only way on for a suspended or failed run is [`Runner::resume`](runner::Runner::resume) with the token of its last
//! result. A stale token is refused with the current one. A resume may merge data into the state, set budgets, and move the run
//! to another node; nothing of it happens when any part is refused.
//!
//! # Storage
//!
//! [`SqliteStore`](store::sqlite::SqliteStore) for one process, [`PostgresStore`](store::postgres::PostgresStore) for several,
//! [`MemoryStore`](store::memory::MemoryStore) for tests. All pass one conformance suite (feature `testing`), which a store of
//! your own can run too.

pub mod envelope;
pub mod failure;
pub mod graph;
pub mod host;
pub mod ids;
pub mod machine;
pub mod patterns;
pub mod payload;
pub mod record;
pub mod runner;
pub mod store;
mod tasks;
#[cfg(feature = "testing")]
pub mod testing;
pub mod time;
pub mod token;
