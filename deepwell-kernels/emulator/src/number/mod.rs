//! Small floating-point formats.
//!
//! # Brief overview
//!
//! A [`Format`] names the meaning of some bits. [`decode`] gives their value, which every format
//! here has exactly in `f32`; [`encode`] rounds an `f32` to the format as the `cvt` instruction
//! does: with its rounding modes (the stochastic one with bits from outside), saturation to the
//! largest finite value, and the clamp of negative values to zero. [`encode_f64`] is the same
//! from `f64`, with one rounding.
//!
//! ```
//! use deepwell_emulator::number::{Format, Rounding, decode, encode};
//!
//! let e4m3 = |value| encode(Format::E4M3, value, Rounding::NearestEven, true, false);
//! assert_eq!(e4m3(1.0625), 0x38, "half way, to the even code");
//! assert_eq!(e4m3(1e9), 0x7e);
//! assert_eq!(decode(Format::E4M3, 0x7e), 448.0);
//! ```

mod decode;
mod encode;
mod format;
#[cfg(test)]
mod tests;

pub use decode::{decode, decode_table};
pub(crate) use encode::encode_parts;
pub use encode::{Rounding, encode, encode_f64};
pub use format::{Format, Specials};
