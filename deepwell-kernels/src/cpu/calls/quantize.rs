//! Block quantization.

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_precision::{QuantStats, quantize_both, quantize_columns, quantize_rows};

use super::{KernelError, Operands, Run, by_float};

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
            let stats = match (&second, axis) {
                (Some((codes_t, scales_t)), _) => quantize_both(
                    x,
                    rows,
                    columns,
                    &spec,
                    (codes, scales),
                    (codes_t.of(arena), scales_t.of(arena)),
                ),
                (None, Axis::Column) => quantize_columns(x, rows, columns, &spec, codes, scales),
                (None, _) => quantize_rows(x, rows, columns, &spec, codes, scales),
            }
            .map_err(|error| error.to_string())?;
            statistics.of(arena).copy_from_slice(&encode(&stats));
            Ok(())
        }))
    })
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
