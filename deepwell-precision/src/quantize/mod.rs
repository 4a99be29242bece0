//! Block quantization along rows, along columns, or both in one pass over the source.
//!
//! Every operand is quantized from the high-precision source, never from another operand:
//! quantizing twice loses bits. Elements are rounded to nearest even and saturate. Bytes and
//! counters do not depend on the number of threads or on the vector instructions of the machine.
//!
//! # Non-finite values
//!
//! If a group of elements with one exponent contains a NaN, its scale is 0xFF and all elements are
//! NaN. If it contains an infinity and no NaN, its scale is 0xFE (2^127), with infinities as the
//! largest finite element, which dequantizes to infinity; finite elements of the group nearly all
//! underflow. Each non-finite element counts in [`QuantStats::nonfinite`].

use alloc::vec::Vec;

use crate::error::{QuantizeError, Shape};
use crate::simd::Level;
use crate::source::Values;
use crate::threads::{ELEMENTS_PER_TASK, join, threads};
use crate::{
    BLOCK, BlockShape, ElementFormat, Granularity, QuantFormat, QuantStats, ScaleRule, Source,
};

pub(crate) mod lanes;
mod min_error;
#[cfg(test)]
mod reference;
mod rows;
mod scales;
pub(crate) mod stochastic;
#[cfg(test)]
mod tests;
mod tile;
mod transpose;

use rows::RowsTask;
pub use stochastic::quantize_rows_stochastic;
use tile::{Column, RowOut, RowSlices, STRIPE_ROWS, TILE_COLS, TileTask};

/// Columns that one thread processes from the first row to the last. Each column of the transposed
/// operand is on separate memory pages; the TLB holds about 1024.
const BAND_COLS: usize = 1024;

const _: () = assert!(BAND_COLS.is_multiple_of(TILE_COLS));

/// A [`QuantFormat`] in the form used by the kernels of MX formats.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MxSpec {
    pub(crate) element: ElementFormat,
    pub(crate) scale_rule: ScaleRule,
    pub(crate) granularity: Granularity,
    pub(crate) block: BlockShape,
}

#[cfg(test)]
impl MxSpec {
    pub(crate) fn format(&self) -> QuantFormat {
        QuantFormat::mx(self.element)
            .with_scale_rule(self.scale_rule)
            .with_granularity(self.granularity)
            .with_shape(self.block)
    }
}

/// Bytes of the scales of a `rows` x `cols` matrix with blocks along its rows: plain row-major
/// [rows, ceil(cols / 32)].
#[must_use]
pub const fn scales_len(rows: usize, cols: usize) -> usize {
    rows * cols.div_ceil(BLOCK)
}

/// Quantizes a matrix with blocks along its rows, for a GEMM that contracts over columns.
///
/// `src` is row-major [rows, cols]; `data` receives the elements in the same shape and `scales`
/// their [`crate::e8m0`] scales, row-major [rows, ceil(cols / 32)]. A row whose length is not a
/// multiple of 32 ends with a shorter block. Large matrices are split over the threads of the
/// current rayon pool. Square blocks take some 100 KiB of stack.
///
/// ```
/// use deepwell_precision::{QuantFormat, dequantize_rows, quantize_rows};
/// let source = [0.0_f32, 1.0, -2.5, 448.0];
/// let (mut data, mut scales) = ([0; 4], [0; 1]);
/// let format = QuantFormat::MXFP8;
/// let stats = quantize_rows(&source, 1, 4, &format, &mut data, &mut scales)?;
/// assert_eq!((stats.amax, scales), (448.0, [127]));
/// let mut back = [0.0_f32; 4];
/// dequantize_rows(&data, &scales, 1, 4, &format, &mut back)?;
/// assert_eq!(back, source);
/// # Ok::<(), deepwell_precision::QuantizeError>(())
/// ```
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape, [`QuantizeError::Format`] for a
/// format that is not MX; nothing is written in these cases.
pub fn quantize_rows<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    format: &QuantFormat,
    data: &mut [u8],
    scales: &mut [u8],
) -> Result<QuantStats, QuantizeError> {
    check_rows(src.len(), rows, cols, data, scales)?;
    let spec = format.mx_spec()?;
    Ok(rows_at(Level::Native, S::values(src), rows, cols, spec, data, scales))
}

