//! GELU: `x * cdf(x)` with the standard normal distribution function, element by element.
//!
//! Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415, section 2, which
//! also gives the form with a hyperbolic tangent in place of the distribution function.

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ELEMENTS_PER_CHUNK, vectorized};
use crate::runtime::cpu::vector_math::{normal_cdf, sigmoid_pair};

/// `2 sqrt(2 / pi)`: the doubled argument of the tanh form, at first order. Doubled because
/// `(1 + tanh u) / 2` is the logistic function of `2 u`.
const LINEAR: f32 = 1.595_769;
/// [`LINEAR`] times 0.044715, the coefficient of the cube.
const CUBIC: f32 = 0.071_354_82;
/// `1 / sqrt(2 pi)`.
const DENSITY: f32 = 0.398_942_3;
/// For larger inputs the logistic function of the argument is 0 or 1 in `f32`; the bound also
/// prevents overflow of the argument's square.
const FLAT: f32 = 12.0;

/// Clamps the input to the range where the slope varies. Comparisons in this direction keep NaN.
#[inline(always)]
fn bounded(x: f32) -> f32 {
    let x = if x < -FLAT { -FLAT } else { x };
    if x > FLAT { FLAT } else { x }
}

#[inline(always)]
fn value<const TANH: bool>(x: f32) -> f32 {
    if TANH {
        let b = bounded(x);
        x * sigmoid_pair(b * (LINEAR + CUBIC * (b * b))).0
    } else {
        x * normal_cdf(x).0
    }
}

#[inline(always)]
fn slope<const TANH: bool>(x: f32) -> f32 {
    if TANH {
        let b = bounded(x);
        let (s, rest) = sigmoid_pair(b * (LINEAR + CUBIC * (b * b)));
        s + (b * (LINEAR + 3.0 * CUBIC * (b * b))) * (s * rest)
    } else {
        let (cdf, e) = normal_cdf(x);
        cdf + x * (DENSITY * e)
    }
}

fn forward<E: Element, const TANH: bool>(x: &[E], y: &mut [E]) {
    y.par_chunks_mut(ELEMENTS_PER_CHUNK).zip(x.par_chunks(ELEMENTS_PER_CHUNK)).for_each(
        |(y, x)| {
            vectorized(
                #[inline(always)]
                || {
                    for (y, &x) in y.iter_mut().zip(x) {
                        *y = E::from_f32(value::<TANH>(x.to_f32()));
                    }
                },
            );
        },
    );
}

fn backward<E: Element, const TANH: bool>(dy: &[E], x: &[E], dx: &mut [E]) {
    dx.par_chunks_mut(ELEMENTS_PER_CHUNK)
        .zip(dy.par_chunks(ELEMENTS_PER_CHUNK).zip(x.par_chunks(ELEMENTS_PER_CHUNK)))
        .for_each(|(dx, (dy, x))| {
            vectorized(
                #[inline(always)]
                || {
                    for (dx, (&dy, &x)) in dx.iter_mut().zip(dy.iter().zip(x)) {
                        *dx = E::from_f32(dy.to_f32() * slope::<TANH>(x.to_f32()));
                    }
                },
            );
        });
}

/// Writes `y = x * cdf(x)`, or if `tanh` is set
/// `y = x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`; the slices are equally long, of any
/// shape. Minus infinity gives NaN, because zero times infinity does.
///
/// # Panics
///
/// If the lengths differ.
pub fn gelu_forward<E: Element>(x: &[E], tanh: bool, y: &mut [E]) {
    assert_eq!(x.len(), y.len(), "`x` and `y` differ in length");
    if tanh { forward::<E, true>(x, y) } else { forward::<E, false>(x, y) }
}

/// Writes the gradient of [`gelu_forward`]: `dx = dy * (cdf(x) + x * density(x))`, or for the tanh
/// form, with `s = sigmoid(2 u)`, `dx = dy * (s + x * s * (1 - s) * 2 du/dx)`.
///
/// # Panics
///
/// If the lengths differ.
pub fn gelu_backward<E: Element>(dy: &[E], x: &[E], tanh: bool, dx: &mut [E]) {
    assert_eq!(dy.len(), x.len(), "`dy` and `x` differ in length");
    assert_eq!(x.len(), dx.len(), "`x` and `dx` differ in length");
    if tanh { backward::<E, true>(dy, x, dx) } else { backward::<E, false>(dy, x, dx) }
}

