//! Conversion of values to bit patterns.

use super::format::{Format, Specials};

/// Rounding modes, for a value between two neighbors of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Rounding {
    /// To nearest, ties to the even code (`.rn`).
    #[default]
    NearestEven,
    /// Toward zero (`.rz`).
    TowardZero,
    /// Up (`.rp`).
    Up,
    /// Down (`.rm`).
    Down,
    /// To nearest, ties away from zero (`.rna`).
    Away,
    /// Stochastic (`.rs`). The [`Format::random_bits`] low bits of this value are added to the
    /// highest discarded bits; the magnitude is rounded up if the sum carries. Other bits are
    /// ignored.
    Stochastic(u32),
}

/// Options of a conversion besides the format.
#[derive(Clone, Copy)]
struct Conversion {
    rounding: Rounding,
    saturate_finite: bool,
    relu: bool,
}

/// Returns the bit pattern of a value. `saturate_finite` maps values beyond the largest finite
/// value, and infinities, to the largest finite value (`.satfinite`). `relu` maps negative values
/// to zero (`.relu`).
///
/// - NaN becomes [`Format::nan`].
/// - Without `saturate_finite`, a value beyond the largest finite value becomes infinity if the
///   format has infinities and the rounding does not point away from infinity. Otherwise the result
///   is NaN in E4M3, UE4M3 and UE8M0, and the largest finite value in the other formats and in
///   integers.
/// - UE8M0 and UE4M3 have no sign and encode the magnitude. UE8M0 has no zero; a value below its
///   smallest value becomes the smallest value.
pub fn encode(
    format: Format,
    value: f32,
    rounding: Rounding,
    saturate_finite: bool,
    relu: bool,
) -> u32 {
    encode_f64(format, f64::from(value), rounding, saturate_finite, relu)
}

/// [`encode`] of an `f64`, with one rounding.
pub fn encode_f64(
    format: Format,
    value: f64,
    rounding: Rounding,
    saturate_finite: bool,
    relu: bool,
) -> u32 {
    let conversion = Conversion { rounding, saturate_finite, relu };
    if value.is_nan() {
        return format.nan();
    }
    if format.is_integer() {
        return encode_integer(format, value, conversion);
    }
    let negative = value.is_sign_negative();
    if negative && conversion.relu {
        return 0;
    }
    let negative = negative && format.is_signed();
    let magnitude = if value.is_infinite() {
        overflow(format, negative, conversion, true)
    } else {
        encode_finite(format, value, negative, conversion)
    };
    if format == Format::TF32 {
        // The code of a TF32 value is the binary32 code without the low 13 bits.
        return (magnitude << 13) | u32::from(negative) << 31;
    }
    magnitude | u32::from(negative) << (format.exponent_bits() + format.mantissa_bits())
}

/// The code of the largest finite magnitude, as a number of steps from zero.
fn max_steps(format: Format) -> u64 {
    let low = if format == Format::TF32 { 13 } else { 0 };
    u64::from(format.max_finite() >> low)
}

fn encode_finite(format: Format, value: f64, negative: bool, conversion: Conversion) -> u32 {
    let (significand, power) = split(value);
    let steps = if format == Format::UE8M0 {
        scale_steps(significand, power, conversion.rounding)
    } else {
        float_steps(format, significand, power, negative, conversion.rounding)
    };
    if steps > max_steps(format) {
        overflow(format, negative, conversion, false)
    } else {
        steps as u32
    }
}

/// Splits a finite magnitude into an integer and a power of two.
fn split(value: f64) -> (u64, i32) {
    let bits = value.to_bits();
    let field = (bits >> 52 & 0x7ff) as i32;
    let implicit = if field == 0 { 0 } else { 1 << 52 };
    (bits & ((1 << 52) - 1) | implicit, field.max(1) - 1075)
}

/// Returns the bits without the sign. These bits count the values from zero on, so that a carry out
/// of the mantissa correctly increments the exponent.
fn float_steps(
    format: Format,
    significand: u64,
    power: i32,
    negative: bool,
    rounding: Rounding,
) -> u64 {
    if significand == 0 {
        return 0;
    }
    let mantissa_bits = format.mantissa_bits() as i32;
    let leading = power + 63 - significand.leading_zeros() as i32;
    let exponent = leading.max(format.exponent_min());
    let rounded = round_shifted(
        significand,
        exponent - mantissa_bits - power,
        negative,
        rounding,
        format.random_bits(),
    );
    // An exponent far beyond the format's range overflows in any case.
    let above_min = (exponent - format.exponent_min()).min(1 << 12) as u64;
    (above_min << mantissa_bits) + rounded
}

