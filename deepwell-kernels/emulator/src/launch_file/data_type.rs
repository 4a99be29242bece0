//! Element types of buffers.

use serde::{Deserialize, Serialize};

use crate::number::{Format, Rounding, decode, encode_f64};

/// Element type of a buffer. Formats below 8 bits have one element per byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum DataType {
    U8,
    U16,
    U32,
    U64,
    I8,
    I16,
    I32,
    I64,
    F16,
    Bf16,
    F32,
    F64,
    E4m3,
    E5m2,
    E3m2,
    E2m3,
    E2m1,
    /// A power of two, for block scales.
    Ue8m0,
    Ue4m3,
}

impl DataType {
    /// All types.
    pub const ALL: [DataType; 19] = [
        DataType::U8,
        DataType::U16,
        DataType::U32,
        DataType::U64,
        DataType::I8,
        DataType::I16,
        DataType::I32,
        DataType::I64,
        DataType::F16,
        DataType::Bf16,
        DataType::F32,
        DataType::F64,
        DataType::E4m3,
        DataType::E5m2,
        DataType::E3m2,
        DataType::E2m3,
        DataType::E2m1,
        DataType::Ue8m0,
        DataType::Ue4m3,
    ];

    /// Name in documents.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// Bytes per element.
    pub fn bytes(self) -> usize {
        use DataType as D;
        match self {
            D::U16 | D::I16 | D::F16 | D::Bf16 => 2,
            D::U32 | D::I32 | D::F32 => 4,
            D::U64 | D::I64 | D::F64 => 8,
            _ => 1,
        }
    }

    /// Returns the number format, if the type has one.
    fn format(self) -> Option<Format> {
        use DataType as D;
        Some(match self {
            D::F16 => Format::F16,
            D::Bf16 => Format::BF16,
            D::F32 => Format::F32,
            D::E4m3 => Format::E4M3,
            D::E5m2 => Format::E5M2,
            D::E3m2 => Format::E3M2,
            D::E2m3 => Format::E2M3,
            D::E2m1 => Format::E2M1,
            D::Ue8m0 => Format::UE8M0,
            D::Ue4m3 => Format::UE4M3,
            _ => return None,
        })
    }

    /// Bits of a code; fewer than 8 for small formats.
    pub(super) fn bits(self) -> u32 {
        self.format().map_or(8 * self.bytes() as u32, Format::bits)
    }

    /// Returns the value of a little-endian element. Integers beyond 2^53 lose bits.
    pub(super) fn decode(self, bytes: &[u8]) -> f64 {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(word);
        if let Some(format) = self.format() {
            return f64::from(decode(format, bits as u32));
        }
        match self {
            DataType::I8 => f64::from(bits as i8),
            DataType::I16 => f64::from(bits as i16),
            DataType::I32 => f64::from(bits as i32),
            DataType::I64 => bits as i64 as f64,
            DataType::F64 => f64::from_bits(bits),
            _ => bits as f64,
        }
    }

    /// Returns the little-endian element nearest to a value.
    pub(super) fn encode(self, value: f64) -> Vec<u8> {
        let bits = match self {
            DataType::F64 => value.to_bits(),
            // Casts from floats saturate.
            DataType::I8 => value.round() as i8 as u64,
            DataType::I16 => value.round() as i16 as u64,
            DataType::I32 => value.round() as i32 as u64,
            DataType::I64 => value.round() as i64 as u64,
            DataType::U8 => u64::from(value.round() as u8),
            DataType::U16 => u64::from(value.round() as u16),
            DataType::U32 => u64::from(value.round() as u32),
            DataType::U64 => value.round() as u64,
            _ => self.format().map_or(0, |format| {
                u64::from(encode_f64(format, value, Rounding::NearestEven, true, false))
            }),
        };
        bits.to_le_bytes()[..self.bytes()].to_vec()
    }

    /// Returns NumPy's kind and size; small formats are unsigned integers.
    pub(super) fn numpy(self) -> (char, usize) {
        use DataType as D;
        let kind = match self {
            D::I8 | D::I16 | D::I32 | D::I64 => 'i',
            D::F16 | D::F32 | D::F64 => 'f',
            _ => 'u',
        };
        (kind, self.bytes())
    }

    /// Returns the type of NumPy's kind and size.
    pub(super) fn of_numpy(kind: char, bytes: usize) -> Option<DataType> {
        if kind == 'b' && bytes == 1 {
            return Some(DataType::U8);
        }
        DataType::ALL.into_iter().find(|known| known.numpy() == (kind, bytes))
    }
}
