//! The one way to start a task, the same as the node's: its kind says what an end means, and a panic is always seen.

pub use iop_node::tasks::{Kind, spawn};
