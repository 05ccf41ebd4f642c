//! OpenAI's wire: only what the gateway must read is typed, the rest stays bytes (design decision 11).

pub mod answer;
pub mod errors;
pub mod event;
mod members;
pub mod multipart;
pub mod request;
pub mod sse;
pub mod usage;
