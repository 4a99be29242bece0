//! LayerNorm: `y = (x - mean) / sqrt(variance + eps) * weight + bias` for each row, and its
//! backward.
//!
//! Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450, section 3. The variance
//! is the mean of `(x - mean)^2`. All arithmetic is `f32` and rounds to the element type once, at
//! the end.

use deepwell_ir::{KernelRequest, Op};
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::Tier;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{
    LANES, ROWS_PER_CHUNK, chunk_elements, sum_lanes, sum_partial_rows, vectorized,
};

/// Sums `term` over a row: lane `i % LANES` adds element `i`, then the lanes are added.
#[inline(always)]
fn sum_of<E: Element>(row: &[E], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] += term(block[lane].to_f32());
        }
    }
    let mut last = [0.0f32; LANES];
    for (last, x) in last.iter_mut().zip(rest) {
        *last = term(x.to_f32());
    }
    for lane in 0..LANES {
        lanes[lane] += last[lane];
    }
    sum_lanes(lanes)
}

/// Returns the mean and the reciprocal standard deviation of a row.
///
/// The mean is computed from distances to the first element, so that the sum of a row far from
/// zero, in particular of a constant row, loses no precision. The variance is computed from
/// distances to the rounded mean.
#[inline(always)]
fn row_statistics<E: Element>(x: &[E], eps: f32) -> (f32, f32) {
    let hidden = x.len() as f32;
    let first = x[0].to_f32();
    let distance = sum_of(
        x,
        #[inline(always)]
        |x| x - first,
    );
    let mean = first + distance / hidden;
    let squares = sum_of(
        x,
        #[inline(always)]
        |x| (x - mean) * (x - mean),
    );
    (mean, 1.0 / (squares / hidden + eps).sqrt())
}

/// Writes the normalized row and returns its mean and reciprocal standard deviation.
#[inline(always)]
fn normalize_row<E: Element>(
    x: &[E],
    weight: &[E],
    bias: &[E],
    eps: f32,
    y: &mut [E],
) -> (f32, f32) {
    let (mean, rstd) = row_statistics(x, eps);
    for ((y, &x), (&weight, &bias)) in y.iter_mut().zip(x).zip(weight.iter().zip(bias)) {
        let normalized = (x.to_f32() - mean) * rstd;
        *y = E::from_f32(normalized * weight.to_f32() + bias.to_f32());
    }
    (mean, rstd)
}

/// Writes `mean[r]` and `rstd[r] = 1 / sqrt(variance + eps)` of each row `x[r]`, and
/// `y[r] = (x[r] - mean[r]) * rstd[r] * weight + bias`.
///
/// `x` and `y` are `[rows, hidden]` row-major, `weight` and `bias` are `[hidden]`, `mean` and
/// `rstd` are `[rows]`, for use in the backward. Distances from the mean above 1.8e19 overflow the
/// variance, as in any `f32` implementation: the row then becomes the bias.
///
/// # Panics
///
/// If `weight` is empty or a slice's length does not fit the shapes.
pub fn layer_norm_forward<E: Element>(
    x: &[E],
    weight: &[E],
    bias: &[E],
    eps: f32,
    y: &mut [E],
    mean: &mut [f32],
    rstd: &mut [f32],
) {
    let hidden = weight.len();
    assert!(hidden > 0, "`weight` is empty");
    assert_eq!(bias.len(), hidden, "`bias` is not [hidden]");
    assert_eq!(mean.len(), rstd.len(), "`mean` and `rstd` differ in length");
    assert_eq!(x.len(), rstd.len() * hidden, "`x` is not [rows, hidden]");
    assert_eq!(y.len(), x.len(), "`y` is not [rows, hidden]");
    let chunk = chunk_elements(hidden);
    y.par_chunks_mut(chunk)
        .zip(x.par_chunks(chunk))
        .zip(mean.par_chunks_mut(ROWS_PER_CHUNK).zip(rstd.par_chunks_mut(ROWS_PER_CHUNK)))
        .for_each(|((y, x), (mean, rstd))| {
            vectorized(
                #[inline(always)]
                || {
                    let rows = y.chunks_exact_mut(hidden).zip(x.chunks_exact(hidden));
                    for ((y, x), (mean, rstd)) in rows.zip(mean.iter_mut().zip(rstd)) {
                        (*mean, *rstd) = normalize_row(x, weight, bias, eps, y);
                    }
                },
            );
        });
}

