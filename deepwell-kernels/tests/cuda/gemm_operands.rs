//! Operands of GEMMs, and how far a right result may be from the exact one.

use deepwell_ir::DType;

use crate::compare::Tolerance;
use crate::harness::uniform;

/// 2^-62: a sum of 64 products of such numbers is near 2^-122.
const TINY: f32 = f32::from_bits((127 - 62) << 23);

/// What the operands hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Uniform in [-1, 1).
    Uniform,
    /// Integers from -4 to 4: every sum is exact in FP32, so that nothing but the rounding of the
    /// result is left.
    Integers,
    /// Large numbers close to each other, those of odd seeds of alternating sign.
    Cancelling,
    /// Magnitudes over 24 binary orders.
    WideRange,
    /// Products near the smallest normal number, so that MX scales of the results are clamped.
    Tiny,
}

impl Kind {
    pub(crate) fn values(self, len: usize, seed: u64) -> Vec<f32> {
        let values = uniform(len, seed, 1.0);
        match self {
            Kind::Uniform => values,
            Kind::Integers => values.iter().map(|x| (x * 4.49).round()).collect(),
            Kind::Cancelling => {
                let sign = |index: usize| if index as u64 & seed & 1 == 0 { 1.0 } else { -1.0 };
                let value = |(index, x): (usize, &f32)| sign(index) * (8.0 + x / 16.0);
                values.iter().enumerate().map(value).collect()
            }
            Kind::WideRange => {
                let exponents = uniform(len, seed + 100, 12.0);
                values.iter().zip(exponents).map(|(x, e)| x * e.round().exp2()).collect()
            }
            Kind::Tiny => values.iter().map(|x| x * TINY).collect(),
        }
    }

    /// No value is larger.
    fn largest(self) -> f64 {
        match self {
            Kind::Uniform => 1.0,
            Kind::Integers => 4.0,
            Kind::Cancelling => 8.0625,
            Kind::WideRange => 4096.0,
            Kind::Tiny => TINY.into(),
        }
    }
}

/// For a sum of `k` products of operands of one kind, and a number of at most `added` on top.
///
/// Tensor cores align the products of one instruction to the largest and cut below 2^-23 of it,
/// and each instruction rounds once: with steps of eight or more products the error of a sum is
/// below `k / 8 + 2` ulp of the largest partial sum. A partial sum is at most `k · largest²` and
/// for the kinds of random sign it grows with the root of K, which we multiply by eight.
pub(crate) fn gemm_tolerance(output: DType, k: usize, kind: Kind, added: f64) -> Tolerance {
    let (k, largest) = (k as f64, kind.largest());
    let partial = match kind {
        Kind::Uniform | Kind::WideRange | Kind::Tiny => 8.0 * k.sqrt() * largest * largest,
        Kind::Integers => 0.0,
        Kind::Cancelling => k * largest * largest,
    };
    let ulp = 2f64.powi(-23);
    let absolute = (k / 8.0 + 2.0) * ulp * (partial + added);
    match output {
        DType::Bf16 => Tolerance { absolute, relative: 1.0 / 256.0 },
        // The result's own rounding, and that of the accumulation onto it.
        _ => Tolerance { absolute, relative: 2.0 * ulp },
    }
}
