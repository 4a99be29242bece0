//! Dequantization of MX formats.

use crate::error::{QuantizeError, Shape};
use crate::quantize::scales_len;
use crate::simd::{Kernel, Level};
use crate::source::ValuesMut;
use crate::threads::{ELEMENTS_PER_TASK, join};
use crate::{
    BLOCK, DequantizedValue, ElementFormat, QuantFormat, e2m1, e2m3, e3m2, e4m3, e5m2, e8m0,
};

/// Writes the values of a quantized matrix: `out[r, c] = decode(data[r, c]) * 2^(scale - 127)`.
///
/// `data` and `out` are row-major [rows, cols], `scales` row-major [rows, ceil(cols / 32)]. A
/// columnwise operand of a [rows, cols] matrix is itself a [cols, rows] matrix with blocks along
/// its rows.
///
/// With `f32` output the result is exact, except that it is infinite if the product exceeds f32
/// (scale bytes from 247 on for E4M3, 240 for E5M2, 251 for E3M2, 253 for E2M3 and E2M1). Data
/// quantized from finite input gives finite values, see [`e8m0`]. With `bf16` output the result is
/// equally exact for scale bytes from 3 (E4M3) or 10 (E5M2) on, and always for the narrower
/// formats; below, bits under 2^-133 are rounded to nearest even.
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape, [`QuantizeError::Format`] for a
/// format that is not MX.
pub fn dequantize_rows<T: DequantizedValue>(
    data: &[u8],
    scales: &[u8],
    rows: usize,
    cols: usize,
    format: &QuantFormat,
    out: &mut [T],
) -> Result<(), QuantizeError> {
    let shape = Shape::new(rows, cols)?;
    shape.expect("data", rows * cols, data.len())?;
    shape.expect("scales", scales_len(rows, cols), scales.len())?;
    shape.expect("out", rows * cols, out.len())?;
    if !out.is_empty() {
        dequantize(data, scales, cols, format.mx_spec()?.element, T::values_mut(out));
    }
    Ok(())
}

fn dequantize(data: &[u8], scales: &[u8], cols: usize, element: ElementFormat, out: ValuesMut<'_>) {
    match out {
        ValuesMut::F32(out) => Task { data, scales, cols, element, out }.run(),
        ValuesMut::Bf16(out) => Task { data, scales, cols, element, out }.run(),
    }
}

/// Whole rows of a quantized matrix, and the destination of their values.
struct Task<'a, T> {
    data: &'a [u8],
    scales: &'a [u8],
    cols: usize,
    element: ElementFormat,
    out: &'a mut [T],
}

impl<T: DequantizedValue> Task<'_, T> {
    /// Halves the rows until tasks are small, then runs the kernel.
    fn run(self) {
        let Self { data, scales, cols, element, out } = self;
        let rows = data.len() / cols;
        if rows == 1 || data.len() <= ELEMENTS_PER_TASK {
            return Level::Native.run(Task { data, scales, cols, element, out });
        }
        let half = rows / 2;
        let (data, data_rest) = data.split_at(half * cols);
        let (scales, scales_rest) = scales.split_at(half * cols.div_ceil(BLOCK));
        let (out, out_rest) = out.split_at_mut(half * cols);
        join(
            || Task { data, scales, cols, element, out }.run(),
            || {
                Task { data: data_rest, scales: scales_rest, cols, element, out: out_rest }.run();
            },
        );
    }

    #[inline(always)]
    fn kernel(self, decode: impl Fn(u8) -> f32 + Copy) {
        let cols = self.cols;
        let rows = self
            .data
            .chunks_exact(cols)
            .zip(self.scales.chunks_exact(cols.div_ceil(BLOCK)))
            .zip(self.out.chunks_exact_mut(cols));
        for ((data, scales), out) in rows {
            let (data, data_tail) = data.as_chunks::<BLOCK>();
            let (out, out_tail) = out.as_chunks_mut::<BLOCK>();
            for ((data, out), &scale) in data.iter().zip(out).zip(scales) {
                let scale = e8m0::decode(scale);
                for i in 0..BLOCK {
                    out[i] = T::from_f32(decode(data[i]) * scale);
                }
            }
            if let Some(&scale) = scales.last() {
                let scale = e8m0::decode(scale);
                for (out, &code) in out_tail.iter_mut().zip(data_tail) {
                    *out = T::from_f32(decode(code) * scale);
                }
            }
        }
    }
}

