//! Comparison of results with reference data.

use super::data_type::DataType;
use super::file::{Tolerance, Within};

/// Result of comparing one expectation.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Name of the compared data.
    pub name: String,
    /// Number of elements.
    pub elements: usize,
    /// Number of elements outside of the tolerance.
    pub wrong: usize,
    /// The first such element.
    pub first: Option<Difference>,
    /// Whether the data were compared; a tolerance may be `"any"`.
    pub compared: bool,
}

/// An element outside of the tolerance.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Index of the element.
    pub element: usize,
    /// Actual value.
    pub got: f64,
    /// Expected value.
    pub expected: f64,
    /// Bits of the actual and the expected value, in hexadecimal.
    pub bits: [String; 2],
}

/// Compares elements of one type.
pub(super) fn compare(
    name: &str,
    dtype: DataType,
    got: &[u8],
    expected: &[u8],
    tolerance: Tolerance,
) -> Comparison {
    let size = dtype.bytes();
    let pairs = || got.chunks(size).zip(expected.chunks(size)).enumerate();
    let mut comparison = Comparison {
        name: name.to_owned(),
        elements: expected.len().div_ceil(size),
        wrong: 0,
        first: None,
        compared: tolerance != Tolerance::Any,
    };
    let value = |bytes: &[u8]| dtype.decode(bytes);
    let largest = match tolerance {
        Tolerance::Within(_) => expected
            .chunks(size)
            .map(|bytes| value(bytes).abs())
            .filter(|value| value.is_finite())
            .fold(0.0, f64::max),
        _ => 0.0,
    };
    for (element, (got, expected)) in pairs() {
        let is_near = match tolerance {
            Tolerance::Any => true,
            Tolerance::Bits => got == expected,
            Tolerance::Within(within) => {
                got == expected || is_near(value(got), value(expected), within, largest)
            }
        };
        if !is_near {
            comparison.wrong += 1;
            comparison.first.get_or_insert_with(|| Difference {
                element,
                got: value(got),
                expected: value(expected),
                bits: [hex(got), hex(expected)],
            });
        }
    }
    comparison
}

fn is_near(got: f64, expected: f64, within: Within, largest: f64) -> bool {
    if got == expected || got.is_nan() && expected.is_nan() {
        return true;
    }
    let allowed = within.absolute + within.relative * expected.abs() + within.largest * largest;
    (got - expected).abs() <= allowed
}

/// Formats bytes as a hexadecimal number, the most significant byte first.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().rev().fold("0x".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}
