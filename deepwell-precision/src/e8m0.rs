//! E8M0: eight exponent bits and nothing else, the format of block scales.
//!
//! ```text
//! bit     7 6 5 4 3 2 1 0
//!         e e e e e e e e       2^(e - 127); 0xFF: NaN. No sign, no zero, no infinity.
//! ```
//!
//! # From the largest magnitude of a block to its scale
//!
//! [`from_amax`] implements the two rules of [`ScaleRule`]. Both give 0x00 for an amax of zero,
//! 0xFE for infinity and 0xFF for NaN.
//!
//! - **RCEIL**: `s = amax / 448` (for another element format, its largest finite value replaces
//!   448, here and below), *divided* in f32 as the cuBLAS documentation specifies. The scale is the
//!   exponent of `s`, plus one if its fraction is not zero: the smallest power of two that is at
//!   least `s`. Multiplying by the rounded reciprocal, as some libraries do, gives other quotients
//!   but the same scales, unless quotients are subnormal (a test covers all fractions). The f32
//!   neighbours of 448 * 2^k lie more than half an ulp of `s` apart, so no finite amax is scaled
//!   beyond 448. Only below 448 * 2^-126, where `s` is subnormal, may it exceed 448 by one part in
//!   2^23, which still rounds to 448. So RCEIL never saturates finite input, with one exception:
//!   elements of a block with an amax above (2 - 2^-m) * 2^127, `m` the fraction bits of an element
//!   (1.875 * 2^127 for E4M3), would round to 2^128, beyond f32. Such a block gets the scale of the
//!   floor rule, and larger magnitudes become the largest element (448 * 2^119 for E4M3). These
//!   saturations are not counted.
//! - **OCP floor**: 2^(floor(log2 amax) - 8) (15 for E5M2, 4 for E3M2, 2 for E2M3 and E2M1), of the
//!   OCP MX specification v1.0. The scaled amax lies in [256, 512), so magnitudes above 448
//!   saturate.
//!
//! Under a third rule, **MIN_ERROR**, the scale depends on all elements of a block
//! ([`from_block`]): the RCEIL scale or half of it, whichever gives the smaller squared error. Both
//! give a normal floating-point element the same relative error. The smaller scale helps blocks
//! with elements below the smallest normal, particularly in formats of few bits.

use crate::{ElementFormat, Overflow, Rounding, ScaleRule, min_error};

/// Code of NaN.
pub const CODE_NAN: u8 = 0xFF;
/// Code of the largest scale, 2^127.
pub const CODE_MAX: u8 = 0xFE;
/// Code of 1.0.
pub const CODE_ONE: u8 = 127;

const INFINITY_BITS: u32 = 0x7F80_0000;

