//! Shared by launchers of kernels in which lanes of a warp share a row: `layout/row_lanes.cuh`.

use super::support::grid_of;

/// Threads per CTA, as in the sources.
pub(crate) const THREADS: u32 = 256;
/// Elements of a vector, 16 bytes of BF16.
const VECTOR: usize = 8;
/// Maximum lanes per row.
const LANES_MAX: usize = 32;

/// Distribution of a matrix over a grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowLanes {
    /// CTAs.
    pub(crate) ctas: u32,
    /// Lanes per row, a power of two.
    pub(crate) lanes: u32,
    /// Suffix of the kernel's name: `_scalar` kernels move element by element, for rows that do not
    /// consist of whole vectors.
    pub(crate) suffix: &'static str,
}

impl RowLanes {
    pub(crate) fn new(rows: usize, columns: usize, sm_count: u32) -> RowLanes {
        RowLanes::of_parts(rows, &[columns], sm_count)
    }

    /// Distribution of rows concatenated from parts of so many columns; a vector never spans two
    /// parts.
    pub(crate) fn of_parts(rows: usize, parts: &[usize], sm_count: u32) -> RowLanes {
        let columns: usize = parts.iter().sum();
        let (units, suffix) = match parts.iter().all(|part| part.is_multiple_of(VECTOR)) {
            true => (columns / VECTOR, ""),
            false => (columns, "_scalar"),
        };
        let lanes = units.next_power_of_two().clamp(1, LANES_MAX);
        RowLanes { ctas: grid_of(rows * lanes, THREADS, sm_count), lanes: lanes as u32, suffix }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_for_the_vectors_of_a_row() {
        // 132 SMs hold 2112 CTAs.
        for (rows, columns, expected) in [
            (0, 64, (1, 8, "")),
            (1, 0, (1, 1, "")),
            (33, 8, (1, 1, "")),
            (33, 24, (1, 4, "")),
            (65, 64, (3, 8, "")),
            (17, 256, (3, 32, "")),
            (17, 2048, (3, 32, "")),
            (9, 33, (2, 32, "_scalar")),
            (9, 3, (1, 4, "_scalar")),
            (1 << 20, 2048, (2112, 32, "")),
        ] {
            let RowLanes { ctas, lanes, suffix } = RowLanes::new(rows, columns, 132);
            assert_eq!((ctas, lanes, suffix), expected, "{rows}x{columns}");
        }
        // Vectors do not span two parts.
        assert_eq!(RowLanes::of_parts(9, &[4, 4], 132).suffix, "_scalar");
        assert_eq!(RowLanes::of_parts(9, &[8, 16], 132), RowLanes::new(9, 24, 132));
    }
}
