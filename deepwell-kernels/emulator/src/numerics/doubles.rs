//! One step along K of both matrices in binary64, with scales multiplied in.
//!
//! Every product of two elements is exact: significands have at most 15 bits each.

use super::operand::Operand;
use super::panel::{BLOCK, Span};
use crate::number::{Format, decode, decode_table};

/// Range of bit weights in a row or column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// The largest exponent of a leading bit; far below every other exponent if all elements are
    /// zero.
    pub(super) leading: i32,
    /// The least exponent of a last set bit; far above every other exponent if all are zero.
    pub(super) last: i32,
    pub(super) finite: bool,
}

impl Extent {
    pub(super) const NONE: Extent = Extent { leading: -10_000, last: 10_000, finite: true };

    pub(super) fn of(value: f64) -> Extent {
        if value == 0.0 {
            return Extent::NONE;
        }
        if !value.is_finite() {
            return Extent { finite: false, ..Extent::NONE };
        }
        // No element is subnormal in binary64.
        let bits = value.to_bits();
        let leading = (bits >> 52 & 0x7ff) as i32 - 1023;
        let significand = bits & ((1 << 52) - 1) | 1 << 52;
        let last = leading - 52 + significand.trailing_zeros() as i32;
        Extent { leading, last, finite: true }
    }

    pub(super) fn and(self, other: Extent) -> Extent {
        Extent {
            leading: self.leading.max(other.leading),
            last: self.last.min(other.last),
            finite: self.finite & other.finite,
        }
    }
}

/// One step of A.
pub(super) struct Rows {
    pub(super) values: Vec<f64>,
    pub(super) extents: Vec<Extent>,
}

/// One step of B, in blocks of columns; each array has the elements of one k.
pub(super) struct Columns {
    pub(super) values: Vec<[f64; BLOCK]>,
    pub(super) extents: Vec<[Extent; BLOCK]>,
}

fn each_element(
    format: Format,
    operand: &Operand<'_>,
    row: usize,
    span: Span,
    mut each: impl FnMut(usize, f64),
) {
    let start = row * span.k + span.start;
    let scale = |index: usize| match &operand.scales {
        None => 1.0,
        Some(scales) => {
            let per_row = span.k.div_ceil(scales.block);
            let code = scales.element_bits[row * per_row + (span.start + index) / scales.block];
            f64::from(decode(scales.format, code.into()))
        }
    };
    if format.bits() <= 8 {
        let table = decode_table(format);
        operand.element_bits.for_each(start, start + span.length, |index, code| {
            each(index, f64::from(table[(code & 0xff) as usize]) * scale(index));
        });
    } else {
        operand.element_bits.for_each(start, start + span.length, |index, code| {
            each(index, f64::from(decode(format, code)) * scale(index));
        });
    }
}

impl Rows {
    pub(super) fn new(
        format: Format,
        operand: &Operand<'_>,
        rows: usize,
        span: Span,
        negate: bool,
    ) -> Rows {
        let sign = if negate { -1.0 } else { 1.0 };
        let mut values = Vec::with_capacity(rows * span.length);
        let mut extents = vec![Extent::NONE; rows];
        for (row, extent) in extents.iter_mut().enumerate() {
            each_element(format, operand, row, span, |_, value| {
                values.push(value * sign);
                *extent = extent.and(Extent::of(value));
            });
        }
        Rows { values, extents }
    }
}

impl Columns {
    pub(super) fn new(
        format: Format,
        operand: &Operand<'_>,
        columns: usize,
        span: Span,
    ) -> Columns {
        let blocks = columns.div_ceil(BLOCK);
        let mut values = vec![[0.0; BLOCK]; blocks * span.length];
        let mut extents = vec![[Extent::NONE; BLOCK]; blocks];
        for column in 0..columns {
            let (block, lane) = (column / BLOCK, column % BLOCK);
            let extent = &mut extents[block][lane];
            each_element(format, operand, column, span, |index, value| {
                values[block * span.length + index][lane] = value;
                *extent = extent.and(Extent::of(value));
            });
        }
        Columns { values, extents }
    }
}
