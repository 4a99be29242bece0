//! Scaled dot-product attention with grouped query heads, softmax over whole rows.

use std::ops::Range;

use rayon::prelude::*;

use crate::ops::linear::oracle::{add_scaled, dot};

/// Sizes and settings; query head `h` reads key and value head `h * kv_heads / heads`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a query and of a key.
    pub head_dim: usize,
    /// Width of a value, if different from `head_dim`.
    pub value_dim: Option<usize>,
    /// Factor on the scores.
    pub scale: f64,
    /// Whether a token sees only itself and earlier tokens.
    pub causal: bool,
    /// Number of tokens that a token sees, counting back from itself; all if `None`.
    pub window: Option<usize>,
    /// Lengths of the documents of a sequence; a token sees only its own document. Sequence `b`
    /// begins with the `b`-th length, the other lengths follow cyclically, and the last document is
    /// cut at the end of the sequence. Empty for joined documents.
    pub documents: &'static [usize],
}

impl Shape {
    /// Width of a value.
    pub fn value_dim(&self) -> usize {
        self.value_dim.unwrap_or(self.head_dim)
    }

    /// Offset of a query head's vector in q and its gradient (`[batch * seq, heads * head_dim]`).
    pub fn query(&self, batch: usize, token: usize, head: usize) -> usize {
        ((batch * self.seq + token) * self.heads + head) * self.head_dim
    }

    /// Offset of a query head's vector in out and its gradient
    /// (`[batch * seq, heads * value_dim]`).
    pub fn out(&self, batch: usize, token: usize, head: usize) -> usize {
        ((batch * self.seq + token) * self.heads + head) * self.value_dim()
    }

    /// Offset of the key of a *query* head in k and its gradient
    /// (`[batch * seq, kv_heads * head_dim]`).
    pub fn key(&self, batch: usize, token: usize, head: usize) -> usize {
        self.kv_row(batch, token, head) * self.head_dim
    }

    /// Offset of the value of a *query* head in v and its gradient
    /// (`[batch * seq, kv_heads * value_dim]`).
    pub fn value(&self, batch: usize, token: usize, head: usize) -> usize {
        self.kv_row(batch, token, head) * self.value_dim()
    }

    fn kv_row(&self, batch: usize, token: usize, head: usize) -> usize {
        let kv_head = head * self.kv_heads / self.heads;
        (batch * self.seq + token) * self.kv_heads + kv_head
    }

    /// Batch, head and query token of every row of scores, in the order of lse.
    pub fn rows(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let Self { batch, seq, heads, .. } = *self;
        (0..batch).flat_map(move |batch| {
            (0..heads).flat_map(move |head| (0..seq).map(move |token| (batch, head, token)))
        })
    }

    /// The tokens of a token's document.
    pub fn document(&self, batch: usize, token: usize) -> Range<usize> {
        let mut document = 0..if self.documents.is_empty() { self.seq } else { 0 };
        for &length in self.documents.iter().cycle().skip(batch) {
            if document.end > token {
                break;
            }
            document = document.end..self.seq.min(document.end + length);
        }
        document
    }

    /// [`Self::document`] of all tokens in the kernels' format, `[batch * seq, 2]`.
    pub fn documents_of_tokens(&self) -> Vec<i32> {
        let tokens = (0..self.batch * self.seq).map(|token| (token / self.seq, token % self.seq));
        let of_token = |(batch, token)| self.document(batch, token);
        tokens.map(of_token).flat_map(|of| [of.start as i32, of.end as i32]).collect()
    }

    /// The keys that are visible to a query token.
    pub fn keys_seen(&self, batch: usize, token: usize) -> Range<usize> {
        let document = self.document(batch, token);
        let end = if self.causal { token + 1 } else { document.end };
        let first = self.window.map_or(0, |window| (token + 1).saturating_sub(window));
        first.max(document.start)..end
    }
}

/// Result of [`forward`].
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// `[batch * seq, heads * value_dim]`.
    pub out: Vec<f64>,
    /// Natural logarithm of the sum of exponentials of the scaled scores and the sink, if present,
    /// `[batch, heads, seq]`.
    pub lse: Vec<f64>,
}

/// Result of [`backward`]; each gradient has the shape of its input.
#[derive(Debug, Clone, PartialEq)]
pub struct Backward {
    /// Gradient of q.
    pub dq: Vec<f64>,
    /// Gradient of k.
    pub dk: Vec<f64>,
    /// Gradient of v.
    pub dv: Vec<f64>,
    /// Gradient of the sinks; empty without sinks.
    pub dsinks: Vec<f64>,
}

