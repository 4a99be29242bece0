//! Contents of a checkpoint: named tensors, each with an element type and a section.

use std::fmt;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// Element type of a stored tensor. All types are little-endian in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum CkptDtype {
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper 16 bits of an `F32`.
    #[serde(rename = "BF16")]
    Bf16,
    /// OCP FP8 E4M3 (finite range ±448, one NaN code per sign, no infinity).
    #[serde(rename = "F8_E4M3")]
    E4M3,
    /// OCP FP8 E5M2 (finite range ±57344, with infinities).
    #[serde(rename = "F8_E5M2")]
    E5M2,
    /// OCP E8M0 power-of-two scale; code `0xFF` is NaN.
    #[serde(rename = "F8_E8M0")]
    E8M0,
    /// Unsigned byte; also the container of packed formats.
    U8,
    /// Signed byte.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
}

impl CkptDtype {
    /// Every element type, in order of declaration.
    pub const ALL: [CkptDtype; 15] = [
        CkptDtype::F64,
        CkptDtype::F32,
        CkptDtype::F16,
        CkptDtype::Bf16,
        CkptDtype::E4M3,
        CkptDtype::E5M2,
        CkptDtype::E8M0,
        CkptDtype::U8,
        CkptDtype::I8,
        CkptDtype::U16,
        CkptDtype::I16,
        CkptDtype::U32,
        CkptDtype::I32,
        CkptDtype::U64,
        CkptDtype::I64,
    ];

    /// Bytes of one element.
    #[must_use]
    pub fn element_bytes(self) -> usize {
        match self {
            CkptDtype::F64 | CkptDtype::U64 | CkptDtype::I64 => 8,
            CkptDtype::F32 | CkptDtype::U32 | CkptDtype::I32 => 4,
            CkptDtype::F16 | CkptDtype::Bf16 | CkptDtype::U16 | CkptDtype::I16 => 2,
            CkptDtype::E4M3 | CkptDtype::E5M2 | CkptDtype::E8M0 | CkptDtype::U8 | CkptDtype::I8 => {
                1
            }
        }
    }

    /// Name of this type in a safetensors header.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            CkptDtype::F64 => "F64",
            CkptDtype::F32 => "F32",
            CkptDtype::F16 => "F16",
            CkptDtype::Bf16 => "BF16",
            CkptDtype::E4M3 => "F8_E4M3",
            CkptDtype::E5M2 => "F8_E5M2",
            CkptDtype::E8M0 => "F8_E8M0",
            CkptDtype::U8 => "U8",
            CkptDtype::I8 => "I8",
            CkptDtype::U16 => "U16",
            CkptDtype::I16 => "I16",
            CkptDtype::U32 => "U32",
            CkptDtype::I32 => "I32",
            CkptDtype::U64 => "U64",
            CkptDtype::I64 => "I64",
        }
    }

    /// The corresponding type of the safetensors crate.
    pub(crate) fn to_safetensors(self) -> Dtype {
        match self {
            CkptDtype::F64 => Dtype::F64,
            CkptDtype::F32 => Dtype::F32,
            CkptDtype::F16 => Dtype::F16,
            CkptDtype::Bf16 => Dtype::BF16,
            CkptDtype::E4M3 => Dtype::F8_E4M3,
            CkptDtype::E5M2 => Dtype::F8_E5M2,
            CkptDtype::E8M0 => Dtype::F8_E8M0,
            CkptDtype::U8 => Dtype::U8,
            CkptDtype::I8 => Dtype::I8,
            CkptDtype::U16 => Dtype::U16,
            CkptDtype::I16 => Dtype::I16,
            CkptDtype::U32 => Dtype::U32,
            CkptDtype::I32 => Dtype::I32,
            CkptDtype::U64 => Dtype::U64,
            CkptDtype::I64 => Dtype::I64,
        }
    }
}

