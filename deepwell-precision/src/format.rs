//! Vocabulary of a policy: formats, roles of tensors, reactions to an offence.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::names::named_enum;
use crate::{
    ElementFormat, GemmKind, GemmMode, GemmPrecision, OperandClass, QuantFormat, ScaleFormat,
    UnknownName,
};

/// Format in which the GEMMs of a tensor are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Format {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16 operands, f32 accumulation.
    Bf16,
    /// Quantized operands, f32 accumulation. A policy takes elements and scales from this format
    /// and sets blocks and rounding for each operand.
    Quantized(QuantFormat),
}

impl Format {
    /// [`QuantFormat::MXFP8`].
    pub const MXFP8: Self = Self::Quantized(QuantFormat::MXFP8);
    /// [`QuantFormat::NVFP4`].
    pub const NVFP4: Self = Self::Quantized(QuantFormat::NVFP4);
    /// [`QuantFormat::MXFP4`].
    pub const MXFP4: Self = Self::Quantized(QuantFormat::MXFP4);
    /// All formats with a name.
    pub const ALL: &'static [Self] = &[
        Self::F32,
        Self::Bf16,
        Self::MXFP8,
        Self::mx(ElementFormat::E5M2),
        Self::mx(ElementFormat::E2M3),
        Self::mx(ElementFormat::E3M2),
        Self::MXFP4,
        Self::NVFP4,
    ];

    /// [`QuantFormat::mx`].
    #[must_use]
    pub const fn mx(element: ElementFormat) -> Self {
        Self::Quantized(QuantFormat::mx(element))
    }

    /// Name in files, flags and messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Quantized(format) => format.name(),
        }
    }

    /// Quantization of operands; `None` in high precision.
    #[must_use]
    pub const fn quantized(&self) -> Option<QuantFormat> {
        match self {
            Self::Quantized(format) => Some(*format),
            Self::F32 | Self::Bf16 => None,
        }
    }

    /// Whether operands are quantized.
    #[must_use]
    pub const fn is_quantized(&self) -> bool {
        self.quantized().is_some()
    }

    /// Whether elements have fewer bits than those of MXFP8, to which guards then move GEMMs before
    /// BF16.
    #[must_use]
    pub const fn has_fewer_bits_than_mxfp8(&self) -> bool {
        match self {
            Self::Quantized(format) => format.element.bits() < 8,
            Self::F32 | Self::Bf16 => false,
        }
    }

    /// [`QuantFormat::has_four_bits`].
    #[must_use]
    pub const fn has_four_bits(&self) -> bool {
        match self {
            Self::Quantized(format) => format.has_four_bits(),
            Self::F32 | Self::Bf16 => false,
        }
    }

    /// Whether operands have a scale for the whole tensor, beside those of blocks.
    #[must_use]
    pub const fn has_tensor_scale(&self) -> bool {
        match self {
            Self::Quantized(format) => matches!(format.scale, ScaleFormat::Ue4m3(_)),
            Self::F32 | Self::Bf16 => false,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let found = Self::ALL.iter().find(|format| format.name() == text).copied();
        found.ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(Self::name).collect();
            UnknownName::new("format", text, &names)
        })
    }
}

/// Serialized by name, or as a table if a quantized format has no name.
impl Serialize for Format {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Quantized(format) if !Self::ALL.contains(self) => format.serialize(serializer),
            named => serializer.serialize_str(named.name()),
        }
    }
}

impl<'de> Deserialize<'de> for Format {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrTable;

        impl<'de> Visitor<'de> for NameOrTable {
            type Value = Format;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a format or a quantized format")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Format, E> {
                name.parse().map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Format, A::Error> {
                QuantFormat::deserialize(MapAccessDeserializer::new(map)).map(Format::Quantized)
            }
        }

        deserializer.deserialize_any(NameOrTable)
    }
}

named_enum! {
    /// Role of a tensor, on which the defaults of a policy depend.
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
    /// Reaction of the guards to GEMMs that offend.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum Fallback ("fallback") {
        /// Compute the GEMMs in BF16 for a while, with an event.
        #[default]
        Safe = "safe",
        /// Stop with an error that names the layer.
        Strict = "strict",
        /// Record the event and continue.
        Off = "off",
    }
}

/// A tensor to which a policy is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorUse<'a> {
    /// Full name, such as `layers.3.mlp.down_proj.weight`.
    pub name: &'a str,
    /// Role of the tensor.
    pub role: Role,
    /// Block of the model to which the tensor belongs, from 0; none outside of blocks.
    pub layer: Option<u32>,
}

/// Decision of a policy about one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// Format of the GEMMs: [`Format::Quantized`] if any operand is quantized, otherwise in high
    /// precision.
    pub format: Format,
    /// Quantization of each operand, in the order of [`OperandClass::ALL`]; `None` if the GEMM
    /// reads the operand in high precision.
    pub operands: [Option<QuantFormat>; 6],
    /// How a GEMM is computed if both operands are quantized.
    pub gemm: GemmMode,
    /// Reason, for a report.
    pub reason: String,
}

impl Assignment {
    /// Quantization of an operand; `None` if the GEMM reads it in high precision.
    #[must_use]
    pub fn operand(&self, class: OperandClass) -> Option<QuantFormat> {
        self.operands[class as usize]
    }

    /// Precision of a GEMM of the tensor.
    #[must_use]
    pub fn gemm(&self, kind: GemmKind) -> GemmPrecision {
        let formats = OperandClass::of(kind).map(|class| self.operand(class));
        // Scales of two kinds have no common instruction, and a transform cancels only if both
        // operands have it.
        let is_one_gemm = matches!(formats, [Some(a), Some(b)] if a.multiplies_with(&b));
        GemmPrecision {
            quantized: formats.map(|format| format.is_some()),
            is_scaled: is_one_gemm && self.gemm == GemmMode::Native,
        }
    }
}