/// Writes `sum = x + delta`, rounded to `E`, then [`layer_norm_forward`] of the rounded sum.
///
/// One pass over memory instead of two: `x` is the residual stream, `delta` the output of a layer,
/// `sum` the new residual stream. All are `[rows, hidden]`.
///
/// # Panics
///
/// If `weight` is empty or a slice's length does not fit the shapes.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn add_layer_norm_forward<E: Element>(
    x: &[E],
    delta: &[E],
    weight: &[E],
    bias: &[E],
    eps: f32,
    sum: &mut [E],
    y: &mut [E],
    mean: &mut [f32],
    rstd: &mut [f32],
) {
    let hidden = weight.len();
    assert!(hidden > 0, "`weight` is empty");
    assert_eq!(bias.len(), hidden, "`bias` is not [hidden]");
    assert_eq!(mean.len(), rstd.len(), "`mean` and `rstd` differ in length");
    assert_eq!(x.len(), rstd.len() * hidden, "`x` is not [rows, hidden]");
    assert_eq!(delta.len(), x.len(), "`delta` is not [rows, hidden]");
    assert_eq!(sum.len(), x.len(), "`sum` is not [rows, hidden]");
    assert_eq!(y.len(), x.len(), "`y` is not [rows, hidden]");
    let chunk = chunk_elements(hidden);
    y.par_chunks_mut(chunk)
        .zip(sum.par_chunks_mut(chunk))
        .zip(x.par_chunks(chunk).zip(delta.par_chunks(chunk)))
        .zip(mean.par_chunks_mut(ROWS_PER_CHUNK).zip(rstd.par_chunks_mut(ROWS_PER_CHUNK)))
        .for_each(|(((y, sum), (x, delta)), (mean, rstd))| {
            vectorized(
                #[inline(always)]
                || {
                    let outputs = y.chunks_exact_mut(hidden).zip(sum.chunks_exact_mut(hidden));
                    let inputs = x.chunks_exact(hidden).zip(delta.chunks_exact(hidden));
                    let statistics = mean.iter_mut().zip(rstd);
                    for (((y, sum), (x, delta)), (mean, rstd)) in
                        outputs.zip(inputs).zip(statistics)
                    {
                        for ((sum, &x), &delta) in sum.iter_mut().zip(x).zip(delta) {
                            *sum = E::from_f32(x.to_f32() + delta.to_f32());
                        }
                        (*mean, *rstd) = normalize_row(sum, weight, bias, eps, y);
                    }
                },
            );
        });
}

/// Bytes of workspace of [`layer_norm_backward`]: two `f32` rows of `hidden` per 64 rows or fewer.
pub fn layer_norm_backward_workspace_bytes(rows: usize, hidden: usize) -> usize {
    2 * rows.div_ceil(ROWS_PER_CHUNK) * hidden * size_of::<f32>()
}

