//! The interpolator, the hardware unit for approximate functions, of an H200.
//!
//! The upper bits of the reduced argument select three coefficients. The result is `constant +
//! linear * x + square * x^2` of the lower bits `x`, in fixed point. Products are exact. The square
//! of a 16-bit fraction omits all partial products of two bits below 2^-15. A constant is then
//! added and the sum is truncated.
//!
//! Coefficients and constants were derived from an H200's results for all arguments of a binade.
//! The tests compare checksums of its results for all 2^32 arguments. Other GPUs may give other
//! bits.

use super::interpolator_tables::{
    Coefficients, EXPONENTIAL, HYPERBOLIC_TANGENT, INVERSE_ROOT_EVEN, INVERSE_ROOT_ODD, LOGARITHM,
    RECIPROCAL, ROOT_EVEN, ROOT_ODD, SINE,
};

const NAN: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;
const SIGN: u32 = 1 << 31;
const ONE: u32 = 0x3f80_0000;
/// Fraction bits of a float.
const FRACTION: u32 = 0x7f_ffff;

/// Layout of a float in a word.
struct Format {
    exponent_bias: i32,
    /// Fraction bits, of a float's 23, that the word lacks.
    missing_bits: u32,
    infinity: u32,
}

const FLOAT: Format = Format { exponent_bias: 127, missing_bits: 0, infinity: INFINITY };
/// The upper half of a binary64 number: results of the same unit, truncated to 21 bits.
const UPPER_HALF: Format = Format { exponent_bias: 1023, missing_bits: 3, infinity: 0x7ff0_0000 };

impl Format {
    /// Splits into sign, magnitude, biased exponent, and fraction scaled to 23 bits.
    #[inline]
    fn parts(&self, bits: u32) -> (u32, u32, i32, u32) {
        let (sign, magnitude) = (bits & SIGN, bits & !SIGN);
        let exponent = (magnitude >> (23 - self.missing_bits)) as i32;
        (sign, magnitude, exponent, magnitude << self.missing_bits & FRACTION)
    }

    /// Builds a number from a 24-bit significand and a biased exponent. Subnormal results become
    /// zero, overflows infinity.
    #[inline]
    fn number(&self, sign: u32, exponent: i32, significand: u32) -> u32 {
        let magnitude = if exponent <= 0 {
            0
        } else if exponent <= 2 * self.exponent_bias {
            let bits = ((exponent as u64) << 23) + u64::from(significand & FRACTION);
            (bits >> self.missing_bits) as u32
        } else {
            self.infinity
        };
        sign | magnitude
    }
}

/// Fixed-point scales of a polynomial.
struct Layout {
    /// Bits of the argument below the selecting bits.
    low_bits: u32,
    /// Left shift of the constant, relative to the last bit of the sum.
    constant_shift: u32,
    /// Left shift of the square term.
    square_shift: u32,
    /// Added before the sum is truncated.
    bias: i64,
    /// Number of truncated bits.
    cut: u32,
}

const RECIPROCAL_LAYOUT: Layout =
    Layout { low_bits: 16, constant_shift: 13, square_shift: 0, bias: 2023, cut: 15 };
const INVERSE_ROOT_LAYOUT: Layout =
    Layout { low_bits: 17, constant_shift: 14, square_shift: 2, bias: 16_383, cut: 16 };
const ROOT_LAYOUT: Layout =
    Layout { low_bits: 17, constant_shift: 15, square_shift: 1, bias: 32_767, cut: 17 };
const EXPONENTIAL_LAYOUT: Layout =
    Layout { low_bits: 17, constant_shift: 13, square_shift: 0, bias: 6_114, cut: 15 };
const LOGARITHM_LAYOUT: Layout =
    Layout { low_bits: 17, constant_shift: 12, square_shift: 1, bias: 837, cut: 2 };
const SINE_LAYOUT: Layout =
    Layout { low_bits: 17, constant_shift: 12, square_shift: 0, bias: 0, cut: 0 };
const HYPERBOLIC_TANGENT_LAYOUT: Layout =
    Layout { low_bits: 17, constant_shift: 15, square_shift: 1, bias: 0, cut: 0 };

/// For arguments from 2^-8 to 8, by exponent: the first part, and the number of dropped low bits.
const HYPERBOLIC_TANGENT_PARTS: [(u32, u32); 11] =
    [(0, 6), (1, 6), (2, 6), (3, 5), (5, 5), (7, 4), (11, 4), (15, 4), (19, 3), (27, 2), (43, 3)];

/// The square of 16 bits divided by 2^17, without partial products that weigh less than one.
#[inline]
fn truncated_square(x: u32) -> u32 {
    let (high, low) = (x >> 8, x & 0xff);
    // In the square of the upper half, only the last bit's own square is dropped. Products of a bit
    // of the upper and a bit of the lower half are kept if their places add up to 16 or more.
    let mut sum = (high * high - (high & 1)) >> 1;
    for place in 1..8 {
        sum += (high >> (8 - place) & 1) * (low >> place);
    }
    sum
}

