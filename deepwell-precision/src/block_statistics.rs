//! What quantization did to a tensor, block by block: signal and noise, saturation, underflow, and
//! a histogram of block scales.
//!
//! [`crate::QuantStats`] is what a quantization counts in passing; this compares a source with its
//! quantized copy afterwards, for a report.

use alloc::vec;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::error::{QuantizeError, Shape};
use crate::simd::{Kernel, Level};
use crate::threads::{ELEMENTS_PER_TASK, join};
use crate::{ElementFormat, Source, dequantize_rows, e2m1, e8m0, nvfp4, ue4m3};

/// Sums over the elements of some blocks. Only blocks in which source and copy are finite are
/// measured; [`BlockSums::blocks_not_finite`] counts the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BlockSums {
    /// Blocks that were measured.
    pub blocks: u64,
    /// Blocks that hold a NaN or an infinity, in the source or in the copy.
    pub blocks_not_finite: u64,
    /// Elements of the measured blocks.
    pub elements: u64,
    /// Non-zero elements that came back as zero.
    pub underflows: u64,
    /// Elements that came back as the largest value of their block and are larger than it, by more
    /// than the roundings of the scales explain (one part in 2^20).
    pub saturations: u64,
    /// Sum of the squares of the source.
    pub signal: f64,
    /// Sum of the squares of what the copy differs from the source by.
    pub noise: f64,
}

impl BlockSums {
    /// Adds what `other` counted.
    pub fn merge(&mut self, other: &Self) {
        self.blocks += other.blocks;
        self.blocks_not_finite += other.blocks_not_finite;
        self.elements += other.elements;
        self.underflows += other.underflows;
        self.saturations += other.saturations;
        self.signal += other.signal;
        self.noise += other.noise;
    }

    /// Signal over noise, as a ratio of powers. Infinite for a copy without error, also of zeros.
    #[must_use]
    pub fn signal_to_noise(&self) -> f64 {
        if self.noise == 0.0 { f64::INFINITY } else { self.signal / self.noise }
    }

    /// [`BlockSums::signal_to_noise`] in decibels.
    #[cfg(feature = "std")]
    #[must_use]
    pub fn snr_db(&self) -> f64 {
        10.0 * self.signal_to_noise().log10()
    }

    /// Share of the measured elements that became zero without being zero, 0 to 1.
    #[must_use]
    pub fn underflow_fraction(&self) -> f64 {
        self.underflows as f64 / self.elements.max(1) as f64
    }

    /// Share of the measured elements that saturated, 0 to 1.
    #[must_use]
    pub fn saturation_fraction(&self) -> f64 {
        self.saturations as f64 / self.elements.max(1) as f64
    }
}

/// Sums for each scale that a block can have. Merging adds floating-point numbers, so the last bits
/// of signal and noise depend on the order of merging; within one call that order is fixed by the
/// shape, at any number of threads.
///
/// ```
/// use deepwell_precision::{BlockStatistics, MxSpec, quantize_rows, scales_len};
/// let source: Vec<f32> = (0..64).map(|i| i as f32).collect();
/// let (mut data, mut scales) = (vec![0; 64], vec![0; scales_len(1, 64)]);
/// let spec = MxSpec::default();
/// quantize_rows(&source, 1, 64, &spec, &mut data, &mut scales)?;
/// let statistics =
///     BlockStatistics::of_mx(&source, &data, &scales, 1, 64, spec.element)?;
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
    /// By scale byte.
    bins: Vec<BlockSums>,
}

/// Scale bytes that there are.
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
    /// Of no block.
    #[must_use]
    pub fn new() -> Self {
        Self { bins: vec![BlockSums::default(); BINS] }
    }

    /// Of a row-major [rows, cols] matrix and its copy with one code to a byte, as
    /// [`crate::quantize_rows`] makes it. For a column copy pass the transpose as `src`.
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
        element: ElementFormat,
    ) -> Result<Self, QuantizeError> {
        let shape = Shape::new(rows, cols)?;
        shape.expect("src", rows * cols, src.len())?;
        shape.expect("data", rows * cols, data.len())?;
        shape.expect("scales", crate::scales_len(rows, cols), scales.len())?;
        Self::of(&Mx { src, data, scales, cols, element }, (0, rows))
    }

    /// Of a row-major [rows, cols] matrix and its copy as [`nvfp4::quantize_rows`] makes it.
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
        Self::of(&Nvfp4 { src, bytes, scales, tensor_scale, cols }, (0, rows))
    }

    /// Adds what `other` counted.
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

    /// Scale bytes that occur, in rising order, each with its sums: the histogram. For MX formats
    /// the scale is 2^(code - 127), for NVFP4 that of [`ue4m3`].
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
    fn of<C: Copied>(copy: &C, (start, end): (usize, usize)) -> Result<Self, QuantizeError> {
        if end - start > 1 && (end - start) * copy.cols() > ELEMENTS_PER_TASK {
            let middle = start + (end - start) / 2;
            let (left, right) =
                join(|| Self::of(copy, (start, middle)), || Self::of(copy, (middle, end)));
            let mut merged = left?;
            merged.merge(&right?);
            return Ok(merged);
        }
        let mut statistics = Self::new();
        let bins = &mut statistics.bins[..];
        Level::Native.run(Task { copy, rows: (start, end), bins })?;
        Ok(statistics)
    }
}

