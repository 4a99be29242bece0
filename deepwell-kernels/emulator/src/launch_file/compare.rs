//! Results beside their references.

use super::data_type::DataType;
use super::file::{Tolerance, Within};

/// One expectation and what came.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// What was compared.
    pub name: String,
    /// Elements in it.
    pub elements: usize,
    /// Elements that are not near enough.
    pub wrong: usize,
    /// The first of them.
    pub first: Option<Difference>,
    /// Whether it was compared at all: a tolerance may be `"any"`.
    pub compared: bool,
}

/// An element that is not what was expected.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Its position.
    pub element: usize,
    /// What came.
    pub got: f64,
    /// What should have come.
    pub expected: f64,
    /// The bits of both, in hexadecimal.
    pub bits: [String; 2],
}

/// Compares elements of a type.
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

/// Bits as a number is written, the most significant first.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().rev().fold("0x".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}
