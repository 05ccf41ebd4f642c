//! How a run ended (D28): encoded once, the same bytes in the head, in the terminal event and wherever the host shows it.

use bytes::Bytes;
use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::failure::Failure;
use crate::record::{Status, words};

words! {
    /// Why a run ended (durable-api §8).
    pub enum Reason {
        Completed => "completed",
        Error => "error",
        Deadline => "deadline",
        Cancelled => "cancelled",
        WaitCancelled => "wait_cancelled",
        Budget => "budget",
        Denied => "denied",
    }
}

/// The code of a failure that is a person's denial: the run's reason is `denied` (D81).
pub const DENIED: &str = "approval_denied";

/// The code of a failure that is a limit which ran out, and nothing else.
pub const SPENT: &str = "budget_exhausted";

/// Which limit ran out (D17).
///
/// `used` and `limit` are written as decimal numbers, exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exhausted {
    /// `retry:<step>`, `steps`, `recovery_attempts` or a budget's name.
    pub budget: String,
    pub used: u64,
    pub limit: u64,
    /// Digits of `used` and `limit` behind the decimal point; 0 for what is counted.
    pub decimals: u8,
}

/// The longest fraction of a u64.
const DECIMALS_MAX: u8 = 19;

fn decimal(n: u64, decimals: u8) -> String {
    let Some(one) = 10_u64.checked_pow(u32::from(decimals)).filter(|one| *one > 1) else {
        return n.to_string();
    };
    let part = format!("{:0width$}", n % one, width = usize::from(decimals));
    match part.trim_end_matches('0') {
        "" => (n / one).to_string(),
        part => format!("{}.{part}", n / one),
    }
}

/// The digits of a decimal number, with so many of them behind the point.
fn digits(text: &str, decimals: u8) -> Option<u64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let width = usize::from(decimals);
    (part.len() <= width).then(|| format!("{whole}{part:0<width$}").parse().ok())?
}

impl std::fmt::Display for Exhausted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let of = |n| decimal(n, self.decimals);
        write!(f, "{} of {} {}", of(self.used), of(self.limit), self.budget)
    }
}

#[derive(Serialize, Deserialize)]
struct Written {
    budget: String,
    used: Box<RawValue>,
    limit: Box<RawValue>,
}

impl Serialize for Exhausted {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let number = |n| RawValue::from_string(decimal(n, self.decimals)).map_err(S::Error::custom);
        let written = Written {
            budget: self.budget.clone(),
            used: number(self.used)?,
            limit: number(self.limit)?,
        };
        written.serialize(s)
    }
}

impl<'de> Deserialize<'de> for Exhausted {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let Written { budget, used, limit } = Written::deserialize(d)?;
        let behind = |n: &RawValue| n.get().split_once('.').map_or(0, |(_, part)| part.len());
        let decimals = u8::try_from(behind(&used).max(behind(&limit)))
            .ok()
            .filter(|decimals| *decimals <= DECIMALS_MAX)
            .ok_or_else(|| D::Error::custom("a limit has too many decimals"))?;
        let number = |n: &RawValue| {
            digits(n.get(), decimals).ok_or_else(|| D::Error::custom("a limit is no decimal number"))
        };
        Ok(Self {
            used: number(&used)?,
            limit: number(&limit)?,
            budget,
            decimals,
        })
    }
}

/// The end of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    pub status: Status,
    pub reason: Reason,
    pub output: Option<Box<RawValue>>,
    pub error: Option<OutcomeError>,
    pub exhausted: Option<Exhausted>,
    pub cancel: Option<OutcomeCancel>,
    pub effects: Vec<Box<RawValue>>,
    pub evidence: Vec<Box<RawValue>>,
    pub usage: Option<Box<RawValue>>,
}

/// A failure and where it happened (D14).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeError {
    #[serde(flatten)]
    pub failure: Failure,
    pub step: Option<String>,
    pub attempt: u32,
}

/// Who cancelled, and why; or the moment by which the run should have ended, in RFC 3339 (D15).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeCancel {
    pub by: Option<String>,
    pub reason: String,
    #[serde(default)]
    pub deadline: Option<String>,
}

impl Outcome {
    pub fn new(status: Status, reason: Reason) -> Self {
        Self {
            status,
            reason,
            output: None,
            error: None,
            exhausted: None,
            cancel: None,
            effects: Vec::new(),
            evidence: Vec::new(),
            usage: None,
        }
    }

    /// Whether a resume may open the next life (D22).
    pub fn resumable(&self) -> bool {
        self.status == Status::Failed && self.error.as_ref().is_some_and(|e| e.failure.kind.resumable())
    }

    /// # Errors
    /// When the output or an effect is no JSON.
    pub fn encode(&self) -> Result<Bytes, serde_json::Error> {
        serde_json::to_vec(self).map(Bytes::from)
    }

    /// # Errors
    /// When the bytes are no encoded outcome.
    pub fn decode(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_written_as_decimal_numbers_and_read_back() {
        for (used, limit, decimals, json, text) in [
            (3, 2, 0, r#"{"budget":"b","used":3,"limit":2}"#, "3 of 2 b"),
            (
                0,
                u64::MAX,
                0,
                r#"{"budget":"b","used":0,"limit":18446744073709551615}"#,
                "0 of 18446744073709551615 b",
            ),
            (
                1_150_000_000,
                500_000_000,
                12,
                r#"{"budget":"b","used":0.00115,"limit":0.0005}"#,
                "0.00115 of 0.0005 b",
            ),
            (
                2_000_000_000_001,
                2_000_000_000_000,
                12,
                r#"{"budget":"b","used":2.000000000001,"limit":2}"#,
                "2.000000000001 of 2 b",
            ),
            (
                u64::MAX,
                1,
                19,
                r#"{"budget":"b","used":1.8446744073709551615,"limit":0.0000000000000000001}"#,
                "1.8446744073709551615 of 0.0000000000000000001 b",
            ),
        ] {
            let budget = "b".to_owned();
            let exhausted = Exhausted {
                budget,
                used,
                limit,
                decimals,
            };
            assert_eq!(serde_json::to_string(&exhausted).unwrap(), json);
            assert_eq!(exhausted.to_string(), text);
            let back: Exhausted = serde_json::from_str(json).unwrap();
            assert_eq!(back.to_string(), text);
            assert_eq!(serde_json::to_string(&back).unwrap(), json);
            let mut outcome = Outcome::new(Status::Exhausted, Reason::Budget);
            outcome.exhausted = Some(exhausted);
            let bytes = outcome.encode().unwrap();
            assert_eq!(Outcome::decode(&bytes).unwrap().encode().unwrap(), bytes);
        }
        for wrong in [
            "-1",
            "1e3",
            "\"1\"",
            "0.00000000000000000001",
            "18446744073709551616",
            "null",
        ] {
            let json = format!(r#"{{"budget":"b","used":{wrong},"limit":1}}"#);
            assert!(serde_json::from_str::<Exhausted>(&json).is_err(), "{wrong}");
        }
    }
}
