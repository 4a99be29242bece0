//! Arithmetic shared by all element formats: one encoder and one decoder, parametrized by the bit
//! layout. Written for clarity; the vector kernels in `quantize` are tested against this code.

use crate::{Overflow, Rounding};

/// Bit layout and special values of a small float.
pub(crate) struct Layout {
    /// Stored fraction bits.
    pub(crate) mantissa_bits: u32,
    /// Exponent bias; the smallest normal is 2^(1 - bias).
    pub(crate) bias: i32,
    /// Position of the sign bit; higher bits are not part of the code.
    pub(crate) sign_bit: u32,
    /// Code of the largest finite magnitude.
    pub(crate) code_max: u8,
    /// Code of NaN of either sign.
    pub(crate) code_nan: u8,
    /// Code of a magnitude beyond the range under `Overflow::NonFinite`.
    pub(crate) code_overflow: u8,
    /// Whether the format has NaN.
    pub(crate) has_nan: bool,
    /// Whether the format has infinities.
    pub(crate) has_infinity: bool,
}

/// The NaN of eight-bit encoders; sign clear.
pub(crate) const CODE_NAN: u8 = 0x7F;
/// Bits of f32 infinity; magnitudes above are NaN.
const INFINITY_BITS: u32 = 0x7F80_0000;

/// Code of `x`, see [`crate::e4m3::encode`].
pub(crate) fn encode(x: f32, layout: &Layout, rounding: Rounding, overflow: Overflow) -> u8 {
    let stays_finite = match rounding {
        Rounding::NearestEven => false,
        Rounding::TowardZero => true,
        Rounding::TowardPositive => x.is_sign_negative(),
    };
    encode_with(x, layout, overflow, stays_finite, |cut| {
        let half = 1_u64 << (cut.shift - 1);
        match rounding {
            Rounding::NearestEven => cut.remainder > half || (cut.remainder == half && cut.is_odd),
            Rounding::TowardZero => false,
            Rounding::TowardPositive => cut.remainder > 0 && x.is_sign_positive(),
        }
    })
}

/// Code of `x`, saturating, rounded away from zero with a probability equal to the fraction of the
/// distance to the next code: if this fraction exceeds `bits` / 2^32. Exact values stay.
pub(crate) fn encode_stochastic(x: f32, layout: &Layout, bits: u32) -> u8 {
    encode_with(x, layout, Overflow::Saturate, true, |cut| {
        (cut.remainder << 32) >> cut.shift > u64::from(bits)
    })
}

/// The part of a magnitude below the last bit of its code.
struct Cut {
    /// `remainder` / 2^`shift` is the fraction of the distance to the next code, in [0, 1); under
    /// 2^24.
    remainder: u64,
    /// 20 to 60.
    shift: u32,
    /// Whether the truncated code is odd.
    is_odd: bool,
}

/// Code of `x`; `round_away` decides the rounding. `stays_finite`: a finite `x` beyond the range
/// does not overflow.
fn encode_with(
    x: f32,
    layout: &Layout,
    overflow: Overflow,
    stays_finite: bool,
    round_away: impl FnOnce(Cut) -> bool,
) -> u8 {
    let negative = x.is_sign_negative();
    let magnitude_bits = x.to_bits() & 0x7FFF_FFFF;
    if magnitude_bits > INFINITY_BITS {
        return layout.code_nan;
    }
    let sign = u8::from(negative) << layout.sign_bit;
    let code_beyond = match overflow {
        Overflow::Saturate => sign | layout.code_max,
        Overflow::NonFinite if layout.has_infinity => sign | layout.code_overflow,
        Overflow::NonFinite if layout.has_nan => layout.code_overflow,
        Overflow::NonFinite => sign | layout.code_max,
    };
    if magnitude_bits == INFINITY_BITS {
        return code_beyond;
    }

    // |x| = significand * 2^(exponent - 23), exactly.
    let exponent_field = magnitude_bits >> 23;
    let fraction = magnitude_bits & 0x007F_FFFF;
    let significand = if exponent_field == 0 { fraction } else { fraction | 0x0080_0000 };
    let exponent = exponent_field.max(1) as i32 - 127;

    // Below the smallest normal all codes have the same spacing, hence the max.
    let exponent_min = 1 - layout.bias;
    let exponent_code = exponent.max(exponent_min);
    // 25 bits and more shift everything into the remainder; the cap keeps the shifts legal.
    let shift = (23 - layout.mantissa_bits as i32 + exponent_code - exponent).min(60) as u32;
    let units = u64::from(significand) >> shift;
    let remainder = u64::from(significand) & ((1 << shift) - 1);
    let cut = Cut { remainder, shift, is_odd: units & 1 == 1 };
    let units = units as u32 + u32::from(round_away(cut));
    // `units` includes the implicit one, so the sum with the exponent minus one carries correctly.
    let code = (((exponent_code - exponent_min) as u32) << layout.mantissa_bits) + units;
    if code <= u32::from(layout.code_max) {
        return sign | code as u8;
    }
    if stays_finite { sign | layout.code_max } else { code_beyond }
}

/// Value of `code`, see [`crate::e4m3::decode`].
pub(crate) const fn decode(code: u8, layout: &Layout) -> f32 {
    let magnitude = (code & ((1 << layout.sign_bit) - 1)) as u32;
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
    if code & (1 << layout.sign_bit) == 0 { value } else { -value }
}