/// A source beside its quantized copy.
trait Copied: Sync {
    type Source: Source;
    /// Elements along a row that share a scale byte.
    const BLOCK: usize;

    fn cols(&self) -> usize;
    fn source(&self) -> &[Self::Source];
    fn scales(&self) -> &[u8];
    /// The largest value of a block, by its scale byte.
    fn largest(&self, scale: u8) -> f32;
    /// The values of `row` from column `col` on, a multiple of the block.
    fn dequantize(&self, row: usize, col: usize, values: &mut [f32]) -> Result<(), QuantizeError>;
}

struct Mx<'a, S> {
    src: &'a [S],
    data: &'a [u8],
    scales: &'a [u8],
    cols: usize,
    element: ElementFormat,
}

impl<S: Source> Copied for Mx<'_, S> {
    type Source = S;
    const BLOCK: usize = crate::BLOCK;

    fn cols(&self) -> usize {
        self.cols
    }

    fn source(&self) -> &[S] {
        self.src
    }

    fn scales(&self) -> &[u8] {
        self.scales
    }

    #[inline(always)]
    fn largest(&self, scale: u8) -> f32 {
        self.element.max() * e8m0::decode(scale)
    }

    fn dequantize(&self, row: usize, col: usize, values: &mut [f32]) -> Result<(), QuantizeError> {
        let (cols, blocks) = (values.len(), values.len().div_ceil(Self::BLOCK));
        let data = &self.data[row * self.cols + col..][..cols];
        let first = row * self.cols.div_ceil(Self::BLOCK) + col / Self::BLOCK;
        dequantize_rows(data, &self.scales[first..][..blocks], 1, cols, self.element, values)
    }
}

struct Nvfp4<'a, S> {
    src: &'a [S],
    bytes: &'a [u8],
    scales: &'a [u8],
    tensor_scale: f32,
    cols: usize,
}

impl<S: Source> Copied for Nvfp4<'_, S> {
    type Source = S;
    const BLOCK: usize = nvfp4::BLOCK;

    fn cols(&self) -> usize {
        self.cols
    }

    fn source(&self) -> &[S] {
        self.src
    }

    fn scales(&self) -> &[u8] {
        self.scales
    }

    #[inline(always)]
    fn largest(&self, scale: u8) -> f32 {
        e2m1::MAX * ue4m3::decode(scale) * self.tensor_scale
    }

    fn dequantize(&self, row: usize, col: usize, values: &mut [f32]) -> Result<(), QuantizeError> {
        let (cols, blocks) = (values.len(), values.len().div_ceil(Self::BLOCK));
        let first = row * self.cols.div_ceil(2) + col / 2;
        let bytes = &self.bytes[first..][..cols.div_ceil(2)];
        let first = row * self.cols.div_ceil(Self::BLOCK) + col / Self::BLOCK;
        let scales = &self.scales[first..][..blocks];
        nvfp4::dequantize_rows(bytes, scales, self.tensor_scale, 1, cols, values)
    }
}

/// Some rows and where their sums go.
struct Task<'a, C> {
    copy: &'a C,
    rows: (usize, usize),
    bins: &'a mut [BlockSums],
}

/// Elements that are summed in lanes: a block of NVFP4, half of one of MX.
const LANES: usize = 16;
/// Elements of a row that are dequantized together, into a buffer on the stack.
const SEGMENT: usize = 2048;

