//! Resume tokens (D91): the run and the revision a caller means, as one opaque text.
//!
//! `rt_` and lower-case hex of: the format's version (1 byte), the revision (8 bytes, big endian), the run id, a checksum
//! (4 bytes). One token has one text. The checksum tells a damaged text from an old one: a text that parses names a revision
//! that was issued or could have been, and only comparing it with the head says whether it is stale.
//!
//! A token is no secret and grants nothing: it holds a run id and a number in plain sight, and anybody can compute one. Whether
//! the caller may resume the run is decided elsewhere.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::{ID_MAX, InvalidId, Revision, RunId, digest_of, hex};

const PREFIX: &str = "rt_";
const VERSION: u8 = 1;
/// Bytes of version, revision and checksum.
const HEADER: usize = 9;
const CHECKSUM: usize = 4;
/// Longest text of a token, in bytes.
pub const TOKEN_MAX: usize = PREFIX.len() + 2 * (HEADER + ID_MAX + CHECKSUM);

/// What a resume names: this run, at this revision.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ResumeToken {
    pub run: RunId,
    pub revision: Revision,
}

/// Why a text is no resume token. A token of an earlier revision is none of these: it is stale.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidToken {
    #[error("a resume token starts with rt_")]
    Prefix,
    #[error("a resume token is at most {TOKEN_MAX} bytes long")]
    TooLong,
    #[error("a resume token has lower-case hexadecimal digits after rt_, in pairs")]
    NotHex,
    #[error("the resume token has version {found}, this program reads {VERSION}")]
    Version { found: u8 },
    #[error("the resume token is cut short")]
    Truncated,
    #[error("the resume token is damaged: its checksum does not hold")]
    Checksum,
    #[error("the resume token names no revision")]
    Revision,
    #[error("the resume token names no run: {0}")]
    Run(InvalidId),
}

impl ResumeToken {
    /// The token of a text, from `Display`.
    ///
    /// # Errors
    /// `InvalidToken`, naming what is wrong.
    pub fn parse(text: &str) -> Result<Self, InvalidToken> {
        let digits = text.strip_prefix(PREFIX).ok_or(InvalidToken::Prefix)?;
        if text.len() > TOKEN_MAX {
            return Err(InvalidToken::TooLong);
        }
        let bytes = unhex(digits).ok_or(InvalidToken::NotHex)?;
        match bytes.first() {
            None => return Err(InvalidToken::Truncated),
            Some(&VERSION) => {}
            Some(&found) => return Err(InvalidToken::Version { found }),
        }
        let (body, sum) = bytes
            .split_last_chunk::<CHECKSUM>()
            .ok_or(InvalidToken::Truncated)?;
        let (revision, run) = body
            .get(1..)
            .and_then(<[u8]>::split_first_chunk::<8>)
            .ok_or(InvalidToken::Truncated)?;
        if *sum != checksum(body) {
            return Err(InvalidToken::Checksum);
        }
        Ok(Self {
            revision: Revision::new(u64::from_be_bytes(*revision)).map_err(|_| InvalidToken::Revision)?,
            run: RunId::from_bytes(run).map_err(InvalidToken::Run)?,
        })
    }
}

impl fmt::Display for ResumeToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let run = self.run.as_str().as_bytes();
        let mut bytes = Vec::with_capacity(HEADER + run.len() + CHECKSUM);
        bytes.push(VERSION);
        bytes.extend(self.revision.get().to_be_bytes());
        bytes.extend(run);
        bytes.extend(checksum(&bytes));
        write!(f, "{PREFIX}{}", hex(&bytes))
    }
}

impl FromStr for ResumeToken {
    type Err = InvalidToken;
    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        Self::parse(text)
    }
}

impl TryFrom<String> for ResumeToken {
    type Error = InvalidToken;
    fn try_from(text: String) -> Result<Self, InvalidToken> {
        Self::parse(&text)
    }
}

impl From<ResumeToken> for String {
    fn from(token: ResumeToken) -> String {
        token.to_string()
    }
}

fn checksum(body: &[u8]) -> [u8; CHECKSUM] {
    let [a, b, c, d, ..] = digest_of(&[b"resume token", body]);
    [a, b, c, d]
}

