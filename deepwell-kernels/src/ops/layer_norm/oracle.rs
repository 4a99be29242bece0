//! LayerNorm.

/// Result of [`forward`].
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// The normalized rows times the weight plus the bias, `[rows, hidden]`.
    pub y: Vec<f64>,
    /// Mean of each row, `[rows]`.
    pub mean: Vec<f64>,
    /// `1 / sqrt(variance + eps)` of each row, `[rows]`.
    pub rstd: Vec<f64>,
}

/// Result of [`backward`].
#[derive(Debug, Clone, PartialEq)]
pub struct Backward {
    /// Gradient of `x`, `[rows, hidden]`.
    pub dx: Vec<f64>,
    /// Gradient of the weight, `[hidden]`.
    pub dweight: Vec<f64>,
    /// Gradient of the bias, `[hidden]`.
    pub dbias: Vec<f64>,
}

/// `y = (x - mean) / sqrt(variance + eps) * weight + bias` for each row of `x`
/// `[rows, weight.len()]`; the variance is the mean of `(x - mean)^2`.
pub fn forward(x: &[f64], weight: &[f64], bias: &[f64], eps: f64) -> Forward {
    let hidden = weight.len();
    let mut result = Forward { y: Vec::with_capacity(x.len()), mean: vec![], rstd: vec![] };
    for row in x.chunks_exact(hidden) {
        let mean = row.iter().sum::<f64>() / hidden as f64;
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / hidden as f64;
        let r = 1.0 / (variance + eps).sqrt();
        result.mean.push(mean);
        result.rstd.push(r);
        let affine = weight.iter().zip(bias);
        result.y.extend(row.iter().zip(affine).map(|(x, (w, b))| (x - mean) * r * w + b));
    }
    result
}

/// The gradients for `dy` `[rows, hidden]`, from `mean` and `rstd` of the forward.
pub fn backward(dy: &[f64], x: &[f64], weight: &[f64], mean: &[f64], rstd: &[f64]) -> Backward {
    let hidden = weight.len();
    let mut dx = Vec::with_capacity(x.len());
    let mut dweight = vec![0.0; hidden];
    let mut dbias = vec![0.0; hidden];
    let rows = x.chunks_exact(hidden).zip(dy.chunks_exact(hidden)).zip(mean.iter().zip(rstd));
    for ((x, dy), (&mean, &r)) in rows {
        // y_j = w_j n_j + b_j with n_j = (x_j - mean) r, and
        // dn_j/dx_i = r ([i = j] - 1 / hidden - n_i n_j / hidden).
        let n: Vec<f64> = x.iter().map(|x| (x - mean) * r).collect();
        let sum: f64 = (0..hidden).map(|j| dy[j] * weight[j]).sum();
        let sum_n: f64 = (0..hidden).map(|j| dy[j] * weight[j] * n[j]).sum();
        for i in 0..hidden {
            dx.push(r * (dy[i] * weight[i] - (sum + n[i] * sum_n) / hidden as f64));
            dweight[i] += dy[i] * n[i];
            dbias[i] += dy[i];
        }
    }
    Backward { dx, dweight, dbias }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        for (rows, hidden, eps) in [(1, 1, 0.1), (3, 5, 1e-5), (2, 8, 0.0)] {
            let (x, weight) = (varied(rows * hidden, 1), varied(hidden, 2));
            let (bias, dy) = (varied(hidden, 3), varied(x.len(), 4));
            let Forward { mean, rstd, .. } = forward(&x, &weight, &bias, eps);
            let gradients = backward(&dy, &x, &weight, &mean, &rstd);
            let loss = |x: &[f64], weight: &[f64], bias: &[f64]| {
                dot(&forward(x, weight, bias, eps).y, &dy)
            };
            check("dx", &x, &gradients.dx, |x| loss(x, &weight, &bias));
            check("dweight", &weight, &gradients.dweight, |weight| loss(&x, weight, &bias));
            check("dbias", &bias, &gradients.dbias, |bias| loss(&x, &weight, bias));
        }
    }

    #[test]
    fn a_row_by_hand() {
        // Mean 5, variance 4.
        let result = forward(&[3.0, 7.0], &[1.0, 2.0], &[0.5, 0.0], 0.0);
        assert_eq!((result.mean, result.rstd), (vec![5.0], vec![0.5]));
        assert_eq!(result.y, [-0.5, 2.0]);
    }
}
