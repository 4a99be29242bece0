//! Exact MMAs of 8-bit integers.

use super::hardware::{dot, for_rows};
use super::operand::Operand;
use super::spec::{Accumulate, MmaSpec};
use crate::number::Format;

/// Elements along K of one instruction; a saturating sum is clamped after each instruction.
const STEP: usize = 32;

/// Adds A·Bᵀ to the accumulator.
pub(super) fn multiply(
    spec: &MmaSpec,
    (m, n, k): (usize, usize, usize),
    a: &Operand<'_>,
    b: &Operand<'_>,
    accumulator: &mut [u32],
    negate: bool,
) {
    let a = decode(spec.a, a, m * k, negate);
    let b = decode(spec.b, b, n * k, false);
    let saturate = spec.accumulate == Accumulate::I32Saturating;
    for_rows(
        accumulator,
        n,
        m * n * k,
        #[inline(always)]
        |row_first, chunk| {
            for (index, row) in chunk.chunks_exact_mut(n).enumerate() {
                let a = &a[(row_first + index) * k..][..k];
                for (column, sum) in row.iter_mut().enumerate() {
                    let b = &b[column * k..][..k];
                    *sum = if saturate {
                        dot_saturating(a, b, *sum)
                    } else {
                        sum.wrapping_add(dot(a, b) as u32)
                    };
                }
            }
        },
    );
}

fn decode(format: Format, operand: &Operand<'_>, count: usize, negate: bool) -> Vec<i16> {
    let sign = if negate { -1 } else { 1 };
    let mut values = Vec::with_capacity(count);
    operand.element_bits.for_each(0, count, |_, code| {
        let byte = code as u8;
        let value = if format == Format::S8 { i16::from(byte as i8) } else { i16::from(byte) };
        values.push(value * sign);
    });
    values
}

fn dot_saturating(a: &[i16], b: &[i16], sum: u32) -> u32 {
    let clamp = |sum: i64| sum.clamp(i32::MIN.into(), i32::MAX.into());
    a.chunks(STEP)
        .zip(b.chunks(STEP))
        .fold(i64::from(sum as i32), |sum, (a, b)| clamp(sum + i64::from(dot(a, b)))) as i32
        as u32
}