/// Returns the code of a neighboring power of two; the least code is 0.
fn scale_steps(significand: u64, power: i32, rounding: Rounding) -> u64 {
    if significand == 0 {
        return 0;
    }
    let leading = power + 63 - significand.leading_zeros() as i32;
    if leading < -127 {
        return 0;
    }
    // One step up from 2^e doubles the value, so the significand's distance to 2^e decides.
    let shift = leading - power;
    let above = significand & ((1 << shift) - 1);
    let field = (leading + 127) as u64;
    let up = round_shifted(above | (field & 1) << shift, shift, false, rounding, 16) - (field & 1);
    field + up
}

/// Returns `significand / 2^shift`, rounded to an integer.
fn round_shifted(
    significand: u64,
    shift: i32,
    negative: bool,
    rounding: Rounding,
    random_bits: u32,
) -> u64 {
    if shift <= 0 {
        // The format has fewer mantissa bits than `significand`, or the value is exact.
        return significand << (-shift).min(10);
    }
    // Larger shifts are below half a step too.
    let (kept, rest, shift) = if shift > 62 {
        (0, u64::from(significand != 0), 62)
    } else {
        (significand >> shift, significand & ((1 << shift) - 1), shift as u32)
    };
    let half = 1u64 << (shift - 1);
    let up = match rounding {
        Rounding::NearestEven => rest > half || rest == half && kept & 1 == 1,
        Rounding::Away => rest >= half,
        Rounding::TowardZero => false,
        Rounding::Up => rest != 0 && !negative,
        Rounding::Down => rest != 0 && negative,
        Rounding::Stochastic(random) => {
            let top = if shift >= random_bits {
                rest >> (shift - random_bits)
            } else {
                rest << (random_bits - shift)
            };
            let random = u64::from(random) & ((1 << random_bits) - 1);
            (top + random) >> random_bits != 0
        }
    };
    kept + u64::from(up)
}

/// Returns the magnitude for a value beyond the largest finite value.
fn overflow(format: Format, negative: bool, conversion: Conversion, infinite: bool) -> u32 {
    let max = max_steps(format) as u32;
    if conversion.saturate_finite {
        return max;
    }
    match format.specials() {
        Specials::None => max,
        Specials::Nan => format.nan(),
        Specials::InfinityAndNan => {
            let stays = match conversion.rounding {
                Rounding::TowardZero => true,
                Rounding::Up => negative,
                Rounding::Down => !negative,
                _ => false,
            };
            // The code of infinity follows the code of the largest finite value.
            if stays && !infinite { max } else { max + 1 }
        }
    }
}

fn encode_integer(format: Format, value: f64, conversion: Conversion) -> u32 {
    let (low, high) = if format == Format::S8 { (-128.0, 127.0) } else { (0.0, 255.0) };
    let low = if conversion.relu { 0.0f64.max(low) } else { low };
    let rounded = match conversion.rounding {
        Rounding::NearestEven => value.round_ties_even(),
        Rounding::TowardZero => value.trunc(),
        Rounding::Up => value.ceil(),
        Rounding::Down => value.floor(),
        Rounding::Away => value.round(),
        Rounding::Stochastic(random) => {
            let weight = f64::from(random & 0xffff) / 65536.0;
            let magnitude = value.abs();
            let rest = (magnitude.fract() * 65536.0).floor() / 65536.0;
            let up = if rest + weight >= 1.0 { 1.0 } else { 0.0 };
            (magnitude.trunc() + up).copysign(value)
        }
    };
    (rounded.clamp(low, high) as i32 as u32) & 0xff
}

/// Returns the code of `significand * 2^power` in a signed floating-point format. The significand
/// is less than 2^61.
pub(crate) fn encode_parts(
    format: Format,
    negative: bool,
    significand: u64,
    power: i32,
    rounding: Rounding,
) -> u32 {
    let steps = float_steps(format, significand, power, negative, rounding);
    let magnitude = if steps > max_steps(format) {
        let conversion = Conversion { rounding, saturate_finite: false, relu: false };
        overflow(format, negative, conversion, false)
    } else {
        steps as u32
    };
    magnitude | u32::from(negative) << (format.exponent_bits() + format.mantissa_bits())
}
