//! Blocks along columns: a strip of the source is transposed on the stack and quantized as rows.

use super::kernel::{Constants, Out, SEGMENT, segment};
use super::rows::height;
use super::{BLOCK, Nvfp4Spec};
use crate::quantize::lanes::Counters;
use crate::simd::{Kernel, Level};
use crate::source::Values;
use crate::threads::{ELEMENTS_PER_TASK, join};
use crate::{QuantStats, Source};

/// Columns that are transposed together: a cache line of f32.
const STRIP_COLS: usize = BLOCK;

/// A range of columns of a matrix, and their destination.
pub(super) struct ColumnsTask<'a> {
    /// The whole matrix, [rows, cols].
    pub(super) src: Values<'a>,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Columns to process, from a multiple of [`STRIP_COLS`] on.
    pub(super) col_range: (usize, usize),
    /// Rows to process, from a multiple of [`BLOCK`] on.
    pub(super) row_range: (usize, usize),
    pub(super) encode_scale: f32,
    pub(super) spec: Nvfp4Spec,
    /// Rows of the operand for these columns.
    pub(super) bytes_t: &'a mut [u8],
    pub(super) scales_t: &'a mut [u8],
}

impl ColumnsTask<'_> {
    /// Halves the columns until tasks are small, then runs the kernel.
    pub(super) fn run(self, level: Level) -> QuantStats {
        let (start, end) = self.col_range;
        let left_cols = ((end - start) / 2).next_multiple_of(STRIP_COLS);
        let elements = (end - start) * (self.row_range.1 - self.row_range.0);
        if left_cols == 0 || left_cols >= end - start || elements <= ELEMENTS_PER_TASK {
            return level.run(self);
        }
        let Self { src, rows, cols, row_range, encode_scale, spec, bytes_t, scales_t, .. } = self;
        let middle = start + left_cols;
        let (bytes_left, bytes_right) = bytes_t.split_at_mut(left_cols * rows.div_ceil(2));
        let (scales_left, scales_right) = scales_t.split_at_mut(left_cols * rows.div_ceil(BLOCK));
        let half = |col_range, bytes_t, scales_t| ColumnsTask {
            src,
            rows,
            cols,
            col_range,
            row_range,
            encode_scale,
            spec,
            bytes_t,
            scales_t,
        };
        let left = half((start, middle), bytes_left, scales_left);
        let right = half((middle, end), bytes_right, scales_right);
        let (left, right) = join(|| left.run(level), || right.run(level));
        left.merged(right)
    }

    #[inline(always)]
    fn kernel<const STOCHASTIC: bool>(self) -> QuantStats {
        let (start, end) = self.col_range;
        let constants = Constants::new(self.encode_scale, self.spec, self.rows);
        let mut out = Out { bytes: self.bytes_t, scales: self.scales_t, first_row: start };
        let mut counters = Counters::new();
        let mut strip = [[0.0; SEGMENT]; STRIP_COLS];
        for col in (start..end).step_by(STRIP_COLS) {
            let strip_cols = STRIP_COLS.min(end - col);
            for row in (self.row_range.0..self.row_range.1).step_by(SEGMENT) {
                let len = SEGMENT.min(self.row_range.1 - row);
                for r in 0..len {
                    let start = (row + r) * self.cols + col;
                    let line = start..start + strip_cols;
                    match self.src {
                        Values::F32(src) => copy_line(&src[line], &mut strip, r),
                        Values::Bf16(src) => copy_line(&src[line], &mut strip, r),
                    }
                }
                if let Some(transform) = self.spec.hadamard {
                    for column in &mut strip[..strip_cols] {
                        let groups = column[..len].as_chunks_mut().0;
                        groups.iter_mut().for_each(|group| transform.forward_bf16(group));
                    }
                }
                let mut slices: [&[f32]; STRIP_COLS] = [&[]; STRIP_COLS];
                for (slice, column) in slices.iter_mut().zip(&strip) {
                    *slice = &column[..len];
                }
                for (i, slices) in slices[..strip_cols].chunks(height(self.spec)).enumerate() {
                    let copy_row = col - start + i * height(self.spec);
                    segment::<f32, STOCHASTIC>(
                        slices,
                        copy_row,
                        row,
                        &constants,
                        &mut out,
                        &mut counters,
                    );
                }
            }
        }
        counters.flush();
        counters.totals
    }
}

/// Copies a line of the source to position `r` of each column.
#[inline(always)]
fn copy_line<S: Source>(line: &[S], strip: &mut [[f32; SEGMENT]; STRIP_COLS], r: usize) {
    for (column, x) in strip.iter_mut().zip(line) {
        column[r] = x.to_f32();
    }
}

impl Kernel for ColumnsTask<'_> {
    type Output = QuantStats;

    #[inline(always)]
    fn call(self) -> QuantStats {
        if self.spec.stochastic.is_some() { self.kernel::<true>() } else { self.kernel::<false>() }
    }
}
