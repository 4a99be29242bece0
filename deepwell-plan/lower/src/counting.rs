//! Pieces of a lowering, for counting the memory of a program without lowering all of its layers.

pub use crate::arena::alive_bytes;
pub use crate::lower::{
    Counted, Differentiated, Transient, block_slice, fallback_plan, further_copy_bytes,
    shared_operand_lifetimes,
};
pub use crate::request::base_plan;
pub use crate::stages::orders_of;
