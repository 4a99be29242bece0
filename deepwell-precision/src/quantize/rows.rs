//! Blocks of one row: amax, scale and codes in one sweep over contiguous memory.

use super::lanes::{
    Counters, E2m1, E2m3, E3m2, E4m3, E5m2, Element, LANES, block_amax, encode_any, encode_block,
    largest_of_lanes, survey_any,
};
use super::min_error::refine_row;
use super::scales::any_scales;
use crate::e8m0::finite_scale;
use crate::quantize::MxSpec;
use crate::simd::{Kernel, Level};
use crate::threads::{ELEMENTS_PER_TASK, join};
use crate::{BLOCK, ElementFormat, Granularity, QuantStats, ScaleRule, Source};

/// Blocks whose scales are computed together, in one AVX-512 register.
const SEGMENT_BLOCKS: usize = 16;
const SEGMENT: usize = SEGMENT_BLOCKS * BLOCK;

const _: () = assert!(LANES == BLOCK);

/// Whole rows of a matrix, and the destination of its operand.
pub(super) struct RowsTask<'a, S> {
    pub(super) src: &'a [S],
    /// Elements per row. Rows that end at a group of blocks may be joined into one row.
    pub(super) cols: usize,
    pub(super) spec: MxSpec,
    pub(super) data: &'a mut [u8],
    pub(super) scales: &'a mut [u8],
}

impl<S: Source> RowsTask<'_, S> {
    /// Splits until tasks are small, then runs the kernel.
    pub(super) fn run(self, level: Level) -> QuantStats {
        if self.src.len() <= ELEMENTS_PER_TASK {
            return level.run(self);
        }
        let group = self.spec.granularity.elements();
        let rows = self.src.len() / self.cols;
        // Elements and scales of the first half: whole rows, or whole groups of a single row.
        let (elements, blocks) = if rows > 1 {
            (rows / 2 * self.cols, rows / 2 * self.cols.div_ceil(BLOCK))
        } else {
            let elements = (self.cols / 2).next_multiple_of(group);
            (elements, elements / BLOCK)
        };
        let (src, src_rest) = self.src.split_at(elements);
        let (data, data_rest) = self.data.split_at_mut(elements);
        let (scales, scales_rest) = self.scales.split_at_mut(blocks);
        let (cols, cols_rest) =
            if rows > 1 { (self.cols, self.cols) } else { (elements, self.cols - elements) };
        let spec = self.spec;
        let (mut stats, rest) = join(
            || RowsTask { src, cols, spec, data, scales }.run(level),
            || {
                let (src, data, scales) = (src_rest, data_rest, scales_rest);
                RowsTask { src, cols: cols_rest, spec, data, scales }.run(level)
            },
        );
        stats.merge(&rest);
        stats
    }

    #[inline(always)]
    fn kernel<E: Element, const CLIP: bool>(self) -> QuantStats {
        let mut counters = Counters::new();
        let (cols, spec) = (self.cols, self.spec);
        let blocks = cols.div_ceil(BLOCK);
        let rows = self
            .src
            .chunks_exact(cols)
            .zip(self.data.chunks_exact_mut(cols))
            .zip(self.scales.chunks_exact_mut(blocks));
        for ((src, data), scales) in rows {
            let segments = src
                .chunks(SEGMENT)
                .zip(data.chunks_mut(SEGMENT))
                .zip(scales.chunks_mut(SEGMENT_BLOCKS));
            for ((src, data), scales) in segments {
                if src.len() % BLOCK == 0 {
                    segment::<S, E, CLIP>(src, spec, data, scales, &mut counters);
                } else {
                    ragged_segment::<S, E, CLIP>(src, spec, data, scales, &mut counters);
                }
            }
        }
        counters.flush();
        if spec.scale_rule == ScaleRule::Rceil {
            // Magnitudes that exceed the limit by one part in 2^23, see `e8m0`, have not saturated.
            counters.totals.saturations = 0;
        }
        counters.totals
    }
}

impl<S: Source> Kernel for RowsTask<'_, S> {
    type Output = QuantStats;

    #[inline(always)]
    fn call(self) -> QuantStats {
        // E4M3 with RCEIL, the usual format of training, is compiled without a comparison per
        // element. Other formats, for which the cost does not matter, are compiled only with the
        // comparison.
        match (self.spec.element, self.spec.scale_rule) {
            (ElementFormat::E4M3, ScaleRule::Rceil) => self.kernel::<E4m3, false>(),
            (ElementFormat::E4M3, _) => self.kernel::<E4m3, true>(),
            (ElementFormat::E5M2, _) => self.kernel::<E5m2, true>(),
            (ElementFormat::E3M2, _) => self.kernel::<E3m2, true>(),
            (ElementFormat::E2M3, _) => self.kernel::<E2m3, true>(),
            (ElementFormat::E2M1, _) => self.kernel::<E2m1, true>(),
        }
    }
}

