//! The edge's HTTP: listeners, routes, keys and small answers here; the data plane's own handler in `openai`.

pub mod auth;
pub mod request_id;
pub mod router;
pub mod server;
pub mod tls;

pub(crate) mod openai;
pub(crate) mod payload;
pub(crate) mod route;

mod agent_models;
mod answer;
mod api;
mod connection;
mod demo;
mod health;
mod models;
mod write_deadline;

#[cfg(test)]
mod tests;
