//! Memory spaces and addresses.
//!
//! Device memory is one list of allocations that all CTAs share ([`GlobalMemory`]). Constant
//! variables and launch parameters are also allocations there. A CTA owns its shared memory
//! ([`SharedMemory`]), its tensor memory ([`TensorMemory`]) and the local memory of its threads.
//! [`Window`] maps a generic address to its memory space.

mod address;
mod atomic;
mod global;
mod shared;
mod tensor;

pub use address::{
    LOCAL_WINDOW, RANK_SHIFT, SHARED_BASE, SHARED_BYTES_LIMIT, SHARED_WINDOW, Window,
    shared_address, split_shared,
};
pub use atomic::apply_atomic;
pub use global::GlobalMemory;
pub use shared::SharedMemory;
pub use tensor::TensorMemory;

/// Value of memory that was never written: NaN in every float format with NaN, and an address
/// outside of every allocation.
pub const POISON: u8 = 0xFF;
