//! Finite differences, test numbers, and settings of a router.

use deepwell_ir::ops::{Route, RouteScore};
use deepwell_precision::random::SplitMix64;

/// A plain router: no normalization, no groups, no bias.
pub(crate) fn settings(experts: usize, top_k: usize, score: RouteScore) -> Route {
    Route {
        experts,
        top_k,
        score,
        normalize: false,
        scaling: 1.0,
        groups: None,
        selection_bias: false,
    }
}

/// `len` pseudorandom numbers in `-1..1`, without patterns that could hide errors.
pub(crate) fn varied(len: usize, seed: u64) -> Vec<f64> {
    let mut random = SplitMix64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d);
    (0..len).map(|_| (random.draw() >> 11) as f64 / (1u64 << 52) as f64 - 1.0).collect()
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Compares `analytic` with central differences of `loss` at `x`.
#[track_caller]
pub(crate) fn check_gradient(
    name: &str,
    x: &[f64],
    analytic: &[f64],
    loss: impl Fn(&[f64]) -> f64,
) {
    assert_eq!(x.len(), analytic.len(), "`{name}` has the wrong length");
    let mut moved = x.to_vec();
    for index in 0..x.len() {
        // The cube root of machine epsilon: the total error is then about 1e-10.
        let step = 6e-6;
        moved[index] = x[index] + step;
        let above = loss(&moved);
        moved[index] = x[index] - step;
        let below = loss(&moved);
        moved[index] = x[index];
        let numeric = (above - below) / (2.0 * step);
        assert!(
            (analytic[index] - numeric).abs() <= 1e-8,
            "`{name}`[{index}]: formula {:e}, finite difference {numeric:e}",
            analytic[index]
        );
    }
}
