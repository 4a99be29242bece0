//! Attention of a rank's queries to the keys of one rank, under context parallelism.

use deepwell_ir::ops::{AttentionHeads, KeySource, PartPlaces, seen_keys};
use rayon::prelude::*;

use super::oracle::{Backward, Forward, RowGradient, Shape, backward_of_rows, forward_of_rows};
use crate::ops::linear::oracle::dot;

/// The shape of a rank's part (of its mask settings `causal` and `window` are used), the origin of
/// the keys, and the places of both ranks, if there is a window.
pub type Part<'a> = (&'a Shape, KeySource, Option<PartPlaces>);

/// The scaled scores of a row, from the rank's first key to the last that the row sees; -∞ before
/// the row's window. Empty if the row sees no key.
fn scores(
    (shape, keys, places): Part<'_>,
    q: &[f64],
    k: &[f64],
    (batch, head, token): (usize, usize, usize),
) -> Vec<f64> {
    let query = &q[shape.query(batch, token, head)..][..shape.head_dim];
    let score = |key| shape.scale * dot(query, &k[shape.key(batch, key, head)..][..shape.head_dim]);
    let Shape { causal, window, .. } = *shape;
    let mask = AttentionHeads { causal, window, ..AttentionHeads::default() };
    let seen = seen_keys(&mask, keys, places, token, shape.seq);
    if seen.is_empty() {
        return Vec::new();
    }
    let before = std::iter::repeat_n(f64::NEG_INFINITY, seen.start);
    before.chain(seen.map(score)).collect()
}

/// out and lse of these keys alone; zeros and -∞ for a row without visible keys.
pub fn forward(of: Part<'_>, q: &[f64], k: &[f64], v: &[f64]) -> Forward {
    forward_of_rows(of.0, v, |row| {
        let scores = scores(of, q, k, row);
        let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - greatest).exp()).sum();
        let weights = scores.iter().map(|score| (score - greatest).exp() / total);
        (weights.collect(), greatest + total.ln())
    })
}

/// The weight of each visible key in a row with this lse over all keys.
pub fn probabilities(
    of: Part<'_>,
    q: &[f64],
    k: &[f64],
    lse: f64,
    row: (usize, usize, usize),
) -> Vec<f64> {
    scores(of, q, k, row).iter().map(|score| (score - lse).exp()).collect()
}

/// Contributions of these queries and keys to the gradients; `whole` has out and lse of all keys.
pub fn backward(of: Part<'_>, dout: &[f64], [q, k, v]: [&[f64]; 3], whole: &Forward) -> Backward {
    let (shape, width) = (of.0, of.0.value_dim());
    let of_row = |(row, &lse): (&(usize, usize, usize), &f64)| {
        let (batch, head, token) = *row;
        let out = shape.out(batch, token, head);
        let dout = &dout[out..][..width];
        let delta = dot(dout, &whole.out[out..][..width]);
        let weights = probabilities(of, q, k, lse, *row);
        let dscore = |(key, p): (usize, &f64)| {
            let value = &v[shape.value(batch, key, head)..][..width];
            shape.scale * p * (dot(dout, value) - delta)
        };
        let dscores = weights.iter().enumerate().map(dscore).collect();
        RowGradient { weights, dscores }
    };
    let rows: Vec<(usize, usize, usize)> = shape.rows().collect();
    let of_rows: Vec<RowGradient> = rows.par_iter().zip(&whole.lse).map(of_row).collect();
    backward_of_rows(shape, dout, q, k, &of_rows)
}

