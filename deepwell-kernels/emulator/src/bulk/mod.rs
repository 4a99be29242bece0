//! Bulk copies and tensor maps.
//!
//! # Brief overview
//!
//! The bulk copy engine (TMA) of Hopper and Blackwell, on any [`crate::place::Memory`]. Functions
//! copy plain bytes ([`copy_to_shared`], [`copy_to_global`], [`copy_between_shared`],
//! [`reduce_to_global`], [`reduce_to_shared`]). A [`TensorMap`] copies boxes of a tensor. Its 128
//! bytes ([`TensorMap::encode`], [`TensorMap::decode`]) use an encoding private to this crate;
//! [`replace_field`] is `tensormap.replace` on these bytes. [`TensorMap::load`],
//! [`TensorMap::store`] and [`TensorMap::reduce`] move one box, [`TensorMap::gather4`] and
//! [`TensorMap::scatter4`] four rows.
//!
//! All rules of the driver's `cuTensorMapEncodeTiled` and of the PTX ISA are checked, and an error
//! names the broken rule. Functions return the bytes that an mbarrier counts for each destination.
//!
//! # Example
//!
//! ```
//! use deepwell_emulator::bulk::{ElementType, Swizzle, TensorMap, TensorMapSpec};
//!
//! let spec = TensorMapSpec {
//!     swizzle: Swizzle::Bytes128,
//!     ..TensorMapSpec::new(ElementType::Bf16, 0x10_0000, &[256, 64], &[512], &[64, 8])
//! };
//! let map = TensorMap::decode(&TensorMap::encode(&spec)?)?;
//! assert_eq!(map.shared_bytes(), 64 * 2 * 8);
//! # Ok::<(), deepwell_emulator::error::Fault>(())
//! ```

mod element;
mod linear;
mod reduction;
mod replace;
mod rules;
mod swizzle;
mod tensor_map;
mod tile;

pub use element::ElementType;
pub use linear::{
    copy_between_shared, copy_to_global, copy_to_shared, reduce_to_global, reduce_to_shared,
};
pub use reduction::{ReduceElement, ReduceOperation};
pub use replace::{MapField, replace_field};
pub use swizzle::{Swizzle, SwizzleAtom, swizzle_address};
pub use tensor_map::{Fill, Interleave, TENSOR_MAP_BYTES, TensorMap, TensorMapSpec};

#[cfg(test)]
mod tests;