/// Quantizes a matrix with blocks along its columns, for a GEMM that contracts over rows.
///
/// `src` is row-major [rows, cols]. The operand is stored transposed, the contraction contiguous:
/// `data_t` receives the elements as row-major [cols, rows] and `scales_t` scales as [cols,
/// ceil(rows / 32)]. Otherwise as [`quantize_rows`].
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape, [`QuantizeError::Format`] for a
/// format that is not MX; nothing is written in these cases.
pub fn quantize_columns<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    format: &QuantFormat,
    data_t: &mut [u8],
    scales_t: &mut [u8],
) -> Result<QuantStats, QuantizeError> {
    check_columns(src.len(), rows, cols, data_t, scales_t)?;
    let spec = format.mx_spec()?;
    Ok(columns_at(Level::Native, S::values(src), rows, cols, spec, data_t, scales_t))
}

/// Quantizes both operands in one pass over the source: (data, scales) as written by
/// [`quantize_rows`] and (data_t, scales_t) as written by [`quantize_columns`], byte for byte. The
/// statistics are those of the two calls merged. With [`BlockShape::Square`] both operands hold the
/// same values.
///
/// ```
/// use deepwell_precision::{QuantFormat, quantize_both, scales_len};
/// let source = vec![1.0_f32; 2 * 40];
/// let (mut data, mut scales) = (vec![0; 80], vec![0; scales_len(2, 40)]);
/// let (mut data_t, mut scales_t) = (vec![0; 80], vec![0; scales_len(40, 2)]);
/// let by_row = (&mut data[..], &mut scales[..]);
/// let by_column = (&mut data_t[..], &mut scales_t[..]);
/// let stats = quantize_both(&source, 2, 40, &QuantFormat::MXFP8, by_row, by_column)?;
/// assert_eq!(stats.elements, 160);
/// # Ok::<(), deepwell_precision::QuantizeError>(())
/// ```
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape, [`QuantizeError::Format`] for a
/// format that is not MX; nothing is written in these cases.
pub fn quantize_both<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    format: &QuantFormat,
    (data, scales): (&mut [u8], &mut [u8]),
    (data_t, scales_t): (&mut [u8], &mut [u8]),
) -> Result<QuantStats, QuantizeError> {
    check_rows(src.len(), rows, cols, data, scales)?;
    check_columns(src.len(), rows, cols, data_t, scales_t)?;
    let spec = format.mx_spec()?;
    let (out, out_t) = ((data, scales), (data_t, scales_t));
    Ok(both_at(Level::Native, S::values(src), rows, cols, spec, out, out_t))
}

fn check_rows(
    src: usize,
    rows: usize,
    cols: usize,
    data: &[u8],
    scales: &[u8],
) -> Result<(), QuantizeError> {
    let shape = Shape::new(rows, cols)?;
    shape.expect("src", rows * cols, src)?;
    shape.expect("data", rows * cols, data.len())?;
    shape.expect("scales", scales_len(rows, cols), scales.len())
}

fn check_columns(
    src: usize,
    rows: usize,
    cols: usize,
    data_t: &[u8],
    scales_t: &[u8],
) -> Result<(), QuantizeError> {
    let shape = Shape::new(rows, cols)?;
    shape.expect("src", rows * cols, src)?;
    shape.expect("data_t", rows * cols, data_t.len())?;
    shape.expect("scales_t", scales_len(cols, rows), scales_t.len())
}

/// [`quantize_rows`] on checked arguments.
fn rows_at(
    level: Level,
    src: Values<'_>,
    rows: usize,
    cols: usize,
    spec: MxSpec,
    data: &mut [u8],
    scales: &mut [u8],
) -> QuantStats {
    let stats = if src.is_empty() {
        QuantStats::default()
    } else if spec.block == BlockShape::Square {
        let (row_range, row_out) = ((0, rows), Some((data, scales)));
        RowsPart { src, cols, row_range, spec, row_out, columns: None }.run(level)
    } else {
        // If groups end at row ends, the kernel treats the matrix as one long row.
        let joined = cols.is_multiple_of(spec.granularity.elements());
        let cols = if joined { src.len() } else { cols };
        match src {
            Values::F32(src) => RowsTask { src, cols, spec, data, scales }.run(level),
            Values::Bf16(src) => RowsTask { src, cols, spec, data, scales }.run(level),
        }
    };
    QuantStats { elements: src.len() as u64, ..stats }
}

