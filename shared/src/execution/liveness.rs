//! Stall timeouts on the wire (004): milliseconds, zero means the default, nonsense is refused before any provider.

/// 004 `DefaultResponseStallTimeoutMS`.
pub const DEFAULT_RESPONSE_STALL_TIMEOUT_MS: i64 = 300_000;

/// 004 `maxSafeStallTimeoutMS`: the largest count of milliseconds whose nanoseconds fit in an `i64`.
pub const MAX_SAFE_STALL_TIMEOUT_MS: i64 = i64::MAX / 1_000_000;

/// Why a stall timeout was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadStallTimeout {
    #[error("response stall timeout must not be negative")]
    Negative,
    #[error("response stall timeout is too large")]
    Overflow,
}

/// 004 `ValidateStallTimeoutMS`: zero is allowed.
///
/// # Errors
/// Negative, or above `MAX_SAFE_STALL_TIMEOUT_MS`.
pub const fn validate_stall_timeout_ms(ms: i64) -> Result<(), BadStallTimeout> {
    if ms < 0 {
        return Err(BadStallTimeout::Negative);
    }
    if ms > MAX_SAFE_STALL_TIMEOUT_MS {
        return Err(BadStallTimeout::Overflow);
    }
    Ok(())
}

/// 004 `ResolveStallTimeoutMS`: validates, then maps zero to the default.
///
/// # Errors
/// As `validate_stall_timeout_ms`.
pub const fn resolve_stall_timeout_ms(ms: i64) -> Result<i64, BadStallTimeout> {
    match validate_stall_timeout_ms(ms) {
        Ok(()) => Ok(if ms == 0 {
            DEFAULT_RESPONSE_STALL_TIMEOUT_MS
        } else {
            ms
        }),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_is_the_default_and_nonsense_is_refused() {
        assert_eq!(resolve_stall_timeout_ms(0), Ok(300_000));
        assert_eq!(resolve_stall_timeout_ms(1), Ok(1));
        assert_eq!(
            resolve_stall_timeout_ms(MAX_SAFE_STALL_TIMEOUT_MS),
            Ok(MAX_SAFE_STALL_TIMEOUT_MS)
        );
        assert_eq!(resolve_stall_timeout_ms(-1), Err(BadStallTimeout::Negative));
        assert_eq!(
            resolve_stall_timeout_ms(MAX_SAFE_STALL_TIMEOUT_MS + 1),
            Err(BadStallTimeout::Overflow)
        );
    }
}
