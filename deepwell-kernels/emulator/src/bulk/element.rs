//! Element types of tensor maps.

use serde::{Deserialize, Serialize};

/// Element type of a tensor. Launch files have the lower-case names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum ElementType {
    U8,
    U16,
    U32,
    S32,
    U64,
    S64,
    F16,
    F32,
    /// Subnormal values are flushed to zero during the copy.
    #[serde(rename = "f32_ftz")]
    F32FlushToZero,
    F64,
    Bf16,
    /// Values are rounded to TF32 when copied to shared memory. The rounding is undocumented; the
    /// emulator rounds to nearest, ties away from zero, like `cvt.rna`. Not compared with hardware.
    Tf32,
    /// [`ElementType::Tf32`] with subnormal values flushed to zero.
    #[serde(rename = "tf32_ftz")]
    Tf32FlushToZero,
    /// 4 bits, packed in both memories (`16U4_ALIGN8B`, `.b4x16`).
    B4x16,
    /// 4 bits; in shared memory, 16 elements are followed by 8 bytes of padding (`16U4_ALIGN16B`,
    /// `.b4x16_p64`).
    #[serde(rename = "b4x16_p64")]
    B4x16Pad64,
    /// 6 bits. Loads: in shared memory, 16 elements are followed by 4 bytes of padding
    /// (`.b6x16_p32`). Stores: each element is the low 6 bits of a byte of shared memory
    /// (`.b6p2x16`).
    #[serde(rename = "b6x16_p32")]
    B6x16Pad32,
}

/// Types by the codes of `tensormap.replace.elemtype`.
const BY_PTX_CODE: [ElementType; 16] = [
    ElementType::U8,
    ElementType::U16,
    ElementType::U32,
    ElementType::S32,
    ElementType::U64,
    ElementType::S64,
    ElementType::F16,
    ElementType::F32,
    ElementType::F32FlushToZero,
    ElementType::F64,
    ElementType::Bf16,
    ElementType::Tf32,
    ElementType::Tf32FlushToZero,
    ElementType::B4x16,
    ElementType::B4x16Pad64,
    ElementType::B6x16Pad32,
];

impl ElementType {
    /// Returns the type of a `CUtensorMapDataType` value. F64 and BF16 have another order in PTX.
    pub fn from_driver(code: u32) -> Option<ElementType> {
        let ptx = match code {
            0..=7 | 11..=15 => code,
            8 => 9,
            9 => 10,
            10 => 8,
            _ => return None,
        };
        ElementType::from_ptx(ptx)
    }

    /// Returns the type of a `tensormap.replace.elemtype` code.
    pub fn from_ptx(code: u32) -> Option<ElementType> {
        BY_PTX_CODE.get(code as usize).copied()
    }

    /// Returns the `tensormap.replace.elemtype` code.
    pub fn ptx_code(self) -> u8 {
        BY_PTX_CODE.iter().position(|&element| element == self).unwrap_or(0) as u8
    }

    /// Bits of one element in global memory.
    pub fn global_bits(self) -> u64 {
        match self {
            ElementType::B4x16 | ElementType::B4x16Pad64 => 4,
            ElementType::B6x16Pad32 => 6,
            ElementType::U8 => 8,
            ElementType::U16 | ElementType::F16 | ElementType::Bf16 => 16,
            ElementType::U64 | ElementType::S64 | ElementType::F64 => 64,
            _ => 32,
        }
    }

    /// Bits of one element in shared memory, including padding.
    pub fn shared_bits(self) -> u64 {
        if self.is_padded() { 8 } else { self.global_bits() }
    }

    /// Whether elements have padding in shared memory.
    pub fn is_padded(self) -> bool {
        matches!(self, ElementType::B4x16Pad64 | ElementType::B6x16Pad32)
    }

    /// Whether elements have fewer than 8 bits.
    pub fn is_sub_byte(self) -> bool {
        self.global_bits() < 8
    }

    /// Whether a map may fill out-of-bounds elements with NaN.
    pub fn is_float(self) -> bool {
        self.not_a_number().is_some()
    }

    /// Bytes of the NaN fill, low byte first. The documentation only mentions a special NaN; the
    /// canonical NaN used here was not compared with hardware.
    pub fn not_a_number(self) -> Option<&'static [u8]> {
        match self {
            ElementType::F16 | ElementType::Bf16 => Some(&[0xff, 0x7f]),
            ElementType::F32
            | ElementType::F32FlushToZero
            | ElementType::Tf32
            | ElementType::Tf32FlushToZero => Some(&[0xff, 0xff, 0xff, 0x7f]),
            ElementType::F64 => Some(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]),
            _ => None,
        }
    }

    /// Applies the conversion of a load to the bytes of in-bounds elements.
    pub(super) fn convert_on_load(self, bytes: &mut [u8]) {
        let (round, flush) = match self {
            ElementType::F32FlushToZero => (false, true),
            ElementType::Tf32 => (true, false),
            ElementType::Tf32FlushToZero => (true, true),
            _ => return,
        };
        for word in bytes.chunks_exact_mut(4) {
            let mut bits = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            if flush && bits & 0x7f80_0000 == 0 {
                bits &= 0x8000_0000;
            }
            if round {
                bits = round_to_tf32(bits);
            }
            word.copy_from_slice(&bits.to_le_bytes());
        }
    }
}

/// Rounds to 10 mantissa bits, to nearest, ties away from zero. Infinities and NaNs keep their
/// upper bits.
fn round_to_tf32(bits: u32) -> u32 {
    if bits & 0x7f80_0000 == 0x7f80_0000 {
        return bits;
    }
    bits.wrapping_add(0x1000) & !0x1fff
}
