//! Number formats and their fields.

use std::fmt;

/// Format of one element. Bit patterns are in the low bits of a `u32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Format {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of binary32.
    BF16,
    /// Binary32 with 10 mantissa bits; the code has all 32 bits, and the low 13 are ignored.
    TF32,
    /// 4 exponent bits, 3 mantissa bits, no infinity; the NaN is `0x7f`.
    E4M3,
    /// 5 exponent bits, 2 mantissa bits, infinities and NaNs as in IEEE.
    E5M2,
    /// 6 bits: 3 exponent, 2 mantissa; every code is finite.
    E3M2,
    /// 6 bits: 2 exponent, 3 mantissa; every code is finite.
    E2M3,
    /// 4 bits: 2 exponent, 1 mantissa; every code is finite.
    E2M1,
    /// A power of two: 2^(code - 127); `0xff` is NaN. There is no sign and no zero.
    UE8M0,
    /// [`Format::E4M3`] without a sign: bit 7 is ignored.
    UE4M3,
    /// Two's complement, 8 bits.
    S8,
    /// Unsigned, 8 bits.
    U8,
}

/// Meaning of the bit patterns with the largest exponent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Specials {
    /// Infinity for mantissa 0, NaN otherwise.
    InfinityAndNan,
    /// The last code is NaN; the others are numbers.
    Nan,
    /// All codes are numbers.
    None,
}

impl Format {
    /// All formats.
    pub const ALL: [Format; 13] = [
        Format::F32,
        Format::F16,
        Format::BF16,
        Format::TF32,
        Format::E4M3,
        Format::E5M2,
        Format::E3M2,
        Format::E2M3,
        Format::E2M1,
        Format::UE8M0,
        Format::UE4M3,
        Format::S8,
        Format::U8,
    ];

    /// Bits of one unpacked code.
    pub fn bits(self) -> u32 {
        match self {
            Format::F32 | Format::TF32 => 32,
            Format::F16 | Format::BF16 => 16,
            Format::E3M2 | Format::E2M3 => 6,
            Format::E2M1 => 4,
            _ => 8,
        }
    }

    /// Bits of the exponent field; 0 for integers.
    pub fn exponent_bits(self) -> u32 {
        match self {
            Format::F32 | Format::BF16 | Format::TF32 | Format::UE8M0 => 8,
            Format::F16 | Format::E5M2 => 5,
            Format::E4M3 | Format::UE4M3 => 4,
            Format::E3M2 => 3,
            Format::E2M3 | Format::E2M1 => 2,
            Format::S8 | Format::U8 => 0,
        }
    }

    /// Bits of the mantissa field; 0 for integers.
    pub fn mantissa_bits(self) -> u32 {
        match self {
            Format::F32 => 23,
            Format::F16 | Format::TF32 => 10,
            Format::BF16 => 7,
            Format::E4M3 | Format::E2M3 | Format::UE4M3 => 3,
            Format::E5M2 | Format::E3M2 => 2,
            Format::E2M1 => 1,
            Format::UE8M0 | Format::S8 | Format::U8 => 0,
        }
    }

    /// Exponent bias; 0 for integers.
    pub fn bias(self) -> i32 {
        match self.exponent_bits() {
            0 => 0,
            bits => (1 << (bits - 1)) - 1,
        }
    }

    /// Exponent of subnormal numbers and of the smallest normal numbers.
    pub fn exponent_min(self) -> i32 {
        match self {
            Format::UE8M0 => -127,
            Format::S8 | Format::U8 => 0,
            _ => 1 - self.bias(),
        }
    }

    /// Whether the format has a sign bit.
    pub fn is_signed(self) -> bool {
        !matches!(self, Format::UE8M0 | Format::UE4M3 | Format::U8)
    }

    /// Whether bit patterns are integers.
    pub fn is_integer(self) -> bool {
        matches!(self, Format::S8 | Format::U8)
    }

    /// Meaning of the bit patterns with the largest exponent.
    pub fn specials(self) -> Specials {
        match self {
            Format::F32 | Format::F16 | Format::BF16 | Format::TF32 | Format::E5M2 => {
                Specials::InfinityAndNan
            }
            Format::E4M3 | Format::UE8M0 | Format::UE4M3 => Specials::Nan,
            _ => Specials::None,
        }
    }

    /// Code of the largest finite value.
    pub fn max_finite(self) -> u32 {
        match self {
            Format::F32 => 0x7f7f_ffff,
            Format::F16 => 0x7bff,
            Format::BF16 => 0x7f7f,
            Format::TF32 => 0x7f7f_e000,
            Format::E4M3 | Format::UE4M3 => 0x7e,
            Format::E5M2 => 0x7b,
            Format::E3M2 | Format::E2M3 => 0x1f,
            Format::E2M1 => 0x7,
            Format::UE8M0 => 0xfe,
            Format::S8 => 0x7f,
            Format::U8 => 0xff,
        }
    }

    /// Code that a conversion produces for NaN: the canonical NaN, or the largest finite value in
    /// formats without NaN, or zero in integers.
    pub fn nan(self) -> u32 {
        match self {
            Format::F32 => 0x7fff_ffff,
            Format::TF32 => 0x7fff_e000,
            Format::F16 | Format::BF16 => 0x7fff,
            Format::E4M3 | Format::E5M2 | Format::UE4M3 => 0x7f,
            Format::UE8M0 => 0xff,
            Format::E3M2 | Format::E2M3 | Format::E2M1 => self.max_finite(),
            Format::S8 | Format::U8 => 0,
        }
    }

    /// Random bits of a stochastic rounding to this format (`cvt.rs`): 13 for F16, 16 for BF16 and
    /// the 8-bit and 6-bit formats, 8 for E2M1. The random bits are aligned with the highest
    /// discarded bits.
    pub fn random_bits(self) -> u32 {
        match self {
            Format::F16 | Format::TF32 => 13,
            Format::E2M1 => 8,
            _ => 16,
        }
    }

    /// Name of the format in PTX.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::F16 => "f16",
            Format::BF16 => "bf16",
            Format::TF32 => "tf32",
            Format::E4M3 => "e4m3",
            Format::E5M2 => "e5m2",
            Format::E3M2 => "e3m2",
            Format::E2M3 => "e2m3",
            Format::E2M1 => "e2m1",
            Format::UE8M0 => "ue8m0",
            Format::UE4M3 => "ue4m3",
            Format::S8 => "s8",
            Format::U8 => "u8",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
