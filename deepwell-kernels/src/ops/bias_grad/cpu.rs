//! Sums of a tensor's rows with a bias, and the gradient of the bias.

use deepwell_ir::{KernelRequest, Op};
use rayon::prelude::*;

use crate::KernelError;
pub use crate::runtime::cpu::add_bias::bias_add_forward_in_place;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::Tier;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ROWS_PER_CHUNK, chunk_elements, sum_partial_rows, vectorized};

/// Writes `y[r] = x[r] + bias` for `x` and `y` `[rows, columns]` and `bias` `[columns]`.
///
/// # Panics
///
/// If `bias` is empty or a slice's length does not fit the shapes.
pub fn bias_add_forward<E: Element>(x: &[E], bias: &[E], y: &mut [E]) {
    let columns = bias.len();
    assert!(columns > 0, "`bias` is empty");
    assert_eq!(x.len() % columns, 0, "`x` is not [rows, columns]");
    assert_eq!(x.len(), y.len(), "`x` and `y` differ in length");
    let chunk = chunk_elements(columns);
    y.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(y, x)| {
        vectorized(
            #[inline(always)]
            || {
                for (y, x) in y.chunks_exact_mut(columns).zip(x.chunks_exact(columns)) {
                    for ((y, &x), &bias) in y.iter_mut().zip(x).zip(bias) {
                        *y = E::from_f32(x.to_f32() + bias.to_f32());
                    }
                }
            },
        );
    });
}

/// Bytes of workspace of [`bias_add_backward`]: one `f32` row of `columns` per 64 rows or fewer.
pub fn bias_add_backward_workspace_bytes(rows: usize, columns: usize) -> usize {
    rows.div_ceil(ROWS_PER_CHUNK) * columns * size_of::<f32>()
}

/// Writes `dbias = sum over rows of dy`, added to the previous `dbias` if `accumulate` is set; `dy`
/// is `[rows, columns]`, `dbias` `[columns]`. (The gradient of `x` is `dy`.)
///
/// `workspace` holds [`bias_add_backward_workspace_bytes`]` / 4` numbers of any value. Rows are
/// added in runs of 64 and then run by run, so the result does not depend on the threads.
///
/// # Panics
///
/// If `dbias` is empty or a slice's length does not fit the shapes.
pub fn bias_add_backward<E: Element>(
    dy: &[E],
    dbias: &mut [f32],
    accumulate: bool,
    workspace: &mut [f32],
) {
    let columns = dbias.len();
    assert!(columns > 0, "`dbias` is empty");
    assert_eq!(dy.len() % columns, 0, "`dy` is not [rows, columns]");
    let parts = (dy.len() / columns).div_ceil(ROWS_PER_CHUNK);
    assert!(workspace.len() >= parts * columns, "`workspace` is too small");
    let partial = &mut workspace[..parts * columns];
    partial.par_chunks_mut(columns).zip(dy.par_chunks(chunk_elements(columns))).for_each(
        |(partial, dy)| {
            vectorized(
                #[inline(always)]
                || {
                    partial.fill(0.0);
                    for dy in dy.chunks_exact(columns) {
                        for (sum, &dy) in partial.iter_mut().zip(dy) {
                            *sum += dy.to_f32();
                        }
                    }
                },
            );
        },
    );
    sum_partial_rows(partial, dbias, accumulate);
}

pub(super) fn prepare(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    let accumulate = operands.adds();
    let workspace = operands.workspace::<f32>()?;
    let dbias = operands.target::<f32>(1)?;
    by_float!(operands, 0, E => {
        let dy = operands.input::<E>(0)?;
        Ok(Box::new(move |arena| {
            bias_add_backward(dy.of(arena), dbias.of(arena), accumulate, workspace.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn workspace_bytes(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let dy = &request.operands[0].shape;
    bias_add_backward_workspace_bytes(dy[0], dy[1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::bias_grad::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close, for_thread_counts, poisoned, to_f64,
    };
    use half::bf16;

    fn check_bias<E: Element>(rows: usize, columns: usize) {
        let mut random = Random::new((rows * columns) as u64);
        let x: Vec<E> = random.normals(rows * columns);
        let bias: Vec<E> = random.normals(columns);
        let before: Vec<f32> = random.normals(columns);
        for_thread_counts(|| {
            let mut y = poisoned::<E>(x.len());
            bias_add_forward(&x, &bias, &mut y);
            let expected = oracle::forward(&to_f64(&x), &to_f64(&bias));
            let relative = f64::from(E::UNIT_ROUNDOFF) + 2f64.powi(-24);
            assert_close("y", &y, &expected, relative, 0.0);
            let mut in_place = x.clone();
            bias_add_forward_in_place(&mut in_place, &bias);
            assert_eq!(y, in_place);
            y
        });
        for accumulate in [false, true] {
            for_thread_counts(|| {
                let mut dbias = if accumulate { before.clone() } else { poisoned(columns) };
                let bytes = bias_add_backward_workspace_bytes(rows, columns);
                let mut workspace = poisoned::<f32>(bytes / 4);
                bias_add_backward(&x, &mut dbias, accumulate, &mut workspace);
                let mut expected = oracle::backward(&to_f64(&x), columns);
                if accumulate {
                    expected.iter_mut().zip(&before).for_each(|(e, &b)| *e += f64::from(b));
                }
                // One f32 addition per row, with an error of 2^-24 of a partial sum of normal
                // numbers.
                let n = rows as f64 + 1.0;
                let absolute = n * 2f64.powi(-24) * (4.0 * n.sqrt() + 4.0);
                assert_close("dbias", &dbias, &expected, 0.0, absolute);
                dbias
            });
        }
    }

    #[test]
    fn biases_match_the_oracle() {
        for (rows, columns) in
            [(0, 3), (1, 1), (5, 31), (63, 64), (64, 33), (65, 300), (257, 704), (1000, 17)]
        {
            check_bias::<bf16>(rows, columns);
            check_bias::<f32>(rows, columns);
        }
    }
}
