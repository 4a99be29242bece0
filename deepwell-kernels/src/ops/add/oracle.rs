//! Sums of tensors.

/// `a + b`. Both gradients equal the output's gradient.
pub fn forward(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn gradients_agree_with_finite_differences() {
        let (a, b, dout) = (varied(7, 1), varied(7, 2), varied(7, 3));
        check("da", &a, &dout, |a| dot(&forward(a, &b), &dout));
        check("db", &b, &dout, |b| dot(&forward(&a, b), &dout));
    }
}