/// Writes the gradients of [`layer_norm_forward`] with respect to `x`, `weight` and `bias`.
///
/// With `n = (x - mean) * rstd` and `g = dy * weight`, row by row:
/// `dx = rstd * (g - mean(g) - n * mean(g * n))`, `dweight = sum over rows of dy * n` and
/// `dbias = sum over rows of dy`. `dresidual` `[rows, hidden]`, if given, is the gradient that
/// bypasses the norm in a residual stream; it is added to `dx` before the single rounding.
/// `dweight` and `dbias` `[hidden]` are added to their previous values if `accumulate` is set.
///
/// `workspace` holds [`layer_norm_backward_workspace_bytes`]` / 4` numbers of any value. The rows'
/// contributions to `dweight` and `dbias` are added in runs of 64 rows and then run by run, so the
/// result does not depend on the number of threads.
///
/// # Panics
///
/// If `weight` is empty or a slice's length does not fit the shapes.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn layer_norm_backward<E: Element>(
    dy: &[E],
    x: &[E],
    weight: &[E],
    mean: &[f32],
    rstd: &[f32],
    dresidual: Option<&[E]>,
    dx: &mut [E],
    dweight: &mut [f32],
    dbias: &mut [f32],
    accumulate: bool,
    workspace: &mut [f32],
) {
    let hidden = weight.len();
    let rows = rstd.len();
    assert!(hidden > 0, "`weight` is empty");
    assert_eq!(mean.len(), rows, "`mean` and `rstd` differ in length");
    assert_eq!(x.len(), rows * hidden, "`x` is not [rows, hidden]");
    assert_eq!(dy.len(), x.len(), "`dy` is not [rows, hidden]");
    assert_eq!(dx.len(), x.len(), "`dx` is not [rows, hidden]");
    assert_eq!(dweight.len(), hidden, "`dweight` is not [hidden]");
    assert_eq!(dbias.len(), hidden, "`dbias` is not [hidden]");
    if let Some(dresidual) = dresidual {
        assert_eq!(dresidual.len(), x.len(), "`dresidual` is not [rows, hidden]");
    }
    let parts = rows.div_ceil(ROWS_PER_CHUNK);
    assert!(workspace.len() >= 2 * parts * hidden, "`workspace` is too small");
    let (weight_parts, bias_parts) = workspace[..2 * parts * hidden].split_at_mut(parts * hidden);

    let chunk = chunk_elements(hidden);
    dx.par_chunks_mut(chunk)
        .zip(weight_parts.par_chunks_mut(hidden).zip(bias_parts.par_chunks_mut(hidden)))
        .zip(dy.par_chunks(chunk).zip(x.par_chunks(chunk)))
        .zip(mean.par_chunks(ROWS_PER_CHUNK).zip(rstd.par_chunks(ROWS_PER_CHUNK)))
        .enumerate()
        .for_each(|(index, (((dx, (dweight, dbias)), (dy, x)), (mean, rstd)))| {
            let dresidual = dresidual.map(|all| &all[index * chunk..][..dx.len()]);
            vectorized(
                #[inline(always)]
                || {
                    dweight.fill(0.0);
                    dbias.fill(0.0);
                    let rows = dx.chunks_exact_mut(hidden).zip(dy.chunks_exact(hidden));
                    let rows = rows.zip(x.chunks_exact(hidden)).zip(mean.iter().zip(rstd));
                    for (row, (((dx, dy), x), statistics)) in rows.enumerate() {
                        let given = Row { dy, x, weight, mean: *statistics.0, rstd: *statistics.1 };
                        match dresidual {
                            None => given.backward(std::iter::repeat(0.0), dx, dweight, dbias),
                            Some(all) => {
                                let residual = all[row * hidden..][..hidden].iter();
                                given.backward(residual.map(|d| d.to_f32()), dx, dweight, dbias);
                            }
                        }
                    }
                },
            );
        });
    sum_partial_rows(weight_parts, dweight, accumulate);
    sum_partial_rows(bias_parts, dbias, accumulate);
}

/// Inputs of the backward of one row.
struct Row<'a, E> {
    dy: &'a [E],
    x: &'a [E],
    weight: &'a [E],
    mean: f32,
    rstd: f32,
}

