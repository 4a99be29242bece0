//! The linear layer's three GEMMs.

use rayon::prelude::*;

/// `y = x w^T + bias`: `x` `[rows, inputs]`, `w` `[outputs, inputs]`, `bias` `[outputs]`, `y`
/// `[rows, outputs]`.
///
/// Rows go over all cores: this is what large GEMMs on a GPU are compared with.
pub fn forward(x: &[f64], w: &[f64], bias: Option<&[f64]>, inputs: usize) -> Vec<f64> {
    let outputs = w.len().checked_div(inputs).unwrap_or(0);
    let row = |x: &[f64]| -> Vec<f64> {
        let dot = |w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
        (0..outputs)
            .map(|output| {
                dot(&w[output * inputs..][..inputs]) + bias.map_or(0.0, |bias| bias[output])
            })
            .collect()
    };
    x.par_chunks_exact(inputs.max(1)).flat_map_iter(row).collect()
}

/// `dx = dy w`: `dy` `[rows, outputs]`, `w` `[outputs, inputs]`, `dx` `[rows, inputs]`.
pub fn data_gradient(dy: &[f64], w: &[f64], inputs: usize) -> Vec<f64> {
    let outputs = w.len().checked_div(inputs).unwrap_or(0);
    let mut dx = Vec::new();
    for dy in dy.chunks_exact(outputs.max(1)) {
        for input in 0..inputs {
            dx.push((0..outputs).map(|output| dy[output] * w[output * inputs + input]).sum());
        }
    }
    dx
}

/// `dw = dy^T x`: `dy` `[rows, outputs]`, `x` `[rows, inputs]`, `dw` `[outputs, inputs]`.
///
/// The bias's gradient is [`bias_grad`](crate::ops::bias_grad::oracle::backward).
pub fn weight_gradient(dy: &[f64], x: &[f64], outputs: usize, inputs: usize) -> Vec<f64> {
    let mut dw = vec![0.0; outputs * inputs];
    let rows = dy.chunks_exact(outputs.max(1)).zip(x.chunks_exact(inputs.max(1)));
    for (dy, x) in rows {
        for output in 0..outputs {
            for input in 0..inputs {
                dw[output * inputs + input] += dy[output] * x[input];
            }
        }
    }
    dw
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn gradients_agree_with_finite_differences() {
        for (rows, inputs, outputs) in [(1, 1, 1), (4, 3, 5), (2, 7, 2)] {
            let (x, w) = (varied(rows * inputs, 1), varied(outputs * inputs, 2));
            let (bias, dy) = (varied(outputs, 3), varied(rows * outputs, 4));
            let dx = data_gradient(&dy, &w, inputs);
            let dw = weight_gradient(&dy, &x, outputs, inputs);
            let dbias = crate::ops::bias_grad::oracle::backward(&dy, outputs);
            check("dx", &x, &dx, |x| dot(&forward(x, &w, Some(&bias), inputs), &dy));
            check("dw", &w, &dw, |w| dot(&forward(&x, w, None, inputs), &dy));
            check("dbias", &bias, &dbias, |b| dot(&forward(&x, &w, Some(b), inputs), &dy));
        }
    }

    #[test]
    fn a_gemm_by_hand() {
        // x = [1 2; 3 4], w = [5 6; 7 8; 9 10].
        let y = forward(&[1., 2., 3., 4.], &[5., 6., 7., 8., 9., 10.], Some(&[0., 0., 1.]), 2);
        assert_eq!(y, [17., 23., 30., 39., 53., 68.]);
    }
}
