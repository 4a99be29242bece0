//! The linear layer's three GEMMs.
//!
//! Rows are distributed over all cores, and inner loops run along contiguous memory, because large
//! GEMMs of GPU tests use this oracle. The order of each sum is the same on any number of cores.

use rayon::prelude::*;

/// Number of partial sums in [`dot`]. Additions to different partial sums do not wait for each
/// other.
const LANES: usize = 8;

/// The dot product of two vectors of the same length.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b);
    for (a, b) in a_chunks.zip(b_chunks) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f64>() + rest.sum::<f64>()
}

/// Computes `sum += factor * x`.
pub(crate) fn add_scaled(sum: &mut [f64], factor: f64, x: &[f64]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += factor * x);
}

/// Rows per task. The rows of a task share each read of the other matrix.
fn rows_at_a_time(rows: usize) -> usize {
    rows.div_ceil(4 * rayon::current_num_threads()).clamp(1, 16)
}

/// `y = x w^T + bias`: `x` `[rows, inputs]`, `w` `[outputs, inputs]`, `bias` `[outputs]`, `y`
/// `[rows, outputs]`.
pub fn forward(x: &[f64], w: &[f64], bias: Option<&[f64]>, inputs: usize) -> Vec<f64> {
    let outputs = w.len().checked_div(inputs).unwrap_or(0);
    let rows = x.len().checked_div(inputs).unwrap_or(0);
    let of_rows = |x: &[f64]| -> Vec<f64> {
        let mut y = vec![0.0; x.len() / inputs * outputs];
        for (output, w) in w.chunks_exact(inputs).enumerate() {
            let bias = bias.map_or(0.0, |bias| bias[output]);
            for (row, x) in x.chunks_exact(inputs).enumerate() {
                y[row * outputs + output] = dot(x, w) + bias;
            }
        }
        y
    };
    x.par_chunks(inputs.max(1) * rows_at_a_time(rows)).flat_map_iter(of_rows).collect()
}

/// `dx = dy w`: `dy` `[rows, outputs]`, `w` `[outputs, inputs]`, `dx` `[rows, inputs]`.
pub fn data_gradient(dy: &[f64], w: &[f64], inputs: usize) -> Vec<f64> {
    if w.is_empty() {
        return Vec::new();
    }
    let outputs = w.len() / inputs;
    let rows = dy.len() / outputs;
    let of_rows = |dy: &[f64]| -> Vec<f64> {
        let mut dx = vec![0.0; dy.len() / outputs * inputs];
        for (output, w) in w.chunks_exact(inputs).enumerate() {
            for (dx, dy) in dx.chunks_exact_mut(inputs).zip(dy.chunks_exact(outputs)) {
                add_scaled(dx, dy[output], w);
            }
        }
        dx
    };
    dy.par_chunks(outputs * rows_at_a_time(rows)).flat_map_iter(of_rows).collect()
}

/// `dw = dy^T x`: `dy` `[rows, outputs]`, `x` `[rows, inputs]`, `dw` `[outputs, inputs]`.
///
/// The bias's gradient is [`bias_grad`](crate::ops::bias_grad::oracle::backward).
pub fn weight_gradient(dy: &[f64], x: &[f64], outputs: usize, inputs: usize) -> Vec<f64> {
    let mut dw = vec![0.0; outputs * inputs];
    let at_a_time = rows_at_a_time(outputs);
    let of_outputs = |(first, dw): (usize, &mut [f64])| {
        for (dy, x) in dy.chunks_exact(outputs).zip(x.chunks_exact(inputs)) {
            for (dw, &dy) in dw.chunks_exact_mut(inputs).zip(&dy[first * at_a_time..]) {
                add_scaled(dw, dy, x);
            }
        }
    };
    dw.par_chunks_mut(inputs.max(1) * at_a_time).enumerate().for_each(of_outputs);
    dw
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn gradients_agree_with_finite_differences() {
        // Sums shorter and longer than one step, more rows and outputs than one task.
        for (rows, inputs, outputs) in [(1, 1, 1), (4, 3, 5), (2, 7, 2), (37, 9, 3), (3, 17, 35)] {
            let x = varied(rows * inputs, 1);
            let w = varied(outputs * inputs, 2);
            let (bias, dy) = (varied(outputs, 3), varied(rows * outputs, 4));
            let dx = data_gradient(&dy, &w, inputs);
            let dw = weight_gradient(&dy, &x, outputs, inputs);
            let dbias = crate::ops::bias_grad::oracle::backward(&dy, outputs);
            check("dx", &x, &dx, |x| dot(&forward(x, &w, Some(&bias), inputs), &dy));
            check("dw", &w, &dw, |w| dot(&forward(&x, w, None, inputs), &dy));
            check("dbias", &bias, &dbias, |b| dot(&forward(&x, &w, Some(b), inputs), &dy));
        }
    }

    /// A GEMM without inputs used to divide by zero.
    #[test]
    fn sizes_of_zero() {
        for (dy, w, inputs) in [(&[1., 2.][..], &[][..], 0), (&[], &[], 3), (&[], &[1., 2., 3.], 3)]
        {
            assert!(data_gradient(dy, w, inputs).is_empty(), "{inputs} inputs");
        }
        assert!(forward(&[], &[], None, 0).is_empty());
        assert!(forward(&[], &[1., 2.], Some(&[0.]), 2).is_empty());
        assert!(weight_gradient(&[1., 2.], &[], 2, 0).is_empty());
        assert!(weight_gradient(&[], &[1., 2.], 0, 2).is_empty());
        assert_eq!(weight_gradient(&[], &[], 2, 1), [0.0_f64, 0.0]);
    }

    #[test]
    fn a_gemm_by_hand() {
        // x = [1 2; 3 4], w = [5 6; 7 8; 9 10].
        let y = forward(&[1., 2., 3., 4.], &[5., 6., 7., 8., 9., 10.], Some(&[0., 0., 1.]), 2);
        assert_eq!(y, [17., 23., 30., 39., 53., 68.]);
    }
}
