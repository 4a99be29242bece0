//! Tiles of 128 columns, for kernels that need several rows at a time: blocks along columns, square
//! blocks, and both operands in one pass.
//!
//! A stripe is 128 rows. Its tiles are processed from left to right, so that the source is read in
//! 128 long streams and the transposed operand is written in whole cache lines. Within a tile, `G`
//! rows at a time (32 or 128, the granularity) pass through these steps, all in L1 or L2 cache:
//!
//! 1. copy to `values` as f32, padded with zeros at ragged edges; amax of each column;
//! 2. scales, for the columns, the rows or the squares;
//! 3. codes of the rowwise operand, written directly to the destination;
//! 4. codes of the columnwise operand, transposed 8 x 8 bytes at a time in registers into
//!    `transposed`, which holds the whole stripe and is copied out at its end.

use super::lanes::{
    Counters, E2m1, E2m3, E3m2, E4m3, E5m2, Element, LANES, block_amax, encode_any, encode_lanes,
    largest_of_lanes, survey_any,
};
use super::min_error::{refine_columns, refine_row};
use super::scales::{any_scales, finite_scales};
use super::transpose::{Words, transpose_8_rows};
use crate::quantize::MxSpec;
use crate::simd::Kernel;
use crate::source::Values;
use crate::{BLOCK, BlockShape, ElementFormat, Granularity, QuantStats, ScaleRule, Source};

/// Columns of a tile.
pub(super) const TILE_COLS: usize = 128;
/// Rows of a stripe.
pub(super) const STRIPE_ROWS: usize = 128;
/// Blocks of 32 along either side of a tile.
const TILE_BLOCKS: usize = TILE_COLS / BLOCK;

/// One mutable slice per row of a stripe, empty for missing rows.
pub(super) type RowSlices<'a> = [&'a mut [u8]; STRIPE_ROWS];

/// Destination of the rowwise operand of one stripe: for each row, the columns of the task.
pub(super) struct RowOut<'a> {
    pub(super) data: RowSlices<'a>,
    pub(super) scales: RowSlices<'a>,
}

/// One column of the columnwise operand, from [`TileTask::first_row`] on.
pub(super) struct Column<'a> {
    pub(super) data: &'a mut [u8],
    /// One per 32 rows.
    pub(super) scales: &'a mut [u8],
}

impl Column<'_> {
    /// The first `rows` rows, a multiple of the block, and the rest.
    pub(super) fn split(&mut self, rows: usize) -> (Column<'_>, Column<'_>) {
        let (data, data_below) = self.data.split_at_mut(rows);
        let (scales, scales_below) = self.scales.split_at_mut(rows / BLOCK);
        (Column { data, scales }, Column { data: data_below, scales: scales_below })
    }
}

/// A range of rows and columns of a matrix, and the destination of its operands.
pub(super) struct TileTask<'a, 'c> {
    /// The whole matrix, row-major.
    pub(super) src: Values<'a>,
    pub(super) cols: usize,
    /// The row of the first element of each of `columns`; the first of a stripe.
    pub(super) first_row: usize,
    /// Rows of the task, from the first of a stripe on. With a rowwise operand, at most one stripe.
    pub(super) row_range: (usize, usize),
    /// Columns of the task, from the first of a tile on.
    pub(super) col_range: (usize, usize),
    pub(super) spec: MxSpec,
    pub(super) row_out: Option<RowOut<'a>>,
    /// One per column of the task.
    pub(super) columns: Option<&'a mut [Column<'c>]>,
}

/// Scratch of one task, on the stack.
struct Scratch<const G: usize> {
    values: [[f32; TILE_COLS]; G],
    codes: [Words; G],
    transposed: [Words; TILE_COLS],
    /// Scales of the stripe for each column.
    scales_t: [[u8; TILE_BLOCKS]; TILE_COLS],
    row_amax: [[u32; TILE_BLOCKS]; G],
    row_scales: [[u8; TILE_BLOCKS]; G],
    row_reciprocals: [[f32; TILE_BLOCKS]; G],
}