/// [`quantize_columns`] on checked arguments.
fn columns_at(
    level: Level,
    src: Values<'_>,
    rows: usize,
    cols: usize,
    spec: MxSpec,
    data_t: &mut [u8],
    scales_t: &mut [u8],
) -> QuantStats {
    let mut columns = columns_of(rows, data_t, scales_t);
    let row_range = (0, rows);
    let part = RowsPart { src, cols, row_range, spec, row_out: None, columns: Some(&mut columns) };
    QuantStats { elements: src.len() as u64, ..part.run(level) }
}

/// [`quantize_both`] on checked arguments.
fn both_at(
    level: Level,
    src: Values<'_>,
    rows: usize,
    cols: usize,
    spec: MxSpec,
    row_out: (&mut [u8], &mut [u8]),
    (data_t, scales_t): (&mut [u8], &mut [u8]),
) -> QuantStats {
    let mut columns = columns_of(rows, data_t, scales_t);
    let row_range = (0, rows);
    let part = RowsPart {
        src,
        cols,
        row_range,
        spec,
        row_out: Some(row_out),
        columns: Some(&mut columns),
    };
    QuantStats { elements: 2 * src.len() as u64, ..part.run(level) }
}

/// The columns of a columnwise operand [columns, rows], and of its scales.
fn columns_of<'a>(rows: usize, data_t: &'a mut [u8], scales_t: &'a mut [u8]) -> Vec<Column<'a>> {
    if rows == 0 {
        return Vec::new();
    }
    let scales = scales_t.chunks_exact_mut(rows.div_ceil(BLOCK));
    data_t
        .chunks_exact_mut(rows)
        .zip(scales)
        .map(|(data, scales)| Column { data, scales })
        .collect()
}

/// A range of rows of a matrix, over all columns, and the destination of its operands.
struct RowsPart<'a, 'c> {
    src: Values<'a>,
    cols: usize,
    /// Begins at a stripe.
    row_range: (usize, usize),
    spec: MxSpec,
    /// Elements and scales of these rows.
    row_out: Option<(&'a mut [u8], &'a mut [u8])>,
    /// Elements and scales of these rows in each column.
    columns: Option<&'a mut [Column<'c>]>,
}

impl RowsPart<'_, '_> {
    /// Splits a narrow matrix by rows until parts are small. A wide matrix is split by columns.
    fn run(self, level: Level) -> QuantStats {
        let (start, end) = self.row_range;
        let is_small = (end - start) * self.cols <= ELEMENTS_PER_TASK || threads() == 1;
        let stripes = (end - start).div_ceil(STRIPE_ROWS);
        if is_small || stripes < 2 || self.cols > BAND_COLS {
            return self.in_bands(level);
        }
        let rows = stripes / 2 * STRIPE_ROWS;
        let middle = start + rows;
        let (above, below) = self
            .row_out
            .map(|(data, scales)| {
                let (data, data_below) = data.split_at_mut(rows * self.cols);
                let (scales, scales_below) = scales.split_at_mut(scales_len(rows, self.cols));
                ((data, scales), (data_below, scales_below))
            })
            .unzip();
        let (mut columns_above, mut columns_below) = self
            .columns
            .map(|columns| columns.iter_mut().map(|column| column.split(rows)).unzip())
            .map_or((None, None), |(above, below): (Vec<_>, Vec<_>)| (Some(above), Some(below)));
        let (src, cols, spec) = (self.src, self.cols, self.spec);
        let (above, below) = join(
            || {
                let columns = columns_above.as_deref_mut();
                let row_range = (start, middle);
                RowsPart { src, cols, row_range, spec, row_out: above, columns }.run(level)
            },
            || {
                let columns = columns_below.as_deref_mut();
                let row_range = (middle, end);
                RowsPart { src, cols, row_range, spec, row_out: below, columns }.run(level)
            },
        );
        above.merged(below)
    }