impl<T: DequantizedValue> Kernel for Task<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        match self.element {
            ElementFormat::E4M3 => self.kernel(decode_e4m3),
            ElementFormat::E5M2 => self.kernel(decode_e5m2),
            ElementFormat::E3M2 => {
                self.kernel(decode_small::<{ e3m2::MANTISSA_BITS }, { e3m2::SIGN_BIT }>);
            }
            ElementFormat::E2M3 => {
                self.kernel(decode_small::<{ e2m3::MANTISSA_BITS }, { e2m3::SIGN_BIT }>);
            }
            ElementFormat::E2M1 => {
                self.kernel(decode_small::<{ e2m1::MANTISSA_BITS }, { e2m1::SIGN_BIT }>);
            }
        }
    }
}

/// [`e4m3::decode`] without branches. Exponent and fraction bits are shifted to their position in
/// f32. The exponent of a subnormal is then one binade below the smallest normal, and subtracting
/// the implicit one leaves half of the value.
#[inline(always)]
pub(crate) fn decode_e4m3(code: u8) -> f32 {
    const OFFSET: u32 = (127 - e4m3::BIAS as u32) << 23;
    let magnitude = u32::from(code & 0x7F);
    let shifted = f32::from_bits((magnitude << (23 - e4m3::MANTISSA_BITS)) + OFFSET);
    let half = shifted - f32::from_bits(OFFSET);
    let value = if magnitude < 1 << e4m3::MANTISSA_BITS { half + half } else { shifted };
    let bits = if magnitude == u32::from(e4m3::CODE_NAN) { NAN_BITS } else { value.to_bits() };
    f32::from_bits(bits | (u32::from(code & 0x80) << 24))
}

/// [`e5m2::decode`] without branches, by the same method.
#[inline(always)]
fn decode_e5m2(code: u8) -> f32 {
    const OFFSET: u32 = (127 - e5m2::BIAS as u32) << 23;
    const INFINITY: u32 = e5m2::CODE_MAX as u32 + 1;
    let magnitude = u32::from(code & 0x7F);
    let shifted = f32::from_bits((magnitude << (23 - e5m2::MANTISSA_BITS)) + OFFSET);
    let half = shifted - f32::from_bits(OFFSET);
    let value = if magnitude < 1 << e5m2::MANTISSA_BITS { half + half } else { shifted };
    let beyond = if magnitude == INFINITY { f32::INFINITY.to_bits() } else { NAN_BITS };
    let bits = if magnitude >= INFINITY { beyond } else { value.to_bits() };
    f32::from_bits(bits | (u32::from(code & 0x80) << 24))
}

/// Decoders of formats whose values are all finite, by the same method. The exponent bits lie
/// between fraction and sign; the bias is half of their range.
#[inline(always)]
pub(crate) fn decode_small<const MANTISSA_BITS: u32, const SIGN_BIT: u32>(code: u8) -> f32 {
    let bias = (1 << (SIGN_BIT - MANTISSA_BITS - 1)) - 1;
    let offset = (127 - bias) << 23;
    let magnitude = u32::from(code) & ((1 << SIGN_BIT) - 1);
    let shifted = f32::from_bits((magnitude << (23 - MANTISSA_BITS)) + offset);
    let half = shifted - f32::from_bits(offset);
    let value = if magnitude < 1 << MANTISSA_BITS { half + half } else { shifted };
    f32::from_bits(value.to_bits() | (((u32::from(code) >> SIGN_BIT) & 1) << 31))
}

/// A quiet NaN.
const NAN_BITS: u32 = 0x7FC0_0000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoders_without_branches() {
        for code in 0..=u8::MAX {
            for (got, expected) in [
                (decode_e4m3(code), e4m3::decode(code)),
                (decode_e5m2(code), e5m2::decode(code)),
                (decode_small::<2, 5>(code), e3m2::decode(code)),
                (decode_small::<3, 5>(code), e2m3::decode(code)),
                (decode_small::<1, 3>(code), e2m1::decode(code)),
            ] {
                assert_eq!(got.is_nan(), expected.is_nan(), "{code:#04x}");
                assert!(got.is_nan() || got.to_bits() == expected.to_bits(), "{code:#04x}");
            }
        }
    }
}
