//! edge/durable