impl<E: Element> Row<'_, E> {
    /// Sums of `g` and of `g * n`, in the order of [`sum_of`].
    #[inline(always)]
    fn sums(&self) -> (f32, f32) {
        let (mut of_g, mut of_gn) = ([0.0f32; LANES], [0.0f32; LANES]);
        let (dy_blocks, dy_rest) = self.dy.as_chunks::<LANES>();
        let (weight_blocks, weight_rest) = self.weight.as_chunks::<LANES>();
        let (x_blocks, x_rest) = self.x.as_chunks::<LANES>();
        for ((dy, weight), x) in dy_blocks.iter().zip(weight_blocks).zip(x_blocks) {
            for lane in 0..LANES {
                let g = dy[lane].to_f32() * weight[lane].to_f32();
                of_g[lane] += g;
                of_gn[lane] += g * ((x[lane].to_f32() - self.mean) * self.rstd);
            }
        }
        let (mut last_g, mut last_gn) = ([0.0f32; LANES], [0.0f32; LANES]);
        let last = last_g.iter_mut().zip(&mut last_gn);
        for ((last_g, last_gn), ((dy, weight), x)) in
            last.zip(dy_rest.iter().zip(weight_rest).zip(x_rest))
        {
            *last_g = dy.to_f32() * weight.to_f32();
            *last_gn = *last_g * ((x.to_f32() - self.mean) * self.rstd);
        }
        for lane in 0..LANES {
            of_g[lane] += last_g[lane];
            of_gn[lane] += last_gn[lane];
        }
        (sum_lanes(of_g), sum_lanes(of_gn))
    }

    /// Writes `dx` and adds the row's contribution to `dweight` and `dbias`.
    #[inline(always)]
    fn backward(
        &self,
        residual: impl Iterator<Item = f32>,
        dx: &mut [E],
        dweight: &mut [f32],
        dbias: &mut [f32],
    ) {
        let hidden = self.x.len() as f32;
        let (of_g, of_gn) = self.sums();
        let (mean_g, mean_gn) = (of_g / hidden, of_gn / hidden);
        let outputs = dx.iter_mut().zip(dweight.iter_mut().zip(dbias)).zip(residual);
        let inputs = self.dy.iter().zip(self.weight).zip(self.x);
        for (((dx, (dweight, dbias)), residual), ((&dy, &weight), &x)) in outputs.zip(inputs) {
            let dy = dy.to_f32();
            let normalized = (x.to_f32() - self.mean) * self.rstd;
            let g = dy * weight.to_f32();
            *dx = E::from_f32(residual + self.rstd * ((g - mean_g) - normalized * mean_gn));
            *dweight += dy * normalized;
            *dbias += dy;
        }
    }
}

#[cfg(test)]
mod tests;

pub(super) fn prepare_forward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::LayerNorm(op) = op else { return Err(operands.unknown_kernel()) };
    let eps = op.eps;
    by_float!(operands, 0, E => {
        let (x, weight) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let (bias, y) = (operands.input::<E>(2)?, operands.target::<E>(3)?);
        let mean = operands.target::<f32>(4)?;
        let rstd = operands.target::<f32>(5)?;
        Ok(Box::new(move |arena| {
            layer_norm_forward(
                x.of(arena),
                weight.of(arena),
                bias.of(arena),
                eps as f32,
                y.of(arena),
                mean.of(arena),
                rstd.of(arena),
            );
            Ok(())
        }))
    })
}

pub(super) fn prepare_add(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::AddLayerNorm(op) = op else { return Err(operands.unknown_kernel()) };
    let eps = op.eps;
    by_float!(operands, 0, E => {
        let (x, delta) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let weight = operands.input::<E>(2)?;
        let bias = operands.input::<E>(3)?;
        let (sum, y) = (operands.target::<E>(4)?, operands.target::<E>(5)?);
        let mean = operands.target::<f32>(6)?;
        let rstd = operands.target::<f32>(7)?;
        Ok(Box::new(move |arena| {
            add_layer_norm_forward(
                x.of(arena),
                delta.of(arena),
                weight.of(arena),
                bias.of(arena),
                eps as f32,
                sum.of(arena),
                y.of(arena),
                mean.of(arena),
                rstd.of(arena),
            );
            Ok(())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let residual = matches!(op, Op::LayerNormBackward(op) if op.residual);
    let accumulate = operands.adds();
    let workspace = operands.workspace::<f32>()?;
    by_float!(operands, 0, E => {
        let (dy, x) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let weight = operands.input::<E>(2)?;
        let mean = operands.input::<f32>(3)?;
        let rstd = operands.input::<f32>(4)?;
        let dresidual = if residual { Some(operands.input::<E>(5)?) } else { None };
        let dx = operands.target::<E>(operands.output(0))?;
        let dweight = operands.target::<f32>(operands.output(1))?;
        let dbias = operands.target::<f32>(operands.output(2))?;
        Ok(Box::new(move |arena| {
            layer_norm_backward(
                dy.of(arena),
                x.of(arena),
                weight.of(arena),
                mean.of(arena),
                rstd.of(arena),
                dresidual.as_ref().map(|dresidual| dresidual.of(arena)),
                dx.of(arena),
                dweight.of(arena),
                dbias.of(arena),
                accumulate,
                workspace.of(arena),
            );
            Ok(())
        }))
    })
}

pub(super) fn backward_workspace_bytes(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let x = &request.operands[1].shape;
    layer_norm_backward_workspace_bytes(x[0], x[1])
}
