//! Sums of rows with a bias.

/// `x + bias` for each row of `x` `[rows, bias.len()]`.
pub fn forward(x: &[f64], bias: &[f64]) -> Vec<f64> {
    x.iter().enumerate().map(|(index, x)| x + bias[index % bias.len()]).collect()
}

/// The gradient of the bias for `dy` `[rows, columns]`: the sum of the rows.
pub fn backward(dy: &[f64], columns: usize) -> Vec<f64> {
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
        let (x, bias, dy) = (varied(12, 4), varied(3, 5), varied(12, 6));
        let dbias = backward(&dy, 3);
        check("dbias", &bias, &dbias, |bias| dot(&forward(&x, bias), &dy));
        check("dx", &x, &dy, |x| dot(&forward(x, &bias), &dy));
    }
}
