//! Block quantization, implemented by deepwell-precision.

use std::ops::Range;

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_ir::{Op, Storage};
use deepwell_precision::{
    QuantFormat, QuantStats, QuantizeError, ScaleFormat, Source, quantize_both, quantize_columns,
    quantize_rows, scale_tiles, scales_len,
};

use deepwell_precision::packed::len as packed_len;

use super::nvfp4::{self, Matrices, Scope};
use super::packed;
use crate::KernelError;
use crate::runtime::cpu::arena::{Arena, Out};
use crate::runtime::cpu::operands::{Operands, Run, by_float};

/// Output planes of one axis.
pub(super) struct PlanesOut {
    pub(super) data: Out<u8>,
    pub(super) scales: Out<u8>,
    pub(super) tensor_scale: Option<Out<f32>>,
    pub(super) axis: Axis,
}

impl PlanesOut {
    /// The planes whose operands start at `first`.
    fn new(
        operands: &Operands<'_>,
        format: &QuantFormat,
        axis: Axis,
        first: usize,
    ) -> Result<PlanesOut, KernelError> {
        let tensor_scale = match Storage::plane_count(format) {
            3 => Some(operands.target(first + 2)?),
            _ => None,
        };
        let data = operands.target(first)?;
        let scales = operands.target(first + 1)?;
        Ok(PlanesOut { data, scales, tensor_scale, axis })
    }
}

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::Quantize(op) = op else { return Err(operands.unknown_kernel()) };
    let (matrices, rows, columns) = match *operands.shape(0) {
        [rows, columns] => (1, rows, columns),
        [matrices, rows, columns] => (matrices, rows, columns),
        _ => return Err(operands.unexpected(0, "a matrix, or a stack of them")),
    };
    let Quantize { format, axis: _ } = *op;
    let scope = Scope::new(operands, 1)?;
    let statistics = operands.target::<u64>(operands.values.len() - 1)?;
    let count = Storage::plane_count(&format);
    let axes = op.axes().iter().enumerate();
    let planes = axes
        .map(|(i, &axis)| PlanesOut::new(operands, &format, axis, operands.output(0) + i * count));
    let planes = planes.collect::<Result<Vec<_>, _>>()?;
    by_float!(operands, 0, E => {
        let x = operands.input::<E>(0)?;
        Ok(Box::new(move |arena| {
            let (x, shape) = (x.of(arena), [rows, columns]);
            let stats = match format.scale {
                ScaleFormat::Ue4m3(_) => {
                    let matrices = Matrices { x, count: matrices, shape };
                    nvfp4::quantize(matrices, &format, &scope, &planes, arena)?
                }
                _ => {
                    let stats = (0..matrices).try_fold(QuantStats::default(), |mut stats, index| {
                        let x = &x[index * rows * columns..][..rows * columns];
                        stats.merge(&quantize_mx(x, shape, &format, &planes, index, arena)?);
                        Ok(stats)
                    });
                    stats.map_err(|error: QuantizeError| error.to_string())?
                }
            };
            statistics.of(arena).copy_from_slice(&encode(&stats));
            Ok(())
        }))
    })
}

/// Quantizes matrix `index` of a stack, independently of the others.
fn quantize_mx<S: Source>(
    x: &[S],
    [rows, columns]: [usize; 2],
    format: &QuantFormat,
    planes: &[PlanesOut],
    index: usize,
    arena: &Arena,
) -> Result<QuantStats, QuantizeError> {
    if packed::is_needed(format) {
        let mut stats = QuantStats::default();
        for planes in planes {
            let (outer, k) = outer_and_k(planes.axis, rows, columns);
            let bytes = packed_len(format.element, outer, k);
            let data = &mut planes.data.of(arena)[index * bytes..][..bytes];
            let plain = &mut planes.scales.of(arena)[index * tiles(outer, k, format)..];
            let plain = &mut plain[..scales_len(outer, k)];
            let shape = [rows, columns];
            stats.merge(&packed::quantize(x, shape, format, planes.axis, (data, plain))?);
        }
        tile_all(planes, [rows, columns], format, index, arena)?;
        return Ok(stats);
    }
    let elements = index * rows * columns..(index + 1) * rows * columns;
    // Row-major scales, at first in the place of the matrix's tiles.
    let scales = |planes: &PlanesOut| -> Range<usize> {
        let (outer, k) = outer_and_k(planes.axis, rows, columns);
        let begin = index * tiles(outer, k, format);
        begin..begin + scales_len(outer, k)
    };
    let stats = match planes {
        [row, column] => {
            let by_row =
                (&mut row.data.of(arena)[elements.clone()], &mut row.scales.of(arena)[scales(row)]);
            let by_column = (
                &mut column.data.of(arena)[elements],
                &mut column.scales.of(arena)[scales(column)],
            );
            quantize_both(x, rows, columns, format, by_row, by_column)?
        }
        _ => {
            let mut stats = QuantStats::default();
            for planes in planes {
                let data = &mut planes.data.of(arena)[elements.clone()];
                let plain = &mut planes.scales.of(arena)[scales(planes)];
                let of_axis = match planes.axis {
                    Axis::Column => quantize_columns(x, rows, columns, format, data, plain),
                    _ => quantize_rows(x, rows, columns, format, data, plain),
                };
                stats.merge(&of_axis?);
            }
            stats
        }
    };
    tile_all(planes, [rows, columns], format, index, arena)?;
    Ok(stats)
}

/// Bytes of the scales of `[outer, k]`, in tiles.
pub(super) fn tiles(outer: usize, k: usize, format: &QuantFormat) -> usize {
    scale_tiles::tiled_len(outer, k.div_ceil(format.scale.stored_every()))
}

/// Rows of an operand, and its contraction.
pub(crate) fn outer_and_k(axis: Axis, rows: usize, columns: usize) -> (usize, usize) {
    if axis == Axis::Column { (columns, rows) } else { (rows, columns) }
}

/// Rearranges the scales of matrix `index` of a stack from row-major to tiles.
pub(super) fn tile_all(
    planes: &[PlanesOut],
    [rows, columns]: [usize; 2],
    format: &QuantFormat,
    index: usize,
    arena: &Arena,
) -> Result<(), QuantizeError> {
    planes.iter().try_for_each(|planes| {
        let (outer, k) = outer_and_k(planes.axis, rows, columns);
        let blocks = k.div_ceil(format.scale.stored_every());
        let tiles = tiles(outer, k, format);
        let scales = &mut planes.scales.of(arena)[index * tiles..][..tiles];
        scale_tiles::tile_in_place(scales, outer, blocks)
    })
}

/// Encodes the counters as [`Quantize::STATISTICS`] words.
fn encode(stats: &QuantStats) -> [u64; Quantize::STATISTICS] {
    [
        u64::from(stats.amax.to_bits()),
        stats.elements,
        stats.underflows,
        stats.saturations,
        stats.scale_clamps,
        stats.nonfinite,
    ]
}

/// Decodes the counters of a quantization.
///
/// # Panics
/// If `words` is not [`Quantize::STATISTICS`] long.
pub fn decode_statistics(words: &[u64]) -> QuantStats {
    QuantStats {
        amax: f32::from_bits(words[0] as u32),
        elements: words[1],
        underflows: words[2],
        saturations: words[3],
        scale_clamps: words[4],
        nonfinite: words[5],
    }
}
