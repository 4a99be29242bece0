//! The part of an operand that is sampled.

use std::ops::Range;

use deepwell_ir::GemmKind;
use deepwell_ir::ops::{Axis, ProductError, first_sampled_row, sampled_group};

/// What the sampled group has of an operand, in the encoding of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it: there are no groups.
    Whole = 0,
    /// Its rows, of which some are sampled.
    Rows = 1,
    /// A range of the contraction.
    Along = 2,
    /// A matrix of a stack.
    Matrix = 3,
}

impl Part {
    /// Of an unquantized operand of this shape, along the axis of its contraction.
    pub(super) fn of_source(shape: &[usize], axis: Axis, is_grouped: bool) -> Part {
        match (is_grouped, shape.len(), axis) {
            (false, ..) => Part::Whole,
            (true, 3, _) => Part::Matrix,
            (true, _, Axis::Column) => Part::Along,
            (true, ..) => Part::Rows,
        }
    }

    /// Of a quantized operand, the first or the second.
    pub(super) fn of_planes(op: &ProductError, index: usize, is_grouped: bool) -> Part {
        match (is_grouped, op.kind, index) {
            (false, ..) => Part::Whole,
            (true, GemmKind::Wgrad, _) => Part::Along,
            (true, _, 0) => Part::Rows,
            (true, ..) => Part::Matrix,
        }
    }

    /// The window of an operand with matrices `[outer, k]`.
    pub(super) fn window(self, offsets: &[i32], [outer, k]: [usize; 2]) -> Window {
        let (group, rows) = sampled_group(offsets);
        let (matrix, outer, along) = match self {
            Part::Whole => (0, first_sampled_row(outer)..outer, 0..k),
            Part::Rows => (0, rows.start + first_sampled_row(rows.len())..rows.end, 0..k),
            Part::Along => (0, first_sampled_row(outer)..outer, rows),
            Part::Matrix => (group, first_sampled_row(outer)..outer, 0..k),
        };
        Window { group, matrix, outer, along }
    }
}

/// Where the sampled elements of an operand are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// Group, whose tensor scale the elements have.
    pub(super) group: usize,
    /// Matrix of a stack.
    pub(super) matrix: usize,
    /// From the first sampled row on, to the end of those that may be sampled.
    pub(super) outer: Range<usize>,
    /// Elements of the contraction.
    pub(super) along: Range<usize>,
}

impl Window {
    /// The place of an element of the sample; `None` beyond the operand.
    pub(super) fn at(&self, row: usize, along: usize) -> Option<[usize; 2]> {
        let (row, along) = (self.outer.start + row, self.along.start + along);
        (row < self.outer.end && along < self.along.end).then_some([row, along])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_the_largest_group() {
        let offsets = [0, 128, 640, 640, 1152];
        for (part, matrix, outer, along) in [
            (Part::Whole, 0, 128..400, 0..96),
            (Part::Rows, 0, 256..640, 0..96),
            (Part::Along, 0, 128..400, 128..640),
            (Part::Matrix, 1, 128..400, 0..96),
        ] {
            let window = part.window(&offsets, [400, 96]);
            assert_eq!(window, Window { group: 1, matrix, outer, along }, "{part:?}");
        }
        let empty = Part::Rows.window(&[0, 0, 0], [400, 96]);
        assert_eq!(empty.at(0, 0), None);
    }
}