/// One row of `softmax(scale q k^T)` and its lse: the weight of each key up to the last visible
/// key, zero for keys before the token's window or document. `sinks` has one score per head, or is
/// empty.
pub fn probabilities(
    shape: &Shape,
    q: &[f64],
    k: &[f64],
    sinks: &[f64],
    (batch, head, token): (usize, usize, usize),
) -> (Vec<f64>, f64) {
    let width = shape.head_dim;
    let query = &q[shape.query(batch, token, head)..][..width];
    let seen = shape.keys_seen(batch, token);
    let score = |key| {
        if !seen.contains(&key) {
            return f64::NEG_INFINITY;
        }
        shape.scale * dot(query, &k[shape.key(batch, key, head)..][..width])
    };
    let scores: Vec<f64> = (0..seen.end).map(score).collect();
    // The sink is a term of the softmax without a key.
    let terms = || scores.iter().chain(sinks.get(head)).copied();
    let greatest = terms().fold(f64::NEG_INFINITY, f64::max);
    let lse = greatest + terms().map(|term| (term - greatest).exp()).sum::<f64>().ln();
    (scores.iter().map(|score| (score - lse).exp()).collect(), lse)
}

/// `out = softmax(scale q k^T) v` and lse, head by head. `sinks` has one score per head, or is
/// empty. Rows are distributed over all cores.
pub fn forward(shape: &Shape, q: &[f64], k: &[f64], v: &[f64], sinks: &[f64]) -> Forward {
    forward_of_rows(shape, v, |row| probabilities(shape, q, k, sinks, row))
}

/// Computes `out` and lse from the weights and the lse of each row.
pub(super) fn forward_of_rows(
    shape: &Shape,
    v: &[f64],
    weights: impl Fn((usize, usize, usize)) -> (Vec<f64>, f64) + Sync,
) -> Forward {
    let width = shape.value_dim();
    let of_row = |row: (usize, usize, usize)| {
        let (weights, lse) = weights(row);
        let mut out = vec![0.0; width];
        for (key, &weight) in weights.iter().enumerate() {
            add_scaled(&mut out, weight, &v[shape.value(row.0, key, row.1)..][..width]);
        }
        (out, lse)
    };
    let rows: Vec<(usize, usize, usize)> = shape.rows().collect();
    let of_rows: Vec<(Vec<f64>, f64)> = rows.par_iter().map(|&row| of_row(row)).collect();
    let mut out = vec![0.0; shape.batch * shape.seq * shape.heads * width];
    for (&(batch, head, token), (of_row, _)) in rows.iter().zip(&of_rows) {
        out[shape.out(batch, token, head)..][..width].copy_from_slice(of_row);
    }
    Forward { out, lse: of_rows.into_iter().map(|(_, lse)| lse).collect() }
}

/// The gradients for `dout`, which has the shape of out. Rows are distributed over all cores.
pub fn backward(
    shape: &Shape,
    dout: &[f64],
    q: &[f64],
    k: &[f64],
    v: &[f64],
    sinks: &[f64],
) -> Backward {
    let width = shape.value_dim();
    let of_row = |row: (usize, usize, usize)| {
        let (batch, head, token) = row;
        let (weights, lse) = probabilities(shape, q, k, sinks, row);
        let dout = &dout[shape.out(batch, token, head)..][..width];
        let dp: Vec<f64> = (0..weights.len())
            .map(|key| dot(dout, &v[shape.value(batch, key, head)..][..width]))
            .collect();
        // The softmax's Jacobian: ds_j = p_j (dp_j - sum_l p_l dp_l). The dp of a sink is zero.
        let mean = dot(&weights, &dp);
        let dscores = weights.iter().zip(&dp).map(|(p, dp)| shape.scale * p * (dp - mean));
        let dsink = sinks.get(head).map_or(0.0, |sink| (sink - lse).exp() * mean);
        (RowGradient { dscores: dscores.collect(), weights }, dsink)
    };
    let rows: Vec<(usize, usize, usize)> = shape.rows().collect();
    let (of_rows, of_sinks): (Vec<RowGradient>, Vec<f64>) =
        rows.par_iter().map(|&row| of_row(row)).unzip();
    let mut dsinks = vec![0.0; sinks.len()];
    if !sinks.is_empty() {
        rows.iter().zip(of_sinks).for_each(|(&(_, head, _), dsink)| dsinks[head] -= dsink);
    }
    Backward { dsinks, ..backward_of_rows(shape, dout, q, k, &of_rows) }
}

/// Weights and score gradients of a row, for the keys from the first on.
#[derive(Debug, Clone, PartialEq)]
pub struct RowGradient {
    /// The weights.
    pub weights: Vec<f64>,
    /// The gradients of the scores.
    pub dscores: Vec<f64>,
}