impl<C: Copied> Kernel for Task<'_, C> {
    type Output = Result<(), QuantizeError>;

    #[inline(always)]
    fn call(self) -> Result<(), QuantizeError> {
        let Self { copy, rows, bins } = self;
        let (cols, blocks) = (copy.cols(), copy.cols().div_ceil(C::BLOCK));
        let mut values = [0.0; SEGMENT];
        for row in rows.0..rows.1 {
            for col in (0..cols).step_by(SEGMENT) {
                let values = &mut values[..SEGMENT.min(cols - col)];
                copy.dequantize(row, col, values)?;
                let src = &copy.source()[row * cols + col..][..values.len()];
                let scales = &copy.scales()[row * blocks + col / C::BLOCK..];
                let parts = src.chunks(C::BLOCK).zip(values.chunks(C::BLOCK)).zip(scales);
                for ((src, values), &scale) in parts {
                    add_block(src, values, copy.largest(scale), &mut bins[usize::from(scale)]);
                }
            }
        }
        Ok(())
    }
}

/// Adds a block to the sums of its scale.
#[inline(always)]
fn add_block<S: Source>(src: &[S], values: &[f32], largest: f32, bin: &mut BlockSums) {
    let mut sums = BlockSums { blocks: 1, elements: src.len() as u64, ..BlockSums::default() };
    let (src_parts, src_rest) = src.as_chunks::<LANES>();
    let (value_parts, value_rest) = values.as_chunks::<LANES>();
    let mut finite = true;
    for (src, values) in src_parts.iter().zip(value_parts) {
        let mut x = [0.0; LANES];
        for lane in 0..LANES {
            x[lane] = src[lane].to_f32();
        }
        finite &= add(&x, values, largest, &mut sums);
    }
    if !src_rest.is_empty() {
        // Zeros that are still zero add nothing.
        let (mut x, mut y) = ([0.0; LANES], [0.0; LANES]);
        for (x, src) in x.iter_mut().zip(src_rest) {
            *x = src.to_f32();
        }
        y[..value_rest.len()].copy_from_slice(value_rest);
        finite &= add(&x, &y, largest, &mut sums);
    }
    if finite {
        bin.merge(&sums);
    } else {
        bin.blocks_not_finite += 1;
    }
}

/// Adds some elements to `sums` and says whether all of them are finite.
///
/// Squares are formed and sixteen of them summed in f32, of elements scaled by a power of two so
/// that the largest lies between 1 and 2: nothing overflows, and what underflows is too small to
/// matter beside it.
#[inline(always)]
fn add(x: &[f32; LANES], y: &[f32; LANES], largest: f32, sums: &mut BlockSums) -> bool {
    const INFINITY_BITS: u32 = 0x7F80_0000;
    // Above this an element that came back as the largest value has saturated.
    let limit = largest * (1.0 + 1.0 / (1 << 20) as f32);
    let (mut underflows, mut saturations, mut magnitude) = (0_u32, 0_u32, 0_u32);
    for lane in 0..LANES {
        let (x, y) = (x[lane], y[lane]);
        magnitude = magnitude.max(x.to_bits() & 0x7FFF_FFFF).max(y.to_bits() & 0x7FFF_FFFF);
        underflows += u32::from((x != 0.0) & (y == 0.0));
        saturations += u32::from((x.abs() > limit) & (y.abs() == largest));
    }
    // From 2^-126 to 2^126, whose reciprocals are normal numbers.
    let exponent = (magnitude >> 23).clamp(1, 253);
    let factor = f32::from_bits((254 - exponent) << 23);
    let (mut signal, mut noise) = ([0.0; LANES], [0.0; LANES]);
    for lane in 0..LANES {
        let (x, y) = (x[lane] * factor, y[lane] * factor);
        signal[lane] = x * x;
        noise[lane] = (x - y) * (x - y);
    }
    let square = f64::from_bits(u64::from(2 * exponent + 1023 - 254) << 52);
    // A block whose scale is zero holds nothing that could saturate: all of it underflows.
    sums.saturations += if largest > 0.0 { u64::from(saturations) } else { 0 };
    sums.underflows += u64::from(underflows);
    sums.signal += f64::from(sum_of_lanes(signal)) * square;
    sums.noise += f64::from(sum_of_lanes(noise)) * square;
    magnitude < INFINITY_BITS
}

/// In halves, so that a sum waits for four additions and not for sixteen.
#[inline(always)]
fn sum_of_lanes(mut x: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            x[lane] += x[lane + half];
        }
    }
    x[0]
}

#[cfg(test)]
mod tests;
