//! Biases of experts. A group's sums run over its rows in ascending order, so results do not depend
//! on the number of threads.

use std::ops::Range;

use deepwell_ir::Op;
use rayon::prelude::*;

use crate::KernelError;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::operands::{Operands, Run, by_float};
use crate::runtime::cpu::parallel::{ROWS_PER_CHUNK, vectorized};

/// Assignment of rows to groups, as in [`deepwell_ir::ops::Dispatch`], and the optional gates.
#[derive(Clone, Copy)]
pub struct Grouping<'a> {
    /// First row of each group, and the end of the last group, `[groups + 1]`.
    pub offsets: &'a [i32],
    /// The pair of each row, negative for an empty row, `[rows]`.
    pub pairs: &'a [i32],
    /// The gate of each pair, `[tokens, top_k]`, if biases are multiplied by gates.
    pub gates: Option<&'a [f32]>,
}

impl Grouping<'_> {
    fn gate(&self, pair: usize) -> f32 {
        self.gates.map_or(1.0, |gates| gates[pair])
    }

    fn rows_of(&self, group: usize) -> Range<usize> {
        self.offsets[group] as usize..self.offsets[group + 1] as usize
    }
}

/// Writes `out = x + bias[group]` per row, with the bias times the gate of the row's pair if there
/// are gates, and zeros to rows without a pair. `x` and `out` are `[rows, columns]`, `bias` is
/// `[groups, columns]`. The sum is in FP32 and rounded once.
///
/// # Panics
///
/// If a slice's length does not fit, or a pair or row does not exist.
pub fn grouped_bias_forward<E: Element>(
    x: &[E],
    bias: &[E],
    grouping: Grouping<'_>,
    columns: usize,
    out: &mut [E],
) {
    let Grouping { offsets, pairs, .. } = grouping;
    assert_eq!((x.len(), out.len()), (pairs.len() * columns, x.len()), "not [rows, columns]");
    assert_eq!(bias.len(), (offsets.len() - 1) * columns, "`bias` is not [groups, columns]");
    if columns == 0 {
        return;
    }
    let chunk = ROWS_PER_CHUNK * columns;
    let chunks = out.par_chunks_mut(chunk).zip(x.par_chunks(chunk));
    chunks.zip(pairs.par_chunks(ROWS_PER_CHUNK)).enumerate().for_each(
        |(index, ((out, x), pairs))| {
            let rows = out.chunks_exact_mut(columns).zip(x.chunks_exact(columns)).zip(pairs);
            for (row, ((out, x), &pair)) in (index * ROWS_PER_CHUNK..).zip(rows) {
                let Ok(pair) = usize::try_from(pair) else {
                    out.fill(E::from_f32(0.0));
                    continue;
                };
                // The last group that begins at or before the row, which skips empty groups.
                let group = offsets.partition_point(|&offset| offset as usize <= row) - 1;
                let bias = &bias[group * columns..][..columns];
                let gate = grouping.gate(pair);
                vectorized(
                    #[inline(always)]
                    || {
                        for ((out, x), bias) in out.iter_mut().zip(x).zip(bias) {
                            *out = E::from_f32(x.to_f32() + gate * bias.to_f32());
                        }
                    },
                );
            }
        },
    );
}

/// Writes the gradient of the biases to `dbias` `[groups, columns]`, or accumulates it.
///
/// # Panics
///
/// As [`grouped_bias_forward`].
pub fn grouped_bias_gradient<E: Element>(
    dout: &[E],
    grouping: Grouping<'_>,
    columns: usize,
    accumulate: bool,
    dbias: &mut [f32],
) {
    let Grouping { offsets, pairs, .. } = grouping;
    assert_eq!(dout.len(), pairs.len() * columns, "`dout` is not [rows, columns]");
    assert_eq!(dbias.len(), (offsets.len() - 1) * columns, "`dbias` is not [groups, columns]");
    if columns == 0 {
        return;
    }
    dbias.par_chunks_mut(columns).enumerate().for_each(|(group, dbias)| {
        let mut sums = vec![0f32; columns];
        for row in grouping.rows_of(group) {
            let Ok(pair) = usize::try_from(pairs[row]) else { continue };
            let gate = grouping.gate(pair);
            vectorized(
                #[inline(always)]
                || {
                    for (sum, dout) in sums.iter_mut().zip(&dout[row * columns..][..columns]) {
                        *sum += gate * dout.to_f32();
                    }
                },
            );
        }
        for (target, sum) in dbias.iter_mut().zip(sums) {
            *target = if accumulate { *target + sum } else { sum };
        }
    });
}

