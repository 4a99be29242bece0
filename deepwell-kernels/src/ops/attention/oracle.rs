//! Scaled dot-product attention with grouped query heads, softmax over whole rows.

/// Sizes and settings; query head `h` reads key and value head `h * kv_heads / heads`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Multiplies the scores.
    pub scale: f64,
    /// Whether a token sees only itself and what came before.
    pub causal: bool,
}

impl Shape {
    /// Where the vector of a query head begins in q, out and their gradients
    /// (`[batch * seq, heads * head_dim]`).
    pub fn query(&self, batch: usize, token: usize, head: usize) -> usize {
        ((batch * self.seq + token) * self.heads + head) * self.head_dim
    }

    /// Where the key (or value) that a *query* head reads begins in k, v and their gradients
    /// (`[batch * seq, kv_heads * head_dim]`).
    pub fn key(&self, batch: usize, token: usize, head: usize) -> usize {
        let kv_head = head * self.kv_heads / self.heads;
        ((batch * self.seq + token) * self.kv_heads + kv_head) * self.head_dim
    }

    /// Batch, head and query token of every row of scores, in the order of lse.
    pub fn rows(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let Self { batch, seq, heads, .. } = *self;
        (0..batch).flat_map(move |batch| {
            (0..heads).flat_map(move |head| (0..seq).map(move |token| (batch, head, token)))
        })
    }

    /// How many keys a query token sees: those before this index.
    pub fn keys_seen(&self, token: usize) -> usize {
        if self.causal { token + 1 } else { self.seq }
    }
}

/// What [`forward`] gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// `[batch * seq, heads * head_dim]`.
    pub out: Vec<f64>,
    /// Natural logarithm of the sum of exponentials of the scaled scores, `[batch, heads, seq]`.
    pub lse: Vec<f64>,
}

/// What [`backward`] gives, each of the shape of what it is the gradient of.
#[derive(Debug, Clone, PartialEq)]
pub struct Backward {
    /// Gradient of q.
    pub dq: Vec<f64>,
    /// Gradient of k.
    pub dk: Vec<f64>,
    /// Gradient of v.
    pub dv: Vec<f64>,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// One row of `softmax(scale q k^T)`, over the keys that `token` sees, and its lse.
pub fn probabilities(
    shape: &Shape,
    q: &[f64],
    k: &[f64],
    (batch, head, token): (usize, usize, usize),
) -> (Vec<f64>, f64) {
    let width = shape.head_dim;
    let query = &q[shape.query(batch, token, head)..][..width];
    let scores: Vec<f64> = (0..shape.keys_seen(token))
        .map(|key| shape.scale * dot(query, &k[shape.key(batch, key, head)..][..width]))
        .collect();
    let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = greatest + scores.iter().map(|score| (score - greatest).exp()).sum::<f64>().ln();
    (scores.iter().map(|score| (score - lse).exp()).collect(), lse)
}

/// `out = softmax(scale q k^T) v` and lse, head by head.
pub fn forward(shape: &Shape, q: &[f64], k: &[f64], v: &[f64]) -> Forward {
    let mut out = vec![0.0; q.len()];
    let mut lse = Vec::new();
    for row in shape.rows() {
        let (batch, head, token) = row;
        let (probabilities, row_lse) = probabilities(shape, q, k, row);
        lse.push(row_lse);
        let out = &mut out[shape.query(batch, token, head)..][..shape.head_dim];
        for (key, p) in probabilities.iter().enumerate() {
            let value = &v[shape.key(batch, key, head)..][..shape.head_dim];
            out.iter_mut().zip(value).for_each(|(out, value)| *out += p * value);
        }
    }
    Forward { out, lse }
}

/// The gradients for `dout`, of the shape of q.
pub fn backward(shape: &Shape, dout: &[f64], q: &[f64], k: &[f64], v: &[f64]) -> Backward {
    let width = shape.head_dim;
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for row in shape.rows() {
        let (batch, head, token) = row;
        let (probabilities, _) = probabilities(shape, q, k, row);
        let query = shape.query(batch, token, head);
        let dout = &dout[query..][..width];
        let keys: Vec<usize> =
            (0..probabilities.len()).map(|key| shape.key(batch, key, head)).collect();
        let dp: Vec<f64> = keys.iter().map(|&key| dot(dout, &v[key..][..width])).collect();
        // The softmax's Jacobian: ds_j = p_j (dp_j - sum_l p_l dp_l).
        let mean = dot(&probabilities, &dp);
        for ((&key, p), dp) in keys.iter().zip(&probabilities).zip(&dp) {
            let dscore = shape.scale * p * (dp - mean);
            for d in 0..width {
                dq[query + d] += dscore * k[key + d];
                dk[key + d] += dscore * q[query + d];
                dv[key + d] += p * dout[d];
            }
        }
    }
    Backward { dq, dk, dv }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        // (batch, seq, heads, kv_heads, head_dim, scale, causal)
        for (batch, seq, heads, kv_heads, head_dim, scale, causal) in [
            (1, 1, 1, 1, 1, 1.0, true),
            (1, 4, 1, 1, 3, 0.6, false),
            (2, 5, 4, 2, 2, 1.5, true),
            (1, 3, 6, 2, 2, -0.7, true),
        ] {
            let shape = Shape { batch, seq, heads, kv_heads, head_dim, scale, causal };
            let q = varied(batch * seq * heads * head_dim, 1);
            let k = varied(batch * seq * kv_heads * head_dim, 2);
            let v = varied(k.len(), 3);
            let dout = varied(q.len(), 4);
            let gradients = backward(&shape, &dout, &q, &k, &v);
            check("dq", &q, &gradients.dq, |q| dot(&forward(&shape, q, &k, &v).out, &dout));
            check("dk", &k, &gradients.dk, |k| dot(&forward(&shape, &q, k, &v).out, &dout));
            check("dv", &v, &gradients.dv, |v| dot(&forward(&shape, &q, &k, v).out, &dout));
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
        };
        // Two query heads of width 1 a token, one key and value head.
        let (q, k, v) = ([5.0, 6.0, 1.0, 0.0], [0.0, 0.5], [3.0, 7.0]);
        let result = forward(&shape, &q, &k, &v);
        // Token 0 sees itself. Token 1: scores 0 and 1 on head 0, 0 and 0 on head 1.
        let e = std::f64::consts::E;
        let expected = [3.0, 3.0, (3.0 + 7.0 * e) / (1.0 + e), 5.0];
        for (got, expected) in result.out.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-14, "{got} {expected}");
        }
        let expected = [0.0, (1.0 + e).ln(), 0.0, 2f64.ln()];
        for (got, expected) in result.lse.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-14, "{got} {expected}");
        }
    }
}
