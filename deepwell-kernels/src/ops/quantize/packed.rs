//! MX formats on the CPU whose elements are packed, or transformed before quantization.
//!
//! A strip of rows of the operand is gathered in FP32, transformed, quantized and packed, one
//! segment at a time, in buffers on the stack.

use std::ops::Range;

use deepwell_ir::ops::Axis;
use deepwell_precision::hadamard::POINTS;
use deepwell_precision::{
    BLOCK, Hadamard16, QuantFormat, QuantStats, QuantizeError, Source, packed, quantize_rows,
    scales_len,
};
use rayon::prelude::*;

use super::cpu::outer_and_k;

/// Elements along the contraction that are quantized together: a multiple of the longest block.
const SEGMENT: usize = 128;

/// Rows of the operand that are gathered together, in formats with blocks of one row: as many
/// columns of a columnwise source as fill a cache line of BF16.
const STRIP: usize = 32;

/// Whether the data of a format is not what [`quantize_rows`] writes.
pub(super) fn is_needed(format: &QuantFormat) -> bool {
    format.element.bits() < 8 || format.hadamard.is_some()
}

/// A source matrix, and how an operand reads it.
#[derive(Clone, Copy)]
pub(crate) struct Gather<'a, S> {
    /// `[rows, columns]`.
    pub(crate) x: &'a [S],
    pub(crate) columns: usize,
    pub(crate) axis: Axis,
    /// Transform along the contraction, rounded to BF16.
    pub(crate) hadamard: Option<Hadamard16>,
}

impl<S: Source> Gather<'_, S> {
    /// Writes elements of one row of the operand. With a transform, `along` begins and ends at
    /// multiples of 16.
    #[inline(always)]
    pub(crate) fn row(&self, outer: usize, along: Range<usize>, target: &mut [f32]) {
        let at = |k: usize| match self.axis {
            Axis::Column => k * self.columns + outer,
            _ => outer * self.columns + k,
        };
        for (target, k) in target.iter_mut().zip(along) {
            *target = self.x[at(k)].to_f32();
        }
        if let Some(transform) = self.hadamard {
            let groups = target.as_chunks_mut::<POINTS>().0;
            groups.iter_mut().for_each(|group| transform.forward_bf16(group));
        }
    }
}

/// Quantizes a matrix `[rows, columns]` along an axis, to packed data and row-major scales.
///
/// # Errors
///
/// [`QuantizeError::Multiple`] when a transform does not divide the contraction into groups of 16;
/// otherwise as [`quantize_rows`].
pub(super) fn quantize<S: Source>(
    x: &[S],
    [rows, columns]: [usize; 2],
    format: &QuantFormat,
    axis: Axis,
    (data, scales): (&mut [u8], &mut [u8]),
) -> Result<QuantStats, QuantizeError> {
    let (outer, k) = outer_and_k(axis, rows, columns);
    if format.hadamard.is_some() && !k.is_multiple_of(POINTS) {
        return Err(QuantizeError::Multiple { cols: k, multiple: POINTS });
    }
    if x.is_empty() {
        return Ok(QuantStats::default());
    }
    let source = Gather { x, columns, axis, hadamard: format.hadamard };
    let plain = QuantFormat { hadamard: None, ..*format };
    let strip = STRIP.max(usize::from(format.block.rows));
    let (row_bytes, row_scales) = (packed::len(format.element, 1, k), scales_len(1, k));
    let data = data[..outer * row_bytes].par_chunks_mut(strip * row_bytes);
    let scales = scales[..outer * row_scales].par_chunks_mut(strip * row_scales);
    let strips = data.zip(scales).enumerate().map(|(index, (data, scales))| {
        quantize_strip(&source, &plain, index * strip, k, data, scales)
    });
    strips.try_reduce(QuantStats::default, |a, b| Ok(a.merged(b)))
}

/// Quantizes the rows of the operand from `first` on that `data` and `scales` have room for.
fn quantize_strip<S: Source>(
    source: &Gather<'_, S>,
    format: &QuantFormat,
    first: usize,
    k: usize,
    data: &mut [u8],
    scales: &mut [u8],
) -> Result<QuantStats, QuantizeError> {
    let (row_bytes, row_scales) = (packed::len(format.element, 1, k), scales_len(1, k));
    let rows = data.len() / row_bytes;
    let mut values = [0.0f32; SEGMENT * SEGMENT];
    let mut codes = [0u8; SEGMENT * SEGMENT];
    let mut of_segment = [0u8; SEGMENT * SEGMENT / BLOCK];
    let mut stats = QuantStats::default();
    for start in (0..k).step_by(SEGMENT) {
        let len = SEGMENT.min(k - start);
        for (row, values) in values.chunks_mut(len).take(rows).enumerate() {
            source.row(first + row, start..start + len, values);
        }
        let blocks = scales_len(1, len);
        let (values, codes) = (&values[..rows * len], &mut codes[..rows * len]);
        let of_segment = &mut of_segment[..rows * blocks];
        stats.merge(&quantize_rows(values, rows, len, format, codes, of_segment)?);
        let begin = packed::len(format.element, 1, start);
        let bytes = packed::len(format.element, 1, len);
        for (row, codes) in codes.chunks(len).enumerate() {
            let data = &mut data[row * row_bytes + begin..][..bytes];
            packed::pack(format.element, codes, 1, len, data)?;
            scales[row * row_scales + start / BLOCK..][..blocks]
                .copy_from_slice(&of_segment[row * blocks..][..blocks]);
        }
    }
    Ok(stats)
}

