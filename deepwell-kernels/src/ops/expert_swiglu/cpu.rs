//! The gated activation of experts, row by row. A row's dot product with its gradient is summed in
//! a fixed number of lanes, so results do not depend on threads.

use deepwell_ir::ops::ExpertActivation;
use deepwell_ir::{KernelRequest, Op};
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::Tier;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{LANES, ROWS_PER_CHUNK, sum_lanes, vectorized};
use crate::runtime::cpu::vector_math::sigmoid;

/// An activation of two projections.
trait Activation: Copy + Send + Sync {
    fn value(self, gate: f32, up: f32) -> f32;

    /// Returns the value and its derivatives with respect to gate and up projection.
    fn with_derivatives(self, gate: f32, up: f32) -> (f32, f32, f32);
}

#[derive(Clone, Copy)]
struct Plain;

impl Activation for Plain {
    #[inline(always)]
    fn value(self, gate: f32, up: f32) -> f32 {
        gate * sigmoid(gate) * up
    }

    #[inline(always)]
    fn with_derivatives(self, gate: f32, up: f32) -> (f32, f32, f32) {
        let s = sigmoid(gate);
        (gate * s * up, up * s * (1.0 + gate * (1.0 - s)), gate * s)
    }
}

#[derive(Clone, Copy)]
struct Clamped {
    alpha: f32,
    limit: f32,
}

impl Clamped {
    /// Comparisons keep NaN; `min` and `clamp` would lose NaN.
    #[inline(always)]
    fn clamped(self, gate: f32, up: f32) -> (f32, f32) {
        let limit = self.limit;
        let gate = if gate > limit { limit } else { gate };
        let up = if up > limit { limit } else { up };
        (gate, if up < -limit { -limit } else { up })
    }
}

impl Activation for Clamped {
    #[inline(always)]
    fn value(self, gate: f32, up: f32) -> f32 {
        let (g, u) = self.clamped(gate, up);
        g * sigmoid(self.alpha * g) * (u + 1.0)
    }

    #[inline(always)]
    fn with_derivatives(self, gate: f32, up: f32) -> (f32, f32, f32) {
        let (g, u) = self.clamped(gate, up);
        let x = self.alpha * g;
        let s = sigmoid(x);
        let dgate = if gate >= self.limit { 0.0 } else { (u + 1.0) * s * (1.0 + x * (1.0 - s)) };
        let dup = if up >= self.limit || up <= -self.limit { 0.0 } else { g * s };
        (g * s * (u + 1.0), dgate, dup)
    }
}

/// Writes `out = activation(gate, up) * gates[pair]` per row, and zeros to rows without a pair.
/// `gate`, `up` and `out` are `[rows, columns]`, `pairs` is `[rows]`.
///
/// # Panics
///
/// If a slice's length does not fit, or a pair does not exist.
pub fn expert_swiglu_forward<E: Element>(
    activation: ExpertActivation,
    gate: &[E],
    up: &[E],
    gates: &[f32],
    pairs: &[i32],
    out: &mut [E],
) {
    match activation {
        ExpertActivation::SwiGlu => forward(Plain, gate, up, gates, pairs, out),
        ExpertActivation::ClampedSwiGlu { alpha, limit } => {
            let activation = Clamped { alpha: alpha as f32, limit: limit as f32 };
            forward(activation, gate, up, gates, pairs, out);
        }
    }
}

