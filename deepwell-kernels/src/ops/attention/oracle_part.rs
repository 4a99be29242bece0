//! Attention of a rank's queries to the keys of one rank, under context parallelism.

use deepwell_ir::ops::KeySource;

use rayon::prelude::*;

use super::oracle::{Backward, Forward, RowGradient, Shape, backward_of_rows, forward_of_rows};
use crate::ops::linear::oracle::dot;

/// The scaled scores of the keys that a row sees, from the rank's first key on. `shape` is the
/// shape of a rank's part; of its mask settings only `causal` is used.
fn scores(
    (shape, keys): (&Shape, KeySource),
    q: &[f64],
    k: &[f64],
    (batch, head, token): (usize, usize, usize),
) -> Vec<f64> {
    let query = &q[shape.query(batch, token, head)..][..shape.head_dim];
    let score = |key| shape.scale * dot(query, &k[shape.key(batch, key, head)..][..shape.head_dim]);
    (0..keys.seen(token, shape.seq, shape.causal)).map(score).collect()
}

/// out and lse of these keys alone; zeros and -∞ for a row without visible keys.
pub fn forward(of: (&Shape, KeySource), q: &[f64], k: &[f64], v: &[f64]) -> Forward {
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
    of: (&Shape, KeySource),
    q: &[f64],
    k: &[f64],
    lse: f64,
    row: (usize, usize, usize),
) -> Vec<f64> {
    scores(of, q, k, row).iter().map(|score| (score - lse).exp()).collect()
}

/// Contributions of these queries and keys to the gradients; `whole` has out and lse of all keys.
pub fn backward(
    of: (&Shape, KeySource),
    dout: &[f64],
    [q, k, v]: [&[f64]; 3],
    whole: &Forward,
) -> Backward {
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
        for (ranks, chunk, value_dim) in [(1, 2, None), (2, 1, None), (2, 3, Some(2)), (3, 2, None)]
        {
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
                let q = rows_of_rank(0, rank);
                let parts: Vec<Forward> = (0..ranks)
                    .map(|step| {
                        let of = owner(step);
                        forward(
                            (&chunk_shape, source(step)),
                            &q,
                            &rows_of_rank(1, of),
                            &rows_of_rank(2, of),
                        )
                    })
                    .collect();
                let merged = merge(&chunk_shape, &parts);
                near("out", &merged.out, &expected.out, widths[3], rank);
                let dout = rows_of_rank(3, rank);
                let mut dq = vec![0.0; q.len()];
                for step in 0..ranks {
                    let of = owner(step);
                    let (k, v) = (rows_of_rank(1, of), rows_of_rank(2, of));
                    let gradients_of_step =
                        backward((&chunk_shape, source(step)), &dout, [&q, &k, &v], &merged);
                    dq.iter_mut().zip(&gradients_of_step.dq).for_each(|(sum, term)| *sum += term);
                    let (dk, dv) = &mut of_keys[of];
                    dk.resize(k.len(), 0.0);
                    dv.resize(v.len(), 0.0);
                    dk.iter_mut().zip(&gradients_of_step.dk).for_each(|(sum, term)| *sum += term);
                    dv.iter_mut().zip(&gradients_of_step.dv).for_each(|(sum, term)| *sum += term);
                }
                near("dq", &dq, &gradients.dq, widths[0], rank);
            }
            for (rank, (dk, dv)) in of_keys.iter().enumerate() {
                near("dk", dk, &gradients.dk, widths[1], rank);
                near("dv", dv, &gradients.dv, widths[2], rank);
            }
        }
    }
}
