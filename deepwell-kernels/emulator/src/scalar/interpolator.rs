//! The unit for approximate functions, as an H200 has it.
//!
//! It takes the upper bits of a reduced argument to choose three coefficients, and gives
//! `constant + linear * x + square * x^2` of the lower bits `x`, in fixed point. Products are
//! exact; the square, of a fraction of 16 bits, leaves out all partial products of two bits below
//! 2^-15; then a constant is added and the sum is cut off.
//!
//! Coefficients and constants were found from an H200's results for all arguments of a binade;
//! the tests hold sums over its results for all 2^32 arguments. The units of other machines may
//! give other bits.

use super::interpolator_tables::{
    Coefficients, EXPONENTIAL, HYPERBOLIC_TANGENT, INVERSE_ROOT_EVEN, INVERSE_ROOT_ODD, LOGARITHM,
    RECIPROCAL, ROOT_EVEN, ROOT_ODD, SINE,
};

const NAN: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;
const SIGN: u32 = 1 << 31;
const ONE: u32 = 0x3f80_0000;
/// The bits of a fraction.
const FRACTION: u32 = 0x7f_ffff;

/// Where a number's parts lie in a word.
struct Format {
    exponent_bias: i32,
    /// Bits of a fraction that the word lacks of a float's 23.
    missing_bits: u32,
    infinity: u32,
}

const FLOAT: Format = Format { exponent_bias: 127, missing_bits: 0, infinity: INFINITY };
/// The upper half of a binary64 number: the same unit's results, cut to 21 bits.
const UPPER_HALF: Format = Format { exponent_bias: 1023, missing_bits: 3, infinity: 0x7ff0_0000 };

impl Format {
    /// Sign, magnitude, biased exponent, and fraction as of a float.
    #[inline]
    fn parts(&self, bits: u32) -> (u32, u32, i32, u32) {
        let (sign, magnitude) = (bits & SIGN, bits & !SIGN);
        let exponent = (magnitude >> (23 - self.missing_bits)) as i32;
        (sign, magnitude, exponent, magnitude << self.missing_bits & FRACTION)
    }

    /// A number of 24 bits of a significand and a biased exponent; zero below the normal numbers,
    /// infinity above them.
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

/// How a polynomial's three terms are added.
struct Layout {
    /// Bits of the argument below those that choose.
    low_bits: u32,
    /// Weight of a constant's last bit, as a power of two of the sum's last.
    constant_shift: u32,
    /// Likewise for the square.
    square_shift: u32,
    /// Is added before the sum is cut off.
    bias: i64,
    /// Bits that are cut off.
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

/// For arguments of 2^-8 to 8, by exponent: the first part, and the last bits that are left out.
const HYPERBOLIC_TANGENT_PARTS: [(u32, u32); 11] =
    [(0, 6), (1, 6), (2, 6), (3, 5), (5, 5), (7, 4), (11, 4), (15, 4), (19, 3), (27, 2), (43, 3)];

/// The square of 16 bits over 2^17, without the partial products that weigh less than one.
#[inline]
fn truncated_square(x: u32) -> u32 {
    let (high, low) = (x >> 8, x & 0xff);
    // The upper half's square lacks only its last bit's own; of the products of a bit of the upper
    // half and one of the lower, those whose places add up to 16 and more are left.
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

/// Without the sign, zero if it is subnormal.
#[inline]
fn magnitude(bits: u32) -> u32 {
    if bits & INFINITY == 0 { 0 } else { bits & !SIGN }
}

/// A float of a fixed-point number with so many bits of a fraction, cut off.
#[inline]
fn from_fixed(sign: u32, value: u64, fraction_bits: i32) -> u32 {
    if value == 0 {
        return sign;
    }
    let length = 63 - value.leading_zeros() as i32;
    let significand = if length >= 23 { value >> (length - 23) } else { value << (23 - length) };
    FLOAT.number(sign, length - fraction_bits + 127, significand as u32)
}

/// Of 1 to 2, not of 1 itself: 24 bits of a number of half to 1.
#[inline]
fn reciprocal_significand(fraction: u32) -> u32 {
    RECIPROCAL_LAYOUT.sum(&RECIPROCAL, fraction) as u32
}

/// Likewise of 1 to 2, or of 2 to 4 where the exponent is odd.
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
    // In fixed point with 23 bits of a fraction; what is below is cut off.
    let significand = magnitude & FRACTION | 1 << 23;
    let shift = exponent - 127;
    let fixed = match shift {
        0.. => significand << shift,
        -24..0 => significand >> -shift,
        _ => 0,
    };
    // Negative ones are complemented, but for those that are whole by now.
    let is_whole = fixed & FRACTION == 0;
    let fixed = match (is_negative, is_whole) {
        (false, _) => fixed as i32,
        (true, true) => -(fixed as i32),
        (true, false) => !(fixed as i32),
    };
    let sum = EXPONENTIAL_LAYOUT.sum(&EXPONENTIAL, fixed as u32 & FRACTION);
    FLOAT.number(0, (fixed >> 23) + 127, sum as u32)
}

/// The binary logarithm.
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
    // A negative one is complemented.
    if value < 0 { from_fixed(SIGN, !value as u64, 36) } else { from_fixed(0, value as u64, 36) }
}

/// Quarters of a revolution, and a fraction of 23 bits of one.
#[inline]
fn revolutions(magnitude: u32) -> (u32, u32) {
    let significand = u64::from(magnitude & FRACTION | 1 << 23);
    // 25 bits of a fraction; what is below is cut off, and whole revolutions are left out.
    let fixed = match (magnitude >> 23) as i32 - 125 {
        shift @ 0..40 => significand << shift,
        shift @ -24..0 => significand >> -shift,
        _ => 0,
    };
    (fixed as u32 >> 23 & 3, fixed as u32 & FRACTION)
}

/// The sine within the first quarter; it is cut off.
#[inline]
fn quarter(sign: u32, fraction: u32) -> u32 {
    from_fixed(sign, SINE_LAYOUT.sum(&SINE, fraction) as u64, 37)
}

/// The sine of so many revolutions.
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

/// The cosine of so many revolutions.
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

/// The hyperbolic tangent. Small numbers are their own, subnormal ones, too.
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