fn forward<E: Element>(
    activation: impl Activation,
    gate: &[E],
    up: &[E],
    gates: &[f32],
    pairs: &[i32],
    out: &mut [E],
) {
    let columns = columns_of(gate, pairs);
    assert_eq!((gate.len(), up.len()), (out.len(), out.len()), "projections and result differ");
    let chunk = (ROWS_PER_CHUNK * columns).max(1);
    let rows = out.par_chunks_mut(chunk).zip(gate.par_chunks(chunk)).zip(up.par_chunks(chunk));
    rows.zip(pairs.par_chunks(ROWS_PER_CHUNK)).for_each(|(((out, gate), up), pairs)| {
        let rows = out.chunks_exact_mut(columns).zip(gate.chunks_exact(columns));
        for (((out, gate), up), &pair) in rows.zip(up.chunks_exact(columns)).zip(pairs) {
            let Ok(pair) = usize::try_from(pair) else {
                out.fill(E::from_f32(0.0));
                continue;
            };
            let factor = gates[pair];
            vectorized(
                #[inline(always)]
                || {
                    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                        let value = activation.value(gate.to_f32(), up.to_f32());
                        *out = E::from_f32(value * factor);
                    }
                },
            );
        }
    });
}

/// The gradients of [`expert_swiglu_forward`]. `dots` `[rows]` is scratch.
///
/// # Panics
///
/// If a slice's length does not fit, or a pair does not exist.
pub fn expert_swiglu_backward<E: Element>(
    activation: ExpertActivation,
    [dout, gate, up]: [&[E]; 3],
    gates: &[f32],
    pairs: &[i32],
    [dgate, dup]: [&mut [E]; 2],
    dgates: &mut [f32],
    dots: &mut [f32],
) {
    let dots = &mut dots[..pairs.len()];
    match activation {
        ExpertActivation::SwiGlu => {
            backward(Plain, [dout, gate, up], gates, pairs, [dgate, dup], dots);
        }
        ExpertActivation::ClampedSwiGlu { alpha, limit } => {
            let activation = Clamped { alpha: alpha as f32, limit: limit as f32 };
            backward(activation, [dout, gate, up], gates, pairs, [dgate, dup], dots);
        }
    }
    // The gate of a pair without a row was not used.
    dgates.fill(0.0);
    for (&pair, &dot) in pairs.iter().zip(&*dots) {
        if let Ok(pair) = usize::try_from(pair) {
            dgates[pair] = dot;
        }
    }
}

fn backward<E: Element>(
    activation: impl Activation,
    [dout, gate, up]: [&[E]; 3],
    gates: &[f32],
    pairs: &[i32],
    [dgate, dup]: [&mut [E]; 2],
    dots: &mut [f32],
) {
    let columns = columns_of(gate, pairs);
    assert_eq!([dout.len(), up.len()], [gate.len(); 2], "operands differ in length");
    assert_eq!([dgate.len(), dup.len()], [gate.len(); 2], "gradients differ in length");
    let chunk = (ROWS_PER_CHUNK * columns).max(1);
    let inputs = dout.par_chunks(chunk).zip(gate.par_chunks(chunk)).zip(up.par_chunks(chunk));
    let outputs = dgate.par_chunks_mut(chunk).zip(dup.par_chunks_mut(chunk));
    let of_rows = pairs.par_chunks(ROWS_PER_CHUNK).zip(dots.par_chunks_mut(ROWS_PER_CHUNK));
    inputs.zip(outputs).zip(of_rows).for_each(|((inputs, outputs), (pairs, dots))| {
        let (((dout, gate), up), (dgate, dup)) = (inputs, outputs);
        for (row, (&pair, dot)) in pairs.iter().zip(dots).enumerate() {
            let range = row * columns..(row + 1) * columns;
            let dgate = &mut dgate[range.clone()];
            let dup = &mut dup[range.clone()];
            let Ok(pair) = usize::try_from(pair) else {
                dgate.fill(E::from_f32(0.0));
                dup.fill(E::from_f32(0.0));
                *dot = 0.0;
                continue;
            };
            let inputs = [&dout[range.clone()], &gate[range.clone()], &up[range]];
            *dot = vectorized(
                #[inline(always)]
                || backward_row(activation, inputs, gates[pair], dgate, dup),
            );
        }
    });
}

