//! Quantization of a matrix as one value: elements, blocks, scales, rounding.

use core::fmt;

use alloc::string::String;
use serde::{Deserialize, Serialize};

use crate::names::named_enum;
use crate::nvfp4::{self, ScaleBound, ScaleOrder};
use crate::quantize::MxSpec;
use crate::{
    BLOCK, BlockShape, ElementFormat, ElementRounding, Granularity, Hadamard16, QuantizeError,
    ScaleRule,
};

/// A rectangle of elements with a common scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// Rows of the operand, across the contraction.
    pub rows: u16,
    /// Elements along the contraction, K.
    pub k: u16,
}

impl Block {
    /// One row of `k` elements.
    #[must_use]
    pub const fn row(k: u16) -> Self {
        Self { rows: 1, k }
    }

    /// As many rows as elements along K: rowwise and columnwise quantization then give the same
    /// values. For weights.
    #[must_use]
    pub const fn square(k: u16) -> Self {
        Self { rows: k, k }
    }

    /// Whether the number of rows equals the number of elements along K.
    #[must_use]
    pub const fn is_square(self) -> bool {
        self.rows == self.k
    }

    /// The shape, row or square.
    #[must_use]
    pub const fn shape(self) -> BlockShape {
        if self.is_square() { BlockShape::Square } else { BlockShape::Row }
    }
}

impl fmt::Display for Block {
    /// `1x32`, for example.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.k)
    }
}

/// Storage format of block scales, and their computation from magnitudes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ScaleFormat {
    /// A power of two, one byte for each 32 elements along K, for every block: [`crate::e8m0`].
    E8m0(ScaleRule),
    /// An unsigned number with four exponent and three fraction bits, one byte for each 16 elements
    /// along K: [`crate::ue4m3`].
    Ue4m3(ScaleBound),
}

impl ScaleFormat {
    /// Elements along K per stored scale. A larger block stores its scale several times.
    #[must_use]
    pub const fn stored_every(self) -> usize {
        match self {
            Self::E8m0(_) => BLOCK,
            Self::Ue4m3(_) => nvfp4::BLOCK,
        }
    }

    /// Lower-case name of the type alone.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::E8m0(_) => "e8m0",
            Self::Ue4m3(_) => "ue4m3",
        }
    }
}

named_enum! {
    /// A scale for the whole tensor, besides the scales of blocks.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum TensorScale ("tensor scale") {
        /// No tensor scale.
        #[default]
        None = "none",
        /// IEEE 754 binary32, from the largest magnitude of the tensor.
        F32 = "f32",
    }
}

/// Quantization of a matrix, as plain data for quantization, dequantization, planning, storage and
/// GEMMs.
///
/// ```
/// use deepwell_precision::{Block, QuantFormat};
/// let weights = QuantFormat::NVFP4.square();
/// assert_eq!((weights.name(), weights.block), ("nvfp4", Block::square(16)));
/// assert_eq!(QuantFormat::MXFP8_128.block.to_string(), "1x128");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuantFormat {
    /// Format of the elements.
    pub element: ElementFormat,
    /// Elements with a common scale.
    pub block: Block,
    /// Format of the scales.
    pub scale: ScaleFormat,
    /// Whether there is a tensor scale.
    pub tensor_scale: TensorScale,
    /// Rounding of elements.
    pub rounding: ElementRounding,
    /// Transform along the contraction before quantization, of elements of four bits. Both operands
    /// of a GEMM have the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hadamard: Option<Hadamard16>,
    /// Order of the operations on scales of NVFP4.
    #[serde(default, skip_serializing_if = "is_default")]
    pub order: ScaleOrder,
    /// Whether an NVFP4 block's largest magnitude may be mapped to 4 instead of 6.
    #[serde(default, skip_serializing_if = "is_default")]
    pub four_six: bool,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Default for QuantFormat {
    fn default() -> Self {
        Self::MXFP8
    }
}