/// Scales of a group of rows, with a lane per column.
struct ColumnScales {
    codes: [u8; TILE_COLS],
    reciprocals: [f32; TILE_COLS],
}

impl Kernel for TileTask<'_, '_> {
    type Output = QuantStats;

    #[inline(always)]
    fn call(self) -> QuantStats {
        // E4M3 with RCEIL, the usual format of training, is compiled without a comparison per
        // element. Other formats, for which the cost does not matter, are compiled only with the
        // comparison.
        match (self.spec.element, self.spec.scale_rule) {
            (ElementFormat::E4M3, ScaleRule::Rceil) => self.with_group::<E4m3, false>(),
            (ElementFormat::E4M3, _) => self.with_group::<E4m3, true>(),
            (ElementFormat::E5M2, _) => self.with_group::<E5m2, true>(),
            (ElementFormat::E3M2, _) => self.with_group::<E3m2, true>(),
            (ElementFormat::E2M3, _) => self.with_group::<E2m3, true>(),
            (ElementFormat::E2M1, _) => self.with_group::<E2m1, true>(),
        }
    }
}

impl TileTask<'_, '_> {
    #[inline(always)]
    fn with_group<E: Element, const CLIP: bool>(self) -> QuantStats {
        match self.spec.granularity {
            Granularity::G32 => self.kernel::<E, CLIP, 32>(),
            Granularity::G128 => self.kernel::<E, CLIP, 128>(),
        }
    }

    #[inline(always)]
    fn kernel<E: Element, const CLIP: bool, const G: usize>(mut self) -> QuantStats {
        let mut scratch = Scratch::<G> {
            values: [[0.0; TILE_COLS]; G],
            codes: [Words::ZERO; G],
            transposed: [Words::ZERO; TILE_COLS],
            scales_t: [[0; TILE_BLOCKS]; TILE_COLS],
            row_amax: [[0; TILE_BLOCKS]; G],
            row_scales: [[0; TILE_BLOCKS]; G],
            row_reciprocals: [[0.0; TILE_BLOCKS]; G],
        };
        let mut counters = Counters::new();
        let (row_start, row_end) = self.row_range;
        let (col_start, col_end) = self.col_range;
        for stripe in (row_start..row_end).step_by(STRIPE_ROWS) {
            let stripe_rows = STRIPE_ROWS.min(row_end - stripe);
            for col in (col_start..col_end).step_by(TILE_COLS) {
                let width = TILE_COLS.min(col_end - col);
                for group in (0..stripe_rows).step_by(G) {
                    let height = G.min(stripe_rows - group);
                    let at = Group { row: stripe + group, in_stripe: group, height, col, width };
                    self.group::<E, CLIP, G>(at, &mut scratch, &mut counters);
                }
                self.store_columns(stripe, stripe_rows, col, width, &scratch);
            }
            counters.flush();
        }
        let mut totals = counters.totals;
        if self.spec.scale_rule == ScaleRule::Rceil {
            // Magnitudes that exceed the limit by one part in 2^23, see `e8m0`, have not saturated.
            totals.saturations = 0;
        }
        if self.spec.block == BlockShape::Square && self.operands() == 2 {
            // Square blocks are encoded once for both operands, so counts are doubled.
            totals.underflows *= 2;
            totals.saturations *= 2;
            totals.scale_clamps *= 2;
            totals.nonfinite *= 2;
        }
        totals
    }

    /// Number of operands: 1 or 2.
    fn operands(&self) -> u64 {
        u64::from(self.row_out.is_some()) + u64::from(self.columns.is_some())
    }

