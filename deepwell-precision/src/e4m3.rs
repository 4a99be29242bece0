//! E4M3: one sign bit, four exponent bits, three fraction bits; no infinity.
//!
//! ```text
//! bit     7  6 5 4 3  2 1 0
//!         s  e e e e  m m m     e = 0:  (-1)^s * m * 2^-9
//!                               else:   (-1)^s * (1 + m/8) * 2^(e - 7)
//!                               s1111111: NaN; the other codes with e = 15 are finite
//! ```
//!
//! Source: OCP 8-bit floating point specification (OFP8), as `.e4m3` of the PTX ISA.

use crate::minifloat::{self, Layout};
use crate::{Overflow, Rounding};

/// Stored fraction bits.
pub const MANTISSA_BITS: u32 = 3;
/// Exponent bias.
pub const BIAS: i32 = 7;
/// Code of [`MAX`].
pub const CODE_MAX: u8 = 0x7E;
/// Code of the NaN that [`encode`] gives.
pub const CODE_NAN: u8 = minifloat::CODE_NAN;
/// Largest finite value.
pub const MAX: f32 = 448.0;
/// Smallest positive normal value, 2^(1 - bias).
pub const MIN_NORMAL: f32 = 1.0 / 64.0;
/// Smallest positive value; half of it or less rounds to zero.
pub const MIN_SUBNORMAL: f32 = 1.0 / 512.0;

pub(crate) const LAYOUT: Layout = Layout {
    mantissa_bits: MANTISSA_BITS,
    bias: BIAS,
    sign_bit: 7,
    code_max: CODE_MAX,
    code_nan: CODE_NAN,
    code_overflow: 0x7F,
    has_nan: true,
    has_infinity: false,
};

const _: () = assert!(decode(CODE_MAX) == MAX);
const _: () = assert!(decode(1 << MANTISSA_BITS) == MIN_NORMAL);
const _: () = assert!(decode(1) == MIN_SUBNORMAL);

/// Code of `x`, rounded once. Subnormals and the sign of zero are kept. NaN of either sign becomes
/// [`CODE_NAN`]; infinities follow `overflow` under every rounding.
///
/// ```
/// use deepwell_precision::{Overflow, Rounding, e4m3};
/// let nearest = |x| e4m3::encode(x, Rounding::NearestEven, Overflow::Saturate);
/// assert_eq!(e4m3::decode(nearest(0.3)), 0.3125);
/// assert_eq!(e4m3::decode(nearest(1e9)), 448.0);
/// assert!(e4m3::decode(e4m3::encode(1e9, Rounding::NearestEven, Overflow::NonFinite)).is_nan());
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