/// out and lse of all keys from those of each part; zeros and -∞ for a row without visible keys.
pub fn merge(shape: &Shape, parts: &[Forward]) -> Forward {
    let width = shape.value_dim();
    let mut out = vec![0.0; shape.batch * shape.seq * shape.heads * width];
    let mut lse = Vec::new();
    for (index, (batch, head, token)) in shape.rows().enumerate() {
        let of_row = || parts.iter().map(|part| part.lse[index]);
        // A NaN need not survive the comparison: its weight makes the result NaN.
        let greatest = of_row().fold(f64::NEG_INFINITY, |a, b| if a > b { a } else { b });
        let weight = |lse: f64| if lse == f64::NEG_INFINITY { 0.0 } else { (lse - greatest).exp() };
        let total: f64 = of_row().map(weight).sum();
        lse.push(greatest + total.ln());
        let at = shape.out(batch, token, head);
        for part in parts.iter().filter(|part| part.lse[index] != f64::NEG_INFINITY) {
            let share = weight(part.lse[index]) / total;
            let rows = out[at..at + width].iter_mut().zip(&part.out[at..]);
            rows.for_each(|(out, of)| *out += share * of);
        }
    }
    Forward { out, lse }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::Zigzag;

    use super::super::oracle;
    use super::*;
    use crate::ops::finite_difference::varied;

    /// The rows, of `columns` elements, of one place in the context-parallel group.
    fn rows(whole: &[f64], columns: usize, part: Zigzag, seq: usize) -> Vec<f64> {
        let rows: Vec<&[f64]> = whole.chunks_exact(columns).collect();
        part.part_of(&rows, seq).concat()
    }

    /// Merged over all ranks, the results equal attention to whole sequences, whose gradients are
    /// checked by finite differences.
    #[test]
    fn parts_together_are_the_whole() {
        for (ranks, chunk, value_dim, window) in [
            (1, 2, None, None),
            (2, 1, None, None),
            (2, 3, Some(2), None),
            (3, 2, None, None),
            (1, 3, None, Some(2)),
            (2, 3, None, Some(1)),
            (2, 3, None, Some(4)),
            (3, 2, Some(2), Some(5)),
            (3, 2, None, Some(100)),
        ] {
            check([ranks, chunk], value_dim, window);
        }
    }

    /// Adds terms to a sum, which is empty before the first.
    fn add(sum: &mut Vec<f64>, terms: &[f64]) {
        sum.resize(terms.len(), 0.0);
        sum.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
    }

    fn check([ranks, chunk]: [usize; 2], value_dim: Option<usize>, window: Option<usize>) {
        let seq = 2 * ranks * chunk;
        let whole = Shape {
            batch: 2,
            seq,
            heads: 2,
            kv_heads: 1,
            head_dim: 3,
            value_dim,
            scale: 0.7,
            causal: true,
            window,
            ..Shape::default()
        };
        let chunk_shape = Shape { seq: 2 * chunk, ..whole };
        let widths = [6, 3, whole.value_dim(), 2 * whole.value_dim()];
        let inputs: Vec<Vec<f64>> =
            (0..4).map(|at| varied(2 * seq * widths[at], at as u64)).collect();
        let [q, k, v, dout] = [0, 1, 2, 3].map(|at| inputs[at].as_slice());
        let expected = oracle::forward(&whole, q, k, v, &[]);
        let gradients = oracle::backward(&whole, dout, q, k, v, &[]);
        let part = |rank| Zigzag { place: rank, ranks };
        let rows_of_rank = |at: usize, rank| rows(&inputs[at], widths[at], part(rank), seq);
        let near = |what: &str, got: &[f64], whole: &[f64], columns, rank| {
            let expected = rows(whole, columns, part(rank), seq);
            assert_eq!(got.len(), expected.len());
            for (got, expected) in got.iter().zip(&expected) {
                assert!((got - expected).abs() < 1e-12, "{what} of {rank} among {ranks}");
            }
        };
        let mut of_keys = vec![(vec![], vec![]); ranks];
        for rank in 0..ranks {
            let source = |step| match step {
                0 => KeySource::Own,
                step if step <= rank => KeySource::Earlier,
                _ => KeySource::Later,
            };
            let owner = |step| (rank + ranks - step) % ranks;
            let part_of = |step| {
                let places = PartPlaces { queries: part(rank), keys: owner(step) };
                (&chunk_shape, source(step), window.map(|_| places))
            };
            let q = rows_of_rank(0, rank);
            let parts: Vec<Forward> = (0..ranks)
                .map(|step| {
                    let of = owner(step);
                    forward(part_of(step), &q, &rows_of_rank(1, of), &rows_of_rank(2, of))
                })
                .collect();
            let merged = merge(&chunk_shape, &parts);
            near("out", &merged.out, &expected.out, widths[3], rank);
            let dout = rows_of_rank(3, rank);
            let mut dq = vec![0.0; q.len()];
            for step in 0..ranks {
                let of = owner(step);
                let (k, v) = (rows_of_rank(1, of), rows_of_rank(2, of));
                let gradients_of_step = backward(part_of(step), &dout, [&q, &k, &v], &merged);
                let (dk, dv) = &mut of_keys[of];
                add(&mut dq, &gradients_of_step.dq);
                add(dk, &gradients_of_step.dk);
                add(dv, &gradients_of_step.dv);
            }
            near("dq", &dq, &gradients.dq, widths[0], rank);
        }
        for (rank, (dk, dv)) in of_keys.iter().enumerate() {
            near("dk", dk, &gradients.dk, widths[1], rank);
            near("dv", dv, &gradients.dv, widths[2], rank);
        }
    }
}
