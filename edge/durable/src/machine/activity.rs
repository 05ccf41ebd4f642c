//! The activity machine.