    /// Steps 1 to 4 for `G` rows of a tile.
    #[inline(always)]
    fn group<E: Element, const CLIP: bool, const G: usize>(
        &mut self,
        at: Group,
        scratch: &mut Scratch<G>,
        counters: &mut Counters,
    ) {
        let square = self.spec.block == BlockShape::Square;
        let rule = self.spec.scale_rule;
        let (cols, values) = (self.cols, &mut scratch.values);
        // Dispatch here and not around the kernel, which would be compiled twice.
        let mut amax = match self.src {
            Values::F32(src) => load(src, cols, at, values),
            Values::Bf16(src) => load(src, cols, at, values),
        };
        let largest = amax.iter().fold(0, |a: u32, &b| a.max(b));
        let finite = largest <= largest_of_lanes::<E, CLIP>();
        if finite {
            counters.totals.amax = counters.totals.amax.max(f32::from_bits(largest));
        } else {
            let mut survey = QuantStats::default();
            survey_any(scratch.values.as_flattened(), &mut survey);
            survey.nonfinite *= if square { 1 } else { self.operands() };
            counters.totals.merge(&survey);
        }

        if !square && let Some(out) = &mut self.row_out {
            scales_of_rows::<E, G>(scratch, finite, rule, &mut counters.totals);
            if CLIP && rule == ScaleRule::MinError {
                let scales = scratch.row_scales.iter_mut().zip(&mut scratch.row_reciprocals);
                for (row, (codes, factors)) in scratch.values.iter().zip(scales) {
                    let blocks = row.as_chunks::<BLOCK>().0;
                    refine_row::<f32, E>(blocks, G / BLOCK, codes, factors);
                }
            }
            encode_rows::<E, CLIP, G>(at, finite, scratch, out, self.col_range.0, counters);
        }
        if square || self.columns.is_some() {
            if square {
                for group in amax.chunks_exact_mut(G) {
                    group.fill(group.iter().fold(0, |a, &b| a.max(b)));
                }
            }
            let per_scale = if square { G } else { 1 };
            let totals = &mut counters.totals;
            let mut scales = scales_of_columns::<E>(&amax, finite, rule, per_scale, totals);
            if CLIP && rule == ScaleRule::MinError {
                let (codes, factors) = (&mut scales.codes, &mut scales.reciprocals);
                refine_columns::<E, G>(&scratch.values, square, codes, factors);
            }
            encode_columns::<E, CLIP, G>(finite, &scales.reciprocals, scratch, counters);
            if square && let Some(out) = &mut self.row_out {
                store_square_rows(at, &scratch.codes, &scales.codes, out, self.col_range.0);
            }
            if self.columns.is_some() {
                transpose_group(at, scratch);
                let first = at.in_stripe / BLOCK;
                for (column, &code) in scratch.scales_t.iter_mut().zip(&scales.codes) {
                    column[first..first + G / BLOCK].fill(code);
                }
            }
        }
    }

    /// Copies the transposed codes of one tile, a whole stripe high, to the columnwise operand.
    #[inline(always)]
    fn store_columns<const G: usize>(
        &mut self,
        stripe: usize,
        stripe_rows: usize,
        col: usize,
        width: usize,
        scratch: &Scratch<G>,
    ) {
        let Some(columns) = &mut self.columns else { return };
        let stripe_blocks = stripe_rows.div_ceil(BLOCK);
        let start = stripe - self.first_row;
        let first = col - self.col_range.0;
        for (i, column) in columns[first..first + width].iter_mut().enumerate() {
            let codes = scratch.transposed[i].as_bytes();
            let data = &mut column.data[start..start + stripe_rows];
            if let Ok(data) = <&mut [u8; STRIPE_ROWS]>::try_from(&mut *data) {
                *data = *codes;
            } else {
                data.copy_from_slice(&codes[..stripe_rows]);
            }
            column.scales[start / BLOCK..start / BLOCK + stripe_blocks]
                .copy_from_slice(&scratch.scales_t[i][..stripe_blocks]);
        }
    }
}

