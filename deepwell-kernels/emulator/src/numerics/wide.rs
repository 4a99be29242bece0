//! Fixed-point number, wide enough for every product of two elements with their scales.

use crate::number::{Format, Rounding, encode_parts};

/// Exponent of the lowest bit. The least bit of a product is 2^-286: two subnormal E5M2 elements
/// with scales of 2^-127.
const LOWEST: i32 = -320;
/// 32 bits per limb, plus carries. The largest product is below 2^288; accumulators are below
/// 2^128.
const LIMBS: usize = 22;

/// A running sum.
pub(super) struct Wide {
    limbs: [i64; LIMBS],
}

impl Wide {
    pub(super) fn new() -> Wide {
        Wide { limbs: [0; LIMBS] }
    }

    /// Adds a finite multiple of 2^[`LOWEST`]. At most 2^30 values may be added.
    pub(super) fn add(&mut self, value: f64) {
        if value == 0.0 {
            return;
        }
        let bits = value.to_bits();
        let significand = bits & ((1 << 52) - 1) | 1 << 52;
        let zeros = significand.trailing_zeros();
        let significand = significand >> zeros;
        let power = (bits >> 52 & 0x7ff) as i32 - 1075 + zeros as i32 - LOWEST;
        let (limb, shift) = (power as usize / 32, power as u32 % 32);
        let shifted = u128::from(significand) << shift;
        for part in 0..3 {
            let limb_part = (shifted >> (32 * part)) as u32;
            if limb_part != 0 {
                let signed = if value < 0.0 { -i64::from(limb_part) } else { limb_part.into() };
                self.limbs[limb + part] += signed;
            }
        }
    }

    /// Rounds the sum to the nearest value of a format, ties to even.
    pub(super) fn round(mut self, format: Format) -> u32 {
        self.carry();
        let negative = self.limbs[LIMBS - 1] < 0;
        if negative {
            self.limbs = self.limbs.map(|limb| -limb);
            self.carry();
        }
        let Some(top) = self.limbs.iter().rposition(|&limb| limb != 0) else { return 0 };
        // Three limbs hold at least 65 bits. Of the lower limbs, only whether they are zero
        // matters.
        let limb = |down: usize| top.checked_sub(down).map_or(0, |index| self.limbs[index] as u128);
        let high = limb(0) << 64 | limb(1) << 32 | limb(2);
        let below = self.limbs[..top.saturating_sub(2)].iter().any(|&limb| limb != 0);
        // Reduces 96 bits to 60; the last bit is the OR of all discarded bits (sticky bit).
        let shift = (128 - high.leading_zeros()).saturating_sub(60);
        let rest = high & ((1 << shift) - 1) != 0 || below;
        let significand = (high >> shift) as u64 | u64::from(rest);
        let power = LOWEST + 32 * (top as i32 - 2) + shift as i32;
        encode_parts(format, negative, significand, power, Rounding::NearestEven)
    }

    /// Carries between limbs, so that every limb but the last has 32 bits.
    fn carry(&mut self) {
        for index in 0..LIMBS - 1 {
            self.limbs[index + 1] += self.limbs[index] >> 32;
            self.limbs[index] &= 0xffff_ffff;
        }
    }
}
