//! Permutation of rows: copies, and sums in FP32 in the order of a token's pairs.

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ROWS_PER_CHUNK, vectorized};

/// Copies the rows of pairs: `x` `[tokens, columns]`, `pairs` `[rows]`, `out` `[rows, columns]`,
/// zero for a row without a pair. A pair is `token * top_k + choice`.
///
/// # Panics
///
/// If a slice's length does not fit, or a pair's token does not exist.
pub fn permute<E: Element>(x: &[E], pairs: &[i32], top_k: usize, columns: usize, out: &mut [E]) {
    assert_eq!(out.len(), pairs.len() * columns, "`out` is not [rows, columns]");
    if columns == 0 {
        return;
    }
    out.par_chunks_mut(ROWS_PER_CHUNK * columns).zip(pairs.par_chunks(ROWS_PER_CHUNK)).for_each(
        |(out, pairs)| {
            for (out, &pair) in out.chunks_exact_mut(columns).zip(pairs) {
                match usize::try_from(pair) {
                    Ok(pair) => out.copy_from_slice(&x[pair / top_k * columns..][..columns]),
                    Err(_) => out.fill(E::from_f32(0.0)),
                }
            }
        },
    );
}

/// Sums the rows of each token: `y` `[rows of pairs, columns]`, `rows` `[tokens, top_k]`, `out`
/// `[tokens, columns]`. A negative row adds nothing.
///
/// # Panics
///
/// If a slice's length does not fit, or a row does not exist.
pub fn unpermute<E: Element>(y: &[E], rows: &[i32], top_k: usize, columns: usize, out: &mut [E]) {
    let add = |sums: &mut [f32], row: usize| {
        for (sum, y) in sums.iter_mut().zip(&y[row * columns..][..columns]) {
            *sum += y.to_f32();
        }
    };
    sum_rows(add, rows, top_k, columns, out);
}

/// [`unpermute`] of `y + z`, with each sum rounded to the type.
///
/// # Panics
///
/// If a slice's length does not fit, or a row does not exist.
pub fn add_unpermute<E: Element>(
    (y, z): (&[E], &[E]),
    rows: &[i32],
    top_k: usize,
    columns: usize,
    out: &mut [E],
) {
    let add = |sums: &mut [f32], row: usize| {
        let (y, z) = (&y[row * columns..][..columns], &z[row * columns..][..columns]);
        for ((sum, y), z) in sums.iter_mut().zip(y).zip(z) {
            *sum += E::from_f32(y.to_f32() + z.to_f32()).to_f32();
        }
    };
    sum_rows(add, rows, top_k, columns, out);
}

/// Sums rows in FP32 with `add`, in the order of a token's pairs.
fn sum_rows<E: Element>(
    add: impl Fn(&mut [f32], usize) + Sync,
    rows: &[i32],
    top_k: usize,
    columns: usize,
    out: &mut [E],
) {
    assert_eq!(out.len() * top_k, rows.len() * columns, "`out` is not [tokens, columns]");
    if columns == 0 {
        return;
    }
    let chunks = out.par_chunks_mut(ROWS_PER_CHUNK * columns);
    chunks.zip(rows.par_chunks(ROWS_PER_CHUNK * top_k)).for_each(|(out, rows)| {
        let mut sums = vec![0f32; columns];
        for (out, rows) in out.chunks_exact_mut(columns).zip(rows.chunks_exact(top_k)) {
            vectorized(
                #[inline(always)]
                || {
                    sums.fill(0.0);
                    for row in rows.iter().filter_map(|&row| usize::try_from(row).ok()) {
                        add(&mut sums, row);
                    }
                    for (out, &sum) in out.iter_mut().zip(&sums) {
                        *out = E::from_f32(sum);
                    }
                },
            );
        }
    });
}

