//! Keys and values of latent attention: columns of each head, and rotated columns that all heads
//! share.

/// Columns of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Heads.
    pub heads: usize,
    /// Columns of a key that are separate for each head.
    pub plain_dim: usize,
    /// Columns of a key that all heads share.
    pub rope_dim: usize,
    /// Columns of a value.
    pub value_dim: usize,
}

impl Shape {
    /// Columns of a token in k.
    pub fn key_columns(&self) -> usize {
        self.heads * (self.plain_dim + self.rope_dim)
    }

    /// Columns of a token in kv.
    pub fn source_columns(&self) -> usize {
        self.heads * (self.plain_dim + self.value_dim)
    }
}

/// Computes k `[tokens, heads * (plain_dim + rope_dim)]` and v `[tokens, heads * value_dim]` from
/// kv `[tokens, heads * (plain_dim + value_dim)]` and k_rope `[tokens, rope_dim]`.
pub fn forward(shape: &Shape, kv: &[f64], k_rope: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut k, mut v) = (Vec::new(), Vec::new());
    let tokens = kv.chunks_exact(shape.source_columns()).zip(k_rope.chunks_exact(shape.rope_dim));
    for (kv, k_rope) in tokens {
        for head in kv.chunks_exact(shape.plain_dim + shape.value_dim) {
            let (plain, value) = head.split_at(shape.plain_dim);
            k.extend(plain.iter().chain(k_rope));
            v.extend(value);
        }
    }
    (k, v)
}

/// The gradients of kv and k_rope from those of k and v.
pub fn backward(shape: &Shape, dk: &[f64], dv: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut dkv, mut dk_rope) = (Vec::new(), Vec::new());
    let tokens =
        dk.chunks_exact(shape.key_columns()).zip(dv.chunks_exact(shape.heads * shape.value_dim));
    for (dk, dv) in tokens {
        let mut sum = vec![0.0; shape.rope_dim];
        let heads = dk.chunks_exact(shape.plain_dim + shape.rope_dim);
        for (dk, dv) in heads.zip(dv.chunks_exact(shape.value_dim)) {
            let (plain, rope) = dk.split_at(shape.plain_dim);
            dkv.extend(plain.iter().chain(dv));
            sum.iter_mut().zip(rope).for_each(|(sum, dk)| *sum += dk);
        }
        dk_rope.extend(sum);
    }
    (dkv, dk_rope)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let shape = Shape { heads: 3, plain_dim: 2, rope_dim: 4, value_dim: 5 };
        let tokens = 3;
        let kv = varied(tokens * shape.source_columns(), 1);
        let k_rope = varied(tokens * 4, 2);
        let dk = varied(tokens * shape.key_columns(), 3);
        let dv = varied(tokens * shape.heads * shape.value_dim, 4);
        let (dkv, dk_rope) = backward(&shape, &dk, &dv);
        let loss = |kv: &[f64], k_rope: &[f64]| {
            let (k, v) = forward(&shape, kv, k_rope);
            dot(&k, &dk) + dot(&v, &dv)
        };
        check("dkv", &kv, &dkv, |kv| loss(kv, &k_rope));
        check("dk_rope", &k_rope, &dk_rope, |k_rope| loss(&kv, k_rope));
    }

    #[test]
    fn one_token_by_hand() {
        let shape = Shape { heads: 2, plain_dim: 1, rope_dim: 2, value_dim: 1 };
        let (k, v) = forward(&shape, &[1.0, 2.0, 3.0, 4.0], &[8.0, 9.0]);
        assert_eq!(k, [1.0, 8.0, 9.0, 3.0, 8.0, 9.0]);
        assert_eq!(v, [2.0, 4.0]);
    }
}