/// The bytes of pairs of lower-case hexadecimal digits.
fn unhex(digits: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    pairs
        .iter()
        .map(|[high, low]| Some((digit(*high)? << 4) | digit(*low)?))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::REVISION_MAX;

    fn token(run: &str, revision: u64) -> ResumeToken {
        ResumeToken {
            run: RunId::new(run).unwrap(),
            revision: Revision::new(revision).unwrap(),
        }
    }

    /// A text over these bytes whose checksum holds.
    fn forged(body: &[u8]) -> String {
        format!("rt_{}{}", hex(body), hex(&checksum(body)))
    }

    fn body(version: u8, revision: u64, run: &[u8]) -> Vec<u8> {
        [&[version][..], &revision.to_be_bytes(), run].concat()
    }

    #[test]
    fn a_token_has_one_text_that_is_safe_in_a_url() {
        // Written down: tokens outlive the program that issued them.
        let written = token("run_1", 42).to_string();
        assert_eq!(written, "rt_01000000000000002a72756e5f31b1b7ede6");
        assert!(
            written
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
        );
        let longest = token(&"é".repeat(128), REVISION_MAX).to_string();
        assert_eq!(longest.len(), TOKEN_MAX);
        assert_eq!(longest.parse(), Ok(token(&"é".repeat(128), REVISION_MAX)));
        let json = serde_json::to_string(&token("run_1", 42)).unwrap();
        assert_eq!(json, format!("\"{written}\""));
        assert_eq!(
            serde_json::from_str::<ResumeToken>(&json).unwrap(),
            token("run_1", 42)
        );
        assert!(serde_json::from_str::<ResumeToken>("\"rt_00\"").is_err());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let good = token("run_1", 42).to_string();
        let damaged = good.replacen("72", "73", 1);
        let mut upper = good.clone();
        upper.make_ascii_uppercase();
        let table = [
            (String::new(), InvalidToken::Prefix),
            ("rt".to_owned(), InvalidToken::Prefix),
            (good[3..].to_owned(), InvalidToken::Prefix),
            (format!(" {good}"), InvalidToken::Prefix),
            (upper, InvalidToken::Prefix),
            (
                format!("rt_{}", good[3..].to_ascii_uppercase()),
                InvalidToken::NotHex,
            ),
            (format!("{good} "), InvalidToken::NotHex),
            (format!("{good}\0\0"), InvalidToken::NotHex),
            ("rt_é".to_owned(), InvalidToken::NotHex),
            (good[..good.len() - 1].to_owned(), InvalidToken::NotHex),
            ("rt_".to_owned(), InvalidToken::Truncated),
            ("rt_01".to_owned(), InvalidToken::Truncated),
            (
                forged(&body(1, 42, b""))[..3 + 2 * 12].to_owned(),
                InvalidToken::Truncated,
            ),
            (
                format!("rt_{}", "0".repeat(TOKEN_MAX - 3)),
                InvalidToken::Version { found: 0 },
            ),
            (format!("rt_{}", "0".repeat(TOKEN_MAX - 1)), InvalidToken::TooLong),
            (forged(&body(2, 42, b"run_1")), InvalidToken::Version { found: 2 }),
            (damaged, InvalidToken::Checksum),
            (good[..good.len() - 2].to_owned(), InvalidToken::Checksum),
            (forged(&body(1, 0, b"run_1")), InvalidToken::Revision),
            (
                forged(&body(1, REVISION_MAX + 1, b"run_1")),
                InvalidToken::Revision,
            ),
            (
                forged(&body(1, 42, b"")),
                InvalidToken::Run(InvalidId::Empty { field: "run_id" }),
            ),
            (
                forged(&body(1, 42, b"a\0")),
                InvalidToken::Run(InvalidId::Nul { field: "run_id" }),
            ),
            (
                forged(&body(1, 42, b"\xff")),
                InvalidToken::Run(InvalidId::NotUtf8 { field: "run_id" }),
            ),
        ];
        for (text, why) in table {
            assert_eq!(ResumeToken::parse(&text), Err(why), "{text:?}");
        }
        assert_eq!(forged(&body(1, 42, b"run_1")), good);
    }

    /// Garbage, and bytes that only lack a meaning: half of the last kind parse.
    fn any_text() -> impl Strategy<Value = String> {
        prop_oneof![
            "(rt_)?([0-9a-f]{0,60}|.{0,60})",
            prop::collection::vec(any::<u8>(), 0..60).prop_map(|bytes| forged(&bytes)),
            (any::<u64>(), "\\PC{0,40}").prop_map(|(n, run)| forged(&body(VERSION, n, run.as_bytes()))),
        ]
    }

    proptest! {
        #[test]
        fn tokens_come_back_as_they_were(run in "[^\0]{1,64}", revision in 1..=REVISION_MAX) {
            let token = token(&run, revision);
            prop_assert_eq!(ResumeToken::parse(&token.to_string()), Ok(token));
        }

        #[test]
        fn any_text_is_refused_or_is_the_text_of_its_token(text in any_text()) {
            if let Ok(token) = ResumeToken::parse(&text) {
                prop_assert_eq!(token.to_string(), text);
            }
        }

        #[test]
        fn a_changed_digit_is_never_another_token(
            run in "[a-z_0-9]{1,40}",
            revision in 1..10_000u64,
            place in any::<prop::sample::Index>(),
            digit in "[0-9a-f]",
        ) {
            let text = token(&run, revision).to_string();
            let place = 3 + place.index(text.len() - 3);
            let mut changed = text.clone();
            changed.replace_range(place..=place, &digit);
            prop_assert_eq!(ResumeToken::parse(&changed).is_ok(), changed == text);
        }
    }
}
