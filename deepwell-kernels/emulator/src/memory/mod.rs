//! Memory spaces and addresses.
//!
//! Device memory is one list of allocations that all CTAs share ([`GlobalMemory`]); constant
//! variables and the parameters of a launch live there too, under addresses of their own. A CTA
//! owns its shared memory ([`SharedMemory`]), its tensor memory ([`TensorMemory`]) and the local
//! memory of its threads. [`Window`] tells which of them a generic address means.

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

/// What memory holds that nobody has written: NaN in every float format that has one, and an
/// address outside of everything.
pub const POISON: u8 = 0xFF;
