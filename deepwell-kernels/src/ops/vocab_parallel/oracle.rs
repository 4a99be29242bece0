//! A rank's part of an embedding and of a head whose vocabulary is split over ranks. Tests compare
//! the sums over ranks with the results for the whole vocabulary.

use deepwell_ir::ops::VocabSlice;

/// `out[t] = table[tokens[t] - first]`, zeros for tokens of other ranks; table `[rows, hidden]`.
pub fn embedding(tokens: &[i32], table: &[f64], slice: &VocabSlice, hidden: usize) -> Vec<f64> {
    let mut out = vec![0.0; tokens.len() * hidden];
    for (token, out) in tokens.iter().zip(out.chunks_exact_mut(hidden)) {
        if let Some(row) = slice.row_of(*token) {
            out.copy_from_slice(&table[row * hidden..][..hidden]);
        }
    }
    out
}

/// The gradient of the table `[rows, hidden]` from `dout` `[tokens, hidden]`.
pub fn embedding_backward(
    tokens: &[i32],
    dout: &[f64],
    slice: &VocabSlice,
    hidden: usize,
) -> Vec<f64> {
    let mut dtable = vec![0.0; slice.rows * hidden];
    for (token, dout) in tokens.iter().zip(dout.chunks_exact(hidden)) {
        let Some(row) = slice.row_of(*token) else { continue };
        for (sum, dout) in dtable[row * hidden..].iter_mut().zip(dout) {
            *sum += dout;
        }
    }
    dtable
}

/// For each token: largest logit, sum of `exp(logit - largest)`, and the target's logit: x
/// `[tokens, hidden]`, w `[rows, hidden]`.
pub fn sums(
    x: &[f64],
    w: &[f64],
    targets: &[i32],
    slice: &VocabSlice,
    hidden: usize,
) -> Vec<[f64; 3]> {
    let of_token = |(x, &target): (&[f64], &i32)| {
        let dot = |w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
        let logits: Vec<f64> = w.chunks_exact(hidden).map(dot).collect();
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum = logits.iter().map(|logit| (logit - largest).exp()).sum();
        [largest, sum, slice.row_of(target).map_or(0.0, |row| logits[row])]
    };
    x.chunks_exact(hidden).zip(targets).map(of_token).collect()
}

#[cfg(test)]
mod tests {
    use approx::assert_abs_diff_eq;

    use super::*;
    use crate::ops::embedding::oracle as whole_embedding;
    use crate::ops::finite_difference::{check, dot, varied};
    use crate::ops::linear_cross_entropy::oracle as whole_head;

    const TOKENS: [i32; 5] = [2, 0, 5, 4, 2];

    #[test]
    fn backward_agrees_with_finite_differences() {
        let (hidden, slice) = (3, VocabSlice { first: 2, rows: 3, vocab: 6 });
        let table = varied(slice.rows * hidden, 1);
        let dout = varied(TOKENS.len() * hidden, 2);
        let dtable = embedding_backward(&TOKENS, &dout, &slice, hidden);
        check("dtable", &table, &dtable, |table| {
            dot(&embedding(&TOKENS, table, &slice, hidden), &dout)
        });
    }

    #[test]
    fn ranks_together_are_the_whole() {
        let (hidden, vocab, parts) = (3, 6, 3);
        let x = varied(TOKENS.len() * hidden, 1);
        let table = varied(vocab * hidden, 2);
        let slices: Vec<VocabSlice> =
            (0..parts).map(|place| VocabSlice::of(vocab, place, parts).unwrap()).collect();
        let rows = |slice: &VocabSlice| &table[slice.first * hidden..][..slice.rows * hidden];
        let mut out = vec![0.0; TOKENS.len() * hidden];
        for slice in &slices {
            let part = embedding(&TOKENS, rows(slice), slice, hidden);
            out.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        assert_eq!(out, whole_embedding::forward(&TOKENS, &table, hidden));
        let parts: Vec<Vec<[f64; 3]>> =
            slices.iter().map(|slice| sums(&x, rows(slice), &TOKENS, slice, hidden)).collect();
        let loss: f64 = (0..TOKENS.len())
            .map(|token| {
                let of_token = || parts.iter().map(|part| part[token]);
                let largest = of_token().map(|sums| sums[0]).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = of_token().map(|sums| sums[1] * (sums[0] - largest).exp()).sum();
                largest + sum.ln() - of_token().map(|sums| sums[2]).sum::<f64>()
            })
            .sum();
        let expected = whole_head::forward(&x, &table, &TOKENS, hidden, 1.0);
        assert_abs_diff_eq!(loss, expected, epsilon = 1e-12);
    }
}
