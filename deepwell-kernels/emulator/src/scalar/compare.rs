//! Comparisons, selection and tests.

use super::half::Half;
use super::ieee::flush;
use super::registers::{LANES, Registers};
use super::rows::{test_longs, test_words};
use crate::decode::{
    Comparison, FloatTest, LogicOperation, PredicateSource, Register, Source, Type,
};

/// Combines two masks.
#[inline]
pub(super) fn combine(operation: LogicOperation, a: u32, b: u32) -> u32 {
    match operation {
        LogicOperation::And => a & b,
        LogicOperation::Or => a | b,
        LogicOperation::Xor => a ^ b,
    }
}

macro_rules! integers {
    ($registers:expr, $test:ident, $sources:expr, $comparison:expr, $convert:expr) => {{
        let convert = $convert;
        match $comparison {
            Comparison::Equal => $test($registers, $sources, |a, b| convert(a) == convert(b)),
            Comparison::NotEqual => $test($registers, $sources, |a, b| convert(a) != convert(b)),
            Comparison::Less => $test($registers, $sources, |a, b| convert(a) < convert(b)),
            Comparison::LessEqual => $test($registers, $sources, |a, b| convert(a) <= convert(b)),
            Comparison::Greater => $test($registers, $sources, |a, b| convert(a) > convert(b)),
            _ => $test($registers, $sources, |a, b| convert(a) >= convert(b)),
        }
    }};
}

/// Compares two floats.
#[inline(always)]
fn floats<T: PartialOrd>(comparison: Comparison, a: T, b: T) -> bool {
    use Comparison as C;
    // A value that differs from itself is NaN.
    #[allow(clippy::eq_op)]
    let unordered = a != a || b != b;
    match comparison {
        C::Equal => a == b,
        C::NotEqual => a != b && !unordered,
        C::Less => a < b,
        C::LessEqual => a <= b,
        C::Greater => a > b,
        C::GreaterEqual => a >= b,
        C::EqualOrNan => a == b || unordered,
        C::NotEqualOrNan => a != b,
        C::LessOrNan => a < b || unordered,
        C::LessEqualOrNan => a <= b || unordered,
        C::GreaterOrNan => a > b || unordered,
        C::GreaterEqualOrNan => a >= b || unordered,
        C::Ordered => !unordered,
        C::Unordered => unordered,
    }
}

fn half_of(value_type: Type) -> Half {
    if matches!(value_type, Type::F16 | Type::F16x2) { Half::F16 } else { Half::Bf16 }
}

/// Compares floats in all lanes; the comparison is chosen once for the row.
macro_rules! compare_floats {
    ($registers:expr, $test:ident, $sources:expr, $comparison:expr, $of:expr) => {{
        let of = $of;
        macro_rules! lanes {
            ($name:ident) => {
                $test($registers, $sources, |a, b| floats(Comparison::$name, of(a), of(b)))
            };
        }
        match $comparison {
            Comparison::Equal => lanes!(Equal),
            Comparison::NotEqual => lanes!(NotEqual),
            Comparison::Less => lanes!(Less),
            Comparison::LessEqual => lanes!(LessEqual),
            Comparison::Greater => lanes!(Greater),
            Comparison::GreaterEqual => lanes!(GreaterEqual),
            other => $test($registers, $sources, |a, b| floats(other, of(a), of(b))),
        }
    }};
}

/// Compares the halves at one bit position of words; `.ftz` exists for F16 only.
fn halves(
    registers: &Registers,
    sources: [Source; 2],
    comparison: Comparison,
    half: Half,
    flush_subnormals: bool,
    shift: u32,
) -> u32 {
    test_words(registers, sources, |a, b| {
        let of = |word: u32| {
            let code = (word >> shift) as u16;
            let small = flush_subnormals && code & half.infinity() == 0;
            half.value(if small { code & 0x8000 } else { code })
        };
        floats(comparison, of(a), of(b))
    })
}

