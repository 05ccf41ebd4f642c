//! What tokens cost. Money is whole numbers of 1e-12 of the currency: nothing is rounded but what a price cannot express.

use std::collections::BTreeMap;

use iop_shared::openai::usage::Usage;

use super::spec::PriceSpec;
use super::spec::check::Invalid;

/// Decimals of a currency amount: one unit is 1e-12.
const AMOUNT_DECIMALS: usize = 12;
/// Decimals of a price per million tokens: with them one token costs a whole number of units.
const PRICE_DECIMALS: usize = 6;

/// Prices by model, as `[prices."MODEL"]` has them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prices(BTreeMap<String, Price>);

/// What one token of a model costs, in units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Price {
    input: u64,
    output: u64,
    /// Of an input token that the provider served from its cache.
    cached_input: u64,
}

impl Prices {
    /// # Errors
    /// The first price that is no decimal, at `MODEL.input` and the like.
    pub fn compile(specs: &BTreeMap<String, PriceSpec>) -> Result<Self, Invalid> {
        specs
            .iter()
            .map(|(model, spec)| Ok((model.clone(), Price::compile(model, spec)?)))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// The price of a model by the name that clients ask for.
    pub fn get(&self, model: &str) -> Option<&Price> {
        self.0.get(model)
    }
}

impl Price {
    fn compile(model: &str, spec: &PriceSpec) -> Result<Self, Invalid> {
        let read = |field: &str, text: &str| {
            decimal(text, PRICE_DECIMALS).ok_or_else(|| {
                Invalid::at(
                    format!("{model}.{field}"),
                    "must be a decimal text with at most 6 decimals, such as \"0.15\": the price of a million tokens",
                )
            })
        };
        let input = read("input", &spec.input)?;
        let cached = spec.cached_input.as_deref();
        Ok(Self {
            input,
            output: read("output", &spec.output)?,
            cached_input: cached.map_or(Ok(input), |text| read("cached_input", text))?,
        })
    }

