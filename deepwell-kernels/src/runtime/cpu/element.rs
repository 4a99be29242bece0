//! The two element types that CPU kernels read and write, and their conversion to and from `f32`.
//!
//! Every kernel computes in `f32`, whatever dtype it stores. The conversions are a few integer
//! operations without a branch, so that a loop over them is vectorized on any target; `half`'s own
//! conversions check for CPU features at run time, once per element.

use half::bf16;

/// A number that a CPU kernel can load, compute on as `f32`, and store.
///
/// ```
/// use deepwell_kernels::cpu::element::Element;
/// use half::bf16;
///
/// // 1 + 2^-8 lies halfway between two BF16 numbers and goes to the even one.
/// let stored = <bf16 as Element>::from_f32(1.0 + 0.00390625);
/// assert_eq!(Element::to_f32(stored), 1.0);
/// ```
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + std::fmt::Debug {
    /// Name of the type in configuration files.
    const NAME: &'static str;

    /// Largest relative error of [`Element::from_f32`] over normal numbers: half the distance
    /// between 1 and the next number, which is 2^-24 for `f32` and 2^-8 for BF16.
    ///
    /// (For `f32` the conversion itself is exact; the value is the rounding error of one arithmetic
    /// operation.)
    const UNIT_ROUNDOFF: f32;

    /// The value as `f32`, exactly.
    fn to_f32(self) -> f32;

    /// The nearest representable number, ties to even.
    ///
    /// Finite values beyond the largest number become infinite, infinities stay, and a NaN
    /// stays a (quiet) NaN.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    const NAME: &'static str = "f32";
    const UNIT_ROUNDOFF: f32 = 1.0 / (1u32 << 24) as f32;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for bf16 {
    const NAME: &'static str = "bf16";
    const UNIT_ROUNDOFF: f32 = 1.0 / 256.0;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        // Adding just under half of the last kept bit, plus this bit's parity, carries exactly when
        // round-to-nearest-even rounds up; an overflow carries into infinity.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // A NaN whose payload is in the low half would round to infinity, so NaNs keep the high
        // half and become quiet.
        let chosen = if value.is_nan() { bits | 0x0040_0000 } else { rounded };
        bf16::from_bits((chosen >> 16) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_round_trips_every_code() {
        for bits in 0..=u16::MAX {
            let value = bf16::from_bits(bits);
            let back = <bf16 as Element>::from_f32(Element::to_f32(value));
            if value.is_nan() {
                assert!(back.is_nan(), "code {bits:#06x}");
            } else {
                assert_eq!(back.to_bits(), bits, "code {bits:#06x}");
            }
        }
    }

    #[test]
    fn bf16_rounds_as_half_does() {
        // Every upper half, with lower halves at the rounding boundaries.
        for upper in 0..=u16::MAX {
            for lower in [0u16, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits((u32::from(upper) << 16) | u32::from(lower));
                let ours = <bf16 as Element>::from_f32(value);
                let theirs = bf16::from_f32(value);
                if value.is_nan() {
                    assert!(ours.is_nan(), "{:#010x}", value.to_bits());
                } else {
                    assert_eq!(ours.to_bits(), theirs.to_bits(), "{:#010x}", value.to_bits());
                }
            }
        }
    }

    #[test]
    fn unit_roundoff_is_half_the_gap_after_one() {
        let next = bf16::from_bits(bf16::ONE.to_bits() + 1);
        assert_eq!(Element::to_f32(next) - 1.0, 2.0 * <bf16 as Element>::UNIT_ROUNDOFF);
        assert_eq!(f32::EPSILON, 2.0 * <f32 as Element>::UNIT_ROUNDOFF);
    }
}
