//! Matrix instructions of a warp group.
//!
//! # Brief overview
//!
//! `wgmma.mma_async` is a [`WgmmaForm`]; [`WgmmaForm::check`] is the table of shapes and types,
//! [`WgmmaForm::run`] computes D for those warps of the group whose fragments are given, one or all
//! four. Matrices in shared memory are found by a [`Descriptor`]; [`Tile`] says which bytes an
//! instruction reads.
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
