//! Elements of tensors, as a tensor map names them.

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// Subnormal values become zero on the way.
    F32FlushToZero,
    F64,
    Bf16,
    /// Values are rounded to TF32 on the way into shared memory. No guide says how; here to the
    /// nearest, ties away from zero, as `cvt.rna` does. Not compared with a machine.
    Tf32,
    /// [`ElementType::Tf32`], and subnormal values become zero.
    Tf32FlushToZero,
    /// 4 bits, packed on both sides (`16U4_ALIGN8B`, `.b4x16`).
    B4x16,
    /// 4 bits; in shared memory 8 bytes of padding follow 16 elements (`16U4_ALIGN16B`,
    /// `.b4x16_p64`).
    B4x16Pad64,
    /// 6 bits. Into shared memory: 4 bytes of padding follow 16 elements (`.b6x16_p32`). Out of
    /// shared memory: each element is a byte, of which 6 bits are taken (`.b6p2x16`).
    B6x16Pad32,
}

/// By the codes of `tensormap.replace.elemtype`.
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
    /// By the number of `CUtensorMapDataType`, which orders F64 and BF16 otherwise than PTX.
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

    /// By the number of `tensormap.replace.elemtype`.
    pub fn from_ptx(code: u32) -> Option<ElementType> {
        BY_PTX_CODE.get(code as usize).copied()
    }

    /// The number of `tensormap.replace.elemtype`.
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

    /// Bits of one element in shared memory, padding included.
    pub fn shared_bits(self) -> u64 {
        if self.is_padded() { 8 } else { self.global_bits() }
    }

    /// Whether shared memory holds padding.
    pub fn is_padded(self) -> bool {
        matches!(self, ElementType::B4x16Pad64 | ElementType::B6x16Pad32)
    }

    /// Whether elements have fewer than 8 bits.
    pub fn is_sub_byte(self) -> bool {
        self.global_bits() < 8
    }

    /// Whether the fill with NaN is possible.
    pub fn is_float(self) -> bool {
        self.not_a_number().is_some()
    }

    /// The bytes that the fill with NaN writes, low byte first. The guides only speak of a special
    /// NaN; that it is the canonical one was not compared with a machine.
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

    /// What a load makes of the bytes of in-bounds elements.
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

/// Nearest value with 10 mantissa bits, of two equally near the one farther from zero. Infinities
/// and NaNs keep their upper bits.
fn round_to_tf32(bits: u32) -> u32 {
    if bits & 0x7f80_0000 == 0x7f80_0000 {
        return bits;
    }
    bits.wrapping_add(0x1000) & !0x1fff
}
