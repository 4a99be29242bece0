//! Block quantization along rows, along columns, or both in one pass over the source.
//!
//! Every operand is quantized from the high-precision source, never from another operand:
//! quantizing twice loses bits. Elements are rounded to nearest even and saturate. The bytes and
//! the counters do not depend on the number of threads or on the vector instructions of the
//! machine.
//!
//! # Values that are not finite
//!
//! A group of elements with one exponent that holds a NaN gets the scale 0xFF, which makes all of
//! it NaN; the elements are NaN too. A group with an infinity and no NaN gets the scale 0xFE
//! (2^127), with the infinity as the largest finite element, so that it dequantizes to infinity;
//! its finite elements all but vanish. Each such element counts in [`QuantStats::nonfinite`].

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
use tile::{ColumnOut, RowOut, RowSlices, STRIPE_ROWS, TILE_COLS, TileTask};

/// Columns that one thread works off from the first row to the last. Each column of the transposed
/// operand lies on memory pages of its own; of 1024 the processor remembers where they are.
const BAND_COLS: usize = 1024;

const _: () = assert!(BAND_COLS.is_multiple_of(TILE_COLS));

/// A [`QuantFormat`] as the kernels of MX formats take it.
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
/// their [`crate::e8m0`] scales, row-major [rows, ceil(cols / 32)]. A row that is not a multiple of
/// 32 long ends with a shorter block. Large matrices are split over the threads of the current
/// rayon pool. Does not allocate; square blocks take some 100 KiB of stack.
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
/// [`QuantizeError::Length`] when a slice does not fit the shape, [`QuantizeError::Format`] for
/// what is no MX format; nothing is written then.
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
/// [`QuantizeError::Length`] when a slice does not fit the shape, [`QuantizeError::Format`] for
/// what is no MX format; nothing is written then.
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

/// Both operands in one pass over the source: (data, scales) as [`quantize_rows`] writes them and
/// (data_t, scales_t) as [`quantize_columns`] does, byte for byte. The statistics are those of the
/// two calls merged. With [`BlockShape::Square`] both operands hold the same values.
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
/// [`QuantizeError::Length`] when a slice does not fit the shape, [`QuantizeError::Format`] for
/// what is no MX format; nothing is written then.
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
    let (spec, out_t) = (format.mx_spec()?, ColumnOut { data_t, scales_t });
    let (values, out) = (S::values(src), (data, scales));
    let stats = stripes(Level::Native, values, rows, cols, spec, out, Some(out_t));
    Ok(QuantStats { elements: 2 * src.len() as u64, ..stats })
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
        stripes(level, src, rows, cols, spec, (data, scales), None)
    } else {
        // Where groups end with the row, the matrix is one long row to the kernel.
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
    let stats = if src.is_empty() {
        QuantStats::default()
    } else {
        let out = ColumnOut { data_t, scales_t };
        let task = TileTask {
            src,
            rows,
            cols,
            row_range: (0, rows),
            col_range: (0, cols),
            spec,
            row_out: None,
            column_out: Some(out),
        };
        split_columns(level, task)
    };
    QuantStats { elements: src.len() as u64, ..stats }
}

/// The rowwise operand, and the columnwise one if asked for. Bands of columns are worked off one
/// after the other, each stripe by stripe of rows. A stripe is split by columns: the columnwise
/// operands of two halves are two halves of a slice, and the rowwise operand falls into as many
/// slices as the stripe has rows, an array of which fits on the stack.
fn stripes(
    level: Level,
    src: Values<'_>,
    rows: usize,
    cols: usize,
    spec: MxSpec,
    (data, scales): (&mut [u8], &mut [u8]),
    mut column_out: Option<ColumnOut<'_>>,
) -> QuantStats {
    let mut stats = QuantStats::default();
    let band_cols = BAND_COLS * threads();
    let blocks = cols.div_ceil(BLOCK);
    for col in (0..if rows == 0 { 0 } else { cols }).step_by(band_cols) {
        let col_end = (col + band_cols).min(cols);
        for row in (0..rows).step_by(STRIPE_ROWS) {
            let row_end = (row + STRIPE_ROWS).min(rows);
            let data = &mut data[row * cols..row_end * cols];
            let scales = &mut scales[row * blocks..row_end * blocks];
            let mut data = data.chunks_exact_mut(cols);
            let mut scales = scales.chunks_exact_mut(blocks);
            let row_out = RowOut {
                data: core::array::from_fn(|_| match data.next() {
                    Some(row) => &mut row[col..col_end],
                    None => Default::default(),
                }),
                scales: core::array::from_fn(|_| match scales.next() {
                    Some(row) => &mut row[col / BLOCK..col_end.div_ceil(BLOCK)],
                    None => Default::default(),
                }),
            };
            let column_out = column_out.as_mut().map(|out| {
                let row_blocks = rows.div_ceil(BLOCK);
                ColumnOut {
                    data_t: &mut out.data_t[col * rows..col_end * rows],
                    scales_t: &mut out.scales_t[col * row_blocks..col_end * row_blocks],
                }
            });
            let task = TileTask {
                src,
                rows,
                cols,
                row_range: (row, row_end),
                col_range: (col, col_end),
                spec,
                row_out: Some(row_out),
                column_out,
            };
            stats.merge(&split_columns(level, task));
        }
    }
    stats
}

/// Halves a task by columns until it is small, then runs the kernel.
fn split_columns(level: Level, task: TileTask<'_>) -> QuantStats {
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
    let (column_left, column_right) = task
        .column_out
        .map(|out| {
            let blocks = task.rows.div_ceil(BLOCK);
            let (data_left, data_right) = out.data_t.split_at_mut(middle_cols * task.rows);
            let (scales_left, scales_right) = out.scales_t.split_at_mut(middle_cols * blocks);
            (
                ColumnOut { data_t: data_left, scales_t: scales_left },
                ColumnOut { data_t: data_right, scales_t: scales_right },
            )
        })
        .unzip();
    let (src, rows, cols, row_range, spec) =
        (task.src, task.rows, task.cols, task.row_range, task.spec);
    let half = move |col_range, row_out, column_out| TileTask {
        src,
        rows,
        cols,
        row_range,
        col_range,
        spec,
        row_out,
        column_out,
    };
    let left = half((start, middle), row_left, column_left);
    let right = half((middle, end), row_right, column_right);
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

/// Splits every slice at `at`; empty ones, which stand for rows that do not exist, stay empty.
fn split_slices(slices: RowSlices<'_>, at: usize) -> (RowSlices<'_>, RowSlices<'_>) {
    let mut left: RowSlices<'_> = core::array::from_fn(|_| Default::default());
    let mut right: RowSlices<'_> = core::array::from_fn(|_| Default::default());
    for ((slice, left), right) in slices.into_iter().zip(&mut left).zip(&mut right) {
        (*left, *right) = slice.split_at_mut(at.min(slice.len()));
    }
    (left, right)
}
