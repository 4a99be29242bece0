//! E5M2: one sign bit, five exponent bits, two fraction bits; infinities as in IEEE 754.
//!
//! ```text
//! bit     7  6 5 4 3 2  1 0
//!         s  e e e e e  m m     e = 0:  (-1)^s * m * 2^-16
//!                               e < 31: (-1)^s * (1 + m/4) * 2^(e - 15)
//!                               e = 31: infinity when m = 0, else NaN
//! ```
//!
//! Source: OCP 8-bit floating point specification (OFP8), as `.e5m2` of the PTX ISA.

use crate::minifloat::{self, Layout};
use crate::{Overflow, Rounding};

/// Stored fraction bits.
pub const MANTISSA_BITS: u32 = 2;
/// Exponent bias.
pub const BIAS: i32 = 15;
/// Code of [`MAX`].
pub const CODE_MAX: u8 = 0x7B;
/// Code of the NaN that [`encode`] gives.
pub const CODE_NAN: u8 = minifloat::CODE_NAN;
/// Largest finite value.
pub const MAX: f32 = 57344.0;
/// Smallest positive normal value, 2^(1 - bias).
pub const MIN_NORMAL: f32 = 1.0 / 16384.0;
/// Smallest positive value; half of it or less rounds to zero.
pub const MIN_SUBNORMAL: f32 = 1.0 / 65536.0;

pub(crate) const LAYOUT: Layout = Layout {
    mantissa_bits: MANTISSA_BITS,
    bias: BIAS,
    sign_bit: 7,
    code_max: CODE_MAX,
    code_nan: CODE_NAN,
    code_overflow: 0x7C,
    has_nan: true,
    has_infinity: true,
};

const _: () = assert!(decode(CODE_MAX) == MAX);
const _: () = assert!(decode(1 << MANTISSA_BITS) == MIN_NORMAL);
const _: () = assert!(decode(1) == MIN_SUBNORMAL);

/// Code of `x`, rounded once. Subnormals and the sign of zero are kept. NaN of either sign becomes
/// [`CODE_NAN`]; infinities follow `overflow` under every rounding.
///
/// ```
/// use deepwell_precision::{Overflow, Rounding, e5m2};
/// let nearest = |x| e5m2::encode(x, Rounding::NearestEven, Overflow::NonFinite);
/// assert_eq!(e5m2::decode(nearest(0.3)), 0.3125);
/// assert_eq!(e5m2::decode(nearest(-1e9)), f32::NEG_INFINITY);
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
