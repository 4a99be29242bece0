//! SwiGLU: `silu(gate) * up` with `silu(x) = x * sigmoid(x)`, element by element.
//!
//! Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202, eq. 6, without the
//! linear layers around it.

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ELEMENTS_PER_CHUNK, vectorized};
use crate::runtime::cpu::vector_math::sigmoid;

/// Writes `out = gate * sigmoid(gate) * up`; the slices are equally long, of any shape.
///
/// # Panics
///
/// If the lengths differ.
pub fn swiglu_forward<E: Element>(gate: &[E], up: &[E], out: &mut [E]) {
    assert_eq!(gate.len(), up.len(), "`gate` and `up` differ in length");
    assert_eq!(gate.len(), out.len(), "`gate` and `out` differ in length");
    out.par_chunks_mut(ELEMENTS_PER_CHUNK)
        .zip(gate.par_chunks(ELEMENTS_PER_CHUNK))
        .zip(up.par_chunks(ELEMENTS_PER_CHUNK))
        .for_each(|((out, gate), up)| {
            vectorized(
                #[inline(always)]
                || forward_of(gate, up, out),
            );
        });
}

/// [`swiglu_forward`] of a part, in one thread.
#[inline(always)]
pub(super) fn forward_of<E: Element>(gate: &[E], up: &[E], out: &mut [E]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        let gate = gate.to_f32();
        *out = E::from_f32(gate * sigmoid(gate) * up.to_f32());
    }
}

/// Writes the gradients of [`swiglu_forward`], with `s = sigmoid(gate)`:
/// `dgate = dout * up * s * (1 + gate * (1 - s))` and `dup = dout * gate * s`.
///
/// # Panics
///
/// If the lengths differ.
pub fn swiglu_backward<E: Element>(
    dout: &[E],
    gate: &[E],
    up: &[E],
    dgate: &mut [E],
    dup: &mut [E],
) {
    assert_eq!(dout.len(), gate.len(), "`dout` and `gate` differ in length");
    assert_eq!(gate.len(), up.len(), "`gate` and `up` differ in length");
    assert_eq!(gate.len(), dgate.len(), "`gate` and `dgate` differ in length");
    assert_eq!(gate.len(), dup.len(), "`gate` and `dup` differ in length");
    dgate
        .par_chunks_mut(ELEMENTS_PER_CHUNK)
        .zip(dup.par_chunks_mut(ELEMENTS_PER_CHUNK))
        .zip(dout.par_chunks(ELEMENTS_PER_CHUNK))
        .zip(gate.par_chunks(ELEMENTS_PER_CHUNK).zip(up.par_chunks(ELEMENTS_PER_CHUNK)))
        .for_each(|(((dgate, dup), dout), (gate, up))| {
            vectorized(
                #[inline(always)]
                || backward_of(dout, [gate, up], dgate, dup),
            );
        });
}

/// [`swiglu_backward`] of a part, in one thread.
#[inline(always)]
pub(super) fn backward_of<E: Element>(
    dout: &[E],
    [gate, up]: [&[E]; 2],
    dgate: &mut [E],
    dup: &mut [E],
) {
    let outputs = dgate.iter_mut().zip(dup);
    let inputs = dout.iter().zip(gate).zip(up);
    for ((dgate, dup), ((&dout, &gate), &up)) in outputs.zip(inputs) {
        let (dout, gate) = (dout.to_f32(), gate.to_f32());
        let s = sigmoid(gate);
        *dgate = E::from_f32(dout * up.to_f32() * s * (1.0 + gate * (1.0 - s)));
        *dup = E::from_f32(dout * (gate * s));
    }
}

