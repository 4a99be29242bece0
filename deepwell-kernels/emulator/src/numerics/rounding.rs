//! Conversion of accumulators to terms, and of sums to accumulators.

use super::element::power_of_two;
use super::panel::BLOCK;
use crate::number::{Format, Rounding, decode, encode_f64};

/// NaN of binary32 sums.
pub(super) const NAN: u32 = 0x7fff_ffff;
/// NaN of binary16 sums.
pub(super) const NAN_HALF: u32 = 0x7fff;
/// Exponent of a zero accumulator, below all others, so that zero never sets the largest exponent.
pub(super) const ZERO_EXPONENT: i32 = -16_384;

/// A block of accumulators, as terms of sums.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accumulated {
    pub(super) values: [f32; BLOCK],
    /// Exponent of the leading bit, at least the format's least exponent; [`ZERO_EXPONENT`] for
    /// zero.
    pub(super) exponents: [i32; BLOCK],
    /// No accumulator is infinite or NaN.
    pub(super) finite: bool,
}

impl Accumulated {
    #[inline(always)]
    pub(super) fn new<const HALF: bool>(bits: &[u32; BLOCK]) -> Accumulated {
        let (mantissa_bits, bias, field_max) = if HALF { (10, 15, 31) } else { (23, 127, 255) };
        let mut exponents = [0; BLOCK];
        let mut special = 0;
        for (exponent, &bits) in exponents.iter_mut().zip(bits) {
            let field = bits >> mantissa_bits & field_max;
            special |= u32::from(field == field_max);
            let sign = if HALF { 1 << 15 } else { 1 << 31 };
            let zero = bits & (sign - 1) == 0;
            *exponent = if zero { ZERO_EXPONENT } else { field.max(1) as i32 - bias };
        }
        let values = if HALF {
            bits.map(|bits| decode(Format::F16, bits))
        } else {
            bits.map(f32::from_bits)
        };
        Accumulated { values, exponents, finite: special == 0 }
    }

    #[inline(always)]
    pub(super) fn exponent_max(&self) -> i32 {
        self.exponents.iter().fold(ZERO_EXPONENT, |largest, &exponent| largest.max(exponent))
    }

    /// Returns the least exponent of a last set bit; far above every other exponent if all are
    /// zero.
    #[inline(always)]
    pub(super) fn last_min<const HALF: bool>(&self, bits: &[u32; BLOCK]) -> i32 {
        let mantissa_bits = if HALF { 10 } else { 23 };
        let mut least = i32::MAX;
        for (&bits, &exponent) in bits.iter().zip(&self.exponents) {
            // A mantissa of zero has trailing zeros up to the implicit bit.
            let zeros = (bits | 1 << mantissa_bits).trailing_zeros() as i32;
            let last = exponent - mantissa_bits + zeros;
            least = least.min(if last < -8192 { i32::MAX } else { last });
        }
        least
    }
}

/// Rounds sums like the hardware. Binary16: to nearest, ties to even. Binary32: toward zero, but to
/// infinity beyond the range. A sum that is zero, also after rounding, is positive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounder {
    mantissa_bits: u32,
    /// Mask of the kept bits of a binary64.
    mask: u64,
}

impl Rounder {
    /// Creates a rounder for binary32 with `mantissa_bits` bits, at most 23. Binary16 has its own
    /// width.
    pub(super) fn new(mantissa_bits: u32) -> Rounder {
        Rounder { mantissa_bits, mask: u64::MAX << (52 - mantissa_bits) }
    }

    #[inline(always)]
    pub(super) fn round<const HALF: bool>(&self, sums: &[f64; BLOCK], bits: &mut [u32; BLOCK]) {
        if HALF {
            *bits = sums.map(round_half);
            return;
        }
        let mut aside = 0;
        for lane in 0..BLOCK {
            let sum = sums[lane];
            let magnitude = sum.abs();
            // False for subnormal results and NaN.
            let normal = magnitude >= f64::from(f32::MIN_POSITIVE);
            aside |= u32::from(!(normal | (magnitude == 0.0)));
            let cut = f64::from_bits(sum.to_bits() & self.mask) as f32;
            bits[lane] = (cut + 0.0).to_bits();
        }
        if aside != 0 {
            *bits = sums.map(|sum| round_toward_zero(sum, self.mantissa_bits));
        }
    }
}

#[inline(always)]
fn round_half(sum: f64) -> u32 {
    let bits = sum.to_bits();
    let field = bits >> 52 & 0x7ff;
    if field.wrapping_sub(1023 - 14) < 29 {
        // Keeps 10 of 52 mantissa bits. A carry correctly increments the exponent, up to infinity.
        let magnitude = bits & (u64::MAX >> 1);
        let rounded = (magnitude + (1 << 41) - 1 + (magnitude >> 42 & 1)) >> 42;
        return (rounded - ((1023 - 15) << 10)) as u32 | (bits >> 63 << 15) as u32;
    }
    let bits = encode_f64(Format::F16, sum, Rounding::NearestEven, false, false);
    if bits == 0x8000 { 0 } else { bits }
}

/// Rounds toward zero to binary32 with at most 23 mantissa bits.
pub(super) fn round_toward_zero(sum: f64, mantissa_bits: u32) -> u32 {
    if sum.is_nan() {
        return NAN;
    }
    if sum.abs() < f64::from(f32::MIN_POSITIVE) {
        // Truncates at the bit weight of the least normal number.
        let steps = truncate(sum * power_of_two(126 + mantissa_bits as i32));
        let rounded = (steps * power_of_two(-126 - mantissa_bits as i32)) as f32;
        return (rounded + 0.0).to_bits();
    }
    let cut = f64::from_bits(sum.to_bits() & (u64::MAX << (52 - mantissa_bits)));
    (cut as f32).to_bits()
}

/// Truncates magnitudes below 2^63. (`f64::trunc` is a function call on baseline x86-64.)
#[inline(always)]
pub(super) fn truncate(value: f64) -> f64 {
    (value as i64) as f64
}
