//! The hardware's sums of FP4 elements with block scales.
//!
//! Groups of 16 products are summed exactly. The term of a group is its sum times the significands
//! of its two scales, truncated like the products of the other kinds.

use super::element::{power_of_two, scale_parts};
use super::hardware::{dot, for_rows};
use super::model::Model;
use super::operand::Operand;
use super::panel::Span;
use super::rounding::{NAN, ZERO_EXPONENT, round_toward_zero, truncate};

/// Products per exactly summed group.
const GROUP: usize = 16;
/// Groups in the largest step.
const GROUPS_MAX: usize = 6;
/// Twice the value of each code of E2M1.
const DOUBLED: [i16; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Adds A·Bᵀ to the accumulator, step by step.
pub(super) fn multiply(
    model: &Model,
    (m, n, k): (usize, usize, usize),
    a: &Operand<'_>,
    b: &Operand<'_>,
    accumulator: &mut [u32],
    negate: bool,
) {
    for start in (0..k).step_by(model.step) {
        let span = Span { k, start, length: model.step.min(k - start) };
        let a = Rows::new(a, m, span, negate);
        let b = Rows::new(b, n, span, false);
        for_rows(accumulator, n, m * n * span.length, |row_first, chunk| {
            for (index, output) in chunk.chunks_exact_mut(n).enumerate() {
                let row = row_first + index;
                for (column, bits) in output.iter_mut().enumerate() {
                    *bits = match (&a.scales[row], &b.scales[column]) {
                        (Some(a_scales), Some(b_scales)) => {
                            let (a, b) = (a.values_of(row), b.values_of(column));
                            add((a, a_scales), (b, b_scales), model, *bits)
                        }
                        _ => NAN,
                    };
                }
            }
        });
    }
}

/// Scale of a group.
#[derive(Clone, Copy, Debug, Default)]
struct Scale {
    exponent: i32,
    significand: f64,
}

type Scales = [Scale; GROUPS_MAX];

/// One step of A, or of B transposed.
struct Rows {
    values: Vec<i16>,
    /// One entry per row; `None` if a scale of the row is NaN.
    scales: Vec<Option<Scales>>,
    length: usize,
}

impl Rows {
    fn new(operand: &Operand<'_>, rows: usize, span: Span, negate: bool) -> Rows {
        let sign = if negate { -1 } else { 1 };
        let mut values = Vec::with_capacity(rows * span.length);
        for row in 0..rows {
            let start = row * span.k + span.start;
            operand.element_bits.for_each(start, start + span.length, |_, code| {
                values.push(DOUBLED[(code & 15) as usize] * sign);
            });
        }
        let scales = (0..rows).map(|row| scales_of(operand, row, span)).collect();
        Rows { values, scales, length: span.length }
    }

    fn values_of(&self, row: usize) -> &[i16] {
        &self.values[row * self.length..][..self.length]
    }
}

fn scales_of(operand: &Operand<'_>, row: usize, span: Span) -> Option<Scales> {
    let mut parts = Scales::default();
    let Some(scales) = &operand.scales else { return Some(parts) };
    let per_row = span.k.div_ceil(scales.block);
    for (group, part) in parts.iter_mut().enumerate().take(span.length.div_ceil(GROUP)) {
        let index = row * per_row + (span.start + group * GROUP) / scales.block;
        let (exponent, significand) = scale_parts(scales.format, scales.element_bits[index]);
        *part = Scale { exponent: exponent?, significand: significand.into() };
    }
    Some(parts)
}

/// Computes one output.
fn add(
    (a, a_scales): (&[i16], &Scales),
    (b, b_scales): (&[i16], &Scales),
    model: &Model,
    bits: u32,
) -> u32 {
    let accumulated = f32::from_bits(bits);
    if !accumulated.is_finite() {
        return if accumulated.is_nan() { NAN } else { bits };
    }
    let mut largest = match bits << 1 {
        0 => ZERO_EXPONENT,
        _ => (bits >> 23 & 255).max(1) as i32 - 127,
    };
    let mut terms = [(0.0, 0); GROUPS_MAX];
    let groups = a.chunks(GROUP).zip(b.chunks(GROUP));
    for ((term, (a, b)), (a_scale, b_scale)) in
        terms.iter_mut().zip(groups).zip(a_scales.iter().zip(b_scales))
    {
        // Both factors are stored doubled.
        let sum = f64::from(dot(a, b)) * 0.25;
        let exponent = a_scale.exponent + b_scale.exponent;
        *term = (sum * a_scale.significand * b_scale.significand, exponent);
        largest = largest.max(exponent);
    }
    let shift = model.fraction_bits - largest;
    let mut total = truncate(f64::from(accumulated) * power_of_two(shift));
    for (significand, exponent) in terms {
        // Unused groups have a significand of zero.
        total += truncate(significand * power_of_two(shift + exponent));
    }
    round_toward_zero(total * power_of_two(-shift), model.mantissa_bits)
}
