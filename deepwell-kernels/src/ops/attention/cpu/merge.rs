//! Attention to several sets of keys from that to each.

use rayon::prelude::*;

use crate::cpu::element::Element;
use crate::cpu::softmax::exp_or_zero;

/// Tokens that one task merges.
const TOKENS_PER_TASK: usize = 64;

/// Merges what queries found of several sets of keys: `parts` are out `[batch * seq, heads *
/// value_dim]` and lse `[batch, heads, seq]` of each, in the order in which they are summed.
///
/// With `lse = ln Σ exp(lse_i)` the result is `Σ exp(lse_i - lse) out_i`, summed in FP32. A set of
/// which a query sees nothing has -∞ for it and changes no bit.
///
/// # Panics
///
/// When a slice's length does not fit, or there are no parts.
pub fn merge_attention<E: Element>(
    parts: &[(&[f32], &[f32])],
    (heads, seq): (usize, usize),
    out: &mut [E],
    lse: &mut [f32],
) {
    assert!(!parts.is_empty() && heads > 0 && seq > 0, "nothing to merge");
    for (part_out, part_lse) in parts {
        assert_eq!((part_out.len(), part_lse.len()), (out.len(), lse.len()), "a part's lengths");
    }
    lse.par_iter_mut().enumerate().for_each(|(index, lse)| {
        let greatest = greatest(parts, index);
        let total: f32 = parts.iter().map(|(_, of)| exp_or_zero(of[index] - greatest)).sum();
        *lse = greatest + total.ln();
    });
    let tokens = lse.len() / heads;
    if tokens == 0 {
        return;
    }
    let width = out.len() / tokens;
    assert_eq!((tokens % seq, width % heads), (0, 0), "whole sequences and heads");
    let value_dim = width / heads;
    let rows = out.par_chunks_mut((TOKENS_PER_TASK * width).max(1));
    rows.enumerate().for_each(|(task, rows)| {
        for (row, out) in rows.chunks_exact_mut(width.max(1)).enumerate() {
            let token = task * TOKENS_PER_TASK + row;
            for (head, out) in out.chunks_exact_mut(value_dim.max(1)).enumerate() {
                let index = (token / seq * heads + head) * seq + token % seq;
                let greatest = greatest(parts, index);
                let weights = parts.iter().map(|(_, of)| exp_or_zero(of[index] - greatest));
                let weights: Vec<f32> = weights.collect();
                let scale = 1.0 / weights.iter().sum::<f32>();
                let first = (token * heads + head) * value_dim;
                for (at, out) in out.iter_mut().enumerate() {
                    let terms = parts.iter().zip(&weights);
                    let sum: f32 = terms.map(|((of, _), weight)| weight * of[first + at]).sum();
                    *out = E::from_f32(sum * scale);
                }
            }
        }
    });
}

/// The greatest of a row's sums.
fn greatest(parts: &[(&[f32], &[f32])], index: usize) -> f32 {
    parts.iter().map(|(_, lse)| lse[index]).fold(f32::NEG_INFINITY, |a, b| {
        // A NaN stays one.
        if a.is_nan() || a > b { a } else { b }
    })
}
