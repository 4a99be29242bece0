//! RMSNorm: `y = x / sqrt(mean(x^2) + eps) * weight` for each row, and its backward.
//!
//! Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467, eq. 4,
//! with `eps` under the root as in Llama. All arithmetic is `f32` and rounds to the element type
//! once, at the end.

use deepwell_ir::{KernelRequest, Op};
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::Tier;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{
    LANES, ROWS_PER_CHUNK, chunk_elements, padded_block, sum_lanes, sum_partial_rows, vectorized,
};

/// Sums the squares of a row: lane `i % LANES` adds element `i`, then the lanes are added.
#[inline(always)]
fn sum_of_squares<E: Element>(row: &[E]) -> f32 {
    #[inline(always)]
    fn add_block<E: Element>(lanes: &mut [f32; LANES], block: &[E; LANES]) {
        for lane in 0..LANES {
            lanes[lane] += block[lane].to_f32() * block[lane].to_f32();
        }
    }
    let mut lanes = [0.0f32; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        add_block(&mut lanes, block);
    }
    if !rest.is_empty() {
        add_block(&mut lanes, &padded_block(rest));
    }
    sum_lanes(lanes)
}

/// Sums `dy * weight * x` over a row, in the order of [`sum_of_squares`].
#[inline(always)]
fn sum_of_products<E: Element>(dy: &[E], weight: &[E], x: &[E]) -> f32 {
    #[inline(always)]
    fn add_block<E: Element>(
        lanes: &mut [f32; LANES],
        dy: &[E; LANES],
        weight: &[E; LANES],
        x: &[E; LANES],
    ) {
        for lane in 0..LANES {
            lanes[lane] += dy[lane].to_f32() * weight[lane].to_f32() * x[lane].to_f32();
        }
    }
    let mut lanes = [0.0f32; LANES];
    let (dy_blocks, dy_rest) = dy.as_chunks::<LANES>();
    let (weight_blocks, weight_rest) = weight.as_chunks::<LANES>();
    let (x_blocks, x_rest) = x.as_chunks::<LANES>();
    for ((dy, weight), x) in dy_blocks.iter().zip(weight_blocks).zip(x_blocks) {
        add_block(&mut lanes, dy, weight, x);
    }
    if !x_rest.is_empty() {
        let dy = padded_block(dy_rest);
        add_block(&mut lanes, &dy, &padded_block(weight_rest), &padded_block(x_rest));
    }
    sum_lanes(lanes)
}

/// Writes the normalized row and returns the reciprocal root mean square.
#[inline(always)]
fn normalize_row<E: Element>(x: &[E], weight: &[E], eps: f32, y: &mut [E]) -> f32 {
    let rstd = 1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt();
    for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
        *y = E::from_f32(x.to_f32() * rstd * weight.to_f32());
    }
    rstd
}

/// Writes `rstd[r] = 1 / sqrt(mean(x[r]^2) + eps)` and `y[r] = x[r] * rstd[r] * weight`.
///
/// `x` and `y` are `[rows, hidden]` row-major, `weight` is `[hidden]`, `rstd` is `[rows]`, for use
/// in the backward. Inputs above 1.8e19 overflow the sum of squares, as in any `f32`
/// implementation: the row then becomes zero.
///
/// # Panics
///
/// If `weight` is empty or a slice's length does not fit the shapes.
pub fn rms_norm_forward<E: Element>(
    x: &[E],
    weight: &[E],
    eps: f32,
    y: &mut [E],
    rstd: &mut [f32],
) {
    let hidden = weight.len();
    assert!(hidden > 0, "`weight` is empty");
    assert_eq!(x.len(), rstd.len() * hidden, "`x` is not [rows, hidden]");
    assert_eq!(y.len(), x.len(), "`y` is not [rows, hidden]");
    let chunk = chunk_elements(hidden);
    y.par_chunks_mut(chunk)
        .zip(x.par_chunks(chunk))
        .zip(rstd.par_chunks_mut(ROWS_PER_CHUNK))
        .for_each(|((y, x), rstd)| {
            vectorized(
                #[inline(always)]
                || {
                    let rows = y.chunks_exact_mut(hidden).zip(x.chunks_exact(hidden));
                    for ((y, x), rstd) in rows.zip(rstd) {
                        *rstd = normalize_row(x, weight, eps, y);
                    }
                },
            );
        });
}

