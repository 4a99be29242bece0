//! One step along K of a matrix, decoded.
//!
//! Scales are powers of two here and are multiplied in: every scaled element is exact in binary64.

use super::element::{Decoder, ZERO_EXPONENT, power_of_two, scale_parts};
use super::operand::{ElementBits, Operand};
use crate::number::Format;

/// Columns that are summed together.
pub(super) const BLOCK: usize = 8;
/// Largest distance from the leading to the last bit of a row whose elements are 16-bit integers.
const WIDTH_MAX: i32 = 14;

/// Location of a step in a matrix with `k` elements per row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) k: usize,
    pub(super) start: usize,
    pub(super) length: usize,
}

/// Range of bit weights of one or several rows of a step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Row {
    /// The largest exponent of an element; far below every other exponent if all are zero.
    pub(super) leading: i32,
    /// The least exponent of a last set bit; far above every other exponent if all are zero.
    pub(super) last: i32,
    /// The largest distance from the leading to the last bit within a row; negative for zeros.
    pub(super) width: i32,
    /// No element and no scale is infinite or NaN.
    pub(super) finite: bool,
}

impl Row {
    const ZEROS: Row = Row { leading: -16_384, last: 32_767, width: -49_151, finite: true };

    /// Whether the elements equal [`Panel::integers_of`], in units of [`Panel::units`].
    pub(super) fn is_narrow(&self) -> bool {
        self.finite && self.width <= WIDTH_MAX
    }

    fn and(self, other: Row) -> Row {
        Row {
            leading: self.leading.max(other.leading),
            last: self.last.min(other.last),
            width: self.width.max(other.width),
            finite: self.finite & other.finite,
        }
    }
}

/// One step of A, or of B transposed: `[rows, length]`.
#[derive(Default)]
pub(super) struct Panel {
    pub(super) rows: Vec<Row>,
    /// Weight of the last bit of each row.
    pub(super) units: Vec<f64>,
    values: Vec<f64>,
    exponents: Vec<i16>,
    integers: Vec<i16>,
    length: usize,
    /// Source bit patterns of the panel, if kept.
    element_bits: Vec<u32>,
    format: Option<Format>,
}

impl Panel {
    /// Whether the panel holds the whole matrix with these bit patterns, without scales.
    pub(super) fn is_of(
        &self,
        format: Format,
        element_bits: &ElementBits<'_>,
        rows: usize,
        span: Span,
    ) -> bool {
        self.format == Some(format)
            && self.length == span.length
            && span.k == span.length
            && self.rows.len() == rows
            && matches!(element_bits, ElementBits::U32(bits) if **bits == *self.element_bits)
    }