/// Computes the gradients of one row; returns the dot product of its `dout` with its activation.
#[inline(always)]
fn backward_row<E: Element>(
    activation: impl Activation,
    [dout, gate, up]: [&[E]; 3],
    factor: f32,
    dgate: &mut [E],
    dup: &mut [E],
) -> f32 {
    let mut lanes = [0f32; LANES];
    let inputs = dout.chunks(LANES).zip(gate.chunks(LANES)).zip(up.chunks(LANES));
    let outputs = dgate.chunks_mut(LANES).zip(dup.chunks_mut(LANES));
    for (((dout, gate), up), (dgate, dup)) in inputs.zip(outputs) {
        let inputs = dout.iter().zip(gate).zip(up);
        let outputs = dgate.iter_mut().zip(dup).zip(&mut lanes);
        for (((&dout, &gate), &up), ((dgate, dup), lane)) in inputs.zip(outputs) {
            let dout = dout.to_f32();
            let (value, by_gate, by_up) = activation.with_derivatives(gate.to_f32(), up.to_f32());
            *lane += dout * value;
            *dgate = E::from_f32(dout * factor * by_gate);
            *dup = E::from_f32(dout * factor * by_up);
        }
    }
    sum_lanes(lanes)
}

fn columns_of<E>(matrix: &[E], pairs: &[i32]) -> usize {
    let columns = matrix.len().checked_div(pairs.len()).unwrap_or(0);
    assert_eq!(matrix.len(), columns * pairs.len(), "`gate` is not [rows, columns]");
    columns.max(1)
}

