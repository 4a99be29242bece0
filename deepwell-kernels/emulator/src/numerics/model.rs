//! Parameters of the hardware's sums.

use super::spec::{Kind, MmaSpec, TensorCore};

/// Model of the sum of one step along K.
///
/// All products of the step and the accumulator form one sum. Each term is a significand times a
/// power of two. The significand of a product is the product of both significands, not normalized;
/// the exponent is the sum of both exponents (subnormal elements have the format's least exponent;
/// scales add their exponents). Each term is truncated to `fraction_bits` bits below the largest
/// exponent of the nonzero terms. The truncated terms are added exactly. The sum is converted to
/// binary32 by truncation to `mantissa_bits` (subnormal results: to the same bit weight as at
/// 2^-126), or to binary16 by rounding to nearest, ties to even.
///
/// A NaN term, infinity times zero, infinities of both signs and a NaN scale give `0x7fff_ffff`
/// (`0x7fff` in binary16). An infinity gives the same infinity, as does a finite sum beyond the
/// range. A sum of zero is positive.
///
/// # Source
///
/// The model is the one that the authors of MMA-Sim found by probing (arXiv 2511.10909), except for
/// a zero accumulator. In MMA-Sim zero has the exponent -126; on an H200 zero does not count for
/// the largest exponent (shown by the BF16 vectors with results below 2^-126). Confidence of each
/// row:
///
/// | instruction | fraction bits | step of K | seen |
/// |---|---|---|---|
/// | `wgmma` E4M3 | 13, result 13 | 32 | equal to an H200 bit for bit (`tests/golden`) |
/// | `wgmma` BF16 | 25 | 16 | equal to an H200 bit for bit (`tests/golden`) |
/// | `wgmma` F16, TF32, E5M2, F16 accumulators | as above | 16, 8, 32 | published model |
/// | `tcgen05.mma` f16, tf32, f8f6f4, mxf8f6f4 | 25 | 16, 8, 32, 32 | published model |
/// | the same with E3M2 or E2M3 | 25 | 32 | not in the published model; taken to be alike |
/// | `tcgen05.mma` mxf4, mxf4nvf4 | 35 | 64 | published model, lower confidence |
/// | the same with K = 96 | 35 | 96 | not published: six groups in one sum, a guess |
/// | `mma.sync` sm_80 F16, BF16, TF32 | 24 | 8, 8, 4 | published model |
/// | `mma.sync` sm_89 8-bit floats | 13, result 13 | 16 | published model |
/// | `mma.sync` sm_90 F16, BF16, TF32 | 25 | 16, 16, 8 | published model |
/// | `mma.sync` sm_90 8-bit floats | 25 | see below | read off SASS |
/// | `mma.sync` sm_120a, all kinds | as `tcgen05` | | published model |
/// | NaN patterns, overflow to infinity, signs of zeros | | | published model |
/// | integers | exact | | the instruction set says so |
///
/// For `mma.sync` with 8-bit floats on sm_90 and sm_100, SASS converts to F16, sums the products
/// with index 0 or 1 modulo 4 along K, adds the products with index 2 or 3 in a second F16 MMA, and
/// adds the accumulator by an ordinary addition.
///
/// In the FP4 kinds, groups of 16 products are first summed exactly. The exponent of a group is the
/// sum of the exponents of its two scales, whatever the group's sum; the significand is the sum
/// times the significands of the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// Bits kept below the largest exponent among the terms.
    pub fraction_bits: i32,
    /// Mantissa bits that a binary32 result keeps.
    pub mantissa_bits: u32,
    /// Elements along K in one sum.
    pub step: usize,
}

impl Model {
    /// Returns the model of a kind of MMA, for a matrix with `k` elements along K. In the FP4
    /// kinds, `k` = 96 is one instruction; other sizes are steps of 64.
    pub fn new(spec: &MmaSpec, k: usize) -> Model {
        let byte_float = spec.kind == Kind::F8f6f4;
        let (fraction_bits, halves) = match spec.architecture {
            TensorCore::Ampere | TensorCore::Ada => (24, 2),
            TensorCore::Hopper | TensorCore::HopperWarp | TensorCore::Blackwell => (25, 1),
        };
        let truncated =
            byte_float && matches!(spec.architecture, TensorCore::Ada | TensorCore::Hopper);
        let step = match spec.kind {
            Kind::F16 | Kind::Bf16 => 16 / halves,
            Kind::Tf32 => 8 / halves,
            Kind::F8f6f4 if spec.architecture == TensorCore::HopperWarp => 16,
            Kind::F8f6f4 => 32 / halves,
            Kind::Mxf8f6f4 | Kind::I8 => 32,
            Kind::Mxf4nvf4 if k == 96 => 96,
            Kind::Mxf4nvf4 => 64,
        };
        let fraction_bits = match spec.kind {
            Kind::Mxf4nvf4 => 35,
            _ if truncated => 13,
            _ => fraction_bits,
        };
        let mantissa_bits = if truncated { 13 } else { 23 };
        Model { fraction_bits, mantissa_bits, step }
    }
}
