//! Pure state machines: what an event does to an activity or a wait. No clock, no I/O, no lock: time and randomness are
//! arguments, effects are values.

pub mod activity;
pub mod retry;
pub mod wait;
