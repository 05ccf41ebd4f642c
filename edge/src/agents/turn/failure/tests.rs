use super::*;

fn of(error: CallError) -> (Failure, Option<Duration>) {
    match error {
        CallError::Failed { failure, retry_after } => (failure, retry_after),
        CallError::Unknown => panic!("a turn has no effect that could be unknown"),
    }
}

fn said(error: CallError) -> (FailureKind, String, bool) {
    let (failure, _) = of(error);
    (failure.kind, failure.code, failure.retryable)
}

#[test]
fn each_word_of_the_gate_has_its_kind_and_what_may_pass_may_be_retried() {
    for kind in ErrorKind::ALL {
        let failure = own(*kind, "why");
        assert_eq!(
            (failure.code.as_str(), failure.message.as_str()),
            (kind.as_str(), "why")
        );
        let passes = matches!(
            kind,
            ErrorKind::RateLimitExceeded
                | ErrorKind::CapacityExhausted
                | ErrorKind::NoProviderAvailable
                | ErrorKind::Draining
                | ErrorKind::ProviderUnreachable
                | ErrorKind::ProviderDisconnected
                | ErrorKind::ProviderError
                | ErrorKind::NodeLost
                | ErrorKind::ResponseStalled
                | ErrorKind::FirstContentTimeout
        );
        assert_eq!(failure.retryable, passes, "{kind}");
        // Its status says the same of it, where it is one that passes or not by itself.
        if kind.status().is_client_error() && *kind != ErrorKind::RateLimitExceeded {
            assert!(!failure.retryable, "{kind}");
        }
    }
}

#[test]
fn statuses_are_retried_as_the_contract_lists_them() {
    for code in 400..600 {
        let status = StatusCode::from_u16(code).unwrap();
        let failure = by_provider(status, None);
        let listed = matches!(code, 408 | 425 | 429 | 500 | 502 | 503 | 504);
        assert_eq!(failure.retryable, listed, "{code}");
        assert_eq!(failure.code, format!("http_{code}"));
        assert_eq!(
            failure.message,
            format!("The provider answered with status {code}.")
        );
        // What the run could retry by itself, a person can resume.
        assert!(!listed || failure.kind.resumable(), "{code}");
        assert_eq!(
            failure.kind == FailureKind::Auth,
            matches!(code, 401 | 403),
            "{code}"
        );
        assert_eq!(failure.kind == FailureKind::RateLimited, code == 429, "{code}");
    }
}

#[test]
fn a_providers_message_is_kept_in_its_length_and_a_page_is_not() {
    let status = StatusCode::BAD_REQUEST;
    let answer = |body: String| unanswered(status, None, &Bytes::from(body), None);
    let message = |body: &str| of(answer(body.to_owned())).0.message;
    assert_eq!(
        message(r#"{"error":{"message":"too long","type":"x"}}"#),
        "too long"
    );
    assert_eq!(message(r#"{"error":"flat"}"#), "flat");
    assert_eq!(message(r#"{"object":"error","message":"vllm"}"#), "vllm");
    for body in [
        "",
        "<html>no</html>",
        "{}",
        r#"{"error":{"code":7}}"#,
        r#"{"error":{"message":""}}"#,
    ] {
        assert_eq!(message(body), "The provider answered with status 400.", "{body}");
    }
    let long = message(&format!(r#"{{"error":{{"message":"{}"}}}}"#, "é".repeat(600)));
    assert_eq!(long, "é".repeat(512));
    let (_, after) = of(unanswered(
        status,
        None,
        &Bytes::new(),
        Some(Duration::from_millis(5)),
    ));
    assert_eq!(after, Some(Duration::from_millis(5)));
}

fn verdict(kind: ErrorKind, answered: Option<u16>, fence: AttemptFence) -> CallError {
    let verdict = Verdict {
        kind,
        answered: answered.map(|s| StatusCode::from_u16(s).unwrap()),
        fence,
    };
    let body = ApiError::new(kind, "the gate's own sentence").body();
    let error = unanswered(kind.status(), Some(verdict), &body, None);
    assert_eq!(of(error.clone()).0.message, "the gate's own sentence");
    error
}

#[test]
fn a_stall_is_asked_again_only_once_its_provider_has_surely_stopped() {
    for fence in AttemptFence::ALL {
        let stalled = verdict(ErrorKind::ResponseStalled, None, *fence);
        let confirmed = *fence == AttemptFence::Confirmed;
        let want = (FailureKind::Timeout, "response_stalled".to_owned(), confirmed);
        assert_eq!(said(stalled), want, "{fence}");
        // No other word depends on it.
        let lost = verdict(ErrorKind::NodeLost, None, *fence);
        assert_eq!(
            said(lost),
            (FailureKind::Unavailable, "node_lost".to_owned(), true)
        );
    }
}

#[test]
fn an_answer_that_could_not_be_passed_on_counts_by_its_status() {
    for (answered, kind, retryable) in [
        (Some(401), FailureKind::Auth, false),
        (Some(404), FailureKind::Configuration, false),
        (Some(200), FailureKind::ProviderError, true),
        (Some(302), FailureKind::ProviderError, true),
        (Some(503), FailureKind::ProviderError, true),
        (None, FailureKind::ProviderError, true),
    ] {
        let error = verdict(ErrorKind::ProviderError, answered, AttemptFence::Unknown);
        assert_eq!(
            said(error),
            (kind, "provider_error".to_owned(), retryable),
            "{answered:?}"
        );
    }
}

fn in_stream(object: &'static str, status: Option<u16>) -> CallError {
    broken(Broken::Said(InBandError {
        status,
        raw: Bytes::from_static(object.as_bytes()),
    }))
}

#[test]
fn an_error_in_a_stream_is_the_gates_by_its_word_and_else_the_providers() {
    let stalled = in_stream(r#"{"message":"m","code":"response_stalled"}"#, None);
    assert_eq!(
        said(stalled),
        (FailureKind::Timeout, "response_stalled".to_owned(), false)
    );
    let lost = in_stream(r#"{"message":"m","code":"node_lost"}"#, None);
    assert_eq!(
        said(lost),
        (FailureKind::Unavailable, "node_lost".to_owned(), true)
    );
    let limited = in_stream(r#"{"message":"m","code":"tokens"}"#, Some(429));
    assert_eq!(
        said(limited),
        (FailureKind::RateLimited, "http_429".to_owned(), true)
    );
    // Words that the gate has too, and never at the end of a stream.
    let internal = in_stream(r#"{"message":"m","code":"internal_error"}"#, Some(500));
    assert_eq!(
        said(internal),
        (FailureKind::ProviderError, "http_500".to_owned(), true)
    );
    let unknown = in_stream(r#"{"message":"m"}"#, None);
    assert_eq!(
        said(unknown),
        (FailureKind::ProviderError, "http_502".to_owned(), true)
    );
}

#[test]
fn what_is_no_answer_says_so() {
    for (why, want) in [
        (
            Broken::Malformed,
            (FailureKind::ProviderError, "provider_error", true),
        ),
        (
            Broken::Cut,
            (FailureKind::Unavailable, "provider_disconnected", true),
        ),
        (
            Broken::TooLarge(7),
            (FailureKind::InvalidInput, "payload_too_large", false),
        ),
        (
            Broken::BadId,
            (FailureKind::InvalidInput, "invalid_encoding", false),
        ),
    ] {
        let (kind, code, retryable) = said(broken(why));
        assert_eq!((kind, code.as_str(), retryable), want);
    }
}
