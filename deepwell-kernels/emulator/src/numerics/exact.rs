//! Exact sums, rounded once.
//!
//! If all bits of the terms and of their sum fit in binary64, the sum is formed in binary64 and is
//! exact. Otherwise the sum is a fixed-point number ([`Wide`]).

use super::doubles::{Columns, Extent, Rows};
use super::hardware::for_rows;
use super::model::Model;
use super::operand::Operand;
use super::panel::{BLOCK, Span};
use super::rounding::{NAN, NAN_HALF};
use super::spec::{Accumulate, MmaSpec};
use super::wide::Wide;
use crate::number::{Format, Rounding, decode, encode_f64};

/// Adds A·Bᵀ to the accumulator, step by step.
pub(super) fn multiply(
    spec: &MmaSpec,
    model: &Model,
    (m, n, k): (usize, usize, usize),
    a: &Operand<'_>,
    b: &Operand<'_>,
    accumulator: &mut [u32],
    negate: bool,
) {
    let format = accumulator_format(spec);
    for start in (0..k).step_by(model.step) {
        let span = Span { k, start, length: model.step.min(k - start) };
        let rows = Rows::new(spec.a, a, m, span, negate);
        let columns = Columns::new(spec.b, b, n, span);
        for_rows(accumulator, n, m * n * span.length, |row_first, chunk| {
            for block in 0..n.div_ceil(BLOCK) {
                let column = block * BLOCK;
                let count = BLOCK.min(n - column);
                for (index, output) in chunk.chunks_exact_mut(n).enumerate() {
                    let output = &mut output[column..column + count];
                    let a_row = row_first + index;
                    let a = &rows.values[a_row * span.length..][..span.length];
                    let b = &columns.values[block * span.length..][..span.length];
                    let extents = &columns.extents[block];
                    add_cta(format, a, rows.extents[a_row], b, extents, output);
                }
            }
        });
    }
}

/// Float format of the accumulator.
pub(super) fn accumulator_format(spec: &MmaSpec) -> Format {
    if spec.accumulate == Accumulate::F16 { Format::F16 } else { Format::F32 }
}

/// Computes one row of A times a block of columns.
fn add_cta(
    format: Format,
    a: &[f64],
    a_extent: Extent,
    b: &[[f64; BLOCK]],
    b_extents: &[Extent; BLOCK],
    output: &mut [u32],
) {
    let mut sums = [0.0; BLOCK];
    for (&a, b) in a.iter().zip(b) {
        for lane in 0..BLOCK {
            sums[lane] += a * b[lane];
        }
    }
    for (lane, bits) in output.iter_mut().enumerate() {
        let accumulated = f64::from(decode(format, *bits));
        let extent = Extent::of(accumulated);
        let b_extent = b_extents[lane];
        let finite = a_extent.finite && b_extent.finite && extent.finite;
        let leading = (a_extent.leading + b_extent.leading + 1).max(extent.leading);
        let last = (a_extent.last + b_extent.last).min(extent.last);
        // A sum of fewer than 128 terms is less than 2^7 times the largest term.
        let fits = leading + 7 - last < 53;
        *bits = if fits || !finite {
            round(format, sums[lane] + accumulated)
        } else {
            let mut wide = Wide::new();
            wide.add(accumulated);
            for (&a, b) in a.iter().zip(b) {
                wide.add(a * b[lane]);
            }
            wide.round(format)
        };
    }
}

/// Rounds to nearest, ties to even.
pub(super) fn round(format: Format, sum: f64) -> u32 {
    if format == Format::F16 {
        if sum.is_nan() {
            return NAN_HALF;
        }
        return encode_f64(format, sum, Rounding::NearestEven, false, false);
    }
    if sum.is_nan() { NAN } else { (sum as f32).to_bits() }
}
