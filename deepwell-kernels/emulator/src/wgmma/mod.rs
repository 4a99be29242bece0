//! Matrix instructions of a warp group.
//!
//! # Brief overview
//!
//! [`WgmmaForm`] is a variant of `wgmma.mma_async`. [`WgmmaForm::check`] holds the table of shapes
//! and types; [`WgmmaForm::run`] computes D for the warps of the group whose fragments are given,
//! one or all four. A [`Descriptor`] locates a matrix in shared memory; a [`Tile`] lists the bytes
//! that an instruction reads.
//!
//! # Example
//!
//! ```
//! use deepwell_emulator::wgmma::{Descriptor, Swizzle};
//!
//! let descriptor = Descriptor {
//!     start: 0x2400,
//!     leading_bytes: 16,
//!     stride_bytes: 1024,
//!     base_offset: 0,
//!     swizzle: Swizzle::Bytes128,
//! };
//! assert_eq!(Descriptor::decode(descriptor.encode())?, descriptor);
//! # Ok::<(), deepwell_emulator::error::Fault>(())
//! ```

mod descriptor;
mod form;

pub use descriptor::{Descriptor, Swizzle, Tile};
pub use form::{MatrixA, WarpFragments, WgmmaForm};

#[cfg(test)]
mod tests;
