//! Embedding lookup.

/// `out[t] = table[tokens[t]]` for `table` `[vocabulary, hidden]`.
///
/// # Panics
///
/// If a token is outside the table.
pub fn forward(tokens: &[i32], table: &[f64], hidden: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(tokens.len() * hidden);
    for &token in tokens {
        let first = token as usize * hidden;
        out.extend_from_slice(&table[first..first + hidden]);
    }
    out
}

/// The gradient of the table `[vocabulary, hidden]` from `dout` `[tokens, hidden]`; row `padding`
/// gets none.
///
/// # Panics
///
/// If a token is outside the table.
pub fn backward(
    tokens: &[i32],
    dout: &[f64],
    vocabulary: usize,
    hidden: usize,
    padding: Option<usize>,
) -> Vec<f64> {
    let mut dtable = vec![0.0; vocabulary * hidden];
    for (index, &token) in tokens.iter().enumerate() {
        if Some(token as usize) == padding {
            continue;
        }
        for column in 0..hidden {
            dtable[token as usize * hidden + column] += dout[index * hidden + column];
        }
    }
    dtable
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let (tokens, vocabulary, hidden) = ([2, 0, 2, 4], 5, 3);
        let table = varied(vocabulary * hidden, 1);
        let dout = varied(tokens.len() * hidden, 2);
        let dtable = backward(&tokens, &dout, vocabulary, hidden, None);
        check("dtable", &table, &dtable, |table| dot(&forward(&tokens, table, hidden), &dout));
        let padded = backward(&tokens, &dout, vocabulary, hidden, Some(2));
        let row_of = |index: usize| index / hidden;
        for (index, (&got, &all)) in padded.iter().zip(&dtable).enumerate() {
            assert_eq!(got, if row_of(index) == 2 { 0.0 } else { all });
        }
    }
}
