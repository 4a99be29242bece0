//! Counters of a quantization.

use serde::{Deserialize, Serialize};

/// Counters of one or more quantizations. Integers and a maximum, so merging is associative and the
/// result does not depend on the order of threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QuantStats {
    /// Largest finite magnitude of the source.
    pub amax: f32,
    /// Elements written. A call that writes both operands counts each element twice.
    pub elements: u64,
    /// Non-zero elements whose code is zero of either sign. The scale of a block with an infinity
    /// is 2^127, so nearly every finite element of such a block counts here.
    pub underflows: u64,
    /// Finite elements that exceeded the largest finite element after scaling. Zero under
    /// [`crate::ScaleRule::Rceil`], which never saturates finite input.
    pub saturations: u64,
    /// Groups of elements with one exponent (1 x 32, 1 x 128, 32 x 32 or 128 x 128) whose scale was
    /// clamped to 2^-127 because the rule gave a smaller scale.
    pub scale_clamps: u64,
    /// NaN and infinite elements of the source.
    pub nonfinite: u64,
}

impl QuantStats {
    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.amax = self.amax.max(other.amax);
        self.elements += other.elements;
        self.underflows += other.underflows;
        self.saturations += other.saturations;
        self.scale_clamps += other.scale_clamps;
        self.nonfinite += other.nonfinite;
    }

    /// `self` plus the counts of `other`.
    #[must_use]
    pub fn merged(mut self, other: Self) -> Self {
        self.merge(&other);
        self
    }

    /// Share of all elements that underflowed to zero, 0 to 1.
    #[must_use]
    pub fn underflow_fraction(&self) -> f64 {
        fraction(self.underflows, self.elements)
    }

    /// Share of all elements that saturated, 0 to 1.
    #[must_use]
    pub fn saturation_fraction(&self) -> f64 {
        fraction(self.saturations, self.elements)
    }
}

fn fraction(count: u64, total: u64) -> f64 {
    if total == 0 { 0.0 } else { count as f64 / total as f64 }
}
