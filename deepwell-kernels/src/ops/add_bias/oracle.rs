//! A bias added to each row.

/// `x[t] + bias` for x `[tokens, bias.len()]`.
pub fn forward(x: &[f64], bias: &[f64]) -> Vec<f64> {
    x.iter().zip(bias.iter().cycle()).map(|(x, bias)| x + bias).collect()
}

/// The gradient of the bias from `dout` `[tokens, width]`; the gradient of x is `dout`.
pub fn backward(dout: &[f64], width: usize) -> Vec<f64> {
    let mut dbias = vec![0.0; width];
    for (index, dout) in dout.iter().enumerate() {
        dbias[index % width] += dout;
    }
    dbias
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let (x, bias, dout) = (varied(12, 1), varied(3, 2), varied(12, 3));
        check("dx", &x, &dout, |x| dot(&forward(x, &bias), &dout));
        let dbias = backward(&dout, 3);
        check("dbias", &bias, &dbias, |bias| dot(&forward(&x, bias), &dout));
    }
}