/// Writes `sum = x + delta`, rounded to `E`, then [`rms_norm_forward`] of the rounded sum.
///
/// One pass over memory instead of two: `x` is the residual stream, `delta` the output of a layer,
/// `sum` the new residual stream. All are `[rows, hidden]`.
///
/// # Panics
///
/// If `weight` is empty or a slice's length does not fit the shapes.
pub fn add_rms_norm_forward<E: Element>(
    x: &[E],
    delta: &[E],
    weight: &[E],
    eps: f32,
    sum: &mut [E],
    y: &mut [E],
    rstd: &mut [f32],
) {
    let hidden = weight.len();
    assert!(hidden > 0, "`weight` is empty");
    assert_eq!(x.len(), rstd.len() * hidden, "`x` is not [rows, hidden]");
    assert_eq!(delta.len(), x.len(), "`delta` is not [rows, hidden]");
    assert_eq!(sum.len(), x.len(), "`sum` is not [rows, hidden]");
    assert_eq!(y.len(), x.len(), "`y` is not [rows, hidden]");
    let chunk = chunk_elements(hidden);
    y.par_chunks_mut(chunk)
        .zip(sum.par_chunks_mut(chunk))
        .zip(x.par_chunks(chunk).zip(delta.par_chunks(chunk)))
        .zip(rstd.par_chunks_mut(ROWS_PER_CHUNK))
        .for_each(|(((y, sum), (x, delta)), rstd)| {
            vectorized(
                #[inline(always)]
                || {
                    let outputs = y.chunks_exact_mut(hidden).zip(sum.chunks_exact_mut(hidden));
                    let inputs = x.chunks_exact(hidden).zip(delta.chunks_exact(hidden));
                    for (((y, sum), (x, delta)), rstd) in outputs.zip(inputs).zip(rstd) {
                        for ((sum, &x), &delta) in sum.iter_mut().zip(x).zip(delta) {
                            *sum = E::from_f32(x.to_f32() + delta.to_f32());
                        }
                        *rstd = normalize_row(sum, weight, eps, y);
                    }
                },
            );
        });
}

/// Bytes of workspace of [`rms_norm_backward`]: one `f32` row of `hidden` per 64 rows or fewer.
pub fn rms_norm_backward_workspace_bytes(rows: usize, hidden: usize) -> usize {
    rows.div_ceil(ROWS_PER_CHUNK) * hidden * size_of::<f32>()
}

/// Writes the gradients of [`rms_norm_forward`] with respect to `x` and `weight`.
///
/// With `n = x * rstd` and `g = dy * weight`, row by row: `dx = rstd * (g - n * mean(g * n))`, and
/// `dweight = sum over rows of dy * n`. `dresidual` `[rows, hidden]`, if given, is the gradient
/// that bypasses the norm in a residual stream; it is added to `dx` before the single rounding.
/// `dweight` `[hidden]` is added to its previous value if `accumulate` is set.
///
/// `workspace` holds [`rms_norm_backward_workspace_bytes`]` / 4` numbers of any value. The rows'
/// contributions to `dweight` are added in runs of 64 rows and then run by run, so the result does
/// not depend on the number of threads.
///
/// # Panics
///
/// If `weight` is empty or a slice's length does not fit the shapes.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn rms_norm_backward<E: Element>(
    dy: &[E],
    x: &[E],
    weight: &[E],
    rstd: &[f32],
    dresidual: Option<&[E]>,
    dx: &mut [E],
    dweight: &mut [f32],
    accumulate: bool,
    workspace: &mut [f32],
) {
    let hidden = weight.len();
    let rows = rstd.len();
    assert!(hidden > 0, "`weight` is empty");
    assert_eq!(x.len(), rows * hidden, "`x` is not [rows, hidden]");
    assert_eq!(dy.len(), x.len(), "`dy` is not [rows, hidden]");
    assert_eq!(dx.len(), x.len(), "`dx` is not [rows, hidden]");
    assert_eq!(dweight.len(), hidden, "`dweight` is not [hidden]");
    if let Some(dresidual) = dresidual {
        assert_eq!(dresidual.len(), x.len(), "`dresidual` is not [rows, hidden]");
    }
    let parts = rows.div_ceil(ROWS_PER_CHUNK);
    assert!(workspace.len() >= parts * hidden, "`workspace` is too small");
    let partial = &mut workspace[..parts * hidden];

    let chunk = chunk_elements(hidden);
    dx.par_chunks_mut(chunk)
        .zip(partial.par_chunks_mut(hidden))
        .zip(dy.par_chunks(chunk).zip(x.par_chunks(chunk)))
        .zip(rstd.par_chunks(ROWS_PER_CHUNK))
        .enumerate()
        .for_each(|(index, (((dx, partial), (dy, x)), rstd))| {
            let dresidual = dresidual.map(|all| &all[index * chunk..][..dx.len()]);
            vectorized(
                #[inline(always)]
                || {
                    partial.fill(0.0);
                    let rows = dx.chunks_exact_mut(hidden).zip(dy.chunks_exact(hidden));
                    let rows = rows.zip(x.chunks_exact(hidden)).zip(rstd).enumerate();
                    for (row, (((dx, dy), x), &rstd)) in rows {
                        match dresidual {
                            None => {
                                let zeros = std::iter::repeat(0.0);
                                backward_row(dy, x, weight, rstd, zeros, dx, partial);
                            }
                            Some(all) => {
                                let residual = &all[row * hidden..][..hidden];
                                let residual = residual.iter().map(|d| d.to_f32());
                                backward_row(dy, x, weight, rstd, residual, dx, partial);
                            }
                        }
                    }
                },
            );
        });
    sum_partial_rows(partial, dweight, accumulate);
}