impl QuantFormat {
    /// E4M3 elements with an E8M0 scale for each 32: OCP MXFP8, scales by RCEIL.
    pub const MXFP8: Self = Self {
        element: ElementFormat::E4M3,
        block: Block::row(32),
        scale: ScaleFormat::E8m0(ScaleRule::Rceil),
        tensor_scale: TensorScale::None,
        rounding: ElementRounding::Nearest,
        hadamard: None,
        order: ScaleOrder::Deepwell,
        four_six: false,
    };
    /// MXFP8 with one exponent for each 128 elements.
    pub const MXFP8_128: Self = Self { block: Block::row(128), ..Self::MXFP8 };
    /// E2M1 elements with a UE4M3 scale for each 16, and an FP32 scale for the tensor.
    pub const NVFP4: Self = Self {
        element: ElementFormat::E2M1,
        block: Block::row(16),
        scale: ScaleFormat::Ue4m3(ScaleBound::Max448),
        tensor_scale: TensorScale::F32,
        rounding: ElementRounding::Nearest,
        ..Self::MXFP8
    };
    /// E2M1 elements with an E8M0 scale for each 32: OCP MXFP4, scales by RCEIL.
    pub const MXFP4: Self = Self::mx(ElementFormat::E2M1);
    /// Formats that a policy can name, one per family.
    pub const FAMILIES: &'static [Self] = &[
        Self::MXFP8,
        Self::mx(ElementFormat::E5M2),
        Self::mx(ElementFormat::E2M3),
        Self::mx(ElementFormat::E3M2),
        Self::MXFP4,
        Self::NVFP4,
    ];

    /// The MX format of these elements: blocks of 1x32, scales by RCEIL.
    #[must_use]
    pub const fn mx(element: ElementFormat) -> Self {
        Self { element, ..Self::MXFP8 }
    }

    /// Name of the family: elements and scales, regardless of blocks and rounding.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match (self.element, self.scale) {
            (ElementFormat::E4M3, ScaleFormat::E8m0(_)) => "mxfp8",
            (ElementFormat::E5M2, ScaleFormat::E8m0(_)) => "mxfp8-e5m2",
            (ElementFormat::E3M2, ScaleFormat::E8m0(_)) => "mxfp6-e3m2",
            (ElementFormat::E2M3, ScaleFormat::E8m0(_)) => "mxfp6-e2m3",
            (ElementFormat::E2M1, ScaleFormat::E8m0(_)) => "mxfp4",
            (ElementFormat::E2M1, ScaleFormat::Ue4m3(_)) => "nvfp4",
            (_, ScaleFormat::Ue4m3(_)) => "scaled by ue4m3",
        }
    }

    /// The family with this name, from [`QuantFormat::FAMILIES`].
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::FAMILIES.iter().copied().find(|format| format.name() == name)
    }

    /// Whether both have the same kind of elements and scales.
    #[must_use]
    pub fn is_of_family(&self, other: &Self) -> bool {
        let same_scale =
            self.scale.name() == other.scale.name() && self.tensor_scale == other.tensor_scale;
        self.element == other.element && same_scale
    }

    /// Whether scales are exponents and there is no tensor scale: OCP MX, with any elements.
    #[must_use]
    pub const fn is_mx(&self) -> bool {
        matches!((self.scale, self.tensor_scale), (ScaleFormat::E8m0(_), TensorScale::None))
    }

    /// Whether elements have four bits. In these formats a tensor's error is large for any data, so
    /// guards judge products.
    #[must_use]
    pub const fn has_four_bits(&self) -> bool {
        self.element.bits() == 4
    }

    /// Name of the family in capitals, for sentences.
    #[must_use]
    pub fn title(&self) -> String {
        self.name().to_ascii_uppercase()
    }

    /// Sets square blocks.
    #[must_use]
    pub const fn square(self) -> Self {
        Self { block: Block::square(self.block.k), ..self }
    }

    /// Sets the block shape.
    #[must_use]
    pub const fn with_shape(self, shape: BlockShape) -> Self {
        match shape {
            BlockShape::Row => Self { block: Block::row(self.block.k), ..self },
            BlockShape::Square => self.square(),
        }
    }

    /// Sets the granularity of exponents; no effect if scales are not exponents.
    #[must_use]
    pub const fn with_granularity(self, granularity: Granularity) -> Self {
        let ScaleFormat::E8m0(_) = self.scale else { return self };
        let k = granularity.elements() as u16;
        let shape = self.block.shape();
        Self { block: Block::row(k), ..self }.with_shape(shape)
    }

    /// Sets the rule for exponents; no effect if scales are not exponents.
    #[must_use]
    pub const fn with_scale_rule(self, rule: ScaleRule) -> Self {
        match self.scale {
            ScaleFormat::E8m0(_) => Self { scale: ScaleFormat::E8m0(rule), ..self },
            ScaleFormat::Ue4m3(_) => self,
        }
    }

    /// Sets the elements of an MX format; no effect if scales are not exponents.
    #[must_use]
    pub const fn with_element(self, element: ElementFormat) -> Self {
        match self.scale {
            ScaleFormat::E8m0(_) => Self { element, ..self },
            ScaleFormat::Ue4m3(_) => self,
        }
    }

    /// Sets the rounding.
    #[must_use]
    pub const fn with_rounding(self, rounding: ElementRounding) -> Self {
        Self { rounding, ..self }
    }

    /// Sets the transform; no effect if elements have more than four bits.
    #[must_use]
    pub const fn with_hadamard(self, hadamard: Option<Hadamard16>) -> Self {
        if self.has_four_bits() { Self { hadamard, ..self } } else { self }
    }

    /// Sets the order of the operations on scales; no effect if there is no tensor scale.
    #[must_use]
    pub const fn with_order(self, order: ScaleOrder) -> Self {
        match self.tensor_scale {
            TensorScale::F32 => Self { order, ..self },
            TensorScale::None => self,
        }
    }

    /// Sets the selection of 4 or 6, together with the bound of block scales that leaves room for
    /// it; no effect if scales are exponents.
    #[must_use]
    pub const fn with_four_six(self, four_six: bool) -> Self {
        let ScaleFormat::Ue4m3(_) = self.scale else { return self };
        let bound = if four_six { ScaleBound::Max256 } else { ScaleBound::Max448 };
        Self { four_six, scale: ScaleFormat::Ue4m3(bound), ..self }
    }

    /// Whether one GEMM may read operands in both formats: the same transform, and the same family
    /// or two MX formats, whose elements may differ.
    ///
    /// ```
    /// use deepwell_precision::{ElementFormat, QuantFormat};
    /// let gradients = QuantFormat::mx(ElementFormat::E5M2);
    /// assert!(gradients.multiplies_with(&QuantFormat::MXFP8));
    /// assert!(!QuantFormat::MXFP4.multiplies_with(&QuantFormat::NVFP4));
    /// ```
    #[must_use]
    pub fn multiplies_with(&self, other: &Self) -> bool {
        let are_mx = self.is_mx() && other.is_mx();
        (are_mx || self.is_of_family(other)) && self.hadamard == other.hadamard
    }

    /// Whether elements are rounded stochastically.
    #[must_use]
    pub fn is_stochastic(&self) -> bool {
        self.rounding == ElementRounding::Stochastic
    }

    /// Checks that the settings of a format fit its scales and blocks.
    ///
    /// # Errors
    ///
    /// [`QuantizeError::Format`] for other elements than E2M1 with scales of UE4M3; for the
    /// selection of 4 or 6 with square blocks, where it gains nothing, with stochastic rounding,
    /// whose mean it would shift, or with a transform; and for a transform of square blocks, which
    /// have no direction.
    pub fn check_settings(&self) -> Result<(), QuantizeError> {
        let (is_square, is_transformed) = (self.block.is_square(), self.hadamard.is_some());
        if !Self::FAMILIES.iter().any(|family| self.is_of_family(family)) {
            return Err(self.refused("e2m1 elements with scales of ue4m3"));
        }
        if self.four_six && (is_square || is_transformed || self.is_stochastic()) {
            return Err(self.refused(
                "4/6 with blocks of 1x16, rounding to nearest and no Hadamard transform",
            ));
        }
        if is_transformed && is_square {
            return Err(self.refused("blocks of one row with a Hadamard transform"));
        }
        Ok(())
    }

    /// The error of a function that does not support this format.
    pub(crate) fn refused(&self, expected: &'static str) -> QuantizeError {
        QuantizeError::Format { expected, got: *self }
    }

    /// The form used by the kernels of MX formats.
    pub(crate) fn mx_spec(&self) -> Result<MxSpec, QuantizeError> {
        const EXPECTED: &str = "an MX format with blocks of 1x32, 32x32, 1x128 or 128x128";
        let (ScaleFormat::E8m0(scale_rule), TensorScale::None) = (self.scale, self.tensor_scale)
        else {
            return Err(self.refused(EXPECTED));
        };
        let granularity = match self.block.k {
            32 => Granularity::G32,
            128 => Granularity::G128,
            _ => return Err(self.refused(EXPECTED)),
        };
        if !self.block.is_square() && self.block.rows != 1 {
            return Err(self.refused(EXPECTED));
        }
        if self.hadamard.is_some() {
            return Err(self.refused("an MX format whose transform was applied before"));
        }
        let block = self.block.shape();
        Ok(MxSpec { element: self.element, scale_rule, granularity, block })
    }
}