/// Computes the gradient of the gates, `[tokens, top_k]`: for each pair the dot product of the
/// pair's row of `dout` with its group's bias, 0 for a pair without a row. `rows` `[tokens, top_k]`
/// has the row of each pair.
///
/// # Panics
///
/// As [`grouped_bias_forward`].
pub fn gate_gradient<E: Element>(
    dout: &[E],
    bias: &[E],
    offsets: &[i32],
    rows: &[i32],
    columns: usize,
    dgates: &mut [f32],
) {
    assert_eq!(rows.len(), dgates.len(), "`dgates` is not [tokens, top_k]");
    dgates.par_iter_mut().zip(rows).for_each(|(dgate, &row)| {
        *dgate = 0.0;
        let Ok(row) = usize::try_from(row) else { return };
        let group = offsets.partition_point(|&offset| offset as usize <= row) - 1;
        let of_row = dout[row * columns..][..columns].iter();
        for (dout, bias) in of_row.zip(&bias[group * columns..][..columns]) {
            *dgate += dout.to_f32() * bias.to_f32();
        }
    });
}

pub(super) fn prepare_forward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::GroupedBias(op) = op else { return Err(operands.unknown_kernel()) };
    let (gated, columns) = (op.gated, operands.shape(0)[1]);
    by_float!(operands, 0, E => {
        let (x, bias) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let offsets = operands.input::<i32>(2)?;
        let gates = operands.input::<f32>(3)?;
        let pairs = operands.input::<i32>(5)?;
        let out = operands.target::<E>(6)?;
        Ok(Box::new(move |arena| {
            let gates = gated.then(|| gates.of(arena));
            let grouping = Grouping { offsets: offsets.of(arena), pairs: pairs.of(arena), gates };
            grouped_bias_forward(x.of(arena), bias.of(arena), grouping, columns, out.of(arena));
            Ok(())
        }))
    })
}

