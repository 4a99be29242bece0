//! Sums of tensors, and of rows with a bias.

/// `a + b`. Both gradients are the output's.
pub fn forward(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// `x + bias` for each row of `x` `[rows, bias.len()]`.
pub fn bias_forward(x: &[f64], bias: &[f64]) -> Vec<f64> {
    x.iter().enumerate().map(|(index, x)| x + bias[index % bias.len()]).collect()
}

/// The gradient of the bias for `dy` `[rows, columns]`: the sum of the rows.
pub fn bias_backward(dy: &[f64], columns: usize) -> Vec<f64> {
    let mut dbias = vec![0.0; columns];
    for (index, dy) in dy.iter().enumerate() {
        dbias[index % columns] += dy;
    }
    dbias
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

        let (x, bias, dy) = (varied(12, 4), varied(3, 5), varied(12, 6));
        let dbias = bias_backward(&dy, 3);
        check("dbias", &bias, &dbias, |bias| dot(&bias_forward(&x, bias), &dy));
        check("dx", &x, &dy, |x| dot(&bias_forward(x, &bias), &dy));
    }
}