/// Quantizes the last segment of a row that does not end with a whole block. Padding zeros change
/// neither amax nor counters.
#[inline(never)]
fn ragged_segment<S: Source, E: Element, const CLIP: bool>(
    src: &[S],
    spec: MxSpec,
    data: &mut [u8],
    scales: &mut [u8],
    counters: &mut Counters,
) {
    let mut padded = [0.0; SEGMENT];
    let mut codes = [0; SEGMENT];
    for (padded, x) in padded.iter_mut().zip(src) {
        *padded = x.to_f32();
    }
    let len = src.len().next_multiple_of(BLOCK);
    segment::<f32, E, CLIP>(&padded[..len], spec, &mut codes[..len], scales, counters);
    data.copy_from_slice(&codes[..src.len()]);
}

/// Quantizes up to [`SEGMENT_BLOCKS`] whole blocks, from the start of a group on.
#[inline(always)]
fn segment<S: Source, E: Element, const CLIP: bool>(
    src: &[S],
    spec: MxSpec,
    data: &mut [u8],
    scales: &mut [u8],
    counters: &mut Counters,
) {
    let (src, _) = src.as_chunks::<BLOCK>();
    let (data, _) = data.as_chunks_mut::<BLOCK>();
    let mut amax = [0; SEGMENT_BLOCKS];
    for (amax, block) in amax.iter_mut().zip(src) {
        *amax = block_amax(block);
    }
    let group_blocks = spec.granularity.elements() / BLOCK;
    if spec.granularity == Granularity::G128 {
        for group in amax.as_chunks_mut::<4>().0 {
            *group = [group[0].max(group[1]).max(group[2].max(group[3])); 4];
        }
    }
    let largest = amax.iter().fold(0, |a: u32, &b| a.max(b));
    if largest > largest_of_lanes::<E, CLIP>() {
        return segment_any::<S, E, CLIP>(src, &amax, spec, data, scales, &mut counters.totals);
    }
    counters.totals.amax = counters.totals.amax.max(f32::from_bits(largest));

    let mut codes = [0; SEGMENT_BLOCKS];
    let mut reciprocals = [0.0; SEGMENT_BLOCKS];
    let mut clamps = 0;
    for i in 0..SEGMENT_BLOCKS {
        let scale = finite_scale(amax[i], E::CONSTANTS, spec.scale_rule);
        codes[i] = scale.code as u8;
        // A finite amax has a scale of at most 2^126, so this is a normal number.
        reciprocals[i] = f32::from_bits((254 - scale.code) << 23);
        clamps += u32::from(scale.clamped);
    }
    // Blocks of a group are clamped together; blocks beyond the end are zero and never clamped.
    counters.totals.scale_clamps += u64::from(clamps) / group_blocks as u64;
    if CLIP && spec.scale_rule == ScaleRule::MinError {
        refine_row::<S, E>(src, group_blocks, &mut codes, &mut reciprocals);
    }
    scales.copy_from_slice(&codes[..scales.len()]);
    for ((block, out), &reciprocal) in src.iter().zip(data).zip(&reciprocals) {
        let mut x = [0.0; BLOCK];
        for i in 0..BLOCK {
            x[i] = block[i].to_f32();
        }
        encode_block::<E, CLIP>(&x, reciprocal, out, counters);
    }
}

/// [`segment`] for blocks with NaN, infinities or saturating elements.
#[inline(never)]
#[cold]
fn segment_any<S: Source, E: Element, const CLIP: bool>(
    src: &[[S; BLOCK]],
    amax: &[u32; SEGMENT_BLOCKS],
    spec: MxSpec,
    data: &mut [[u8; BLOCK]],
    scales: &mut [u8],
    totals: &mut QuantStats,
) {
    let group_blocks = spec.granularity.elements() / BLOCK;
    let mut reciprocals = [0.0; SEGMENT_BLOCKS];
    let mut codes = [0; SEGMENT_BLOCKS];
    let clamps = any_scales::<E>(amax, spec.scale_rule, &mut codes, &mut reciprocals);
    totals.scale_clamps += clamps / group_blocks as u64;
    if spec.scale_rule == ScaleRule::MinError {
        refine_row::<S, E>(src, group_blocks, &mut codes, &mut reciprocals);
    }
    scales.copy_from_slice(&codes[..scales.len()]);
    for ((block, out), &reciprocal) in src.iter().zip(data).zip(&reciprocals) {
        let x = block.map(S::to_f32);
        survey_any(&x, totals);
        encode_any::<E>(&x, &[reciprocal; BLOCK], CLIP, out, totals);
    }
}
