//! How an attempt is counted on the node: one total match from what was answered and how it ended. Pure.

use http::StatusCode;
use iop_shared::execution::{AttemptResult, FailureCode};
use iop_shared::wire::terminal::Terminal;

/// The result of an attempt; `status` is the provider's, if it had a head.
pub(crate) fn result(status: Option<StatusCode>, terminal: &Terminal) -> AttemptResult {
    match terminal {
        Terminal::Complete { .. } => status.map_or(AttemptResult::Success, of_status),
        Terminal::Cancelled => AttemptResult::Cancelled,
        Terminal::Error(e) => match e.code {
            FailureCode::ConnectFailed => AttemptResult::ConnectError,
            FailureCode::ProviderCut | FailureCode::Internal => AttemptResult::Cut,
            FailureCode::ResponseStalled => AttemptResult::ResponseStalled,
            FailureCode::Capacity => AttemptResult::Capacity,
            // The caller's fault or absence: the provider said nothing about itself.
            FailureCode::InvalidRequest
            | FailureCode::Draining
            | FailureCode::ProviderMissing
            | FailureCode::ProviderUnavailable
            | FailureCode::TargetMissing => AttemptResult::Cancelled,
        },
    }
}

fn of_status(status: StatusCode) -> AttemptResult {
    if status.is_success() || status == StatusCode::NOT_MODIFIED {
        AttemptResult::Success
    } else if status == StatusCode::TOO_MANY_REQUESTS {
        AttemptResult::RateLimited
    } else if status.is_client_error() {
        AttemptResult::Http4xx
    } else {
        // A redirect is as unusable as a broken server (G11).
        AttemptResult::Http5xx
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_counted_by_its_status_and_a_broken_one_by_its_failure() {
        let complete = Terminal::Complete { usage: None };
        for (status, want) in [
            (200, AttemptResult::Success),
            (304, AttemptResult::Success),
            (302, AttemptResult::Http5xx),
            (401, AttemptResult::Http4xx),
            (429, AttemptResult::RateLimited),
            (503, AttemptResult::Http5xx),
        ] {
            assert_eq!(
                result(StatusCode::from_u16(status).ok(), &complete),
                want,
                "{status}"
            );
        }
        let cut = Terminal::error(FailureCode::ProviderCut, "");
        assert_eq!(result(Some(StatusCode::OK), &cut), AttemptResult::Cut);
        assert_eq!(
            result(None, &Terminal::error(FailureCode::ConnectFailed, "")),
            AttemptResult::ConnectError
        );
        assert_eq!(
            result(Some(StatusCode::OK), &Terminal::Cancelled),
            AttemptResult::Cancelled
        );
    }
}
