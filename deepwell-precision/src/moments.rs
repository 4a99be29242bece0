//! Moments of AdamW in eight bits.
//!
//! A block of [`BLOCK`] elements has [`BLOCK_BYTES`] bytes: the E4M3 codes, then an FP32 scale, a
//! power of two. The first moment is stored as it is, the second as its square root, which has half
//! the range of exponents. The scale is the smallest power of two by which the largest magnitude of
//! the block fits into E4M3.
//!
//! An update changes a second moment by a few percent, which is less than the distance of two
//! codes, so rounding to nearest would keep many codes forever. Codes are therefore rounded
//! stochastically, away from zero with a probability equal to the fraction of the distance to the
//! next code. A positive second moment never becomes zero: an update divides by its root.
//!
//! Decoded moments are exact in BF16, and encoding them again returns the same values.
//!
//! ```
//! use deepwell_precision::moments::{self, BLOCK, Moment, NEAREST};
//!
//! let values: [f32; BLOCK] = std::array::from_fn(|i| (i as f32 * 0.1).sin());
//! let (mut block, mut decoded) = ([0; moments::BLOCK_BYTES], [0.0; BLOCK]);
//! moments::encode(&values, Moment::First, &NEAREST, &mut block);
//! moments::decode(&block, Moment::First, &mut decoded);
//! for (value, decoded) in values.iter().zip(decoded) {
//!     // Half a code of three fraction bits, and half a subnormal code of the largest, 1.
//!     assert!((value - decoded).abs() <= value.abs() / 16.0 + 1.0 / 256.0 / 512.0);
//! }
//! ```

/// Elements with a common scale.
pub const BLOCK: usize = 128;

/// Bytes of a block: the codes and the scale.
pub const BLOCK_BYTES: usize = BLOCK + size_of::<f32>();

/// Random words that round to nearest, ties away from zero.
pub const NEAREST: [u32; BLOCK] = [0x8000_8000; BLOCK];

/// A moment of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Running mean of the gradient.
    First,
    /// Running mean of the squared gradient, stored as its square root.
    Second,
}

/// Number of blocks of `elements` elements; zeros fill the last block.
#[must_use]
pub const fn blocks(elements: usize) -> usize {
    elements.div_ceil(BLOCK)
}

/// Ratio of the smallest normal numbers of E4M3 and FP32: a code is the upper bits of an FP32
/// number that is smaller by this factor, also of subnormal numbers.
const RANGE: f32 = f32::from_bits((120 + 127) << 23);
const RANGE_RECIPROCAL: f32 = f32::from_bits((127 - 120) << 23);
/// Bits of FP32 below the last bit of a code.
const CODE_SHIFT: u32 = 20;
const CODE_NAN: u32 = 0x7F;
/// The smallest exponent of a scale. The scale's reciprocal, and 2^-120 of the reciprocal, are
/// normal numbers.
const EXPONENT_MIN: i32 = -100;

/// Decodes a block.
#[inline(always)]
pub fn decode(block: &[u8; BLOCK_BYTES], moment: Moment, values: &mut [f32; BLOCK]) {
    let scale = scale_of(block);
    for (value, &code) in values.iter_mut().zip(block) {
        let magnitude = u32::from(code) & 0x7F;
        let magnitude = match magnitude == CODE_NAN {
            true => f32::NAN,
            false => f32::from_bits(magnitude << CODE_SHIFT) * RANGE,
        };
        let sign = u32::from(code & 0x80) << 24;
        let stored = f32::from_bits(magnitude.to_bits() | sign) * scale;
        *value = match moment {
            Moment::First => stored,
            Moment::Second => stored * stored,
        };
    }
}

/// Encodes a block. Of the random words, one for each element, a first moment uses the lower 16
/// bits and a second moment the upper 16.
///
/// NaN and infinities become NaN.
#[inline(always)]
pub fn encode(
    values: &[f32; BLOCK],
    moment: Moment,
    random: &[u32; BLOCK],
    block: &mut [u8; BLOCK_BYTES],
) {
    let mut stored = *values;
    if moment == Moment::Second {
        stored.iter_mut().for_each(|value| *value = value.sqrt());
    }
    // As integers, so that NaN is the largest.
    let magnitudes = stored.iter().map(|value| value.to_bits() & 0x7FFF_FFFF);
    let (scale, reciprocal) = scale_for(magnitudes.fold(0, u32::max));
    for ((code, value), random) in block.iter_mut().zip(stored).zip(random) {
        let shrunk = (value.abs() * reciprocal) * RANGE_RECIPROCAL;
        let random = match moment {
            Moment::First => (random & 0xFFFF) << 4,
            Moment::Second => random >> 16 << 4,
        };
        let rounded = ((shrunk.to_bits() + random) >> CODE_SHIFT).min(CODE_NAN);
        let is_lost = moment == Moment::Second && rounded == 0 && value > 0.0;
        let sign = value.to_bits() >> 24 & 0x80;
        *code = (rounded | sign) as u8 | u8::from(is_lost);
    }
    block[BLOCK..].copy_from_slice(&scale.to_le_bytes());
}

fn scale_of(block: &[u8; BLOCK_BYTES]) -> f32 {
    let [.., a, b, c, d] = *block;
    f32::from_le_bytes([a, b, c, d])
}