#[cfg(test)]
mod tests {
    use deepwell_precision::{
        ElementFormat, Granularity, ScaleRule, quantize_columns, scale_tiles,
    };
    use half::bf16;

    use super::*;
    use crate::runtime::cpu::test_support::{Random, for_thread_counts};

    /// Values with blocks of zeros, denormals, NaN and infinities.
    fn source(rows: usize, columns: usize) -> Vec<bf16> {
        let normals = Random::new((rows * 31 + columns) as u64).normals(rows * columns);
        let spread = |(index, x): (usize, f32)| match index % 977 {
            500 => f32::NAN,
            700 => f32::INFINITY,
            800..840 => 0.0,
            840..880 => x * 1e-39,
            880..920 => x * 1e38,
            _ => x,
        };
        normals.into_iter().enumerate().map(|it| bf16::from_f32(spread(it))).collect()
    }

    /// Bytes, scales and counters are those of the quantizers of deepwell-precision, packed, of
    /// the transformed matrix where the format has a transform.
    #[test]
    fn planes_are_those_of_the_definition() {
        for (rows, columns) in [(0, 32), (1, 1), (3, 33), (31, 129), (130, 96), (257, 160)] {
            for &element in ElementFormat::ALL {
                let mx = QuantFormat::mx(element);
                for format in [
                    mx,
                    mx.square(),
                    mx.with_granularity(Granularity::G128),
                    mx.square().with_granularity(Granularity::G128),
                    mx.with_scale_rule(ScaleRule::OcpFloor),
                    mx.with_scale_rule(ScaleRule::MinError),
                    mx.with_hadamard(Some(Hadamard16::TRAINING)),
                ] {
                    for axis in [Axis::Row, Axis::Column] {
                        check(rows, columns, &format, axis);
                    }
                }
            }
        }
    }

    fn check(rows: usize, columns: usize, format: &QuantFormat, axis: Axis) {
        let what = format!("{format} {} of {rows}x{columns}", axis.name());
        let (outer, k) = outer_and_k(axis, rows, columns);
        let x = source(rows, columns);
        let element = format.element;
        let run = || {
            let mut data = vec![0xEE; packed::len(element, outer, k)];
            let mut scales = vec![0xEE; scales_len(outer, k)];
            let planes = (&mut data[..], &mut scales[..]);
            let stats = quantize(&x, [rows, columns], format, axis, planes);
            stats.map(|stats| (data, scales, stats))
        };
        let mut values: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let mut by_row = *format;
        if let Some(transform) = format.hadamard {
            if !k.is_multiple_of(POINTS) {
                let expected = QuantizeError::Multiple { cols: k, multiple: POINTS };
                assert_eq!(run().unwrap_err(), expected, "{what}");
                return;
            }
            // The transform of the operand, `[outer, k]`, as a rowwise source.
            let place = |index: usize| match axis {
                Axis::Column => index % k * columns + index / k,
                _ => index,
            };
            let mut turned: Vec<f32> = (0..outer * k).map(|index| values[place(index)]).collect();
            for group in turned.as_chunks_mut::<POINTS>().0 {
                transform.forward_bf16(group);
            }
            values = turned;
            by_row.hadamard = None;
        }
        let mut codes = vec![0; outer * k];
        let mut expected_scales = vec![0; scales_len(outer, k)];
        let is_column = axis == Axis::Column && format.hadamard.is_none();
        let stats = match is_column {
            true => {
                quantize_columns(&values, rows, columns, &by_row, &mut codes, &mut expected_scales)
            }
            false => quantize_rows(&values, outer, k, &by_row, &mut codes, &mut expected_scales),
        };
        let stats = stats.unwrap();
        let mut expected = vec![0; packed::len(element, outer, k)];
        packed::pack(element, &codes, outer, k, &mut expected).unwrap();
        for_thread_counts(|| {
            let (data, scales, of_run) = run().unwrap();
            assert_eq!(data, expected, "data of {what}");
            assert_eq!(scales, expected_scales, "scales of {what}");
            assert_eq!(of_run, stats, "{what}");
            data
        });
    }

    /// The op writes tiles: the scale of a block is found at its place.
    #[test]
    fn a_strip_ends_within_a_tile_of_scales() {
        let (rows, columns) = (40, 300);
        let format = QuantFormat::MXFP4;
        let x: Vec<f32> = (0..rows * columns).map(|i| ((i / columns + 1) * 6) as f32).collect();
        let mut data = vec![0; packed::len(format.element, rows, columns)];
        let mut scales = vec![0; scale_tiles::tiled_len(rows, columns.div_ceil(BLOCK))];
        let planes = (&mut data[..], &mut scales[..]);
        quantize(&x, [rows, columns], &format, Axis::Row, planes).unwrap();
        let blocks = columns.div_ceil(BLOCK);
        scale_tiles::tile_in_place(&mut scales, rows, blocks).unwrap();
        for row in 0..rows {
            let expected = 127 + (row + 1).next_power_of_two().trailing_zeros() as u8;
            for block in 0..blocks {
                let scale = scales[scale_tiles::offset(row, block, blocks)];
                assert_eq!(scale, expected, "row {row}, block {block}");
            }
        }
    }
}
