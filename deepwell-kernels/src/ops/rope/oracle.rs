//! Rotary position embedding, with pairs half a head apart or of neighbors.

/// Sizes and settings.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Shape {
    /// Heads per row.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Unrotated elements at the beginning of a head.
    pub plain_dim: usize,
    /// Whether a pair is two neighbors.
    pub interleaved: bool,
    /// Tokens per sequence.
    pub seq: usize,
}

impl Shape {
    /// The two elements of pair `i` within a head.
    fn pair(&self, i: usize) -> (usize, usize) {
        let half = (self.head_dim - self.plain_dim) / 2;
        let (a, b) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
        (self.plain_dim + a, self.plain_dim + b)
    }
}

/// Rotates `x` `[tokens, heads * head_dim]`; token `t` has the position `t % seq`, and pair `i` of
/// a head is rotated by `position * inv_freq[i]`.
pub fn forward(x: &[f64], shape: &Shape, inv_freq: &[f64]) -> Vec<f64> {
    rotate(x, shape, inv_freq, 1.0)
}

/// The gradient of [`forward`] for `dy`, which has the shape of `x`.
pub fn backward(dy: &[f64], shape: &Shape, inv_freq: &[f64]) -> Vec<f64> {
    rotate(dy, shape, inv_freq, -1.0)
}

fn rotate(x: &[f64], shape: &Shape, inv_freq: &[f64], direction: f64) -> Vec<f64> {
    let Shape { heads, head_dim, seq, .. } = *shape;
    let mut y = x.to_vec();
    for token in 0..x.len() / (heads * head_dim) {
        let position = (token % seq) as f64;
        for head in 0..heads {
            let first = (token * heads + head) * head_dim;
            for (i, frequency) in inv_freq.iter().enumerate() {
                let (sin, cos) = (direction * position * frequency).sin_cos();
                let (a_at, b_at) = shape.pair(i);
                let (a, b) = (x[first + a_at], x[first + b_at]);
                y[first + a_at] = a * cos - b * sin;
                y[first + b_at] = b * cos + a * sin;
            }
        }
    }
    y
}

#[cfg(test)]
mod tests {
    use approx::assert_abs_diff_eq;

    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let inv_freq = [1.0, 0.3, 0.01];
        for (plain_dim, interleaved) in [(0, false), (0, true), (3, false), (2, true)] {
            let head_dim = plain_dim + 6;
            let shape = Shape { heads: 2, head_dim, plain_dim, interleaved, seq: 3 };
            let x = varied(6 * shape.heads * head_dim, 1);
            let dy = varied(x.len(), 2);
            let dx = backward(&dy, &shape, &inv_freq);
            check("dx", &x, &dx, |x| dot(&forward(x, &shape, &inv_freq), &dy));
        }
    }

    #[test]
    fn scores_depend_on_the_distance_alone() {
        // The defining property of the embedding: q at p and k at p + 2 give one score for every p.
        for interleaved in [false, true] {
            let (q, k) = (varied(8, 3), varied(8, 4));
            let inv_freq = [1.0, 0.5, 0.2, 0.05];
            let shape = Shape { heads: 1, head_dim: 8, plain_dim: 0, interleaved, seq: 9 };
            let all = |row: &[f64]| forward(&row.repeat(9), &shape, &inv_freq);
            let (q, k) = (all(&q), all(&k));
            let score = |p: usize| dot(&q[p * 8..][..8], &k[(p + 2) * 8..][..8]);
            for p in 1..7 {
                assert_abs_diff_eq!(score(p), score(0), epsilon = 1e-12);
            }
        }
    }

    /// Both arrangements are permutations of each other, so scores are equal.
    #[test]
    fn both_arrangements_give_one_score() {
        let (q, k) = (varied(8, 5), varied(8, 6));
        let inv_freq = [1.0, 0.5, 0.2, 0.05];
        let halves_of = |x: &[f64]| -> Vec<f64> {
            [0, 2, 4, 6, 1, 3, 5, 7].iter().map(|&index| x[index]).collect()
        };
        let shape = Shape { heads: 1, head_dim: 8, seq: 4, ..Shape::default() };
        let neighbors = Shape { interleaved: true, ..shape };
        let at = |x: &[f64], shape: &Shape, position: usize| -> Vec<f64> {
            forward(&x.repeat(4), shape, &inv_freq)[position * 8..][..8].to_vec()
        };
        let score = |q: &[f64], k: &[f64], shape| dot(&at(q, shape, 3), &at(k, shape, 1));
        let difference = score(&q, &k, &neighbors) - score(&halves_of(&q), &halves_of(&k), &shape);
        assert_abs_diff_eq!(difference, 0.0, epsilon = 1e-12);
    }
}
