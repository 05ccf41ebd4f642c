//! The wait machine.
