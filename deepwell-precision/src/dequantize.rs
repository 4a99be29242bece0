//! From codes and scales back to numbers.

use crate::error::{QuantizeError, Shape};
use crate::quantize::scales_len;
use crate::{BLOCK, ElementFormat, Target, e4m3, e5m2, e8m0};

/// Writes the values of a quantized matrix: `out[r, c] = decode(data[r, c]) * 2^(scale - 127)`.
///
/// `data` and `out` are row-major [rows, cols], `scales` row-major [rows, ceil(cols / 32)]. A
/// column copy of a [rows, cols] matrix is itself a [cols, rows] matrix with blocks along its rows.
///
/// Into `f32` the result is exact, except that it is infinite where the product exceeds f32 (scale
/// bytes above 246 for E4M3, above 239 for E5M2; finite input never leads to them). Into `bf16` it
/// is as exact for scale bytes from 3 (E4M3) or 10 (E5M2) on; below, bits under 2^-133 are rounded
/// to nearest even.
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape.
pub fn dequantize_rows<T: Target>(
    data: &[u8],
    scales: &[u8],
    rows: usize,
    cols: usize,
    element: ElementFormat,
    out: &mut [T],
) -> Result<(), QuantizeError> {
    let shape = Shape::new(rows, cols)?;
    shape.expect("data", rows * cols, data.len())?;
    shape.expect("scales", scales_len(rows, cols), scales.len())?;
    shape.expect("out", rows * cols, out.len())?;
    let blocks = cols.div_ceil(BLOCK);
    for row in 0..rows {
        for col in 0..cols {
            let code = data[row * cols + col];
            let value = match element {
                ElementFormat::E4M3 => e4m3::decode(code),
                ElementFormat::E5M2 => e5m2::decode(code),
            };
            let scale = e8m0::decode(scales[row * blocks + col / BLOCK]);
            out[row * cols + col] = T::from_f32(value * scale);
        }
    }
    Ok(())
}
