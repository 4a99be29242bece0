//! One step along K of a matrix, decoded.

use super::element::{Decoder, ZERO_EXPONENT, power_of_two, scale_parts};
use super::operand::Operand;
use crate::number::Format;

/// Columns that are summed together.
pub(super) const BLOCK: usize = 8;

/// Where a step lies in a matrix with `k` elements to a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) k: usize,
    pub(super) start: usize,
    pub(super) length: usize,
}

/// What holds for a row of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    /// The largest exponent of an element, far below all for zeros.
    pub(super) leading: i32,
    /// The least exponent of a last bit that is set, far above all for zeros.
    pub(super) last: i32,
    /// No element is infinite or NaN, nor is the scale.
    pub(super) finite: bool,
    /// The exponent of the scale, 0 for NaN.
    pub(super) scale: i32,
    pub(super) scale_nan: bool,
}

impl Row {
    /// Bits between the leading and the last, up to which elements are 16-bit integers.
    const WIDTH_MAX: i32 = 14;

    /// Whether [`Panel::integers`] are the elements, in units of 2 to `last`.
    pub(super) fn is_narrow(&self) -> bool {
        self.finite && self.leading - self.last <= Row::WIDTH_MAX
    }
}

/// A step of A, or of B transposed: `[rows, length]`.
pub(super) struct Panel {
    pub(super) rows: Vec<Row>,
    pub(super) values: Vec<f64>,
    pub(super) exponents: Vec<i16>,
    /// Elements of narrow rows; zero in others.
    pub(super) integers: Vec<i16>,
    length: usize,
}

impl Panel {
    pub(super) fn new(
        format: Format,
        operand: &Operand<'_>,
        rows: usize,
        span: Span,
        negate: bool,
    ) -> Panel {
        let decoder = Decoder::new(format);
        let sign = if negate { -1.0 } else { 1.0 };
        let count = rows * span.length;
        let mut panel = Panel {
            rows: Vec::with_capacity(rows),
            values: Vec::with_capacity(count),
            exponents: Vec::with_capacity(count),
            integers: vec![0; count],
            length: span.length,
        };
        for row in 0..rows {
            let start = row * span.k + span.start;
            let (scale, scale_nan) = scale_of(operand, row, span);
            let (mut leading, mut last, mut finite) = (ZERO_EXPONENT, i16::MAX, !scale_nan);
            operand.codes.for_each(start, start + span.length, |_, code| {
                let element = decoder.decode(code);
                panel.values.push(f64::from(element.value * sign));
                panel.exponents.push(element.exponent);
                leading = leading.max(element.exponent);
                last = last.min(element.last);
                finite &= element.value.is_finite();
            });
            let (leading, last) = (leading.into(), last.into());
            let state = Row { leading, last, finite, scale, scale_nan };
            if state.is_narrow() {
                let unit = power_of_two(-last);
                let range = row * span.length..(row + 1) * span.length;
                let values = &panel.values[range.clone()];
                for (integer, value) in panel.integers[range].iter_mut().zip(values) {
                    *integer = (value * unit) as i16;
                }
            }
            panel.rows.push(state);
        }
        panel
    }

    /// The elements of [`BLOCK`] rows at a time, those of one k together. Rows beyond the last are
    /// zero.
    pub(super) fn transposed(&self) -> Vec<[f64; BLOCK]> {
        let blocks = self.rows.len().div_ceil(BLOCK);
        let mut transposed = vec![[0.0; BLOCK]; blocks * self.length];
        for (row, values) in self.values.chunks_exact(self.length).enumerate() {
            let target = &mut transposed[row / BLOCK * self.length..][..self.length];
            for (target, &value) in target.iter_mut().zip(values) {
                target[row % BLOCK] = value;
            }
        }
        transposed
    }

    pub(super) fn values_of(&self, row: usize) -> &[f64] {
        &self.values[row * self.length..][..self.length]
    }

    pub(super) fn exponents_of(&self, row: usize) -> &[i16] {
        &self.exponents[row * self.length..][..self.length]
    }

    pub(super) fn integers_of(&self, row: usize) -> &[i16] {
        &self.integers[row * self.length..][..self.length]
    }
}

/// The exponent of the scale of a row in a step, which is one block; and whether it is NaN.
fn scale_of(operand: &Operand<'_>, row: usize, span: Span) -> (i32, bool) {
    let Some(scales) = &operand.scales else { return (0, false) };
    let per_row = span.k.div_ceil(scales.block);
    let code = scales.codes[row * per_row + span.start / scales.block];
    let (exponent, _) = scale_parts(scales.format, code);
    (exponent.unwrap_or(0), exponent.is_none())
}