impl Layout {
    #[inline]
    fn sum<const PARTS: usize>(&self, table: &Coefficients<PARTS>, argument: u32) -> i64 {
        let part = (argument >> self.low_bits) as usize % PARTS;
        let low = argument & ((1 << self.low_bits) - 1);
        let square = truncated_square(low >> (self.low_bits - 16));
        let sum = (i64::from(table.constant[part]) << self.constant_shift)
            + i64::from(table.linear[part]) * i64::from(low)
            + ((i64::from(table.square[part]) * i64::from(square)) << self.square_shift);
        (sum + self.bias) >> self.cut
    }
}

/// Returns the magnitude, zero for subnormal numbers.
#[inline]
fn magnitude(bits: u32) -> u32 {
    if bits & INFINITY == 0 { 0 } else { bits & !SIGN }
}

/// Converts a fixed-point number with `fraction_bits` fraction bits to a float, truncating.
#[inline]
fn from_fixed(sign: u32, value: u64, fraction_bits: i32) -> u32 {
    if value == 0 {
        return sign;
    }
    let length = 63 - value.leading_zeros() as i32;
    let significand = if length >= 23 { value >> (length - 23) } else { value << (23 - length) };
    FLOAT.number(sign, length - fraction_bits + 127, significand as u32)
}

/// Reciprocal of a number in (1, 2): 24 bits of a significand in [1/2, 1).
#[inline]
fn reciprocal_significand(fraction: u32) -> u32 {
    RECIPROCAL_LAYOUT.sum(&RECIPROCAL, fraction) as u32
}

/// Reciprocal square root of a number in (1, 2), or in [2, 4) if the exponent is odd.
#[inline]
fn inverse_root_significand(is_odd: bool, fraction: u32) -> u32 {
    let table = if is_odd { &INVERSE_ROOT_ODD } else { &INVERSE_ROOT_EVEN };
    INVERSE_ROOT_LAYOUT.sum(table, fraction) as u32
}

/// `1 / x`.
#[inline]
pub(super) fn reciprocal(bits: u32) -> u32 {
    reciprocal_of(&FLOAT, bits)
}

/// `1 / x` of the upper half of a binary64 number.
pub(super) fn reciprocal_high(word: u32) -> u32 {
    reciprocal_of(&UPPER_HALF, word)
}

/// `1 / sqrt(x)`.
#[inline]
pub(super) fn inverse_root(bits: u32) -> u32 {
    inverse_root_of(&FLOAT, bits)
}

/// `1 / sqrt(x)` of the upper half of a binary64 number.
pub(super) fn inverse_root_high(word: u32) -> u32 {
    inverse_root_of(&UPPER_HALF, word)
}

#[inline]
fn reciprocal_of(format: &Format, bits: u32) -> u32 {
    let (sign, magnitude, exponent, fraction) = format.parts(bits);
    if magnitude > format.infinity {
        NAN
    } else if exponent == 0 {
        sign | format.infinity
    } else if magnitude == format.infinity {
        sign
    } else if fraction == 0 {
        format.number(sign, 2 * format.exponent_bias - exponent, 0)
    } else {
        let exponent = 2 * format.exponent_bias - 1 - exponent;
        format.number(sign, exponent, reciprocal_significand(fraction))
    }
}

#[inline]
fn inverse_root_of(format: &Format, bits: u32) -> u32 {
    let (sign, magnitude, exponent, fraction) = format.parts(bits);
    if magnitude > format.infinity {
        NAN
    } else if exponent == 0 {
        sign | format.infinity
    } else if sign != 0 {
        NAN
    } else if magnitude == format.infinity {
        0
    } else {
        let half = (exponent - format.exponent_bias) >> 1;
        let is_odd = exponent % 2 == 0;
        if fraction == 0 && !is_odd {
            return format.number(0, format.exponent_bias - half, 0);
        }
        let significand = inverse_root_significand(is_odd, fraction);
        format.number(0, format.exponent_bias - 1 - half, significand)
    }
}

/// `sqrt(x)`.
#[inline]
pub(super) fn root(bits: u32) -> u32 {
    let (sign, magnitude) = (bits & SIGN, magnitude(bits));
    let (exponent, fraction) = ((magnitude >> 23) as i32, magnitude & FRACTION);
    if magnitude == 0 {
        sign
    } else if magnitude > INFINITY || sign != 0 {
        NAN
    } else if magnitude == INFINITY {
        INFINITY
    } else {
        let table = if exponent % 2 == 0 { &ROOT_ODD } else { &ROOT_EVEN };
        FLOAT.number(0, 127 + ((exponent - 127) >> 1), ROOT_LAYOUT.sum(table, fraction) as u32)
    }
}

