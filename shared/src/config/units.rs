//! Durations and sizes: strings with a unit. A bare integer is neither (gateway.md §13).

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, Visitor};

/// A duration such as `"300s"` or `"1m 30s"`, at most a hundred years so that milliseconds always fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Period(pub Duration);

const LONGEST: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

impl Period {
    pub const fn secs(n: u64) -> Self {
        Self(Duration::from_secs(n))
    }

    /// Whole milliseconds, as the link carries them.
    pub fn as_millis_i64(self) -> i64 {
        i64::try_from(self.0.as_millis()).unwrap_or(i64::MAX)
    }
}

impl FromStr for Period {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let d = humantime::parse_duration(text)
            .map_err(|e| format!("{text:?} is no duration ({e}); write it with a unit, such as \"300s\""))?;
        if d > LONGEST {
            Err(format!("{text:?} is longer than a hundred years"))
        } else {
            Ok(Self(d))
        }
    }
}

/// A size such as `"64MiB"`, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

impl ByteSize {
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// As a length in memory; saturates where addresses are smaller.
    pub fn as_usize(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl FromStr for ByteSize {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let advice = || format!("{text:?} is no size; write it with a unit, such as \"64MiB\"");
        if text.bytes().all(|b| b.is_ascii_digit()) {
            return Err(advice());
        }
        text.parse::<bytesize::ByteSize>()
            .map(|b| Self(b.as_u64()))
            .map_err(|_| advice())
    }
}

macro_rules! from_string {
    ($name:ident, $what:literal) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                struct Text;
                impl Visitor<'_> for Text {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($what)
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        text.parse().map_err(E::custom)
                    }
                }
                d.deserialize_any(Text)
            }
        }
    };
}

from_string!(Period, "a duration with a unit, such as \"300s\"");
from_string!(ByteSize, "a size with a unit, such as \"64MiB\"");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_required() {
        assert_eq!("300s".parse::<Period>(), Ok(Period::secs(300)));
        assert_eq!("1m 30s".parse::<Period>(), Ok(Period::secs(90)));
        assert_eq!("0s".parse::<Period>(), Ok(Period::secs(0)));
        assert_eq!("64MiB".parse::<ByteSize>(), Ok(ByteSize::mib(64)));
        for bad in ["300", "-1s", "", "soon", "200000000days"] {
            assert!(bad.parse::<Period>().is_err(), "{bad}");
        }
        for bad in ["1024", "", "64 parsecs", "-1MiB"] {
            assert!(bad.parse::<ByteSize>().is_err(), "{bad}");
        }
    }
}
