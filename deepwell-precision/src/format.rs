//! The words in which a policy speaks: formats, roles of tensors, what to do on an offence.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::names::named_enum;
use crate::{Direction, GemmMode, GemmPrecision, OperandClass, QuantFormat, UnknownName};

/// In what format the GEMMs of a tensor are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Format {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16 operands, f32 accumulation.
    Bf16,
    /// Quantized operands, f32 accumulation. Of the format a policy takes elements and scales;
    /// blocks and rounding it sets for each operand.
    Quantized(QuantFormat),
}

impl Format {
    /// [`QuantFormat::MXFP8`].
    pub const MXFP8: Self = Self::Quantized(QuantFormat::MXFP8);
    /// [`QuantFormat::NVFP4`].
    pub const NVFP4: Self = Self::Quantized(QuantFormat::NVFP4);
    /// Those that have a name.
    pub const ALL: &'static [Self] = &[Self::F32, Self::Bf16, Self::MXFP8, Self::NVFP4];

    /// The name that stands for it in files, flags and messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Quantized(format) => format.name(),
        }
    }

    /// How operands are quantized; none in high precision.
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

/// By name; a quantized format that has none as a table.
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
    /// How the guards answer GEMMs that offend.
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// Format of the GEMMs. A tensor of which only some operands are quantized is
    /// [`Format::Quantized`], one of which none is quantized is not.
    pub format: Format,
    /// How each operand is quantized, in the order of [`OperandClass::ALL`]; none where the GEMM
    /// reads it in high precision.
    pub operands: [Option<QuantFormat>; 6],
    /// What computes a GEMM whose operands are both quantized.
    pub gemm: GemmMode,
    /// Why, in words for a report.
    pub reason: String,
}

impl Assignment {
    /// How an operand is quantized; none where the GEMM reads it in high precision.
    #[must_use]
    pub fn operand(&self, class: OperandClass) -> Option<QuantFormat> {
        self.operands[class as usize]
    }

    /// How a GEMM of the tensor is computed.
    #[must_use]
    pub fn gemm(&self, direction: Direction) -> GemmPrecision {
        let formats = OperandClass::of(direction).map(|class| self.operand(class));
        // Operands of two kinds no instruction multiplies.
        let of_one_family = matches!(formats, [Some(a), Some(b)] if a.is_of_family(&b));
        GemmPrecision {
            quantized: formats.map(|format| format.is_some()),
            is_scaled: of_one_family && self.gemm == GemmMode::Native,
        }
    }
}
