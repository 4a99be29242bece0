//! A bias added to each row.

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{chunk_elements, vectorized};

/// Writes `out[t] = x[t] + bias`, each sum computed in `f32` and rounded to `E`; `x` and `out` are
/// `[tokens, bias.len()]`.
///
/// # Panics
///
/// If `bias` is empty or a slice's length does not fit.
pub fn add_bias<E: Element>(x: &[E], bias: &[E], out: &mut [E]) {
    assert_eq!(x.len(), out.len(), "`x` and `out` differ in length");
    assert_eq!(x.len() % bias.len(), 0, "`x` is not [tokens, width]");
    let chunk = chunk_elements(bias.len());
    out.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(out, x)| {
        vectorized(
            #[inline(always)]
            || {
                for (out, x) in out.chunks_exact_mut(bias.len()).zip(x.chunks_exact(bias.len())) {
                    for (out, (&x, &bias)) in out.iter_mut().zip(x.iter().zip(bias)) {
                        *out = E::from_f32(x.to_f32() + bias.to_f32());
                    }
                }
            },
        );
    });
}

pub(super) fn prepare(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    if operands.shape(1).iter().product::<usize>() == 0 {
        return Err(operands.unexpected(1, "a bias of at least one element"));
    }
    by_float!(operands, 0, E => {
        let (x, bias) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let out = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            add_bias(x.of(arena), bias.of(arena), out.of(arena));
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::add_bias::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close, for_thread_counts, poisoned, to_f64,
    };
    use half::bf16;

    fn check<E: Element>(tokens: usize, width: usize) {
        let mut random = Random::new((tokens * width) as u64);
        let (x, bias): (Vec<E>, Vec<E>) = (random.normals(tokens * width), random.normals(width));
        for_thread_counts(|| {
            let mut out = poisoned::<E>(x.len());
            add_bias(&x, &bias, &mut out);
            let expected = oracle::forward(&to_f64(&x), &to_f64(&bias));
            // One f32 rounding, then one to E (none for f32).
            let relative = f64::from(E::UNIT_ROUNDOFF) + 2f64.powi(-24);
            assert_close("out", &out, &expected, relative, 0.0);
            out
        });
    }

    #[test]
    fn matches_the_oracle() {
        for (tokens, width) in [(0, 3), (1, 1), (3, 7), (63, 33), (64, 32), (65, 256), (700, 96)] {
            check::<f32>(tokens, width);
            check::<bf16>(tokens, width);
        }
    }
}
