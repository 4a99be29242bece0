//! Merges attention to disjoint sets of keys into attention to all keys.

use rayon::prelude::*;

use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::softmax::exp_or_zero;

/// Tokens per task.
const TOKENS_PER_TASK: usize = 64;

/// Merges the results of queries for several sets of keys: `parts` has out
/// `[batch * seq, heads * value_dim]` and lse `[batch, heads, seq]` of each set, in the order of
/// summation.
///
/// With `lse = ln Σ exp(lse_i)` the result is `Σ exp(lse_i - lse) out_i`, summed in FP32. For a set
/// that is hidden from a query, `lse_i` is -∞ and the set changes no bit.
///
/// # Panics
///
/// If a slice's length does not fit, or there are no parts.
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

/// The greatest lse of a row over the parts.
fn greatest(parts: &[(&[f32], &[f32])], index: usize) -> f32 {
    parts.iter().map(|(_, lse)| lse[index]).fold(f32::NEG_INFINITY, |a, b| {
        // Keeps NaN.
        if a.is_nan() || a > b { a } else { b }
    })
}
