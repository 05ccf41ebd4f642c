//! The memory adapter.
