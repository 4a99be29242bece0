//! Blocks of one row, or of sixteen rows together, over contiguous memory.

use super::kernel::{Constants, Out, SEGMENT, segment};
use super::{BLOCK, Nvfp4Spec};
use crate::quantize::lanes::Counters;
use crate::simd::{Kernel, Level};
use crate::threads::{ELEMENTS_PER_TASK, join};
use crate::{BlockShape, QuantStats, Source};

/// Whole rows of a matrix, and the destination of its operand.
pub(super) struct RowsTask<'a, S> {
    pub(super) src: &'a [S],
    pub(super) cols: usize,
    /// Row of the matrix at which the slices start.
    pub(super) first_row: usize,
    pub(super) encode_scale: f32,
    pub(super) spec: Nvfp4Spec,
    pub(super) bytes: &'a mut [u8],
    pub(super) scales: &'a mut [u8],
}

impl<S: Source> RowsTask<'_, S> {
    /// Halves the rows until tasks are small, then runs the kernel.
    pub(super) fn run(self, level: Level) -> QuantStats {
        let Self { src, cols, first_row, encode_scale, spec, bytes, scales } = self;
        let rows = src.len() / cols;
        let half = (rows / 2).next_multiple_of(height(spec));
        if half == 0 || half >= rows || src.len() <= ELEMENTS_PER_TASK {
            return level.run(RowsTask { src, cols, first_row, encode_scale, spec, bytes, scales });
        }
        let (src, src_rest) = src.split_at(half * cols);
        let (bytes, bytes_rest) = bytes.split_at_mut(half * cols.div_ceil(2));
        let (scales, scales_rest) = scales.split_at_mut(half * cols.div_ceil(BLOCK));
        let (left, right) = join(
            || RowsTask { src, cols, first_row, encode_scale, spec, bytes, scales }.run(level),
            || {
                let first_row = first_row + half;
                let (src, bytes, scales) = (src_rest, bytes_rest, scales_rest);
                RowsTask { src, cols, first_row, encode_scale, spec, bytes, scales }.run(level)
            },
        );
        left.merged(right)
    }

    #[inline(always)]
    fn kernel<const STOCHASTIC: bool>(self) -> QuantStats {
        let Self { src, cols, first_row, encode_scale, spec, bytes, scales } = self;
        let constants = Constants::new(encode_scale, spec, cols);
        let mut out = Out { bytes, scales, first_row };
        let mut counters = Counters::new();
        let (rows, height) = (src.len() / cols, height(spec));
        for row in (0..rows).step_by(height) {
            let together = height.min(rows - row);
            for col in (0..cols).step_by(SEGMENT) {
                let len = SEGMENT.min(cols - col);
                let mut slices: [&[S]; BLOCK] = [&[]; BLOCK];
                for (i, slice) in slices[..together].iter_mut().enumerate() {
                    *slice = &src[(row + i) * cols + col..][..len];
                }
                let slices = &slices[..together];
                if let Some(transform) = spec.hadamard {
                    let mut segment_of_row = [0.0; SEGMENT];
                    let values = &mut segment_of_row[..len];
                    values.iter_mut().zip(slices[0]).for_each(|(to, x)| *to = x.to_f32());
                    let groups = values.as_chunks_mut().0;
                    groups.iter_mut().for_each(|group| transform.forward_bf16(group));
                    let slices: &[&[f32]] = &[values];
                    segment::<_, STOCHASTIC>(slices, row, col, &constants, &mut out, &mut counters);
                    continue;
                }
                segment::<S, STOCHASTIC>(slices, row, col, &constants, &mut out, &mut counters);
            }
        }
        counters.flush();
        counters.totals
    }
}

/// Number of rows with common scales.
pub(super) fn height(spec: Nvfp4Spec) -> usize {
    match spec.block {
        BlockShape::Row => 1,
        BlockShape::Square => BLOCK,
    }
}

impl<S: Source> Kernel for RowsTask<'_, S> {
    type Output = QuantStats;

    #[inline(always)]
    fn call(self) -> QuantStats {
        if self.spec.stochastic.is_some() { self.kernel::<true>() } else { self.kernel::<false>() }
    }
}
