//! Closed word lists. A label, code or state is an enum; free text can only arrive as a parse failure.

/// A closed list of words, as a metric family sees it.
pub trait Label: Copy + 'static {
    /// Every word, in index order.
    const ALL: &'static [Self];
    /// The place of this word in `ALL`.
    fn index(self) -> usize;
    /// The word.
    fn word(self) -> &'static str;
}

/// Declares a closed list of words: the enum, its one total `as_str`, `ALL` for zero-filling metrics,
/// strict parsing, and serde as the word.
#[macro_export]
macro_rules! label_enum {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$vmeta:meta])* $variant:ident => $word:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $vis enum $name { $($(#[$vmeta])* $variant),+ }

        impl $name {
            /// Every word of the list, in declaration order.
            $vis const ALL: &'static [$name] = &[$($name::$variant),+];

            /// The word, as in labels, logs and on the wire.
            $vis const fn as_str(self) -> &'static str {
                match self { $($name::$variant => $word),+ }
            }

            /// The value of a word of the list.
            $vis fn parse(word: &str) -> Option<Self> {
                match word { $($word => Some($name::$variant),)+ _ => None }
            }
        }

        impl $crate::label::Label for $name {
            const ALL: &'static [Self] = Self::ALL;
            fn index(self) -> usize {
                self as usize
            }
            fn word(self) -> &'static str {
                self.as_str()
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl ::serde::Serialize for $name {
            fn serialize<S: ::serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(self.as_str())
            }
        }

        impl<'de> ::serde::Deserialize<'de> for $name {
            fn deserialize<D: ::serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let word = <::std::borrow::Cow<'de, str> as ::serde::Deserialize>::deserialize(d)?;
                $name::parse(&word).ok_or_else(|| ::serde::de::Error::unknown_variant(&word, &[$($word),+]))
            }
        }
    };
}

#[cfg(test)]
mod tests {
    label_enum! {
        /// Two words.
        enum Pair { One => "one", Two => "two" }
    }

    #[test]
    fn words_round_trip_and_strangers_are_refused() {
        for p in Pair::ALL {
            assert_eq!(Pair::parse(p.as_str()), Some(*p));
            assert_eq!(serde_json::to_string(p).unwrap(), format!("\"{p}\""));
        }
        assert_eq!(Pair::parse("three"), None);
        assert!(serde_json::from_str::<Pair>("\"three\"").is_err());
    }
}
