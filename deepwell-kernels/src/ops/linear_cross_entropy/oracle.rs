//! Output head and cross-entropy, with tokens distributed over all cores.

use rayon::prelude::*;

use crate::ops::linear::oracle::{add_scaled, dot};

/// Tokens with this target are excluded from the loss.
pub const IGNORED: i32 = -100;

/// Result of [`backward`].
#[derive(Debug, Clone, PartialEq)]
pub struct Backward {
    /// Gradient of x, `[tokens, hidden]`.
    pub dx: Vec<f64>,
    /// Gradient of w, `[vocab, hidden]`.
    pub dw: Vec<f64>,
    /// Gradient of the logits, `[tokens, vocab]`.
    pub dlogits: Vec<f64>,
}

/// The logits of a token, and the logarithm of the sum of their exponentials.
fn logits_and_lse(x: &[f64], w: &[f64]) -> (Vec<f64>, f64) {
    let logits: Vec<f64> = w.chunks_exact(x.len()).map(|w| dot(x, w)).collect();
    let greatest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = greatest + logits.iter().map(|logit| (logit - greatest).exp()).sum::<f64>().ln();
    (logits, lse)
}

/// `loss_scale` times the sum over tokens of `lse - logit[target]`, where `logits = x w^T`:
/// x `[tokens, hidden]`, w `[vocab, hidden]`, targets `[tokens]` below vocab or [`IGNORED`].
pub fn forward(x: &[f64], w: &[f64], targets: &[i32], hidden: usize, loss_scale: f64) -> f64 {
    let tokens = x.par_chunks_exact(hidden).zip(targets).filter(|(_, target)| **target != IGNORED);
    let losses = tokens.map(|(x, &target)| {
        let (logits, lse) = logits_and_lse(x, w);
        lse - logits[target as usize]
    });
    // Losses are collected first, because the sum must have a fixed order.
    loss_scale * losses.collect::<Vec<f64>>().iter().sum::<f64>()
}

/// The gradients of [`forward`].
pub fn backward(x: &[f64], w: &[f64], targets: &[i32], hidden: usize, loss_scale: f64) -> Backward {
    let vocab = w.len() / hidden;
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
    let mut dlogits = vec![0.0; targets.len() * vocab];
    let of_token = x.par_chunks_exact(hidden).zip(targets);
    let gradients = dx.par_chunks_exact_mut(hidden).zip(dlogits.par_chunks_exact_mut(vocab));
    of_token.zip(gradients).for_each(|((x, &target), (dx, dlogits))| {
        if target == IGNORED {
            return;
        }
        let (logits, lse) = logits_and_lse(x, w);
        for (word, (dlogit, logit)) in dlogits.iter_mut().zip(&logits).enumerate() {
            let one_hot = if word == target as usize { 1.0 } else { 0.0 };
            *dlogit = loss_scale * ((logit - lse).exp() - one_hot);
            add_scaled(dx, *dlogit, &w[word * hidden..][..hidden]);
        }
    });
    dw.par_chunks_exact_mut(hidden).enumerate().for_each(|(word, dw)| {
        let tokens = dlogits.chunks_exact(vocab).zip(x.chunks_exact(hidden)).zip(targets);
        for ((dlogits, x), _) in tokens.filter(|(_, target)| **target != IGNORED) {
            add_scaled(dw, dlogits[word], x);
        }
    });
    Backward { dx, dw, dlogits }
}

#[cfg(test)]
mod tests {
    use approx::assert_abs_diff_eq;

    use super::*;
    use crate::ops::finite_difference::{check, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        for (hidden, vocab, targets) in [
            (1, 1, vec![0]),
            (3, 4, vec![0, 3, IGNORED, 1]),
            (2, 7, vec![6, 6]),
            (2, 3, vec![IGNORED]),
        ] {
            let x = varied(targets.len() * hidden, 1);
            let w = varied(vocab * hidden, 2);
            let gradients = backward(&x, &w, &targets, hidden, 1.3);
            check("dx", &x, &gradients.dx, |x| forward(x, &w, &targets, hidden, 1.3));
            check("dw", &w, &gradients.dw, |w| forward(&x, w, &targets, hidden, 1.3));
        }
    }

    #[test]
    fn a_token_by_hand() {
        // Logits ln 2 and ln 6: probabilities 1/4 and 3/4.
        let (x, w) = ([1.0], [2f64.ln(), 6f64.ln()]);
        assert_abs_diff_eq!(forward(&x, &w, &[0], 1, 2.0), 2.0 * 4f64.ln(), epsilon = 1e-15);
        let gradients = backward(&x, &w, &[0], 1, 2.0);
        for (got, expected) in gradients.dlogits.iter().zip([-1.5, 1.5]) {
            assert_abs_diff_eq!(*got, expected, epsilon = 1e-15);
        }
        assert_eq!(forward(&x, &w, &[IGNORED], 1, 2.0), 0.0);
    }
}
