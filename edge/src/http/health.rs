//! `/livez`, `/readyz`, `/metrics`: whether the process lives, wants work, and what it counted.

use http::StatusCode;

use super::answer::{Answer, whole};
use crate::app::App;
use crate::error::{ApiError, ErrorKind};

const TEXT: &str = "text/plain; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) fn livez() -> Answer {
    whole(StatusCode::OK, TEXT, "ok\n")
}

/// Ready without providers too (gateway.md §13): what is missing then is not this process.
pub(super) fn readyz(app: &App) -> Answer {
    if app.drain.is_draining() {
        whole(StatusCode::SERVICE_UNAVAILABLE, TEXT, "draining\n")
    } else {
        whole(StatusCode::OK, TEXT, "ready\n")
    }
}

pub(super) fn metrics(app: &App) -> Result<Answer, ApiError> {
    match app.metrics.encode() {
        Ok(text) => Ok(whole(StatusCode::OK, PROMETHEUS, text)),
        Err(error) => {
            tracing::error!(%error, "cannot write metrics");
            Err(ApiError::new(
                ErrorKind::InternalError,
                "The metrics could not be written.",
            ))
        }
    }
}
