//! Two shapes of graphs that many hosts need, as builders: what they declare can be added to before `compile`.
//!
//! `react` is the loop of an agent (D254): reason, act on what is pending, reason again. `ordered_steps` is the flow of seed
//! 002: named steps, one after the other, each working on what the one before left.

mod data;
mod react;
mod steps;

pub use data::{Data, State};
pub use react::{ACTION, REASON, TURNS, react};
pub use steps::{CALL, Retry, Step, StepFn, attempts, call, ordered_steps};
