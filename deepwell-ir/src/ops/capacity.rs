//! Largest number of (token, expert) pairs that an expert accepts.

use super::Check;
use crate::{Dim, OpError};

/// Sizes round capacity factors up to multiples of `1 / STEPS`.
const STEPS: f64 = 65_536.0;

/// Capacity of each of `experts` experts for `tokens` with `top_k` experts each:
/// `ceil(factor · tokens · top_k / experts)`, at most all tokens.
///
/// The factor is rounded up to a multiple of 2^-16. The result is exact for factors such as 1.25.
/// For any other factor the result is at most one pair larger, for up to 65,536 pairs per expert on
/// average. The result is never smaller than the capacity that a kernel computes in floating point,
/// because that computation is monotonic in the factor and exact for multiples of 2^-16.
///
/// ```
/// use deepwell_ir::{Dim, ops::capacity};
///
/// assert_eq!(capacity(1.25, 8, Dim::TOKENS, 2).to_string(), "5*B*S/16");
/// assert_eq!(capacity(4.0, 8, Dim::TOKENS, 2), Dim::TOKENS);
/// ```
pub fn capacity(factor: f64, experts: usize, tokens: Dim, top_k: usize) -> Dim {
    if factor * top_k as f64 >= experts as f64 {
        return tokens;
    }
    let steps = (factor * STEPS).ceil() as usize * top_k;
    let most = STEPS as usize * experts;
    if steps < most { tokens.share(steps, most) } else { tokens }
}

/// Whether, for many tokens, the capacity of `here` of the `experts` is smaller than the number of
/// pairs that tokens with `top_k` experts each can send to these experts.
pub fn capacity_sizes_rows(factor: f64, experts: usize, here: usize, top_k: usize) -> bool {
    factor * (here * top_k) as f64 <= (experts * top_k.min(here)) as f64
}

/// Rejects a capacity factor unless finite and positive.
pub(super) fn check_factor(check: &Check<'_>, factor: Option<f64>) -> Result<(), OpError> {
    match factor.filter(|factor| !factor.is_finite() || *factor <= 0.0) {
        Some(factor) => Err(check.error("a finite capacity factor over 0", factor.to_string())),
        None => Ok(()),
    }
}
