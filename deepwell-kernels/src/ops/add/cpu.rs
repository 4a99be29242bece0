//! Sums of two tensors.

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ELEMENTS_PER_CHUNK, vectorized};

/// Writes `out = a + b`, each sum computed in `f32` and rounded to `E`, for equally long slices of
/// any shape.
///
/// The backward passes `dout` to both inputs, so it needs no kernel.
///
/// # Panics
///
/// If the lengths differ.
pub fn add<E: Element>(a: &[E], b: &[E], out: &mut [E]) {
    assert_eq!(a.len(), b.len(), "`a` and `b` differ in length");
    assert_eq!(a.len(), out.len(), "`a` and `out` differ in length");
    out.par_chunks_mut(ELEMENTS_PER_CHUNK)
        .zip(a.par_chunks(ELEMENTS_PER_CHUNK))
        .zip(b.par_chunks(ELEMENTS_PER_CHUNK))
        .for_each(|((out, a), b)| {
            vectorized(
                #[inline(always)]
                || {
                    for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
                        *out = E::from_f32(a.to_f32() + b.to_f32());
                    }
                },
            );
        });
}

/// Adds `source` to `target`, rounded to `E`: [`add`] in place.
///
/// # Panics
///
/// If the lengths differ.
pub fn add_in_place<E: Element>(target: &mut [E], source: &[E]) {
    assert_eq!(target.len(), source.len(), "`target` and `source` differ in length");
    target.par_chunks_mut(ELEMENTS_PER_CHUNK).zip(source.par_chunks(ELEMENTS_PER_CHUNK)).for_each(
        |(target, source)| {
            vectorized(
                #[inline(always)]
                || {
                    for (target, &source) in target.iter_mut().zip(source) {
                        *target = E::from_f32(target.to_f32() + source.to_f32());
                    }
                },
            );
        },
    );
}

pub(super) fn prepare(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let (a, b) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let out = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            add(a.of(arena), b.of(arena), out.of(arena));
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::add::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close, for_thread_counts, poisoned, to_f64,
    };
    use half::bf16;

    fn check_add<E: Element>(len: usize) {
        let mut random = Random::new(len as u64);
        let (a, b): (Vec<E>, Vec<E>) = (random.normals(len), random.normals(len));
        for_thread_counts(|| {
            let mut out = poisoned::<E>(len);
            add(&a, &b, &mut out);
            let expected = oracle::forward(&to_f64(&a), &to_f64(&b));
            // One f32 rounding, then one to E (none for f32).
            let relative = f64::from(E::UNIT_ROUNDOFF) + 2f64.powi(-24);
            assert_close("out", &out, &expected, relative, 0.0);
            let mut in_place = a.clone();
            add_in_place(&mut in_place, &b);
            assert_eq!(out, in_place);
            out
        });
    }

    #[test]
    fn sums_match_the_oracle() {
        for len in [0, 1, 31, 32, 33, 16 * 1024 - 1, 16 * 1024, 16 * 1024 + 1, 70_000] {
            check_add::<bf16>(len);
            check_add::<f32>(len);
        }
    }

    #[test]
    fn sums_beyond_the_largest_number_become_infinite() {
        let largest = bf16::MAX;
        let mut out = [bf16::ZERO; 2];
        add(&[largest, bf16::NAN], &[largest, bf16::ONE], &mut out);
        assert_eq!(out[0], bf16::INFINITY);
        assert!(out[1].is_nan());
    }
}
