//! Block quantization and back.

use deepwell_ir::ops::{Axis, Dequantize, Quantize, StochasticRound};
use deepwell_precision::{
    BLOCK, Philox, QuantStats, QuantizeError, quantize_both, quantize_columns, quantize_rows,
    scale_tiles, scales_len,
};

use super::{KernelError, Operands, Run, by_float};
use crate::ops::dequantize::cpu::{dequantize_columns, dequantize_rows};
use crate::ops::stochastic_round::cpu::stochastic_round as round_kernel;

pub(super) fn quantize(operands: &Operands<'_>, op: &Quantize) -> Result<Run, KernelError> {
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

pub(super) fn dequantize(operands: &Operands<'_>, op: &Dequantize) -> Result<Run, KernelError> {
    let target_index = operands.output(0);
    let &[_, columns] = operands.shape(target_index) else {
        return Err(operands.unexpected(target_index, "a matrix"));
    };
    let (data, scales) = (operands.input::<u8>(0)?, operands.input::<u8>(1)?);
    let axis = op.axis;
    by_float!(operands, target_index, E => {
        let target = operands.target::<E>(target_index)?;
        Ok(Box::new(move |arena| {
            let (data, scales) = (data.of(arena), scales.of(arena));
            match axis {
                Axis::Column => dequantize_columns(data, scales, columns, target.of(arena)),
                _ => dequantize_rows(data, scales, columns, target.of(arena)),
            }
            Ok(())
        }))
    })
}

pub(super) fn stochastic_round(
    operands: &Operands<'_>,
    op: &StochasticRound,
) -> Result<Run, KernelError> {
    let &[_, columns] = operands.shape(0) else {
        return Err(operands.unexpected(0, "a matrix"));
    };
    let (scales, key) = (operands.input::<u8>(1)?, operands.input::<u64>(2)?);
    let data = operands.target::<u8>(operands.output(0))?;
    let by_column = op.axis == Axis::Column;
    let stream = StochasticRound::stream(&operands.call.name);
    by_float!(operands, 0, E => {
        let x = operands.input::<E>(0)?;
        Ok(Box::new(move |arena| {
            let key = key.of(arena);
            let philox = Philox { seed: key[0], stream: stream | u64::from(key[1] as u32) };
            let (x, scales) = (x.of(arena), scales.of(arena));
            round_kernel(x, columns, by_column, scales, philox, data.of(arena));
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