pub(super) fn prepare_forward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::Gelu(op) = op else { return Err(operands.unknown_kernel()) };
    let tanh = op.tanh;
    by_float!(operands, 0, E => {
        let (x, y) = (operands.input::<E>(0)?, operands.target::<E>(1)?);
        Ok(Box::new(move |arena| {
            gelu_forward(x.of(arena), tanh, y.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::GeluBackward(op) = op else { return Err(operands.unknown_kernel()) };
    let tanh = op.tanh;
    by_float!(operands, 0, E => {
        let (dy, x) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let dx = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            gelu_backward(dy.of(arena), x.of(arena), tanh, dx.of(arena));
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::gelu::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close_each, for_thread_counts, poisoned, to_f64,
    };
    use half::bf16;

    /// Relative error of the distribution function or of the logistic function: see [`normal_cdf`].
    /// The logistic function's argument is rounded four times, which its exponential amplifies by
    /// the argument. Six more roundings in the derivative.
    fn relative_error(x: f64, tanh: bool) -> f64 {
        let argument = (1.6 * x.abs() * (1.0 + 0.045 * x * x)).min(110.0);
        let of_function = if tanh { 8.0 + 5.0 * argument } else { 12.0 + (x * x).min(220.0) };
        (of_function + 6.0) * 2f64.powi(-24)
    }

    fn check<E: Element>(x: &[E]) {
        let dy: Vec<E> = Random::new(x.len() as u64).normals(x.len());
        let (x_64, dy_64) = (to_f64(x), to_f64(&dy));
        let rounding = f64::from(E::UNIT_ROUNDOFF);
        for tanh in [false, true] {
            // 2^-120: here the exponential is subnormal or zero.
            let allowed = |x: f64, size: f64| relative_error(x, tanh) * size + 2f64.powi(-120);
            for_thread_counts(|| {
                let mut y = poisoned::<E>(x.len());
                gelu_forward(x, tanh, &mut y);
                let expected = oracle::forward(&x_64, tanh);
                let absolute: Vec<f64> =
                    x_64.iter().zip(&expected).map(|(&x, y)| allowed(x, y.abs())).collect();
                assert_close_each("y", &y, &expected, rounding, &absolute);
                y
            });
            for_thread_counts(|| {
                let mut dx = poisoned::<E>(x.len());
                gelu_backward(&dy, x, tanh, &mut dx);
                let expected = oracle::backward(&dy_64, &x_64, tanh);
                // The two terms cancel near x = -0.75, so the error is relative to the sum of their
                // sizes.
                let ones = vec![1.0; x.len()];
                let slopes = oracle::backward(&ones, &x_64, tanh);
                let absolute: Vec<f64> = (0..x.len())
                    .map(|i| {
                        let x = x_64[i];
                        let cdf = if x == 0.0 { 0.5 } else { oracle::forward(&[x], tanh)[0] / x };
                        let terms = cdf + (slopes[i] - cdf).abs();
                        allowed(x, dy_64[i].abs() * terms)
                    })
                    .collect();
                assert_close_each("dx", &dx, &expected, rounding, &absolute);
                dx
            });
        }
    }

    fn check_both(x: &[f32]) {
        check::<f32>(x);
        check::<bf16>(&x.iter().map(|&x| Element::from_f32(x)).collect::<Vec<_>>());
    }

    #[test]
    fn matches_the_oracle() {
        for len in [0, 1, 3, 31, 32, 33, 1000, 16 * 1024 - 1, 16 * 1024 + 1, 100_000] {
            let mut random = Random::new(len as u64 + 1);
            let x: Vec<f32> = random.normals::<f32>(len).into_iter().map(|x| 3.0 * x).collect();
            check_both(&x);
        }
    }

    #[test]
    fn matches_the_oracle_on_extreme_inputs() {
        let mut x = vec![0.0f32, -0.0, 1e-38, -1e-38, 1e-45, -1e-45, -0.751_791_5, -5.0, 5.0];
        x.extend([-9.9, 9.9, -11.9, -12.0, -12.1, 12.1, -13.0, -13.3, -14.5, -15.0, 15.0]);
        x.extend([-1e4, 1e4, 3e30, -3e30, 3e38, -3e38]);
        check_both(&x);
    }

    #[test]
    fn non_finite_input_is_not_hidden() {
        for tanh in [false, true] {
            let x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
            let mut y = [0.0f32; 3];
            gelu_forward(&x, tanh, &mut y);
            assert!(y[0].is_nan() && y[1] == f32::INFINITY && y[2].is_nan(), "{y:?}");
            let mut dx = [0.0f32; 3];
            gelu_backward(&[1.0, f32::NAN, f32::INFINITY], &[f32::NAN, 1.0, 1.0], tanh, &mut dx);
            assert!(dx[0].is_nan() && dx[1].is_nan() && dx[2] == f32::INFINITY, "{dx:?}");
        }
    }
}