/// Computes one row of [`rms_norm_backward`]; adds the row's contribution to `dweight`.
#[inline(always)]
fn backward_row<E: Element>(
    dy: &[E],
    x: &[E],
    weight: &[E],
    rstd: f32,
    residual: impl Iterator<Item = f32>,
    dx: &mut [E],
    dweight: &mut [f32],
) {
    let mean = sum_of_products(dy, weight, x) * rstd / x.len() as f32;
    let outputs = dx.iter_mut().zip(dweight).zip(residual);
    for (((dx, dweight), residual), ((&dy, &weight), &x)) in
        outputs.zip(dy.iter().zip(weight).zip(x))
    {
        let dy = dy.to_f32();
        let normalized = x.to_f32() * rstd;
        *dx = E::from_f32(residual + rstd * (dy * weight.to_f32() - normalized * mean));
        *dweight += dy * normalized;
    }
}

pub(crate) fn prepare_forward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let eps = match op {
        Op::RmsNorm(op) => op.eps,
        // A head is a row as wide as the gain, so the lengths alone determine the rows.
        Op::HeadRmsNorm(op) => op.eps,
        _ => return Err(operands.unknown_kernel()),
    };
    by_float!(operands, 0, E => {
        let (x, weight) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let y = operands.target::<E>(2)?;
        let rstd = operands.target::<f32>(3)?;
        Ok(Box::new(move |arena| {
            let (x, weight) = (x.of(arena), weight.of(arena));
            rms_norm_forward(x, weight, eps as f32, y.of(arena), rstd.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn prepare_add(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::AddRmsNorm(op) = op else { return Err(operands.unknown_kernel()) };
    let eps = op.eps;
    by_float!(operands, 0, E => {
        let (x, delta) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let weight = operands.input::<E>(2)?;
        let (sum, y) = (operands.target::<E>(3)?, operands.target::<E>(4)?);
        let rstd = operands.target::<f32>(5)?;
        Ok(Box::new(move |arena| {
            add_rms_norm_forward(
                x.of(arena),
                delta.of(arena),
                weight.of(arena),
                eps as f32,
                sum.of(arena),
                y.of(arena),
                rstd.of(arena),
            );
            Ok(())
        }))
    })
}

pub(crate) fn prepare_backward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let residual = matches!(op, Op::RmsNormBackward(op) if op.residual);
    let accumulate = operands.adds();
    let workspace = operands.workspace::<f32>()?;
    by_float!(operands, 0, E => {
        let (dy, x) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let weight = operands.input::<E>(2)?;
        let rstd = operands.input::<f32>(3)?;
        let dresidual = if residual { Some(operands.input::<E>(4)?) } else { None };
        let dx = operands.target::<E>(operands.output(0))?;
        let dweight = operands.target::<f32>(operands.output(1))?;
        Ok(Box::new(move |arena| {
            rms_norm_backward(
                dy.of(arena),
                x.of(arena),
                weight.of(arena),
                rstd.of(arena),
                dresidual.as_ref().map(|dresidual| dresidual.of(arena)),
                dx.of(arena),
                dweight.of(arena),
                accumulate,
                workspace.of(arena),
            );
            Ok(())
        }))
    })
}

pub(super) fn backward_workspace_bytes(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let x = &request.operands[1].shape;
    rms_norm_backward_workspace_bytes(x[0], x[1])
}

#[cfg(test)]
mod tests;
