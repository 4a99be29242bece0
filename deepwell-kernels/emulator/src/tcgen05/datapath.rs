//! Layout of accumulator elements over lanes and columns.

use std::ops::Range;

/// Layout of D over lanes. The letters are those of the instruction set; C is for sparse MMAs only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataPath {
    /// M = 256 of a CTA pair: 128 rows in each CTA, row `m` in lane `m % 128`.
    A,
    /// M = 128 of a CTA pair: 64 rows in each CTA. The first half of the columns is in lanes 0 to
    /// 63, the second half in lanes 64 to 127 of the same tensor-memory columns.
    B,
    /// M = 128: row `m` in lane `m`.
    D,
    /// M = 64, weight stationary: column halves as in [`DataPath::B`].
    E,
    /// M = 64: 16 rows in every group of 32 lanes, in its first or second 16 lanes.
    F,
    /// M = 32, weight stationary: a quarter of the columns in every group of 32 lanes.
    G,
}

/// A part of D with rows in one CTA and consecutive columns in each lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// CTA of the pair: 0, or 1 for the odd CTA.
    pub block: u32,
    /// Rows of D.
    pub rows: Range<u32>,
    /// Columns of D, starting at the first tensor-memory column of D.
    pub columns: Range<u32>,
    /// Index among the parts with the same rows; each has other lanes.
    pub slice: u32,
}

impl DataPath {
    /// Returns the layout of an accumulator of `m` rows, or `None` for an illegal combination.
    pub fn select(m: u32, group: u32, weight_stationary: bool) -> Option<DataPath> {
        match (m, group, weight_stationary) {
            (256, 2, false) => Some(DataPath::A),
            (128, 2, false) => Some(DataPath::B),
            (128, 1, _) => Some(DataPath::D),
            (64, 1, true) => Some(DataPath::E),
            (64, 1, false) => Some(DataPath::F),
            (32, 1, true) => Some(DataPath::G),
            _ => None,
        }
    }

    /// First lanes that D (and A, if it is in tensor memory) may have.
    pub fn first_lanes(self) -> &'static [u32] {
        if self == DataPath::F { &[0, 16] } else { &[0] }
    }

    /// Number of CTAs that hold rows.
    pub fn blocks(self) -> u32 {
        if matches!(self, DataPath::A | DataPath::B) { 2 } else { 1 }
    }

    /// Number of column parts that share tensor-memory columns.
    pub fn slices(self) -> u32 {
        match self {
            DataPath::B | DataPath::E => 2,
            DataPath::G => 4,
            _ => 1,
        }
    }

    /// Returns the lane of a row, with both relative to the first of the part and of D.
    pub fn lane(self, slice: u32, row: u32) -> u32 {
        match self {
            DataPath::A | DataPath::D => row,
            DataPath::B | DataPath::E => row + 64 * slice,
            DataPath::F => row % 16 + row / 16 * 32,
            DataPath::G => row + 32 * slice,
        }
    }

    /// Splits D into parts.
    pub fn parts(self, m: u32, n: u32) -> Vec<Part> {
        let (rows, columns) = (m / self.blocks(), n / self.slices());
        let mut parts = Vec::new();
        for block in 0..self.blocks() {
            for slice in 0..self.slices() {
                parts.push(Part {
                    block,
                    rows: block * rows..(block + 1) * rows,
                    columns: slice * columns..(slice + 1) * columns,
                    slice,
                });
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::TENSOR_LANES;

    #[test]
    fn every_element_has_its_own_cell() {
        for (m, group, stationary) in [
            (256, 2, false),
            (128, 2, false),
            (128, 1, false),
            (128, 1, true),
            (64, 1, true),
            (64, 1, false),
            (32, 1, true),
        ] {
            let n = 64;
            let path = DataPath::select(m, group, stationary).unwrap();
            let mut cells = std::collections::HashSet::new();
            let mut elements = std::collections::HashSet::new();
            for part in path.parts(m, n) {
                for row in part.rows.clone() {
                    let lane = path.lane(part.slice, row - part.rows.start);
                    assert!(lane < TENSOR_LANES);
                    for column in part.columns.clone() {
                        assert!(cells.insert((part.block, lane, column - part.columns.start)));
                        assert!(elements.insert((row, column)));
                    }
                }
            }
            assert_eq!(elements.len(), (m * n) as usize, "{path:?}");
        }
        assert_eq!(DataPath::select(64, 2, false), None);
        assert_eq!(DataPath::select(256, 1, false), None);
        assert_eq!(DataPath::select(32, 1, false), None);
    }
}
