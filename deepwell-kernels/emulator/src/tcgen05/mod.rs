//! Fifth-generation tensor cores: the `tcgen05` instructions.
//!
//! # Brief overview
//!
//! This module is independent of the engine. An instruction with its operand values is a request
//! ([`MmaRequest`], [`CopyRequest`], [`RegisterAccess`]). Its `check` decides legality,
//! independently of memory contents, and returns a plan. The plan's `run` (`load`, `store`)
//! executes the instruction, immediately or later, through [`Memory`](crate::place::Memory).
//! [`Allocator`] manages the columns of one CTA.
//!
//! Every rule has a name, which [`Fault::rule`](crate::error::Fault) holds when the rule is broken.
//!
//! ```
//! use deepwell_emulator::decode::MmaKind;
//! use deepwell_emulator::tcgen05::{MatrixA, MmaRequest, SharedDescriptor, Swizzle};
//!
//! let operand = SharedDescriptor {
//!     start: 0x400,
//!     leading: 16,
//!     stride: 1024,
//!     base_offset: 0,
//!     swizzle: Swizzle::Bytes128,
//! };
//! let mut request = MmaRequest {
//!     kind: MmaKind::F16,
//!     group: 1,
//!     rank: 0,
//!     weight_stationary: false,
//!     d: 0,
//!     a: MatrixA::Shared(operand.encode()),
//!     b: operand.encode(),
//!     // F32 sums of BF16 elements, N = 64, M = 128.
//!     instruction: 1 << 4 | 1 << 7 | 1 << 10 | 64 >> 3 << 17 | 128 >> 4 << 24,
//!     scales: None,
//!     accumulate: false,
//!     scale_input_d: 0,
//!     disabled_lanes: [0; 8],
//!     shift_a: false,
//! };
//! assert_eq!(request.check()?.multiply_adds(), 128 * 64 * 16);
//! request.instruction ^= (128 >> 4 ^ 256 >> 4) << 24;
//! assert_eq!(request.check().unwrap_err().rule, "mma-shape-m");
//! # Ok::<(), deepwell_emulator::error::Fault>(())
//! ```

mod address;
mod allocation;
mod copy;
mod datapath;
mod elements;
mod instruction_descriptor;
mod legality;
mod load_store;
mod mma;
mod mma_request;
mod scale_factors;
mod shared_descriptor;
mod tile;

#[cfg(test)]
mod tests;

pub use address::TensorAddress;
pub use allocation::{Allocator, COLUMNS_MIN};
pub use copy::{CopyPlan, CopyRequest, copy};
pub use datapath::{DataPath, Part};
pub use elements::{CodeBuffer, Container};
pub use instruction_descriptor::{
    InstructionDescriptor, ScaleFields, has_scales, k_of, mma_kind, packs_4_bits,
};
pub use legality::{
    check_scale_id, check_shape, check_swizzle, check_transposed_n, scales_along_k,
};
pub use load_store::{LaneBits, RegisterAccess, RegisterPlan, WarpRegisters, load, store};
pub use mma::{A_COLUMNS, MmaPlan, mma};
pub use mma_request::{MatrixA, MmaRequest, ScaleOperands};
pub use scale_factors::ScaleTile;
pub use shared_descriptor::{SharedDescriptor, Swizzle};
pub use tile::{CHUNK_BYTES, K_CHUNKS, Major, SharedTile};