/// Value of `code`: 2^(code - 127), NaN for 0xFF. Code 0 is the subnormal 2^-127.
#[must_use]
pub const fn decode(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        CODE_NAN => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

/// 2^(127 - code), the exact factor that removes a scale; NaN for 0xFF.
#[must_use]
pub const fn reciprocal(code: u8) -> f32 {
    match code {
        CODE_NAN => f32::NAN,
        _ => decode(254 - code),
    }
}

/// Code of `x`, rounded to a power of two. `NearestEven` measures distance on the number line and
/// breaks the tie at 1.5 * 2^k toward the even code. Zero and values below 2^-127 become 0x00. NaN
/// and negative values become NaN. Values beyond 2^127 become 0xFE when saturating, otherwise NaN.
///
/// ```
/// use deepwell_precision::{Overflow, Rounding, e8m0};
/// assert_eq!(e8m0::encode(1.1, Rounding::TowardPositive, Overflow::Saturate), 128);
/// assert_eq!(e8m0::encode(1.1, Rounding::TowardZero, Overflow::Saturate), 127);
/// ```
#[must_use]
pub fn encode(x: f32, rounding: Rounding, overflow: Overflow) -> u8 {
    if x.is_nan() || x < 0.0 {
        return CODE_NAN;
    }
    let beyond = match overflow {
        Overflow::Saturate => CODE_MAX,
        Overflow::NonFinite => CODE_NAN,
    };
    if x == f32::INFINITY {
        return beyond;
    }
    // Scaling by 2^32 makes every subnormal input normal, so that one rule on the fraction serves.
    // 2^-127 itself has its single bit at 2^22 units of 2^-149.
    if x <= decode(0) {
        return 0;
    }
    let (bits, offset) = if x < f32::MIN_POSITIVE {
        ((x * f32::from_bits((127 + 32) << 23)).to_bits(), 32)
    } else {
        (x.to_bits(), 0)
    };
    let code = (bits >> 23) as i32 - offset;
    let fraction = bits & 0x007F_FFFF;
    let up = match rounding {
        Rounding::NearestEven => {
            fraction > 0x0040_0000 || (fraction == 0x0040_0000 && code & 1 == 1)
        }
        Rounding::TowardZero => false,
        Rounding::TowardPositive => fraction > 0,
    };
    let code = code + i32::from(up);
    if code <= i32::from(CODE_MAX) {
        code as u8
    } else if rounding == Rounding::TowardZero {
        CODE_MAX
    } else {
        beyond
    }
}

/// Scale of a block of E4M3 elements whose largest magnitude is `amax`; the sign of `amax` is
/// ignored. See the module documentation for the rules and the edge cases. [`ScaleRule::MinError`]
/// depends on all elements; here the rule gives its larger candidate.
///
/// ```
/// use deepwell_precision::{ScaleRule, e8m0};
/// assert_eq!(e8m0::from_amax(448.0, ScaleRule::Rceil), 127);
/// assert_eq!(e8m0::from_amax(480.0, ScaleRule::Rceil), 128);
/// assert_eq!(e8m0::from_amax(480.0, ScaleRule::OcpFloor), 127);
/// ```
#[must_use]
pub fn from_amax(amax: f32, rule: ScaleRule) -> u8 {
    from_amax_for(amax, ElementFormat::E4M3, rule)
}

/// [`from_amax`] for any element format.
#[must_use]
pub fn from_amax_for(amax: f32, element: ElementFormat, rule: ScaleRule) -> u8 {
    let bits = amax.to_bits() & 0x7FFF_FFFF;
    if bits > INFINITY_BITS {
        CODE_NAN
    } else if bits == INFINITY_BITS {
        CODE_MAX
    } else {
        let scale = finite_scale(bits, ScaleConstants::new(element), rule);
        scale.code as u8
    }
}

/// Scale of a block from all its elements, in runs of `run` elements: a block along K is one run,
/// in a square block each column of the source is one run, also if the matrix ends within the
/// block. [`ScaleRule::MinError`] needs all elements; for other rules the largest magnitude is
/// enough.
///
/// ```
/// use deepwell_precision::{ElementFormat, ScaleRule, e8m0};
/// // Under the scale 1 7 saturates to 6; under 2 it becomes 8, and 0.5 becomes 0, which is worse.
/// let block = [7.0, 3.0, 3.0, 3.0, 3.0, 0.5];
/// let scale = |rule| e8m0::decode(e8m0::from_block(&block, 6, ElementFormat::E2M1, rule));
/// assert_eq!((scale(ScaleRule::Rceil), scale(ScaleRule::MinError)), (2.0, 1.0));
/// ```
#[must_use]
pub fn from_block(elements: &[f32], run: usize, element: ElementFormat, rule: ScaleRule) -> u8 {
    let amax = elements.iter().fold(0, |amax, x| (x.to_bits() & 0x7FFF_FFFF).max(amax));
    let scale = from_amax_for(f32::from_bits(amax), element, rule);
    match rule {
        ScaleRule::MinError if amax < INFINITY_BITS => {
            min_error::scale(elements, run, element, scale)
        }
        _ => scale,
    }
}

/// Constants of the scale rules that depend on the element format.
#[derive(Clone, Copy)]
pub(crate) struct ScaleConstants {
    /// Largest finite element.
    pub(crate) element_max: f32,
    /// Exponent of the largest finite element.
    pub(crate) exponent_max: u32,
    /// Bits of the largest amax with an RCEIL scale: in a block above it an element may round to
    /// 2^128.
    pub(crate) amax_bits_max: u32,
}

impl ScaleConstants {
    pub(crate) const fn new(element: ElementFormat) -> Self {
        use crate::{e2m1, e2m3, e3m2, e4m3, e5m2};
        let (element_max, exponent_max, mantissa_bits) = match element {
            ElementFormat::E4M3 => (e4m3::MAX, 8, e4m3::MANTISSA_BITS),
            ElementFormat::E5M2 => (e5m2::MAX, 15, e5m2::MANTISSA_BITS),
            ElementFormat::E3M2 => (e3m2::MAX, 4, e3m2::MANTISSA_BITS),
            ElementFormat::E2M3 => (e2m3::MAX, 2, e2m3::MANTISSA_BITS),
            ElementFormat::E2M1 => (e2m1::MAX, 2, e2m1::MANTISSA_BITS),
        };
        // Infinity minus one unit in the last place of an element.
        let amax_bits_max = INFINITY_BITS - (1 << (23 - mantissa_bits));
        Self { element_max, exponent_max, amax_bits_max }
    }
}

/// A scale code, widened so that vector code needs no packing, and whether the rule gave a scale
/// below 2^-127.
pub(crate) struct FiniteScale {
    pub(crate) code: u32,
    pub(crate) clamped: bool,
}

/// The scale rules on the bits of a finite, non-negative amax, without branches, so that loops
/// vectorize.
#[inline(always)]
pub(crate) fn finite_scale(
    amax_bits: u32,
    constants: ScaleConstants,
    rule: ScaleRule,
) -> FiniteScale {
    match rule {
        ScaleRule::Rceil | ScaleRule::MinError => {
            let s = (f32::from_bits(amax_bits) / constants.element_max).to_bits();
            // Adding all ones below the exponent carries if and only if the fraction is not zero.
            // Subnormals up to 2^-127 (0x0040_0000) keep code 0; above, the code is 1.
            let normal = (s + 0x007F_FFFF) >> 23;
            let subnormal = u32::from(s > 0x0040_0000);
            let code = if s < 0x0080_0000 { subnormal } else { normal };
            // The floor of the last binade, 2^127, in which an element would round to 2^128.
            let largest = 254 - constants.exponent_max;
            let code = if amax_bits > constants.amax_bits_max { largest } else { code };
            FiniteScale { code, clamped: (s <= 0x0020_0000) & (amax_bits != 0) }
        }
        ScaleRule::OcpFloor => {
            let exponent = amax_bits >> 23;
            let below = exponent < constants.exponent_max;
            let code = if below { 0 } else { exponent - constants.exponent_max };
            FiniteScale { code, clamped: below & (amax_bits != 0) }
        }
    }
}
