//! Keys and values of latent attention: copies, and sums over heads in FP32.

use deepwell_ir::Op;
use deepwell_ir::ops::LatentKeyValue;
use rayon::prelude::*;

use super::oracle::Shape;
use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ROWS_PER_CHUNK, vectorized};

/// Columns of a token in kv, k_rope, k and v.
fn columns(shape: &Shape) -> [usize; 4] {
    [shape.source_columns(), shape.rope_dim, shape.key_columns(), shape.heads * shape.value_dim]
}

fn check(shape: &Shape, lengths: [usize; 4]) {
    let columns = columns(shape);
    assert!(columns.iter().all(|&columns| columns > 0), "a size is zero: {shape:?}");
    let tokens = lengths[0] / columns[0];
    assert_eq!(lengths, columns.map(|columns| tokens * columns), "{shape:?}");
}

/// Writes keys `k` `[tokens, heads * (plain_dim + rope_dim)]` and values `v`
/// `[tokens, heads * value_dim]` from `kv` `[tokens, heads * (plain_dim + value_dim)]` and `k_rope`
/// `[tokens, rope_dim]`.
///
/// # Panics
///
/// If a size is zero, or a slice's length does not fit.
pub fn latent_key_value<E: Element>(
    shape: &Shape,
    kv: &[E],
    k_rope: &[E],
    k: &mut [E],
    v: &mut [E],
) {
    check(shape, [kv.len(), k_rope.len(), k.len(), v.len()]);
    let [of_kv, of_rope, of_k, of_v] = columns(shape);
    let inputs =
        kv.par_chunks(ROWS_PER_CHUNK * of_kv).zip(k_rope.par_chunks(ROWS_PER_CHUNK * of_rope));
    let outputs =
        k.par_chunks_mut(ROWS_PER_CHUNK * of_k).zip(v.par_chunks_mut(ROWS_PER_CHUNK * of_v));
    inputs.zip(outputs).for_each(|((kv, k_rope), (k, v))| {
        let tokens = kv.chunks_exact(of_kv).zip(k_rope.chunks_exact(of_rope));
        let results = k.chunks_exact_mut(of_k).zip(v.chunks_exact_mut(of_v));
        for ((kv, k_rope), (k, v)) in tokens.zip(results) {
            let heads = kv.chunks_exact(shape.plain_dim + shape.value_dim);
            let keys = k.chunks_exact_mut(shape.plain_dim + shape.rope_dim);
            for ((kv, k), v) in heads.zip(keys).zip(v.chunks_exact_mut(shape.value_dim)) {
                k[..shape.plain_dim].copy_from_slice(&kv[..shape.plain_dim]);
                k[shape.plain_dim..].copy_from_slice(k_rope);
                v.copy_from_slice(&kv[shape.plain_dim..]);
            }
        }
    });
}

/// Writes `dkv` and `dk_rope`, the gradients of [`latent_key_value`]'s inputs, from those of its
/// outputs. The gradient of k_rope is the sum over heads, first to last, in FP32, rounded once.
///
/// # Panics
///
/// As [`latent_key_value`].
pub fn latent_key_value_backward<E: Element>(
    shape: &Shape,
    dk: &[E],
    dv: &[E],
    dkv: &mut [E],
    dk_rope: &mut [E],
) {
    check(shape, [dkv.len(), dk_rope.len(), dk.len(), dv.len()]);
    let [of_kv, of_rope, of_k, of_v] = columns(shape);
    let inputs = dk.par_chunks(ROWS_PER_CHUNK * of_k).zip(dv.par_chunks(ROWS_PER_CHUNK * of_v));
    let outputs = dkv
        .par_chunks_mut(ROWS_PER_CHUNK * of_kv)
        .zip(dk_rope.par_chunks_mut(ROWS_PER_CHUNK * of_rope));
    inputs.zip(outputs).for_each(|((dk, dv), (dkv, dk_rope))| {
        let mut sums = vec![0f32; of_rope];
        let tokens = dk.chunks_exact(of_k).zip(dv.chunks_exact(of_v));
        let results = dkv.chunks_exact_mut(of_kv).zip(dk_rope.chunks_exact_mut(of_rope));
        for ((dk, dv), (dkv, dk_rope)) in tokens.zip(results) {
            vectorized(
                #[inline(always)]
                || {
                    sums.fill(0.0);
                    let heads = dkv.chunks_exact_mut(shape.plain_dim + shape.value_dim);
                    let keys = dk.chunks_exact(shape.plain_dim + shape.rope_dim);
                    for ((dkv, dk), dv) in heads.zip(keys).zip(dv.chunks_exact(shape.value_dim)) {
                        dkv[..shape.plain_dim].copy_from_slice(&dk[..shape.plain_dim]);
                        dkv[shape.plain_dim..].copy_from_slice(dv);
                        for (sum, dk) in sums.iter_mut().zip(&dk[shape.plain_dim..]) {
                            *sum += dk.to_f32();
                        }
                    }
                    for (target, &sum) in dk_rope.iter_mut().zip(&sums) {
                        *target = E::from_f32(sum);
                    }
                },
            );
        }
    });
}

