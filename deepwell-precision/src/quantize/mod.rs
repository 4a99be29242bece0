//! Block quantization along rows, along columns, or both in one pass over the source.

use crate::error::{QuantizeError, Shape};
use crate::{BLOCK, MxSpec, QuantStats, Source};

mod reference;

/// Bytes of the scales of a `rows` x `cols` matrix with blocks along its rows: plain row-major
/// [rows, ceil(cols / 32)].
#[must_use]
pub const fn scales_len(rows: usize, cols: usize) -> usize {
    rows * cols.div_ceil(BLOCK)
}

/// Row copy.
pub fn quantize_rows<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    spec: &MxSpec,
    data: &mut [u8],
    scales: &mut [u8],
) -> Result<QuantStats, QuantizeError> {
    let shape = Shape::new(rows, cols)?;
    shape.expect("src", rows * cols, src.len())?;
    shape.expect("data", rows * cols, data.len())?;
    shape.expect("scales", scales_len(rows, cols), scales.len())?;
    Ok(reference::quantize(|o, k| src[o * cols + k].to_f32(), rows, cols, spec, data, scales))
}

/// Column copy, transposed.
pub fn quantize_columns<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    spec: &MxSpec,
    data_t: &mut [u8],
    scales_t: &mut [u8],
) -> Result<QuantStats, QuantizeError> {
    let shape = Shape::new(rows, cols)?;
    shape.expect("src", rows * cols, src.len())?;
    shape.expect("data_t", rows * cols, data_t.len())?;
    shape.expect("scales_t", scales_len(cols, rows), scales_t.len())?;
    Ok(reference::quantize(|o, k| src[k * cols + o].to_f32(), cols, rows, spec, data_t, scales_t))
}

/// Both copies.
pub fn quantize_both<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    spec: &MxSpec,
    (data, scales): (&mut [u8], &mut [u8]),
    (data_t, scales_t): (&mut [u8], &mut [u8]),
) -> Result<QuantStats, QuantizeError> {
    let by_rows = quantize_rows(src, rows, cols, spec, data, scales)?;
    Ok(by_rows.merged(quantize_columns(src, rows, cols, spec, data_t, scales_t)?))
}
