//! Biases of experts, row by row. `pairs` `[rows]` and `rows` `[tokens, top_k]` are the maps of
//! [`deepwell_ir::ops::Dispatch`], `chosen` the expert of each pair.

/// `x` `[rows, columns]` plus the bias `[experts, columns]` of each row's expert, times the gate of
/// the row's pair if there are gates; zero for a row without a pair.
pub fn forward(
    x: &[f64],
    bias: &[f64],
    gates: Option<&[f64]>,
    chosen: &[i32],
    pairs: &[i32],
) -> Vec<f64> {
    let columns = x.len() / pairs.len().max(1);
    let value = |index: usize| {
        let (row, column) = (index / columns, index % columns);
        let Ok(pair) = usize::try_from(pairs[row]) else { return 0.0 };
        let gate = gates.map_or(1.0, |gates| gates[pair]);
        x[index] + gate * bias[chosen[pair] as usize * columns + column]
    };
    (0..x.len()).map(value).collect()
}

/// Gradients for `dout` of the bias and of the gates; the latter are empty without gates.
pub fn backward(
    dout: &[f64],
    bias: &[f64],
    gates: Option<&[f64]>,
    chosen: &[i32],
    rows: &[i32],
    columns: usize,
) -> [Vec<f64>; 2] {
    let mut dbias = vec![0.0; bias.len()];
    let mut dgates = vec![0.0; gates.map_or(0, <[f64]>::len)];
    for (pair, &row) in rows.iter().enumerate() {
        let Ok(row) = usize::try_from(row) else { continue };
        let gate = gates.map_or(1.0, |gates| gates[pair]);
        for column in 0..columns {
            let at = chosen[pair] as usize * columns + column;
            let dout = dout[row * columns + column];
            dbias[at] += gate * dout;
            if gates.is_some() {
                dgates[pair] += bias[at] * dout;
            }
        }
    }
    [dbias, dgates]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::dispatch::oracle as grouping;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let (experts, columns) = (4, 3);
        // Five tokens with two choices; a capacity of 3 drops pairs, and no token chooses expert 3.
        let chosen = [0, 2, 0, 1, 2, 0, 0, 2, 2, 0];
        let maps = grouping::forward(&chosen, experts, 4, 3, 20);
        let x = varied(20 * columns, 1);
        let bias = varied(experts * columns, 2);
        let mut gates = varied(chosen.len(), 3);
        // The gradient does not divide by a gate: a gate of zero has a gradient like any other.
        gates[4] = 0.0;
        let dout = forward(&varied(20 * columns, 4), &bias, None, &chosen, &maps.pairs);
        for gates in [None, Some(gates.as_slice())] {
            let [dbias, dgates] = backward(&dout, &bias, gates, &chosen, &maps.rows, columns);
            let loss = |bias: &[f64], gates: Option<&[f64]>| {
                dot(&forward(&x, bias, gates, &chosen, &maps.pairs), &dout)
            };
            check("dbias", &bias, &dbias, |bias| loss(bias, gates));
            assert!(dbias[3 * columns..].iter().all(|dbias| *dbias == 0.0));
            if let Some(gates) = gates {
                check("dgates", gates, &dgates, |gates| loss(&bias, Some(gates)));
                assert!(dgates[4] != 0.0);
            }
        }
    }
}
