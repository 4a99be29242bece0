//! The accumulator as a term, and sums as the accumulator.

use super::element::power_of_two;
use crate::number::{Format, Rounding, decode, encode_f64};

/// The NaN that sums give.
pub(super) const NAN: u32 = 0x7fff_ffff;
/// The NaN that sums in binary16 give.
pub(super) const NAN_HALF: u32 = 0x7fff;

/// The exponent of a zero accumulator, below all others.
const ZERO: i32 = -8192;

/// The accumulator as a term of the sum.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Accumulated {
    pub(super) value: f32,
    /// [`ZERO`] for zero, which has no part in the largest exponent.
    pub(super) exponent: i32,
    /// The exponent of the last bit that is set, far above all others for zero.
    pub(super) last: i32,
    pub(super) finite: bool,
}

impl Accumulated {
    #[inline(always)]
    pub(super) fn new<const HALF: bool>(bits: u32) -> Accumulated {
        let (value, exponent, significand, finite) = if HALF {
            let field = (bits >> 10 & 31) as i32;
            let significand = bits & 0x3ff | u32::from(field != 0) << 10;
            (decode(Format::F16, bits), field.max(1) - 15, significand << 13, field != 31)
        } else {
            let field = (bits >> 23 & 255) as i32;
            let significand = bits & 0x7f_ffff | u32::from(field != 0) << 23;
            (f32::from_bits(bits), field.max(1) - 127, significand, field != 255)
        };
        if significand == 0 {
            return Accumulated { value, exponent: ZERO, last: 8192, finite };
        }
        let last = exponent - 23 + significand.trailing_zeros() as i32;
        Accumulated { value, exponent, last, finite }
    }
}

/// The bits of a sum as the hardware rounds it: to binary16 to the nearest, ties to even; to
/// binary32 toward zero, but to infinity beyond the range. A sum of zero is positive, also where
/// rounding made it.
#[inline(always)]
pub(super) fn round<const HALF: bool>(sum: f64, mantissa_bits: u32) -> u32 {
    if HALF { round_half(sum) } else { round_toward_zero(sum, mantissa_bits) }
}

fn round_half(sum: f64) -> u32 {
    let bits = encode_f64(Format::F16, sum, Rounding::NearestEven, false, false);
    if bits == 0x8000 { 0 } else { bits }
}

/// To binary32 with at most 23 mantissa bits.
#[inline(always)]
pub(super) fn round_toward_zero(sum: f64, mantissa_bits: u32) -> u32 {
    let magnitude = sum.abs();
    if magnitude >= f64::from(f32::MIN_POSITIVE) || magnitude == 0.0 {
        let cut = f64::from_bits(sum.to_bits() & (u64::MAX << (52 - mantissa_bits)));
        return (cut as f32 + 0.0).to_bits();
    }
    if sum.is_nan() { NAN } else { round_subnormal(sum, mantissa_bits) }
}

/// What is below the least normal number is cut where that is.
#[cold]
fn round_subnormal(sum: f64, mantissa_bits: u32) -> u32 {
    let steps = truncate(sum * power_of_two(126 + mantissa_bits as i32));
    let rounded = (steps * power_of_two(-126 - mantissa_bits as i32)) as f32;
    (rounded + 0.0).to_bits()
}

/// Toward zero, for magnitudes below 2^63. (`f64::trunc` is a call on the oldest x86-64.)
#[inline(always)]
pub(super) fn truncate(value: f64) -> f64 {
    (value as i64) as f64
}
