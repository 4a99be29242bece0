//! The most pairs of token and expert that an expert takes.

use super::Check;
use crate::{Dim, OpError};

/// Capacity factors are rounded up to multiples of `1 / STEPS` for sizes.
const STEPS: f64 = 65_536.0;

/// Most pairs that one of `experts` takes of `tokens` with `top_k` experts each, with a capacity
/// factor: `ceil(factor · tokens · top_k / experts)`, and never more than all tokens.
///
/// The factor is rounded up to a multiple of 2^-16. The result is exact for factors such as 1.25.
/// For any other factor it is at most one pair larger, with up to 65,536 pairs per expert on
/// average. It is never smaller than the capacity that a kernel computes in floating point: that
/// computation is monotonic in the factor and exact for multiples of 2^-16.
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
    let (steps, most) = ((factor * STEPS).ceil() as usize * top_k, STEPS as usize * experts);
    if steps < most { tokens.share(steps, most) } else { tokens }
}

/// Whether the capacity of `here` of the `experts` is smaller than the number of pairs that tokens
/// with `top_k` experts each can send there, for a large number of tokens.
pub fn capacity_sizes_rows(factor: f64, experts: usize, here: usize, top_k: usize) -> bool {
    factor * (here * top_k) as f64 <= (experts * top_k.min(here)) as f64
}

/// Refuses a capacity factor that is not a finite number over 0.
pub(super) fn check_factor(check: &Check<'_>, factor: Option<f64>) -> Result<(), OpError> {
    match factor.filter(|factor| !factor.is_finite() || *factor <= 0.0) {
        Some(factor) => Err(check.error("a finite capacity factor over 0", factor.to_string())),
        None => Ok(()),
    }
}
