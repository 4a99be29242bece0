//! Passes over a differentiated graph, in this order: recompute, precision, fuse.

mod assign;
mod fuse;
mod precision;
mod recompute;
mod tensor_precision;

pub use assign::expert_row_alignment;
pub use fuse::{Predict, fuse};
pub use precision::{apply_precision, apply_served_precision};
pub use recompute::{Recompute, recompute};
pub use tensor_precision::TensorPrecision;
