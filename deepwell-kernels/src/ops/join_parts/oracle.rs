//! Contiguous parts of a matrix, placed side by side. The op has no derivative.

/// Joins `x`, `parts` contiguous matrices `[rows, columns]`, to `[rows, parts · columns]`.
pub fn join<T: Copy>(x: &[T], parts: usize, rows: usize, columns: usize) -> Vec<T> {
    let at = |row: usize, column: usize| {
        let part = column / columns;
        x[(part * rows + row) * columns + column % columns]
    };
    let whole = parts * columns;
    (0..rows * whole).map(|it| at(it / whole, it % whole)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_those_of_the_first_part_first() {
        assert_eq!(join(&[1, 2, 3, 4, 5, 6, 7, 8], 2, 2, 2), [1, 2, 5, 6, 3, 4, 7, 8]);
        assert_eq!(join(&[1, 2, 3, 4, 5, 6], 1, 2, 3), [1, 2, 3, 4, 5, 6]);
        assert_eq!(join(&[1, 2, 3, 4, 5, 6], 3, 2, 1), [1, 3, 5, 2, 4, 6]);
    }
}
