//! E2M3: one sign bit, two exponent bits, three fraction bits; neither infinity nor NaN. FP6.
//!
//! ```text
//! bit     5  4 3  2 1 0       e = 0:  (-1)^s * m * 2^-3
//!         s  e e  m m m       else:   (-1)^s * (1 + m/8) * 2^(e - 1)
//! ```
//!
//! A code occupies the low six bits of a byte; [`decode`] ignores the bits above. Many codes at
//! once are stored closer, see [`crate::packed`]. Source: OCP Microscaling formats (MX) v1.0, as
//! `.e2m3` of the PTX ISA.

use crate::minifloat::{self, Layout};
use crate::{Overflow, Rounding};

/// Stored fraction bits.
pub const MANTISSA_BITS: u32 = 3;
/// Exponent bias.
pub const BIAS: i32 = 1;
/// Place of the sign bit.
pub const SIGN_BIT: u32 = 5;
/// Code of [`MAX`].
pub const CODE_MAX: u8 = 0x1F;
/// Largest finite value, the largest of all.
pub const MAX: f32 = 7.5;
/// Smallest positive normal value, 2^(1 - bias).
pub const MIN_NORMAL: f32 = 1.0;
/// Smallest positive value; what is at most half of it rounds to zero.
pub const MIN_SUBNORMAL: f32 = 0.125;

pub(crate) const LAYOUT: Layout = Layout {
    mantissa_bits: MANTISSA_BITS,
    bias: BIAS,
    sign_bit: SIGN_BIT,
    code_max: CODE_MAX,
    code_nan: CODE_MAX,
    code_overflow: CODE_MAX,
    has_nan: false,
    has_infinity: false,
};

const _: () = assert!(decode(CODE_MAX) == MAX);
const _: () = assert!(decode(1 << MANTISSA_BITS) == MIN_NORMAL);
const _: () = assert!(decode(1) == MIN_SUBNORMAL);

/// Code of `x`, rounded once. Subnormals are kept and the sign of zero too. The format has nothing
/// beyond [`MAX`], so both kinds of `overflow` saturate, infinities included; NaN of either sign
/// becomes [`CODE_MAX`], as `cvt.satfinite` of the PTX ISA has it.
///
/// ```
/// use deepwell_precision::{Overflow, Rounding, e2m3};
/// let nearest = |x| e2m3::encode(x, Rounding::NearestEven, Overflow::Saturate);
/// assert_eq!(e2m3::decode(nearest(2.4)), 2.5);
/// assert_eq!(e2m3::decode(nearest(-1e9)), -e2m3::MAX);
/// ```
#[must_use]
pub fn encode(x: f32, rounding: Rounding, overflow: Overflow) -> u8 {
    minifloat::encode(x, &LAYOUT, rounding, overflow)
}

/// Value of `code`, exact.
#[must_use]
pub const fn decode(code: u8) -> f32 {
    minifloat::decode(code, &LAYOUT)
}