pub(super) fn prepare_forward(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let (gate, up) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let out = operands.target::<E>(2)?;
        Ok(Box::new(move |arena| {
            swiglu_forward(gate.of(arena), up.of(arena), out.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, _: &Op) -> Result<Run, KernelError> {
    by_float!(operands, 0, E => {
        let dout = operands.input::<E>(0)?;
        let (gate, up) = (operands.input::<E>(1)?, operands.input::<E>(2)?);
        let dgate = operands.target::<E>(3)?;
        let dup = operands.target::<E>(4)?;
        Ok(Box::new(move |arena| {
            swiglu_backward(
                dout.of(arena),
                gate.of(arena),
                up.of(arena),
                dgate.of(arena),
                dup.of(arena),
            );
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::swiglu::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close_each, for_thread_counts, poisoned, to_f64,
    };
    use half::bf16;

    fn check<E: Element>(gate: &[E]) {
        let mut random = Random::new(gate.len() as u64);
        let up: Vec<E> = random.normals(gate.len());
        let dout: Vec<E> = random.normals(gate.len());
        let gate_64 = to_f64(gate);
        let up_64 = to_f64(&up);
        let dout_64 = to_f64(&dout);
        let relative = f64::from(E::UNIT_ROUNDOFF);
        // The sigmoid has an error of 4 ulp (2^-21), followed by four roundings of 2^-24, all
        // relative to the product of the factors' sizes; 2^-120 is for gates under -87, whose
        // sigmoid is zero, and for the subnormal grids.
        let allowed = |size: f64| size * 2f64.powi(-20) + 2f64.powi(-120);

        for_thread_counts(|| {
            let mut out = poisoned::<E>(gate.len());
            swiglu_forward(gate, &up, &mut out);
            let expected = oracle::forward(&gate_64, &up_64);
            let absolute: Vec<f64> = expected.iter().map(|e| allowed(e.abs())).collect();
            assert_close_each("out", &out, &expected, relative, &absolute);
            out
        });
        for_thread_counts(|| {
            let mut dgate = poisoned::<E>(gate.len());
            let mut dup = poisoned::<E>(gate.len());
            swiglu_backward(&dout, gate, &up, &mut dgate, &mut dup);
            let (expected_dgate, expected_dup) = oracle::backward(&dout_64, &gate_64, &up_64);
            // `1 + gate (1 - s)` cancels near gate = -1.28, and 1 - s loses bits for large gates:
            // the error is relative to |dout up s| (1 + |gate|).
            let absolute: Vec<f64> = (0..gate.len())
                .map(|i| {
                    let s = 1.0 / (1.0 + (-gate_64[i]).exp());
                    allowed((dout_64[i] * up_64[i]).abs() * s * (1.0 + gate_64[i].abs()))
                })
                .collect();
            assert_close_each("dgate", &dgate, &expected_dgate, relative, &absolute);
            let absolute: Vec<f64> = expected_dup.iter().map(|e| allowed(e.abs())).collect();
            assert_close_each("dup", &dup, &expected_dup, relative, &absolute);
            (dgate, dup)
        });
    }

    #[test]
    fn matches_the_oracle() {
        for len in [0, 1, 3, 31, 32, 33, 1000, 16 * 1024 - 1, 16 * 1024 + 1, 100_000] {
            let mut random = Random::new(len as u64 + 1);
            let gate: Vec<f32> =
                random.normals::<f32>(len).into_iter().map(|gate| 4.0 * gate).collect();
            check::<f32>(&gate);
            check::<bf16>(&gate.iter().map(|&gate| Element::from_f32(gate)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn matches_the_oracle_on_extreme_gates() {
        let mut gate = vec![0.0f32, -0.0, 1e-38, -1e-38, -1.2784645, 88.0, 89.0, -85.0, -88.0];
        gate.extend([-89.0, -103.0, -105.0, -1e4, 1e4, 3e30, -3e30, 1e-45, -1e-45]);
        check::<f32>(&gate);
        check::<bf16>(&gate.iter().map(|&gate| Element::from_f32(gate)).collect::<Vec<_>>());
    }

    #[test]
    fn non_finite_input_is_not_hidden() {
        let gate = [f32::NAN, 1.0, 1.0];
        let up = [1.0, f32::NAN, f32::INFINITY];
        let mut out = [0.0f32; 3];
        swiglu_forward(&gate, &up, &mut out);
        assert!(out[0].is_nan() && out[1].is_nan());
        assert_eq!(out[2], f32::INFINITY);
    }
}