/// `2^x`.
#[inline]
pub(super) fn exponential2(bits: u32) -> u32 {
    let magnitude = magnitude(bits);
    let exponent = (magnitude >> 23) as i32;
    let is_negative = bits & SIGN != 0;
    if magnitude > INFINITY {
        return NAN;
    }
    if exponent >= 127 + 8 {
        return if is_negative { 0 } else { INFINITY };
    }
    // Fixed point with 23 fraction bits; lower bits are truncated.
    let significand = magnitude & FRACTION | 1 << 23;
    let shift = exponent - 127;
    let fixed = match shift {
        0.. => significand << shift,
        -24..0 => significand >> -shift,
        _ => 0,
    };
    // Negative numbers are complemented, except integers (after truncation).
    let is_whole = fixed & FRACTION == 0;
    let fixed = match (is_negative, is_whole) {
        (false, _) => fixed as i32,
        (true, true) => -(fixed as i32),
        (true, false) => !(fixed as i32),
    };
    let sum = EXPONENTIAL_LAYOUT.sum(&EXPONENTIAL, fixed as u32 & FRACTION);
    FLOAT.number(0, (fixed >> 23) + 127, sum as u32)
}

/// Binary logarithm.
#[inline]
pub(super) fn logarithm2(bits: u32) -> u32 {
    let (sign, magnitude) = (bits & SIGN, magnitude(bits));
    if magnitude == 0 {
        return SIGN | INFINITY;
    } else if magnitude > INFINITY || sign != 0 {
        return NAN;
    } else if magnitude == INFINITY {
        return INFINITY;
    } else if magnitude == ONE {
        return 0;
    }
    let exponent = i64::from(magnitude >> 23) - 127;
    let value = (exponent << 36) + LOGARITHM_LAYOUT.sum(&LOGARITHM, magnitude & FRACTION);
    // A negative value is complemented.
    if value < 0 { from_fixed(SIGN, !value as u64, 36) } else { from_fixed(0, value as u64, 36) }
}

/// Returns quarters of a revolution, and a 23-bit fraction of a quarter.
#[inline]
fn revolutions(magnitude: u32) -> (u32, u32) {
    let significand = u64::from(magnitude & FRACTION | 1 << 23);
    // Fixed point with 25 fraction bits. Lower bits and whole revolutions are dropped.
    let fixed = match (magnitude >> 23) as i32 - 125 {
        shift @ 0..40 => significand << shift,
        shift @ -24..0 => significand >> -shift,
        _ => 0,
    };
    (fixed as u32 >> 23 & 3, fixed as u32 & FRACTION)
}

/// Sine within the first quarter, truncated.
#[inline]
fn quarter(sign: u32, fraction: u32) -> u32 {
    from_fixed(sign, SINE_LAYOUT.sum(&SINE, fraction) as u64, 37)
}

/// Sine of an angle in revolutions.
#[inline]
pub(super) fn sine(bits: u32) -> u32 {
    let (sign, magnitude) = (bits & SIGN, magnitude(bits));
    if magnitude >= INFINITY {
        return NAN;
    }
    let (quarters, fraction) = revolutions(magnitude);
    let sign = sign ^ quarters >> 1 << 31;
    quarter(sign, if quarters & 1 == 0 { fraction } else { FRACTION - fraction })
}

/// Cosine of an angle in revolutions.
#[inline]
pub(super) fn cosine(bits: u32) -> u32 {
    let magnitude = magnitude(bits);
    if magnitude >= INFINITY {
        return NAN;
    }
    let (quarters, fraction) = revolutions(magnitude);
    let sign = (quarters + 1) >> 1 << 31;
    quarter(sign, if quarters & 1 == 0 { FRACTION - fraction } else { fraction })
}

/// Hyperbolic tangent. Small arguments, also subnormal ones, are returned unchanged.
#[inline]
pub(super) fn hyperbolic_tangent(bits: u32) -> u32 {
    let (sign, magnitude) = (bits & SIGN, bits & !SIGN);
    let exponent = (magnitude >> 23) as i32 - 127;
    if magnitude > INFINITY {
        NAN
    } else if exponent < -8 {
        bits
    } else if exponent >= 3 {
        sign | ONE
    } else {
        let (first, left_out) = HYPERBOLIC_TANGENT_PARTS[(exponent + 8) as usize];
        let argument = (first << 17) + ((magnitude & FRACTION) >> left_out);
        let sum = HYPERBOLIC_TANGENT_LAYOUT.sum(&HYPERBOLIC_TANGENT, argument);
        from_fixed(sign, sum as u64, 38 - exponent.min(-1))
    }
}
