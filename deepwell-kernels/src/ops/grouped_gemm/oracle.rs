//! The three GEMMs, group by group.

use crate::ops::linear::oracle as linear;

/// Rows of each group.
fn groups(offsets: &[i32]) -> impl Iterator<Item = std::ops::Range<usize>> {
    offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize)
}

/// `y_e = x_e w[e]^T`: `x` `[rows, inputs]`, `w` `[groups, outputs, inputs]`, `y`
/// `[rows, outputs]`, zero after the groups.
pub fn forward(x: &[f64], w: &[f64], offsets: &[i32], inputs: usize, outputs: usize) -> Vec<f64> {
    let mut y = vec![0.0; x.len() / inputs * outputs];
    for (rows, w) in groups(offsets).zip(w.chunks_exact(outputs * inputs)) {
        let of_group = linear::forward(&x[rows.start * inputs..rows.end * inputs], w, None, inputs);
        y[rows.start * outputs..rows.end * outputs].copy_from_slice(&of_group);
    }
    y
}

/// `dx_e = dy_e w[e]`: `dy` `[rows, outputs]`, `dx` `[rows, inputs]`, zero after the groups.
pub fn data_gradient(
    dy: &[f64],
    w: &[f64],
    offsets: &[i32],
    inputs: usize,
    outputs: usize,
) -> Vec<f64> {
    let mut dx = vec![0.0; dy.len() / outputs * inputs];
    for (rows, w) in groups(offsets).zip(w.chunks_exact(outputs * inputs)) {
        let of_group =
            linear::data_gradient(&dy[rows.start * outputs..rows.end * outputs], w, inputs);
        dx[rows.start * inputs..rows.end * inputs].copy_from_slice(&of_group);
    }
    dx
}

/// `dw[e] = dy_e^T x_e`: `dw` `[groups, outputs, inputs]`.
pub fn weight_gradient(
    dy: &[f64],
    x: &[f64],
    offsets: &[i32],
    inputs: usize,
    outputs: usize,
) -> Vec<f64> {
    let of_group = |rows: std::ops::Range<usize>| {
        let dy = &dy[rows.start * outputs..rows.end * outputs];
        linear::weight_gradient(dy, &x[rows.start * inputs..rows.end * inputs], outputs, inputs)
    };
    groups(offsets).flat_map(of_group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn gradients_agree_with_finite_differences() {
        let (inputs, outputs) = (3, 2);
        for offsets in [vec![0, 2, 2, 5], vec![0, 0, 4, 4], vec![0, 1, 2, 3]] {
            // One row after the groups.
            let rows = offsets[3] as usize + 1;
            let x = varied(rows * inputs, 1);
            let w = varied(3 * inputs * outputs, 2);
            let dy = varied(rows * outputs, 3);
            let dx = data_gradient(&dy, &w, &offsets, inputs, outputs);
            let dw = weight_gradient(&dy, &x, &offsets, inputs, outputs);
            check("dx", &x, &dx, |x| dot(&forward(x, &w, &offsets, inputs, outputs), &dy));
            check("dw", &w, &dw, |w| dot(&forward(&x, w, &offsets, inputs, outputs), &dy));
            for (rows, dw) in groups(&offsets).zip(dw.chunks(inputs * outputs)) {
                assert_eq!(rows.is_empty(), dw.iter().all(|dw| *dw == 0.0));
            }
        }
    }
}
