//! What an error of the driver means for the caller: whether something may have been written, and whose fault it is.
//!
//! A statement that the server answers with an error was undone by it. A connection that is lost before the answer leaves it
//! open; so do the errors with which a server ends a session, because they may reach the client after a commit was written.

use sqlx::Error;

use crate::store::StoreError;

/// How to go on after an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The connection is gone; what was sent may have been done.
    Lost,
    /// The connection was gone before the whole of it was sent. A statement's last message is what makes the server commit it,
    /// so nothing was done.
    Unsent,
    /// A unique key is taken.
    Taken,
    /// One of the values cannot be stored.
    Value,
    /// A lock was not given in time.
    Blocked,
    /// Undone for the sake of another transaction: the same statement may pass now.
    Again,
    /// Anything else: undone, and not for a value's sake.
    Other,
}

pub(super) fn fault(error: &Error) -> Fault {
    if let Error::Database(error) = error {
        return error.code().map_or(Fault::Other, |code| of_code(&code));
    }
    if matches!(error, Error::Io(error) if error.kind() == std::io::ErrorKind::BrokenPipe) {
        Fault::Unsent
    } else if matches!(
        error,
        Error::Io(_) | Error::Tls(_) | Error::Protocol(_) | Error::WorkerCrashed
    ) {
        Fault::Lost
    } else if matches!(error, Error::Encode(_)) {
        Fault::Value
    } else {
        Fault::Other
    }
}

/// <https://www.postgresql.org/docs/current/errcodes-appendix.html>
fn of_code(code: &str) -> Fault {
    match (code.get(..2), code) {
        // Terminated by an administrator, by a crash of another session, for idling; not known whether it was completed.
        (_, "57P01" | "57P02" | "57P05" | "40003") | (Some("08"), _) => Fault::Lost,
        (_, "23505") => Fault::Taken,
        (_, "40001" | "40P01") => Fault::Again,
        (_, "55P03") => Fault::Blocked,
        (Some("21" | "22" | "23" | "54"), _) => Fault::Value,
        _ => Fault::Other,
    }
}

impl Fault {
    /// Whether the connection is of no use any more.
    pub(super) const fn is_of_connection(self) -> bool {
        match self {
            Self::Lost | Self::Unsent => true,
            Self::Taken | Self::Value | Self::Blocked | Self::Again | Self::Other => false,
        }
    }

    /// Whether nothing was done and the same statement may pass now.
    pub(super) const fn is_worth_another(self) -> bool {
        match self {
            Self::Unsent | Self::Again => true,
            Self::Lost | Self::Taken | Self::Value | Self::Blocked | Self::Other => false,
        }
    }
}

/// For what only reads.
pub(super) fn read(error: Error) -> StoreError {
    if matches!(error, Error::ColumnDecode { .. } | Error::Decode(_)) {
        StoreError::corrupt(error.to_string())
    } else {
        StoreError::unavailable(error)
    }
}

/// For what writes. A taken key is `duplicate`: what else it may mean is for the caller to know.
pub(super) fn write(error: Error) -> StoreError {
    match fault(&error) {
        Fault::Lost => StoreError::unconfirmed(error),
        Fault::Taken => StoreError::Duplicate,
        Fault::Value => StoreError::corrupt(format!("not written: the database refuses it: {error}")),
        Fault::Unsent | Fault::Blocked | Fault::Again | Fault::Other => StoreError::unavailable(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_session_that_ended_leaves_it_open_what_was_written() {
        for code in ["57P01", "57P02", "57P05", "40003", "08006", "08P01"] {
            assert_eq!(of_code(code), Fault::Lost, "{code}");
        }
        for (code, fault) in [
            ("23505", Fault::Taken),
            ("40P01", Fault::Again),
            ("40001", Fault::Again),
            ("55P03", Fault::Blocked),
            ("22021", Fault::Value),
            ("23514", Fault::Value),
            ("54000", Fault::Value),
            ("53100", Fault::Other),
            ("57P03", Fault::Other),
            ("57014", Fault::Other),
            ("25006", Fault::Other),
            ("", Fault::Other),
        ] {
            assert_eq!(of_code(code), fault, "{code}");
        }
        let reset = Error::Io(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
        assert_eq!(write(reset).kind(), "unconfirmed");
        let unsent = Error::Io(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
        assert_eq!(fault(&unsent), Fault::Unsent);
        assert_eq!(write(unsent).kind(), "unavailable");
        assert_eq!(write(Error::PoolTimedOut).kind(), "unavailable");
        assert_eq!(read(Error::PoolTimedOut).kind(), "unavailable");
    }
}
