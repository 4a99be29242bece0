//! ReLU: the larger of a number and zero, element by element.

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ELEMENTS_PER_CHUNK, vectorized};

/// Returns `of` if `x` is positive or NaN, else zero.
#[inline(always)]
fn passed(of: f32, x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { of }
}

/// Writes `y = max(x, 0)`; the slices are equally long, of any shape. NaN stays NaN.
///
/// # Panics
///
/// If the lengths differ.
pub fn relu_forward<E: Element>(x: &[E], y: &mut [E]) {
    assert_eq!(x.len(), y.len(), "`x` and `y` differ in length");
    y.par_chunks_mut(ELEMENTS_PER_CHUNK).zip(x.par_chunks(ELEMENTS_PER_CHUNK)).for_each(
        |(y, x)| {
            vectorized(
                #[inline(always)]
                || {
                    for (y, &x) in y.iter_mut().zip(x) {
                        let x = x.to_f32();
                        *y = E::from_f32(passed(x, x));
                    }
                },
            );
        },
    );
}

/// Writes the gradient of [`relu_forward`]: `dx = dy` if `x` is positive or NaN, else zero.
///
/// # Panics
///
/// If the lengths differ.
pub fn relu_backward<E: Element>(dy: &[E], x: &[E], dx: &mut [E]) {
    assert_eq!(dy.len(), x.len(), "`dy` and `x` differ in length");
    assert_eq!(x.len(), dx.len(), "`x` and `dx` differ in length");
    dx.par_chunks_mut(ELEMENTS_PER_CHUNK)
        .zip(dy.par_chunks(ELEMENTS_PER_CHUNK).zip(x.par_chunks(ELEMENTS_PER_CHUNK)))
        .for_each(|(dx, (dy, x))| {
            vectorized(
                #[inline(always)]
                || {
                    for (dx, (&dy, &x)) in dx.iter_mut().zip(dy.iter().zip(x)) {
                        *dx = E::from_f32(passed(dy.to_f32(), x.to_f32()));
                    }
                },
            );
        });
}

pub(super) fn prepare_forward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::Relu(_) = op else { return Err(operands.unknown_kernel()) };
    by_float!(operands, 0, E => {
        let (x, y) = (operands.input::<E>(0)?, operands.target::<E>(1)?);
        Ok(Box::new(move |arena| {
            relu_forward(x.of(arena), y.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::ReluBackward(_) = op else { return Err(operands.unknown_kernel()) };
    by_float!(operands, 0, E => {
        let (dy, x) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let dx = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            relu_backward(dy.of(arena), x.of(arena), dx.of(arena));
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::relu::oracle;
    use crate::runtime::cpu::test_support::{Random, for_thread_counts, poisoned, to_f64};

    fn check<E: Element>(x: &[E]) {
        let dy: Vec<E> = Random::new(x.len() as u64).normals(x.len());
        for_thread_counts(|| {
            let mut y = poisoned::<E>(x.len());
            relu_forward(x, &mut y);
            assert_eq!(to_f64(&y), oracle::forward(&to_f64(x)));
            y
        });
        for_thread_counts(|| {
            let mut dx = poisoned::<E>(x.len());
            relu_backward(&dy, x, &mut dx);
            assert_eq!(to_f64(&dx), oracle::backward(&to_f64(&dy), &to_f64(x)));
            dx
        });
    }

    #[test]
    fn matches_the_oracle_to_the_bit() {
        for len in [0, 1, 3, 31, 32, 33, 1000, 16 * 1024 - 1, 16 * 1024 + 1] {
            let mut x: Vec<f32> = Random::new(len as u64 + 1).normals(len);
            for (x, special) in x.iter_mut().zip([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38]) {
                *x = special;
            }
            check::<f32>(&x);
            check::<bf16>(&x.iter().map(|&x| Element::from_f32(x)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn non_finite_input_is_not_hidden() {
        let mut y = [0.0f32; 3];
        relu_forward(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY], &mut y);
        assert!(y[0].is_nan() && y[1] == f32::INFINITY && y[2] == 0.0, "{y:?}");
        let mut dx = [0.0f32; 3];
        relu_backward(&[2.0, f32::NAN, f32::INFINITY], &[f32::NAN, 1.0, 1.0], &mut dx);
        assert!(dx[0] == 2.0 && dx[1].is_nan() && dx[2] == f32::INFINITY, "{dx:?}");
    }
}
