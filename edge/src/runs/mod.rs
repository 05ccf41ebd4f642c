//! The durable runtime inside the edge: where runs are stored, who works on them, and what people and clients do to them.

pub mod problem;
