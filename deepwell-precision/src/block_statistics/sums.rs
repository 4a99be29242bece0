//! The sums of blocks, and the addition of one block.

use serde::{Deserialize, Serialize};

use crate::Source;

/// Sums over the elements of some blocks. A block is measured only if its source and quantized
/// values are finite; [`BlockSums::blocks_not_finite`] counts the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BlockSums {
    /// Measured blocks.
    pub blocks: u64,
    /// Blocks with a NaN or an infinity, in the source or in the quantized values.
    pub blocks_not_finite: u64,
    /// Elements of the measured blocks.
    pub elements: u64,
    /// Non-zero elements that became zero.
    pub underflows: u64,
    /// Elements that became the largest value of their block but exceed this value by more than the
    /// rounding of scales explains (one part in 2^20).
    pub saturations: u64,
    /// Sum of the squares of the source.
    pub signal: f64,
    /// Sum of the squares of the differences between source and quantized values.
    pub noise: f64,
}

impl BlockSums {
    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.blocks += other.blocks;
        self.blocks_not_finite += other.blocks_not_finite;
        self.elements += other.elements;
        self.underflows += other.underflows;
        self.saturations += other.saturations;
        self.signal += other.signal;
        self.noise += other.noise;
    }

    /// Signal over noise, as a ratio of powers. Infinite without error, also for zeros.
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

    /// Share of the measured elements that underflowed to zero, 0 to 1.
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

/// Elements that are summed in lanes: an NVFP4 block, or half an MX block.
const LANES: usize = 16;

/// Adds a block to the sums of its scale.
#[inline(always)]
pub(super) fn add_block<S: Source>(src: &[S], values: &[f32], largest: f32, bin: &mut BlockSums) {
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
        // Padding zeros add nothing.
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

/// Adds some elements to `sums` and returns whether all of them are finite.
///
/// Elements are scaled by a power of two so that the largest lies between 1 and 2; then squares are
/// formed, and sixteen of them are summed, in f32. Nothing overflows, and squares that underflow
/// are negligible compared with the largest.
#[inline(always)]
fn add(x: &[f32; LANES], y: &[f32; LANES], largest: f32, sums: &mut BlockSums) -> bool {
    const INFINITY_BITS: u32 = 0x7F80_0000;
    // An element above this limit has saturated if it became the largest value.
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
    // If the scale of a block is zero, its elements underflow and none saturates.
    sums.saturations += if largest > 0.0 { u64::from(saturations) } else { 0 };
    sums.underflows += u64::from(underflows);
    sums.signal += f64::from(sum_of_lanes(signal)) * square;
    sums.noise += f64::from(sum_of_lanes(noise)) * square;
    magnitude < INFINITY_BITS
}

/// Pairwise, so that the critical path has four additions instead of sixteen.
#[inline(always)]
fn sum_of_lanes(mut x: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            x[lane] += x[lane + half];
        }
    }
    x[0]
}
