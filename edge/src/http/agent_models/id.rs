//! Ids of responses that are parts of runs. They say which run and where in it the answer begins, so that every edge of the store
//! can find it: there is no table of them.

use std::fmt;

use iop_durable::ids::RunId;

const HEX: usize = 32;

/// A response: what a run did from behind an event up to its next pause, or to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResponseId {
    pub(super) run: RunId,
    /// The event that the answer begins behind; 0: the answer begins with the run.
    pub(super) after: u64,
}

impl ResponseId {
    /// `None`: not of this shape.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (hex, after) = text.strip_prefix("resp_")?.split_once('_')?;
        let plain = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        if hex.len() != HEX || !hex.bytes().all(plain) {
            return None;
        }
        let number = after == "0" || (after.bytes().all(|b| b.is_ascii_digit()) && !after.starts_with('0'));
        Some(Self {
            run: RunId::new(&format!("run_{hex}")).ok()?,
            after: after.parse().ok().filter(|_| number)?,
        })
    }

    /// The same run, begun behind another event.
    pub(super) fn at(&self, after: u64) -> Self {
        Self {
            run: self.run.clone(),
            after,
        }
    }

    /// What ids of an answer's parts are made of.
    pub(super) fn uuid(&self) -> uuid::Uuid {
        let hex = self.run.as_str().strip_prefix("run_").unwrap_or_default();
        uuid::Uuid::try_parse(hex).unwrap_or_default()
    }
}

impl fmt::Display for ResponseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let run = self.run.as_str();
        write!(
            f,
            "resp_{}_{}",
            run.strip_prefix("run_").unwrap_or(run),
            self.after
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn others_ids_are_not_ours() {
        let hex = "0123456789abcdef0123456789abcdef";
        for text in [
            "resp_1",
            "resp_",
            &format!("resp_{hex}"),
            &format!("resp_{hex}_"),
            &format!("resp_{hex}_x"),
            &format!("resp_{hex}_+1"),
            &format!("resp_{hex}_01"),
            &format!("resp_{}_0", hex.to_uppercase()),
            &format!("resp_{}_0", &hex[1..]),
            &format!("run_{hex}_0"),
            &format!("resp_{hex}_99999999999999999999999"),
        ] {
            assert_eq!(ResponseId::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn an_id_leads_back_to_its_place(run in any::<u128>(), after in any::<u64>()) {
            let uuid = uuid::Uuid::from_u128(run);
            let id = ResponseId { run: RunId::new(&format!("run_{}", uuid.simple())).unwrap(), after };
            prop_assert_eq!(ResponseId::parse(&id.to_string()), Some(id.clone()));
            prop_assert_eq!(id.uuid(), uuid);
        }

        #[test]
        fn any_text_is_read_or_refused(text in "(resp_)?[0-9a-f_]{0,40}") {
            if let Some(id) = ResponseId::parse(&text) {
                prop_assert_eq!(id.to_string(), text);
            }
        }
    }
}
