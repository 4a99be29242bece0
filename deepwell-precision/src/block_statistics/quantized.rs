//! Comparison of a source with its quantized matrix, in a single pass over both.

use super::sums::{BlockSums, add_block};
use crate::error::QuantizeError;
use crate::simd::Kernel;
use crate::{QuantFormat, Source, dequantize_rows, e2m1, e8m0, nvfp4, ue4m3};

/// How a quantized matrix stores data and scales.
pub(super) trait Storage: Copy + Sync {
    /// Elements along a row that share a scale byte; even.
    const BLOCK: usize;

    /// Bytes of the data of `cols` elements from the start of a row.
    fn code_bytes(cols: usize) -> usize;
    /// The largest representable magnitude of a block, given its scale byte.
    fn largest(self, scale: u8) -> f32;
    /// Dequantizes a part of one row that begins at a block boundary.
    fn dequantize(
        self,
        data: &[u8],
        scales: &[u8],
        values: &mut [f32],
    ) -> Result<(), QuantizeError>;
}

/// MX formats: one element per byte, blocks of 32 with a power-of-two scale.
#[derive(Clone, Copy)]
pub(super) struct Mx(pub(super) QuantFormat);

impl Storage for Mx {
    const BLOCK: usize = crate::BLOCK;

    fn code_bytes(cols: usize) -> usize {
        cols
    }

    #[inline(always)]
    fn largest(self, scale: u8) -> f32 {
        self.0.element.max() * e8m0::decode(scale)
    }

    fn dequantize(
        self,
        data: &[u8],
        scales: &[u8],
        values: &mut [f32],
    ) -> Result<(), QuantizeError> {
        dequantize_rows(data, scales, 1, values.len(), &self.0, values)
    }
}

/// NVFP4 with its tensor scale.
#[derive(Clone, Copy)]
pub(super) struct Nvfp4(pub(super) f32);

impl Storage for Nvfp4 {
    const BLOCK: usize = nvfp4::BLOCK;

    fn code_bytes(cols: usize) -> usize {
        cols.div_ceil(2)
    }

    #[inline(always)]
    fn largest(self, scale: u8) -> f32 {
        e2m1::MAX * ue4m3::decode(scale) * self.0
    }

    fn dequantize(
        self,
        data: &[u8],
        scales: &[u8],
        values: &mut [f32],
    ) -> Result<(), QuantizeError> {
        nvfp4::dequantize_rows(data, scales, self.0, 1, values.len(), values)
    }
}

/// A source and its quantized matrix, of matching lengths.
#[derive(Clone, Copy)]
pub(super) struct Quantized<'a, S, F> {
    pub(super) src: &'a [S],
    pub(super) data: &'a [u8],
    pub(super) scales: &'a [u8],
    pub(super) cols: usize,
    pub(super) storage: F,
}

/// A range of rows and the destination of its sums.
pub(super) struct Task<'a, S, F> {
    pub(super) matrix: Quantized<'a, S, F>,
    pub(super) rows: (usize, usize),
    /// One per scale byte.
    pub(super) bins: &'a mut [BlockSums],
}

/// Elements of a row that are dequantized together, into a buffer on the stack.
const SEGMENT: usize = 2048;

impl<S: Source, F: Storage> Kernel for Task<'_, S, F> {
    type Output = Result<(), QuantizeError>;

    #[inline(always)]
    fn call(self) -> Result<(), QuantizeError> {
        let Self { matrix: Quantized { src, data, scales, cols, storage }, rows, bins } = self;
        let (row_bytes, row_blocks) = (F::code_bytes(cols), cols.div_ceil(F::BLOCK));
        let mut values = [0.0; SEGMENT];
        for row in rows.0..rows.1 {
            for col in (0..cols).step_by(SEGMENT) {
                let values = &mut values[..SEGMENT.min(cols - col)];
                let src = &src[row * cols + col..][..values.len()];
                let data = &data[row * row_bytes + F::code_bytes(col)..];
                let data = &data[..F::code_bytes(values.len())];
                let scales = &scales[row * row_blocks + col / F::BLOCK..];
                let scales = &scales[..values.len().div_ceil(F::BLOCK)];
                storage.dequantize(data, scales, values)?;
                let parts = src.chunks(F::BLOCK).zip(values.chunks(F::BLOCK)).zip(scales);
                for ((src, values), &scale) in parts {
                    add_block(src, values, storage.largest(scale), &mut bins[usize::from(scale)]);
                }
            }
        }
        Ok(())
    }
}
