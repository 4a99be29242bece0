//! Saturating conversion of two single-precision values to two values of eight bits or fewer, to
//! nearest. Quantization uses these conversions.

use super::registers::LANES;
use crate::decode::{Conversion, FloatRounding, Type};

/// Parameters of a small format for conversion.
pub(super) struct Kernel {
    mantissa_bits: u32,
    /// Exponent of the smallest normal number.
    exponent_min: i32,
    max_finite: u32,
    nan: u32,
    sign: u32,
    part_bits: u32,
    relu: bool,
}

impl Kernel {
    /// Returns the kernel of a conversion, if the conversion has this form.
    pub(super) fn of(conversion: &Conversion) -> Option<Kernel> {
        let (mantissa_bits, exponent_min, max_finite, nan, sign, part_bits) = match conversion.to {
            Type::E4m3x2 => (3, -6, 0x7e, 0x7f, 0x80, 8),
            Type::E5m2x2 => (2, -14, 0x7b, 0x7f, 0x80, 8),
            Type::E3m2x2 => (2, -2, 0x1f, 0x1f, 0x20, 8),
            Type::E2m3x2 => (3, 0, 0x1f, 0x1f, 0x20, 8),
            Type::E2m1x2 => (1, 0, 0x7, 0x7, 0x8, 4),
            _ => return None,
        };
        let nearest = conversion.float_rounding == Some(FloatRounding::NearestEven);
        if conversion.from != Type::F32 || !nearest || !conversion.saturate_finite {
            return None;
        }
        let relu = conversion.relu;
        Some(Kernel { mantissa_bits, exponent_min, max_finite, nan, sign, part_bits, relu })
    }

    /// Converts 32 pairs of values; `a` goes to the upper parts.
    #[inline]
    pub(super) fn row(&self, a: &[u32; LANES], b: &[u32; LANES]) -> [u32; LANES] {
        let shift = 23 - self.mantissa_bits;
        // A sum with this number is rounded to steps of the smallest subnormal number.
        let magic = f32::from_bits(((self.exponent_min + shift as i32 + 127) as u32) << 23);
        let smallest_normal = ((self.exponent_min + 127) as u32) << 23;
        let bias = ((self.exponent_min + 126) as u32) << self.mantissa_bits;
        let one = |bits: u32| {
            let magnitude = bits & 0x7fff_ffff;
            let small = (f32::from_bits(magnitude) + magic).to_bits() - magic.to_bits();
            let rounded =
                (magnitude + ((1 << (shift - 1)) - 1) + (magnitude >> shift & 1)) >> shift;
            let code = if magnitude < smallest_normal { small } else { rounded.wrapping_sub(bias) };
            let code = code.min(self.max_finite);
            let negative = bits >> 31 == 1;
            let code = if negative && self.relu { 0 } else { code };
            let sign = if negative && !self.relu { self.sign } else { 0 };
            if magnitude > 0x7f80_0000 { self.nan } else { code | sign }
        };
        std::array::from_fn(|lane| one(a[lane]) << self.part_bits | one(b[lane]))
    }
}
