//! What the kernels that work on whole rows share on the host: `layout/row_group.cuh` and
//! `common/block_columns.cuh`.

use deepwell_ir::KernelRequest;

/// Elements that a thread holds: four pieces of eight.
const ELEMENTS_PER_THREAD: usize = 32;
/// Threads of a row at most.
const THREADS_MAX: usize = 512;
/// Rows and columns that the kernels index.
const EXTENT_MAX: usize = i32::MAX as usize;

/// Threads that hold a row of `columns` elements in registers: whole warps, a power of two of
/// them; none where the row is not made of whole pieces or too long.
pub(super) fn threads_per_row(columns: usize) -> Option<u32> {
    let threads = columns.div_ceil(ELEMENTS_PER_THREAD).next_power_of_two().max(32);
    (columns > 0 && columns.is_multiple_of(8) && threads <= THREADS_MAX).then_some(threads as u32)
}

/// Says when operand `index` is too large to be indexed.
pub(super) fn too_large(request: &KernelRequest<'_>, index: usize) -> Option<String> {
    let shape = &request.operands[index].shape;
    shape
        .iter()
        .any(|&extent| extent > EXTENT_MAX)
        .then(|| format!("takes at most {EXTENT_MAX} rows and columns, not {shape:?}"))
}

/// How sums over all rows are divided among blocks: a row of partial sums each, which teams of
/// neighbours add, and the teams' rows, which the last block adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockColumns {
    /// Blocks of the launch.
    pub(super) blocks: usize,
    /// Blocks of a team.
    pub(super) members: usize,
}

impl BlockColumns {
    /// One block for each of `workers` multiprocessors, as far as there are rows for
    /// `rows_per_block` each; teams such that either level adds about as many rows.
    pub(super) fn new(rows: usize, rows_per_block: usize, workers: usize) -> BlockColumns {
        let blocks = rows.div_ceil(rows_per_block.max(1)).clamp(1, workers.max(1));
        let root = blocks.isqrt();
        let members = if root * root == blocks { root } else { root + 1 };
        BlockColumns { blocks, members }
    }

    /// Teams.
    pub(super) fn teams(self) -> usize {
        self.blocks.div_ceil(self.members)
    }

    /// Counters: one for each team, and one for the teams.
    pub(super) fn tickets(self) -> usize {
        self.teams() + 1
    }

    /// Scratch for `width` FP32 sums.
    pub(super) fn scratch_bytes(self, width: usize) -> usize {
        (self.blocks + self.teams()) * width * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_fit_their_threads() {
        let expected = [
            (0, None),
            (8, Some(32)),
            (12, None),
            (768, Some(32)),
            (1024, Some(32)),
            (1032, Some(64)),
            (4096, Some(128)),
            (5120, Some(256)),
            (16384, Some(512)),
            (16392, None),
        ];
        for (columns, threads) in expected {
            assert_eq!(threads_per_row(columns), threads, "{columns}");
        }
    }

    #[test]
    fn every_block_has_a_team_and_every_team_a_block() {
        for rows in [0, 1, 2, 3, 15, 16, 17, 130, 5000] {
            for workers in [0, 1, 78, 132, 148] {
                let division = BlockColumns::new(rows, 4, workers);
                let BlockColumns { blocks, members } = division;
                assert!(blocks >= 1 && blocks <= workers.max(1), "{division:?}");
                assert!(members >= 1 && members * members >= blocks, "{division:?}");
                assert!((division.teams() - 1) * members < blocks, "{division:?}");
                let scratch = division.scratch_bytes(8);
                assert_eq!(scratch, 32 * (blocks + division.teams()));
            }
        }
    }
}
