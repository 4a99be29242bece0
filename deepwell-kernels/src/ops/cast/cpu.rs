//! Conversion of a whole tensor between element types.

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ELEMENTS_PER_CHUNK, vectorized};

/// Converts each element of `source` to the type of `target`, to nearest, ties to even.
///
/// Between equal types this is a copy.
///
/// ```
/// use deepwell_kernels::ops::cast::cpu::cast;
/// use half::bf16;
///
/// let mut narrow = [bf16::ZERO; 3];
/// cast(&[1.0f32, -0.1, 3.4e38], &mut narrow);
/// assert_eq!(narrow, [bf16::ONE, bf16::from_f32(-0.1), bf16::INFINITY]);
/// ```
///
/// # Panics
///
/// If the lengths differ.
pub fn cast<S: Element, T: Element>(source: &[S], target: &mut [T]) {
    assert_eq!(source.len(), target.len(), "`source` and `target` differ in length");
    target.par_chunks_mut(ELEMENTS_PER_CHUNK).zip(source.par_chunks(ELEMENTS_PER_CHUNK)).for_each(
        |(target, source)| {
            vectorized(
                #[inline(always)]
                || {
                    for (target, &source) in target.iter_mut().zip(source) {
                        *target = T::from_f32(source.to_f32());
                    }
                },
            );
        },
    );
}

pub(super) fn prepare(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    by_float!(operands, 0, Source => by_float!(operands, 1, Target => {
        let x = operands.input::<Source>(0)?;
        let y = operands.target::<Target>(1)?;
        Ok(Box::new(move |arena| {
            cast(x.of(arena), y.of(arena));
            Ok(())
        }))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cpu::test_support::{
        Random, assert_close, for_thread_counts, poisoned, to_f64,
    };
    use half::bf16;

    #[test]
    fn every_bf16_survives_the_way_to_f32_and_back() {
        let narrow: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let mut wide = poisoned::<f32>(narrow.len());
        cast(&narrow, &mut wide);
        let mut back = vec![bf16::ZERO; narrow.len()];
        cast(&wide, &mut back);
        for ((&narrow, &wide), &back) in narrow.iter().zip(&wide).zip(&back) {
            if narrow.is_nan() {
                assert!(wide.is_nan() && back.is_nan());
            } else {
                assert_eq!(f64::from(narrow), f64::from(wide));
                assert_eq!(narrow.to_bits(), back.to_bits());
            }
        }
    }

    #[test]
    fn rounds_to_half_a_unit_for_every_length_and_thread_count() {
        for len in [0, 1, 15, 16, 17, 16 * 1024 - 1, 16 * 1024 + 1, 50_000] {
            let wide: Vec<f32> = Random::new(len as u64).normals(len);
            for_thread_counts(|| {
                let mut narrow = poisoned::<bf16>(len);
                cast(&wide, &mut narrow);
                // Half a unit in the last of 8 places; 2^-134 is half the smallest subnormal
                // number.
                assert_close("narrow", &narrow, &to_f64(&wide), 2f64.powi(-8), 2f64.powi(-134));
                let nearest: Vec<bf16> = wide.iter().map(|&x| bf16::from_f32(x)).collect();
                assert_eq!(narrow, nearest);
                narrow
            });
        }
    }
}