pub(super) fn prepare_forward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::ExpertSwiGlu(op) = op else { return Err(operands.unknown_kernel()) };
    let activation = op.activation;
    by_float!(operands, 0, E => {
        let (gate, up) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let gates = operands.input::<f32>(2)?;
        let pairs = operands.input::<i32>(4)?;
        let out = operands.target::<E>(5)?;
        Ok(Box::new(move |arena| {
            let (gates, pairs) = (gates.of(arena), pairs.of(arena));
            let gate = gate.of(arena);
            let up = up.of(arena);
            let out = out.of(arena);
            expert_swiglu_forward(activation, gate, up, gates, pairs, out);
            Ok(())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::ExpertSwiGluBackward(op) = op else { return Err(operands.unknown_kernel()) };
    let activation = op.activation;
    let dots = operands.workspace::<f32>()?;
    by_float!(operands, 0, E => {
        let dout = operands.input::<E>(0)?;
        let (gate, up) = (operands.input::<E>(1)?, operands.input::<E>(2)?);
        let gates = operands.input::<f32>(3)?;
        let pairs = operands.input::<i32>(5)?;
        let dgate = operands.target::<E>(6)?;
        let dup = operands.target::<E>(7)?;
        let dgates = operands.target::<f32>(8)?;
        Ok(Box::new(move |arena| {
            expert_swiglu_backward(
                activation,
                [dout.of(arena), gate.of(arena), up.of(arena)],
                gates.of(arena),
                pairs.of(arena),
                [dgate.of(arena), dup.of(arena)],
                dgates.of(arena),
                dots.of(arena),
            );
            Ok(())
        }))
    })
}

/// One dot product per row.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    request.operands[0].shape[0] * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::expert_swiglu::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close_each, for_thread_counts, poisoned, to_f64,
    };

    const CLAMPED: ExpertActivation = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 2.5 };

    fn check<E: Element>(activation: ExpertActivation, rows: usize, columns: usize) {
        let mut random = Random::new((rows * 100 + columns) as u64);
        let mut numbers = || -> Vec<E> {
            let wide = |x: f32| E::from_f32(2.0 * x);
            random.normals::<f32>(rows * columns).into_iter().map(wide).collect()
        };
        let (gate, up, dout) = (numbers(), numbers(), numbers());
        // Every third row has no pair, and pairs are in reverse order; one pair has no row.
        let count = rows + 1;
        let pair = |row: usize| if row % 3 == 1 { -1 } else { (count - 1 - row) as i32 };
        let pairs: Vec<i32> = (0..rows).map(pair).collect();
        let mut gates: Vec<f32> = Random::new(5).normals(count);
        gates[count - 1] = 0.0;
        let wide = [&dout, &gate, &up].map(|x| to_f64(x));
        let [wide_dout, wide_gate, wide_up] = &wide;
        let wide_gates = to_f64(&gates);
        let relative = f64::from(E::UNIT_ROUNDOFF);
        // As for swiglu: 2^-20 of the product of the factors' sizes, with 1.702 times the gate in
        // the clamped form, and one more factor.
        let size = |index: usize| {
            let factor = usize::try_from(pairs[index / columns]).map_or(0.0, |p| wide_gates[p]);
            let (gate, up) = (wide_gate[index].abs(), wide_up[index].abs());
            factor.abs() * (1.0 + 2.0 * gate) * (1.0 + up)
        };
        let allowed = |size: f64| size * 2f64.powi(-19) + 2f64.powi(-120);
        let expected = oracle::forward(activation, wide_gate, wide_up, &wide_gates, &pairs);
        let absolute: Vec<f64> = (0..gate.len()).map(|i| allowed(size(i))).collect();
        for_thread_counts(|| {
            let mut out = poisoned::<E>(gate.len());
            expert_swiglu_forward(activation, &gate, &up, &gates, &pairs, &mut out);
            assert_close_each("out", &out, &expected, relative, &absolute);
            out
        });
        let [dgate, dup, dgates] =
            oracle::backward(activation, wide_dout, wide_gate, wide_up, &wide_gates, &pairs);
        let absolute: Vec<f64> =
            (0..gate.len()).map(|i| allowed(size(i) * wide_dout[i].abs())).collect();
        // The dot product adds `columns` roundings of sums.
        let mut of_dots = vec![2f64.powi(-120); count];
        for index in 0..gate.len() {
            if let Ok(pair) = usize::try_from(pairs[index / columns]) {
                let one = (1.0 + 2.0 * wide_gate[index].abs()) * (1.0 + wide_up[index].abs());
                let each = 2f64.powi(-19) + columns as f64 * 2f64.powi(-24);
                of_dots[pair] += each * one * wide_dout[index].abs();
            }
        }
        for_thread_counts(|| {
            let mut own_dgate = poisoned::<E>(gate.len());
            let mut own_dup = poisoned(gate.len());
            let mut own_dgates = poisoned::<f32>(count);
            let mut dots = poisoned::<f32>(rows);
            expert_swiglu_backward(
                activation,
                [&dout, &gate, &up],
                &gates,
                &pairs,
                [&mut own_dgate, &mut own_dup],
                &mut own_dgates,
                &mut dots,
            );
            assert_close_each("dgate", &own_dgate, &dgate, relative, &absolute);
            assert_close_each("dup", &own_dup, &dup, relative, &absolute);
            assert_close_each("dgates", &own_dgates, &dgates, 0.0, &of_dots);
            (own_dgate, own_dup, own_dgates)
        });
    }

    #[test]
    fn matches_the_oracle() {
        for activation in [ExpertActivation::SwiGlu, CLAMPED] {
            for rows in [0, 1, 31, 63, 64, 65, 129] {
                for columns in [1, 31, 32, 33, 100] {
                    check::<f32>(activation, rows, columns);
                    check::<bf16>(activation, rows, columns);
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        for activation in [ExpertActivation::SwiGlu, CLAMPED] {
            for (gate, up, factor) in
                [(f32::NAN, 1.0, 1.0), (1.0, f32::NAN, 1.0), (1.0, 1.0, f32::NAN)]
            {
                let mut out = [0f32];
                expert_swiglu_forward(activation, &[gate], &[up], &[factor], &[0], &mut out);
                assert!(out[0].is_nan(), "{activation:?} {gate} {up} {factor}");
            }
        }
    }
}
