//! Splits tensors into cache-sized pieces, processed by the threads of the rayon pool.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use deepwell_precision::scale_tiles::{TILE_BLOCKS, TILE_BYTES, TILE_ROWS};

use super::shape::{Matrices, Stored};
use super::{QuantizeFileError, ScaleLayout};

/// Maximum bytes of the buffers of all threads together.
pub const BUFFER_BYTES_MAX: usize = 160 << 20;

/// Elements of a piece, unless 128 rows have more.
const PIECE_ELEMENTS: usize = 1 << 18;
/// Elements of a piece of a tensor with inputs first. Such a piece consists of many short runs of
/// the file; a larger piece has longer runs.
const TURNED_PIECE_ELEMENTS: usize = 1 << 21;
/// Elements of 128 rows at most.
const TILED_ELEMENTS_MAX: usize = 1 << 23;
/// Bytes of all buffers per element: source (4), data, packed data, scales, values (4), and the
/// source in file order (4).
const BYTES_PER_ELEMENT: usize = 16;

const _: () = assert!(TILED_ELEMENTS_MAX * BYTES_PER_ELEMENT <= BUFFER_BYTES_MAX);
// At the cuts of a row, a byte and a block start in all formats.
const _: () = assert!(PIECE_ELEMENTS.is_multiple_of(32));

/// Maximum elements of a row with tiled scales.
pub(super) const TILED_COLS_MAX: usize = TILED_ELEMENTS_MAX / TILE_ROWS;

/// Whole rows, or a part of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    /// First row, counted over all matrices.
    pub(super) row: usize,
    pub(super) rows: usize,
    pub(super) col: usize,
    pub(super) cols: usize,
}

impl Region {
    pub(super) fn elements(self) -> usize {
        self.rows * self.cols
    }

    /// Index of the first element.
    pub(super) fn first(self, matrices: Matrices) -> u64 {
        self.row as u64 * matrices.cols as u64 + self.col as u64
    }

    /// Byte offset of the piece's data in the tensor's data.
    pub(super) fn data_begin(self, matrices: Matrices, stored: Stored) -> u64 {
        self.row as u64 * stored.data_len(matrices.cols) as u64 + stored.data_len(self.col) as u64
    }

    /// Byte offset of the piece's scales in the tensor's scales.
    pub(super) fn scales_begin(self, matrices: Matrices, stored: Stored) -> u64 {
        let blocks = stored.blocks(matrices.cols);
        match stored.layout {
            ScaleLayout::Plain => {
                self.row as u64 * blocks as u64 + (self.col / stored.block()) as u64
            }
            ScaleLayout::Tiled => {
                let (matrix, row) = (self.row / matrices.rows, self.row % matrices.rows);
                let tiles = row / TILE_ROWS * blocks.div_ceil(TILE_BLOCKS);
                (matrix * stored.matrix_scales_len(matrices) + tiles * TILE_BYTES) as u64
            }
        }
    }
}

/// Calls `run` for each contiguous run of file elements in a piece of a tensor with inputs first:
/// for each column of the piece and each matrix with rows in it. The arguments are the column, the
/// index of the first element, its row in the piece, and the number of consecutive rows.
pub(super) fn for_each_run<E>(
    region: Region,
    matrices: Matrices,
    mut run: impl FnMut(usize, u64, usize, usize) -> Result<(), E>,
) -> Result<(), E> {
    let Matrices { rows, cols, .. } = matrices;
    let mut done = 0;
    while done < region.rows {
        let matrix = (region.row + done) / rows;
        let row = (region.row + done) % rows;
        let count = (rows - row).min(region.rows - done);
        for col in 0..region.cols {
            let first = (matrix * cols + region.col + col) as u64 * rows as u64 + row as u64;
            run(col, first, done, count)?;
        }
        done += count;
    }
    Ok(())
}

/// The pieces of a tensor, which depend only on its shape, layout and orientation, and on the rows
/// of a block: no piece ends within a block.
pub(super) fn regions(
    matrices: Matrices,
    layout: ScaleLayout,
    is_inputs_first: bool,
    block_rows: usize,
) -> Vec<Region> {
    let Matrices { count, rows, cols } = matrices;
    let mut regions = Vec::new();
    if count * rows * cols == 0 {
        return regions;
    }
    let piece_elements = if is_inputs_first { TURNED_PIECE_ELEMENTS } else { PIECE_ELEMENTS };
    let mut rows_at_once = piece_elements / cols;
    if block_rows > 1 {
        rows_at_once = (rows_at_once / block_rows).max(1) * block_rows;
    }
    match layout {
        ScaleLayout::Plain if rows_at_once == 0 => {
            for row in 0..count * rows {
                for col in (0..cols).step_by(piece_elements) {
                    let cols = piece_elements.min(cols - col);
                    regions.push(Region { row, rows: 1, col, cols });
                }
            }
        }
        ScaleLayout::Plain => {
            for row in (0..count * rows).step_by(rows_at_once) {
                let rows = rows_at_once.min(count * rows - row);
                regions.push(Region { row, rows, col: 0, cols });
            }
        }
        ScaleLayout::Tiled => {
            let rows_at_once = (rows_at_once / TILE_ROWS).max(1) * TILE_ROWS;
            for matrix in 0..count {
                for row in (0..rows).step_by(rows_at_once) {
                    let region_rows = rows_at_once.min(rows - row);
                    let row = matrix * rows + row;
                    regions.push(Region { row, rows: region_rows, col: 0, cols });
                }
            }
        }
    }
    regions
}

