//! Serde for f64 including numbers that JSON lacks.
//!
//! Finite numbers are JSON numbers. The others are the strings `"NaN"`, `"inf"` and `"-inf"`, which
//! Python's `float()` reads too; `serde_json` alone would write `null` and fail to read it back.
//! Usage: `#[serde(with = "deepwell_metrics::nonfinite")]`.

use serde::de::{Deserializer, Error, Unexpected};
use serde::{Deserialize, Serializer};

/// Writes a number, or a string if it is not finite.
///
/// # Errors
///
/// Errors of the serializer.
pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() {
        serializer.serialize_f64(*value)
    } else {
        serializer.serialize_str(&value.to_string())
    }
}

/// Reads a number written by [`serialize`].
///
/// # Errors
///
/// The value is neither a number nor one of the three strings.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Number {
        Finite(f64),
        Text(String),
    }
    match Number::deserialize(deserializer)? {
        Number::Finite(value) => Ok(value),
        Number::Text(text) => match text.as_str() {
            "NaN" => Ok(f64::NAN),
            "inf" => Ok(f64::INFINITY),
            "-inf" => Ok(f64::NEG_INFINITY),
            other => {
                Err(D::Error::invalid_value(Unexpected::Str(other), &"a number, NaN, inf or -inf"))
            }
        },
    }
}

/// Serde for `Option<f64>` including numbers that JSON lacks. Omit `None` when writing
/// (`skip_serializing_if`, `default`): then a missing key means that no number exists, and the
/// string `"NaN"` means a number that is not finite.
pub mod option {
    use serde::de::Deserializer;
    use serde::{Deserialize, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Number(#[serde(with = "super")] f64);

    /// Writes the number like [`super::serialize`].
    ///
    /// # Errors
    ///
    /// Errors of the serializer.
    pub fn serialize<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(Number).serialize(serializer)
    }

    /// Reads a number written by [`serialize`]. Earlier versions wrote `null` for NaN.
    ///
    /// # Errors
    ///
    /// As [`super::deserialize`].
    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<f64>, D::Error> {
        let number = Option::<Number>::deserialize(deserializer)?;
        Ok(Some(number.map_or(f64::NAN, |number| number.0)))
    }
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    #[derive(Serialize, Deserialize)]
    struct Wrap(#[serde(with = "super")] f64);

    #[derive(Serialize, Deserialize)]
    struct Maybe {
        #[serde(with = "super::option", skip_serializing_if = "Option::is_none", default)]
        loss: Option<f64>,
    }

    #[test]
    fn a_missing_number_is_not_one_that_is_not_finite() {
        let check = |json: &str, expected: Option<f64>, again: &str| {
            let read: Maybe = serde_json::from_str(json).unwrap();
            assert_eq!(read.loss.map(f64::to_bits), expected.map(f64::to_bits), "{json}");
            assert_eq!(serde_json::to_string(&read).unwrap(), again);
        };
        check("{}", None, "{}");
        check(r#"{"loss":2.5}"#, Some(2.5), r#"{"loss":2.5}"#);
        check(r#"{"loss":"NaN"}"#, Some(f64::NAN), r#"{"loss":"NaN"}"#);
        check(r#"{"loss":"-inf"}"#, Some(f64::NEG_INFINITY), r#"{"loss":"-inf"}"#);
        check(r#"{"loss":null}"#, Some(f64::NAN), r#"{"loss":"NaN"}"#);
        assert!(serde_json::from_str::<Maybe>(r#"{"loss":"many"}"#).is_err());
    }

    #[test]
    fn round_trips() {
        for (value, json) in [
            (2.5, "2.5"),
            (f64::NAN, "\"NaN\""),
            (f64::INFINITY, "\"inf\""),
            (f64::NEG_INFINITY, "\"-inf\""),
        ] {
            assert_eq!(serde_json::to_string(&Wrap(value)).unwrap(), json);
            let back: Wrap = serde_json::from_str(json).unwrap();
            assert_eq!(back.0.to_bits(), value.to_bits());
        }
        assert!(serde_json::from_str::<Wrap>("\"many\"").is_err());
        assert!(serde_json::from_str::<Wrap>("null").is_err());
    }
}
