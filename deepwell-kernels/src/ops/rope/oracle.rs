//! Rotary position embedding, pairs `head_dim / 2` apart.

/// Rotates `x` `[tokens, heads * head_dim]`; token `t` has the position `t % seq`, and the pair
/// `(i, i + head_dim / 2)` turns by `position * inv_freq[i]`.
pub fn forward(x: &[f64], heads: usize, head_dim: usize, seq: usize, inv_freq: &[f64]) -> Vec<f64> {
    rotate(x, heads, head_dim, seq, inv_freq, 1.0)
}

/// The gradient of [`forward`] for `dy` of the shape of `x`.
pub fn backward(
    dy: &[f64],
    heads: usize,
    head_dim: usize,
    seq: usize,
    inv_freq: &[f64],
) -> Vec<f64> {
    rotate(dy, heads, head_dim, seq, inv_freq, -1.0)
}

fn rotate(
    x: &[f64],
    heads: usize,
    head_dim: usize,
    seq: usize,
    inv_freq: &[f64],
    direction: f64,
) -> Vec<f64> {
    let half = head_dim / 2;
    let mut y = vec![0.0; x.len()];
    for token in 0..x.len() / (heads * head_dim) {
        let position = (token % seq) as f64;
        for head in 0..heads {
            let first = (token * heads + head) * head_dim;
            for i in 0..half {
                let (sin, cos) = (direction * position * inv_freq[i]).sin_cos();
                let (a, b) = (x[first + i], x[first + i + half]);
                y[first + i] = a * cos - b * sin;
                y[first + i + half] = b * cos + a * sin;
            }
        }
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let (heads, head_dim, seq) = (2, 6, 3);
        let inv_freq = [1.0, 0.3, 0.01];
        let x = varied(6 * heads * head_dim, 1);
        let dy = varied(x.len(), 2);
        let dx = backward(&dy, heads, head_dim, seq, &inv_freq);
        check("dx", &x, &dx, |x| dot(&forward(x, heads, head_dim, seq, &inv_freq), &dy));
    }

    #[test]
    fn scores_depend_on_the_distance_alone() {
        // The property that the embedding exists for: q at p and k at p + 2 give one score.
        let (q, k) = (varied(8, 3), varied(8, 4));
        let inv_freq = [1.0, 0.5, 0.2, 0.05];
        let all = |row: &[f64]| forward(&row.repeat(9), 1, 8, 9, &inv_freq);
        let (q, k) = (all(&q), all(&k));
        let score = |p: usize| dot(&q[p * 8..][..8], &k[(p + 2) * 8..][..8]);
        for p in 1..7 {
            assert!((score(p) - score(0)).abs() < 1e-12, "position {p}");
        }
    }
}