/// Gradients of q, k and v (the sinks' are left empty) from the gradients of rows, in the order of
/// [`Shape::rows`].
pub fn backward_of_rows(
    shape: &Shape,
    dout: &[f64],
    q: &[f64],
    k: &[f64],
    rows: &[RowGradient],
) -> Backward {
    let Shape { batch, seq, heads, kv_heads, head_dim: width, .. } = *shape;
    let value_width = shape.value_dim();
    let row = |batch: usize, head: usize, token: usize| &rows[(batch * heads + head) * seq + token];
    let mut dq = vec![0.0; q.len()];
    dq.par_chunks_exact_mut(width.max(1)).enumerate().for_each(|(index, dq)| {
        let (batch, token, head) = (index / heads / seq, index / heads % seq, index % heads);
        for (key, &dscore) in row(batch, head, token).dscores.iter().enumerate() {
            add_scaled(dq, dscore, &k[shape.key(batch, key, head)..][..width]);
        }
    });
    // One task per key and its value, over all queries that attend to the key.
    let keys = batch * seq * kv_heads;
    let (dk, dv): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (0..keys)
        .into_par_iter()
        .map(|index| {
            let (batch, key) = (index / kv_heads / seq, index / kv_heads % seq);
            let (mut dk, mut dv) = (vec![0.0; width], vec![0.0; value_width]);
            let of_key = |&head: &usize| head * kv_heads / heads == index % kv_heads;
            for head in (0..heads).filter(of_key) {
                for token in 0..seq {
                    let RowGradient { weights, dscores } = row(batch, head, token);
                    let (Some(&weight), Some(&dscore)) = (weights.get(key), dscores.get(key))
                    else {
                        continue;
                    };
                    add_scaled(&mut dk, dscore, &q[shape.query(batch, token, head)..][..width]);
                    let dout = &dout[shape.out(batch, token, head)..][..value_width];
                    add_scaled(&mut dv, weight, dout);
                }
            }
            (dk, dv)
        })
        .unzip();
    Backward { dq, dk: dk.concat(), dv: dv.concat(), dsinks: Vec::new() }
}

