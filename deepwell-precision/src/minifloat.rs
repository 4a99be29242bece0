//! The arithmetic that E4M3 and E5M2 share: one encoder and one decoder over a description of the
//! bits. Written for clarity; the vector kernels in `quantize` have their own, tested against this.

use crate::{Overflow, Rounding};

/// What tells one eight-bit float from another.
pub(crate) struct Layout {
    /// Stored fraction bits.
    pub(crate) mantissa_bits: u32,
    /// Exponent bias; the smallest normal is 2^(1 - bias).
    pub(crate) bias: i32,
    /// Code of the largest finite magnitude.
    pub(crate) code_max: u8,
    /// Code that a magnitude beyond the range takes under `Overflow::NonFinite`.
    pub(crate) code_overflow: u8,
    /// Whether the format has infinities.
    pub(crate) has_infinity: bool,
}

/// The one NaN that encoding gives, for either format; sign clear.
pub(crate) const CODE_NAN: u8 = 0x7F;
/// Bits of f32 infinity; magnitudes above are NaN.
const INFINITY_BITS: u32 = 0x7F80_0000;

/// Code of `x`, see [`crate::e4m3::encode`].
pub(crate) fn encode(x: f32, layout: &Layout, rounding: Rounding, overflow: Overflow) -> u8 {
    let negative = x.is_sign_negative();
    let magnitude_bits = x.to_bits() & 0x7FFF_FFFF;
    if magnitude_bits > INFINITY_BITS {
        return CODE_NAN;
    }
    let sign = u8::from(negative) << 7;
    let code_beyond = match overflow {
        Overflow::Saturate => sign | layout.code_max,
        Overflow::NonFinite if layout.has_infinity => sign | layout.code_overflow,
        Overflow::NonFinite => layout.code_overflow,
    };
    if magnitude_bits == INFINITY_BITS {
        return code_beyond;
    }

    // |x| = significand * 2^(exponent - 23), exactly.
    let exponent_field = magnitude_bits >> 23;
    let fraction = magnitude_bits & 0x007F_FFFF;
    let significand = if exponent_field == 0 { fraction } else { fraction | 0x0080_0000 };
    let exponent = exponent_field.max(1) as i32 - 127;

    // Below the smallest normal all codes share one spacing, hence the max.
    let exponent_min = 1 - layout.bias;
    let exponent_code = exponent.max(exponent_min);
    // 25 bits and more shift all of it into the remainder; the cap keeps the shift legal.
    let shift = (23 - layout.mantissa_bits as i32 + exponent_code - exponent).min(40) as u32;
    let units = u64::from(significand) >> shift;
    let remainder = u64::from(significand) & ((1 << shift) - 1);
    let half = 1_u64 << (shift - 1);
    let round_away = match rounding {
        Rounding::NearestEven => remainder > half || (remainder == half && units & 1 == 1),
        Rounding::TowardZero => false,
        Rounding::TowardPositive => remainder > 0 && !negative,
    };
    let units = units as u32 + u32::from(round_away);
    // `units` holds the implicit one, so adding it to the exponent less one carries by itself.
    let code = (((exponent_code - exponent_min) as u32) << layout.mantissa_bits) + units;
    if code <= u32::from(layout.code_max) {
        return sign | code as u8;
    }
    let stays_finite = match rounding {
        Rounding::NearestEven => false,
        Rounding::TowardZero => true,
        Rounding::TowardPositive => negative,
    };
    if stays_finite { sign | layout.code_max } else { code_beyond }
}

/// Value of `code`, see [`crate::e4m3::decode`].
pub(crate) const fn decode(code: u8, layout: &Layout) -> f32 {
    let magnitude = (code & 0x7F) as u32;
    let value = if magnitude > layout.code_max as u32 {
        if layout.has_infinity && magnitude == layout.code_overflow as u32 {
            f32::INFINITY
        } else {
            f32::NAN
        }
    } else {
        let exponent_field = magnitude >> layout.mantissa_bits;
        let fraction = magnitude & ((1 << layout.mantissa_bits) - 1);
        if exponent_field == 0 {
            let unit_exponent = 1 - layout.bias - layout.mantissa_bits as i32;
            fraction as f32 * f32::from_bits(((unit_exponent + 127) as u32) << 23)
        } else {
            let exponent = exponent_field as i32 - layout.bias;
            f32::from_bits(
                (((exponent + 127) as u32) << 23) | (fraction << (23 - layout.mantissa_bits)),
            )
        }
    };
    if code & 0x80 == 0 { value } else { -value }
}
