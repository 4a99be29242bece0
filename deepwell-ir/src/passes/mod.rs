//! Passes over a differentiated graph, in this order: recompute, precision, fuse.

mod fuse;
mod precision;
mod recompute;

pub use fuse::fuse;
pub use precision::{TensorPrecision, apply_precision};
pub use recompute::{Recompute, recompute};
