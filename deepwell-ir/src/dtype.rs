//! Storage types of tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How one element of a tensor is stored.
///
/// A quantized matrix consists of several tensors: see [`crate::Storage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// 32-bit signed integer: token ids.
    I32,
    /// 64-bit signed integer: indices in graphs of other frameworks.
    I64,
    /// 64-bit unsigned integer: counters.
    U64,
    /// Boolean, one byte each: masks in graphs of other frameworks.
    Bool,
    /// OCP E4M3 elements.
    E4m3,
    /// OCP E5M2 elements.
    E5m2,
    /// OCP E2M3 elements, four in three bytes.
    E2m3,
    /// OCP E3M2 elements, four in three bytes.
    E3m2,
    /// OCP E8M0 block scales.
    E8m0,
    /// OCP E2M1 elements, two per byte.
    E2m1,
    /// Unsigned block scales with four exponent bits and three mantissa bits.
    Ue4m3,
}

impl DType {
    /// Bits per element. [`crate::storage_bytes`] computes the bytes of a tensor.
    pub const fn bits(self) -> u32 {
        match self {
            DType::I64 | DType::U64 => 64,
            DType::F32 | DType::I32 => 32,
            DType::Bf16 => 16,
            DType::Bool | DType::E4m3 | DType::E5m2 | DType::E8m0 | DType::Ue4m3 => 8,
            DType::E2m3 | DType::E3m2 => 6,
            DType::E2m1 => 4,
        }
    }

    /// Lower-case name in text forms and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U64 => "u64",
            DType::Bool => "bool",
            DType::E4m3 => "e4m3",
            DType::E5m2 => "e5m2",
            DType::E2m3 => "e2m3",
            DType::E3m2 => "e3m2",
            DType::E8m0 => "e8m0",
            DType::E2m1 => "e2m1",
            DType::Ue4m3 => "ue4m3",
        }
    }

    /// Whether activations and compute weights may be stored in this type.
    pub const fn is_high_precision(self) -> bool {
        matches!(self, DType::F32 | DType::Bf16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
