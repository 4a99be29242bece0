//! Columns of a matrix in two parts: copies.

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::ROWS_PER_CHUNK;

/// Copies `x` `[rows, a + b]` to `first` `[rows, a]` and `rest` `[rows, b]`; `columns` are
/// `[a, b]`.
///
/// # Panics
///
/// If a part has no columns, or a slice's length does not fit.
pub fn split_columns<E: Element>(x: &[E], columns: [usize; 2], first: &mut [E], rest: &mut [E]) {
    let [a, b] = columns;
    check(x.len(), columns, first.len(), rest.len());
    let parts =
        first.par_chunks_mut(ROWS_PER_CHUNK * a).zip(rest.par_chunks_mut(ROWS_PER_CHUNK * b));
    parts.zip(x.par_chunks(ROWS_PER_CHUNK * (a + b))).for_each(|((first, rest), x)| {
        let parts = first.chunks_exact_mut(a).zip(rest.chunks_exact_mut(b));
        for ((first, rest), x) in parts.zip(x.chunks_exact(a + b)) {
            first.copy_from_slice(&x[..a]);
            rest.copy_from_slice(&x[a..]);
        }
    });
}

/// Copies `first` `[rows, a]` and `rest` `[rows, b]` to `x` `[rows, a + b]`; `columns` are
/// `[a, b]`.
///
/// # Panics
///
/// As [`split_columns`].
pub fn join_columns<E: Element>(first: &[E], rest: &[E], columns: [usize; 2], x: &mut [E]) {
    let [a, b] = columns;
    check(x.len(), columns, first.len(), rest.len());
    let parts = first.par_chunks(ROWS_PER_CHUNK * a).zip(rest.par_chunks(ROWS_PER_CHUNK * b));
    x.par_chunks_mut(ROWS_PER_CHUNK * (a + b)).zip(parts).for_each(|(x, (first, rest))| {
        let parts = first.chunks_exact(a).zip(rest.chunks_exact(b));
        for (x, (first, rest)) in x.chunks_exact_mut(a + b).zip(parts) {
            x[..a].copy_from_slice(first);
            x[a..].copy_from_slice(rest);
        }
    });
}

fn check(whole: usize, [a, b]: [usize; 2], first: usize, rest: usize) {
    assert!(a > 0 && b > 0, "a part has no columns");
    let rows = whole / (a + b);
    assert_eq!((whole, first, rest), (rows * (a + b), rows * a, rows * b), "parts of {a} and {b}");
}

pub(super) fn prepare_split(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    let columns = [1, 2].map(|index| operands.shape(index)[1]);
    by_float!(operands, 0, E => {
        let x = operands.input::<E>(0)?;
        let first = operands.target::<E>(1)?;
        let rest = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            split_columns(x.of(arena), columns, first.of(arena), rest.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn prepare_join(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    let columns = [0, 1].map(|index| operands.shape(index)[1]);
    by_float!(operands, 0, E => {
        let first = operands.input::<E>(0)?;
        let rest = operands.input::<E>(1)?;
        let x = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            join_columns(first.of(arena), rest.of(arena), columns, x.of(arena));
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::split_columns::oracle;
    use crate::runtime::cpu::test_support::{Random, for_thread_counts, poisoned, to_f64};

    fn check<E: Element>(rows: usize, [a, b]: [usize; 2]) {
        let x: Vec<E> = Random::new((rows + a) as u64).normals(rows * (a + b));
        for_thread_counts(|| {
            let mut first = poisoned::<E>(rows * a);
            let mut rest = poisoned::<E>(rows * b);
            split_columns(&x, [a, b], &mut first, &mut rest);
            // Copies are exact.
            assert_eq!((to_f64(&first), to_f64(&rest)), oracle::split(&to_f64(&x), a + b, a));
            let mut joined = poisoned::<E>(x.len());
            join_columns(&first, &rest, [a, b], &mut joined);
            assert_eq!(joined, x);
            joined
        });
    }

    #[test]
    fn matches_the_oracle() {
        for rows in [0, 1, 63, 64, 65, 200] {
            for columns in [[1, 1], [2, 7], [33, 4], [512, 64]] {
                check::<f32>(rows, columns);
                check::<bf16>(rows, columns);
            }
        }
    }
}
