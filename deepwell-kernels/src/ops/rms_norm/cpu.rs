//! RMSNorm: `y = x / sqrt(mean(x^2) + eps) * weight` for each row, and its backward.
//!
//! Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467, eq. 4,
//! with `eps` under the root as Llama has it. All arithmetic is `f32` and rounds to the element
//! type once, at the end.

use rayon::prelude::*;

use crate::cpu::element::Element;
use crate::cpu::parallel::{
    LANES, ROWS_PER_CHUNK, chunk_elements, padded_block, sum_lanes, sum_partial_rows, vectorized,
};

/// Sum of squares of a row: lane `i % LANES` adds element `i`, then the lanes are added.
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

/// Sum of `dy * weight * x` over a row, in the order of [`sum_of_squares`].
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

/// `rstd[r] = 1 / sqrt(mean(x[r]^2) + eps)` and `y[r] = x[r] * rstd[r] * weight`.
///
/// `x` and `y` are `[rows, hidden]` row-major, `weight` is `[hidden]`, `rstd` is `[rows]` and is
/// what the backward needs. Inputs above 1.8e19 overflow the sum of squares, as they do in `f32`
/// everywhere: the row then comes out zero.
///
/// # Panics
///
/// When `weight` is empty or a slice's length does not fit the shapes.
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

/// `sum = x + delta`, rounded to `E`, then [`rms_norm_forward`] of that rounded sum.
///
/// One pass over memory in place of two: `x` is the residual stream, `delta` what a layer adds to
/// it, `sum` the stream after it. All are `[rows, hidden]`.
///
/// # Panics
///
/// When `weight` is empty or a slice's length does not fit the shapes.
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

/// Bytes of workspace that [`rms_norm_backward`] needs: one `f32` row of `hidden` for every 64
/// rows begun.
pub fn rms_norm_backward_workspace_bytes(rows: usize, hidden: usize) -> usize {
    rows.div_ceil(ROWS_PER_CHUNK) * hidden * size_of::<f32>()
}

/// Gradients of [`rms_norm_forward`] with respect to `x` and `weight`.
///
/// With `n = x * rstd` and `g = dy * weight`, row by row:
/// `dx = rstd * (g - n * mean(g * n))`, and `dweight = sum over rows of dy * n`. Given
/// `dresidual` `[rows, hidden]`, `dx` is `dresidual` plus that, rounded once: the gradient that
/// reaches a residual stream past the norm. `dweight` `[hidden]` is added to what it holds when
/// `accumulate` is set.
///
/// `workspace` holds [`rms_norm_backward_workspace_bytes`]` / 4` numbers of any value. The rows'
/// contributions to `dweight` are added in runs of 64 rows and then run by run, so the result
/// does not depend on the number of threads.
///
/// # Panics
///
/// When `weight` is empty or a slice's length does not fit the shapes.
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

