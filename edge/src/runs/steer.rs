//! Steering runs: on from a pause or a failure, to an end, out of the store, past an effect that nobody knows of.

pub(crate) mod effects;
pub(crate) mod resume;
