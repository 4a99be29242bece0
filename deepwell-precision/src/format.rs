//! The words in which a policy speaks: formats, roles of tensors, what to do on an offence.

use alloc::string::String;

use crate::names::named_enum;
use crate::{Direction, GemmMode, GemmPrecision, OperandClass, OperandQuantization};

named_enum! {
    /// In what format the matrix products of a tensor are computed.
    #[non_exhaustive]
    pub enum Format ("format") {
        /// IEEE 754 binary32.
        F32 = "f32",
        /// bfloat16 operands, f32 accumulation.
        Bf16 = "bf16",
        /// Block-scaled eight-bit operands, f32 accumulation.
        Mxfp8 = "mxfp8",
    }
}

named_enum! {
    /// What a tensor is for; defaults of a policy go by it.
    #[non_exhaustive]
    pub enum Role ("role") {
        /// Token embedding table.
        Embedding = "embedding",
        /// Weight of a linear layer inside a block.
        Linear = "linear",
        /// Output head.
        Head = "head",
        /// Gain or bias of a normalization.
        Norm = "norm",
        /// Weight that scores experts.
        Router = "router",
        /// Weight of a linear layer inside an expert.
        Expert = "expert",
    }
}

named_enum! {
    /// What the guards do about a layer that offends.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum Fallback ("fallback") {
        /// Compute it in BF16 for a while, with an event.
        #[default]
        Safe = "safe",
        /// Stop with an error that names the layer.
        Strict = "strict",
        /// Record the event and go on.
        Off = "off",
    }
}

/// One tensor that a policy decides about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorUse<'a> {
    /// Full name, such as `layers.3.mlp.down_proj.weight`.
    pub name: &'a str,
    /// What it is for.
    pub role: Role,
}

/// What a policy decided about one tensor.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Assignment {
    /// Format of the GEMMs. A tensor of which only some operands are quantized is
    /// [`Format::Mxfp8`], one of which none is quantized is not.
    pub format: Format,
    /// How each operand is quantized, in the order of [`OperandClass::ALL`]; none where the GEMM
    /// reads it in high precision.
    pub operands: [Option<OperandQuantization>; 6],
    /// What computes a GEMM whose operands are both quantized.
    pub gemm: GemmMode,
    /// Why, in words for a report.
    pub reason: String,
}

impl Assignment {
    /// How an operand is quantized; none where the GEMM reads it in high precision.
    #[must_use]
    pub fn operand(&self, class: OperandClass) -> Option<OperandQuantization> {
        self.operands[class as usize]
    }

    /// How a GEMM of the tensor is computed.
    #[must_use]
    pub fn gemm(&self, direction: Direction) -> GemmPrecision {
        let quantized = OperandClass::of(direction).map(|class| self.operand(class).is_some());
        let is_mxfp8 = quantized == [true, true] && self.gemm == GemmMode::Native;
        GemmPrecision { quantized, is_mxfp8 }
    }
}