#[cfg(test)]
mod tests {
    use approx::assert_abs_diff_eq;

    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let shape = |(batch, seq), (heads, kv_heads, head_dim), scale, causal| Shape {
            batch,
            seq,
            heads,
            kv_heads,
            head_dim,
            scale,
            causal,
            ..Shape::default()
        };
        let extended = |window, value_dim, shape| Shape { window, value_dim, ..shape };
        let documents = |documents, shape| Shape { documents, ..shape };
        for (shape, has_sinks) in [
            (shape((1, 1), (1, 1, 1), 1.0, true), false),
            (shape((1, 4), (1, 1, 3), 0.6, false), false),
            (shape((2, 5), (4, 2, 2), 1.5, true), false),
            (shape((1, 3), (6, 2, 2), -0.7, true), false),
            (shape((2, 5), (4, 2, 2), 1.5, true), true),
            (shape((1, 4), (2, 1, 3), 0.6, false), true),
            (extended(Some(1), None, shape((1, 4), (2, 1, 2), 0.6, true)), true),
            (extended(Some(3), None, shape((2, 6), (4, 2, 2), 0.9, true)), true),
            (extended(Some(9), None, shape((1, 6), (2, 2, 2), 0.9, true)), false),
            (extended(None, Some(2), shape((2, 5), (2, 2, 3), 0.8, true)), false),
            (extended(Some(2), Some(5), shape((1, 5), (4, 2, 3), 0.8, true)), true),
            (documents(&[2, 1], shape((2, 6), (4, 2, 2), 0.9, true)), false),
            (documents(&[1], shape((1, 3), (2, 1, 2), 0.9, true)), true),
            (
                documents(&[4, 2], extended(Some(2), None, shape((1, 7), (2, 2, 2), 0.9, true))),
                true,
            ),
        ] {
            let tokens = shape.batch * shape.seq;
            let q = varied(tokens * shape.heads * shape.head_dim, 1);
            let k = varied(tokens * shape.kv_heads * shape.head_dim, 2);
            let v = varied(tokens * shape.kv_heads * shape.value_dim(), 3);
            let dout = varied(tokens * shape.heads * shape.value_dim(), 4);
            let s = varied(if has_sinks { shape.heads } else { 0 }, 5);
            let gradients = backward(&shape, &dout, &q, &k, &v, &s);
            let loss = |q: &[f64], k: &[f64], v: &[f64], s: &[f64]| {
                dot(&forward(&shape, q, k, v, s).out, &dout)
            };
            check("dq", &q, &gradients.dq, |q| loss(q, &k, &v, &s));
            check("dk", &k, &gradients.dk, |k| loss(&q, k, &v, &s));
            check("dv", &v, &gradients.dv, |v| loss(&q, &k, v, &s));
            check("dsinks", &s, &gradients.dsinks, |s| loss(&q, &k, &v, s));
        }
    }

    #[test]
    fn two_tokens_by_hand() {
        let shape = Shape {
            batch: 1,
            seq: 2,
            heads: 2,
            kv_heads: 1,
            head_dim: 1,
            scale: 2.0,
            causal: true,
            ..Shape::default()
        };
        // Two query heads of width 1 per token, one key and value head.
        let (q, k, v) = ([5.0, 6.0, 1.0, 0.0], [0.0, 0.5], [3.0, 7.0]);
        let e = std::f64::consts::E;
        // Token 0 sees itself. Token 1: scores 0 and 1 on head 0, 0 and 0 on head 1. A sink of 0
        // counts as an additional score of 0; with a window of 1 each token sees only itself.
        let window = Shape { window: Some(1), ..shape };
        for (shape, sinks, out, sums) in [
            (shape, vec![], [3.0, 3.0, (3.0 + 7.0 * e) / (1.0 + e), 5.0], [1.0, 1.0 + e, 1.0, 2.0]),
            (
                shape,
                vec![0.0, 0.0],
                [1.5, 1.5, (3.0 + 7.0 * e) / (2.0 + e), 10.0 / 3.0],
                [2.0, 2.0 + e, 2.0, 3.0],
            ),
            (window, vec![], [3.0, 3.0, 7.0, 7.0], [1.0, e, 1.0, 1.0]),
            (
                window,
                vec![0.0, 1.0],
                [1.5, 3.0 / (1.0 + e), 7.0 * e / (1.0 + e), 7.0 / (1.0 + e)],
                [2.0, 1.0 + e, 1.0 + e, 1.0 + e],
            ),
        ] {
            let result = forward(&shape, &q, &k, &v, &sinks);
            for (got, expected) in result.out.iter().zip(out) {
                assert_abs_diff_eq!(*got, expected, epsilon = 1e-14);
            }
            for (got, sum) in result.lse.iter().zip(sums) {
                assert_abs_diff_eq!(*got, f64::ln(sum), epsilon = 1e-14);
            }
        }
    }

    /// By definition each document gives the same result as alone.
    #[test]
    fn documents_of_a_sequence_are_those_one_by_one() {
        let packed = Shape {
            batch: 2,
            seq: 9,
            heads: 2,
            kv_heads: 1,
            head_dim: 2,
            value_dim: Some(3),
            scale: 0.7,
            causal: true,
            window: Some(3),
            documents: &[4, 1, 3],
        };
        // Sequence 1 begins with the second length, and the rest of the sequence is its last
        // document.
        let lengths: [&[usize]; 2] = [&[4, 1, 3, 1], &[1, 3, 4, 1]];
        let tokens = packed.batch * packed.seq;
        let q = varied(4 * tokens, 1);
        let k = varied(2 * tokens, 2);
        let v = varied(3 * tokens, 3);
        let (dout, sinks) = (varied(6 * tokens, 4), varied(2, 5));
        let got = forward(&packed, &q, &k, &v, &sinks);
        let gradients = backward(&packed, &dout, &q, &k, &v, &sinks);
        let mut dsinks = [0.0; 2];
        let mut first = 0;
        for (batch, lengths) in lengths.into_iter().enumerate() {
            for &seq in lengths {
                let alone = Shape { batch: 1, seq, documents: &[], ..packed };
                let rows = first..first + seq;
                let of = |x: &[f64], width: usize| x[width * rows.start..width * rows.end].to_vec();
                let (q, k, v, dout) = (of(&q, 4), of(&k, 2), of(&v, 3), of(&dout, 6));
                let expected = forward(&alone, &q, &k, &v, &sinks);
                assert_eq!(of(&got.out, 6), expected.out, "{batch} {rows:?}");
                let of_expected = backward(&alone, &dout, &q, &k, &v, &sinks);
                assert_eq!(of(&gradients.dq, 4), of_expected.dq, "{batch} {rows:?}");
                assert_eq!(of(&gradients.dk, 2), of_expected.dk, "{batch} {rows:?}");
                assert_eq!(of(&gradients.dv, 3), of_expected.dv, "{batch} {rows:?}");
                dsinks.iter_mut().zip(of_expected.dsinks).for_each(|(sum, of)| *sum += of);
                first = rows.end;
            }
        }
        let differences = gradients.dsinks.iter().zip(dsinks).map(|(got, sum)| (got - sum).abs());
        assert!(differences.fold(0.0, f64::max) < 1e-14);
        assert_eq!(packed.documents_of_tokens()[18..24], [0, 1, 1, 4, 1, 4]);
    }
}
