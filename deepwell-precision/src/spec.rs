//! What a block-scaled tensor looks like: element format, scale rule, granularity, block shape.

use serde::{Deserialize, Serialize};

use crate::names::named_enum;

/// Elements that share one stored scale byte, along the contraction.
pub const BLOCK: usize = 32;

named_enum! {
    /// Format of one element of a block.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum ElementFormat ("element format") {
        /// Four exponent and three fraction bits, up to 448: for weights, activations, gradients.
        #[default]
        E4M3 = "e4m3",
        /// Five exponent and two fraction bits, up to 57344.
        E5M2 = "e5m2",
    }
}

named_enum! {
    /// How the scale of a block follows from its largest magnitude; see [`crate::e8m0`].
    #[derive(Default)]
    #[non_exhaustive]
    pub enum ScaleRule ("scale rule") {
        /// amax / 448 rounded up to a power of two. Never saturates finite input.
        #[default]
        Rceil = "rceil",
        /// 2^(floor(log2 amax) - 8), of the OCP MX specification. Saturates when the fraction of
        /// amax lies above 1.75.
        OcpFloor = "floor",
    }
}

named_enum! {
    /// How many neighbouring elements along the contraction share one exponent. Storage does not
    /// depend on it: there is one scale byte for each [`BLOCK`] elements.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum Granularity ("granularity") {
        /// Each block has its own exponent.
        #[default]
        G32 = "32",
        /// Four neighbouring blocks share one, its byte stored four times.
        G128 = "128",
    }
}

impl Granularity {
    /// 32 or 128.
    #[must_use]
    pub const fn elements(self) -> usize {
        match self {
            Self::G32 => 32,
            Self::G128 => 128,
        }
    }
}

named_enum! {
    /// Extent of a block.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum BlockShape ("block shape") {
        /// 1 x 32 (1 x 128 with [`Granularity::G128`]), long along the contraction.
        #[default]
        Row = "row",
        /// 32 x 32 (128 x 128 with [`Granularity::G128`]): the row and the column copy of a matrix
        /// then hold the same values. For weights.
        Square = "square",
    }
}

/// How one tensor is quantized. The default is E4M3, RCEIL, one exponent per 1 x 32 block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MxSpec {
    /// Format of the elements.
    pub element: ElementFormat,
    /// How scales follow from magnitudes.
    pub scale_rule: ScaleRule,
    /// How many elements share an exponent.
    pub granularity: Granularity,
    /// Extent of a block.
    pub block: BlockShape,
}