impl fmt::Display for CkptDtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Role of a tensor. Names are unique within a section, not across sections: a weight and its
/// master copy share a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Section {
    /// Weights in the precision that the forward pass reads.
    Weights,
    /// High-precision master copies of the weights.
    Master,
    /// First moments of the optimizer.
    MomentFirst,
    /// Second moments of the optimizer.
    MomentSecond,
    /// Block scales, plain row-major.
    Scales,
    /// Quantized element data.
    Quantized,
    /// Anything else, such as counters and amax histories.
    Other,
}

impl Section {
    /// Every section, in the order in which shards are written.
    pub const ALL: [Section; 7] = [
        Section::Weights,
        Section::Master,
        Section::MomentFirst,
        Section::MomentSecond,
        Section::Scales,
        Section::Quantized,
        Section::Other,
    ];

    /// Name of the section in the manifest and, followed by a number, in file names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Section::Weights => "weights",
            Section::Master => "master",
            Section::MomentFirst => "moment_first",
            Section::MomentSecond => "moment_second",
            Section::Scales => "scales",
            Section::Quantized => "quantized",
            Section::Other => "other",
        }
    }
}

impl fmt::Display for Section {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A tensor to be saved: borrowed bytes with type, shape and section. Saving never copies `data`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorView<'a> {
    /// Name, unique within `section`.
    pub name: &'a str,
    /// Element type of `data`.
    pub dtype: CkptDtype,
    /// Sizes, outermost first; empty for a scalar; a size may be 0.
    pub shape: Vec<usize>,
    /// Row-major little-endian elements: the product of `shape` times the element's bytes.
    pub data: &'a [u8],
    /// Role of the tensor.
    pub section: Section,
}

impl<'a> TensorView<'a> {
    /// A view of `F32` elements.
    #[must_use]
    pub fn from_f32(section: Section, name: &'a str, shape: &[usize], data: &'a [f32]) -> Self {
        let data = bytemuck::cast_slice(data);
        TensorView { name, dtype: CkptDtype::F32, shape: shape.to_vec(), data, section }
    }

    /// A view of `BF16` elements, given as bit patterns.
    #[must_use]
    pub fn from_bf16_bits(
        section: Section,
        name: &'a str,
        shape: &[usize],
        data: &'a [u16],
    ) -> Self {
        let data = bytemuck::cast_slice(data);
        TensorView { name, dtype: CkptDtype::Bf16, shape: shape.to_vec(), data, section }
    }
}

/// Part of a tensor, saved by the rank that holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceView<'a> {
    /// The part's elements; `shape` is the shape of the part.
    pub view: TensorView<'a>,
    /// Shape of the whole tensor.
    pub global_shape: Vec<usize>,
    /// Offset of the part in the whole tensor, per dimension.
    pub global_offset: Vec<usize>,
}

impl<'a> SliceView<'a> {
    /// The whole tensor as a single part.
    #[must_use]
    pub fn whole(view: TensorView<'a>) -> Self {
        let global_shape = view.shape.clone();
        SliceView { global_offset: vec![0; global_shape.len()], global_shape, view }
    }
}

/// Bytes of a tensor of this shape, or `None` if the product overflows.
pub(crate) fn tensor_bytes(dtype: CkptDtype, shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(dtype.element_bytes(), |product, &size| product.checked_mul(size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes_agree_with_the_safetensors_crate() {
        for dtype in CkptDtype::ALL {
            let theirs = dtype.to_safetensors();
            assert_eq!(dtype.name(), theirs.to_string());
            assert_eq!(dtype.element_bytes() * 8, theirs.bitsize());
            let json = serde_json::to_value(dtype).unwrap();
            assert_eq!(json, dtype.name());
        }
    }

    #[test]
    fn section_names_are_those_of_the_manifest() {
        for section in Section::ALL {
            assert_eq!(serde_json::to_value(section).unwrap(), section.name());
        }
    }

    #[test]
    fn tensor_bytes_of_edge_shapes() {
        let check = |shape: &[usize], expected: Option<usize>| {
            assert_eq!(tensor_bytes(CkptDtype::F32, shape), expected, "{shape:?}");
        };
        check(&[], Some(4));
        check(&[0], Some(0));
        check(&[3, 0, 5], Some(0));
        check(&[3, 5], Some(60));
        check(&[usize::MAX, 2], None);
    }
}