fn shape_of(op: &LatentKeyValue) -> Shape {
    let LatentKeyValue { heads, plain_dim, rope_dim, value_dim } = *op;
    Shape { heads, plain_dim, rope_dim, value_dim }
}

pub(super) fn prepare_forward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::LatentKeyValue(op) = op else { return Err(operands.unknown_kernel()) };
    let shape = shape_of(op);
    by_float!(operands, 0, E => {
        let (kv, k_rope) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let (k, v) = (operands.target::<E>(2)?, operands.target::<E>(3)?);
        Ok(Box::new(move |arena| {
            latent_key_value(&shape, kv.of(arena), k_rope.of(arena), k.of(arena), v.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::LatentKeyValueBackward(op) = op else { return Err(operands.unknown_kernel()) };
    let shape = shape_of(&op.forward);
    by_float!(operands, 0, E => {
        let (dk, dv) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let dkv = operands.target::<E>(2)?;
        let dk_rope = operands.target::<E>(3)?;
        Ok(Box::new(move |arena| {
            let (dkv, dk_rope) = (dkv.of(arena), dk_rope.of(arena));
            latent_key_value_backward(&shape, dk.of(arena), dv.of(arena), dkv, dk_rope);
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::latent_key_value::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close_each, for_thread_counts, poisoned, to_f64,
    };

    fn check<E: Element>(tokens: usize, shape: &Shape) {
        let mut random = Random::new((tokens + shape.heads) as u64);
        let [of_kv, of_rope, of_k, of_v] = columns(shape).map(|columns| tokens * columns);
        let (kv, k_rope): (Vec<E>, Vec<E>) = (random.normals(of_kv), random.normals(of_rope));
        let (dk, dv): (Vec<E>, Vec<E>) = (random.normals(of_k), random.normals(of_v));
        for_thread_counts(|| {
            let (mut k, mut v) = (poisoned::<E>(of_k), poisoned::<E>(of_v));
            latent_key_value(shape, &kv, &k_rope, &mut k, &mut v);
            // Copies are exact.
            let expected = oracle::forward(shape, &to_f64(&kv), &to_f64(&k_rope));
            assert_eq!((to_f64(&k), to_f64(&v)), expected);
            (k, v)
        });
        let expected = oracle::backward(shape, &to_f64(&dk), &to_f64(&dv));
        let sizes: Vec<f64> = to_f64(&dk).iter().map(|dk| dk.abs()).collect();
        let sizes = oracle::backward(shape, &sizes, &to_f64(&dv)).1;
        for_thread_counts(|| {
            let mut dkv = poisoned::<E>(of_kv);
            let mut dk_rope = poisoned::<E>(of_rope);
            latent_key_value_backward(shape, &dk, &dv, &mut dkv, &mut dk_rope);
            assert_eq!(to_f64(&dkv), expected.0);
            // One addition per head, rounded by 2^-24 of the sum of magnitudes, then one rounding
            // to the type.
            let absolute: Vec<f64> =
                sizes.iter().map(|size| shape.heads as f64 * 2f64.powi(-24) * size).collect();
            let relative = f64::from(E::UNIT_ROUNDOFF);
            assert_close_each("dk_rope", &dk_rope, &expected.1, relative, &absolute);
            (dkv, dk_rope)
        });
    }

    #[test]
    fn matches_the_oracle() {
        for tokens in [0, 1, 63, 64, 65, 130] {
            for (heads, plain_dim, rope_dim, value_dim) in
                [(1, 1, 2, 1), (4, 8, 4, 12), (3, 33, 2, 7), (16, 128, 64, 128)]
            {
                let shape = Shape { heads, plain_dim, rope_dim, value_dim };
                check::<f32>(tokens, &shape);
                check::<bf16>(tokens, &shape);
            }
        }
    }
}
