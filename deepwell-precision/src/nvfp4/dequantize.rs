//! Dequantization of NVFP4.

use super::{BLOCK, check};
use crate::dequantize::{decode_e4m3, decode_small};
use crate::error::QuantizeError;
use crate::simd::{Kernel, Level};
use crate::source::ValuesMut;
use crate::threads::{ELEMENTS_PER_TASK, join};
use crate::{DequantizedValue, e2m1, ue4m3};

/// Writes the values of a quantized matrix: `(e2m1 * ue4m3) * tensor_scale`. The inner product is
/// exact, the outer product is rounded once, and once more into `bf16`.
///
/// `out` is row-major [rows, cols]; `bytes` and `scales` are in the layout of
/// [`super::quantize_rows`]. A columnwise operand of a [rows, cols] matrix is itself a [cols, rows]
/// matrix. Scale bytes above 0x7E give NaN.
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape; nothing is written in this case.
pub fn dequantize_rows<T: DequantizedValue>(
    bytes: &[u8],
    scales: &[u8],
    tensor_scale: f32,
    rows: usize,
    cols: usize,
    out: &mut [T],
) -> Result<(), QuantizeError> {
    check("out", out.len(), rows, cols, bytes.len(), scales.len())?;
    if !out.is_empty() {
        dequantize(bytes, scales, tensor_scale, cols, T::values_mut(out));
    }
    Ok(())
}

fn dequantize(bytes: &[u8], scales: &[u8], tensor_scale: f32, cols: usize, out: ValuesMut<'_>) {
    match out {
        ValuesMut::F32(out) => Task { bytes, scales, tensor_scale, cols, out }.run(),
        ValuesMut::Bf16(out) => Task { bytes, scales, tensor_scale, cols, out }.run(),
    }
}

/// Whole rows of a quantized matrix, and the destination of their values.
struct Task<'a, T> {
    bytes: &'a [u8],
    scales: &'a [u8],
    tensor_scale: f32,
    cols: usize,
    out: &'a mut [T],
}

impl<T: DequantizedValue> Task<'_, T> {
    /// Halves the rows until tasks are small, then runs the kernel.
    fn run(self) {
        let Self { bytes, scales, tensor_scale, cols, out } = self;
        let half = out.len() / cols / 2;
        if half == 0 || out.len() <= ELEMENTS_PER_TASK {
            return Level::Native.run(Task { bytes, scales, tensor_scale, cols, out });
        }
        let (bytes, bytes_rest) = bytes.split_at(half * cols.div_ceil(2));
        let (scales, scales_rest) = scales.split_at(half * cols.div_ceil(BLOCK));
        let (out, out_rest) = out.split_at_mut(half * cols);
        join(
            || Task { bytes, scales, tensor_scale, cols, out }.run(),
            || {
                let (bytes, scales, out) = (bytes_rest, scales_rest, out_rest);
                Task { bytes, scales, tensor_scale, cols, out }.run();
            },
        );
    }
}

impl<T: DequantizedValue> Kernel for Task<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let cols = self.cols;
        let rows = self
            .bytes
            .chunks_exact(cols.div_ceil(2))
            .zip(self.scales.chunks_exact(cols.div_ceil(BLOCK)))
            .zip(self.out.chunks_exact_mut(cols));
        for ((bytes, scales), out) in rows {
            let blocks = bytes.chunks(BLOCK / 2).zip(scales).zip(out.chunks_mut(BLOCK));
            for ((bytes, &scale), out) in blocks {
                // A byte with its top bit set is not a UE4M3 scale.
                let scale =
                    decode_e4m3(if scale > ue4m3::CODE_NAN { ue4m3::CODE_NAN } else { scale });
                let decode = |bits: u8| {
                    let value = decode_small::<{ e2m1::MANTISSA_BITS }, { e2m1::SIGN_BIT }>(bits);
                    T::from_f32(value * scale * self.tensor_scale)
                };
                if let (Some(bytes), Some(out)) =
                    (bytes.as_array::<{ BLOCK / 2 }>(), out.as_mut_array::<BLOCK>())
                {
                    let mut elements = [0; BLOCK];
                    for i in 0..BLOCK {
                        elements[i] = (bytes[i / 2] >> (i % 2 * 4)) & 0xF;
                    }
                    for i in 0..BLOCK {
                        out[i] = decode(elements[i]);
                    }
                } else {
                    for (i, out) in out.iter_mut().enumerate() {
                        *out = decode((bytes[i / 2] >> (i % 2 * 4)) & 0xF);
                    }
                }
            }
        }
    }
}
