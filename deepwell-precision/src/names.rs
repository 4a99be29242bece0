//! Enums with one name per variant, for files, flags and messages.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use thiserror::Error;

/// A name that matches no variant.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected one of {expected} as {kind}, got `{got}`")]
#[non_exhaustive]
pub struct UnknownName {
    /// Kind of the name, such as "scale rule".
    pub kind: &'static str,
    /// The unknown name.
    pub got: String,
    /// The valid names, each in backticks.
    pub expected: String,
}

impl UnknownName {
    pub(crate) fn new(kind: &'static str, got: &str, names: &[&str]) -> Self {
        let expected: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        Self { kind, got: got.to_owned(), expected: expected.join(", ") }
    }
}

/// Declares a fieldless enum with `ALL`, `name`, `Display`, `FromStr`, and serde through the names.
macro_rules! named_enum {
    (
        $(#[$attribute:meta])*
        pub enum $type:ident ($kind:literal) {
            $( $(#[$variant_attribute:meta])* $variant:ident = $name:literal, )+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[derive(serde::Serialize, serde::Deserialize)]
        #[serde(into = "&'static str", try_from = "alloc::borrow::Cow<'_, str>")]
        pub enum $type {
            $( $(#[$variant_attribute])* $variant, )+
        }

        impl $type {
            /// All variants, in the order of declaration.
            pub const ALL: &'static [Self] = &[$( Self::$variant, )+];

            /// Name of this variant in files, flags and messages.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }
        }

        impl core::fmt::Display for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.pad(self.name())
            }
        }

        impl core::str::FromStr for $type {
            type Err = $crate::UnknownName;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $( $name => Ok(Self::$variant), )+
                    _ => Err($crate::UnknownName::new($kind, text, &[$( $name, )+])),
                }
            }
        }

        impl From<$type> for &'static str {
            fn from(value: $type) -> Self {
                value.name()
            }
        }

        impl TryFrom<alloc::borrow::Cow<'_, str>> for $type {
            type Error = $crate::UnknownName;

            fn try_from(text: alloc::borrow::Cow<'_, str>) -> Result<Self, Self::Error> {
                text.parse()
            }
        }
    };
}
pub(crate) use named_enum;
