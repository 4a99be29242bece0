//! Block quantization, by deepwell-precision.

use deepwell_ir::Op;
use deepwell_ir::ops::{Axis, Quantize};
use deepwell_precision::{
    BLOCK, QuantStats, QuantizeError, quantize_both, quantize_columns, quantize_rows, scale_tiles,
    scales_len,
};

use crate::KernelError;
use crate::cpu::calls::{Operands, Run, by_float};

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::Quantize(op) = op else { return Err(operands.unknown_kernel()) };
    let &[rows, columns] = operands.shape(0) else {
        return Err(operands.unexpected(0, "a matrix"));
    };
    let Quantize { spec, axis } = *op;
    let statistics = operands.target::<u64>(operands.values.len() - 1)?;
    let (codes, scales) = (operands.target::<u8>(1)?, operands.target::<u8>(2)?);
    let second = match axis {
        Axis::Both => Some((operands.target::<u8>(3)?, operands.target::<u8>(4)?)),
        _ => None,
    };
    by_float!(operands, 0, E => {
        let x = operands.input::<E>(0)?;
        Ok(Box::new(move |arena| {
            let (x, codes, scales) = (x.of(arena), codes.of(arena), scales.of(arena));
            // Rows of the first copy and its contraction.
            let (outer, depth) =
                if axis == Axis::Column { (columns, rows) } else { (rows, columns) };
            let plain = &mut scales[..scales_len(outer, depth)];
            let stats = match (&second, axis) {
                (Some((codes_t, scales_t)), _) => {
                    let scales_t = scales_t.of(arena);
                    let plain_t = &mut scales_t[..scales_len(columns, rows)];
                    let by_column = (codes_t.of(arena), plain_t);
                    quantize_both(x, rows, columns, &spec, (codes, plain), by_column)
                        .and_then(|stats| tile(scales_t, columns, rows).map(|()| stats))
                }
                (None, Axis::Column) => quantize_columns(x, rows, columns, &spec, codes, plain),
                (None, _) => quantize_rows(x, rows, columns, &spec, codes, plain),
            };
            let stats = stats
                .and_then(|stats| tile(scales, outer, depth).map(|()| stats))
                .map_err(|error| error.to_string())?;
            statistics.of(arena).copy_from_slice(&encode(&stats));
            Ok(())
        }))
    })
}

/// Scales of codes `[rows, depth]`, from plain ones to tiles.
fn tile(scales: &mut [u8], rows: usize, depth: usize) -> Result<(), QuantizeError> {
    scale_tiles::tile_in_place(scales, rows, depth.div_ceil(BLOCK))
}

/// The counters as [`Quantize::STATISTICS`] words.
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

/// Reads the counters that a quantization left.
///
/// # Panics
/// When `words` are not [`Quantize::STATISTICS`] long.
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