/// Up to `G` rows of one tile.
#[derive(Clone, Copy)]
struct Group {
    /// First row in the matrix.
    row: usize,
    /// First row in the stripe.
    in_stripe: usize,
    /// Rows within the matrix.
    height: usize,
    /// First column in the matrix.
    col: usize,
    /// Columns within the matrix.
    width: usize,
}

/// Step 1. Returns the amax of each column, as bits; the order is finite, infinity, NaN.
#[inline(always)]
fn load<S: Source, const G: usize>(
    src: &[S],
    cols: usize,
    at: Group,
    values: &mut [[f32; TILE_COLS]; G],
) -> [u32; TILE_COLS] {
    let mut amax = [0; TILE_COLS];
    for (i, values) in values.iter_mut().enumerate() {
        if i >= at.height {
            *values = [0.0; TILE_COLS];
            continue;
        }
        let start = (at.row + i) * cols + at.col;
        let row = &src[start..start + at.width];
        if let Ok(row) = <&[S; TILE_COLS]>::try_from(row) {
            for j in 0..TILE_COLS {
                values[j] = row[j].to_f32();
                amax[j] = amax[j].max(values[j].to_bits() & 0x7FFF_FFFF);
            }
        } else {
            *values = [0.0; TILE_COLS];
            for ((value, amax), x) in values.iter_mut().zip(&mut amax).zip(row) {
                *value = x.to_f32();
                *amax = (*amax).max(value.to_bits() & 0x7FFF_FFFF);
            }
        }
    }
    amax
}

/// Step 2 for columns and squares: one scale per lane; `per_scale` neighbouring lanes share one.
#[inline(always)]
fn scales_of_columns<E: Element>(
    amax: &[u32; TILE_COLS],
    finite: bool,
    rule: ScaleRule,
    per_scale: usize,
    totals: &mut QuantStats,
) -> ColumnScales {
    let mut scales = ColumnScales { codes: [0; TILE_COLS], reciprocals: [0.0; TILE_COLS] };
    let (codes, reciprocals) = (&mut scales.codes, &mut scales.reciprocals);
    let clamps = if finite {
        finite_scales::<E>(amax, rule, codes, reciprocals)
    } else {
        any_scales::<E>(amax, rule, codes, reciprocals)
    };
    // Lanes beyond the matrix have an amax of zero, or the amax of their square, which counts once.
    totals.scale_clamps += clamps / per_scale as u64;
    scales
}

/// Step 2 for rows: amax and scale of each row, 32 or `G` = 128 columns at a time.
#[inline(always)]
fn scales_of_rows<E: Element, const G: usize>(
    scratch: &mut Scratch<G>,
    finite: bool,
    rule: ScaleRule,
    totals: &mut QuantStats,
) {
    for (values, amax) in scratch.values.iter().zip(&mut scratch.row_amax) {
        for (block, amax) in values.as_chunks::<BLOCK>().0.iter().zip(amax.iter_mut()) {
            *amax = block_amax(block);
        }
        if G == 128 {
            *amax = [amax[0].max(amax[1]).max(amax[2].max(amax[3])); TILE_BLOCKS];
        }
    }
    let amax = scratch.row_amax.as_flattened();
    let codes = scratch.row_scales.as_flattened_mut();
    let reciprocals = scratch.row_reciprocals.as_flattened_mut();
    let clamps = if finite {
        finite_scales::<E>(amax, rule, codes, reciprocals)
    } else {
        any_scales::<E>(amax, rule, codes, reciprocals)
    };
    totals.scale_clamps += clamps / (G / BLOCK) as u64;
}