pub(super) fn prepare_backward(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::GroupedBiasBackward(op) = op else { return Err(operands.unknown_kernel()) };
    let (gated, columns) = (op.forward.gated, operands.shape(0)[1]);
    let adds = operands.adds();
    by_float!(operands, 0, E => {
        let (dout, bias) = (operands.input::<E>(0)?, operands.input::<E>(1)?);
        let offsets = operands.input::<i32>(2)?;
        let gates = operands.input::<f32>(3)?;
        let rows = operands.input::<i32>(4)?;
        let pairs = operands.input::<i32>(5)?;
        let dbias = operands.target::<f32>(6)?;
        let dgates = gated.then(|| operands.target::<f32>(7)).transpose()?;
        Ok(Box::new(move |arena| {
            let (dout, offsets) = (dout.of(arena), offsets.of(arena));
            let gates = gated.then(|| gates.of(arena));
            let grouping = Grouping { offsets, pairs: pairs.of(arena), gates };
            grouped_bias_gradient(dout, grouping, columns, adds, dbias.of(arena));
            if let Some(dgates) = &dgates {
                let (bias, rows) = (bias.of(arena), rows.of(arena));
                gate_gradient(dout, bias, offsets, rows, columns, dgates.of(arena));
            }
            Ok(())
        }))
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::dispatch::oracle::{self as grouping, Grouped};
    use crate::ops::grouped_bias::oracle;
    use crate::runtime::cpu::test_support::{
        Random, assert_close, assert_close_each, for_thread_counts, poisoned, to_f64,
    };

    fn check<E: Element>(tokens: usize, top_k: usize, columns: usize, capacity: usize) {
        let mut random = Random::new((tokens + columns) as u64);
        // No token chooses the first or the last expert.
        let experts = 6;
        let chosen: Vec<i32> = (0..tokens * top_k).map(|_| 1 + random.below(4) as i32).collect();
        let length = chosen.len().next_multiple_of(32) + experts * 32;
        let Grouped { offsets, rows, pairs, .. } =
            grouping::forward(&chosen, experts, 32, capacity, length);
        let mut x: Vec<E> = random.normals(length * columns);
        let bias: Vec<E> = random.normals(experts * columns);
        let mut gates: Vec<f32> = random.normals(chosen.len());
        // The gradient does not divide by a gate.
        gates.iter_mut().step_by(5).for_each(|gate| *gate = 0.0);
        let before: Vec<f32> = random.normals(bias.len());
        // Rows without a pair are not read.
        for row in (0..length).filter(|&row| pairs[row] < 0) {
            x[row * columns..][..columns].fill(E::from_f32(f32::NAN));
        }
        let dout = &x;
        for gates in [None, Some(gates.as_slice())] {
            let wide = gates.map(to_f64);
            let (x64, bias64) = (to_f64(&x), to_f64(&bias));
            let grouping = Grouping { offsets: &offsets, pairs: &pairs, gates };
            let expected = oracle::forward(&x64, &bias64, wide.as_deref(), &chosen, &pairs);
            for_thread_counts(|| {
                let mut out = poisoned::<E>(x.len());
                grouped_bias_forward(&x, &bias, grouping, columns, &mut out);
                // A product and a sum of numbers below 30, in FP32, then one rounding.
                let absolute = 60.0 * 2f64.powi(-24);
                let relative = f64::from(E::UNIT_ROUNDOFF);
                assert_close("out", &out, &expected, relative, absolute);
                out
            });
            let [dbias, dgates] =
                oracle::backward(&x64, &bias64, wide.as_deref(), &chosen, &rows, columns);
            // For a dropped pair the oracle's gradient is zero, too. One rounding of each product
            // and of each partial sum, by 2^-24 of the sum of magnitudes.
            let sizes_of = |values: &[f64]| values.iter().map(|x| x.abs()).collect::<Vec<_>>();
            let wide_sizes = wide.as_deref().map(sizes_of);
            let [bias_sizes, gate_sizes] = oracle::backward(
                &sizes_of(&x64),
                &sizes_of(&bias64),
                wide_sizes.as_deref(),
                &chosen,
                &rows,
                columns,
            );
            let allowed = |sizes: &[f64], terms: usize| -> Vec<f64> {
                sizes
                    .iter()
                    .map(|size| (terms + 3) as f64 * 2f64.powi(-24) * (size + 5.0))
                    .collect()
            };
            for accumulate in [false, true] {
                for_thread_counts(|| {
                    let mut got = if accumulate { before.clone() } else { poisoned(bias.len()) };
                    grouped_bias_gradient(dout, grouping, columns, accumulate, &mut got);
                    let mut expected = dbias.clone();
                    if accumulate {
                        expected.iter_mut().zip(&before).for_each(|(e, &b)| *e += f64::from(b));
                    } else {
                        assert!(got[..columns].iter().all(|value| *value == 0.0), "an empty group");
                    }
                    let allowed = allowed(&bias_sizes, length);
                    assert_close_each("dbias", &got, &expected, 0.0, &allowed);
                    got
                });
            }
            if gates.is_some() {
                for_thread_counts(|| {
                    let mut got = poisoned::<f32>(rows.len());
                    gate_gradient(dout, &bias, &offsets, &rows, columns, &mut got);
                    let allowed = allowed(&gate_sizes, columns);
                    assert_close_each("dgates", &got, &dgates, 0.0, &allowed);
                    got
                });
            }
        }
    }

    #[test]
    fn matches_the_oracle() {
        for tokens in [0, 1, 31, 33, 65, 200] {
            for (top_k, columns) in [(1, 1), (2, 33), (4, 64)] {
                for capacity in [usize::MAX, 7, 0] {
                    check::<f32>(tokens, top_k, columns, capacity);
                    check::<bf16>(tokens, top_k, columns, capacity);
                }
            }
        }
    }
}
