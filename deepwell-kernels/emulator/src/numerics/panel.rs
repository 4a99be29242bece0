//! One step along K of a matrix, decoded.
//!
//! Scales are powers of two here and are multiplied in: binary64 has the products of all elements
//! with all scales.

use super::element::{Decoder, ZERO_EXPONENT, power_of_two, scale_parts};
use super::operand::{ElementBits, Operand};
use crate::number::Format;

/// Columns that are summed together.
pub(super) const BLOCK: usize = 8;
/// Bits between the leading and the last of a row, up to which elements are 16-bit integers.
const WIDTH_MAX: i32 = 14;

/// Where a step lies in a matrix with `k` elements to a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) k: usize,
    pub(super) start: usize,
    pub(super) length: usize,
}

/// What holds for a row of a step, or for several.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Row {
    /// The largest exponent of an element, far below all for zeros.
    pub(super) leading: i32,
    /// The least exponent of a last bit that is set, far above all for zeros.
    pub(super) last: i32,
    /// The most bits from the leading to the last of one row, less one; negative for zeros.
    pub(super) width: i32,
    /// No element is infinite or NaN, nor is the scale.
    pub(super) finite: bool,
}

impl Row {
    const ZEROS: Row = Row { leading: -16_384, last: 32_767, width: -49_151, finite: true };

    /// Whether [`Panel::integers_of`] are the elements, in units of [`Panel::units`].
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

/// A step of A, or of B transposed: `[rows, length]`.
#[derive(Default)]
pub(super) struct Panel {
    pub(super) rows: Vec<Row>,
    /// The weights of the last bits.
    pub(super) units: Vec<f64>,
    values: Vec<f64>,
    exponents: Vec<i16>,
    integers: Vec<i16>,
    length: usize,
    /// The bit patterns that the panel was made of, and their format, if they were kept.
    element_bits: Vec<u32>,
    format: Option<Format>,
}

impl Panel {
    /// Whether the panel was made of these bit patterns, whole and without scales.
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

    /// Keeps the bit patterns that the panel was made of, or none.
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

    /// Decodes a step. What the panel held before is gone; its memory is used again.
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
                // Of zeros any unit will do.
                let unit = power_of_two(-state.last);
                for (integer, value) in panel.integers[range].iter_mut().zip(values) {
                    *integer = (*value * unit) as i16;
                }
            }
            panel.rows.push(state);
        }
    }

    /// Puts [`BLOCK`] rows at a time side by side.
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

    /// Exponents of the elements, far below all others for zeros.
    pub(super) fn exponents_of(&self, row: usize) -> &[i16] {
        &self.exponents[row * self.length..][..self.length]
    }

    pub(super) fn integers_of(&self, row: usize) -> &[i16] {
        &self.integers[row * self.length..][..self.length]
    }
}

/// Decodes a row, whose scale has been made a weight and an exponent. Returns the largest exponent
/// of an element, the least of a last bit, and whether all are finite.
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

/// At most [`BLOCK`] rows, together.
#[derive(Default)]
pub(super) struct Block {
    /// What holds for all of them.
    pub(super) row: Row,
    pub(super) units: [f64; BLOCK],
    /// Elements of one k together. Rows beyond the last are zero.
    pub(super) values: Vec<[f64; BLOCK]>,
}

/// The exponent of the scale of a row in a step, which is one block; `None` if it is NaN.
fn scale_of(operand: &Operand<'_>, row: usize, span: Span) -> Option<i32> {
    let Some(scales) = &operand.scales else { return Some(0) };
    let per_row = span.k.div_ceil(scales.block);
    let code = scales.element_bits[row * per_row + span.start / scales.block];
    scale_parts(scales.format, code).0
}
