//! Conversion of bit patterns to values.

use super::format::{Format, Specials};

/// Returns the value of a bit pattern. Bits above those of the format are ignored.
pub fn decode(format: Format, bits: u32) -> f32 {
    match format {
        Format::F32 => f32::from_bits(bits),
        Format::TF32 => f32::from_bits(bits & 0xffff_e000),
        Format::BF16 => f32::from_bits(bits << 16),
        Format::S8 => f32::from(bits as u8 as i8),
        Format::U8 => f32::from(bits as u8),
        Format::UE8M0 => match bits & 0xff {
            0xff => f32::NAN,
            // 2^-127 is subnormal in binary32.
            0 => f32::from_bits(1 << 22),
            exponent => f32::from_bits(exponent << 23),
        },
        _ => decode_fields(format, bits),
    }
}

/// Decodes formats with a narrower exponent field than binary32.
fn decode_fields(format: Format, bits: u32) -> f32 {
    let mantissa_bits = format.mantissa_bits();
    let exponent_field_max = (1 << format.exponent_bits()) - 1;
    let mantissa = bits & ((1 << mantissa_bits) - 1);
    let exponent = bits >> mantissa_bits & exponent_field_max;
    let sign_bit = format.exponent_bits() + mantissa_bits;
    let negative = format.is_signed() && bits >> sign_bit & 1 == 1;
    let magnitude = match format.specials() {
        Specials::InfinityAndNan if exponent == exponent_field_max => {
            if mantissa == 0 {
                f32::INFINITY
            } else {
                f32::NAN
            }
        }
        Specials::Nan if exponent == exponent_field_max && mantissa == (1 << mantissa_bits) - 1 => {
            f32::NAN
        }
        _ => {
            let implicit = if exponent == 0 { 0 } else { 1 << mantissa_bits };
            let power = exponent.max(1) as i32 - format.bias() - mantissa_bits as i32;
            // At most 11 bits times a power of two that is a normal number in binary32.
            (mantissa | implicit) as f32 * f32::from_bits(((power + 127) as u32) << 23)
        }
    };
    if negative { -magnitude } else { magnitude }
}

/// Returns the values of all bit patterns of a format with at most 8 bits, or of the first 256
/// patterns of a wider format.
pub fn decode_table(format: Format) -> [f32; 256] {
    std::array::from_fn(|code| decode(format, code as u32))
}
