//! Small number formats.
//!
//! # Brief overview
//!
//! A [`Format`] gives the meaning of a bit pattern. [`decode`] returns the value, which is exact in
//! `f32` for every format. [`encode`] rounds an `f32` to the format like the `cvt` instruction,
//! with its rounding modes (random bits for stochastic rounding are an argument), saturation to the
//! largest finite value, and clamping of negative values to zero. [`encode_f64`] does the same for
//! an `f64`, with one rounding.
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
