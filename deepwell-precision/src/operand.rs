//! The operands of a linear layer's GEMMs, and their quantization.
//!
//! A linear layer has three GEMMs of two operands each, which gives six [`OperandClass`]es. A
//! weight, an activation or a gradient is an operand of two of the GEMMs, along different axes, and
//! each use has its own quantization.

use serde::{Deserialize, Serialize};

use crate::names::named_enum;

named_enum! {
    /// One of the three GEMMs of a linear layer.
    pub enum GemmKind ("GEMM") {
        /// `y = x · wᵀ`.
        Fprop = "fprop",
        /// `dx = dy · w`.
        Dgrad = "dgrad",
        /// `dw = dyᵀ · x`.
        Wgrad = "wgrad",
    }
}

named_enum! {
    /// One operand of one of the GEMMs of a linear layer.
    pub enum OperandClass ("operand class") {
        /// x in `y = x · wᵀ`.
        FpropActivation = "fprop.activation",
        /// w in `y = x · wᵀ`.
        FpropWeight = "fprop.weight",
        /// dy in `dx = dy · w`.
        DgradGradient = "dgrad.gradient",
        /// w in `dx = dy · w`.
        DgradWeight = "dgrad.weight",
        /// dy in `dw = dyᵀ · x`.
        WgradGradient = "wgrad.gradient",
        /// x in `dw = dyᵀ · x`.
        WgradActivation = "wgrad.activation",
    }
}

impl OperandClass {
    /// The operands of a GEMM, in argument order.
    ///
    /// ```
    /// use deepwell_precision::{GemmKind, OperandClass};
    /// let classes = OperandClass::of(GemmKind::Wgrad);
    /// assert_eq!(classes.map(OperandClass::operand), ["gradient", "activation"]);
    /// ```
    #[must_use]
    pub const fn of(kind: GemmKind) -> [Self; 2] {
        match kind {
            GemmKind::Fprop => [Self::FpropActivation, Self::FpropWeight],
            GemmKind::Dgrad => [Self::DgradGradient, Self::DgradWeight],
            GemmKind::Wgrad => [Self::WgradGradient, Self::WgradActivation],
        }
    }

    /// The GEMM that reads the operand.
    #[must_use]
    pub const fn gemm(self) -> GemmKind {
        match self {
            Self::FpropActivation | Self::FpropWeight => GemmKind::Fprop,
            Self::DgradGradient | Self::DgradWeight => GemmKind::Dgrad,
            Self::WgradGradient | Self::WgradActivation => GemmKind::Wgrad,
        }
    }

    /// `weight`, `activation` or `gradient`.
    #[must_use]
    pub const fn operand(self) -> &'static str {
        match self {
            Self::FpropWeight | Self::DgradWeight => "weight",
            Self::FpropActivation | Self::WgradActivation => "activation",
            Self::DgradGradient | Self::WgradGradient => "gradient",
        }
    }
}

named_enum! {
    /// Rounding of a scaled value to an element.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum ElementRounding ("rounding") {
        /// To the nearest element, ties to even.
        #[default]
        Nearest = "nearest",
        /// To one of the two neighbours at random, so that the expectation equals the value.
        Stochastic = "stochastic",
    }
}

named_enum! {
    /// How a GEMM is computed if both operands are quantized.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum GemmMode ("gemm") {
        /// Tensor cores with block scales, or an equivalent.
        #[default]
        Native = "native",
        /// A BF16 GEMM on the dequantized operands. It has the error of quantization but not the
        /// error of the accumulator of FP8 tensor cores.
        Emulated = "emulated",
    }
}

/// Precision of one GEMM of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmPrecision {
    /// Whether each operand is quantized, in the order of [`OperandClass::of`].
    pub quantized: [bool; 2],
    /// Whether the GEMM multiplies quantized data with scales. Otherwise quantized operands are
    /// dequantized for a BF16 GEMM.
    #[serde(alias = "is_mxfp8")]
    pub is_scaled: bool,
}

impl GemmPrecision {
    /// A GEMM of quantized data with scales.
    pub const SCALED: Self = Self { quantized: [true, true], is_scaled: true };
    /// A GEMM without quantized operands.
    pub const PLAIN: Self = Self { quantized: [false, false], is_scaled: false };

    /// Whether quantized operands are dequantized for the GEMM.
    #[must_use]
    pub fn is_emulated(self) -> bool {
        !self.is_scaled && self.quantized != [false, false]
    }

    /// Describes the difference from a GEMM with scales for a report, beginning with `kind`;
    /// `None` for a GEMM with scales. `format` is the name of the quantized operands' format.
    ///
    /// ```
    /// use deepwell_precision::{GemmKind, GemmPrecision};
    /// let gemm = GemmPrecision { quantized: [false, true], is_scaled: false };
    /// assert_eq!(
    ///     gemm.describe(GemmKind::Dgrad, "MXFP8").unwrap(),
    ///     "dgrad emulated: weight in MXFP8, GEMM in BF16"
    /// );
    /// assert_eq!(GemmPrecision::SCALED.describe(GemmKind::Dgrad, "MXFP8"), None);
    /// ```
    #[must_use]
    pub fn describe(self, kind: GemmKind, format: &str) -> Option<alloc::string::String> {
        let [first, second] = OperandClass::of(kind).map(OperandClass::operand);
        let operands = match self.quantized {
            _ if self.is_scaled => return None,
            [false, false] => return Some(alloc::format!("{kind} in BF16")),
            [true, true] => "both operands",
            [true, false] => first,
            [false, true] => second,
        };
        Some(alloc::format!("{kind} emulated: {operands} in {format}, GEMM in BF16"))
    }
}
