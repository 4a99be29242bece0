//! Block-by-block error statistics of a quantized tensor: signal and noise, saturation, underflow,
//! and a histogram of block scales.
//!
//! [`crate::QuantStats`] is counted during quantization. This module compares a source with its
//! quantized operand afterwards, for a report.

use alloc::vec;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use self::quantized::{Mx, Nvfp4, Quantized, Storage, Task};
pub use self::sums::BlockSums;
use crate::error::{QuantizeError, Shape};
use crate::simd::Level;
use crate::threads::{ELEMENTS_PER_TASK, join};
use crate::{QuantFormat, Source, nvfp4};

mod quantized;
mod sums;
#[cfg(test)]
mod tests;

/// Sums for each possible block scale. Merging adds floating-point numbers, so the last bits of
/// signal and noise depend on the order of merging. Within one call the order is fixed by the
/// shape, for any number of threads.
///
/// ```
/// use deepwell_precision::{BlockStatistics, QuantFormat, quantize_rows, scales_len};
/// let source: Vec<f32> = (0..64).map(|i| i as f32).collect();
/// let (mut data, mut scales) = (vec![0; 64], vec![0; scales_len(1, 64)]);
/// let format = QuantFormat::MXFP8;
/// quantize_rows(&source, 1, 64, &format, &mut data, &mut scales)?;
/// let statistics = BlockStatistics::of_mx(&source, &data, &scales, 1, 64, &format)?;
/// assert_eq!(statistics.total().blocks, 2);
/// // The block that ends with 31 has the scale 2^-3 (31 / 448 rounded up), the other 2^-2.
/// let scales: Vec<u8> = statistics.by_scale().map(|(code, _)| code).collect();
/// assert_eq!(scales, [124, 125]);
/// assert!(statistics.total().signal_to_noise() > 1000.0);
/// # Ok::<(), deepwell_precision::QuantizeError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "Vec<BlockSums>", try_from = "Vec<BlockSums>")]
pub struct BlockStatistics {
    /// Indexed by scale byte.
    bins: Vec<BlockSums>,
}

/// Number of scale bytes.
const BINS: usize = 1 << 8;

impl From<BlockStatistics> for Vec<BlockSums> {
    fn from(statistics: BlockStatistics) -> Self {
        statistics.bins
    }
}

impl TryFrom<Vec<BlockSums>> for BlockStatistics {
    type Error = QuantizeError;

    fn try_from(bins: Vec<BlockSums>) -> Result<Self, QuantizeError> {
        Shape { rows: 1, cols: BINS }.expect("bins", BINS, bins.len())?;
        Ok(Self { bins })
    }
}

impl Default for BlockStatistics {
    fn default() -> Self {
        Self::new()
    }
}

impl BlockStatistics {
    /// Statistics of no block.
    #[must_use]
    pub fn new() -> Self {
        Self { bins: vec![BlockSums::default(); BINS] }
    }

    /// Compares a row-major [rows, cols] matrix with its quantized operand, one element per byte,
    /// as written by [`crate::quantize_rows`]. For a columnwise operand pass the transpose as
    /// `src`.
    ///
    /// # Errors
    ///
    /// [`QuantizeError::Length`] when a slice does not fit the shape.
    pub fn of_mx<S: Source>(
        src: &[S],
        data: &[u8],
        scales: &[u8],
        rows: usize,
        cols: usize,
        format: &QuantFormat,
    ) -> Result<Self, QuantizeError> {
        let shape = Shape::new(rows, cols)?;
        shape.expect("src", rows * cols, src.len())?;
        shape.expect("data", rows * cols, data.len())?;
        shape.expect("scales", crate::scales_len(rows, cols), scales.len())?;
        Self::of(Quantized { src, data, scales, cols, storage: Mx(*format) }, (0, rows))
    }

    /// Compares a row-major [rows, cols] matrix with its quantized operand, as written by
    /// [`nvfp4::quantize_rows`].
    ///
    /// # Errors
    ///
    /// [`QuantizeError::Length`] when a slice does not fit the shape.
    pub fn of_nvfp4<S: Source>(
        src: &[S],
        bytes: &[u8],
        scales: &[u8],
        tensor_scale: f32,
        rows: usize,
        cols: usize,
    ) -> Result<Self, QuantizeError> {
        let shape = Shape::new(rows, cols)?;
        shape.expect("src", rows * cols, src.len())?;
        shape.expect("bytes", crate::packed::fp4_len(rows, cols), bytes.len())?;
        shape.expect("scales", nvfp4::scales_len(rows, cols), scales.len())?;
        let storage = Nvfp4(tensor_scale);
        Self::of(Quantized { src, data: bytes, scales, cols, storage }, (0, rows))
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (bin, other) in self.bins.iter_mut().zip(&other.bins) {
            bin.merge(other);
        }
    }

    /// The sums of the blocks whose scale byte is `code`.
    #[must_use]
    pub fn bin(&self, code: u8) -> &BlockSums {
        &self.bins[usize::from(code)]
    }

    /// Histogram: the scale bytes that occur, ascending, with sums. For MX formats the scale is
    /// 2^(code - 127), for NVFP4 a [`crate::ue4m3`] value.
    pub fn by_scale(&self) -> impl Iterator<Item = (u8, &BlockSums)> {
        let bins = (0..=u8::MAX).map(|code| (code, self.bin(code)));
        bins.filter(|(_, bin)| bin.blocks + bin.blocks_not_finite > 0)
    }

    /// The sums of all blocks.
    #[must_use]
    pub fn total(&self) -> BlockSums {
        let mut total = BlockSums::default();
        self.bins.iter().for_each(|bin| total.merge(bin));
        total
    }

    /// Halves the rows until tasks are small.
    fn of<S: Source, F: Storage>(
        matrix: Quantized<'_, S, F>,
        (start, end): (usize, usize),
    ) -> Result<Self, QuantizeError> {
        if end - start > 1 && (end - start) * matrix.cols > ELEMENTS_PER_TASK {
            let middle = start + (end - start) / 2;
            let (left, right) =
                join(|| Self::of(matrix, (start, middle)), || Self::of(matrix, (middle, end)));
            let mut merged = left?;
            merged.merge(&right?);
            return Ok(merged);
        }
        let mut statistics = Self::new();
        let bins = &mut statistics.bins[..];
        Level::Native.run(Task { matrix, rows: (start, end), bins })?;
        Ok(statistics)
    }
}