/// Step 3 for blocks along rows.
#[inline(always)]
fn encode_rows<E: Element, const CLIP: bool, const G: usize>(
    at: Group,
    finite: bool,
    scratch: &mut Scratch<G>,
    out: &mut RowOut<'_>,
    task_col: usize,
    counters: &mut Counters,
) {
    let col = at.col - task_col;
    let width_blocks = at.width.div_ceil(BLOCK);
    for i in 0..at.height {
        let row = at.in_stripe + i;
        let scales = &mut out.scales[row][col / BLOCK..col / BLOCK + width_blocks];
        scales.copy_from_slice(&scratch.row_scales[i][..width_blocks]);

        let values = scratch.values[i].as_chunks::<BLOCK>().0;
        let reciprocals = &scratch.row_reciprocals[i];
        let data = &mut out.data[row][col..col + at.width];
        // Writes a whole tile directly: a copy of bytes just written would wait for them to leave
        // the store buffer.
        if let Ok(data) = <&mut [u8; TILE_COLS]>::try_from(&mut *data) {
            encode_row::<E, CLIP>(values, finite, reciprocals, data, counters);
        } else {
            let mut codes = [0; TILE_COLS];
            encode_row::<E, CLIP>(values, finite, reciprocals, &mut codes, counters);
            data.copy_from_slice(&codes[..at.width]);
        }
    }
}

#[inline(always)]
fn encode_row<E: Element, const CLIP: bool>(
    values: &[[f32; BLOCK]],
    finite: bool,
    reciprocals: &[f32; TILE_BLOCKS],
    codes: &mut [u8; TILE_COLS],
    counters: &mut Counters,
) {
    let blocks = values.iter().zip(codes.as_chunks_mut::<BLOCK>().0).zip(reciprocals);
    for ((values, codes), &reciprocal) in blocks {
        let reciprocals = [reciprocal; BLOCK];
        if finite {
            encode_lanes::<E, CLIP>(values, &reciprocals, codes, counters);
        } else {
            encode_any::<E>(values, &reciprocals, CLIP, codes, &mut counters.totals);
        }
    }
}

/// Codes of all rows of a group, each column with its own factor, into `scratch.codes`.
#[inline(always)]
fn encode_columns<E: Element, const CLIP: bool, const G: usize>(
    finite: bool,
    reciprocals: &[f32; TILE_COLS],
    scratch: &mut Scratch<G>,
    counters: &mut Counters,
) {
    if !finite {
        for (values, codes) in scratch.values.iter().zip(&mut scratch.codes) {
            let codes = codes.as_bytes_mut();
            encode_any::<E>(values, reciprocals, CLIP, codes, &mut counters.totals);
        }
        return;
    }
    for block in 0..TILE_BLOCKS {
        let factors = &reciprocals.as_chunks::<LANES>().0[block];
        for (values, codes) in scratch.values.iter().zip(&mut scratch.codes) {
            let values = &values.as_chunks::<LANES>().0[block];
            let codes = &mut codes.as_bytes_mut().as_chunks_mut::<LANES>().0[block];
            encode_lanes::<E, CLIP>(values, factors, codes, counters);
        }
    }
}

/// Step 3 for square blocks: the codes are those of the columnwise operand.
#[inline(always)]
fn store_square_rows(
    at: Group,
    codes: &[Words],
    column_scales: &[u8; TILE_COLS],
    out: &mut RowOut<'_>,
    task_col: usize,
) {
    let col = at.col - task_col;
    let width_blocks = at.width.div_ceil(BLOCK);
    let scales: [u8; TILE_BLOCKS] = core::array::from_fn(|block| column_scales[block * BLOCK]);
    for (i, codes) in codes.iter().take(at.height).enumerate() {
        let row = at.in_stripe + i;
        out.data[row][col..col + at.width].copy_from_slice(&codes.as_bytes()[..at.width]);
        out.scales[row][col / BLOCK..col / BLOCK + width_blocks]
            .copy_from_slice(&scales[..width_blocks]);
    }
}

/// Step 4.
#[inline(always)]
fn transpose_group<const G: usize>(at: Group, scratch: &mut Scratch<G>) {
    for (i, rows) in scratch.codes.as_chunks::<8>().0.iter().enumerate() {
        transpose_8_rows(rows, &mut scratch.transposed, at.in_stripe / 8 + i);
    }
}
