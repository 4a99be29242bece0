//! Parts of formats and settings of policies: elements, scale rules, blocks.

use crate::names::named_enum;
use crate::{Overflow, Rounding, e2m1, e2m3, e3m2, e4m3, e5m2, minifloat};

/// Elements per stored scale byte, along the contraction.
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
        /// Three exponent and two fraction bits, up to 28: MXFP6 with range.
        E3M2 = "e3m2",
        /// Two exponent and three fraction bits, up to 7.5: MXFP6 with precision.
        E2M3 = "e2m3",
        /// Two exponent bits and one fraction bit, up to 6: MXFP4.
        E2M1 = "e2m1",
    }
}

impl ElementFormat {
    /// Bits of one code: 8, 6 or 4. Quantization writes one code per byte; [`crate::packed`] stores
    /// elements of fewer bits without gaps.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::E4M3 | Self::E5M2 => 8,
            Self::E3M2 | Self::E2M3 => 6,
            Self::E2M1 => 4,
        }
    }

    /// Code of `x` in this format, in the low bits of a byte; see [`crate::e4m3::encode`] for the
    /// conventions.
    #[must_use]
    pub fn encode(self, x: f32, rounding: Rounding, overflow: Overflow) -> u8 {
        match self {
            Self::E4M3 => e4m3::encode(x, rounding, overflow),
            Self::E5M2 => e5m2::encode(x, rounding, overflow),
            Self::E3M2 => e3m2::encode(x, rounding, overflow),
            Self::E2M3 => e2m3::encode(x, rounding, overflow),
            Self::E2M1 => e2m1::encode(x, rounding, overflow),
        }
    }

    /// Code of `x` in this format, rounded away from zero if the fraction of the distance to the
    /// next code exceeds `bits` / 2^32: with uniform `bits`, for example from [`crate::Philox`],
    /// the expectation is `x`, to 2^-32 of the spacing. Representable values stay; values beyond
    /// the range saturate.
    ///
    /// ```
    /// use deepwell_precision::ElementFormat::E2M1;
    /// // 4.5 is a quarter of the way from 4 to 6.
    /// assert_eq!(E2M1.decode(E2M1.encode_stochastic(4.5, (1 << 30) - 1)), 6.0);
    /// assert_eq!(E2M1.decode(E2M1.encode_stochastic(4.5, 1 << 30)), 4.0);
    /// ```
    #[must_use]
    pub fn encode_stochastic(self, x: f32, bits: u32) -> u8 {
        let layout = match self {
            Self::E4M3 => &e4m3::LAYOUT,
            Self::E5M2 => &e5m2::LAYOUT,
            Self::E3M2 => &e3m2::LAYOUT,
            Self::E2M3 => &e2m3::LAYOUT,
            Self::E2M1 => &e2m1::LAYOUT,
        };
        minifloat::encode_stochastic(x, layout, bits)
    }

    /// Value of `code` in this format, exact.
    #[must_use]
    pub const fn decode(self, code: u8) -> f32 {
        match self {
            Self::E4M3 => e4m3::decode(code),
            Self::E5M2 => e5m2::decode(code),
            Self::E3M2 => e3m2::decode(code),
            Self::E2M3 => e2m3::decode(code),
            Self::E2M1 => e2m1::decode(code),
        }
    }

    /// Largest finite value.
    #[must_use]
    pub const fn max(self) -> f32 {
        match self {
            Self::E4M3 => e4m3::MAX,
            Self::E5M2 => e5m2::MAX,
            Self::E3M2 => e3m2::MAX,
            Self::E2M3 => e2m3::MAX,
            Self::E2M1 => e2m1::MAX,
        }
    }
}

named_enum! {
    /// Computation of a block's scale from its largest magnitude; see [`crate::e8m0`].
    #[derive(Default)]
    #[non_exhaustive]
    pub enum ScaleRule ("scale rule") {
        /// amax / 448 (or the format's largest element) rounded up to a power of two. Never
        /// saturates finite input.
        #[default]
        Rceil = "rceil",
        /// 2^(floor(log2 amax) - 8) (or the largest exponent of an element), of the OCP MX
        /// specification. Saturates if the fraction of amax exceeds the fraction of the largest
        /// element, 1.75 for E4M3.
        OcpFloor = "floor",
        /// The scale of `Rceil` or half of it, whichever gives the block the smaller squared error.
        /// With the smaller scale the largest elements may saturate.
        MinError = "min_error",
    }
}

named_enum! {
    /// Number of neighbouring elements along the contraction with one exponent. Storage is
    /// independent of it: there is one scale byte for each [`BLOCK`] elements.
    #[derive(Default)]
    pub enum Granularity ("granularity") {
        /// Each block has its own exponent.
        #[default]
        G32 = "32",
        /// Four neighbouring blocks share an exponent, stored four times.
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
    /// Extent of a block; its length along the contraction is part of the format.
    #[derive(Default)]
    pub enum BlockShape ("block shape") {
        /// One row: 1 x 32, 1 x 128, 1 x 16.
        #[default]
        Row = "row",
        /// As many rows as elements along the contraction, 32 x 32, 128 x 128 or 16 x 16: rowwise
        /// and columnwise quantization then give the same values. For weights.
        Square = "square",
    }
}
