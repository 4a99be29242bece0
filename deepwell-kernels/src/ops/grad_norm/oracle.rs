//! The global norm of the gradients.

/// The square root of the sum of squares over all tensors.
pub fn forward(tensors: &[&[f64]]) -> f64 {
    tensors.iter().flat_map(|tensor| tensor.iter()).map(|x| x * x).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_by_hand() {
        for (tensors, expected) in [
            (&[] as &[&[f64]], 0.0),
            (&[&[]], 0.0),
            (&[&[-3.0], &[4.0]], 5.0),
            (&[&[1.0, 1.0], &[1.0, 1.0]], 2.0),
        ] {
            assert_eq!(forward(tensors), expected, "{tensors:?}");
        }
    }
}
