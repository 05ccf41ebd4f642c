//! The postgres adapter.