    /// What a turn cost, in units. Reasoning is part of the output, cached input part of the input. A sum that no `u64` holds
    /// is the largest one.
    pub fn cost(&self, usage: &Usage) -> u64 {
        let cached = usage.cached.min(usage.input);
        let part = |price: u64, tokens: u64| u128::from(price) * u128::from(tokens);
        let sum = part(self.input, usage.input - cached)
            .saturating_add(part(self.cached_input, cached))
            .saturating_add(part(self.output, usage.output));
        u64::try_from(sum).unwrap_or(u64::MAX)
    }
}

/// The units of an amount such as `"2.50"`; `None`: no decimal, more than 12 decimals, or over 18,446,744 of the currency.
pub fn spend(text: &str) -> Option<u64> {
    decimal(text, AMOUNT_DECIMALS)
}

/// A decimal text, scaled by 10 to the power of `decimals`. Digits, then perhaps a point and digits; zeros at the end of a
/// fraction count for nothing.
fn decimal(text: &str, decimals: usize) -> Option<u64> {
    let (whole, fraction) = match text.split_once('.') {
        Some((_, "")) => return None,
        Some(parts) => parts,
        None => (text, ""),
    };
    let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) {
        return None;
    }
    let fraction = fraction.trim_end_matches('0');
    let missing = decimals.checked_sub(fraction.len())?;
    let zeros = std::iter::repeat_n(b'0', missing);
    whole
        .bytes()
        .chain(fraction.bytes())
        .chain(zeros)
        .try_fold(0_u64, |sum, digit| {
            sum.checked_mul(10)?.checked_add(u64::from(digit - b'0'))
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prices(input: &str, output: &str, cached: Option<&str>) -> Result<Prices, Invalid> {
        let spec = PriceSpec {
            input: input.to_owned(),
            output: output.to_owned(),
            cached_input: cached.map(str::to_owned),
        };
        Prices::compile(&BTreeMap::from([("m".to_owned(), spec)]))
    }

    fn usage(input: u64, output: u64, cached: u64) -> Usage {
        Usage {
            input,
            output,
            cached,
            reasoning: 0,
        }
    }

    #[test]
    fn amounts_are_exact() {
        for (text, units) in [
            ("0", 0),
            ("2.50", 2_500_000_000_000),
            ("2.5", 2_500_000_000_000),
            ("0.000000000001", 1),
            ("0.1000000000000000", 100_000_000_000),
            ("007", 7_000_000_000_000),
            ("18446744.073709551615", u64::MAX),
        ] {
            assert_eq!(spend(text), Some(units), "{text}");
        }
        for text in [
            "",
            ".",
            "1.",
            ".5",
            "-1",
            "+1",
            "1e3",
            "1,5",
            "1_000",
            " 1",
            "1 ",
            "1.5.5",
            "0x1",
            "٣",
            "1.٣",
            "0.0000000000001",
            "18446744.073709551616",
            "99999999999999999999",
        ] {
            assert_eq!(spend(text), None, "{text}");
        }
    }

    #[test]
    fn a_turn_costs_its_tokens() {
        let prices = prices("0.15", "0.60", Some("0.075")).unwrap();
        let price = prices.get("m").unwrap();
        // A million of each: 0.15, 0.60, and 0.075.
        assert_eq!(price.cost(&usage(1_000_000, 0, 0)), spend("0.15").unwrap());
        assert_eq!(price.cost(&usage(0, 1_000_000, 0)), spend("0.60").unwrap());
        assert_eq!(
            price.cost(&usage(1_000_000, 0, 1_000_000)),
            spend("0.075").unwrap()
        );
        assert_eq!(price.cost(&usage(1, 1, 0)), 150_000 + 600_000);
        assert_eq!(prices.get("other"), None);
    }

    #[test]
    fn without_a_price_of_their_own_cached_tokens_are_input() {
        let prices = prices("2", "0", None).unwrap();
        let price = prices.get("m").unwrap();
        assert_eq!(price.cost(&usage(10, 0, 4)), price.cost(&usage(10, 0, 0)));
        // A provider that counts more cached tokens than input.
        assert_eq!(price.cost(&usage(10, 0, 40)), price.cost(&usage(10, 0, 10)));
    }

    #[test]
    fn a_price_that_is_none_is_named() {
        for (input, output, cached, field) in [
            ("", "1", None, "m.input"),
            ("1", "-1", None, "m.output"),
            ("1", "1", Some("0.0000001"), "m.cached_input"),
            ("99999999999999999999", "1", None, "m.input"),
        ] {
            assert_eq!(prices(input, output, cached).unwrap_err().field, field);
        }
    }

    proptest! {
        #[test]
        fn every_decimal_is_read_as_it_is_written(whole in 0_u64..18_000_000, fraction in 0_u64..1_000_000_000_000) {
            let text = format!("{whole}.{fraction:012}");
            prop_assert_eq!(spend(&text), Some(whole * 1_000_000_000_000 + fraction));
        }

        #[test]
        fn no_text_panics(text in ".*") {
            if let Some(units) = spend(&text) {
                let again = format!("{}.{:012}", units / 1_000_000_000_000, units % 1_000_000_000_000);
                prop_assert_eq!(spend(&again), Some(units));
            }
        }

        #[test]
        fn costs_add_up_over_turns(parts in prop::collection::vec((0_u64..1 << 20, 0_u64..1 << 20), 0..8)) {
            let prices = prices("1.234567", "3.000001", None).unwrap();
            let price = prices.get("m").unwrap();
            let each: u64 = parts.iter().map(|(i, o)| price.cost(&usage(*i, *o, 0))).sum();
            let input = parts.iter().map(|(i, _)| i).sum();
            let output = parts.iter().map(|(_, o)| o).sum();
            prop_assert_eq!(each, price.cost(&usage(input, output, 0)));
        }

        #[test]
        fn no_usage_overflows(input: u64, output: u64, cached: u64) {
            let prices = prices("18000000000000", "18000000000000", Some("0")).unwrap();
            let price = prices.get("m").unwrap();
            prop_assert!(price.cost(&usage(input, output, cached)) >= price.cost(&usage(0, output, 0)));
        }
    }
}