pub(super) fn prepare_permute(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    let (top_k, columns) = (operands.shape(1)[1], operands.shape(0)[1]);
    by_float!(operands, 0, E => {
        let (x, pairs) = (operands.input::<E>(0)?, operands.input::<i32>(2)?);
        let out = operands.target::<E>(3)?;
        Ok(Box::new(move |arena| {
            permute(x.of(arena), pairs.of(arena), top_k, columns, out.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn prepare_unpermute(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    let (top_k, columns) = (operands.shape(1)[1], operands.shape(0)[1]);
    by_float!(operands, 0, E => {
        let (y, rows) = (operands.input::<E>(0)?, operands.input::<i32>(1)?);
        let out = operands.target::<E>(3)?;
        Ok(Box::new(move |arena| {
            unpermute(y.of(arena), rows.of(arena), top_k, columns, out.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn prepare_add_unpermute(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    let (top_k, columns) = (operands.shape(2)[1], operands.shape(0)[1]);
    by_float!(operands, 0, E => {
        let (y, z) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let rows = operands.input::<i32>(2)?;
        let out = operands.target::<E>(4)?;
        Ok(Box::new(move |arena| {
            let of_sum = (y.of(arena), z.of(arena));
            add_unpermute(of_sum, rows.of(arena), top_k, columns, out.of(arena));
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::dispatch::oracle::{self as grouping, Grouped};
    use crate::ops::permute::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close_each, for_thread_counts, poisoned, to_f64,
    };

    fn check<E: Element>(tokens: usize, top_k: usize, columns: usize, capacity: usize) {
        let mut random = Random::new((tokens + columns) as u64);
        let experts = 5;
        let first: Vec<usize> = (0..tokens).map(|_| random.below(experts)).collect();
        let chosen: Vec<i32> = first
            .iter()
            .flat_map(|first| (0..top_k).map(move |choice| ((first + choice) % experts) as i32))
            .collect();
        let length = chosen.len().next_multiple_of(32) + experts * 32;
        let Grouped { rows, pairs, .. } = grouping::forward(&chosen, experts, 32, capacity, length);
        let x: Vec<E> = random.normals(tokens * columns);
        let permuted = oracle::permute(&to_f64(&x), &pairs, top_k, columns);
        for_thread_counts(|| {
            let mut out = poisoned::<E>(length * columns);
            permute(&x, &pairs, top_k, columns, &mut out);
            assert_eq!(to_f64(&out), permuted, "copies are exact");
            out
        });
        // Rows without a pair are not read.
        let mut y: Vec<E> = random.normals(length * columns);
        let expected = oracle::unpermute(&to_f64(&y), &rows, top_k, columns);
        let magnitudes: Vec<f64> = to_f64(&y).iter().map(|y| y.abs()).collect();
        let sizes = oracle::unpermute(&magnitudes, &rows, top_k, columns);
        for (row, _) in pairs.iter().enumerate().filter(|(_, pair)| **pair < 0) {
            y[row * columns..][..columns].fill(E::from_f32(f32::NAN));
        }
        for_thread_counts(|| {
            let mut out = poisoned::<E>(tokens * columns);
            unpermute(&y, &rows, top_k, columns, &mut out);
            // One addition per pair, rounded by 2^-24 of the sum of magnitudes, then one rounding
            // to the type.
            let absolute: Vec<f64> =
                sizes.iter().map(|size| top_k as f64 * 2f64.powi(-24) * size).collect();
            assert_close_each("out", &out, &expected, f64::from(E::UNIT_ROUNDOFF), &absolute);
            out
        });
        // The bits equal those of storing the sum and unpermuting it.
        let z: Vec<E> = random.normals(length * columns);
        let sum: Vec<E> =
            y.iter().zip(&z).map(|(y, z)| E::from_f32(y.to_f32() + z.to_f32())).collect();
        let mut expected = poisoned::<E>(tokens * columns);
        unpermute(&sum, &rows, top_k, columns, &mut expected);
        for_thread_counts(|| {
            let mut out = poisoned::<E>(tokens * columns);
            add_unpermute((&y, &z), &rows, top_k, columns, &mut out);
            assert_eq!(to_f64(&out), to_f64(&expected), "of a sum");
            out
        });
    }

    #[test]
    fn matches_the_oracle() {
        for tokens in [0, 1, 31, 33, 63, 64, 65, 200] {
            for (top_k, columns) in [(1, 1), (2, 33), (4, 64)] {
                for capacity in [usize::MAX, 7, 0] {
                    check::<f32>(tokens, top_k, columns, capacity);
                    check::<bf16>(tokens, top_k, columns, capacity);
                }
            }
        }
    }
}