/// Returns the mask of lanes in which a comparison holds; for packed types, of the low and the high
/// halves.
pub(super) fn compare(
    registers: &Registers,
    comparison: Comparison,
    value_type: Type,
    flush_subnormals: bool,
    s: [Source; 2],
) -> (u32, Option<u32>) {
    let one = match value_type {
        Type::F32 if flush_subnormals => {
            let of = |bits: u32| flush(f32::from_bits(bits));
            compare_floats!(registers, test_words, s, comparison, of)
        }
        Type::F32 => compare_floats!(registers, test_words, s, comparison, f32::from_bits),
        Type::F64 => compare_floats!(registers, test_longs, s, comparison, f64::from_bits),
        Type::F16 | Type::Bf16 | Type::F16x2 | Type::Bf16x2 => {
            let half = half_of(value_type);
            let low = halves(registers, s, comparison, half, flush_subnormals, 0);
            if matches!(value_type, Type::F16x2 | Type::Bf16x2) {
                let high = halves(registers, s, comparison, half, flush_subnormals, 16);
                return (low, Some(high));
            }
            low
        }
        _ => match (value_type.bits(), value_type.is_signed()) {
            (64, true) => integers!(registers, test_longs, s, comparison, |a: u64| a as i64),
            (64, false) => integers!(registers, test_longs, s, comparison, |a: u64| a),
            (32, true) => integers!(registers, test_words, s, comparison, |a: u32| a as i32),
            (32, false) => integers!(registers, test_words, s, comparison, |a: u32| a),
            (_, true) => integers!(registers, test_words, s, comparison, |a: u32| a as u16 as i16),
            (_, false) => integers!(registers, test_words, s, comparison, |a: u32| a as u16),
        },
    };
    (one, None)
}

/// `set`.
pub(super) fn set(
    registers: &mut Registers,
    mask: u32,
    result_type: Type,
    packed_source: bool,
    (low, high): (u32, Option<u32>),
    destination: Register,
) {
    let yes: u32 = match result_type {
        Type::F32 => 0x3f80_0000,
        Type::F16 | Type::F16x2 => 0x3c00,
        Type::Bf16 | Type::Bf16x2 => 0x3f80,
        _ if packed_source => 0xffff,
        _ => u32::MAX,
    };
    let out: [u32; LANES] = std::array::from_fn(|lane| {
        let low = (low >> lane & 1) * yes;
        match high {
            Some(high) => low | ((high >> lane & 1) * yes) << 16,
            None => low,
        }
    });
    registers.set_row32(destination, &out, mask);
}

/// `selp`.
pub(super) fn select(
    registers: &mut Registers,
    mask: u32,
    destination: Register,
    a: Source,
    b: Source,
    predicate: PredicateSource,
) {
    let chosen = registers.predicate(predicate);
    if let Register::Long(_) = destination {
        let (a, b) = (registers.row64(a), registers.row64(b));
        let out: [u64; LANES] =
            std::array::from_fn(|lane| if chosen >> lane & 1 == 1 { a[lane] } else { b[lane] });
        registers.set_row64(destination, &out, mask);
    } else {
        let (a, b) = (registers.row32(a), registers.row32(b));
        let out: [u32; LANES] =
            std::array::from_fn(|lane| if chosen >> lane & 1 == 1 { a[lane] } else { b[lane] });
        registers.set_row32(destination, &out, mask);
    }
}

/// `testp`.
pub(super) fn test(registers: &Registers, test: FloatTest, value_type: Type, a: Source) -> u32 {
    let of = |value: f64, subnormal: bool| match test {
        FloatTest::Finite => value.is_finite(),
        FloatTest::Infinite => value.is_infinite(),
        FloatTest::Number => !value.is_nan(),
        FloatTest::NotANumber => value.is_nan(),
        FloatTest::Normal => value.is_finite() && value != 0.0 && !subnormal,
        FloatTest::Subnormal => subnormal,
    };
    if value_type == Type::F64 {
        test_longs(registers, [a, a], |a, _| {
            let value = f64::from_bits(a);
            of(value, value.is_subnormal())
        })
    } else {
        test_words(registers, [a, a], |a, _| {
            let value = f32::from_bits(a);
            of(f64::from(value), value.is_subnormal())
        })
    }
}
