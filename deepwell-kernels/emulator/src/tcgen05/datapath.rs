//! Which lane and column holds which element of the accumulator.

use std::ops::Range;

/// How D is spread over lanes. The letters are those of the instruction set; C is for sparse MMAs
/// only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataPath {
    /// M = 256 of a pair: 128 rows in each CTA, row `m` in lane `m % 128`.
    A,
    /// M = 128 of a pair: 64 rows in each CTA. The first half of the columns is in lanes 0 to
    /// 63, the second half in lanes 64 to 127 of the same tensor-memory columns.
    B,
    /// M = 128: row `m` in lane `m`.
    D,
    /// M = 64, weight stationary: halves of the columns as in [`DataPath::B`].
    E,
    /// M = 64: 16 rows in every 32 lanes, in the first or in the second 16.
    F,
    /// M = 32, weight stationary: a quarter of the columns in every 32 lanes.
    G,
}

/// A part of D whose rows are in one CTA and whose columns are consecutive in each lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// 0, or 1 for the odd CTA of a pair.
    pub block: u32,
    /// Rows of D.
    pub rows: Range<u32>,
    /// Columns of D. They begin at the first tensor-memory column of D.
    pub columns: Range<u32>,
    /// Which of the parts with the same rows, which differ in lanes.
    pub slice: u32,
}

impl DataPath {
    /// The layout of an accumulator of `m` rows. Nothing if there is none.
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

    /// Lanes at which D (and A, if it is in tensor memory) may begin.
    pub fn first_lanes(self) -> &'static [u32] {
        if self == DataPath::F { &[0, 16] } else { &[0] }
    }

    /// CTAs that hold rows.
    pub fn blocks(self) -> u32 {
        if matches!(self, DataPath::A | DataPath::B) { 2 } else { 1 }
    }

    /// Parts of the columns that share tensor-memory columns.
    pub fn slices(self) -> u32 {
        match self {
            DataPath::B | DataPath::E => 2,
            DataPath::G => 4,
            _ => 1,
        }
    }

    /// Lane of a row of a part, counted from the part's first row and from D's first lane.
    pub fn lane(self, slice: u32, row: u32) -> u32 {
        match self {
            DataPath::A | DataPath::D => row,
            DataPath::B | DataPath::E => row + 64 * slice,
            DataPath::F => row % 16 + row / 16 * 32,
            DataPath::G => row + 32 * slice,
        }
    }

    /// D in parts.
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
