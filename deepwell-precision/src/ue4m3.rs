//! UE4M3: E4M3 without a sign, the format of the block scales of NVFP4.
//!
//! ```text
//! bit     7  6 5 4 3  2 1 0
//!         0  e e e e  m m m     as in E4M3; 0x7F: NaN; no infinity
//! ```
//!
//! The byte is the [`crate::e4m3`] code of the same value, with a clear sign bit. Source: `.ue4m3`
//! of the PTX ISA.

use crate::{Overflow, Rounding, e4m3};

/// Code of [`MAX`].
pub const CODE_MAX: u8 = e4m3::CODE_MAX;
/// Code of NaN.
pub const CODE_NAN: u8 = e4m3::CODE_NAN;
/// Code of 1.0.
pub const CODE_ONE: u8 = 0x38;
/// Largest finite value.
pub const MAX: f32 = e4m3::MAX;
/// Smallest positive normal value.
pub const MIN_NORMAL: f32 = e4m3::MIN_NORMAL;
/// Smallest positive value; half of it or less rounds to zero.
pub const MIN_SUBNORMAL: f32 = e4m3::MIN_SUBNORMAL;

const _: () = assert!(decode(CODE_ONE) == 1.0);

/// Code of `x`, rounded once. NaN and negative values become [`CODE_NAN`]; both zeros become 0.
/// Values beyond [`MAX`] follow `overflow`.
///
/// ```
/// use deepwell_precision::{Overflow, Rounding, ue4m3};
/// let nearest = |x| ue4m3::encode(x, Rounding::NearestEven, Overflow::Saturate);
/// assert_eq!(nearest(1.0), ue4m3::CODE_ONE);
/// assert_eq!(nearest(-1.0), ue4m3::CODE_NAN);
/// assert_eq!(ue4m3::decode(nearest(1e9)), 448.0);
/// ```
#[must_use]
pub fn encode(x: f32, rounding: Rounding, overflow: Overflow) -> u8 {
    if x < 0.0 { CODE_NAN } else { e4m3::encode(x, rounding, overflow) & 0x7F }
}

/// Value of `code`, exact. Bytes above 0x7F are not codes of this format and give NaN.
#[must_use]
pub const fn decode(code: u8) -> f32 {
    if code > CODE_NAN { f32::NAN } else { e4m3::decode(code) }
}