/// Runs `work` on each of `items` with the threads of the current rayon pool, each with its own
/// state, and returns the results in order. `elements` is the size of the largest item. After an
/// error no new item is started.
pub(super) fn for_each<I: Copy + Sync, W: Default, R: Send>(
    items: &[I],
    elements: usize,
    work: impl Fn(&mut W, I) -> Result<R, QuantizeFileError> + Sync,
) -> Result<Vec<R>, QuantizeFileError> {
    let fitting = BUFFER_BYTES_MAX / (elements * BYTES_PER_ELEMENT).max(1);
    let workers = rayon::current_num_threads().min(fitting).min(items.len()).max(1);
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let done: Mutex<Vec<(usize, Result<R, QuantizeFileError>)>> = Mutex::new(Vec::new());
    let worker = || {
        let mut state = W::default();
        let mut results = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&item) = items.get(index) else { break };
            let result = work(&mut state, item);
            if result.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            results.push((index, result));
        }
        // A poisoned lock only means that another thread panicked; rayon propagates the panic.
        done.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).append(&mut results);
    };
    // A thread that waits inside of `work` may start another worker, but never another item, so the
    // number of states is at most the number of workers.
    rayon::scope(|scope| (0..workers).for_each(|_| scope.spawn(|_| worker())));
    let mut done = done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    done.sort_by_key(|&(index, _)| index);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::super::FileFormat;
    use super::*;

    /// Pieces cover every element once, and their data and scales are consecutive.
    #[test]
    fn pieces_cover_a_tensor() {
        for (count, rows, cols) in
            [(1, 1, 1), (3, 130, 70), (1, 700, 3000), (2, 1, 600_000), (1, 0, 5), (1, 300, 20_000)]
        {
            let matrices = Matrices { count, rows, cols };
            for layout in [ScaleLayout::Plain, ScaleLayout::Tiled] {
                if layout == ScaleLayout::Tiled && cols > TILED_COLS_MAX {
                    continue;
                }
                for (format, is_inputs_first) in
                    [(FileFormat::Mxfp6, false), (FileFormat::Nvfp4, true)]
                {
                    let stored = Stored { format, layout };
                    let (mut element, mut data, mut scales) = (0, 0, 0);
                    for region in regions(matrices, layout, is_inputs_first, 1) {
                        assert_eq!(region.first(matrices), element);
                        assert_eq!(region.data_begin(matrices, stored), data);
                        assert_eq!(region.scales_begin(matrices, stored), scales);
                        element += region.elements() as u64;
                        data += (region.rows * stored.data_len(region.cols)) as u64;
                        let part = Matrices { count: 1, rows: region.rows, cols: region.cols };
                        scales += stored.matrix_scales_len(part) as u64;
                    }
                    assert_eq!(element, (count * rows * cols) as u64);
                    assert_eq!(scales, (count * stored.matrix_scales_len(matrices)) as u64);
                }
            }
        }
    }

    /// No piece but the last ends within a square block.
    #[test]
    fn pieces_end_at_blocks() {
        for (rows, cols, block_rows) in [(100, 20_000, 16), (70, 300_000, 32), (400, 3000, 128)] {
            let matrices = Matrices { count: 1, rows, cols };
            let regions = regions(matrices, ScaleLayout::Plain, false, block_rows);
            assert!(regions.len() > 1);
            assert_eq!(regions.iter().map(|region| region.rows).sum::<usize>(), rows);
            assert!(regions.iter().all(|region| region.row % block_rows == 0), "{regions:?}");
        }
    }

    /// The runs of all pieces of a tensor with inputs first give its transpose.
    #[test]
    fn runs_are_the_transpose() {
        for (count, rows, cols) in [(1, 1, 1), (3, 5, 7), (2, 700, 2000), (1, 1, 3_000_000)] {
            let matrices = Matrices { count, rows, cols };
            let mut seen = vec![false; count * rows * cols];
            for region in regions(matrices, ScaleLayout::Plain, true, 1) {
                let all = for_each_run(region, matrices, |col, first, done, run| {
                    for i in 0..run {
                        let element = first as usize + i;
                        // Position of the element in the file: matrix, input, output.
                        let matrix = element / (rows * cols);
                        let rest = element % (rows * cols);
                        let (input, output) = (rest / rows, rest % rows);
                        let expected = (region.row + done + i, region.col + col);
                        assert_eq!((matrix * rows + output, input), expected);
                        assert!(!std::mem::replace(&mut seen[element], true));
                    }
                    Ok::<(), ()>(())
                });
                assert_eq!(all, Ok(()));
            }
            assert!(seen.into_iter().all(|seen| seen), "{matrices:?}");
        }
    }

    #[test]
    fn results_come_in_order_and_errors_stop() {
        let items: Vec<usize> = (0..1000).collect();
        let results = for_each(&items, 1, |calls: &mut usize, item| {
            *calls += 1;
            Ok(item * 2)
        });
        assert_eq!(results.expect("no error"), (0..2000).step_by(2).collect::<Vec<_>>());
        let error = for_each(&items, 1, |_: &mut (), item| match item {
            5 => Err(QuantizeFileError::NothingToQuantize),
            _ => Ok(()),
        });
        assert!(error.is_err());
    }
}
