//! The most pairs of token and expert that an expert takes.

use super::Check;
use crate::{Dim, OpError};

/// What capacity factors are rounded up to a multiple of, where sizes follow from them.
const STEPS: f64 = 65_536.0;

/// Most pairs that one of `experts` takes of `tokens` with `top_k` experts each, with a capacity
/// factor: `ceil(factor · tokens · top_k / experts)`, and never more than all tokens.
///
/// The factor is rounded up to a multiple of 2^-16. So this is exact for factors such as 1.25, and
/// one pair more at most of any other factor with up to 65,536 pairs for an expert on average. It
/// is never less than what a kernel computes in floating point: there the result grows with the
/// factor, and that of a multiple of 2^-16 is exact.
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

/// Whether groups with a capacity are what sizes the rows of `here` of the `experts`, rather than
/// the pairs that tokens with `top_k` experts each can want of them, of many tokens.
pub fn capacity_sizes_rows(factor: f64, experts: usize, here: usize, top_k: usize) -> bool {
    factor * (here * top_k) as f64 <= (experts * top_k.min(here)) as f64
}

/// Wants a capacity factor, where there is one, to be a number over 0.
pub(super) fn check_factor(check: &Check<'_>, factor: Option<f64>) -> Result<(), OpError> {
    match factor.filter(|factor| !factor.is_finite() || *factor <= 0.0) {
        Some(factor) => Err(check.error("a finite capacity factor over 0", factor.to_string())),
        None => Ok(()),
    }
}
