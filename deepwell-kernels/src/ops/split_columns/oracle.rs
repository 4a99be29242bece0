//! Columns of a matrix in two parts. Each of the two functions is the backward of the other.

/// The first `columns` columns of `x` `[rows, whole]`, and the rest.
pub fn split(x: &[f64], whole: usize, columns: usize) -> (Vec<f64>, Vec<f64>) {
    let part = |of: std::ops::Range<usize>| {
        x.chunks_exact(whole).flat_map(|row| row[of.clone()].iter().copied()).collect()
    };
    (part(0..columns), part(columns..whole))
}

/// Joins `first` `[rows, a]` and `rest` `[rows, b]` to one matrix `[rows, a + b]`.
pub fn join(first: &[f64], rest: &[f64], a: usize, b: usize) -> Vec<f64> {
    let rows = first.chunks_exact(a).zip(rest.chunks_exact(b));
    rows.flat_map(|(first, rest)| first.iter().chain(rest).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn each_is_the_gradient_of_the_other() {
        let (rows, a, b) = (3, 2, 5);
        let x = varied(rows * (a + b), 1);
        let (dfirst, drest) = (varied(rows * a, 2), varied(rows * b, 3));
        check("dx", &x, &join(&dfirst, &drest, a, b), |x| {
            let (first, rest) = split(x, a + b, a);
            dot(&first, &dfirst) + dot(&rest, &drest)
        });
        let (dx_first, dx_rest) = split(&x, a + b, a);
        check("dfirst", &dfirst, &dx_first, |first| dot(&join(first, &drest, a, b), &x));
        check("drest", &drest, &dx_rest, |rest| dot(&join(&dfirst, rest, a, b), &x));
    }

    #[test]
    fn there_and_back_is_the_same() {
        let x = varied(12, 4);
        let (first, rest) = split(&x, 4, 1);
        assert_eq!((first.len(), rest.len()), (3, 9));
        assert_eq!(join(&first, &rest, 1, 3), x);
    }
}