    /// Processes bands of columns in sequence, each stripe by stripe of rows. A stripe is split by
    /// columns: the columnwise operands of two halves are two halves of a list. The rowwise operand
    /// becomes as many slices as the stripe has rows, an array that fits on the stack.
    fn in_bands(self, level: Level) -> QuantStats {
        let RowsPart { src, cols, row_range: (start, end), spec, mut row_out, mut columns } = self;
        let mut stats = QuantStats::default();
        let band_cols = BAND_COLS * threads();
        let blocks = cols.div_ceil(BLOCK);
        // Without a rowwise operand the number of rows of a task is not limited.
        let task_rows = if row_out.is_some() { STRIPE_ROWS } else { (end - start).max(1) };
        for col in (0..if start == end { 0 } else { cols }).step_by(band_cols) {
            let col_end = (col + band_cols).min(cols);
            for row in (start..end).step_by(task_rows) {
                let row_end = (row + task_rows).min(end);
                let row_out = row_out.as_mut().map(|(data, scales)| {
                    let rows = row - start..row_end - start;
                    let data = &mut data[rows.start * cols..rows.end * cols];
                    let scales = &mut scales[rows.start * blocks..rows.end * blocks];
                    let mut data = data.chunks_exact_mut(cols);
                    let mut scales = scales.chunks_exact_mut(blocks);
                    RowOut {
                        data: core::array::from_fn(|_| match data.next() {
                            Some(row) => &mut row[col..col_end],
                            None => Default::default(),
                        }),
                        scales: core::array::from_fn(|_| match scales.next() {
                            Some(row) => &mut row[col / BLOCK..col_end.div_ceil(BLOCK)],
                            None => Default::default(),
                        }),
                    }
                });
                let task = TileTask {
                    src,
                    cols,
                    first_row: start,
                    row_range: (row, row_end),
                    col_range: (col, col_end),
                    spec,
                    row_out,
                    columns: columns.as_mut().map(|columns| &mut columns[col..col_end]),
                };
                stats.merge(&split_columns(level, task));
            }
        }
        stats
    }
}

/// Halves a task by columns until it is small, then runs the kernel.
fn split_columns(level: Level, task: TileTask<'_, '_>) -> QuantStats {
    let (start, end) = task.col_range;
    let tiles = (end - start).div_ceil(TILE_COLS);
    let elements = (task.row_range.1 - task.row_range.0) * (end - start);
    let small = end - start <= BAND_COLS && (elements <= ELEMENTS_PER_TASK || threads() == 1);
    if tiles == 1 || small {
        return level.run(task);
    }
    let middle_cols = tiles / 2 * TILE_COLS;
    let middle = start + middle_cols;
    let (row_left, row_right) = task.row_out.map(|out| split_row_out(out, middle_cols)).unzip();
    let (columns_left, columns_right) =
        task.columns.map(|columns| columns.split_at_mut(middle_cols)).unzip();
    let (src, cols, first_row, row_range, spec) =
        (task.src, task.cols, task.first_row, task.row_range, task.spec);
    let half = move |col_range, row_out, columns| TileTask {
        src,
        cols,
        first_row,
        row_range,
        col_range,
        spec,
        row_out,
        columns,
    };
    let left = half((start, middle), row_left, columns_left);
    let right = half((middle, end), row_right, columns_right);
    let (left, right) = join(|| split_columns(level, left), || split_columns(level, right));
    left.merged(right)
}

/// Splits each row of a stripe after `cols` columns, a multiple of the tile.
fn split_row_out(out: RowOut<'_>, cols: usize) -> (RowOut<'_>, RowOut<'_>) {
    let (data_left, data_right) = split_slices(out.data, cols);
    let (scales_left, scales_right) = split_slices(out.scales, cols / BLOCK);
    (
        RowOut { data: data_left, scales: scales_left },
        RowOut { data: data_right, scales: scales_right },
    )
}

/// Splits every slice at `at`; empty slices, for missing rows, stay empty.
fn split_slices(slices: RowSlices<'_>, at: usize) -> (RowSlices<'_>, RowSlices<'_>) {
    let mut left: RowSlices<'_> = core::array::from_fn(|_| Default::default());
    let mut right: RowSlices<'_> = core::array::from_fn(|_| Default::default());
    for ((slice, left), right) in slices.into_iter().zip(&mut left).zip(&mut right) {
        (*left, *right) = slice.split_at_mut(at.min(slice.len()));
    }
    (left, right)
}
