//! The sqlite adapter.
