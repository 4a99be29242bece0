//! RMSNorm.

/// Result of [`forward`].
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// The normalized rows times the weight, `[rows, hidden]`.
    pub y: Vec<f64>,
    /// `1 / sqrt(mean(x^2) + eps)` of each row, `[rows]`.
    pub rstd: Vec<f64>,
}

/// Result of [`backward`].
#[derive(Debug, Clone, PartialEq)]
pub struct Backward {
    /// Gradient of `x`, `[rows, hidden]`.
    pub dx: Vec<f64>,
    /// Gradient of the weight, `[hidden]`.
    pub dweight: Vec<f64>,
}

/// `y = x / sqrt(mean(x^2) + eps) * weight` for each row of `x` `[rows, weight.len()]`.
pub fn forward(x: &[f64], weight: &[f64], eps: f64) -> Forward {
    let hidden = weight.len();
    let (mut y, mut rstd) = (Vec::with_capacity(x.len()), Vec::new());
    for row in x.chunks_exact(hidden) {
        let mean_square = row.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
        let r = 1.0 / (mean_square + eps).sqrt();
        rstd.push(r);
        y.extend(row.iter().zip(weight).map(|(x, w)| x * r * w));
    }
    Forward { y, rstd }
}

/// The gradients for `dy` `[rows, hidden]`, from the `rstd` of the forward.
pub fn backward(dy: &[f64], x: &[f64], weight: &[f64], rstd: &[f64]) -> Backward {
    let hidden = weight.len();
    let mut dx = Vec::with_capacity(x.len());
    let mut dweight = vec![0.0; hidden];
    let rows = x.chunks_exact(hidden).zip(dy.chunks_exact(hidden)).zip(rstd);
    for ((x, dy), &r) in rows {
        // y_j = w_j x_j r and dr/dx_i = -r^3 x_i / hidden.
        let through_r: f64 = (0..hidden).map(|j| dy[j] * weight[j] * x[j]).sum();
        for i in 0..hidden {
            dx.push(dy[i] * weight[i] * r - through_r * r * r * r * x[i] / hidden as f64);
            dweight[i] += dy[i] * x[i] * r;
        }
    }
    Backward { dx, dweight }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        for (rows, hidden, eps) in [(1, 1, 0.1), (3, 5, 1e-5), (2, 8, 0.0)] {
            let (x, weight) = (varied(rows * hidden, 1), varied(hidden, 2));
            let dy = varied(x.len(), 3);
            let rstd = forward(&x, &weight, eps).rstd;
            let gradients = backward(&dy, &x, &weight, &rstd);
            check("dx", &x, &gradients.dx, |x| dot(&forward(x, &weight, eps).y, &dy));
            check("dweight", &weight, &gradients.dweight, |weight| {
                dot(&forward(&x, weight, eps).y, &dy)
            });
        }
    }

    #[test]
    fn a_row_by_hand() {
        // mean(x^2) = 12.5.
        let result = forward(&[3.0, 4.0], &[1.0, 2.0], 0.0);
        assert_eq!(result.rstd, [1.0 / 12.5f64.sqrt()]);
        assert_eq!(result.y, [3.0 / 12.5f64.sqrt(), 4.0 / 12.5f64.sqrt() * 2.0]);
    }
}