impl fmt::Display for QuantFormat {
    /// `mxfp8 1x32`, followed by settings that are not the default.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name(), self.block)?;
        if self.rounding != ElementRounding::Nearest {
            write!(f, " {}", self.rounding)?;
        }
        if self.hadamard.is_some() {
            f.write_str(" hadamard")?;
        }
        if self.four_six {
            f.write_str(" 4/6")?;
        }
        match self.order {
            ScaleOrder::Deepwell => Ok(()),
            order => write!(f, " order={order}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_and_their_blocks() {
        let mx = QuantFormat::MXFP8;
        for (format, text, stored_every) in [
            (mx, "mxfp8 1x32", 32),
            (mx.square(), "mxfp8 32x32", 32),
            (QuantFormat::MXFP8_128, "mxfp8 1x128", 32),
            (mx.square().with_granularity(Granularity::G128), "mxfp8 128x128", 32),
            (QuantFormat::MXFP8_128.square().with_shape(BlockShape::Row), "mxfp8 1x128", 32),
            (QuantFormat::NVFP4, "nvfp4 1x16", 16),
            (QuantFormat::NVFP4.square().with_granularity(Granularity::G128), "nvfp4 16x16", 16),
            (
                QuantFormat::NVFP4.with_rounding(ElementRounding::Stochastic),
                "nvfp4 1x16 stochastic",
                16,
            ),
            (
                QuantFormat::NVFP4.with_hadamard(Some(Hadamard16::TRAINING)),
                "nvfp4 1x16 hadamard",
                16,
            ),
            (
                QuantFormat::NVFP4.with_four_six(true).with_order(ScaleOrder::Te),
                "nvfp4 1x16 4/6 order=te",
                16,
            ),
            (QuantFormat::mx(ElementFormat::E5M2).square(), "mxfp8-e5m2 32x32", 32),
            (QuantFormat::mx(ElementFormat::E2M3), "mxfp6-e2m3 1x32", 32),
            (
                QuantFormat::mx(ElementFormat::E3M2).with_hadamard(Some(Hadamard16::TRAINING)),
                "mxfp6-e3m2 1x32",
                32,
            ),
            (
                QuantFormat::MXFP4.with_hadamard(Some(Hadamard16::TRAINING)).with_four_six(true),
                "mxfp4 1x32 hadamard",
                32,
            ),
            (QuantFormat::NVFP4.with_element(ElementFormat::E4M3), "nvfp4 1x16", 16),
            (
                mx.with_four_six(true)
                    .with_order(ScaleOrder::Te)
                    .with_hadamard(Some(Hadamard16::TRAINING)),
                "mxfp8 1x32",
                32,
            ),
        ] {
            assert_eq!(alloc::format!("{format}"), text);
            assert_eq!(format.scale.stored_every(), stored_every, "{text}");
            let json = serde_json::to_string(&format).unwrap();
            assert_eq!(serde_json::from_str::<QuantFormat>(&json).unwrap(), format, "{json}");
            assert!(format.is_of_family(&QuantFormat::named(format.name()).unwrap()), "{text}");
        }
    }

    /// Every pair of families: MX formats multiply with each other, NVFP4 with itself alone.
    #[test]
    fn formats_that_multiply() {
        for a in QuantFormat::FAMILIES {
            for b in QuantFormat::FAMILIES {
                let expected = a.is_mx() == b.is_mx();
                assert_eq!(a.multiplies_with(b), expected, "{a} and {b}");
            }
        }
        let turned = QuantFormat::MXFP4.with_hadamard(Some(Hadamard16::TRAINING));
        assert!(turned.multiplies_with(&turned));
        assert!(!turned.multiplies_with(&QuantFormat::MXFP4));
        assert!(!turned.multiplies_with(&QuantFormat::MXFP8));
    }

    #[test]
    fn settings_that_exclude_each_other() {
        let transform = Some(Hadamard16::TRAINING);
        let odd = QuantFormat { element: ElementFormat::E4M3, ..QuantFormat::NVFP4 };
        for (format, expected) in [
            (odd, "expected e2m1 elements with scales of ue4m3"),
            (QuantFormat::MXFP4.with_hadamard(transform).square(), "expected blocks of one row"),
            (QuantFormat::NVFP4.with_hadamard(transform).square(), "expected blocks of one row"),
        ] {
            let error = format.check_settings().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        for family in QuantFormat::FAMILIES {
            family.with_hadamard(transform).check_settings().unwrap();
        }
    }

    #[test]
    fn kernels_refuse_formats_that_they_do_not_make() {
        let odd = QuantFormat { block: Block { rows: 2, k: 32 }, ..QuantFormat::MXFP8 };
        let wide = QuantFormat { block: Block::row(64), ..QuantFormat::MXFP8 };
        for format in [odd, wide, QuantFormat::NVFP4] {
            let error = format.mx_spec().unwrap_err().to_string();
            assert!(error.starts_with("expected an MX format with blocks of 1x32"), "{error}");
            assert!(error.ends_with(&alloc::format!("got `{format}`")), "{error}");
        }
    }
}
