//! Permutation of rows. Each of the two functions is the backward of the other.

/// Rows of pairs `[pairs, columns]` of `x` `[tokens, columns]`; zero for a row without a pair.
pub fn permute(x: &[f64], pairs: &[i32], top_k: usize, columns: usize) -> Vec<f64> {
    let mut rows = vec![0.0; pairs.len() * columns];
    for (row, &pair) in pairs.iter().enumerate().filter(|(_, pair)| **pair >= 0) {
        for column in 0..columns {
            rows[row * columns + column] = x[pair as usize / top_k * columns + column];
        }
    }
    rows
}

/// The sum of each token's rows of `y`, selected by `rows` `[tokens, top_k]`.
pub fn unpermute(y: &[f64], rows: &[i32], top_k: usize, columns: usize) -> Vec<f64> {
    let mut sums = vec![0.0; rows.len() / top_k * columns];
    for (pair, &row) in rows.iter().enumerate().filter(|(_, row)| **row >= 0) {
        for column in 0..columns {
            sums[pair / top_k * columns + column] += y[row as usize * columns + column];
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::dispatch::oracle::forward;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn each_is_the_gradient_of_the_other() {
        let (top_k, columns) = (2, 3);
        // Five tokens; a capacity of 3 drops two pairs.
        let grouped = forward(&[0, 2, 0, 1, 2, 0, 0, 2, 2, 0], 4, 4, 3, 20);
        assert_eq!(grouped.rows.iter().filter(|row| **row < 0).count(), 3);
        let (x, y) = (varied(5 * columns, 1), varied(20 * columns, 2));
        let dx = unpermute(&y, &grouped.rows, top_k, columns);
        check("dx", &x, &dx, |x| dot(&permute(x, &grouped.pairs, top_k, columns), &y));
        let dy = permute(&x, &grouped.pairs, top_k, columns);
        check("dy", &y, &dy, |y| dot(&unpermute(y, &grouped.rows, top_k, columns), &x));
    }

    /// Every kept row returns once per copy sent.
    #[test]
    fn there_and_back_is_top_k_times() {
        let grouped = forward(&[0, 2, 0, 1, 2, 0], 3, 4, 9, 20);
        let x = varied(9, 3);
        let back = unpermute(&permute(&x, &grouped.pairs, 2, 3), &grouped.rows, 2, 3);
        let twice: Vec<f64> = x.iter().map(|x| 2.0 * x).collect();
        assert_eq!(back, twice);
    }
}
