//! One attempt on the node: from a provider's head to the one terminal.
//!
//! `head`, `encoding` and `terminal` decide (pure); `gather`, `source` and `task` move bytes. Everything that a
//! provider yields passes `task::RunBody`, nothing goes around it.

pub(crate) mod encoding;
pub(crate) mod gather;
pub(crate) mod head;
pub(crate) mod source;
pub(crate) mod task;
pub(crate) mod terminal;
