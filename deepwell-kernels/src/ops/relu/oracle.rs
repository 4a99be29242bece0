//! The larger of a number and zero.

/// `max(x, 0)`, element by element.
pub fn forward(x: &[f64]) -> Vec<f64> {
    x.iter().map(|&x| if x <= 0.0 { 0.0 } else { x }).collect()
}

/// The gradient of `x` for `dy`: zero at zero, as in PyTorch.
pub fn backward(dy: &[f64], x: &[f64]) -> Vec<f64> {
    dy.iter().zip(x).map(|(&dy, &x)| if x <= 0.0 { 0.0 } else { dy }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let mut x = varied(20, 1);
        x.extend([-3.0, -0.01, 0.01, 4.0]);
        let dy = varied(x.len(), 2);
        assert!(x.iter().any(|x| *x > 0.0) && x.iter().any(|x| *x < 0.0));
        check("dx", &x, &backward(&dy, &x), |x| dot(&forward(x), &dy));
    }

    #[test]
    fn by_hand() {
        assert_eq!(forward(&[-1.0, 0.0, 2.5]), [0.0, 0.0, 2.5]);
        assert_eq!(backward(&[3.0, 3.0, 3.0], &[-1.0, 0.0, 2.5]), [0.0, 0.0, 3.0]);
        assert!(forward(&[f64::NAN])[0].is_nan());
    }
}