    /// Keeps the bit patterns of the panel, or none.
    pub(super) fn keep_element_bits(&mut self, of: Option<(Format, &ElementBits<'_>, Span)>) {
        self.format = None;
        if let Some((format, ElementBits::U32(element_bits), span)) = of
            && span.k == span.length
        {
            self.element_bits.clear();
            self.element_bits.extend_from_slice(element_bits);
            self.format = Some(format);
        }
    }

    /// Decodes a step. The old contents are overwritten and their memory is reused.
    pub(super) fn fill(
        &mut self,
        format: Format,
        operand: &Operand<'_>,
        rows: usize,
        span: Span,
        negate: bool,
    ) {
        let decoder = Decoder::new(format);
        let sign = if negate { -1.0 } else { 1.0 };
        let count = rows * span.length;
        let panel = self;
        panel.rows.clear();
        panel.units.clear();
        panel.values.resize(count, 0.0);
        panel.exponents.resize(count, 0);
        panel.integers.resize(count, 0);
        panel.length = span.length;
        panel.format = None;
        for row in 0..rows {
            let start = row * span.k + span.start;
            let range = row * span.length..(row + 1) * span.length;
            let values = &mut panel.values[range.clone()];
            let scale = scale_of(operand, row, span);
            let weight = scale.map_or(f64::NAN, power_of_two) * sign;
            let scale = scale.unwrap_or(0) as i16;
            let element_bits = start..start + span.length;
            let exponents = &mut panel.exponents[range.clone()];
            let decode = (&decoder, weight, scale);
            let (leading, last, finite) = match operand.element_bits {
                ElementBits::U8(all) => decode_row(&all[element_bits], decode, values, exponents),
                ElementBits::U16(all) => decode_row(&all[element_bits], decode, values, exponents),
                ElementBits::U32(all) => decode_row(&all[element_bits], decode, values, exponents),
            };
            let state = if leading == ZERO_EXPONENT {
                Row { finite, ..Row::ZEROS }
            } else {
                let (leading, last) = (i32::from(leading + scale), i32::from(last + scale));
                Row { leading, last, width: leading - last, finite }
            };
            panel.units.push(if state.width < 0 { 1.0 } else { power_of_two(state.last) });
            if state.is_narrow() {
                // Any unit is valid for zeros.
                let unit = power_of_two(-state.last);
                for (integer, value) in panel.integers[range].iter_mut().zip(values) {
                    *integer = (*value * unit) as i16;
                }
            }
            panel.rows.push(state);
        }
    }

    /// Interleaves [`BLOCK`] rows at a time.
    pub(super) fn fill_blocks(&self, blocks: &mut Vec<Block>) {
        blocks.resize_with(self.rows.len().div_ceil(BLOCK), Block::default);
        for (index, (block, rows)) in blocks.iter_mut().zip(self.rows.chunks(BLOCK)).enumerate() {
            block.row = rows.iter().fold(Row::ZEROS, |all, &row| all.and(row));
            block.units = [1.0; BLOCK];
            if rows.len() < BLOCK {
                block.values.clear();
            }
            block.values.resize(self.length, [0.0; BLOCK]);
            for lane in 0..rows.len() {
                let row = index * BLOCK + lane;
                block.units[lane] = self.units[row];
                for (target, &value) in block.values.iter_mut().zip(self.values_of(row)) {
                    target[lane] = value;
                }
            }
        }
    }

    pub(super) fn values_of(&self, row: usize) -> &[f64] {
        &self.values[row * self.length..][..self.length]
    }

    /// Returns the exponents of the elements; zeros have an exponent far below all others.
    pub(super) fn exponents_of(&self, row: usize) -> &[i16] {
        &self.exponents[row * self.length..][..self.length]
    }

    pub(super) fn integers_of(&self, row: usize) -> &[i16] {
        &self.integers[row * self.length..][..self.length]
    }
}

/// Decodes a row; its scale is given as a weight and an exponent. Returns the largest exponent of
/// an element, the least exponent of a last bit, and whether all elements are finite.
#[inline(always)]
fn decode_row<T: Copy + Into<u32>>(
    element_bits: &[T],
    (decoder, weight, scale): (&Decoder, f64, i16),
    values: &mut [f64],
    exponents: &mut [i16],
) -> (i16, i16, bool) {
    let (mut leading, mut last, mut special) = (ZERO_EXPONENT, i16::MAX, 0);
    for ((&code, value), exponent) in element_bits.iter().zip(values).zip(exponents) {
        let element = decoder.decode(code.into());
        *value = f64::from(element.value) * weight;
        *exponent = element.exponent + scale;
        leading = leading.max(element.exponent);
        last = last.min(element.last);
        special |= u32::from(!value.is_finite());
    }
    (leading, last, special == 0)
}

/// At most [`BLOCK`] rows, interleaved.
#[derive(Default)]
pub(super) struct Block {
    /// Range of all rows of the block.
    pub(super) row: Row,
    pub(super) units: [f64; BLOCK],
    /// One array per k, with one element of each row. Rows beyond the last are zero.
    pub(super) values: Vec<[f64; BLOCK]>,
}

/// Returns the exponent of the scale of a row in a step (one block), or `None` for NaN.
fn scale_of(operand: &Operand<'_>, row: usize, span: Span) -> Option<i32> {
    let Some(scales) = &operand.scales else { return Some(0) };
    let per_row = span.k.div_ceil(scales.block);
    let code = scales.element_bits[row * per_row + span.start / scales.block];
    scale_parts(scales.format, code).0
}