/// The scale for a block whose largest magnitude has these bits, and the scale's reciprocal.
#[inline(always)]
fn scale_for(largest_bits: u32) -> (f32, f32) {
    // 448 is 1.75 * 2^8.
    let is_above = (largest_bits & 0x007F_FFFF) > 0x0060_0000;
    let exponent = (largest_bits >> 23) as i32 - 127 - 8 + i32::from(is_above);
    let exponent = exponent.max(EXPONENT_MIN);
    let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
    (power(exponent), power(-exponent))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Philox, Rounding, e4m3};

    fn round_trip(values: &[f32; BLOCK], moment: Moment, random: &[u32; BLOCK]) -> [f32; BLOCK] {
        let (mut block, mut decoded) = ([0xA5; BLOCK_BYTES], [0.0; BLOCK]);
        encode(values, moment, random, &mut block);
        decode(&block, moment, &mut decoded);
        decoded
    }

    fn random_words(stream: u64) -> [u32; BLOCK] {
        let mut words = [0; BLOCK];
        Philox { seed: 7, stream }.fill(0, &mut words);
        words
    }

    #[test]
    fn every_code_survives() {
        let scale = 2f32.powi(-20);
        for half in [0x00, 0x80] {
            // 0x7F is NaN; the largest code fixes the scale.
            let values = std::array::from_fn(|i| match i {
                0x7F => e4m3::decode(e4m3::CODE_MAX) * scale,
                i => e4m3::decode(half | i as u8) * scale,
            });
            for random in [NEAREST, [0; BLOCK], [u32::MAX; BLOCK], random_words(1)] {
                let decoded = round_trip(&values, Moment::First, &random);
                assert_eq!(decoded.map(f32::to_bits), values.map(f32::to_bits));
            }
        }
    }

    #[test]
    fn decoded_moments_are_exact_in_bf16_and_stay() {
        for moment in [Moment::First, Moment::Second] {
            for stream in 0..100 {
                let words = random_words(stream);
                let sizes: [f32; BLOCK] = words.map(|word| {
                    // Twenty binades, both signs for the first moment.
                    let size = (word >> 8) as f32 * 2f32.powi(-24 - (word & 31) as i32);
                    if moment == Moment::First && word & 64 > 0 { -size } else { size }
                });
                let once = round_trip(&sizes, moment, &random_words(1000 + stream));
                assert!(once.iter().all(|value| value.to_bits() & 0xFFFF == 0), "{moment:?}");
                let twice = round_trip(&once, moment, &random_words(2000 + stream));
                assert_eq!(twice, once, "{moment:?} {stream}");
            }
        }
    }

    #[test]
    fn rounding_to_nearest_is_that_of_e4m3() {
        let words = random_words(3);
        let mut values = words.map(|word| word as f32 / 2f32.powi(32) * 448.0);
        values[0] = 448.0;
        let decoded = round_trip(&values, Moment::First, &NEAREST);
        for (value, decoded) in values.into_iter().zip(decoded) {
            let overflow = crate::Overflow::Saturate;
            let expected = e4m3::decode(e4m3::encode(value, Rounding::NearestEven, overflow));
            assert_eq!(decoded, expected, "{value}");
        }
    }

    /// The mean of `n` roundings differs from the value by a few standard errors, at most half a
    /// code over the root of `n`. Rounding to nearest or toward zero fails.
    #[test]
    fn stochastic_rounding_has_the_right_mean() {
        // Normal and subnormal codes, both nearer to the lower one.
        let mut values = [0.0; BLOCK];
        (values[0], values[1], values[2]) = (448.0, 1.03, 0.3 / 512.0);
        let mut sums = [0.0f64; 3];
        let n = 20_000;
        for stream in 0..n {
            let decoded = round_trip(&values, Moment::First, &random_words(stream));
            sums.iter_mut().zip(decoded).for_each(|(sum, value)| *sum += f64::from(value));
        }
        for (at, code) in [(0, 0.0), (1, 0.125), (2, 1.0 / 512.0)] {
            let mean = sums[at] / n as f64;
            let error = (mean - f64::from(values[at])).abs();
            assert!(error <= 4.0 * 0.5 * code / (n as f64).sqrt(), "{at}: {mean}");
        }
    }

    #[test]
    fn a_positive_second_moment_stays_positive() {
        let mut values = [1e-30; BLOCK];
        values[5] = 1.0;
        values[6] = 0.0;
        let decoded = round_trip(&values, Moment::Second, &[0; BLOCK]);
        // The smallest code under a scale of 1 / 256.
        let least = (2f32.powi(-9) / 256.0).powi(2);
        for (at, value) in decoded.into_iter().enumerate() {
            let expected = match at {
                5 => 1.0,
                6 => 0.0,
                _ => least,
            };
            assert_eq!(value, expected, "{at}");
        }
    }

    #[test]
    fn zeros_tiny_and_huge_blocks() {
        assert_eq!(round_trip(&[0.0; BLOCK], Moment::First, &random_words(1)), [0.0; BLOCK]);
        for size in [3e38, 1e30, 1e-25, f32::MIN_POSITIVE, 1e-45] {
            let decoded = round_trip(&[size; BLOCK], Moment::First, &NEAREST)[0];
            // Below 2^-109, half of the smallest code under the smallest scale.
            let tolerance = (size / 16.0).max(2f32.powi(-110));
            assert!((decoded - size).abs() <= tolerance, "{size} {decoded}");
        }
        // Bytes of zeros are moments of zero.
        let mut decoded = [1.0; BLOCK];
        decode(&[0; BLOCK_BYTES], Moment::Second, &mut decoded);
        assert_eq!(decoded, [0.0; BLOCK]);
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; BLOCK];
            values[3] = bad;
            let decoded = round_trip(&values, Moment::First, &random_words(1));
            assert!(decoded[3].is_nan(), "{bad}");
        }
    }
}