/// One row of [`rms_norm_backward`]; adds the row's part to `dweight`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::test_support::{
        Random, assert_close, assert_close_each, for_thread_counts, poisoned, to_f64,
    };
    use crate::ops::rms_norm::oracle;
    use half::bf16;

    const EPS: f32 = 1e-5;

    /// The arithmetic of a row rounds a handful of times in `f32`, and its sum of `hidden` terms
    /// in 32 lanes as often as `hidden / 32 + 5`; a bound that grows with that, relative to the
    /// terms' size.
    fn f32_error(hidden: usize) -> f64 {
        (hidden as f64 / 32.0 + 12.0) * 2f64.powi(-24)
    }

    fn check_forward<E: Element>(x: &[E], hidden: usize) {
        let rows = x.len() / hidden;
        let mut random = Random::new(hidden as u64);
        let weight: Vec<E> = random.normals(hidden);
        let delta: Vec<E> = random.normals(x.len());
        let rounding = f64::from(E::UNIT_ROUNDOFF) + f32_error(hidden);

        for_thread_counts(|| {
            let (mut y, mut rstd) = (poisoned::<E>(x.len()), poisoned::<f32>(rows));
            rms_norm_forward(x, &weight, EPS, &mut y, &mut rstd);
            let expected = oracle::forward(&to_f64(x), &to_f64(&weight), f64::from(EPS));
            assert_close("rstd", &rstd, &expected.rstd, f32_error(hidden), 0.0);
            // 2^-134: half the smallest BF16 subnormal.
            assert_close("y", &y, &expected.y, rounding, 2f64.powi(-134));
            (y, rstd)
        });
        for_thread_counts(|| {
            let (mut sum, mut y) = (poisoned::<E>(x.len()), poisoned::<E>(x.len()));
            let mut rstd = poisoned::<f32>(rows);
            add_rms_norm_forward(x, &delta, &weight, EPS, &mut sum, &mut y, &mut rstd);
            let added: Vec<f64> =
                to_f64(x).iter().zip(to_f64(&delta)).map(|(x, d)| x + d).collect();
            assert_close("sum", &sum, &added, f64::from(E::UNIT_ROUNDOFF), 0.0);
            // The norm of the sum as stored: identical to the plain kernel on it.
            let (mut y_plain, mut rstd_plain) = (poisoned::<E>(x.len()), poisoned::<f32>(rows));
            rms_norm_forward(&sum, &weight, EPS, &mut y_plain, &mut rstd_plain);
            assert_eq!(y, y_plain);
            assert_eq!(rstd, rstd_plain);
            (sum, y)
        });
    }

    fn check_backward<E: Element>(x: &[E], hidden: usize) {
        let rows = x.len() / hidden;
        let mut random = Random::new(hidden as u64 + 1);
        let weight: Vec<E> = random.normals(hidden);
        let dy: Vec<E> = random.normals(x.len());
        let residual: Vec<E> = random.normals(x.len());
        let before: Vec<f32> = random.normals(hidden);
        let (mut y, mut rstd) = (poisoned::<E>(x.len()), poisoned::<f32>(rows));
        rms_norm_forward(x, &weight, EPS, &mut y, &mut rstd);
        let exact = oracle::backward(&to_f64(&dy), &to_f64(x), &to_f64(&weight), &to_f64(&rstd));

        for (with_residual, accumulate) in [(false, false), (true, true)] {
            for_thread_counts(|| {
                let mut dx = poisoned::<E>(x.len());
                let mut dweight = if accumulate { before.clone() } else { poisoned(hidden) };
                let bytes = rms_norm_backward_workspace_bytes(rows, hidden);
                let mut workspace = poisoned::<f32>(bytes / 4);
                rms_norm_backward(
                    &dy,
                    x,
                    &weight,
                    &rstd,
                    with_residual.then_some(&residual[..]),
                    &mut dx,
                    &mut dweight,
                    accumulate,
                    &mut workspace,
                );
                let mut expected_dx = exact.dx.clone();
                let mut expected_dweight = exact.dweight.clone();
                if with_residual {
                    expected_dx.iter_mut().zip(to_f64(&residual)).for_each(|(e, r)| *e += r);
                }
                if accumulate {
                    expected_dweight.iter_mut().zip(to_f64(&before)).for_each(|(e, b)| *e += b);
                }
                // The two terms of dx may cancel: the error is relative to their size, which is
                // rstd times a normal number times a weight, both below 5.
                let absolute: Vec<f64> = rstd
                    .iter()
                    .flat_map(|&rstd| {
                        let size = f64::from(rstd) * 25.0 + 5.0;
                        std::iter::repeat_n(size * f32_error(hidden), hidden)
                    })
                    .collect();
                let relative = f64::from(E::UNIT_ROUNDOFF);
                assert_close_each("dx", &dx, &expected_dx, relative, &absolute);
                // |dy| < 5 and |normalized| <= sqrt(hidden); one addition a row.
                let terms = rows as f64 + 4.0;
                let size = 5.0 * (hidden as f64).sqrt().min(5.0) * terms.sqrt() + 5.0;
                assert_close("dweight", &dweight, &expected_dweight, 0.0, {
                    terms * 2f64.powi(-24) * size
                });
                (dx, dweight)
            });
        }
    }

    fn check<E: Element>(x: &[E], hidden: usize) {
        check_forward(x, hidden);
        check_backward(x, hidden);
    }

    #[test]
    fn matches_the_oracle() {
        for (rows, hidden) in [
            (0, 4),
            (1, 1),
            (1, 256),
            (3, 31),
            (5, 32),
            (63, 33),
            (64, 7),
            (65, 64),
            (129, 257),
            (300, 256),
            (2, 4096),
        ] {
            let mut random = Random::new(rows as u64);
            check::<bf16>(&random.normals(rows * hidden), hidden);
            check::<f32>(&random.normals(rows * hidden), hidden);
        }
    }

    #[test]
    fn matches_the_oracle_on_extreme_rows() {
        // A zero row, a row of tiny numbers, one of large ones, one with a single outlier.
        let hidden = 48;
        let mut x = vec![0.0f32; 4 * hidden];
        for column in 0..hidden {
            let sign = if column % 3 == 0 { -1.0 } else { 1.0 };
            x[hidden + column] = sign * 1e-30;
            x[2 * hidden + column] = sign * 1e15 * (1.0 + column as f32);
            x[3 * hidden + column] = if column == 17 { 3e4 } else { sign * 1e-3 };
        }
        let narrow: Vec<bf16> = x.iter().map(|&x| Element::from_f32(x)).collect();
        check_forward(&x, hidden);
        check_forward(&narrow, hidden);
        check_backward(&x, hidden);
        check_backward(&narrow, hidden);
    }

    #[test]
    fn non_finite_input_is_not_hidden() {
        let mut x = vec![1.0f32; 64];
        x[40] = f32::NAN;
        let (mut y, mut rstd) = ([0.0; 64], [0.0; 2]);
        rms_norm_forward(&x, &[1.0; 32], EPS, &mut y, &mut rstd);
        assert!(y[..32].iter().all(|y| y.is_finite()));
        assert!(y[32..].iter().all(|y| y.is_nan()));
    }
}
