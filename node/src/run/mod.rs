//! One attempt on the node: from a provider's head to the one terminal.
//!
//! `head`, `encoding`, `terminal` and `watchdog` decide (pure); `gather`, `source` and `task` move bytes, `watch` and
//! `stall` see to it that silence ends. Everything that a provider yields passes `task::RunBody`, nothing goes around
//! it.

pub(crate) mod encoding;
pub(crate) mod gather;
pub(crate) mod head;
pub(crate) mod source;
pub(crate) mod stall;
pub(crate) mod task;
pub(crate) mod terminal;
pub(crate) mod watch;
pub(crate) mod watchdog;
